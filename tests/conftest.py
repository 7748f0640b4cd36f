import os

import pytest
import torch

NEEDED_GPUS = {"gpu": 1, "multigpu": 2}

# Each worker of pytest-xdist gets its own share of the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(
        max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker, count in NEEDED_GPUS.items():
        config.addinivalue_line(
            "markers", f"{marker}: needs {count} GPU{'s' * (count > 1)} or more; skipped elsewhere"
        )
    config.addinivalue_line(
        "markers", "interpreted: runs on the CPU under Triton's interpreter too"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes comes first, and workers without work take some from the others (`--dist worksteal`)."""
    items.sort(key=lambda item: item.path.name != "test_interpreter.py")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, count in NEEDED_GPUS.items():
        if item.get_closest_marker(marker) and torch.cuda.device_count() < count:
            pytest.skip(f"needs {count} GPU{'s' * (count > 1)}")
