"""Semi-Markov chains: segments of a state and a number of steps, with a score for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...paths.distribution import PathDistribution
from ...paths.inputs import end_of_chains, lengths_of_chains, steps_first
from ...runtime import checks
from ...runtime.constants import scalar
from ...runtime.dtypes import acc_dtype
from . import autograd
from .common import SemiMarkovPotentials
from .reference import path_score


class SemiMarkovPath(NamedTuple):
    """The best path of each sequence.

    Of equal paths it is the one with the lowest last state, then the shortest last segment, then
    the lowest state before it, and so on. The k best paths of `nbest` have a leading dimension k.

    Fields:
        score: `[N]`, in nats if the scores are; -inf for a sequence without a path.
        states: `[T, N]` int64; -1 past the length and for a sequence without a path.
        starts: `[T, N]` bool; True where a segment starts.
    """

    score: Tensor
    states: Tensor
    starts: Tensor


class SemiMarkovSample(NamedTuple):
    """Paths that are drawn from the posterior.

    Fields:
        states: `[k, T, N]` int64, as in `SemiMarkovPath`.
        starts: `[k, T, N]` bool, as in `SemiMarkovPath`.
    """

    states: Tensor
    starts: Tensor


class SemiMarkovCounts(NamedTuple):
    """What the E-step of expectation maximization needs, summed over the steps.

    Fields:
        start: the posterior of the first state, `[N, C]`.
        transitions: the expected number of transitions between segments `[N, C, C]`, as
            `[n, from, to]`.
        durations: the expected number of segments `[N, D, C]`, as `[n, d - 1, c]` for d steps.
        end: the posterior of the last state, `[N, C]`.
    """

    start: Tensor
    transitions: Tensor
    durations: Tensor
    end: Tensor


def _checked_emissions(
    emissions: Tensor, transitions: Tensor, durations: Tensor, batch_first: bool
) -> Tensor:
    """Return the emissions as `[T, N, C]`, or raise for a wrong dtype, shape or device."""
    emissions = steps_first(emissions, batch_first)
    C = emissions.shape[2]
    for name, scores in (("transitions", transitions), ("durations", durations)):
        checks.floating(name, scores)
        checks.device(name, scores, emissions, "emissions")
    if tuple(transitions.shape) != (C, C):
        raise ValueError(
            f"transitions: expected shape [C, C] with C = {C}, got {list(transitions.shape)}"
        )
    if durations.ndim != 2 or durations.shape[0] < 1 or durations.shape[1] != C:
        raise ValueError(
            f"durations: expected shape [D, C] with D of at least 1 and C = {C},"
            f" got {list(durations.shape)}"
        )
    return emissions


def _as_end(name: str, end: Tensor | None, emissions: Tensor) -> Tensor:
    """Return the scores of the first or last states as `[N, C]`, or raise for a wrong argument."""
    if end is None:
        return scalar(0.0, emissions.dtype, emissions.device).expand(emissions.shape[1:])
    return end_of_chains(name, end, emissions)


class SemiMarkovChain(PathDistribution[SemiMarkovPath, SemiMarkovSample]):
    """A batch of semi-Markov chains, whose paths are sequences of segments.

    A segment has one state and 1 to D steps, and the segments of a path cover the sequence. A path
    of L steps has the score start[first state] + Σ emissions[t, y_t] over the steps
    + Σ durations[d − 1, c] over the segments + Σ transitions[c, c'] over neighbouring segments
    + end[last state]. A state may follow itself in a new segment; a transition of -inf forbids it.
    The work is O(T·N·C·(D + C)), and the memory beside arguments and results O(T·N·C), unless the
    docstring of a method says otherwise.

    Args:
        emissions: `[T, N, C]` floating, in nats, any strides, T at least 1. A row of zeros stands
            for a missing observation.
        transitions: `[C, C]`, from and to, in nats; -inf forbids one.
        durations: `[D, C]`, in nats, D at least 1: row d - 1 has the scores of segments of d steps.
        start, end: `[C]` or `[N, C]`, the scores of the first and of the last state, in nats; zeros
            if None.
        lengths: `[N]` integers on any device, or a list, 1 to T: the number of steps of each
            sequence; T if None.
        mask: `[T, N]` bool instead of lengths, True for the steps of each sequence, which are a
            prefix of it.
        batch_first: whether emissions are `[N, T, C]` and the mask `[N, T]`. All other arguments
            and results of methods have the step first in any case, as documented there.

    Everything but the paths is differentiable in the scores. Emissions past a length have gradient
    0. Half types give fp32 results. Second derivatives run in plain PyTorch on every device.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong, a length is out of range, or a
            mask has a hole. On a GPU the last two are checked only with `PARTITA_CHECK=1`.
            Otherwise the results of that sequence are NaN.

    Source: Sarawagi and Cohen, Semi-Markov conditional random fields for information extraction,
    2004.

    Example:
        >>> import torch
        >>> from partita import SemiMarkovChain
        >>> chain = SemiMarkovChain(torch.zeros(3, 1, 1), torch.zeros(1, 1), torch.zeros(2, 1))
        >>> chain.logz().exp()  # 3 steps as 1 + 1 + 1, 1 + 2 or 2 + 1
        tensor([3.])
    """

    _ops, _tensors = autograd, SemiMarkovPotentials
    _path, _sample = SemiMarkovPath, SemiMarkovSample

    def __init__(
        self,
        emissions: Tensor,
        transitions: Tensor,
        durations: Tensor,
        start: Tensor | None = None,
        end: Tensor | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        mask: Tensor | None = None,
        batch_first: bool = False,
    ) -> None:
        emissions = _checked_emissions(emissions, transitions, durations, batch_first)
        self.emissions, self.transitions, self.durations = emissions, transitions, durations
        self.start, self.end = _as_end("start", start, emissions), _as_end("end", end, emissions)
        self.lengths = lengths_of_chains(emissions, lengths, mask, batch_first, "step")

    def _for_marginals(self) -> SemiMarkovPotentials:
        """Return the potentials in dtypes of which gradients are as exact as the results."""
        dtype = acc_dtype(self.emissions.dtype)
        emissions, start, end = (
            x.to(torch.promote_types(x.dtype, dtype))
            for x in (self.emissions, self.start, self.end)
        )
        return self._potentials._replace(emissions=emissions, start=start, end=end)

    def logz(self) -> Tensor:
        """Return log Z in nats, `[N]`; -inf for a sequence without a path.

        Example:
            >>> import torch, partita
            >>> durations = torch.tensor([[0.0], [-torch.inf], [1.0]])  # 1 or 3 steps
            >>> partita.SemiMarkovChain(torch.zeros(3, 1, 1), torch.zeros(1, 1), durations).logz()
            tensor([1.3133])
        """
        return autograd.log_partitions(self._potentials)[1]

    def state_marginals(self) -> Tensor:
        """Return the posterior probability of each state, `[T, N, C]`, zero past the lengths.

        It is differentiable.

        Example:
            >>> import torch, partita
            >>> emissions = torch.tensor([[[0.0, 0.0]], [[0.0, 2.0]]])
            >>> chain = partita.SemiMarkovChain(emissions, torch.zeros(2, 2), torch.zeros(2, 2))
            >>> chain.state_marginals()[:, 0]
            tensor([[0.3731, 0.6269],
                    [0.1192, 0.8808]])
        """
        return autograd.marginals(self._for_marginals())[0]

    def segment_marginals(self) -> Tensor:
        """Return the posterior probability of each segment, `[T, D, N, C]`.

        Entry `[t, d - 1, n, c]` is that of a segment of d steps in state c whose last step is t. It
        is zero past the lengths. The result is differentiable, and the largest tensor of a chain.

        Example:
            >>> import torch, partita
            >>> durations = torch.zeros(2, 1)
            >>> chain = partita.SemiMarkovChain(torch.zeros(2, 1, 1), torch.zeros(1, 1), durations)
            >>> chain.segment_marginals()[:, :, 0, 0]  # 1 + 1, or 2
            tensor([[0.5000, 0.0000],
                    [0.5000, 0.5000]])
        """
        return autograd.segment_marginals(self._for_marginals())

    def expected_counts(self) -> SemiMarkovCounts:
        """Return the posteriors of the ends, and the expected numbers of transitions and durations.

        They are the gradients of each sequence's log Z, and differentiable. They take memory of
        N·C·(C + D).

        Example:
            >>> import torch, partita
            >>> durations = torch.zeros(2, 1)
            >>> chain = partita.SemiMarkovChain(torch.zeros(3, 1, 1), torch.zeros(1, 1), durations)
            >>> chain.expected_counts().durations  # 1 + 1 + 1, 1 + 2 or 2 + 1
            tensor([[[1.6667],
                     [0.6667]]])
        """
        _, transitions, durations, start, end = autograd.marginals(self._for_marginals())
        return SemiMarkovCounts(*map(self._rounded, (start, transitions, durations, end)))

    def log_prob(self, states: Tensor, starts: Tensor) -> Tensor:
        """Return the log-probability of paths in nats, `[..., N]`; -inf for what is no path.

        A state that is out of range or changes inside a segment, a segment of more than D steps,
        and a first step that starts no segment make it no path.

        Args:
            states: `[..., T, N]` integers; states past a length are ignored.
            starts: `[..., T, N]` bool, True where a segment starts, as in `SemiMarkovPath`.

        Raises:
            TypeError, ValueError: a dtype, shape or device is wrong.

        Source: the score of the path minus log Z.

        Example:
            >>> import torch, partita
            >>> durations = torch.zeros(2, 1)
            >>> chain = partita.SemiMarkovChain(torch.zeros(3, 1, 1), torch.zeros(1, 1), durations)
            >>> starts = torch.tensor([[True], [True], [False]])
            >>> chain.log_prob(torch.zeros(3, 1, dtype=torch.int64), starts).exp()
            tensor([0.3333])
        """
        checks.integer("states", states)
        checks.device("states", states, self.emissions, "emissions")
        checks.last_sizes("states", states, self.emissions.shape[:2], "T, N")
        checks.tensor("starts", starts)
        if starts.dtype != torch.bool:
            raise TypeError(f"starts: expected dtype torch.bool, got {starts.dtype}")
        checks.shape("starts", starts, states.shape, "that of states")
        checks.device("starts", starts, self.emissions, "emissions")
        score = path_score(self._potentials, states.long(), starts)
        return self._rounded(self._log_prob(score))


def semi_markov_chain(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor | None = None,
    end: Tensor | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    mask: Tensor | None = None,
    batch_first: bool = False,
) -> SemiMarkovChain:
    """Return a chain of segments: each has one of C states and 1 to D steps.

    Args:
        emissions, transitions, durations, start, end, lengths, mask, batch_first: as in
            `SemiMarkovChain`.

    Returns:
        A `SemiMarkovChain`.

    Raises:
        TypeError, ValueError: as in `SemiMarkovChain`.

    Source: Sarawagi and Cohen, Semi-Markov conditional random fields for information extraction,
    2004.

    Example:
        >>> import torch
        >>> from partita import semi_markov_chain
        >>> durations = torch.tensor([[-torch.inf], [0.0]])  # 2 steps
        >>> path = semi_markov_chain(torch.zeros(4, 1, 1), torch.zeros(1, 1), durations).viterbi()
        >>> path.starts.flatten()
        tensor([ True, False,  True, False])
    """
    options: Any = {"lengths": lengths, "mask": mask, "batch_first": batch_first}
    return SemiMarkovChain(emissions, transitions, durations, start, end, **options)
