"""Whether a loss on a GPU packs the rows whose labels are not ignored.

`PARTITA_PACK_ROWS=1` asks for that. The number of these rows is known on the GPU alone, and the
products that read it there are slower where no label is ignored, so the user has to choose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import plain_eager
from ...runtime.register import PLAIN

ALIGNMENT = 16  # elements of which hidden size, classes and rows of the matrix are multiples


def packing_wanted() -> bool:
    """Return whether the environment asks for packed rows, which compiled code never has."""
    return not torch.compiler.is_compiling() and bool(checks.variable("PARTITA_PACK_ROWS"))


def sizes_allow_packing(hidden: int, classes: int, dtype: torch.dtype) -> bool:
    """Return whether the grouped product takes matrices of this size and dtype."""
    aligned = all(size > 0 and size % ALIGNMENT == 0 for size in (hidden, classes))
    return aligned and dtype == torch.bfloat16


def has_grouped_product(device: torch.device) -> bool:
    """Return whether PyTorch's grouped product on this device does not wait for the host.

    Source: `_grouped_mm_cuda` of PyTorch. On GPUs other than sm_90 and sm_100 it copies the numbers
    of rows to the host.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def packs_rows(
    input: Tensor, weight: Tensor, bias: Tensor | None, reduction: str, backend: str
) -> bool:
    """Return whether the loss of these hidden states packs its rows, if its plan is fast."""
    return (
        reduction != "none"
        and packing_wanted()
        and plain_eager()
        and type(input) in PLAIN
        and type(weight) in PLAIN
        and bias is None
        and backend in ("auto", "triton")
        and len(input) > 0
        and sizes_allow_packing(weight.shape[1], len(weight), input.dtype)
        and weight.stride(1) == 1
        and weight.stride(0) % ALIGNMENT == 0
        and weight.data_ptr() % (ALIGNMENT * weight.element_size()) == 0
        and has_grouped_product(input.device)
    )
