"""The machine code of the CPU kernels stays on disk, and never outlives the sources."""

from pathlib import Path

import pytest

pytest.importorskip("numba")
import numba

from partita.primitives.cpu import jit as jit_module
from partita.primitives.cpu.jit import jit


def add(a: float, b: float) -> float:
    return a + b


def hits() -> int:
    """Compile `add` as another process would, and return how often its code was on disk."""
    dispatcher = jit(add)
    assert dispatcher(1.0, 2.0) == 3.0
    return sum(dispatcher.stats.cache_hits.values())


def test_another_process_finds_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert [hits(), hits(), hits()] == [0, 1, 1]


def test_any_change_of_a_source_makes_the_code_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    names = {name.replace("\\", "/") for name, *_ in jit_module.STAMP}
    assert {"primitives/cpu/math.py", "ops/ctc/cpu/loss.py", "ops/chain/cpu/steps.py"} <= names
    assert [hits(), hits()] == [0, 1]
    monkeypatch.setattr(jit_module, "STAMP", (*jit_module.STAMP[1:], ("ops/ctc/cpu/loss.py", 0, 0)))
    assert [hits(), hits()] == [0, 1]


def test_without_a_directory_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    assert hits() == 0


def test_a_version_of_numba_that_stores_code_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("numba.core.caching.Cache._impl_class", None, raising=False)
    monkeypatch.setattr("numba.core.dispatcher.FunctionCache", lambda function: object())
    assert hits() == 0


@jit
def scaled(x: float, factor: int, negative: bool) -> float:
    return -x * factor if negative else x * factor


@jit
def by_constants(x: float, factor: int) -> tuple[float, float, float]:
    return scaled(x, 2, True), scaled(x, 3, False), scaled(x, factor, factor > 4)


def test_one_version_serves_all_constants() -> None:
    assert scaled(1.5, 5, False) == 7.5  # The code of `by_constants` may be a stored one.
    assert by_constants(1.5, 5) == (-3.0, 4.5, -7.5)
    assert len(scaled.signatures) == 1
