"""Registration of ops with PyTorch. This is the only file that touches `torch.library`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any, get_type_hints

import torch

from . import launcher, private_names, recording
from .autograd import is_capturing, plain_eager
from .backend import resolve
from .caches import BoundedCache, register_cache

PLAIN = (torch.Tensor, torch.nn.Parameter)
MAX_PROGRAMS = 1024  # recorded programs of an op; a full cache is emptied
MAX_TRIES = 2  # recordings of a key that may be refused

# How a call was served, beside the reasons why a recording was refused.
REPLAYED, RECORDED = "replayed", "recorded"
NOT_RECORDED = "no equal call was recorded"
LEFT_TO_PYTHON = "an argument, a variable of the environment or a profiler rules replay out"
BY_REFERENCE = "the backend 'reference' serves it"

Loader = Callable[[], ModuleType | tuple[ModuleType, ...]]  # imports a backend of an op

_library = torch.library.Library("partita", "DEF")


class Op:
    """A registered op. A plain eager call bypasses PyTorch's dispatcher, which costs host time.

    On a GPU the second call of a key is recorded and later ones are replayed in one C call. The key
    has the dtype, shape, strides, alignment and device of each tensor and the value of each other
    argument. See `recording.py`.

    Args:
        name: the name of the op.
        run: the function that serves plain eager calls.
        dispatched: the op as PyTorch's dispatcher knows it.
        by_identity: the positions of tensors whose values decide what the op does. They count by
            identity and version.
        parameters: the names of all arguments.

    `programs` holds the recorded calls by key, and `refusals` why recordings of a key were refused.
    `latest` says how the latest call that was not replayed was served; replays leave it alone,
    which spares them its time.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        dispatched: Callable[..., Any],
        by_identity: Sequence[int] = (),
        parameters: Sequence[str] = (),
    ) -> None:
        self.name, self.run, self.dispatched, self.by_identity = name, run, dispatched, by_identity
        self.parameters = parameters
        self.latest = NOT_RECORDED
        self.programs: BoundedCache[bytes, Any] = BoundedCache(MAX_PROGRAMS)
        self.refusals: BoundedCache[bytes, list[str]] = BoundedCache(4 * MAX_PROGRAMS)
        self._replay: Any = None
        register_cache(f"runtime.register.{name}.programs", self.programs.clear)
        register_cache(f"runtime.register.{name}.refusals", self.refusals.clear)

    def __call__(self, first: torch.Tensor, *rest: Any) -> Any:
        if type(first) in PLAIN and plain_eager():
            return self.eager(first, *rest)
        return self.dispatched(first, *rest)

    def eager(self, first: torch.Tensor, *rest: Any) -> Any:
        """Serve a call in plain eager mode."""
        if not first.is_cuda or recording.thread.recorder is not None:
            return self.run(first, *rest)
        replay = self._replay or self.replay()
        if replay is None:
            self.latest = launcher.status()
            return self.run(*without_lazy_bits(first, *rest))
        found = replay(first, *rest)
        if type(found) is bytes:
            return self._record(found, (first, *rest))
        if found is not NotImplemented:
            return found
        if first.device.index != private_names.current_device():
            with torch.cuda.device(first.device):
                return self.eager(first, *rest)
        self.latest = LEFT_TO_PYTHON
        return self.run(*without_lazy_bits(first, *rest))

    def replay(self) -> Callable[..., Any] | None:
        """Return the C module's form of this op, or None without the module."""
        module = launcher.module()
        if self._replay is None and module is not None and private_names.HAS_DISPATCH_MODES:
            by_identity = sum(1 << position for position in self.by_identity)
            self._replay = module.Replay(self.programs, by_identity)
        return self._replay

    def _record(self, key: bytes, args: tuple[Any, ...]) -> Any:
        """Run a call that has no program, and record it if its key was seen before.

        A second try follows a refusal, which may be due to a cached table that the call built.
        """
        if args[-1] == "reference":  # which is no sequence of launches
            self.latest = BY_REFERENCE
            return self.run(*args)
        refusals = self.refusals.get(key)
        if refusals is None:
            self.refusals.store(key, [])
        if refusals is None or len(refusals) >= MAX_TRIES or is_capturing(args[0]):
            self.latest = refusals[-1] if refusals else NOT_RECORDED
            return self.run(*args)
        with recording.Recorder(args, self.by_identity) as recorder:
            result = self.run(*args)
        drop = functools.partial(self.programs.pop, key, None)
        program = recorder.program(launcher.module(), result, drop)
        if program is None:
            self.latest = recorder.reason or ""
            refusals.append(self.latest)
        else:
            self.latest = RECORDED
            self.programs.store(key, program)
            refusals.clear()  # a cache that was emptied is filled again
        return result


@contextlib.contextmanager
def watch() -> Iterator[list[tuple[str, str]]]:
    """Yield a list that gets the name of each op that is called inside, and how it was served.

    That is `REPLAYED`, `RECORDED`, or the reason why the call took the plain path. The list has the
    plain eager calls of all threads on a GPU. A public function that adds nothing to it calls no
    op, because PyTorch's own functions serve it. Outside of the block no call takes longer.
    """
    calls: list[tuple[str, str]] = []
    serve = Op.eager

    def note(self: Op, first: torch.Tensor, *rest: Any) -> Any:
        if not first.is_cuda or recording.thread.recorder is not None:  # or a part of a call
            return serve(self, first, *rest)
        self.latest = REPLAYED
        result = serve(self, first, *rest)
        calls.append((self.name, self.latest))
        return result

    Op.eager = note  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        Op.eager = serve  # type: ignore[method-assign]


def without_lazy_bits(*args: Any) -> tuple[Any, ...]:
    """Return the arguments with tensors whose memory holds their values.

    Negated views, and tensors of zeros without memory, are resolved by PyTorch.
    """
    return tuple(
        resolved(arg) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
        for arg in args
    )


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy where its memory does not hold its values."""
    if private_names.is_zerotensor(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_neg()


def like(expected: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]) -> Any:
    """Return results in the expected shapes; one that has another shape holds nothing of use."""
    pairs = zip(expected, results, strict=True)
    return tuple(result if result.shape == empty.shape else empty for empty, result in pairs)


def define(
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    gpu: Loader,
    cpu: Loader | None = None,
    name: str | None = None,
    results: int | None = None,
    mutates: str | None = None,
    overwrites: str | None = None,
    check: Callable[..., None] | None = None,
    vmap: Callable[..., Any] | None = None,
    reference_if_empty: bool = False,
    by_identity: Sequence[str] = (),
) -> Op:
    """Register an op and return it.

    The reference declares the op: its name, its arguments in their order, the first of which is a
    tensor, their types and those of the results. A call has the name of the backend as one more
    argument, the last. The functions that serve the op have its name on every backend. They may
    take named tuples, whose fields are arguments of the op one by one.

    `fake` and `check` get the arguments that they name, or all if they take `*args`. A named tuple
    of the reference may be named as one, or by its fields. Where the shapes of the results depend
    on the backend, `fake` names `served_by` too: `reference`, `gpu` or `cpu`.

    Args:
        reference: what the op means, a typed function in plain PyTorch.
        fake: computes the shapes and dtypes of the results.
        gpu: imports the module that has the op's Triton or Gluon kernels, at the first call.
        cpu: imports the module that has its Numba kernels; None where ATen serves the CPU.
        name: the name of the op, if the reference has another one.
        results: the number of tensors, if the reference says `tuple[Tensor, ...]`.
        mutates: the name of the argument that the op writes to.
        overwrites: the name of the argument that takes the tensor that the reference returns. The
            op returns nothing, and its name ends in an underscore.
        check: runs before the op, and never while a graph is traced.
        vmap: the batching rule; it gets the op and what `torch.library.register_vmap` says.
        reference_if_empty: whether the reference serves calls whose first tensor has no elements.
        by_identity: the names of tensors whose values decide what the op does, such as a table of
            edges. A replay serves the same tensor in the same version only.
    """
    kinds, returned = signature(reference)
    if results is not None:
        returned = tuple[(torch.Tensor,) * results]  # type: ignore[misc]
    parameters = flattened(kinds)
    has_tuples = len(parameters) > len(kinds)
    name = name or unwrapped(reference).__name__
    overwritten = None if overwrites is None else list(parameters).index(overwrites)
    if overwrites is not None:
        name, returned, mutates = f"{name}_", type(None), overwrites
    qualified = f"partita::{name}"
    has_cpu = cpu is not None
    fake_by_backend = "served_by" in inspect.signature(fake).parameters
    fake = of_named(fake, {**kinds, "served_by": str}, name)
    check = check and of_named(check, kinds, name)

    @functools.lru_cache(maxsize=256)
    def implementation(backend: str, device: torch.device, empty: bool) -> Callable[..., Any]:
        table = "reference" if empty else resolve(backend, device, has_cpu=has_cpu)
        loader = {"reference": None, "gpu": gpu, "cpu": cpu}[table]
        return reference if loader is None else function_of(loader, name)

    register_cache(f"runtime.register.{name}", implementation.cache_clear)

    def run(first: torch.Tensor, *rest: Any) -> Any:
        *args, backend = rest
        if check is not None:
            check(first, *args)
        empty = reference_if_empty and not first.numel()
        serve = implementation(backend, first.device, empty)
        result = serve(*grouped(kinds, (first, *args))) if has_tuples else serve(first, *args)
        if overwritten is not None and result is not None:  # of the reference
            (first, *args)[overwritten].copy_(result)
            return None
        return like(shapes(first, *rest), result) if empty and fake_by_backend else result

    def shapes(first: torch.Tensor, *rest: Any) -> Any:
        *args, backend = rest
        if fake_by_backend:
            return fake(first, *args, resolve(backend, first.device, has_cpu=has_cpu))
        return fake(first, *args)

    def refuse_derivatives(*args: Any) -> Any:
        """Raise where a transform would bypass the autograd functions and lose the derivative."""
        transformed = private_names.peek_interpreter_stack() is not None
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
        )
        if transformed and needs_grad:
            raise RuntimeError(
                f"{qualified}: no derivative here; compile the function inside of"
                " torch.func.grad, not the transform itself"
            )
        with private_names.AutoDispatchBelowAutograd():
            return dispatched(*args)

    _library.define(name + schema(parameters, returned, mutates))
    _library.impl(name, run, "CompositeExplicitAutograd")
    if private_names.AutoDispatchBelowAutograd is not None:
        _library.impl(name, refuse_derivatives, "Autograd")
    torch.library.register_fake(qualified, shapes, lib=_library)
    dispatched = getattr(torch.ops.partita, name).default
    positions = [list(parameters).index(tensor) for tensor in by_identity]
    op = Op(name, run, dispatched, positions, [*parameters, "backend"])
    if vmap is not None:
        torch.library.register_vmap(qualified, functools.partial(vmap, op), lib=_library)
    return op


def of_named(function: Callable[..., Any], kinds: dict[str, Any], op: str) -> Callable[..., Any]:
    """Return a function of an op's arguments that passes on those that another names.

    It may name a tuple of arguments, or fields of one. Its last parameters may have defaults, and
    other names.
    """
    names = list(flattened(kinds))

    def argument(name: str) -> Callable[[tuple[Any, ...]], Any]:
        fields = getattr(kinds.get(name), "_fields", None)
        if fields is None:
            return itemgetter(names.index(name))
        start, make = names.index(fields[0]), kinds[name]._make
        return lambda args: make(args[start : start + len(fields)])

    known, declared = {*names, *kinds}, inspect.signature(function).parameters.values()
    parameters = [each for each in declared if each.name in known or each.default is each.empty]
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return function
    for each in parameters:
        if each.name not in known:
            raise TypeError(f"{op}: expected one of its arguments {names}, got {each.name!r}")
    chosen = [argument(each.name) for each in parameters]
    return lambda *args: function(*(choose(args) for choose in chosen))


def unwrapped(reference: Callable[..., Any]) -> Any:
    """Return the function in which a partial one, or one that computes by rows, is written."""
    while isinstance(reference, functools.partial):
        reference = reference.func
    return inspect.unwrap(reference)


def signature(reference: Callable[..., Any]) -> tuple[dict[str, Any], Any]:
    """Return the types of the positional arguments of a reference, by name, and of its result.

    A named tuple of tensors is the tuple of its fields.
    """
    types = get_type_hints(unwrapped(reference))
    parameters = inspect.signature(reference).parameters.values()
    positional = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
    results = types["return"]
    if fields := getattr(results, "_fields", None):
        results = tuple[(torch.Tensor,) * len(fields)]  # type: ignore[misc]
    return {name: types[name] for name in positional}, results


def flattened(kinds: dict[str, Any]) -> dict[str, Any]:
    """Return the types of parameters with those of the fields for each named tuple."""
    found: dict[str, Any] = {}
    for name, kind in kinds.items():
        found |= get_type_hints(kind) if hasattr(kind, "_fields") else {name: kind}
    return found


def grouped(kinds: dict[str, Any], args: tuple[Any, ...]) -> Iterator[Any]:
    """Yield arguments of an op as its reference takes them, the fields of a tuple as one."""
    rest = iter(args)
    for kind in kinds.values():
        fields = getattr(kind, "_fields", None)
        yield next(rest) if fields is None else kind._make(itertools.islice(rest, len(fields)))


def schema(parameters: dict[str, Any], results: Any, mutates: str | None) -> str:
    """Return the schema of an op without its name; `str backend` follows the arguments."""

    def prototype() -> None:
        """Stand for the op."""

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = {**parameters, "backend": str}
    prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=of) for name, of in parameters.items()],
        return_annotation=None if results is type(None) else results,
    )
    return torch.library.infer_schema(prototype, mutates_args=[mutates] if mutates else [])


def function_of(loader: Loader, name: str) -> Callable[..., Any]:
    """Return the function of this name in the module, or in one of the modules, of a loader."""
    found = loader()
    modules = found if isinstance(found, tuple) else (found,)
    function: Callable[..., Any] = next(
        getattr(module, name) for module in modules if hasattr(module, name)
    )
    return function
