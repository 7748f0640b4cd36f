"""Sample calls of CTC and CTC-CRF, and of their decoders."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from ...ops.ctc.api import ctc_align, ctc_loss
from ...ops.ctc_crf.api import ctc_crf_loss
from ...ops.decode.api import ctc_beam_search, ctc_crf_decode, ctc_greedy_search
from . import in_torch
from .call import Bound, Call, Draw, Inputs, Sizes, past_lengths, together, without

CTC = {"steps": 6, "batch": 3, "classes": 4, "labels": 2}
USUAL_CTC = {"steps": (500,), "batch": (16,), "classes": (32, 1024), "labels": (64,)}
CHECKED_CTC = ({"steps": 19, "batch": 1, "classes": 781, "labels": 2},)
CRF = {"steps": 5, "batch": 3, "labels": 3, "states": 4, "bases": 2}
USUAL_CRF = {
    "steps": (500,),
    "batch": (16,),
    "labels": (64,),
    "states": (64, 256, 1024),
    "bases": (4,),
}
CHECKED_CRF = ({"steps": 19, "batch": 1, "labels": 6, "states": 64, "bases": 4},)
SEARCH = {"steps": 6, "batch": 3, "classes": 4}
USUAL_SEARCH = {"steps": (500,), "batch": (16,), "classes": (5, 32, 1024)}
of_paths = partial(
    Call, numba=True, scale=None, forward=Bound(8.0, 1e-6), backward=Bound(8.0, 4e-6)
)


def sequences(draw: Draw, sizes: Sizes, names: tuple[str, str], blank: int = 0) -> Inputs:
    """Return targets without the blank, and lengths for which each has an alignment."""
    if sizes["classes"] < 2:
        raise ValueError(
            f"classes: expected 2 or more, a blank and a label, got {sizes['classes']}"
        )
    targets = draw.labels(1, sizes["classes"], sizes["batch"], sizes["labels"])
    most, least = sizes["steps"], min(sizes["steps"], 2 * sizes["labels"])
    return {
        "targets": targets,
        names[0]: draw.lengths(sizes["batch"], most, least),
        names[1]: draw.lengths(sizes["batch"], sizes["labels"]),
        "blank": blank,
        "reduction": "none",
    }


def _ctc(draw: Draw, sizes: Sizes) -> Inputs:
    logits = draw.scores(sizes["steps"], sizes["batch"], sizes["classes"])
    return {
        "log_probs": logits,
        **sequences(draw, sizes, ("input_lengths", "target_lengths")),
        "from_logits": True,
    }


def _priors(draw: Draw, sizes: Sizes) -> Inputs:
    priors = draw.beside(sizes["classes"], grad=False).log_softmax(0)
    return {"label_priors": priors.float(), "prior_scale": 0.5}


def _concatenated(draw: Draw, sizes: Sizes) -> Inputs:
    lengths = draw.lengths(sizes["batch"], sizes["labels"])
    targets = draw.labels(1, sizes["classes"], sizes["batch"] * sizes["labels"])
    return {"targets": targets[: int(lengths.sum())]}


def _one_step(draw: Draw, sizes: Sizes) -> Inputs:
    """Return lengths that are too short for the targets."""
    return {"input_lengths": torch.ones(sizes["batch"], dtype=torch.int64, device=draw.device)}


LOG_PROBS = {"log-probabilities": {"from_logits": False}}
SCORES: dict[str, Any] = {
    **LOG_PROBS,
    "priors": _priors,
    "star": lambda draw, sizes: {
        "targets": torch.full(
            (sizes["batch"], sizes["labels"]), sizes["classes"], device=draw.device
        ),
        "star": sizes["classes"],
    },
}
CTC_LOSS: dict[str, Any] = {
    **SCORES,
    "mean": {"reduction": "mean"},
    "sum of log-probabilities": {"reduction": "sum", "from_logits": False},
    "concatenated targets": _concatenated,
    "impossible": _one_step,
    "zero_infinity": together(_one_step, {"zero_infinity": True, "reduction": "mean"}),
}


def _frames(draw: Draw, sizes: Sizes) -> Inputs:
    return {
        "log_probs": draw.scores(sizes["steps"], sizes["batch"], sizes["classes"]).detach(),
        "input_lengths": draw.lengths(sizes["batch"], sizes["steps"]),
        "from_logits": True,
    }


def _state_len(sizes: Sizes) -> int:
    """Return the number of bases of a state."""
    bases, states = sizes["bases"], sizes["states"]
    length = round(math.log(states, bases))
    if bases**length != states or not length:
        raise ValueError(f"states: expected a power of the number of bases, {bases}, got {states}")
    return length


def _crf_scores(draw: Draw, sizes: Sizes) -> Inputs:
    bases, k = sizes["bases"], _state_len(sizes)
    return {
        "scores": draw.scores(sizes["steps"], sizes["batch"], bases**k, bases + 1),
        "state_len": k,
        "alphabet_size": bases + 1,
        "input_lengths": draw.lengths(sizes["batch"], sizes["steps"], min(4, sizes["steps"])),
    }


def _crf(draw: Draw, sizes: Sizes) -> Inputs:
    least = min(_state_len(sizes), sizes["labels"])
    return {
        **_crf_scores(draw, sizes),
        "targets": draw.labels(1, sizes["bases"] + 1, sizes["batch"], sizes["labels"]),
        "target_lengths": draw.lengths(sizes["batch"], sizes["labels"], least),
        "reduction": "none",
    }


def _flat_scores(draw: Draw, sizes: Sizes) -> Inputs:
    scores = sizes["states"] * (sizes["bases"] + 1)
    return {
        "scores": draw.scores(sizes["steps"], sizes["batch"], scores),
        "input_lengths": None,
        "reduction": "sum",
    }


STEPS = {"log_probs": 1, "input_lengths": 0}

_ctc_call = partial(
    of_paths,
    inputs=_ctc,
    small=CTC,
    usual=USUAL_CTC,
    empty=("batch", "labels"),
    values=("offset", "wide", "masked"),
    batch={**STEPS, "targets": 0, "target_lengths": 0},
    uncounted=lambda inputs: past_lengths("log_probs", inputs, "input_lengths"),
)
_search = partial(
    of_paths,
    small=SEARCH,
    usual=USUAL_SEARCH,
    empty=("steps", "batch"),
    batch=STEPS,
    rows=(0, 0, 0, 0),
    uncounted=lambda inputs: past_lengths("log_probs", inputs, "input_lengths"),
    second_derivatives=False,
)
_crf_call = partial(
    of_paths,
    small=CRF,
    usual=USUAL_CRF,
    empty=("batch",),
    values=("offset", "wide"),
    uncounted=lambda inputs: past_lengths("scores", inputs, "input_lengths"),
)
CALLS = (
    _ctc_call(
        "ctc_loss",
        ctc_loss,
        options=CTC_LOSS,
        rows=(0,),
        in_torch=in_torch.ctc_loss,
        checked=CHECKED_CTC,
    ),
    _ctc_call(
        "ctc_align",
        ctc_align,
        inputs=without(_ctc, "reduction", grad=True),
        options=SCORES,
        rows=(0, 0, 0, 0),
        second_derivatives=False,
    ),
    _search(
        "ctc_greedy_search",
        ctc_greedy_search,
        _frames,
        options={**LOG_PROBS, "no lengths": {"input_lengths": None}},
    ),
    _search(
        "ctc_beam_search",
        ctc_beam_search,
        together(_frames, {"beam_width": 4, "nbest": 2}),
        options={**LOG_PROBS, "pruned": {"cutoff_top_n": 2, "blank_skip_threshold": 0.9}},
    ),
    _crf_call(
        "ctc_crf_loss",
        ctc_crf_loss,
        _crf,
        options={"mean": {"reduction": "mean"}, "flat scores": _flat_scores},
        batch={"scores": 1, "input_lengths": 0, "targets": 0, "target_lengths": 0},
        rows=(0,),
        checked=CHECKED_CRF,
    ),
    _crf_call(
        "ctc_crf_decode",
        ctc_crf_decode,
        without(_crf_scores),
        options={
            "posterior": {"method": "posterior"},
            "beam": {"method": "beam", "beam_width": 4},
        },
        batch={"scores": 1, "input_lengths": 0},
        rows=(0, 0, 0, 0, 0),
        second_derivatives=False,
    ),
)
