"""Sample calls of sparse, dense and semi-Markov chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.chain.api import Chain
from ...ops.linear_chain.api import LinearChain
from ...ops.semi_markov.api import SemiMarkovChain
from ...primitives.semiring import Max
from . import in_torch
from .call import Bound, Call, Draw, Inputs, Sizes

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
    "scale": None,
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


def past_lengths(scores: Tensor, lengths: Any) -> Tensor:
    """Return which steps `[T, N]` of scores `[T, N, ...]` lie past the length of their sequence."""
    steps = torch.arange(len(scores), device=scores.device)[:, None]
    lengths = torch.full(scores.shape[1:2], len(scores)) if lengths is None else lengths
    return steps >= torch.as_tensor(lengths, device=scores.device)


def _past_edges(inputs: Inputs) -> dict[str, Tensor]:
    """Return the edges that are missing or past a length."""
    scores = inputs["scores"]
    past = past_lengths(scores, inputs["lengths"])[..., None, None]
    return {"scores": (past | (inputs["source"] < 0)).expand_as(scores)}


CHAIN: dict[str, Any] = {
    "no ends": {"initial": None, "final": None, "lengths": None},
    "lengths as a list": lambda draw, sizes: {
        "lengths": draw.lengths(sizes["batch"], sizes["steps"]).tolist()
    },
}


def of_chain(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of scores, table, ends and lengths from one of a chain."""

    def call(
        scores: Tensor,
        source: Tensor,
        initial: Tensor | None = None,
        final: Tensor | None = None,
        lengths: Any = None,
        **others: Any,
    ) -> Any:
        return method(Chain(scores, source, initial, final, lengths=lengths), **others)

    return call


def without_lengths(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for a batch whose sequences all have the full length."""

    def call(lengths: Any = None, **others: Any) -> Any:
        return function(**others)

    return call


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(SEED)


def _values(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _chain(draw, sizes)
    acc_dtype = torch.promote_types(draw.dtype, torch.float32)
    values = draw.normal(*inputs["scores"].shape).to(draw.device, acc_dtype)
    return {**inputs, "values": values.requires_grad_(draw.grad)}


def _other_chain(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _chain(draw, sizes)
    other = draw.normal(*inputs["scores"].shape).sin().to(draw.device, draw.dtype)
    return {**inputs, "other": other.requires_grad_(draw.grad)}


def _stay(draw: Draw, sizes: Sizes) -> Inputs:
    """Return a path that stays in state 0 by its first edge."""
    inputs = _chain(draw, sizes)
    shape = inputs["scores"].shape[:2]
    return {**inputs, "edges": torch.zeros(shape, dtype=torch.int64, device=draw.device)}


def _kl(chain: Chain, other: Tensor) -> Tensor:
    ends = (chain.initial, chain.final)
    return chain.kl(Chain(other, chain.source, *ends, lengths=chain.lengths))


SPARSE_BATCH = {"scores": 1, "initial": 0, "final": 0, "lengths": 0}


def _sparse(name: str, method: Callable[..., Any], rows: tuple[int, ...], **fields: Any) -> Call:
    """Return the entry of a method of `Chain`."""
    fields = {
        "inputs": _chain,
        "options": CHAIN,
        "empty": ("steps", "batch"),
        "batch": SPARSE_BATCH,
        "uncounted": _past_edges,
        **PATHS,
        **fields,
    }
    return Call(name, of_chain(method), small=SPARSE, rows=rows, **fields)


def _linear(draw: Draw, sizes: Sizes) -> Inputs:
    steps, batch, states = sizes["steps"], sizes["batch"], sizes["states"]
    return {
        "emissions": draw.scores(steps, batch, states),
        "transitions": draw.beside(states, states),
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


def of_linear_chain(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of scores and lengths from one of a dense chain."""

    def call(
        emissions: Tensor,
        transitions: Tensor,
        start: Tensor | None = None,
        end: Tensor | None = None,
        lengths: Any = None,
        mask: Tensor | None = None,
        **others: Any,
    ) -> Any:
        ends = (start, end)
        chain = LinearChain(emissions, transitions, *ends, lengths=lengths, mask=mask)
        return method(chain, **others)

    return call


def _past_tokens(inputs: Inputs) -> dict[str, Tensor]:
    emissions, mask = inputs["emissions"], inputs.get("mask")
    past = past_lengths(emissions, inputs["lengths"]) if mask is None else ~mask
    return {"emissions": past[..., None].expand_as(emissions)}


def _linear_values(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _linear(draw, sizes)
    emissions, transitions = inputs["emissions"], inputs["transitions"]
    acc_dtype = torch.promote_types(draw.dtype, torch.float32)
    values = (
        draw.normal(*x.shape).cos().to(draw.device, acc_dtype) for x in (emissions, transitions)
    )
    names = ("emission_values", "transition_values")
    return {
        **inputs,
        **{n: v.requires_grad_(draw.grad) for n, v in zip(names, values, strict=True)},
    }


def _states(draw: Draw, sizes: Sizes) -> Inputs:
    states = draw.labels(0, sizes["states"], sizes["steps"], sizes["batch"])
    return {**_linear(draw, sizes), "states": states}


def _other_emissions(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _linear(draw, sizes)
    other = draw.normal(*inputs["emissions"].shape).sin().to(draw.device, draw.dtype)
    return {**inputs, "other": other.requires_grad_(draw.grad)}


def _linear_kl(chain: LinearChain, other: Tensor) -> Tensor:
    rest = (chain.transitions, chain.start, chain.end)
    return chain.kl(LinearChain(other, *rest, lengths=chain.lengths))


def _dense(name: str, method: Callable[..., Any], rows: tuple[int, ...], **fields: Any) -> Call:
    """Return the entry of a method of `LinearChain`."""
    fields = {
        "inputs": _linear,
        "options": LINEAR,
        "empty": ("batch",),
        "batch": {"emissions": 1, "end": 0, "lengths": 0},
        "mixtures": MIXED_SCORES,
        "uncounted": _past_tokens,
        **PATHS,
        **fields,
    }
    return Call(name, of_linear_chain(method), small=DENSE, rows=rows, **fields)


def _segments(draw: Draw, sizes: Sizes) -> Inputs:
    steps, batch, states = sizes["steps"], sizes["batch"], sizes["states"]
    return {
        "emissions": draw.scores(steps, batch, states),
        "transitions": draw.beside(states, states),
        "durations": draw.beside(sizes["durations"], states),
        "start": draw.beside(states),
        "end": draw.beside(batch, states),
        "lengths": draw.lengths(batch, steps, min(1, steps)),
    }


def of_segments(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of scores and lengths from one of a semi-Markov chain."""

    def call(
        emissions: Tensor,
        transitions: Tensor,
        durations: Tensor,
        start: Tensor | None = None,
        end: Tensor | None = None,
        lengths: Any = None,
        **others: Any,
    ) -> Any:
        scores = (emissions, transitions, durations, start, end)
        return method(SemiMarkovChain(*scores, lengths=lengths), **others)

    return call


def _segment_path(draw: Draw, sizes: Sizes) -> Inputs:
    """Return a path whose segments have one step each."""
    states = draw.labels(0, sizes["states"], sizes["steps"], sizes["batch"])
    return {**_segments(draw, sizes), "states": states, "starts": torch.ones_like(states).bool()}


def _semi(name: str, method: Callable[..., Any], rows: tuple[int, ...], **fields: Any) -> Call:
    """Return the entry of a method of `SemiMarkovChain`."""
    fields = {
        "inputs": _segments,
        "options": {"no ends": LINEAR["no ends"]},
        "empty": ("batch",),
        "batch": {"emissions": 1, "end": 0, "lengths": 0},
        "mixtures": MIXED_SCORES,
        "uncounted": _past_tokens,
        **PATHS,
        **fields,
    }
    return Call(name, of_segments(method), small=SEGMENTS, rows=rows, **fields)


def _sampled(chain: Any) -> Any:
    device = chain.scores.device if isinstance(chain, Chain) else chain.emissions.device
    return chain.sample(2, generator=_generator(device))


PATH: dict[str, Any] = {"second_derivatives": False}
CALLS = (
    _sparse(
        "logz",
        Chain.logz,
        (0,),
        usual=USUAL_SPARSE,
        in_torch=without_lengths(in_torch.total_of_paths),
        checked=CHECKED_SPARSE,
    ),
    _sparse("logz, Max", lambda chain: chain.logz(Max), (0,), **PATH),
    _sparse("Chain.marginals", Chain.marginals, (1,)),
    _sparse("Chain.viterbi", Chain.viterbi, (0, 1, 1), usual=USUAL_SPARSE, **PATH),
    _sparse("Chain.nbest", lambda chain: chain.nbest(2), (1, 2, 2), **PATH),
    _sparse("Chain.sample", _sampled, (2, 2), usual=USUAL_SPARSE, **PATH),
    _sparse(
        "Chain.expectation",
        lambda chain, values: chain.expectation(values),
        (0,),
        inputs=_values,
        usual=USUAL_SPARSE,
        batch={**SPARSE_BATCH, "values": 1},
        in_torch=without_lengths(lambda **inputs: in_torch.expectation(**inputs)[1]),
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
        lambda chain, edges: chain.log_prob(edges),
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
    _dense(
        "linear_chain",
        LinearChain.logz,
        (0,),
        usual=USUAL_DENSE,
        in_torch=without_lengths(in_torch.linear_chain),
        checked=CHECKED_DENSE,
    ),
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
        lambda chain, emission_values, transition_values: chain.expectation(
            emission_values, transition_values
        ),
        (0,),
        inputs=_linear_values,
        batch={"emissions": 1, "end": 0, "lengths": 0, "emission_values": 1},
        options={"no ends": LINEAR["no ends"]},
        mixtures=(),
    ),
    _dense("LinearChain.entropy", LinearChain.entropy, (0,), usual=USUAL_DENSE, values=("wide",)),
    _dense(
        "LinearChain.kl",
        _linear_kl,
        (0,),
        inputs=_other_emissions,
        batch={"emissions": 1, "end": 0, "lengths": 0, "other": 1},
        values=("wide",),
        mixtures=(),
        backward=Bound(8.0, 4e-6),  # a difference of sums of marginals
    ),
    _dense(
        "LinearChain.log_prob",
        lambda chain, states: chain.log_prob(states),
        (0,),
        inputs=_states,
        batch={"emissions": 1, "end": 0, "lengths": 0, "states": 1},
        values=("wide",),
    ),
    _semi(
        "semi_markov_chain",
        SemiMarkovChain.logz,
        (0,),
        usual=USUAL_SEGMENTS,
        in_torch=without_lengths(in_torch.semi_markov_chain),
        checked=CHECKED_SEGMENTS,
    ),
    _semi("SemiMarkovChain.state_marginals", SemiMarkovChain.state_marginals, (1,)),
    _semi("SemiMarkovChain.segment_marginals", SemiMarkovChain.segment_marginals, (2,)),
    _semi(
        "SemiMarkovChain.viterbi", SemiMarkovChain.viterbi, (0, 1, 1), usual=USUAL_SEGMENTS, **PATH
    ),
    _semi("SemiMarkovChain.sample", _sampled, (2, 2), usual=USUAL_SEGMENTS, **PATH),
    _semi("SemiMarkovChain.entropy", SemiMarkovChain.entropy, (0,), values=("wide",)),
    _semi(
        "SemiMarkovChain.log_prob",
        lambda chain, states, starts: chain.log_prob(states, starts),
        (0,),
        inputs=_segment_path,
        batch={"emissions": 1, "end": 0, "lengths": 0, "states": 1, "starts": 1},
        values=("wide",),
    ),
)
