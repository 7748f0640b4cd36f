"""Launches that are deferred while kernels compile side by side, with stand-ins for kernels."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from torch import Tensor

from partita.runtime import first_call


class Kernel:
    """A kernel that notes its compilation in a log."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def warmup(self, *args: Any, grid: Any, **options: Any) -> None:
        self.log.append(f"compile {self.name}")


class Setup:
    """Two kernels, a log, and a launch function that defers like the real one."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.first, self.second = Kernel("first", self.log), Kernel("second", self.log)
        self.compiled: set[str] = set()

    def launch(self, kernel: Kernel, programs: int, *args: Any, **options: Any) -> None:
        is_compiled = kernel.name in self.compiled
        work = (kernel, programs, args, options)
        if first_call.defer(self.launch, *work, is_compiled=is_compiled):
            self.compiled.add(kernel.name)
            return
        self.log.append(f"launch {kernel.name} {options['size']}")


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_kernels_compile_before_the_first_launch(setup: Setup) -> None:
    def op(x: Tensor) -> Tensor:
        setup.launch(setup.first, 1, x, size=1)
        temporary = torch.zeros_like(x).view(-1)
        setup.launch(setup.second, 1, temporary, size=2)
        setup.launch(setup.first, 1, x, size=3)
        return temporary

    assert first_call.run(op, torch.ones(3)).shape == (3,)
    assert setup.log == [
        *("compile first", "compile second", "compile first"),
        *("launch first 1", "launch second 2", "launch first 3"),
    ]
    assert not first_call.watching() and torch._C._len_torch_dispatch_stack() == 0


def test_compiled_kernels_are_launched_at_once(setup: Setup) -> None:
    setup.compiled = {"first"}
    first_call.run(lambda x: setup.launch(setup.first, 1, x, size=1), torch.ones(3))
    assert setup.log == ["launch first 1"]


def test_nothing_is_deferred_outside_of_an_op(setup: Setup) -> None:
    setup.launch(setup.first, 1, torch.ones(3), size=1)
    assert setup.log == ["launch first 1"]


@pytest.mark.parametrize(
    "function",
    [lambda x, _: x + 1, lambda x, _: x.zero_(), lambda x, y: y.copy_(x), lambda _, y: y.sum()],
)
def test_what_may_depend_on_a_launch_comes_after_it(
    function: Callable[[Tensor, Tensor], Tensor], setup: Setup
) -> None:
    def op(x: Tensor, y: Tensor) -> None:
        setup.launch(setup.first, 1, x, size=1)
        function(x, y)
        setup.log.append("function")
        setup.launch(setup.second, 1, x, size=2)

    first_call.run(op, torch.ones(3), torch.ones(3))
    assert setup.log == ["compile first", "launch first 1", "function", "launch second 2"]


def test_a_fill_of_other_memory_does_not_wait(setup: Setup) -> None:
    def op(x: Tensor, y: Tensor) -> None:
        setup.launch(setup.first, 1, x, size=1)
        y.fill_(3.0)
        setup.log.append("filled")

    y = torch.ones(3)
    first_call.run(op, torch.ones(3), y)
    assert setup.log == ["compile first", "filled", "launch first 1"]
    assert y.tolist() == [3.0] * 3


def test_an_error_of_the_op_leaves_nothing_behind(setup: Setup) -> None:
    def op(x: Tensor) -> None:
        setup.launch(setup.first, 1, x, size=1)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        first_call.run(op, torch.ones(3))
    assert not first_call.watching() and torch._C._len_torch_dispatch_stack() == 0
    setup.launch(setup.second, 1, torch.ones(3), size=2)
    assert setup.log[-1] == "launch second 2"


def test_an_error_of_the_compiler_is_raised_and_forgotten(setup: Setup) -> None:
    from triton.runtime import _async_compile

    def fail() -> None:
        raise ValueError("no such instruction")

    def warmup(*args: Any, grid: Any, **options: Any) -> None:
        mode = _async_compile.active_mode.get()
        assert mode is not None
        mode.submit("key", fail, lambda kernel: None)

    setup.first.warmup = warmup  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no such instruction"):
        first_call.run(lambda x: setup.launch(setup.first, 1, x, size=1), torch.ones(3))
    assert _async_compile.active_mode.get() is None and not first_call.watching()
    first_call.run(lambda x: setup.launch(setup.second, 1, x, size=2), torch.ones(3))
    assert setup.log == ["compile second", "launch second 2"]


def test_the_modes_of_first_calls_import_no_compiler() -> None:
    code = """
import sys, torch
from partita.runtime import first_call, recording

class Kernel:
    def warmup(self, *args, **options): pass

def launch(kernel, programs, *args, **options):
    first_call.defer(launch, kernel, programs, args, options, is_compiled=False)

def op(x):
    launch(Kernel(), 1, x)
    return torch.zeros_like(x)

x = torch.ones(3)
first_call.run(op, x)
with recording.Recorder((x,)):
    torch.empty_like(x)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
