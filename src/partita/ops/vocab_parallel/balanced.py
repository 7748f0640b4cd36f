"""The distribution of a ragged batch over ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def balanced(work: Tensor | Sequence[float], ranks: int) -> list[list[int]]:
    """Distribute the sequences of a ragged batch over ranks with about equal work for each.

    Args:
        work: the work of each sequence `[N]`, in any unit: input length times target length for
            CTC, the length for a chain. The call waits for a tensor on a GPU.
        ranks: the number of ranks.

    Returns:
        For each rank the indices of its sequences in ascending order. The numbers of sequences of
        two ranks differ by at most one.

    Raises:
        ValueError: `ranks` is below 1, or some work is negative or not a number.

    Source: Graham, Bounds on multiprocessing timing anomalies, 1969: the longest job goes first,
    each job to the rank with the least work.

    Example:
        >>> import partita
        >>> partita.parallel.balanced([9, 1, 1, 1, 8, 2], 2)
        [[0, 1, 2], [3, 4, 5]]
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks!r}")
    sizes = work.tolist() if isinstance(work, Tensor) else list(work)
    if not all(size >= 0 for size in sizes):
        raise ValueError("work: expected numbers of at least 0")
    capacity = [len(sizes) // ranks + (rank < len(sizes) % ranks) for rank in range(ranks)]
    loads = [0.0] * ranks
    assigned = [list[int]() for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        open_ranks = (r for r in range(ranks) if len(assigned[r]) < capacity[r])
        rank = min(open_ranks, key=lambda r: (loads[r], r))
        loads[rank] += sizes[index]
        assigned[rank].append(index)
    return [sorted(indices) for indices in assigned]
