"""Docstrings of public names have shapes, units, errors, a source and an example that runs."""

import doctest
import importlib
from collections import Counter

import pytest
from helpers.docstrings import (
    ALIASES,
    BY_NAME,
    CONSTANTS,
    EXCEPTIONS,
    MODULES,
    NEEDS,
    PUBLIC,
    RULES,
    Public,
    doc_of,
    names_of,
    problems,
)


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.name)
def test_docstring(public: Public) -> None:
    rules = [rule for rule in RULES[public.kind] if (public.name, rule.__name__) not in EXCEPTIONS]
    assert [problem for rule in rules for problem in problems(public, rule)] == []


@pytest.mark.parametrize(
    "public",
    [public for public in PUBLIC if ">>>" in doc_of(public)],
    ids=lambda public: public.name,
)
def test_example(public: Public) -> None:
    test = doctest.DocTestParser().get_doctest(doc_of(public), {}, public.name, None, 0)
    if public.name in NEEDS:
        pytest.importorskip(NEEDS[public.name], exc_type=ImportError)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    printed: list[str] = []
    runner.run(test, out=printed.append)
    assert runner.tries > 0
    assert not runner.failures, "".join(printed)


@pytest.mark.parametrize(("name", "rule"), EXCEPTIONS, ids=lambda value: value)
def test_an_exception_is_needed(name: str, rule: str) -> None:
    (needed,) = [each for each in RULES[BY_NAME[name].kind] if each.__name__ == rule]
    assert problems(BY_NAME[name], needed)


def test_as_many_names_are_checked_as_are_public() -> None:
    exported = sum(len(names_of(importlib.import_module(path))) for path in MODULES)
    of_classes = Counter(public.kind for public in PUBLIC)
    members = sum(of_classes[kind] for kind in ("method", "method of a module", "property"))
    # And `partita`, `MemoryPlan` and `RNNTPlan`.
    assert len(BY_NAME) == len(PUBLIC) == exported + members + 3
    assert set(of_classes) == set(RULES)
    assert {public.name for public in PUBLIC if public.kind == "constant"} == set(CONSTANTS)
    assert {public.name for public in PUBLIC if public.kind == "alias"} == set(ALIASES)
