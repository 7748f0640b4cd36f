"""What the backends of semi-Markov chains agree on."""

from __future__ import annotations

# What each backend saves for the gradient: tensors [T, N, C] in fp64.
SAVED = {"reference": 0, "gpu": 4, "cpu": 2}


def saved_shape(table: str, T: int, N: int, C: int) -> tuple[int, ...]:
    """Return the shape of the fp64 tensor that log Z saves for its gradient.

    Args:
        table: the backend that serves the call, `reference`, `gpu` or `cpu`.
        T, N, C: the sizes of the emissions.
    """
    return (SAVED[table], T, N, C) if SAVED[table] else (0,)
