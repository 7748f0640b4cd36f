"""Write the figures that README.md and the pages quote, from the tables of this folder.

    python docs/bench/quoted.py            # write them into README.md and the pages
    python docs/bench/quoted.py --check    # exit code 1 if one of them is not current

A page quotes `<!-- name -->text<!-- / -->`, where `name` is a function of one of the modules
`quoted_*.py`. The text is in the file, so that it shows on a code host too. The build of the site
writes it again, and tests compare it with the tables.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import quoted_figures  # noqa: F401, fills FIGURES
import quoted_h200  # noqa: F401
import quoted_host  # noqa: F401
import quoted_linear  # noqa: F401
import quoted_options  # noqa: F401
import quoted_parallel  # noqa: F401
import quoted_readme  # noqa: F401
import quoted_rnnt  # noqa: F401
import quoted_searches  # noqa: F401
import quoted_single_runs  # noqa: F401
from quoted_rows import FIGURES

ROOT = Path(__file__).parents[2]
QUOTE = re.compile(r"<!-- (\w+) -->(.*?)<!-- / -->", re.DOTALL)


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def current(text: str) -> str:
    """Return a page with its quotes as the tables have them.

    Raises:
        KeyError: a quote has a name that no function has.
    """
    return QUOTE.sub(lambda quote: f"<!-- {quote[1]} -->{FIGURES[quote[1]]()}<!-- / -->", text)


def shown(text: str) -> str:
    """Return a page as readers see it: with current figures, without the marks around them."""
    return QUOTE.sub(lambda quote: FIGURES[quote[1]](), text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the figures that pages quote.")
    parser.add_argument("--check", action="store_true", help="only say which pages would change")
    check = parser.parse_args(argv).check
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if current(text) != text:
            stale.append(page)
            if not check:
                page.write_text(current(text), encoding="utf-8")
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'not current' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
