"""The benchmark of chains: tables of sources, sizes, verdicts, and calls of the peers."""

import dataclasses
import sys
import types

import pytest
import torch
from helpers.bench import CPU, SETTINGS, devices, run
from torch import Tensor

import partita
from partita.bench import chain, picture, providers
from partita.bench.case import Buffers, Provider
from partita.bench.measure import Timing
from partita.bench.providers import PARTITA, TORCH
from partita.bench.runner import Row

CHAINS, JUDGED = 8, (0, 2, 4, 7)
LOGZ = chain.LogZ("chain", torch.float32, 20, CHAINS, 16, chain.kmers)
VITERBI = chain.Viterbi("viterbi", torch.float32, 20, CHAINS, 16, chain.kmers)


def named(name: str, function: object) -> Provider:
    return Provider(name, {"chain": lambda: function, "viterbi": lambda: function})


def off_by(factor: float, chains: slice = slice(None)) -> object:
    """log Z whose gradient is `factor` times what it should be."""

    def function(scores: Tensor, *others: Tensor) -> Tensor:
        total = partita.logz(scores, *others)
        factors = torch.ones_like(total)
        factors[chains] = factor
        return total.detach() + factors * (total - total.detach())

    return function


def test_tables() -> None:
    for length in (1, 3, 5):
        assert torch.equal(chain.kmers(4**length), partita.debruijn_source(4, length))
    assert (torch.bincount(chain.kmers(33).flatten()) == 5).all()
    assert chain.alignment(4).tolist() == [[0, -1, -1], [1, 0, -1], [2, 1, 0], [3, 2, 1]]
    for table, slots in ((chain.kmers, 5), (chain.alignment, 3)):
        case = dataclasses.replace(LOGZ, table=table)
        assert (case.shape, case.bytes) == ((20, CHAINS, 16, slots), 4 * 20 * CHAINS * 16 * slots)
        inputs = case.inputs(Buffers(CPU.device))
        assert (inputs.scores.shape, inputs.source.shape, inputs.initial.shape) == (
            case.shape,
            (16, slots),
            (CHAINS, 16),
        )


def test_sizes() -> None:
    def shapes(**changes: object) -> list[tuple[int, ...]]:
        settings = dataclasses.replace(
            SETTINGS, **{"columns": (), "elements": None, "dtypes": (torch.float32,), **changes}
        )
        return [case.shape for case in chain.chain_cases(settings) if isinstance(case, chain.LogZ)]

    gpu = torch.device("cuda")
    full = [
        (800, 64, 64, 5),
        (800, 64, 256, 5),
        (800, 64, 1024, 5),
        (2000, 128, 256, 5),
        (2000, 64, 1024, 5),
        (500, 128, 201, 3),
        (100_000, 1, 16, 5),
        (1_000_000, 1, 4, 4),
    ]
    assert shapes(device=gpu, quick=False) == full
    assert shapes(device=gpu) == full[:2]
    assert shapes(quick=False) == [(500, 8, 64, 5), (200, 4, 1024, 5), (500, 8, 201, 3)]
    assert shapes() == [(100, 4, 64, 5), (100, 4, 256, 5)]
    assert shapes(device=gpu, columns=(16, 100)) == [(800, 64, 16, 5), (800, 64, 100, 5)]
    assert shapes(elements=2 * 100 * 64 * 5) == [(100, 2, 64, 5), (50, 1, 256, 5)]
    assert shapes(elements=1) == [(1, 1, 64, 5), (1, 1, 256, 5)]
    cases = list(chain.chain_cases(dataclasses.replace(SETTINGS, columns=())))
    assert [(case.op, case.dtype) for case in cases] == [
        (op, dtype) for dtype in SETTINGS.dtypes for op in ("chain", "viterbi") for _ in range(2)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("table", [chain.kmers, chain.alignment])
@devices
def test_ours_and_the_loop_are_right(
    device: str, table: chain.SourceTable, dtype: torch.dtype
) -> None:
    cases = [dataclasses.replace(case, table=table, dtype=dtype) for case in (LOGZ, VITERBI)]
    rows = run(
        iter(cases),
        PARTITA,
        TORCH,
        machine=dataclasses.replace(CPU, device=torch.empty(0, device=device).device),
    )
    logz = ("inference", "forward", "backward", "total")
    expected = [("chain", name, part) for name in ("partita", "torch") for part in logz] + [
        ("viterbi", name, "inference") for name in ("partita", "torch")
    ]
    assert [(row.case.op, row.provider, row.part) for row in rows if row.timing] == expected
    assert all(row.error <= (1e-6 if row.provider == "partita" else 1e-4) for row in rows)


@pytest.mark.parametrize("table", [chain.kmers, chain.alignment])
def test_the_truth_of_long_chains(
    table: chain.SourceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scans from both ends give the truth of long chains; a loop in PyTorch refuses them."""
    for case in (LOGZ, VITERBI):
        case = dataclasses.replace(case, table=table)
        inputs, found = case.inputs(Buffers(CPU.device)), []
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
    slightly, badly = off_by(1.001), off_by(1.05)
    assert all(row.timing for row in run(iter([LOGZ]), named("another", slightly)))
    for name, function, allowed in (("partita", slightly, "2e-06"), ("another", badly, "0.01")):
        (row,) = run(iter([LOGZ]), named(name, function))
        assert (
            row.timing is None
            and row.note.startswith("wrong: ")
            and row.note.endswith(f", allowed {allowed}")
        )


def test_every_chain_counts() -> None:
    """Chains that are not compared with fp64 are checked too."""
    inputs = LOGZ.inputs(Buffers(CPU.device))
    assert tuple(chain.judged(inputs)[0].tolist()) == JUDGED
    for factor in (0.5, torch.nan):
        (row,) = run(iter([LOGZ]), named("another", off_by(factor, slice(3, 4))))
        assert row.timing is None and row.note.startswith("wrong: ") and ", 3] (got " in row.note


@pytest.mark.parametrize("step", [0, 7, 19])
@pytest.mark.parametrize("edge", [-1, 80, "unlinked"])
def test_a_broken_path_is_wrong(edge: int | str, step: int) -> None:
    def broken(*inputs: Tensor) -> Tensor:
        edges = chain.loop_viterbi(*inputs)
        edges[step] = (edges[step] + 25) % 80 if edge == "unlinked" else edge
        return edges

    (row,) = run(iter([VITERBI]), named("another", broken))
    assert row.timing is None and row.note.startswith("wrong: ")


def test_a_path_that_is_not_the_best_is_wrong() -> None:
    (row,) = run(
        iter([VITERBI]),
        named("another", lambda scores, *others: chain.loop_viterbi(-scores, *others)),
    )
    assert row.timing is None and row.note.startswith("wrong: ")


def test_libraries_are_called_as_they_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def summed(
        scores: Tensor,
        source: Tensor,
        initial: Tensor,
        final: Tensor,
        semiring: partita.Semiring,
        slots: int,
    ) -> Tensor:
        assert (scores.dtype, source.dtype, initial.dtype, slots) == (
            torch.float32,
            torch.int32,
            torch.float32,
            1,
        )
        called.append(semiring)
        return partita.logz(scores, source, initial, final, semiring)

    for name, function in (("koi.ctc", "logZ_cu_sparse"), ("seqdist.sparse", "logZ")):
        monkeypatch.setitem(
            sys.modules,
            name,
            types.SimpleNamespace(**{function: summed}, Log=partita.Log, Max=partita.Max),
        )
    for peer in providers.choose(["koi", "seqdist"])[-2:]:
        called.clear()
        rows = run(
            iter([LOGZ, VITERBI]),
            dataclasses.replace(peer, packages=(), beyond={}),
        )
        assert all(row.timing for row in rows) and len(rows) == 5
        assert set(called) == {partita.Log, partita.Max}


def test_what_the_libraries_cannot_take() -> None:
    def reason(
        source: Tensor, device: str = "cuda", dtype: torch.dtype = torch.float32
    ) -> str | None:
        return chain.beyond_fp32_kernels(
            (types.SimpleNamespace(device=torch.device(device), dtype=dtype), source)
        )

    assert reason(chain.kmers(64)) is None
    assert reason(chain.kmers(64), device="cpu") == "needs a GPU"
    assert reason(chain.kmers(64), dtype=torch.bfloat16) == "takes fp32 scores only"
    assert reason(chain.kmers(1025)) == "takes at most 1,024 states"
    for source in (chain.alignment(5), torch.zeros(4, 3, dtype=torch.int32)):
        assert reason(source) == "takes tables only that use each source exactly 3 times"
    rows = run(iter([LOGZ, VITERBI]), *providers.choose(["koi", "seqdist"])[-2:])
    assert [row.note for row in rows] == ["refuses: needs a GPU"] * 4


def test_a_panel_for_each_dtype() -> None:
    def row(case: chain.ChainCase, part: str, timing: Timing | None) -> Row:
        return Row(case, "partita", part, timing, 0.0, None, "")

    half = dataclasses.replace(LOGZ, dtype=torch.bfloat16)
    time = Timing.of([1.0])
    rows = [
        row(LOGZ, "inference", time),
        row(LOGZ, "total", time),
        row(half, "total", time),
        row(VITERBI, "inference", time),
        row(LOGZ, "", None),
    ]
    assert [panel.rows for panel in picture.panels(rows)] == [rows[1:2], rows[2:3]]
    assert picture.panels(rows[3:]) == []
