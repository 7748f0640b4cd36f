"""What the backends of dense linear chains agree on."""

from __future__ import annotations


def saved_shape(table: str, T: int, N: int, C: int) -> tuple[int, ...]:
    """Return the shape of the fp64 tensor that log Z saves for its gradient.

    Args:
        table: the backend that serves the call, `reference`, `gpu` or `cpu`.
        T, N, C: the sizes of the emissions.
    """
    if table == "reference":
        return (0,)
    if table == "gpu":
        return (2, T, N, C)
    return (T, N, C)
