"""Error budgets, edge inputs, poisoned memory and timing, for tests of your own kernels."""

from torch.serialization import add_safe_globals as _add_safe_globals

from .budget import Error, assert_within_budget, ulp_error
from .compare import (
    Difference,
    Errors,
    contract_errors,
    forward_backward_difference,
    poisoned_memory,
)
from .inputs import EDGES, Labelled, edge_rows, sample_labels, sample_rows
from .paths import Paths, all_paths
from .timing import Timing, report, time_forward_backward

__all__ = [
    "EDGES",
    "Difference",
    "Error",
    "Errors",
    "Labelled",
    "Paths",
    "Timing",
    "all_paths",
    "assert_within_budget",
    "contract_errors",
    "edge_rows",
    "forward_backward_difference",
    "poisoned_memory",
    "report",
    "sample_labels",
    "sample_rows",
    "time_forward_backward",
    "ulp_error",
]

# `torch.load` reads them by default.
_add_safe_globals([Difference, Error, Errors, Labelled, Paths, Timing])
