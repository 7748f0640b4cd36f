"""`partita report`: the page that it writes, what it keeps to itself, and what it refuses."""

import argparse
import getpass
import html
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from helpers.bench import row_of
from torch import Tensor

from partita.__main__ import main
from partita.bench import chain, cli, providers
from partita.bench import report_cli as _report
from partita.bench.case import Settings
from partita.bench.cli import Measured
from partita.bench.measure import Machine
from partita.cli import check as _check_machine
from partita.testing.samples import CALLS, Call

VOID = {"meta", "br", "hr", "img", "link", "input"}
NOTE = "no <b>kernel</b> & no luck"


def _fails(x: Tensor) -> Tensor:
    raise RuntimeError(f"{NOTE} in {Path.home()}/secret/kernel.py")


def check(op: str, function: Callable[[Tensor], Tensor]) -> Call:
    softmax = CALLS["softmax"]
    return replace(softmax, name=op, function=lambda input, dim: function(input), options={})


GOOD, BAD = check("softmax", lambda x: torch.softmax(x, -1)), check("broken", _fails)


class Page(HTMLParser):
    """A page of HTML, whose elements must be closed and may load no source and run no script."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(tag, attrs)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def _see(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        for name, value in attrs:
            assert value is not None or name == "open"
            assert not name.startswith("on") and name != "src"
            if name == "id":
                self.ids.append(str(value))
            elif name in ("href", "xlink:href"):
                self.links.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.words)

    def table(self, *header: str) -> list[list[str]]:
        """The rows of the first whose header begins so."""
        return next(rows[1:] for rows in self.tables if tuple(rows[0][: len(header)]) == header)


@pytest.fixture(autouse=True, scope="module")
def tiny() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_check_machine, "CALLS", {"softmax": GOOD})
        monkeypatch.setattr(_report, "CPU_ELEMENTS", 2048)
        monkeypatch.setattr(_report, "CPU_REPETITIONS", 2)
        yield


def run(path: Path, *arguments: str) -> int:
    return main(["report", str(path), "--device", "cpu", *arguments])


@pytest.fixture(scope="module")
def whole(tiny: None, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """A run with a check that fails, every part of the page, and a peer that is not installed."""
    path = tmp_path_factory.mktemp("report") / "new folder" / "report.html"
    absent = providers.Provider(
        "absent",
        {"softmax": lambda: torch.softmax},
        packages=("no_such_package",),
        install="pip install no-such-package",
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_check_machine, "CALLS", {"softmax": GOOD, "broken": BAD})
        monkeypatch.setattr(providers, "PEERS", (providers.TORCH, absent))
        monkeypatch.setenv("OMP_NUM_THREADS", "<1>")
        assert run(path, "--ops", "softmax,token_stats", "--peers", "torch,absent") == 1
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    return Page(path)


def assert_stands_alone(page: Page) -> None:
    assert page.source.startswith("<!DOCTYPE html>\n<html lang=")
    assert not {"script", "link", "img", "iframe", "object", "image"} & page.seen
    assert len(page.ids) == len(set(page.ids))
    assert {link[0] for link in page.links} == {"#"}
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert set(re.findall(r"url\(#(.*?)\)", page.source)) <= set(page.ids)
    assert "@import" not in page.source and page.source.count("url(") == page.source.count("url(#")
    assert set(re.findall(r"https?://[^\s\"<]+", page.source)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_the_page_is_html_that_stands_alone(whole: Page) -> None:
    assert_stands_alone(whole)


def test_a_failed_check_is_first_and_escaped(whole: Page) -> None:
    rows = whole.table("op", "dtype")
    note = f"RuntimeError: {NOTE} in …/kernel.py"
    dtypes = list(_check_machine.DTYPES)
    failed, passed = rows[: len(dtypes)], rows[len(dtypes) :]
    assert failed == [["broken", d, "", "", "", "FAIL", note] for d in dtypes]
    assert "PyTorch on cpu, against fp64" in whole.text
    assert len(passed) == len(dtypes) and {row[5] for row in passed} == {"pass"}
    assert "<b>" not in whole.source and html.escape(NOTE) in whole.source
    assert f"check: {len(passed)} passed, {len(failed)} failed" in whole.text
    assert '<tr class="fail">' in whole.source


def test_the_header_says_where_and_how(whole: Page) -> None:
    options = "--device=cpu --ops=softmax,token_stats --peers=torch,absent"
    assert f"partita report report.html {options}" in whole.text
    assert re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", whole.text)
    assert ["torch", torch.__version__, ""] in whole.table("package", "version")
    assert whole.table("op", "cpu")
    assert "OMP_NUM_THREADS=<1>" in whole.text
    assert ("No GPU: " in whole.text) == (not torch.cuda.is_available())


def test_the_bench_is_there_beside_torch_with_pictures(whole: Page) -> None:
    rows = whole.table("provider", "rows × columns")
    assert [row[0] for row in rows[:2]] == ["partita", "torch"]
    header = next(rows[0] for rows in whole.tables if rows[0][:2] == ["provider", "rows × columns"])
    assert {"forward, ms", "ulp"} <= set(header)
    assert not any("of copy" in row or "%" in row for rows in whole.tables for row in rows)
    assert "absent: not installed (pip install no-such-package)" in whole.text
    assert "bench: all results of Partita right" in whole.text
    assert whole.source.count("<figure><svg ") == 1
    assert {"softmax", "log_softmax", "token_stats"} <= set(whole.ids)


def test_pictures_share_a_page(tmp_path: Path) -> None:
    """Their anchors are apart, and each is drawn from its own."""
    machine = Machine(torch.device("cpu"), "<CPU>", copy=4e9, read=2e9)
    rows = [
        row_of(name, chain.LogZ("chain", dtype, 2, 3, 2, chain.kmers), 1.0)
        for dtype in (torch.float32, torch.bfloat16)
        for name in ("partita", "torch")
    ]
    report = _report.Report("", "", [], [], Measured(rows, machine))
    path = tmp_path / "report.html"
    path.write_text(_report.page(report), encoding="utf-8")
    page = Page(path)
    assert page.source.count("<figure><svg ") == 2
    assert_stands_alone(page)
    anchors = {link[: len("#chain-0-")] for link in page.links if "-" in link}
    assert anchors == {"#chain-0-", "#chain-1-"}
    assert "log Z and its gradient, bf16 scores, <CPU>" in page.text


def test_without_matplotlib_the_tables_are_there(no_matplotlib: None, tmp_path: Path) -> None:
    assert run(tmp_path / "report.html", "--ops=softmax", "--peers=torch") == 0
    page = Page(tmp_path / "report.html")
    assert "svg" not in page.seen
    missing = "No pictures: matplotlib is not installed; pip install matplotlib brings it."
    assert missing in page.text
    assert page.table("provider", "rows × columns")


def test_without_a_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    assert run(path, "--no-bench") == 0
    assert capsys.readouterr().out == f"check: 4 passed, 0 failed\nwrote {path}\n"
    assert "bench" not in Page(path).ids


def test_nobody_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "jane.q.zzyzx"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(getpass, "getuser", lambda: "janezzyzx")
    monkeypatch.setattr(platform, "node", lambda: "box-17.example.org")
    monkeypatch.setenv(
        "OMP_NUM_THREADS",
        f"{home}/work on janezzyzx@box-17 and box-17.example.org, /scratch/jane.q.zzyzx/file.py:3",
    )
    path = home / "box-17" / "janezzyzx.html"
    monkeypatch.setattr(_check_machine, "CALLS", {"broken": BAD})
    assert run(path, "--no-bench") == 1
    page = Page(path)
    assert "~/work on (user)@(host) and (host), …/file.py:3" in page.text
    for secret in ("jane", "zzyzx", "box-17", "example.org", str(home), "scratch"):
        assert secret not in page.source


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("copy 100 GB/s and/or a / b, 1/3", "copy 100 GB/s and/or a / b, 1/3"),
        (
            "see https://pytorch.org/docs/stable/x.html",
            "see https://pytorch.org/docs/stable/x.html",
        ),
        ('File "/home/other/x/y.py", line 3', 'File "…/y.py", line 3'),
        (r"C:\Users\other\x\y.py", r"C:…/y.py"),
        ("/home/other", "~"),
        ("src/partita/x.py", "src/partita/x.py"),
    ],
)
def test_folders_are_left_out(text: str, expected: str) -> None:
    assert _report.public(text) == expected


def test_what_is_there_is_not_overwritten_unless_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("mine")
    with monkeypatch.context() as context:
        context.setattr(_check_machine, "run_all", lambda backends: pytest.fail("the work began"))
        assert run(path) == 2
    assert path.read_text() == "mine"
    expected = f"partita report: {path}: is there already; --force overwrites it\n"
    assert capsys.readouterr().err == expected
    assert run(path, "--force", "--no-bench") == 0
    assert "--force" in Page(path).text


@pytest.mark.parametrize("argument", ["--device=nowhere", "--ops=chess", "--peers=nobody"])
def test_wrong_arguments(argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "folder" / "x.html"), argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("partita report: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_no_file_can_be_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    expected = {
        tmp_path: "is a folder; expected a file to write",
        Path(os.devnull): "is no ordinary file",
        tmp_path / "file" / "x.html": "cannot be written: ",
        tmp_path / ("x" * 300): "cannot be written: ",
    }
    for path, reason in expected.items():
        assert run(path, "--force", "--no-bench") == 2
        error = capsys.readouterr().err
        assert error.startswith(f"partita report: {path}: {reason}") and error.count("\n") == 1


def test_a_backend_that_serves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTITA_BACKEND", "abacus")
    assert run(tmp_path / "report.html") == 2
    expected = "nothing is left to check: cpu is left out: PARTITA_BACKEND: expected one of"
    assert expected in capsys.readouterr().err


def test_what_is_wrong_in_the_bench_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = {"softmax": lambda: lambda x: 1.1 * torch.softmax(x, -1)}
    monkeypatch.setattr(providers, "OURS", (providers.Provider("partita", ops),))
    assert run(tmp_path / "report.html", "--ops=softmax", "--peers=torch") == 1
    page = Page(tmp_path / "report.html")
    assert "results of Partita wrong or refused" in capsys.readouterr().out
    assert "partita wrong: " in page.text
    notes = [row[-1] for row in page.table("provider", "rows × columns") if row[0] == "partita"]
    assert notes[0].startswith("wrong: ")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, MemoryError("no memory\nat all")], ids=["interrupted", "memory"]
)
def test_a_bench_that_breaks_off_is_written(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*args: object, **kwargs: object) -> Iterator[object]:
        raise error
        yield

    monkeypatch.setattr(cli, "run", breaks)
    code = run(tmp_path / "report.html", "--ops=softmax", "--peers=")
    assert code == (130 if error is KeyboardInterrupt else 1)
    told = "interrupted" if error is KeyboardInterrupt else "broke off: MemoryError: no memory"
    assert f"bench: nothing measured; {told}\n" in Page(tmp_path / "report.html").text


def test_a_check_that_is_interrupted_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_check_machine, "run", interrupted)
    assert run(tmp_path / "report.html") == 130
    assert capsys.readouterr().err == "partita report: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("mine")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert run(path, "--force", "--no-bench") == 1
    *_, told = capsys.readouterr().err.splitlines()  # a slow machine shows its progress before
    assert told == f"partita report: {path}: cannot be written: No space left on device"
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "mine"


@pytest.mark.parametrize(
    "command",
    [[], ["info"], ["check"], ["bench"], ["report"], ["warm"]],
    ids=lambda c: c[0] if c else "partita",
)
def test_help_has_examples_and_exit_codes(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "\nexamples:\n  " in printed and "\nexit codes" in printed
    assert f"  {' '.join(['partita', *command])}" in printed


def test_the_quick_bench_on_a_cpu_leaves_out_what_takes_longest() -> None:
    parser = argparse.ArgumentParser()
    _report.add_arguments(parser)

    def plan(*arguments: str) -> tuple[Settings, set[str]]:
        found = _report._plan(parser.parse_args(["x.html", "--device=cpu", *arguments]))
        return found.settings, {provider.name for provider in found.providers}

    settings, names = plan()
    assert settings.quick and settings.elements == 2048
    assert "compile" not in names and "torch" in names
    settings, names = plan("--full")
    assert not settings.quick and settings.elements is None and "compile" in names
    assert "compile" in plan("--peers=torch,compile")[1]
