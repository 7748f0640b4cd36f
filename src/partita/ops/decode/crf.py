"""Decoding of CTC-CRF: the best path, the best path of posteriors, and prefix beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.backend import current_backend
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from ...runtime.lengths import Lengths, as_lengths, on_device
from ..chain.api import Chain
from ..ctc_crf.common import kmer_source, unflatten_scores
from . import registered
from .basecalls import Basecalls
from .common import MAX_BEAM_WIDTH

METHODS = ("viterbi", "posterior", "beam")
MAX_ALPHABET = 60  # bases of which a word has a bit each


def ctc_crf_decode(
    scores: Tensor,
    *,
    state_len: int,
    alphabet_size: int,
    input_lengths: Lengths | None = None,
    method: str = "viterbi",
    beam_width: int = 32,
) -> Basecalls:
    """Return the called bases of CTC-CRF scores, with the log-probability of each.

    Args:
        scores: `[T, N, C * A]` or `[T, N, C, A]` floating, as in `ctc_crf_loss`.
        state_len: k, the bases of a k-mer.
        alphabet_size: A, the bases and the blank.
        input_lengths: `[N]`, the number of valid steps, a tensor on any device, a list or a tuple;
            all steps if None.
        method: `viterbi` is the best path; `posterior` the best path over the logs of the posterior
            probabilities of the edges; `beam` the sequence of bases that is most probable over the
            paths that a prefix beam search sums.
        beam_width: the number of prefixes that go on after each step, from 1 to 256.

    Returns:
        `Basecalls(labels, lengths, log_probs, steps, moves)` with S = T + k, in nats. The
        log-probability of a base is the log of the mean, over the steps from its move up to the
        next one, of the posterior probability that the k-mer ends in this base. For the first k
        bases it is that of the base in the first k-mer. Not differentiable.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes, lengths or numbers. Lengths on a GPU are
            checked only with `PARTITA_CHECK=1`; otherwise an invalid sequence has no bases.

    Source: Oxford Nanopore's bonito, 2020, for `posterior`; its dorado, 2023, ranks prefixes by the
        score of all that follows too, as `beam` does.

    Example:
        >>> import torch, partita
        >>> scores = torch.zeros(3, 1, 4, 5)  # three steps, single bases
        >>> scores[1, 0, 2, 1 + 0] = 9.0  # the second step moves from the first to the third base
        >>> scores[0, 0, 0, 0] = scores[2, 0, 2, 0] = 5.0
        >>> calls = partita.ctc_crf_decode(scores, state_len=1, alphabet_size=5, method="posterior")
        >>> calls.labels, calls.steps, calls.moves
        (tensor([[1, 3, 0, 0]]), tensor([[-1,  1, -1, -1]]), tensor([[False,  True, False]]))
    """
    checks.choice("method", method, METHODS)
    checks.python_int("beam_width", beam_width)
    if not 1 <= beam_width <= MAX_BEAM_WIDTH:
        raise ValueError(
            f"beam_width: expected a number from 1 to {MAX_BEAM_WIDTH}, got {beam_width}"
        )
    _check_scores(scores, state_len, alphabet_size)
    if method == "beam" and alphabet_size > MAX_ALPHABET:
        raise ValueError(
            f"alphabet_size: expected at most {MAX_ALPHABET} for a beam, got {alphabet_size}"
        )
    with torch.no_grad():
        source = constant(kmer_source, alphabet_size - 1, state_len, device=scores.device)
        edges = unflatten_scores(scores, source)
        T, N = edges.shape[:2]
        if input_lengths is None:
            lengths = scores.new_full((N,), T, dtype=torch.int64)
        else:
            host_lengths = as_lengths("input_lengths", input_lengths, N)
            lengths = on_device(scores.device, host_lengths)[0]
        checks.within("input_lengths", lengths, 0, T, "steps")
        backend = current_backend()
        if method == "posterior":
            marginals = Chain(edges, source, lengths=lengths).marginals()
            path = Chain(marginals.log(), source, lengths=lengths).viterbi()[1:]
            posteriors = registered.crf_base_posteriors(marginals, lengths, backend)
        else:
            width = beam_width if method == "beam" else 0
            *path, by_base, first = registered.crf_path(edges, source, lengths, width, backend)
            posteriors = by_base, first
        dtype = acc_dtype(scores.dtype)
        calls = registered.crf_calls(*posteriors, *path, lengths, state_len, dtype, backend)
        labels, counts, log_probs, steps, moves = calls
        # A sequence with NaN has no path, and so no base whose probability could be NaN.
        unknown = posteriors[1].isnan().any(1, keepdim=True)
        log_probs = log_probs.masked_fill(unknown, torch.nan)
        return Basecalls(labels, counts, log_probs, steps, moves)


def _check_scores(scores: Tensor, state_len: int, alphabet_size: int) -> None:
    checks.floating("scores", scores)
    for name, value, least in (("state_len", state_len, 1), ("alphabet_size", alphabet_size, 2)):
        checks.python_int(name, value)
        if value < least:
            raise ValueError(f"{name}: expected a number of at least {least}, got {value}")
    C, A = (alphabet_size - 1) ** state_len, alphabet_size
    if scores.ndim not in (3, 4) or scores.shape[2:] not in ((C * A,), (C, A)):
        raise ValueError(
            "scores: expected shape [T, N, C * A] or [T, N, C, A]"
            f" with C = {A - 1}^{state_len} = {C} and A = {A}, got {list(scores.shape)}"
        )
