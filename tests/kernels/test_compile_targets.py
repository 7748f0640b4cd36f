"""Each kernel compiles for each supported GPU, within its shared memory and registers.

The launches are those of real calls (see helpers/launches.py), so no GPU is needed.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.rows import INTERPRETING

pytest.importorskip("triton")
import triton
from helpers.compilation import (
    HOPPER_ONLY,
    NVIDIA_ONLY,
    SM_90_ONLY,
    TARGETS,
    chosen,
    compiled,
    spilled,
)
from helpers.launches import (
    NAMES,
    Launch,
    call_chains_with_ends,
    launches,
    recorded,
    recording,
)

pytestmark = pytest.mark.skipif(INTERPRETING, reason="kernels are functions of Python there")

# Known bytes of stack of a thread. ptxas saves a scalar or two that no loop reads.
SPILLED = {
    "chain_resident_gradient_kernel": 8,
    "chain_resident_middle_kernel": 8,
    "chain_expectation_gradient_kernel": 8,
    "chain_gradient_kernel": 8,
    "chain_logz_kernel": 8,
    "chain_viterbi_kernel": 8,
    # Where the columns are no multiple of 16, as their shifts and weights are loaded one by one.
    "contrastive_product_gradient_kernel": 24,
    # Of sigmoids, where it writes codes.
    "contrastive_product_scan_kernel": 8,
    # In rows whose classes are not adjacent.
    "divergence_accumulate_kernel": 32,
    # A few numbers of the row. With more registers, fewer programs would load at the same time.
    "divergence_mixture_row_kernel": 32,
    "divergence_row_kernel": 8,
    # A scan of log Z alone loads two numbers in four steps.
    "linear_chain_resident_scan_kernel": 8,
    # The largest of the blocks that stay in registers: a few numbers of each step.
    "linear_chain_sample_kernel": 32,
    "linear_chain_sample_words_kernel": 8,
    # A few numbers of nodes, around the loop over a row, and on sm_80 some addresses of the scan.
    # With 64 registers, a multiprocessor runs as many programs as it can have. With 144, for many
    # kinds of arcs, it spills most where rows of 16-bit logits are read by words.
    "rnnt_overlap_kernel": 64,
    # The pairs of the candidates of a beam of 8, in fp64; a beam of 4 spills nothing.
    "transducer_beam_kernel": 1400,
    # Around the loops over a row and in the loop over its reads: with 64 registers, more programs
    # load at the same time. The loops over blocks spill nothing.
    "truncated_stats_kernel": 144,
    # The spills stand before the loops of the fast scan (48 at most), and in the rare scan in fp64.
    # With fewer registers, more programs run at the same time.
    "ctc_posterior_scan_kernel": 168,
}
# The same for Triton 3.7 to 3.9. Since 3.8 a thread sums its values as a tree, which holds more of
# them at a time than a running sum does. With smaller blocks the kernels of 3.6 would be slower.
SPILLED_SINCE_3_7 = {
    **SPILLED,
    **dict.fromkeys(
        (
            "chain_boundaries_kernel",
            "chain_scan_kernel",
            "ctc_crf_beam_search_kernel",
            "ctc_crf_calls_kernel",
            "linear_chain_prepare_kernel",
            "linear_chain_viterbi_kernel",
        ),
        8,
    ),
    # With 1,024 states a program has 32 warps, so that a thread has 64 registers.
    "chain_expectation_gradient_kernel": 24,
    "chain_gradient_kernel": 16,
    "chain_resident_gradient_kernel": 16,
    "chain_viterbi_kernel": 16,
    # Triton 3.9 has the most of these two: 328 with the sigmoid, where 3.7 has 144, and 48 without.
    "contrastive_product_gradient_kernel": 328,
    "contrastive_product_scan_kernel": 48,
    "cross_entropy_row_kernel": 16,
    # In the scan of log Z alone, with the weights of 128 states in registers.
    "linear_chain_resident_scan_kernel": 24,
    "linear_chain_scan_kernel": 16,
    "parallel_row_kernel": 24,
    # In the loop over a row's last blocks, which need a mask. The one over whole blocks has none.
    "linear_accumulate_kernel": 24,
    "token_stats_kernel": 88,
    # In a loop of 435 instructions, 17 of which move spilled values.
    "rnnt_overlap_kernel": 80,
    # Once in a row.
    "softmax_row_kernel": 144,
    "softmax_backward_row_kernel": 160,
    # Numbers of the row, around the loops over a row and one or two in them.
    "truncated_stats_kernel": 320,
    # In the rare scan in fp64.
    "ctc_posterior_scan_kernel": 224,
}


def test_every_kernel_is_launched_by_calls_in_every_dtype() -> None:
    found: dict[str, set[torch.dtype]] = {name: set() for name in NAMES}
    for dtype in (torch.bfloat16, torch.float32):
        for launch in recorded("13.0")[dtype]:
            found[launch.kernel.__name__].add(dtype)
    few = {name: dtypes for name, dtypes in found.items() if len(dtypes) < 2}
    assert few == {
        "divergence_mixture_row_kernel": {torch.bfloat16},  # which serves 16-bit logits alone
        "linear_chain_best_ties_kernel": {torch.float32},  # half types are scanned one way
        # These serve half types alone.
        "contrastive_product_gradient_kernel": {torch.bfloat16},
        "contrastive_product_scan_kernel": {torch.bfloat16},
        "low_rank_gradients_kernel": {torch.bfloat16},
        "low_rank_sums_kernel": {torch.bfloat16},
    }


def bound_on_spills(kernel: str) -> int:
    """Return the bytes of stack that a thread of a kernel may have."""
    is_later = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
    return (SPILLED_SINCE_3_7 if is_later else SPILLED).get(kernel, 0)


CHOSEN_TARGETS = os.environ.get("PARTITA_TEST_TARGETS", " ".join(TARGETS)).split()

# It takes minutes, so it comes first: other workers compile the rest meanwhile.
SLOWEST = ("ctc_posterior_scan_kernel", "gfx942")


@pytest.mark.parametrize(
    ("kernel", "name"),
    sorted(
        (
            (kernel, name)
            for kernel in NAMES
            for name in CHOSEN_TARGETS
            if name != "gfx942" or not kernel.startswith(NVIDIA_ONLY)
            if name != "sm_80" or not kernel.startswith(HOPPER_ONLY)
            if name == "sm_90" or not kernel.startswith(SM_90_ONLY)
        ),
        key=lambda pair: pair != SLOWEST,
    ),
)
def test_compiles(
    kernel: str, name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Check shared memory for all variants, and spills for plain ones.

    The terms of the options spill where registers are limited, and no bound on that follows from
    anything. fp64 needs two registers for each number, and is no dtype of training. Mixtures of
    dtypes have the code of one dtype apart from their loads.
    """
    target, limit = TARGETS[name]
    bound, sizes, spills = bound_on_spills(kernel), [0], []
    for launch in chosen(kernel, name):
        result = compiled(launch, target)
        assert result.metadata.shared <= limit, str(launch)
        if launch.plain and not launch.is_mixture and launch.dtype != torch.float64:
            size = spilled(result, target, tmp_path)
            sizes.append(size)
            spills += [f"{size} in {launch}"] * (size > bound)
    record_property("spilled", max(sizes))
    assert not spills, "\n".join(spills)


@pytest.mark.parametrize(
    "kernel", [name for name in NAMES if name.startswith(("ctc_b", "ctc_crf_", "ctc_collapse"))]
)
def test_compiles_where_numbers_are_1(kernel: str) -> None:
    """Triton makes a constant of an argument that is 1, which has no methods of a tensor."""
    for launch in chosen(kernel, "sm_90")[:1]:
        args = tuple(1 if type(arg) is int else arg for arg in launch.args)
        assert compiled(launch._replace(args=args), TARGETS["sm_90"].target).asm["ptx"]


def test_checks_of_overflow_would_not_change_the_machine_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton drops these checks outside of its debug mode, so kernels are compiled without."""
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")  # The table of lines differs.
    launch = chosen("ctc_collapse_kernel", "sm_90")[0]
    assert launch.options["sanitize_overflow"] is False
    checked = launch._replace(options={**launch.options, "sanitize_overflow": True})
    without, with_checks = (
        compiled(each, TARGETS["sm_90"].target).asm for each in (launch, checked)
    )
    assert len(without["source"]) < len(with_checks["source"])
    assert without["cubin"] == with_checks["cubin"]


def carried_values(ir: str) -> list[int]:
    """Return how many values each loop of a kernel carries from turn to turn."""
    return [int(number) for number in re.findall(r":(\d+) = scf\.for", ir)]


def test_no_pass_drops_a_carried_value() -> None:
    """Triton 3.6 drops values of a loop that only decide about the turns of an inner loop."""
    for launch in chosen("semi_markov_scan_kernel", "sm_90")[:2]:
        asm = compiled(launch, TARGETS["sm_90"].target).asm
        before, after = (carried_values(asm[stage]) for stage in ("ttir", "ttgir"))
        assert len(before) == len(after) == 2
        assert all(a <= b for a, b in zip(before, after, strict=True))


def test_constants_of_fp64_kernels_have_all_digits() -> None:
    """A constant that a device function returns is rounded to fp32, but not by the interpreter."""
    found = [item for item in launches("13.0")["rnnt_nodes_kernel"] if item.dtype == torch.float64]
    assert found
    for launch in found:
        ir = compiled(launch, TARGETS["sm_90"].target).asm["ttir"]
        assert "1.4426950408889634" in ir
        assert "1.4426950216293335" not in ir


def test_aligned_rows_are_read_in_vectors() -> None:
    """Triton forgets the alignment that `tl.multiple_of` gives a scalar."""
    of_kinds = {
        item.options["CODE"]: item
        for item in launches("13.0")["rnnt_overlap_kernel"]
        if item.dtype == torch.bfloat16 and not item.options["TILE"].edges
    }
    assert len(of_kinds) == 2
    for launch in of_kinds.values():
        assert launch.options["TILE"].vector == 8
        assert "ld.global.v4.b32" in compiled(launch, TARGETS["sm_90"].target).asm["ptx"]


def test_scans_that_wait_read_words_by_volatile_loads() -> None:
    """Other loads may find old words in the cache of a multiprocessor forever."""
    # A carry, and the arcs of a block of rows: 2 kinds of 4 rows each, or 9 kinds of 2 rows each.
    of_kinds = {item.options["CODE"]: item for item in launches("13.0")["rnnt_overlap_kernel"]}
    for words, (_, launch) in zip((1 + 2 * 4, 1 + 9 * 2), sorted(of_kinds.items()), strict=True):
        ptx = compiled(launch, TARGETS["sm_90"].target).asm["ptx"]
        # Both in the loop that waits, and before it for the block after.
        assert len(re.findall(r"ld\.volatile\.global", ptx)) >= 2 * words


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("C", [3, 24, 70])
def test_ends_of_chains_compile(C: int, transposed: bool) -> None:
    """Triton 3.6 loses a stride of 1 that a loop reads from a tuple in a tuple."""
    found: list[Launch] = []
    with recording(found, "13.0"):
        call_chains_with_ends(C, transposed)
    for launch in {launch.kernel.__name__: launch for launch in found}.values():
        compiled(launch, TARGETS["sm_90"].target)
