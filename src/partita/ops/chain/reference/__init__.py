"""The specification of sparse linear chains in plain PyTorch."""

from __future__ import annotations

from .expectation import (
    Values,
    chain_expectation,
    chain_expectation_gradient,
    covariances,
    expected_value,
    mean_value,
)
from .logz import (
    ChainInputs,
    backward_scores,
    chain_gradient,
    chain_inputs,
    chain_logz,
    chain_scan,
    forward_scores,
    log_partition,
    posteriors,
)
from .nbest import best_paths
from .paths import best_path, chain_sample, chain_viterbi, path_score, sample_paths

__all__ = [
    "ChainInputs",
    "Values",
    "backward_scores",
    "best_path",
    "best_paths",
    "chain_expectation",
    "chain_expectation_gradient",
    "chain_gradient",
    "chain_inputs",
    "chain_logz",
    "chain_sample",
    "chain_scan",
    "chain_viterbi",
    "covariances",
    "expected_value",
    "forward_scores",
    "log_partition",
    "mean_value",
    "path_score",
    "posteriors",
    "sample_paths",
]
