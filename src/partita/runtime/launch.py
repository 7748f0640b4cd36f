"""Launches of Triton kernels with little host time, and the sizes that launches are made of."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import triton.language as tl
from torch import Tensor

from .backend import interpreting
from .caches import BoundedCache, register_cache

INTERPRETED = interpreting()
NVIDIA = torch.version.hip is None

# A compiled kernel and its constexpr values in the order of the signature.
Executable = tuple[Any, tuple[Any, ...]]

# Executables by what Triton specializes a kernel for. Triton has them too, so a dropped entry costs
# one slow call. A model uses some dozens.
_compiled: BoundedCache[tuple[Any, ...], Executable] = BoundedCache(4096)
# Executables by the exact arguments of a launch, or by its call id: the fast way.
_recent: BoundedCache[tuple[Any, ...], Executable] = BoundedCache(4096)
_call_ids: BoundedCache[tuple[Any, ...], int] = BoundedCache(4096)
_next_call_id = itertools.count()  # an id is never used for two calls, so the cache may be emptied

register_cache("runtime.launch.compiled", _compiled.clear)
register_cache("runtime.launch.recent", _recent.clear)
register_cache("runtime.launch.call_ids", _call_ids.clear)


def cdiv(number: int, by: int) -> int:
    """Return the quotient rounded up. Triton's own takes the host as long as making a tensor."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def tl_acc_dtype(dtype: torch.dtype) -> Any:
    """Return the dtype in which a kernel accumulates values of `dtype`."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def zeroed_words(device: torch.device, *words: int) -> list[Tensor | None]:
    """Return zeroed 64-bit words for several kernels from one allocation and one fill.

    Args:
        device: the device of the words.
        *words: the number of words of each kernel.

    Returns:
        A tensor for each kernel, or None for a kernel that needs no words.
    """
    sizes = [size + size % 2 for size in words]  # each tensor starts on 16 bytes
    if not any(sizes):
        return [None] * len(words)
    parts = torch.zeros(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    return [part if size else None for part, size in zip(parts, words, strict=True)]


def specialization_of(args: Iterable[Any]) -> list[Any]:
    """Return all properties of the arguments that a compiled kernel may depend on, and more."""
    properties: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            properties += arg.dtype, arg.data_ptr() & 15 == 0
            if not NVIDIA:
                properties.append(arg.untyped_storage().nbytes() < 2**31)
        else:
            properties.append(arg)
    return properties


def _kind(value: Any) -> Any:
    """Return what Triton specializes a kernel for, given one property of an argument.

    An integer counts as 1, as a multiple of 16, and as beyond 32 bits. A float does not count. The
    dtype and the alignment of a tensor count as they are.
    """
    if isinstance(value, int):
        return 1 if value == 1 else 2 + (value % 16 == 0) + 2 * (not -(2**31) <= value < 2**31)
    return float if isinstance(value, float) else value


def call_id(*args: Any) -> int:
    """Return a number that stands for these arguments in the launches that depend on them alone.

    An op with several launches computes it once, so that `launch` need not look at the arguments of
    each launch.
    """
    key = tuple(specialization_of(args))
    found = _call_ids.get(key)
    return _call_ids.store(key, next(_next_call_id)) if found is None else found


def launch(kernel: Any, programs: int, *args: Any, call: Any = None, **options: Any) -> None:
    """Run `kernel` on the device and the current stream of its first tensor.

    A kernel that was compiled for such arguments is called directly, and with the addresses of
    tensors, which Triton accepts. That halves the host time. A launch with the same arguments as an
    earlier one, or with the same `call`, skips the specialization too.

    Args:
        kernel: the Triton kernel.
        programs: the number of programs; nothing runs if it is 0.
        *args: the run-time arguments in the order of the signature.
        call: the `call_id` of the arguments that determine `args`.
        **options: the constexpr arguments and the launch options.
    """
    if programs == 0:
        return
    device = args[0].device
    if device.type != "cuda":
        kernel[(programs,)](*args, **options)
        return
    index = device.index
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, programs, *args, call=call, **options)
        return
    properties = specialization_of(args) if call is None else [call]
    recent_key = (id(kernel), index, *options.values(), *properties)
    executable = _recent.get(recent_key)
    if executable is None:
        kinds = map(_kind, specialization_of(args))
        compiled_key = (id(kernel), index, *options.values(), *kinds)
        executable = _compiled.get(compiled_key)
        if executable is None:
            compiled = kernel[(programs,)](*args, **options)
            constexprs = tuple(options[name] for name in kernel.arg_names[len(args) :])
            _compiled.store(compiled_key, (compiled, constexprs))
            return
        _recent.store(recent_key, executable)
    compiled, constexprs = executable
    # An address of other memory makes Triton fail, so such tensors are passed as tensors.
    values = [arg.data_ptr() if isinstance(arg, Tensor) and arg.is_cuda else arg for arg in args]
    compiled[(programs, 1, 1)](*values, *constexprs)


class SideStream:
    """A stream for short launches of few programs that run next to one that fills the GPU.

    The launches inside the block overlap with those that the current stream gets until `join`. They
    have the higher priority where both are ready. Without streams, or unless `wanted`, all launches
    run in their order.

    Args:
        tensor: a tensor on the device of the launches.
        wanted: whether the launches inside the block may overlap with others.
    """

    # Each thread has its own stream, since one may capture a graph while another does not.
    _streams: ClassVar[BoundedCache[tuple[torch.device, int], torch.cuda.Stream]] = BoundedCache(
        256
    )

    def __init__(self, tensor: Tensor, wanted: bool) -> None:
        self.context: AbstractContextManager[Any] = nullcontext()
        self.main = None
        if tensor.is_cuda and wanted:
            self.main = torch.cuda.current_stream(tensor.device)
            key = tensor.device, threading.get_ident()
            self.side = self._streams.get(key) or self._streams.store(
                key, torch.cuda.Stream(tensor.device, priority=-1)
            )
            self.side.wait_stream(self.main)
            self.context = torch.cuda.stream(self.side)

    def __enter__(self) -> None:
        self.context.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.context.__exit__(*raised)

    def join(self) -> None:
        """Let the current stream wait for the launches of the block."""
        if self.main is not None:
            self.main.wait_stream(self.side)


register_cache("runtime.launch.side_streams", SideStream._streams.clear)
