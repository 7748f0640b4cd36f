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
        RuntimeError: a number is NaN or infinite, or no path has a probability above 0, as where
            the numbers are log-probabilities.

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
    numbers = _numbers(network_output, alphabet)
    log_probs = numbers.masked_fill(numbers < beam_cut_threshold, 0.0).log()
    found = ctc_beam_search(log_probs, beam_width=beam_size)
    if found.scores[0, 0] == -torch.inf:
        raise RuntimeError(
            "network_output: expected probabilities, got numbers of which no path is above 0;"
            " partita.ctc_beam_search takes log-probabilities"
        )
    return _text(found, alphabet)


def viterbi_search(
    network_output: Any, alphabet: Sequence[str], qstring: bool = False
) -> tuple[str, list[int]]:
    """Decode one sequence by the most probable class of each step.

    Args:
        network_output: `[T, C]`, an array or a tensor on any device: probabilities, or any numbers
            in their order, such as their logarithms.
        alphabet: as in `beam_search`.
        qstring: False; no quality follows the text.

    Returns:
        The text, and the step at which each label is emitted first.

    Raises:
        TypeError, ValueError: a wrong shape or dtype; `qstring=True`.
        RuntimeError: a number is NaN or +inf.

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
    return _text(ctc_greedy_search(_numbers(network_output, alphabet)), alphabet)


def _numbers(network_output: Any, alphabet: Sequence[str]) -> Tensor:
    """Return the numbers as a tensor, of which none is NaN or +inf."""
    numbers = torch.as_tensor(network_output)
    checks.floating("network_output", numbers)
    shape = list(numbers.shape)
    if len(shape) != 2 or shape[1] != len(alphabet):
        raise ValueError(
            f"network_output: expected shape [T, C] with C = {len(alphabet)}, got {shape}"
        )
    if (index := checks.first_index(~(numbers < torch.inf))) is not None:
        raise RuntimeError(
            f"network_output: expected probabilities, got {float(numbers[index])} at {list(index)}"
        )
    return numbers


def _text(found: Hypotheses, alphabet: Sequence[str]) -> tuple[str, list[int]]:
    length = int(found.lengths[0, 0])
    tokens = found.tokens[0, 0, :length].tolist()
    return "".join(alphabet[token] for token in tokens), found.steps[0, 0, :length].tolist()
