"""The calls of `partita bench host`: each op on tiny inputs, by each provider.

    python -m partita.bench.host_cases cross_entropy partita cuda

prints the seconds of the first call of this process, as `partita bench host --cold` does.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cli.fresh_process import end_process
from ..ops.cross_entropy.api import token_stats
from ..ops.ctc_crf.api import debruijn_source
from ..ops.linear_chain.api import linear_chain
from ..ops.linear_heads.api import linear_cross_entropy
from ..testing.samples import Draw
from . import providers
from .case import Function, Load
from .measure import wait

Inputs = tuple[Any, ...]

ROWS, CLASSES = 8, 1000
TOKENS, HIDDEN = 64, 64
STEPS, SEQUENCES, LABELS, SYMBOLS, TAGS = 50, 4, 10, 20, 10
BASES, STATE_LEN = 4, 3
SAME, ON_DEVICE, NEW_SHAPES = "", "lengths on the device", "a new shape at every call"


class Unit(NamedTuple):
    """The measurement whose time is the unit of others."""

    op: str
    provider: str
    variant: str = SAME


@dataclass(frozen=True)
class HostCase:
    """An op on tiny inputs, whose backward pass is the gradient of the result."""

    op: str
    inputs: Callable[[Draw, int], Inputs]  # draws those of a shape by its number, 0 for the usual
    functions: Mapping[str, Load]  # by provider, functions of the inputs
    variant: str = SAME  # how the case differs from other cases of the op

    @property
    def unit(self) -> Unit:
        """Return whose time is the unit of this case: PyTorch's, or that of a similar op."""
        if "torch" in self.functions:
            return Unit(self.op, "torch", self.variant if self.variant == NEW_SHAPES else SAME)
        if self.op == "ctc_crf_loss":
            return Unit("ctc_loss", "partita")
        return Unit("cross_entropy", "torch")

    @property
    def name(self) -> str:
        return f"{self.op}, {self.variant}" if self.variant else self.op


def step(function: Function, inputs: Inputs) -> Tensor:
    """Run forward, and backward where the result has a gradient.

    Gradients are added to those of the step before, as in a loop that accumulates them.
    """
    result = function(*inputs)
    if result.requires_grad:
        result.backward()
    return result


def _rows(draw: Draw, shape: int) -> Inputs:
    rows = ROWS + shape
    return draw.scores(rows, CLASSES), draw.labels(0, CLASSES, rows)


def _logits(draw: Draw, shape: int) -> Inputs:
    return (draw.scores(ROWS, CLASSES),)


def _hidden(draw: Draw, shape: int) -> Inputs:
    return (
        draw.scores(TOKENS, HIDDEN),
        draw.scores(CLASSES, HIDDEN),
        draw.labels(0, CLASSES, TOKENS),
    )


def _sequences(draw: Draw, shape: int) -> Inputs:
    """Return logits, targets and lengths; the lengths are ragged in other shapes than 0."""
    if shape == 0:
        T, N, S = STEPS, SEQUENCES, LABELS
        steps, lengths = torch.full((N,), T), torch.full((N,), S)
    else:
        # Steps, labels and sequences count up like the digits of a number, so shapes differ.
        T, S, N = 30 + shape % 40, 4 + shape // 40 % 8, 2 + shape // 320
        steps, lengths = T - torch.arange(N) % 3, S - torch.arange(N) % 2
    logits = draw.scores(T, N, SYMBOLS)
    return logits, draw.labels(1, SYMBOLS, N, S), steps, lengths


def _sequences_on_device(draw: Draw, shape: int) -> Inputs:
    logits, targets, *lengths = _sequences(draw, shape)
    return logits, targets, *(length.to(draw.device) for length in lengths)


def _log_probs(draw: Draw, shape: int) -> Inputs:
    logits, *others = _sequences(draw, shape)
    return logits.detach().log_softmax(-1), *others


def _kmers(draw: Draw, shape: int) -> Inputs:
    """Return scores, their table, and zeros for both ends."""
    source = debruijn_source(BASES, STATE_LEN, device=draw.device).int()
    ends = torch.zeros(SEQUENCES, len(source), device=draw.device)
    return draw.scores(STEPS, SEQUENCES, *source.shape), source, ends, ends


def _scores(draw: Draw, shape: int) -> Inputs:
    scores, *others = _kmers(draw, shape)
    return scores.detach(), *others


def _bases(draw: Draw, shape: int) -> Inputs:
    """Return scores, their table, and targets with their lengths on the host."""
    targets = draw.labels(1, BASES + 1, SEQUENCES, LABELS)
    return *_kmers(draw, shape)[:2], targets, torch.full((SEQUENCES,), LABELS), STATE_LEN


def _tags(draw: Draw, shape: int) -> Inputs:
    return draw.scores(STEPS, SEQUENCES, TAGS), draw.scores(TAGS, TAGS)


def _same(function: Function) -> Function:
    return function


def _summed(function: Function) -> Function:
    return lambda *inputs: function(*inputs).sum()


def _of_a_copy(function: Function) -> Function:
    """Return the function of a copy of the logits, for a peer that overwrites them."""
    return lambda logits, *others: function(logits.clone(), *others)


def _by(names: str, op: str, use: Callable[[Function], Function] = _same) -> dict[str, Load]:
    """Return what loads the functions of some providers, with their names between commas.

    `op` is their op in the other benchmarks, whose function `use` turns into one of the inputs.
    """

    def load(name: str) -> Function:
        everyone = (*providers.OURS, *providers.PEERS)
        return use(next(each for each in everyone if each.name == name).ops[op]())

    return {name: functools.partial(load, name) for name in names.split(",")}


def _torch_logprob(logits: Tensor, target: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, target[:, None]).sum()


def _torch_ctc_loss(logits: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    return F.ctc_loss(logits.log_softmax(-1), targets, steps, lengths)


def _logprob(logits: Tensor, target: Tensor) -> Tensor:
    return token_stats(logits, target).logprob.sum()


def _linear_chain(emissions: Tensor, transitions: Tensor) -> Tensor:
    return linear_chain(emissions, transitions).logz().sum()


_CROSS_ENTROPY = {
    **_by("torch,partita,quack", "cross_entropy"),
    **_by("liger", "cross_entropy", _of_a_copy),
}
_CTC = {"torch": lambda: _torch_ctc_loss, **_by("partita,seqdist", "ctc")}

CASES = (
    HostCase("softmax", _logits, _by("torch,partita,liger,quack", "softmax", _summed)),
    HostCase("cross_entropy", _rows, _CROSS_ENTROPY),
    HostCase("cross_entropy", _rows, _CROSS_ENTROPY, NEW_SHAPES),
    HostCase("token_stats", _rows, {"torch": lambda: _torch_logprob, "partita": lambda: _logprob}),
    HostCase(
        "linear_cross_entropy",
        _hidden,
        {**_by("torch,liger", "linear_cross_entropy"), "partita": lambda: linear_cross_entropy},
    ),
    HostCase("ctc_loss", _sequences, _CTC),
    HostCase("ctc_loss", _sequences_on_device, _CTC, ON_DEVICE),
    HostCase("ctc_loss", _sequences, _CTC, NEW_SHAPES),
    HostCase("ctc_align", _log_probs, _by("partita", "ctc_align")),
    HostCase("logz", _kmers, _by("partita,koi,seqdist", "chain", _summed)),
    HostCase("viterbi", _scores, _by("partita,koi,seqdist", "viterbi")),
    HostCase("linear_chain", _tags, {"partita": lambda: _linear_chain}),
    HostCase("ctc_crf_loss", _bases, _by("partita,koi", "ctc_crf")),
)
OPS = tuple(dict.fromkeys(case.op for case in CASES))
PROVIDERS = tuple(dict.fromkeys(name for case in CASES for name in case.functions))


def usual_case(op: str) -> HostCase:
    return next(case for case in CASES if case.op == op and not case.variant)


def seconds(op: str, provider: str, device: torch.device) -> dict[str, float]:
    """Return the seconds of the first and the second forward and backward, waited for.

    The inputs are made before, so the context of the GPU is not counted.
    """
    case, draw = usual_case(op), Draw(device=device)
    inputs = case.inputs(draw, 0)
    function = case.functions[provider]()
    times = {}
    for name in ("first", "second"):
        wait(device)
        start = time.perf_counter()
        step(function, inputs)
        wait(device)
        times[name] = time.perf_counter() - start
    return times


def main(argv: Sequence[str]) -> int:
    op, provider, device = argv
    chosen = torch.empty(0, device=device).device
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    print(json.dumps(seconds(op, provider, chosen)))
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
