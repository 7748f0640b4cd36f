"""Runs of examples that tests share."""

from types import ModuleType
from typing import Any

import pytest


def two_reports(module: ModuleType, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> list[Any]:
    """Return the reports of two equal runs. The second draws no picture, which takes seconds."""
    first = module.run(**arguments)
    with monkeypatch.context() as patch:
        patch.setattr(module, "draw", lambda *parts: None)
        return [first, module.run(**arguments)]


def share_run(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give equal later runs of an example the report of the first, whose files are there."""
    run, reports = module.run, []

    def shared(*values: Any, **named: Any) -> Any:
        if not reports:
            reports.append((run(*values, **named), values, named))
        report, *arguments = reports[0]
        assert arguments == [values, named]
        return report

    monkeypatch.setattr(module, "run", shared)
