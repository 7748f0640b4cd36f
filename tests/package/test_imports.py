"""The modules that `import partita` loads, in fresh processes from a source tree."""

import os

import pytest
from helpers.errors import raises
from helpers.fresh import SOURCE, run_fresh

import partita

ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": str(SOURCE),
    "PYTHONDONTWRITEBYTECODE": "1",
}


def run(code: str) -> str:
    """Return what the code prints in a process that has imported PyTorch alone."""
    done = run_fresh(code, ENVIRONMENT)
    assert done.code == 0, done.stderr
    return done.stdout.strip()


def test_import_adds_only_torch_and_the_package_itself() -> None:
    """No other package is loaded, and no part of PyTorch that `import torch` does not load."""
    code = """
import sys, torch
before = set(sys.modules)
import partita
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(added - set(sys.stdlib_module_names)))
"""
    assert run(code) == "['partita']"


def test_the_optional_parts_are_there_after_the_import_and_load_on_use() -> None:
    code = """
import sys, partita
names = ("hmm", "integrations", "nn", "testing", "ops.softmax.gpu.launch")
print(["partita." + name in sys.modules for name in names])
print(partita.nn.CrossEntropyLoss.__name__, partita.testing.sample_rows.__name__)
print(any(".gpu." in name for name in sys.modules if name.startswith("partita.ops.softmax")))
print("partita.integrations.koi" in sys.modules, partita.integrations.koi.logZ_cu.__name__)
"""
    assert run(code).splitlines() == [
        "[False, False, False, False, False]",
        "CrossEntropyLoss sample_rows",
        "False",
        "False logZ_cu",
    ]


def test_calls_on_the_cpu_load_no_triton() -> None:
    code = """
import sys, torch, partita
x = torch.randn(4, 7, requires_grad=True)
partita.cross_entropy(x, torch.tensor([0, 1, 2, 3])).backward()
partita.softmax(x), partita.logsumexp(x)
partita.token_stats(x, torch.tensor([0, 1, 2, 3])), partita.testing.sample_rows(2, 2)
print([m for m in ("triton", "numba", "matplotlib") if m in sys.modules])
"""
    assert run(code) == "[]"


def test_an_unknown_attribute_is_named() -> None:
    with raises("AttributeError: module 'partita' has no attribute 'softmin'$"):
        partita.softmin  # noqa: B018


MODULES = [
    "runtime.backend",
    "ops.softmax.api",
    "ops.ctc_crf.api",
    "ops.cross_entropy.api",
    "ops.cross_entropy.reference",
    "ops.linear_heads.plan",
    "ops.ctc.gpu.plan",
    "integrations.koi",
    "hmm",
    "nn",
    "parallel",
    "testing",
]


@pytest.mark.parametrize("module", MODULES)
def test_each_module_can_be_the_first_import(module: str) -> None:
    code = f"""
import importlib, sys
assert not any(name.startswith("partita") for name in sys.modules)
print(importlib.import_module("partita.{module}").__name__)
"""
    assert run(code) == f"partita.{module}"
