"""Alpha and beta of sparse linear chains under Log and Max, in parallel over the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ....primitives.cpu.batch import as_array, as_steps, empty_batch, fill_nan, run_over_batch
from ....primitives.cpu.jit import jit
from .logz import chain_forward_kernel
from .paths import chain_best_path_kernel, pointer_dtype
from .steps import beta_step, chain_batch, load_edges


@jit(nogil=True)
def chain_backward_scan_kernel(
    chains: Any, batch: Any, scores: Any, final: Any, use_max: bool, beta: Any
) -> None:
    """Compute beta of every step under Log or Max, `[T + 1, N, C]`; `final` from a length on."""
    C = final.shape[1]
    for n in chains:
        buffer = np.empty(C * batch.K, scores.numbers.dtype)
        edge_values, terms = np.empty(C * batch.K), np.empty(len(batch.outgoing))
        max_term, sum_exp = np.empty(C), np.empty(C)
        for t in range(batch.lengths[n], len(beta)):
            for c in range(C):
                beta[t, n, c] = final[n, c]
        for t in range(batch.lengths[n] - 1, -1, -1):
            row = load_edges(scores, t, n, batch.K, buffer)
            beta_step(
                row,
                batch,
                beta[t + 1, n],
                edge_values,
                terms,
                max_term,
                sum_exp,
                use_max,
                beta[t, n],
            )


def chain_scan(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    use_max: bool,
    reverse: bool,
) -> Tensor:
    """Return alpha, or beta if `reverse`, under Log or Max, `[T + 1, N, C]` fp64."""
    batch, invalid = chain_batch(scores, source, lengths)
    T, N, C, _ = scores.shape
    result = empty_batch((T + 1, N, C))
    steps, first, last = as_steps(scores), as_array(initial), as_array(final)
    save, trace = True, False
    unused = np.empty(N)
    if reverse:
        run_over_batch(chain_backward_scan_kernel, batch, steps, last, use_max, result.numpy())
    elif use_max:
        pointers = np.empty((1, N, C), pointer_dtype(batch.K))
        no_paths = np.empty((0, 0), np.int64)
        run_over_batch(
            chain_best_path_kernel,
            batch,
            steps,
            first,
            last,
            result.numpy(),
            save,
            pointers,
            unused,
            no_paths,
            no_paths,
            trace,
        )
    else:
        run_over_batch(
            chain_forward_kernel, batch, steps, first, last, result.numpy(), save, unused
        )
    fill_nan(result, invalid)
    return result
