"""The benchmark of semi-Markov chains: verdicts, sizes, and the calls of the peers."""

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
from helpers.bench import CPU, SETTINGS, run
from torch import Tensor

import partita
from partita.bench import semi_markov
from partita.bench.case import Buffers, Provider, needs_gpu
from partita.bench.providers import PARTITA, TORCH

LOGZ = semi_markov.LogZ("semi_markov", torch.float32, 9, 2, 3, 4)
VITERBI = semi_markov.Viterbi("semi_markov_viterbi", torch.float32, 9, 2, 3, 4)


def named(name: str, function: object) -> Provider:
    return Provider(name, {op: lambda: function for op in ("semi_markov", "semi_markov_viterbi")})


def test_sizes() -> None:
    def shapes(**changes: object) -> list[tuple[int, ...]]:
        settings = dataclasses.replace(
            SETTINGS, **{"columns": (), "elements": None, "dtypes": (torch.float32,), **changes}
        )
        cases = semi_markov.semi_markov_cases(settings)
        return [case.shape for case in cases if isinstance(case, semi_markov.LogZ)]

    assert shapes(device=torch.device("cuda"), quick=False)[0] == (1000, 32, 24)
    assert shapes() == [(40, 4, 6)]
    assert shapes(elements=100) == [(16, 1, 6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ours_and_the_loop_are_right(dtype: torch.dtype) -> None:
    cases = [dataclasses.replace(case, dtype=dtype) for case in (LOGZ, VITERBI)]
    rows = run(iter(cases), PARTITA, TORCH)
    assert {(row.case.op, row.provider) for row in rows if row.timing} == {
        ("semi_markov", "partita"),
        ("semi_markov", "torch"),
        ("semi_markov_viterbi", "partita"),
    }
    assert all(row.error <= (1e-6 if row.provider == "partita" else 1e-4) for row in rows)


def test_wrong_gradients_and_paths_are_found() -> None:
    def counts(emissions: Tensor, transitions: Tensor, durations: Tensor, *ends: Tensor) -> Tensor:
        logz = partita.SemiMarkovChain(emissions, transitions, durations, *ends).logz()
        return logz + 1e-3 * (durations - durations.detach()).sum()

    def path(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        found = partita.SemiMarkovChain(*inputs).viterbi()
        return 2 - found.states, found.starts

    for case, function in ((LOGZ, counts), (VITERBI, path)):
        (row,) = run(iter([case]), named("partita", function))
        assert row.timing is None and "allowed" in row.note


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

    module = types.ModuleType("torch_struct")
    module.SemiMarkovCRF = SemiMarkovCRF
    monkeypatch.setitem(sys.modules, "torch_struct", module)
    inputs = LOGZ.inputs(Buffers(CPU.device))
    found = semi_markov.torch_struct_logz()(*inputs)
    torch.testing.assert_close(found, semi_markov.loop_logz(*inputs))
    assert semi_markov.beyond_torch_struct(inputs) is None
    large = inputs._replace(durations=torch.zeros(10_000, 3))
    assert "for each step" in semi_markov.beyond_torch_struct(large)


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

    module = types.ModuleType("flash_semicrf")
    module.semi_crf_streaming_forward = semi_crf_streaming_forward
    monkeypatch.setitem(sys.modules, "flash_semicrf", module)
    inputs = LOGZ.inputs(Buffers(CPU.device))
    found = semi_markov.flash_semicrf_logz()(*inputs)
    torch.testing.assert_close(found, semi_markov.loop_logz(*inputs))
    assert needs_gpu(inputs) == "needs a GPU"
