"""The settings of the interpreter while a call waits for its kernels, with a stand-in for one."""

import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from partita.runtime import first_call, waiting


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Restore the settings after each test."""
    interval = sys.getswitchinterval()
    yield
    gc.enable()
    sys.setswitchinterval(interval)


def settings_of_a_wait() -> tuple[bool, float]:
    """Return whether the collector runs, and the interval, while a call waits for a kernel."""
    found: list[tuple[bool, float]] = []
    future = SimpleNamespace(result=lambda: found.append((gc.isenabled(), sys.getswitchinterval())))
    kernel = SimpleNamespace(warmup=lambda *args, **options: future)

    def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        first_call.defer(launch, kernel, programs, args, options, is_compiled=False)

    first_call.run(lambda x: launch(kernel, 1, x), torch.ones(3))
    return found[0]


@pytest.mark.parametrize("collects", [True, False])
def test_a_call_that_waits_pauses_the_collector(collects: bool) -> None:
    if not collects:
        gc.disable()
    assert not settings_of_a_wait()[0] and gc.isenabled() == collects


@pytest.mark.parametrize("usual", [5e-3, 1e-4])
def test_threads_switch_often_while_a_call_waits(usual: float) -> None:
    sys.setswitchinterval(usual)
    assert settings_of_a_wait()[1] == pytest.approx(min(usual, waiting.SWITCH_INTERVAL))
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_the_settings_are_restored_after_an_error() -> None:
    usual = sys.getswitchinterval()
    contexts = pytest.raises(ValueError, match="syntax"), waiting.paused_collector()
    with contexts[0], contexts[1], waiting.short_turns():
        assert not gc.isenabled() and sys.getswitchinterval() < usual
        raise ValueError("syntax")
    assert gc.isenabled() and sys.getswitchinterval() == usual
