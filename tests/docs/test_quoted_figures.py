"""Figures in README.md and in the pages: what they quote is what the tables say."""

import inspect
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "bench"))
import quoted  # noqa: E402
import quoted_options  # noqa: E402
import quoted_rows  # noqa: E402

import partita  # noqa: E402

PAGES = list(quoted.pages())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == quoted.current(text), "run `python docs/bench/quoted.py`"
    marks = len(re.findall(r"<!-- (?:\w+|/) -->", text))
    assert marks == 2 * len(quoted.QUOTE.findall(text)), "a quote is not closed"


def test_every_figure_is_quoted() -> None:
    names = {
        name for page in PAGES for name, _ in quoted.QUOTE.findall(page.read_text(encoding="utf-8"))
    }
    assert names == set(quoted.FIGURES)


def test_every_function_has_its_arguments_on_a_page() -> None:
    shown = {name for names in quoted_options.PAGES.values() for name in names.split()}
    functions = {name for name in partita.__all__ if inspect.isfunction(getattr(partita, name))}
    helpers = {"debruijn_source", "dense_source", "edges_from_states"}
    assert functions - shown == helpers | {"linear_rnnt_plan", "word_spans"}


def test_arguments_and_defaults_come_from_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def example(first: int, second: int, *, third: str = "a", fourth: float = 2.0) -> None:
        """Do nothing.

        Args:
            first, second: two numbers that have one meaning | or another. More of them.
            third: short. But there is more.
            fourth: as elsewhere.
        """

    monkeypatch.setattr(partita, "example", example, raising=False)
    monkeypatch.setitem(quoted_options.PAGES, "example", "example")
    assert quoted_options.options("example").splitlines()[1:] == [
        "```text",
        'partita.example(first, second, *, third="a", fourth=2.0)',
        "```",
        "",
        "| argument | default |  |",
        "| --- | --- | --- |",
        r"| `first`, `second` |  | two numbers that have one meaning \| or another |",
        '| `third` | `"a"` | short. But there is more |',
        "| `fourth` | `2.0` | as elsewhere |",
    ]
    example.__doc__ = str(example.__doc__).replace("third:", "another:")
    with pytest.raises(LookupError, match="differ in another, third"):
        quoted_options.options("example")


def test_a_figure_that_is_not_current_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quoted.main(["--check"]) == 0
    monkeypatch.setitem(quoted.FIGURES, "readme_speed", lambda: "\nanother table\n")
    assert quoted.main(["--check"]) == 1
    assert capsys.readouterr().out == "README.md: not current\n"


def test_the_site_shows_the_figures_without_marks() -> None:
    text = "Posteriors: <!-- ctc_greatest_error -->old<!-- / -->."
    assert quoted.shown(text) == f"Posteriors: {quoted.FIGURES['ctc_greatest_error']()}."
    with pytest.raises(KeyError):
        quoted.current("<!-- no_such_figure -->1<!-- / -->")


def test_a_table_is_read_by_all_that_tells_its_rows_apart() -> None:
    one = quoted_rows.row("parallel.csv", op="linear_cross_entropy", gpus=1)
    assert one["provider"] == "partita"
    with pytest.raises(LookupError, match="expected one row"):
        quoted_rows.row("parallel.csv", op="cross_entropy", gpus=2)


@pytest.mark.parametrize(
    ("value", "precision", "expected"),
    [
        (0.0409, 2, "0.041"),
        (9.96, 2, "10"),
        (859.365, 3, "859"),
        (1234.5, 3, "1,230"),
        (2.0, 2, "2.0"),
        (0.995, 2, "0.99"),
        (0.0, 3, "0.00"),
    ],
)
def test_digits(value: float, precision: int, expected: str) -> None:
    assert quoted_rows.digits(value, precision) == expected


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 8_000
    assert [line for line in text.splitlines() if len(line) > 100] == []
