"""Sparse linear chains: the scores of all paths of states through T steps, and their posterior."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...paths.distribution import SemiringDistribution
from ...paths.inputs import as_values, check_semiring, full_lengths
from ...primitives.semiring import Log, Semiring
from ...runtime import checks
from ...runtime.constants import scalar
from ...runtime.dtypes import acc_dtype
from ...runtime.lengths import lengths_on_device
from ...runtime.sizes import same_sizes
from . import autograd
from .common import ChainPotentials, check_end
from .edges import edges_from_states
from .reference import path_score


class ViterbiPath(NamedTuple):
    """The best path of each chain.

    Of equal paths it is the one with the lowest edge into each state, then the lowest last state.

    Fields:
        score: `[N]`, in nats if the scores are; -inf for a chain without a path.
        states: `[T + 1, N]` int64; row 0 is the initial state. -1 past the length and for a chain
            without a path.
        edges: `[T, N]` int64, c·K + k for the k-th edge into state c; -1 as in states.
    """

    score: Tensor
    states: Tensor
    edges: Tensor


class ChainSample(NamedTuple):
    """Paths that are drawn from the posterior.

    Fields:
        states: `[k, T + 1, N]` int64, as in `ViterbiPath`.
        edges: `[k, T, N]` int64, as in `ViterbiPath`.
    """

    states: Tensor
    edges: Tensor


class Chain(SemiringDistribution[ViterbiPath, ChainSample]):
    """A batch of sparse linear chains: the scores of the steps, and the states that they connect.

    `scores[t, n, c, k]` is the score of entering state c at step t of chain n by its k-th edge,
    which comes from state `source[c, k]`. A path starts in a state with its `initial` score, takes
    one edge a step, and ends with the `final` score of its last state.

    Args:
        scores: `[T, N, C, K]` floating, in nats, any strides; -inf forbids an edge.
        source: `[C, K]`, any integer dtype; -1 for no edge, whose scores are never read. A state
            may be the source of any number of edges.
        initial, final: `[N, C]` floating, in nats; zeros if None (the semiring's one).
        lengths: `[N]` integers on any device, or a list: the number of steps of each chain; T if
            None.

    Everything is differentiable in scores, initial and final. Scores past a length have gradient 0.
    Half types give fp32 results.

    Raises:
        TypeError, ValueError: a dtype, shape or device is wrong, or a source or length is out of
            range. On a GPU the latter is checked only with `PARTITA_CHECK=1`. Otherwise the results
            of that chain are NaN, or for a source the results of every chain.

    Source: Rabiner, A tutorial on hidden Markov models, 1989; Lafferty et al., Conditional random
    fields, 2001; for `expectation`, `entropy` and `kl` Li and Eisner, First- and second-order
    expectation semirings, 2009.

    Example:
        >>> import torch
        >>> from partita import Chain, dense_source
        >>> chain = Chain(torch.zeros(3, 1, 2, 2), dense_source(2))
        >>> chain.logz()  # log 16: 2 initial states, then 3 choices of 2
        tensor([2.7726])
        >>> chain.viterbi().states.squeeze(1)
        tensor([0, 0, 0, 0])
    """

    _ops = autograd
    _path, _sample = ViterbiPath, ChainSample

    def __init__(
        self,
        scores: Tensor,
        source: Tensor,
        initial: Tensor | None = None,
        final: Tensor | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> None:
        checks.floating("scores", scores)
        if scores.ndim != 4:
            raise ValueError(f"scores: expected shape [T, N, C, K], got {list(scores.shape)}")
        checks.integer("source", source)
        checks.device("source", source, scores, "scores")
        checks.shape("source", source, scores.shape[2:], "[C, K] of scores")
        for name, end in (("initial", initial), ("final", final)):
            if end is not None:
                check_end(name, end, scores)
        self.scores, self.source, self.initial, self.final = scores, source, initial, final
        self.lengths: Tensor | None = None
        if lengths is not None:
            N = scores.shape[1]
            self.lengths = lengths_on_device("lengths", lengths, N, scores.device)[1]

    @property
    def _potentials(self) -> ChainPotentials:
        return self._under(Log)

    def _under(self, semiring: Semiring) -> ChainPotentials:
        """Return the potentials; an end that was not given is the semiring's one."""
        check_semiring(semiring)
        scores, initial, final = self.scores, self.initial, self.final
        if initial is None or final is None:
            one = scalar(semiring.one, acc_dtype(scores.dtype), scores.device)
            # Each end is a tensor of its own: compilers refuse one tensor for two arguments.
            shape = scores.shape[1:3]
            initial, final = (one.expand(shape) if x is None else x for x in (initial, final))
        return ChainPotentials(scores, self.source, initial, final, self.lengths)

    def marginals(self) -> Tensor:
        """Return the posterior probability of each edge, `[T, N, C, K]`, zero past the lengths.

        It is not differentiable; `expectation` is.

        Example:
            >>> import torch, partita
            >>> chain = partita.Chain(torch.zeros(2, 1, 2, 2), partita.dense_source(2))
            >>> chain.marginals().sum((2, 3))
            tensor([[1.],
                    [1.]])
        """
        with torch.no_grad():
            return autograd.marginals(self._potentials)

    def expectation(
        self, values: Tensor, initial: Tensor | None = None, final: Tensor | None = None
    ) -> Tensor:
        """Return the posterior mean of the sum of values along a path, `[N]`.

        It is differentiable in the scores and in the values.

        Args:
            values: the values of the edges, `[T, N, C, K]` or what broadcasts to it. A value whose
                posterior is 0 adds 0, even if it is infinite.
            initial, final: the values of the first and of the last state, `[N, C]`; 0 if None.

        Raises:
            TypeError, ValueError: a dtype, shape or device is wrong.

        Example:
            >>> import torch, partita
            >>> chain = partita.Chain(torch.zeros(6, 1, 2, 2), partita.dense_source(2))
            >>> chain.expectation(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))  # steps that stay
            tensor([3.])
        """
        edge_values = as_values("values", values, self.scores, "scores", "scores")
        for name, value in (("initial", initial), ("final", final)):
            if value is not None:
                check_end(name, value, self.scores)
        zero = scalar(0.0, self.scores.dtype, self.scores.device)
        ends = (zero.expand(self.scores.shape[1:3]) if x is None else x for x in (initial, final))
        mean, _ = autograd.mean_and_log_partition(self._potentials, (edge_values, *ends))
        return self._rounded(mean)

    def log_prob(self, edges: Tensor | None = None, *, states: Tensor | None = None) -> Tensor:
        """Return the log-probability of paths in nats, `[..., N]`; -inf for edges that form none.

        Args:
            edges: `[..., T, N]` integers as in `ViterbiPath`; edges past a length are ignored. They
                do not tell the path of a chain of no steps, whose result is 0.
            states: `[..., T + 1, N]` integers instead of edges, as in `edges_from_states`. They
                tell the path of a chain of no steps too.

        Raises:
            TypeError, ValueError: a dtype or shape is wrong; both or neither of edges and states
                are given; no edge connects two states, as in `edges_from_states`.

        Source: the score of the path minus log Z.

        Example:
            >>> import torch, partita
            >>> chain = partita.Chain(torch.zeros(3, 1, 2, 2), partita.dense_source(2))
            >>> chain.log_prob(chain.viterbi().edges).exp()
            tensor([0.0625])
            >>> chain.log_prob(states=torch.tensor([[0], [1], [1], [0]])).exp()
            tensor([0.0625])
        """
        if (edges is None) == (states is None):
            raise TypeError("log_prob: expected either edges or states")
        T, N = self.scores.shape[:2]
        name, given, rows = ("edges", edges, T) if states is None else ("states", states, T + 1)
        checks.integer(name, given)
        assert given is not None
        checks.device(name, given, self.scores, "scores")
        if not same_sizes(given.shape[-2:], (rows, N)):
            raise ValueError(
                f"{name}: expected shape [..., {'T' if states is None else 'T + 1'}, N] with"
                f" [T, N] = {[T, N]}, got {list(given.shape)}"
            )
        if states is not None:
            edges = edges_from_states(states, self.source)
        assert edges is not None
        first_state = None if states is None else states[..., 0, :].long()
        score = path_score(self._potentials, edges.long(), first_state)
        log_prob = self._log_prob(score)
        if states is None:  # The path of a chain of no steps is not told by its edges.
            is_empty = full_lengths(self.scores, self.lengths) == 0
            log_prob = torch.where(is_empty & (log_prob > -torch.inf), 0.0, log_prob)
        return self._rounded(log_prob)

    def forward_scores(self, semiring: Semiring = Log) -> Tensor:
        """Return alpha, `[T + 1, N, C]`, in nats: the sum over all paths into each state.

        Row t is the sum over the first t steps. Past a length it is the row at the length.

        Args:
            semiring: as in `partita.logz`.

        Example:
            >>> import torch, partita
            >>> chain = partita.Chain(torch.zeros(2, 1, 2, 2), partita.dense_source(2))
            >>> chain.forward_scores()[:, 0, 0]
            tensor([0.0000, 0.6931, 1.3863])
        """
        alpha = autograd.state_scores(self._under(semiring), semiring, reverse=False)
        return self._rounded(alpha)

    def backward_scores(self, semiring: Semiring = Log) -> Tensor:
        """Return beta, `[T + 1, N, C]`, in nats: the sum over all paths on from each state.

        Row t is the sum over the steps from t on. From a length on it is the final scores.

        Args:
            semiring: as in `partita.logz`.

        Example:
            >>> import torch, partita
            >>> chain = partita.Chain(torch.zeros(2, 1, 2, 2), partita.dense_source(2))
            >>> chain.backward_scores()[:, 0, 0]
            tensor([1.3863, 0.6931, 0.0000])
        """
        beta = autograd.state_scores(self._under(semiring), semiring, reverse=True)
        return self._rounded(beta)


def logz(
    scores: Tensor,
    source: Tensor,
    initial: Tensor | None = None,
    final: Tensor | None = None,
    semiring: Semiring = Log,
    *,
    lengths: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """Return the sum over all paths of sparse linear chains, `Chain(...).logz(semiring)`.

    Args:
        scores, source, initial, final, lengths: as in `Chain`.
        semiring: `Log` for log Z, `Max` for the best score, or any other.

    Returns:
        `[N]`, in nats under `Log`; fp32 for half inputs. The gradient is the marginals under `Log`
        and the indicator of the best path under `Max`.

    Raises:
        TypeError, ValueError: as in `Chain`.

    Source: as in `Chain`.

    Example:
        >>> import torch
        >>> from partita import Log, dense_source, logz
        >>> logz(torch.zeros(3, 1, 2, 2), dense_source(2), semiring=Log)  # log 16; the default
        tensor([2.7726])
    """
    return Chain(scores, source, initial, final, lengths=lengths).logz(semiring)
