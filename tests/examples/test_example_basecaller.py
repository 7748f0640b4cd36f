"""The example of a basecaller at a small size."""

import random
from pathlib import Path

import basecaller
import pytest
import torch
from helpers.examples import two_reports


def test_identity_is_that_of_the_edit_distance() -> None:
    found = basecaller.compare("ACGT", "AGGTT")
    assert found.identity == pytest.approx(1 - 2 / 5) and sum(found.is_right) == 3
    assert basecaller.compare("GATTACA", "GATTACA") == (1.0, [True] * 7)
    assert basecaller.compare("", "AC") == (0.0, [])
    text = "".join(random.Random(0).choices("ACGT", k=50))
    missed = basecaller.compare(text[:20] + text[22:], text)
    assert missed.identity == pytest.approx(0.96) and all(missed.is_right)


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(basecaller, "STRAND", 2000)
    threads = torch.get_num_threads()
    out, fastq = tmp_path / "new folder" / "picture", tmp_path / "strand.fastq"
    arguments = ["--batches", "2", "--out", str(out), "--fastq", str(fastq), "--quiet"]
    assert basecaller.main(arguments) == 0
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == [
        "Strand",
        *(f"Identity of {method}" for method in basecaller.METHODS),
        "Identity with the strand in one piece",
        "Right bases",
        "Picture",
    ]
    assert "2 batches are too few" in lines[-1]
    name, bases, plus, qualities = fastq.read_text(encoding="ascii").splitlines()
    assert (name, plus) == ("@strand", "+") and len(bases) == len(qualities) > 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_it_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basecaller, "STRAND", 900)
    arguments = {"batches": 2, "seed": 3, "out": tmp_path / "picture.svg", "quiet": True}
    first, second = two_reports(basecaller, monkeypatch, **arguments)
    # The mean of the qualities has a bit of every score.
    assert first == second and 0 < first.promised < 1
