"""Launches that are deferred while kernels compile side by side, with stand-ins for kernels."""

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fresh import run_fresh

pytest.importorskip("triton")
from torch import Tensor

from partita.runtime import constants, first_call


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
    [
        lambda x, _: x + 1,
        lambda x, _: x.zero_(),
        lambda x, y: y.copy_(x),
        lambda x, y: torch.cat([y, x]),
        lambda x, y: torch.add(y, 1, out=x),
    ],
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
    assert setup.log == [
        *("compile first", "launch first 1", "function", "compile second", "launch second 2")
    ]


def test_functions_of_other_memory_do_not_wait(setup: Setup) -> None:
    def op(x: Tensor, y: Tensor) -> None:
        setup.launch(setup.first, 1, x, size=1)
        y.fill_(3.0)
        y[y.long() - 2] = torch.cat([y.cumsum(0)])
        setup.log.append("computed")

    y = torch.ones(3)
    first_call.run(op, torch.ones(3), y)
    assert setup.log == ["computed", "compile first", "launch first 1"]
    assert y.tolist() == [3.0, 9.0, 3.0]


def test_compiled_kernels_are_launched_at_once_after_a_release(setup: Setup) -> None:
    def op(x: Tensor) -> None:
        setup.launch(setup.first, 1, x, size=1)
        x.sum()
        setup.launch(setup.first, 1, x, size=2)
        setup.log.append("end")

    first_call.run(op, torch.ones(3))
    assert setup.log == ["compile first", "launch first 1", "launch first 2", "end"]


def gradient_of(setup: Setup, *functions: Callable[[Tensor], object]) -> Callable[..., None]:
    """Return the gradient of an op, which allocates, calls the functions, and launches."""

    def then(args: tuple[Any, ...], result: Tensor) -> None:
        gradient = torch.zeros(2**50, device=result.device)
        gradient.fill_(1.0)
        for function in functions:
            function(result)
        setup.launch(setup.second, 1, gradient.view(-1), result, size=2)

    return then


def test_the_gradient_compiles_first_and_launches_nothing(setup: Setup) -> None:
    def op(x: Tensor) -> Tensor:
        setup.launch(setup.first, 1, x, size=1)
        return torch.zeros_like(x)

    result = first_call.run(op, torch.ones(3), then=gradient_of(setup, lambda x: x.fill_(7.0)))
    assert setup.log == ["compile second", "compile first", "launch first 1"]
    assert result.tolist() == [0.0] * 3  # a fill of the gradient does not happen
    assert not first_call.watching() and torch._C._len_torch_dispatch_stack() == 0


def test_nothing_is_planned_where_all_kernels_are_compiled(setup: Setup) -> None:
    setup.compiled = {"first"}

    def op(x: Tensor) -> Tensor:
        setup.launch(setup.first, 1, x, size=1)
        return torch.zeros_like(x)

    first_call.run(op, torch.ones(3), then=gradient_of(setup))
    assert setup.log == ["launch first 1"]


def raise_an_error(x: Tensor) -> None:
    raise ValueError("not differentiable")


def make_a_constant(x: Tensor) -> None:
    constants.constant(torch.zeros, 5, device=torch.device("meta"))


@pytest.mark.parametrize("function", [Tensor.exp, raise_an_error, make_a_constant])
def test_a_gradient_of_other_functions_is_not_planned(
    function: Callable[[Tensor], object], setup: Setup
) -> None:
    def op(x: Tensor) -> Tensor:
        setup.launch(setup.first, 1, x, size=1)
        return torch.zeros_like(x)

    constants._constants.clear()
    first_call.run(op, torch.ones(3), then=gradient_of(setup, function))
    assert setup.log == ["compile first", "launch first 1"]
    assert not constants._constants and not first_call.watching()


class Compiled:
    """A kernel that compiles in the threads of Triton's mode, as its own kernels do."""

    def __init__(self, key: str, compile: Callable[[], str]) -> None:
        self.key, self.compile = key, compile
        self.known: Any = ""

    def warmup(self, *args: Any, grid: Any, **options: Any) -> Any:
        from triton.runtime import _async_compile

        finish = lambda found: setattr(self, "known", found)  # noqa: E731
        return submit(_async_compile.active_mode.get(), self.key, self.compile, finish)


def submit(mode: Any, key: str, compile: Callable[[], Any], finish: Callable[[Any], None]) -> Any:
    """Submit a compilation; since Triton 3.9 with what to do if it fails."""
    clean_up = [lambda _: None] * ("cleanup_fn" in inspect.signature(mode.submit).parameters)
    return mode.submit(key, compile, finish, *clean_up)


def test_a_call_does_not_wait_for_the_gradient_which_compiles_once() -> None:
    begun: list[str] = []
    go_on = threading.Event()

    def compile_gradient() -> str:
        begun.append("gradient")
        assert go_on.wait(60)
        return "binary"

    loss, gradient = Compiled("loss", lambda: "other"), Compiled("gradient", compile_gradient)

    def launch(kernel: Compiled, *_: Any) -> None:
        if not first_call.defer(launch, kernel, 1, _, {}, is_compiled=bool(kernel.known)):
            assert kernel.known

    first_call.run(launch, loss, torch.ones(3), then=lambda *_: launch(gradient, torch.ones(3)))
    assert loss.known == "other" and not gradient.known
    threading.Timer(0.05, go_on.set).start()
    thread = threading.Thread(target=first_call.run, args=(launch, gradient, torch.ones(3)))
    thread.start()
    thread.join(60)
    assert gradient.known == "binary" and begun == ["gradient"]


def test_an_error_of_a_planned_kernel_is_raised_by_the_gradient_alone() -> None:
    attempts: list[int] = []

    def fail() -> str:
        attempts.append(1)
        raise ValueError("no such instruction")

    loss, gradient = Compiled("loss 2", lambda: "binary"), Compiled("gradient 2", fail)

    def launch(kernel: Compiled, *_: Any) -> None:
        assert first_call.defer(launch, kernel, 1, _, {}, is_compiled=False) or kernel.known

    first_call.run(launch, loss, torch.ones(3), then=lambda *_: launch(gradient, torch.ones(3)))
    assert loss.known == "binary"
    with pytest.raises(ValueError, match="no such instruction"):
        first_call.run(launch, gradient, torch.ones(3))


def test_kernels_that_take_longest_compile_first(setup: Setup) -> None:
    """The launches keep their order. More code comes first, and then greater constants."""

    setup.first.fn = inner  # type: ignore[attr-defined]
    setup.second.fn = outer  # type: ignore[attr-defined]

    def op(x: Tensor) -> None:
        for kernel, size in ((setup.first, 1), (setup.first, 8), (setup.second, 2)):
            setup.launch(kernel, 1, x, size=size)

    started: list[Any] = []

    def note(kernel: Kernel) -> Callable[..., None]:
        return lambda *args, size, **options: started.append((kernel.name, size))

    for kernel in (setup.first, setup.second):
        kernel.warmup = note(kernel)  # type: ignore[method-assign]
    first_call.run(op, torch.ones(3))
    assert started == [("second", 2), ("first", 8), ("first", 1)]
    assert setup.log == ["launch first 1", "launch first 8", "launch second 2"]


def inner(x: int) -> int:
    return x + 1


def outer(x: int) -> int:
    return device_inner(device_inner(x))


# Device functions, whose `fn` is the function of Python, as in Triton.
device_inner: Any = SimpleNamespace(fn=inner)
device_outer: Any = SimpleNamespace(fn=outer)


def test_the_size_of_a_kernel_has_the_functions_that_it_calls() -> None:
    codes = (inner.__code__, outer.__code__)
    assert first_call._code_size(device_outer, set()) == sum(len(code.co_code) for code in codes)
    assert first_call._code_size(object(), set()) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_no_compilations() -> None:
    """The child of a process that compiles has a free lock and a collector."""
    code = """
import gc, os, sys
from partita.runtime import first_call, translation, waiting
from triton.compiler.code_generator import CodeGenerator
first_call._compilations.store("kernel", None)
usual = CodeGenerator.visit
interval = sys.getswitchinterval()
turn = translation._turns.turn(0), translation._plain_visits()
with turn[0], turn[1], waiting.paused_collector(), waiting.short_turns():
    child = os.fork()
    if child == 0:
        free = not translation._turns.is_taken and sys.getswitchinterval() == interval
        free &= CodeGenerator.visit is usual
        os._exit(0 if free and gc.isenabled() and not first_call._compilations else 1)
    status = os.waitpid(child, 0)[1]
    assert not gc.isenabled() and translation._turns.is_taken
assert gc.isenabled()
print(os.waitstatus_to_exitcode(status))
"""
    assert run_fresh(code).stdout.strip() == "0"


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

    def warmup(*args: Any, grid: Any, **options: Any) -> Any:
        return submit(_async_compile.active_mode.get(), "key", fail, lambda kernel: None)

    setup.first.warmup = warmup  # type: ignore[method-assign]
    for _ in range(2):
        setup.compiled.clear()
        with pytest.raises(ValueError, match="no such instruction"):
            first_call.run(lambda x: setup.launch(setup.first, 1, x, size=1), torch.ones(3))
        assert _async_compile.active_mode.get() is None and not first_call.watching()
    # Triton 3.9 drops the future of a compilation that has failed.
    failed: Any = SimpleNamespace(future=None, kernel=None)
    first_call._compilations.store("of Triton 3.9", failed)
    first_call.run(lambda x: setup.launch(setup.second, 1, x, size=2), torch.ones(3))
    assert failed not in first_call._compilations.values()
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
