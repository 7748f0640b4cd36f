"""The source lines of device functions are those that `inspect` finds."""

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

pytest.importorskip("triton")
from helpers.fresh import run_fresh
from triton.runtime.jit import JITFunction

import partita
from partita.runtime import sources
from partita.runtime.backend import Backends

ROOT = Path(partita.__file__).parent
USUAL = inspect.getsourcelines
KERNELS = sorted([*ROOT.glob("ops/*/gpu/*.py"), *ROOT.glob("primitives/gpu/*.py")])


def module_of(path: Path) -> Any:
    name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
    return importlib.import_module(name.removesuffix(".__init__"))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_device_functions_have_the_usual_lines(path: Path) -> None:
    module = module_of(path)
    values = [
        value.fn if isinstance(value, JITFunction) else value for value in vars(module).values()
    ]
    functions = [value for value in values if isinstance(value, FunctionType)]

    def refuse(object: Any) -> Any:
        raise AssertionError(f"{object} was not found by the parse")

    quick = sources._finder(refuse)
    for function in functions:
        if function.__module__ == module.__name__ and not hasattr(function, "__wrapped__"):
            assert quick(function) == USUAL(function)


def test_others_are_found_as_usual() -> None:
    def nested() -> None:
        pass

    asked: list[Any] = []

    def usual(object: Any) -> tuple[list[str], int]:
        asked.append(object)
        return USUAL(object)

    others = [nested, USUAL, Path, sources._finder, functools.lru_cache(sources._functions)]
    quick = sources._finder(usual)
    for each in others:
        assert quick(each) == USUAL(each)
    assert asked == [each for each in others if each is not sources._finder]


def test_a_loader_of_kernels_finds_them_quickly() -> None:
    found: list[Callable[..., Any]] = []

    def load() -> dict[str, Callable[..., Any]]:
        found.append(inspect.getsourcelines)
        with sources.quick_sources():  # a block in a block changes nothing
            found.append(inspect.getsourcelines)
        return {}

    backends = Backends(reference=load, gpu=load)
    backends.functions("gpu")
    backends.functions("reference")
    assert found[0] is found[1] is not USUAL
    assert found[2] is USUAL and inspect.getsourcelines is USUAL


def test_the_usual_function_comes_back_after_an_error() -> None:
    with pytest.raises(ImportError), sources.quick_sources():
        raise ImportError
    assert inspect.getsourcelines is USUAL


def test_a_file_that_has_changed_is_left_to_the_usual_function(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def f(:\n")
    assert sources._functions(str(path)) == {}
    assert sources._functions(str(tmp_path / "absent.py")) == {}


def test_kernels_have_the_same_keys() -> None:
    """The cache of a process that found the lines as usual serves one that found them quickly."""
    code = """
from partita.runtime import sources
{block}:
    from partita.ops.ctc.gpu.posterior_scan import ctc_posterior_scan_kernel
print(ctc_posterior_scan_kernel.cache_key)
"""
    keys = [
        run_fresh(code.format(block=block)).stdout
        for block in ("with sources.quick_sources()", "if True")
    ]
    assert keys[0] == keys[1] != ""
