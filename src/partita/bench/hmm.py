"""Hidden Markov models: one iteration of `fit`, and the posteriors of the states.

The truth is the reference in fp64. hmmlearn takes one sequence after another on the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import hmm
from ..runtime.backend import backend
from .case import Attempt, Buffers, Function, Functions, Limited, Sizes, Verdict, cases_of, given
from .paths import SequencesCase, worst

ALLOWED = 1e-5  # of posteriors, and of means of observations near 1
SIZES = Sizes(  # steps, sequences, states and columns
    [(1000, 256, 16, 4), (10_000, 8, 16, 4)],
    [(1000, 256, 16, 4)],
    [(1000, 32, 16, 4), (10_000, 1, 16, 4)],
    [(50, 3, 4, 2)],
)


class HmmInputs(NamedTuple):
    """Observations of sequences one after another, and the parameters of a Gaussian model."""

    X: Tensor  # [N * T, columns]
    lengths: list[int]
    parameters: dict[str, Tensor]


def model_of(module: Any, parameters: dict[str, Tensor]) -> Any:
    """Return a model of either library, which does one iteration from these parameters."""
    model = module.GaussianHMM(len(parameters["startprob_"]), init_params="", n_iter=1)
    for name, value in parameters.items():
        setattr(model, name, value)
    return model


def fitted(module: Any) -> Function:
    return lambda X, lengths, parameters: model_of(module, parameters).fit(X, lengths).means_


def posteriors(module: Any) -> Function:
    return lambda X, lengths, parameters: model_of(module, parameters).predict_proba(X, lengths)


def hmmlearn(function: Function) -> Limited:
    def on_arrays() -> Function:
        found = function(importlib.import_module("hmmlearn.hmm"))

        def on_host(X: Tensor, lengths: list[int], parameters: dict[str, Tensor]) -> Any:
            arrays = {name: value.numpy() for name, value in parameters.items()}
            return found(X.double().numpy(), lengths, arrays)

        return on_host

    return Limited(on_arrays, lambda x: "runs on the host" if x.X.is_cuda else None)


FUNCTIONS = {"hmm_fit": fitted, "hmm_posteriors": posteriors}
PROVIDERS: Functions = {
    "partita": {op: given(make(hmm)) for op, make in FUNCTIONS.items()},
    "hmmlearn": {op: hmmlearn(make) for op, make in FUNCTIONS.items()},
}


@dataclass(frozen=True)
class HmmCase(SequencesCase):
    """A Gaussian model with diagonal covariances."""

    sequences: int
    states: int
    columns: int

    sizes = ("steps", "sequences", "states", "columns")
    dimensions = ("steps", "sequences", "columns")
    scores = "observations"

    def inputs(self, buffers: Buffers) -> HmmInputs:
        T, N, C, width = self.steps, self.sequences, self.states, self.columns
        drawn = torch.Generator().manual_seed(0)
        parameters = {
            "startprob_": torch.full((C,), 1 / C, dtype=torch.float64),
            "transmat_": torch.randn(C, C, generator=drawn, dtype=torch.float64).softmax(1),
            "means_": torch.randn(C, width, generator=drawn, dtype=torch.float64),
            "covars_": torch.ones(C, width, dtype=torch.float64),
        }
        return HmmInputs(buffers.normal("X", (N * T, width), self.dtype), [T] * N, parameters)

    def standard(self, inputs: HmmInputs) -> Tensor:
        with backend("reference"):
            found = FUNCTIONS[self.op](hmm)(inputs.X.double(), *inputs[1:])
        return torch.as_tensor(found).double()

    def verdicts(self, attempt: Attempt, standard: Tensor) -> Iterator[Verdict]:
        found = torch.as_tensor(attempt.function(*attempt.inputs)).to(standard)
        yield worst((found - standard).abs(), ALLOWED, found, standard)


hmm_cases = cases_of({op: (HmmCase, SIZES) for op in FUNCTIONS}, torch.float32)
OPS = {"hmm": hmm_cases}
