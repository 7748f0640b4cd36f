"""How tensors become rows, and rows become launches."""

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

INTERPRETED = interpreting()
NVIDIA = torch.version.hip is None


def cdiv(number: int, by: int) -> int:
    """The quotient rounded up; Triton's own takes the host as long as a small tensor."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """The least power of 2 that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def zeroed_words(device: torch.device, *words: int) -> list[Tensor | None]:
    """Zeroed 64-bit words for several kernels, from one allocation and one fill; none for those that need none."""
    sizes = [count + count % 2 for count in words]  # each starts on 16 bytes
    if not any(sizes):
        return [None] * len(words)
    parts = torch.zeros(sum(sizes), dtype=torch.int64, device=device).split(sizes)
    return [part if count else None for part, count in zip(parts, words, strict=True)]


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_recent: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
MOST_RECENT = 4096


def specialization_of(args: Iterable[Any]) -> list[Any]:
    """All of arguments on which it may depend what is compiled, and more."""
    known: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            known += arg.dtype, arg.data_ptr() & 15 == 0
            if not NVIDIA:
                known.append(arg.untyped_storage().nbytes() < 2**31)
        else:
            known.append(arg)
    return known


_numbers: dict[tuple[Any, ...], int] = {}
_next_number = itertools.count()


def call_id(*args: Any) -> int:
    """The number of a call whose arguments settle those of several launches: it stands for all of them, so that these need not be looked at again."""
    known = tuple(specialization_of(args))
    found = _numbers.get(known)
    if found is None:
        if len(_numbers) >= MOST_RECENT:
            _numbers.clear()  # numbers are not given again
        found = _numbers[known] = next(_next_number)
    return found


def launch(kernel: Any, programs: int, *args: Any, call: Any = None, **options: Any) -> None:
    """Run `kernel` on the device and the current stream of its first tensor.

    `args` are its run-time arguments in order, `options` its compile-time ones. A kernel that was compiled for such arguments is called
    directly, which halves the time that the host takes, and with addresses, which Triton takes as they are; one that ran with the same numbers
    is found at once. So is one of a `call` (see `number_of`) that was made before.
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
    known = specialization_of(args) if call is None else [call]
    exact = (id(kernel), index, *options.values(), *known)
    found = _recent.get(exact)
    if found is None:
        key = (id(kernel), index, *options.values(), *map(_kind, specialization_of(args)))
        found = _compiled.get(key)
        if found is None:
            compiled = kernel[(programs,)](*args, **options)
            _compiled[key] = (
                compiled,
                tuple(options[name] for name in kernel.arg_names[len(args) :]),
            )
            return
        if len(_recent) >= MOST_RECENT:
            _recent.clear()
        _recent[exact] = found
    compiled, constants = found
    values = [
        arg.data_ptr() if isinstance(arg, Tensor) and arg.is_cuda else arg for arg in args
    ]  # of other memory Triton says that it is out of reach
    compiled[(programs, 1, 1)](*values, *constants)


class SideStream:
    """Launches that run beside those which the current stream gets from here to `join`, and before them where both are ready: short ones of few programs,
    beside one that fills the GPU. Where there are no streams, or it is not `wanted`, all run in their order."""

    _streams: ClassVar[
        dict[tuple[torch.device, int], torch.cuda.Stream]
    ] = {}  # of each thread: one may capture a graph while another does not

    def __init__(self, tensor: Tensor, wanted: bool) -> None:
        self.context: AbstractContextManager[Any] = nullcontext()
        self.main = None
        if tensor.is_cuda and wanted:
            self.main = torch.cuda.current_stream(tensor.device)
            place = tensor.device, threading.get_ident()
            self.side = self._streams.get(place) or self._streams.setdefault(
                place, torch.cuda.Stream(tensor.device, priority=-1)
            )
            self.side.wait_stream(self.main)
            self.context = torch.cuda.stream(self.side)

    def __enter__(self) -> None:
        self.context.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.context.__exit__(*raised)

    def join(self) -> None:
        if self.main is not None:
            self.main.wait_stream(self.side)


def _kind(known: Any) -> Any:
    """All of an argument that Triton compiles anew for: dtype and alignment of a tensor; of an integer whether it is 1, a multiple of 16,
    and beyond 32 bits; nothing of a float."""
    if isinstance(known, int):
        return 1 if known == 1 else 2 + (known % 16 == 0) + 2 * (not -(2**31) <= known < 2**31)
    return float if isinstance(known, float) else known


def tl_acc_dtype(dtype: torch.dtype) -> Any:
    """The accumulator's dtype for a kernel."""
    return tl.float64 if dtype == torch.float64 else tl.float32
