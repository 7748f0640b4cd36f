"""Greedy search of a transducer, for all sequences of a batch side by side.

Each round of the loop finds one label of each sequence, as the label-looping algorithm does. The
joint network sees the next frames of a sequence at once, all with the same output of the predictor,
because a blank does not change it. Of the frames up to the first label, those that the path visits
are found by pointer doubling. Then the predictor reads the labels that were found, and sequences
without a label keep their state.

All that a round changes is in memory that stays where it is, so that a CUDA graph can repeat it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...runtime.backend import current_backend, resolve
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from .transducer_common import (
    LabelModels,
    Network,
    NodeScores,
    TransducerHypotheses,
    TransducerState,
    Walk,
    Written,
    leaves_of,
    own_copy,
    rows_at,
    table,
    write_rows,
)
from .transducer_rounds import repeat

FRAMES_AT_ONCE = 8  # that the joint network sees; a power of two


class Frames(NamedTuple):
    """The best token of each frame, and its duration.

    Fields:
        tokens: `[B, K]`.
        moves: `[B, K]`, the frames by which it moves on, at least 1 for a blank.
        token_scores, duration_scores: `[B, K]` log-probabilities, fp64.
    """

    tokens: Tensor
    moves: Tensor
    token_scores: Tensor
    duration_scores: Tensor


def best_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the greatest class and its log-probability, in fp64."""
    best = logits.argmax(-1)
    log_probs = logits.log_softmax(-1).gather(-1, best[..., None])
    return best, log_probs.squeeze(-1).double()


def best_frames(scores: NodeScores, durations: Tensor, blank: int) -> Frames:
    """Return the best token and the best duration of each frame."""
    tokens, token_scores = best_of(scores.tokens)
    if scores.durations is None:
        moves, duration_scores = torch.zeros_like(tokens), torch.zeros_like(token_scores)
    else:
        chosen, duration_scores = best_of(scores.durations)
        moves = durations[chosen]
    moves = torch.where((tokens == blank) & (moves == 0), 1, moves)
    return Frames(tokens, moves, token_scores, duration_scores)


def walk_blanks(stops: Tensor, moves: Tensor, scores: Tensor, longest: int) -> tuple[Tensor, ...]:
    """Return the first place that stops a walk from place 0, `[B]`, and the score of the walk.

    From a place that does not stop, the walk moves on and adds its score. Tensors are `[B, K]`.
    Places from K on stop.
    """
    B, K = stops.shape
    places = torch.arange(K + longest, device=stops.device).expand(B, -1)
    ahead = places + pad(torch.where(stops, 0, moves), (0, longest))
    gains = pad(torch.where(stops, 0.0, scores), (0, longest))
    for _ in range(K.bit_length() - 1):
        gains = gains + gains.gather(1, ahead)
        ahead = ahead.gather(1, ahead)
    return ahead[:, 0], gains[:, 0]


def shown_frames(encoder: Tensor, t: Tensor, lengths: Tensor) -> Tensor:
    """Return the frames from t on that the joint network sees, `[B, K, D]`.

    A frame past the length may hold anything and is never read where there is another one.
    """
    places = t[:, None] + torch.arange(FRAMES_AT_ONCE, device=t.device)
    return rows_at(encoder, torch.minimum(places, lengths[:, None] - 1).clamp_(min=0))


def advance(
    scores: NodeScores,
    encoder: Tensor,
    lengths: Tensor,
    durations: Tensor,
    longest: int,
    walk: Walk,
    written: Written,
    models: LabelModels,
    model_states: tuple[Tensor, ...],
    blank: int,
    max_symbols_per_step: int,
) -> None:
    """Move each sequence on past its next label, and write the label.

    Args:
        scores: those of the frames `walk.frames`.
        encoder: `[B, T, D]`.
        lengths: `[B]`.
        durations: `[number of durations]`; a 0 for RNN-T.
        longest: the greatest duration.
        walk, written, model_states: what is written to.
        models: the language model and boosted phrases.
        blank, max_symbols_per_step: as in `rnnt_greedy_search`.
    """
    t, symbols, K, S = walk.t, walk.symbols, FRAMES_AT_ONCE, written.tokens.shape[1] - 1
    rows = torch.arange(len(t), device=t.device)
    found = best_frames(scores, durations, blank)
    places = t[:, None] + torch.arange(K, device=t.device)
    stops = (found.tokens != blank) | (places >= lengths[:, None])
    of_blank = found.token_scores + found.duration_scores
    at, gain = walk_blanks(stops, found.moves, of_blank, longest)
    symbols = torch.where(at > 0, 0, symbols)
    t, total = t + at, walk.total + gain
    emits = (at < K) & (t < lengths)
    column = at.clamp(max=K - 1)
    token, move, token_score, duration_score = (x[rows, column] for x in found)
    rank = token_score
    if models:
        log_probs = scores.tokens[rows, column].log_softmax(-1).double()
        added, following = models.advance(model_states, log_probs.shape[-1])
        ranks = log_probs + added
        ranks[:, blank] = -torch.inf
        # Where no label is possible, the network's own stays, whose score is -inf.
        rank, best = ranks.max(-1)
        token = torch.where(rank == -torch.inf, token, best)
        token_score, rank = log_probs[rows, token], ranks[rows, token]
        write_rows(emits, leaves_of(tuple(x[rows, token] for x in following), model_states))
    total = total + torch.where(emits, rank + duration_score, 0.0)
    place = torch.where(emits, walk.counts, S)
    emitted = (token, t, move, token_score + duration_score)
    for field, value in zip(written, emitted, strict=True):
        field[rows, place] = value
    count, symbols = walk.counts + emits, symbols + emits
    move = torch.where((move == 0) & (symbols >= max_symbols_per_step), 1, move)
    t = torch.where(emits, t + move, t)
    symbols = torch.where(emits & (move > 0), 0, symbols)
    t = torch.where(count >= S, torch.maximum(t, lengths), t)
    token, frames = torch.where(emits, token, blank), shown_frames(encoder, t, lengths)
    after = Walk(t, count, symbols, total, t < lengths, emits, token, frames)
    for old, new in zip(walk, after, strict=True):
        old.copy_(new)


def greedy_search(
    encoder: Tensor,
    lengths: Tensor,
    network: Network,
    models: LabelModels,
    max_symbols_per_step: int,
    max_tokens: int,
    state: TransducerState | None,
    graphs: bool,
) -> TransducerHypotheses:
    """Return the hypotheses of checked arguments, with at least one sequence and one frame."""
    (B, T, _), S, device = encoder.shape, max_tokens, encoder.device
    valid = (lengths >= 0) & (lengths <= T)
    lengths = torch.where(valid, lengths, 0)
    if state is None:
        output, predictor = network.first(B, device)
        t, model_states = lengths.new_zeros(B), models.start(B)
    else:
        output, predictor, t, model_states = state[:4]
    t, model_states, dims = t.clone(), own_copy(model_states), (0, network.state_dims)
    output, predictor = own_copy((output, predictor), dims)
    zeros = torch.zeros_like(t)
    walk = Walk(
        t=t,
        counts=zeros,
        symbols=zeros.clone(),
        total=zeros.double(),
        is_open=t < lengths,
        emits=torch.zeros_like(valid),
        token=zeros.clone(),
        frames=shown_frames(encoder, t, lengths),
    )
    # Past the last token is a column for what is no token.
    tokens = lengths.new_full((B, S + 1), -1)
    none = torch.zeros_like(tokens)
    written = Written(tokens, tokens.clone(), none, none.double())
    durations = constant(table, *(network.durations or (0,)), device=device)
    longest, options = max(network.durations or (1,)), (network.blank, max_symbols_per_step)
    has_kernels = resolve(current_backend(), device, has_cpu=False) == "gpu"
    if has_kernels:
        from .gpu import launch_transducer as kernels
    dtype = acc_dtype(encoder.dtype)

    def one_round() -> None:
        nonlocal dtype
        logits = network.join(walk.frames, output)
        dtype = acc_dtype(logits.dtype)
        given = (encoder, lengths, durations)
        if has_kernels and not models:
            number = len(network.durations or ())
            kernels.advance(logits, *given, number, walk, written, *options)
        else:
            scores, own = network.scores(logits), (models, model_states)
            advance(scores, *given, longest, walk, written, *own, *options)
        leaves = leaves_of(network.predict(walk.token, predictor), (output, predictor), dims)
        (kernels.write_rows if has_kernels else write_rows)(walk.emits, leaves)

    repeat(one_round, walk.is_open, T + S, graphs, network.predictor)
    return TransducerHypotheses(
        tokens=tokens[:, None, :S],
        lengths=walk.counts[:, None],
        scores=torch.where(valid, walk.total, torch.nan).to(dtype)[:, None],
        steps=written.steps[:, None, :S],
        durations=written.durations[:, None, :S],
        token_scores=written.token_scores[:, None, :S].to(dtype),
        state=TransducerState(
            output, predictor, (walk.t - lengths).clamp(min=0), model_states, models.boosts
        ),
    )
