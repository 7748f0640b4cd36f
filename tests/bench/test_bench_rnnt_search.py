"""The benchmark of searches of transducers: their tokens are known."""

from typing import Any

import pytest
import torch
from helpers.bench import note_of_wrong, run

from partita.bench import rnnt_search
from partita.bench.providers import PARTITA

OPS = ("rnnt_greedy", "tdt_greedy", "rnnt_beam")


def search(op: str, dtype: torch.dtype = torch.float32) -> rnnt_search.Search:
    return rnnt_search.Search(op, dtype, 20, 3, 4, 80, 128, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ours_find_the_tokens(dtype: torch.dtype) -> None:
    rows = run([search(op, dtype) for op in OPS], PARTITA)
    assert [bool(row.timing) for row in rows] == [True] * 3
    assert [row.error for row in rows] == [0.0] * 3


def test_other_tokens_are_found() -> None:
    def shorter(inputs: rnnt_search.SearchInputs) -> Any:
        found = rnnt_search.greedy(inputs)
        return found._replace(lengths=found.lengths - 1)

    assert "got 0, expected 3" in note_of_wrong(search("rnnt_greedy"), shorter)
