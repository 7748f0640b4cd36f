"""Which tags may follow which, read from their names in the schemes BIO and BIOES.

A name is O, or a position and a type, as B-PER. Segments of a type begin with B and go on with I.
In BIOES the last tag of a segment is E, and a segment of one token is S. A position without a type
is of the type that has no name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks


class TagRules(NamedTuple):
    """The segments that tags need and leave; the last entry is that of O, for both ends.

    Fields:
        leaves: the type, from 1 on, whose segment is open after a tag; 0 for none.
        needs: the type whose segment a tag goes on with; 0 for none.
        must_close: whether an open segment has to go on.
    """

    leaves: tuple[int, ...]
    needs: tuple[int, ...]
    must_close: bool


def tag_rules(labels: tuple[str, ...] | None, scheme: str | None) -> TagRules | None:
    """Return the rules of tags with these names, None without a scheme; wrong arguments raise."""
    if scheme is None:
        return None
    checks.choice("constraints", scheme, ("BIO", "BIOES"))
    if labels is None:
        raise ValueError(
            f"labels: expected the names of the tags with constraints={scheme!r}, got None"
        )
    types: dict[str, int] = {}
    leaves, needs = [], []
    for label in (*labels, "O"):
        position, dash, name = label.partition("-")
        # "O-PER" and "B-" are no names.
        if position not in scheme or len(position) != 1 or (dash and (position == "O" or not name)):
            known = ", ".join(f"'{each}-TYPE'" for each in scheme if each != "O")
            raise ValueError(
                f"labels: expected 'O' or {known} with constraints={scheme!r}, got {label!r}"
            )
        number = types.setdefault(name, len(types) + 1)
        leaves.append(number if position in "BI" else 0)
        needs.append(number if position in "IE" else 0)
    return TagRules(tuple(leaves), tuple(needs), "E" in scheme)


def forbidden_moves(
    leaves: tuple[int, ...], needs: tuple[int, ...], must_close: bool, *, device: torch.device
) -> Tensor:
    """Return which tags may not follow which, `[C + 1, C + 1]` bool, from and to.

    Before the first and after the last tag is tag C.
    """
    before, after = (torch.tensor(segments, device=device) for segments in (leaves, needs))
    return (before[:, None] != after) & ((after > 0) | must_close)


def checked_labels(labels: Sequence[str] | None, num_tags: int) -> tuple[str, ...] | None:
    """Return the names of tags, or raise unless they are as many different strings as tags."""
    if labels is None:
        return None
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"labels: expected a sequence of strings, got {labels!r}")
    if len(labels) != num_tags or len(set(labels)) != num_tags:
        raise ValueError(
            f"labels: expected {num_tags} different names, one for each tag,"
            f" got {len(set(labels))} in {list(labels)}"
        )
    return tuple(labels)
