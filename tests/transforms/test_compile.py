"""torch.compile without a graph break, with dynamic shapes too, and torch.export."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from helpers.rows import OPS, class_weights, devices, dtypes, leaf, targets_for
from helpers.sized_calls import CALLS, SizedCall, varying_dims
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import partita
from partita.testing import poisoned_memory, sample_labels, sample_rows

ALL = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3}
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    name: (lambda x, t, op=op: op.ours(x, -1)) for name, op in OPS.items()
}
FUNCTIONS |= {
    "cross_entropy": partita.cross_entropy,
    "cross_entropy, none": lambda x, t: partita.cross_entropy(x, t, reduction="none", **ALL),
    "cross_entropy, all": lambda x, t: partita.cross_entropy(x, t, torch.ones_like(x[0]), **ALL),
    "cross_entropy, inplace": lambda x, t: partita.cross_entropy(x * 1, t, inplace=True),
    "cross_entropy, probabilities": lambda x, t: partita.cross_entropy(
        x, torch.softmax(x.detach(), 1)
    ),
    "token_stats": lambda x, t: torch.stack(partita.token_stats(x, t)[:3]),
}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(function: Callable, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    result = function(x, target)
    upstream = (
        torch.linspace(0.5, 2.5, result.numel(), device=x.device)
        .reshape(result.shape)
        .to(result.dtype)
    )
    return result, torch.autograd.grad(result, x, upstream)[0]


def assert_same(function: Callable, compiled: Callable, x: Tensor, target: Tensor) -> None:
    """Assert that eager and compiled results agree up to rounding.

    A gradient that the forward pass computes has one more rounding in eager mode. Where its terms
    cancel, their rounding errors remain; the terms are about as large as the largest gradient.
    """
    with poisoned_memory():
        ours = run(compiled, x, target)
    for a, b in zip(ours, run(function, x, target), strict=True):
        assert a.dtype == b.dtype
        eps = torch.finfo(a.dtype).eps
        working = torch.finfo(torch.promote_types(a.dtype, torch.float32)).eps
        largest = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=2 * eps, atol=4 * working * largest)


@devices
@dtypes
@functions
def test_fullgraph(function: Callable, dtype: torch.dtype, device: str) -> None:
    x = leaf(6, 37, dtype=dtype, device=device)
    assert_same(
        function,
        torch.compile(function, fullgraph=True, backend="aot_eager"),
        x,
        targets_for(x, "labels", ignored=-100),
    )


@devices
@functions
def test_dynamic_shapes_compile_once(function: Callable, device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    counts = set()
    for rows, columns in ((6, 37), (5, 70), (9, 33)):
        x = leaf(rows, columns, device=device)
        assert_same(function, compiled, x, targets_for(x, "labels", ignored=-100))
        counts.add(counter.frame_count)
    assert len(counts) == 1


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="Inductor needs a C++ compiler")
@devices
def test_inductor(device: str) -> None:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(x)
        stats = partita.token_stats(h, target)
        return (
            partita.cross_entropy(h, target, **ALL)
            + stats.entropy.mean()
            + partita.softmax(h).square().sum()
            + partita.logsumexp(h, 0).sum()
        )

    x = leaf(6, 37, device=device)
    target = targets_for(x, "labels")
    ours, expected = run(torch.compile(loss, fullgraph=True), x, target), run(loss, x, target)
    torch.testing.assert_close(ours, expected)


@devices
def test_inplace_has_no_effect_in_compiled_code(device: str) -> None:
    logits, target = sample_labels(6, 37, device=device)
    x = logits.requires_grad_()
    h = x * 1
    before = h.detach().clone()
    torch.compile(
        lambda h: partita.cross_entropy(h, target, inplace=True),
        fullgraph=True,
        backend="aot_eager",
    )(h).backward()
    assert torch.equal(h, before)


@devices
def test_the_backend_is_chosen_at_each_call(device: str) -> None:
    """Tracing fixes the backend of compiled code, and a guard checks it at each call."""
    compiled = torch.compile(lambda x: partita.softmax(x), fullgraph=True, backend="aot_eager")
    x = sample_rows(3, 5, device=device)
    compiled(x)
    with partita.backend("numba"), pytest.raises(RuntimeError, match=r"backend 'numba'"):
        compiled(x)


@devices
def test_labels_are_checked_in_compiled_code(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "1")
    logits, target = sample_labels(6, 37, device=device)
    target[3] = 37
    with pytest.raises(IndexError, match=r"got 37 at \[3\]"):
        torch.compile(partita.cross_entropy, fullgraph=True, backend="aot_eager")(logits, target)


@devices
@functions
def test_compiled_transforms_are_right_or_refused(function: Callable, device: str) -> None:
    """Dynamo traces past an autograd function under `torch.func.grad`.

    The ops that it finds there must not count as constants.
    """
    x = sample_rows(3, 8, device=device)
    target = torch.arange(3, device=device)

    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: function(x, target).square().sum())(x)

    try:
        compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")(x)
    except (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported) as refused:
        assert "partita" in str(refused)
        return
    torch.testing.assert_close(compiled, gradient(x))


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("name", ["softmax", "cross_entropy", "cross_entropy, all", "token_stats"])
def test_a_tracer_sees_the_ops_and_not_their_kernels(name: str, device: str) -> None:
    """A graph without the kernel would replay an output that nothing wrote."""
    x = leaf(6, 37, device=device)
    target = targets_for(x, "labels")
    graph = make_fx(lambda x, t: run(FUNCTIONS[name], x, t))(x, target)
    assert any("partita" in str(node.target) for node in graph.graph.nodes)
    other = leaf(6, 37, device=device, seed=5)
    torch.testing.assert_close(graph(other, target), run(FUNCTIONS[name], other, target))


@devices
@functions
def test_fake_tensors(function: Callable, device: str) -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(6, 37, device=device, dtype=torch.bfloat16, requires_grad=True)
        result, grad = run(function, x, torch.zeros(6, device=device, dtype=torch.int64))
    assert mode is result.fake_mode
    real = leaf(6, 37, dtype=torch.bfloat16, device=device)
    expected = run(function, real, targets_for(real, "labels"))
    for fake, value in zip((result, grad), expected, strict=True):
        assert (fake.shape, fake.dtype, fake.device, fake.stride()) == (
            value.shape,
            value.dtype,
            value.device,
            value.stride(),
        )


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 7)
        self.loss = partita.nn.CrossEntropyLoss(
            class_weights(7, torch.float32, "cpu"), ignore_index=3, **ALL
        )

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = self.linear(x)
        entropy = partita.token_stats(logits, target, ignore_index=3).entropy
        return (
            self.loss(logits, target),
            entropy,
            partita.log_softmax(logits, 0),
            partita.logsumexp(logits, (0, 1), keepdim=True),
        )


@devices
def test_export(device: str) -> None:
    model = Model().to(device)
    rows = torch.export.Dim("rows", min=2)
    x, target = sample_rows(6, 8, device=device), torch.arange(6, device=device)
    exported = torch.export.export(
        model, (x, target), dynamic_shapes={"x": {0: rows}, "target": {0: rows}}
    ).module()
    for size in (6, 9):
        x, target = sample_rows(size, 8, device=device), torch.arange(size, device=device) % 7
        torch.testing.assert_close(exported(x, target), model(x, target))


def with_gradients(function: Callable, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the results of a call and the gradients of their sums."""
    found = function(*tensors)
    results = [found] if isinstance(found, Tensor) else list(found)
    sums = [result.sum() for result in results if result.requires_grad]
    inputs = [tensor for tensor in tensors if tensor.requires_grad]
    of_inputs = torch.autograd.grad(sums, inputs, allow_unused=True) if sums else ()
    return [*results, *(gradient for gradient in of_inputs if gradient is not None)]


@devices
@pytest.mark.parametrize("mark", ["mark_dynamic", "mark_unbacked"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_one_compilation_serves_all_sizes(call: SizedCall, mark: str, device: str) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call.function, fullgraph=True, backend=counter)
    with partita.backend("reference" if device == "cpu" else "auto"):
        for size in (5, 3):
            tensors = [tensor.to(device).detach() for tensor in call.tensors(size)]
            for tensor, dim in zip(tensors, varying_dims(call), strict=True):
                tensor.requires_grad_(tensor.is_floating_point())
                if dim is not None:
                    getattr(torch._dynamo.decorators, mark)(tensor, dim)
            expected = with_gradients(call.function, tensors)
            torch.testing.assert_close(with_gradients(compiled, tensors), expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_export_with_a_size_without_bounds(call: SizedCall) -> None:
    class Exported(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return call.function(*tensors)

    size = torch.export.Dim("size")
    dims = tuple({} if dim is None else {dim: size} for dim in varying_dims(call))
    with partita.backend("reference"):
        exported = torch.export.export(Exported(), call.tensors(5), dynamic_shapes=(dims,)).module()
        tensors = call.tensors(7)
        torch.testing.assert_close(exported(*tensors), call.function(*tensors))
