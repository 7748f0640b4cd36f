"""The package changes no other library and no setting of the interpreter in a user's process."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import partita

SOURCE = Path(partita.__file__).parent
# What an attribute may be assigned to: an object of the package's own, by the name of its variable.
OWN = {"self", "cls", "ctx", "Op", "RNNTLoss", "_object", "forward", "parser", "results", "state"}
OWN |= {"CRF", "thread", "moved"}
EXCEPTIONS = {
    ("runtime/register.py", "prototype.__signature__"): "a function that the package makes",
    ("integrations/fused_head.py", "model.forward"): "the user gives the model to `fuse`",
    ("integrations/fused_head.py", "model.loss_function"): "the user gives the model to `fuse`",
    ("integrations/fused_head.py", "setattr"): "the user gives the model to `fuse`",
    ("integrations/fused_head.py", "delattr"): "the user gives the model to `fuse`",
    ("integrations/trl.py", "setattr"): "the user calls `patch`, and `unpatch` restores it",
    ("cli/warm.py", "knobs.compilation.listener"): "`partita warm` counts kernels, in a scope",
    ("cli/digest.py", "torch.set_num_threads"): "`partita check --digest`, in a block",
    ("testing/compare.py", "_settings.fill_uninitialized_memory"): "poisoned memory, in a block",
    ("testing/compare.py", "torch.use_deterministic_algorithms"): "poisoned memory, in a block",
    ("bench/parallel.py", "torch.manual_seed"): "processes that the benchmark starts",
    ("bench/hmm.py", "setattr"): "models that the benchmark makes, of either library",
    ("bench/heads.py", "identity.semantic_value_key"): "the peer QuACK, if it is measured",
    ("bench/linear_chain.py", "setattr"): "a module of the peer pytorch-crf",
    ("bench/linear_chain.py", "delattr"): "a module of the peer pytorch-crf",
}
# Functions that set something for the whole process; filters of warnings only inside of a block.
SETTERS = {
    *(f"sys.{name}" for name in ("setswitchinterval", "setrecursionlimit", "settrace")),
    *(f"torch.{name}" for name in ("manual_seed", "set_num_threads", "set_default_dtype")),
    *("torch.set_default_device", "torch.use_deterministic_algorithms", "os.putenv"),
    *(f"gc.{name}" for name in ("disable", "enable", "freeze", "collect", "set_threshold")),
    *("setattr", "delattr"),
}
FILTERS = {"simplefilter", "filterwarnings", "resetwarnings"}


def targets(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a statement assigns to or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        found = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    else:
        return
    for target in found:
        yield from target.elts if isinstance(target, ast.Tuple) else [target]


def changes(source: str) -> set[str]:
    """Return what a module changes beyond its own objects."""
    tree = ast.parse(source)
    found = set()
    allowed = {
        id(inner)
        for block in ast.walk(tree)
        if isinstance(block, ast.With)
        and any("catch_warnings" in ast.unparse(item) for item in block.items)
        for inner in ast.walk(block)
    }
    for node in ast.walk(tree):
        for target in targets(node):
            if isinstance(target, ast.Attribute) or "environ[" in ast.unparse(target):
                root = ast.unparse(target).partition(".")[0]
                if root not in OWN:
                    found.add(ast.unparse(target))
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_filter = name.rpartition(".")[2] in FILTERS and id(node) not in allowed
            if name in SETTERS or is_filter:
                found.add(name)
    return found


def test_nothing_of_others_is_changed_but_for_the_exceptions() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in SOURCE.rglob("*.py")
        for name in changes(path.read_text(encoding="utf-8"))
    }
    assert found == set(EXCEPTIONS)


@pytest.mark.parametrize(
    "code",
    [
        "import inspect\ninspect.getsourcelines = None",
        "def f(kernel):\n    kernel.ASTSource = 1",
        "import gc\ngc.disable()",
        "import sys\nsys.setswitchinterval(1e-4)",
        "import warnings\nwarnings.simplefilter('ignore')",
        "import os\nos.environ['A'] = 'b'",
        "import torch\nsetattr(torch, 'softmax', None)",
    ],
)
def test_a_change_is_seen(code: str) -> None:
    assert changes(code)


def test_a_filter_inside_of_a_block_is_none() -> None:
    code = "import warnings\nwith warnings.catch_warnings():\n    warnings.simplefilter('ignore')"
    assert not changes(code)
