"""`partita info`: what is installed and found, and what serves each op."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata

import torch

from . import _backend
from ._console import print_table

NUMBA_OPS = ("logz", "viterbi", "expectation", "ctc_loss")
OPS = ("logsumexp", "softmax", "log_softmax", "cross_entropy", "token_stats", "linear_cross_entropy", "linear_token_stats", *NUMBA_OPS)
FLOORS = {"reference": "PyTorch", "kernels": "Triton", "cpu": "Numba"}

# What each package brings, and the command that brings the package.
EXTRAS = {
    "triton": ("the kernels for GPUs", "pip install triton"),
    "numba": ("the kernels of chains for CPUs", "pip install 'partita[cpu]'"),
    "matplotlib": ("the pictures of partita bench", "pip install 'partita[bench]'"),
    "rich": ("tables and progress bars in colour", "pip install 'partita[bench]'"),
}
VARIABLES = ("PARTITA_BACKEND", "PARTITA_CHECK", "TRITON_INTERPRET")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print versions, GPUs, and the backend that serves each op on each device."
    parser.epilog = "exit code: 0"


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> list[list[str]]:
    from . import __version__

    rows = [["partita", __version__, ""], ["python", platform.python_version(), ""], ["torch", torch.__version__, ""]]
    for package, (purpose, command) in EXTRAS.items():
        found = version(package)
        rows.append([package, found, ""] if found else [package, "not installed", f"{purpose}: {command}"])
    return rows


def _gpus() -> list[list[str]]:
    rows = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        rows.append([f"cuda:{index}", gpu.name, f"{gpu.total_memory / 2**30:.0f} GiB", str(gpu.multi_processor_count), f"{gpu.major}.{gpu.minor}"])
    return rows


def no_gpu() -> str:
    """Why there is no GPU, and what brings one."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "No GPU: this PyTorch was built without CUDA; on Linux, pip install --force-reinstall torch brings one that has it."
    return "No GPU: PyTorch finds none; nvidia-smi (or rocm-smi) tells whether the driver does."


def _server(device: torch.device, op: str) -> str:
    try:
        floor = _backend.resolve(_backend.current(), device, numba=op in NUMBA_OPS)
    except (RuntimeError, ValueError) as error:
        return f"none: {error}"
    interpreted = floor == "kernels" and device.type == "cpu"
    return FLOORS[floor] + (" (interpreted)" if interpreted else "")


def main(args: argparse.Namespace) -> int:
    """Print all; the exit code."""
    print_table("Installed", ["package", "version", ""], _versions(), left=2)
    gpus = _gpus()
    if gpus:
        print_table("GPUs", ["device", "name", "memory", "multiprocessors", "capability"], gpus, left=2)
    else:
        print(f"\n{no_gpu()}")
    devices = ["cpu", *(row[0] for row in gpus)]
    print_table("Served by", ["op", *devices], [[op, *(_server(torch.device(device), op) for device in devices)] for op in OPS], left=1 + len(devices))
    if gpus and not _backend.has_triton():
        print(f"\nThe GPU is served by PyTorch, because triton is not installed: {EXTRAS['triton'][1]}")
    for name in VARIABLES:
        if name in os.environ:
            print(f"\n{name}={os.environ[name]}")
    return 0
