"""The distribution over the paths of a sequence, and what follows from its log-partition function.

A path y has a score, the sum of the potentials θ that it passes (scores of edges, emissions,
transitions, durations, ends), and the probability p(y) = exp(score(y)) / Z with Z = Σ exp(score).
A family of distributions scans the steps to sum over its paths. All else is mathematics:

    marginals, expected counts      P(y passes i) = ∂ log Z(θ) / ∂ θ_i
    expectation of values v         E[v] = Σ_i v_i P(y passes i) = ∂ log Z(θ + ε v) / ∂ ε at ε = 0
    entropy                         H(p) = log Z − E[score]
    divergence                      KL(p ‖ q) = E_p[score_p − score_q] − log Z_p + log Z_q
    log-probability                 log p(y) = score(y) − log Z
    second derivatives of log Z     the product of a tensor v with the marginals is E[v], so their
                                    derivative is that of E[v], a covariance
    best path, samples              argmax of the score, and draws from p, traced back in time

Differences of log Z are formed in fp64 before they are rounded. A sequence without a path has log Z
of −inf, and its marginals, entropy and divergence are 0.

Source: Rabiner, A tutorial on hidden Markov models, 1989; Sarawagi and Cohen, Semi-Markov
conditional random fields, 2004; Li and Eisner, First- and second-order expectation semirings, 2009
(expectation, entropy and their gradients); Eisner, Inside-outside and forward-backward algorithms
are just backprop, 2016. One class over all families is the design of torch-struct (Rush, 2020) and
of SynJax (Stanić and others, 2023).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from ..primitives.semiring import Log, Semiring
from ..runtime import checks
from ..runtime.dtypes import acc_dtype
from .inputs import check_semiring

Path = TypeVar("Path")  # the records that a family returns
Sample = TypeVar("Sample")


class PathDistribution(Generic[Path, Sample]):
    """A distribution over the paths of each sequence of a batch.

    A family gives its potentials, its records and its functions. The potentials are a NamedTuple
    of the attributes of the same names. Its first field is `[T, N, ...]`, its field `lengths` is
    `[N]` or None, and its property `variables` has the differentiable tensors.
    `in_full_precision()` returns them in dtypes whose gradients are as exact as the results, and
    `aligned_with(other)` returns two potentials in the same shapes with where their paths are the
    same, `[N]`. The functions are those of the family's `autograd.py`, and take potentials:

        log_partitions              log Z, `[N]`, in fp64 and in the dtype of results
        mean_and_log_partition      the mean of the sum of values along a path, and log Z, in fp64;
                                    there is a value for each of the variables, of its shape
        best_path, nbest, draw      the fields of the records
        partition                   the sum under another semiring, if the scan takes one
    """

    _ops: ModuleType
    _tensors: Any  # the class of the potentials
    _path: Callable[..., Path]
    _sample: Callable[..., Sample]

    @property
    def _potentials(self) -> Any:
        return self._tensors(*(getattr(self, name) for name in self._tensors._fields))

    def _rounded(self, value: Tensor) -> Tensor:
        """Return a value in the dtype of results."""
        return value.to(acc_dtype(self._potentials[0].dtype))

    def _log_prob(self, score: Tensor) -> Tensor:
        """Return the log-probability of paths with these scores, `[..., N]` fp64."""
        log_partition = self._ops.log_partitions(self._potentials)[0]
        # A path that is given is not a path of a sequence that has none.
        return torch.where(log_partition == -torch.inf, -torch.inf, score - log_partition)

    def viterbi(self) -> Path:
        """Return the best path of each sequence, as in the record that says how ties are broken.

        It is not differentiable; `log_prob` of the path is.

        Example:
            >>> import torch, partita
            >>> emissions = torch.tensor([[[1.0, 0.0]], [[0.0, 0.1]], [[1.0, 0.0]]])
            >>> partita.LinearChain(emissions, torch.eye(2)).viterbi().states.flatten()
            tensor([0, 0, 0])
        """
        with torch.no_grad():
            return self._path(*self._ops.best_path(self._potentials))

    def nbest(self, k: int) -> Path:
        """Return the k best paths of each sequence, from the best on.

        Of equal paths that with the lowest edges (states for a `LinearChain`), from the last state
        back, comes first. Those of a `SemiMarkovChain` may come in any order. The scan runs in
        Numba on the CPU and in PyTorch elsewhere, except that semi-Markov chains of few states have
        a kernel. It is not differentiable; `log_prob` of the paths is.

        Args:
            k: the number of paths.

        Returns:
            The record that `viterbi` returns, each field with a leading dimension k. A path that
            does not exist has score -inf, and its states and edges are -1.

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
            score, *path = self._ops.nbest(self._potentials, k)
            return self._path(self._rounded(score), *path)

    def sample(self, k: int, generator: torch.Generator | None = None) -> Sample:
        """Draw k independent paths from the posterior of each sequence.

        Args:
            k: the number of paths.
            generator: a generator on the device of the scores; the default one if None. The same
                state of it gives the same paths.

        Returns:
            The paths, with a leading dimension k.

        Raises:
            TypeError, ValueError: k is not an integer, or it is negative; the generator is none, or
                on another device.

        Example:
            >>> import torch, partita
            >>> chain = partita.LinearChain(torch.zeros(4, 2, 3), torch.zeros(3, 3))
            >>> chain.sample(5).states.shape
            torch.Size([5, 4, 2])
        """
        checks.python_int("k", k)
        if k < 0:
            raise ValueError(f"k: expected a number of paths, 0 or more, got {k!r}")
        scores = self._potentials[0]
        checks.generator("generator", generator, scores.device)

        def uniform(*shape: int) -> Tensor:
            numbers = scores.new_empty(shape, dtype=torch.float64)
            return numbers.uniform_(generator=generator)

        with torch.no_grad():
            return self._sample(*self._ops.draw(self._potentials, k, uniform))

    def entropy(self) -> Tensor:
        """Return the entropy of the paths in nats, `[N]`; 0 for a sequence without a path.

        Example:
            >>> import torch, partita
            >>> chain = partita.LinearChain(torch.zeros(4, 1, 2), torch.zeros(2, 2))
            >>> chain.entropy()  # log 16, of 16 equal paths
            tensor([2.7726])
        """
        potentials = self._potentials.in_full_precision()
        # Each value is a view of its own, because Dynamo refuses a tensor that is two arguments.
        values = tuple(None if x is None else x.expand(x.shape) for x in potentials.variables)
        mean, log_partition = self._ops.mean_and_log_partition(potentials, values)
        entropy = torch.where(log_partition == -torch.inf, 0.0, log_partition - mean)
        return self._rounded(entropy)

    def kl(self, other: Self) -> Tensor:
        """Return KL(self ‖ other) of the paths in nats, `[N]`.

        It is +inf where the other distribution forbids a path of this one.

        Args:
            other: one of the same class, with the same sizes, lengths and, for a `Chain`, `source`.

        Raises:
            TypeError, ValueError: other is of another class, or its shape, device, `source` or
                lengths differ. On a GPU the last two are checked only with `PARTITA_CHECK=1`, and
                otherwise give NaN.

        Example:
            >>> import torch, partita
            >>> chain = partita.LinearChain(torch.randn(3, 1, 2), torch.zeros(2, 2))
            >>> chain.kl(chain)
            tensor([0.])
        """
        p = self._potentials
        q = other._potentials if isinstance(other, PathDistribution) else other
        if type(q) is not type(p):
            expected = type(self).__name__
            raise TypeError(f"other: expected a {expected}, got {type(other).__name__}")
        p, q = p.in_full_precision(), q.in_full_precision()
        name = p._fields[0]
        checks.shape(f"other.{name}", q[0], p[0].shape, "that of this chain")
        checks.device(f"other.{name}", q[0], p[0], name)
        p, q, same = p.aligned_with(q)
        differences = map(_difference, p.variables, q.variables)
        mean, log_partition = self._ops.mean_and_log_partition(p, tuple(differences))
        divergence = mean - log_partition + self._ops.log_partitions(q)[0]
        divergence = torch.where(mean == torch.inf, torch.inf, divergence)
        divergence = torch.where(log_partition == -torch.inf, 0.0, divergence)
        return self._rounded(torch.where(same, divergence, torch.nan))


class SemiringDistribution(PathDistribution[Path, Sample]):
    """A distribution whose scan takes any semiring."""

    def _under(self, semiring: Semiring) -> Any:
        """Return the potentials for a semiring but `Log`."""
        return self._potentials

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
        if semiring == Log:
            return self._ops.log_partitions(self._potentials)[1]
        return self._ops.partition(self._under(semiring), semiring)


def _difference(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return a - b in fp64; a tensor that is None is 0."""
    if a is None or b is None:
        return a if b is None else -b.double()
    return a.double() - b.double()
