"""Decoding of transducers, with durations (TDT) or without, under the user's own network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.lengths import Lengths, as_lengths, on_device
from .phrase_boost import PhraseBoost
from .transducer_beam import beam_search
from .transducer_common import (
    Join,
    LabelModels,
    Network,
    Predict,
    TransducerBeamState,
    TransducerHypotheses,
    TransducerState,
    checked_durations,
    no_hypotheses,
)
from .transducer_greedy import greedy_search


def _checked(
    encoder: Tensor,
    lengths: Lengths,
    blank: int,
    max_symbols_per_step: int,
    max_tokens: int | None,
    durations: Sequence[int] | None,
) -> tuple[Tensor, tuple[int, ...] | None, int]:
    """Check what both searches take, and return lengths on the device, durations and max_tokens."""
    checks.floating("encoder", encoder)
    if encoder.ndim != 3:
        raise ValueError(f"encoder: expected shape [B, T, D], got {list(encoder.shape)}")
    B, T, _ = encoder.shape
    found = on_device(encoder.device, as_lengths("lengths", lengths, B))[0]
    checks.within("lengths", found, 0, T, "frames")
    checks.at_least("blank", blank, 0)
    checks.at_least("max_symbols_per_step", max_symbols_per_step, 1)
    if max_tokens is None:
        max_tokens = max(2 * T, max_symbols_per_step)
    checks.at_least("max_tokens", max_tokens, 1)
    return found, checked_durations(durations), max_tokens


def _check_state(state: Any, kind: type[Any], B: int, models: LabelModels) -> None:
    """Check that a state is that of B streams, of a search of a kind with these models."""
    if state is None:
        return
    if not isinstance(state, kind):
        got = type(state).__name__
        raise TypeError(f"state: expected that of hypotheses, a {kind.__name__}, got {got}")
    if len(state.boosts) != B:
        raise ValueError(f"state: expected that of {B} streams, got that of {len(state.boosts)}")
    if state.boosts != models.boosts:
        pairs = enumerate(zip(state.boosts, models.boosts, strict=True))
        others = [b for b, (before, now) in pairs if before != now]
        raise ValueError(
            "state: expected that of a search with the same boosts, got one with other boosts"
            f" for the sequences {others}"
        )
    if len(state.models) != len(models):
        raise ValueError(
            f"state: expected that of a search with {len(models)} of a language model and a"
            f" boost, got one with {len(state.models)}"
        )


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
    graphs: bool = True,
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
        state: that of the hypotheses of the previous chunk of the same B streams, decoded with the
            same models.
        state_dims: the dimension of B in the tensors of the predictor's state, 1 for `nn.LSTM`; or
            a structure of such numbers, like that of the state.
        graphs: whether a GPU captures the second round in a CUDA graph and repeats it. Then
            `predict` and `join` have to do the same work at each call, whatever Python has counted
            or drawn meanwhile. Where a capture fails, a warning says why, and the search goes on
            without.

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
    sizes = (blank, max_symbols_per_step, max_tokens, durations)
    lengths, durations, S = _checked(encoder, lengths, *sizes)
    network = Network(predict, join, blank, durations, state_dims)
    with torch.no_grad():
        models = LabelModels(language_model, alpha, boost, len(encoder), encoder.device)
        _check_state(state, TransducerState, len(encoder), models)
        if not encoder.shape[0] or not encoder.shape[1]:
            return no_hypotheses(encoder, 1, S, state)
        options = (max_symbols_per_step, S, state, graphs)
        return greedy_search(encoder, lengths, network, models, *options)


def rnnt_beam_search(
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
    state: TransducerBeamState | None = None,
    final: bool = True,
    state_dims: Any = 0,
    beam_width: int = 8,
    nbest: int = 1,
    length_normalize: bool = False,
    graphs: bool = True,
) -> TransducerHypotheses:
    """Decode a transducer by beam search, which sums over the alignments of a hypothesis.

    At each step every hypothesis of the beam takes one arc, a blank or a label. Those whose tokens
    and frames agree are merged. Paths are those of `rnnt_loss` and `tdt_loss`: a blank moves on by
    at least one frame, and a path ends by a blank that leads exactly to the end of the frames.

    Args:
        encoder, lengths, predict, join, blank, durations: as in `rnnt_greedy_search`; `predict` and
            `join` see `beam_width` rows for each sequence, and `join` one frame of each.
        max_symbols_per_step: a hypothesis has no more labels on a frame.
        max_tokens: S, beyond which no hypothesis goes; 2 T by default, and at least
            `max_symbols_per_step`. In a stream, tokens that are committed do not count, and by
            default the others that are there already are added.
        language_model, alpha, boost: as in `rnnt_greedy_search`. They are added to labels, never to
            the blank, and their ends to complete hypotheses.
        state: that of the hypotheses of the previous chunk of the same B streams, decoded with the
            same models and `beam_width`.
        final: whether the frames end here. Otherwise hypotheses go on with the next chunk.
        state_dims: as in `rnnt_greedy_search`.
        beam_width: the number of hypotheses that go on after each step, and of complete ones.
        nbest: the number of hypotheses that are returned, up to `beam_width`.
        length_normalize: whether complete hypotheses are ranked by their score over their number of
            tokens, which then are their `scores`.
        graphs: as in `rnnt_greedy_search`.

    Returns:
        `TransducerHypotheses(tokens, lengths, scores, steps, durations, token_scores, state)`, the
        best first. Steps, durations and scores of tokens are those of the most probable alignment
        that the search has seen. Without frames there are no tokens and the score is 0.

        A chunk that is not final returns the best hypotheses of the beam and a state. A sequence
        waits while one of its hypotheses may move to a frame that has not arrived. All hypotheses
        share their first `state.committed[b]` tokens, which are final, and which those of the next
        chunk leave out. Scores and steps are those of the whole stream. Chunks of any sizes give
        bit for bit what one call gives, as long as no hypothesis reaches `max_tokens`. The host
        waits for the device after a chunk that is not final.

        The search is approximate unless the beam holds all hypotheses; then scores are exact.

    Raises:
        TypeError, ValueError: as in `rnnt_greedy_search`; a number out of range; a language model
            without the end of a sentence.

    Source: Saon et al., Alignment-length synchronous decoding for RNN transducer, 2020, with merged
        hypotheses as in NVIDIA's NeMo, 2025.

    Example:
        >>> import torch, partita
        >>> frames = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]]).log()  # a blank and one label
        >>> def predict(tokens, state):  # no label follows another one
        ...     return torch.tensor([[0.0, 0.0], [50.0, 0.0]])[tokens], state
        >>> def join(frames, output):
        ...     return frames + output
        >>> found = partita.rnnt_beam_search(frames, [2], predict, join, blank=0, nbest=2)
        >>> found.tokens[0, :, 0], found.scores.exp()  # the best path alone would be empty
        (tensor([ 1, -1]), tensor([[0.6400, 0.3600]]))
    """
    sizes = (blank, max_symbols_per_step, max_tokens, durations)
    lengths, durations, S = _checked(encoder, lengths, *sizes)
    checks.at_least("beam_width", beam_width, 1)
    checks.at_least("nbest", nbest, 1)
    if nbest > beam_width:
        raise ValueError(f"nbest: expected a number from 1 to {beam_width}, got {nbest}")
    network = Network(predict, join, blank, durations, state_dims)
    B, T, _ = encoder.shape
    with torch.no_grad():
        models = LabelModels(language_model, alpha, boost, B, encoder.device)
        _check_state(state, TransducerBeamState, B, models)
        if state is not None:
            S += state.longest if max_tokens is None else 0
            _check_chunk(state, encoder, S, beam_width)
        if not B or (final and state is None and not T):
            return no_hypotheses(encoder, nbest, S, state)
        options = (max_symbols_per_step, S, beam_width, nbest, bool(length_normalize), state)
        return beam_search(encoder, lengths, network, models, *options, bool(final), graphs)


def _check_chunk(state: TransducerBeamState, encoder: Tensor, S: int, beam_width: int) -> None:
    """Check that a beam search of a chunk can go on from a state."""
    before, width = state.encoder, state.numbers.shape[2] // 2
    if width != beam_width:
        raise ValueError(
            f"state: expected that of a search with beam_width={beam_width}, got one with {width}"
        )
    if state.longest > S:
        raise ValueError(
            f"max_tokens: expected at least {state.longest}, the tokens of a hypothesis of the"
            f" state that are not committed, got {S}"
        )
    one, other = ((x.shape[2], x.dtype, x.device) for x in (encoder, before))
    if one != other:
        raise ValueError(
            "encoder: expected the features, dtype and device of the chunks before,"
            f" {', '.join(map(str, other))}, got {', '.join(map(str, one))}"
        )
