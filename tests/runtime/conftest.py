"""Ops on a driver of host memory and on a GPU, for the tests of recording and replay."""

from collections.abc import Callable, Iterator

import pytest
from helpers.eager import Served
from helpers.gpu_calls import make_calls
from helpers.replay import Ops
from torch import Tensor


@pytest.fixture(scope="module")
def compiled() -> Ops:
    pytest.importorskip("triton")
    return Ops()


@pytest.fixture
def ops(compiled: Ops) -> Iterator[Ops]:
    driver = compiled.driver
    driver.log.clear()
    driver.allocated.clear()
    compiled.programs.clear()
    yield compiled
    driver.status, driver.device, driver.current, driver.failing = 0, 0, 0, None
    driver.knobs.launch_enter_hook.calls.clear()


@pytest.fixture
def served(compiled: Ops, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    driver = compiled.driver
    yield Served(driver, monkeypatch)
    driver.status = 0
    driver.knobs.launch_enter_hook.calls.clear()


@pytest.fixture(scope="module")
def calls() -> dict[str, Callable[[], list[Tensor]]]:
    """Return calls on a GPU by name."""
    return make_calls()
