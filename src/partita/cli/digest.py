"""Digests: hashes of the bits that the sample calls return, to compare versions and machines.

A file of digests has a line for each sample and dtype, in the order of the catalogue: a hash of the
results, a hash of the gradients, and the name. Lines that start with `#` say where it was made.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..runtime.backend import current_backend, has_triton, numba_problem
from ..testing.samples import CALLS, Draw
from .console import DTYPES, Progress, UsageError, first_line
from .info import version

Digests = Mapping[str, str]
"""The hashes of results and gradients by the name of the sample and its dtype."""

HASH_LETTERS = 12


@dataclass(frozen=True)
class _PortableDraw(Draw):
    """Draws the same numbers on every machine.

    PyTorch's generator of a CPU gives the same integers everywhere. Its normal numbers are made of
    them with logarithms and cosines, whose last bits depend on the machine, so they are rounded.
    """

    def normal(self, *shape: int) -> Tensor:
        return (super().normal(*shape) * 2.0**36).round() / 2.0**36


def hash_of(tensors: Iterable[Tensor]) -> str:
    """Return a hash of dtypes, shapes and bits; 0 and -0 differ, and every NaN is the same."""
    found = hashlib.sha256()
    for x in tensors:
        x = x.detach().cpu().contiguous()
        if x.is_floating_point():
            x = x.masked_fill(x.isnan(), torch.nan)
        found.update(f"{x.dtype} {list(x.shape)}".encode())
        found.update(ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()))
    return found.hexdigest()[:HASH_LETTERS]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let PyTorch use one thread of the CPU: several divide sums and products in another way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _arithmetic(device: torch.device) -> str:
    """Return a hash of what PyTorch and Numba compute on a device without Partita.

    Libraries choose their code by the instructions, the caches and the maker of a CPU. What they
    look at is not known, but this hash differs where they compute other bits.
    """
    found = []
    for dtype in DTYPES.values():
        x = _PortableDraw(dtype, device=device, grad=False).scores(61, 1000)
        y, z = x.abs(), x.T.contiguous()
        # Products of matrices of every kind of size, in the layouts of logits and gradients.
        for m, n, k in itertools.product((1, 6, 61), (5, 37, 61), (3, 8, 40, 512)):
            found += [x[:m, :k] @ x[:n, :k].T, x[:m, :k] @ z[:k, :n], z[:k, :m].T @ z[:k, :n]]
            found += [torch.addmm(x[0, :n], x[:m, :k], x[:n, :k].T)]
        found += [x.exp(), y.log(), y.log1p(), x.expm1(), x.tanh(), x.sigmoid(), y.sqrt()]
        found += [x.sum(0), x.sum(1), x.logsumexp(1), x.softmax(1)]
        if device.type == "cpu" and dtype.itemsize >= 4 and numba_problem() is None:
            found += _numba_arithmetic(x.flatten())
    return hash_of(found)


def _numba_arithmetic(x: Tensor) -> list[Tensor]:
    """Return sums of products, which LLVM may vectorize, and functions of the C library."""
    import numba

    def compute(x: Any, functions: Any) -> float:
        dot = 0.0
        for i in range(len(x)):
            dot += x[i] * x[len(x) - 1 - i]
        for i in range(len(x)):
            functions[i] = math.log1p(math.exp(-abs(x[i]))) + math.log(abs(x[i])) * x[i]
        return dot

    functions = torch.empty_like(x)
    compiled = numba.njit(fastmath={"contract", "reassoc"})(compute)
    dot = compiled(x.numpy(), functions.numpy())
    return [torch.tensor(dot, dtype=torch.float64), functions]


def machine(device: torch.device) -> str:
    """Return what the bits of a device depend on: its model, versions, and its arithmetic."""
    if device.type == "cpu":
        name, package = f"CPU with {torch.backends.cpu.get_cpu_capability()}", "numba"
        serves = numba_problem() is None
    else:
        name, package, serves = torch.cuda.get_device_name(device), "triton", has_triton()
    parts = [name, f"torch {torch.__version__}"]
    parts.append(f"{package} {version(package)}" if serves else f"no {package}")
    if current_backend() != "auto":
        parts.append(f"backend {current_backend()}")
    with _one_thread():
        return ", ".join([*parts, f"arithmetic {_arithmetic(device)}"])


def digests_of(name: str, device: torch.device, dtype: str) -> dict[str, str]:
    """Return the digests of the samples of a call in a dtype: small ones, and larger sizes."""
    call, draw = CALLS[name], _PortableDraw(DTYPES[dtype], device=device)
    if draw.dtype not in call.dtypes:
        return {}
    found = {}
    with _one_thread():
        larger = (
            call.sample(draw, sizes=sizes, name=f"large {number}")
            for number, sizes in enumerate(call.checked)
        )
        for sample in itertools.chain(call.samples(draw), larger):
            results = sample.run()
            gradients = sample.gradients(results).values()
            found[f"{sample}, {dtype}"] = f"{hash_of(results)} {hash_of(gradients)}"
    return found


def text_of(machine: str, digests: Digests, reason: str = "") -> str:
    """Return the content of a file of digests."""
    head = [machine, *[f"reason: {reason}"] * bool(reason), "results, gradients, sample"]
    lines = [*(f"# {line}" for line in head), *(f"{x}  {name}" for name, x in digests.items())]
    return "\n".join(lines) + "\n"


def read(path: Path) -> tuple[str, Digests]:
    """Return the machine and the digests of a file, or raise UsageError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--digest: cannot read {path}: {first_line(error)}") from None
    found = {}
    for number, line in enumerate(lines, 1):
        digest, _, name = line.partition("  ")
        if not line.startswith("#"):
            if not name or len(digest) != 2 * HASH_LETTERS + 1:
                raise UsageError(f"--digest: {path}: line {number} is no digest: {line!r}")
            found[name] = digest
    if not found or not lines[0].startswith("# "):
        raise UsageError(f"--digest: {path}: expected what `partita check --digest` prints")
    return lines[0][2:], found


def changes(found: Digests, kept: Digests) -> list[str]:
    """Return what differs in each sample that both have."""
    lines = []
    for name in found.keys() & kept.keys():
        pairs = zip(("results", "gradients"), found[name].split(), kept[name].split(), strict=True)
        if parts := [part for part, ours, theirs in pairs if ours != theirs]:
            lines.append(f"{name}: other {' and '.join(parts)}")
    return sorted(lines)


def main(device: torch.device, file: str) -> int:
    """Print the digests of a device, or how they differ from those of a file."""
    other, kept = read(Path(file)) if file else ("", {})
    found: dict[str, str] = {}
    with Progress(len(CALLS) * len(DTYPES)) as progress:
        for name in CALLS:
            for dtype in DTYPES:
                progress.say(f"{name} {dtype} on {device}")
                found |= digests_of(name, device, dtype)
                progress.advance()
    here = machine(device)
    if not file:
        print(text_of(here, found), end="")
        return 0
    changed = changes(found, kept)
    print("\n".join([*changed] + [""] * bool(changed)) + f"here: {here}\nfile: {other}")
    common = len(found.keys() & kept.keys())
    print(
        f"{common - len(changed)} equal, {len(changed)} differ,"
        f" {len(found) - common} only here, {len(kept) - common} only in the file"
    )
    return int(bool(changed) or not common)
