"""The benchmark of chains: tables of sources, sizes, verdicts, and calls of the peers."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.bench import (
    inputs_of,
    installed,
    machine_with,
    note_of_wrong,
    row_of,
    run,
    run_as,
    sparse_logz,
    stand_in,
    with_gradient_times,
)
from helpers.rows import devices
from torch import Tensor, nn

import partita
from partita.bench import chain, linear_chain, picture, providers
from partita.bench.case import Case, needs_gpu
from partita.bench.providers import PARTITA, TORCH

CHAINS, JUDGED = 8, (0, 2, 4, 7)
LOGZ = chain.LogZ("chain", torch.float32, 20, CHAINS, 16, chain.kmers)
VITERBI = chain.Viterbi("viterbi", torch.float32, 20, CHAINS, 16, chain.kmers)
LINEAR_LOGZ = linear_chain.LogZ("linear_chain", torch.float32, 20, 3, 6)
LINEAR_VITERBI = linear_chain.Viterbi("linear_viterbi", torch.float32, 20, 3, 6)
SEGMENTS = linear_chain.SegmentsLogZ("semi_markov", torch.float32, 9, 2, 3, 4)
NBEST_SEGMENTS = linear_chain.SegmentsNBest("semi_markov_nbest", torch.float32, 9, 2, 3, 4)
BEST_SEGMENTS = linear_chain.SegmentsViterbi("semi_markov_viterbi", torch.float32, 9, 2, 3, 4)


def test_tables() -> None:
    for length in (1, 3, 5):
        assert torch.equal(chain.kmers(4**length), partita.debruijn_source(4, length))
    assert (torch.bincount(chain.kmers(33).flatten()) == 5).all()
    assert chain.alignment(4).tolist() == [[0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 2, 1]]
    for table, slots in ((chain.kmers, 5), (chain.alignment, 3)):
        case = dataclasses.replace(LOGZ, table=table)
        assert (case.shape, case.bytes) == ((20, CHAINS, 16, slots), 4 * 20 * CHAINS * 16 * slots)
        inputs = inputs_of(case)
        shapes = tuple(x.shape for x in (inputs.scores, inputs.source, inputs.initial))
        assert shapes == (case.shape, (16, slots), (CHAINS, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("logz", "viterbi"),
    [
        (LOGZ, VITERBI),
        [dataclasses.replace(case, table=chain.alignment) for case in (LOGZ, VITERBI)],
        (LINEAR_LOGZ, LINEAR_VITERBI),
        (SEGMENTS, BEST_SEGMENTS),
    ],
    ids=["kmers", "alignment", "linear", "semi-Markov"],
)
@devices
def test_ours_and_the_loop_are_right(
    device: str, logz: Case, viterbi: Case, dtype: torch.dtype
) -> None:
    cases = [dataclasses.replace(case, dtype=dtype) for case in (logz, viterbi)]
    rows = run(cases, PARTITA, TORCH, machine=machine_with(device))
    names, parts = ("partita", "torch"), ("inference", "forward", "backward", "total")
    paths = names if logz is not SEGMENTS else names[:1]  # PyTorch has no loop for segments
    assert [(row.case.op, row.provider, row.part) for row in rows if row.timing] == [
        *((logz.op, name, part) for name in names for part in parts),
        *((viterbi.op, name, "inference") for name in paths),
    ]
    assert all(row.error <= (1e-6 if row.provider == "partita" else 1e-4) for row in rows)


def test_the_best_paths_are_judged() -> None:
    (row,) = run([NBEST_SEGMENTS], PARTITA)
    assert row.timing and row.error <= 1e-6

    def twice(*inputs: Tensor) -> Any:
        best = partita.SemiMarkovChain(*inputs).nbest(linear_chain.PATHS)
        return [torch.cat([part[:1], part[:-1]]) for part in best[1:]]

    def worse(*inputs: Tensor) -> Any:
        best = partita.SemiMarkovChain(*inputs).nbest(linear_chain.PATHS + 1)
        return [part[1:] for part in best[1:]]

    assert "expected 0" in note_of_wrong(NBEST_SEGMENTS, twice)
    note_of_wrong(NBEST_SEGMENTS, worse, "partita")


@pytest.mark.parametrize("table", [chain.kmers, chain.alignment])
def test_the_truth_of_long_chains(
    table: chain.SourceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scans from both ends give the truth of long chains; a loop in PyTorch refuses them."""
    for case in (LOGZ, VITERBI):
        case = dataclasses.replace(case, table=table)
        inputs, found = inputs_of(case), []
        for limit in (20, 19):
            monkeypatch.setattr(chain, "MAX_REFERENCE_STEPS", limit)
            truth = case.standard(inputs)
            if isinstance(case, chain.LogZ):
                truth = truth.result, truth.gradients[0].truth
            found.append(truth)
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert TORCH.refusal(case.op, inputs) is None
        monkeypatch.setattr(chain, "MAX_STEPS", 19)
        assert TORCH.refusal(case.op, inputs) == "a loop of more than 19 steps"
        monkeypatch.undo()


def test_the_bound_of_peers_is_looser_than_the_contract() -> None:
    slightly, badly = (with_gradient_times(factor, partita.logz) for factor in (1.001, 1.05))
    assert all(row.timing for row in run_as("another", LOGZ, slightly))
    assert note_of_wrong(LOGZ, slightly, "partita").endswith(", allowed 2e-06")
    assert note_of_wrong(LOGZ, badly).endswith(", allowed 0.01")


def test_every_chain_counts() -> None:
    """Chains that are not compared with fp64 are checked too."""
    inputs = inputs_of(LOGZ)
    assert tuple(chain.judged(inputs).tolist()) == JUDGED
    for factor in (0.5, torch.nan):
        wrong = with_gradient_times(factor, partita.logz, where=(slice(None), 3))
        assert ", 3] (got " in note_of_wrong(LOGZ, wrong)


def wrong_counts(emissions: Tensor, transitions: Tensor, *others: Tensor) -> Tensor:
    """log Z whose gradient with respect to the transitions is a little too large."""
    make = partita.LinearChain if len(others) == 2 else partita.SemiMarkovChain
    logz = make(emissions, transitions, *others).logz()
    return logz + 1e-3 * (transitions - transitions.detach()).sum()


def test_expected_counts_are_judged() -> None:
    assert note_of_wrong(LINEAR_LOGZ, wrong_counts, "partita").endswith(", allowed 2e-06")
    assert all(row.timing for row in run_as("another", LINEAR_LOGZ, wrong_counts))
    assert "allowed" in note_of_wrong(SEGMENTS, wrong_counts, "partita")


@pytest.mark.parametrize("step", [0, 7, 19])
@pytest.mark.parametrize("edge", [-1, 80, "unlinked"])
def test_a_broken_path_is_wrong(edge: int | str, step: int) -> None:
    def broken(*inputs: Tensor) -> Tensor:
        edges = chain.loop_viterbi(*inputs)
        edges[step] = (edges[step] + 25) % 80 if edge == "unlinked" else edge
        return edges

    note_of_wrong(VITERBI, broken)


def other_segments(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    found = partita.SemiMarkovChain(*inputs).viterbi()
    return 2 - found.states, found.starts


@pytest.mark.parametrize(
    ("case", "function"),
    [
        (VITERBI, lambda x, *others: chain.loop_viterbi(-x, *others)),
        (LINEAR_VITERBI, lambda x, *others: linear_chain.loop_viterbi(-x, *others)),
        (BEST_SEGMENTS, other_segments),
    ],
    ids=["chain", "linear", "semi-Markov"],
)
def test_a_path_that_is_not_the_best_is_wrong(case: Case, function: Callable[..., Any]) -> None:
    note_of_wrong(case, function, "another" if case is not BEST_SEGMENTS else "partita")


@pytest.mark.parametrize("state", [-1, 6])
def test_a_state_that_is_none_is_wrong(state: int) -> None:
    def broken(*inputs: Tensor) -> Tensor:
        states = linear_chain.loop_viterbi(*inputs)
        states[3, 1] = state
        return states

    note_of_wrong(LINEAR_VITERBI, broken)


def test_libraries_are_called_as_they_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def summed(*arguments: Any) -> Tensor:
        called.append(arguments[4])
        return sparse_logz(*arguments)

    for name, function in (("koi.ctc", "logZ_cu_sparse"), ("seqdist.sparse", "logZ")):
        members = {function: summed, "Log": partita.Log, "Max": partita.Max}
        stand_in(monkeypatch, name, **members)
    for name in ("koi", "seqdist"):
        called.clear()
        rows = run([LOGZ, VITERBI], installed(name))
        assert all(row.timing for row in rows) and len(rows) == 5
        assert set(called) == {partita.Log, partita.Max}


def test_what_the_libraries_cannot_take() -> None:
    def reason(source: Tensor, device: str = "cuda", dtype: Any = torch.float32) -> str | None:
        scores = SimpleNamespace(device=torch.device(device), dtype=dtype)
        return chain.beyond_fp32_kernels((scores, source))

    assert reason(chain.kmers(64)) is None
    assert reason(chain.kmers(64), device="cpu") == "needs a GPU"
    assert reason(chain.kmers(64), dtype=torch.bfloat16) == "takes fp32 scores only"
    assert reason(chain.kmers(1025)) == "takes at most 1,024 states"
    for source in (chain.alignment(5), torch.zeros(4, 3, dtype=torch.int32)):
        assert reason(source) == "takes tables only that use each source exactly 3 times"
    rows = run([LOGZ, VITERBI], *providers.choose(["koi", "seqdist"])[-2:])
    assert [row.note for row in rows] == ["refuses: needs a GPU"] * 4


def test_long_sequences_are_beyond_a_loop() -> None:
    inputs = inputs_of(LINEAR_LOGZ)
    assert linear_chain.beyond_loop(inputs) is None
    long = inputs._replace(emissions=torch.empty(10_001, 1, 2))
    assert linear_chain.beyond_loop(long) == "a loop of more than 10,000 steps"


class FakeCRF(nn.Module):
    """The parts of pytorch-crf's module that the benchmark calls, by the loops of this package."""

    def __init__(self, num_tags: int) -> None:
        super().__init__()
        for name in ("start_transitions", "end_transitions"):
            setattr(self, name, nn.Parameter(torch.zeros(num_tags)))
        self.transitions = nn.Parameter(torch.zeros(num_tags, num_tags))

    def _inputs(self, emissions: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        assert mask.dtype == torch.bool and mask.shape == emissions.shape[:2] and mask.all()
        return emissions, self.transitions, self.start_transitions, self.end_transitions

    def _compute_normalizer(self, emissions: Tensor, mask: Tensor) -> Tensor:
        return linear_chain.loop_logz(*self._inputs(emissions, mask))

    def decode(self, emissions: Tensor, mask: Tensor) -> list[list[int]]:
        return linear_chain.loop_viterbi(*self._inputs(emissions, mask)).T.tolist()


class FakeLinearChainCRF:
    """torch-struct's distribution, from `[N, T - 1, C, C]` (new, old)."""

    def __init__(self, log_potentials: Tensor) -> None:
        self.log_potentials = log_potentials

    @property
    def partition(self) -> Tensor:
        alpha = self.log_potentials.new_zeros(len(self.log_potentials), 1, 6)
        for step in self.log_potentials.unbind(1):
            alpha = (step + alpha).logsumexp(2)[:, None]
        return alpha[:, 0].logsumexp(1)

    @property
    def argmax(self) -> Tensor:
        leaf = self.log_potentials.detach().requires_grad_()
        alpha = leaf.new_zeros(len(leaf), 1, 6)
        for step in leaf.unbind(1):
            alpha = (step + alpha).amax(2)[:, None]
        return torch.autograd.grad(alpha[:, 0].amax(1).sum(), leaf)[0]


@pytest.mark.parametrize("library", ["pytorch_crf", "torch_struct"])
def test_calls_of_the_peers_of_linear_chains(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torchcrf", "torch_struct"):
        stand_in(monkeypatch, module, CRF=FakeCRF, LinearChainCRF=FakeLinearChainCRF)
    logz = getattr(linear_chain, f"{library}_logz")()
    viterbi = getattr(linear_chain, f"{library}_viterbi")()
    rows = run_as("another", LINEAR_LOGZ, logz) + run_as("another", LINEAR_VITERBI, viterbi)
    assert [row.note for row in rows] == [""] * 5


def test_torch_struct_gets_segments_as_potentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in sums over the segments as torch-struct does, which is not installed."""

    class SemiMarkovCRF:
        def __init__(self, potentials: Tensor) -> None:
            N, T, K, C, _ = potentials.shape
            before: list[Any] = [torch.zeros(N, C, dtype=potentials.dtype)]
            for t in range(1, T + 1):
                ways = [
                    (potentials[:, t - k, k] + before[t - k][:, None]).logsumexp(2)
                    for k in range(1, min(K - 1, t) + 1)
                ]
                before.append(torch.stack(ways).logsumexp(0))
            self.partition = before[-1].logsumexp(1)

    stand_in(monkeypatch, "torch_struct", SemiMarkovCRF=SemiMarkovCRF)
    inputs = inputs_of(SEGMENTS)
    found = linear_chain.torch_struct_segments()(*inputs)
    torch.testing.assert_close(found, linear_chain.segments_logz(*inputs))


def test_flash_semicrf_gets_prefix_sums_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in sums over the segments as flash-semicrf does, which is not installed."""

    def semi_crf_streaming_forward(
        sums: Tensor,
        transitions: Tensor,
        durations: Tensor,
        lengths: Tensor,
        longest: int,
        proj_start: Tensor,
        proj_end: Tensor,
    ) -> Tensor:
        before = [torch.zeros_like(sums[:, 0])]
        for t in range(1, int(lengths[0]) + 1):
            ways = []
            for k in range(1, min(longest, t) + 1):
                segment = sums[:, t] - sums[:, t - k] + durations[k - 1]
                segment = segment + proj_start[:, t - k] + proj_end[:, t - 1]
                ways.append((before[t - k][:, :, None] + transitions).logsumexp(1) + segment)
            before.append(torch.stack(ways).logsumexp(0))
        return before[-1].logsumexp(1)

    members = {"semi_crf_streaming_forward": semi_crf_streaming_forward}
    stand_in(monkeypatch, "flash_semicrf", **members)
    inputs = inputs_of(SEGMENTS)
    found = linear_chain.flash_semicrf_logz()(*inputs)
    torch.testing.assert_close(found, linear_chain.segments_logz(*inputs))
    assert needs_gpu(inputs) == "needs a GPU"


def test_a_panel_for_each_dtype() -> None:
    half = dataclasses.replace(LOGZ, dtype=torch.bfloat16)
    rows = [
        row_of("partita", LOGZ, 1.0, "inference"),
        row_of("partita", LOGZ, 1.0),
        row_of("partita", half, 1.0),
        row_of("partita", VITERBI, 1.0, "inference"),
        row_of("partita", LOGZ, None),
    ]
    assert picture.panels(rows) == [rows[1:2], rows[2:3]]
    assert picture.panels(rows[3:]) == []
