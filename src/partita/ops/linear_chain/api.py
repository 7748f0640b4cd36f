"""Dense linear chains: the tagger's conditional random field and the hidden Markov model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...paths.distribution import SemiringDistribution
from ...paths.inputs import as_values, end_of_chains, lengths_of_chains
from ...runtime import checks
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from ..chain.api import Chain
from ..chain.edges import dense_source
from . import autograd
from .common import LinearChainPotentials, check_linear_chain
from .reference import path_score


class LinearPath(NamedTuple):
    """The best path of each sequence.

    Of equal paths it is the one with the lowest state before each state, then the lowest last
    state. The k best paths of `nbest` have a leading dimension k.

    Fields:
        score: `[N]`, in nats if the scores are; -inf for a sequence without a path.
        states: `[T, N]` int64; -1 past the length and for a sequence without a path.
    """

    score: Tensor
    states: Tensor


class LinearSample(NamedTuple):
    """Paths that are drawn from the posterior.

    Fields:
        states: `[k, T, N]` int64, as in `LinearPath`.
    """

    states: Tensor


class ExpectedCounts(NamedTuple):
    """What the E-step of expectation maximization needs, summed over the tokens.

    Fields:
        start: the posterior of the first state, `[N, C]`.
        transitions: the expected number of transitions `[N, C, C]`, as `[n, from, to]`.
        end: the posterior of the last state, `[N, C]`.
    """

    start: Tensor
    transitions: Tensor
    end: Tensor


class LinearChain(SemiringDistribution[LinearPath, LinearSample]):
    """A batch of linear chains in which every state may follow every state.

    A path of a sequence of L tokens has the score
    start[y₀] + Σ emissions[t, y_t] + Σ transitions[y_t, y_{t+1}] + end[y_{L-1}].
    The memory that the methods take beside arguments and results is O(T·N·C), unless the docstring
    of a method says otherwise. `expectation`, `entropy` and `kl` take that of `expected_counts`.

    Args:
        emissions: `[T, N, C]` floating, in nats, any strides, T at least 1. A row of zeros stands
            for a missing observation.
        transitions: from and to, in nats; -inf forbids one. `[C, C]` are constant, `[T - 1, C, C]`
            vary with the token, and `[T - 1, N, C, C]` also with the sequence.
        start, end: `[C]` or `[N, C]`, the scores of the first and of the last state, in nats; zeros
            if None.
        lengths: `[N]` integers on any device, or a list, 1 to T: the number of tokens of each
            sequence; T if None.
        mask: `[T, N]` bool instead of lengths, True for the tokens of each sequence, which are a
            prefix of it.
        batch_first: whether emissions are `[N, T, C]` and the mask `[N, T]`. All other arguments,
            values and results of methods have the token first in any case, as documented there.

    Everything is differentiable in emissions, transitions, start and end. Emissions past a length
    have gradient 0. Half types give fp32 results.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong, a length is out of range, or a
            mask has a hole. On a GPU the last two are checked only with `PARTITA_CHECK=1`.
            Otherwise the results of that sequence are NaN.

    Source: Rabiner, A tutorial on hidden Markov models, 1989; Lafferty et al., Conditional random
    fields, 2001; for derivatives of `expectation`, `entropy` and `kl` Li and Eisner, First- and
    second-order expectation semirings, 2009.

    Example:
        >>> import torch
        >>> from partita import LinearChain
        >>> chain = LinearChain(torch.zeros(4, 1, 2), torch.zeros(2, 2))
        >>> chain.logz()  # log 16: 4 tokens of 2 states
        tensor([2.7726])
        >>> chain.state_marginals()[:, 0, 0]
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    _ops, _tensors = autograd, LinearChainPotentials
    _path, _sample = LinearPath, LinearSample

    def __init__(
        self,
        emissions: Tensor,
        transitions: Tensor,
        start: Tensor | None = None,
        end: Tensor | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        mask: Tensor | None = None,
        batch_first: bool = False,
    ) -> None:
        emissions = check_linear_chain(emissions, transitions, batch_first)
        self.emissions, self.transitions = emissions, transitions
        self.start = None if start is None else end_of_chains("start", start, emissions)
        self.end = None if end is None else end_of_chains("end", end, emissions)
        self.lengths = lengths_of_chains(emissions, lengths, mask, batch_first, "token")

    def state_marginals(self) -> Tensor:
        """Return the posterior probability of each state, `[T, N, C]`, zero past the lengths.

        It is differentiable.

        Example:
            >>> import torch, partita
            >>> emissions = torch.tensor([[[0.0, 0.0]], [[0.0, 2.0]]])
            >>> partita.LinearChain(emissions, torch.eye(2)).state_marginals()[:, 0]
            tensor([[0.3240, 0.6760],
                    [0.1192, 0.8808]])
        """
        chain = self._potentials.in_full_precision()
        return autograd.marginals(chain, need_transitions=False, per_sequence=False)[0]

    def marginals(self) -> Tensor:
        """Return the posterior probability of each transition, `[T - 1, N, C, C]`.

        Entry `[t, n, to, from]` is that of the transition from token t to token t + 1, as in
        `Chain.marginals`; it is zero past the lengths. The result is differentiable. It is the
        largest tensor of a dense chain; `expected_counts` has its sum over the tokens.

        Example:
            >>> import torch, partita
            >>> partita.LinearChain(torch.zeros(2, 1, 2), torch.zeros(2, 2)).marginals()
            tensor([[[[0.2500, 0.2500],
                      [0.2500, 0.2500]]]])
        """
        chain = self._potentials.in_full_precision().of_sequences()
        d_transitions = autograd.marginals(chain, need_transitions=True, per_sequence=False)[1]
        return self._rounded(d_transitions.transpose(2, 3))

    def expected_counts(self) -> ExpectedCounts:
        """Return the posteriors of the ends and the expected number of transitions.

        They are differentiable. They take memory of `[N, C, C]`, or of `[T - 1, N, C, C]` for
        transitions that vary.

        Example:
            >>> import torch, partita
            >>> chain = partita.LinearChain(torch.zeros(9, 1, 2), torch.zeros(2, 2))
            >>> chain.expected_counts().transitions
            tensor([[[2., 2.],
                     [2., 2.]]])
        """
        chain = self._potentials.in_full_precision().with_ends()
        if self.transitions.ndim != 2:
            chain = chain.of_sequences()
        _, counts, start, end = autograd.marginals(chain, need_transitions=True, per_sequence=True)
        if self.transitions.ndim != 2:
            counts = counts.sum(0)
        return ExpectedCounts(*map(self._rounded, (start, counts, end)))

    def expectation(
        self,
        emission_values: Tensor | None = None,
        transition_values: Tensor | None = None,
        start_values: Tensor | None = None,
        end_values: Tensor | None = None,
    ) -> Tensor:
        """Return the posterior mean of the sum of values along a path, `[N]`.

        It is differentiable in the scores and in the values.

        Args:
            emission_values: the value of each state at each token, what broadcasts to `[T, N, C]`.
            transition_values: the value of each transition, `[C, C]` or what broadcasts to the
                transitions.
            start_values, end_values: the values of the first and of the last state, `[C]` or
                `[N, C]`.

        Values are 0 if None. A value whose posterior is 0 adds 0, even if it is infinite.

        Raises:
            TypeError, ValueError: a dtype, shape or device is wrong.

        Example:
            >>> import torch, partita
            >>> chain = partita.LinearChain(torch.zeros(7, 1, 2), torch.zeros(2, 2))
            >>> chain.expectation(transition_values=torch.eye(2))  # transitions that stay
            tensor([3.])
        """
        chain = self._potentials.in_full_precision()
        ends = (
            value if value is None else end_of_chains(name, value, self.emissions)
            for name, value in (("start_values", start_values), ("end_values", end_values))
        )
        of_scores = (
            as_values(name, values, scores, scores_name, "emissions")
            for name, values, scores, scores_name in (
                ("emission_values", emission_values, self.emissions, "emissions"),
                ("transition_values", transition_values, self.transitions, "transitions"),
            )
        )
        return self._rounded(autograd.mean_of_values(chain, *of_scores, *ends))

    def log_prob(self, states: Tensor) -> Tensor:
        """Return the log-probability of paths in nats, `[..., N]`; -inf for states out of range.

        Args:
            states: `[..., T, N]` integers; states past a length are ignored.

        Raises:
            TypeError, ValueError: a dtype, shape or device is wrong.

        Source: the score of the path minus log Z.

        Example:
            >>> import torch, partita
            >>> chain = partita.LinearChain(torch.zeros(4, 1, 2), torch.zeros(2, 2))
            >>> chain.log_prob(torch.tensor([[0], [1], [1], [0]])).exp()
            tensor([0.0625])
        """
        checks.integer("states", states)
        checks.device("states", states, self.emissions, "emissions")
        checks.last_sizes("states", states, self.emissions.shape[:2], "T, N")
        return self._rounded(self._log_prob(path_score(self._potentials, states.long())))

    def to_chain(self) -> Chain:
        """Return the sparse `Chain` over `dense_source` with the same paths.

        It has T - 1 steps, its first state is that of the first token, and its scores take memory
        of `[T - 1, N, C, C]`.

        Example:
            >>> import torch, partita
            >>> partita.LinearChain(torch.zeros(4, 1, 2), torch.zeros(2, 2)).to_chain().scores.shape
            torch.Size([3, 1, 2, 2])
        """
        dtype = acc_dtype(self.emissions.dtype)
        emissions, transitions = self.emissions.to(dtype), self.transitions.to(dtype)
        if transitions.ndim == 3:
            transitions = transitions.unsqueeze(1)
        scores = emissions[1:, :, :, None] + transitions.transpose(-1, -2)
        initial = emissions[0] if self.start is None else emissions[0] + self.start
        source = constant(dense_source, emissions.shape[2], device=emissions.device)
        steps = None if self.lengths is None else self.lengths - 1
        return Chain(scores, source, initial, self.end, lengths=steps)


def linear_chain(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None = None,
    end: Tensor | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    mask: Tensor | None = None,
    batch_first: bool = False,
) -> LinearChain:
    """Return the chain of a tagger or a hidden Markov model: T tokens, each with one of C states.

    Args:
        emissions, transitions, start, end, lengths, mask, batch_first: as in `LinearChain`.

    Returns:
        A `LinearChain`.

    Raises:
        TypeError, ValueError: as in `LinearChain`.

    Source: Lafferty et al., Conditional random fields, 2001.

    Example:
        >>> import torch
        >>> from partita import linear_chain
        >>> emissions = torch.tensor([[[2.0, 0.0]], [[0.0, 0.5]], [[1.0, 0.0]]])
        >>> linear_chain(emissions, torch.eye(2)).viterbi().states.flatten()
        tensor([0, 0, 0])
    """
    return LinearChain(
        emissions, transitions, start, end, lengths=lengths, mask=mask, batch_first=batch_first
    )
