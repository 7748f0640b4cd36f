"""Launches of Triton kernels with little host time, and the sizes that launches are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launcher, private_names, recording
from .backend import interpreting
from .caches import BoundedCache, register_cache
from .recording import FORK, JOIN, LEAVE
from .sizes import cdiv as cdiv
from .sizes import next_power_of_2 as next_power_of_2
from .waiting import compiling

INTERPRETED = interpreting()

# Kernels of the C module by what Triton specializes them for. A model uses some dozens.
_kernels: BoundedCache[bytes, Any] = BoundedCache(4096)
register_cache("runtime.launch.kernels", _kernels.clear)


def tl_acc_dtype(dtype: torch.dtype) -> Any:
    """Return the dtype in which a kernel accumulates values of `dtype`."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def zeroed_words(device: torch.device, *words: int) -> list[Tensor | None]:
    """Return zeroed 64-bit words for several kernels from one allocation and one fill.

    A kernel that needs no words gets None.
    """
    if not any(words):
        return [None] * len(words)
    sizes = [size + size % 2 for size in words]  # each tensor starts on 16 bytes
    zeros = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
    return [part if size else None for part, size in zip(zeros.split(sizes), words, strict=True)]


def compiler_options() -> dict[str, Any]:
    """Return the options of Triton's compiler that all kernels share.

    Products are fused with sums, for speed and accuracy; Triton 3.10 will not do so by default.

    In its debug mode Triton checks sums, differences and products of 32-bit integers for overflow.
    In other modes it would translate these checks too, and drop them later. Leaving them out does
    not change the machine code, and saves a seventh of the translation from Python.
    """
    if not launcher.is_known_triton():
        return {}
    checks = {} if triton.knobs.runtime.debug else {"sanitize_overflow": False}
    return {"enable_fp_fusion": True, **checks}


def launch(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
    """Run `kernel` on the device and the current stream of its first tensor.

    The C module launches the kernel, which Triton compiles at the first call for such arguments.
    Triton launches it where the C module does not serve.

    Args:
        kernel: the Triton kernel.
        programs: the number of programs; nothing runs if it is 0.
        *args: the run-time arguments in the order of the signature. What belongs together may be a
            tuple.
        **options: further run-time arguments by name, the constexpr arguments and the launch
            options.
    """
    if programs == 0:
        return
    module = launcher.module()
    if module is not None:
        if names := _names_after(kernel, len(args)):
            args += tuple(options.pop(name) for name in names)
        bound = module.launch(_kernels, kernel, programs, args, options)
        if type(bound) is bytes and _compile(bound, kernel, programs, args, options):
            bound = module.launch(_kernels, kernel, programs, args, options)
        if type(bound) is module.Kernel:
            if (active := recording.thread.recorder) is not None:
                active.launch(bound, programs, args)
            return
    every = launcher.members((*args, *options.values()))
    first = next(arg for arg in every if isinstance(arg, Tensor))
    if first.is_cuda and first.device.index != private_names.current_device():
        with torch.cuda.device(first.device):
            launch(kernel, programs, *args, **options)
        return
    if (active := recording.thread.recorder) is not None:
        active.refuse("Triton has to launch one of its kernels")
    if not INTERPRETED:
        options |= compiler_options()
    kernel[(programs,)](*args, **options)


def _names_after(kernel: Any, number: int) -> list[str]:
    """Return the names of the run-time parameters after the first ones; constexprs follow them."""
    names: list[str] = kernel.arg_names
    end = kernel.constexprs[0] if kernel.constexprs else len(names)
    return names[number:end] if number < end else []


def _compile(
    key: bytes, kernel: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any]
) -> bool:
    """Compile a kernel and store it under its key; return whether the C module can launch it."""
    with compiling("Triton", kernel.__module__):
        compiled = kernel.warmup(*args, grid=(programs,), **options, **compiler_options())
    # The key names objects by their addresses, so they live as long as its entry.
    keep = kernel, options, list(tuple_types(args))
    bound = launcher.bind(compiled, kernel.arg_names, len(args), keep)
    if bound is not None:
        _kernels.store(key, bound)
    return bound is not None


def tuple_types(args: tuple[Any, ...]) -> Iterator[type]:
    """Yield the types of the tuples among the arguments of a launch."""
    for arg in args:
        if isinstance(arg, tuple):
            yield type(arg)
            yield from tuple_types(arg)


def launch_alongside(tensor: Tensor, few: Callable[[], None], many: Callable[[], None]) -> None:
    """Run the launches of `few`, which have few programs, next to those of `many`.

    Those of `few` run on a side stream, and have the higher priority where both are ready. The
    current stream then waits for them. Without streams all launches run in their order.

    Args:
        tensor: a tensor on the device of the launches.
        few, many: functions that launch, and allocate nothing.
    """
    if not tensor.is_cuda:
        few()
        many()
        return
    active, main = recording.thread.recorder, torch.cuda.current_stream(tensor.device)
    note = active.change_stream if active is not None else lambda kind: None
    side, _ = launcher.side_stream(tensor.device.index)
    side.wait_stream(main)
    try:
        note(FORK)
        with torch.cuda.stream(side):
            few()
        note(LEAVE)
        many()
    finally:
        # The streams join after an error too, because the memory belongs to the current stream.
        note(JOIN)
        main.wait_stream(side)
