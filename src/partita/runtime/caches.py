"""The caches of the package: each is bounded and has a name, and one call clears them all.

A module-level cache is a `BoundedCache` or an `lru_cache`, and its module calls `register_cache`.
Tests that replace what a cached value was computed from call `clear_caches`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_clear_functions: dict[str, Callable[[], object]] = {}


class BoundedCache(dict[Key, Value]):
    """A dictionary that is emptied when it is full, so a lookup is as fast as in a dictionary.

    Args:
        limit: the number of entries at which the next new key empties the dictionary.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def store(self, key: Key, value: Value) -> Value:
        """Store the value, after emptying a full cache, and return it."""
        if len(self) >= self.limit and key not in self:
            self.clear()
        self[key] = value
        return value


def register_cache(name: str, clear: Callable[[], object]) -> None:
    """Register the function that empties a cache; `name` is `<module>.<what it holds>`."""
    if name in _clear_functions:
        raise ValueError(f"name: expected one cache of each name, got {name!r} again")
    _clear_functions[name] = clear


def cache_names() -> list[str]:
    """Return the names of all caches that the loaded modules have registered."""
    return sorted(_clear_functions)


def clear_caches() -> None:
    """Empty every registered cache. Results stay the same; the next calls compute them anew."""
    for clear in list(_clear_functions.values()):
        clear()
