"""The specification of sparse linear chains in plain PyTorch."""

from __future__ import annotations

from .expectation import chain_expectation, chain_expectation_gradient, expected_value
from .logz import (
    ChainInputs,
    backward_scores,
    chain_gradient,
    chain_inputs,
    chain_logz,
    chain_scan,
    forward_scores,
    log_partition,
)
from .nbest import best_paths, chain_nbest
from .paths import chain_sample, chain_viterbi, path_score

__all__ = [
    "ChainInputs",
    "backward_scores",
    "best_paths",
    "chain_expectation",
    "chain_expectation_gradient",
    "chain_gradient",
    "chain_inputs",
    "chain_logz",
    "chain_nbest",
    "chain_sample",
    "chain_scan",
    "chain_viterbi",
    "expected_value",
    "forward_scores",
    "log_partition",
    "path_score",
]
