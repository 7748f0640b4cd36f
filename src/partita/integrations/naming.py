"""Errors in the words of a drop-in, whose arguments have other names than those of Partita."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

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


class Renamed:
    """A context in which errors of a function of Partita have the names that the user knows.

    Args:
        names: the names that the user knows, by the names of the arguments of that function.
        labels: the labels in which the place of a bad one is looked for, among `classes` classes.
    """

    def __init__(
        self,
        names: dict[str, str],
        labels: Labels | None = None,
        classes: int = 0,
        ignore_index: int = -100,
    ) -> None:
        self.names, self.labels, self.bounds = names, labels, (classes, ignore_index)

    def __enter__(self) -> None:
        """Change nothing before an error."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, IndexError) and self.labels is not None:
            self.labels.find(*self.bounds)
        elif isinstance(error, REFUSALS) and self.names:
            words = re.compile(rf"\b({'|'.join(self.names)})\b")
            message = words.sub(lambda found: self.names[found[0]], str(error))
            raise type(error)(message) from None
