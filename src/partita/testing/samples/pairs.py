"""Sample calls of losses of pairs of features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ...ops.contrastive.api import contrastive_loss
from ...ops.contrastive.common import row_bytes
from .call import Call, Draw, Inputs, Sizes, together


def _columns(draw: Draw, sizes: Sizes, more: int = 0) -> Tensor:
    columns = replace(draw, seed=draw.seed + 1)
    return columns.scores(sizes["rows"] + more, sizes["hidden"], plain=True)


def _number(draw: Draw, value: float) -> Tensor:
    number = draw.plain(draw.dtype).fill_(value)
    return number.requires_grad_(draw.grad)


def _pairs(draw: Draw, sizes: Sizes) -> Inputs:
    return {
        "a": draw.scores(sizes["rows"], sizes["hidden"], plain=True),
        "b": _columns(draw, sizes),
        "logit_scale": _number(draw, 1.5),
    }


def _lean(draw: Draw, sizes: Sizes) -> Inputs:
    """Return a budget in bytes that holds the logits of two rows."""
    return {"memory_budget": 2 * row_bytes(sizes["rows"] + 3, draw.dtype)}


def _more_columns(draw: Draw, sizes: Sizes) -> Inputs:
    return {"b": _columns(draw, sizes, more=3), "symmetric": False}


def _sigmoid(draw: Draw, sizes: Sizes) -> Inputs:
    return {"kind": "sigmoid", "logit_bias": _number(draw, -1.25)}


OPTIONS: dict[str, Any] = {
    "lean": _lean,
    "bias": lambda draw, sizes: {"logit_bias": _number(draw, -1.25)},
    "more columns": _more_columns,
    "more columns, lean": together(_more_columns, _lean),
    "sigmoid": _sigmoid,
    "sigmoid, a number": {"kind": "sigmoid", "logit_bias": -2.0},
    "sigmoid, lean": together(_sigmoid, _lean),
    "sigmoid, more columns": together(_sigmoid, _more_columns),
}
CALLS = (
    Call(
        "contrastive_loss",
        contrastive_loss,
        _pairs,
        small={"rows": 7, "hidden": 5},
        usual={"rows": (4096,), "hidden": (512,)},
        options=OPTIONS,
        empty=("rows",),
        values=(),
        checked=({"rows": 301, "hidden": 65},),
    ),
)
