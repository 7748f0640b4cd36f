"""Time a fit of one iteration of partita.hmm beside hmmlearn, from the same parameters.

    python docs/bench/fit_hmm.py [cpu|cuda]

Where hmmlearn is installed, its new parameters are compared with ours. Both libraries run by turns,
and the least time of each counts, since other processes only add to it. On a GPU an iteration
inside of a fit is timed too, of one start and of 64 restarts.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import partita

ROUNDS = 5
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


def iteration(X: torch.Tensor, lengths: list[int], n_init: int) -> float:
    """Return the time of an iteration inside of a fit, which has one start or several."""

    def fit(n_iter: int) -> Any:
        options: dict[str, Any] = {"n_iter": n_iter, "n_init": n_init, "random_state": 0}
        return partita.hmm.GaussianHMM(16, tol=-1e9, **options).fit(X, lengths)

    fit(1)
    one, many = (min(seconds(partial(fit, k)) for _ in range(ROUNDS)) for k in (1, 6))
    return (many - one) / 5


def main(device: str = "cpu") -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    theirs = importlib.util.find_spec("hmmlearn") and importlib.import_module("hmmlearn.hmm")
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
    for N, T in ((1, 100_000), (100, 200)) if device != "cpu" else ():
        values = torch.from_numpy(np.random.RandomState(0).normal(size=(N * T, 4)))
        values, lengths = values.to(device, torch.float32), [T] * N
        one, many = (iteration(values, lengths, n_init) for n_init in (1, 64))
        print(f"An iteration of {N} × {T:,} steps: {one * 1e3:.2f} ms,", end=" ")
        print(f"of 64 restarts {many * 1e3:.2f} ms, {many / one:.1f} ×")


if __name__ == "__main__":
    main(*sys.argv[1:])
