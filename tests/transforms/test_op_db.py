"""PyTorch's own samples of the ops that ours replace."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.rows import OPS, Op, check, check_loss, check_op, devices, dtypes
from torch import Tensor

import partita
from partita.testing.samples import in_torch

pytest.importorskip("expecttest", reason="PyTorch's samples need it")
# The import would disable the global flags for the other tests of the process too.
with mock.patch.object(torch.backends, "disable_global_flags"):
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

INFOS = [info for info in op_db if info.name in (*OPS, "nn.functional.cross_entropy")]
# PyTorch has this op since 2.13.
LINEAR = [info for info in op_db if info.name == "nn.functional.linear_cross_entropy"]
(CTC,) = [info for info in op_db if info.name == "nn.functional.ctc_loss"]
MAX_SAMPLES = 4  # of an op in a check of gradients
infos = pytest.mark.parametrize(
    "info", INFOS, ids=lambda info: "-".join(filter(None, (info.name, info.variant_test_name)))
)


def check_softmax(op: Op, x: Tensor, dim: int, **options: Any) -> None:
    """Assert that softmax or log-softmax with these options is within the budget."""
    functions = ((lambda x, dim, f=f: f(x, dim, **options)) for f in op[1:])
    check_op(Op(op.name, *functions), x, dim, few=True)


def check_logsumexp(x: Tensor, *args: Any) -> None:
    """Assert that log-sum-exp over any dimensions is within the budget."""
    check(
        lambda x: partita.logsumexp(x, *args),
        lambda x: in_torch.logsumexp(x, *args),
        x,
        scale="tensor",
    )


def check_empty(function: Any, theirs: Any, sample: SampleInput) -> None:
    """Assert that a function gives PyTorch's result for an empty tensor, and has a gradient."""
    x = sample.input.detach().requires_grad_()
    ours, expected = (f(x, *sample.args, **sample.kwargs) for f in (function, theirs))
    assert torch.equal(ours, expected)
    (grad,) = torch.autograd.grad(ours.sum(), x)
    assert grad.shape == x.shape


@devices
@dtypes
@infos
def test_samples(info: OpInfo, dtype: torch.dtype, device: str) -> None:
    """All kinds of samples pass under PyTorch's names of the arguments, without an adaptation."""
    samples = list(info.reference_inputs(device, dtype))
    assert samples
    for sample in samples:
        x, args, kwargs = sample.input, sample.args, sample.kwargs
        if info.name == "nn.functional.cross_entropy":
            check_loss(x, *args, few=True, **kwargs)
        elif not x.numel():
            check_empty(OPS[info.name].ours, info.op, sample)
        elif info.name == "logsumexp":
            check_logsumexp(x, *args)
        else:
            check_softmax(OPS[info.name], x, *args, **kwargs)


@devices
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize(
    "info",
    [info for info in INFOS if info.variant_test_name == "with_dtype"],
    ids=lambda info: info.name,
)
def test_integer_samples(info: OpInfo, dtype: torch.dtype, device: str) -> None:
    """Integers are cast by the argument `dtype`.

    Without it PyTorch's log-sum-exp takes integers as fp32; ours takes only floating dtypes.
    """
    for sample in info.reference_inputs(device, dtype):
        assert torch.equal(
            *(
                f(sample.input, *sample.args, **sample.kwargs)
                for f in (OPS[info.name].ours, info.op)
            )
        )


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_ctc_samples(backend: str, dtype: torch.dtype, device: str) -> None:
    """The samples pass through a log-softmax.

    PyTorch's gradient assumes log-probabilities that come from one; ours is the true one of any.
    """
    samples = list(CTC.sample_inputs(device, dtype))
    assert samples
    for sample in samples:
        leaf = sample.input.detach().requires_grad_()
        exact = leaf.detach().double().requires_grad_()
        with partita.backend(backend):
            loss = partita.ctc_loss(leaf.log_softmax(-1), *sample.args, **sample.kwargs)
            (grad,) = torch.autograd.grad(loss.sum(), leaf)
        truth = F.ctc_loss(exact.log_softmax(-1), *sample.args, **sample.kwargs)
        (true_grad,) = torch.autograd.grad(truth.sum(), exact)
        bounds = (
            {"rtol": 1e-6, "atol": 2e-6}
            if dtype == torch.float32
            else {"rtol": 1e-10, "atol": 1e-11}
        )
        torch.testing.assert_close(loss, truth.to(dtype), **bounds)
        torch.testing.assert_close(grad, true_grad.to(dtype), **bounds)


GRADIENTS = {
    "nn.functional.cross_entropy": partita.cross_entropy,
    "nn.functional.linear_cross_entropy": partita.linear_cross_entropy,
}


def call_with(
    function: Any, given: dict[Any, Any], names: tuple[Any, ...], *tensors: Tensor
) -> Tensor:
    """Call a function with given arguments, of which the tensors replace the named ones."""
    values = {**given, **dict(zip(names, tensors, strict=True))}
    args = [value for key, value in values.items() if isinstance(key, int)]
    return function(*args, **{key: value for key, value in values.items() if isinstance(key, str)})


@devices
@pytest.mark.parametrize(
    "info",
    [info for info in op_db if info.name in GRADIENTS],
    ids=lambda info: "-".join(filter(None, (info.name, info.variant_test_name))),
)
def test_gradients_of_samples(info: OpInfo, device: str) -> None:
    """Check first, second and batched gradients as PyTorch's `test_ops_gradients` does.

    Two runs have to give the same bits, even where the sample allows PyTorch a tolerance.
    """
    samples = list(info.sample_inputs(device, torch.float64, requires_grad=True))
    assert samples
    for sample in samples[:: max(len(samples) // MAX_SAMPLES, 1)]:
        given = {**dict(enumerate((sample.input, *sample.args))), **sample.kwargs}
        given.pop("options", None)
        variables = {
            key: value
            for key, value in given.items()
            if isinstance(value, Tensor) and value.requires_grad
        }

        loss = functools.partial(call_with, GRADIENTS[info.name], given, tuple(variables))
        settings = {"fast_mode": True, "check_batched_grad": True, "check_grad_dtypes": True}
        with partita.backend("reference" if device == "cpu" else "auto"):
            for check_gradients in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
                assert check_gradients(loss, tuple(variables.values()), nondet_tol=0.0, **settings)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor of a floating dtype, and return anything else as it is."""
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("info", LINEAR, ids=lambda info: info.variant_test_name)
def test_linear_samples(info: OpInfo, dtype: torch.dtype, device: str) -> None:
    """All samples pass, without `options`, which say how PyTorch divides the batch."""
    samples = list(info.sample_inputs(device, dtype))
    assert samples
    for sample in samples:
        options = {name: value for name, value in sample.kwargs.items() if name != "options"}
        results = []
        for function, kind in (
            (partita.linear_cross_entropy, dtype),
            (F.linear_cross_entropy, dtype),
            (F.linear_cross_entropy, torch.float64),
        ):
            cast = functools.partial(cast_floating, dtype=kind)
            leaf, matrix = (
                cast(t.detach()).requires_grad_() for t in (sample.input, sample.args[0])
            )
            loss = function(
                leaf,
                matrix,
                *map(cast, sample.args[1:]),
                **{name: cast(value) for name, value in options.items()},
            )
            results.append((loss.detach(), *torch.autograd.grad(loss.sum(), (leaf, matrix))))
        for ours, theirs, truth in zip(*results, strict=True):
            error, their_error = (
                (t.double() - truth).abs().max() if truth.numel() else 0.0 for t in (ours, theirs)
            )
            scale = truth.abs().max() if truth.numel() else 0.0
            bound = 2 * their_error + 4 * torch.finfo(dtype).eps * scale
            assert ours.shape == truth.shape
            assert error <= bound or not truth.isfinite().all()
