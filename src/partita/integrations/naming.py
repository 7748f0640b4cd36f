"""Errors in the words of a drop-in, whose arguments have other names than those of Partita."""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

from torch import Tensor

from ..runtime import checks

REFUSALS = (TypeError, ValueError, IndexError)


class Labels(NamedTuple):
    """The labels that a user gave, of which flat or shifted ones were refused."""

    name: str
    tensor: Tensor
    shifted: bool = False  # whether the first label of each sequence is not read

    def find(self, classes: int, ignore_index: int) -> None:
        """Raise `IndexError` with the place of the first bad label."""
        labels = self.tensor.long()
        if self.shifted:
            labels = labels.clone()
            labels[..., :1] = ignore_index
        checks.labels(self.name, labels, classes, ignore_index)


def labels_read(labels: Tensor | None, shift_labels: Tensor | None) -> Labels:
    """Return the one of both that is read; `labels` are shifted by Partita."""
    name, given = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
    checks.integer(name, given)
    assert given is not None
    return Labels(name, given, shift_labels is None)


def raise_renamed(error: Exception, **names: str) -> NoReturn:
    """Raise an error of a function of Partita again, with the names that the user knows.

    `names` has them by the names of the arguments of that function.
    """
    words = re.compile(rf"\b({'|'.join(names)})\b")
    raise type(error)(words.sub(lambda found: names[found[0]], str(error))) from None
