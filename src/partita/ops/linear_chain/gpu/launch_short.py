"""Launch the kernels of small batches of short sequences."""

from __future__ import annotations

from torch import Tensor

from ....runtime.launch import launch
from . import plan
from .arguments import Batch, Gradients, Saved, Span, strided_pairs
from .short import linear_chain_short_gradient_kernel, linear_chain_short_scan_kernel


def short_scan(
    batch: Batch, transitions: Tensor, saved: Saved | None, logz: Tensor, rounded: Tensor
) -> None:
    """Scan alpha and compute log Z; with `saved`, scan beta too and fill in what it has."""
    launch(
        linear_chain_short_scan_kernel,
        batch.N if saved is None else 2 * batch.N,
        batch=batch,
        transitions=strided_pairs(transitions),
        saved=saved or Saved(None, None, None, Span(None, 1)),
        logz_ptr=logz,
        rounded_ptr=rounded,
        SAVE=saved is not None,
        EXACT=plan.is_exact(batch.emissions.ptr, transitions),
        **plan.scan_options(batch.C, True),
    )


def short_gradient(
    grad_output: Tensor,
    batch: Batch,
    transitions: Tensor,
    saved: Saved,
    gradients: Gradients,
    d_transitions: Tensor,
) -> None:
    """Fill in the gradients in emissions, transitions, start and end."""
    launch(
        linear_chain_short_gradient_kernel,
        batch.C,
        grad_ptr=grad_output,
        grad_n=grad_output.stride(0),
        batch=batch,
        transitions=strided_pairs(transitions),
        saved=saved,
        gradients=gradients,
        d_transitions_ptr=d_transitions,
        EXACT=plan.is_exact(batch.emissions.ptr, transitions),
        **plan.short_gradient_options(batch.C),
    )
