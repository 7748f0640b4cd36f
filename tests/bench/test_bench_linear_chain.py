"""The benchmark of dense linear chains: verdicts, sizes, and the calls of the peers."""

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
from helpers.bench import CPU, SETTINGS, devices, run
from torch import Tensor, nn

from partita import LinearChain
from partita.bench import linear_chain
from partita.bench.case import Buffers, Provider
from partita.bench.providers import PARTITA, TORCH

LOGZ = linear_chain.LogZ("linear_chain", torch.float32, 20, 3, 6)
VITERBI = linear_chain.Viterbi("linear_viterbi", torch.float32, 20, 3, 6)


def named(name: str, function: object) -> Provider:
    return Provider(name, {"linear_chain": lambda: function, "linear_viterbi": lambda: function})


def inputs_of_a_case() -> linear_chain.LinearInputs:
    return LOGZ.inputs(Buffers(CPU.device))


def test_sizes() -> None:
    def shapes(**changes: object) -> list[tuple[int, ...]]:
        settings = dataclasses.replace(
            SETTINGS, **{"columns": (), "elements": None, "dtypes": (torch.float32,), **changes}
        )
        cases = linear_chain.linear_chain_cases(settings)
        return [case.shape for case in cases if isinstance(case, linear_chain.LogZ)]

    gpu = torch.device("cuda")
    assert shapes(device=gpu, quick=False) == list(map(tuple, linear_chain.FULL_SIZES))
    assert shapes(device=gpu) == [(100, 64, 20), (500, 32, 50)]
    assert shapes(quick=False) == [(100, 64, 20), (500, 32, 50), (100_000, 1, 16)]
    assert shapes() == [(40, 8, 10), (300, 1, 16)]
    assert shapes(device=gpu, columns=(7,)) == [(100, 64, 7)]
    assert shapes(elements=800) == [(40, 2, 10), (50, 1, 16)]
    assert shapes(elements=1) == [(2, 1, 10), (2, 1, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@devices
def test_ours_and_the_loop_are_right(device: str, dtype: torch.dtype) -> None:
    cases = [dataclasses.replace(case, dtype=dtype) for case in (LOGZ, VITERBI)]
    machine = dataclasses.replace(CPU, device=torch.empty(0, device=device).device)
    rows = run(iter(cases), PARTITA, TORCH, machine=machine)
    parts = ("inference", "forward", "backward", "total")
    names = ("partita", "torch")
    expected = [("linear_chain", name, part) for name in names for part in parts] + [
        ("linear_viterbi", name, "inference") for name in names
    ]
    assert [(row.case.op, row.provider, row.part) for row in rows if row.timing] == expected
    assert all(row.error <= (1e-6 if row.provider == "partita" else 1e-4) for row in rows)


def wrong_counts(emissions: Tensor, transitions: Tensor, *ends: Tensor) -> Tensor:
    """log Z whose gradient with respect to the transitions is a little too large."""
    logz = LinearChain(emissions, transitions, *ends).logz()
    return logz + 1e-3 * (transitions - transitions.detach()).sum()


def test_expected_counts_are_judged() -> None:
    (row,) = run(iter([LOGZ]), named("partita", wrong_counts))
    assert row.timing is None and row.note.endswith(", allowed 2e-06")
    assert all(row.timing for row in run(iter([LOGZ]), named("another", wrong_counts)))


@pytest.mark.parametrize("state", [-1, 6])
def test_a_path_that_is_not_the_best_is_wrong(state: int) -> None:
    def broken(*inputs: Tensor) -> Tensor:
        states = linear_chain.loop_viterbi(*inputs)
        states[3, 1] = state
        return states

    def another(emissions: Tensor, *others: Tensor) -> Tensor:
        return linear_chain.loop_viterbi(-emissions, *others)

    for function in (broken, another):
        (row,) = run(iter([VITERBI]), named("another", function))
        assert row.timing is None and row.note.startswith("wrong: ")


def test_long_sequences_are_beyond_a_loop() -> None:
    inputs = inputs_of_a_case()
    assert linear_chain.beyond_loop(inputs) is None
    long = inputs._replace(emissions=torch.empty(10_001, 1, 2))
    assert linear_chain.beyond_loop(long) == "a loop of more than 10,000 steps"
    assert linear_chain.beyond_torch_struct(inputs) is None
    short, large = torch.empty(1, 3, 6), torch.empty(1, device="meta").expand(2**10, 2, 2**11)
    for emissions, reason in ((short, "two tokens"), (large, "several times")):
        assert reason in linear_chain.beyond_torch_struct(inputs._replace(emissions=emissions))


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
def test_calls_of_the_peers(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes: dict[str, Any] = {"CRF": FakeCRF, "LinearChainCRF": FakeLinearChainCRF}
    for module in ("torchcrf", "torch_struct"):
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**fakes))
    logz = getattr(linear_chain, f"{library}_logz")()
    viterbi = getattr(linear_chain, f"{library}_viterbi")()
    rows = run(iter([LOGZ]), named("another", logz)) + run(
        iter([VITERBI]), named("another", viterbi)
    )
    assert [row.note for row in rows] == [""] * 5
