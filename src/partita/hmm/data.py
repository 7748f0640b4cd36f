"""Conversion of what users give to padded batches, and of results to the form they gave."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.lengths import Lengths, as_lengths

ROWS = 512  # of one product in a sum of products
FEW_COLUMNS = 64  # of the left side, whose sum of products is a single one on a GPU
K_MEANS_STEPS = 25
MANY = 2**16  # rows from which on NumPy has the memory; restarts in one batch have fewer on a CPU


class Batch(NamedTuple):
    """Sequences of different lengths as one padded batch, with the steps first.

    Fields:
        values: `[T * N, F]` fp64, the values at step t of sequence n in row t * N + n; zero where
            a value is missing and past the lengths.
        observed: `[T * N, F]` bool, False where a value is missing; None where all are there.
        missing: `[T * N, 1]` bool, True where a whole row is missing; None where none is.
        lengths: `[N]`, None where all are T.
        shape: T and N.
        rows: the row of each row of X, `[M]`; None where all lengths are equal.
        restore: brings a result to the user's form: its dtype, its device, an array for arrays.
    """

    values: Tensor
    observed: Tensor | None
    missing: Tensor | None
    lengths: Tensor | None
    shape: tuple[int, int]
    rows: Tensor | None
    restore: Callable[[Tensor], Any]

    def in_order(self, result: Tensor) -> Tensor:
        """Return a result `[T, N, ...]` in the order of the rows of X, `[M, ...]`."""
        if self.rows is None:
            return result.transpose(0, 1).reshape(-1, *result.shape[2:])
        return result.reshape(-1, *result.shape[2:])[self.rows]


def as_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor, an array or nested lists as a tensor on its device.

    What the mask of an array leaves out becomes NaN, which is a missing value.
    """
    if isinstance(value, Tensor):
        return value.detach()
    import numpy as np

    try:
        if np.ma.is_masked(value):
            value = value.astype(np.float64).filled(np.nan)
        array = np.asarray(value)
        # PyTorch takes neither a read-only array nor one that is read backwards.
        is_taken = array.flags.writeable and min(array.strides, default=0) >= 0
        return torch.from_numpy(array if is_taken else array.copy())
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: expected a tensor, an array or lists of numbers, got {type(value).__name__}"
            f" ({error})"
        ) from None


def form_of(X: Any) -> Callable[[Tensor], Any]:
    """Return the function that brings results to the form of X."""
    is_array = not isinstance(X, Tensor)
    dtype = getattr(X, "dtype", None)
    dtype = torch.float32 if str(dtype).removeprefix("torch.") == "float32" else torch.float64
    device = X.device if isinstance(X, Tensor) else None

    def restore(result: Tensor) -> Any:
        if result.is_floating_point():
            result = result.to(dtype)
        return result.cpu().numpy() if is_array else result.to(device)

    return restore


def batch_of(X: Any, lengths: Lengths | None) -> Batch:
    """Return rows `[M, F]` of all sequences as a batch, or raise for a wrong shape or length."""
    values = as_tensor("X", X)
    if values.ndim != 2 or not values.numel():
        raise ValueError(
            "X: expected shape [M, F], the values of all sequences one after another, with M and F"
            f" of at least 1, got {list(values.shape)}"
        )
    if values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"X: expected numbers, got {values.dtype}")
    is_whole = not values.is_floating_point()
    M = len(values)
    sizes = _checked_lengths(lengths, M)
    T, N = int(sizes.max()), len(sizes)
    is_ragged, rows = T * N > M, None
    # Row t * N + n of the batch has step t of sequence n.
    if is_ragged:
        sequence = torch.repeat_interleave(torch.arange(N), sizes)
        step = torch.arange(M) - (sizes.cumsum(0) - sizes)[sequence]
        rows = (step * N + sequence).to(values.device)
        values = values.double()
        values = values.new_zeros(T * N, values.shape[1]).index_copy_(0, rows, values)
    else:
        # One copy brings both the dtype and the order.
        values = values.unflatten(0, (N, T)).transpose(0, 1)
        values = values.to(torch.float64, memory_format=torch.contiguous_format)
        values = values.reshape(M, -1)
    observed = missing = None
    # A sum that is finite has no NaN and no infinity.
    if not is_whole and not math.isfinite(values.sum()):
        found = ~values.isnan()
        counts = torch.stack([found.all(), found.any(1).all(), values.isinf().any()]).tolist()
        if counts[2]:
            raise ValueError("X: expected finite values, or NaN where one is missing, got infinity")
        observed = None if counts[0] else found
        missing = None if counts[1] else ~found.any(1, keepdim=True)
        values = values if counts[0] else values.nan_to_num()
    on_device = sizes.to(values.device) if is_ragged else None
    return Batch(values, observed, missing, on_device, (T, N), rows, form_of(X))


def _checked_lengths(lengths: Lengths | None, M: int) -> Tensor:
    """Return the lengths of the sequences on the host, or raise where their sum is not M."""
    if lengths is None:
        return torch.tensor([M])
    sizes = as_tensor("lengths", lengths).reshape(-1)
    sizes = as_lengths("lengths", sizes, len(sizes)).cpu()
    if not len(sizes) or int(sizes.min()) < 1:
        raise ValueError(f"lengths: expected lengths of at least 1, got {sizes.tolist()}")
    if int(sizes.sum()) != M:
        raise ValueError(
            f"lengths: expected a sum of {M}, the number of rows of X, got {int(sizes.sum())}"
        )
    return sizes


def random_state(value: Any) -> Any:
    """Return NumPy's `RandomState` of a seed, a `RandomState`, or a generator of PyTorch.

    None takes a seed from PyTorch's default generator.
    """
    import numpy as np

    if isinstance(value, np.random.RandomState):
        return value
    if value is None or isinstance(value, torch.Generator):
        device = value.device if value is not None else "cpu"
        value = int(torch.randint(2**31 - 1, (), generator=value, device=device))
    try:
        return np.random.RandomState(value)
    except (TypeError, ValueError) as error:
        raise type(error)(
            "random_state: expected a seed, a RandomState or a torch.Generator, got"
            f" {value!r} ({error})"
        ) from None


def generator_of(value: Any, device: torch.device) -> torch.Generator:
    """Return a generator of PyTorch on a device for what `random_state` takes."""
    if isinstance(value, torch.Generator) and value.device == device:
        return value
    return torch.Generator(device).manual_seed(int(random_state(value).randint(2**31 - 1)))


def normalized(counts: Tensor, old: Tensor) -> Tensor:
    """Return rows divided by their sums; a row that is zero keeps its old values."""
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts / total, old)


def prior(value: Any, like: Tensor, ndim: int = 0) -> Any:
    """Return a number as it is, and any other prior as a tensor beside `like`.

    A tensor of `ndim` dimensions has a row for each state, and is repeated for all restarts.
    """
    if isinstance(value, int | float):
        return value
    found = as_tensor("prior", value).to(like)
    if found.ndim == ndim and 1 < len(found) < len(like):
        found = found.repeat(len(like) // len(found), *(1,) * (ndim - 1))
    return found


def moved(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return fp64 tensors of a CPU on a device, to which they go in one copy."""
    if device.type == "cpu" or not tensors:
        return tensors
    flat = torch.cat([x.reshape(-1) for x in tensors.values()]).to(device)
    parts = flat.split([x.numel() for x in tensors.values()])
    return {name: x.view(tensors[name].shape) for name, x in zip(tensors, parts, strict=True)}


def at_least_zero(value: Any) -> Any:
    return value.clamp(min=0) if isinstance(value, Tensor) else max(value, 0)


def products(left: Tensor, right: Tensor) -> Tensor:
    """Return `[M, K]` times `[K, C]`.

    On a CPU NumPy has the memory for many rows: it asks for large pages, and PyTorch's memory takes
    longer to touch for the first time than the product takes.
    """
    if not left.is_cpu or len(left) < MANY:
        return left @ right
    import numpy as np

    return torch.mm(left, right, out=torch.from_numpy(np.empty((len(left), right.shape[1]))))


def sums_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the product `[C, K]` of `[M, C]` and `[M, K]`, whose sums are over many rows.

    It is a batch of products of some rows, which takes half as long on a CPU as one of all. A GPU
    divides a single one among its multiprocessors where the columns are few.
    """
    whole = len(left) // ROWS * ROWS
    if whole <= ROWS or (not left.is_cpu and left.shape[1] <= FEW_COLUMNS):
        return left.T @ right
    parts = [x[:whole].reshape(-1, ROWS, x.shape[1]) for x in (left, right)]
    found = (parts[0].mT @ parts[1]).sum(0)
    return found if whole == len(left) else found.addmm(left[whole:].T, right[whole:])


def k_means(points: Tensor, centers: int, restarts: int, runs: int, random: Any) -> Tensor:
    """Return the centers `[R, C, D]` of k-means on points `[M, D]`, each the best of some runs.

    All runs are one batch. Each starts at points that are drawn far from each other.

    Source: Arthur and Vassilvitskii, k-means++: the advantages of careful seeding, 2007.
    """
    number = restarts * runs
    drawn = torch.from_numpy(random.random_sample((centers, number))).to(points)
    first = (drawn[0] * len(points)).long().clamp(max=len(points) - 1)
    found = points[first][:, None]  # [runs, 1, D]
    nearest = points.new_full((number, len(points)), torch.inf)
    for uniform in drawn[1:]:
        nearest = torch.minimum(nearest, _squares(points, found[:, -1:])[..., 0])
        total = nearest.cumsum(1)
        at = torch.searchsorted(total, (uniform * total[:, -1])[:, None], right=True)
        found = torch.cat([found, points[at.clamp(max=len(points) - 1)]], 1)
    for _ in range(K_MEANS_STEPS):
        distance = _squares(points, found)
        members = torch.nn.functional.one_hot(distance.argmin(-1), centers).to(points)
        size = members.sum(1)[..., None]
        found = torch.where(size > 0, members.mT @ points / size.clamp(min=1), found)
    inertia = _squares(points, found).amin(-1).sum(1).view(restarts, runs)
    # Runs find the same centers in other orders, and rounding must not choose among these.
    is_best = inertia <= inertia.amin(1, keepdim=True) * (1 + 1e-4)
    best = torch.arange(0, number, runs).to(points.device) + is_best.to(torch.uint8).argmax(1)
    return found[best]


def _squares(points: Tensor, centers: Tensor) -> Tensor:
    """Return the squared distances `[runs, M, C]` between points and centers `[runs, C, D]`."""
    products = points @ centers.mT
    squares = points.square().sum(1)[:, None] + centers.square().sum(2)[:, None] - 2 * products
    return squares.clamp(min=0)
