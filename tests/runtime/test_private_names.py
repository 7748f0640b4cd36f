"""Private names of other packages stand in one file, and every op works without each of them."""

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.fresh import run_fresh

import partita
from partita.ops.vocab_parallel.shard import PlainCollectives, collectives
from partita.runtime import backend, private_names

SOURCE = Path(partita.__file__).parent
PUBLIC: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": (
        *("triton.knobs", "triton.language", "triton.testing", "triton.experimental.gluon"),
        "triton.tools.tensor_descriptor",
    ),
    "numba": (
        *("numba.types", "numba.njit", "numba.extending", "numba.TypingError"),
        "numba.core.compiler",  # Numba's manual customizes the compiler by this module
    ),
}
NAMEDTUPLE = {"_replace", "_fields", "_asdict", "_make"}
# Attributes of Python's own objects, and of packages that the benchmark is compared with.
OTHERS = {
    ("runtime/backend.py", "_getframe"),
    ("cli/fresh_process.py", "_exit"),
    ("bench/ctc.py", "_fwd_bwd_cupy"),
    ("bench/ctc.py", "_Logz"),
    ("bench/linear_chain.py", "_compute_normalizer"),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """Return the private names that the package defines itself."""
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
                found.add(node.attr)
    return found


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the full names that a statement imports from elsewhere."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [] if node.level else [f"{node.module}.{alias.name}" for alias in node.names]


def is_internal(whole: str) -> bool:
    """Return whether a name, with its module, is no public one of PyTorch, Triton or Numba."""
    package = whole.partition(".")[0]
    return package in PUBLIC and (
        any(map(is_private, whole.split(".")))
        or not (whole == package or whole.startswith(PUBLIC[package]))
    )


def private_names_in(text: str, own: set[str]) -> Iterator[str]:
    """Yield the private names of other packages that a source text reads."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from filter(is_internal, imported_names(node))
            continue
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            name = ast.unparse(node.args[1]).strip("'")
        if is_private(name) and name not in own:
            yield name


def test_private_names_are_read_in_one_file() -> None:
    own = own_names() | NAMEDTUPLE
    found = {
        (name, private)
        for path in SOURCE.rglob("*.py")
        if (name := str(path.relative_to(SOURCE))) != "runtime/private_names.py"
        for private in private_names_in(path.read_text(encoding="utf-8"), own)
    }
    assert found == OTHERS


def test_a_private_name_is_found() -> None:
    for text, name in (
        ("torch._C.f()", "_C"),
        ("getattr(tensor, '_version')", "_version"),
        ("from torch._C import f", "torch._C.f"),
        ("import torch.utils._pytree", "torch.utils._pytree"),
        ("from triton.runtime import driver", "triton.runtime.driver"),
        ("from numba.core import errors", "numba.core.errors"),
    ):
        assert list(private_names_in(text, set())) == [name]


# Forks of one process, which import the package without one name each. What is removed is back
# before the ops run, because PyTorch needs it.
WITHOUT = """
import os, sys, traceback, torch, torch._decomp.decompositions_for_jvp, torch._dynamo
import torch.nn.functional as F
from contextlib import contextmanager
from torch.autograd.forward_ad import dual_level, make_dual
from torch.func import grad, vmap

class Missing:
    def __get__(self, *_):
        raise AttributeError("removed")

@contextmanager
def without(path):
    owner, (*parts, name) = torch, path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    if owner is torch.Tensor:  # the attribute is one of a class that is written in C
        setattr(owner, name, Missing())
        yield
        delattr(owner, name)
    elif hasattr(owner, name):
        value = getattr(owner, name)
        delattr(owner, name)
        yield
        setattr(owner, name, value)
    else:  # a build of PyTorch for the CPU has less
        yield

x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
labels, targets = torch.tensor([1, 0, 4]), torch.tensor([[1, 2], [3, 0], [4, 4]])
lengths = torch.tensor([4, 3, 4]), torch.tensor([2, 1, 2])
ones = torch.ones(3)

def check(partita, device):
    def capped(logits):
        return partita.cross_entropy(logits, labels.to(device), softcap=2.0)

    def expected_capped(logits):
        return F.cross_entropy(2 * (logits / 2).tanh(), labels)

    def ctc(logits):
        options = {"from_logits": True, "reduction": "sum"}
        return partita.ctc_loss(logits, targets.to(device), *lengths, **options)

    def expected_ctc(logits):
        return F.ctc_loss(logits.log_softmax(-1), targets, *lengths, reduction="sum")

    def logz(logits):
        scores = logits[..., :4].reshape(4, 3, 2, 2)
        return partita.logz(scores, partita.dense_source(2).to(device)).sum()

    def expected_logz(logits):
        state = torch.zeros(3, 2, dtype=logits.dtype)
        for step in logits[..., :4].reshape(4, 3, 2, 2):
            state = (state[:, None] + step).logsumexp(-1)
        return state.logsumexp(-1).sum()

    for f, g, exact in (
        (capped, expected_capped, x[0].double()),
        (ctc, expected_ctc, x.double()),
        (logz, expected_logz, x.double()),
    ):
        input, exact = exact.float().to(device).requires_grad_(), exact.requires_grad_()
        loss, expected = f(input), g(exact)
        close(loss, expected)
        twice = f is not ctc  # PyTorch's has no second derivative
        found, = torch.autograd.grad(loss, input, create_graph=True)
        truth, = torch.autograd.grad(expected, exact, create_graph=twice)
        close(found, truth)
        if twice:
            found, = torch.autograd.grad(found.square().sum(), input)
            close(found, *torch.autograd.grad(truth.square().sum(), exact))
        batch = torch.autograd.grad(f(input), input, ones.to(device), is_grads_batched=True)[0]
        close(batch, truth.expand_as(batch))
        input, exact = input.detach(), exact.detach()
        for _ in range(3):  # on a GPU the third call is a replay
            close(f(input), expected)
        close(grad(f)(input), truth)
        close(vmap(f)(torch.stack([input, -input])), torch.stack([g(exact), g(-exact)]))
        with dual_level():
            try:
                f(make_dual(input, input))
            except (NotImplementedError, RuntimeError):
                continue
        raise AssertionError("a tangent is lost")
    each = [grad(expected_capped)(logits) for logits in x.double()]
    close(vmap(grad(capped))(x.to(device)), torch.stack(each))
    leaf, exact = x[0].clone().to(device).requires_grad_(), x[0].double().requires_grad_()
    partita.cross_entropy(leaf + 0, labels.to(device), inplace=True).backward()
    F.cross_entropy(exact, labels).backward()
    close(leaf.grad, exact.grad)
    close(partita.softmax(leaf, -1), exact.softmax(-1))

def close(found, truth):
    torch.testing.assert_close(found.detach().cpu().double(), truth.detach(), rtol=1e-4, atol=1e-5)

for path in PATHS:
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(path if code else "")
        continue
    try:
        with without(path):
            import partita.runtime.private_names
        assert not partita.runtime.private_names.NAMES[path]
        check(partita, DEVICE)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
"""
# Calls on a CPU look at none of these, and calls in one process at none of the second.
OF_GPUS = ("cuda.", "_C._cuda", "_C._dynamo", "_C._autograd")
OF_RANKS = ("distributed.", "_C._distributed")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ops_do_without_each_name(device: str) -> None:
    paths = [path for path in private_names.NAMES if not path.startswith(OF_RANKS)]
    paths = [path for path in paths if path.startswith(OF_GPUS) == (device == "cuda")]
    assert len(paths) > 3
    code = f"PATHS, DEVICE = {paths}, {device!r}\n{WITHOUT}"
    chosen = {"PARTITA_BACKEND": "reference"} if device == "cpu" else {}
    done = run_fresh(code, {**os.environ, "PYTHONPATH": str(SOURCE.parent), **chosen})
    assert done.code == 0 and not done.stdout.split(), done.stdout + done.stderr


@pytest.mark.parametrize(
    "path", [path for path in private_names.NAMES if path.startswith(OF_RANKS)]
)
def test_ranks_gather_without_each_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _, name = f"torch.{path}".rpartition(".")
    monkeypatch.delattr(sys.modules[owner], name)
    spec = importlib.util.find_spec(private_names.__name__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert private_names.CAN_SHARE_MEMORY and not fresh.CAN_SHARE_MEMORY


def test_plain_collectives_serve_without_those_that_compilers_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks of `test_parallel` compare both."""
    assert collectives() is torch.ops._c10d_functional
    monkeypatch.setitem(sys.modules, "torch.distributed._functional_collectives", None)
    assert collectives() is PlainCollectives


def test_no_binary_is_loaded_without_triton_s_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "triton.runtime.driver", None)
    assert private_names.load_binary("kernel", b"", 0, 0) is None


def test_a_numba_whose_arrays_moved_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setitem(sys.modules, "numba.np.arrayobj", None)
    backend.numba_problem.cache_clear()
    try:
        assert "the package numba cannot be imported" in (backend.numba_problem() or "")
    finally:
        backend.numba_problem.cache_clear()


def test_functions_count_references_where_numba_has_no_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = pytest.importorskip("numba.core.options")
    assert private_names.numba_without_counts() == {"_nrt": False}
    monkeypatch.delattr(options.DefaultOptions, "_nrt")
    assert private_names.numba_without_counts() == {}
