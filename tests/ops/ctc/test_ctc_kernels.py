"""The kernels of CTC against the specification, under the interpreter and on a GPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers.rows import KERNEL_DEVICES, kernel_devices
from hypothesis import given, settings
from hypothesis import strategies as st

import partita
from partita.testing import poisoned_memory


class Batch(NamedTuple):
    logits: torch.Tensor
    targets: torch.Tensor
    input_lengths: torch.Tensor
    target_lengths: torch.Tensor
    blank: int = 0

    def to(self, device: str) -> "Batch":
        return Batch(*(t.to(device) for t in self[:4]), self.blank)


def batch_of(
    steps: int,
    count: int,
    classes: int,
    most: int,
    *,
    device: str = "cpu",
    seed: int = 0,
    scale: float = 1.0,
    holes: float = 0.0,
) -> Batch:
    """Targets may hold the blank, which is the last class but one, and repeat labels."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(steps, count, classes, generator=g) * scale
    logits[torch.rand(logits.shape, generator=g) < holes] = -torch.inf
    blank = max(classes - 2, 0)
    logits[..., blank] = logits[..., blank].nan_to_num(neginf=0.0)
    targets = torch.randint(0, classes, (count, most), generator=g)
    inputs = torch.randint(steps // 2, steps + 1, (count,), generator=g)
    return Batch(
        logits, targets, inputs, torch.randint(most // 2, most + 1, (count,), generator=g), blank
    ).to(device)


def results(
    x: Batch, backend: str, dtype: torch.dtype = torch.float32, from_logits: bool = True
) -> tuple[torch.Tensor, ...]:
    """Losses with and without a gradient to come, and the gradient."""
    logits = x.logits.to(dtype).clone().requires_grad_()
    with partita.backend(backend), poisoned_memory():
        losses = partita.ctc_loss(logits, *x[1:], "none", from_logits=from_logits)
        weights = torch.linspace(0.5, 2, len(losses), device=losses.device).to(losses.dtype)
        (grad,) = torch.autograd.grad(
            (losses.nan_to_num(nan=torch.nan, posinf=0.0) * weights).sum(), logits
        )
        with torch.no_grad():
            alone = partita.ctc_loss(logits, *x[1:], "none", from_logits=from_logits)
    return losses.detach(), alone, grad


def assert_right(x: Batch, dtype: torch.dtype = torch.float32, from_logits: bool = True) -> None:
    """Posteriors are within 2e-6, twice that where weights double them, and an ulp of where they are stored; losses within 1e-6 of themselves."""
    ours, truth = (
        results(x, "triton", dtype, from_logits),
        results(x, "reference", dtype, from_logits),
    )
    tolerance = 2e-6 if dtype.itemsize < 8 else 1e-12
    for a, b in zip(ours, truth, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(
            a,
            b,
            rtol=max(tolerance, 2 * torch.finfo(a.dtype).eps),
            atol=2 * tolerance,
            equal_nan=True,
        )


def assert_aligned(x: Batch, from_logits: bool = True) -> None:
    found = []
    for backend in ("triton", "reference"):
        with partita.backend(backend), poisoned_memory():
            found.append(partita.ctc_align(*x, from_logits=from_logits))
    torch.testing.assert_close(found[0].score, found[1].score, rtol=1e-6, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(
        found[0].scores, found[1].scores, rtol=1e-6, atol=2e-6, equal_nan=True
    )
    assert torch.equal(found[0].labels, found[1].labels) and torch.equal(
        found[0].tokens, found[1].tokens
    )


# Few and many classes, of which tables are made and not; targets of one chunk and of several, and at their edges; impossible ones.
SHAPES = [
    (12, 2, 5, 3),
    (40, 2, 6, 10),
    (9, 3, 5, 0),
    (1, 2, 4, 1),
    (0, 2, 4, 1),
    (5, 2, 6, 10),
    (90, 2, 5, 40),
    (70, 2, 40, 31),
    (80, 2, 70, 33),
]
SHAPES += [(30, 2, 300, 9), (50, 2, 300, 40)]
# The interpreter takes a second for some steps.
FEW = [
    (12, 2, 5, 3),
    (9, 1, 5, 0),
    (1, 2, 4, 1),
    (0, 2, 4, 1),
    (5, 2, 6, 10),
    (36, 1, 5, 33),
    (36, 1, 70, 33),
    (16, 2, 300, 9),
]


def shapes_for(interpreted: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> Any:
    """Fewer and smaller ones under the interpreter."""
    chosen = [
        (kind, shape)
        for kind, shapes in zip(KERNEL_DEVICES, (interpreted, others), strict=True)
        for shape in shapes
    ]
    parameters = [
        pytest.param(shape, *kind.values, marks=kind.marks, id=f"{shape}-{kind.values[0]}")
        for kind, shape in chosen
    ]
    return pytest.mark.parametrize(("shape", "device"), parameters)


@shapes_for(FEW, SHAPES)
def test_against_the_specification(shape: tuple[int, int, int, int], device: str) -> None:
    x = batch_of(*shape, device=device, seed=sum(shape))
    assert_right(x)
    assert_aligned(x)


@shapes_for([(12, 2, 6, 5), (36, 1, 60, 33)], [(30, 2, 6, 10), (60, 2, 60, 40)])
def test_classes_that_the_scan_sums(
    shape: tuple[int, int, int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where programs are many."""
    from partita.ops.ctc.gpu import plan

    monkeypatch.setattr(plan, "FULL_GPU", 0)
    plan.ctc_plan.cache_clear()
    try:
        for dtype in (torch.float32, torch.float64)[: 1 + (device != "cpu")]:
            assert_right(batch_of(*shape, device=device), dtype)
    finally:
        plan.ctc_plan.cache_clear()


@kernel_devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates what it stores in bf16")
    x = (
        batch_of(36, 1, 6, 33, device=device)
        if device == "cpu"
        else batch_of(40, 2, 6, 36, device=device)
    )
    assert_right(x, dtype)
    assert_right(x._replace(logits=x.logits.log_softmax(-1)), dtype, from_logits=False)


@kernel_devices
def test_logits_that_no_exponent_holds_are_served_by_logarithms(device: str) -> None:
    """Masks such as -1e9, scores of 1e7, a NaN, and -inf; the other sequences of the batch go the usual way."""
    x = batch_of(8, 4, 6, 3, device=device, holes=0.1)
    x.logits[:, 1] *= 1e7
    x.logits[:, 2, 1] = -1e9
    assert_right(x)
    x.logits[3, 3, 0] = torch.nan
    losses, alone, grad = results(x, "triton")
    assert losses[3].isnan() and alone[3].isnan() and grad[: x.input_lengths[3], 3].isnan().all()
    others = torch.tensor([0, 1, 2], device=device)
    truth = results(x, "reference")
    torch.testing.assert_close(
        (losses[others], grad[:, others]),
        (truth[0][others], truth[2][:, others]),
        rtol=2e-6,
        atol=4e-6,
    )
    assert_right(
        batch_of(*((34, 1, 6, 33) if device == "cpu" else (60, 2, 6, 40)), device=device, scale=1e7)
    )


@kernel_devices
def test_wrong_labels_and_lengths_spoil_their_sequence_alone(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "0")
    good = batch_of(12, 6, 7, 5, device=device)._replace(
        target_lengths=torch.full((6,), 4, device=device)
    )
    targets, inputs, lengths = (
        good.targets.clone(),
        good.input_lengths.clone(),
        good.target_lengths.clone(),
    )
    targets[1, 2], targets[2, 0], inputs[3], lengths[4] = 2**40, -1, 13, 6
    lengths[5] = -1
    for backend in ("triton", "reference"):
        losses, alone, grad = results(
            Batch(good.logits, targets, inputs, lengths, good.blank), backend
        )
        truth = results(good, "reference")
        assert losses[1:].isnan().all() and alone[1:].isnan().all() and grad[:, 1:].isnan().all()
        torch.testing.assert_close(
            (losses[:1], grad[:, 0] * 1.0), (truth[0][:1], truth[2][:, 0]), rtol=2e-6, atol=4e-6
        )
        with partita.backend(backend):
            aligned = partita.ctc_align(
                good.logits, targets, inputs, lengths, good.blank, from_logits=True
            )
        assert (
            aligned.score[1:].isnan().all()
            and (aligned.labels[1:] == -1).all()
            and aligned.score[0].isfinite()
        )


@kernel_devices
def test_any_strides(device: str) -> None:
    x = batch_of(7, 2, 8, 3, device=device)
    assert_right(x._replace(logits=x.logits.permute(2, 0, 1).contiguous().permute(1, 2, 0)))
    assert_right(x._replace(logits=x.logits[:, :1].expand(-1, 2, -1)))
    fewer = x._replace(targets=x.targets % 7, input_lengths=x.input_lengths.clamp(max=6))
    assert_right(fewer._replace(logits=x.logits[1:, :, 1:]))


def reduced(
    x: Batch, backend: str, reduction: str, zero_infinity: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x.logits.clone().requires_grad_()
    with partita.backend(backend), poisoned_memory():
        loss = partita.ctc_loss(logits, *x[1:], reduction, zero_infinity, from_logits=True)
        return loss.detach(), torch.autograd.grad(loss * 0.7, logits)[0]


@kernel_devices
@pytest.mark.parametrize(
    ("reduction", "classes", "zero_infinity"),
    [("mean", 6, True), ("sum", 6, False), ("mean", 300, True)],
)
def test_reductions(reduction: str, classes: int, zero_infinity: bool, device: str) -> None:
    """With a target that is empty, and one that cannot be aligned."""
    x = batch_of(12, 4, classes, 3, device=device)
    x.target_lengths[0], x.input_lengths[1] = 0, 1
    x.target_lengths[1] = 3
    for dtype in (torch.float32, torch.float64)[: 1 + (device != "cpu")]:  # the interpreter is slow
        x = x._replace(logits=x.logits.to(dtype))
        (loss, grad), (expected, truth) = (
            reduced(x, backend, reduction, zero_infinity) for backend in ("triton", "reference")
        )
        assert loss.dtype == dtype and loss.isfinite() == zero_infinity
        torch.testing.assert_close((loss, grad), (expected, truth), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_a_reduction_of_many_is_the_same_each_time(device: str) -> None:
    x = batch_of(30, 1000, 9, 6, device=device)
    first = reduced(x, "triton", "mean", True)
    torch.testing.assert_close(first, reduced(x, "reference", "mean", True), rtol=2e-6, atol=2e-9)
    for _ in range(5):
        assert all(map(torch.equal, reduced(x, "triton", "mean", True), first))


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_lengths_come_from_the_host(count: int, device: str) -> None:
    """In one copy: an odd number of them too, and where the joined targets start."""
    x = batch_of(20, count, 9, 4, device=device)
    joined = torch.cat(
        [target[:length] for target, length in zip(x.targets, x.target_lengths, strict=True)]
    )
    for targets in (x.targets, joined):
        forms = (
            [x.input_lengths.to(a), x.target_lengths.to(b)]
            for a in ("cpu", device)
            for b in ("cpu", device)
        )
        losses = [
            partita.ctc_loss(x.logits, targets, *form, x.blank, "none", from_logits=True)
            for form in forms
        ]
        assert all(torch.equal(loss, losses[0]) for loss in losses)


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 70),
    st.integers(0, 5),
    st.sampled_from([2, 3, 9, 33, 70, 300]),
    st.integers(0, 70),
    st.integers(0, 2**20),
    st.booleans(),
)
def test_any_batch(
    device: str, steps: int, count: int, classes: int, most: int, seed: int, from_logits: bool
) -> None:
    x = batch_of(steps, count, classes, most, device=device, seed=seed, holes=0.05 * (seed % 3))
    assert_right(
        x if from_logits else x._replace(logits=x.logits.log_softmax(-1)), from_logits=from_logits
    )


def native(x: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x.logits.double().requires_grad_()
    with torch.backends.cudnn.flags(enabled=False):
        losses = F.ctc_loss(
            logits.log_softmax(-1),
            x.targets,
            x.input_lengths.cpu(),
            x.target_lengths.cpu(),
            x.blank,
            "none",
        )
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


LARGE = [
    (4000, 1, 32, 1200),
    (10_000, 1, 32, 700),
    (20_000, 1, 32, 2000),
    (300, 400, 5, 100),
    (100, 3, 100_000, 30),
    (300, 70, 300, 150),
    (300, 3, 60, 60),
]


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_batches_against_pytorch_in_fp64(
    shape: tuple[int, int, int, int], device: str
) -> None:
    x = batch_of(*shape, device=device)
    x = x._replace(
        targets=torch.where(x.targets == x.blank, 0, x.targets),
        input_lengths=torch.full_like(x.input_lengths, shape[0]),
    )
    logits = x.logits.requires_grad_()
    losses = partita.ctc_loss(logits, *x[1:], "none", from_logits=True)
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    truth, expected = native(x)
    assert (grad.double() - expected).abs().max() <= 2e-6
    torch.testing.assert_close(losses.double(), truth, rtol=1e-6, atol=1e-9 * shape[0])
    again = partita.ctc_loss(logits, *x[1:], "none", from_logits=True)
    assert torch.equal(again, losses) and torch.equal(
        torch.autograd.grad(again.sum(), logits)[0], grad
    )


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_posteriors_of_a_hundred_thousand_steps(device: str) -> None:
    """Against the kernels in fp64, which are against the specification above."""
    x = batch_of(100_000, 1, 16, 3000, device=device)
    _, _, grad = results(x, "triton")
    _, _, truth = results(x, "triton", torch.float64)
    assert (grad.double() - truth).abs().max() <= 4e-6  # the one weight is .5


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_an_hour_is_aligned(device: str) -> None:
    """A best path that is known: its classes stand out."""
    steps, tokens = 180_000, 20_000
    g = torch.Generator(device).manual_seed(0)
    labels = torch.randint(1, 32, (tokens,), device=device, generator=g)
    logits = torch.randn(steps, 1, 32, device=device, generator=g)
    at = torch.arange(tokens, device=device) * 9 + 4
    logits[:, 0, 0] += 20.0
    logits[at, 0, labels] += 50.0
    torch.cuda.reset_peak_memory_stats()
    found = partita.ctc_align(
        logits,
        labels[None],
        torch.tensor([steps], device=device),
        torch.tensor([tokens], device=device),
        from_logits=True,
    )
    assert torch.cuda.max_memory_allocated() < 16 * 2**30
    assert torch.equal(found.tokens[0, at], torch.arange(tokens, device=device))
    assert torch.equal(found.labels[0, at], labels)
    assert (found.labels >= 0).sum() == steps


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_replay_sees_other_lengths_and_never_waits_for_the_host(
    reduction: str, device: str
) -> None:
    x = batch_of(60, 4, 20, 40, device=device)
    logits = x.logits.clone().requires_grad_()

    def step() -> tuple[Any, ...]:
        loss = partita.ctc_loss(logits, *x[1:], reduction, True, from_logits=True)
        return (
            loss,
            torch.autograd.grad(loss.sum(), logits)[0],
            partita.ctc_align(logits, *x[1:], from_logits=True).labels,
        )

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        other = batch_of(60, 4, 20, 40, device=device, seed=seed)
        for held, new in zip((logits.data, *x[1:4]), other[:4], strict=True):
            held.copy_(new)
        graph.replay()
        for found, expected in zip(captured, step(), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_another_number_of_steps_compiles_nothing(device: str) -> None:
    from partita.ops.ctc.gpu import (
        forward_scan,
        gradient,
        label_gradient,
        label_index,
        loss,
        normalize,
        posterior_scan,
    )

    modules = (
        forward_scan,
        gradient,
        label_gradient,
        label_index,
        loss,
        normalize,
        posterior_scan,
    )
    kernels = {
        name: k
        for module in modules
        for name, k in vars(module).items()
        if name.endswith("_kernel")
    }

    def compiled() -> dict[str, int]:
        return {
            name: sum(len(cache[0]) for cache in kernel.device_caches.values())
            for name, kernel in kernels.items()
        }

    for most in (24, 40):  # a program for a sequence, and several
        results(batch_of(64, 16, 20, most, device=device), "triton")
        results(batch_of(65, 15, 20, most + 1, device=device), "triton")
    before = compiled()
    for steps in (66, 67, 80, 100, 128, 333, 512):
        results(batch_of(steps, steps % 7 + 1, 20, steps // 3 + 2, device=device), "triton")
    assert compiled() == before and sum(before.values()) > 0


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_derivatives(device: str) -> None:
    x = batch_of(7, 2, 4, 3, device=device)
    logits = x.logits.double().requires_grad_()

    def loss(t: torch.Tensor) -> torch.Tensor:
        return partita.ctc_loss(t, *x[1:], "sum", True, from_logits=True)

    assert torch.autograd.gradcheck(loss, logits)
    assert torch.autograd.gradgradcheck(
        loss, logits, nondet_tol=1e-12
    )  # the specification's own scatter, on a GPU


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_concatenated_targets_with_lengths_on_the_device(device: str) -> None:
    x = batch_of(50, 4, 9, 12, device=device)
    flat = torch.cat(
        [row[:length] for row, length in zip(x.targets, x.target_lengths.tolist(), strict=True)]
    )
    a, b = results(x, "triton"), results(x._replace(targets=flat), "triton")
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
