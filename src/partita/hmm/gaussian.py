"""Hidden Markov models with Gaussian emissions."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..runtime import checks
from .base import BaseHMM, Parameters
from .data import Batch, as_tensor, at_least_zero, k_means, prior, products, sums_of_products

COVARIANCE_TYPES = ("spherical", "diag", "full", "tied")
LOG_2PI = math.log(2 * math.pi)
TINY = torch.finfo(torch.float64).tiny
REPAIR = 1e-7  # is added to the variances of a covariance matrix that is not positive definite
MOST_POINTS = 4096  # rows from which k-means finds starting values


class GaussianData(NamedTuple):
    """Values with their mean over all rows taken off, so that squares do not cancel.

    Fields:
        values: `[M, F]`, zero where one is missing.
        features: for covariances that are spherical or diagonal, the squares, the values and
            where they are there, `[M, 2 F + 1]` or `[M, 3 F]`; only the first two for others.
        shift: the mean, `[F]`.
    """

    values: Tensor
    features: Tensor
    shift: Tensor


class GaussianHMM(BaseHMM):
    """A hidden Markov model whose states emit vectors with Gaussian distributions.

    Args:
        n_components: the number of states, C.
        covariance_type: `"spherical"` (one variance a state), `"diag"` (one a state and column),
            `"full"` (a matrix a state) or `"tied"` (one matrix).
        min_covar: is added to the variances that `fit` starts from.
        startprob_prior, transmat_prior: as in `BaseHMM`.
        means_prior, means_weight: mean and weight of the normal prior of the means, numbers or
            what broadcasts to `[C, F]`.
        covars_prior, covars_weight: parameters of the prior of the covariances: inverse gamma for
            `"spherical"` and `"diag"`, otherwise inverse Wishart.
        algorithm, random_state, n_iter, tol, verbose: as in `BaseHMM`.
        params, init_params: letters of s (start), t (transitions), m (means) and c (covariances).
        implementation, n_init: as in `BaseHMM`.

    Its attributes are those of `BaseHMM`, `means_` `[C, F]` and `covars_`, which is set as `[C]`,
    `[C, F]`, `[C, F, F]` or, if tied, `[F, F]`, and read as `[C, F, F]`.

    Raises:
        TypeError, ValueError: an argument is out of its range.

    Source: `hmmlearn.hmm.GaussianHMM`; Huang, Acero and Hon, Spoken language processing, 2001.

    Example:
        >>> import torch
        >>> from partita.hmm import GaussianHMM
        >>> X = torch.tensor([[0.0], [0.1], [0.0], [5.0], [5.1], [float("nan")], [4.9]])
        >>> model = GaussianHMM(2, random_state=0, n_init=4).fit(X)
        >>> model.predict(X).unique_consecutive(return_counts=True)[1]
        tensor([3, 4])
    """

    emission_parameters: ClassVar[dict[str, str]] = {"m": "means", "c": "covars"}
    means_: Any

    def __init__(
        self,
        n_components: int = 1,
        covariance_type: str = "diag",
        min_covar: float = 1e-3,
        startprob_prior: Any = 1.0,
        transmat_prior: Any = 1.0,
        means_prior: Any = 0,
        means_weight: Any = 0,
        covars_prior: Any = 1e-2,
        covars_weight: Any = 1,
        algorithm: str = "viterbi",
        random_state: Any = None,
        n_iter: int = 10,
        tol: float = 1e-2,
        verbose: bool = False,
        params: str = "stmc",
        init_params: str = "stmc",
        implementation: str = "log",
        *,
        n_init: int = 1,
    ) -> None:
        super().__init__(
            *(n_components, startprob_prior, transmat_prior, algorithm, random_state, n_iter, tol),
            *(verbose, params, init_params, implementation),
            n_init=n_init,
        )
        checks.choice("covariance_type", covariance_type, COVARIANCE_TYPES)
        self.covariance_type, self.min_covar = covariance_type, min_covar
        self.means_prior, self.means_weight = means_prior, means_weight
        self.covars_prior, self.covars_weight = covars_prior, covars_weight

    @property
    def covars_(self) -> Any:
        """The covariance matrices, `[C, F, F]`; see the class for the shapes in which to set it."""
        value = self.__dict__.get("_covars_")
        if value is None:
            raise AttributeError("covars_")
        F = self.n_features or as_tensor("means_", self.means_).shape[1]
        covars = as_tensor("covars_", value)
        if self.covariance_type == "spherical":
            covars = covars[:, None, None] * torch.eye(F).to(covars)
        elif self.covariance_type == "diag":
            covars = covars.diag_embed()
        elif self.covariance_type == "tied":
            covars = covars.repeat(self.n_components, 1, 1)
        return covars if isinstance(value, Tensor) else covars.numpy()

    @covars_.setter
    def covars_(self, value: Any) -> None:
        covars = as_tensor("covars_", value)
        C, ndim = self.n_components, {"spherical": 1, "diag": 2, "tied": 2, "full": 3}
        shape = {"spherical": "[C]", "diag": "[C, F]", "tied": "[F, F]", "full": "[C, F, F]"}
        kind = self.covariance_type
        is_matrix = kind in ("tied", "full")
        right = covars.ndim == ndim[kind] and (kind == "tied" or len(covars) == C)
        if not right or (is_matrix and covars.shape[-1] != covars.shape[-2]):
            raise ValueError(
                f"covars_: expected shape {shape[kind]} with C = {C} for {kind!r} covariances, got"
                f" {list(covars.shape)}"
            )
        if is_matrix:
            symmetric = torch.allclose(covars, covars.mT, rtol=1e-5, atol=1e-8)
            if not symmetric or torch.linalg.cholesky_ex(covars)[1].any():
                raise ValueError("covars_: expected matrices, symmetric and positive definite")
        elif not (covars > 0).all():
            raise ValueError(f"covars_: expected variances above 0, got {covars.min().item()}")
        copied = covars.clone()
        self._covars_ = copied if isinstance(value, Tensor) else copied.numpy()

    @property
    def _is_diagonal(self) -> bool:
        return self.covariance_type in ("spherical", "diag")

    @property
    def _has_separate_states(self) -> bool:  # type: ignore[override]
        return self.covariance_type != "tied"

    @property
    def _width(self) -> int:  # type: ignore[override]
        return 1 if self._is_diagonal else self.n_features or 1

    @property
    def has_missing_entries(self) -> bool:  # type: ignore[override]
        return self._is_diagonal

    def _check_parameters(self, parameters: Parameters) -> None:
        super()._check_parameters(parameters)
        F = self.n_features or parameters["means"].shape[-1]
        C = self.n_components
        covars = {"spherical": (C,), "diag": (C, F), "full": (C, F, F), "tied": (F, F)}
        for name, shape in (("means", (C, F)), ("covars", covars[self.covariance_type])):
            value = parameters.get(name)
            if value is not None and value.shape != shape:
                raise ValueError(f"{name}_: expected shape {list(shape)}, got {list(value.shape)}")

    def _free_scalars(self) -> dict[str, int]:
        C, F = self.n_components, self.n_features or 0
        matrix = F * (F + 1) // 2
        covars = {"spherical": C, "diag": C * F, "full": C * matrix, "tied": matrix}
        return {**super()._free_scalars(), "m": C * F, "c": covars[self.covariance_type]}

    def initialize(self, X: Tensor, random: Any) -> Parameters:
        return {name: x[0] for name, x in self._initial_values(X, random, 1).items()}

    def _initial_values(self, X: Tensor, random: Any, restarts: int | None = None) -> Parameters:
        if restarts is None:
            if type(self).initialize is not GaussianHMM.initialize:
                return super()._initial_values(X, random)  # the starting values of a subclass
            restarts = self.n_init
        C, F = self.n_components, X.shape[1]
        means = X.nanmean(0)
        centered = (X - means).nan_to_num()
        points = centered
        if len(points) > max(MOST_POINTS, 64 * C):
            drawn = random.permutation(len(points))[: max(MOST_POINTS, 64 * C)]
            points = points[torch.from_numpy(drawn).to(points.device)]
        centers = k_means(points, C, restarts, 10 if self.n_init == 1 else 1, random) + means
        count = (~X.isnan()).sum(0).sub(1).clamp(min=1)
        covars = centered.T @ centered / count.sqrt() / count.sqrt()[:, None]
        covars = covars + self.min_covar * torch.eye(F).to(X)
        kinds = {
            "spherical": lambda: covars.diagonal().mean().expand(C),
            "diag": lambda: covars.diagonal().expand(C, F),
            "full": lambda: covars.expand(C, F, F),
            "tied": lambda: covars,
        }
        covars = kinds[self.covariance_type]()
        return {"means": centers, "covars": covars.expand(restarts, *covars.shape)}

    def _prepare(self, batch: Batch) -> GaussianData:
        X, observed = batch.values, batch.observed
        if observed is None:
            is_there = X.new_ones(len(X), 1)
            shift = X.sum(0) / (len(X) if batch.rows is None else len(batch.rows))
            values = X - shift
        else:
            is_there = observed.to(X.dtype)
            counted = is_there if batch.rows is None else is_there[batch.rows]  # without padding
            shift = X.sum(0) / counted.sum(0).clamp(min=1)
            values = (X - shift) * is_there
        if self._is_diagonal:
            return GaussianData(values, torch.cat([values.square(), values, is_there], 1), shift)
        return GaussianData(values, torch.cat([values, X.new_ones(len(X), 1)], 1), shift)

    def log_likelihood(self, X: GaussianData, means: Tensor, covars: Tensor) -> Tensor:  # type: ignore[override]
        m = means - X.shift
        C, F = m.shape
        if self._is_diagonal:
            inverse = covars.clamp(min=TINY).reciprocal()
            inverse = inverse[:, None].expand(C, F) if inverse.ndim == 1 else inverse
            linear = m * inverse
            constant = torch.addcmul((inverse * (0.5 / math.pi)).log(), m, linear, value=-1)
            if X.features.shape[1] == 2 * F + 1:
                constant = constant.sum(1, keepdim=True)
            factors = torch.cat([-0.5 * inverse, linear, 0.5 * constant], 1)
            return products(X.features, factors.T)
        identity = torch.eye(F).to(m)
        lower, failed = torch.linalg.cholesky_ex(covars)
        repaired = torch.linalg.cholesky_ex(covars + REPAIR * identity)[0]
        lower = torch.where(failed[..., None, None] > 0, repaired, lower).expand(C, F, F)
        inverse = torch.linalg.solve_triangular(lower, identity.expand(C, F, F), upper=False)
        centers = (inverse @ m[..., None]).reshape(C * F)
        whitened = X.values @ inverse.reshape(C * F, F).T - centers
        log_det = lower.diagonal(dim1=1, dim2=2).log().sum(1)
        squares = whitened.reshape(-1, C, F).square().sum(2)
        return -0.5 * squares - (log_det + 0.5 * F * LOG_2PI)

    def statistics(  # type: ignore[override]
        self, X: GaussianData, posteriors: Tensor, means: Tensor, covars: Tensor
    ) -> Parameters:
        F = X.values.shape[1]
        sums = sums_of_products(posteriors, X.features)
        if self._is_diagonal:
            xx, x, n = sums.split([F, F, sums.shape[1] - 2 * F], 1)
            return {"n": n.expand_as(x), "x": x, "xx": xx, "shift": X.shift.expand_as(x)}
        x, n = sums.split([F, 1], 1)
        weighted = posteriors[:, :, None] * X.values[:, None]
        xx = sums_of_products(weighted.flatten(1), X.values).view(-1, F, F)
        return {"n": n.expand_as(x), "x": x, "xx": xx, "shift": X.shift.expand_as(x)}

    def update(self, statistics: Parameters, means: Tensor, covars: Tensor) -> Parameters:  # type: ignore[override]
        n, x, xx, shift = (statistics[name] for name in ("n", "x", "xx", "shift"))
        weight, of_prior = prior(self.means_weight, x, 2), prior(self.means_prior, x, 2)
        has_prior = not isinstance(weight, int | float) or weight != 0
        of_prior = of_prior - shift if has_prior else 0.0
        m = means - shift
        if "m" in self.params:
            # A state without rows and without a prior keeps its values.
            total, weighted = (weight + n, weight * of_prior + x) if has_prior else (n, x)
            m = torch.where(total > 0, weighted / total, m)
        new = {"means": m + shift}
        if "c" not in self.params:
            return new
        covars_prior, covars_weight = (
            prior(p, x, 2 if self._is_diagonal else 3)
            for p in (self.covars_prior, self.covars_weight)
        )
        difference = m - of_prior if has_prior else m
        if self._is_diagonal:
            freedom = at_least_zero(covars_weight - 1)
            spread = torch.addcmul(xx, m, torch.sub(m * n, x, alpha=2)).clamp(min=0)
            if has_prior:
                spread = spread + weight * difference**2
            scale, count = covars_prior + spread, freedom + n
            if self.covariance_type == "spherical":
                scale, count = scale.mean(1), count.mean(1)
            found = scale / count.clamp(min=1e-5)
            new["covars"] = torch.where(count > 0, found, covars)
            return new
        root = weight**0.5 * difference
        cross = x[:, :, None] * m[:, None]
        outer = root[:, :, None] * root[:, None] + xx - cross - cross.mT
        outer = outer + m[:, :, None] * m[:, None] * n[:, :1, None]
        count = at_least_zero(covars_weight - n.shape[1]) + n[:, :1, None]
        if self.covariance_type == "tied":
            freedom = at_least_zero(covars_weight - n.shape[1])
            new["covars"] = (covars_prior + outer.sum(0)) / (freedom + n[:, 0].sum())
        else:
            found = (covars_prior + outer) / count
            new["covars"] = torch.where(count > 0, found, covars)
        return new

    def means_of(self, means: Tensor, covars: Tensor) -> Tensor:  # type: ignore[override]
        return means

    def draw(  # type: ignore[override]
        self, states: Tensor, generator: torch.Generator, means: Tensor, covars: Tensor
    ) -> Tensor:
        C, F = means.shape
        normal = torch.randn(
            len(states), F, generator=generator, dtype=means.dtype, device=means.device
        )
        if self._is_diagonal:
            width = covars.sqrt()
            width = width[:, None].expand(C, F) if width.ndim == 1 else width
            return means[states] + normal * width[states]
        lower = torch.linalg.cholesky(covars).expand(C, F, F)
        return means[states] + (lower[states] @ normal[..., None]).squeeze(-1)
