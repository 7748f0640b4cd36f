"""Inputs that break kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Layout = Literal["contiguous", "reversed", "framed", "every_other"]


class Labelled(NamedTuple):
    """Logits and their labels.

    Fields:
        logits: `[rows, classes]`.
        labels: `[rows]`, int64.
    """

    logits: Tensor
    labels: Tensor


def sample_rows(
    rows: int = 1823,
    columns: int = 781,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensor:
    """Return standard normal rows, the same on all devices; the default sizes are no block's.

    Args:
        rows, columns, dtype, device: the sizes, dtype and device of the result.
        seed: the seed of the generator.

    Returns:
        `[rows, columns]`.

    Raises:
        RuntimeError: a size below 0.

    Example:
        >>> from partita.testing import sample_rows
        >>> sample_rows(3, 4).shape
        torch.Size([3, 4])
    """
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(
        device, dtype
    )


def sample_labels(
    rows: int = 4,
    classes: int = 10,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Labelled:
    """Return standard normal logits with uniform labels, the same on all devices.

    Args:
        rows, classes, dtype, device: the sizes, dtype and device of the logits.
        seed: the seed of the generator.

    Returns:
        `Labelled(logits [rows, classes], labels [rows])`.

    Raises:
        RuntimeError: a size below 0, or rows without classes.

    Example:
        >>> from partita.testing import sample_labels
        >>> sample_labels().labels.shape
        torch.Size([4])
    """
    labels = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(seed))
    return Labelled(
        sample_rows(rows, classes, dtype=dtype, device=device, seed=seed), labels.to(device)
    )


def _framed(x: Tensor) -> Tensor:
    frame = x.new_full([size + 3 for size in x.shape], torch.nan)
    inner = tuple(slice(1, size + 1) for size in x.shape)
    frame[inner] = x
    return frame[inner]


def _reversed(x: Tensor) -> Tensor:
    dims = range(x.ndim)[::-1]
    return x.permute(*dims).contiguous().permute(*dims)


def _leading_inf(x: Tensor) -> Tensor:
    x[:, : x.shape[1] - max(1, x.shape[1] // 8)] = -torch.inf
    return x


def _scattered_inf(x: Tensor) -> Tensor:
    x[:, 1:] = x[:, 1:].masked_fill(x[:, 1:] < 0, -torch.inf)
    return x


def inf_rows(x: Tensor) -> Tensor:
    x[::2] = -torch.inf
    return x


# The catalogue of calls has these values and layouts too.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "offset": lambda x: x + 1e4,
    "wide": lambda x: 10 * x,
    "huge": lambda x: torch.finfo(x.dtype).max / 64 * x.sign(),
    "equal": torch.zeros_like,
}
LAYOUTS: dict[Layout, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "reversed": _reversed,
    "framed": _framed,
    "every_other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}
_EDGES: dict[str, Callable[[Tensor], Tensor]] = {
    **VALUES,
    "leading_inf": _leading_inf,
    "scattered_inf": _scattered_inf,
    "inf_rows": inf_rows,
    "transposed": _reversed,
    "framed": _framed,
    "every_other": LAYOUTS["every_other"],
    "one_row_expanded": lambda x: x[:1].expand_as(x),
    "one_column_expanded": lambda x: x[:, :1].expand_as(x),
    "one_column": lambda x: x[:, :1],
    "no_rows": lambda x: x[:0],
}

EDGES = tuple(_EDGES)
"""The edges that `edge_rows` knows, by name."""


def edge_rows(
    edge: str,
    rows: int = 5,
    columns: int = 37,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensor:
    """Return rows that a kernel may get wrong, of one kind for each name in `EDGES`.

    Args:
        edge: `plain`; values `offset` by 1e4, `wide` (tens of nats apart), `huge` (near the largest
            number), or all `equal`; `leading_inf` (-inf in all but the last eighth of the columns),
            `scattered_inf`, `inf_rows` (each second row is all -inf); strides that are
            `transposed`, `framed` (a slice with NaN on all sides), `every_other` (columns two
            apart), `one_row_expanded` and `one_column_expanded` (stride 0); `one_column`;
            `no_rows`.
        rows, columns, dtype, device: the sizes, dtype and device before the edge is applied.
        seed: the seed of the generator.

    Returns:
        `[rows, columns]`; one column or no rows for the edges of these names.

    Raises:
        ValueError: an edge that is not in `EDGES`.

    Example:
        >>> from partita.testing import EDGES, edge_rows
        >>> edge_rows("transposed", 2, 3).stride()
        (1, 2)
        >>> [edge for edge in EDGES if edge_rows(edge).isinf().any()]
        ['leading_inf', 'scattered_inf', 'inf_rows']
    """
    if edge not in _EDGES:
        raise ValueError(f"edge: expected one of {', '.join(EDGES)}, got {edge!r}")
    return _EDGES[edge](sample_rows(rows, columns, dtype=dtype, device=device, seed=seed))
