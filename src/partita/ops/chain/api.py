"""Sparse linear chains: every path of states through T steps has a score, and log Z is the log-sum-exp of them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.semiring import Log, Max, Semiring, differentiable
from ...runtime import checks
from ...runtime.autograd import apply, refuse_forward_mode
from ...runtime.backend import current_backend
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from ...runtime.lengths import lengths_on_device
from . import autograd as _chain
from . import reference
from .edges import edges_from_states
from .reference_paths import chain_log_score


class ViterbiPath(NamedTuple):
    """The best path of each chain.

    Fields:
        score: `[N]`, in nats, as the scores are; -inf for a chain without a path.
        states: `[T + 1, N]` int64; row 0 is the initial state; -1 past the length and for a chain without a path.
        edges: `[T, N]` int64, c·K + k for the k-th edge into state c; -1 likewise.
    """

    score: Tensor
    states: Tensor
    edges: Tensor


class ChainSample(NamedTuple):
    """Paths drawn from the posterior.

    Fields:
        states: `[k, T + 1, N]` int64, as in `ViterbiPath`.
        edges: `[k, T, N]` int64, likewise.
    """

    states: Tensor
    edges: Tensor


def _scalar(value: float, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    return torch.full((1, 1), value, dtype=dtype, device=device)


class Chain:
    """A batch of sparse linear chains: the scores of the steps, and which states they connect.

    `scores[t, n, c, k]` is the score of entering state c at step t of chain n by its k-th edge, which comes from state `source[c, k]`. A path
    starts in a state with its `initial` score, takes one edge a step, and ends with the `final` score of its last state.

    Args:
        scores: `[T, N, C, K]` floating, in nats, any strides; -inf forbids an edge.
        source: `[C, K]`, any integer dtype; -1 for no edge, whose scores are never looked at. A state may be used any number of times.
        initial, final: `[N, C]` floating, in nats; zeros if None (the semiring's one).
        lengths: `[N]` integers on any device, or a list; how many steps of each chain count, all if None.

    Everything is differentiable in scores, initial and final. Scores past a length have gradient 0. Half types give fp32 results.

    Raises:
        TypeError, ValueError: a wrong dtype, shape or device; a source or length out of range (on a GPU only with `PARTITA_CHECK=1`, otherwise
            the results of that chain, or for a source of every chain, are NaN).

    Source: Rabiner, A tutorial on hidden Markov models, 1989; Lafferty et al., Conditional random fields, 2001; for `expectation`, `entropy` and `kl`
    Li and Eisner, First- and second-order expectation semirings, 2009.

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
        checks.floating("scores", scores)
        if scores.ndim != 4:
            raise ValueError(f"scores: expected shape [T, N, C, K], got {list(scores.shape)}")
        checks.integer("source", source)
        checks.device("source", source, scores, "scores")
        checks.shape("source", source, scores.shape[2:], "[C, K] of scores")
        for name, value in (("initial", initial), ("final", final)):
            if value is not None:
                checks.floating(name, value)
                checks.device(name, value, scores, "scores")
                checks.shape(name, value, scores.shape[1:3], "[N, C] of scores")
        self.scores, self.source, self.initial, self.final = scores, source, initial, final
        self.lengths = (
            None
            if lengths is None
            else lengths_on_device("lengths", lengths, scores.shape[1], scores.device)[1]
        )

    def _ends(self, one: float = 0.0) -> tuple[Tensor, Tensor]:
        """Initial and final scores, `[N, C]`."""
        if self.initial is not None and self.final is not None:
            return self.initial, self.final
        ones = constant(_scalar, one, acc_dtype(self.scores.dtype), device=self.scores.device)
        return tuple(
            ones.expand(self.scores.shape[1:3]) if end is None else end
            for end in (self.initial, self.final)
        )  # type: ignore[return-value]

    def _all(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        return self.scores, self.source, *self._ends(), self.lengths

    def _scanned(self, what: str, semiring: Semiring) -> reference.ChainInputs:
        """All inputs of what runs in plain PyTorch on every device, ready to be scanned under a semiring."""
        if not isinstance(semiring, Semiring):
            raise TypeError(f"semiring: expected a Semiring, as Log or Max, got {semiring!r}")
        name = current_backend()
        if name in ("triton", "numba"):
            raise RuntimeError(
                f"backend {name!r}: {what} has no kernel; it runs in PyTorch (backend 'auto' or 'reference')"
            )
        inputs = self.scores, self.source, *self._ends(semiring.one), self.lengths
        if not torch.compiler.is_compiling():
            _chain.check_values(*inputs)
        return reference.chain_inputs(*inputs, semiring)

    def _differentiated(self, *more: Tensor | None) -> bool:
        return torch.is_grad_enabled() and any(
            t is not None and t.requires_grad
            for t in (self.scores, self.initial, self.final, *more)
        )

    def _rounded(self, value: Tensor) -> Tensor:
        return value.to(acc_dtype(self.scores.dtype))

    def _logz64(self, semiring: Semiring) -> Tensor:
        """log Z in fp64, so that differences of it are formed before they are rounded."""
        if semiring not in (Log, Max):
            return reference.log_partition(
                self._scanned("this semiring", semiring), differentiable(semiring)
            )
        run = _chain.BestScore if semiring == Max else _chain.LogZ
        return apply(run, *self._all(), self._differentiated(), current_backend())[0]

    def logz(self, semiring: Semiring = Log) -> Tensor:
        """The sum over all paths, `[N]`: log Z in nats under `Log`, the best score under `Max`; -inf for a chain without a path.

        Args:
            semiring: as in `partita.logz`.

        Example:
            >>> import torch, partita
            >>> partita.Chain(torch.zeros(2, 1, 2, 2), partita.dense_source(2)).logz(partita.Max)
            tensor([0.])
        """
        return self._rounded(self._logz64(semiring))

    def marginals(self) -> Tensor:
        """The posterior probability of each edge, `[T, N, C, K]`, zero past the lengths; not differentiable (see `expectation`).

        Example:
            >>> import torch, partita
            >>> partita.Chain(torch.zeros(2, 1, 2, 2), partita.dense_source(2)).marginals().sum((2, 3))
            tensor([[1.],
                    [1.]])
        """
        with torch.no_grad():
            scores, source, initial, final, lengths = self._all()
            backend, dtype = current_backend(), acc_dtype(scores.dtype)
            total, kept = _chain.logz(scores, source, initial, final, lengths, True, backend)
            return _chain.logz_gradient(
                torch.ones_like(total),
                scores,
                initial,
                final,
                source,
                lengths,
                total,
                kept,
                dtype,
                backend,
            )[0]

    def viterbi(self) -> ViterbiPath:
        """The best path; among equals the one with the lowest edge into each state, then the lowest last state.

        Example:
            >>> import torch, partita
            >>> scores = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]])  # one step: state 0 is best entered from state 1
            >>> partita.Chain(scores, partita.dense_source(2)).viterbi().states.flatten()
            tensor([1, 0])
        """
        with torch.no_grad():
            score, states, edges = _chain.viterbi(*self._all(), True, current_backend())
        return ViterbiPath(self._rounded(score), states, edges)

    def sample(self, k: int, generator: torch.Generator | None = None) -> ChainSample:
        """k independent paths from the posterior of each chain.

        Args:
            k: how many.
            generator: on the device of the scores; the default one if None. The same state of it gives the same paths.

        Raises:
            ValueError: a number of paths that is none.

        Example:
            >>> import torch, partita
            >>> chain = partita.Chain(torch.zeros(4, 2, 3, 3), partita.dense_source(3))
            >>> chain.sample(5).states.shape
            torch.Size([5, 5, 2])
        """
        checks.python_int("k", k)
        if k < 0:
            raise ValueError(f"k: expected a number of paths, 0 or more, got {k!r}")
        with torch.no_grad():
            steps, chains = self.scores.shape[:2]
            uniforms = self.scores.new_empty((steps + 1, k, chains), dtype=torch.float64).uniform_(
                generator=generator
            )
            return ChainSample(*_chain.sample(*self._all(), uniforms, current_backend()))

    def _expectation64(
        self, values: Tensor, first_values: Tensor, last_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mean of the values and log Z, in fp64; log Z without a gradient."""
        keep = self._differentiated(values, first_values, last_values)
        return apply(
            _chain.Expectation,
            *self._all(),
            values,
            first_values,
            last_values,
            keep,
            current_backend(),
        )[:2]

    def expectation(
        self, values: Tensor, initial: Tensor | None = None, final: Tensor | None = None
    ) -> Tensor:
        """The posterior mean of the sum of values along a path, `[N]`; differentiable in the scores and in the values.

        Args:
            values: of the edges, `[T, N, C, K]`, or what broadcasts to it; 0 · (±inf) counts as 0.
            initial, final: of the first and the last state, `[N, C]`; 0 if None.

        Raises:
            TypeError, ValueError: wrong dtypes, shapes or devices.

        Example:
            >>> import torch, partita
            >>> chain = partita.Chain(torch.zeros(6, 1, 2, 2), partita.dense_source(2))
            >>> chain.expectation(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))  # how often a state follows itself
            tensor([3.])
        """
        checks.floating("values", values)
        checks.device("values", values, self.scores, "scores")
        try:
            edges = values.expand(self.scores.shape)
        except RuntimeError:
            raise ValueError(
                f"values: expected what broadcasts to the scores, {list(self.scores.shape)}, got {list(values.shape)}"
            ) from None
        ends = []
        for name, value in (("initial", initial), ("final", final)):
            if value is not None:
                checks.floating(name, value)
                checks.device(name, value, self.scores, "scores")
                checks.shape(name, value, self.scores.shape[1:3], "[N, C] of scores")
            ends.append(
                self.scores.new_zeros(()).expand(self.scores.shape[1:3]) if value is None else value
            )
        return self._rounded(self._expectation64(edges, *ends)[0])

    def entropy(self) -> Tensor:
        """The entropy of the paths in nats, `[N]`; 0 for a chain without a path.

        Example:
            >>> import torch, partita
            >>> partita.Chain(torch.zeros(3, 1, 2, 2), partita.dense_source(2)).entropy()  # of 16 paths
            tensor([2.7726])
        """
        scores, initial, final = (
            t.expand(t.shape) for t in (self.scores, *self._ends())
        )  # Dynamo takes no tensor twice
        mean, total = self._expectation64(scores, initial, final)
        if self._differentiated():
            total = self._logz64(Log)
        return self._rounded(torch.where(total == -torch.inf, 0.0, total - mean))

    def kl(self, other: Chain) -> Tensor:
        """KL(self ‖ other) of the paths in nats, `[N]`; +inf where the other forbids a path of this one.

        Args:
            other: a chain of the same `[T, N, C, K]` scores, `source` and lengths.

        Raises:
            TypeError, ValueError: the other is no chain, or has another shape, device, `source` or lengths; the last two are NaN on a GPU, unless
                `PARTITA_CHECK=1`.

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
        mine, others = (
            (
                x.source,
                x.scores.new_full(x.scores.shape[1:2], len(x.scores))
                if x.lengths is None
                else x.lengths,
            )
            for x in (self, other)
        )
        if checks.should_check_values(self.scores.device):
            for name, own, given in zip(("source", "lengths"), mine, others, strict=True):
                if given is not own and not torch.equal(given, own.to(given.dtype)):
                    raise ValueError(
                        f"other.{name}: expected the {name} of this chain, got another"
                    )
        pairs = zip((self.scores, *self._ends()), (other.scores, *other._ends()), strict=True)
        mean, total = self._expectation64(*(a.double() - b.double() for a, b in pairs))
        if self._differentiated():
            total = self._logz64(Log)
        result = torch.where(mean == torch.inf, torch.inf, mean - total + other._logz64(Log))
        result = torch.where(total == -torch.inf, 0.0, result)
        same = (mine[1] == others[1]) & (
            True if others[0] is mine[0] else (mine[0] == others[0]).all()
        )
        return self._rounded(torch.where(same, result, torch.nan))

    def log_prob(self, edges: Tensor | None = None, *, states: Tensor | None = None) -> Tensor:
        """The log-probability of paths in nats, `[..., N]`; -inf for edges that do not follow one another.

        Args:
            edges: `[..., T, N]` integers as in `ViterbiPath`; those past a length do not count. Of a chain of no steps they say nothing: 0.
            states: in their place `[..., T + 1, N]` integers, which tell the state of such a chain too; as in `edges_from_states`.

        Raises:
            TypeError, ValueError: wrong dtypes or shapes; edges and states, or neither; states that no edge connects, as in `edges_from_states`.

        Source: the score of the path less log Z.

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
        if states is not None:
            edges = edges_from_states(states, self.source)
        assert edges is not None
        checks.integer("edges", edges)
        checks.device("edges", edges, self.scores, "scores")
        if edges.shape[-2:] != self.scores.shape[:2]:
            name, given, rows = (
                ("edges", edges, "T") if states is None else ("states", states, "T + 1")
            )
            raise ValueError(
                f"{name}: expected shape [..., {rows}, N] with [T, N] = {list(self.scores.shape[:2])}, got {list(given.shape)}"
            )
        total = chain_log_score(
            *self._all(), edges.long(), None if states is None else states[..., 0, :].long()
        )
        log_z = self._logz64(Log)
        log_prob = torch.where(
            log_z == -torch.inf, -torch.inf, total - log_z
        )  # no path is one of none
        if states is None:
            nothing = (
                len(self.scores) == 0
                if self.lengths is None
                else (self.lengths == 0) & (log_z > -torch.inf)
            )
            log_prob = (
                torch.where(nothing, 0.0, log_prob)
                if isinstance(nothing, Tensor)
                else torch.zeros_like(log_prob)
                if nothing
                else log_prob
            )
        return self._rounded(log_prob)

    def _scores_after(self, semiring: Semiring, *, reverse: bool) -> Tensor:
        """α or β; where a gradient is to come, of a scan in PyTorch."""
        if semiring in (Log, Max) and not self._differentiated():
            refuse_forward_mode(self.scores, self.initial, self.final)
            return self._rounded(
                _chain.scan(*self._all(), semiring == Max, reverse, current_backend())
            )
        scan = reference.backward_scores if reverse else reference.forward_scores
        x = self._scanned(
            "a derivative of the scores of states" if semiring in (Log, Max) else "this semiring",
            semiring,
        )
        return self._rounded(torch.stack(scan(x, differentiable(semiring))))

    def forward_scores(self, semiring: Semiring = Log) -> Tensor:
        """α, `[T + 1, N, C]`, in nats: the sum over all ways to be in each state after t steps; past the length, that at the length.

        Args:
            semiring: as in `partita.logz`.

        Example:
            >>> import torch, partita
            >>> partita.Chain(torch.zeros(2, 1, 2, 2), partita.dense_source(2)).forward_scores()[:, 0, 0]
            tensor([0.0000, 0.6931, 1.3863])
        """
        return self._scores_after(semiring, reverse=False)

    def backward_scores(self, semiring: Semiring = Log) -> Tensor:
        """β, `[T + 1, N, C]`, in nats: the sum over all ways to go on from each state after t steps; from the length on, the final scores.

        Args:
            semiring: as in `partita.logz`.

        Example:
            >>> import torch, partita
            >>> partita.Chain(torch.zeros(2, 1, 2, 2), partita.dense_source(2)).backward_scores()[:, 0, 0]
            tensor([1.3863, 0.6931, 0.0000])
        """
        return self._scores_after(semiring, reverse=True)


def logz(
    scores: Tensor,
    source: Tensor,
    initial: Tensor | None = None,
    final: Tensor | None = None,
    semiring: Semiring = Log,
    *,
    lengths: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The sum over all paths of sparse linear chains: `Chain(...).logz(semiring)` in one call.

    Args:
        scores, source, initial, final, lengths: as in `Chain`.
        semiring: `Log` for log Z, `Max` for the best score, or any other.

    Returns:
        `[N]`, in nats under `Log`; fp32 for half inputs. The gradient is the marginals under `Log`, the best path's indicator under `Max`.

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
