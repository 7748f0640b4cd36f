"""Operations on rows in plain PyTorch that the references share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.autograd import is_batched_gradient
from ..runtime.dtypes import acc_dtype

# The elements of rows that are computed together on a CPU: their temporaries fit in a cache.
ELEMENTS = 2**20
# From this width on PyTorch's threads share the sum of a row that is alone, in another order.
SHARED_WIDTH = 2**15


def finite_shift(maximum: Tensor) -> Tensor:
    """Return the maximum to subtract before an exponential: 0 where the maximum is -inf."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def chunks(total: int, size: int) -> Iterator[slice]:
    """Return slices of at most `size` elements, or of one, that cover `total` elements."""
    size = max(size, 1)
    return (slice(first, min(first + size, total)) for first in range(0, total, size))


def row_chunks(rows: Tensor) -> Iterator[slice]:
    """Return slices of the rows of `[M, V]`: small ones on a CPU, else one slice with all rows."""
    if rows.device.type != "cpu" or not rows.numel():
        return chunks(len(rows), len(rows))
    return (index[0] for index in _blocks(rows.shape[:1], rows.shape[1]))


def part_of(value: Any, rows: slice) -> Any:
    """Return some rows of a tensor, or of the tensors in a named tuple; other values stay."""
    if hasattr(value, "_make"):
        return value._make(part_of(field, rows) for field in value)
    return value[rows] if isinstance(value, Tensor) else value


def by_rows(
    function: Callable[..., Any], *, logits: int = 0, classes: int = -1, shared: Sequence[int] = ()
) -> Callable[..., Any]:
    """Return a function of rows that computes on a CPU a few rows at a time.

    The temporary tensors of the function are as large as these rows then, and it gets the classes
    of a row next to each other, since PyTorch adds up others in another order. It returns a
    tensor, which gets the memory layout of the logits, or a tuple of tensors, all of them by rows.

    Args:
        function: takes positional arguments, which may be named tuples of tensors.
        logits: the position of the logits.
        classes: the dimension of the classes in the logits, 1 or -1.
        shared: the positions of the tensors that all rows have in common.
    """

    def of_some(*args: Any) -> Any:
        """Return the function's results for some rows; one that is wide gets a copy beside it."""
        rows: Tensor = args[logits]
        is_alone = rows.numel() == rows.shape[classes] >= SHARED_WIDTH
        if rows.device.type != "cpu" or not is_alone or torch.get_num_threads() == 1:
            return function(*args)
        join = torch.cat if rows.ndim > 1 else torch.stack

        def twice(value: Any, position: int) -> Any:
            if hasattr(value, "_make"):
                return value._make(twice(field, position) for field in value)
            is_shared = not isinstance(value, Tensor) or position in shared
            return value if is_shared else join([value, value.detach()])

        def first(found: Tensor) -> Tensor:
            return found[:1] if rows.ndim > 1 else found[0]

        found = function(*map(twice, args, range(len(args))))
        if isinstance(found, Tensor):
            return first(found)
        fields = map(first, found)
        return found._make(fields) if hasattr(found, "_make") else tuple(fields)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        rows: Tensor = args[logits]
        is_small = rows.numel() <= ELEMENTS and rows.movedim(classes, -1).is_contiguous()
        if rows.device.type != "cpu" or rows.ndim == 1 or not rows.numel() or is_small:
            found = of_some(*args)
            return laid_out_like(found, rows) if isinstance(found, Tensor) else found
        rows_shape, results = rows.select(classes, 0).shape, list[Tensor]()

        def classes_last(tensor: Tensor) -> Tensor:
            return tensor.movedim(classes, -1) if tensor.ndim == rows.ndim else tensor

        def argument(value: Any, position: int, index: tuple[slice, ...]) -> Any:
            if hasattr(value, "_make"):
                return value._make(argument(field, position, index) for field in value)
            if not isinstance(value, Tensor) or position in shared:
                return value
            value = classes_last(value)[index]
            return value.contiguous().movedim(-1, classes) if value.ndim == rows.ndim else value

        def memory(found: Tensor) -> Tensor:
            if found.ndim == rows.ndim and found.shape[classes] == rows.shape[classes]:
                return torch.empty_like(rows, dtype=found.dtype)
            return found.new_empty(rows_shape + found.shape[len(rows_shape) :])

        for index in _blocks(rows_shape, rows.shape[classes]):
            found = of_some(*(argument(arg, i, index) for i, arg in enumerate(args)))
            fields = (found,) if isinstance(found, Tensor) else found
            results = results or list(map(memory, fields))
            for result, field in zip(results, fields, strict=True):
                classes_last(result)[index].copy_(classes_last(field))
        if isinstance(found, Tensor):
            return results[0]
        return found._make(results) if hasattr(found, "_make") else tuple(results)

    return run


def _blocks(shape: Sequence[int], classes: int) -> Iterator[tuple[slice, ...]]:
    """Return indices of rows, `shape`, with about `ELEMENTS` elements each, and two rows at least.

    A single row would be computed twice; see `by_rows`.
    """
    total, elements = shape[0], torch.Size(shape[1:]).numel() * classes
    if elements > ELEMENTS and len(shape) > 1:
        for first in range(total):
            yield from ((slice(first, first + 1), *rest) for rest in _blocks(shape[1:], classes))
        return
    number = max(min(-(-total * elements // ELEMENTS), total // 2), 1)
    bounds = [total * i // number for i in range(number + 1)]
    yield from ((slice(*pair),) for pair in itertools.pairwise(bounds))


def aligned_rows(rows: Tensor, vector: int) -> Tensor:
    """Return rows, `[..., C]`, that start on 16 bytes if their width is a multiple of `vector`.

    Triton adds up a tile in an order that follows from the alignment of its rows. So rows of
    adjacent classes that start elsewhere are copied, and get the bits that they would have there.
    """
    *strides, stride = rows.stride()
    can_be = stride == 1 and rows.shape[-1] % vector == 0
    are = rows.data_ptr() % 16 == 0 and not any(stride % vector for stride in strides)
    return rows.clone(memory_format=torch.contiguous_format) if can_be and not are else rows


def inert_rows(statistics: Iterable[Tensor], grads: Iterable[Tensor | None]) -> Tensor:
    """Return which rows no result depends on although their derivatives would be NaN, `[...]`.

    These rows have no gradient, and a statistic that is not finite. There are none for batched
    gradients, of which PyTorch knows few operations.

    Args:
        statistics: statistics of the rows, `[...]` each.
        grads: the gradients of all results of the rows, `[...]` each or None for zeros.
    """
    grads = list(grads)
    is_inert = ~torch.stack([statistic.isfinite() for statistic in statistics]).all(0)
    if is_batched_gradient(*grads):
        return torch.zeros_like(is_inert)
    for grad in grads:
        is_inert = is_inert if grad is None else is_inert & (grad == 0)
    return is_inert


def without_inert_rows(
    rows: Tensor, statistics: Iterable[Tensor], grads: Iterable[Tensor | None]
) -> Tensor:
    """Return the rows, `[..., C]`, with zeros in the inert ones; see `inert_rows`."""
    return torch.where(inert_rows(statistics, grads).unsqueeze(-1), 0, rows)


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """Return the logits in the accumulator dtype, soft-capped unless `softcap` is 0."""
    x = logits.to(acc_dtype(logits.dtype))
    return softcap * (x / softcap).tanh() if softcap else x


def softcap_slope(logits: Tensor, softcap: float) -> Tensor:
    """Return the derivative of soft-capping, 1 - tanh², without cancellation near a tanh of 1."""
    t = (logits.to(acc_dtype(logits.dtype)) / softcap).tanh()
    return (1 - t) * (1 + t)


def laid_out_like(result: Tensor, like: Tensor) -> Tensor:
    """Return the result with the memory layout of another tensor.

    Kernels lay out their results in this way, and the fakes tell compilers so.
    """
    output = torch.empty_like(like, dtype=result.dtype)
    return result if result.stride() == output.stride() else output.copy_(result)
