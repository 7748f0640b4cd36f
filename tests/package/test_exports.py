"""The public names: sorted and all there, and their results can be saved and loaded."""

import importlib
import io
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import docstrings

import partita

MODULES = [importlib.import_module(path) for path in docstrings.MODULES]


@pytest.mark.parametrize(
    "module",
    [module for module in MODULES if hasattr(module, "__all__")],
    ids=lambda module: module.__name__,
)
def test_all_is_sorted_and_there(module: ModuleType) -> None:
    def natural(name: str) -> tuple[bool, bool, str]:
        return (
            not name.isupper(),
            not name[0].isupper(),
            name,
        )  # as ruff sorts: constants, classes, functions

    assert module.__all__ == sorted(module.__all__, key=natural)
    assert all(hasattr(module, name) for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))
    assert dir(module) == sorted(dir(module))


def records() -> dict[str, Any]:
    """Return an instance of each public class that functions return."""
    plans = (
        partita.linear_cross_entropy_plan(2, 3, 4, torch.float32),
        partita.linear_rnnt_plan(1, 2, 3, 4, 5, torch.float32),
    )
    chains = (
        partita.Chain(torch.zeros(3, 1, 2, 2), partita.dense_source(2)),
        partita.linear_chain(torch.zeros(3, 1, 2), torch.zeros(2, 2)),
        partita.semi_markov_chain(torch.zeros(3, 1, 2), torch.zeros(2, 2), torch.zeros(2, 2)),
    )
    found: dict[str, Any] = {type(record).__name__: record for record in (*plans, *chains)}
    for kind in (each.value for each in docstrings.PUBLIC if each.kind == "record"):
        if kind is not partita.Semiring and kind.__name__ not in found:
            fields = range(len(docstrings.fields_of(kind)))
            found[kind.__name__] = kind(*(torch.full((2,), float(i)) for i in fields))
    return found


RECORDS = records()


@pytest.mark.parametrize("name", RECORDS)
def test_results_load_by_default(name: str) -> None:
    record, file = RECORDS[name], io.BytesIO()
    torch.save({"records": [record]}, file)
    file.seek(0)
    found = torch.load(file)["records"][0]
    assert type(found) is type(record)
    values, expected = (
        list(x) if isinstance(x, tuple) else list(vars(x).values()) for x in (found, record)
    )
    assert str(values) == str(expected)
