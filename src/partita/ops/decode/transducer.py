"""Decoding of transducers, with durations (TDT) or without, under the user's own network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.lengths import Lengths, as_lengths, on_device
from .phrase_boost import PhraseBoost
from .transducer_common import (
    Join,
    LabelModels,
    Network,
    Predict,
    TransducerHypotheses,
    TransducerState,
    checked_durations,
    no_hypotheses,
)
from .transducer_greedy import greedy_search


def _least(name: str, value: Any, least: int) -> None:
    checks.python_int(name, value)
    if value < least:
        raise ValueError(f"{name}: expected a number of at least {least}, got {value}")


def _checked_lengths(encoder: Tensor, lengths: Lengths) -> Tensor:
    """Return the lengths `[B]` on the device of the encoder's output `[B, T, D]`."""
    checks.floating("encoder", encoder)
    if encoder.ndim != 3:
        raise ValueError(f"encoder: expected shape [B, T, D], got {list(encoder.shape)}")
    B, T, _ = encoder.shape
    found = on_device(encoder.device, as_lengths("lengths", lengths, B))[0]
    checks.within("lengths", found, 0, T, "frames")
    return found


def rnnt_greedy_search(
    encoder: Tensor,
    lengths: Lengths,
    predict: Predict,
    join: Join,
    *,
    blank: int,
    durations: Sequence[int] | None = None,
    max_symbols_per_step: int = 10,
    max_tokens: int | None = None,
    language_model: Any = None,
    alpha: float = 0.3,
    boost: PhraseBoost | Sequence[PhraseBoost | None] | None = None,
    state: TransducerState | None = None,
    state_dims: Any = 0,
) -> TransducerHypotheses:
    """Decode a transducer by the most probable token of each frame.

    A label keeps the frame, or moves on by its duration in a token-and-duration transducer (TDT). A
    blank moves on by one frame or by its duration, of which 0 counts as 1. Tokens and durations are
    chosen apart from each other.

    Args:
        encoder: `[B, T, D]` floating, the output of the encoder. Frames past the lengths reach no
            result.
        lengths: `[B]`, a tensor on any device, a list or a tuple.
        predict: `predict(tokens [B], state) -> (output [B, P], state)`, which reads one label of
            each sequence. The first call has blanks and the state None. It leaves the state that it
            is given as it is, because sequences without a new label keep theirs.
        join: `join(frames [B, K, D], output [B, 1, P]) -> logits [B, K, V]`, and V + the number of
            durations for a TDT, tokens first.
        blank: the class of the blank, from 0 to V - 1.
        durations: those of a TDT, in frames.
        max_symbols_per_step: after so many labels on a frame, the search moves on by one frame.
        max_tokens: S, at which a hypothesis ends; 2 T by default, and at least
            `max_symbols_per_step`.
        language_model: an `NgramLM` whose columns are the V classes, or an object with its methods
            `start`, `advance` and `final`.
        alpha: the weight of the language model.
        boost: a `PhraseBoost`, or a list `[B]` of them or None. Boost and language model choose
            among the labels where the network prefers a label to the blank.
        state: that of the hypotheses of the previous chunk of the same B streams.
        state_dims: the dimension of B in the tensors of the predictor's state, 1 for `nn.LSTM`; or
            a structure of such numbers, like that of the state.

    Returns:
        `TransducerHypotheses(tokens, lengths, scores, steps, durations, token_scores, state)` with
        one hypothesis for each sequence. The score is that of the path, its blanks included. Of
        equally probable classes it takes the lowest. Without frames there are no tokens and the
        score is 0. A chunk has its own tokens and scores, and its steps count from its start.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes, devices, lengths or numbers, of what `predict`,
            `join` and the models return too. Lengths on a GPU are checked only with
            `PARTITA_CHECK=1`; otherwise an invalid sequence has no tokens and the score NaN.

    Source: Bataev et al., Label-looping: highly efficient decoding for transducers, 2024; the rules
        are those of greedy search in NVIDIA's NeMo, 2024.

    Example:
        >>> import torch, partita
        >>> frames = 9 * torch.eye(3)[None, [1, 0, 2, 0]]  # 1, the blank, 2, the blank
        >>> def predict(tokens, state):
        ...     return 9 * torch.eye(3)[tokens], state
        >>> def join(frames, output):  # the last label is not written again
        ...     return frames - output
        >>> found = partita.rnnt_greedy_search(frames, [4], predict, join, blank=0)
        >>> found.tokens[0, 0, : found.lengths[0, 0]], found.steps[0, 0, : found.lengths[0, 0]]
        (tensor([1, 2]), tensor([0, 2]))
    """
    checked = _checked_lengths(encoder, lengths)
    B, T, _ = encoder.shape
    _least("blank", blank, 0)
    _least("max_symbols_per_step", max_symbols_per_step, 1)
    if max_tokens is None:
        max_tokens = max(2 * T, max_symbols_per_step)
    _least("max_tokens", max_tokens, 1)
    if state is not None and (not isinstance(state, TransducerState) or len(state.output) != B):
        raise ValueError(f"state: expected that of hypotheses of {B} streams, got {state!r:.60}")
    network = Network(predict, join, blank, checked_durations(durations), state_dims)
    with torch.no_grad():
        models = LabelModels(language_model, alpha, boost, B, encoder.device)
        if not B or not T:
            return no_hypotheses(encoder, 1, max_tokens, state)
        options = (max_symbols_per_step, max_tokens, state)
        return greedy_search(encoder, checked, network, models, *options)
