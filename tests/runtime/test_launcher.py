"""The C module is loaded at the first call, with stand-ins for a GPU."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fresh import SOURCE, run_fresh

pytest.importorskip("triton")
import triton

from partita.runtime import launch, launcher, private_names, register

MODULE = SimpleNamespace(Kernel=type(None))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Make it look as if there were a GPU; a test builds its own module."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(launcher, "interpreting", lambda: False)
    monkeypatch.setattr(launcher, "_library", lambda: SimpleNamespace())
    monkeypatch.setattr(launcher, "DRIVER_FUNCTIONS", ())
    launcher._forget()
    yield monkeypatch
    launcher._forget()


def test_the_first_call_loads_the_module(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(launcher, "build", lambda *_: MODULE)
    assert launcher.module() is MODULE
    assert launcher.status() == "the C launcher replays calls"


def test_threads_that_need_the_module_wait_for_the_same(gpu: pytest.MonkeyPatch) -> None:
    go_on, built = threading.Event(), []

    def build(*_: Any) -> Any:
        assert go_on.wait(60)
        built.append(1)
        return MODULE

    gpu.setattr(launcher, "build", build)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(launcher.module) for _ in range(8)]
        assert not any(future.done() for future in futures)
        go_on.set()
        assert all(future.result(60) is MODULE for future in futures)
    assert built == [1]


def test_a_build_that_fails_is_the_status(gpu: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.")

    gpu.setattr(launcher, "build", fail)
    assert launcher.module() is None
    assert launcher.status() == (
        "Triton launches: the C launcher failed (RuntimeError: Failed to find C compiler.)"
    )


def test_triton_launches_without_its_builder(gpu: pytest.MonkeyPatch) -> None:
    gpu.delattr("triton.runtime.build.compile_module_from_src")
    kernel = Kernel()
    launch.launch(kernel, 1, torch.ones(3))
    assert kernel.log == ["launch"]
    status = launcher.status()
    assert status.startswith("Triton launches: the C launcher failed (")
    assert "cannot import name" in status


def test_there_is_no_module_without_a_c_compiler(tmp_path: Path) -> None:
    code = """
from partita.runtime import private_names
try:
    private_names.build_c_module("int one;", "one", [])
except Exception as error:
    print("not built")
"""
    nowhere = {"CC": str(tmp_path / "nowhere"), "TRITON_CACHE_DIR": str(tmp_path)}
    done = run_fresh(code, {**os.environ, "PYTHONPATH": str(SOURCE), **nowhere})
    assert done.code == 0 and done.stdout == "not built\n", done.stderr


def test_an_unknown_triton_launches(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(triton, "__version__", "2.9.0")
    assert launcher.module() is None
    assert launcher.status() == "Triton launches: version 2.9.0 of Triton is not known here"


def test_without_a_gpu_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    launcher._forget()
    assert launcher.module() is None
    assert launcher.status() == "no GPU that Triton serves was found"
    launcher._forget()


class Kernel:
    """A kernel that notes when it is launched."""

    arg_names = ("x",)

    def __init__(self) -> None:
        self.log: list[str] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: self.log.append("launch")


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_the_first_call_of_a_key_is_not_recorded(gpu: pytest.MonkeyPatch) -> None:
    """The second call is recorded, so it must know the key of the first."""
    replay = SimpleNamespace(Replay=lambda programs, by_identity: lambda *args: b"key")
    gpu.setattr(launcher, "build", lambda *_: replay)
    gpu.setattr(private_names, "current_device", lambda: None)
    gpu.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    op = register.Op("test_launcher", lambda x: x, lambda x: x)
    x = torch.ones(3).as_subclass(OnGPU)
    assert op.eager(x) is x
    assert op.refusals == {b"key": []} and not op.programs


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    """It has the module if its parent had loaded it."""
    code = """
import os
from partita.runtime import launcher

def child():
    process = os.fork()
    if process == 0:
        os._exit(launcher._lock.acquire(blocking=False) + 2 * (launcher._found is None))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

with launcher._lock:
    print(child())
launcher._found = "module", "status"
print(child())
"""
    assert run_fresh(code).stdout.split() == ["3", "1"]
