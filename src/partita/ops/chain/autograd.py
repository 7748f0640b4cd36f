"""The registered ops of chains and their autograd functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...primitives.semiring import Log, Max, Semiring, differentiable
from ...runtime import checks, register
from ...runtime.autograd import apply, double_backward, is_double_backward
from ...runtime.backend import current_backend
from . import reference
from .backends import BACKENDS
from .inputs import ChainTensors
from .reference import expected_value


def check_values(
    scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None, *_: Any
) -> None:
    """Raise for a source or a length that is out of range, where values are checked."""
    checks.within("source", source, -1, scores.shape[2] - 1, "states, or -1 for no edge")
    if lengths is not None:
        checks.within("lengths", lengths, 0, scores.shape[0], "steps")


def _fake_per_chain(scores: Tensor) -> Tensor:
    return scores.new_empty(scores.shape[1], dtype=torch.float64)


def _fake_state_scores(scores: Tensor, *leading: int) -> Tensor:
    T, N, C, _ = scores.shape
    return scores.new_empty((*leading, T + 1, N, C), dtype=torch.float64)


def _fake_nothing(scores: Tensor) -> Tensor:
    return scores.new_empty(0, dtype=torch.float64)


def _fake_gradient(tensor: Tensor, dtype: torch.dtype | None = None, needed: bool = True) -> Tensor:
    shape = tensor.shape if needed else (0,)
    return torch.empty(shape, dtype=dtype or tensor.dtype, device=tensor.device)


def _fake_logz(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    save: bool,
    served_by: str,
) -> tuple[Tensor, Tensor]:
    saves = save and served_by != "reference"
    saved = _fake_state_scores(scores) if saves else _fake_nothing(scores)
    return _fake_per_chain(scores), saved


def _fake_logz_gradient(
    grad_output: Tensor,
    scores: Tensor,
    initial: Tensor,
    final: Tensor,
    source: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    saved: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradient(scores, dtype), _fake_gradient(initial), _fake_gradient(final)


def _fake_viterbi(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    trace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    T, N = scores.shape[:2]
    states = scores.new_empty((T + 1, N) if trace else (0,), dtype=torch.int64)
    edges = scores.new_empty((T, N) if trace else (0,), dtype=torch.int64)
    return _fake_per_chain(scores), states, edges


def _fake_sample(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    T, N = scores.shape[:2]
    samples = uniforms.shape[1]
    states = scores.new_empty((samples, T + 1, N), dtype=torch.int64)
    return states, scores.new_empty((samples, T, N), dtype=torch.int64)


def _fake_expectation(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
    save: bool,
    served_by: str,
) -> tuple[Tensor, Tensor, Tensor]:
    saves = save and served_by != "reference"
    saved = _fake_state_scores(scores, 2) if saves else _fake_nothing(scores)
    return _fake_per_chain(scores), _fake_per_chain(scores), saved


def _fake_expectation_gradient(
    grad_output: Tensor,
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
    mean: Tensor,
    logz: Tensor,
    saved: Tensor,
    need_score_grads: bool,
    need_value_grads: bool,
) -> tuple[Tensor, ...]:
    return (
        *(_fake_gradient(t, needed=need_score_grads) for t in (scores, initial, final)),
        *(_fake_gradient(t, needed=need_value_grads) for t in (values, first_values, last_values)),
    )


_CHAIN = "Tensor scores, Tensor source, Tensor initial, Tensor final, Tensor? lengths"
_VALUES = "Tensor values, Tensor first_values, Tensor last_values"

logz = register.define(
    f"chain_logz({_CHAIN}, bool save, str backend) -> (Tensor, Tensor)",
    _fake_logz,
    check=check_values,
    fake_by_backend=True,
    backends=BACKENDS,
)
logz_gradient = register.define(
    "chain_gradient(Tensor grad_output, Tensor scores, Tensor initial, Tensor final, Tensor source,"
    " Tensor? lengths, Tensor logz, Tensor saved, ScalarType dtype, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _fake_logz_gradient,
    backends=BACKENDS,
)
scan = register.define(
    f"chain_scan({_CHAIN}, bool use_max, bool reverse, str backend) -> Tensor",
    lambda scores, *_: _fake_state_scores(scores),
    check=check_values,
    backends=BACKENDS,
)
viterbi = register.define(
    f"chain_viterbi({_CHAIN}, bool trace, str backend) -> (Tensor, Tensor, Tensor)",
    _fake_viterbi,
    check=check_values,
    backends=BACKENDS,
)
sample = register.define(
    f"chain_sample({_CHAIN}, Tensor uniforms, str backend) -> (Tensor, Tensor)",
    _fake_sample,
    check=check_values,
    backends=BACKENDS,
)
expectation = register.define(
    f"chain_expectation({_CHAIN}, {_VALUES}, bool save, str backend) -> (Tensor, Tensor, Tensor)",
    _fake_expectation,
    check=check_values,
    fake_by_backend=True,
    backends=BACKENDS,
)
expectation_gradient = register.define(
    f"chain_expectation_gradient(Tensor grad_output, {_CHAIN}, {_VALUES}, Tensor mean, Tensor logz,"
    " Tensor saved, bool need_score_grads, bool need_value_grads, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake_expectation_gradient,
    backends=BACKENDS,
)


class LogZ(torch.autograd.Function):
    """Log Z of each chain, `[N]` fp64; its gradient is the marginals."""

    @staticmethod
    def forward(
        scores: Tensor,
        source: Tensor,
        initial: Tensor,
        final: Tensor,
        lengths: Tensor | None,
        save: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor]:
        return logz(scores, source, initial, final, lengths, save, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        scores, source, initial, final, lengths, _, ctx.backend = inputs
        logz, saved = output
        ctx.mark_non_differentiable(saved)
        # Zeros for the gradient of `saved` would take as much memory as `saved`.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(scores, initial, final, source, lengths, logz, saved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output = grads[0]
        if grad_output is None:
            return (None,) * 7
        gradient = Marginals.apply if is_double_backward() else logz_gradient
        scores, *rest = ctx.saved_tensors
        d_scores, d_initial, d_final = gradient(
            grad_output, scores, *rest, scores.dtype, ctx.backend
        )
        return d_scores, None, d_initial, d_final, None, None, None


class Marginals(torch.autograd.Function):
    """The gradient of log Z, which can be differentiated again.

    Its product with a tensor is the posterior mean of that tensor along a path, so its gradient is
    the gradient of `Expectation`.
    """

    @staticmethod
    def forward(grad_output: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        return logz_gradient(grad_output, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        grad_output, scores, initial, final, source, lengths, *_, ctx.backend = inputs
        ctx.save_for_backward(grad_output, scores, initial, final, source, lengths)

    @staticmethod
    def backward(ctx: Any, *values: Tensor) -> tuple[Any, ...]:
        grad_output, scores, initial, final, source, lengths = ctx.saved_tensors
        chain = (scores, source, initial, final, lengths)
        d_grad_output, *saved = Expectation.apply(*chain, *values, True, ctx.backend)
        if is_double_backward():
            variables = (scores, initial, final)
            grads = double_backward(
                lambda s, i, f: expected_value(s, source, i, f, lengths, *values),
                variables,
                [variable.requires_grad for variable in variables],
                grad_output,
            )
        else:
            results = expectation_gradient(
                grad_output, *chain, *values, d_grad_output, *saved, True, False, ctx.backend
            )
            grads = results[:3]
        return d_grad_output, *grads, *(None,) * 6


class BestScore(torch.autograd.Function):
    """The best score of each chain, `[N]` fp64; its gradient is the indicator of the best path.

    With `trace` the forward pass also returns the states and edges of that path.
    """

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
        grad_output = grads[0]
        if grad_output is None:
            return (None,) * 7
        score, states, edges, lengths = ctx.saved_tensors
        T, N, C, K = ctx.shape
        if lengths is None:
            last = torch.full((N,), T, device=grad_output.device)
        else:
            last = lengths.long().clamp(0, T)
        zero = torch.where(score.isnan(), torch.nan, 0.0)  # NaN for an invalid chain, [N]

        def indicator(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
            """Return `[..., N, size]` with the gradient of each chain at its index."""
            result = zero[:, None].expand(*index.shape, size)
            if not size:
                return result.to(dtype)
            values = torch.where(index >= 0, grad_output, zero)
            return result.to(dtype).scatter(
                -1, index.clamp(min=0)[..., None], values.to(dtype)[..., None]
            )

        d_scores = indicator(edges, C * K, ctx.dtypes[0]).reshape(ctx.shape)
        d_initial = indicator(states[0], C, ctx.dtypes[1])
        d_final = indicator(states.gather(0, last[None])[0], C, ctx.dtypes[2])
        return d_scores, None, d_initial, d_final, None, None, None


class Expectation(torch.autograd.Function):
    """The posterior mean of values along a path, `[N]` fp64, with log Z and the saved states."""

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
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad_output = grads[0]
        if grad_output is None:
            return (None,) * 10
        *tensors, mean, logz, saved = ctx.saved_tensors
        if is_double_backward():
            needed = ctx.needs_input_grad[:8]
            return *double_backward(expected_value, tensors, needed, grad_output), None, None
        # The inputs are scores, source, initial, final, lengths, and three tensors of values.
        need_score_grads = any(ctx.needs_input_grad[i] for i in (0, 2, 3))
        need_value_grads = any(ctx.needs_input_grad[i] for i in (5, 6, 7))
        results = expectation_gradient(
            grad_output,
            *tensors,
            mean,
            logz,
            saved,
            need_score_grads,
            need_value_grads,
            ctx.backend,
        )
        none = (None, None, None)
        d_scores, d_initial, d_final = results[:3] if need_score_grads else none
        d_values = results[3:] if need_value_grads else none
        return d_scores, None, d_initial, d_final, None, *d_values, None, None


def needs_gradient(*tensors: Tensor) -> bool:
    """Return whether autograd will differentiate a function of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def chain_needs_gradient(chain: ChainTensors) -> bool:
    """Return whether autograd will differentiate a function of the chain's scores."""
    return needs_gradient(chain.scores, chain.initial, chain.final)


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
    if not torch.compiler.is_compiling():
        check_values(*chain)
    return reference.chain_inputs(*chain, semiring)


def log_partition(chain: ChainTensors, semiring: Semiring) -> Tensor:
    """Return the sum over all paths under a semiring, `[N]`."""
    if semiring not in (Log, Max):
        inputs = scan_inputs(chain, semiring, "this semiring")
        return reference.log_partition(inputs, differentiable(semiring))
    function = BestScore if semiring == Max else LogZ
    return apply(function, *chain, chain_needs_gradient(chain), current_backend())[0]
