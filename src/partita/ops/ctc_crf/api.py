"""CTC-CRF: the loss of a target whose alignment is unknown, normalised over all k-mer paths."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import (
    apply,
    needs_gradient,
    plain_eager,
    refuse_forward_mode,
)
from ...runtime.backend import current_backend
from ...runtime.constants import constant
from ...runtime.lengths import Lengths, as_lengths, on_device
from ...runtime.sizes import holds
from ..ctc.common import longest_target
from . import autograd as _crf
from .common import check_scores, kmer_source, lattice_source

# On a GPU the number of lattice states is rounded up to a multiple of this, because the first call
# with a table of another size waits for the device.
STATES_MULTIPLE = 64


def debruijn_source(
    n_base: int, state_len: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Return the source table of CTC-CRF, in which states are k-mers.

    Each k-mer stays, or is entered from the k-mers that end in its first k - 1 bases.

    Args:
        n_base: number of bases, b.
        state_len: bases of a k-mer, k; the first is the most significant digit of a state's number.
        device: device of the table.

    Returns:
        `[bᵏ, b + 1]` int64: column 0 is the state itself, column 1 + j the k-mer that starts with
        base j and goes on with all bases of this state but the last.

    Raises:
        TypeError, ValueError: a number is no int or below 1.

    Source: de Bruijn, A combinatorial problem, 1946; the order of the columns is that of bonito's
        `CTC_CRF`.

    Example:
        >>> from partita import debruijn_source
        >>> debruijn_source(2, 2)  # AA, AB, BA, BB
        tensor([[0, 0, 2],
                [1, 0, 2],
                [2, 1, 3],
                [3, 1, 3]])
    """
    checks.at_least("n_base", n_base, 1)
    checks.at_least("state_len", state_len, 1)
    return kmer_source(n_base, state_len, device)


def _check_targets(targets: Tensor, scores: Tensor) -> None:
    checks.integer("targets", targets)
    checks.device("targets", targets, scores, "scores")
    ndim, N = targets.ndim, scores.shape[1]
    if ndim != 1 and (ndim != 2 or not holds(targets.shape[0] == N)):
        raise ValueError(
            f"targets: expected shape [N, S] with N = {N}, or [sum of target_lengths],"
            f" got {list(targets.shape)}"
        )


def _lattice_states(longest: int, targets: Tensor, T: int, state_len: int) -> int:
    """Return an upper bound of the number of k-mers of a target that has a path."""
    states = max(min(longest - state_len, T) + 1, 1)
    if targets.device.type == "cpu":
        return states
    return -(-states // STATES_MULTIPLE) * STATES_MULTIPLE


def ctc_crf_loss(
    scores: Tensor,
    targets: Tensor,
    target_lengths: Lengths,
    *,
    state_len: int,
    alphabet_size: int,
    input_lengths: Lengths | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the CTC-CRF loss: minus the log-probability of the k-mer paths that spell the target.

    A path starts in any k-mer and stays or moves on at each step. Its probability is the
    exponential of its score, divided by the sum of the exponentials over all paths.

    Args:
        scores: `[T, N, C * A]` or `[T, N, C, A]` floating, C = (A - 1)^state_len, any numbers:
            `scores[t, n, c, 0]` is the score of staying in k-mer c, `scores[t, n, c, 1 + j]` that
            of entering it from the k-mer that begins with base j (see `debruijn_source`).
        targets: `[N, S]`, or all targets concatenated, `[sum of target_lengths]`; integers from 1
            to A - 1, 0 for padding.
        target_lengths: `[N]`, a tensor on any device, or a list or tuple.
        state_len: bases of a k-mer.
        alphabet_size: A, the bases and the blank.
        input_lengths: `[N]`, the number of valid steps, in the same forms; all steps if None.
        reduction: `mean` (of loss / target length), `sum` or `none`.

    Returns:
        A number, or `[N]`, in nats; fp32 for half types; inf, with the gradient 0, for a target
        that is shorter than a k-mer or needs more moves than there are steps.

    Raises:
        TypeError, ValueError, IndexError: wrong dtypes, shapes, devices, lengths or labels. Values
            on a GPU are checked only with `PARTITA_CHECK=1`; otherwise an invalid sequence has the
            loss NaN and the gradient NaN.

    Source: Xiang, Ou, CRF-based single-stage acoustic modeling with CTC topology, 2019; over k-mers
        as in Oxford Nanopore's bonito, 2020.

    Example:
        >>> import torch, partita
        >>> scores = torch.zeros(2, 1, 2 * 3)  # two steps, two bases and the blank: 2 * 3 * 3 paths
        >>> targets, sizes = torch.tensor([[1, 2]]), {"state_len": 1, "alphabet_size": 3}
        >>> partita.ctc_crf_loss(scores, targets, [2], **sizes, reduction="sum")  # log of 18 / 2
        tensor(2.1972)
    """
    checks.choice("reduction", reduction, checks.REDUCTIONS)
    check_scores(scores, state_len, alphabet_size)
    _check_targets(targets, scores)
    (T, N), device = scores.shape[:2], scores.device
    given = [as_lengths("target_lengths", target_lengths, N)]
    states = _lattice_states(longest_target(given[0], targets), targets, T, state_len)
    if input_lengths is not None:
        given.append(as_lengths("input_lengths", input_lengths, N))
    sequences = (targets, *on_device(device, *given), None)[:3]
    tables = (
        constant(kmer_source, alphabet_size - 1, state_len, device=device),
        constant(lattice_source, states, device=device),
    )
    save = needs_gradient(scores)
    options = (state_len, reduction, save, current_backend())
    if not save and plain_eager():
        refuse_forward_mode(scores)
        return _crf.loss(scores, *tables, *sequences, *options)[0]
    return apply(_crf.CRFLossFunction, scores, *tables, *sequences, *options)[0]
