"""CTC-CRF in plain PyTorch: the table of k-mers, and the lattice of the paths through it that spell a target."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.semiring import Log
from ...runtime.dtypes import acc_dtype
from ..chain.reference import chain_gradient, chain_inputs, log_partition

# Marginals are summed as integers of this type, in units of 2 to the minus that: in any order the same bits, and they cannot drift.
FIXED = {torch.float32: (torch.int32, 30), torch.float64: (torch.int64, 60)}
SLAB = 2**22  # marginals that are subtracted at a time


class Targets(NamedTuple):
    """Targets of a batch, wherever they lie.

    Fields:
        labels: one after another, `[M]`, from 1 on.
        offsets: where each sequence's begin, `[N]`.
        lengths: `[N]`.
        most: `[N]` or `[]`: no length may be greater.
    """

    labels: Tensor
    offsets: Tensor
    lengths: Tensor
    most: Tensor


class Lattice(NamedTuple):
    """The chain whose paths spell a target: its states are the target's k-mers, each stays or is entered from the one before it.

    Fields:
        places: `[N, L, 2]`, which of a step's scores, c·A + k, staying in each state and moving into it have; -1 for none.
        source: `[L, 2]`.
        initial, final: `[N, L]`.
    """

    places: Tensor
    source: Tensor
    initial: Tensor
    final: Tensor


def kmers(n_base: int, state_len: int, device: torch.device | str | None = None) -> Tensor:
    """`[C, n_base + 1]`: column 0 stays, column 1 + j comes from the k-mer of j and all bases of this one but its last."""
    count = n_base**state_len
    states = torch.arange(count, device=device)
    return torch.cat(
        [states[:, None], states.repeat_interleave(n_base).reshape(n_base, count).T], 1
    )


def ladder(states: int, device: torch.device | str | None = None) -> Tensor:
    """`[L, 2]`: each state stays, or is entered from the one before it; nothing moves into the first."""
    return torch.arange(states, device=device)[:, None] - torch.arange(2, device=device)


def misspelt(targets: Targets, n_base: int) -> Tensor:
    """`[N]`, sequences with a label or a length that is out of range."""
    labels, offsets, lengths, most = targets
    labels = labels.long()  # a narrow type would wrap the bounds
    bad = torch.nn.functional.pad(((labels < 1) | (labels > n_base)).cumsum(0), (1, 0))
    before, after = (place.clamp(0, len(labels)) for place in (offsets, offsets + lengths))
    return (bad[after] > bad[before]) | (lengths < 0) | (lengths > most)


def places_of(targets: Targets, states: int, state_len: int, n_base: int) -> Tensor:
    """`[N, L, 2]` for the first L k-mers; -1 past a target's end, and for a move into the first, which there is none."""
    place = targets.offsets[:, None] + torch.arange(
        states + state_len - 1, device=targets.offsets.device
    )
    labels = torch.nn.functional.pad(targets.labels.long(), (0, 1), value=1)
    digits = (labels[place.clamp(0, len(labels) - 1)] - 1).clamp(0, n_base - 1)
    kmer = torch.zeros_like(place[:, :states])
    for i in range(state_len):
        kmer = kmer * n_base + digits[:, i : i + states]
    stay = kmer * (n_base + 1)
    move = stay + torch.nn.functional.pad(digits[:, : states - 1] + 1, (1, 0))
    state = torch.arange(states, device=place.device)
    within = (state <= (targets.lengths - state_len)[:, None])[..., None]
    entered = state[:, None] >= torch.arange(2, device=place.device)
    return torch.where(within & entered, torch.stack([stay, move], -1), -1)


def lattice(
    targets: Targets, states: int, state_len: int, n_base: int, dtype: torch.dtype, source: Tensor
) -> Lattice:
    """Of the first L k-mers of each target; a target that is shorter than a k-mer, or has more of them, ends nowhere."""
    state = torch.arange(states, device=targets.offsets.device)
    initial = torch.where(state == 0, 0.0, -torch.inf).to(dtype).expand(len(targets.offsets), -1)
    last = (targets.lengths - state_len)[:, None]
    final = torch.where(state == last, 0.0, -torch.inf).to(dtype)
    return Lattice(places_of(targets, states, state_len, n_base), source, initial, final)


def at_places(scores: Tensor, places: Tensor) -> Tensor:
    """`[T, N, L, 2]` of `[T, N, C, A]`; anything where there is no place, which no path enters."""
    return (
        scores.flatten(2)
        .gather(2, places.flatten(1).clamp(min=0).expand(len(scores), -1, -1))
        .unflatten(2, places.shape[1:])
    )


def crf_loss(scores: Tensor, source: Tensor, spelt: Lattice, lengths: Tensor | None) -> Tensor:
    """log Z of all paths minus that of those that spell the target, `[N]` fp64; inf without one, with the gradient 0."""
    zeros = scores.new_zeros(scores.shape[1:3])
    every = log_partition(chain_inputs(scores, source, zeros, zeros, lengths, Log), Log)
    mine = log_partition(
        chain_inputs(
            at_places(scores, spelt.places), spelt.source, spelt.initial, spelt.final, lengths, Log
        ),
        Log,
    )
    return torch.where(mine == -torch.inf, torch.inf, every - mine)


def free(scores: Tensor) -> Tensor:
    """The scores of ends where all are free, `[N, C]`."""
    return torch.zeros((1, 1), dtype=acc_dtype(scores.dtype), device=scores.device).expand(
        scores.shape[1:3]
    )


def subtract(d_scores: Tensor, marginals: Tensor, places: Tensor, factor: Tensor) -> None:
    """Takes `factor[n] · marginals[t, n]` away from `d_scores[t, n]`, `[T, N, C, A]` contiguous, at `places[n]`, of which some are equal.

    The places are sorted once. The sum over a run of equal ones is a difference of cumulative sums, and each of the run writes the same result.
    """
    fixed = FIXED[marginals.dtype][0]
    flat, marginals, places = (
        d_scores.flatten(2),
        marginals.flatten(2),
        places.flatten(1).clamp(min=0),
    )  # of no place, marginals are 0
    place, order = places.sort(1)
    order = torch.nn.functional.pad(
        order, (1, 0), value=1
    )  # nothing moves into the first state: a 0 before all sums
    first, behind = (torch.searchsorted(place, place, right=right) for right in (False, True))
    steps = len(flat)
    slab = max(steps if torch.compiler.is_compiling() else SLAB // max(places.numel(), 1), 1)
    for t in range(0, steps, slab):
        part = flat[t : t + slab]
        ranked, at, below, above = (
            index.expand(len(part), -1, -1) for index in (order, place, first, behind)
        )
        sums = marginals[t : t + slab].gather(2, ranked).round_().to(fixed).cumsum(2, dtype=fixed)
        total = sums.gather(2, above).sub_(sums.gather(2, below))
        part.scatter_(2, at, part.gather(2, at).sub_(total * factor[:, None]))


def crf_gradient(
    grad: Tensor,
    scores: Tensor,
    source: Tensor,
    lengths: Tensor,
    logz: Tensor,
    kept: Tensor,
    marginals: Tensor,
    places: Tensor,
) -> Tensor:
    """The gradient of all paths' log Z, less the lattice's marginals, which come in units of `FIXED`; half types are rounded once."""
    dtype = acc_dtype(scores.dtype)
    result = chain_gradient(
        grad, scores, free(scores), free(scores), source, lengths, logz, kept, dtype
    )[0]
    subtract(result, marginals, places, (grad * 2.0 ** -FIXED[dtype][1]).to(dtype))
    return result.to(scores.dtype)
