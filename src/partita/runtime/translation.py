"""The translation of kernels from Python: the part of a first call that cannot run in parallel.

Triton's front end is Python, which holds the GIL. Here kernels are translated one after another, in
the order in which they are needed. In versions of Triton that this package knows, two things make
it shorter. Operations do not get a location in the source each: they carry that of their function,
which also shortens the later stages. And while threads prepare what else the compiler needs, the
thread that waits for them translates the first kernels.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import launcher
from .caches import BoundedCache, register_cache

_numbers = itertools.count()  # of sources, in the order in which they are submitted
# Kernels that are translated, but not yet compiled, by target, source and options. A kernel that is
# in Triton's cache after all stays here.
_translated: BoundedCache[tuple[Any, str, str], Any] = BoundedCache(16)
register_cache("runtime.translation.translated", _translated.clear)
_usual_methods: dict[str, Any] = {}  # those of Triton, while `_plain_visits` replaces them


class Turns:
    """A lock that goes to the waiting thread with the least number."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: list[int] = []
        self.is_taken = False

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """Wait for the turn of a number, and have the lock in the block."""
        with self._condition:
            self._waiting.append(number)
            while self.is_taken or min(self._waiting) != number:
                self._condition.wait()
            self._waiting.remove(number)
            self.is_taken = True
        try:
            yield
        finally:
            with self._condition:
                self.is_taken = False
                self._condition.notify_all()


_turns = Turns()


@functools.lru_cache(maxsize=16)
def in_turn(source: type) -> type:
    """Return a class of sources that Triton translates from Python one after another.

    They keep the order in which they are made. This part of the compiler is Python, so threads
    would only take it from each other: the first kernel would get to the parallel part when the
    last one does. It also changes the filters of warnings, which is not safe in several threads.
    """
    if getattr(source, "takes_turns", False):
        return source

    class SourceInTurn(source):  # type: ignore[misc]
        takes_turns = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.number = next(_numbers)

        def make_ir(self, target: Any, options: Any, *args: Any) -> Any:
            found = _translated.pop((target, self.hash(), options.hash()), None)
            if found is not None:
                return found
            with _turns.turn(self.number), _plain_visits():
                return super().make_ir(target, options, *args)

    return SourceInTurn


register_cache("runtime.translation.sources", in_turn.cache_clear)


def translate_ahead(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Translate a kernel for the current device, and keep the result for its compilation.

    Triton's driver is not needed for this, which is compiled meanwhile if the cache is empty.
    """
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    major, minor = torch.cuda.get_device_capability()
    target = GPUTarget("cuda", 10 * major + minor, 32)
    backend = make_backend(target)
    # These two options and what follows are as in `JITFunction.run`.
    debug = options.get("debug", kernel.debug) or triton.knobs.runtime.debug
    mode = triton.knobs.compilation.instrumentation_mode
    given = {**options, "debug": debug, "instrumentation_mode": mode}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, chosen = bind(*args, **given)
    chosen, *parts = kernel._pack_args(backend, given, bound, specialization, chosen)
    source = in_turn(GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *parts)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(chosen), backend.get_module_map()
    translated = source.make_ir(target, chosen, functions, modules, context)
    _translated.store((target, source.hash(), chosen.hash()), translated)


def _visit(generator: Any, node: Any) -> Any:
    """Translate a node of the syntax tree.

    Triton's method also sets the location of the node, and the filters of warnings. Both take
    longer than the translation of most nodes.
    """
    from triton.compiler.errors import CompilationError

    if node is None:
        return None
    outer, generator.cur_node = generator.cur_node, node
    try:
        result = ast.NodeVisitor.visit(generator, node)
    except CompilationError:
        raise
    except Exception as error:
        raise CompilationError(generator.jit_fn.src, generator.cur_node, repr(error)) from None
    generator.cur_node = outer
    return result


def _leave_location(generator: Any, value: Any, name: str) -> None:
    """Do not add the name of a variable to the location of its value."""


@contextmanager
def _plain_visits() -> Iterator[None]:
    """Translate in this block without the location of each node, where Triton is known.

    Kernels that other threads translate meanwhile get the same code.
    """
    import triton

    if not launcher.is_known_triton() or triton.knobs.compilation.front_end_debugging:
        yield
        return
    from triton.compiler.code_generator import CodeGenerator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        replaced = {"visit": _visit, "_maybe_set_loc_to_name": _leave_location}
        _usual_methods.update({name: getattr(CodeGenerator, name) for name in replaced})
        try:
            for name, method in replaced.items():
                setattr(CodeGenerator, name, method)
            yield
        finally:
            _restore()


def _restore() -> None:
    """Give Triton its methods back."""
    if _usual_methods:
        from triton.compiler.code_generator import CodeGenerator

        for name, method in _usual_methods.items():
            setattr(CodeGenerator, name, method)
        _usual_methods.clear()


def _forget_threads() -> None:
    """Forget what threads were doing, which a forked process does not have."""
    global _turns
    _turns = Turns()
    _restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
