"""Helpers for tests of ops on rows: comparisons with fp64, and inputs."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import partita
from partita.runtime.dtypes import acc_dtype
from partita.testing import contract_errors, sample_rows
from partita.testing.compare import upstream_like
from partita.testing.samples import in_torch

from .terms import (
    Terms,
    cross_entropy_terms,
    logsumexp_terms,
    softmax_terms,
    token_stats_terms,
)

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

devices = pytest.mark.parametrize("device", DEVICES)
KERNEL_DEVICES = [
    pytest.param(
        "cpu",
        marks=[
            pytest.mark.interpreted,
            pytest.mark.skipif(not INTERPRETING, reason="needs TRITON_INTERPRET=1"),
        ],
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ],
    ),
]
kernel_devices = pytest.mark.parametrize("device", KERNEL_DEVICES)
# A GPU compiles a kernel for each dtype: it runs the usual ones. The catalogue has the others.
devices_and_dtypes = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(("cpu", dtype) for dtype in DTYPES),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    ],
    ids=str,
)
# The dtypes of training; on a GPU, where each option is a kernel to compile, the usual one.
training = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.bfloat16, id="bfloat16-cpu"),
        pytest.param("cpu", torch.float32, id="float32-cpu"),
        pytest.param("cuda", torch.bfloat16, id="bfloat16-cuda", marks=pytest.mark.gpu),
    ],
)
dtypes = pytest.mark.parametrize(
    "dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch.")
)


class Op(NamedTuple):
    """An op on rows.

    Fields:
        name: its name in Partita.
        ours: Partita's function.
        theirs: PyTorch's function.
        reference: the function that is computed in fp64 for the truth.
    """

    name: str
    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    reference: Callable[[Tensor, int], Tensor]


OPS = {
    "softmax": Op("softmax", partita.softmax, torch.softmax, torch.softmax),
    "log_softmax": Op("log_softmax", partita.log_softmax, torch.log_softmax, torch.log_softmax),
    "logsumexp": Op("logsumexp", partita.logsumexp, torch.logsumexp, in_torch.logsumexp),
}
ops = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def check(function: Callable, reference: Callable, *inputs: Tensor, **options: Any) -> None:
    """Assert that a function and its gradients are within the error budget."""
    errors = contract_errors(function, reference, *inputs, **options)
    # Triton's interpreter truncates to bf16 and does not round, and its fused multiply-add rounds
    # two times.
    allowed = 2 if INTERPRETING else 1
    assert all(
        error.ulp <= allowed * error.budget for error in (*errors.forward, *errors.backward)
    ), f"\n{errors}"


def worst_case(terms: Terms, classes: int) -> Terms:
    """Return terms so large that 2 ulp of them bound the error of `classes` successive roundings.

    They serve tensors with too few elements to show the usual error of the baseline.
    """
    factor = classes / 4 + 2
    forward = (
        terms.forward * factor
        if isinstance(terms.forward, Tensor)
        else [t * factor for t in terms.forward]
    )
    return Terms(forward, terms.backward * factor)


def check_op(op: Op, x: Tensor, dim: int, *, few: bool = False) -> None:
    """Assert that an op is within the budget against fp64.

    The tensor has enough elements to compare with PyTorch's own errors, or `few`.
    """
    result = op.theirs(x, dim)
    upstream = upstream_like([result])
    rows = x if x.ndim else x.reshape(1)
    terms = (
        logsumexp_terms(rows, dim, *upstream)
        if op.name == "logsumexp"
        else softmax_terms(op.name, rows, dim, *upstream)
    )
    terms = worst_case(terms, rows.shape[dim]) if few else terms
    forward, backward = (t.reshape(like.shape) for t, like in zip(terms, (result, x), strict=True))
    # The interpreter rounds inside a fused multiply-add, and that decides the last ulp.
    scale = "element" if op.name == "softmax" and not few and not INTERPRETING else forward
    check(
        lambda x: op.ours(x, dim),
        lambda x: op.reference(x, dim),
        x,
        upstream=upstream,
        scale=scale,
        grad_scale=backward,
    )


def check_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    inplace: bool = False,
    few: bool = False,
    upstream: Tensor | None = None,
    **options: Any,
) -> None:
    """Assert that `partita.cross_entropy` is within the budget against fp64."""
    if upstream is None:
        (upstream,) = upstream_like([in_torch.cross_entropy(logits, target, weight, **options)])
    terms = cross_entropy_terms(logits, target, weight, upstream, **options)
    terms = worst_case(terms, logits.shape[min(logits.ndim - 1, 1)]) if few else terms
    check(
        lambda x: partita.cross_entropy(
            x.clone() if inplace else x, target, weight, inplace=inplace, **options
        ),
        lambda x: in_torch.cross_entropy(x, target, weight, **options),
        logits,
        upstream=[upstream],
        scale=terms.forward,
        grad_scale=terms.backward,
    )


def check_stats(
    logits: Tensor, target: Tensor | None, *, few: bool = False, **options: Any
) -> None:
    """Compare `partita.token_stats` and its gradient with fp64.

    With `few`, the rows are so few that the error's bound is that of the worst case.
    """
    with torch.no_grad():
        upstream = upstream_like(in_torch.token_stats(logits, target, **options))
    terms = token_stats_terms(logits, target, upstream, **options)
    terms = worst_case(terms, logits.shape[-1]) if few else terms
    check(
        lambda x: partita.token_stats(x, target, **options)[:3],
        lambda x: in_torch.token_stats(x, target, **options),
        logits,
        upstream=upstream,
        scale=terms.forward,
        grad_scale=terms.backward,
    )
    stats = partita.token_stats(logits, target, **options)
    if options.get("softcap") is None:  # which may round two logits to one number
        assert torch.equal(stats.argmax, logits.argmax(-1))
    assert {field.dtype for field in stats[:3]} == {acc_dtype(logits.dtype)}


def upstream(loss: Tensor) -> Tensor:
    """Return a gradient of the loss with another number for each element."""
    return (
        torch.linspace(0.5, 2.0, loss.numel(), device=loss.device)
        .reshape(loss.shape)
        .to(loss.dtype)
    )


def gradients(result: Tensor, leaves: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the gradients of the sum of a result with another factor for each element.

    Leaves may be None. The graph is kept for another backward pass.
    """
    factors = torch.linspace(-1, 2, result.numel(), dtype=torch.float64).view(result.shape)
    wanted = [leaf for leaf in leaves if leaf is not None]
    return torch.autograd.grad(result, wanted, factors.to(result), retain_graph=True)


def targets_for(logits: Tensor, kind: str, *, ignored: int | None = None) -> Tensor:
    """Return probabilities, or labels; with `ignored` a third of the labels has that value."""
    generator = torch.Generator().manual_seed(1)
    if kind == "probabilities":
        return (
            torch.rand(logits.shape, generator=generator)
            .to(logits.device)
            .softmax(min(logits.ndim - 1, 1))
            .to(logits.dtype)
        )
    rows = logits.shape[:1] + logits.shape[2:] if logits.ndim > 1 else ()
    labels = torch.randint(logits.shape[min(logits.ndim - 1, 1)], rows, generator=generator)
    if ignored is not None:
        labels = torch.where(torch.rand(rows, generator=generator) < 1 / 3, ignored, labels)
    return labels.to(logits.device)


def class_weights(classes: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return positive weights, and 0 for one class."""
    weights = torch.rand(classes, generator=torch.Generator().manual_seed(2)) + 0.1
    weights[classes // 2] = 0
    return weights.to(device, dtype)


def strided(
    shape: Sequence[int],
    order: Sequence[int],
    steps: Sequence[int],
    *,
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> Tensor:
    """Return a tensor whose dimensions lie in memory in this order and with these steps.

    A step of 0 repeats the elements.
    """
    generator = torch.Generator().manual_seed(seed)
    stored = [max(1, shape[d] * steps[d]) if steps[d] else 1 for d in order]
    memory = (3 * torch.randn(stored, generator=generator)).to(device, dtype)
    x = memory.permute([order.index(d) for d in range(len(order))])
    x = x[tuple(slice(None, None, max(step, 1)) for step in steps)]
    return x[tuple(slice(0, size) for size in shape)].expand(shape)


def leaf(
    rows: int, columns: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    """Return sample rows that need a gradient."""
    return sample_rows(rows, columns, dtype=dtype, device=device).requires_grad_()


def bits(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors as integers, so that NaN equals any NaN and 0.0 is not -0.0."""
    words = {2: torch.int16, 4: torch.int32}
    one_nan = (each.masked_fill(each.isnan(), torch.nan).contiguous() for each in tensors)
    return [each.view(words[each.element_size()]) for each in one_nan]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(map(torch.equal, bits(found), bits(expected)))
