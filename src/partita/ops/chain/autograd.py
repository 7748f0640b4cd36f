"""The registered ops of chains and their autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...paths.autograd import (
    gradients,
    log_partitions_of,
    off_path,
    on_path,
    ones,
    refuse_kernels,
    save_log_partition,
)
from ...paths.inputs import full_lengths
from ...primitives.semiring import Log, Max, Semiring, differentiable
from ...runtime import checks, register
from ...runtime.autograd import (
    call,
    double_backward,
    for_gradients,
    is_double_backward,
    needed_gradients,
    needs_gradient,
    one_by_one,
    refuse_forward_mode,
    saved_tensors,
    skip_unused_gradients,
    sum_of_gradients,
    takes,
)
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from . import common, reference
from .common import ChainPotentials, ChainValues, check_states


def check_values(scores: Tensor, source: Tensor, lengths: Tensor | None) -> None:
    """Raise for a source or a length that is out of range, where values are checked."""
    if source.is_meta or not checks.should_check_values(source.device):
        return
    check_states("source", source, scores.shape[2], "for no edge")
    if lengths is not None:
        checks.within("lengths", lengths, 0, scores.shape[0], "steps")


def _cpu() -> tuple[ModuleType, ...]:
    from .cpu import logz, paths

    return logz, paths


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


def _gpu_paths() -> ModuleType:
    from .gpu import launch_paths

    return launch_paths


_define = partial(register.define, cpu=_cpu, vmap=one_by_one, by_identity=("source",))
logz = _define(reference.chain_logz, common.fake_logz, gpu=_gpu, check=check_values)
logz_gradient = _define(reference.chain_gradient, common.fake_gradient, gpu=_gpu)
scan = _define(reference.chain_scan, common.fake_scan, gpu=_gpu, check=check_values)
viterbi = _define(reference.chain_viterbi, common.fake_viterbi, gpu=_gpu_paths, check=check_values)
# On a GPU the reference finds the k best paths.
best_paths = _define(
    reference.chain_nbest, common.fake_nbest, gpu=lambda: reference, check=check_values
)
sample = _define(reference.chain_sample, common.fake_sample, gpu=_gpu_paths, check=check_values)
expectation = _define(
    reference.chain_expectation,
    common.fake_expectation,
    gpu=_gpu,
    check=check_values,
)
expectation_gradient = _define(
    reference.chain_expectation_gradient,
    lambda scores, initial, final: common.fake_gradient(scores, initial, final, scores.dtype),
    gpu=_gpu,
)


class LogZ(torch.autograd.Function):
    """Log Z of each chain, `[N]`, in fp64 and in the dtype of results."""

    generate_vmap_rule = True
    setup_context = staticmethod(save_log_partition)

    @staticmethod
    @takes(logz)
    def forward(*args: Any) -> Any:
        return logz(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output = sum_of_gradients(*grads[:2])
        if grad_output is None:
            return (None,) * 7
        *tensors, fp64, saved = saved_tensors(ctx)
        chain = ChainPotentials(*tensors)
        args = (grad_output.double(), *chain, fp64, saved, chain.scores.dtype, ctx.backend)

        def log_partition(scores: Tensor, initial: Tensor, final: Tensor) -> Tensor:
            variables = {"scores": scores, "initial": initial, "final": final}
            return reference.chain_logz(chain._replace(**variables), False)[0]

        results = gradients(logz_gradient, Marginals, log_partition, chain.variables, *args)
        d_scores, d_initial, d_final = results
        return d_scores, None, d_initial, d_final, None, None, None


def mean_and_logz(*tensors: Any) -> tuple[Tensor, Tensor]:
    """Return what `Expectation` does, in PyTorch, from the tensors of potentials and of values."""
    chain, values = ChainPotentials(*tensors[:5]), ChainValues(*tensors[5:])
    return reference.chain_expectation(chain, values, False)[:2]


class Marginals(torch.autograd.Function):
    """The gradient of log Z, which can be differentiated again.

    Its product with a tensor is the posterior mean of that tensor along a path, so its gradient is
    the gradient of `Expectation`.
    """

    generate_vmap_rule = True

    @staticmethod
    @takes(logz_gradient)
    def forward(*args: Any) -> Any:
        return logz_gradient(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *_, ctx.backend = inputs
        ctx.save_for_backward(*inputs[:6])

    @staticmethod
    def backward(ctx: Any, *values: Tensor) -> tuple[Any, ...]:
        tensors = saved_tensors(ctx)
        if is_double_backward(*tensors, *values):

            def product(grad_output: Tensor, *chain: Any) -> Tensor:
                return grad_output * mean_and_logz(*chain, *values)[0]

            needed = ctx.needs_input_grad[:6]
            results = double_backward(product, tensors, needed, ones(tensors[1]))
            return *results, *(None,) * 4
        op = for_gradients(expectation, *values)
        d_grad_output, *saved = op(*tensors[1:], *values, True, ctx.backend)
        op = for_gradients(expectation_gradient, *values)
        args = (*tensors, *values, d_grad_output, *saved, ctx.backend)
        d_scores, d_initial, d_final = op(*args)
        return d_grad_output, d_scores, None, d_initial, d_final, *(None,) * 5


class BestScore(torch.autograd.Function):
    """The best score of each chain, `[N]`; its gradient is the indicator of the best path.

    With `trace` the forward pass also returns the states and edges of that path.
    """

    generate_vmap_rule = True

    @staticmethod
    @takes(viterbi)
    def forward(*args: Any) -> Any:
        return viterbi(*args)

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
        T, _, C, K = ctx.shape
        lengths = full_lengths(states[1:], lengths)
        elsewhere = torch.where(score.isnan(), torch.nan, 0.0)
        last_state = states.gather(0, lengths.clamp(0, T)[None])[0]
        of_scores, *of_ends = ctx.dtypes
        unused = off_path(score, lengths, T, first=0)
        d_scores = on_path(grad_output, edges, unused, C * K, of_scores).reshape(ctx.shape)
        d_initial, d_final = (
            on_path(grad_output, state, elsewhere, C, dtype)
            for state, dtype in zip((states[0], last_state), of_ends, strict=True)
        )
        return d_scores, None, d_initial, d_final, None, None, None


class Expectation(torch.autograd.Function):
    """The posterior mean of values along a path and log Z, `[N]` fp64, and the saved states."""

    generate_vmap_rule = True

    @staticmethod
    @takes(expectation)
    def forward(*args: Any) -> Any:
        return expectation(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, _, ctx.backend = inputs
        ctx.mark_non_differentiable(output[2])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if grads[0] is None and grads[1] is None:
            return (None,) * 10
        *tensors, mean, log_partition, saved = saved_tensors(ctx)
        of_mean, of_logz = (torch.zeros_like(mean) if x is None else x for x in grads[:2])
        needed, upstream = needed_gradients(ctx, *tensors), (of_mean, of_logz)
        if is_double_backward(*upstream, *tensors):
            return *double_backward(mean_and_logz, tensors, needed, upstream), None, None
        chain, values = ChainPotentials(*tensors[:5]), ChainValues(*tensors[5:])
        needs_chain, needs_values = any(needed[:5]), any(needed[5:])
        d_chain: Any = (None, None, None)
        d_values: Any = (None, None, None)
        if needs_chain:
            op = for_gradients(expectation_gradient, of_mean)
            d_chain = op(of_mean, *tensors, mean, log_partition, saved, ctx.backend)
        if needs_values or grads[1] is not None:
            # The derivatives in the values, and those of log Z, are posteriors.
            dtype = torch.promote_types(chain.scores.dtype, values.values.dtype)
            ends = {"initial": chain.initial.double(), "final": chain.final.double()}
            chain = chain._replace(**ends)
            fp64, _, states = logz(*chain, True, ctx.backend)

            def posteriors(grad: Tensor, likes: Any) -> Any:
                op = for_gradients(logz_gradient, grad)
                found = op(grad, *chain, fp64, states, dtype, ctx.backend)
                return (x.to(like.dtype) for x, like in zip(found, likes, strict=True))

            if needs_values:
                d_values = posteriors(of_mean, values)
            if needs_chain and grads[1] is not None:
                d_chain = map(torch.add, d_chain, posteriors(of_logz, d_chain))
        d_scores, d_initial, d_final = d_chain
        return d_scores, None, d_initial, d_final, None, *d_values, None, None


log_partitions = partial(log_partitions_of, logz, LogZ)


def best_path(chain: ChainPotentials) -> tuple[Tensor, ...]:
    """Return the best score, the states and the edges of each chain."""
    return viterbi(*chain, True, current_backend())


def draw(chain: ChainPotentials, k: int, uniform: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """Return the states and edges of k paths, drawn by the numbers of `uniform(*shape)`."""
    T, N = chain.scores.shape[:2]
    return sample(*chain, uniform(T + 1, k, N), current_backend())


def partition(chain: ChainPotentials, semiring: Semiring) -> Tensor:
    """Return the sum over all paths under a semiring but Log in the dtype of results, `[N]`."""
    if semiring == Max:
        args = (*chain, needs_gradient(*chain.variables), current_backend())
        return call(viterbi, BestScore, chain.variables, *args)[0]
    inputs = scan_inputs(chain, semiring, "this semiring")
    result = reference.log_partition(inputs, differentiable(semiring))
    return result.to(acc_dtype(chain.scores.dtype))


def marginals(chain: ChainPotentials) -> Tensor:
    """Return the posterior of each edge, `[T, N, C, K]`, in the dtype of results."""
    backend, dtype = current_backend(), acc_dtype(chain.scores.dtype)
    fp64, _, saved = logz(*chain, True, backend)
    return logz_gradient(ones(chain.scores), *chain, fp64, saved, dtype, backend)[0]


def state_scores(chain: ChainPotentials, semiring: Semiring, *, reverse: bool) -> Tensor:
    """Return alpha, or beta if `reverse`, `[T + 1, N, C]`.

    Kernels serve Log and Max without a gradient; a scan in PyTorch serves the rest.
    """
    has_kernel = semiring in (Log, Max)
    if has_kernel and not needs_gradient(*chain.variables):
        refuse_forward_mode(*chain.variables)
        return scan(*chain, semiring == Max, reverse, current_backend())
    name = "a derivative of the scores of states" if has_kernel else "this semiring"
    inputs = scan_inputs(chain, semiring, name)
    scores = reference.backward_scores if reverse else reference.forward_scores
    return torch.stack(scores(inputs, differentiable(semiring)))


def mean_and_log_partition(
    chain: ChainPotentials, values: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Return the mean of the values along a path and log Z, `[N]` fp64.

    The values are those of the edges `[T, N, C, K]`, and of the first and the last states `[N, C]`.
    """
    variables = (*chain.variables, *values)
    args = (*chain, *values, needs_gradient(*variables), current_backend())
    return call(expectation, Expectation, variables, *args)[:2]


def nbest(chain: ChainPotentials, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores, states and edges of the k best paths, as in `reference.best_paths`."""
    backend = current_backend()
    if chain.scores.is_cpu and backend != "triton":
        return best_paths(*chain, k, backend)
    return reference.best_paths(scan_inputs(chain, Max, "nbest"), k)


def scan_inputs(chain: ChainPotentials, semiring: Semiring, name: str) -> reference.ChainInputs:
    """Return the inputs of a scan in PyTorch, which serves what no backend has a kernel for.

    The error of a backend that was chosen by name has the name of the quantity.
    """
    refuse_kernels(name)
    check_values(chain.scores, chain.source, chain.lengths)
    return reference.chain_inputs(chain, semiring)
