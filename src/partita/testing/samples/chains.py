"""Sample calls of sparse, dense and semi-Markov chains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ...ops.chain.api import Chain
from ...ops.linear_chain.api import LinearChain
from ...ops.semi_markov.api import SemiMarkovChain
from ...primitives.semiring import Max
from ...runtime.dtypes import acc_dtype
from .call import Bound, Call, Draw, Inputs, Sizes, past_lengths

SPARSE = {"steps": 4, "batch": 3, "states": 3, "edges": 2}
USUAL_SPARSE: dict[str, Any] = {
    "steps": (500,),
    "batch": (16,),
    "states": (64, 256, 1024),
    "edges": (5,),
}
CHECKED_SPARSE = ({"steps": 19, "batch": 1, "states": 260, "edges": 3},)
DENSE = {"steps": 4, "batch": 3, "states": 3}
USUAL_DENSE: dict[str, Any] = {"steps": (32, 100), "batch": (16,), "states": (16, 64)}
CHECKED_DENSE = ({"steps": 19, "batch": 1, "states": 40},)
SEGMENTS = {"steps": 4, "batch": 3, "states": 3, "durations": 2}
USUAL_SEGMENTS: dict[str, Any] = {
    "steps": (500,),
    "batch": (16,),
    "states": (24,),
    "durations": (50,),
}
CHECKED_SEGMENTS = ({"steps": 19, "batch": 1, "states": 12, "durations": 7},)
PATHS: dict[str, Any] = {
    "numba": True,
    "forward": Bound(8.0, 2e-6),
    "backward": Bound(8.0, 2e-6),  # marginals
    "values": ("offset", "wide", "masked"),
}
SEED = 7  # of the samples of paths


def table(draw: Draw, sizes: Sizes) -> Tensor:
    """Return the states that each state is entered from; the last has one edge less."""
    states = torch.arange(sizes["states"])
    source = (states[:, None] + torch.arange(sizes["edges"])) % max(sizes["states"], 1)
    if sizes["edges"] > 1 and sizes["states"]:
        source[-1, -1] = -1
    return source.to(draw.device)


def _chain(draw: Draw, sizes: Sizes) -> Inputs:
    source = table(draw, sizes)
    scores = draw.scores(sizes["steps"], sizes["batch"], *source.shape)
    ends = [draw.beside(sizes["batch"], len(source)) for _ in range(2)]
    return {
        "scores": scores,
        "source": source,
        "initial": ends[0],
        "final": ends[1],
        "lengths": draw.lengths(sizes["batch"], sizes["steps"]),
    }


def _past_edges(inputs: Inputs) -> dict[str, Tensor]:
    """Return the edges that are missing or past a length."""
    past = past_lengths("scores", inputs, "lengths")
    return {"scores": past["scores"] | (inputs["source"] < 0)}


CHAIN: dict[str, Any] = {
    "no ends": {"initial": None, "final": None, "lengths": None},
    "lengths as a list": lambda draw, sizes: {
        "lengths": draw.lengths(sizes["batch"], sizes["steps"]).tolist()
    },
}


def _method(
    kind: Callable[..., Any],
    fields: Mapping[str, Any],
    name: str,
    method: Callable[..., Any],
    rows: tuple[int, ...],
    **own: Any,
) -> Call:
    """Return the entry of a method of a class, whose fields are those of the class and its own.

    What is called takes the arguments of the class and of the method by name.
    """
    of_class = tuple(signature(kind).parameters)

    def call(**inputs: Any) -> Any:
        made = kind(**{name: inputs.pop(name) for name in of_class if name in inputs})
        return method(made, **inputs)

    return Call(name, call, rows=rows, **{**PATHS, **fields, **own})


def _like(draw: Draw, x: Tensor, dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Draw a leaf in the shape of another one, with other numbers."""
    values = change(draw.normal(*x.shape)).to(draw.device, dtype)
    return values.requires_grad_(draw.grad)


def _values(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _chain(draw, sizes)
    values = _like(draw, inputs["scores"], acc_dtype(draw.dtype), torch.clone)
    return {**inputs, "values": values}


def _other_chain(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _chain(draw, sizes)
    return {**inputs, "other": _like(draw, inputs["scores"], draw.dtype, torch.sin)}


def _stay(draw: Draw, sizes: Sizes) -> Inputs:
    """Return a path that stays in state 0 by its first edge."""
    inputs = _chain(draw, sizes)
    shape = inputs["scores"].shape[:2]
    return {**inputs, "edges": torch.zeros(shape, dtype=torch.int64, device=draw.device)}


def _kl(chain: Chain, other: Tensor) -> Tensor:
    ends = (chain.initial, chain.final)
    return chain.kl(Chain(other, chain.source, *ends, lengths=chain.lengths))


SPARSE_BATCH = {"scores": 1, "initial": 0, "final": 0, "lengths": 0}


_sparse = partial(
    _method,
    Chain,
    {
        "inputs": _chain,
        "small": SPARSE,
        "options": CHAIN,
        "empty": ("steps", "batch"),
        "batch": SPARSE_BATCH,
        "uncounted": _past_edges,
    },
)


def _linear(draw: Draw, sizes: Sizes) -> Inputs:
    """Draw the scores of dense chains, with those of durations for semi-Markov chains."""
    steps, batch, states = sizes["steps"], sizes["batch"], sizes["states"]
    of_durations = (
        {"durations": draw.beside(sizes["durations"], states)} if "durations" in sizes else {}
    )
    return {
        "emissions": draw.scores(steps, batch, states),
        "transitions": draw.beside(states, states),
        **of_durations,
        "start": draw.beside(states),
        "end": draw.beside(batch, states),
        "lengths": draw.lengths(batch, steps, min(1, steps)),
    }


LINEAR: dict[str, Any] = {
    "no ends": {"start": None, "end": None, "lengths": None},
    "by token": lambda draw, sizes: {
        "transitions": draw.beside(max(sizes["steps"] - 1, 0), sizes["states"], sizes["states"])
    },
    "by sequence": lambda draw, sizes: {
        "transitions": draw.beside(
            max(sizes["steps"] - 1, 0), sizes["batch"], sizes["states"], sizes["states"]
        )
    },
    "mask": lambda draw, sizes: {
        "lengths": None,
        "mask": torch.arange(sizes["steps"], device=draw.device)[:, None]
        < draw.lengths(sizes["batch"], sizes["steps"], 1),
    },
}
# What users mix: emissions of a network in a half type, and parameters of a CRF in fp32.
MIXED_SCORES = (
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
)


def _past_tokens(inputs: Inputs) -> dict[str, Tensor]:
    if (mask := inputs.get("mask")) is None:
        return past_lengths("emissions", inputs, "lengths")
    return {"emissions": ~mask[..., None].expand_as(inputs["emissions"])}


def _linear_values(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _linear(draw, sizes)
    for part in ("emission", "transition"):
        scores = inputs[f"{part}s"]
        inputs[f"{part}_values"] = _like(draw, scores, acc_dtype(draw.dtype), torch.cos)
    return inputs


def _states(draw: Draw, sizes: Sizes) -> Inputs:
    states = draw.labels(0, sizes["states"], sizes["steps"], sizes["batch"])
    return {**_linear(draw, sizes), "states": states}


def _other_emissions(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _linear(draw, sizes)
    return {**inputs, "other": _like(draw, inputs["emissions"], draw.dtype, torch.sin)}


def _linear_kl(chain: LinearChain, other: Tensor) -> Tensor:
    rest = (chain.transitions, chain.start, chain.end)
    return chain.kl(LinearChain(other, *rest, lengths=chain.lengths))


DENSE_BATCH = {"emissions": 1, "end": 0, "lengths": 0}
DENSE_CALL: dict[str, Any] = {
    "inputs": _linear,
    "small": DENSE,
    "options": LINEAR,
    "empty": ("batch",),
    "batch": DENSE_BATCH,
    "mixtures": MIXED_SCORES,
    "uncounted": _past_tokens,
}
NO_ENDS = {"no ends": LINEAR["no ends"]}
_dense = partial(_method, LinearChain, DENSE_CALL)
_semi = partial(_method, SemiMarkovChain, {**DENSE_CALL, "small": SEGMENTS, "options": NO_ENDS})


def _segment_path(draw: Draw, sizes: Sizes) -> Inputs:
    """Return a path whose segments have one step each."""
    inputs = _states(draw, sizes)
    return {**inputs, "starts": torch.ones_like(inputs["states"]).bool()}


def _sampled(chain: Any) -> Any:
    device = chain.scores.device if isinstance(chain, Chain) else chain.emissions.device
    return chain.sample(2, generator=torch.Generator(device).manual_seed(SEED))


PATH: dict[str, Any] = {"second_derivatives": False}
CALLS = (
    _sparse("logz", Chain.logz, (0,), usual=USUAL_SPARSE, checked=CHECKED_SPARSE),
    _sparse("logz, Max", lambda chain: chain.logz(Max), (0,), **PATH),
    _sparse("Chain.marginals", Chain.marginals, (1,)),
    _sparse("Chain.viterbi", Chain.viterbi, (0, 1, 1), usual=USUAL_SPARSE, **PATH),
    _sparse("Chain.nbest", lambda chain: chain.nbest(2), (1, 2, 2), **PATH),
    _sparse("Chain.sample", _sampled, (2, 2), usual=USUAL_SPARSE, **PATH),
    _sparse(
        "Chain.expectation",
        Chain.expectation,
        (0,),
        inputs=_values,
        usual=USUAL_SPARSE,
        batch={**SPARSE_BATCH, "values": 1},
        checked=CHECKED_SPARSE,
    ),
    _sparse("Chain.entropy", Chain.entropy, (0,), values=("wide", "masked")),
    _sparse(
        "Chain.kl",
        _kl,
        (0,),
        inputs=_other_chain,
        batch={**SPARSE_BATCH, "other": 1},
        values=("wide",),
    ),
    _sparse(
        "Chain.log_prob",
        Chain.log_prob,
        (0,),
        inputs=_stay,
        batch={**SPARSE_BATCH, "edges": 1},
        values=("wide",),
    ),
    _sparse(
        "Chain.forward_scores",
        Chain.forward_scores,
        (1,),
        inputs=lambda draw, sizes: {**_chain(draw, sizes), "final": None},
    ),
    _sparse(
        "Chain.backward_scores",
        Chain.backward_scores,
        (1,),
        inputs=lambda draw, sizes: {**_chain(draw, sizes), "initial": None},
    ),
    _dense("linear_chain", LinearChain.logz, (0,), usual=USUAL_DENSE, checked=CHECKED_DENSE),
    _dense("linear_chain, Max", lambda chain: chain.logz(Max), (0,), second_derivatives=False),
    _dense("LinearChain.state_marginals", LinearChain.state_marginals, (1,)),
    _dense("LinearChain.marginals", LinearChain.marginals, (1,)),
    _dense(
        "LinearChain.expected_counts", LinearChain.expected_counts, (0, 0, 0), usual=USUAL_DENSE
    ),
    _dense("LinearChain.viterbi", LinearChain.viterbi, (0, 1), usual=USUAL_DENSE, **PATH),
    _dense("LinearChain.nbest", lambda chain: chain.nbest(2), (1, 2), **PATH),
    _dense("LinearChain.sample", _sampled, (2,), usual=USUAL_DENSE, **PATH),
    _dense(
        "LinearChain.expectation",
        LinearChain.expectation,
        (0,),
        inputs=_linear_values,
        batch={**DENSE_BATCH, "emission_values": 1},
        options=NO_ENDS,
        mixtures=(),
    ),
    _dense("LinearChain.entropy", LinearChain.entropy, (0,), usual=USUAL_DENSE, values=("wide",)),
    _dense(
        "LinearChain.kl",
        _linear_kl,
        (0,),
        inputs=_other_emissions,
        batch={**DENSE_BATCH, "other": 1},
        values=("wide",),
        mixtures=(),
        backward=Bound(8.0, 4e-6),  # a difference of sums of marginals
    ),
    _dense(
        "LinearChain.log_prob",
        LinearChain.log_prob,
        (0,),
        inputs=_states,
        batch={**DENSE_BATCH, "states": 1},
        values=("wide",),
    ),
    _semi(
        "semi_markov_chain",
        SemiMarkovChain.logz,
        (0,),
        usual=USUAL_SEGMENTS,
        checked=CHECKED_SEGMENTS,
    ),
    _semi("SemiMarkovChain.state_marginals", SemiMarkovChain.state_marginals, (1,)),
    _semi("SemiMarkovChain.segment_marginals", SemiMarkovChain.segment_marginals, (2,)),
    _semi("SemiMarkovChain.expected_counts", SemiMarkovChain.expected_counts, (0, 0, 0, 0)),
    _semi(
        "SemiMarkovChain.viterbi", SemiMarkovChain.viterbi, (0, 1, 1), usual=USUAL_SEGMENTS, **PATH
    ),
    _semi("SemiMarkovChain.nbest", lambda chain: chain.nbest(2), (1, 2, 2), **PATH),
    _semi("SemiMarkovChain.sample", _sampled, (2, 2), usual=USUAL_SEGMENTS, **PATH),
    _semi("SemiMarkovChain.entropy", SemiMarkovChain.entropy, (0,), values=("wide",)),
    _semi(
        "SemiMarkovChain.log_prob",
        SemiMarkovChain.log_prob,
        (0,),
        inputs=_segment_path,
        batch={**DENSE_BATCH, "states": 1, "starts": 1},
        values=("wide",),
    ),
)
