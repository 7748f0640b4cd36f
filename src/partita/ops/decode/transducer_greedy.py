"""Greedy search of a transducer, for all sequences of a batch side by side.

Each round of the loop finds one label of each sequence, as the label-looping algorithm does. The
joint network sees the next frames of a sequence at once, all with the same output of the predictor,
because a blank does not change it. Of the frames up to the first label, those that the path visits
are found by pointer doubling. Then the predictor reads the labels that were found, and sequences
without a label keep their state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from .transducer_common import (
    STEPS_BETWEEN_CHECKS,
    LabelModels,
    Network,
    NodeScores,
    TransducerHypotheses,
    TransducerState,
    select_rows,
    table,
)

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


def greedy_search(
    encoder: Tensor,
    lengths: Tensor,
    network: Network,
    models: LabelModels,
    max_symbols_per_step: int,
    max_tokens: int,
    state: TransducerState | None,
) -> TransducerHypotheses:
    """Return the hypotheses of checked arguments, with at least one sequence and one frame."""
    B, T, _ = encoder.shape
    device, blank, S, K = encoder.device, network.blank, max_tokens, FRAMES_AT_ONCE
    valid = (lengths >= 0) & (lengths <= T)
    lengths = torch.where(valid, lengths, 0)
    if state is None:
        output, predictor = network.first(B, device)
        t, model_states = lengths.new_zeros(B), models.start(B)
    else:
        output, predictor, t, model_states = state[:4]
    durations = constant(table, *(network.durations or (0,)), device=device)
    longest = max(network.durations or (1,))
    rows = torch.arange(B, device=device)
    window = torch.arange(K, device=device)
    # Past the last token is a column for what is no token.
    tokens, steps = (lengths.new_full((B, S + 1), -1) for _ in range(2))
    token_durations = lengths.new_zeros(B, S + 1)
    token_scores = encoder.new_zeros(B, S + 1, dtype=torch.float64)
    count, symbols = lengths.new_zeros(B), lengths.new_zeros(B)
    total = token_scores.new_zeros(B)
    dtype = acc_dtype(encoder.dtype)
    every = STEPS_BETWEEN_CHECKS if device.type != "cpu" else 1

    round_ = 0
    while round_ % every or bool((t < lengths).any()):
        round_ += 1
        places = t[:, None] + window
        # A frame past the length may hold anything and is never read where there is another one.
        shown = torch.minimum(places, lengths[:, None] - 1).clamp_(min=0)
        scores = network.join(encoder[rows[:, None], shown], output)
        dtype = acc_dtype(scores.tokens.dtype)
        found = best_frames(scores, durations, blank)
        stops = (found.tokens != blank) | (places >= lengths[:, None])
        of_blank = found.token_scores + found.duration_scores
        at, gain = walk_blanks(stops, found.moves, of_blank, longest)
        symbols = torch.where(at > 0, 0, symbols)
        t, total = t + at, total + gain
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
            after = tuple(x[rows, token] for x in following)
            model_states = select_rows(emits, after, model_states)
        total = total + torch.where(emits, rank + duration_score, 0.0)
        place = torch.where(emits, count, S)
        tokens[rows, place] = token
        steps[rows, place] = t
        token_durations[rows, place] = move
        token_scores[rows, place] = token_score + duration_score
        count = count + emits
        symbols = symbols + emits
        move = torch.where((move == 0) & (symbols >= max_symbols_per_step), 1, move)
        t = torch.where(emits, t + move, t)
        symbols = torch.where(emits & (move > 0), 0, symbols)
        t = torch.where(count >= S, torch.maximum(t, lengths), t)
        next_output, next_state = network.predict(torch.where(emits, token, blank), predictor)
        output = select_rows(emits, next_output, output)
        predictor = select_rows(emits, next_state, predictor, network.state_dims)
    return TransducerHypotheses(
        tokens=tokens[:, None, :S],
        lengths=count[:, None],
        scores=torch.where(valid, total, torch.nan).to(dtype)[:, None],
        steps=steps[:, None, :S],
        durations=token_durations[:, None, :S],
        token_scores=token_scores[:, None, :S].to(dtype),
        state=TransducerState(output, predictor, (t - lengths).clamp(min=0), model_states),
    )
