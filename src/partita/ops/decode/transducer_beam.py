"""Beam search of a transducer, for all sequences of a batch side by side.

At each step every hypothesis takes one arc, a blank or a label, so for RNN-T all of them have the
same number of frames plus labels (alignment-length synchronous). Hypotheses whose tokens and frames
agree are one, and their probabilities are added. A blank that leads exactly to the end of the
frames completes a hypothesis. The best complete ones are kept apart from the beam.

The tokens of a hypothesis are a node of a trie, which is known by its key: the node without the
last token, times V, plus that token. All keys of a sequence are in a table, in which new ones are
looked up, so that equal tokens are always one node. What was emitted when is a list of events, each
of which leads to the one before, along the most probable alignment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from .transducer_common import (
    LabelModels,
    Network,
    TransducerHypotheses,
    leaves_of,
    write_rows,
    table,
    take_rows,
)

STEPS_BETWEEN_CHECKS = 10
CANDIDATES = 4  # for each place of the beam, the extensions among which equal ones are looked for


class Beam(NamedTuple):
    """Hypotheses of each sequence, each field `[B, W]`.

    Fields:
        nodes, keys: the tokens, as a node of the trie and by its key; -1 is that of no tokens.
        frames: the frame that each has reached.
        scores: what they are ranked by, -inf where there is none.
        best: the score of the most probable alignment.
        counts: the number of tokens.
        symbols: the number of labels on the frame.
        events: the last event of the most probable alignment, -1 for none.
    """

    nodes: Tensor
    keys: Tensor
    frames: Tensor
    scores: Tensor
    best: Tensor
    counts: Tensor
    symbols: Tensor
    events: Tensor


class Extensions(NamedTuple):
    """Hypotheses and an arc that each of them takes, each field `[B, C]`.

    Fields:
        scores, best, keys: as in `Beam`, with the arc.
        origins: the place of the hypothesis; W more for one that is complete and takes no arc.
        tokens: the token of the arc.
        frames: the frame that it leads to.
        moves: the frames by which it moves on.
        token_scores: the log-probability of the arc in the network.
    """

    scores: Tensor
    best: Tensor
    keys: Tensor
    origins: Tensor
    tokens: Tensor
    frames: Tensor
    moves: Tensor
    token_scores: Tensor


class Event(NamedTuple):
    """The labels that the hypotheses of one step have emitted, each field `[B, W]`."""

    before: Tensor  # the event before, -1 for none
    tokens: Tensor
    steps: Tensor
    durations: Tensor
    token_scores: Tensor


def take(records: tuple[Tensor, ...], places: Tensor) -> list[Tensor]:
    """Return the entries of tensors `[B, X]` at places `[B, Y]`."""
    return [x.gather(1, places) for x in records]


def no_beam(lengths: Tensor, W: int) -> Beam:
    """Return a beam without hypotheses, in which the root of the trie is anywhere."""
    zeros = lengths.new_zeros(len(lengths), W)
    nothing = zeros.new_full(zeros.shape, -torch.inf, dtype=torch.float64)
    return Beam(zeros, zeros - 1, zeros, nothing, nothing, zeros, zeros, zeros - 1)


def best_first(scores: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the greatest scores of each row, and their places."""
    values, places = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :number], places[:, :number]


def extensions_of(
    beam: Beam,
    log_probs: Tensor,
    ranks: Tensor,
    log_durations: Tensor,
    moves: Tensor,
    ending: Tensor,
    lengths: Tensor,
    blank: int,
) -> Extensions:
    """Return the best extensions of a beam by one arc, the best first.

    Args:
        beam: the hypotheses.
        log_probs: `[B, W, V]`, those of the tokens.
        ranks: `[B, W, V]`, the same with the models; -inf for the blank and impossible labels.
        log_durations: `[B, W, D]`.
        moves: `[2, D]`, the frames by which a blank and a label move on; -1 for none.
        ending: `[B, W]`, what the models add at the end.
        lengths: `[B]`.
        blank: the class of the blank.
    """
    W, V = log_probs.shape[1:]
    # A label that is not among the W best of a hypothesis cannot enter the beam.
    top, labels = ranks.topk(min(W, V - 1), dim=2)
    tokens = torch.cat([torch.full_like(labels[..., :1], blank), labels], 2)
    token_scores = log_probs.gather(2, tokens)[..., None] + log_durations[:, :, None]
    of_tokens = torch.cat([log_probs[..., blank, None], top], 2)[..., None]
    gains = of_tokens + log_durations[:, :, None]
    move = torch.cat([moves[:1], moves[1:].expand(labels.shape[2], -1)])  # [1 + labels, D]
    frames = beam.frames[..., None, None] + move
    ends, is_blank = frames == lengths[:, None, None, None], (tokens == blank)[..., None]
    gains = gains + torch.where(ends, ending[..., None, None], 0.0)
    possible = (move >= 0) & ((frames < lengths[:, None, None, None]) | (ends & is_blank))
    # An impossible token stays impossible where other scores are NaN: the sum would be NaN.
    possible = possible & (beam.scores != -torch.inf)[..., None, None] & (of_tokens != -torch.inf)
    scores, best = (
        torch.where(possible, x[..., None, None] + gains, -torch.inf)
        for x in (beam.scores, beam.best)
    )
    keys = torch.where(tokens == blank, beam.keys[..., None], beam.nodes[..., None] * V + tokens)
    origins = torch.arange(W, device=frames.device)[:, None, None]
    fields = (scores, best, keys[..., None], origins, tokens[..., None], frames, move, token_scores)
    flat = [x.expand(scores.shape).flatten(1) for x in fields]
    _, places = best_first(flat[0], CANDIDATES * W)
    return Extensions(*take(tuple(flat), places))


def merge(found: Extensions) -> Extensions:
    """Add the probabilities of extensions whose tokens and frames agree.

    The sum is at the first of them, and the others have -inf. The other fields are those of the one
    with the most probable alignment.
    """
    alive = found.scores != -torch.inf
    same = alive[:, :, None] & alive[:, None]
    for x in (found.keys, found.frames):
        same = same & (x[:, :, None] == x[:, None])
    total = torch.where(same, found.scores[:, None], -torch.inf).logsumexp(2)
    repeats = (same & torch.ones_like(same[0]).tril(-1)).any(2)
    chosen = torch.where(same, found.best[:, None], -torch.inf).argmax(2)
    merged = Extensions(*take(found, chosen))
    return merged._replace(scores=total.masked_fill(repeats, -torch.inf))


def next_beam(beam: Beam, found: Extensions, among: Tensor, W: int) -> tuple[Beam, Extensions]:
    """Return the best W hypotheses after the extensions of a mask, and their arcs."""
    scores, places = best_first(torch.where(among, found.scores, -torch.inf), W)
    arcs = Extensions(*take(found, places))
    before = Beam(*take(beam, arcs.origins))
    emits = (arcs.keys != before.keys) & (scores != -torch.inf)
    on_frame = arcs.frames == before.frames
    after = before._replace(
        keys=arcs.keys,
        frames=arcs.frames,
        scores=scores,
        best=arcs.best,
        counts=before.counts + emits,
        symbols=torch.where(on_frame, before.symbols + emits, 0),
    )
    return after, arcs


def nodes_of(known: Tensor, keys: Tensor, is_new: Tensor, used: int) -> Tensor:
    """Return the nodes of keys `[B, W]`, and enter those that are not known yet.

    The first `used` entries of `known` are the keys of nodes; it gets W more. Only keys that are
    `is_new` are looked up.
    """
    W = keys.shape[1]
    equal = known[:, None, :used] == keys[..., None]
    same = (keys[..., None] == keys[:, None]) & is_new[:, None]
    place, first = equal.int().argmax(2), same.int().argmax(2)
    is_known = equal.any(2)
    enters = is_new & ~is_known & (first == torch.arange(W, device=keys.device))
    known[:, used : used + W] = torch.where(enters, keys, -2)
    return torch.where(is_known, place, used + first)


def beam_search(
    encoder: Tensor,
    lengths: Tensor,
    network: Network,
    models: LabelModels,
    max_symbols_per_step: int,
    max_tokens: int,
    beam_width: int,
    nbest: int,
    length_normalize: bool,
) -> TransducerHypotheses:
    """Return the hypotheses of checked arguments, with at least one sequence and one frame."""
    B, T, _ = encoder.shape
    device, blank, S, W = encoder.device, network.blank, max_tokens, beam_width
    valid = (lengths >= 0) & (lengths <= T)
    lengths = torch.where(valid, lengths, 0)
    output, predictor = network.first(B * W, device)
    model_states = tuple(x.repeat_interleave(W, 0) for x in models.start(B))
    of_labels = network.durations or (0,)
    of_blanks = tuple(d or -1 for d in network.durations or (1,))  # none has the duration 0
    moves = constant(table, of_blanks, of_labels, device=device)
    nothing, first = no_beam(lengths, W), torch.arange(W, device=device) == 0
    has_frames = (lengths > 0)[:, None]

    def root(mask: Tensor) -> Beam:
        score = torch.where(mask & first, 0.0, nothing.scores)
        return nothing._replace(scores=score, best=score)

    beam, ends = root(has_frames), root(~has_frames)  # ends are the complete hypotheses
    known = lengths.new_full((B, 1 + (T + S) * W), -2)  # the keys of the nodes
    known[:, 0] = -1
    events: list[Event] = []
    sequence = torch.arange(B, device=device)[:, None]
    dtype, every = acc_dtype(encoder.dtype), STEPS_BETWEEN_CHECKS if device.type != "cpu" else 1

    for step in range(T + S):
        if step % every == 0 and not bool((beam.scores != -torch.inf).any()):
            break
        shown = torch.minimum(beam.frames, lengths[:, None] - 1).clamp_(min=0)
        logits = network.join(encoder[sequence, shown].flatten(0, 1)[:, None], output)
        scores = network.scores(logits)
        dtype, V = acc_dtype(scores.tokens.dtype), scores.tokens.shape[2]
        log_probs = scores.tokens.log_softmax(-1).double().view(B, W, V)
        log_durations = log_probs.new_zeros(B, W, 1)
        if scores.durations is not None:
            log_durations = scores.durations.log_softmax(-1).double().view(B, W, -1)
        ranks, ending, following = log_probs.clone(), torch.zeros_like(beam.scores), model_states
        if models:
            added, following = models.advance(model_states, V)
            ranks, ending = ranks + added.view(B, W, V), models.final(model_states).view(B, W)
        full = (beam.counts >= S) | (beam.symbols >= max_symbols_per_step)
        ranks = ranks.masked_fill(full[..., None], -torch.inf)
        ranks[..., blank] = -torch.inf
        found = extensions_of(beam, log_probs, ranks, log_durations, moves, ending, lengths, blank)

        # Complete hypotheses take no arc, and merge with those that become complete.
        hypotheses = Beam(*(torch.cat(each, 1) for each in zip(beam, ends, strict=True)))
        complete = Extensions(
            scores=ends.scores,
            best=ends.best,
            keys=ends.keys,
            origins=torch.arange(W, 2 * W, device=device).expand(B, -1),
            tokens=torch.full_like(ends.keys, blank),
            frames=lengths[:, None].expand(-1, W),
            moves=torch.zeros_like(ends.keys),
            token_scores=torch.zeros_like(ends.best),
        )
        found = merge(Extensions(*(torch.cat(x, 1) for x in zip(found, complete, strict=True))))
        is_end = found.frames == lengths[:, None]
        ends, _ = next_beam(hypotheses, found, is_end, W)
        # But for boosts, a hypothesis only loses, and cannot overtake the W best complete ones.
        is_open = ~is_end & ~(found.scores < ends.scores[:, -1:])
        beam_before, (beam, arcs) = beam, next_beam(hypotheses, found, is_open, W)
        exists, origins = beam.scores != -torch.inf, arcs.origins.clamp(max=W - 1)
        emits = exists & (arcs.tokens != blank)
        steps = beam_before.frames.gather(1, origins)
        events.append(Event(beam.events, arcs.tokens, steps, arcs.moves, arcs.token_scores))
        nodes = nodes_of(known, beam.keys, emits, 1 + step * W)
        beam = beam._replace(
            nodes=torch.where(emits, nodes, beam.nodes),
            events=torch.where(emits, step * W + torch.arange(W, device=device), beam.events),
        )
        rows, tokens, new = (
            (sequence * W + origins).flatten(),
            arcs.tokens.flatten(),
            emits.flatten(),
        )
        output, predictor = take_rows(rows, output), take_rows(rows, predictor, network.state_dims)
        next_output, next_state = network.predict(tokens, predictor)
        dims = (0, network.state_dims)
        write_rows(new, leaves_of((next_output, next_state), (output, predictor), dims))
        after = tuple(x[rows, tokens] for x in following) if models else ()
        model_states = take_rows(rows, model_states)
        write_rows(new, leaves_of(after, model_states))

    if length_normalize:
        ends = ends._replace(scores=ends.scores / ends.counts.clamp(min=1))
    ends = Beam(*take(ends, best_first(ends.scores, nbest)[1]))
    return _traced(ends, events, valid, S, dtype)


def _traced(
    ends: Beam,
    events: list[Event],
    valid: Tensor,
    S: int,
    dtype: torch.dtype,
) -> TransducerHypotheses:
    """Return complete hypotheses with their tokens, by the events from their ends on."""
    exists = (ends.scores != -torch.inf) & valid[:, None]
    lengths = torch.where(exists, ends.counts, 0)
    # Past the last token is a column for what is no token.
    tokens, steps = (lengths.new_full((*lengths.shape, S + 1), -1) for _ in range(2))
    durations = torch.zeros_like(tokens)
    token_scores = torch.zeros_like(tokens, dtype=ends.scores.dtype)
    if events:
        every = Event(*(torch.stack(each, 1).flatten(1) for each in zip(*events, strict=True)))
        place, event = lengths - 1, ends.events.clamp(min=0)
        for _ in range(int(lengths.max())):
            column = torch.where(place >= 0, place, S)[..., None]
            event_before, *emitted = take(every, event)
            for field, value in zip((tokens, steps, durations, token_scores), emitted, strict=True):
                field.scatter_(2, column, value[..., None])
            place, event = place - 1, event_before.clamp(min=0)
    scores = torch.where(valid[:, None], ends.scores, torch.nan)
    return TransducerHypotheses(
        tokens=tokens[..., :S],
        lengths=lengths,
        scores=scores.to(dtype),
        steps=steps[..., :S],
        durations=durations[..., :S],
        token_scores=token_scores[..., :S].to(dtype),
        state=None,
    )
