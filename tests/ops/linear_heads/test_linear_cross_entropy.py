"""Cross-entropy and token statistics from hidden states: every plan and option against the plain composition in fp64."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.rows import INTERPRETING, devices, hypothesis_settings
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

import partita
from partita.ops.linear_heads.plan import ROW_WORDS
from partita.testing import poisoned_memory

TOKENS, HIDDEN, CLASSES = 40, 24, 333
REDUCTIONS = ("none", "mean", "sum")
OPTIONS = list(
    itertools.product((False, True), (False, True), (0.0, 0.1), (None, 5.0), (0.0, 1e-2))
)
if INTERPRETING:  # which takes its time: none, and all
    OPTIONS = [OPTIONS[0], OPTIONS[-1]]
dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"]
)


class Batch(NamedTuple):
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None


def batch_of(
    tokens: int = TOKENS,
    classes: int = CLASSES,
    *,
    bias: bool = False,
    weighted: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Batch:
    """A seventh of the tokens is ignored."""
    g = torch.Generator().manual_seed(tokens + classes)
    numbers = [
        torch.randn(*size, generator=g)
        for size in ((tokens, HIDDEN), (classes, HIDDEN), (classes,))
    ]
    target = torch.randint(classes, (tokens,), generator=g)
    target[::7] = -100
    class_weight = torch.rand(classes, generator=g)
    class_weight[:2] = 0.0
    hidden, matrix, offset = (number.to(dtype).to(device) for number in numbers)
    return Batch(
        hidden,
        0.5 * matrix,
        offset if bias else None,
        target.to(device),
        class_weight.to(dtype).to(device) if weighted else None,
    )


def budgets(x: Batch) -> dict[str, int | None]:
    """One for each plan: all logits at once; chunks of classes, the last of which is short."""
    (tokens, hidden), item = x.input.shape, x.input.dtype.itemsize
    beside = ROW_WORDS * 4 * tokens + (4 * tokens * hidden if item == 2 else 0)
    return {"fast": None, "lean": tokens * 128 * item + beside}


def plain(x: Batch, **options: Any) -> Tensor:
    with partita.backend("reference"):
        return partita.cross_entropy(
            F.linear(x.input, x.weight, x.bias), x.target, x.class_weight, **options
        )


def ours(x: Batch, memory_budget: int | None = None, **options: Any) -> Tensor:
    return partita.linear_cross_entropy(
        x.input,
        x.weight,
        x.target,
        linear_bias=x.bias,
        weight=x.class_weight,
        memory_budget=memory_budget,
        **options,
    )


def results(
    f: Callable[[Batch], Tensor], x: Batch, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The loss, and the gradients of what can have one, with an upstream gradient that is not 1."""
    leaves = [
        None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in x[:3]
    ]
    class_weight = (
        None if x.class_weight is None else x.class_weight.to(dtype or x.class_weight.dtype)
    )
    with poisoned_memory():
        loss = f(Batch(*leaves, x.target, class_weight))
        upstream = (
            torch.linspace(0.5, 2.0, loss.numel(), device=loss.device)
            .reshape(loss.shape)
            .to(loss.dtype)
        )
        return [
            loss.detach(),
            *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None], upstream),
        ]


def assert_as_good(
    found: Sequence[Tensor],
    theirs: Sequence[Tensor],
    truth: Sequence[Tensor],
    dtype: torch.dtype,
    ulps: float = 4.0,
) -> None:
    """Errors are at most twice those of PyTorch in the same dtype, or a few units in the last place of the greatest element."""
    for mine, other, right in zip(found, theirs, truth, strict=True):
        assert mine.shape == right.shape
        assert torch.equal(mine.isnan(), right.isnan())
        if right.numel():
            size = right.nan_to_num().abs().max()
            error, own = ((t.double() - right).nan_to_num().abs().max() for t in (mine, other))
            assert error <= 2 * own + ulps * torch.finfo(dtype).eps * size


def check(x: Batch, budget: int | None, **options: Any) -> None:
    f = lambda x: plain(x, **options)  # noqa: E731
    found = results(lambda x: ours(x, budget, **options), x)
    assert_as_good(found, results(f, x), results(f, x, torch.float64), x.input.dtype)


@pytest.mark.interpreted
@devices
@dtypes
@pytest.mark.parametrize("plan", ["fast", "lean"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("bias", "weighted", "label_smoothing", "softcap", "z_loss"), OPTIONS)
def test_every_combination_of_options(
    bias, weighted, label_smoothing, softcap, z_loss, reduction, plan, dtype, device
) -> None:
    x = batch_of(bias=bias, weighted=weighted, dtype=dtype, device=device)
    budget = budgets(x)[plan]
    assert (budget is None) == (plan == "fast")
    check(
        x,
        budget,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
    )


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("plan", ["fast", "lean"])
def test_fp16_gradients_do_not_underflow_before_a_loss_scale(plan: str, device: str) -> None:
    x = batch_of(dtype=torch.float16, device=device)
    scaled = lambda f: lambda x: 2.0**12 * f(x).float() * 2.0**-4  # noqa: E731
    f = scaled(plain)
    found = results(scaled(lambda x: ours(x, budgets(x)[plan])), x)
    assert_as_good(
        found, results(f, x), results(lambda x: 2.0**8 * plain(x), x, torch.float64), torch.float16
    )


@devices
@dtypes
def test_chunks_of_tokens(dtype: torch.dtype, device: str) -> None:
    """The gradient of the matrix is added up over them."""
    x = batch_of(5000, 50, bias=True, weighted=True, dtype=dtype, device=device)
    plan = partita.linear_cross_entropy_plan(
        5000, HIDDEN, 50, dtype, memory_budget=ROW_WORDS * 4 * 5000 + 600_000
    )
    assert plan.name == "fast" and plan.chunk < 5000
    for reduction in ("mean", "sum"):
        check(
            x, ROW_WORDS * 4 * 5000 + 600_000, reduction=reduction, label_smoothing=0.1, z_loss=1e-3
        )


@pytest.mark.interpreted
@hypothesis_settings
@given(
    st.integers(0, 30),
    st.integers(2, 600),
    st.sampled_from(["fast", "lean"]),
    st.sampled_from(REDUCTIONS),
    st.booleans(),
)
def test_any_sizes(tokens: int, classes: int, plan: str, reduction: str, bias: bool) -> None:
    x = batch_of(tokens, classes, bias=bias)
    check(x, budgets(x)[plan] if tokens else None, reduction=reduction, label_smoothing=0.2)


@devices
def test_shapes_of_the_arguments(device: str) -> None:
    x = batch_of(24, 30, bias=True, weighted=True, device=device)
    flat = ours(x, reduction="none")
    stacked = ours(
        x._replace(
            input=x.input.reshape(2, 3, 4, HIDDEN), target=x.target.reshape(2, 3, 4).to(torch.int32)
        ),
        reduction="none",
    )
    torch.testing.assert_close(stacked.flatten(), flat)
    one = ours(x._replace(input=x.input[1], target=x.target[1]), reduction="none")
    torch.testing.assert_close(one, flat[1])
    assert one.shape == ()
    strided = x._replace(input=x.input.T.contiguous().T, weight=x.weight.T.contiguous().T)
    for a, b in zip(results(ours, strided), results(ours, x), strict=True):
        torch.testing.assert_close(a, b)


@devices
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize("dims", [(), (3,), (2, 3)])
def test_matrices_of_more_dimensions_and_probabilities(
    dims: tuple[int, ...], kind: str, device: str
) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, matrix = (
        torch.randn(5, 4, generator=g).to(device),
        torch.randn(6, *dims, 4, generator=g).to(device),
    )
    bias, probabilities = (
        torch.randn(6, *dims, generator=g).to(device),
        torch.randn(5, 6, *dims, generator=g).softmax(1).to(device),
    )
    labels = torch.randint(6, (5, *dims), generator=g).to(device)
    target = labels if kind == "labels" else probabilities
    logits = torch.einsum("nh,c...h->nc...", hidden, matrix) + bias
    for reduction in REDUCTIONS:
        expected = F.cross_entropy(logits, target, reduction=reduction, label_smoothing=0.1)
        found = partita.linear_cross_entropy(
            hidden, matrix, target, linear_bias=bias, reduction=reduction, label_smoothing=0.1
        )
        torch.testing.assert_close(found, expected)
        if hasattr(F, "linear_cross_entropy"):
            theirs = F.linear_cross_entropy(
                hidden, matrix, target, linear_bias=bias, reduction=reduction, label_smoothing=0.1
            )
            torch.testing.assert_close(found, theirs)


def test_probabilities_of_stacked_hidden_states_stand_last() -> None:
    hidden, matrix, target = (
        torch.randn(2, 3, 4),
        torch.randn(5, 4),
        torch.randn(2, 3, 5).softmax(-1),
    )
    expected = F.cross_entropy((hidden @ matrix.T).reshape(6, 5), target.reshape(6, 5))
    torch.testing.assert_close(partita.linear_cross_entropy(hidden, matrix, target), expected)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("plan", ["fast", "lean"])
def test_nothing_but_ignored_tokens(plan: str, device: str) -> None:
    x = batch_of(8, device=device)
    x = x._replace(target=torch.full_like(x.target, 3))
    for reduction, expected in (("mean", torch.nan), ("sum", 0.0)):
        loss, *grads = results(
            lambda x, r=reduction: ours(x, budgets(x)[plan], reduction=r, ignore_index=3), x
        )
        torch.testing.assert_close(loss, torch.full_like(loss, expected), equal_nan=True)
        for grad in grads:
            assert not grad.any()
    assert ours(x, reduction="sum", ignore_index=None) > 0


@devices
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_tokens(reduction: str, device: str) -> None:
    x = batch_of(0, 9, bias=True, device=device)
    for a, b in zip(
        results(lambda x: ours(x, reduction=reduction), x),
        results(lambda x: plain(x, reduction=reduction), x),
        strict=True,
    ):
        torch.testing.assert_close(a, b.to(a.dtype), equal_nan=True)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("plan", ["fast", "lean"])
def test_a_wrong_label_spoils_its_token_alone(plan: str, device: str) -> None:
    x = batch_of(9, device=device)
    for wrong in (-1, CLASSES, 2**40):
        bad = x._replace(target=x.target.index_fill(0, torch.tensor([4], device=device), wrong))
        with (
            mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"}),
            pytest.raises(IndexError, match=r"target: expected labels from 0 to .* at \[4\]"),
        ):
            ours(bad)
        with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
            loss, grad, matrix = results(lambda x: ours(x, budgets(x)[plan], reduction="none"), bad)
            right, right_grad, _ = results(lambda x: ours(x, budgets(x)[plan], reduction="none"), x)
            stats = partita.linear_token_stats(*bad[:2], bad.target)
        others = torch.arange(9, device=device) != 4
        assert (
            loss[4].isnan()
            and grad[4].isnan().all()
            and matrix.isnan().all()
            and stats.logprob[4].isnan()
        )
        assert torch.equal(loss[others], right[others]) and torch.equal(
            grad[others], right_grad[others]
        )


@devices
@pytest.mark.parametrize("plan", ["fast", "lean"])
@pytest.mark.parametrize(
    "wanted", [w for w in itertools.product((False, True), repeat=3) if any(w)]
)
def test_frozen_parts(wanted: tuple[bool, ...], plan: str, device: str) -> None:
    x = batch_of(bias=True, device=device)
    everything = results(lambda x: ours(x, budgets(x)[plan]), x)
    leaves = [t.clone().requires_grad_(wants) for t, wants in zip(x[:3], wanted, strict=True)]
    loss = ours(Batch(*leaves, *x[3:]), budgets(x)[plan])
    found = torch.autograd.grad(
        loss, [leaf for leaf in leaves if leaf.requires_grad], torch.full_like(loss, 0.5)
    )
    for a, b in zip(found, itertools.compress(everything[1:], wanted), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("plan", ["fast", "lean"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_several_backward_passes(reduction: str, plan: str, device: str) -> None:
    """Under retain_graph each gives the same, and gradients add up; two runs give the same bits."""
    x = batch_of(bias=True, device=device)
    leaves = [t.clone().requires_grad_() for t in x[:3]]
    losses = [ours(Batch(*leaves, *x[3:]), budgets(x)[plan], reduction=reduction) for _ in range(2)]
    first = torch.autograd.grad(losses[0].sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(3 * losses[0].sum(), leaves, retain_graph=True)
    other = torch.autograd.grad(losses[1].sum(), leaves)
    assert torch.equal(*losses)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, c)
        torch.testing.assert_close(3 * a, b)
    losses[0].sum().backward()
    for leaf, a in zip(leaves, first, strict=True):
        torch.testing.assert_close(leaf.grad, a)


@pytest.mark.parametrize("plan", ["fast", "lean"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_derivatives(reduction: str, plan: str) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, matrix, bias = (
        torch.randn(*size, generator=g, dtype=torch.float64, requires_grad=True)
        for size in ((4, 3), (200, 3), (200,))
    )
    target, budget = (
        torch.tensor([3, 0, -100, 199]),
        None if plan == "fast" else 4 * 128 * 8 + 24 * 4 * 4,
    )

    def loss(hidden: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        options = {
            "linear_bias": bias,
            "reduction": reduction,
            "label_smoothing": 0.1,
            "softcap": 3.0,
            "z_loss": 0.1,
            "memory_budget": budget,
        }
        return partita.linear_cross_entropy(hidden, matrix, target, **options)

    def stats(hidden: Tensor, matrix: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return partita.linear_token_stats(
            hidden, matrix, target, linear_bias=bias, temperature=0.7, memory_budget=budget
        )[:3]

    for f in (loss, stats):
        assert torch.autograd.gradcheck(f, (hidden, matrix, bias), fast_mode=True)
        assert torch.autograd.gradgradcheck(f, (hidden, matrix, bias), fast_mode=True)


@devices
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("plan", ["fast", "lean"])
def test_compile(plan: str, reduction: str, device: str) -> None:
    x = batch_of(bias=True, device=device)
    f = lambda x: ours(x, budgets(x)[plan], reduction=reduction, label_smoothing=0.1)  # noqa: E731
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
        graphs = []
        backend = aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph.code) or graph)
        results(torch.compile(f, fullgraph=True, backend=backend), x)
        op = "linear_one_pass" if plan == "fast" and reduction == "mean" else "linear_rows"
        assert op in graphs[0]
        torch.compiler.reset()
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        for a, b in zip(results(compiled, x), results(f, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_function_transforms() -> None:
    x = batch_of(6, 9)
    f = lambda hidden, matrix: partita.linear_cross_entropy(hidden, matrix, x.target)  # noqa: E731
    g = lambda hidden, matrix: F.cross_entropy(hidden @ matrix.T, x.target)  # noqa: E731
    for a, b in zip(
        torch.func.grad(f, (0, 1))(*x[:2]), torch.func.grad(g, (0, 1))(*x[:2]), strict=True
    ):
        torch.testing.assert_close(a, b)


@devices
def test_autocast(device: str) -> None:
    x = batch_of(bias=True, device=device)
    leaf, matrix = x.input.clone().requires_grad_(), x.weight.clone().requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = partita.linear_cross_entropy(leaf, matrix, x.target, linear_bias=x.bias)
        stats = partita.linear_token_stats(leaf, matrix, x.target)
    halves = [t.bfloat16() for t in (x.input, x.weight, x.bias)]
    assert loss.dtype == stats.entropy.dtype == torch.float32
    torch.testing.assert_close(
        loss, partita.linear_cross_entropy(*halves[:2], x.target, linear_bias=halves[2])
    )
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(loss, (leaf, matrix)))


@pytest.mark.interpreted
@devices
@dtypes
@pytest.mark.parametrize("plan", ["fast", "lean"])
@pytest.mark.parametrize("masked", [False, True])
def test_token_stats(masked: bool, plan: str, dtype: torch.dtype, device: str) -> None:
    """Also where classes are masked by a bias of -inf."""
    x = batch_of(bias=True, dtype=dtype, device=device)
    if masked:
        x.bias[::3] = -torch.inf
        x = x._replace(target=torch.where((x.target >= 0) & (x.target % 3 == 0), 1, x.target))

    def ours(x: Batch) -> Tensor:
        budget = budgets(x)[plan]
        return torch.stack(
            partita.linear_token_stats(
                x.input,
                x.weight,
                x.target,
                linear_bias=x.bias,
                temperature=0.7,
                memory_budget=budget,
            )[:3]
        )

    def plain(x: Batch) -> Tensor:
        with partita.backend("reference"):
            return torch.stack(
                partita.token_stats(F.linear(x.input, x.weight, x.bias), x.target, temperature=0.7)[
                    :3
                ]
            )

    found, theirs, truth = results(ours, x), results(plain, x), results(plain, x, torch.float64)
    if masked:  # what a mask of -inf has for a gradient is 0 here
        found, theirs, truth = (r[:3] for r in (found, theirs, truth))
    assert_as_good(found, theirs, truth, dtype)
    logits = F.linear(x.input, x.weight, x.bias)
    same = partita.linear_token_stats(
        x.input, x.weight, x.target, linear_bias=x.bias
    ).argmax == logits.argmax(1)
    assert same.float().mean() >= (0.9 if dtype == torch.bfloat16 else 1.0)


def test_the_lowest_of_equal_classes() -> None:
    hidden, matrix = torch.ones(3, 2), torch.zeros(500, 2)
    matrix[[140, 300, 499]] = 1.0
    for budget in (None, 3 * 128 * 4 + 24 * 4 * 3):
        assert (
            partita.linear_token_stats(
                hidden, matrix, torch.zeros(3, dtype=torch.int64), memory_budget=budget
            ).argmax.tolist()
            == [140] * 3
        )


def test_plans() -> None:
    plan = partita.linear_cross_entropy_plan
    sizes = (8192, 4096, 128256, torch.bfloat16)
    product = 2 * 8192 * 4096 * 128256
    fast, lean, loss = (
        plan(*sizes),
        plan(*sizes, memory_budget=2**29),
        plan(*sizes, input_grad=False, weight_grad=False),
    )
    assert (fast.name, fast.chunk, fast.flops) == ("fast", 8192, 3 * product)
    assert (lean.name, lean.flops) == ("lean", 4 * product) and lean.workspace_bytes <= 2**29
    assert (loss.name, loss.flops) == ("loss", product) and loss.workspace_bytes <= 2**28
    assert plan(*sizes, weight_grad=False).flops == 2 * product
    long = plan(2**17, 4096, 128256, torch.bfloat16, memory_budget=2**33)
    assert long.name == "fast" and 2048 <= long.chunk < 2**17 and long.workspace_bytes <= 2**33
    assert (
        plan(2**17, 4096, 128256, torch.bfloat16, memory_budget=2**33, reduced=False).name == "lean"
    )
    assert plan(2**20, 4096, 128256, torch.bfloat16).name == "lean"
    one, several = (
        plan(8192, 4096, 64128, torch.bfloat16),
        plan(8192, 4096, 64128, torch.bfloat16, parallel=True),
    )
    assert (
        several.workspace_bytes - one.workspace_bytes == 8 * 8192 * 4096
    )  # the gradient of hidden states in fp32, sent and received
    assert (
        plan(2**17, 4096, 64128, torch.bfloat16, memory_budget=2**33, parallel=True).name == "lean"
    )
    assert (
        plan(8192, 4096, 64128, torch.bfloat16, parallel=True, input_grad=False).workspace_bytes
        == one.workspace_bytes
    )
    with pytest.raises(
        ValueError, match=r"memory_budget: expected at least .* bytes for 8,192 tokens"
    ):
        plan(*sizes, memory_budget=2**20)
    with pytest.raises(ValueError, match="tokens: expected an int of at least 0, got -1"):
        plan(-1, 2, 3, torch.float32)


BAD = {
    "input: expected shape": ({"input": torch.zeros(2, 5)}, ValueError),
    "linear_weight: expected shape": ({"linear_weight": torch.zeros(5)}, ValueError),
    "linear_weight: expected the dtype of input": (
        {"linear_weight": torch.zeros(3, 4).double()},
        TypeError,
    ),
    "linear_bias: expected shape": ({"linear_bias": torch.zeros(4)}, ValueError),
    "target: expected shape": ({"target": torch.zeros(3, dtype=torch.int64)}, ValueError),
    "weight: expected shape": ({"weight": torch.zeros(4)}, ValueError),
    "reduction: expected one of": ({"reduction": "median"}, ValueError),
    "label_smoothing: expected a number": ({"label_smoothing": 2.0}, ValueError),
    "softcap: expected a number above 0": ({"softcap": 0.0}, ValueError),
    "memory_budget: expected at least": ({"memory_budget": 7}, ValueError),
}


@pytest.mark.parametrize("message", BAD)
def test_errors(message: str) -> None:
    wrong, kind = BAD[message]
    arguments = {
        "input": torch.zeros(2, 4),
        "linear_weight": torch.zeros(3, 4),
        "target": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(kind, match=message):
        partita.linear_cross_entropy(**(arguments | wrong))


def test_module() -> None:
    torch.manual_seed(0)
    module = partita.nn.LinearCrossEntropyLoss(8, 20, bias=True, label_smoothing=0.1, softcap=5.0)
    hidden, target = torch.randn(6, 8), torch.randint(20, (6,))
    expected = partita.cross_entropy(
        module.linear(hidden), target, label_smoothing=0.1, softcap=5.0
    )
    torch.testing.assert_close(module(hidden, target), expected)
    wide = partita.nn.LinearCrossEntropyLoss(8, 20, out_features=(2, 3), reduction="none")
    assert wide(hidden, torch.randint(20, (6, 2, 3))).shape == (6, 2, 3)
    if hasattr(torch.nn, "LinearCrossEntropyLoss"):
        theirs = torch.nn.LinearCrossEntropyLoss(8, 20, bias=True, label_smoothing=0.1)
        theirs.load_state_dict(module.state_dict())
        plain = partita.nn.LinearCrossEntropyLoss(8, 20, bias=True, label_smoothing=0.1)
        plain.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(plain(hidden, target), theirs(hidden, target))


def extra_memory(f: Callable[[], Any]) -> int:
    f()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = f()
    torch.cuda.synchronize()
    del kept
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [2**31, 700 * 2**20, 200 * 2**20])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_is_what_the_plan_promises(reduction: str, budget: int) -> None:
    """Beside the results: gradients, and for `none` the loss's own little tensors."""
    sizes, dtype = (4096, 1024, 65_537), torch.bfloat16
    x = torch.randn(sizes[0], sizes[1], device="cuda", dtype=dtype, requires_grad=True)
    matrix = torch.randn(sizes[2], sizes[1], device="cuda", dtype=dtype).mul_(0.03).requires_grad_()
    target = torch.randint(sizes[2], (sizes[0],), device="cuda")
    plan = partita.linear_cross_entropy_plan(
        *sizes, dtype, memory_budget=budget, reduced=reduction == "mean"
    )
    assert plan.workspace_bytes <= budget

    def train() -> Any:
        loss = partita.linear_cross_entropy(
            x, matrix, target, reduction=reduction, memory_budget=budget
        )
        return torch.autograd.grad(loss.sum(), (x, matrix))

    gradients = 2 * (x.numel() + matrix.numel())
    assert extra_memory(train) <= gradients + plan.workspace_bytes + 2**20
    with torch.no_grad():
        promised = partita.linear_cross_entropy_plan(
            *sizes, dtype, input_grad=False, weight_grad=False
        ).workspace_bytes
        assert (
            extra_memory(lambda: partita.linear_cross_entropy(x, matrix, target))
            <= promised + 2**20
            <= 2**28
        )


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["fast", "lean"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_capture_and_replay(reduction: str, plan: str) -> None:
    x = batch_of(device="cuda", dtype=torch.bfloat16)
    hidden, matrix = x.input.clone().requires_grad_(), x.weight.clone().requires_grad_()

    def step() -> tuple[Tensor, ...]:
        loss = partita.linear_cross_entropy(
            hidden, matrix, x.target, reduction=reduction, memory_budget=budgets(x)[plan]
        )
        return loss.detach(), *torch.autograd.grad(loss.sum(), (hidden, matrix))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        hidden.data.copy_(torch.randn_like(hidden))
        x.target.copy_(torch.randint(CLASSES, (TOKENS,)))
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for a, b in zip(captured, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_more_than_2_31_logits() -> None:
    """All tokens are one of three, so three rows tell what all must be."""
    tokens, classes = 34_000, 65_537
    few, matrix = (
        torch.randn(3, 64, device="cuda", dtype=torch.bfloat16),
        torch.randn(classes, 64, device="cuda", dtype=torch.bfloat16).mul_(0.125),
    )
    target = torch.tensor([5, 65_536, 40_000], device="cuda")
    which = torch.arange(tokens, device="cuda") % 3
    expected = F.cross_entropy((few.double() @ matrix.double().T), target, reduction="none")[which]
    for reduction in ("none", "mean"):
        hidden = few[which].requires_grad_()
        loss = partita.linear_cross_entropy(
            hidden, matrix, target[which], reduction=reduction, memory_budget=2**34
        )
        (grad,) = torch.autograd.grad(loss.sum(), hidden)
        torch.testing.assert_close(
            loss.double(),
            expected if reduction == "none" else expected.mean(),
            rtol=2e-3,
            atol=1e-3,
        )
        assert torch.equal(
            grad[-3:].float().norm(dim=1) > 0, torch.ones(3, dtype=torch.bool, device="cuda")
        )
        torch.testing.assert_close(grad[which == 0][-1], grad[0])


@pytest.mark.skipif(INTERPRETING, reason="of the CPU's own floor")
def test_ignored_tokens_cost_no_memory_on_a_cpu() -> None:
    """So much as to hide that most are ignored would not fit the budget."""
    x = batch_of(4000, 300)
    target = torch.full_like(x.target, -100)
    target[:20] = 7
    budget = 24 * 4 * 20 + 20 * 304 * 4
    loss = ours(x._replace(target=target), budget)
    torch.testing.assert_close(loss, F.cross_entropy(x.input[:20] @ x.weight.T, target[:20]))


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("plan", ["fast", "lean"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_strided_and_narrow_arguments(reduction: str, plan: str, device: str) -> None:
    """Labels and class weights that do not lie side by side, and labels of types in which the bounds would wrap."""
    x = batch_of(weighted=True, device=device)
    x = x._replace(target=torch.arange(TOKENS, device=device) * 3 % 120)
    expected = results(
        lambda x: ours(x, budgets(x)[plan], reduction=reduction, label_smoothing=0.1), x
    )
    for dtype in (torch.int64, torch.uint8, torch.int8):
        target = torch.stack([x.target, x.target * 0], 1).to(dtype)[:, 0]
        weight = torch.stack([x.class_weight, x.class_weight * 0 + 1e9], 1)[:, 0]
        strided = x._replace(target=target, class_weight=weight)
        found = results(
            lambda x: ours(x, budgets(x)[plan], reduction=reduction, label_smoothing=0.1), strided
        )
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    loss = partita.cross_entropy(x.input @ x.weight.T, x.target, weight, label_smoothing=0.1)
    torch.testing.assert_close(
        loss,
        partita.cross_entropy(x.input @ x.weight.T, x.target, x.class_weight, label_smoothing=0.1),
    )


def test_under_a_dispatch_mode_second_derivatives_are_right() -> None:
    x = batch_of(6, 9)
    found = []
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        leaf = x.input.clone().requires_grad_()
        with mode:
            loss = partita.linear_cross_entropy(leaf, x.weight, x.target)
            (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        found.append(torch.autograd.grad((grad**2).sum(), leaf)[0])
    torch.testing.assert_close(*found)
    assert found[0].any()


def test_compiled_code_takes_any_number_of_tokens() -> None:
    compiled = torch.compile(
        lambda h, w, t: partita.linear_cross_entropy(h, w, t), fullgraph=True, backend="aot_eager"
    )
    matrix = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for tokens in range(4, 18):
        hidden, target = (
            torch.randn(tokens, 6, generator=torch.Generator().manual_seed(tokens)),
            torch.arange(tokens) % 5,
        )
        torch.testing.assert_close(
            compiled(hidden, matrix, target), partita.linear_cross_entropy(hidden, matrix, target)
        )


def test_hidden_states_of_no_size() -> None:
    torch.testing.assert_close(
        partita.linear_cross_entropy(torch.zeros(2, 0), torch.zeros(5, 0), torch.tensor([0, 1])),
        torch.tensor(5.0).log(),
    )


@pytest.mark.parametrize("call", [partita.linear_cross_entropy, partita.linear_token_stats])
def test_a_budget_holds_on_a_cpu(call: Callable[..., Any]) -> None:
    """The peak of resident memory beside what is there before, in a process of its own: the logits would take 250 MB."""
    code = f"""
import torch, partita
torch.set_num_threads(1)
h, w, t = torch.randn(2048, 64, requires_grad=True), torch.randn(32000, 64, requires_grad=True), torch.randint(32000, (2048,))
def peak(): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
def run(h, t):
    found = partita.{call.__name__}(h, w, t, memory_budget=2**26)
    (found if isinstance(found, torch.Tensor) else found.entropy.sum()).backward()
run(h[:256].detach().requires_grad_(), t[:256])
w.grad = None
open("/proc/self/clear_refs", "w").write("5")
before = peak()
run(h, t)
print(peak() - before)
"""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs Linux")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert float(done.stdout) < 150
