"""Every call under torch.compile without a graph break, and under tracers."""

from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from helpers.catalogue import COMPOSED, DIFFERENTIABLE, VARIANTS, is_score, same_bits
from helpers.rows import devices
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import partita
from partita.testing import poisoned_memory
from partita.testing.samples import CALLS, Draw, Sample, map_tensors, tensors_of

# A generator of random numbers is no argument that a compiler knows.
TRACED = [name for name in CALLS if not name.endswith("sample")]
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def typical(name: str, draw: Draw) -> Sample:
    """Return the call as users make it: reduced, if it can be and has no other option."""
    call, option = VARIANTS.get(name, (name, ""))
    options = CALLS[call].options
    return CALLS[call].sample(draw, option or ("mean" if "mean" in options else ""))


@devices
@pytest.mark.parametrize("name", list(dict.fromkeys([*TRACED, *VARIANTS])))
def test_fullgraph(name: str, device: str) -> None:
    sample = typical(name, Draw(device=device))
    compiled = torch.compile(sample.call.function, fullgraph=True, backend="aot_eager")
    with poisoned_memory():
        errors = replace(sample, call=replace(sample.call, function=compiled)).errors()
    assert not {part: error for part, error in errors.items() if error > 1}


@devices
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_transforms_are_right_or_refused(name: str, device: str) -> None:
    """Dynamo traces past an autograd function under `torch.func.grad`.

    The ops that it finds there must not count as constants. Nor must an input whose gradient the
    transform takes, where another one needs a gradient outside of it.
    """
    sample = typical(name, Draw(device=device))
    for part, x in sample.leaves.items():

        def gradient(x: Tensor, part: str = part) -> Tensor:
            def total(x: Tensor) -> Tensor:
                return sum(r.square().sum() for r in sample.run(**{part: x}) if is_score(r))

            return torch.func.grad(total)(x)

        torch._dynamo.reset()
        try:
            found = torch.compile(gradient, fullgraph=True, backend="eager")(x.detach())
        except (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported) as refused:
            assert "partita" in str(refused)
            continue
        torch.testing.assert_close(found, gradient(x.detach()), rtol=1e-4, atol=1e-4)


@devices
@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "." not in name])
def test_compiled_autograd_gives_the_same_bits(name: str, device: str) -> None:
    """Gradients of a chain's methods are sums of several, which it adds in another order."""
    sample = typical(name, Draw(device=device))
    leaves = list(sample.leaves.values())

    def total() -> Tensor:
        return sum(r.double().square().sum() for r in sample.run() if r.requires_grad)

    expected = torch.autograd.grad(total(), leaves)
    counters.clear()
    loss = total()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(), backend="eager")()
    assert counters["compiled_autograd"]["captures"] == 1
    assert all(same_bits(x.grad, truth) for x, truth in zip(leaves, expected, strict=True))


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("name", [name for name in TRACED if name not in COMPOSED])
def test_a_tracer_sees_the_ops_and_not_their_kernels(name: str, device: str) -> None:
    """A graph without the kernel would replay an output that nothing wrote."""
    sample, other = (typical(name, Draw(device=device, seed=seed)) for seed in (0, 1))
    names = [name for name, x in sample.inputs.items() if is_score(x)]

    def run(*tensors: Tensor) -> list[Tensor]:
        changed = replace(
            sample, inputs={**sample.inputs, **dict(zip(names, tensors, strict=True))}
        )
        results = changed.run()
        return [*results, *changed.gradients(results).values()]

    graph = make_fx(run)(*(sample.inputs[name] for name in names))
    assert any("partita" in str(node.target) for node in graph.graph.nodes)
    tensors = [other.inputs[name] for name in names]
    torch.testing.assert_close(graph(*tensors), run(*tensors), equal_nan=True)


class Dispatched(TorchDispatchMode):
    """Sends each op through PyTorch's dispatcher, as for a compiler."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return op(*args, **kwargs or {})


def layout(tensor: Tensor) -> tuple[object, ...]:
    """Return what a compiler is told of a tensor; strides of single elements do not count."""
    strides = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    is_empty = not tensor.numel()
    return tensor.shape, tensor.dtype, tensor.device, None if is_empty else strides


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("name", [name for name in CALLS if name not in COMPOSED])
def test_results_lie_as_fakes_say(name: str, device: str) -> None:
    """Shapes, dtypes and strides are those of the fakes, for inputs of every layout."""
    call, wrong = CALLS[name], []
    draw = Draw(torch.bfloat16, device=device)
    # A GPU compiles a kernel for each: it has the layouts in fp32, as the test of values does.
    few, other = (None, draw) if device == "cpu" else (2, Draw(device=device))
    layouts = [laid for _, laid in call.extreme_draws(other) if laid.layout != draw.layout]
    for sample in (*list(call.samples(draw))[:few], *map(call.sample, layouts[:few])):
        with Dispatched():
            results = sample.run()
            real = [*results, *sample.gradients(results).values()]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            inputs = {
                name: map_tensors(mode.from_tensor, value) for name, value in sample.inputs.items()
            }
            faked = replace(sample, inputs=inputs)
            results = faked.run()
            fake = [*results, *faked.gradients(results).values()]
        wrong += [
            f"{sample}: {layout(a)} {layout(b)}"
            for a, b in zip(real, fake, strict=True)
            if layout(a) != layout(b)
        ]
    assert not wrong


# The derivatives of semi-Markov chains run the reference, step by step.
UNROLLED = [
    f"SemiMarkovChain.{method}"
    for method in ("state_marginals", "segment_marginals", "expected_counts", "entropy")
]
SIZED = [
    (name, size)
    for name in TRACED
    if name not in COMPOSED
    for size in ("rows", "batch", "steps", "labels")
    if size in CALLS[name].small and not (name in UNROLLED and size == "steps")
]
# One size of each call.
FIRST_SIZES = {name: (name, size) for name, size in reversed(SIZED)}.values()
NEVER_UNBACKED = "SemiMarkovChain.log_prob"  # PyTorch's cummax asks whether there are elements


def of_size(name: str, size: str, number: int, device: str) -> Sample:
    sizes = {size: number} if size != "labels" else {size: number, "steps": 12}
    return CALLS[name].sample(Draw(device=device), sizes=sizes)


def tensors_and_dims(name: str, size: str, device: str) -> list[tuple[Tensor, int | None]]:
    """Return the tensors of a call of size 5, each with the dimension that follows the size."""
    five, seven = (tree_leaves(of_size(name, size, n, device).inputs) for n in (5, 7))
    return [
        (x, next((dim for dim in range(x.ndim) if x.shape[dim] != y.shape[dim]), None))
        for x, y in zip(five, seven, strict=True)
        if isinstance(x, Tensor)
    ]


@pytest.mark.parametrize(
    ("name", "size", "mark", "device"),
    [
        *((*sized, "mark_unbacked", "cpu") for sized in SIZED if sized[0] != NEVER_UNBACKED),
        *((*sized, "mark_dynamic", "cpu") for sized in SIZED if sized[0] == NEVER_UNBACKED),
        *((*sized, "mark_dynamic", "cpu") for sized in FIRST_SIZES if sized[0] != NEVER_UNBACKED),
        *(
            pytest.param(*sized, "mark_unbacked", "cuda", marks=pytest.mark.gpu)
            for sized in FIRST_SIZES
            if sized[0] != NEVER_UNBACKED
        ),
    ],
)
def test_one_compilation_serves_all_sizes(name: str, size: str, mark: str, device: str) -> None:
    """A size without a value, which no code may ask for, serves dynamic sizes too.

    So one size of each call is dynamic here. On a GPU, one without a value serves the others.
    """
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[name].function, fullgraph=True, backend=counter)
    dims = [dim for _, dim in tensors_and_dims(name, size, device)]
    with partita.backend("reference" if device == "cpu" else "auto"):
        for number in (5, 3):
            sample = of_size(name, size, number, device)
            tensors = [x for x in tree_leaves(sample.inputs) if isinstance(x, Tensor)]
            for x, dim in zip(tensors, dims, strict=True):
                if dim is not None:
                    getattr(torch._dynamo.decorators, mark)(x, dim)
            expected = sample.run()
            found = replace(sample, call=replace(sample.call, function=compiled)).run()
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(sample.gradients(found), sample.gradients(expected))
    assert counter.frame_count == 1


@pytest.mark.parametrize(("name", "size"), SIZED)
def test_export_with_a_size_without_bounds(name: str, size: str) -> None:
    leaves, structure = tree_flatten(of_size(name, size, 5, "cpu").inputs)

    class Exported(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> object:
            rest = iter(tensors)
            inputs = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return CALLS[name].function(**tree_unflatten(inputs, structure))

    # PyTorch's own slices of all but one step know that a size of 1 broadcasts.
    number = torch.export.Dim("number", min=3 if size in ("steps", "labels") else None)
    other = of_size(name, size, 7, "cpu")
    tensors, dims = zip(*tensors_and_dims(name, size, "cpu"), strict=True)
    # A tensor with one row more than labels has the size `number + 1`.
    shapes = tuple(
        None if dim is None else {dim: number + (x.shape[dim] - 5) if x.shape[dim] > 5 else number}
        for x, dim in zip(tensors, dims, strict=True)
    )
    with partita.backend("reference"):
        exported = torch.export.export(Exported(), tensors, dynamic_shapes=(shapes,)).module()
        found = exported(*(x for x in tree_leaves(other.inputs) if isinstance(x, Tensor)))
        torch.testing.assert_close(tuple(tensors_of(found)), other.run())
