"""Decoding of CTC: greedy search and prefix beam search."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.backend import current_backend
from ...runtime.lengths import Lengths, as_lengths, on_device
from . import registered
from .common import MAX_BEAM_WIDTH, Hypotheses


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
    T, N, C = log_probs.shape
    checks.blank(blank, C)
    if input_lengths is None:
        return log_probs, log_probs.new_full((N,), T, dtype=torch.int64)
    lengths = as_lengths("input_lengths", input_lengths, N)
    return log_probs, on_device(log_probs.device, lengths)[0]


def _number(name: str, value: int, least: int, greatest: int | None = None) -> None:
    checks.python_int(name, value)
    if value < least or (greatest is not None and value > greatest):
        bound = f"from {least} to {greatest}" if greatest is not None else f"of at least {least}"
        raise ValueError(f"{name}: expected a number {bound}, got {value}")


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
    _number("beam_width", beam_width, 1, MAX_BEAM_WIDTH)
    _number("nbest", nbest, 1, beam_width)
    if cutoff_top_n is not None:
        _number("cutoff_top_n", cutoff_top_n, 1)
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
