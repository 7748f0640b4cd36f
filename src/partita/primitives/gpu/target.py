"""The description of a GPU that plans take.

A plan takes a `Target` as an argument, so that it can be made and tested for any GPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ...runtime.backend import interpreting
from ...runtime.caches import register_cache

MAX_SPLITS = 64  # programs that may wait for one another: fewer than any GPU keeps resident


class Target(NamedTuple):
    """A model of GPU.

    Fields:
        vendor: `nvidia` or `amd`.
        multiprocessors: their number; AMD calls them compute units.
        shared_memory: the bytes of shared memory that a program may use.
        warp_size: the number of threads of a warp.
        interpreted: whether Triton's interpreter stands for the GPU.
    """

    vendor: str
    multiprocessors: int
    shared_memory: int
    warp_size: int
    interpreted: bool = False

    @property
    def runs_ptx(self) -> bool:
        """Whether kernels may choose layouts, contain PTX and limit their registers."""
        return self.vendor == "nvidia" and not self.interpreted


A100 = Target("nvidia", 108, 166_912, 32)
H100 = Target("nvidia", 132, 232_448, 32)
B200 = Target("nvidia", 148, 232_448, 32)
MI300 = Target("amd", 304, 65_536, 64)
TARGETS = {"A100": A100, "H100": H100, "B200": B200, "MI300": MI300}

# The GPU of tensors that are on none: the interpreter's, or one that a test compiles kernels for.
assumed = (H100 if torch.version.hip is None else MI300)._replace(interpreted=interpreting())


def target_of(device: torch.device) -> Target:
    """Return what is known of a GPU, or of the assumed one for another device."""
    return _target_of_gpu(device) if device.type == "cuda" else assumed


@functools.lru_cache(maxsize=64)
def _target_of_gpu(device: torch.device) -> Target:
    properties: Any = torch.cuda.get_device_properties(device)
    return Target(
        assumed.vendor,
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        properties.warp_size,
        assumed.interpreted,
    )


register_cache("primitives.target.gpus", _target_of_gpu.cache_clear)
