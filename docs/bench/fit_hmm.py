"""Time fits of partita.hmm beside hmmlearn, pomegranate and dynamax, from the same parameters.

    python docs/bench/fit_hmm.py [cpu|cuda] [hmmlearn|restarts|peers]

Without a second argument all parts run. A library that is not installed, or that fails, is named
with the reason.

hmmlearn    a fit of one iteration, and the distance of the new parameters from ours. The libraries
            run by turns, and the least time of each counts, since other processes only add to it.
restarts    on a GPU an iteration inside of a fit, of one start and of 64 restarts.
peers       an iteration inside of a fit in fp32 beside pomegranate and dynamax, and the
            log-likelihood after one and five iterations. Compilation is left out. pomegranate
            estimates the end of a sequence too, whose log-probability its log-likelihood includes.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import partita

ROUNDS = 5
SLOW = 3  # seconds above which a measurement is not repeated
SIZES = {  # states, columns or symbols, sequences, steps
    "GaussianHMM": (16, 4, 1, 100_000),
    "CategoricalHMM": (8, 20, 1000, 993),
}


def model_of(module: Any, name: str, **options: Any) -> Any:
    """Return a model with parameters that depend on its name alone."""
    C, width, *_ = SIZES[name]
    random = np.random.RandomState(1)
    model = getattr(module, name)(C, init_params="", n_iter=1, **options)
    model.startprob_, model.transmat_ = np.full(C, 1 / C), random.dirichlet(np.ones(C), C)
    if name == "GaussianHMM":
        model.means_, model.covars_ = random.normal(size=(C, width)), np.ones((C, width))
    else:
        model.emissionprob_ = random.dirichlet(np.ones(width), C)
    return model


def fit_of(module: Any, name: str, X: Any, lengths: list[int], **options: Any) -> Any:
    return model_of(module, name, **options).fit(X, lengths)


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def iteration(fit: Callable[[int], Any]) -> tuple[float, Any]:
    """Return the time of an iteration inside of a fit, and the model after six iterations.

    `fit` gets the number of iterations.
    """
    fit(1)  # compiles
    found = []
    best = dict.fromkeys((1, 6), float("inf"))
    for _ in range(ROUNDS):
        for k in best:
            best[k] = min(best[k], seconds(lambda: found.append(fit(k))))  # noqa: B023
        if best[6] > SLOW:
            break
    return (best[6] - best[1]) / 5, found[-1]


def beside_hmmlearn(device: str) -> None:
    theirs = importlib.util.find_spec("hmmlearn") and importlib.import_module("hmmlearn.hmm")
    if not theirs:
        print("hmmlearn: not installed")
    for name, (C, width, N, T) in SIZES.items():
        random = np.random.RandomState(0)
        is_gaussian = name == "GaussianHMM"
        size = (N * T, width if is_gaussian else 1)
        X = random.normal(size=size) if is_gaussian else random.randint(width, size=size)
        values = torch.from_numpy(X).to(device)
        values = values.float() if is_gaussian and device != "cpu" else values
        fits = {"partita": partial(fit_of, partita.hmm, name, values, [T] * N)}
        for implementation in ("scaling", "log") if theirs else ():
            fit = partial(fit_of, theirs, name, X, [T] * N, implementation=implementation)
            fits[f"hmmlearn, {implementation}"] = fit
        found = {library: fit() for library, fit in fits.items()}  # the first call compiles
        best = dict.fromkeys(fits, float("inf"))
        for _ in range(ROUNDS):
            for library, fit in fits.items():
                best[library] = min(best[library], seconds(fit))
        attribute = "means_" if is_gaussian else "emissionprob_"
        ours = np.asarray(torch.as_tensor(getattr(found["partita"], attribute)).cpu())
        print(f"{name}: {N} × {T:,} steps, {C} states, {width} columns or symbols, {device}")
        for library, least in best.items():
            apart = abs(
                np.asarray(torch.as_tensor(getattr(found[library], attribute)).cpu()) - ours
            )
            ratio = least / best["partita"]
            print(f"  {library:20} {least * 1e3:8.1f} ms  {ratio:5.1f} ×  apart {apart.max():.0e}")


def restarts(device: str) -> None:
    for N, T in ((1, 100_000), (100, 200)) if device != "cpu" else ():
        values = torch.from_numpy(np.random.RandomState(0).normal(size=(N * T, 4)))
        values, lengths = values.to(device, torch.float32), [T] * N

        def fit(n_iter: int, n_init: int) -> Any:
            options: dict[str, Any] = {"n_iter": n_iter, "n_init": n_init, "random_state": 0}
            return partita.hmm.GaussianHMM(16, tol=-1e9, **options).fit(values, lengths)  # noqa: B023

        one, many = (iteration(partial(fit, n_init=n_init))[0] for n_init in (1, 64))
        print(f"An iteration of {N} × {T:,} steps: {one * 1e3:.2f} ms,", end=" ")
        print(f"of 64 restarts {many * 1e3:.2f} ms, {many / one:.1f} ×")


class Start(NamedTuple):
    """The values and the parameters from which all libraries start, fp32.

    Fields:
        X: the values, `[N, T, F]`.
        start, transitions, means: `[C]`, `[C, C]`, `[C, F]`; the variances are 1.
    """

    X: np.ndarray
    start: np.ndarray
    transitions: np.ndarray
    means: np.ndarray


Fit = tuple[float, list[float]]  # seconds of an iteration, log P before each iteration


def of_partita(given: Start, device: str) -> Fit:
    N, T, _ = given.X.shape
    X, lengths = torch.from_numpy(given.X).to(device).flatten(0, 1), [T] * N

    def fit(n_iter: int) -> Any:
        model = partita.hmm.GaussianHMM(
            len(given.start), n_iter=n_iter, tol=-1e9, init_params="", covars_prior=0.0
        )
        model.startprob_, model.transmat_ = given.start, given.transitions
        model.means_, model.covars_ = given.means, np.ones_like(given.means)
        return model.fit(X, lengths)

    time_of_one, model = iteration(fit)
    return time_of_one, list(model.monitor_.history)


def of_pomegranate(given: Start, device: str) -> Fit:
    distributions = importlib.import_module("pomegranate.distributions")
    C, F = given.means.shape
    states = [
        distributions.Normal(torch.from_numpy(mean), torch.ones(F), covariance_type="diag")
        for mean in given.means
    ]
    probabilities = map(torch.from_numpy, (given.transitions, given.start))
    model = importlib.import_module("pomegranate.hmm").DenseHMM(
        states, *probabilities, torch.ones(C)
    )
    model, X = model.to(device), torch.from_numpy(given.X).to(device)
    model.summarize(X[:, :10])  # the first call initializes the device
    model._reset_cache()
    times: list[float] = []
    history: list[float] = []

    def step() -> None:  # what its `fit` does in an iteration
        history.append(float(model.summarize(X).sum()))
        model.from_summaries()

    while len(times) < 6 and (len(times) < 2 or times[0] < SLOW):
        times.append(seconds(step))
    return min(times), history


def of_dynamax(given: Start, device: str) -> Fit:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch is on this GPU too
    jax = importlib.import_module("jax")
    models = importlib.import_module("dynamax.hidden_markov_model")

    class Model(models.DiagonalGaussianHMM):  # type: ignore[name-defined, misc]
        def log_prior(self, params: Any) -> float:  # flat, which its formula does not allow
            return 0.0

    # Its maximum of a Dirichlet posterior needs parameters above 1 in fp32.
    priors = (1.0001, 1.0001, 0.0, 0.0, 0.0, -1.5, 0.0)
    model = Model(*given.means.shape, *priors)
    parameters, properties = model.initialize(
        initial_probs=jax.numpy.asarray(given.start),
        transition_matrix=jax.numpy.asarray(given.transitions),
        emission_means=jax.numpy.asarray(given.means),
        emission_scale_diags=jax.numpy.ones(given.means.shape),
    )
    X = jax.numpy.asarray(given.X)

    def compiled(n_iter: int) -> Any:
        def run(parameters: Any, X: Any) -> Any:
            return model.fit_em(parameters, properties, X, num_iters=n_iter, verbose=False)

        with jax.default_matmul_precision("highest"):
            return jax.jit(run).lower(parameters, X).compile()

    fits = {k: compiled(k) for k in (1, 6)}
    time_of_one, (_, history) = iteration(lambda k: jax.block_until_ready(fits[k](parameters, X)))
    return time_of_one, history.tolist()


def beside_peers(device: str) -> None:
    C, F = 16, 4
    for N, T in ((100, 1000), (1, 100_000)):
        random = np.random.RandomState(0)
        values = (
            random.normal(size=(N, T, F)),
            np.full(C, 1 / C),
            random.dirichlet(np.ones(C), C),
            random.normal(size=(C, F)),
        )
        given = Start(*(x.astype(np.float32) for x in values))
        print(f"GaussianHMM: {N} × {T:,} steps, {C} states, {F} columns, fp32, {device}")
        for of_library in (of_partita, of_dynamax, of_pomegranate):
            library = of_library.__name__.removeprefix("of_")
            try:
                time_of_one, history = of_library(given, device)
            except Exception as error:
                print(f"  {library:12} {type(error).__name__}: {str(error).partition(chr(10))[0]}")
                continue
            after = [f"{history[k]:.1f}" if k < len(history) else "not run" for k in (1, 5)]
            print(f"  {library:12} {time_of_one * 1e3:10.2f} ms an iteration,", end=" ")
            print(f"log P after one {after[0]}, after five {after[1]}", flush=True)


PARTS = {"hmmlearn": beside_hmmlearn, "restarts": restarts, "peers": beside_peers}


def main(device: str = "cpu", *parts: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for part in parts or PARTS:
        PARTS[part](device)


if __name__ == "__main__":
    main(*sys.argv[1:])
