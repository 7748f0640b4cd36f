"""Sparse linear chains: the scores of all paths of states through T steps, and their posterior."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...primitives.semiring import Log, Max, Semiring
from ...runtime import checks
from ...runtime.backend import current_backend
from ...runtime.constants import scalar
from ...runtime.dtypes import acc_dtype
from ...runtime.lengths import lengths_on_device
from ...runtime.sizes import same_sizes
from . import autograd, functional
from .edges import edges_from_states
from .inputs import (
    ChainTensors,
    chain_tensors,
    check_chain,
    check_end,
    check_same_paths,
    check_semiring,
)
from .results import ChainSample, ViterbiPath


class Chain:
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

    def __init__(
        self,
        scores: Tensor,
        source: Tensor,
        initial: Tensor | None = None,
        final: Tensor | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> None:
        check_chain(scores, source, initial, final)
        self.scores, self.source, self.initial, self.final = scores, source, initial, final
        self.lengths: Tensor | None = None
        if lengths is not None:
            N = scores.shape[1]
            self.lengths = lengths_on_device("lengths", lengths, N, scores.device)[1]

    def _tensors(self, semiring: Semiring = Log) -> ChainTensors:
        """Return the tensors that the registered ops take."""
        check_semiring(semiring)
        ends = self.initial, self.final
        return chain_tensors(self.scores, self.source, *ends, self.lengths, semiring)

    def _to_result_dtype(self, value: Tensor) -> Tensor:
        return value.to(acc_dtype(self.scores.dtype))

    def logz(self, semiring: Semiring = Log) -> Tensor:
        """Return the sum over all paths, `[N]`.

        It is log Z in nats under `Log` and the best score under `Max`. A chain without a path has
        -inf.

        Args:
            semiring: as in `partita.logz`.

        Example:
            >>> import torch, partita
            >>> partita.Chain(torch.zeros(2, 1, 2, 2), partita.dense_source(2)).logz(partita.Max)
            tensor([0.])
        """
        return functional.partition(self._tensors(semiring), semiring)

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
            return functional.marginals(self._tensors())

    def viterbi(self) -> ViterbiPath:
        """Return the best path of each chain, as in `ViterbiPath`.

        Of equal paths it is the one with the lowest edge into each state, then the lowest last
        state.

        Example:
            >>> import torch, partita
            >>> scores = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]])  # edge 1 into state 0 is best
            >>> partita.Chain(scores, partita.dense_source(2)).viterbi().states.flatten()
            tensor([1, 0])
        """
        with torch.no_grad():
            return ViterbiPath(*autograd.viterbi(*self._tensors(), True, current_backend()))

    def nbest(self, k: int) -> ViterbiPath:
        """Return the k best paths of each chain, from the best on.

        Paths differ in an edge. Of equal paths that with the lowest edges, from the last state
        back, comes first. The scan runs in Numba on the CPU and in PyTorch elsewhere. It is not
        differentiable; `log_prob` of the edges is.

        Args:
            k: the number of paths.

        Returns:
            A `ViterbiPath` with scores `[k, N]`, states `[k, T + 1, N]` and edges `[k, T, N]`. A
            path that does not exist has score -inf, and its states and edges are -1.

        Raises:
            TypeError, ValueError: k is not an integer, or it is below 1.

        Source: Schwartz and Chow, The N-best algorithm, 1990.

        Example:
            >>> import torch, partita
            >>> scores = torch.tensor([[[[2.0, 0.0], [0.5, 0.0]]]])
            >>> best = partita.Chain(scores, partita.dense_source(2)).nbest(3)
            >>> best.score[:, 0], best.states[:, :, 0].tolist()
            (tensor([2.0000, 0.5000, 0.0000]), [[0, 0], [0, 1], [1, 0]])
        """
        checks.python_int("k", k)
        if k < 1:
            raise ValueError(f"k: expected a number of paths, 1 or more, got {k!r}")
        with torch.no_grad():
            score, states, edges = functional.nbest(self._tensors(Max), k)
            return ViterbiPath(self._to_result_dtype(score), states, edges)

    def sample(self, k: int, generator: torch.Generator | None = None) -> ChainSample:
        """Draw k independent paths from the posterior of each chain.

        Args:
            k: the number of paths.
            generator: a generator on the device of the scores; the default one if None. The same
                state of it gives the same paths.

        Returns:
            The paths, as in `ChainSample`.

        Raises:
            TypeError, ValueError: k is not an integer, or it is negative; the generator is none, or
                on another device.

        Example:
            >>> import torch, partita
            >>> chain = partita.Chain(torch.zeros(4, 2, 3, 3), partita.dense_source(3))
            >>> chain.sample(5).states.shape
            torch.Size([5, 5, 2])
        """
        checks.python_int("k", k)
        if k < 0:
            raise ValueError(f"k: expected a number of paths, 0 or more, got {k!r}")
        checks.generator("generator", generator, self.scores.device)
        with torch.no_grad():
            T, N = self.scores.shape[:2]
            uniforms = self.scores.new_empty((T + 1, k, N), dtype=torch.float64)
            uniforms = uniforms.uniform_(generator=generator)
            return ChainSample(*autograd.sample(*self._tensors(), uniforms, current_backend()))

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
        checks.floating("values", values)
        checks.device("values", values, self.scores, "scores")
        try:
            edge_values = values.expand(self.scores.shape)
        except RuntimeError:
            raise ValueError(
                "values: expected what broadcasts to the scores,"
                f" {list(self.scores.shape)}, got {list(values.shape)}"
            ) from None
        ends = []
        for name, value in (("initial", initial), ("final", final)):
            if value is None:
                zero = scalar(0.0, self.scores.dtype, self.scores.device)
                value = zero.expand(self.scores.shape[1:3])
            else:
                check_end(name, value, self.scores)
            ends.append(value)
        mean, _ = functional.expectation(self._tensors(), edge_values, *ends)
        return self._to_result_dtype(mean)

    def entropy(self) -> Tensor:
        """Return the entropy of the paths in nats, `[N]`; 0 for a chain without a path.

        Example:
            >>> import torch, partita
            >>> chain = partita.Chain(torch.zeros(3, 1, 2, 2), partita.dense_source(2))
            >>> chain.entropy()  # log 16, of 16 equal paths
            tensor([2.7726])
        """
        return self._to_result_dtype(functional.entropy(self._tensors()))

    def kl(self, other: Chain) -> Tensor:
        """Return KL(self ‖ other) of the paths in nats, `[N]`.

        It is +inf where the other chain forbids a path of this one.

        Args:
            other: a chain with the same `[T, N, C, K]`, `source` and lengths.

        Raises:
            TypeError, ValueError: other is not a chain, or its shape, device, `source` or lengths
                differ. On a GPU the last two are checked only with `PARTITA_CHECK=1`, and otherwise
                give NaN.

        Example:
            >>> import torch, partita
            >>> chain = partita.Chain(torch.randn(3, 1, 2, 2), partita.dense_source(2))
            >>> chain.kl(chain)
            tensor([0.])
        """
        if not isinstance(other, Chain):
            raise TypeError(f"other: expected a Chain, got {type(other).__name__}")
        checks.shape("other.scores", other.scores, self.scores.shape, "that of this chain")
        checks.device("other.scores", other.scores, self.scores, "scores")
        chain, other_chain = self._tensors(), other._tensors()
        check_same_paths(chain, other_chain)
        return self._to_result_dtype(functional.kl(chain, other_chain))

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
        log_prob = functional.log_prob(self._tensors(), edges.long(), first_state)
        return self._to_result_dtype(log_prob)

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
        alpha = functional.state_scores(self._tensors(semiring), semiring, reverse=False)
        return self._to_result_dtype(alpha)

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
        beta = functional.state_scores(self._tensors(semiring), semiring, reverse=True)
        return self._to_result_dtype(beta)


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
