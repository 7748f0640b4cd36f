"""The ops that `partita warm` runs, and one of them in a process of its own.

python -m partita.cli.warm_ops cross_entropy bf16 cuda '{"rows": [1024], "classes": [32000]}'
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.chain.api import Chain, logz
from ..ops.cross_entropy.api import cross_entropy, token_stats
from ..ops.ctc.api import ctc_align, ctc_loss
from ..ops.ctc_crf.api import ctc_crf_loss, debruijn_source
from ..ops.decode.api import ctc_beam_search, ctc_greedy_search
from ..ops.decode.crf import ctc_crf_decode
from ..ops.divergence.api import divergence, topk_divergence
from ..ops.linear_chain.api import linear_chain
from ..ops.linear_heads.api import linear_cross_entropy, linear_token_stats
from ..ops.linear_heads.divergence import linear_divergence
from ..ops.linear_heads.logprobs import linear_logprobs
from ..ops.linear_heads.topk import linear_topk_logprobs
from ..ops.linear_heads.topk_divergence import linear_topk_divergence
from ..ops.logprobs.api import logprobs, topk_logprobs
from ..ops.rnnt.api import rnnt_align, rnnt_loss
from ..ops.rnnt.linear import linear_rnnt_loss, linear_tdt_loss
from ..ops.rnnt.tdt import tdt_align, tdt_loss
from ..ops.semi_markov.api import semi_markov_chain
from ..ops.softmax.api import log_softmax, logsumexp, softmax
from ..runtime.dtypes import acc_dtype
from .console import DTYPES, UsageError, first_line

Sizes = Mapping[str, tuple[int, ...]]
Size = Mapping[str, int]

# Batches differ in these sizes. Triton compiles a kernel for a multiple of 16 apart from others,
# so each of them is run as it is and with one less.
RAGGED = ("rows", "steps", "batch")
# The first call of a size compiles, the second is recorded, and the third replays the record.
CALLS = 3
BASES = 4
SLOTS = 5  # edges that enter each state


class Warmed(NamedTuple):
    """The time and the kernels that one op in one dtype took.

    Fields:
        seconds: the time of all calls, without starting the process.
        compiled: the number of kernels that were compiled.
        cached: the number of kernels that Triton's cache had before.
    """

    seconds: float
    compiled: int
    cached: int


class Inputs:
    """Random inputs of one dtype on one device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def leaf(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device).requires_grad_()

    def labels(self, least: int, limit: int, *shape: int) -> Tensor:
        return torch.randint(least, limit, shape, device=self.device)


@dataclass(frozen=True)
class WarmOp:
    """An op and its usual sizes.

    Fields:
        sizes: the sizes that the op has, with their usual values.
        arguments: draws the arguments of one size.
        function: computes the results of the arguments.
    """

    sizes: Sizes
    arguments: Callable[[Inputs, Size], tuple[Any, ...]]
    function: Callable[..., Tensor | Sequence[Tensor]]


def _logits(inputs: Inputs, size: Size) -> tuple[Any, ...]:
    return (inputs.leaf(size["rows"], size["classes"]),)


def _rows(inputs: Inputs, size: Size) -> tuple[Any, ...]:
    return *_logits(inputs, size), inputs.labels(0, size["classes"], size["rows"])


def _hidden(inputs: Inputs, size: Size) -> tuple[Any, ...]:
    rows, classes, hidden = size["rows"], size["classes"], size["hidden"]
    matrix = inputs.leaf(classes, hidden)
    return inputs.leaf(rows, hidden), matrix, inputs.labels(0, classes, rows)


def _sequences(inputs: Inputs, size: Size) -> tuple[Any, ...]:
    T, N, C, S = size["steps"], size["batch"], size["classes"], size["labels"]
    if C < 2:
        raise UsageError(f"--classes: expected 2 or more, a blank and a label, got {C}")
    targets = inputs.labels(1, C, N, S)
    return inputs.leaf(T, N, C), targets, torch.full((N,), T), torch.full((N,), S)


def _nodes(inputs: Inputs, size: Size) -> tuple[Any, ...]:
    """Return the joint of a transducer, and the same targets and lengths as CTC."""
    T, N, C, S = size["steps"], size["batch"], size["classes"], size["labels"]
    return inputs.leaf(N, T, S + 1, C), *_sequences(inputs, size)[1:]


def _joint(inputs: Inputs, size: Size) -> tuple[Any, ...]:
    """Return encoder, predictor and matrix of a transducer, targets and lengths."""
    T, N, C, S = size["steps"], size["batch"], size["classes"], size["labels"]
    D = size["hidden"]
    joint = (inputs.leaf(N, T, D), inputs.leaf(N, S + 1, D), inputs.leaf(C, D))
    return *joint, *_sequences(inputs, size)[1:]


def _frames(inputs: Inputs, size: Size) -> tuple[Any, ...]:
    return (inputs.leaf(size["steps"], size["batch"], size["classes"]).detach(),)


def _edges(inputs: Inputs, size: Size) -> tuple[Any, ...]:
    """Return scores, and a table in which a state is entered from the states around it."""
    states = torch.arange(size["states"], device=inputs.device)
    source = (states[:, None] + torch.arange(SLOTS, device=inputs.device)) % len(states)
    return inputs.leaf(size["steps"], size["batch"], *source.shape), source


def _tags(inputs: Inputs, size: Size) -> tuple[Any, ...]:
    C = size["states"]
    return inputs.leaf(size["steps"], size["batch"], C), inputs.leaf(C, C)


def _segments(inputs: Inputs, size: Size) -> tuple[Any, ...]:
    return *_tags(inputs, size), inputs.leaf(size["durations"], size["states"])


def _bases(inputs: Inputs, size: Size) -> tuple[Any, ...]:
    """Return the arguments of CTC-CRF, whose states are the k-mers of four bases."""
    state_len = (size["states"].bit_length() - 1) // 2
    if state_len < 1 or BASES**state_len != size["states"]:
        states = size["states"]
        raise UsageError(f"--states: ctc_crf_loss has a power of 4, such as 256, got {states}")
    N, S = size["batch"], size["labels"]
    scores = inputs.leaf(size["steps"], N, *debruijn_source(BASES, state_len).shape)
    return scores, inputs.labels(1, BASES + 1, N, S), torch.full((N,), S), state_len


def _expectation(scores: Tensor, source: Tensor) -> Tensor:
    values = torch.ones(source.shape, dtype=acc_dtype(scores.dtype), device=scores.device)
    return Chain(scores, source).expectation(values)


def _ctc_crf_loss(scores: Tensor, targets: Tensor, lengths: Tensor, state_len: int) -> Tensor:
    return ctc_crf_loss(
        scores, targets, lengths, state_len=state_len, alphabet_size=scores.shape[-1]
    )


def _ctc_crf_decode(scores: Tensor, targets: Tensor, lengths: Tensor, state_len: int) -> Tensor:
    A = scores.shape[-1]
    ctc_crf_decode(scores, state_len=state_len, alphabet_size=A, method="beam")
    return ctc_crf_decode(scores, state_len=state_len, alphabet_size=A).log_probs


_CLASSES: Sizes = {"rows": (1024,), "classes": (1000, 32000, 128256)}
_HIDDEN: Sizes = {**_CLASSES, "classes": (32000, 128256), "hidden": (1024,)}
_CTC: Sizes = {"steps": (500,), "batch": (16,), "classes": (32, 1024), "labels": (64,)}
_RNNT: Sizes = {"steps": (200,), "batch": (8,), "classes": (500, 1025), "labels": (40,)}
_DURATIONS = range(5)
_SEARCH: Sizes = {"steps": (500,), "batch": (16,), "classes": (5, 32, 1024)}
_CHAIN: Sizes = {"steps": (500,), "batch": (16,), "states": (64, 256, 1024)}


def _duration_logits(logits: Tensor) -> Tensor:
    """Return logits of the durations."""
    return logits.new_zeros(*logits.shape[:3], len(_DURATIONS))


def _tdt_loss(logits: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    return tdt_loss(logits, _duration_logits(logits), targets, steps, lengths, 0, _DURATIONS)


def _tdt_align(logits: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    inputs = (logits.detach(), _duration_logits(logits.detach()), targets)
    return tdt_align(*inputs, steps, lengths, 0, _DURATIONS).score


def _linear_tdt_loss(
    encoder: Tensor, predictor: Tensor, weight: Tensor, targets: Tensor, *lengths: Tensor
) -> Tensor:
    joint, (steps, labels) = (encoder, predictor, weight, weight[:5]), lengths
    durations = range(len(weight[:5]))
    return linear_tdt_loss(*joint, targets, steps, labels, 0, durations)


def _k(x: Tensor) -> int:
    """Return the number of classes that a teacher usually names, or all."""
    return min(20, x.shape[-1])


OPS: dict[str, WarmOp] = {
    "logsumexp": WarmOp(_CLASSES, _logits, lambda x: logsumexp(x, -1)),
    "softmax": WarmOp(_CLASSES, _logits, lambda x: softmax(x, -1)),
    "log_softmax": WarmOp(_CLASSES, _logits, lambda x: log_softmax(x, -1)),
    "cross_entropy": WarmOp(_CLASSES, _rows, cross_entropy),
    "token_stats": WarmOp(_CLASSES, _rows, lambda *inputs: token_stats(*inputs)[:3]),
    "divergence": WarmOp(_CLASSES, _logits, lambda x: divergence(x, x.detach().flip(0))),
    "logprobs": WarmOp(
        _CLASSES, _rows, lambda x, target: logprobs(x, target[:, None].expand(-1, 8))
    ),
    "topk_divergence": WarmOp(
        _CLASSES, _logits, lambda x: topk_divergence(x, topk_logprobs(x.detach().flip(0), _k(x)))
    ),
    "topk_logprobs": WarmOp(_CLASSES, _logits, lambda x: topk_logprobs(x, _k(x)).logprobs),
    "linear_cross_entropy": WarmOp(_HIDDEN, _hidden, linear_cross_entropy),
    "linear_token_stats": WarmOp(_HIDDEN, _hidden, lambda *inputs: linear_token_stats(*inputs)[:3]),
    "linear_logprobs": WarmOp(
        _HIDDEN,
        _hidden,
        lambda input, weight, target: linear_logprobs(input, weight, target[:, None].expand(-1, 8)),
    ),
    "linear_topk_logprobs": WarmOp(
        _HIDDEN,
        _hidden,
        lambda input, weight, _: linear_topk_logprobs(input, weight, _k(weight.T)).logprobs,
    ),
    "linear_topk_divergence": WarmOp(
        _HIDDEN,
        _hidden,
        lambda input, weight, _: linear_topk_divergence(
            input,
            weight,
            linear_topk_logprobs(input.detach().flip(0), weight.detach(), _k(weight.T)),
        ),
    ),
    "linear_divergence": WarmOp(
        _HIDDEN,
        _hidden,
        lambda input, weight, _: linear_divergence(input, weight, input.flip(0), weight),
    ),
    "ctc_loss": WarmOp(_CTC, _sequences, lambda *inputs: ctc_loss(*inputs, from_logits=True)),
    "ctc_align": WarmOp(
        _CTC, _sequences, lambda logits, *others: ctc_align(logits.detach(), *others).score
    ),
    "ctc_greedy_search": WarmOp(
        _SEARCH, _frames, lambda logits: ctc_greedy_search(logits, from_logits=True).scores
    ),
    "ctc_beam_search": WarmOp(
        _SEARCH, _frames, lambda logits: ctc_beam_search(logits, from_logits=True).scores
    ),
    "logz": WarmOp(_CHAIN, _edges, logz),
    "viterbi": WarmOp(_CHAIN, _edges, lambda *inputs: Chain(*inputs).viterbi().score.detach()),
    "expectation": WarmOp(_CHAIN, _edges, _expectation),
    "linear_chain": WarmOp(
        {"steps": (32, 100), "batch": (16,), "states": (16, 64)},
        _tags,
        lambda *inputs: linear_chain(*inputs).logz(),
    ),
    "rnnt_loss": WarmOp(_RNNT, _nodes, lambda x, t, n, m: rnnt_loss(x, t, n, m, 0)),
    "rnnt_align": WarmOp(
        _RNNT, _nodes, lambda x, t, n, m: rnnt_align(x.detach(), t, n, m, 0).score
    ),
    "tdt_loss": WarmOp(_RNNT, _nodes, _tdt_loss),
    "tdt_align": WarmOp(_RNNT, _nodes, _tdt_align),
    "linear_rnnt_loss": WarmOp(
        {**_RNNT, "hidden": (640,)}, _joint, lambda *inputs: linear_rnnt_loss(*inputs, blank=0)
    ),
    "linear_tdt_loss": WarmOp({**_RNNT, "hidden": (640,)}, _joint, _linear_tdt_loss),
    "ctc_crf_decode": WarmOp({**_CHAIN, "labels": (64,)}, _bases, _ctc_crf_decode),
    "semi_markov_chain": WarmOp(
        {"steps": (500,), "batch": (16,), "states": (24,), "durations": (50,)},
        _segments,
        lambda *inputs: semi_markov_chain(*inputs).logz(),
    ),
    "ctc_crf_loss": WarmOp({**_CHAIN, "labels": (64,)}, _bases, _ctc_crf_loss),
}
SIZES = tuple(dict.fromkeys(name for op in OPS.values() for name in op.sizes))


def combinations(sizes: Sizes) -> Iterator[Size]:
    """Yield every combination of the sizes; ragged ones occur as they are and with one less."""
    values = [
        dict.fromkeys(number - less for number in sizes[name] for less in (0, 1) if number > less)
        if name in RAGGED
        else sizes[name]
        for name in sizes
    ]
    for numbers in itertools.product(*values):
        yield dict(zip(sizes, numbers, strict=True))


@contextmanager
def _compilations(device: torch.device) -> Iterator[list[bool]]:
    """Yield a list that gets an entry for each kernel: whether Triton's cache had it."""
    found: list[bool] = []
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        yield found
        return
    from triton import knobs

    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    try:
        yield found
    finally:
        knobs.compilation.listener = None


def _run(op: WarmOp, inputs: Inputs, size: Size) -> None:
    """Run forward without a gradient, and forward and backward with one."""
    arguments = op.arguments(inputs, size)
    leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    for _ in range(CALLS):
        with torch.no_grad():
            op.function(*arguments)
    for _ in range(CALLS):
        results = op.function(*arguments)
        results = [results] if isinstance(results, Tensor) else list(results)
        if all(result.requires_grad for result in results):
            torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results])


def warm_one(op: str, dtype: str, sizes: Sizes, device: torch.device) -> Warmed:
    """Run an op in a dtype at all combinations of the sizes; those not given are the usual ones."""
    inputs, chosen = Inputs(DTYPES[dtype], device), OPS[op]
    own = {name: sizes.get(name, usual) for name, usual in chosen.sizes.items()}
    start = time.perf_counter()
    with _compilations(device) as found:
        for size in combinations(own):
            _run(chosen, inputs, size)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    return Warmed(time.perf_counter() - start, found.count(False), found.count(True))


def main(argv: Sequence[str]) -> int:
    """Warm one op in this process, and print the result as JSON."""
    op, dtype, device, sizes = argv
    chosen = torch.empty(0, device=device).device
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    numbers = {name: tuple(values) for name, values in json.loads(sizes).items()}
    try:
        result = warm_one(op, dtype, numbers, chosen)
    except Exception as error:
        message = str(error) if isinstance(error, UsageError) else first_line(error)
        print(message, file=sys.stderr)
        return 1
    print(json.dumps(result._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
