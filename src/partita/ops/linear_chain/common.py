"""Sizes that the backends of dense linear chains share."""

from __future__ import annotations

from ...primitives.gpu.target import assumed

RANGE_ROWS = 16  # states whose transitions one part of the search for the range reads

# Triton 3.6 compiles products of fp64 matrices for NVIDIA GPUs only, and the scans choose layouts.
HAS_KERNELS = assumed.vendor == "nvidia"


def saved_shape(table: str, T: int, N: int, C: int) -> tuple[int, ...]:
    """Return the shape of the fp64 tensor that log Z saves for its gradient.

    Args:
        table: the backend that serves the call, `reference`, `gpu` or `cpu`.
        T, N, C: the sizes of the emissions.
    """
    if table == "reference" or (table == "gpu" and not HAS_KERNELS):
        return (0,)
    if table == "gpu":
        return (sum(saved_sizes(T, N, C, True)),)
    return (T, N, C)


def saved_sizes(T: int, N: int, C: int, save: bool) -> list[int]:
    """Return the sizes of what the GPU saves, see `gpu/launch.py`; without `save`, of its work."""
    return [2 * T * N * C if save else 0, T * N, T * N, 2 * -(-C // RANGE_ROWS)]
