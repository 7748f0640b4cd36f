"""Snippets of Python's standard library and the tags of their characters, for the tagger."""

from __future__ import annotations

import io
import keyword
import random
import sysconfig
import tokenize
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from language_model import LEFT_OUT
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

TEST_FILES = 10  # one file in this number is for the test
LINES, LONGEST = 6, 256  # the lines and the greatest number of characters of a snippet
CHARACTERS = 128  # the ASCII characters; any other becomes a question mark
KINDS = ["name", "keyword", "number", "string", "comment", "operator"]
# B of kind k is tag 2k + 1, and I is tag 2k + 2.
TAGS = ["space", *(f"{position}-{kind}" for kind in KINDS for position in "BI")]
FROM, TO = torch.arange(len(TAGS))[:, None], torch.arange(len(TAGS))
# The scheme BIO: the tag before an I is of the same kind. [from, to]
BROKEN = (TO > 0) & (TO % 2 == 0) & (FROM != TO) & (FROM != TO - 1)


class Snippets(NamedTuple):
    """A batch of N snippets of T characters at most."""

    text: Tensor  # [N, T] ASCII, 0 past the length
    tags: Tensor  # [N, T], -1 past the length
    lengths: Tensor  # [N]

    @property
    def mask(self) -> Tensor:
        """Return which tokens count, `[T, N]`, as taggers get it from their tokenizers."""
        return torch.arange(self.text.shape[1])[:, None] < self.lengths

    def take(self, index: Tensor | slice) -> Snippets:
        """Return the snippets at an index, padded to the longest of them."""
        lengths = self.lengths[index]
        T = int(lengths.max())
        return Snippets(self.text[index, :T], self.tags[index, :T], lengths)


def line_starts(text: str) -> list[int]:
    return [0, *accumulate(len(line) + 1 for line in text.split("\n"))]


def tags_of(text: str) -> list[int]:
    """Return the tag of each character from `tokenize`; characters in no token are space."""
    tags, starts = [0] * len(text), line_starts(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type].lower()
        name = {
            "op": "operator",
            "name": "keyword" if keyword.iskeyword(token.string) else "name",
        }.get(name, name)
        # From Python 3.12 on, an f-string is several tokens.
        name = "string" if name.startswith(("fstring", "tstring")) else name
        begin, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        if name in KINDS and begin < end:
            first = TAGS.index(f"B-{name}")
            tags[begin:end] = [first, *[first + 1] * (end - begin - 1)]
    return tags


def snippets_of(tagged: Sequence[tuple[str, list[int]]]) -> Snippets:
    codes = [torch.tensor(list(text.encode("ascii", "replace"))) for text, _ in tagged]
    tags = [torch.tensor(tags) for _, tags in tagged]
    lengths = torch.tensor([len(text) for text, _ in tagged])
    return Snippets(
        pad_sequence(codes, batch_first=True),
        pad_sequence(tags, batch_first=True, padding_value=-1),
        lengths,
    )


def load(files: int, seed: int) -> tuple[Snippets, Snippets]:
    """Return snippets of the library's files to train on, and snippets of other files to test."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not LEFT_OUT & set(path.relative_to(root).parts)
    ]
    parts: list[list[tuple[str, list[int]]]] = [[], []]
    for i, path in enumerate(random.Random(seed).sample(paths, min(files, len(paths)))):
        text = path.read_text(encoding="utf-8", errors="ignore")
        tags, starts = tags_of(text), [*line_starts(text)[::LINES], len(text)]
        pieces = [
            slice(start, min(stop, start + LONGEST))
            for start, stop in pairwise(starts)
            if stop - start > 1
        ]
        parts[i % TEST_FILES == 0].extend((text[piece], tags[piece]) for piece in pieces)
    if not all(parts):
        raise ValueError(
            f"files: expected enough of them to train on some and hold out others, got {files}"
        )
    return snippets_of(parts[0]), snippets_of(parts[1])
