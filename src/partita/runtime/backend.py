"""The choice of the backend that serves a call, by the user and by what is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from types import FrameType
from typing import Any, Literal, TypeVar

import torch

from . import private_names
from .caches import register_cache

BACKENDS = ("auto", "reference", "triton", "numba")

Table = Literal["reference", "gpu", "cpu"]

Function = TypeVar("Function", bound=Callable[..., Any])

_default: str | None = None  # what a plain call of `backend` set for the whole process
_latest: str | None = None  # mirrors `_chosen` for compilers, which cannot trace a ContextVar
# The backend of the innermost block.
_chosen: ContextVar[str | None] = ContextVar("partita_backend", default=None)


def _known(name: str, origin: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{origin}: expected one of {', '.join(BACKENDS)}, got {name!r}")
    return name


class backend(ContextDecorator):
    """Serve calls by one backend: in a block, or everywhere by a plain call outside of any block.

    Args:
        name: `auto` (Triton on a GPU, Numba or ATen on the CPU), `reference` (plain PyTorch on any
            device), `triton`, or `numba`.

    A block applies to the current thread or task only. A plain call outside of any block sets the
    default of the process, which all threads share. Without such a call `PARTITA_BACKEND` sets the
    default. A backend that cannot serve a call raises `RuntimeError`; it never falls back silently.
    The backward pass of a graph runs on the backend of its forward pass, wherever it is called.

    Raises:
        ValueError: `name` is not one of these names.

    Example:
        >>> import torch, partita
        >>> with partita.backend("reference"):
        ...     partita.softmax(torch.zeros(2), dim=0)
        tensor([0.5000, 0.5000])
    """

    def __init__(self, name: str) -> None:
        global _default
        self.name = _known(name, "backend")
        self._tokens: list[Token[str | None]] = []
        self._previous = _default
        self._is_default = _chosen.get() is None
        if self._is_default:
            _default = name

    def __enter__(self) -> None:
        global _latest
        self._leave_default()
        self._tokens.append(_chosen.set(self.name))
        _latest = self.name

    def __exit__(self, *raised: object) -> None:
        global _latest
        _chosen.reset(self._tokens.pop())
        _latest = _chosen.get()

    def __call__(self, func: Function) -> Function:
        self._leave_default()
        return super().__call__(func)

    def _leave_default(self) -> None:
        """Undo the plain call that a block or a decorator begins with."""
        global _default
        if self._is_default:
            _default, self._is_default = self._previous, False


def current_backend() -> str:
    """Return the backend that the user chose, or `auto`."""
    chosen = (_latest if torch.compiler.is_compiling() else _chosen.get()) or _default
    if chosen is not None:
        return chosen
    variable = os.environ.get("PARTITA_BACKEND")
    return _known(variable, "PARTITA_BACKEND") if variable else "auto"


def is_installed(package: str) -> bool:
    """Return whether a package is installed, and no hook hides it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


# This is known from the import on, since Dynamo traces no search for a package.
_HAS_TRITON = is_installed("triton")


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return _HAS_TRITON


@functools.cache
def numba_problem() -> str | None:
    """Import Numba, and return why that fails, or None.

    An installed Numba may refuse to be imported, for example beside a NumPy that is too new for it.
    """
    try:
        importlib.import_module("numba")
        private_names.numba_make_array()
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":
            return "the package numba is not installed; pip install numba brings it"
        lines = str(error).strip().splitlines() or [""]
        return f"the package numba cannot be imported: {type(error).__name__}: {lines[0]}"
    return None


def caller_stacklevel() -> int:
    """Return the `stacklevel` with which the calling function warns at the user's line.

    The user's frame is the first one that is neither in this package nor in PyTorch.
    """
    folders = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__)
    library = tuple(folder + os.sep for folder in folders)
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(library):
        frame, level = frame.f_back, level + 1
    return level


@functools.cache
def _without_numba() -> Table:
    """Return the table that replaces Numba's kernels, and warn once."""
    message = (
        "partita: chains, CTC and transducers on the CPU run in PyTorch, several times slower than"
        f" with Numba: {numba_problem()}"
    )
    warnings.warn(message, RuntimeWarning, stacklevel=caller_stacklevel())
    return "reference"


register_cache("runtime.backend.numba_problem", numba_problem.cache_clear)
register_cache("runtime.backend.warned_about_numba", _without_numba.cache_clear)


def interpreting() -> bool:
    """Return whether Triton's interpreter runs the kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def resolve(name: str, device: torch.device, *, has_cpu: bool) -> Table:
    """Return the table that serves a call of an op, which has Numba kernels if `has_cpu`.

    Raises:
        RuntimeError: the backend of this name cannot serve the call.
    """
    if name == "auto":
        if device.type == "cuda" and has_triton():
            return "gpu"
        if has_cpu and device.type == "cpu":
            return "cpu" if numba_problem() is None else _without_numba()
        return "reference"
    if name == "triton":
        if not has_triton():
            raise RuntimeError("backend 'triton': the package triton is not installed")
        if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
            raise RuntimeError(
                "backend 'triton': expected tensors on a GPU (or TRITON_INTERPRET=1 set before the"
                f" import), got {device}"
            )
        return "gpu"
    if name == "numba":
        if not has_cpu:
            raise RuntimeError(
                "backend 'numba': this op has no Numba kernel; on the CPU it is served by ATen"
                " (backend 'reference')"
            )
        if device.type != "cpu":
            raise RuntimeError(f"backend 'numba': expected tensors on the CPU, got {device}")
        if numba_problem() is not None:
            raise RuntimeError(f"backend 'numba': {numba_problem()}")
        return "cpu"
    return "reference"
