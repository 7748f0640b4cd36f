"""Memory that shows missing writes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic

_settings: Any = deterministic  # its one attribute is not declared


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory of PyTorch with NaN, and with the greatest number for integers.

    This holds on all devices and in all threads for `torch.empty`, `empty_like`, `empty_strided`,
    `Tensor.new_empty` and similar functions. A kernel that leaves an element of its output
    unwritten, or reads it before it writes it, shows NaN. It is PyTorch's deterministic mode
    without warnings.

    Source: `torch.utils.deterministic.fill_uninitialized_memory`.

    Example:
        >>> import torch
        >>> from partita.testing import poisoned_memory
        >>> with poisoned_memory():
        ...     torch.empty(2)
        tensor([nan, nan])
    """
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = _settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            _settings.fill_uninitialized_memory = True
            yield
        finally:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            _settings.fill_uninitialized_memory = fill
