import gc
import os
from collections.abc import Iterator

import pytest
import torch
from helpers.compile_once import compile_once

NEEDED_GPUS = {"gpu": 1, "multigpu": 2, "whole_gpu": 1}
MARKERS = {
    "gpu": "needs a GPU; skipped elsewhere",
    "multigpu": "needs 2 GPUs or more; skipped elsewhere",
    "whole_gpu": "needs most of the memory of a GPU: make test-gpu; skipped elsewhere",
    "long": "takes many seconds, so it starts before the others",
    "interpreted": "runs on the CPU under Triton's interpreter too: make test-kernels",
}
RELEASED = 2**30  # bytes of cached GPU memory beyond which a test gives them back

# Collections of the oldest objects, of which the imports and compilers make millions, take 5 % of
# the time otherwise.
gc.set_threshold(10_000, 20, 100)

# Inductor otherwise starts processes that import PyTorch, and compiles a program for each set of
# vector instructions to see whether the compiler knows it. Scalar code has the same meaning.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Each worker of pytest-xdist gets its own share of the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    compile_once()

if os.environ.get("TRITON_INTERPRET") == "1":
    from helpers.interpreter import make_interpreter_faster

    make_interpreter_faster()


def pytest_configure(config: pytest.Config) -> None:
    for marker, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{marker}: {meaning}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the long tests first, so that no worker ends with one while the others idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Exempt what exists before the first test from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, number in NEEDED_GPUS.items():
        if item.get_closest_marker(marker) and torch.cuda.device_count() < number:
            pytest.skip(f"needs {number} GPU{'s' * (number > 1)}")


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls look at no values of labels and lengths."""
    monkeypatch.setenv("PARTITA_CHECK", "0")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Let no compiled code of other tests count, nor that of this test in later ones."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def gpu_memory() -> Iterator[None]:
    """Give cached memory of a GPU back, of which other test processes have need."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > RELEASED:
        torch.cuda.empty_cache()
