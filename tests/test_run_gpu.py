"""The runner of `make test-gpu`, on tests that need no GPU, and the choice of versions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from run_versions import SUPPORTED, Pair, pair_of

TESTS = """
import os, pytest
pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("i", range(9))
def test_passes(i): pass

def test_fails():
    os.system("echo printed by a child")
    assert 1 + 1 == 3

def test_dies(): os._exit(3)

@pytest.mark.skip(reason="no reason")
def test_skipped(): pass

@pytest.mark.whole_gpu
def test_whole(): pass

@pytest.mark.multigpu
def test_multi(): pass

@pytest.fixture(scope="module")
def broken(): raise ValueError

def test_set_up(broken): pass
"""
CODE = """
import pathlib, sys, run_gpu
sys.exit(run_gpu.main(sys.argv[2:], gpus=2, record=pathlib.Path(sys.argv[1])))
"""


def run(folder: Path, *options: str) -> tuple[int, list[str], dict]:
    command = [sys.executable, "-c", CODE, str(folder / "record.json"), str(folder / "test_it.py")]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    record = json.loads((folder / "record.json").read_text())
    return done.returncode, done.stdout.splitlines(), record


def test_a_run_and_its_continuation(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    code, lines, record = run(tmp_path)
    assert code == 1
    assert lines[-1].startswith("test-gpu: 11 passed, 3 failed, 1 skipped in ")
    assert lines[-5] == "     1 skipped: no reason"
    assert {line.rpartition("::")[2] for line in lines[-4:-1]} == {
        *("test_fails", "test_dies", "test_set_up")
    }
    assert "printed by a child" in lines and "its process ended" in lines
    assert len(record["passed"]) == 11
    (tmp_path / "test_it.py").write_text(TESTS.replace("== 3", "== 2"))
    code, lines, _ = run(tmp_path, "--resume")
    assert code == 1
    assert lines[-1].startswith("test-gpu: 1 passed, 2 failed, 1 skipped, 11 passed before in ")


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("oldest", Pair(*SUPPORTED[0].split("+"))),
        ("newest", Pair(*SUPPORTED[-1].split("+"))),
        ("2.11+3.6", Pair("2.11.0", "3.6.0")),
        ("2.1+3.6", Pair("2.1", "3.6")),  # no beginning of 2.11
    ],
)
def test_a_pair_is_named_by_its_place_or_the_first_numbers(text: str, pair: Pair) -> None:
    assert pair_of(text) == pair


def test_a_version_alone_is_no_pair() -> None:
    with pytest.raises(SystemExit, match=r"expected pairs like"):
        pair_of("2.11")
