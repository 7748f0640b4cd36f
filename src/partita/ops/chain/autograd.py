"""The registered ops of chains and their autograd functions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...primitives.semiring import Semiring
from ...runtime import checks, register
from ...runtime.autograd import (
    apply,
    double_backward,
    for_gradients,
    is_batched_gradient,
    is_double_backward,
    is_vmapped,
    needed_gradients,
    one_by_one,
    plain_eager,
    refuse_forward_mode,
    requires_grad,
    saved_tensors,
    skip_unused_gradients,
    sum_of_gradients,
    without_wrappers,
)
from ...runtime.backend import current_backend
from . import fakes, reference
from .inputs import ChainTensors, check_states
from .reference import expected_value


def check_values(scores: Tensor, source: Tensor, lengths: Tensor | None) -> None:
    """Raise for a source or a length that is out of range, where values are checked."""
    if source.is_meta or not checks.should_check_values(source.device):
        return
    check_states("source", source, scores.shape[2], "for no edge")
    if lengths is not None:
        checks.within("lengths", lengths, 0, scores.shape[0], "steps")


def _cpu() -> tuple[ModuleType, ...]:
    from .cpu import expectation, logz, paths

    return expectation, logz, paths


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


def _gpu_expectation() -> ModuleType:
    from .gpu import launch_expectation

    return launch_expectation


def _gpu_paths() -> ModuleType:
    from .gpu import launch_paths

    return launch_paths


logz = register.define(
    reference.chain_logz,
    fakes.fake_logz,
    gpu=_gpu,
    cpu=_cpu,
    check=check_values,
    vmap=one_by_one,
    by_identity=("source",),
)
logz_gradient = register.define(
    reference.chain_gradient,
    fakes.fake_logz_gradient,
    gpu=_gpu,
    cpu=_cpu,
    vmap=one_by_one,
    by_identity=("source",),
)

scan = register.define(
    reference.chain_scan,
    fakes.fake_scan,
    gpu=_gpu,
    cpu=_cpu,
    check=check_values,
    vmap=one_by_one,
    by_identity=("source",),
)
viterbi = register.define(
    reference.chain_viterbi,
    fakes.fake_viterbi,
    gpu=_gpu_paths,
    cpu=_cpu,
    check=check_values,
    vmap=one_by_one,
    by_identity=("source",),
)
# It serves the CPU. On a GPU the k best paths are found by the reference.
best_paths = register.define(
    reference.chain_nbest,
    fakes.fake_nbest,
    gpu=lambda: reference,
    cpu=_cpu,
    check=check_values,
    vmap=one_by_one,
    by_identity=("source",),
)
sample = register.define(
    reference.chain_sample,
    fakes.fake_sample,
    gpu=_gpu_paths,
    cpu=_cpu,
    check=check_values,
    vmap=one_by_one,
    by_identity=("source",),
)
expectation = register.define(
    reference.chain_expectation,
    fakes.fake_expectation,
    gpu=_gpu_expectation,
    cpu=_cpu,
    check=check_values,
    vmap=one_by_one,
    by_identity=("source",),
)
expectation_gradient = register.define(
    reference.chain_expectation_gradient,
    fakes.fake_expectation_gradient,
    gpu=_gpu_expectation,
    cpu=_cpu,
    vmap=one_by_one,
    by_identity=("source",),
)


def logz_gradients(
    grad_output: Tensor, saved: tuple[Any, ...], backend: str
) -> tuple[Tensor | None, ...]:
    """Return the gradients in scores, initial and final, which may be differentiated again."""
    scores, initial, final, source, lengths, *rest = without_wrappers(saved)
    variables = (scores, initial, final)
    tensors = (*variables, source, lengths, *rest)
    if not is_double_backward(grad_output, *variables):
        op = for_gradients(logz_gradient, grad_output)
        grads = op(grad_output, *tensors, scores.dtype, backend)
    elif is_vmapped() or is_batched_gradient(grad_output):
        # PyTorch loses the derivative of a function that is applied to batched gradients.
        grads = double_backward(
            lambda s, i, f: reference.chain_logz(s, source, i, f, lengths, False)[0],
            variables,
            [requires_grad(variable) for variable in variables],
            grad_output.double(),
        )
    else:
        grads = apply(Marginals, grad_output.double(), *tensors, scores.dtype, backend)
    return grads


class LogZ(torch.autograd.Function):
    """Log Z of each chain, `[N]`, in fp64 and in the dtype of results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        scores: Tensor,
        source: Tensor,
        initial: Tensor,
        final: Tensor,
        lengths: Tensor | None,
        save: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return logz(scores, source, initial, final, lengths, save, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        scores, source, initial, final, lengths, _, ctx.backend = inputs
        logz, _, saved = output
        ctx.mark_non_differentiable(saved)
        # Zeros for the gradient of `saved` would take as much memory as `saved`.
        skip_unused_gradients(ctx)
        ctx.save_for_backward(scores, initial, final, source, lengths, logz, saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output = sum_of_gradients(*grads[:2])
        if grad_output is None:
            return (None,) * 7
        found = logz_gradients(grad_output, ctx.saved_tensors, ctx.backend)
        d_scores, d_initial, d_final = found
        return d_scores, None, d_initial, d_final, None, None, None


class Marginals(torch.autograd.Function):
    """The gradient of log Z, which can be differentiated again.

    Its product with a tensor is the posterior mean of that tensor along a path, so its gradient is
    the gradient of `Expectation`.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(grad_output: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return logz_gradient(grad_output, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad_output, scores, initial, final, source, lengths, *_, ctx.backend = inputs
        ctx.save_for_backward(grad_output, scores, initial, final, source, lengths)

    @staticmethod
    def backward(ctx: Any, *values: Tensor) -> tuple[Any, ...]:
        grad_output, scores, initial, final, source, lengths = saved_tensors(ctx)
        chain = (scores, source, initial, final, lengths)
        variables = (grad_output, scores, initial, final)
        if is_double_backward(*variables, *values):

            def product(grad_output: Tensor, s: Tensor, i: Tensor, f: Tensor) -> Tensor:
                return grad_output * expected_value(s, source, i, f, lengths, *values)

            ones = torch.ones_like(grad_output)
            return *double_backward(product, variables, ctx.needs_input_grad[:4], ones), *(
                None,
            ) * 6
        op = for_gradients(expectation, *values)
        d_grad_output, *saved = op(*chain, *values, True, ctx.backend)
        op = for_gradients(expectation_gradient, *values)
        tensors = (grad_output, *chain, *values, d_grad_output, *saved)
        grads = op(*tensors, True, False, ctx.backend)[:3]
        return d_grad_output, *grads, *(None,) * 6


class BestScore(torch.autograd.Function):
    """The best score of each chain, `[N]`; its gradient is the indicator of the best path.

    With `trace` the forward pass also returns the states and edges of that path.
    """

    generate_vmap_rule = True

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
        skip_unused_gradients(ctx)
        ctx.shape, ctx.dtypes = scores.shape, [t.dtype for t in (scores, initial, final)]
        ctx.save_for_backward(score, states, edges, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output = grads[0]
        if grad_output is None:
            return (None,) * 7
        score, states, edges, lengths = saved_tensors(ctx)
        T, N, C, K = ctx.shape
        if lengths is None:
            lengths = torch.full((N,), T, device=grad_output.device)
        last, step = lengths.long().clamp(0, T), torch.arange(T, device=grad_output.device)
        zero = torch.where(score.isnan(), torch.nan, 0.0)  # NaN for a chain with NaN, [N]
        # Steps past a length have 0 but in an invalid chain.
        counts = (step[:, None] < lengths) | (last != lengths)

        def indicator(index: Tensor, zero: Tensor, size: int, dtype: torch.dtype) -> Tensor:
            """Return `[..., N, size]` with the gradient of each chain at its index."""
            result = zero[..., None].expand(*index.shape, size)
            if not size:
                return result.to(dtype)
            values = torch.where(index >= 0, grad_output, zero)
            return result.to(dtype).scatter(
                -1, index.clamp(min=0)[..., None], values.to(dtype)[..., None]
            )

        of_steps = torch.where(counts, zero, 0.0)
        d_scores = indicator(edges, of_steps, C * K, ctx.dtypes[0]).reshape(ctx.shape)
        d_initial = indicator(states[0], zero, C, ctx.dtypes[1])
        d_final = indicator(states.gather(0, last[None])[0], zero, C, ctx.dtypes[2])
        return d_scores, None, d_initial, d_final, None, None, None


class Expectation(torch.autograd.Function):
    """The posterior mean of values along a path, `[N]` fp64, with log Z and the saved states."""

    generate_vmap_rule = True

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
        save: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        chain = (scores, source, initial, final, lengths)
        return expectation(*chain, values, first_values, last_values, save, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, ctx.backend = inputs
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output = grads[0]
        if grad_output is None:
            return (None,) * 10
        *tensors, mean, logz, saved = saved_tensors(ctx)
        if is_double_backward(grad_output, *tensors):
            needed = ctx.needs_input_grad[:8]
            return *double_backward(expected_value, tensors, needed, grad_output), None, None
        # The inputs are scores, source, initial, final, lengths, and three tensors of values.
        needed = needed_gradients(ctx, *tensors)
        need_score_grads = any(needed[i] for i in (0, 2, 3))
        need_value_grads = any(needed[i] for i in (5, 6, 7))
        op = for_gradients(expectation_gradient, grad_output)
        args = (grad_output, *tensors, mean, logz, saved)
        results = op(*args, need_score_grads, need_value_grads, ctx.backend)
        none = (None, None, None)
        d_scores, d_initial, d_final = results[:3] if need_score_grads else none
        d_values = results[3:] if need_value_grads else none
        return d_scores, None, d_initial, d_final, None, *d_values, None, None


def needs_gradient(a: Tensor, b: Tensor, c: Tensor) -> bool:
    """Return whether autograd will differentiate a function of the tensors."""
    return torch.is_grad_enabled() and (requires_grad(a) or requires_grad(b) or requires_grad(c))


def chain_needs_gradient(chain: ChainTensors) -> bool:
    """Return whether autograd will differentiate a function of the chain's scores."""
    return needs_gradient(chain.scores, chain.initial, chain.final)


def calls_op(needs_grad: bool, *tensors: Tensor) -> bool:
    """Return whether a call may go to its op directly, past the autograd function.

    It may where no gradient is needed and no transform is active. A tangent would be lost, so it
    raises an error.
    """
    if needs_grad or not plain_eager():
        return False
    refuse_forward_mode(*tensors)
    return True


def scan_inputs(chain: ChainTensors, semiring: Semiring, name: str) -> reference.ChainInputs:
    """Return the inputs of a scan in PyTorch, which serves what no backend has a kernel for.

    Args:
        chain: the chains.
        semiring: the semiring of the scan.
        name: the name of the quantity in the error of a backend that was chosen by name.
    """
    backend = current_backend()
    if backend in ("triton", "numba"):
        raise RuntimeError(
            f"backend {backend!r}: {name} has no kernel;"
            " it runs in PyTorch (backend 'auto' or 'reference')"
        )
    check_values(chain.scores, chain.source, chain.lengths)
    return reference.chain_inputs(*chain, semiring)
