"""`partita info`: versions, devices, the backend that serves each op, and what is replayed."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from ..runtime import launcher
from ..runtime.backend import current_backend, has_triton, numba_problem, resolve
from ..runtime.invariance import VARIABLE, is_batch_invariant
from ..runtime.register import REPLAYED, watch
from ..testing.samples import CALLS, Call, Draw
from .console import Progress, Table, first_line, print_table

# The functions, and the methods of chains, that have sample calls; and whether Numba serves them.
OPS = {
    call.name.removeprefix("Chain."): call.numba
    for call in CALLS.values()
    if call.usual and "." not in call.name.removeprefix("Chain.") and "," not in call.name
}
ROUNDS = 5  # The second or third of equal calls is recorded, in forward and backward pass.
BACKEND_NAMES = {"reference": "PyTorch", "gpu": "Triton", "cpu": "Numba"}

# The purpose of each optional package, and the command that installs it.
EXTRAS = {
    "triton": ("the kernels for GPUs", "pip install triton"),
    "numba": ("the kernels of chains, CTC and transducers for CPUs", "pip install numba"),
    "matplotlib": ("the pictures of partita bench and report", "pip install matplotlib"),
}
# The beginnings of environment variables that can change results or times.
VARIABLES = (
    *("PARTITA_", "TRITON_", "NUMBA_", "OMP_", "MKL_", "CUDA_", "HIP_"),
    *("NVIDIA_TF32", "TORCH_ALLOW", "PYTORCH_"),
)

DESCRIPTION = """\
Print versions, GPUs, and the backend that serves each op on each device. With --replay, make the
sample calls of every function on the current GPU instead, five times in fp32, forward and backward,
and print whether the last one was replayed in one call of C, and if not, why."""

EPILOG = """\
examples:
  partita info                           what is installed, and what serves each op
  PARTITA_BACKEND=numba partita info     the same under this choice
  partita info --replay                  which calls are replayed on the GPU

exit codes:
  0  printed             2  wrong arguments"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "--replay", action="store_true", help="whether each call is replayed, or why not"
    )


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> list[list[str]]:
    from .. import __version__

    rows = [
        ["partita", __version__, ""],
        ["python", platform.python_version(), ""],
        ["torch", torch.__version__, ""],
    ]
    for package, (purpose, command) in EXTRAS.items():
        found = version(package)
        problem = (numba_problem() or "") if found and package == "numba" else ""
        rows.append(
            [package, found, problem]
            if found
            else [package, "not installed", f"{purpose}: {command}"]
        )
    if torch.cuda.is_available():
        rows.append(["driver", _driver(), ""])
    return [*rows, ["system", platform.platform(), ""]]


def _driver() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return " ".join(dict.fromkeys(done.stdout.split()))


def cpu() -> str:
    """Return the name of the CPU, and the number of threads that PyTorch uses."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = next(names, platform.processor() or platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def _devices() -> list[list[str]]:
    rows = [["cpu", cpu(), "", "", ""]]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        rows.append(
            [
                f"cuda:{index}",
                gpu.name,
                f"{gpu.total_memory / 2**30:.0f} GiB",
                str(gpu.multi_processor_count),
                f"{gpu.major}.{gpu.minor}",
            ]
        )
    return rows


def no_gpu() -> str:
    """Return why there is no GPU, and what helps."""
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            "No GPU: this PyTorch was built without CUDA; on Linux,"
            " pip install --force-reinstall torch brings one that has it."
        )
    return "No GPU: PyTorch finds none; nvidia-smi (or rocm-smi) tells whether the driver does."


def _server(device: torch.device, numba: bool) -> str:
    try:
        table = resolve(current_backend(), device, has_cpu=numba)
    except (RuntimeError, ValueError) as error:
        return f"none: {error}"
    interpreted = table == "gpu" and device.type == "cpu"
    return BACKEND_NAMES[table] + (" (interpreted)" if interpreted else "")


def tables() -> list[Table]:
    found = _devices()
    devices = [row[0] for row in found]
    return [
        Table("Installed", ["package", "version", ""], _versions(), left=2),
        Table("Devices", ["device", "name", "memory", "SMs", "capability"], found, left=2),
        Table(
            "Served by",
            ["op", *devices],
            [
                [op, *(_server(torch.device(device), numba) for device in devices)]
                for op, numba in OPS.items()
            ],
            left=1 + len(devices),
        ),
    ]


def notes() -> list[str]:
    """Return what launches the kernels, or why the kernels for GPUs serve nothing here."""
    if not torch.cuda.is_available():
        absent = "" if has_triton() else f", once {EXTRAS['triton'][1]} has brought them"
        with_gpu = f"With a GPU, Triton's kernels would serve every op on its tensors{absent}."
        return [no_gpu(), with_gpu]
    if has_triton():
        return [f"Launches: {launcher.status()}."]
    return [f"The GPU is served by PyTorch, because triton is not installed: {EXTRAS['triton'][1]}"]


def invariance() -> str:
    """Return whether linear heads give each token bits of its own."""
    if is_batch_invariant():
        return "Linear heads are batch-invariant: each token has bits of its own."
    return f"Linear heads are batch-invariant inside batch_invariant() and with {VARIABLE}=1."


def missing() -> list[str]:
    absent = {package: about for package, about in EXTRAS.items() if not version(package)}
    return [
        *notes(),
        *(
            f"{package} is not installed; {command} brings it, for {purpose}"
            for package, (purpose, command) in absent.items()
        ),
    ]


def variables() -> list[str]:
    return [f"{name}={value}" for name, value in os.environ.items() if name.startswith(VARIABLES)]


class Line(NamedTuple):
    """A line of the table of replays."""

    call: str  # its name in the catalogue
    replayed: str  # `yes`, `no`, or `partly` where some of its ops are
    reason: str  # why not, with the name of each op that is not replayed


def line_of(call: str, ops: Iterable[tuple[str, str]]) -> Line:
    """Return the line of a call from its ops and how each was served, as `watch` tells it."""
    ops = list(dict.fromkeys(ops))
    if not ops:
        return Line(call, "no", "PyTorch's own functions serve it")
    reasons = [f"{op}: {served}" for op, served in ops if served != REPLAYED]
    if not reasons:
        return Line(call, "yes", "")
    return Line(call, "partly" if len(reasons) < len(ops) else "no", "; ".join(reasons))


def replay_of(call: Call, device: str = "cuda") -> Line:
    """Make equal calls, forward and backward, and return how the last one was served."""
    try:
        sample = call.sample(Draw(device=device))
        for _ in range(ROUNDS):
            with watch() as ops:
                sample.gradients(sample.run())
    except Exception as error:
        return Line(call.name, "no", first_line(error))
    return line_of(call.name, ops)


def all_replays() -> list[Line]:
    lines = []
    with Progress(len(CALLS)) as progress:
        for call in CALLS.values():
            progress.say(call.name)
            lines.append(replay_of(call))
            progress.advance()
    return lines


def show_replays() -> None:
    """Print the table of all calls, or why nothing is replayed here."""
    if launcher.module() is None:
        print(f"Nothing is replayed: {launcher.status()}.")
        return
    lines = all_replays()
    print_table(Table("Replayed", ["call", "replayed", ""], lines, left=2))
    print(f"\n{sum(line.replayed == 'yes' for line in lines)} of {len(lines)} calls are replayed.")


def main(args: argparse.Namespace) -> int:
    """Print all tables, or that of replay, and return the exit code."""
    if args.replay:
        show_replays()
    else:
        for table in tables():
            print_table(table)
        for line in (*notes(), invariance()):
            print(f"\n{line}")
    for line in variables():
        print(f"\n{line}")
    return 0
