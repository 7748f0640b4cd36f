"""Environment variables, read at each call with little host time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any


def dictionary() -> dict[bytes, bytes] | None:
    """Return the dictionary below `os.environ`, or None where there is none of bytes.

    It has what Python set, which the C library's `getenv` finds too.
    """
    environ: Any = os.environ
    data = getattr(environ, "_data", None)
    encode = getattr(environ, "encodekey", str)
    return data if isinstance(data, dict) and isinstance(encode("PATH"), bytes) else None


def reader(name: str) -> Callable[[], str]:
    """Return a function that returns the present value of a variable, "" if it is not set.

    `os.environ` raises and catches an exception for a variable that is not set, which takes longer
    than the rest of a small call. So the function reads the dictionary below it if there is one.
    """
    environ: Any = os.environ
    data: Mapping[Any, Any] | None = getattr(environ, "_data", None)
    if data is None or not hasattr(environ, "encodekey"):
        return lambda: os.environ.get(name, "")
    key, decode = environ.encodekey(name), environ.decodevalue

    def value() -> str:
        found = data.get(key)
        return decode(found) if found else ""

    return value
