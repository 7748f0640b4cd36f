"""The k-mers, target lattices and fixed-point sums of CTC-CRF, which all backends share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype

# Marginals are summed as integers of this dtype, in units of 2 ** -bits. Such a sum has the same
# bits in any order, and its differences lose nothing.
FIXED_POINT = {torch.float32: (torch.int32, 30), torch.float64: (torch.int64, 60)}
SLAB_SIZE = 2**22  # marginals that are subtracted at a time, which bounds the temporary memory


class CRFTargets(NamedTuple):
    """The targets of a batch, as slices of one tensor of labels.

    Fields:
        labels: all labels, counted from 1, `[num_labels]`.
        offsets: index of each sequence's first label, `[N]`.
        lengths: number of labels of each sequence, `[N]`.
        max_lengths: the greatest valid value of each length, `[N]` or `[]`.
    """

    labels: Tensor
    offsets: Tensor
    lengths: Tensor
    max_lengths: Tensor


class CRFLattice(NamedTuple):
    """The target lattice: the chain whose paths spell a target.

    Its states are the target's k-mers. Each state stays or is entered from the one before it.

    Fields:
        edge_index: index c·A + k of each edge's score among the scores of a step, `[N, L, 2]`, for
            staying in a state and for moving into it; -1 for no edge.
        source: the state that each edge comes from, `[L, 2]`.
        initial, final: the score of starting and of ending in each state, `[N, L]`.
    """

    edge_index: Tensor
    source: Tensor
    initial: Tensor
    final: Tensor


def kmer_source(n_base: int, state_len: int, device: torch.device | str | None = None) -> Tensor:
    """Return the k-mer that each edge comes from, `[C, n_base + 1]`.

    Column 0 is the k-mer itself. Column 1 + j is base j followed by all bases but the last.
    """
    C = n_base**state_len
    states = torch.arange(C, device=device)
    moves = states.repeat_interleave(n_base).reshape(n_base, C).T
    return torch.cat([states[:, None], moves], 1)


def lattice_source(states: int, device: torch.device | str | None = None) -> Tensor:
    """Return the state that each edge of a target lattice comes from, `[L, 2]`.

    Column 0 is the state itself and column 1 the state before it, -1 for the first state.
    """
    return torch.arange(states, device=device)[:, None] - torch.arange(2, device=device)


def invalid_targets(targets: CRFTargets, n_base: int) -> Tensor:
    """Return the mask of sequences with a label or a length that is out of range, `[N]`."""
    labels, offsets, lengths, max_lengths = targets
    labels = labels.long()  # comparisons with the bounds would wrap in a narrow dtype
    bad_labels = ((labels < 1) | (labels > n_base)).cumsum(0)
    bad_labels = torch.nn.functional.pad(bad_labels, (1, 0))
    ends = offsets + lengths
    first, last = (bad_labels[index.clamp(0, len(labels))] for index in (offsets, ends))
    return (last > first) | (lengths < 0) | (lengths > max_lengths)


def lattice_edge_index(targets: CRFTargets, states: int, state_len: int, n_base: int) -> Tensor:
    """Return the index of each edge's score for the first L k-mers of each target, `[N, L, 2]`.

    It is -1 past a target's end and for the move into the first k-mer, which does not exist.
    """
    position = torch.arange(states + state_len - 1, device=targets.offsets.device)
    position = targets.offsets[:, None] + position
    labels = torch.nn.functional.pad(targets.labels.long(), (0, 1), value=1)
    bases = (labels[position.clamp(0, len(labels) - 1)] - 1).clamp(0, n_base - 1)
    kmer = torch.zeros_like(position[:, :states])
    for i in range(state_len):
        kmer = kmer * n_base + bases[:, i : i + states]
    stay = kmer * (n_base + 1)
    # The move into a k-mer is numbered by the base that it drops, the first of the k-mer before it.
    move = stay + torch.nn.functional.pad(bases[:, : states - 1] + 1, (1, 0))
    state = torch.arange(states, device=position.device)
    within = (state <= (targets.lengths - state_len)[:, None])[..., None]
    has_source = state[:, None] >= torch.arange(2, device=position.device)
    return torch.where(within & has_source, torch.stack([stay, move], -1), -1)


def target_lattice(
    targets: CRFTargets,
    states: int,
    state_len: int,
    n_base: int,
    dtype: torch.dtype,
    source: Tensor,
) -> CRFLattice:
    """Build the lattice of the first L k-mers of each target.

    A target without a k-mer, or with more than L of them, has no final state and so no path.
    """
    state = torch.arange(states, device=targets.offsets.device)
    initial = torch.where(state == 0, 0.0, -torch.inf).to(dtype).expand(len(targets.offsets), -1)
    last = (targets.lengths - state_len)[:, None]
    final = torch.where(state == last, 0.0, -torch.inf).to(dtype)
    edge_index = lattice_edge_index(targets, states, state_len, n_base)
    return CRFLattice(edge_index, source, initial, final)


def lattice_scores(scores: Tensor, edge_index: Tensor) -> Tensor:
    """Gather the scores of the lattice's edges, `[T, N, L, 2]`, from `[T, N, C, A]`.

    The value where there is no edge is arbitrary, because no path uses it.
    """
    index = edge_index.flatten(1).clamp(min=0).expand(len(scores), -1, -1)
    return scores.flatten(2).gather(2, index).unflatten(2, edge_index.shape[1:])


def zero_ends(scores: Tensor) -> Tensor:
    """Return scores of 0 for starting and ending in each state, `[N, C]`."""
    zero = torch.zeros((1, 1), dtype=acc_dtype(scores.dtype), device=scores.device)
    return zero.expand(scores.shape[1:3])


def marginal_scale(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor, `[N]`, that turns marginals in fixed-point units into gradients."""
    return (grad * 2.0 ** -FIXED_POINT[dtype][1]).to(dtype)


def subtract_marginals(
    d_scores: Tensor, marginals: Tensor, edge_index: Tensor, scale: Tensor
) -> None:
    """Subtract `scale[n] · marginals[t, n]` from `d_scores[t, n]` in place, at `edge_index[n]`.

    `d_scores` is `[T, N, C, A]` and contiguous. Several edges may share an index, so the indices of
    a sequence are sorted once. The sum over a run of equal indices is a difference of cumulative
    sums, and each member of the run writes the same result.
    """
    dtype = FIXED_POINT[marginals.dtype][0]
    d_scores, marginals = d_scores.flatten(2), marginals.flatten(2)
    # Where there is no edge, the marginal is 0.
    index, order = edge_index.flatten(1).clamp(min=0).sort(1)
    # Nothing moves into the first state, so its marginal puts a 0 in front of the cumulative sums.
    order = torch.nn.functional.pad(order, (1, 0), value=1)
    first, last = (torch.searchsorted(index, index, right=right) for right in (False, True))
    T = len(d_scores)
    slab = max(T if torch.compiler.is_compiling() else SLAB_SIZE // max(edge_index.numel(), 1), 1)
    for t in range(0, T, slab):
        part = d_scores[t : t + slab]
        slab_order, slab_index, slab_first, slab_last = (
            tensor.expand(len(part), -1, -1) for tensor in (order, index, first, last)
        )
        sums = marginals[t : t + slab].gather(2, slab_order).round_().to(dtype)
        sums = sums.cumsum(2, dtype=dtype)
        total = sums.gather(2, slab_last).sub_(sums.gather(2, slab_first))
        part.scatter_(2, slab_index, part.gather(2, slab_index).sub_(total * scale[:, None]))
