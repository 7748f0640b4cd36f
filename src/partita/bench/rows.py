"""Rows of logits: softmax, cross-entropy, token statistics, log-probabilities.

Errors are in ulp, and bounded by those of PyTorch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.dtypes import acc_dtype
from ..testing import Error, ulp_error
from ..testing.budget import Scale
from ..testing.samples import in_torch
from .case import (
    Attempt,
    Buffers,
    Case,
    Function,
    Functions,
    Loop,
    Moves,
    Provider,
    Settings,
    Verdict,
    Widths,
    cases_of,
    load,
    poison,
)
from .measure import Timing, rotation, time_do_bench, time_replay

# A result is wrong when its error is this multiple of the contract: 2 ulp, or two times the error
# of PyTorch.
TOLERANCE = 2.0
ELEMENTS_AT_ONCE = 2**24  # elements whose truth is computed in fp64 together

SOFTMAX_WIDTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 781, 50257)
SOFTMAX_QUICK_WIDTHS = (256, 4096, 65536, 781)
LOSS_WIDTHS, LOSS_QUICK_WIDTHS = (8192, 16384, 32768, 131072, 262144, 50257), (8192, 131072, 50257)
WIDTHS, QUICK_WIDTHS = (8192, 32768, 131072, 50257), (32768, 50257)
SWEEP_ROWS = 4096
SWEEP_STEP = 128
SWEEP_LAST = 6272
DO_BENCH_LAST = 12672  # of the plot in Triton's tutorial
CLASSES = 8  # of each row, whose log-probabilities are computed
RULES: dict[str, Any] = {"top_k": 50, "top_p": 0.9}
RULES_OF_ROWS = ((50, 1.0), (0, 0.95), (50, 0.9))  # top-k and top-p; 0 and 1 switch them off
DEVIATION = 2.6  # of the logits whose classes are kept, which are more peaky than normal ones


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def naive_softmax(x: Tensor) -> Tensor:
    """Compute softmax in five calls, which read the matrix five times and write it three times."""
    z = x - x.amax(-1, keepdim=True)
    numerator = z.exp()
    return numerator / numerator.sum(-1, keepdim=True)


def token_stats(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute log-probability, log-sum-exp, entropy and arg-max with PyTorch's ops."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logp = x.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, target.unsqueeze(-1)).squeeze(-1), x.logsumexp(-1), entropy, x.argmax(-1)


def truncated_stats(logits: Tensor, target: Tensor, top_k: int, top_p: float) -> tuple[Tensor, ...]:
    """Compute statistics over what the rules keep with PyTorch's ops, which sort the rows."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return in_torch.truncated_stats(x, target, top_k=top_k, top_p=top_p)[:3]


def logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Compute the log-probabilities of the ids of each row with PyTorch's ops."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.log_softmax(-1, dtype=dtype).gather(-1, ids)


TORCH: dict[str, Function] = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "cross_entropy": F.cross_entropy,
    "token_stats": token_stats,
    "truncated_stats": truncated_stats,
    "logprobs": logprobs,
}


class _SameMemory(torch.autograd.Function):
    """A result in the memory of the input, as `inplace=True` does not write to a leaf."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _truncated() -> Function:
    from .. import truncated_stats

    def statistics(logits: Tensor, target: Tensor, top_k: int, top_p: float) -> tuple[Tensor, ...]:
        return truncated_stats(logits, target, top_k=top_k, top_p=top_p)[:3]

    return statistics


def _inplace() -> Function:
    from .. import cross_entropy

    return lambda logits, target: cross_entropy(_SameMemory.apply(logits), target, inplace=True)


def _liger_cross_entropy() -> Function:
    apply = load("liger_kernel.ops.cross_entropy", "LigerCrossEntropyFunction.apply")()
    return lambda logits, target: apply(logits, target, None)[0]


PROVIDERS: Functions = {
    "partita": {**{n: load("partita", n) for n in TORCH}, "truncated_stats": _truncated},
    "partita-inplace": {"cross_entropy": _inplace},
    "naive": {"softmax": lambda: naive_softmax},
    "quack": {
        "softmax": load("quack.softmax", "softmax"),
        "cross_entropy": load("quack.cross_entropy", "cross_entropy"),
    },
    "liger": {
        "softmax": load("liger_kernel.ops.softmax", "LigerSoftmaxFunction.apply"),
        "cross_entropy": _liger_cross_entropy,
    },
}


@dataclass(frozen=True)
class RowsCase(Case):
    """Logits `[rows, columns]`."""

    rows: int
    columns: int

    sizes: ClassVar[tuple[str, ...]] = ("rows", "columns")
    unit = "ulp"
    scale: ClassVar[Scale] = "element"  # of the errors of results, as in `ulp_error`
    grad_scale: ClassVar[Scale] = -1

    @abstractmethod
    def truth(self, inputs: Any, x: Tensor, rows: slice) -> Tensor:
        """Return the true outputs of some rows, stacked, from these rows of the logits in fp64."""

    def weights(self, inputs: Any, truth: Tensor, rows: slice) -> Tensor:
        """Return the upstream gradient of the true outputs."""
        return torch.ones_like(truth)

    def errors(self, attempt: Attempt) -> Iterator[Error]:
        """Yield the errors against fp64, one for each result and gradient."""
        function, inputs, _ = attempt
        x = inputs[0]

        def gradient(x: Tensor, rows: slice) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                truth = self.truth(inputs, x, rows)
                return torch.autograd.grad(truth, x, self.weights(inputs, truth, rows))[0]

        if self.learned:
            result, (grad,) = self.trained(attempt)
            yield row_error(grad, gradient, x, scale=self.grad_scale)
        else:
            poison(x)
            result = function(*inputs[: self.arguments])
        yield from self.result_errors(function, inputs, result)

    def result_errors(self, function: Function, inputs: Any, result: Any) -> Iterator[Error]:
        outputs = [output.detach() for output in self.outputs(result)]
        stacked = torch.stack(outputs, -1) if len(outputs) > 1 else outputs[0]
        truth = lambda x, rows: self.truth(inputs, x, rows)  # noqa: E731
        yield row_error(stacked, truth, inputs[0], scale=self.scale)

    def standard(self, inputs: Any) -> list[float]:
        """Return the errors of PyTorch."""
        attempt = Attempt(TORCH[self.op], inputs, Provider("torch", {}))
        return [error.ulp for error in self.errors(attempt)]

    def verdicts(self, attempt: Attempt, standard: Sequence[float]) -> Iterator[Verdict]:
        for error, own in zip(self.errors(attempt), standard, strict=True):
            yield Verdict(
                error.ulp, TOLERANCE * max(2.0, 2 * own), error.index, error.got, error.expected
            )


def blocks(x: Tensor) -> Iterator[slice]:
    """Return slices of rows that are computed in fp64 together."""
    step = max(1, ELEMENTS_AT_ONCE // x.shape[1])
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def row_error(
    result: Tensor, truth: Callable[[Tensor, slice], Tensor], x: Tensor, *, scale: Scale
) -> Error:
    """Return the worst error of a result, `[rows, ...]`, whose truth is computed in blocks.

    `truth` maps some rows of the logits in fp64 and their slice to the true rows of the result.
    """
    with torch.no_grad():
        parts = ((result[rows], truth(x[rows].double(), rows)) for rows in blocks(x))
        return max((ulp_error(*part, scale=scale) for part in parts), key=lambda error: error.ulp)


class SoftmaxInputs(NamedTuple):
    x: Tensor  # [rows, columns]
    grad: Tensor  # [rows, columns]


class Softmax(RowsCase):
    """Forward reads x and writes y; backward reads y and its gradient and writes that of x."""

    learned = 1
    arguments = 1
    work: ClassVar[Mapping[str, Moves]] = {
        "forward": Moves(2, "copy"),
        "backward": Moves(3, "copy"),
        "total": Moves(5, "copy"),
    }

    def inputs(self, buffers: Buffers) -> SoftmaxInputs:
        shape = self.shape, self.dtype
        return SoftmaxInputs(buffers.normal("logits", *shape), buffers.normal("gradient", *shape))

    def upstream(self, inputs: SoftmaxInputs) -> list[Tensor]:
        return [inputs.grad]

    def truth(self, inputs: SoftmaxInputs, x: Tensor, rows: slice) -> Tensor:
        return torch.softmax(x, -1)

    def weights(self, inputs: SoftmaxInputs, truth: Tensor, rows: slice) -> Tensor:
        return inputs.grad[rows].to(truth.dtype)

    def loops(self, attempt: Attempt) -> list[Loop]:
        return [self.training(attempt)]


class LogSoftmax(RowsCase):
    """Forward alone, with one read and one write."""

    scale = -1
    work: ClassVar[Mapping[str, Moves]] = {"inference": Moves(2, "copy")}

    def inputs(self, buffers: Buffers) -> tuple[Tensor]:
        return (buffers.normal("logits", self.shape, self.dtype),)

    def truth(self, inputs: tuple[Tensor], x: Tensor, rows: slice) -> Tensor:
        return torch.log_softmax(x, -1)


class Sweep(RowsCase):
    """Softmax forward of narrow rows inside a CUDA graph, which leaves out the host.

    The inputs are several, so that the L2 cache holds none of them.
    """

    without = ()
    label = "sweep"
    arguments = 1
    work: ClassVar[Mapping[str, Moves]] = {"replay": Moves(2, "copy")}

    def inputs(self, buffers: Buffers) -> Sequence[Tensor]:
        sets = rotation(2 * self.bytes, buffers.device)
        flat = buffers.normal("sweep", (sets * self.rows, self.columns), self.dtype)
        return flat.split(self.rows)

    def truth(self, inputs: Sequence[Tensor], x: Tensor, rows: slice) -> Tensor:
        return torch.softmax(x, -1)

    def times(self, attempt: Attempt, device: torch.device, repetitions: int) -> dict[str, Timing]:
        moved = 2 * self.bytes
        function, inputs, _ = attempt
        timing = time_replay(function, inputs, device, bytes_moved=moved, repetitions=repetitions)
        return {"replay": timing}


class DoBenchSweep(Sweep):
    """The same by Triton's `do_bench`, which empties the L2 cache and includes the launch."""

    label = "do_bench"
    work: ClassVar[Mapping[str, Moves]] = {"do_bench": Moves(2, "copy")}

    def inputs(self, buffers: Buffers) -> Sequence[Tensor]:
        return [buffers.normal("sweep", self.shape, self.dtype)]

    def times(self, attempt: Attempt, device: torch.device, repetitions: int) -> dict[str, Timing]:
        return {"do_bench": time_do_bench(lambda: attempt.function(attempt.inputs[0]))}


class Inputs(NamedTuple):
    x: Tensor  # [rows, columns]
    target: Tensor  # [rows], or several for each row


class LabelledRows(RowsCase):
    """Rows of logits with labels."""

    learned = 1
    labels = 0  # the number of labels of a row; 0 for one, without a dimension

    def inputs(self, buffers: Buffers) -> Inputs:
        logits = buffers.normal("logits", self.shape, self.dtype)
        target = buffers.labels(self.rows * max(1, self.labels), self.columns)
        return Inputs(logits, target.view(self.rows, self.labels) if self.labels else target)


class CrossEntropy(LabelledRows):
    """The loss reads the logits once; loss and gradient read them once and write the gradient."""

    grad_scale = "element"
    work: ClassVar[Mapping[str, Moves]] = {"inference": Moves(1, "read"), "total": Moves(2, "copy")}
    memory_of = "total"

    def leaves(self, inputs: Inputs, provider: Provider) -> list[Tensor]:
        """Return the logits; a copy where the provider overwrites them."""
        x = inputs.x.clone() if provider.overwrites else inputs.x.detach()
        return [x.requires_grad_()]

    def truth(self, inputs: Inputs, x: Tensor, rows: slice) -> Tensor:
        losses = F.cross_entropy(x, inputs.target[rows], reduction="none")
        return losses / len(inputs.target)

    def result_errors(self, function: Function, inputs: Inputs, result: Tensor) -> Iterator[Error]:
        x = inputs.x
        with torch.no_grad():
            parts = [self.truth(inputs, x[rows].double(), rows).sum() for rows in blocks(x)]
        expected = torch.stack(parts).sum()
        yield ulp_error(result.detach(), expected)
        yield ulp_error(function(*inputs), expected)

    def loops(self, attempt: Attempt) -> list[Loop]:
        loops = super().loops(attempt)
        return loops[1:] if attempt.provider.name == "partita-inplace" else loops


class TokenStats(LabelledRows):
    """The statistics read the logits once; their gradient reads them a second time and writes."""

    scale = 0
    work: ClassVar[Mapping[str, Moves]] = {
        "inference": Moves(1, "read"),
        "backward": Moves(2, "copy"),
        "total": Moves(3, "copy"),
    }

    def outputs(self, result: tuple[Tensor, ...]) -> Sequence[Tensor]:
        """Return all statistics but the arg-max."""
        return result[:3]

    def upstream(self, inputs: Inputs) -> list[Tensor]:
        x = inputs.x
        return [torch.ones(len(x), dtype=acc_dtype(x.dtype), device=x.device)] * 3

    def truth(self, inputs: Inputs, x: Tensor, rows: slice) -> Tensor:
        return torch.stack(token_stats(x, inputs.target[rows])[:3], -1)

    def result_errors(self, function: Function, inputs: Inputs, result: Any) -> Iterator[Error]:
        yield from super().result_errors(function, inputs, result)
        chosen = inputs.x.gather(-1, function(*inputs)[3].unsqueeze(-1)).squeeze(-1)
        yield ulp_error(chosen, inputs.x.amax(-1).double())


class KeptInputs(NamedTuple):
    x: Tensor  # [rows, columns]
    target: Tensor  # [rows]
    top_k: int
    top_p: float


@dataclass(frozen=True)
class TruncatedStats(TokenStats):
    """The same for the classes that top-k and top-p keep."""

    top_k: int
    top_p: float

    sizes = ("rows", "columns", "top_k", "top_p")
    dimensions = ("rows", "columns")

    def inputs(self, buffers: Buffers) -> KeptInputs:  # type: ignore[override]
        x, target = super().inputs(buffers)
        return KeptInputs(x * DEVIATION, target, self.top_k, self.top_p)

    def truth(self, inputs: Any, x: Tensor, rows: slice) -> Tensor:
        return torch.stack(truncated_stats(x, inputs.target[rows], *inputs[2:]), -1)

    result_errors = LabelledRows.result_errors


class Logprobs(LabelledRows):
    """The results read the logits once; their gradient reads them a second time and writes."""

    labels = CLASSES
    scale = -1
    work = TokenStats.work

    def upstream(self, inputs: Inputs) -> list[Tensor]:
        x, ids = inputs
        return [torch.ones(ids.shape, dtype=acc_dtype(x.dtype), device=x.device)]

    def truth(self, inputs: Inputs, x: Tensor, rows: slice) -> Tensor:
        return logprobs(x, inputs.target[rows])


def _sweep(settings: Settings, kind: type[Sweep], last: int) -> Iterator[Case]:
    step = 8 * SWEEP_STEP if settings.quick else SWEEP_STEP
    rows = min(SWEEP_ROWS, settings.rows(last))
    for columns in range(2 * SWEEP_STEP, last + 1, step):
        yield kind("softmax", torch.float32, rows, columns)


_widths = Widths(SOFTMAX_WIDTHS, SOFTMAX_QUICK_WIDTHS)
softmaxes = cases_of({"softmax": (Softmax, _widths), "log_softmax": (LogSoftmax, _widths)})
cross_entropy_cases = cases_of(
    {"cross_entropy": (CrossEntropy, Widths(LOSS_WIDTHS, LOSS_QUICK_WIDTHS))}
)


def softmax_cases(settings: Settings) -> Iterator[Case]:
    if settings.do_bench:
        yield from _sweep(settings, DoBenchSweep, DO_BENCH_LAST)
        return
    yield from softmaxes(settings)
    if settings.sweep:
        yield from _sweep(settings, Sweep, SWEEP_LAST)


OPS = {
    "softmax": softmax_cases,
    "cross_entropy": cross_entropy_cases,
    "token_stats": cases_of({"token_stats": (TokenStats, Widths(WIDTHS, QUICK_WIDTHS))}),
    "truncated_stats": cases_of(
        {"truncated_stats": (TruncatedStats, Widths(WIDTHS, QUICK_WIDTHS, RULES_OF_ROWS))}
    ),
    "logprobs": cases_of({"logprobs": (Logprobs, Widths(WIDTHS, QUICK_WIDTHS))}),
}
