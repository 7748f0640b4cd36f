"""The C module checks what it is given, raises what fails, and leaves nothing of a call behind."""

import ctypes
import gc
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from helpers.replay import Ops, aligned, scale_kernel

pytest.importorskip("triton")
from torch import Tensor


def with_all_kinds_of_memory(ops: Ops) -> Tensor:
    """Record an op with two outputs, a view and a workspace, and return its argument."""

    def op(x: Tensor) -> tuple[Tensor, ...]:
        temporary, first, second = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
        ops.launch(x, temporary, x.numel(), 2.0)
        ops.launch(temporary, first, x.numel(), 1.0)
        ops.launch(temporary, second, x.numel(), 3.0)
        return first, second, second[1:]

    x = aligned(100)
    assert ops.record(op, x).reason is None
    return x


@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_allocation_that_fails_is_an_error_and_nothing_else(number: int, ops: Ops) -> None:
    x = with_all_kinds_of_memory(ops)
    expected = ops.replay(x)
    ops.driver.allocated.clear()
    ops.driver.log.clear()
    ops.driver.failing = number
    with pytest.raises(torch.OutOfMemoryError):
        ops.replay(x)
    assert len(ops.driver.allocated) == number and not ops.driver.log
    ops.driver.failing = None
    assert all(map(torch.equal, ops.replay(x), expected))


def test_an_error_of_the_driver_is_raised_with_its_text(ops: Ops) -> None:
    x = with_all_kinds_of_memory(ops)
    ops.driver.status = 701
    with pytest.raises(RuntimeError, match=r"out of resources \(701\)"):
        ops.replay(x)
    with pytest.raises(RuntimeError, match=r"out of resources \(701\)"):
        ops.launch(x, aligned(100), 100, 1.0)


def launch(
    ops: Ops, x: Tensor, *, kernels: Any = None, programs: int = 3, factor: Any = 1.0
) -> Any:
    """Return what the C module returns for a launch."""
    found = ops.kernels if kernels is None else kernels
    args = (x, x, x.numel(), factor)
    return ops.driver.module.launch(found, scale_kernel, programs, args, {})


# How calls end: they replay, find no program, are left to Python, fail to allocate or to launch.
ENDINGS: dict[str, Callable[[Ops, Tensor], Any]] = {
    "replayed": lambda ops, x: ops.replay(x),
    "no program": lambda ops, x: ops.replay(x[1:]),
    "not served": lambda ops, x: ops.replay(x, object()),
    "no memory": lambda ops, x: (setattr(ops.driver, "failing", 1), ops.replay(x)),
    "driver": lambda ops, x: (setattr(ops.driver, "status", 701), ops.replay(x)),
    "launched": lambda ops, x: launch(ops, x),
    "no kernel": lambda ops, x: launch(ops, x, kernels={}),
    "launch not served": lambda ops, x: launch(ops, x, factor=2**70),
    "launch, driver": lambda ops, x: (setattr(ops.driver, "status", 701), launch(ops, x)),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_thousands_of_calls_leave_nothing(ending: str, ops: Ops) -> None:
    x = with_all_kinds_of_memory(ops)
    launch(ops, x)
    call, programs = ENDINGS[ending], ops.programs
    held = (x, ops.scale, *programs, *programs.values(), ops.replay, ops.driver.knobs, x.dtype)

    def counts(calls: int) -> tuple[int, list[int]]:
        for _ in range(calls):
            with suppress(torch.OutOfMemoryError, RuntimeError):
                call(ops, x)
            ops.driver.allocated.clear()
            ops.driver.log.clear()
        ops.driver.failing, ops.driver.status = None, 0
        gc.collect()
        return sys.getallocatedblocks(), [sys.getrefcount(each) for each in held]

    blocks, references = counts(10)
    more_blocks, more_references = counts(4_000)
    assert more_references[:-1] == references[:-1]
    # Each call would add or take 4,000. The rest of the process frees holders of the dtype, too.
    assert abs(more_references[-1] - references[-1]) < 2_000
    assert more_blocks - blocks < 2_000


def test_ten_thousand_calls_from_eight_threads(ops: Ops) -> None:
    inputs = [with_all_kinds_of_memory(ops)] + [aligned(100) for _ in range(7)]
    expected = [ops.replay(x) for x in inputs]
    wrong: list[int] = []

    def work(x: Tensor, truth: tuple[Tensor, ...]) -> None:
        for _ in range(1250):
            if not all(map(torch.equal, ops.replay(x), truth)):
                wrong.append(1)

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = sum(name == "launch" for name, *_ in ops.driver.log)
    assert not wrong and launches >= 3 * 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, (), None, ((0, 1, 1, 1, 0, 0, ((5, 0),)),), None), "slot below 1, got 5"),
        ((1, (), None, ((0, 1, 1, 1, 0, 0, ((0, 0),) * 95),), None), "too many parameters"),
        ((1, (), None, ((0, 1),), None), "seven fields"),
        ((1, (3,), 0, (), None), "results that name allocations"),
        ((1, (), 0, (), None), "results that name allocations"),
        ((1, (), [-1], (), None), "results that name allocations"),
        ((1, (), [(2**70, (), (), 0)], (), None), "results that name allocations"),
        ((1, (((2,), (1,), torch.half),), [0, (0, ())], (), None), "results that name allocations"),
        ((200, (), None, (), None), "at most 128 slots"),
        ((-1, (), None, (), None), "0 to 64 arguments"),
    ],
)
def test_programs_are_checked(arguments: Any, message: str, ops: Ops) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ops.driver.module.Program(*arguments)


def test_entries_that_do_not_fit_a_call_are_errors(ops: Ops) -> None:
    module, x = ops.driver.module, aligned(8)
    key = ops.replay(x)
    for entry in ("text", module.Program(2, (), None, (), None)):
        ops.programs[key] = entry
        with pytest.raises(TypeError, match=r"expected"):
            ops.replay(x)
    key = launch(ops, x, kernels={})
    with pytest.raises(TypeError, match=r"expected a partita\.runtime\.Kernel, got 'text'"):
        launch(ops, x, kernels={key: "text"})
    for number in (-1, 4):
        kernel = ops.driver.kernel(scale_kernel, (number, "p"))
        with pytest.raises(IndexError, match=f"without an argument: {number}"):
            launch(ops, x, kernels={key: kernel})
    with pytest.raises(TypeError):
        module.Kernel(1, 32, 0, ((0, 1),), None)
    with pytest.raises(ValueError, match="at most 94 parameters"):
        module.Kernel(1, 32, 0, ((0, "p"),) * 95, None)


def test_launches_that_the_module_cannot_describe_are_left_to_triton(ops: Ops) -> None:
    x = aligned(8)
    assert type(launch(ops, x, kernels={})) is bytes
    for programs in (0, 2**31, 2**32 + 3):
        assert launch(ops, x, kernels={}, programs=programs) is NotImplemented
    for factor in (2**70, object()):
        assert launch(ops, x, kernels={}, factor=factor) is NotImplemented
    with pytest.raises(OverflowError):
        launch(ops, x, kernels={}, programs=2**70)
    ops.driver.current = None  # type: ignore[assignment]
    assert launch(ops, x, kernels={}) is NotImplemented


OTHER_VERSION = (ctypes.c_uint32 * 16)(2)


def capsule(table: Any) -> Any:
    """Return a table as PyTorch gives its own."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(table), b"dlpack_exchange_api", None)


@pytest.mark.parametrize(
    ("exchange", "addresses", "error"),
    [
        (capsule(OTHER_VERSION), {}, "version 1 of DLPack's exchange"),
        (object(), {}, "invalid PyCapsule object"),
        (None, {"cuEventRecord": 0}, "a driver's function is missing"),
    ],
)
def test_a_module_without_a_function_that_it_needs_is_not_connected(
    exchange: Any, addresses: dict[str, int], error: str, ops: Ops
) -> None:
    try:
        with pytest.raises((RuntimeError, ValueError, OverflowError), match=error):
            ops.driver.connect(exchange, **addresses)
    finally:
        ops.driver.connect()
