"""CTC-CRF: the loss of a target whose alignment is not known, where every path through the k-mers competes with it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply
from ...runtime.backend import current_backend
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from ...runtime.lengths import Lengths, lengths_on_device
from ..ctc.api import REDUCTIONS
from ..ctc.common import reduce_over_lengths
from . import autograd as _crf
from . import reference
from .reference import Targets

_BLOCK = 64  # states by which a lattice grows on a GPU, where a table of another size waits for the device once


def _count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected a number of at least {least}, got {value!r}")


def debruijn_source(
    n_base: int, state_len: int, *, device: torch.device | str | None = None
) -> Tensor:
    """The table of CTC-CRF: each k-mer stays, or is entered from those that end in its first k - 1 bases.

    Args:
        n_base: number of bases, b.
        state_len: bases of a k-mer, k; its first one counts most in the number of a state.
        device: where the table is.

    Returns:
        `[bᵏ, b + 1]` int64: column 0 is the state itself, column 1 + j the k-mer of base j and all bases of this one but the last.

    Raises:
        ValueError: a number below 1.

    Source: de Bruijn, A combinatorial problem, 1946; the order of the columns is that of bonito's `CTC_CRF`.

    Example:
        >>> from partita import debruijn_source
        >>> debruijn_source(2, 2)  # AA, AB, BA, BB
        tensor([[0, 0, 2],
                [1, 0, 2],
                [2, 1, 3],
                [3, 1, 3]])
    """
    _count("n_base", n_base, 1)
    _count("state_len", state_len, 1)
    return reference.kmers(n_base, state_len, device)


def _as_steps(scores: Tensor, state_len: int, alphabet_size: int) -> Tensor:
    """`[T, N, C, A]`."""
    checks.floating("scores", scores)
    _count("state_len", state_len, 1)
    _count("alphabet_size", alphabet_size, 2)
    states = (alphabet_size - 1) ** state_len
    if scores.ndim == 3 and scores.shape[2] == states * alphabet_size:
        return scores.unflatten(2, (states, alphabet_size))
    if scores.ndim == 4 and scores.shape[2:] == (states, alphabet_size):
        return scores
    raise ValueError(
        f"scores: expected shape [T, N, C * A] or [T, N, C, A] with C = {alphabet_size - 1}^{state_len} = {states} and A = {alphabet_size},"
        f" got {list(scores.shape)}"
    )


def _targets(scores: Tensor, targets: Tensor, lengths: Tensor) -> Targets:
    checks.integer("targets", targets)
    checks.device("targets", targets, scores, "scores")
    count = scores.shape[1]
    if targets.ndim == 2 and len(targets) == count:
        offsets = torch.arange(count, device=scores.device) * targets.shape[1]
        return Targets(
            targets.reshape(-1), offsets, lengths, torch.full_like(offsets, targets.shape[1])
        )
    if targets.ndim != 1:
        raise ValueError(
            f"targets: expected shape [N, S] with N = {count}, or [sum of target_lengths], got {list(targets.shape)}"
        )
    there = lengths.clamp(min=0)
    offsets = there.cumsum(0) - there
    return Targets(targets, offsets, lengths, len(targets) - offsets)


def _check_values(
    scores: Tensor, targets: Tensor, lengths: Tensor, inputs: Tensor, n_base: int
) -> None:
    checks.within("input_lengths", inputs, 0, len(scores), "steps")
    checks.within("target_lengths", lengths, 0, targets.shape[-1], "labels")
    counts = torch.ones_like(targets, dtype=torch.bool)
    if targets.ndim == 2:
        counts = torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]
    elif int(lengths.sum()) != len(targets):
        raise ValueError(
            f"targets: expected as many labels as the sum of target_lengths, {int(lengths.sum())}, got {len(targets)}"
        )
    labels = targets.long()
    if (place := checks.first_index(counts & ((labels < 1) | (labels > n_base)))) is not None:
        raise IndexError(
            f"targets: expected labels from 1 to {n_base}, got {int(labels[place])} at {list(place)}"
        )


def _states(came: Tensor, targets: Tensor, steps: int, state_len: int) -> int:
    """How many k-mers any target has: by its length where the host knows that, by its room, and by the steps that it may take."""
    longest = targets.shape[-1]
    if came.device.type == "cpu" and came.numel() and not torch.compiler.is_compiling():
        longest = min(longest, int(came.max()))
    states = max(min(longest - state_len, steps) + 1, 1)
    return states if targets.device.type == "cpu" else -(-states // _BLOCK) * _BLOCK


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
    """The CTC-CRF loss: minus the log-probability, in nats, of the paths through the k-mers that spell the target.

    A path starts in any k-mer and stays or moves on at each step; its probability is its share in the exponentials of the scores of all paths.

    Args:
        scores: `[T, N, C * A]` or `[T, N, C, A]` floating, C = (A - 1)^state_len, any numbers: `scores[t, n, c, 0]` is that of staying in k-mer c,
            `scores[t, n, c, 1 + j]` that of entering it from the k-mer that begins with base j (see `debruijn_source`).
        targets: `[N, S]`, or all one after another, `[sum of target_lengths]`; integers from 1 to A - 1, 0 for padding.
        target_lengths: `[N]`, a tensor on any device, or a list or tuple.
        state_len: bases of a k-mer.
        alphabet_size: A, the bases and the blank.
        input_lengths: `[N]`, how many steps count, likewise; all if None.
        reduction: `mean` (of loss / target length), `sum` or `none`.

    Returns:
        A number, or `[N]`; fp32 for half types; inf, with the gradient 0, for a target shorter than a k-mer or with more moves than steps.

    Raises:
        TypeError, ValueError, IndexError: wrong dtypes, shapes, devices, lengths or labels (values on a GPU only with `PARTITA_CHECK=1`, otherwise
            that sequence's loss and gradient are NaN).

    Source: Xiang, Ou, CRF-based single-stage acoustic modeling with CTC topology, 2019; over k-mers as in Oxford Nanopore's bonito, 2020.

    Example:
        >>> import torch, partita
        >>> scores = torch.zeros(2, 1, 2 * 3)  # two steps, two bases and the blank: 2 * 3 * 3 paths
        >>> partita.ctc_crf_loss(scores, torch.tensor([[1, 2]]), [2], state_len=1, alphabet_size=3, reduction="sum")  # log of 18 / 2
        tensor(2.1972)
    """
    checks.choice("reduction", reduction, REDUCTIONS)
    steps = _as_steps(scores, state_len, alphabet_size)
    n_base, count, device = alphabet_size - 1, steps.shape[1], scores.device
    came, lengths = lengths_on_device("target_lengths", target_lengths, count, device)
    all_steps = torch.full((count,), len(steps), device=device)
    inputs = (
        all_steps
        if input_lengths is None
        else lengths_on_device("input_lengths", input_lengths, count, device)[1]
    )
    spoken = _targets(steps, targets, lengths)
    if (
        not torch.compiler.is_compiling()
        and not scores.is_meta
        and checks.should_check_values(device)
    ):
        _check_values(steps, targets, lengths, inputs, n_base)
    inputs = torch.where(
        reference.misspelt(spoken, n_base), -1, inputs
    )  # no length of a chain: its results are NaN
    states = _states(came, targets, len(steps), state_len)
    spelt = reference.lattice(
        spoken,
        states,
        state_len,
        n_base,
        acc_dtype(scores.dtype),
        constant(reference.ladder, states, device=device),
    )
    keep = torch.is_grad_enabled() and scores.requires_grad
    loss = apply(
        _crf.Loss,
        steps,
        constant(reference.kmers, n_base, state_len, device=device),
        *spelt,
        inputs,
        keep,
        current_backend(),
    )[0]
    return reduce_over_lengths(loss, lengths, reduction).to(acc_dtype(scores.dtype))
