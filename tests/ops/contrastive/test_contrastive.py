"""Contrastive losses against open_clip's formulas in fp64; chunks, bits, memory and bad input."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.contrastive import clip_loss, features, siglip_loss
from helpers.errors import raises
from helpers.memory import Largest
from helpers.rows import INTERPRETING, devices, devices_and_dtypes
from torch import Tensor

import partita
from partita.ops.contrastive import reference
from partita.ops.contrastive.common import chunk_rows, row_bytes
from partita.testing import poisoned_memory

pytestmark = pytest.mark.interpreted
N, D = 150, 24  # several tiles of a kernel, and parts of some
LEAN = 70 * row_bytes(N, torch.float32)  # bytes; chunks of several tiles
ONES = torch.ones(3, 4)
KINDS = ("softmax", "rows alone", "hard negatives", "sigmoid", "sigmoid, hard negatives")


def inputs(
    dtype: torch.dtype, device: str, kind: str, n: int = N, d: int = D
) -> tuple[Tensor, ...]:
    """Return a, b, scale and bias, whose pairs are near each other."""
    a = features(n, d, dtype, device, 0)
    b = features(n, d, dtype, device, 1, near=a)
    if kind.endswith("hard negatives"):
        more = features(37, d, dtype, device, 2)
        b = torch.cat([b.detach(), more.detach()]).requires_grad_()
    numbers = (torch.tensor(x, device=device, requires_grad=True) for x in (20.0, -6.0))
    return a, b, *numbers


def options(kind: str) -> dict[str, Any]:
    is_sigmoid = kind.startswith("sigmoid")
    return {
        "kind": "sigmoid" if is_sigmoid else "softmax",
        "symmetric": kind in ("softmax", "sigmoid"),
    }


def run(of: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    """Return the loss and the gradients of three times the loss."""
    a, b, scale, bias = of
    loss = partita.contrastive_loss(a, b, scale, logit_bias=bias, **options)
    return loss, *torch.autograd.grad(3 * loss, of)


def exact(of: tuple[Tensor, ...], kind: str) -> tuple[Tensor, ...]:
    of = tuple(x.detach().double().requires_grad_() for x in of)
    a, b, scale, bias = of
    n = len(a)
    if kind == "softmax":
        loss = clip_loss(a, a, b, b, scale, 0)
    elif kind.startswith("sigmoid"):
        loss = siglip_loss(a, [b[:n]], scale, bias, 0)
        loss = loss - F.logsigmoid(-(scale * a @ b[n:].T + bias)).sum() / n
    else:
        loss = F.cross_entropy(scale * a @ b.T, torch.arange(n, device=a.device))
    found = torch.autograd.grad(3 * loss, of, materialize_grads=True)
    return loss, *found


@devices_and_dtypes
@pytest.mark.parametrize("budget", [None, LEAN], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(
    kind: str, budget: int | None, dtype: torch.dtype, device: str
) -> None:
    of = inputs(dtype, device, kind)
    with poisoned_memory():
        found = run(of, **options(kind), memory_budget=budget)
    check(found, exact(of, kind), dtype)


def check(found: tuple[Tensor, ...], truth: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """Compare a loss and its gradients with those in fp64."""
    single = torch.float64 if dtype == torch.float64 else torch.float32
    assert [x.dtype for x in found] == [single, dtype, dtype, torch.float32, torch.float32]
    eps = torch.finfo(single).eps
    # The logits are up to 20, so their rounding changes a probability by 20 eps and more.
    for ours, exactly in zip(found, truth, strict=True):
        rounding = torch.finfo(ours.dtype).eps
        if ours.ndim == 2:  # the gradient of the logits is rounded too
            rounding = 4 * rounding
        largest = max(float(exactly.detach().abs().max()), 20 / len(found[1]))
        error = float((ours.detach().double() - exactly.detach()).abs().max())
        assert error <= (64 * eps + rounding) * largest, (ours.shape, error, largest)


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_that_multiply(kind: str, dtype: torch.dtype, device: str) -> None:
    """On Hopper the kernels multiply features in half types; here are several of their tiles."""
    of = inputs(dtype, device, kind, 300, 72)
    budget = 130 * row_bytes(len(of[1]), dtype, True)
    with poisoned_memory():
        found = run(of, **options(kind), memory_budget=budget)
        again = run(of, **options(kind), memory_budget=budget)
    assert all(map(torch.equal, found, again))
    check(found, exact(of, kind), dtype)


@pytest.mark.parametrize(
    ("change", "multiplies"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"D": 20}, False),  # whose rows start on 8 bytes
        ({"shift": 1}, False),
    ],
)
def test_features_that_kernels_multiply(change: dict[str, Any], multiplies: bool) -> None:
    kernels = pytest.importorskip("partita.ops.contrastive.gpu.kernels")
    size = {"D": 24, "dtype": torch.bfloat16, "shift": 0, **change}
    memory = torch.zeros(size["shift"] + 3 * size["D"], dtype=size["dtype"])
    a = memory[size["shift"] :].view(3, size["D"])
    assert kernels.multiplies(a, torch.zeros_like(a)) is multiplies


def test_the_budget_decides_the_chunks() -> None:
    a, meta = torch.empty(1000, 8, device="meta"), 4096 * 9  # bytes of a row
    b = torch.empty(4096, 8, device="meta")
    assert row_bytes(4096, torch.float32) == meta
    rows = [chunk_rows(a, b, budget * meta) for budget in (1, 100, 300, 999, 1000, 2000)]
    assert rows == [1, 100, 256, 512, 1000, 1000]


def test_chunks_of_products_fill_the_multiprocessors() -> None:
    """A product with 768 columns has 3 tiles for 128 rows, so that 132 programs have 5,632 rows."""
    a = torch.empty(65536, 768, device="meta", dtype=torch.bfloat16)
    row = row_bytes(65536, a.dtype, True)
    rows = [chunk_rows(a, a, budget * row, True) for budget in (5000, 6000, 12000, 65536)]
    assert rows == [4736, 5632, 11264, 11264]


@devices
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_second_backward_pass_has_the_same_bits(kind: str, device: str) -> None:
    a, b, scale, bias = of = inputs(torch.float32, device, kind)
    for memory_budget in (None, LEAN):
        call = {"kind": kind, "memory_budget": memory_budget, "logit_bias": bias}
        loss = partita.contrastive_loss(a, b, scale, **call)
        first = torch.autograd.grad(loss, of, retain_graph=True, materialize_grads=True)
        second = torch.autograd.grad(loss, of, materialize_grads=True)
        again = partita.contrastive_loss(a, b, scale, **call)
        assert all(map(torch.equal, first, second)) and torch.equal(loss, again)


@pytest.mark.parametrize("kind", KINDS)
def test_all_logits_are_never_in_memory(kind: str) -> None:
    a, b, *numbers = (x.detach() for x in inputs(torch.float32, "cpu", kind))
    a, b, columns = a[:, :8], b[:, :8], len(b)
    is_sigmoid = kind.startswith("sigmoid")
    rest = (0, is_sigmoid, kind == "softmax", 20 * row_bytes(columns, torch.float32))
    with Largest() as largest:
        state = reference.contrastive_state(a, b, *numbers, *rest, False)
        reference.contrastive_gradient(a, b, *numbers, *state, *rest, True, True)
    assert 20 * columns <= largest.elements <= 20 * (columns + 16) < N * N / 4


def test_a_loss_near_zero_does_not_cancel() -> None:
    """The log-sum-exp of a row and its pair's logit are near 1e4, where fp32 has steps of 1e-3."""
    shifted = torch.cat([torch.full((4, 1), 100.0), torch.eye(4)], 1)
    loss = partita.contrastive_loss(shifted, shifted, 1.0)
    truth = F.cross_entropy(torch.eye(4, dtype=torch.float64), torch.arange(4))
    assert abs(float(loss) - float(truth)) < 1e-6


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_and_columns_far_below_the_others(dtype: torch.dtype, device: str) -> None:
    """Their exponentials vanish beside those of the other logits of a tile."""
    of = inputs(dtype, device, "softmax")
    with torch.no_grad():
        for x in of[:2]:
            x.copy_(F.normalize(0.1 * x + 1, dim=1))
        of[0][3] *= -1
        of[1][77] *= -0.2
        of[2].fill_(300.0)
    budget = 70 * row_bytes(N, dtype)
    for result, truth in zip(run(of, memory_budget=budget), exact(of, "softmax"), strict=True):
        bound = 2e-5 if result.dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        assert (result - truth).abs().max() <= bound * truth.abs().max()


@devices
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("columns", [0, 4])
def test_no_rows(columns: int, kind: str, device: str) -> None:
    a, b = (torch.zeros(n, 3, device=device, requires_grad=True) for n in (0, columns))
    scale = torch.ones((), device=device, requires_grad=True)
    loss = partita.contrastive_loss(a, b, scale, kind=kind, symmetric=columns == 0)
    loss.backward()
    assert loss.isnan() and a.grad.shape == (0, 3) and scale.grad == 0
    assert b.grad.shape == b.shape and not b.grad.nan_to_num().any()


@devices
def test_one_row(device: str) -> None:
    a = torch.ones(1, 3, device=device, requires_grad=True)
    loss = partita.contrastive_loss(a, a.detach(), 5.0)
    loss.backward()
    assert loss == 0 and not a.grad.any()


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_nan_reaches_the_loss(kind: str, dtype: torch.dtype, device: str) -> None:
    for part in (0, 1):
        of = inputs(dtype, device, kind)
        with torch.no_grad():
            of[part][5, 3] = torch.nan
        loss, *grads = run(of, kind=kind, memory_budget=70 * row_bytes(N, dtype))
        assert loss.isnan() and all(grad.isnan().any() for grad in grads[:3])


@devices
def test_what_needs_no_gradient_has_none(device: str) -> None:
    """A tower that is frozen takes no product in the backward pass."""
    a, b, scale, _ = inputs(torch.float32, device, "softmax")
    expected = torch.autograd.grad(partita.contrastive_loss(a, b, scale), (a, b, scale))
    for part, leaf in enumerate((a, b, scale)):
        of = [x if i == part else x.detach() for i, x in enumerate((a, b, scale))]
        (found,) = torch.autograd.grad(partita.contrastive_loss(*of), leaf)
        assert torch.equal(found, expected[part])
    with torch.no_grad():
        assert not partita.contrastive_loss(a, b, scale).requires_grad


@devices
def test_numbers_and_tensors_are_alike(device: str) -> None:
    a, b, scale, bias = inputs(torch.float32, device, "sigmoid")
    expected = partita.contrastive_loss(a, b, scale, logit_bias=bias, kind="sigmoid")
    for number in (float, lambda x: x[None], lambda x: x.detach().double()):
        numbers = {"logit_scale": number(scale), "logit_bias": number(bias)}
        assert torch.equal(partita.contrastive_loss(a, b, **numbers, kind="sigmoid"), expected)


@devices
def test_a_bias_cancels_in_a_softmax(device: str) -> None:
    a, b, scale, bias = inputs(torch.float32, device, "softmax")
    loss = partita.contrastive_loss(a, b, scale, logit_bias=bias)
    assert torch.equal(loss, partita.contrastive_loss(a, b, scale))
    assert torch.autograd.grad(loss, bias)[0] == 0


@devices
def test_autocast_casts_features(device: str) -> None:
    a, b, scale, _ = inputs(torch.float32, device, "softmax")
    expected = partita.contrastive_loss(a.bfloat16(), b.bfloat16(), scale)
    with torch.autocast(device, torch.bfloat16):
        loss = partita.contrastive_loss(a, b, scale)
    assert torch.equal(loss, expected) and loss.dtype == torch.float32
    assert [x.dtype for x in torch.autograd.grad(loss, (a, b))] == [torch.float32] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_gradients_in_fp16_do_not_underflow(kind: str) -> None:
    """The gradient of most logits is below 1e-8 here, which fp16 does not have."""
    a, b = (features(16384, 64, torch.float16, "cuda", seed) for seed in (0, 1))
    numbers = (torch.tensor(x, device="cuda", requires_grad=True) for x in (10.0, -9.0))
    of = (a, b, *numbers)
    found = run(of, kind=kind, memory_budget=2**28)
    wide = tuple(x.detach().double().requires_grad_() for x in of)
    for ours, truth in zip(found[1:3], run(wide, kind=kind)[1:3], strict=True):
        # Some gradients of features are subnormal, in steps of 6e-8.
        error = (ours.double() - truth).norm() / truth.norm()
        assert error < 2e-2


@pytest.mark.skipif(INTERPRETING, reason="it compares no kernels")
@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("TypeError: a: expected a Tensor, got int", {"a": 1}),
        ("TypeError: b: expected a floating dtype, got torch.int64", {"b": ONES.long()}),
        ("TypeError: b: expected the dtype of a, torch.float32, got", {"b": ONES.double()}),
        ("ValueError: b: expected the device of a, cpu, got meta", {"b": ONES.to("meta")}),
        (r"ValueError: a: expected shape \[N, D\], got \[3\]", {"a": ONES[:, 0]}),
        (r"ValueError: b: expected shape a.shape = \[3, 4\], got \[2, 4\]", {"b": ONES[:2]}),
        (r"ValueError: b: expected shape a.shape = \[3, 4\], got \[3, 2\]", {"b": ONES[:, :2]}),
        (
            r"ValueError: b: expected at least 3 rows and D = 4, got \[2, 4\]",
            {"b": ONES[:2], "symmetric": False},
        ),
        ("ValueError: kind: expected one of 'softmax', 'sigmoid', got 'x'", {"kind": "x"}),
        ("TypeError: logit_scale: expected a number, got str", {"logit_scale": "1"}),
        (r"ValueError: logit_scale: expected a number, of shape \[\] or", {"logit_scale": ONES}),
        ("TypeError: logit_bias: expected a floating dtype", {"logit_bias": torch.tensor(1)}),
        ("ValueError: memory_budget: expected a number of bytes", {"memory_budget": -1}),
        (
            "ValueError: memory_budget: expected at least 144 bytes for 3 columns, or None, got 10",
            {"memory_budget": 10},
        ),
    ],
)
def test_bad_arguments(line: str, change: dict[str, Any]) -> None:
    with raises(line):
        partita.contrastive_loss(**{"a": ONES, "b": ONES, "logit_scale": 1.0, **change})
