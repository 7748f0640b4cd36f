"""Sample calls of transducers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.rnnt.api import rnnt_align, rnnt_loss
from ...ops.rnnt.linear import linear_rnnt_loss, linear_tdt_loss
from ...ops.rnnt.tdt import tdt_align, tdt_loss
from . import in_torch
from .alignments import PATHS, sequences
from .call import Bound, Call, Draw, Inputs, Sizes

RNNT = {"steps": 3, "batch": 3, "classes": 4, "labels": 2}
USUAL_RNNT = {"steps": (200,), "batch": (8,), "classes": (500, 1025), "labels": (40,)}
CHECKED_RNNT = ({"steps": 6, "batch": 1, "classes": 781, "labels": 2},)
HIDDEN = {**RNNT, "hidden": 4}
USUAL_HIDDEN = {**USUAL_RNNT, "hidden": (640,)}
CHECKED_HIDDEN = ({"steps": 6, "batch": 1, "classes": 30, "labels": 2, "hidden": 40},)
DURATIONS = [0, 1, 2]
HEADS: dict[str, Any] = {
    "numba": True,
    "scale": None,
    "forward": Bound(16.0, 2e-6),
    "backward": Bound(16.0, 4e-6),
    "rounds": True,
}


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
    "mean": {"reduction": "mean"},
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


def _align_nodes(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _nodes(draw, sizes)
    del inputs["reduction"]
    return {**inputs, "logits": inputs["logits"].detach()}


def _tdt(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _nodes(draw, sizes)
    del inputs["blank"]
    shape = inputs["logits"].shape[:3]
    return {
        "token_logits": inputs.pop("logits"),
        "duration_logits": draw.scores(*shape, len(DURATIONS), plain=True),
        **inputs,
        "blank_token_id": 0,
        "durations": DURATIONS,
        "sigma": 0.1,
    }


def _align_tdt(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _tdt(draw, sizes)
    del inputs["reduction"]
    return {n: x.detach() if isinstance(x, Tensor) else x for n, x in inputs.items()}


def _joint(draw: Draw, sizes: Sizes) -> Inputs:
    batch, hidden = sizes["batch"], sizes["hidden"]
    weight = draw.scores(sizes["classes"], hidden, plain=True).detach() / hidden**0.5
    return {
        "encoder": draw.scores(batch, sizes["steps"], hidden, plain=True),
        "predictor": draw.scores(batch, sizes["labels"] + 1, hidden, plain=True),
        "linear_weight": weight.requires_grad_(draw.grad),
        **sequences(draw, sizes, ("logit_lengths", "target_lengths")),
    }


def _joint_tdt(draw: Draw, sizes: Sizes) -> Inputs:
    inputs = _joint(draw, sizes)
    del inputs["blank"]
    weight = draw.scores(len(DURATIONS), sizes["hidden"], plain=True)
    rest = {"blank_token_id": 0, "durations": DURATIONS, "sigma": 0.1}
    return {**inputs, "duration_weight": weight, **rest}


def _past_states(inputs: Inputs) -> dict[str, Tensor]:
    found = {}
    for name, length, more in (("encoder", "logit_lengths", 0), ("predictor", "target_lengths", 1)):
        x = inputs[name]
        past = torch.arange(x.shape[1], device=x.device) >= inputs[length][:, None] + more
        found[name] = past[..., None].expand_as(x)
    return found


JOINT: dict[str, Any] = {
    "mean": {"reduction": "mean"},
    "tanh, bias": lambda draw, sizes: {
        "activation": "tanh",
        "linear_bias": draw.scores(sizes["classes"], plain=True),
    },
    "small budget": lambda draw, sizes: {"memory_budget": 4000 + 1000 * draw.dtype.itemsize},
}
SEQUENCES = {"targets": 0, "logit_lengths": 0, "target_lengths": 0}

CALLS = (
    *(
        Call(
            name,
            function,
            _nodes,
            RNNT,
            USUAL_RNNT,
            options,
            ("batch", "labels"),
            values=("offset", "wide"),
            batch={"logits": 0, **SEQUENCES},
            rows=(0,),
            uncounted=lambda inputs: _past_nodes(inputs, "logits"),
            in_torch=in_torch.rnnt_loss,
            checked=CHECKED_RNNT,
            second_derivatives=function is rnnt_loss,
            **PATHS,
        )
        for name, function, options in (
            ("rnnt_loss", rnnt_loss, RNNT_LOSS),
            ("rnnt_loss, in place", _rnnt_inplace, {"mean": {"reduction": "mean"}}),
        )
    ),
    Call(
        "rnnt_align",
        rnnt_align,
        _align_nodes,
        RNNT,
        USUAL_RNNT,
        {"log-probabilities": {"fused_log_softmax": False}},
        ("batch", "labels"),
        batch={"logits": 0, **SEQUENCES},
        rows=(0, 0, 0),
        uncounted=lambda inputs: _past_nodes(inputs, "logits"),
        second_derivatives=False,
        **PATHS,
    ),
    Call(
        "tdt_loss",
        tdt_loss,
        _tdt,
        RNNT,
        USUAL_RNNT,
        {"mean": {"reduction": "mean"}},
        ("batch", "labels"),
        values=("offset", "wide"),
        batch={"token_logits": 0, "duration_logits": 0, **SEQUENCES},
        rows=(0,),
        uncounted=lambda inputs: _past_nodes(inputs, "token_logits", "duration_logits"),
        in_torch=in_torch.tdt_loss,
        checked=CHECKED_RNNT,
        **PATHS,
    ),
    Call(
        "tdt_align",
        tdt_align,
        _align_tdt,
        RNNT,
        USUAL_RNNT,
        empty=("batch", "labels"),
        batch={"token_logits": 0, "duration_logits": 0, **SEQUENCES},
        rows=(0, 0, 0),
        uncounted=lambda inputs: _past_nodes(inputs, "token_logits", "duration_logits"),
        second_derivatives=False,
        **PATHS,
    ),
    Call(
        "linear_rnnt_loss",
        linear_rnnt_loss,
        _joint,
        HIDDEN,
        USUAL_HIDDEN,
        JOINT,
        ("batch",),
        values=(),
        batch={"encoder": 0, "predictor": 0, **SEQUENCES},
        uncounted=_past_states,
        in_torch=in_torch.linear_rnnt_loss,
        checked=CHECKED_HIDDEN,
        **HEADS,
    ),
    Call(
        "linear_tdt_loss",
        linear_tdt_loss,
        _joint_tdt,
        HIDDEN,
        USUAL_HIDDEN,
        JOINT,
        ("batch",),
        values=(),
        batch={"encoder": 0, "predictor": 0, **SEQUENCES},
        uncounted=_past_states,
        in_torch=in_torch.linear_tdt_loss,
        checked=CHECKED_HIDDEN,
        **HEADS,
    ),
)
