"""Sample calls of CTC, CTC-CRF and transducers, and of their decoders."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from ...ops.ctc.api import ctc_align, ctc_loss
from ...ops.ctc_crf.api import ctc_crf_loss
from ...ops.decode.api import ctc_beam_search, ctc_crf_decode, ctc_greedy_search
from ...ops.linear_heads.low_rank import LoRA
from ...ops.rnnt.api import rnnt_align, rnnt_loss, tdt_align, tdt_loss
from ...ops.rnnt.linear import linear_rnnt_loss, linear_tdt_loss
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
of_paths = partial(Call, numba=True, forward=Bound(8.0, 1e-6), backward=Bound(8.0, 4e-6))


def sequences(draw: Draw, sizes: Sizes, names: tuple[str, str]) -> Inputs:
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
        "blank": 0,
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

RNNT = {"steps": 3, "batch": 3, "classes": 4, "labels": 2}
USUAL_RNNT = {"steps": (200,), "batch": (8,), "classes": (500, 1025), "labels": (40,)}
CHECKED_RNNT = ({"steps": 6, "batch": 1, "classes": 781, "labels": 2},)
HIDDEN = {**RNNT, "hidden": 4}
USUAL_HIDDEN = {**USUAL_RNNT, "hidden": (640,)}
CHECKED_HIDDEN = ({"steps": 6, "batch": 1, "classes": 30, "labels": 2, "hidden": 40},)
DURATIONS = [0, 1, 2]
TDT = {"blank_token_id": 0, "durations": DURATIONS, "sigma": 0.1}
MEAN = {"mean": {"reduction": "mean"}}


def _nodes(draw: Draw, sizes: Sizes) -> Inputs:
    shape = (sizes["batch"], sizes["steps"], sizes["labels"] + 1, sizes["classes"])
    return {
        "logits": draw.scores(*shape),
        **sequences(draw, sizes, ("logit_lengths", "target_lengths")),
    }


def _past_nodes(inputs: Inputs, *names: str) -> dict[str, Tensor]:
    """Return the nodes of the lattice past the lengths of its sequence."""
    found = {}
    for name in names:
        logits = inputs[name]
        steps, labels = (inputs[each][:, None] for each in ("logit_lengths", "target_lengths"))
        t, u = (torch.arange(size, device=logits.device) for size in logits.shape[1:3])
        past = (t >= steps)[:, :, None] | (u > labels)[:, None]
        found[name] = past[..., None].expand_as(logits)
    return found


RNNT_LOSS: dict[str, Any] = {
    **MEAN,
    "log-probabilities": {"fused_log_softmax": False},
    "clamp": {"clamp": 0.2},
    "hat": {"hat": True},
    "fastemit and delay": {"fastemit_lambda": 0.1, "delay_penalty": 0.1},
    "last class is the blank": lambda draw, sizes: {
        "targets": draw.labels(0, sizes["classes"] - 1, sizes["batch"], sizes["labels"]),
        "blank": -1,
    },
}


def _rnnt_inplace(logits: Tensor, **others: Any) -> Tensor:
    """Overwrite a copy, because a leaf can't be overwritten."""
    return rnnt_loss(logits * 1, inplace=True, **others)


def _tdt(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = without(_nodes, "blank", grad=True)(draw, sizes)
    logits = inputs.pop("logits")
    durations = draw.scores(*logits.shape[:3], len(DURATIONS), plain=True)
    return {"token_logits": logits, "duration_logits": durations, **inputs, **TDT}


def _joint(draw: Draw, sizes: Sizes) -> Inputs:
    batch, hidden = sizes["batch"], sizes["hidden"]
    return {
        "encoder": draw.scores(batch, sizes["steps"], hidden, plain=True),
        "predictor": draw.scores(batch, sizes["labels"] + 1, hidden, plain=True),
        "linear_weight": draw.matrix(sizes["classes"], hidden),
        **sequences(draw, sizes, ("logit_lengths", "target_lengths")),
    }


def _joint_tdt(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = without(_joint, "blank", grad=True)(draw, sizes)
    weight = draw.scores(len(DURATIONS), sizes["hidden"], plain=True)
    return {**inputs, "duration_weight": weight, **TDT}


def _lora(draw: Draw, sizes: Sizes, rows: int) -> Inputs:
    return {"A": draw.matrix(3, sizes["hidden"]), "B": draw.matrix(rows, 3)}


def _with_lora(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes the factors of LoRA as inputs of their own."""

    @wraps(function)
    def call(*, A: Tensor | None = None, B: Tensor | None = None, **inputs: Any) -> Any:
        if A is not None and B is not None:
            inputs["low_rank"] = LoRA(A, B, 0.5)
        return function(**inputs)

    return call


def _past_states(inputs: Inputs) -> dict[str, Tensor]:
    found = {}
    for name, length, more in (("encoder", "logit_lengths", 0), ("predictor", "target_lengths", 1)):
        x = inputs[name]
        past = torch.arange(x.shape[1], device=x.device) >= inputs[length][:, None] + more
        found[name] = past[..., None].expand_as(x)
    return found


JOINT: dict[str, Any] = {
    **MEAN,
    "tanh, bias": lambda draw, sizes: {
        "activation": "tanh",
        "linear_bias": draw.scores(sizes["classes"], plain=True),
    },
    "small budget": lambda draw, sizes: {"memory_budget": 4000 + 1000 * draw.dtype.itemsize},
    "low rank": lambda draw, sizes: _lora(draw, sizes, sizes["classes"]),
}
JOINT_TDT: dict[str, Any] = {
    **JOINT,
    "low rank": lambda draw, sizes: _lora(draw, sizes, sizes["classes"] + len(DURATIONS)),
}
SEQUENCES = {"targets": 0, "logit_lengths": 0, "target_lengths": 0}

_lattice = partial(
    of_paths,
    small=RNNT,
    usual=USUAL_RNNT,
    empty=("batch", "labels"),
    values=("offset", "wide"),
    rows=(0,),
)
_rnnt = partial(
    _lattice,
    inputs=_nodes,
    batch={"logits": 0, **SEQUENCES},
    uncounted=lambda inputs: _past_nodes(inputs, "logits"),
)
_durations = partial(
    _lattice,
    inputs=_tdt,
    batch={"token_logits": 0, "duration_logits": 0, **SEQUENCES},
    uncounted=lambda inputs: _past_nodes(inputs, "token_logits", "duration_logits"),
)
_from_hidden = partial(
    of_paths,
    small=HIDDEN,
    usual=USUAL_HIDDEN,
    empty=("batch",),
    values=(),
    batch={"encoder": 0, "predictor": 0, **SEQUENCES},
    uncounted=_past_states,
    forward=Bound(16.0, 2e-6),
    backward=Bound(16.0, 4e-6),
    rounds=True,
    checked=CHECKED_HIDDEN,
)
ALIGN: dict[str, Any] = {
    "values": ("offset", "masked"),
    "rows": (0, 0, 0),
    "second_derivatives": False,
}
CALLS = (
    _ctc_call("ctc_loss", ctc_loss, options=CTC_LOSS, rows=(0,), checked=CHECKED_CTC),
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
        options={"posterior": {"method": "posterior"}, "beam": {"method": "beam", "beam_width": 4}},
        batch={"scores": 1, "input_lengths": 0},
        rows=(0, 0, 0, 0, 0),
        second_derivatives=False,
    ),
    _rnnt("rnnt_loss", rnnt_loss, options=RNNT_LOSS, checked=CHECKED_RNNT),
    _rnnt(
        "rnnt_loss, in place",
        _rnnt_inplace,
        options=MEAN,
        checked=CHECKED_RNNT,
        second_derivatives=False,
    ),
    _rnnt(
        "rnnt_align",
        rnnt_align,
        inputs=without(_nodes, "reduction"),
        options={"log-probabilities": {"fused_log_softmax": False}},
        **ALIGN,
    ),
    _durations("tdt_loss", tdt_loss, options=MEAN, checked=CHECKED_RNNT),
    _durations("tdt_align", tdt_align, inputs=without(_tdt, "reduction"), **ALIGN),
    _from_hidden("linear_rnnt_loss", _with_lora(linear_rnnt_loss), _joint, options=JOINT),
    _from_hidden("linear_tdt_loss", _with_lora(linear_tdt_loss), _joint_tdt, options=JOINT_TDT),
)
