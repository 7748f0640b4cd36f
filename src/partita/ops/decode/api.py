"""Decoding of CTC and of CTC-CRF: the best path, and prefix beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.backend import current_backend
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from ...runtime.lengths import Lengths, as_lengths, on_device
from ..chain.api import Chain
from ..ctc_crf.common import check_scores, kmer_source, unflatten_scores
from . import registered
from .basecalls import Basecalls
from .common import MAX_BEAM_WIDTH, Hypotheses

METHODS = ("viterbi", "posterior", "beam")
MAX_ALPHABET = 60  # bases of which a word has a bit each


def _prepare(log_probs: Tensor, input_lengths: Lengths | None, blank: int) -> tuple[Tensor, Tensor]:
    """Return scores `[T, N, C]` and the lengths `[N]` on their device."""
    checks.floating("log_probs", log_probs)
    if log_probs.ndim not in (2, 3) or log_probs.shape[-1] == 0:
        raise ValueError(
            "log_probs: expected shape [T, N, C] or [T, C] with at least one class,"
            f" got {list(log_probs.shape)}"
        )
    if log_probs.ndim == 2:
        log_probs = log_probs[:, None]
    C = log_probs.shape[2]
    checks.blank(blank, C)
    return log_probs, _lengths(log_probs, input_lengths)


def _lengths(scores: Tensor, input_lengths: Lengths | None) -> Tensor:
    """Return the lengths `[N]` of scores `[T, N, ...]` on their device."""
    T, N = scores.shape[:2]
    if input_lengths is None:
        return scores.new_full((N,), T, dtype=torch.int64)
    return on_device(scores.device, as_lengths("input_lengths", input_lengths, N))[0]


def _up_to(name: str, value: int, greatest: int) -> None:
    checks.python_int(name, value)
    if not 1 <= value <= greatest:
        raise ValueError(f"{name}: expected a number from 1 to {greatest}, got {value}")


def ctc_greedy_search(
    log_probs: Tensor,
    input_lengths: Lengths | None = None,
    *,
    blank: int = 0,
    from_logits: bool = False,
) -> Hypotheses:
    """Decode by the most probable class of each step, without repeats and blanks.

    Args:
        log_probs: `[T, N, C]` or `[T, C]` floating: log-probabilities of the classes at each step,
            or logits with `from_logits`.
        input_lengths: `[N]`, a tensor on any device, a list or a tuple; T by default.
        blank: the class of the blank.
        from_logits: whether the op takes the log-softmax itself.

    Returns:
        `Hypotheses(tokens, lengths, scores, steps)` with one hypothesis for each sequence; N is 1
        without a batch dimension. The score is the log-probability of the path in nats. Of equally
        probable classes it takes the lowest. Not differentiable.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or lengths. Lengths on a GPU are checked only
            with `PARTITA_CHECK=1`; otherwise an invalid sequence has no tokens and the score NaN,
            as has one with NaN or +inf.

    Source: Graves et al., Connectionist temporal classification, 2006, best path decoding.

    Example:
        >>> import torch, partita
        >>> logits = torch.eye(3)[[0, 1, 1, 0, 2]] * 9  # blank, 1, 1, blank, 2
        >>> found = partita.ctc_greedy_search(logits, from_logits=True)
        >>> found.tokens, found.steps, found.lengths
        (tensor([[[ 1,  2, -1, -1, -1]]]), tensor([[[ 1,  4, -1, -1, -1]]]), tensor([[2]]))
    """
    with torch.no_grad():
        x = _prepare(log_probs, input_lengths, blank)
        found = registered.greedy_search(*x, blank, bool(from_logits), current_backend())
    return Hypotheses(*found)


def ctc_beam_search(
    log_probs: Tensor,
    input_lengths: Lengths | None = None,
    *,
    blank: int = 0,
    beam_width: int = 16,
    nbest: int = 1,
    cutoff_top_n: int | None = None,
    blank_skip_threshold: float | None = None,
    from_logits: bool = False,
) -> Hypotheses:
    """Decode by prefix beam search, which sums over the alignments of a prefix.

    Args:
        log_probs, input_lengths, blank, from_logits: as in `ctc_greedy_search`.
        beam_width: the number of prefixes that go on after each step, from 1 to 256.
        nbest: the number of hypotheses that are returned, up to `beam_width`.
        cutoff_top_n: the number of labels that may extend a prefix at a step; all by default. A
            step never looks at more than `beam_width + 1`, because no others can enter the beam.
        blank_skip_threshold: a probability. Where that of the blank is above it, the step is taken
            as a blank. By default no step is.

    Returns:
        `Hypotheses(tokens, lengths, scores, steps)`, the best first. Of equal scores the prefix
        with the lower last label comes first, then the older prefix. Not differentiable.

        The search is approximate unless the beam holds all prefixes; then the scores are exact.
        `cutoff_top_n` and `blank_skip_threshold` approximate further.

    Raises:
        TypeError, ValueError: as in `ctc_greedy_search`; a number out of range.

    Source: Hannun et al., First-pass large vocabulary continuous speech recognition using
        bi-directional recurrent DNNs, 2014, without a language model.

    Example:
        >>> import torch, partita
        >>> probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]])  # blank and one label
        >>> found = partita.ctc_beam_search(probs.log(), nbest=2)
        >>> found.tokens, found.scores.exp()  # the best path alone would be empty
        (tensor([[[ 1, -1],
                 [-1, -1]]]), tensor([[0.6400, 0.3600]]))
    """
    _up_to("beam_width", beam_width, MAX_BEAM_WIDTH)
    _up_to("nbest", nbest, beam_width)
    if cutoff_top_n is not None:
        checks.at_least("cutoff_top_n", cutoff_top_n, 1)
    if blank_skip_threshold is not None:
        checks.number(
            "blank_skip_threshold", blank_skip_threshold, low=0.0, high=1.0, open_low=True
        )
    with torch.no_grad():
        x = _prepare(log_probs, input_lengths, blank)
        # No label beyond the beam_width + 1 most probable ones can enter the beam.
        labels = min(beam_width + 1, x[0].shape[2], cutoff_top_n or beam_width + 1)
        options = (beam_width, nbest, labels, float(blank_skip_threshold or 0.0))
        found = registered.beam_search(*x, blank, *options, bool(from_logits), current_backend())
    return Hypotheses(*found)


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
    _up_to("beam_width", beam_width, MAX_BEAM_WIDTH)
    check_scores(scores, state_len, alphabet_size)
    if method == "beam" and alphabet_size > MAX_ALPHABET:
        raise ValueError(
            f"alphabet_size: expected at most {MAX_ALPHABET} for a beam, got {alphabet_size}"
        )
    with torch.no_grad():
        source = constant(kmer_source, alphabet_size - 1, state_len, device=scores.device)
        edges = unflatten_scores(scores, source)
        lengths = _lengths(scores, input_lengths)
        checks.within("input_lengths", lengths, 0, scores.shape[0], "steps")
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
