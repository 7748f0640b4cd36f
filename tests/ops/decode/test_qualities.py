"""Phred qualities of base calls: their text, their mean, and their calibration."""

import math
import re
from typing import Any

import pytest
import torch
from helpers.errors import raises
from torch import Tensor

from partita import Basecalls


def calls_of(qualities: Tensor, lengths: Tensor | None = None) -> Basecalls:
    """Return calls of single bases with these qualities `[N, S]`; past the length stands NaN."""
    N, S = qualities.shape
    lengths = torch.full((N,), S) if lengths is None else lengths
    valid = torch.arange(S) < lengths[:, None]
    log_probs = torch.log1p(-(10 ** (-qualities.double() / 10)))
    labels = (1 + torch.arange(S) % 4).expand(N, S)
    return Basecalls(
        labels * valid,
        lengths,
        torch.where(valid, log_probs, 0.0),
        torch.where(valid, torch.arange(S) - 1, -1),
        valid[:, 1:],
    )


def drawn(number: int, seed: int = 0) -> Tensor:
    """Return qualities from 3 to 38 as `[number / 100, 100]`."""
    g = torch.Generator().manual_seed(seed)
    return 3 + 35 * torch.rand(number // 100, 100, generator=g, dtype=torch.float64)


def errors_of(qualities: Tensor, offset: float, scale: float, seed: int = 1) -> Tensor:
    """Draw which bases are wrong, where the calibrated qualities hold."""
    g = torch.Generator().manual_seed(seed)
    error = 10 ** (-(scale * qualities + offset).clamp(1, 50) / 10)
    return torch.rand(qualities.shape, generator=g, dtype=torch.float64) < error


@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (-3.5, 1.1), (20, 0.25), (0, 0)])
def test_text_is_that_of_a_loop(offset: float, scale: float) -> None:
    log_probs = torch.tensor([[0.0, -1e-12, -1e-4, -0.02, -0.7, -9.0, -0.5], [-0.1, *[0.0] * 6]])
    lengths = torch.tensor([6, 1])
    calls = calls_of(torch.ones(2, 7), lengths)._replace(log_probs=log_probs)
    for row, length, text in zip(log_probs, [6, 1], calls.qstring(offset, scale), strict=True):
        expected = ""
        for log_prob in row[:length].tolist():
            phred = -10 * math.log10(max(-math.expm1(log_prob), 1e-6))
            expected += chr(33 + round(min(max(scale * phred + offset, 1), 50)))
        assert text == expected


@pytest.mark.parametrize("skip", [0, 3, 60])
def test_mean_quality_is_that_of_the_mean_error(skip: int) -> None:
    lengths = torch.tensor([100, 61, 60, 4, 3, 1, 0])
    calls = calls_of(drawn(700), lengths)
    found = calls.mean_q(skip, offset=2.0, scale=0.9)
    for text, quality in zip(calls.qstring(2.0, 0.9), found.tolist(), strict=True):
        counted = text[skip:] or text
        error = sum(10 ** (-(ord(letter) - 33) / 10) for letter in counted) / max(len(counted), 1)
        assert quality == pytest.approx(-10 * math.log10(error) if counted else 0.0)
    calls.log_probs[1] = torch.nan
    unknown = calls._replace(lengths=torch.where(torch.arange(7) == 1, 0, lengths)).mean_q(skip)
    assert unknown.isnan().tolist() == [False, True, *[False] * 5]


@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (12.0, 0.6), (-2.0, 1.2)])
def test_a_calibration_finds_the_offset_and_scale_of_the_errors(
    offset: float, scale: float
) -> None:
    """It is within four standard errors, which the information of the sample gives."""
    qualities = drawn(40_000)
    wrong = errors_of(qualities, offset, scale)
    found = calls_of(qualities).calibrate(~wrong)
    phred = (scale * qualities + offset).flatten()
    x = torch.stack([torch.ones_like(phred), qualities.flatten()])[:, (phred > 1) & (phred < 50)]
    error = 10 ** (-(scale * x[1] + offset) / 10)
    information = (math.log(10) / 10) ** 2 * (x * error / (1 - error)) @ x.T
    deviations = information.inverse().diagonal().sqrt().tolist()
    for name, got, true, deviation in zip(
        ("offset", "scale"), found, (offset, scale), deviations, strict=True
    ):
        assert abs(got - true) < 4 * deviation, name
    assert deviations[0] < 1 and deviations[1] < 0.1


@pytest.mark.parametrize(("offset", "scale"), [(5.0, 0.7), (-9.0, 1.4), (-17.0, 1.7)])
def test_a_calibration_has_the_greatest_likelihood(offset: float, scale: float) -> None:
    """In the last two cases the first steps of the scoring are too long."""
    qualities = (drawn(20_000) * 100).round() / 100
    wrong = errors_of(qualities, offset, scale)
    offset, scale = calls_of(qualities).calibrate(~wrong)

    def log_likelihood(offset: float, scale: float) -> float:
        error = 10 ** (-(scale * qualities + offset).clamp(1, 50) / 10)
        return float(torch.where(wrong, error.log(), torch.log1p(-error)).sum())

    greatest = log_likelihood(offset, scale)
    for a, b in [(0.01, 0), (-0.01, 0), (0, 0.001), (0, -0.001), (0.01, -0.001), (-0.01, 0.001)]:
        assert log_likelihood(offset + a, scale + b) < greatest


def test_calibrated_qualities_hold() -> None:
    """The errors of other reads are as many as their qualities say, in each range of them."""
    offset, scale = calls_of(drawn(40_000)).calibrate(~errors_of(drawn(40_000), 9.0, 0.5))
    others = drawn(40_000, seed=2)
    wrong = errors_of(others, 9.0, 0.5, seed=3)
    letters = "".join(calls_of(others).qstring(offset, scale)).encode()
    written = torch.tensor([*letters]) - 33
    assert int(written.min()) >= 10 and int(written.max()) <= 29
    for low in range(10, 30, 5):
        inside = (written >= low) & (written < low + 5)
        expected = float((10 ** (-written[inside].double() / 10)).sum())
        seen = int(wrong.flatten()[inside].sum())
        # Four standard deviations of the number of errors, and 10 % for the calibration itself.
        assert abs(seen - expected) < 4 * expected**0.5 + 0.1 * expected


def test_what_is_past_the_length_has_no_effect() -> None:
    qualities, lengths = drawn(4000), torch.arange(40) % 7 * 16
    wrong = errors_of(qualities, 0.0, 1.0)
    expected = calls_of(qualities, lengths).calibrate(~wrong)
    past = torch.arange(100) >= lengths[:, None]
    calls = calls_of(qualities, lengths)
    calls.log_probs[past] = torch.nan
    assert calls.calibrate(wrong ^ ~past) == expected


def test_qualities_that_say_nothing() -> None:
    """Equal qualities become the mean one, and errors at good qualities alone leave no slope."""
    wrong = torch.arange(1000)[None] % 50 == 0
    for quality in (10.0, 60.0):
        offset, scale = calls_of(torch.full((1, 1000), quality)).calibrate(~wrong)
        assert scale * quality + offset == pytest.approx(-10 * math.log10(1 / 50), abs=1e-6)
    separate = torch.where(wrong, 5.0, 30.0)
    offset, scale = calls_of(separate).calibrate(~wrong)
    assert 5 * scale + offset < 1.5 and 30 * scale + offset > 49
    mostly_wrong = calls_of(drawn(1000)).calibrate(
        (wrong & (torch.arange(1000) < 500)).view(10, 100)
    )
    assert set("".join(calls_of(drawn(1000)).qstring(*mostly_wrong))) == {chr(34)}


def test_fastq() -> None:
    calls = calls_of(drawn(300), torch.tensor([100, 7, 0]))
    text = calls.to_fastq(["a read=1", "b", "c"], offset=3.0, scale=0.8)
    records = re.findall(r"@(\S[^\n]*)\n([ACGT]*)\n\+\n([\"-S]*)\n", text)  # " is 1, and S is 50
    assert sum(sum(map(len, record)) + 6 for record in records) == len(text)
    assert [name for name, *_ in records] == ["a read=1", "b", "c"]
    assert [len(bases) for _, bases, _ in records] == [100, 7, 0]
    assert [qualities for *_, qualities in records] == calls.qstring(3.0, 0.8)
    assert calls.to_string() == [bases for _, bases, _ in records]


@pytest.mark.parametrize(
    ("error", "call"),
    {
        "ValueError: names: expected names of one line, got 'a.nb'": (
            lambda calls: calls.to_fastq(["x", "a\nb"])
        ),
        "ValueError: names: expected names of one line, got 'a.n'": (
            lambda calls: calls.to_fastq(["x", "a\n"])
        ),
        "ValueError: names: expected names of one line, got ''": (
            lambda calls: calls.to_fastq(["x", ""])
        ),
        "TypeError: offset: expected a number, got str": lambda calls: calls.qstring("1"),
        "ValueError: offset: expected a number .*, got nan": lambda calls: calls.mean_q(
            offset=math.nan
        ),
        "ValueError: scale: expected a number .*, got inf": lambda calls: calls.qstring(
            0, math.inf
        ),
        "TypeError: skip: expected an int, got float": lambda calls: calls.mean_q(6.0),
        "ValueError: skip: expected .* at least 0, got -1": lambda calls: calls.mean_q(-1),
        "TypeError: correct: expected a Tensor, got list": lambda calls: calls.calibrate([True]),
        "TypeError: correct: expected bool, got torch.int64": lambda calls: calls.calibrate(
            calls.labels
        ),
        r"ValueError: correct: expected shape \[N, S\] = \[2, 5\], got \[2, 4\]": (
            lambda calls: calls.calibrate(calls.moves)
        ),
        "ValueError: correct: expected both right and wrong bases, got 10 right and 0 wrong": (
            lambda calls: calls.calibrate(calls.labels > 0)
        ),
        "ValueError: correct: expected both right and wrong bases, got 0 right and 10 wrong": (
            lambda calls: calls.calibrate(calls.labels < 0)
        ),
    }.items(),
)
def test_errors_name_the_argument(error: str, call: Any) -> None:
    with raises(error):
        call(calls_of(torch.full((2, 5), 9.0)))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    qualities, lengths = drawn(4000), torch.arange(40) % 7 * 16
    calls, correct = calls_of(qualities, lengths), ~errors_of(qualities, 5.0, 0.8)
    on_gpu = Basecalls(*(part.cuda() for part in calls))
    torch.testing.assert_close(on_gpu.calibrate(correct.cuda()), calls.calibrate(correct))
    assert on_gpu.to_fastq(offset=5.0, scale=0.8) == calls.to_fastq(offset=5.0, scale=0.8)
    with raises("ValueError: correct: expected the device of labels, cuda:0, got cpu"):
        on_gpu.calibrate(correct)
