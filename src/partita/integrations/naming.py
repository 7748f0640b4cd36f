"""Errors in the words of a drop-in, whose arguments have other names than those of Partita."""

from __future__ import annotations

import re
from typing import NoReturn

from torch import Tensor

from ..runtime import checks

REFUSALS = (TypeError, ValueError, IndexError)


def raise_renamed(error: Exception, **names: str) -> NoReturn:
    """Raise an error again, with other names of arguments in its message.

    Args:
        error: the error of a function of Partita.
        names: for each argument of that function the name that the user knows.
    """
    words = re.compile(rf"\b({'|'.join(names)})\b")
    raise type(error)(words.sub(lambda found: names[found[0]], str(error))) from None


def find_label(
    name: str, labels: Tensor, classes: int, ignore_index: int, *, shifted: bool = False
) -> None:
    """Raise `IndexError` with the place of the first bad label in the tensor that a user gave.

    Args:
        name: the name of the labels.
        labels: the labels, of which flat or shifted ones were refused.
        classes: the number of classes.
        ignore_index: the label that counts for nothing.
        shifted: whether the first label of each sequence is not read.
    """
    labels = labels.long()
    if shifted:
        labels = labels.clone()
        labels[..., :1] = ignore_index
    checks.labels(name, labels, classes, ignore_index)
