"""Hidden Markov models that emit symbols or counts."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.linear_chain import autograd
from .base import BaseHMM, Parameters
from .data import Batch, at_least_zero, normalized, prior, products, sums_of_products


class CategoricalHMM(BaseHMM):
    """A hidden Markov model whose states emit one of K symbols, 0 to K - 1.

    Args:
        n_components: the number of states, C.
        startprob_prior, transmat_prior: as in `BaseHMM`.
        emissionprob_prior: parameters of the Dirichlet prior of the symbols, a number or what
            broadcasts to `[C, K]`; 1 for none.
        n_features: the number of symbols, K; if None, that of `emissionprob_`, or one more than
            the greatest symbol that `fit` sees.
        algorithm, random_state, n_iter, tol, verbose: as in `BaseHMM`.
        params, init_params: letters of s (start), t (transitions) and e (emissions).
        implementation, n_init: as in `BaseHMM`.

    Its attributes are those of `BaseHMM` and `emissionprob_` `[C, K]`. X is `[M, 1]`: integers, or
    whole numbers in a floating dtype, where NaN stands for a missing symbol.

    Raises:
        TypeError, ValueError: an argument is out of its range.

    Source: `hmmlearn.hmm.CategoricalHMM`.

    Example:
        >>> import torch
        >>> from partita.hmm import CategoricalHMM
        >>> X = torch.tensor([0, 0, 1, 0, 2, 2, 3, 2])[:, None]
        >>> model = CategoricalHMM(2, random_state=1, n_init=8, n_iter=50).fit(X)
        >>> model.predict(X).unique_consecutive(return_counts=True)[1]
        tensor([4, 4])
    """

    emission_parameters: ClassVar[dict[str, str]] = {"e": "emissionprob"}
    _has_separate_states = True

    def __init__(
        self,
        n_components: int = 1,
        startprob_prior: Any = 1.0,
        transmat_prior: Any = 1.0,
        *,
        emissionprob_prior: Any = 1.0,
        n_features: int | None = None,
        algorithm: str = "viterbi",
        random_state: Any = None,
        n_iter: int = 10,
        tol: float = 1e-2,
        verbose: bool = False,
        params: str = "ste",
        init_params: str = "ste",
        implementation: str = "log",
        n_init: int = 1,
    ) -> None:
        super().__init__(
            *(n_components, startprob_prior, transmat_prior, algorithm, random_state, n_iter, tol),
            *(verbose, params, init_params, implementation),
            n_init=n_init,
        )
        self.emissionprob_prior, self.n_features = emissionprob_prior, n_features

    def _check_features(self, batch: Batch) -> None:
        X = batch.values
        if X.shape[1] != 1:
            raise ValueError(f"X: expected one column, the symbols, got {X.shape[1]}")
        least, most, wholes = torch.stack([X.min(), X.max(), (X.floor() == X).all()]).tolist()
        if not wholes or least < 0:
            raise ValueError("X: expected symbols, whole numbers of 0 or more")
        if self.n_features is None:
            known = None if "e" in self.init_params else self._stored("emissionprob")
            self.n_features = int(most) + 1 if known is None else known.shape[-1]
        if most >= self.n_features:
            raise ValueError(
                f"X: expected symbols below {self.n_features}, the number of symbols of the model,"
                f" got {int(most)}"
            )

    def _parameters(self, device: torch.device) -> Parameters:
        if self.n_features is None and (known := self._stored("emissionprob")) is not None:
            self.n_features = known.shape[-1]
        return super()._parameters(device)

    def _check_parameters(self, parameters: Parameters) -> None:
        super()._check_parameters(parameters)
        if "emissionprob" in parameters:
            shape = (self.n_components, self.n_features or 0)
            self._check_distributions("emissionprob_", parameters["emissionprob"], shape)

    def _free_scalars(self) -> dict[str, int]:
        C, K = self.n_components, self.n_features or 1
        return {**super()._free_scalars(), "e": C * (K - 1)}

    def initialize(self, X: Tensor, random: Any) -> Parameters:
        found = torch.from_numpy(random.rand(self.n_components, self.n_features)).to(X)
        return {"emissionprob": found / found.sum(1, keepdim=True)}

    def _prepare(self, batch: Batch) -> Tensor:
        """Return the symbol of each row, `[M]`; K where it is missing."""
        # The steps of a sequence are next to each other in memory, where scans look them up. The
        # copy that brings this order converts the dtype too.
        steps_last = batch.values.view(batch.shape).T
        symbols = steps_last.to(torch.int64, memory_format=torch.contiguous_format).T
        if batch.missing is not None:
            symbols.masked_fill_(batch.missing.view(batch.shape), self.n_features or 0)
        return symbols

    def log_likelihood(self, X: Tensor, emissionprob: Tensor) -> Tensor:  # type: ignore[override]
        return self._table(emissionprob).index_select(0, X.flatten())

    @staticmethod
    def _table(emissionprob: Tensor) -> Tensor:
        """Return the log-probabilities of the symbols, `[K + 1, C]`; zeros for a missing one."""
        return torch.nn.functional.pad(emissionprob.log().T, (0, 0, 0, 1))

    def _counts(self, batch: Batch, data: Tensor, parameters: Parameters) -> Parameters:
        if data.is_cpu and len(parameters["startprob"]) == 1:
            start, moves = parameters["startprob"].log(), parameters["transmat"][0].log()
            start = start.expand(batch.shape[1], -1)
            table = self._table(parameters["emissionprob"][0])
            found = autograd.expectation_of_symbols(table, data.T, moves, start, batch.lengths)
            if found is not None:
                log_probs, of_symbols, of_moves, of_start = found
                return {
                    "log_prob": log_probs.sum()[None],
                    "startprob": of_start.sum(0)[None],
                    "transmat": of_moves[None],
                    "emissions.counts": of_symbols[:-1].T[None],
                }
        return super()._counts(batch, data, parameters)

    def statistics(  # type: ignore[override]
        self, X: Tensor, posteriors: Tensor, emissionprob: Tensor
    ) -> Parameters:
        counts, symbols = torch.zeros_like(self._table(emissionprob)), X.flatten()
        if symbols.is_cpu:
            counts = counts.index_add(0, symbols, posteriors)
        else:
            # Unlike index_add, this adds rows in the same order in every run on a GPU.
            counts = counts.index_put((symbols,), posteriors, accumulate=True)
        return {"counts": counts[:-1].T}

    def update(self, statistics: Parameters, emissionprob: Tensor) -> Parameters:  # type: ignore[override]
        counts = statistics["counts"]
        found = at_least_zero(prior(self.emissionprob_prior, counts, 2) - 1 + counts)
        return {"emissionprob": normalized(found, emissionprob)}

    def means_of(self, emissionprob: Tensor) -> Tensor:  # type: ignore[override]
        return emissionprob

    def draw(  # type: ignore[override]
        self, states: Tensor, generator: torch.Generator, emissionprob: Tensor
    ) -> Tensor:
        uniform = torch.rand(
            len(states), 1, generator=generator, dtype=torch.float64, device=states.device
        )
        ends = emissionprob.cumsum(1)
        ends = ends / ends[:, -1:]
        return (ends[states] <= uniform).sum(1, keepdim=True).clamp(max=ends.shape[1] - 1)


class PoissonData(NamedTuple):
    """Counts, and what of their log-probabilities depends on no parameter.

    Fields:
        features: the counts and where they are there, `[M, F + 1]` or `[M, 2 F]`.
        is_positive: `[M, F]` fp64.
        log_factorials: the sum over the columns, `[M, 1]`.
    """

    features: Tensor
    is_positive: Tensor
    log_factorials: Tensor


class PoissonHMM(BaseHMM):
    """A hidden Markov model whose states emit counts with Poisson distributions.

    Args:
        n_components: the number of states, C.
        startprob_prior, transmat_prior: as in `BaseHMM`.
        lambdas_prior, lambdas_weight: shape and rate of the gamma prior of the rates, numbers or
            what broadcasts to `[C, F]`. A shape below 1 counts as 1, and both are none at 0.
        algorithm, random_state, n_iter, tol, verbose: as in `BaseHMM`.
        params, init_params: letters of s (start), t (transitions) and l (rates).
        implementation, n_init: as in `BaseHMM`.

    Its attributes are those of `BaseHMM` and the rates `lambdas_` `[C, F]`.

    Raises:
        TypeError, ValueError: an argument is out of its range.

    Source: `hmmlearn.hmm.PoissonHMM`; Zucchini and MacDonald, Hidden Markov models for time
    series, 2009.

    Example:
        >>> import torch
        >>> from partita.hmm import PoissonHMM
        >>> X = torch.tensor([[1.0], [0.0], [1.0], [9.0], [12.0], [10.0]])
        >>> model = PoissonHMM(2, random_state=0, n_init=4, n_iter=50).fit(X)
        >>> model.lambdas_.sort(0).values.round()
        tensor([[ 1.],
                [10.]])
    """

    emission_parameters: ClassVar[dict[str, str]] = {"l": "lambdas"}
    _has_separate_states = True
    has_missing_entries = True

    def __init__(
        self,
        n_components: int = 1,
        startprob_prior: Any = 1.0,
        transmat_prior: Any = 1.0,
        lambdas_prior: Any = 0.0,
        lambdas_weight: Any = 0.0,
        algorithm: str = "viterbi",
        random_state: Any = None,
        n_iter: int = 10,
        tol: float = 1e-2,
        verbose: bool = False,
        params: str = "stl",
        init_params: str = "stl",
        implementation: str = "log",
        *,
        n_init: int = 1,
    ) -> None:
        super().__init__(
            *(n_components, startprob_prior, transmat_prior, algorithm, random_state, n_iter, tol),
            *(verbose, params, init_params, implementation),
            n_init=n_init,
        )
        self.lambdas_prior, self.lambdas_weight = lambdas_prior, lambdas_weight

    def _check_features(self, batch: Batch) -> None:
        super()._check_features(batch)
        X = batch.values
        if ((X < 0) | (X.floor() != X)).any():
            raise ValueError("X: expected counts, whole numbers of 0 or more")

    def _check_parameters(self, parameters: Parameters) -> None:
        super()._check_parameters(parameters)
        if (rates := parameters.get("lambdas")) is None:
            return
        shape = (self.n_components, self.n_features or rates.shape[-1])
        if rates.shape != shape or not (rates >= 0).all():
            raise ValueError(
                f"lambdas_: expected rates of 0 or more of shape {list(shape)}, got"
                f" {rates.min().item()} in {list(rates.shape)}"
            )

    def initialize(self, X: Tensor, random: Any) -> Parameters:
        C, F = self.n_components, X.shape[1]
        counts = X[~X.isnan()]
        mean, variance = counts.mean().item(), counts.var(correction=0).item()
        if not mean or not variance:
            return {"lambdas": torch.full((C, F), mean).to(X)}
        drawn = random.gamma(shape=mean**2 / variance, scale=variance / mean, size=(C, F))
        return {"lambdas": torch.from_numpy(drawn).to(X)}

    def _prepare(self, batch: Batch) -> PoissonData:
        X, observed = batch.values, batch.observed
        is_there = X.new_ones(len(X), 1) if observed is None else observed.to(X.dtype)
        log_factorials = torch.lgamma(X + 1).sum(1, keepdim=True)
        return PoissonData(torch.cat([X, is_there], 1), (X > 0).to(X.dtype), log_factorials)

    def log_likelihood(self, X: PoissonData, lambdas: Tensor) -> Tensor:  # type: ignore[override]
        is_zero = lambdas == 0
        rates = -lambdas
        if X.features.shape[1] == lambdas.shape[1] + 1:
            rates = rates.sum(1, keepdim=True)
        factors = torch.cat([lambdas.log().masked_fill(is_zero, 0.0), rates], 1)
        found = products(X.features, factors.T) - X.log_factorials
        # A rate of 0 gives no count but 0.
        return found.masked_fill(X.is_positive @ is_zero.to(lambdas.dtype).T > 0, -torch.inf)

    def statistics(  # type: ignore[override]
        self, X: PoissonData, posteriors: Tensor, lambdas: Tensor
    ) -> Parameters:
        F = X.is_positive.shape[1]
        sums = sums_of_products(posteriors, X.features)
        return {"n": sums[:, F:].expand(-1, F), "x": sums[:, :F]}

    def update(self, statistics: Parameters, lambdas: Tensor) -> Parameters:  # type: ignore[override]
        n, x = statistics["n"], statistics["x"]
        shape = at_least_zero(prior(self.lambdas_prior, x, 2) - 1)
        rate = prior(self.lambdas_weight, x, 2) + n
        return {"lambdas": torch.where(rate > 0, (shape + x) / rate, lambdas)}

    def means_of(self, lambdas: Tensor) -> Tensor:  # type: ignore[override]
        return lambdas

    def draw(  # type: ignore[override]
        self, states: Tensor, generator: torch.Generator, lambdas: Tensor
    ) -> Tensor:
        return torch.poisson(lambdas[states], generator=generator)
