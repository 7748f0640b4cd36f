"""Random calls of all ops against the fp64 reference, within the budgets of `partita.testing`.

A default run draws a few hundred calls on the CPU. On a GPU, `PARTITA_DRAWS=10000` sets the number
of draws, which the ops share:

    PARTITA_DRAWS=10000 python -m pytest tests/test_draws.py -k cuda
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.rows import (
    DTYPES,
    INTERPRETING,
    OPS,
    check_loss,
    check_op,
    class_weights,
    devices,
    strided,
    targets_for,
)
from helpers.stats import check_stats
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import partita
from partita.ops.linear_heads.plan import ROW_WORDS
from partita.runtime.dtypes import acc_dtype
from partita.testing import poisoned_memory

DRAWS = int(os.environ.get("PARTITA_DRAWS", "210"))
MARGINAL, LOGZ, LOGZ_STEP = 2e-6, 1e-6, 1e-9  # of the contract: absolute, relative, for each step
Draw = Callable[[st.SearchStrategy], Any]


def strided_numbers(
    draw: Draw, shape: list[int], device: str, *, dtypes: list[torch.dtype], masked: bool = True
) -> Tensor:
    """Draw numbers of any strides, dtype and offset, some of them -inf."""
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.lists(st.sampled_from((1, 1, 2, 0)), min_size=len(shape), max_size=len(shape)))
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**16))
    x = strided(shape, order, steps, dtype=dtype, device=device, seed=seed)
    offset = draw(st.sampled_from((0.0, 0.0, 0.0, -100.0, 1e4)))
    share = draw(st.sampled_from((0.0, 0.0, 0.2, 0.8))) if masked else 0.0
    if offset or share:
        # A view keeps the strides; where elements repeat, so do the numbers that replace them.
        generator = torch.Generator().manual_seed(seed)
        memory = x.new_empty(0).set_(
            x.untyped_storage(), 0, (x.untyped_storage().size() // x.itemsize,)
        )
        memory += offset
        holes = torch.rand(memory.shape, generator=generator) < share
        memory[holes.to(device)] = -torch.inf
    return x


def results(call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of a call and the gradient of their weighted sum, on poisoned memory."""
    leaf = x.detach().requires_grad_()
    with poisoned_memory():
        value = call(leaf)
        finite = torch.where(value.isfinite(), value, 0.0)
        weights = torch.linspace(0.5, 1.0, value.numel(), device=x.device).to(value.dtype)
        (grad,) = torch.autograd.grad((finite.flatten() * weights).sum(), leaf)
    return value.detach(), grad


def check_paths(
    call: Callable[[Tensor], Tensor],
    x: Tensor,
    T: int,
    scale: float = 1.0,
    *,
    gradient_is_marginal: bool = True,
) -> None:
    """Assert that log Z and its gradient are within the bounds of the contract for paths.

    The contract bounds the gradient of log Z, whose elements are marginals, and no other one.

    Results of half types are rounded to their dtype in the gradient. `scale` is the magnitude of
    the numbers whose difference the result is.
    """
    value, grad = results(call, x)
    with partita.backend("reference"):
        truth, true_grad = results(call, x.double())
    assert value.dtype == acc_dtype(x.dtype) and grad.dtype == x.dtype
    same = (value.double() == truth) | (value.isnan() & truth.isnan())
    bound = LOGZ * truth.abs().nan_to_num(posinf=0.0, neginf=0.0).clamp(min=scale) + LOGZ_STEP * T
    error = torch.where(same, 0.0, (value.double() - truth).abs())
    assert (error <= bound).all(), f"{value} for {truth}"
    if not gradient_is_marginal:
        return
    rounding = torch.finfo(x.dtype).eps * true_grad.abs()
    differs = (grad.double() - true_grad).abs() > MARGINAL + rounding
    differs |= grad.isnan() != true_grad.isnan()
    assert not differs.any(), f"gradient off by {(grad.double() - true_grad).abs().max()}"


def draw_rows(draw: Draw, device: str) -> tuple[Tensor, Tensor | None]:
    """Draw logits `[..., C]` and labels, or None."""
    shape = [*draw(st.lists(st.integers(0, 6), max_size=3)), draw(st.integers(1, 90))]
    logits = strided_numbers(draw, shape, device, dtypes=DTYPES)
    ignored = draw(st.sampled_from((-100, 0)))
    target = targets_for(logits.movedim(-1, min(1, logits.ndim - 1)), "labels", ignored=ignored)
    return logits, target


def softmax(draw: Draw, device: str) -> None:
    shape = draw(st.lists(st.integers(0, 7) | st.integers(8, 70), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    op = OPS[draw(st.sampled_from(sorted(OPS)))]
    # The maximum over an empty dimension is not defined.
    shape[dim] = max(shape[dim], 1)
    x = strided_numbers(draw, shape, device, dtypes=DTYPES, masked=op.name == "logsumexp")
    check_op(op, x, dim, few=True)


def cross_entropy(draw: Draw, device: str) -> None:
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    C = draw(st.integers(1, 90))
    shape.insert(1, C)
    x = strided_numbers(draw, shape, device, dtypes=DTYPES, masked=False)
    kind = draw(st.sampled_from(("labels", "labels", "probabilities")))
    weight = class_weights(C, x.dtype, device) if draw(st.booleans()) else None
    check_loss(
        x,
        targets_for(x, kind, ignored=-100),
        weight,
        few=True,
        reduction=draw(st.sampled_from(("none", "mean", "sum"))),
        label_smoothing=draw(st.sampled_from((0.0, 0.1))),
        softcap=draw(st.sampled_from((None, 5.0))),
        z_loss=draw(st.sampled_from((0.0, 1e-3))),
    )


def token_stats(draw: Draw, device: str) -> None:
    logits, target = draw_rows(draw, device)
    check_stats(
        logits,
        draw(st.sampled_from((target, None))),
        few=True,
        temperature=draw(st.sampled_from((1.0, 0.5, 3.0))),
        softcap=draw(st.sampled_from((None, None, 4.0))),
    )


def ragged_ctc(draw: Draw, device: str) -> None:
    T, N, C = draw(st.integers(1, 24)), draw(st.integers(1, 5)), draw(st.integers(2, 9))
    x = strided_numbers(
        draw, [T, N, C], device, dtypes=[torch.float32, torch.float32, torch.bfloat16]
    )
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    S, blank = draw(st.integers(0, 8)), draw(st.integers(0, C - 1))
    targets = torch.randint(C, (N, S), generator=g)
    input_lengths = torch.randint(0, T + 1, (N,), generator=g)
    target_lengths = torch.randint(0, S + 1, (N,), generator=g)
    if draw(st.booleans()):
        targets = torch.cat([t[:n] for t, n in zip(targets, target_lengths, strict=True)])
    lengths = input_lengths.to(device), target_lengths.to(device)
    targets = targets.to(device)
    # A row of -inf has no log-softmax; its gradient in the logits is not defined.
    from_logits = draw(st.booleans()) and not bool((x == -torch.inf).all(-1).any())
    call = lambda x: partita.ctc_loss(  # noqa: E731
        x, targets, *lengths, blank, "none", from_logits=from_logits
    )
    largest = float(x.double().nan_to_num(neginf=0.0).abs().max())
    check_paths(call, x, T, max(1.0, largest * T))


def ctc_crf(draw: Draw, device: str) -> None:
    T, N, A, k = (draw(st.integers(*ends)) for ends in ((1, 20), (1, 4), (2, 5), (1, 2)))
    x = strided_numbers(
        draw, [T, N, (A - 1) ** k * A], device, dtypes=[torch.float32], masked=False
    )
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    S = draw(st.integers(0, 8))
    targets = torch.randint(1, A, (N, S), generator=g).to(device)
    lengths = torch.randint(0, S + 1, (N,), generator=g).to(device)
    inputs = torch.randint(0, T + 1, (N,), generator=g).to(device)
    options = {"state_len": k, "alphabet_size": A, "input_lengths": inputs, "reduction": "none"}
    largest = float(x.abs().max())
    call = lambda x: partita.ctc_crf_loss(x, targets, lengths, **options)  # noqa: E731
    check_paths(call, x, T, max(1.0, largest * T))


def chain(draw: Draw, device: str) -> None:
    T, N, C, K = (draw(st.integers(*ends)) for ends in ((0, 16), (1, 4), (1, 9), (1, 5)))
    x = strided_numbers(draw, [T, N, C, K], device, dtypes=[torch.float32, torch.float16])
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    source = torch.randint(-1, C, (C, K), generator=g).to(device)
    lengths = torch.randint(0, T + 1, (N,), generator=g).to(device)
    ends = [torch.randn(N, C, generator=g).to(device) for _ in range(2)]
    lengths = draw(st.sampled_from((lengths, None)))
    largest = float(x.double().nan_to_num(neginf=0.0).abs().max()) if x.numel() else 0.0
    name = draw(st.sampled_from(("logz", "entropy")))

    def call(x: Tensor) -> Tensor:
        dtype = acc_dtype(x.dtype)
        drawn = partita.Chain(x, source, *(end.to(dtype) for end in ends), lengths=lengths)
        return getattr(drawn, name)()

    check_paths(call, x, T, max(1.0, largest * T), gradient_is_marginal=name == "logz")


def linear_heads(draw: Draw, device: str) -> None:
    M, H, C = draw(st.integers(1, 20)), draw(st.integers(1, 12)), draw(st.integers(1, 300))
    numbers = {"dtypes": [torch.float32], "masked": False}
    hidden = strided_numbers(draw, [M, H], device, **numbers)
    hidden = hidden.clamp(-9, 9)
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    matrix = torch.randn(C, H, generator=g).to(device)
    target = torch.randint(C, (M,), generator=g)
    target[torch.rand(M, generator=g) < 0.3] = -100
    target = target.to(device)
    lean = 4 * M * (128 + ROW_WORDS)
    softcap = draw(st.sampled_from((None, 5.0)))
    is_loss, small = draw(st.booleans()), draw(st.booleans())

    def call(hidden: Tensor, budget: int | None = None if small else lean) -> Tensor:
        options = {"softcap": softcap, "memory_budget": budget}
        weight = matrix.to(hidden.dtype)
        if is_loss:
            return partita.linear_cross_entropy(hidden, weight, target, reduction="none", **options)
        stats = partita.linear_token_stats(hidden, weight, target, temperature=3.0, **options)
        return torch.stack(stats[:3])

    value, grad = results(call, hidden)
    with partita.backend("reference"):
        truth, true_grad = results(lambda x: call(x, None), hidden.double())
    # Products of H terms of at most 9 times 5 are rounded to fp32.
    bound = 9 * 5 * (H + 2) * torch.finfo(torch.float32).eps
    torch.testing.assert_close(value.double(), truth, rtol=1e-6, atol=4 * bound)
    torch.testing.assert_close(grad.double(), true_grad, rtol=1e-5, atol=16 * bound)


FAMILIES = [softmax, cross_entropy, token_stats, ragged_ctc, ctc_crf, chain, linear_heads]


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_draws(family: Callable[[Draw, str], None], device: str) -> None:
    @settings(
        max_examples=max(1, (30 if INTERPRETING else DRAWS) // len(FAMILIES)),
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),  # shrinking takes minutes, and a drawn call is small
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        family(data.draw, device)

    run()
