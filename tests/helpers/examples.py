"""Runs of examples that tests share."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.image import imread


def options(values: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a command that has these values."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def lines_of(printed: str) -> dict[str, str]:
    """Return what a command prints, by the name at the start of each line."""
    return dict(line.split(": ") for line in printed.splitlines() if ": " in line)


def assert_is_wide(picture: Path) -> None:
    height, width, _ = imread(picture).shape
    assert width > height > 500


def two_reports(module: ModuleType, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> list[Any]:
    """Return the reports of two equal runs. They draw no picture, which takes seconds."""
    monkeypatch.setattr(module, "draw", lambda *parts: None)
    return [module.run(**arguments, quiet=True) for _ in range(2)]


def lines_with_few_batches(
    module: ModuleType,
    arguments: list[str],
    batches: int,
    warning: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> dict[str, str]:
    """Run a command with batches that cannot reach what it asks for, and return its lines.

    It prints that they are too few, and warns and fails only where as many are its default. Both
    commands have the report of one run.
    """
    run, reports = module.run, []

    def shared(*values: Any, **named: Any) -> Any:
        reports.append(reports[0] if reports else (run(*values, **named), values, named))
        assert reports[0][1:] == (values, named)
        return reports[0][0]

    monkeypatch.setattr(module, "run", shared)
    for is_default in (False, True):
        if is_default:
            monkeypatch.setattr(module, "BATCHES", batches)
        assert module.main([*arguments, "--batches", str(batches), "--quiet"]) == int(is_default)
        printed = capsys.readouterr()
        assert (warning in printed.err) == is_default
        assert ("batches are too few" in printed.out) != is_default
    return lines_of(printed.out)
