"""Which floor serves a call: the choice of the user, and what this machine has."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

BACKENDS = ("auto", "reference", "triton", "numba")

_forced: str | None = None


def _known(name: str, origin: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{origin}: expected one of {', '.join(BACKENDS)}, got {name!r}")
    return name


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Serve every call inside the block by one backend, in this process.

    Args:
        name: `auto` (Triton on a GPU, Numba or ATen on the CPU), `reference` (plain PyTorch, any device), `triton`, or `numba`.

    The variable `PARTITA_BACKEND` does the same from outside. A backend that cannot serve a call raises `RuntimeError`; it never falls back
    in silence. The backward pass of a graph runs on the backend of its forward pass, wherever it is called.

    Raises:
        ValueError: `name` is none of these.

    Example:
        >>> import torch, partita
        >>> with partita.backend("reference"):
        ...     partita.softmax(torch.zeros(2), dim=0)
        tensor([0.5000, 0.5000])
    """
    global _forced
    previous, _forced = _forced, _known(name, "backend")
    try:
        yield
    finally:
        _forced = previous


def current() -> str:
    """The backend that the user asked for, `auto` unless told otherwise."""
    if _forced is not None:
        return _forced
    return _known(os.environ.get("PARTITA_BACKEND") or "auto", "PARTITA_BACKEND")


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _without_numba() -> str:
    """The floor that serves instead, and a word about it, once."""
    message = "partita: chains and CTC on the CPU run in PyTorch, several times slower than with Numba: pip install numba brings it"
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    return "reference"


def interpreting() -> bool:
    """True where Triton kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def resolve(name: str, device: torch.device, *, numba: bool) -> str:
    """The floor that serves a call on `device`: `reference`, `kernels` or `cpu`; `numba` says whether the op has such a column."""
    if name == "auto":
        if device.type == "cuda" and has_triton():
            return "kernels"
        if numba and device.type == "cpu":
            return "cpu" if has_numba() else _without_numba()
        return "reference"
    if name == "triton":
        if not has_triton():
            raise RuntimeError("backend 'triton': the package triton is not installed")
        if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
            raise RuntimeError(f"backend 'triton': expected tensors on a GPU (or TRITON_INTERPRET=1 set before the import), got {device}")
        return "kernels"
    if name == "numba":
        if not numba:
            raise RuntimeError("backend 'numba': this op has no Numba kernel; on the CPU it is served by ATen (backend 'reference')")
        if device.type != "cpu":
            raise RuntimeError(f"backend 'numba': expected tensors on the CPU, got {device}")
        if not has_numba():
            raise RuntimeError("backend 'numba': the package numba is not installed; pip install numba brings it")
        return "cpu"
    return "reference"
