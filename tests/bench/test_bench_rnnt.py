"""The benchmark of transducers: its sizes, and how results are judged."""

import dataclasses

import pytest
import torch
from helpers.bench import CPU, SETTINGS, run
from torch import Tensor

from partita.bench import rnnt
from partita.bench.case import Buffers, Provider
from partita.bench.providers import PARTITA, PEERS, TORCH

CASES = (
    rnnt.RNNT("rnnt", torch.float32, 2, 8, 3, 5),
    rnnt.TDT("tdt", torch.float32, 2, 8, 3, 5),
    rnnt.LinearRNNT("linear_rnnt", torch.float32, 2, 8, 3, 5, 4),
)


def test_sizes() -> None:
    def shapes(op: str, **changes: object) -> list[tuple[int, ...]]:
        settings = dataclasses.replace(
            SETTINGS, **{"columns": (), "elements": None, "dtypes": (torch.float32,), **changes}
        )
        return [case.shape for case in rnnt.rnnt_cases(settings) if case.op == op]

    gpu = torch.device("cuda")
    full = shapes("rnnt", device=gpu, quick=False)
    assert full[0] == (8, 200, 41, 500) and len(full) == 4
    assert shapes("rnnt", device=gpu) == full[:2]
    assert shapes("tdt") == [(2, 20, 7, 32), (1, 12, 5, 64)]
    assert shapes("linear_rnnt", quick=False) == [(2, 60, 21, 100), (1, 150, 41, 256)]
    assert shapes("rnnt", device=gpu, columns=(1, 100)) == [(8, 200, 41, 2), (8, 200, 41, 100)]
    assert shapes("rnnt", elements=2048)[0] == (1, 9, 7, 32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op)
def test_ours_and_pytorch_are_right(case: rnnt.RNNT) -> None:
    rows = run(iter([case]), PARTITA, TORCH)
    assert [row.provider for row in rows if row.part == "total"] == ["partita", "torch"]
    assert all(row.error < 1e-6 for row in rows)


def test_a_wrong_gradient_is_found() -> None:
    def function(logits: Tensor, *others: Tensor) -> Tensor:
        scaled = logits.detach() + 1.1 * (logits - logits.detach())
        return PARTITA.ops["rnnt"]()(scaled, *others)

    (row,) = run(iter([CASES[0]]), Provider("another", {"rnnt": lambda: function}))
    assert row.timing is None and row.note.startswith("wrong: ")


def test_peers_refuse_what_they_cannot_take() -> None:
    peers = {peer.name: peer for peer in PEERS}
    inputs = CASES[0].inputs(Buffers(CPU.device))
    assert peers["warprnnt"].refusal("rnnt", inputs) == "needs a GPU"
    assert peers["torchaudio"].refusal("rnnt", inputs) is None
