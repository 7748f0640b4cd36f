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
from partita.runtime.backend import current_backend
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
    function = sample.call.function
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")

    def run(**inputs: object) -> object:
        """Compile the call, but on a CPU not the reference in fp64 that it is compared with."""
        is_truth = device == "cpu" and current_backend() == "reference"
        return (function if is_truth else compiled)(**inputs)

    with poisoned_memory():
        errors = replace(sample, call=replace(sample.call, function=run)).errors()
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
# The sizes of each call that may differ from one call to the next, separated by spaces.
SIZES = {
    name: " ".join(
        size
        for size in ("rows", "batch", "steps", "labels")
        if size in CALLS[name].small and not (name in UNROLLED and size == "steps")
    )
    for name in TRACED
    if name not in COMPOSED
}
NUMBERS = {"rows": 5, "batch": 5, "steps": 9, "labels": 4}
NEVER_UNBACKED = "SemiMarkovChain.log_prob"  # PyTorch's cummax asks whether there are elements


def of_sizes(name: str, device: str, numbers: dict[str, int]) -> Sample:
    if name in UNROLLED and device == "cpu":
        numbers = {"steps": 3, **numbers}  # one more than the longest segment
    return CALLS[name].sample(Draw(device=device), sizes=numbers)


def tensors_and_dims(name: str, sizes: str, device: str) -> list[tuple[Tensor, dict[int, str]]]:
    """Return the tensors of a call, each with its dimensions that follow one of the sizes."""
    numbers = {size: NUMBERS[size] for size in sizes.split()}
    trees = {
        size: tree_leaves(of_sizes(name, device, {**numbers, size: number + 2}).inputs)
        for size, number in numbers.items()
    }
    return [
        (
            x,
            {
                dim: size
                for size, others in trees.items()
                for dim in range(x.ndim)
                if x.shape[dim] != others[i].shape[dim]
            },
        )
        for i, x in enumerate(tree_leaves(of_sizes(name, device, numbers).inputs))
        if isinstance(x, Tensor)
    ]


@pytest.mark.parametrize(
    ("name", "sizes", "mark", "device"),
    [
        *(
            (name, sizes, "mark_dynamic" if name == NEVER_UNBACKED else "mark_unbacked", "cpu")
            for name, sizes in SIZES.items()
        ),
        *(
            (name, sizes.split()[0], "mark_dynamic", "cpu")
            for name, sizes in SIZES.items()
            if name != NEVER_UNBACKED
        ),
        *(
            pytest.param(name, sizes.split()[0], "mark_unbacked", "cuda", marks=pytest.mark.gpu)
            for name, sizes in SIZES.items()
            if name != NEVER_UNBACKED
        ),
    ],
)
def test_one_compilation_serves_all_sizes(name: str, sizes: str, mark: str, device: str) -> None:
    """Sizes without values, which no code may ask for, serve dynamic sizes too.

    So one size of each call is dynamic here. On a GPU, one without a value serves the others.
    """
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[name].function, fullgraph=True, backend=counter)
    marked = [dims for _, dims in tensors_and_dims(name, sizes, device)]
    with partita.backend("reference" if device == "cpu" else "auto"):
        for change in (0, -2):
            numbers = {size: NUMBERS[size] + change for size in sizes.split()}
            sample = of_sizes(name, device, numbers)
            tensors = [x for x in tree_leaves(sample.inputs) if isinstance(x, Tensor)]
            for x, dims in zip(tensors, marked, strict=True):
                for dim in dims:
                    getattr(torch._dynamo.decorators, mark)(x, dim)
            expected = sample.run()
            found = replace(sample, call=replace(sample.call, function=compiled)).run()
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(sample.gradients(found), sample.gradients(expected))
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", SIZES)
def test_export_with_sizes_without_bounds(name: str) -> None:
    numbers = {size: NUMBERS[size] for size in SIZES[name].split()}
    leaves, structure = tree_flatten(of_sizes(name, "cpu", numbers).inputs)

    class Exported(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> object:
            rest = iter(tensors)
            inputs = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return CALLS[name].function(**tree_unflatten(inputs, structure))

    # PyTorch's own slices of all but one step know that a size of 1 broadcasts.
    symbols = {
        size: torch.export.Dim(size, min=3 if size in ("steps", "labels") else None)
        for size in numbers
    }
    other = of_sizes(name, "cpu", {size: number + 2 for size, number in numbers.items()})
    tensors, dims = zip(*tensors_and_dims(name, SIZES[name], "cpu"), strict=True)
    # A tensor with one row more than labels has the size `labels + 1`.
    shapes = tuple(
        {
            dim: symbols[size] + (x.shape[dim] - numbers[size])
            if x.shape[dim] != numbers[size]
            else symbols[size]
            for dim, size in of.items()
        }
        for x, of in zip(tensors, dims, strict=True)
    )
    with partita.backend("reference"):
        exported = torch.export.export(Exported(), tensors, dynamic_shapes=(shapes,)).module()
        found = exported(*(x for x in tree_leaves(other.inputs) if isinstance(x, Tensor)))
        torch.testing.assert_close(tuple(tensors_of(found)), other.run())
