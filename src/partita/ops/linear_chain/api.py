"""Dense linear chains: the tagger's conditional random field and the hidden Markov model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...primitives.semiring import Log, Semiring
from ...runtime import checks
from ...runtime.backend import current_backend
from ...runtime.constants import constant, scalar
from ...runtime.dtypes import acc_dtype
from ..chain.api import Chain
from ..chain.edges import dense_source
from . import autograd, functional
from .common import end_of_chains, lengths_of_chains
from .inputs import (
    LinearChainTensors,
    check_linear_chain,
    check_same_lengths,
    check_semiring,
)
from .results import ExpectedCounts, LinearPath, LinearSample


class LinearChain:
    """A batch of linear chains in which every state may follow every state.

    A path of a sequence of L tokens has the score
    start[y₀] + Σ emissions[t, y_t] + Σ transitions[y_t, y_{t+1}] + end[y_{L-1}].
    The memory that the methods take beside arguments and results is O(T·N·C), unless the docstring
    of a method says otherwise.

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
    fields, 2001; for `expectation`, `entropy` and `kl` Li and Eisner, First- and second-order
    expectation semirings, 2009.

    Example:
        >>> import torch
        >>> from partita import LinearChain
        >>> chain = LinearChain(torch.zeros(4, 1, 2), torch.zeros(2, 2))
        >>> chain.logz()  # log 16: 4 tokens of 2 states
        tensor([2.7726])
        >>> chain.state_marginals()[:, 0, 0]
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

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

    def _tensors(self) -> LinearChainTensors:
        """Return the tensors that the registered ops take."""
        ends = self.start, self.end
        return LinearChainTensors(self.emissions, self.transitions, *ends, self.lengths)

    def _full_precision(self) -> LinearChainTensors:
        """Return the tensors in the dtype of results or a wider one, which gradients have too."""

        def widened(scores: Any) -> Any:
            if scores is None:
                return None
            return scores.to(torch.promote_types(scores.dtype, acc_dtype(self.emissions.dtype)))

        emissions, transitions, start, end, lengths = self._tensors()
        return LinearChainTensors(
            widened(emissions), widened(transitions), widened(start), widened(end), lengths
        )

    def _to_result_dtype(self, value: Tensor) -> Tensor:
        return value.to(acc_dtype(self.emissions.dtype))

    def logz(self, semiring: Semiring = Log) -> Tensor:
        """Return the sum over all paths, `[N]`.

        It is log Z in nats under `Log` and the best score under `Max`. A sequence without a path
        has -inf.

        Args:
            semiring: as in `partita.logz`. Any but `Log` and `Max` runs in plain PyTorch.

        Raises:
            TypeError: semiring is not a `Semiring`.
            RuntimeError: the backend that was chosen by name has no kernel for it.

        Example:
            >>> import torch, partita
            >>> partita.LinearChain(torch.ones(3, 1, 2), torch.zeros(2, 2)).logz(partita.Max)
            tensor([3.])
        """
        check_semiring(semiring)
        return functional.partition(self._tensors(), semiring)

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
        chain = self._full_precision()
        return functional.marginals(chain, need_transitions=False, per_sequence=False)[0]

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
        chain = functional.transitions_of_sequences(self._full_precision())
        d_transitions = functional.marginals(chain, need_transitions=True, per_sequence=False)[1]
        return self._to_result_dtype(d_transitions.transpose(2, 3))

    def expected_counts(self) -> ExpectedCounts:
        """Return the posteriors of the ends and the expected number of transitions.

        They are differentiable. Transitions that vary take memory of `[T - 1, N, C, C]`.

        Example:
            >>> import torch, partita
            >>> chain = partita.LinearChain(torch.zeros(9, 1, 2), torch.zeros(2, 2))
            >>> chain.expected_counts().transitions
            tensor([[[2., 2.],
                     [2., 2.]]])
        """
        chain = functional.with_ends(self._full_precision())
        if self.transitions.ndim != 2:
            chain = functional.transitions_of_sequences(chain)
        _, counts, start, end = functional.marginals(
            chain, need_transitions=True, per_sequence=True
        )
        if self.transitions.ndim != 2:
            counts = counts.sum(0)
        return ExpectedCounts(*map(self._to_result_dtype, (start, counts, end)))

    def viterbi(self) -> LinearPath:
        """Return the best path of each sequence, as in `LinearPath`.

        Of equal paths it is the one with the lowest state before each state, then the lowest last
        state.

        Example:
            >>> import torch, partita
            >>> emissions = torch.tensor([[[1.0, 0.0]], [[0.0, 0.1]], [[1.0, 0.0]]])
            >>> partita.LinearChain(emissions, torch.eye(2)).viterbi().states.flatten()
            tensor([0, 0, 0])
        """
        with torch.no_grad():
            return LinearPath(*autograd.viterbi(*self._tensors(), current_backend()))

    def nbest(self, k: int) -> LinearPath:
        """Return the k best paths of each sequence, from the best on.

        Of equal paths that with the lowest states, from the last state back, comes first. The scan
        runs in Numba on the CPU and in PyTorch elsewhere. It is not differentiable; `log_prob` of
        the states is.

        Args:
            k: the number of paths.

        Returns:
            A `LinearPath` with scores `[k, N]` and states `[k, T, N]`. A path that does not exist
            has score -inf and states -1.

        Raises:
            TypeError, ValueError: k is not an integer, or it is below 1.

        Source: Schwartz and Chow, The N-best algorithm, 1990.

        Example:
            >>> import torch, partita
            >>> emissions = torch.tensor([[[2.0, 0.0]], [[0.0, 0.5]]])
            >>> best = partita.LinearChain(emissions, torch.zeros(2, 2)).nbest(3)
            >>> best.score[:, 0], best.states[:, :, 0].tolist()
            (tensor([2.5000, 2.0000, 0.5000]), [[0, 1], [0, 0], [1, 1]])
        """
        checks.python_int("k", k)
        if k < 1:
            raise ValueError(f"k: expected a number of paths, 1 or more, got {k!r}")
        with torch.no_grad():
            score, states = functional.nbest(self._tensors(), k)
            return LinearPath(self._to_result_dtype(score), states)

    def sample(self, k: int, generator: torch.Generator | None = None) -> LinearSample:
        """Draw k independent paths from the posterior of each sequence.

        Args:
            k: the number of paths.
            generator: a generator on the device of the emissions; the default one if None. The same
                state of it gives the same paths.

        Returns:
            The paths, as in `LinearSample`.

        Raises:
            TypeError, ValueError: k is not an integer, or it is negative.

        Example:
            >>> import torch, partita
            >>> chain = partita.LinearChain(torch.zeros(4, 2, 3), torch.zeros(3, 3))
            >>> chain.sample(5).states.shape
            torch.Size([5, 4, 2])
        """
        checks.python_int("k", k)
        if k < 0:
            raise ValueError(f"k: expected a number of paths, 0 or more, got {k!r}")
        with torch.no_grad():
            T, N, _ = self.emissions.shape
            uniforms = self.emissions.new_empty((T, k, N), dtype=torch.float64)
            uniforms = uniforms.uniform_(generator=generator)
            return LinearSample(autograd.sample(*self._tensors(), uniforms, current_backend()))

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
        chain = self._full_precision()
        ends = (
            value if value is None else end_of_chains(name, value, self.emissions)
            for name, value in (("start_values", start_values), ("end_values", end_values))
        )
        mean = functional.expectation(
            chain,
            self._values("emission_values", emission_values, "emissions", self.emissions),
            self._values("transition_values", transition_values, "transitions", self.transitions),
            *ends,
        )
        return self._to_result_dtype(mean)

    def _values(self, name: str, values: Tensor | None, of: str, scores: Tensor) -> Tensor:
        """Return values in the shape of the scores that they belong to, zeros for None."""
        if values is None:
            values = scalar(0.0, scores.dtype, scores.device)
        checks.floating(name, values)
        checks.device(name, values, self.emissions, "emissions")
        try:
            return values.expand(scores.shape)
        except RuntimeError:
            raise ValueError(
                f"{name}: expected what broadcasts to the {of}, {list(scores.shape)},"
                f" got {list(values.shape)}"
            ) from None

    def entropy(self) -> Tensor:
        """Return the entropy of the paths in nats, `[N]`; 0 for a sequence without a path.

        Example:
            >>> import torch, partita
            >>> partita.LinearChain(torch.zeros(4, 1, 2), torch.zeros(2, 2)).entropy()
            tensor([2.7726])
        """
        return self._to_result_dtype(functional.entropy(self._full_precision()))

    def kl(self, other: LinearChain) -> Tensor:
        """Return KL(self ‖ other) of the paths in nats, `[N]`.

        It is +inf where the other chain forbids a path of this one.

        Args:
            other: a chain with the same `[T, N, C]` and lengths.

        Raises:
            TypeError, ValueError: other is not a `LinearChain`, or its shape, device or lengths
                differ. On a GPU the lengths are checked only with `PARTITA_CHECK=1`, and otherwise
                give NaN.

        Example:
            >>> import torch, partita
            >>> chain = partita.LinearChain(torch.randn(3, 1, 2), torch.zeros(2, 2))
            >>> chain.kl(chain)
            tensor([0.])
        """
        if not isinstance(other, LinearChain):
            raise TypeError(f"other: expected a LinearChain, got {type(other).__name__}")
        shape = self.emissions.shape
        checks.shape("other.emissions", other.emissions, shape, "that of this chain")
        checks.device("other.emissions", other.emissions, self.emissions, "emissions")
        chain, other_chain = self._full_precision(), other._full_precision()
        check_same_lengths(chain, other_chain)
        return self._to_result_dtype(functional.kl(chain, other_chain))

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
        return self._to_result_dtype(functional.log_prob(self._tensors(), states.long()))

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
