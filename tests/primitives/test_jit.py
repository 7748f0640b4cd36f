"""The machine code of the CPU kernels stays on disk, and never outlives the sources."""

import importlib
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
import numba

from partita.primitives.cpu import jit as jit_module
from partita.primitives.cpu.jit import ONE, STAMP, discard_stale_code, jit, sources_hash
from partita.runtime.caches import clear_caches

CALLEE = """
from partita.primitives.cpu.jit import jit

@jit
def scaled(x):
    return {factor} * x
"""
CALLER = """
from partita.primitives.cpu.jit import jit
from kernels_of_test.callee.cpu import scaled

@jit
def total(x):
    return scaled(x) + 1.0
"""


def add(a: float, b: float) -> float:
    return a + b


def hits() -> int:
    """Compile `add` as another process would, and return how often its code was on disk."""
    dispatcher = jit(add)
    assert dispatcher(1.0, 2.0) == 3.0
    return sum(dispatcher.stats.cache_hits.values())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a package of which one kernel calls a function of another file."""
    package = tmp_path / "kernels_of_test"
    for file, text in (("callee/cpu.py", CALLEE.format(factor=2.0)), ("caller/cpu.py", CALLER)):
        (package / file).parent.mkdir(parents=True)
        (package / file).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(jit_module, "PACKAGE", package)
    return package


def call_in_package() -> tuple[float, int]:
    """Import the package as another process would; return the total of 10 and the hits on disk."""
    clear_caches()
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.startswith("kernels_of_test")]:
        del sys.modules[name]
    total = importlib.import_module("kernels_of_test.caller.cpu").total
    return total(10.0), sum(total.stats.cache_hits.values())


def test_another_process_finds_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert [hits(), hits(), hits()] == [0, 1, 1]


@pytest.mark.parametrize("in_user_folder", [False, True])
def test_a_change_of_a_function_in_another_file_makes_the_code_stale(
    package: Path, in_user_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "user") if in_user_folder else "")
    assert [call_in_package(), call_in_package()] == [(21.0, 0), (21.0, 1)]
    (package / "callee/cpu.py").write_text(CALLEE.format(factor=3.0))
    assert [call_in_package(), call_in_package()] == [(31.0, 0), (31.0, 1)]
    # Code without a stamp may be of any sources.
    [stamp] = [file for file in tmp_path.rglob(STAMP) if "caller" in str(file.parent)]
    stamp.unlink()
    assert [call_in_package(), call_in_package()] == [(31.0, 0), (31.0, 1)]


def test_the_sources_are_all_files_with_kernels(package: Path) -> None:
    of_package = sources_hash(package)
    for name, counts in (("other.py", False), ("a/cpu/steps.py", True), ("b/cpu.py", True)):
        sources_hash.cache_clear()
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
        assert (sources_hash(package) != of_package) == counts
        of_package = sources_hash(package)
    for file in Path(jit_module.__file__).parents[2].rglob("*.py"):
        if re.search(r"^from \S*(cpu|)\.jit import", file.read_text(), re.MULTILINE):
            assert file.name == "cpu.py" or file.parent.name == "cpu"


def test_without_a_folder_to_write_to(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    discard_stale_code(package / "callee/cpu.py/no_folder", package)
    folder = package / "stored"
    folder.mkdir()
    (folder / "code.nbi").touch()

    def refuse(path: Path, missing_ok: bool) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "unlink", refuse)
    discard_stale_code(folder, package)
    assert [file.name for file in folder.iterdir()] == ["code.nbi"]  # no stamp on stale code


def test_a_file_that_another_process_deletes(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, unlink = package / "stored", Path.unlink
    folder.mkdir()
    for name in ("code.nbi", "code.1.nbc"):
        (folder / name).touch()

    def unlink_twice(path: Path, missing_ok: bool = False) -> None:
        unlink(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_twice)
    discard_stale_code(folder, package)
    assert [file.name for file in folder.iterdir()] == [STAMP]


def test_without_a_directory_for_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    assert hits() == 0


@jit
def scaled(x: float, factor: int) -> float:
    return x * factor


@jit
def by_constants(x: float, factor: int) -> tuple[float, float]:
    return scaled(x, ONE), scaled(x, factor)


def test_a_number_of_numpy_needs_no_version_of_its_own() -> None:
    assert scaled(1.5, 5) == 7.5  # The code of `by_constants` may be a stored one.
    assert by_constants(1.5, 5) == (1.5, 7.5)
    assert len(scaled.signatures) == 1
