"""The layout of the package: the imports between modules, and the look of source files."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import partita

SOURCE = Path(partita.__file__).parent
ROOT = Path(__file__).parents[2]
FILES = sorted(SOURCE.rglob("*.py"))
TEXTS = [*FILES, *sorted(ROOT.glob("tests/**/*.py")), *sorted(ROOT.glob("examples/*.py"))]
TEXTS += sorted(ROOT.glob("docs/**/*.py"))

FAMILIES = {path.name for path in (SOURCE / "ops").iterdir() if (path / "__init__.py").exists()}

# A layer (reference, gpu, cpu) of the first family may import the same layer of the second.
ARROWS = {
    ("cross_entropy", "softmax"),
    ("linear_heads", "cross_entropy"),
    ("logprobs", "cross_entropy"),
    ("truncated", "cross_entropy"),
    ("divergence", "cross_entropy"),
    ("linear_heads", "logprobs"),
    ("linear_heads", "divergence"),
    ("linear_heads", "truncated"),
    ("vocab_parallel", "cross_entropy"),
    ("vocab_parallel", "linear_heads"),
    ("linear_chain", "chain"),
    ("semi_markov", "chain"),
    ("ctc", "chain"),
    ("ctc_crf", "chain"),
    ("rnnt", "ctc"),
    ("decode", "logprobs"),
    ("decode", "chain"),
}
BACKEND_LAYERS = ("reference", "gpu", "cpu")
SHARED = ("common", "plan")  # what all layers of a family, and other families, may import
PUBLISHED = ("api", "autograd", "edges")  # what the host code of other families may import too


class Import(NamedTuple):
    """One name that a module imports from the package.

    Fields:
        module: the module that is imported, as its parts below the package.
        name: the name that is taken from it, or None for the module itself.
        at_top: whether it is imported with the module, and not inside of a function.
    """

    module: tuple[str, ...]
    name: str | None
    at_top: bool


def is_module(parts: tuple[str, ...]) -> bool:
    path = SOURCE.joinpath(*parts)
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def module_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Return what a file imports from the package, which has to be relative."""
    found = []
    tree = tree_of(path)
    inner = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.partition(".")[0] == "partita" for alias in node.names)
        if not isinstance(node, ast.ImportFrom):
            continue
        if not node.level:
            assert (node.module or "").partition(".")[0] != "partita", "import relatively"
            continue
        package = path.relative_to(SOURCE).parent.parts
        base = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
        base = tuple(part for part in base if part)
        for alias in node.names:
            whole = (*base, alias.name)
            module, name = (whole, None) if is_module(whole) else (base, alias.name)
            found.append(Import(module, name, node not in inner))
    return tuple(found)


def layer_of(parts: tuple[str, ...]) -> str:
    """Return the layer of a module of a family."""
    layer = parts[2] if len(parts) > 2 else ""
    return next((name for name in BACKEND_LAYERS if layer.startswith(name)), layer)


def allowed(importer: tuple[str, ...], found: Import) -> bool:
    """Return whether the module `importer` may import another one in this way."""
    module = found.module
    top = importer[0] if importer else ""
    target = module[0] if module else ""
    if top == "runtime":
        return target == "runtime"
    if top == "primitives":
        return target in ("runtime", "primitives")
    if top == "paths":
        return target in ("runtime", "primitives", "paths")
    if (top, target) == ("cli", "bench"):  # which imports the command's parts
        return False
    if target != "ops":
        return target in ("runtime", "primitives", "paths") if top == "ops" else True
    if top != "ops":  # the namespaces, the command, the benchmark and the integrations
        return layer_of(module) not in BACKEND_LAYERS
    family, layer, other, other_layer = importer[1], layer_of(importer), module[1], layer_of(module)
    is_plan = module[2:] == ("gpu", "plan")  # pure functions of sizes
    if layer in ("gpu", "cpu"):
        same = other_layer == layer and (family == other or (family, other) in ARROWS)
        own = family == other and other_layer not in (*BACKEND_LAYERS, *PUBLISHED)
        return same or own or other_layer in SHARED or is_plan
    if layer == "reference":
        same = other_layer == layer and (family == other or (family, other) in ARROWS)
        return same or other_layer not in (*BACKEND_LAYERS, *PUBLISHED)
    if other_layer == "reference":  # the second derivatives of autograd functions
        return family == other or (family, other) in ARROWS
    if family != other:
        return other_layer in (*PUBLISHED, *SHARED)
    # Kernels load at the first call that needs them, so they are imported inside of a function.
    return other_layer not in ("gpu", "cpu") or is_plan or not found.at_top


def test_imports_follow_the_layout() -> None:
    own_kernels = ("bench", "read_kernel")  # the benchmark times a kernel of its own
    refused = [
        (name_of(path), ".".join(found.module))
        for path in FILES
        for found in imports(path)
        if not allowed(module_of(path), found) and found.module != own_kernels
    ]
    assert not refused


def test_public_modules_are_no_helper_libraries() -> None:
    """Only public names are imported from a public module of the ops."""
    public = {*partita.__all__, *partita.parallel.__all__, "Lengths"}
    helpers = [
        (name_of(path), f"{'.'.join(found.module)}.{found.name}")
        for path in FILES
        for found in imports(path)
        if found.module[:1] == ("ops",)
        and found.module[-1:] == ("api",)
        and module_of(path)[:2] != found.module[:2]
        and found.name not in public
    ]
    assert not helpers


def test_imports_have_no_cycles() -> None:
    graph = defaultdict(set)
    for path in FILES:
        graph[module_of(path)] |= {found.module for found in imports(path) if found.at_top}
    done: set[tuple[str, ...]] = set()

    def visit(module: tuple[str, ...], trail: tuple[tuple[str, ...], ...]) -> None:
        assert module not in trail, " -> ".join(".".join(each) for each in (*trail, module))
        if module not in done:
            for other in sorted(graph.get(module, ())):
                if other:  # the root package
                    visit(other, (*trail, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_one_file_touches_torch_library() -> None:
    users = [
        str(path.relative_to(SOURCE))
        for path in FILES
        if "torch.library" in path.read_text(encoding="utf-8")
    ]
    assert users == ["runtime/register.py"]


def test_caches_are_bounded_and_registered() -> None:
    """`clear_caches` empties all caches, so a module registers each cache that it makes."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        unbounded = re.search(r"@(functools\.)?cache\b", text)
        assert not unbounded or path.name == "backend.py", name_of(path)
        made = len(re.findall(r"lru_cache\(|WeakTensorKeyDictionary\(\)", text))
        assert text.count("register_cache(") >= made, name_of(path)


def test_kernels_are_not_looked_up_by_a_string() -> None:
    pattern = re.compile(r"getattr\([^)]*\bf[\"']|import_module\([^)]*(\bf[\"']|\+)")
    allowed_files = {"__init__.py", "integrations/__init__.py", "bench/cli.py"}
    found = [
        str(path.relative_to(SOURCE))
        for path in FILES
        if pattern.search(path.read_text(encoding="utf-8"))
    ]
    assert set(found) <= allowed_files


def test_families_have_empty_package_files() -> None:
    filled = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.glob("ops/**/__init__.py")
        if path.read_text(encoding="utf-8").strip()
    ]
    assert not filled
    assert {"softmax", "cross_entropy", "linear_heads", "chain", "ctc"} <= FAMILIES


def test_formatting_is_seldom_switched_off() -> None:
    switch = "fmt:" + " skip"
    assert sum(path.read_text(encoding="utf-8").count(switch) for path in TEXTS) < 10
