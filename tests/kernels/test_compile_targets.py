"""Each kernel compiles for each supported GPU, within its shared memory and registers.

The launches are those of real calls (see helpers/launches.py), so no GPU is needed.
"""

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.rows import INTERPRETING

import partita

pytest.importorskip("triton")
from helpers.compilation import TARGETS, chosen, compiled, spilled
from helpers.launches import NAMES, launches, recording

pytestmark = pytest.mark.skipif(INTERPRETING, reason="kernels are functions of Python there")

# Known bytes of stack of a thread. ptxas saves a scalar or two that no loop reads.
SPILLED = {
    "chain_resident_gradient_kernel": 8,
    "chain_resident_middle_kernel": 8,
    "chain_gradient_kernel": 8,
    "chain_logz_kernel": 8,
    "chain_viterbi_kernel": 8,
    "ctc_narrow_gradient_kernel": 8,
    # The spills stand before the loop. With fewer registers, more programs run at the same time.
    "ctc_posterior_scan_kernel": 144,
}
NVIDIA_ONLY = "chain_resident"  # the prefix of the register-resident kernels, written in Gluon


def test_the_id_of_a_call_determines_its_launches() -> None:
    """Two CTC calls with the same id compile the same kernels, whatever else differs."""
    from partita.runtime import launch

    seen: dict[Any, list[Any]] = {}

    def checked(kernel: Any, _: int, *args: Any, call: Any = None, **options: Any) -> None:
        kinds = [launch._kind(known) for known in launch.specialization_of(args)]
        if call is not None:
            key = (kernel.__name__, call, *options.values())
            assert seen.setdefault(key, kinds) == kinds

    dtypes = (torch.bfloat16, torch.float32, torch.float64)
    sizes = ((5, 10), (5, 40), (20, 101), (5000, 10), (500, 301))
    reductions = (("none", True), ("mean", False), ("sum", True), ("mean", False))
    with recording([], "13.0"), mock.patch.object(launch, "launch", checked):
        for dtype, from_logits, N, (C, S), (reduction, zero_infinity) in itertools.product(
            dtypes, (False, True), (2, 3), sizes, reductions
        ):
            logits = torch.zeros(40, N + 1, C, dtype=dtype)[:, 1:].requires_grad_()
            targets = torch.ones(N, S, dtype=torch.int64)
            lengths = torch.ones(N, dtype=torch.int64)
            options = (0, reduction, zero_infinity)
            for x, target_lengths in (
                (logits, lengths * S),
                (logits.detach(), lengths * S),
                (logits, lengths),
            ):
                loss = partita.ctc_loss(
                    x, targets, lengths, target_lengths, *options, from_logits=from_logits
                )
            strided = torch.ones_like(loss)[..., None].expand(*loss.shape, 2)[..., 1]
            for grad in (torch.ones_like(loss), strided):
                torch.autograd.grad(loss, logits, grad, retain_graph=True)
    assert len(seen) > 500


def test_every_kernel_is_launched_in_every_dtype() -> None:
    found = {name: {launch.dtype for launch in each} for name, each in launches("13.0").items()}
    assert sorted(found) == NAMES
    # The largest floating tensors of these kernels are losses, states, posteriors or pointers.
    single_dtype = {
        **dict.fromkeys(
            (
                "cross_entropy_reduce_kernel",
                "crf_subtract_kernel",
                "ctc_label_gradient_kernel",
                "ctc_lane_gradient_kernel",
                "ctc_loss_kernel",
                "ctc_narrow_gradient_kernel",
                "ctc_posterior_scan_kernel",
                "linear_statistics_kernel",
                "parallel_coefficients_kernel",
                "parallel_fields_kernel",
            ),
            torch.float32,
        ),
        **dict.fromkeys(
            ("chain_resident_final_state_kernel", "ctc_backtrace_kernel"), torch.float64
        ),
        **dict.fromkeys(
            (
                "chain_resident_segment_maps_kernel",
                "chain_resident_trace_kernel",
                "ctc_label_index_kernel",
                "ctc_label_order_kernel",
            ),
            torch.int64,
        ),
    }
    both = {torch.bfloat16, torch.float32}
    missing = {
        name: dtypes
        for name, dtypes in found.items()
        if not dtypes >= ({single_dtype[name]} if name in single_dtype else both)
    }
    assert not missing


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (kernel, name)
        for kernel in NAMES
        for name in TARGETS
        if name != "gfx942" or not kernel.startswith(NVIDIA_ONLY)
    ],
)
def test_compiles(kernel: str, name: str, tmp_path: Path) -> None:
    """Check shared memory for all variants, and spills for plain ones.

    The terms of the options spill where registers are limited, and no bound on that follows from
    anything. fp64 needs two registers for each number, and is no dtype of training.
    """
    target, limit = TARGETS[name]
    spills = []
    for launch in chosen(kernel, name):
        result = compiled(launch, target)
        assert result.metadata.shared <= limit, str(launch)
        if launch.plain and launch.dtype != torch.float64:
            size = spilled(result, target, tmp_path)
            spills += [f"{size} in {launch}"] * (size > SPILLED.get(kernel, 0))
    assert not spills, "\n".join(spills)
