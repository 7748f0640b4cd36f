"""The C module that launches kernels, and the ways around it.

A launch through Triton takes the host about 11 µs, and PyTorch's allocations and views around it
take as long again. The C module of `launcher.c` and of the files that it includes launches one
kernel in about 3 µs, or all recorded work of an op in one call (see `recording.py`). Triton's own
build function compiles it at the first call, and Triton's cache keeps it.

Triton launches instead wherever this module cannot: where it cannot be compiled, on AMD GPUs, with
versions of Triton that are not known here, for kernels that need more than a plain launch
(clusters, cooperative launches, scratch memory), and while a profiler's launch hooks are set.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from . import private_names
from .backend import has_triton, interpreting
from .caches import register_cache
from .waiting import compiling

KNOWN_TRITONS = ("3.6", "3.7", "3.8", "3.9")  # their metadata and order of parameters are alike
MODULE = "partita_launcher"
INCLUDED = ("programs.c", "replay.c")
CUDA = 2  # DLPack's number
WARP = 32
DRIVER_FUNCTIONS = (
    "cuLaunchKernel",
    "cuMemsetD32Async",
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuCtxGetDevice",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuGetErrorString",
)
# How the C module passes each type of a kernel's signature; pointers start with an asterisk.
PARAMETER_TYPES = {
    **dict.fromkeys(("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"), "i"),
    "fp32": "f",
    "fp64": "d",
}
PARAMETER_SIZES = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "fp32": 4}
NUM_SCRATCH_POINTERS = 2  # Triton's kernels end with pointers to global and to profiling scratch

_side = threading.local()


def build(
    exchange: Any,  # PyTorch's table of DLPack functions, a capsule
    knobs: Any,  # the object with Triton's launch hooks
    driver: Mapping[str, int],  # the address of each of the `DRIVER_FUNCTIONS`
    # A function of size, stride and dtype that returns a tensor on the current device.
    allocate: Any,
    # A function of no arguments that returns the index of PyTorch's current device. Calls with
    # tensors on another one are left to Python.
    current_device: Any,
    device_type: int = CUDA,  # the number that DLPack has for the devices to serve
) -> Any:
    """Compile the C module, or load it from Triton's cache, and connect it."""
    folder = Path(__file__).parent
    source = (folder / "launcher.c").read_text()
    for name in INCLUDED:  # in one source text, because it is the key of Triton's cache
        source = source.replace(f'#include "{name}"', (folder / name).read_text())
    # Triton's -O3 doubles the time of the C compiler, and makes no call faster.
    module = private_names.build_c_module(source, MODULE, ["-O1"])
    types = (torch.Tensor, torch.nn.Parameter, torch.dtype)
    functions = (allocate, current_device, exchange, knobs, side_stream_handles)
    addresses = struct.pack("=8Q", *(driver[name] for name in DRIVER_FUNCTIONS))
    module.setup(device_type, *types, *functions, addresses)
    return module


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    """Return the driver's library."""
    return ctypes.CDLL("libcuda.so.1")


_lock = threading.Lock()
_found: tuple[Any, str] | None = None  # the connected C module, or None, and a sentence about it


def is_known_triton() -> bool:
    """Return whether this package knows the installed version of Triton."""
    import triton

    return bool(triton.__version__.startswith(tuple(f"{known}." for known in KNOWN_TRITONS)))


def _connect() -> tuple[Any, str]:
    """Return the connected C module, or None, and a sentence about it."""
    if not torch.cuda.is_available() or not has_triton():
        return None, "no GPU that Triton serves was found"
    if torch.version.hip is not None:
        return None, "Triton launches: the C launcher is for NVIDIA GPUs"
    if interpreting():
        return None, "Triton's interpreter runs the kernels"
    import triton

    if not is_known_triton():
        return None, f"Triton launches: version {triton.__version__} of Triton is not known here"
    try:
        exchange = torch.Tensor.__dlpack_c_exchange_api__
        driver = {
            name: ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0
            for name in DRIVER_FUNCTIONS
        }
        of_device = private_names.empty_strided_cuda, private_names.current_device
        with compiling("the C compiler", __name__):
            module = build(exchange, triton.knobs.runtime, driver, *of_device)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        return None, f"Triton launches: the C launcher failed ({type(error).__name__}: {reason})"
    if not private_names.HAS_DISPATCH_MODES:
        return module, "the C launcher launches kernels, and this PyTorch lets no call be recorded"
    return module, "the C launcher replays calls"


def _load() -> tuple[Any, str]:
    """Return the connected C module, or None, and a sentence about it; the first call loads it."""
    global _found
    with _lock:
        if _found is None:
            _found = _connect()
        return _found


def _forget() -> None:
    """Forget the C module, so that the next call loads it anew."""
    global _found
    _found = None


def _forget_lock() -> None:
    """Forget the lock, which a thread that a forked process does not have may hold."""
    global _lock
    _lock = threading.Lock()


register_cache("runtime.launcher.library", _library.cache_clear)
register_cache("runtime.launcher.module", _forget)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_lock)


def module() -> Any:
    """Return the C module, or None where Triton has to launch."""
    return (_found or _load())[0]


def status() -> str:
    """Return a sentence for `partita info` that says what launches kernels."""
    return (_found or _load())[1]


def side_stream(index: int) -> tuple[torch.cuda.Stream, torch.cuda.Event]:
    """Return this thread's side stream on a device, and an event for its forks and joins.

    Threads share none, since one may capture a graph while another does not.
    """
    streams: dict[int, tuple[Any, Any]] = _side.__dict__.setdefault("streams", {})
    if index not in streams:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(index))  # the first record creates the event
        streams[index] = torch.cuda.Stream(index, priority=-1), event
    return streams[index]


def side_stream_handles(index: int) -> tuple[int, int]:
    """Return the handles of the side stream and its event, for the C module."""
    stream, event = side_stream(index)
    return stream.cuda_stream, event.cuda_event


def bind(compiled: Any, arg_names: list[str], num_args: int, keep: Any) -> Any:
    """Return the C module's form of a compiled kernel, or None where only Triton can launch it.

    Args:
        compiled: Triton's compiled kernel.
        arg_names: the names of the kernel's parameters.
        num_args: how many of them are run-time arguments; the others are constexpr.
        keep: what must live as long as the kernel.
    """
    loaded = module()
    if loaded is None or compiled is None or needs_more_than_a_launch(compiled.metadata):
        return None
    metadata, signature = compiled.metadata, compiled.src.signature
    parameters, sizes = [], []
    for i, kind in enumerate(members(tuple(signature[name] for name in arg_names[:num_args]))):
        if kind == "constexpr":  # a None, or an integer that is 1
            continue
        letter = "p" if str(kind).startswith("*") else PARAMETER_TYPES.get(kind)
        if letter is None:
            return None
        parameters.append((i, letter))
        sizes.append(PARAMETER_SIZES.get(kind, 8))
    function = _load_function(compiled)
    if function is None or not _has_layout(function, [*sizes, *[8] * NUM_SCRATCH_POINTERS]):
        return None
    threads = WARP * metadata.num_warps
    return loaded.Kernel(function, threads, metadata.shared, tuple(parameters), (compiled, keep))


def members(args: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the arguments of a launch, and those of tuples one by one, as the C module counts.

    A kernel takes what belongs together as one tuple, whose members may be tuples again.
    """
    for arg in args:
        if isinstance(arg, tuple):
            yield from members(arg)
        else:
            yield arg


def needs_more_than_a_launch(metadata: Any) -> bool:
    """Return whether a kernel needs clusters, scratch memory, descriptors or the like."""
    return bool(
        getattr(metadata, "num_ctas", 1) != 1
        or getattr(metadata, "launch_cooperative_grid", False)
        or getattr(metadata, "launch_pdl", False)
        or getattr(metadata, "global_scratch_size", 0)
        or getattr(metadata, "profile_scratch_size", 0)
        or getattr(metadata, "tensordesc_meta", None)
    )


def _load_function(compiled: Any) -> int | None:
    """Return the driver's handle of a kernel, or None where only Triton can load it.

    Triton would load it in the same way, but it would first build a launcher for its signature.
    """
    metadata, device = compiled.metadata, torch.cuda.current_device()
    properties: Any = torch.cuda.get_device_properties(device)
    if metadata.shared > properties.shared_memory_per_block_optin:
        return None
    loaded = private_names.load_binary(metadata.name, compiled.kernel, metadata.shared, device)
    if loaded is None:
        return None
    _, function, _, _, max_threads = loaded
    return None if metadata.num_warps * WARP > max_threads else function


def _has_layout(function: int, sizes: list[int]) -> bool:
    """Return whether the driver says that a kernel has parameters of these sizes, and no others."""
    get_parameter = getattr(_library(), "cuFuncGetParamInfo", None)
    if get_parameter is None:  # drivers before CUDA 12.4
        return True
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    found: list[int] = []
    handle, where = ctypes.c_void_p(function), (ctypes.byref(offset), ctypes.byref(size))
    while len(found) <= len(sizes) and get_parameter(handle, len(found), *where) == 0:
        found.append(size.value)
    return found == sizes
