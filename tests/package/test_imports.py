"""The modules that `import partita` loads, in fresh processes from a source tree."""

import os
import subprocess
import sys

import pytest
from helpers.fresh import SOURCE, run_fresh

HEAVY = (
    "triton",
    "numba",
    "matplotlib",
    "numpy.testing",
    "hypothesis",
    "torch._dynamo",
    "torch._inductor",
    "sympy",
)


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


def test_import_adds_nothing_heavy_to_torch() -> None:
    code = f"""
import sys, torch
before = set(sys.modules)
import partita
print([name for name in {HEAVY!r} if name in sys.modules and name not in before])
"""
    assert run(code) == "[]"


def test_import_adds_only_torch_and_the_package_itself() -> None:
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


def test_it_runs_where_triton_and_numba_are_not_installed() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "numba", "matplotlib", "numpy"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch, partita
x = torch.zeros(2, 2, requires_grad=True)
partita.cross_entropy(x, torch.tensor([0, 1])).backward()
print(x.grad.tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[-0.25, 0.25], [0.25, -0.25]]"


def test_an_unknown_attribute_is_named() -> None:
    code = """
import partita
try:
    partita.softmin
except AttributeError as error:
    print(error)
"""
    assert run(code) == "module 'partita' has no attribute 'softmin'"


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
