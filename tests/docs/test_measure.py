"""docs/bench/measure.py: which tables a run replaces."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "bench"))
import measure  # noqa: E402
from measure_parts import PARTS, Part  # noqa: E402

WRITE = "-c \"open('{table}', 'w').write('new')"


def measured(tmp_path: Path, command: str, limit: float = 60.0) -> tuple[bool, str, str]:
    """Return whether a part is complete, its table after it, and what is in `partial`."""
    for folder in ("logs", "partial"):
        (tmp_path / folder).mkdir(exist_ok=True)
    table = tmp_path / "table.csv"
    table.write_text("old")
    part = Part("part", command, table.name, 60)
    complete = measure.measure(part, tmp_path, dict(os.environ), limit)
    partial = tmp_path / "partial" / table.name
    return complete, table.read_text(), partial.read_text() if partial.exists() else ""


def test_a_complete_part_replaces_its_table(tmp_path: Path) -> None:
    assert measured(tmp_path, f'{WRITE}"') == (True, "new", "")


@pytest.mark.parametrize(
    ("command", "limit"),
    [
        (f'{WRITE}; raise SystemExit(1)"', 60.0),
        (f'{WRITE}; import time; time.sleep(60)"', 1.0),
    ],
    ids=["failed", "stopped"],
)
def test_other_parts_leave_the_old_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, limit: float
) -> None:
    complete, table, partial = measured(tmp_path, command, limit)
    assert (complete, table) == (False, "old")
    assert partial in ("", "new")
    assert "the old table stays" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "complete"),
    [("chain fp32: partita wrong: 1.0", True), ("broke off: out of memory", False)],
)
def test_a_wrong_result_is_in_the_table_and_an_early_end_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, complete: bool
) -> None:
    monkeypatch.setattr(measure, "BENCH", "-c")
    command = f"{WRITE}; print('partita bench: {said}'); raise SystemExit(1)\""
    assert measured(tmp_path, command)[0] is complete


def test_dry_run_names_each_table_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(["--dry-run", "--out", "tables"]) == 0
    said = capsys.readouterr().out
    assert len({part.table for part in PARTS}) == len(PARTS)
    for part in PARTS:
        assert f"{part.name}, at most {part.limit} s: " in said


def test_warm_ups_run_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    done = [tmp_path / name for name in ("a", "b")]
    commands = tuple(f"-c \"open('{path}', 'w')\"" for path in done)
    part = Part("part", "", "table.csv", 60, (*commands, '-c "import time; time.sleep(60)"'))
    measure.fill_caches([part], tmp_path, dict(os.environ), 5.0, 2, 70)
    assert all(path.exists() for path in done)
    assert "part-2: stopped" in capsys.readouterr().out
