"""The stored key of Triton's installation."""

import functools
import os
from pathlib import Path

import pytest

pytest.importorskip("triton")
from triton.runtime import cache

from partita.runtime import triton_key


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a small installation, whose key is the text of one file."""
    folder = tmp_path / "triton"
    (folder / "runtime").mkdir(parents=True)
    (folder / "library.so").write_text("first")
    monkeypatch.setattr(cache, "__file__", str(folder / "runtime" / "cache.py"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    new_process(folder, monkeypatch)
    return folder


def new_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let Triton compute its key as in a new process, and return a list of the computed keys."""
    computed: list[str] = []

    @functools.lru_cache
    def key() -> str:
        computed.append((folder / "library.so").read_text())
        return computed[-1]

    monkeypatch.setattr(cache, "triton_key", key)
    return computed


def test_a_second_process_takes_the_stored_key(
    installation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_key.use_stored()
    assert cache.triton_key() == "first"
    computed = new_process(installation, monkeypatch)
    triton_key.use_stored()
    assert cache.triton_key() == "first" and not computed
    triton_key.use_stored()  # a second time, nothing changes
    assert cache.triton_key() == "first"


def test_a_changed_file_has_another_key(
    installation: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_key.use_stored()
    library = installation / "library.so"
    library.write_text("other")  # of the same size
    os.utime(library, ns=(1, 1))
    computed = new_process(installation, monkeypatch)
    triton_key.use_stored()
    assert cache.triton_key() == "other" and computed == ["other"]


def test_a_key_that_was_computed_stays(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_key.use_stored()
    computed = new_process(installation, monkeypatch)
    cache.triton_key()
    (installation / "library.so").write_text("later")
    triton_key.use_stored()
    assert cache.triton_key() == "first" and computed == ["first"]


def test_another_triton_is_left_alone(installation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "triton_key", lambda: "its own")
    triton_key.use_stored()
    assert cache.triton_key() == "its own"


def test_the_stored_key_is_that_of_the_installed_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = cache.triton_key()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "triton_key", functools.lru_cache(lambda: computed))
    triton_key.use_stored()
    monkeypatch.setattr(cache, "triton_key", functools.lru_cache(lambda: "not computed"))
    triton_key.use_stored()
    assert cache.triton_key() == computed
