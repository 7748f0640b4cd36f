"""Sample calls of transducers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops.rnnt.api import rnnt_align, rnnt_loss, tdt_align, tdt_loss
from ...ops.rnnt.linear import linear_rnnt_loss, linear_tdt_loss
from .alignments import of_paths, sequences
from .call import Bound, Draw, Inputs, Sizes, without

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
    options=JOINT,
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
    _rnnt(
        "rnnt_loss",
        rnnt_loss,
        options=RNNT_LOSS,
        checked=CHECKED_RNNT,
    ),
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
    _from_hidden("linear_rnnt_loss", linear_rnnt_loss, _joint),
    _from_hidden("linear_tdt_loss", linear_tdt_loss, _joint_tdt),
)
