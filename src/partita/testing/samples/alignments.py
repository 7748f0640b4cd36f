"""Sample calls of CTC and CTC-CRF, and of their decoders."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...ops.ctc.api import ctc_align, ctc_loss
from ...ops.ctc_crf.api import ctc_crf_loss
from ...ops.decode.api import ctc_beam_search, ctc_greedy_search
from ...ops.decode.crf import ctc_crf_decode
from . import in_torch
from .call import Bound, Call, Draw, Inputs, Sizes
from .chains import past_lengths

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
PATHS: dict[str, Any] = {
    "numba": True,
    "scale": None,
    "forward": Bound(8.0, 1e-6),
    "backward": Bound(8.0, 4e-6),
}


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


def _ctc_align(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _ctc(draw, sizes)
    del inputs["reduction"]
    return inputs


def _past_steps(inputs: Inputs) -> dict[str, Tensor]:
    """Return the steps past each length."""
    scores = inputs["log_probs"]
    past = past_lengths(scores, inputs["input_lengths"])
    return {"log_probs": past[..., None].expand_as(scores)}


def _priors(draw: Draw, sizes: Sizes) -> Inputs:
    priors = draw.beside(sizes["classes"], grad=False).log_softmax(0)
    return {"label_priors": priors.float(), "prior_scale": 0.5}


def _concatenated(draw: Draw, sizes: Sizes) -> Inputs:
    lengths = draw.lengths(sizes["batch"], sizes["labels"])
    targets = draw.labels(1, sizes["classes"], sizes["batch"] * sizes["labels"])
    return {"targets": targets[: int(lengths.sum())]}


SCORES: dict[str, Any] = {
    "log-probabilities": {"from_logits": False},
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
    "impossible": lambda draw, sizes: {
        "input_lengths": torch.ones(sizes["batch"], dtype=torch.int64, device=draw.device)
    },
    "zero_infinity": lambda draw, sizes: {
        "input_lengths": torch.ones(sizes["batch"], dtype=torch.int64, device=draw.device),
        "zero_infinity": True,
        "reduction": "mean",
    },
}


def _frames(draw: Draw, sizes: Sizes) -> Inputs:
    return {
        "log_probs": draw.scores(sizes["steps"], sizes["batch"], sizes["classes"]).detach(),
        "input_lengths": draw.lengths(sizes["batch"], sizes["steps"]),
        "from_logits": True,
    }


def _beam(draw: Draw, sizes: Sizes) -> Inputs:
    return {**_frames(draw, sizes), "beam_width": 4, "nbest": 2}


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


def _crf_decode(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _crf_scores(draw, sizes)
    return {**inputs, "scores": inputs["scores"].detach()}


def _past_crf(inputs: Inputs) -> dict[str, Tensor]:
    scores = inputs["scores"]
    past = past_lengths(scores, inputs["input_lengths"])
    return {"scores": past.reshape(*past.shape, *[1] * (scores.ndim - 2)).expand_as(scores)}


STEPS = {"log_probs": 1, "input_lengths": 0}

CALLS = (
    Call(
        "ctc_loss",
        ctc_loss,
        _ctc,
        CTC,
        USUAL_CTC,
        CTC_LOSS,
        ("batch", "labels"),
        values=("offset", "wide", "masked"),
        batch={**STEPS, "targets": 0, "target_lengths": 0},
        rows=(0,),
        uncounted=_past_steps,
        in_torch=in_torch.ctc_loss,
        checked=CHECKED_CTC,
        **PATHS,
    ),
    Call(
        "ctc_align",
        ctc_align,
        _ctc_align,
        CTC,
        USUAL_CTC,
        SCORES,
        ("batch", "labels"),
        values=("offset", "wide", "masked"),
        batch={**STEPS, "targets": 0, "target_lengths": 0},
        rows=(0, 0, 0, 0),
        uncounted=_past_steps,
        second_derivatives=False,
        **PATHS,
    ),
    Call(
        "ctc_greedy_search",
        ctc_greedy_search,
        _frames,
        SEARCH,
        USUAL_SEARCH,
        {"log-probabilities": {"from_logits": False}, "no lengths": {"input_lengths": None}},
        ("steps", "batch"),
        batch=STEPS,
        rows=(0, 0, 0, 0),
        uncounted=_past_steps,
        second_derivatives=False,
        **PATHS,
    ),
    Call(
        "ctc_beam_search",
        ctc_beam_search,
        _beam,
        SEARCH,
        USUAL_SEARCH,
        {
            "log-probabilities": {"from_logits": False},
            "pruned": {"cutoff_top_n": 2, "blank_skip_threshold": 0.9},
        },
        ("steps", "batch"),
        batch=STEPS,
        rows=(0, 0, 0, 0),
        uncounted=_past_steps,
        second_derivatives=False,
        **PATHS,
    ),
    Call(
        "ctc_crf_loss",
        ctc_crf_loss,
        _crf,
        CRF,
        USUAL_CRF,
        {
            "mean": {"reduction": "mean"},
            "flat scores": lambda draw, sizes: {
                "scores": draw.scores(
                    sizes["steps"],
                    sizes["batch"],
                    sizes["states"] * (sizes["bases"] + 1),
                ),
                "input_lengths": None,
                "reduction": "sum",
            },
        },
        ("batch",),
        values=("offset", "wide"),
        batch={"scores": 1, "input_lengths": 0, "targets": 0, "target_lengths": 0},
        rows=(0,),
        uncounted=_past_crf,
        in_torch=lambda input_lengths=None, **inputs: in_torch.ctc_crf_loss(**inputs),
        checked=CHECKED_CRF,
        **PATHS,
    ),
    Call(
        "ctc_crf_decode",
        ctc_crf_decode,
        _crf_decode,
        CRF,
        USUAL_CRF,
        {
            "posterior": {"method": "posterior"},
            "beam": {"method": "beam", "beam_width": 4},
        },
        ("batch",),
        values=("offset", "wide"),
        batch={"scores": 1, "input_lengths": 0},
        rows=(0, 0, 0, 0, 0),
        uncounted=_past_crf,
        second_derivatives=False,
        **PATHS,
    ),
)
