"""What the catalogue of calls is made of: a public function, and how its arguments are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...runtime.backend import backend
from ..budget import Scale
from ..compare import Errors, contract_errors
from ..inputs import LAYOUTS, VALUES, Layout, inf_rows

Sizes = Mapping[str, int]
Inputs = dict[str, Any]
Values = Literal["plain", "offset", "wide", "huge", "equal", "masked", "inf_rows"]

HALF, SINGLE = (torch.float16, torch.bfloat16), (torch.float32, torch.float64)
ALL_DTYPES = (*HALF, *SINGLE)
MANY = 65_521  # numbers of a tensor that all differ; no multiple of it is a usual size
FP64 = 2e-5  # the share of an absolute error that is allowed in fp64


@dataclass(frozen=True)
class Draw:
    """Draws the arguments of one call, the same on all devices.

    Fields:
        dtype: the dtype of logits, scores and hidden states.
        second: the dtype of what stands beside them (class weights, transitions, a teacher), if it
            is another one.
        device: the device of all tensors.
        values: normal numbers as they are (`plain`), `offset` by 1e4, `wide` (tens of nats apart),
            `huge` (near the largest number), `equal`, or with -inf in some places (`masked`) or
            in whole rows (`inf_rows`).
        layout: how the tensors of `scores` lie in memory. A frame is NaN.
        ragged: whether lengths differ.
        grad: whether the tensors of `scores` need a gradient.
        seed: the seed of all numbers.
    """

    dtype: torch.dtype = torch.float32
    second: torch.dtype | None = None
    device: torch.device | str = "cpu"
    values: Values = "plain"
    layout: Layout = "contiguous"
    ragged: bool = True
    grad: bool = True
    seed: int = 0

    def generator(self, *shape: int) -> torch.Generator:
        """Return a generator whose numbers depend on the seed and on the shape."""
        seed = self.seed
        for size in shape:
            seed = (seed * 1_000_003 + size + 1) % 2**31
        return torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Draw normal numbers in fp64 on the CPU."""
        return torch.randn(shape, generator=self.generator(*shape), dtype=torch.float64)

    def plain(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Draw normal numbers on the device. Many are some numbers again and again."""
        number = torch.Size(shape).numel()
        if number <= MANY:
            return self.normal(*shape).to(self.device, dtype)
        some = self.normal(MANY).to(self.device, dtype)
        return some.repeat(-(-number // MANY))[:number].reshape(shape)

    def scores(self, *shape: int, plain: bool = False) -> Tensor:
        """Draw logits, scores or hidden states; `plain` ones are finite numbers near 0."""
        x = self.plain(self.dtype, *shape)
        x = x if plain else _VALUES[self.values](x)
        return LAYOUTS[self.layout](x).requires_grad_(self.grad)

    def beside(self, *shape: int, grad: bool = True) -> Tensor:
        """Draw finite numbers of the second dtype, which are not those of `scores`."""
        x = replace(self, seed=self.seed + 1).plain(self.second or self.dtype, *shape)
        return x.requires_grad_(self.grad and grad)

    def matrix(self, classes: int, hidden: int) -> Tensor:
        """Draw the matrix of a head; its product with hidden states has numbers near 1."""
        weight = self.scores(classes, hidden, plain=True).detach() / hidden**0.5
        return weight.requires_grad_(self.grad)

    def positive(self, *shape: int) -> Tensor:
        """Draw numbers from 0.1 to 1.1 of the second dtype, without a gradient."""
        x = torch.rand(shape, generator=self.generator(*shape), dtype=torch.float64) + 0.1
        return x.to(self.device, self.second or self.dtype)

    def labels(self, least: int, limit: int, *shape: int) -> Tensor:
        """Draw integers from `least` to `limit - 1`; the bounds themselves if there is room."""
        x = torch.randint(least, max(limit, least + 1), shape, generator=self.generator(*shape, 7))
        if x.numel() > 1 and limit > least:
            x.view(-1)[0], x.view(-1)[-1] = limit - 1, least
        return x.to(self.device)

    def lengths(self, number: int, most: int, least: int = 0) -> Tensor:
        """Return lengths from `most` down to `least`, or `most` alone without `ragged`.

        The seed decides which sequence has which.
        """
        steps = torch.arange(number) if self.ragged else torch.zeros(number, dtype=torch.int64)
        span = max(most - least, 0) + 1
        return (most - steps * max(1, span // 3) % span).roll(self.seed).to(self.device)

    def counts(self, *shape: int) -> Tensor:
        """Return a mask in which every third entry is False, from the second on."""
        count = torch.arange(torch.Size(shape).numel()) % 3 != 1
        return count.reshape(shape).to(self.device)


def _masked(x: Tensor) -> Tensor:
    places = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    return x.masked_fill((places % 5 == 2) & (places % max(x.shape[-1], 1) != 0), -torch.inf)


_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    **VALUES,
    "masked": _masked,
    "inf_rows": inf_rows,
}
Option = Mapping[str, Any] | Callable[[Draw, Sizes], Mapping[str, Any]]


class Bound(NamedTuple):
    """The error that a result or gradient may have against fp64.

    Fields:
        ulps: units in the last place of its dtype, of the greatest magnitude in the tensor, or of
            1, the size of the weights of a gradient.
        absolute: an absolute error beside them, as the contract allows marginals in fp32; in
            fp64 a fraction of it, FP64.
    """

    ulps: float = 4.0
    absolute: float = 0.0


EXACT = Bound()


@dataclass(frozen=True)
class Call:
    """A public function with its sample calls.

    Fields:
        name: the name of the function in `partita`, or of the method of a class.
        function: what is called, with the inputs as keywords.
        inputs: draws the inputs of a small or large call.
        small: sizes for which all paths can be enumerated, and compilers and transforms are quick.
        usual: sizes that users have, several of each; `partita warm` compiles for them.
        options: what each further sample changes in the inputs, by the name of the sample.
        empty: the sizes that may be 0.
        numba: whether Numba serves it on a CPU.
        values: the kinds of values beside normal numbers for which the results are defined.
        dtypes: the dtypes of `Draw.dtype` that it serves.
        mixtures: pairs of `Draw.dtype` and `Draw.second` that it serves beside equal ones.
        batch: the dimension of each input that counts rows or sequences, by name.
        rows: that dimension in each result. A result depends on its own row alone, bit for bit.
        uncounted: returns masks of the elements of inputs that do not count, by name.
        in_torch: the same function of rows in plain PyTorch, whose errors bound those of ours.
        forward, backward: the bounds of results and gradients.
        rounds: whether a product is rounded to the dtype of its factors on the way.
        scale, grad_scale: the scales of `ulp_error` for a comparison with `in_torch`. That of
            gradients may be a function of the inputs.
        checked: larger sizes at which `partita check` compares.
        second_derivatives: whether they exist.
    """

    name: str
    function: Callable[..., Any]
    inputs: Callable[[Draw, Sizes], Inputs]
    small: Sizes
    usual: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    numba: bool = False
    values: tuple[Values, ...] = ("offset", "masked")
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    mixtures: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
    batch: Mapping[str, int] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    uncounted: Callable[[Inputs], dict[str, Tensor]] | None = None
    in_torch: Callable[..., Any] | None = None
    forward: Bound = EXACT
    backward: Bound = EXACT
    rounds: bool = False
    scale: Scale = "tensor"
    grad_scale: Scale | Callable[[Inputs], Tensor] = "tensor"
    checked: tuple[Sizes, ...] = ()
    second_derivatives: bool = True

    def sample(
        self, draw: Draw, option: str = "", sizes: Sizes | None = None, name: str = ""
    ) -> Sample:
        """Return the call of these sizes, with one of the options."""
        sizes = {**self.small, **(sizes or {})}
        inputs = self.inputs(draw, sizes)
        if option:
            changes = self.options[option]
            inputs |= changes(draw, sizes) if callable(changes) else changes
        return Sample(self, name or option or "small", inputs, draw.dtype)

    def samples(self, draw: Draw = Draw()) -> Iterator[Sample]:
        """Yield a small call, one with each option, and one with each size that may be 0."""
        yield self.sample(draw)
        for option in self.options:
            yield self.sample(draw, option)
        for size in self.empty:
            yield self.sample(draw, sizes={size: 0}, name=f"no {size}")

    def extreme_draws(self, draw: Draw) -> Iterator[tuple[str, Draw]]:
        """Yield draws of extreme values, and of other layouts in memory, with their names."""
        for values in self.values:
            yield values, replace(draw, values=values)
        for layout in LAYOUTS:
            if layout != "contiguous":
                yield layout, replace(draw, layout=layout)


@dataclass(frozen=True)
class Sample:
    """One call of a public function.

    Fields:
        call: the entry of the catalogue.
        name: what the sample shows.
        inputs: its arguments by name.
        dtype: the dtype of its scores.
    """

    call: Call
    name: str
    inputs: Inputs
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.call.name}, {self.name}"

    def run(self, **changes: Any) -> tuple[Tensor, ...]:
        """Call the function, and return the tensors of its result."""
        return tuple(tensors_of(self.call.function(**{**self.inputs, **changes})))

    def with_inputs(self, change: Callable[[Tensor], Tensor]) -> Sample:
        """Return the sample with each tensor of its inputs changed."""
        inputs = {name: map_tensors(change, value) for name, value in self.inputs.items()}
        return replace(self, inputs=inputs)

    def to(self, dtype: torch.dtype) -> Sample:
        """Return the sample with its floating inputs in another dtype, as leaves.

        A budget in bytes and the dtype of logits are left out, which were for the former dtype.
        """

        def cast(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            return x.detach().to(dtype).requires_grad_(x.requires_grad)

        of_dtype = ("memory_budget", "logits_dtype")
        inputs = {name: x for name, x in self.inputs.items() if name not in of_dtype}
        return replace(self, inputs=inputs, dtype=dtype).with_inputs(cast)

    def errors(self) -> dict[str, float]:
        """Return the error of each result and gradient against fp64, as a share of its bound.

        The truth is that of the reference. The share is infinite where a NaN, an infinity or an
        integer is another one.
        """
        results = self.run()
        gradients = self.gradients(results)
        exact = self.to(torch.float64)
        with backend("reference"):
            truth = exact.run()
            true_gradients = exact.gradients(truth)
        bounds = self.call.forward, self.call.backward
        found = {}
        for i, (ours, right) in enumerate(zip(results, truth, strict=True)):
            # A result in a narrower dtype than the scores has the bound of theirs.
            dtype = torch.promote_types(ours.dtype, self.dtype)
            found[f"result {i}"] = self._error(ours, right, bounds[0], dtype)
        for name, gradient in gradients.items():
            found[name] = self._error(gradient, true_gradients[name], bounds[1], gradient.dtype)
        return found

    def errors_beside_torch(self) -> Errors:
        """Return the errors of results and gradients in ulp, bounded by those of plain PyTorch."""
        call, leaves, in_torch = self.call, self.leaves, self.call.in_torch
        assert in_torch is not None

        def ours(*tensors: Tensor) -> tuple[Tensor, ...]:
            found = self.run(**dict(zip(leaves, tensors, strict=True)))
            return tuple(each for each in found if each.requires_grad)

        def theirs(*tensors: Tensor) -> tuple[Tensor, ...]:
            sample = self.to(tensors[0].dtype)
            inputs = {**sample.inputs, **dict(zip(leaves, tensors, strict=True))}
            return tuple(tensors_of(in_torch(**inputs)))

        grad_scale = call.grad_scale(self.inputs) if callable(call.grad_scale) else call.grad_scale
        scales: dict[str, Any] = {"scale": call.scale, "grad_scale": grad_scale}
        errors: Errors = contract_errors(ours, theirs, *leaves.values(), **scales)
        return errors

    def _error(self, ours: Tensor, truth: Tensor, bound: Bound, dtype: torch.dtype) -> float:
        ours, truth = ours.detach(), truth.detach()
        if not ours.is_floating_point():
            return 0.0 if torch.equal(ours, truth) else torch.inf
        if not ours.numel():
            return 0.0 if ours.shape == truth.shape else torch.inf
        rounds = self.call.rounds and "logits_dtype" not in self.inputs
        dtypes = [dtype, self.dtype] if rounds else [dtype]
        eps = max(torch.finfo(each).eps for each in dtypes)
        magnitude = max(1.0, float(torch.where(truth.isfinite(), truth, 0).abs().max()))
        absolute = bound.absolute * (FP64 if self.dtype == torch.float64 else 1.0)
        allowed = absolute + bound.ulps * eps * magnitude
        same = (ours == truth.to(ours.dtype)) | (ours.isnan() & truth.isnan())
        error = torch.where(same, 0.0, (ours.double() - truth.double()).abs() / allowed)
        return float(error.nan_to_num(nan=torch.inf).max())

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Return the inputs that need a gradient, by name."""
        return {
            name: value
            for name, value in self.inputs.items()
            if isinstance(value, Tensor) and value.requires_grad
        }

    @property
    def reduced(self) -> bool:
        """Return whether the result is a sum or a mean over the batch."""
        return self.inputs.get("reduction", "none") != "none"

    def gradients(self, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Return the gradients of a weighted sum of the finite elements of the results."""
        total: Tensor | float = 0.0
        for result in results:
            if result.requires_grad:
                finite = torch.where(result.isfinite(), result, 0)
                weights = torch.linspace(
                    0.5, 1.5, result.numel(), dtype=torch.float64, device=result.device
                )
                weights = weights.to(result.dtype).reshape(result.shape)
                total = total + (finite * weights).sum().double()
        leaves = self.leaves
        if isinstance(total, float):
            return {}
        found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, found, strict=True))


def without(
    inputs: Callable[[Draw, Sizes], Inputs], *names: str, grad: bool = False
) -> Callable[[Draw, Sizes], Inputs]:
    """Return a function that draws the inputs but those of these names, by default no leaves."""

    def drawn(draw: Draw, sizes: Sizes) -> Inputs:
        found = inputs(replace(draw, grad=draw.grad and grad), sizes)
        return {name: value for name, value in found.items() if name not in names}

    return drawn


def together(*options: Option) -> Callable[[Draw, Sizes], Inputs]:
    """Return a function that draws the inputs of several, of which later ones count."""

    def drawn(draw: Draw, sizes: Sizes) -> Inputs:
        found: Inputs = {}
        for option in options:
            found |= option(draw, sizes) if callable(option) else option
        return found

    return drawn


def past_lengths(name: str, inputs: Inputs, lengths: str) -> dict[str, Tensor]:
    """Return the elements of scores `[T, N, ...]` at steps past the length of their sequence."""
    scores, given = inputs[name], inputs[lengths]
    if given is None:
        return {name: torch.zeros_like(scores, dtype=torch.bool)}
    steps = torch.arange(len(scores), device=scores.device)[:, None]
    past = steps >= torch.as_tensor(given, device=scores.device)
    return {name: past.reshape(*past.shape, *[1] * (scores.ndim - 2)).expand_as(scores)}


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result, in the order of its fields."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_of(each)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return an argument with its tensors changed, those of named tuples too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(change, each) for each in value))
    return value
