"""The functions of `fast_ctc_decode`, on probabilities of one sequence.

Its beam search goes backward in time and in fp32. So the same bases come out where the beam holds
all prefixes that matter, and others may where it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.decode.api import ctc_beam_search, ctc_greedy_search
from ..ops.decode.common import MAX_BEAM_WIDTH, Hypotheses
from ..runtime import checks

__all__ = ["beam_search", "viterbi_search"]


def beam_search(
    network_output: Any,
    alphabet: Sequence[str],
    beam_size: int = 5,
    beam_cut_threshold: float = 0.0,
    collapse_repeats: bool = True,
) -> tuple[str, list[int]]:
    """Decode one sequence by prefix beam search.

    Args:
        network_output: `[T, C]` probabilities, an array or a tensor on any device.
        alphabet: the text of each class; the first is the blank.
        beam_size: the number of prefixes that go on after each step, up to 256.
        beam_cut_threshold: probabilities below it count as 0.
        collapse_repeats: True; the search has no other meaning here.

    Returns:
        The text, and the step at which each label is emitted first.

    Raises:
        TypeError, ValueError: a wrong shape, dtype or number; `collapse_repeats=False`.

    Source: the function of this name in fast-ctc-decode 0.3, 2019; the method is that of
        `partita.ctc_beam_search`.

    Example:
        >>> import torch
        >>> from partita.integrations.fast_ctc_decode import beam_search
        >>> probabilities = torch.tensor([[0.1, 0.9, 0.0], [0.6, 0.4, 0.0], [0.1, 0.0, 0.9]])
        >>> beam_search(probabilities, "-AB")
        ('AB', [0, 2])
    """
    if not collapse_repeats:
        raise ValueError("collapse_repeats: expected True, got False")
    checks.number("beam_cut_threshold", beam_cut_threshold, low=0.0, high=1.0)
    if not 1 <= beam_size <= MAX_BEAM_WIDTH:
        raise ValueError(f"beam_size: expected 1 to {MAX_BEAM_WIDTH}, got {beam_size}")
    log_probs = _log_probs(network_output, alphabet, beam_cut_threshold)
    return _text(ctc_beam_search(log_probs, beam_width=beam_size), alphabet)


def viterbi_search(
    network_output: Any, alphabet: Sequence[str], qstring: bool = False
) -> tuple[str, list[int]]:
    """Decode one sequence by the most probable class of each step.

    Args:
        network_output, alphabet: as in `beam_search`.
        qstring: False; no quality follows the text.

    Returns:
        The text, and the step at which each label is emitted first.

    Raises:
        TypeError, ValueError: a wrong shape or dtype; `qstring=True`.

    Source: the function of this name in fast-ctc-decode 0.3, 2019.

    Example:
        >>> import torch
        >>> from partita.integrations.fast_ctc_decode import viterbi_search
        >>> probabilities = torch.tensor([[0.1, 0.9, 0.0], [0.6, 0.4, 0.0], [0.1, 0.0, 0.9]])
        >>> viterbi_search(probabilities, "-AB")
        ('AB', [0, 2])
    """
    if qstring:
        raise ValueError("qstring: expected False, got True")
    return _text(ctc_greedy_search(_log_probs(network_output, alphabet, 0.0)), alphabet)


def _log_probs(network_output: Any, alphabet: Sequence[str], threshold: float) -> Tensor:
    probabilities = torch.as_tensor(network_output)
    checks.floating("network_output", probabilities)
    shape = list(probabilities.shape)
    if len(shape) != 2 or shape[1] != len(alphabet):
        raise ValueError(
            f"network_output: expected shape [T, C] with C = {len(alphabet)}, got {shape}"
        )
    return probabilities.masked_fill(probabilities < threshold, 0.0).log()


def _text(found: Hypotheses, alphabet: Sequence[str]) -> tuple[str, list[int]]:
    length = int(found.lengths[0, 0])
    tokens = found.tokens[0, 0, :length].tolist()
    return "".join(alphabet[token] for token in tokens), found.steps[0, 0, :length].tolist()
