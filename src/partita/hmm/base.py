"""Hidden Markov models by expectation maximization over emissions of any kind.

The parameters of all restarts of a fit are one batch, a dict of tensors `[R, ...]` in fp64. An
iteration is

    expectation    log Z of a dense linear chain, and its gradients: the posteriors of the states
                   and the expected counts of the transitions
    maximization   start, transitions and emissions that are most probable for these counts and the
                   priors

Source: Rabiner, A tutorial on hidden Markov models, 1989; `hmmlearn.hmm`, whose rules hold where
docs/hmm.md names no other.
"""

from __future__ import annotations

import copy
import string
import warnings
from collections.abc import Callable
from numbers import Integral
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ..ops.chain.api import Chain
from ..ops.chain.edges import dense_source
from ..ops.linear_chain import autograd
from ..ops.linear_chain.api import LinearChain
from ..ops.linear_chain.common import LinearChainPotentials
from ..runtime import checks
from ..runtime.constants import constant
from ..runtime.lengths import Lengths
from .data import (
    Batch,
    as_tensor,
    at_least_zero,
    batch_of,
    generator_of,
    moved,
    normalized,
    prior,
    random_state,
)
from .monitor import ConvergenceMonitor, FitProgress

Parameters = dict[str, Tensor]

CHUNK = 2**24  # scores of transitions that `filter` writes out at once
# Restarts run in batches of so many numbers at most: on a GPU of the scores of all states, of which
# there are some copies in memory. On a CPU, which scans long chains faster one by one, they are a
# single batch up to so many transitions of all steps of one restart.
MOST_TOGETHER = {"cpu": 2**15, "cuda": 2**26}
DECODERS = ("viterbi", "map")


class Forecast(NamedTuple):
    """The forecast of the steps after the observed ones, in the form of X.

    With `lengths`, N sequences are forecast, and the fields have a dimension N after the first.

    Fields:
        states: the probability of each state, `[steps, C]`.
        means: the mean of each value, `[steps, F]`; for categorical emissions the probability of
            each symbol.
    """

    states: Tensor
    means: Tensor


class BaseHMM:
    """A hidden Markov model; a subclass says what its states emit.

    A subclass names its parameters, which are attributes `[C, ...]`, in `emission_parameters`: for
    each letter of `params` and `init_params` the name without its final underscore. It defines
    `initialize`, `log_likelihood`, `statistics` and `update`, and for `forecast` and `sample`
    also `means_of` and `draw`. X is `[M, F]` there, posteriors are `[M, C]`, and the parameters
    come by name; all are fp64 on the device of the data. `random` is a `RandomState` of NumPy. A
    row that is missing has zeros in X, and its posteriors are 0. Restarts run through
    `torch.func.vmap`, so the control flow cannot depend on values.

    Args:
        n_components: the number of states, C.
        startprob_prior, transmat_prior: parameters of Dirichlet priors, a number or what broadcasts
            to `[C]` and `[C, C]`; 1 for none.
        algorithm: how `decode` finds states: `"viterbi"`, the best path, or `"map"`, the most
            probable state of each step.
        random_state: a seed, a `RandomState` of NumPy or a `torch.Generator` for starting values
            and samples; None for PyTorch's default generator.
        n_iter: the most iterations of `fit`.
        tol: `fit` ends when the log-likelihood gains less than this, in nats.
        verbose: whether each iteration of `fit` writes a line to the error stream. Otherwise a fit
            of some seconds shows its progress on a terminal.
        params: the letters of the parameters that `fit` updates: s for start, t for transitions,
            and those of the emissions.
        init_params: the letters of those to which `fit` gives starting values.
        implementation: `"log"` or `"scaling"`, which mean the same here.
        n_init: the number of restarts from different starting values, as one batch. `fit` keeps
            the one with the greatest log-likelihood.

    Its attributes are `startprob_` `[C]`, `transmat_` `[C, C]` (from and to), `n_features`,
    `monitor_`, and those of the emissions. They are set as tensors, arrays or lists, and have the
    form of X after `fit`.

    Raises:
        TypeError, ValueError: an argument is out of its range.

    Source: Rabiner, A tutorial on hidden Markov models, 1989; `hmmlearn.base.BaseHMM`.

    Example:
        >>> import torch
        >>> from partita.hmm import BaseHMM
        >>> class ExponentialHMM(BaseHMM):
        ...     emission_parameters = {"r": "rates"}
        ...     def initialize(self, X, random):
        ...         scales = torch.from_numpy(random.rand(self.n_components, 1)).to(X)
        ...         return {"rates": 1 / (scales * X.mean())}
        ...     def log_likelihood(self, X, rates):
        ...         return rates.log().sum(1) - X @ rates.T
        ...     def statistics(self, X, posteriors, rates):
        ...         return {"n": posteriors.sum(0), "sum": posteriors.T @ X}
        ...     def update(self, statistics, rates):
        ...         return {"rates": statistics["n"][:, None] / statistics["sum"]}
        >>> model = ExponentialHMM(2, params="str", init_params="str", random_state=0, n_init=3)
        >>> waits = torch.tensor([[0.1], [0.2], [0.1], [9.0], [8.0], [9.5]])
        >>> model.fit(waits).predict(waits).unique_consecutive(return_counts=True)[1]
        tensor([3, 3])
    """

    emission_parameters: ClassVar[dict[str, str]] = {}
    startprob_: Any
    transmat_: Any
    has_missing_entries = False  # whether single entries of a row may be missing
    # Whether each state has parameters, statistics and updates of its own. Then the states of all
    # restarts run as those of one model, otherwise restarts run through `torch.func.vmap`.
    _has_separate_states = False
    _width = 1  # the numbers of a state and a row in temporaries

    def __init__(
        self,
        n_components: int = 1,
        startprob_prior: Any = 1.0,
        transmat_prior: Any = 1.0,
        algorithm: str = "viterbi",
        random_state: Any = None,
        n_iter: int = 10,
        tol: float = 1e-2,
        verbose: bool = False,
        params: str = string.ascii_letters,
        init_params: str = string.ascii_letters,
        implementation: str = "log",
        *,
        n_init: int = 1,
    ) -> None:
        self.n_components, self.algorithm, self.random_state = n_components, algorithm, random_state
        self.startprob_prior, self.transmat_prior = startprob_prior, transmat_prior
        self.n_iter, self.tol, self.verbose, self.n_init = n_iter, tol, verbose, n_init
        self.params, self.init_params, self.implementation = params, init_params, implementation
        self.n_features: int | None = None
        for name, number in (("n_components", n_components), ("n_iter", n_iter)):
            self._check_count(name, number)
        self._check_count("n_init", n_init)
        checks.choice("algorithm", algorithm, DECODERS)
        checks.choice("implementation", implementation, ("log", "scaling"))
        self.monitor_ = ConvergenceMonitor(tol, n_iter, verbose)

    # A subclass defines these.

    def initialize(self, X: Tensor, random: Any) -> Parameters:
        """Return starting values of the emissions' parameters by name, `[C, ...]`."""
        if self.emission_parameters:
            raise NotImplementedError(f"{type(self).__name__}.initialize")
        return {}

    def _initial_values(self, X: Tensor, random: Any) -> Parameters:
        """Return starting values of the emissions of all restarts, `[R, C, ...]`."""
        drawn = [self.initialize(X, random) for _ in range(self.n_init)]
        return {name: torch.stack([each[name] for each in drawn]) for name in drawn[0]}

    def _prepare(self, batch: Batch) -> Any:
        """Return what `log_likelihood` and `statistics` get, which a fit forms once."""
        return batch.values

    def log_likelihood(self, X: Any, **parameters: Tensor) -> Tensor:
        """Return the log-density of each row in each state, `[M, C]`, in nats."""
        raise NotImplementedError(f"{type(self).__name__}.log_likelihood")

    def statistics(self, X: Any, posteriors: Tensor, **parameters: Tensor) -> Parameters:
        """Return sums over the rows that `update` needs, by name."""
        raise NotImplementedError(f"{type(self).__name__}.statistics")

    def update(self, statistics: Parameters, **parameters: Tensor) -> Parameters:
        """Return new values of the emissions' parameters by name; those left out stay."""
        raise NotImplementedError(f"{type(self).__name__}.update")

    def means_of(self, **parameters: Tensor) -> Tensor:
        """Return the mean of the values in each state, `[C, F]`."""
        raise NotImplementedError(f"{type(self).__name__}.means_of")

    def draw(self, states: Tensor, generator: torch.Generator, **parameters: Tensor) -> Tensor:
        """Return a draw of the values for each state of a path, `[M, F]`."""
        raise NotImplementedError(f"{type(self).__name__}.draw")

    def _free_scalars(self) -> dict[str, int]:
        """Return the number of free scalars of the parameters by their letter, for AIC and BIC."""
        C = self.n_components
        emissions = {
            letter: value.numel()
            for letter, name in self.emission_parameters.items()
            if (value := self._stored(name)) is not None
        }
        return {"s": C - 1, "t": C * (C - 1), **emissions}

    # Users call these.

    def fit(self, X: Any, lengths: Lengths | None = None) -> Self:
        """Estimate the parameters by expectation maximization.

        Args:
            X: the values of all sequences one after another, `[M, F]`; a tensor on any device, an
                array or lists. NaN stands for a missing value.
            lengths: the lengths of the sequences, `[N]` integers with the sum M; one sequence if
                None.

        Returns:
            The model.

        Raises:
            TypeError, ValueError: X or lengths are wrong, or parameters that were set. The
                log-likelihood is NaN for all restarts.

        Example:
            >>> import torch
            >>> from partita.hmm import GaussianHMM
            >>> X = torch.tensor([[0.0], [0.1], [0.0], [5.0], [5.1], [4.9]])
            >>> GaussianHMM(2, random_state=0).fit(X).means_.sort(0).values
            tensor([[0.0333],
                    [5.0000]])
        """
        with torch.no_grad():
            batch = batch_of(X, lengths)
            self._check_features(batch)
            self._warn_of_few_values(batch)
            data = self._prepare(batch)
            parameters, monitor = self._maximum(batch, data, self._starting_values(batch))
        self.monitor_ = monitor
        for name, value in parameters.items():
            # A property, whose setter is for users, has its value below a name that starts with _.
            attribute = f"{name}_"
            is_property = isinstance(getattr(type(self), attribute, None), property)
            self.__dict__["_" * is_property + attribute] = batch.restore(value)
        return self

    def score(self, X: Any, lengths: Lengths | None = None) -> float:
        """Return the log-likelihood of all sequences, a number in nats."""
        with torch.no_grad():
            return float(self._chain(batch_of(X, lengths))[0].logz().sum())

    def score_samples(self, X: Any, lengths: Lengths | None = None) -> tuple[float, Any]:
        """Return the log-likelihood, and the posterior of each state, `[M, C]`."""
        batch = batch_of(X, lengths)
        log_probs, posteriors, *_ = autograd.expectation_step(self._chain(batch)[0]._potentials)
        return float(log_probs.sum()), batch.restore(batch.in_order(posteriors))

    def predict_proba(self, X: Any, lengths: Lengths | None = None) -> Any:
        """Return the posterior of each state given the whole sequence, `[M, C]`."""
        return self.score_samples(X, lengths)[1]

    def decode(
        self, X: Any, lengths: Lengths | None = None, algorithm: str | None = None
    ) -> tuple[float, Any]:
        """Return a score and the states, `[M]`.

        The score is the log-probability of the best paths and the values for `"viterbi"`, and the
        sum of the greatest posteriors for `"map"`.

        Args:
            X, lengths: as in `fit`.
            algorithm: as in the constructor, whose choice holds if it is None.
        """
        algorithm = self.algorithm if algorithm is None else algorithm
        checks.choice("algorithm", algorithm, DECODERS)
        batch = batch_of(X, lengths)
        chain = self._chain(batch)[0]
        if algorithm == "viterbi":
            score, states = chain.viterbi()
            return float(score.sum()), batch.restore(batch.in_order(states))
        posteriors = batch.in_order(autograd.expectation_step(chain._potentials)[1])
        greatest, best = posteriors.max(1)
        return float(greatest.sum()), batch.restore(best)

    def predict(self, X: Any, lengths: Lengths | None = None) -> Any:
        """Return the states that `decode` finds, `[M]` integers."""
        return self.decode(X, lengths)[1]

    def filter(self, X: Any, lengths: Lengths | None = None) -> Any:
        """Return the probability of each state given the values up to its step, `[M, C]`."""
        batch = batch_of(X, lengths)
        chain, parameters = self._chain(batch)
        emissions, moves = chain.emissions, chain.transitions
        _, N, C = emissions.shape
        source = constant(dense_source, C, device=emissions.device)
        rows = [(emissions[:1] + parameters["startprob"].log()).log_softmax(-1)]
        for some in emissions[1:].split(max(1, CHUNK // (N * C * C))):
            scores = some[..., None] + moves.T  # [t, N, to, from]
            alpha = Chain(scores, source, rows[-1][-1]).forward_scores()[1:]
            rows.append(alpha.log_softmax(-1))
        return batch.restore(batch.in_order(torch.cat(rows).exp()))

    def forecast(self, X: Any, steps: int, lengths: Lengths | None = None) -> Forecast:
        """Return the probabilities of the states and the means of the values after the last step.

        Args:
            X, lengths: as in `fit`. With `lengths` each sequence is forecast after its last step.
            steps: the number of steps to forecast.
        """
        self._check_count("steps", steps)
        batch = batch_of(X, lengths)
        chain, parameters = self._chain(batch)
        last = autograd.expectation_step(chain._potentials.with_ends())[-1]  # [N, C]
        moves, states = parameters["transmat"], []
        for _ in range(steps):
            last = last @ moves
            states.append(last)
        found = torch.stack(states)
        means = found @ self.means_of(**self._of_emissions(parameters))
        if lengths is None:
            found, means = found[:, 0], means[:, 0]
        return Forecast(batch.restore(found), batch.restore(means))

    def sample(
        self, n_samples: int = 1, random_state: Any = None, currstate: int | None = None
    ) -> tuple[Any, Any]:
        """Draw a sequence from the model: its values `[n_samples, F]`, and its states.

        Args:
            n_samples: the number of steps.
            random_state: as in the constructor, whose own holds if it is None.
            currstate: the first state; drawn if None.
        """
        self._check_count("n_samples", n_samples)
        C = self.n_components
        stored = [self._stored(name) for name in self._letters.values()]
        device = next((x.device for x in stored if x is not None), torch.device("cpu"))
        parameters = self._parameters(device)
        state = self.random_state if random_state is None else random_state
        generator = generator_of(state, device)
        start = parameters["startprob"]
        if currstate is not None:
            if not 0 <= currstate < C:
                raise ValueError(f"currstate: expected a state from 0 to {C - 1}, got {currstate}")
            start = torch.zeros_like(start)
            start[currstate] = 1.0
        # Rows of zeros as emissions: without observations the posterior is the prior.
        emissions = start.new_zeros(n_samples, 1, C)
        chain = LinearChain(emissions, parameters["transmat"].log(), start.log())
        states = chain.sample(1, generator).states[0, :, 0]
        values = self.draw(states, generator, **self._of_emissions(parameters))
        if isinstance(self.transmat_, Tensor):
            dtype = self.transmat_.dtype if values.is_floating_point() else values.dtype
            return values.to(dtype), states
        return values.numpy(), states.numpy()

    def aic(self, X: Any, lengths: Lengths | None = None) -> float:
        """Return Akaike's information criterion, a number; the lower, the better."""
        return -2 * self.score(X, lengths) + 2 * sum(self._free_scalars().values())

    def bic(self, X: Any, lengths: Lengths | None = None) -> float:
        """Return the Bayesian information criterion, a number; the lower, the better.

        It counts all rows of X, missing ones too.
        """
        log_M = float(torch.tensor(len(X), dtype=torch.float64).log())
        return -2 * self.score(X, lengths) + log_M * sum(self._free_scalars().values())

    def get_stationary_distribution(self) -> Any:
        """Return the distribution of states that the transitions leave as it is, `[C]`."""
        moves = as_tensor("transmat_", self.transmat_).double()
        # π P = π and Σ π = 1 give π (I - P + 1) = 1, where 1 is the matrix and the row of ones.
        matrix = torch.eye(len(moves)).to(moves) - moves + 1
        found = torch.linalg.solve(matrix.T, moves.new_ones(len(moves)))
        if isinstance(self.transmat_, Tensor):
            return found.to(self.transmat_.dtype)
        return found.numpy()

    # Parameters.

    @property
    def _letters(self) -> dict[str, str]:
        return {"s": "startprob", "t": "transmat", **self.emission_parameters}

    def _stored(self, name: str) -> Tensor | None:
        """Return a parameter as it was set; None if it was not."""
        value = self.__dict__.get(f"{name}_", self.__dict__.get(f"_{name}_"))
        return None if value is None else as_tensor(f"{name}_", value)

    def _of_emissions(self, parameters: Parameters) -> Parameters:
        return {name: parameters[name] for name in self.emission_parameters.values()}

    def _parameters(self, device: torch.device) -> Parameters:
        """Return all parameters in fp64, or raise for one that is not there or wrong."""
        found = {}
        for name in self._letters.values():
            value = self._stored(name)
            if value is None:
                raise AttributeError(
                    f"{name}_: expected a value; call fit first, or set {name}_ and leave its"
                    " letter out of init_params"
                )
            found[name] = value.to("cpu", torch.float64)
        self._check_parameters(found)
        return moved(found, device)

    def _check_parameters(self, parameters: Parameters) -> None:
        """Raise for a parameter that is wrong, of those that were set."""
        C = self.n_components
        for name, shape in (("startprob", (C,)), ("transmat", (C, C))):
            if name in parameters:
                self._check_distributions(f"{name}_", parameters[name], shape)

    @staticmethod
    def _check_distributions(name: str, value: Tensor, shape: tuple[int, ...]) -> None:
        if value.shape != shape:
            raise ValueError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")
        sums = value.sum(-1)
        gaps = [abs(each - 1) for each in sums.flatten().tolist()]
        if not all(gap <= 1e-5 for gap in gaps) or (value < 0).any():
            raise ValueError(
                f"{name}: expected probabilities, none negative, with a sum of 1, got the"
                f" sum{'s' * (value.ndim > 1)} {sums.tolist()}"
            )

    @staticmethod
    def _check_count(name: str, value: Any) -> None:
        checks.python_int(name, value)
        if value < 1:
            raise ValueError(f"{name}: expected 1 or more, got {value!r}")

    def _check_features(self, batch: Batch) -> None:
        F = batch.values.shape[1]
        if self.n_features is None:
            self.n_features = F
        if self.n_features != F:
            raise ValueError(f"X: expected {self.n_features} columns, got {F}")
        if batch.observed is not None and not self.has_missing_entries:
            partly = batch.observed.any(1) & ~batch.observed.all(1)
            if partly.any():
                raise ValueError(
                    "X: expected NaN in all columns of a row or in none, since these emissions take"
                    " no single missing entries"
                )

    def _warn_of_few_values(self, batch: Batch) -> None:
        scalars = self._free_scalars()
        free = sum(scalars.get(letter, 0) for letter in self.params)
        M = len(batch.values) if batch.rows is None else len(batch.rows)
        if M * batch.values.shape[1] < free:
            warnings.warn(
                f"X has {M * batch.values.shape[1]} values, fewer than the {free} free parameters"
                " of the model",
                stacklevel=3,
            )

    def _starting_values(self, batch: Batch) -> Parameters:
        """Return the parameters from which the restarts start, `[R, ...]`."""
        letters = self._letters
        drawn = []
        for letter, name in letters.items():
            is_set = self._stored(name) is not None
            if letter in self.init_params or not is_set:
                drawn.append(name)
            if letter in self.init_params and is_set:
                warnings.warn(
                    f"{name}_ was set, and fit overwrites it, since init_params has {letter!r}",
                    stacklevel=3,
                )
        X, C = batch.values, self.n_components
        if batch.missing is not None or set(drawn) - {"startprob", "transmat"}:
            X = X if batch.observed is None else X.where(batch.observed, torch.nan)
            X = batch.in_order(X.unflatten(0, batch.shape))
        if batch.missing is not None:
            X = X[~X.isnan().all(1)]
            if not len(X):
                raise ValueError("X: expected values, got NaN alone")
        # As in hmmlearn, equal seeds give transitions and emissions equal streams of their own.
        of_states: Any = random_state(self.random_state) if drawn else None
        of_emissions = None
        if set(drawn) - {"startprob", "transmat"}:
            shared = not isinstance(self.random_state, Integral)
            of_emissions = of_states if shared else random_state(self.random_state)
        sizes = {"startprob": None, "transmat": C}
        rows = [
            {n: of_states.dirichlet([1 / C] * C, k) for n, k in sizes.items() if n in drawn}
            for _ in range(self.n_init if drawn else 0)
        ]
        values = {
            name: torch.stack([torch.from_numpy(each[name]) for each in rows])
            for name in sizes
            if name in drawn
        }
        if of_emissions is not None:
            found = self._initial_values(X, of_emissions)
            values |= {name: found[name].double() for name in drawn if name not in values}
        given = {
            name: value.to("cpu", torch.float64)
            for name in letters.values()
            if name not in drawn and (value := self._stored(name)) is not None
        }
        self._check_parameters(given)
        values |= {name: x.expand(self.n_init, *x.shape) for name, x in given.items()}
        return values | moved({name: x for name, x in values.items() if x.is_cpu}, X.device)

    # Expectation maximization.

    def _maximum(
        self, batch: Batch, data: Any, parameters: Parameters
    ) -> tuple[Parameters, ConvergenceMonitor]:
        """Return the parameters and the monitor of the best restart."""
        if type(self.monitor_) is ConvergenceMonitor:
            options = (self.tol, self.n_iter, self.verbose)
            monitors = [ConvergenceMonitor(*options) for _ in range(self.n_init)]
        else:
            monitors = [copy.deepcopy(self.monitor_) for _ in range(self.n_init)]
            for monitor in monitors:
                monitor._reset()
        running, found = list(range(self.n_init)), {}
        with FitProgress(self.n_iter) as progress:
            for iteration in range(self.n_iter):
                log_probs, counts = self._expectation(batch, data, parameters)
                parameters = self._maximization(counts, parameters)
                numbers = log_probs.tolist()  # the one time that the host waits in an iteration
                ended = []
                for i, number in enumerate(numbers):
                    monitor = monitors[running[i]]
                    monitor.report(number)
                    if monitor.converged or number != number or iteration + 1 == self.n_iter:
                        ended.append(i)
                        found[running[i]] = {name: x[i] for name, x in parameters.items()}
                if not self.verbose:
                    progress.show(numbers, self.n_init)
                kept = [i for i in range(len(running)) if i not in ended]
                if not kept:
                    break
                if ended:
                    running = [running[i] for i in kept]
                    parameters = {name: x[kept] for name, x in parameters.items()}
        scores = {r: monitors[r].history[-1] for r in found}
        if all(score != score for score in scores.values()):
            raise ValueError(
                "X: the log-likelihood is NaN; expected covariances that are positive definite and"
                " parameters that are finite"
            )
        best = max(scores, key=lambda r: -torch.inf if scores[r] != scores[r] else scores[r])
        return found[best], monitors[best]

    def _expectation(
        self, batch: Batch, data: Any, parameters: Parameters
    ) -> tuple[Tensor, Parameters]:
        """Return log P of each restart, `[R]`, and its expected counts and statistics."""
        (T, N), C, R = batch.shape, self.n_components, len(parameters["startprob"])
        device, together = batch.values.device.type, 1
        if device == "cuda":
            together = max(1, MOST_TOGETHER[device] // (max(T, C) * N * C * self._width))
        elif MOST_TOGETHER.get(device, 0) >= T * N * C * C:
            together = R
        size = -(-R // -(-R // together))  # so that batches are equally large
        if size == R:
            counts = self._counts(batch, data, parameters)
        else:
            parts = ({k: x[i : i + size] for k, x in parameters.items()} for i in range(0, R, size))
            found = [self._counts(batch, data, part) for part in parts]
            counts = {name: torch.cat([each[name] for each in found]) for name in found[0]}
        return counts.pop("log_prob"), counts

    def _counts(self, batch: Batch, data: Any, parameters: Parameters) -> Parameters:
        """Return `log_prob`, expected counts and statistics of restarts as one batch."""
        (T, N), C, R = batch.shape, self.n_components, len(parameters["startprob"])
        of_emissions = self._of_emissions(parameters)
        columns = self._over_restarts(
            lambda p: {"": self._emissions(batch, data, p).T}, of_emissions or parameters
        )[""]
        # Restart r of sequence n is sequence n * R + r of the batch.
        chain = self._potentials(batch, columns.permute(2, 0, 1), parameters)
        log_probs, posteriors, moves, start, _ = autograd.expectation_step(chain)
        counts = {
            "log_prob": log_probs.view(N, R).sum(0),
            "startprob": start.view(N, R, C).sum(0),
            "transmat": moves[None] if R == 1 else moves.sum(0).view(N, R, C, C).sum(0),
        }
        if of_emissions:
            columns = posteriors.reshape(T * N, R, C).permute(1, 2, 0)
            counts |= self._over_restarts(
                lambda q, p: self._statistics(batch, data, q[""].T, p), {"": columns}, of_emissions
            )
        return counts

    def _emissions(self, batch: Batch, data: Any, parameters: Parameters) -> Tensor:
        """Return the emissions of one model, `[T * N, C]`; a row that is missing has zeros."""
        rows = self.log_likelihood(data, **self._of_emissions(parameters))
        return rows if batch.missing is None else rows.masked_fill(batch.missing, 0.0)

    def _statistics(
        self, batch: Batch, data: Any, posteriors: Tensor, parameters: Parameters
    ) -> Parameters:
        """Return the statistics of one model by name."""
        if batch.missing is not None:
            posteriors = posteriors.masked_fill(batch.missing, 0.0)
        of_emissions = self._of_emissions(parameters)
        return {
            f"emissions.{name}": value
            for name, value in self.statistics(data, posteriors, **of_emissions).items()
        }

    def _potentials(
        self, batch: Batch, emissions: Tensor, parameters: Parameters
    ) -> LinearChainPotentials:
        """Return the chains of all restarts, whose emissions are `[T * N, R, C]`."""
        (T, N), (_, R, C) = batch.shape, emissions.shape
        moves = parameters["transmat"].log()
        own = moves.expand(N, R, C, C).reshape(1, N * R, C, C)[: T - 1] if R > 1 else moves[0]
        start = parameters["startprob"].log().expand(N, R, C).reshape(N * R, C)
        emissions, lengths = emissions.reshape(T, N * R, C), batch.lengths
        if lengths is not None:
            lengths = lengths[:, None].expand(N, R).reshape(N * R)
        return LinearChainPotentials(emissions, own, start, None, lengths)

    def _chain(self, batch: Batch) -> tuple[LinearChain, Parameters]:
        """Return the chains of the sequences of a batch, and the parameters."""
        self._check_features(batch)
        parameters = self._parameters(batch.values.device)
        data = self._prepare(batch)
        emissions = self._emissions(batch, data, parameters)[:, None]
        of_one = {name: value[None] for name, value in parameters.items()}
        emissions, moves, start, end, lengths = self._potentials(batch, emissions, of_one)
        return LinearChain(emissions, moves, start, end, lengths=lengths), parameters

    def _maximization(self, counts: Parameters, parameters: Parameters) -> Parameters:
        """Return the new parameters of all restarts, `[R, ...]`."""
        new = dict(parameters)
        for letter, name, of_prior in (
            ("s", "startprob", self.startprob_prior),
            ("t", "transmat", self.transmat_prior),
        ):
            if letter in self.params:
                old, found = parameters[name], counts[name]
                if not isinstance(of_prior, int | float) or of_prior != 1:
                    # A state or transition that is forbidden stays so.
                    found = at_least_zero(prior(of_prior, old) - 1 + found)
                    found = found.masked_fill(old == 0, 0.0)
                new[name] = normalized(found, old)
        statistics = {
            name.partition(".")[2]: value
            for name, value in counts.items()
            if name.startswith("emissions.")
        }
        if statistics:
            updated = self._over_restarts(
                lambda s, p: self.update(s, **p), statistics, self._of_emissions(parameters)
            )
            for letter, name in self.emission_parameters.items():
                if letter in self.params and name in updated:
                    new[name] = updated[name]
        return new

    def _over_restarts(
        self, function: Callable[..., Parameters], *values: Parameters
    ) -> Parameters:
        """Call a function of one model's tensors by name with those of all restarts, `[R, ...]`."""
        R = len(next(iter(values[0].values())))
        if R > 1 and not self._has_separate_states:
            return torch.func.vmap(function)(*values)
        # Those of a single restart are flattened too, which is a view.
        if self._has_separate_states:
            one = [{name: x.flatten(0, 1) for name, x in each.items()} for each in values]
            return {name: x.unflatten(0, (R, -1)) for name, x in function(*one).items()}
        one = [{name: x[0] for name, x in each.items()} for each in values]
        return {name: x[None] for name, x in function(*one).items()}
