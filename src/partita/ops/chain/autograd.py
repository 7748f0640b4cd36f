"""The ops of chains, and their derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import double_backward, is_double_backward
from . import reference_expectation as reference_pairs
from .backends import BACKENDS


def check_values(
    scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None, *_: Any
) -> None:
    checks.within("source", source, -1, scores.shape[2] - 1, "states, or -1 for no edge")
    if lengths is not None:
        checks.within("lengths", lengths, 0, scores.shape[0], "steps")


def _states(scores: Tensor, dtype: torch.dtype = torch.float64, *more: int) -> Tensor:
    return scores.new_empty((*more, scores.shape[0] + 1, *scores.shape[1:3]), dtype=dtype)


def _like(tensor: Tensor, dtype: torch.dtype | None = None, wanted: bool = True) -> Tensor:
    return torch.empty(
        tensor.shape if wanted else (0,), dtype=dtype or tensor.dtype, device=tensor.device
    )


_CHAIN = "Tensor scores, Tensor source, Tensor initial, Tensor final, Tensor? lengths"
logz = register.define(
    f"chain_logz({_CHAIN}, bool keep, str backend) -> (Tensor, Tensor)",
    lambda scores, source, initial, final, lengths, keep, floor: (
        scores.new_empty(scores.shape[1], dtype=torch.float64),
        _states(scores)
        if keep and floor != "reference"
        else scores.new_empty(0, dtype=torch.float64),
    ),
    check=check_values,
    fake_by_backend=True,
    backends=BACKENDS,
)
logz_gradient = register.define(
    "chain_gradient(Tensor grad, Tensor scores, Tensor initial, Tensor final, Tensor source, Tensor? lengths, Tensor logz, Tensor kept,"
    " ScalarType dtype, str backend) -> (Tensor, Tensor, Tensor)",
    lambda grad, scores, initial, final, *rest: (
        _like(scores, rest[-1]),
        _like(initial),
        _like(final),
    ),
    backends=BACKENDS,
)
scan = register.define(
    f"chain_scan({_CHAIN}, bool best, bool reverse, str backend) -> Tensor",
    lambda scores, *rest: _states(scores),
    check=check_values,
    backends=BACKENDS,
)
viterbi = register.define(
    f"chain_viterbi({_CHAIN}, bool trace, str backend) -> (Tensor, Tensor, Tensor)",
    lambda scores, source, initial, final, lengths, trace: (
        scores.new_empty(scores.shape[1], dtype=torch.float64),
        scores.new_empty(
            (scores.shape[0] + 1, scores.shape[1]) if trace else (0,), dtype=torch.int64
        ),
        scores.new_empty(scores.shape[:2] if trace else (0,), dtype=torch.int64),
    ),
    check=check_values,
    backends=BACKENDS,
)
sample = register.define(
    f"chain_sample({_CHAIN}, Tensor uniforms, str backend) -> (Tensor, Tensor)",
    lambda scores, source, initial, final, lengths, uniforms: (
        scores.new_empty(
            (uniforms.shape[1], scores.shape[0] + 1, scores.shape[1]), dtype=torch.int64
        ),
        scores.new_empty((uniforms.shape[1], *scores.shape[:2]), dtype=torch.int64),
    ),
    check=check_values,
    backends=BACKENDS,
)
_VALUES = "Tensor values, Tensor first_values, Tensor last_values"
expectation = register.define(
    f"chain_expectation({_CHAIN}, {_VALUES}, bool keep, str backend) -> (Tensor, Tensor, Tensor)",
    lambda scores, source, initial, final, lengths, values, first_values, last_values, keep, floor: (
        scores.new_empty(scores.shape[1], dtype=torch.float64),
        scores.new_empty(scores.shape[1], dtype=torch.float64),
        _states(scores, torch.float64, 2)
        if keep and floor != "reference"
        else scores.new_empty(0, dtype=torch.float64),
    ),
    check=check_values,
    fake_by_backend=True,
    backends=BACKENDS,
)
expectation_gradient = register.define(
    f"chain_expectation_gradient(Tensor grad, {_CHAIN}, {_VALUES}, Tensor mean, Tensor logz, Tensor kept, bool of_scores, bool of_values,"
    " str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda grad, scores, source, initial, final, lengths, values, first_values, last_values, mean, logz, kept, of_scores, of_values: (
        *(_like(t, None, of_scores) for t in (scores, initial, final)),
        *(_like(t, None, of_values) for t in (values, first_values, last_values)),
    ),
    backends=BACKENDS,
)


class LogZ(torch.autograd.Function):
    """log Z, `[N]` fp64; its gradient is the marginals."""

    @staticmethod
    def forward(
        scores: Tensor,
        source: Tensor,
        initial: Tensor,
        final: Tensor,
        lengths: Tensor | None,
        keep: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        return logz(scores, source, initial, final, lengths, keep, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        scores, source, initial, final, lengths, _, ctx.backend = inputs
        logz, kept = output
        ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)  # zeros for what is kept would be as large as it
        ctx.save_for_backward(scores, initial, final, source, lengths, logz, kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * 7
        run = Marginals.apply if is_double_backward() else logz_gradient
        scores, *rest = ctx.saved_tensors
        d_scores, d_initial, d_final = run(grad, scores, *rest, scores.dtype, ctx.backend)
        return d_scores, None, d_initial, d_final, None, None, None


class Marginals(torch.autograd.Function):
    """The gradient of log Z, differentiable again: its product with a tensor is the mean of that tensor along a path."""

    @staticmethod
    def forward(grad: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return logz_gradient(grad, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad, scores, initial, final, source, lengths, *_, ctx.backend = inputs
        ctx.save_for_backward(grad, scores, initial, final, source, lengths)

    @staticmethod
    def backward(ctx: Any, *values: Tensor) -> tuple[Any, ...]:
        grad, scores, initial, final, source, lengths = ctx.saved_tensors
        chain = (scores, source, initial, final, lengths)
        d_grad, *kept = Expectation.apply(*chain, *values, True, ctx.backend)
        if is_double_backward():
            ends = (scores, initial, final)
            parts = double_backward(
                lambda s, i, f: reference_pairs.mean_of(s, source, i, f, lengths, *values),
                ends,
                [t.requires_grad for t in ends],
                grad,
            )
        else:
            parts = expectation_gradient(
                grad, *chain, *values, d_grad, *kept, True, False, ctx.backend
            )[:3]
        return d_grad, *parts, *(None,) * 6


class BestScore(torch.autograd.Function):
    """The best score, `[N]` fp64, with states and edges of its path where a gradient is to come; that is the path's indicator."""

    @staticmethod
    def forward(
        scores: Tensor,
        source: Tensor,
        initial: Tensor,
        final: Tensor,
        lengths: Tensor | None,
        trace: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return viterbi(scores, source, initial, final, lengths, trace, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        scores, _, initial, final, lengths, *_ = inputs
        score, states, edges = output
        ctx.mark_non_differentiable(states, edges)
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtypes = scores.shape, [t.dtype for t in (scores, initial, final)]
        ctx.save_for_backward(score, states, edges, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * 7
        score, states, edges, lengths = ctx.saved_tensors
        steps, chains, count, slots = ctx.shape
        last = (
            torch.full((chains,), steps, device=grad.device)
            if lengths is None
            else lengths.long().clamp(0, steps)
        )
        nothing = torch.where(score.isnan(), torch.nan, 0.0)

        def indicator(places: Tensor, width: int, dtype: torch.dtype) -> Tensor:
            """`[..., N, width]`: the gradient at each place, NaN all over for a chain that is wrong."""
            base = nothing[:, None].expand(*places.shape, width)
            if not width:
                return base.to(dtype)
            values = torch.where(places >= 0, grad, nothing)
            return base.to(dtype).scatter(
                -1, places.clamp(min=0)[..., None], values.to(dtype)[..., None]
            )

        d_scores = indicator(edges, count * slots, ctx.dtypes[0]).reshape(ctx.shape)
        d_initial = indicator(states[0], count, ctx.dtypes[1])
        d_final = indicator(states.gather(0, last[None])[0], count, ctx.dtypes[2])
        return d_scores, None, d_initial, d_final, None, None, None


class Expectation(torch.autograd.Function):
    """The mean of values along a path, `[N]` fp64, and log Z; what is kept is for the gradients."""

    @staticmethod
    def forward(
        scores: Tensor,
        source: Tensor,
        initial: Tensor,
        final: Tensor,
        lengths: Tensor | None,
        values: Tensor,
        first_values: Tensor,
        last_values: Tensor,
        keep: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return expectation(
            scores,
            source,
            initial,
            final,
            lengths,
            values,
            first_values,
            last_values,
            keep,
            backend,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, ctx.backend = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * 10
        *tensors, mean, logz, kept = ctx.saved_tensors
        of_scores, of_values = (
            any(ctx.needs_input_grad[i] for i in part) for part in ((0, 2, 3), (5, 6, 7))
        )
        if is_double_backward():
            return (
                *double_backward(reference_pairs.mean_of, tensors, ctx.needs_input_grad[:8], grad),
                None,
                None,
            )
        parts = expectation_gradient(
            grad, *tensors, mean, logz, kept, of_scores, of_values, ctx.backend
        )
        scores, values = (
            (part if wanted else (None,) * 3)
            for part, wanted in ((parts[:3], of_scores), (parts[3:], of_values))
        )
        return scores[0], None, *scores[1:], None, *values, None, None
