"""Compilation of recorded launches for GPUs that this machine does not have."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from .launches import Launch, launches

KIB = 1024


class Target(NamedTuple):
    """A GPU to compile for.

    Fields:
        target: the GPU.
        shared: the bytes of shared memory that a program may use.
    """

    target: GPUTarget
    shared: int


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * KIB),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * KIB),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * KIB),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * KIB),
}


def chosen(kernel: str, name: str) -> list[Launch]:
    """Return the launches that are compiled for a target.

    bf16 differs from fp32 in its loads alone, so fp32 stands for both wherever the compile-time
    arguments are the same. For the GPU that the plans were measured on these are all launches but
    those in fp64. Elsewhere, and in fp64, they are the most demanding of each dtype, plain and not.
    """
    known = launches(None if name == "gfx942" else "13.0")[kernel]
    in_fp32 = {launch.variant for launch in known if launch.dtype == torch.float32}
    known = [
        launch
        for launch in known
        if launch.dtype != torch.bfloat16 or launch.variant not in in_fp32
    ]
    kinds = dict.fromkeys((launch.dtype, launch.plain) for launch in known)
    if name != "sm_90" and torch.float32 in {launch.dtype for launch in known}:
        kinds = {kind: None for kind in kinds if kind[0] != torch.bfloat16}
    hardest = [
        max(
            (launch for launch in known if (launch.dtype, launch.plain) == kind),
            key=lambda launch: launch.demand,
        )
        for kind in kinds
    ]
    if name != "sm_90":
        return hardest
    return [
        launch
        for launch in known
        if launch.dtype != torch.float64 or any(launch is other for other in hardest)
    ]


def compiled(launch: Launch, target: GPUTarget) -> Any:
    """Compile a launch like `JITFunction.run`, for another GPU."""
    backend = make_backend(target)
    binder = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, specialization, options = binder(*launch.args, **launch.options)
    options, signature, constexprs, attrs = launch.kernel._pack_args(
        backend, launch.options, bound, specialization, options
    )
    kind = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    return triton.compile(
        kind(launch.kernel, signature, constexprs, attrs), target=target, options=options.__dict__
    )


def spilled(result: Any, target: GPUTarget, folder: Path) -> int:
    """Return the bytes of stack of a thread, or the vector registers that did not fit."""
    if target.backend == "hip":
        return int(re.search(r"\.vgpr_spill_count:\s*(\d+)", result.asm["amdgcn"])[1])
    binary = folder / "kernel.cubin"
    binary.write_bytes(result.asm["cubin"])
    name = "cuobjdump.exe" if os.name == "nt" else "cuobjdump"
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    done = subprocess.run(
        [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    )
    return int(re.search(r"STACK:(\d+)", done.stdout)[1])
