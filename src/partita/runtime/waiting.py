"""The settings of Python's interpreter while a thread waits for its kernels to be compiled."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL = 5e-4  # seconds after which a thread gives the GIL to another that waits for it

_is_collector_paused = False
_usual_interval: float | None = None  # that of Python, while a thread has set a shorter one


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the garbage collector.

    The translation of kernels from Python makes many objects that live as long as it runs, and
    spent a third of its time in searching them for garbage. A thread that waits cannot turn the
    collector off itself, so its choice is not overruled.
    """
    global _is_collector_paused
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _is_collector_paused = True
    try:
        yield
    finally:
        _is_collector_paused = False
        gc.enable()


@contextmanager
def short_turns() -> Iterator[None]:
    """Let threads switch often.

    The translation of a kernel holds the GIL. The compilations of other kernels need it a hundred
    times, for an instant each, and would wait for Python's interval of 5 ms each time, which is
    half a second for a large kernel.
    """
    global _usual_interval
    interval = sys.getswitchinterval()
    if interval <= SWITCH_INTERVAL:
        yield
        return
    _usual_interval = interval
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        _usual_interval = None
        sys.setswitchinterval(interval)


def _restore() -> None:
    """Restore the settings in a forked process, which does not have the thread that waits."""
    global _is_collector_paused, _usual_interval
    if _is_collector_paused:
        _is_collector_paused = False
        gc.enable()
    if _usual_interval is not None:
        sys.setswitchinterval(_usual_interval)
        _usual_interval = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore)
