"""How often the head of a fused model has run: the counts, a report, and a warning."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import nn
from torch.serialization import add_safe_globals


class FusedReport(NamedTuple):
    """How often the head of a fused model has computed the loss without logits, and how often not.

    Fields:
        model: the name of its class.
        head: the head's name in the model, and its class.
        fused: the number of forward passes without logits.
        unfused: the number of forward passes with logits, for each reason.
        is_compiled: whether `torch.compile` has traced forward passes, which are not counted.
    """

    model: str
    head: str
    fused: int
    unfused: dict[str, int]
    is_compiled: bool

    def __repr__(self) -> str:
        whys = ", ".join(f"{number} × {why}" for why, number in self.unfused.items())
        unfused = f"{sum(self.unfused.values())} with logits{f' ({whys})' if whys else ''}"
        compiled = "; those of torch.compile are not counted" if self.is_compiled else ""
        passes = f"{self.fused} forward passes without logits, {unfused}{compiled}"
        return f"FusedReport({self.model}, head {self.head}: {passes})"


add_safe_globals([FusedReport])  # `torch.load` reads them by default


class HeadRuns:
    """The forward passes of a fused model since `fuse`."""

    def __init__(self) -> None:
        self.fused, self.unfused = 0, dict[str, int]()
        self.is_compiled = self.has_warned = False
        self.is_running = False  # whether a forward pass of the fused model has not returned

    def count(self, why_unfused: str | None) -> None:
        if torch.compiler.is_compiling():
            self.is_compiled = True
        elif why_unfused is None:
            self.fused += 1
        else:
            self.unfused[why_unfused] = self.unfused.get(why_unfused, 0) + 1

    def warn(self, why_unfused: str, advice: str) -> None:
        """Count a forward pass whose labels the head did not get, and warn of the first one."""
        self.count(why_unfused)
        if not self.has_warned and not torch.compiler.is_compiling():
            self.has_warned = True
            warnings.warn(
                f"partita's fuse has no effect on this model: {why_unfused}; {advice}. See"
                " partita.integrations.transformers.fused(model)",
                stacklevel=2,
            )

    def report(self, model: nn.Module, head: nn.Module) -> FusedReport:
        name = next((name for name, module in model.named_modules() if module is head), "missing")
        described = f"{name}, {type(head).__name__}"
        return FusedReport(
            type(model).__name__, described, self.fused, dict(self.unfused), self.is_compiled
        )
