"""The tuples that kernels of dense linear chains take, and how they are made of tensors."""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from torch import Tensor

from ....primitives.gpu.target import target_of
from ..common import LinearChainPotentials, saved_sizes
from . import plan


class StridedTokens(NamedTuple):
    """A number for each state at each token, `[T, N, C]` with the strides `t, n, c`."""

    ptr: tl.tensor
    t: tl.tensor
    n: tl.tensor
    c: tl.tensor


class StridedStates(NamedTuple):
    """A number for each state of each sequence, `[N, C]` with the strides `n, c`, or None for 0."""

    ptr: tl.tensor
    n: tl.tensor
    c: tl.tensor


class StridedSteps(NamedTuple):
    """A number for each pair of states at each step, with the strides `t, n, k, c`.

    It is `[T - 1, N, C, C]`. Strides over steps and sequences are 0 where these share numbers.
    """

    ptr: tl.tensor
    t: tl.tensor
    n: tl.tensor
    k: tl.tensor
    c: tl.tensor


class StridedUniforms(NamedTuple):
    """A uniform number for each draw, `[T, samples, N]` fp64 with the strides `t, s, n`."""

    ptr: tl.tensor
    t: tl.tensor
    s: tl.tensor
    n: tl.tensor


class Batch(NamedTuple):
    """The scores of the states at the tokens of sequences.

    A kernel starts with `batch = Batch(*batch)`, because Triton forgets in loops and branches which
    members of tuples in a tuple are known to be 1.

    Fields:
        emissions: StridedTokens.
        start: StridedStates, for the first tokens; None in kernels whose steps do not enter these.
        end: StridedStates, for the last tokens.
        lengths: `[N]`, or None if all sequences have T tokens.
        T, N, C: the sizes of the emissions; C is None in kernels that have it as a constexpr.
    """

    emissions: StridedTokens
    start: StridedStates | None
    end: StridedStates | None
    lengths: tl.tensor
    T: tl.tensor
    N: tl.tensor
    C: tl.tensor

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes as arguments of kernels that take no batch."""
        return {"T": self.T, "N": self.N, "C": self.C}


class Span(NamedTuple):
    """The ranges of constant transitions, in parts.

    Fields:
        ptr: `[sets, parts, 2]` fp64, the greatest and the least transition of each part.
        parts: their number; 0 for chains that are scanned in the log domain in any case.
        sets: N if each sequence has transitions of its own, 1 if all share theirs.
    """

    ptr: tl.tensor
    parts: tl.tensor
    sets: tl.tensor


class Saved(NamedTuple):
    """The results of the scans that the gradient needs, as views of one fp64 tensor.

    Fields:
        states: `[2, T, N, C]`, alpha and beta. For log Z alone those of middle tokens, `[2, N, C]`.
        scales: `[T, N]`, the exponents or offsets that were taken out of the step into each token,
            by alpha, or by beta after the middle.
        maxima: `[T, N]`, the greatest emission of each token.
        span: Span.
    """

    states: tl.tensor
    scales: tl.tensor
    maxima: tl.tensor
    span: Span


class Gradients(NamedTuple):
    """The gradients in the scores of states.

    Fields:
        emissions: `[T, N, C]`.
        start, end: `[N, C]`, each or None.
    """

    emissions: tl.tensor
    start: tl.tensor
    end: tl.tensor


class Operators(NamedTuple):
    """The operators of all segments, or of all groups of one level.

    Fields:
        matrices: `[N, number, C, C]` fp64.
        exponents: `[N, number, C]` fp64, of the rows; None in max-plus arithmetic.
        offsets: `[N, number]` fp64, logarithms of what was taken out; in max-plus arithmetic 0, or
            NaN for a segment that has one.
    """

    matrices: tl.tensor
    exponents: tl.tensor
    offsets: tl.tensor


def strided_states(states: Tensor | None) -> StridedStates:
    """Return numbers `[N, C]` with their strides."""
    return StridedStates(states, *((0, 0) if states is None else states.stride()))


def strided_steps(transitions: Tensor) -> StridedSteps:
    """Return transitions in any of their shapes with their strides."""
    strides = transitions.stride()
    step = strides[0] if transitions.ndim > 2 and len(transitions) > 1 else 0
    sequence = strides[1] if transitions.ndim == 4 else 0
    return StridedSteps(transitions, step, sequence, *strides[-2:])


def batch_of(chain: LinearChainPotentials) -> Batch:
    """Return the scores of sequences with their strides and sizes."""
    emissions, _, start, end, lengths = chain
    return Batch(
        StridedTokens(emissions, *emissions.stride()),
        strided_states(start),
        strided_states(end),
        None if lengths is None else lengths.contiguous(),
        *emissions.shape,
    )


def split_saved(saved: Tensor, chain: LinearChainPotentials, save: bool = True) -> Saved:
    """Return the parts of the tensor that `linear_chain_logz` saves."""
    T, N, C = chain.emissions.shape
    states, scales, maxima, span = saved.split(saved_sizes(T, N, C, save))
    parts = plan.range_parts(chain.transitions, T, N, save, target_of(saved.device))
    sets = N if parts and chain.transitions.ndim == 4 else 1
    return Saved(states, scales, maxima, Span(span, parts, sets))
