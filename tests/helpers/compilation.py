"""Compilation of recorded launches for GPUs that this machine does not have."""

import os
import re
import subprocess
from collections.abc import Callable
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

# A prefix of kernels whose tiles need more shared memory than others have.
HOPPER_ONLY = "low_rank"
# A prefix of kernels that run on Hopper and on no later GPU.
SM_90_ONLY = "contrastive_product"
# The prefixes of kernels in Gluon, of one that reads their results, of those with products of fp64
# matrices, and of those whose programs wait for others that compute.
NVIDIA_ONLY = (
    "chain_resident",
    "ctc_crf_base_sums",
    "divergence_mixture",
    "linear_chain_",
    HOPPER_ONLY,
    "rnnt_overlap",
)


def chosen(kernel: str, name: str) -> list[Launch]:
    """Return the launches that are compiled for a target.

    A mixture of dtypes is compiled for each target, as a product may lack an instruction for it.
    """
    known = launches(None if name == "gfx942" else "13.0")[kernel]
    mixtures = [launch for launch in known if launch.is_mixture]
    others = [launch for launch in known if not launch.is_mixture]
    return [*hardest(others, name), *most_demanding(mixtures, lambda launch: launch.dtypes)]


def hardest(known: list[Launch], name: str) -> list[Launch]:
    """Return the launches that demand most of a target.

    bf16 differs from fp32 in its loads alone, so fp32 stands for both wherever the compile-time
    arguments are the same. For the GPU that the plans were measured on these are each plan with the
    options that demand most, and each choice of options with the plan that does, plain and not.
    Elsewhere, and in fp64, they are the most demanding of each dtype, plain and not.
    """
    in_fp32 = {launch.variant for launch in known if launch.dtype == torch.float32}
    known = [
        launch
        for launch in known
        if launch.dtype != torch.bfloat16 or launch.variant not in in_fp32
    ]
    kinds = dict.fromkeys((launch.dtype, launch.plain) for launch in known)
    if name != "sm_90" and torch.float32 in {launch.dtype for launch in known}:
        kinds = {kind: None for kind in kinds if kind[0] != torch.bfloat16}
    known = [launch for launch in known if (launch.dtype, launch.plain) in kinds]
    of_dtypes = most_demanding(known, lambda launch: (launch.dtype, launch.plain))
    if name != "sm_90":
        return of_dtypes
    known = [launch for launch in known if launch.dtype != torch.float64]
    each = (
        of_dtypes,
        most_demanding(known, lambda launch: (launch.dtype, launch.plain, launch.plan)),
        most_demanding(known, lambda launch: (launch.dtype, launch.plain, launch.choice)),
    )
    return list({id(launch): launch for launches in each for launch in launches}.values())


def most_demanding(known: list[Launch], kind: Callable[[Launch], Any]) -> list[Launch]:
    """Return the launch of each kind that demands most."""
    found: dict[Any, Launch] = {}
    for launch in known:
        other = found.setdefault(kind(launch), launch)
        if launch.demand > other.demand:
            found[kind(launch)] = launch
    return list(found.values())


def compiled(
    launch: Launch, target: GPUTarget, wrap: Callable[[type], type] = lambda source: source
) -> Any:
    """Compile a launch like `JITFunction.run`, for another GPU, from a wrapped class of sources."""
    backend = make_backend(target)
    binder = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, specialization, options = binder(*launch.args, **launch.options)
    options, signature, constexprs, attrs = launch.kernel._pack_args(
        backend, launch.options, bound, specialization, options
    )
    kind = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    return triton.compile(
        wrap(kind)(launch.kernel, signature, constexprs, attrs),
        target=target,
        options=options.__dict__,
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
