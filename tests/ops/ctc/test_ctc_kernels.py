"""CTC's kernels against the reference, under the interpreter and on a GPU."""

from typing import Any

import pytest
import torch
from helpers.ctc import (
    assert_alignment_matches,
    assert_matches_reference,
    batch_of,
    reduced_loss,
    results,
)
from helpers.rows import KERNEL_DEVICES, kernel_devices

import partita

# Few classes (with an emission table) and many; targets of one chunk, of several, and of lengths at
# the boundary; targets that cannot be aligned.
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
    (30, 2, 300, 9),
    (50, 2, 300, 40),
]
# The interpreter takes seconds for a few steps, so it gets smaller shapes.
INTERPRETED_SHAPES = [
    (12, 2, 5, 3),
    (9, 1, 5, 0),
    (1, 2, 4, 1),
    (0, 2, 4, 1),
    (5, 2, 6, 10),
    (36, 1, 5, 33),
    (36, 1, 70, 33),
    (16, 2, 300, 9),
]
CASES = [
    pytest.param(shape, *device.values, marks=device.marks)
    for device, shapes in zip(KERNEL_DEVICES, (INTERPRETED_SHAPES, SHAPES), strict=True)
    for shape in shapes
]


@pytest.mark.parametrize(("shape", "device"), CASES, ids=str)
def test_against_the_specification(shape: tuple[int, int, int, int], device: str) -> None:
    x = batch_of(*shape, device=device, seed=sum(shape))
    assert_matches_reference(x)
    assert_alignment_matches(x)


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
    assert_matches_reference(x, dtype)
    assert_matches_reference(x._replace(logits=x.logits.log_softmax(-1)), dtype, from_logits=False)


@kernel_devices
def test_logits_beyond_the_range_of_emissions_use_fp64(device: str) -> None:
    """Masks such as -1e9, scores of 1e7, NaN and -inf do not affect the other sequences."""
    x = batch_of(8, 4, 6, 3, device=device, holes=0.1)
    x.logits[:, 1] *= 1e7
    x.logits[:, 2, 1] = -1e9
    assert_matches_reference(x)
    x.logits[3, 3, 0] = torch.nan
    losses, without_grad, grad = results(x, "triton")
    assert (
        losses[3].isnan()
        and without_grad[3].isnan()
        and grad[: x.input_lengths[3], 3].isnan().all()
    )
    others = torch.tensor([0, 1, 2], device=device)
    truth = results(x, "reference")
    torch.testing.assert_close(
        (losses[others], grad[:, others]),
        (truth[0][others], truth[2][:, others]),
        rtol=2e-6,
        atol=4e-6,
    )
    assert_matches_reference(
        batch_of(*((34, 1, 6, 33) if device == "cpu" else (60, 2, 6, 40)), device=device, scale=1e7)
    )


@kernel_devices
@pytest.mark.parametrize("C", [6, 70, 300])
def test_sequences_in_fp64_share_a_batch_with_targets_of_several_chunks(
    C: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan in fp64 comes first, and clears the words through which other programs wait."""
    from partita.ops.ctc.gpu import launch

    run, cleared = launch.launch_lanes, []

    def checked_run(kernel: Any, programs: int, **options: Any) -> None:
        is_first = kernel is launch.POSTERIOR_SCAN and options["FP64"]
        if is_first:
            counter, carries = options["memory"][:2]
            counter[0] = 1
            carries.fill_(1)
        run(kernel, programs, **options)
        if is_first:
            in_fp32 = options["saved"].flags[:N] == 0
            cleared.append(counter[0].item() == 0 and not carries[:, :, in_fp32].any())
            assert in_fp32.tolist() == [True, False] + [True] * (N - 2)

    monkeypatch.setattr(launch, "launch_lanes", checked_run)
    steps, N = (36, 3) if device == "cpu" else (90, 5)
    x = batch_of(steps, N, C, 33, device=device)
    x.input_lengths[:], x.target_lengths[:] = steps, 33
    x.targets[:] = torch.arange(33, device=device) % 3
    x.logits[:, 1] *= 1e7
    assert_matches_reference(x)
    assert cleared and all(cleared)


@kernel_devices
def test_scores_of_alignments_are_sums_over_blocks_of_steps(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One target is empty, one cannot be aligned, and one sequence has a step of NaN."""
    from partita.ops.ctc.gpu import align

    monkeypatch.setattr(align, "ALIGNMENT_STEPS", 16)
    x = batch_of(36, 4, 6, 4, device=device)
    x.target_lengths[0], x.input_lengths[1], x.target_lengths[1] = 0, 1, 4
    x.input_lengths[2:] = 36
    assert_alignment_matches(x)
    x.logits[2, 3] = torch.nan
    with partita.backend("triton"):
        found = partita.ctc_align(*x, from_logits=True)
    assert found.score.isnan().tolist() == [False, False, False, True]
    assert found.score[1] == -torch.inf
    torch.testing.assert_close(found.score[2], found.scores[2].sum(), rtol=1e-5, atol=0.0)


@kernel_devices
def test_any_strides(device: str) -> None:
    x = batch_of(7, 2, 8, 3, device=device)
    assert_matches_reference(
        x._replace(logits=x.logits.permute(2, 0, 1).contiguous().permute(1, 2, 0))
    )
    assert_matches_reference(x._replace(logits=x.logits[:, :1].expand(-1, 2, -1)))
    fewer = x._replace(targets=x.targets % 7, input_lengths=x.input_lengths.clamp(max=6))
    assert_matches_reference(fewer._replace(logits=x.logits[1:, :, 1:]))


@kernel_devices
@pytest.mark.parametrize(
    ("reduction", "classes", "zero_infinity"),
    [("mean", 6, True), ("sum", 6, False), ("mean", 300, True)],
)
def test_reductions(reduction: str, classes: int, zero_infinity: bool, device: str) -> None:
    """One target is empty, and one cannot be aligned."""
    x = batch_of(12, 4, classes, 3, device=device)
    x.target_lengths[0], x.input_lengths[1] = 0, 1
    x.target_lengths[1] = 3
    for dtype in (torch.float32, torch.float64)[: 1 + (device != "cpu")]:  # the interpreter is slow
        x = x._replace(logits=x.logits.to(dtype))
        (loss, grad), (expected, truth) = (
            reduced_loss(x, backend, reduction, zero_infinity)
            for backend in ("triton", "reference")
        )
        assert loss.dtype == dtype and loss.isfinite() == zero_infinity
        torch.testing.assert_close((loss, grad), (expected, truth), rtol=2e-6, atol=2e-6)
