"""The registry of caches: bounds, names, and the call that empties all of them."""

from typing import Any

import pytest
import torch

from partita.runtime import caches, constants
from partita.runtime.caches import BoundedCache, clear_caches, register_cache


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests register names without a trace."""
    monkeypatch.setattr(caches, "_clear_functions", dict(caches._clear_functions))


def test_a_full_cache_is_emptied_by_the_next_new_key() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    assert cache.store("a", 1) == 1
    cache.store("b", 2)
    cache.store("b", 3)
    assert cache == {"a": 1, "b": 3}
    cache.store("c", 4)
    assert cache == {"c": 4}


def test_one_call_empties_every_cache() -> None:
    first: BoundedCache[str, int] = BoundedCache(2)
    second: BoundedCache[str, int] = BoundedCache(2)
    for name, cache in (("test.first", first), ("test.second", second)):
        register_cache(name, cache.clear)
        cache.store("a", 1)
    assert {"test.first", "test.second"} <= set(caches._clear_functions)
    clear_caches()
    assert not first and not second


def test_names_are_unique() -> None:
    register_cache("test.name", dict.clear)
    with pytest.raises(
        ValueError, match=r"^name: expected one cache of each name, got 'test.name'"
    ):
        register_cache("test.name", dict.clear)


def test_the_caches_of_the_runtime_are_registered() -> None:
    assert {
        "runtime.backend.numba_problem",
        "runtime.constants",
        "runtime.register.softmax",
    } <= set(caches._clear_functions)


def test_a_full_cache_of_constants_drops_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured CUDA graph may read a cached tensor."""
    monkeypatch.setattr(constants, "MAX_CONSTANTS", 1)
    monkeypatch.setattr(constants, "_constants", {})
    made: list[Any] = []

    def make(value: int, device: torch.device) -> torch.Tensor:
        made.append(value)
        return torch.zeros(value, device=device)

    device = torch.device("meta")  # as a GPU, without one
    first = constants.constant(make, 3, device=device)
    second = constants.constant(make, 4, device=device)
    assert constants.constant(make, 3, device=device) is first
    assert constants.constant(make, 4, device=device) is not second
    assert made == [3, 4, 4]
