"""Hooks of MkDocs for this site.

The pages are written to be read on a code host too, so they link to files of the repository and
have formulas between dollar signs.

- README.md begins the first page. ARCHITECTURE.md, CONTRIBUTING.md and CHANGELOG.md are pages. All
  other files outside of `docs` that a page links to become pages with their text.
- Links point to the pages of their targets on the site. A link without a target stays, and the
  strict build stops at it.
- Figures that a page quotes are read from the tables, by docs/bench/quoted.py.
- The output of a command follows `$ partita ... --help`.
- Formulas become MathML, so that nothing is fetched to show them. A formula that cannot be
  converted stops the build.
- The sections `Fields:` and `Example:` of docstrings, and parameters that share a line, get the
  form that mkdocstrings knows.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import posixpath
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from math_core import LatexToMathML
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "bench"))
import quoted  # noqa: E402, of that folder

PAGES = {
    "README.md": "index.md",
    "docs": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")
FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL
)
HELP = re.compile(r"(?<=```console\n)\$ partita (.*--help)$", re.MULTILINE)
NUMBER = re.compile(r"<td>(?=[\d.]+e-\d+</td>)")  # a browser breaks it after the sign
SHARED = re.compile(
    r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+): (.*(?:\n\1 +\S.*)*)", re.MULTILINE
)


def path_of(uri: str) -> str:
    """Return the path of a page of the site in the repository."""
    return next(
        (path for path, page in PAGES.items() if page == uri != "index.md"),
        f"docs/{uri}",
    )


def uri_of(path: str) -> str:
    """Return the page of a file of the repository on the site."""
    is_on_the_site = path.startswith("docs/") and not path.endswith(".py")
    return PAGES.get(path) or (
        path.removeprefix("docs/") if is_on_the_site else f"source/{path}.md"
    )


def links(text: str, origin: str) -> Iterator[str]:
    """Yield the files of the repository that a page links to."""
    for link in LINK.findall(text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))
        if (ROOT / path).exists():
            yield path


def turned(text: str, origin: str, uri: str) -> str:
    """Return a text from the file `origin` with links that fit the page `uri` of the site."""

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[1]))
        if not (ROOT / path).exists():
            return match[1]
        return posixpath.relpath(uri_of(path), posixpath.dirname(uri) or ".")

    return LINK.sub(link, text)


def printed(command: re.Match[str]) -> str:
    from partita.__main__ import main

    os.environ["COLUMNS"] = "100"
    with (
        contextlib.redirect_stdout(io.StringIO()) as text,
        contextlib.suppress(SystemExit),
    ):
        main(shlex.split(command[1]))
    return f"{command[0]}\n{text.getvalue().rstrip()}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, uri in PAGES.items():
        if uri != "index.md":
            files.append(
                File.generated(
                    config, uri, content=(ROOT / path).read_text(encoding="utf-8")
                )
            )
    for page in list(files.documentation_pages()):
        for path in links(page.content_string, path_of(page.src_uri)):
            if (
                uri_of(path).startswith("source/")
                and (ROOT / path).is_file()
                and uri_of(path) not in files.src_uris
            ):
                text = (ROOT / path).read_text(encoding="utf-8")
                language = Path(path).suffix.lstrip(".")
                head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
                listing = f"{head}`````{language}\n{text}`````\n"
                files.append(File.generated(config, uri_of(path), content=listing))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    uri, origin = page.file.src_uri, path_of(page.file.src_uri)
    if uri.startswith("source/"):
        return markdown
    if uri == "index.md":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        first = turned(readme.partition("## More\n")[0], "README.md", uri)
        lists = markdown[markdown.index("## Guides\n") :]
        return quoted.shown(first) + turned(lists, origin, uri)
    return HELP.sub(printed, turned(quoted.shown(markdown), origin, uri))


def on_page_content(
    content: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    converter = LatexToMathML()

    def converted(match: re.Match[str]) -> str:
        formula = converter.convert_with_local_state(
            html.unescape(match[2]), displaystyle=match[1] == "div"
        )
        return f'<{match[1]} class="formula">{formula}</{match[1]}>'

    content = NUMBER.sub('<td style="white-space: nowrap">', content)
    return FORMULA.sub(converted, content)


class Docstrings(griffe.Extension):
    """Docstrings in the form of mkdocstrings: attributes, examples, one line for each parameter."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = re.sub(
                r"^( *)Fields:$",
                r"\1Attributes:",
                obj.docstring.value,
                flags=re.MULTILINE,
            )
            text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
            obj.docstring.value = SHARED.sub(self.each, text)

    @staticmethod
    def each(match: re.Match[str]) -> str:
        indent, names, meaning = match.groups()
        if names[0].isupper():  # exceptions
            return match[0]
        return "\n".join(f"{indent}{name}: {meaning}" for name in names.split(", "))
