"""`partita info --replay`."""

import dataclasses
import functools
from typing import Any

import pytest

from partita.__main__ import main
from partita.cli import info
from partita.cli.info import Line, line_of
from partita.runtime import launcher
from partita.runtime.register import RECORDED, REPLAYED
from partita.testing.samples import CALLS


def test_without_a_module_one_sentence_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "module", lambda: None)
    monkeypatch.setattr(launcher, "status", lambda: "no GPU that Triton serves was found")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert main(["info", "--replay"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "Nothing is replayed: no GPU that Triton serves was found."
    assert "Served by" not in printed


@pytest.mark.parametrize(
    ("ops", "line"),
    [
        ([], Line("f", "no", "PyTorch's own functions serve it")),
        ([("a", REPLAYED), ("b", REPLAYED), ("a", REPLAYED)], Line("f", "yes", "")),
        ([("a", REPLAYED), ("b", "it calls c")], Line("f", "partly", "b: it calls c")),
        ([("a", RECORDED), ("a", RECORDED)], Line("f", "no", "a: recorded")),
        ([("a", REPLAYED), ("a", "why")], Line("f", "partly", "a: why")),
        ([("a", "one"), ("b", "two")], Line("f", "no", "a: one; b: two")),
    ],
)
def test_the_line_of_a_call(ops: list[tuple[str, str]], line: Line) -> None:
    assert line_of("f", ops) == line


def test_a_line_for_each_call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU nothing is replayed, and a call that raises says so."""

    def fails(**inputs: Any) -> None:
        raise RuntimeError("no kernel\nat all")

    broken = dataclasses.replace(CALLS["logsumexp"], function=fails)
    monkeypatch.setattr(info, "CALLS", {"softmax": CALLS["softmax"], "logsumexp": broken})
    monkeypatch.setattr(info, "replay_of", functools.partial(info.replay_of, device="cpu"))
    monkeypatch.setattr(launcher, "module", object)
    monkeypatch.setenv("PARTITA_REPLAY", "0")
    assert main(["info", "--replay"]) == 0
    cells = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines() if line]
    assert ["softmax", "no", "PyTorch's own functions serve it"] in cells
    assert ["logsumexp", "no", "RuntimeError: no kernel"] in cells
    assert ["0", "of", "2 calls are replayed."] in cells
    assert ["PARTITA_REPLAY=0"] in cells
