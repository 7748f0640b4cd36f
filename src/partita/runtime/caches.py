"""The caches of the package: each is bounded and has a name, and one call clears them all.

A module-level cache is a `BoundedCache` or an `lru_cache`, and its module calls `register_cache`.
Tests that replace what a cached value was computed from call `clear_caches`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import private_names

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


class TableCache:
    """A cache of what was computed from the values of tensors, by tensor object.

    A value is found again while PyTorch tells of no change: the tensor has the version that it had,
    and the same memory in the same layout. A write through another tensor on that memory with a
    version of its own, such as `table.data`, or through an array of NumPy, cannot be noticed.
    """

    def __init__(self, name: str) -> None:
        self._entries = WeakTensorKeyDictionary()
        register_cache(name, self._entries.clear)

    def get(self, table: Tensor) -> Any:
        """Return the value for a table that has not changed, else None."""
        found = self._entries.get(table)
        return found[-1] if found is not None and found[0] == _state(table) else None

    def store(self, table: Tensor, value: Any) -> Any:
        """Store the value, unless the table has no version, and return it."""
        if (state := _state(table)) is not None:
            # While the memory lives, no other values can have its address.
            self._entries[table] = state, table.detach(), value
        return value


def memory_state(tensor: Tensor) -> tuple[int, int] | None:
    """Return what changes with the memory of a tensor; None if nobody counts writes to it."""
    version = private_names.version_of(tensor)
    return None if version is None else (version, tensor.data_ptr())


def _state(table: Tensor) -> tuple[Any, ...] | None:
    """Return what changes with the values of a table, as far as PyTorch tells."""
    memory = memory_state(table)
    return None if memory is None else (*memory, table.dtype, table.shape, table.stride())


def register_cache(name: str, clear: Callable[[], object]) -> None:
    """Register the function that empties a cache; `name` is `<module>.<what it holds>`."""
    if name in _clear_functions:
        raise ValueError(f"name: expected one cache of each name, got {name!r} again")
    _clear_functions[name] = clear


def clear_caches() -> None:
    """Empty every registered cache. Results stay the same; the next calls compute them anew."""
    for clear in list(_clear_functions.values()):
        clear()
