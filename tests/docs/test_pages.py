"""Pages of documentation: their code runs, their links exist, the reference is complete."""

import ast
import contextlib
import importlib
import importlib.util
import inspect
import io
import re
import runpy
import shlex
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from helpers import configurations, small_llama
from helpers.docstrings import MODULES, names_of

import partita
from partita.__main__ import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
# The docstrings of the reference have their code, which runs as doctests.
WITHOUT_CODE = {*REFERENCE, *(DOCS / f"{name}.md" for name in ("benchmarks", "gallery", "index"))}
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
# A block of Python, and the block of text after it, if there is one: what it prints.
CODE = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if page not in WITHOUT_CODE], ids=named)
def test_code_of_the_pages_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for the files that the code writes
    blocks = CODE.findall(TEXTS[page])
    assert blocks
    namespace: dict[str, object] = {}
    if importlib.util.find_spec("transformers") is None:
        monkeypatch.setitem(sys.modules, "transformers", small_llama.module())
    for block, expected in blocks:
        # The last block of a tutorial is a script of its own.
        is_script = page in TUTORIALS and block == blocks[-1][0]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(block, {} if is_script else namespace)
        # A tutorial trains networks, which other processors round in other ways.
        if expected and page not in TUTORIALS:
            assert printed.getvalue() == expected


@pytest.mark.parametrize("page", TUTORIALS, ids=named)
def test_a_tutorial_ends_in_a_short_script(page: Path) -> None:
    [(script, _)] = CODE.findall(TEXTS[page].partition("\n## The whole script\n")[2])
    assert len(script.splitlines()) <= 40


def test_the_table_of_fused_models_is_what_the_tests_try() -> None:
    row = r"^\| (served|`fuse` refuses|refused at the first step) \| (.*) \|$"
    rows = re.findall(row, TEXTS[DOCS / "transformers.md"], re.MULTILINE)
    served = ", ".join(case.model for case in configurations.SERVED)
    at_once, at_step = (
        "; ".join(
            f"{case.model} ({case.reason})"
            for case in configurations.REFUSED
            if case.at_step is at_step
        )
        for at_step in (False, True)
    )
    assert {kind: text.replace("`", "") for kind, text in rows} == {
        "served": served,
        "`fuse` refuses": at_once,
        "refused at the first step": at_step,
    }


def added(block: str) -> list[ast.AST]:
    """Return the nodes of what a diff leaves, in the order of the text."""
    lines = [line[1:] for line in block.splitlines() if not line.startswith("-")]
    nodes = [node for node in ast.walk(ast.parse("\n".join(lines))) if hasattr(node, "lineno")]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


@pytest.mark.parametrize("page", [page for page in PAGES if "```diff\n" in TEXTS[page]], ids=named)
def test_what_a_diff_adds_exists_and_takes_these_arguments(page: Path) -> None:
    """A diff has names of its reader's program, so it does not run; but its calls are bound."""
    blocks = re.findall(r"```diff\n(.*?)```", TEXTS[page], re.DOTALL)
    known: dict[str, Any] = {"partita": partita}
    for node in (node for block in blocks for node in added(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("partita"):
            module = importlib.import_module(str(node.module))
            known |= {
                alias.asname or alias.name: getattr(module, alias.name) for alias in node.names
            }
        elif isinstance(node, ast.Call):
            path = ast.unparse(node.func).split(".")
            if path[0] not in known or "(" in path[0]:
                continue
            function = known[path[0]]
            for name in path[1:]:
                function = getattr(function, name)
            names = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            if not any(isinstance(argument, ast.Starred) for argument in node.args):
                inspect.signature(function).bind_partial(*node.args, **names)


def test_commands_of_the_pages_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `partita` command is parsed, scripts have the options, and make has the targets."""
    for module in ("bench.cli", "bench.report_cli", "cli.check", "cli.info", "cli.warm"):
        monkeypatch.setattr(f"partita.{module}.main", lambda args: 0)
    texts = [*TEXTS.values(), (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")]
    blocks = [block for text in texts for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    for words in commands:
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        words = words[: words.index(">")] if ">" in words else words
        if words[:3] == ["python", "-m", "partita"] or words[:1] == ["partita"]:
            assert main(words[words.index("partita") + 1 :]) == 0
        elif words[:1] == ["python"]:
            source = (ROOT / words[1]).read_text(encoding="utf-8")
            assert [x for x in words[2:] if x.startswith("--") and f'"{x}"' not in source] == []
        elif words:
            assert words[:2] == ["pip", "install"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {name for text in texts for name in re.findall(r"`make ([a-z-]+)", text)} <= {*targets}


def test_code_of_the_pages_is_narrow() -> None:
    """Blocks of 88 columns fit beside the navigation of the site."""
    too_long = [
        (named(page), line)
        for page, text in TEXTS.items()
        for block in re.findall(r"```\w+\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if len(line) > 88
    ]
    assert too_long == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_table_has_a_header(page: Path) -> None:
    """Rows without one are shown as text."""
    text = re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert re.match(r".*\n\|[ :|-]+\|\n", table), table


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_of_the_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXTS[page])
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)
    # docs/hooks.py makes these of the files of their names.
    made = {"architecture.md", "contributing.md", "changelog.md"}
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES[1:]}
    assert sorted(listed) == sorted(pages | made)


def test_the_reference_has_every_public_name() -> None:
    shown = [resolve_name(path) for page in REFERENCE for path in DIRECTIVE.findall(TEXTS[page])]
    for module in map(importlib.import_module, MODULES):
        for name in names_of(module):
            assert any(getattr(module, name) is value for value in shown), (module, name)


def test_the_page_of_the_command_has_every_command() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as help, contextlib.suppress(SystemExit):
        main(["--help"])
    commands = re.findall(r"\{([a-z,]+)\}", help.getvalue())[0].split(",")
    page = TEXTS[DOCS / "reference/command.md"]
    assert re.findall(r"^\$ partita (\w+) --help$", page, re.MULTILINE) == commands


def test_pictures_of_the_tables(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runpy.run_path(str(DOCS / "bench/figures.py"))["main"](["--out", str(tmp_path)])
    drawn, shown = (
        {path.name for path in folder.glob("*.svg")} for folder in (tmp_path, DOCS / "bench")
    )
    assert drawn == shown - {"chain_exactness.svg"}  # which an example draws
