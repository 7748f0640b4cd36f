"""How much memory calls use, and whether the host waits for a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an op returns.

    The mode sees nothing inside of a registered op.
    """

    elements = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **kwargs or {})
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def extra_memory(f: Callable[[], Any]) -> int:
    """Return the peak of a GPU's memory during a call, above what was allocated before it.

    A first call, which is not measured, allocates what the library keeps.
    """
    f()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = f()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise where the host waits for a GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
