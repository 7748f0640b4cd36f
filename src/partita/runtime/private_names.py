"""The private names of PyTorch, Triton and Numba: no other file reads one.

A release may move or drop any of them. Then what stands beside the name serves: it costs time,
memory or a feature, which a comment names, and no right result. A test removes each name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMES: dict[str, bool] = {}  # the names below `torch`, and whether this release has them


def _find(path: str, otherwise: Any = None) -> Any:
    """Return what a path below `torch` names, or else what serves without it."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    NAMES[path] = found is not None
    return otherwise if found is None else found


# Function transforms (`torch.func`). Where one of these names is missing, a call is served as if
# `vmap` were active: through PyTorch's dispatcher, with derivatives of the reference.
peek_interpreter_stack = _find("_C._functorch.peek_interpreter_stack", lambda: "unknown")
is_batchedtensor = _find("_C._functorch.is_batchedtensor", lambda tensor: True)
is_legacy_batchedtensor = _find("_C._functorch.is_legacy_batchedtensor", lambda tensor: True)
# A view of the wrapper of a transform that has ended is a view of the tensor inside.
unwrap_if_dead = _find("_C._functorch.unwrap_if_dead", lambda tensor: tensor.view_as(tensor))
_level = _find("_C._functorch.maybe_current_level", lambda: None)
_depth = _find("_C._functorch.get_dynamic_layer_stack_depth")
# The compiler of PyTorch 2.11 knows the level alone, and breaks the graph where there is one.
_KNOWS_DEPTH = _depth is not None and torch.__version__ >= "2.12"
_VMAP = _find("_C._functorch.TransformType.Vmap")
_is_wrapper = _find("_C._functorch.is_functorch_wrapped_tensor")
_get_unwrapped = _find("_C._functorch.get_unwrapped")


def is_vmap(transform: Any) -> bool:
    """Return whether a transform, which `peek_interpreter_stack` has returned, is `vmap`."""
    return _VMAP is None or transform == "unknown" or transform.key() == _VMAP


def has_traced_level() -> bool:
    """Return whether the compiler that traces this call is inside of a function transform."""
    return _depth() > 0 if _KNOWS_DEPTH else _level() is not None


def at_some_level(tensor: Tensor, has_property: Callable[[Tensor], bool]) -> bool:
    """Return whether a tensor, or what it wraps at some level of the transforms, has a property."""
    if _is_wrapper is None or _get_unwrapped is None:
        return True
    while not has_property(tensor):
        if not _is_wrapper(tensor):
            return False
        tensor = _get_unwrapped(tensor)
    return True


# Dispatch modes. Without the number of active ones each call goes through PyTorch's dispatcher.
# Without the class nothing is replayed.
len_torch_dispatch_stack = _find("_C._len_torch_dispatch_stack", lambda: 1)
HAS_DISPATCH_MODES = _find("utils._python_dispatch.TorchDispatchMode") is not None
if HAS_DISPATCH_MODES:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:

    class TorchDispatchMode:  # type: ignore[no-redef]
        """A mode that sees nothing."""

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *raised: Any) -> None:
            pass


# Tracers. Without these names a check reads the values of a tensor that a tracer follows, which
# PyTorch refuses.
_get_dispatch_mode = _find("_C._get_dispatch_mode")
_TRACERS = tuple(
    key
    for name in ("FAKE", "PROXY", "FUNCTIONAL")
    if (key := _find(f"_C._TorchDispatchModeKey.{name}")) is not None
)


def is_tracing() -> bool:
    """Return whether a tracer follows the call."""
    if _get_dispatch_mode is None or not len_torch_dispatch_stack():
        return False
    return any(_get_dispatch_mode(key) is not None for key in _TRACERS)


# Autograd. Without the guard, nothing refuses a transform of an op that would lose a derivative.
AutoDispatchBelowAutograd = _find("_C._AutoDispatchBelowAutograd")
_HAS_LEVEL = _find("autograd.forward_ad._current_level") is not None


def may_have_tangents() -> bool:
    """Return whether forward mode is active; without its level, it may be."""
    return not _HAS_LEVEL or torch.autograd.forward_ad._current_level >= 0


# Tensors. Without versions nothing that was made from a tensor is cached, and without any of the
# three a gradient is not written over its logits.
_HAS_VERSION = _find("Tensor._version") is not None
CAN_WRITE_OVER_LOGITS = _HAS_VERSION and None not in (
    _find("Tensor._base"),
    _find("Tensor._is_view"),
)


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to, or None if nobody counts, as in inference mode."""
    return tensor._version if _HAS_VERSION and not tensor.is_inference() else None


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which this is a view, or else the tensor itself."""
    return tensor._base if tensor._is_view() else tensor


def _has_no_memory(tensor: Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:
        return True
    return False


is_zerotensor = _find("Tensor._is_zerotensor", _has_no_memory)


def is_replica(model: torch.nn.Module) -> bool:
    """Return whether `nn.DataParallel` made a model, which is then refused."""
    return getattr(model, "_is_replica", False)


# CUDA. The functions that serve instead do the same in more time.
current_device = _find("_C._cuda_getDevice", torch.cuda.current_device)
current_raw_stream = _find(
    "_C._cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)
empty_strided_cuda = _find(
    "_C._dynamo.guards._empty_strided_cuda",
    lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda"),
)
# Without this, times of small kernels have some of the host's time in them.
sleep = _find("cuda._sleep", lambda cycles: None)
# Without these names, the allocator keeps the memory of a capture that has failed for it.
_end_allocate_to_pool = _find("_C._cuda_endAllocateToPool")
_release_pool = _find("_C._cuda_releasePool")


def abandon_pool(index: int, pool: Any) -> None:
    """Tell the allocator of a GPU that the capture in a pool has ended without a graph."""
    if _end_allocate_to_pool is not None and _release_pool is not None:
        with contextlib.suppress(RuntimeError):  # the capture may have failed before it or after it
            _end_allocate_to_pool(index, pool)
            _release_pool(index, pool)


# Distributed. Without `_functional_collectives`, parallel losses run in eager mode alone. Without
# one of the others, the GPUs of a host share no memory, and the ranks gather their statistics.
resolve_process_group = _find("distributed.distributed_c10d._resolve_process_group")
process_group_store = _find("distributed.distributed_c10d._get_process_group_store")
register_process_group = _find("_C._distributed_c10d._register_process_group")
unregister_process_group = _find("_C._distributed_c10d._unregister_process_group")
CAN_SHARE_MEMORY = None not in (
    resolve_process_group,
    process_group_store,
    register_process_group,
    unregister_process_group,
)


def functional_collectives() -> Any:
    """Return the collectives that compilers trace, or None where they are missing."""
    try:
        import torch.distributed._functional_collectives  # registers them
    except ImportError:
        return None
    return torch.ops._c10d_functional


def symmetric_memory() -> Any:
    """Return the module of PyTorch whose tensors every GPU of a group can write to."""
    import torch.distributed._symmetric_memory

    return torch.distributed._symmetric_memory


def timeout_of(group: Any, device: torch.device) -> float | None:
    """Return the seconds after which collectives of a group fail, or None if they are unknown."""
    with contextlib.suppress(AttributeError, RuntimeError):
        return group._get_backend(device).options._timeout.total_seconds()
    return None


# ATen. Where one of these is missing, its formula serves, whose last bits are others.
softmax_gradient = _find(
    "_softmax_backward_data",
    lambda grad, output, dim, dtype: output * (grad - (output * grad).sum(dim, keepdim=True)),
)
log_softmax_gradient = _find(
    "_log_softmax_backward_data",
    lambda grad, output, dim, dtype: grad - output.exp() * grad.sum(dim, keepdim=True),
)


# Triton. Where one of these is missing, Triton launches the kernels.
def load_binary(*args: Any) -> Any:
    """Load a compiled kernel as Triton would, or return None."""
    with contextlib.suppress(ImportError, AttributeError):
        from triton.runtime.driver import driver

        return driver.active.utils.load_binary(*args)
    return None


def build_c_module(source: str, name: str, flags: list[str]) -> Any:
    """Compile a C module, or load it from Triton's cache."""
    from triton.runtime.build import compile_module_from_src

    return compile_module_from_src(source, name, ccflags=flags)


# Numba. Without this, chains, CTC and transducers on a CPU run in PyTorch, as without Numba.
def numba_make_array() -> Any:
    """Return Numba's function that finds the fields of an array in generated code."""
    from numba.np.arrayobj import make_array

    return make_array


# Without this, functions that allocate nothing count references to arrays, which takes time.
def numba_without_counts() -> dict[str, Any]:
    """Return the options of functions that count no references to arrays."""
    from numba.core.options import DefaultOptions

    return {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}
