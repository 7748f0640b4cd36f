"""Launch the kernels of small batches of short sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....runtime.launch import launch
from . import plan
from .saved import Saved, end_strides, split_saved
from .short import linear_chain_short_gradient_kernel, linear_chain_short_scan_kernel


def short_scan(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    saved: Tensor | None,
    logz: Tensor,
    rounded: Tensor,
) -> None:
    """Scan alpha and compute log Z; with `saved`, scan beta too and fill in what it has."""
    T, N, C = emissions.shape
    stored = (None,) * 4 if saved is None else split_saved(saved, T, N, C)[::-1]
    range_, maxima, scales, states = stored
    launch(
        linear_chain_short_scan_kernel,
        N if saved is None else 2 * N,
        *(emissions, transitions, start, end, lengths),
        *(range_, maxima, states, scales, logz, rounded),
        *(T, N, C, *emissions.stride(), *transitions.stride()),
        *(*end_strides(start), *end_strides(end)),
        SAVE=saved is not None,
        EXACT=plan.is_exact(emissions, transitions),
        **plan.scan_options(C, True),
    )


def short_gradient(inputs: tuple[Any, ...], saved: Saved, results: tuple[Any, ...]) -> None:
    """Fill in the gradients in emissions, transitions, start and end.

    Args:
        inputs: the gradient of log Z, emissions, transitions, end and lengths.
        saved: what the scan saved.
        results: the gradients; None for an end that is None.
    """
    grad_output, emissions, transitions, end, _ = inputs
    T, N, C = emissions.shape
    launch(
        linear_chain_short_gradient_kernel,
        C,
        *inputs,
        *(saved.span, saved.maxima, saved.states, saved.scales, *results),
        *(T, N, C, grad_output.stride(0), *emissions.stride(), *transitions.stride()),
        *end_strides(end),
        EXACT=plan.is_exact(emissions, transitions),
        **plan.short_gradient_options(C),
    )
