"""Errors of calls, each written as the last line of its traceback."""

import builtins
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises(line: str) -> Iterator[None]:
    """Expect an error: a type and the pattern of a message, as in `ValueError: clamp: expected`."""
    kind, _, message = line.partition(": ")
    with pytest.raises(getattr(builtins, kind), match=f"^{message}"):
        yield
