"""The example of forced alignment at a small size."""

import re
from pathlib import Path

import alignment
import pytest
import torch
from helpers.examples import assert_is_wide, lines_with_few_batches, options, two_reports
from torch import Tensor

SMALL = {"lines": 3, "errors": 4, "seed": 1}


def page(lines: int, seed: int) -> alignment.Page:
    return alignment.compose_page(alignment.load(0, torch.device("cpu"))[1], lines, seed)


def certain(labels: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits `[T, 1, CLASSES]` that are sure of the labels, with their starts and ends.

    Each label takes its length in steps and is followed by one blank.
    """
    end = (lengths + 1).cumsum(0) - 1
    path = (
        torch.stack([labels, torch.zeros_like(labels)], 1)
        .flatten()
        .repeat_interleave(torch.stack([lengths, torch.ones_like(labels)], 1).flatten())
    )
    return 9.0 * torch.nn.functional.one_hot(path, alignment.CLASSES)[:, None], end - lengths, end


def test_the_page_knows_where_its_digits_are() -> None:
    signal, labels, spans = page(20, seed=0)
    assert len(labels) == len(spans) >= 20 * alignment.SHORTEST
    assert labels.min() >= 1 and labels.max() < alignment.CLASSES
    assert (spans[:, 0] < spans[:, 1]).all() and (spans[1:, 0] >= spans[:-1, 1]).all()
    assert spans[-1, 1] <= signal.shape[1]
    ink = signal.sum(0)
    assert (ink[spans[:, 0]] > 0).all() and (ink[spans[:, 1] - 1] > 0).all()
    inside = torch.zeros(signal.shape[1], dtype=torch.bool)
    for begin, end in spans.tolist():
        inside[begin:end] = True
    assert not ink[~inside].any()


def test_wrong_labels_are_known_and_differ_from_their_neighbours() -> None:
    truth = page(20, seed=0).labels
    transcript = alignment.spoil(truth, 40, torch.Generator().manual_seed(0))
    inserted = transcript.digit < 0
    changed = ~inserted & (transcript.labels != truth[transcript.digit])
    assert inserted.any() and changed.any()
    assert torch.equal(inserted | changed, transcript.is_error) and transcript.is_error.sum() == 40
    assert torch.equal(transcript.digit[~inserted], torch.arange(len(truth)))
    next_to_error = transcript.is_error[1:] | transcript.is_error[:-1]
    assert (transcript.labels[1:] != transcript.labels[:-1])[next_to_error].all()


def test_one_hot_logits_give_their_spans() -> None:
    labels = page(20, seed=1).labels
    logits, start, end = certain(labels, 1 + torch.arange(len(labels)) % 3)
    best = alignment.align(logits, labels)
    spans = best.spans()
    assert torch.equal(spans.start[0], start) and torch.equal(spans.end[0], end)
    assert torch.equal(best.labels[0], logits[:, 0].argmax(1))


def test_a_sure_network_finds_every_wrong_label() -> None:
    # Without repeats, the transcript matches the page in one position alone.
    labels = 1 + torch.arange(120) % 10
    logits, start, end = certain(labels, torch.full_like(labels, 3))
    # The noise makes no two alignments equally good.
    noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(0))
    logits = logits + 0.01 * noise
    known = alignment.Page(
        torch.empty(0), labels, alignment.COLUMNS_A_STEP * torch.stack([start, end], 1)
    )
    transcript = alignment.spoil(labels, 40, torch.Generator().manual_seed(0))
    report = alignment.judge(
        logits, alignment.align(logits, transcript.labels), known, transcript, seconds=0.0
    )
    assert report.steps == len(logits) and report.labels == len(transcript.labels)
    assert report.placed == report.area == 1 and report.found == report.errors == 40
    assert report.distance < 0.5 and report.same_path
    assert report.score_difference <= 1e-6 * report.steps * 9


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new folder" / "page"
    arguments = options({**SMALL, "out": out})
    lines = lines_with_few_batches(alignment, arguments, 2, "Below 95%", monkeypatch, capsys)
    assert list(lines) == [
        "Page",
        "Time of the alignment",
        "Labels on their digits",
        "Wrong labels",
        "Compared with forced_align",
        "Picture",
    ]
    assert re.fullmatch(r"\d+ steps, \d+ labels, 4 of them wrong", lines["Page"])
    assert re.fullmatch(r"[\d.]+ ms", lines["Time of the alignment"])
    compared = lines["Compared with forced_align"]
    assert re.fullmatch(r"the same path, score diff \d\.\d\de[-+]\d+", compared)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert_is_wide(out)


def test_it_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {**SMALL, "batches": 2, "out": tmp_path / "page.png"}
    first, second = two_reports(alignment, monkeypatch, **arguments)
    assert first == second


def test_it_refuses_more_errors_than_lines_hold(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        alignment.main(["--lines", "3", "--errors", "7"])
    assert "--errors: expected at most 2 to a line, 6, got 7" in capsys.readouterr().err
