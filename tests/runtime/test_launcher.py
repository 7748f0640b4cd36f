"""The C module is loaded by threads beside the first call, with stand-ins for a GPU."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fresh import run_fresh

pytest.importorskip("triton")
import triton

from partita.runtime import first_call, launch, launcher, private_names, register, triton_key

MODULE = SimpleNamespace(Kernel=type(None))


class Threads:
    """What the threads that load the module do. They wait for `go_on`."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.connected = 0
        self.connect: Callable[[], tuple[Any, str]] = lambda: (MODULE, "replays")
        self.driver: Callable[[], None] = lambda: None

    def run_connect(self) -> tuple[Any, str]:
        assert self.go_on.wait(60)
        self.connected += 1
        return self.connect()

    def run_driver(self) -> None:
        assert self.go_on.wait(60)
        self.driver()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    found = Threads()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(launcher, "interpreting", lambda: False)
    monkeypatch.setattr(launcher, "_connect", found.run_connect)
    monkeypatch.setattr(launcher, "_load_driver", found.run_driver)
    monkeypatch.setattr(triton_key, "use_stored", lambda: None)
    launcher._forget()
    try:
        yield found
    finally:
        found.go_on.set()
        launcher._forget()


def test_the_first_call_goes_on_while_the_module_is_loaded(threads: Threads) -> None:
    assert launcher.is_loading() and launcher.is_loading()
    threads.go_on.set()
    assert launcher.module() is MODULE and launcher.status() == "replays"
    assert not launcher.is_loading() and threads.connected == 1


def test_a_call_that_can_do_without_the_module_neither_loads_it_nor_waits(threads: Threads) -> None:
    assert launcher.loaded() is None and launcher._loading is None
    assert launcher.is_loading() and launcher.loaded() is None
    threads.go_on.set()
    wait([launcher._load().module])
    assert launcher.loaded() is MODULE and launcher.loaded() is MODULE


def test_threads_that_need_the_module_wait_for_the_same(threads: Threads) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(launcher.module) for _ in range(8)]
        assert not any(future.done() for future in futures)
        threads.go_on.set()
        assert all(future.result(60) is MODULE for future in futures)
    assert threads.connected == 1


def test_the_compiler_waits_for_the_driver_alone(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.wait_for_compiler()  # nothing is being prepared
    monkeypatch.setattr(launcher, "_load_driver", lambda: None)
    assert launcher.is_loading()
    launcher.wait_for_compiler()
    assert launcher.is_loading() and threads.connected == 0


def test_an_error_of_the_driver_is_left_to_the_launch(threads: Threads) -> None:
    def fail() -> None:
        raise RuntimeError("no driver")

    threads.driver = fail
    threads.go_on.set()
    assert launcher.module() is MODULE


def test_an_error_is_raised_where_the_module_is_needed_and_the_next_call_tries_again(
    threads: Threads,
) -> None:
    def fail() -> tuple[Any, str]:
        raise MemoryError

    threads.connect = fail
    assert launcher.is_loading()
    threads.go_on.set()
    with pytest.raises(MemoryError):
        launcher.module()
    threads.connect = lambda: (MODULE, "replays")
    assert launcher.module() is MODULE and threads.connected == 2


def test_a_build_that_fails_is_the_status(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.undo()
    monkeypatch.setattr(launcher, "_library", lambda: SimpleNamespace())
    monkeypatch.setattr(launcher, "DRIVER_FUNCTIONS", ())
    monkeypatch.setattr(launcher, "build", fail)
    found, status = launcher._connect()
    assert found is None
    assert status == (
        "Triton launches: the C launcher failed (RuntimeError: Failed to find C compiler.)"
    )


def test_with_an_unknown_triton_nothing_is_deferred(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", "2.9.0")
    assert not launcher.is_loading()
    threads.go_on.set()
    assert launcher.module() is None and threads.connected == 0
    assert launcher.status() == "Triton launches: version 2.9.0 of Triton is not known here"


def test_without_a_gpu_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launcher._forget()
    before = threading.active_count()
    assert not launcher.is_loading() and launcher.module() is None
    assert threading.active_count() == before
    assert launcher.status() == "no GPU that Triton serves was found"
    launcher._forget()


class Kernel:
    """A kernel that notes when it is compiled and launched."""

    arg_names = ("x",)

    def __init__(self) -> None:
        self.log: list[str] = []

    def warmup(self, *args: Any, grid: Any, **options: Any) -> None:
        self.log.append("compile")

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: self.log.append("launch")


def test_kernels_compile_before_the_module_is_there(threads: Threads) -> None:
    """The launch waits for the module. Here Triton has to launch."""
    kernel = Kernel()
    threads.connect = lambda: (None, "no module")

    def op(x: torch.Tensor) -> None:
        launch.launch(kernel, 1, x)
        assert kernel.log == [] and launcher.is_loading()

    timer = threading.Timer(0.05, threads.go_on.set)
    timer.start()
    first_call.run(op, torch.ones(3))
    timer.join()
    assert kernel.log == ["compile", "launch"]


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_a_call_beside_the_load_counts_as_the_first_of_its_key(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call is recorded, so it must know the key of the first."""

    def run(x: torch.Tensor) -> torch.Tensor:
        assert first_call.may_defer() and launcher.is_loading()
        threads.go_on.set()
        launcher.module()
        return x

    replay = SimpleNamespace(Replay=lambda programs, by_identity: lambda *args: b"key")
    threads.connect = lambda: (replay, "replays")
    monkeypatch.setattr(private_names, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    op = register.Op("test_launcher", run, run)
    x = torch.ones(3).as_subclass(OnGPU)
    assert op.eager(x) is x
    assert op.tries == {b"key": 1} and not first_call.may_defer()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_loads_the_module_itself() -> None:
    """A child has none of the threads of its parent, but the module that they have loaded."""
    code = """
import os
from concurrent.futures import Future
from partita.runtime import launcher

def child():
    process = os.fork()
    if process == 0:
        lock = launcher._lock.acquire(blocking=False)
        os._exit(lock + 2 * (launcher._loading is None) + 4 * (launcher._found is None))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

launcher._loading = launcher._Loading(Future(), ())
with launcher._lock:
    print(child())
launcher._found = "module", "status"
print(child())
"""
    assert run_fresh(code).stdout.split() == ["7", "1"]
