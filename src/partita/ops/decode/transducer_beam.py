"""Beam search of a transducer, for all sequences of a batch side by side.

At each step every hypothesis takes one arc, a blank or a label, so for RNN-T all of them have the
same number of frames plus labels (alignment-length synchronous). Hypotheses whose tokens and frames
agree are one, and their probabilities are added. A blank that leads exactly to the end of the
frames completes a hypothesis. The best complete ones are kept apart from the beam.

The tokens of a hypothesis are a node of a trie, which is known by its key: the node without the
last token, times V, plus that token. All keys of a sequence are in a table, in which new ones are
looked up, so that equal tokens are always one node. What was emitted when is a list of events, each
of which leads to the one before, along the most probable alignment.

All that a round changes is in memory that stays where it is, so that a CUDA graph can repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.backend import current_backend, resolve
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from .transducer_common import (
    CANDIDATES,
    Beam,
    Event,
    LabelModels,
    Network,
    NodeScores,
    Progress,
    TransducerHypotheses,
    leaves_of,
    merge_rows,
    own_copy,
    table,
    take_rows,
    write_rows,
)
from .transducer_rounds import repeat

WIDEST = 8  # the beam that the kernel serves


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


def take(records: tuple[Tensor, ...], places: Tensor) -> list[Tensor]:
    """Return the entries of tensors `[B, X]` at places `[B, Y]`."""
    return [x.gather(1, places) for x in records]


def start(encoder: Tensor, lengths: Tensor, W: int, steps: int, blank: int) -> Progress:
    """Return the progress before the first step, with the empty hypothesis for each sequence."""
    B = len(lengths)
    integers = lengths.new_zeros(B, len(Beam._fields) - 2, 2 * W)
    integers[:, [Beam._fields.index(name) for name in ("keys", "events")]] = -1
    numbers = torch.full((B, 2, 2 * W), -torch.inf, dtype=torch.float64, device=lengths.device)
    numbers[:, :, 0] = torch.where(lengths > 0, 0.0, -torch.inf)[:, None]
    numbers[:, :, W] = torch.where(lengths > 0, -torch.inf, 0.0)[:, None]
    known = lengths.new_full((B, 1 + steps * W), -2)
    known[:, 0] = -1
    before, tokens, moments, durations = (lengths.new_zeros(B, steps * W) for _ in range(4))
    return Progress(
        integers,
        numbers,
        known,
        events=Event(before, tokens, moments, durations, before.double()),
        step=lengths.new_zeros(B),
        is_open=lengths > 0,
        rows=torch.arange(B * W, device=lengths.device),
        tokens=lengths.new_full((B * W,), blank),
        emits=torch.zeros(B * W, dtype=torch.bool, device=lengths.device),
        frames=shown_frames(encoder, integers[:, 0, :W], lengths),
    )


def shown_frames(encoder: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """Return the frame of each hypothesis, `[B * W, 1, D]`, the last one for what is past it."""
    shown = torch.minimum(frames, lengths[:, None] - 1).clamp_(min=0)
    sequence = torch.arange(len(encoder), device=encoder.device)[:, None]
    return encoder[sequence, shown].flatten(0, 1)[:, None]


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


def nodes_of(known: Tensor, keys: Tensor, is_new: Tensor, used: Tensor) -> Tensor:
    """Return the nodes of keys `[B, W]`, and enter those that are not known yet.

    The first `used` entries, `[B]`, of `known` are the keys of nodes; it gets W more. Only keys
    that are `is_new` are looked up.
    """
    W = keys.shape[1]
    lane = torch.arange(W, device=keys.device)
    table = known if known.is_cuda else known[:, : int(used.max())]  # the host knows it there
    equal = table[:, None] == keys[..., None]
    same = (keys[..., None] == keys[:, None]) & is_new[:, None]
    place, first = equal.int().argmax(2), same.int().argmax(2)
    is_known = equal.any(2)
    enters = is_new & ~is_known & (first == lane)
    known.scatter_(1, used[:, None] + lane, torch.where(enters, keys, -2))
    return torch.where(is_known, place, used[:, None] + first)


def advance(
    scores: NodeScores,
    encoder: Tensor,
    lengths: Tensor,
    moves: Tensor,
    progress: Progress,
    models: LabelModels,
    model_states: tuple[Tensor, ...],
    blank: int,
    max_symbols_per_step: int,
    max_tokens: int,
) -> None:
    """Let each hypothesis take an arc, and keep the best ones.

    Args:
        scores: those of the frames `progress.frames`.
        encoder: `[B, T, D]`.
        lengths: `[B]`.
        moves: `[2, D]`, the frames by which a blank and a label move on; -1 for none.
        progress, model_states: what is written to.
        models: the language model and boosted phrases.
        blank, max_symbols_per_step, max_tokens: as in `rnnt_beam_search`.
    """
    B, V, W = len(encoder), scores.tokens.shape[2], progress.numbers.shape[2] // 2
    device = encoder.device
    hypotheses = progress.hypotheses()
    beam, ends = Beam(*(x[:, :W] for x in hypotheses)), Beam(*(x[:, W:] for x in hypotheses))
    log_probs = scores.tokens.log_softmax(-1).double().view(B, W, V)
    log_durations = log_probs.new_zeros(B, W, 1)
    if scores.durations is not None:
        log_durations = scores.durations.log_softmax(-1).double().view(B, W, -1)
    ranks, ending, following = log_probs.clone(), torch.zeros_like(beam.scores), model_states
    if models:
        added, following = models.advance(model_states, V)
        ranks, ending = ranks + added.view(B, W, V), models.final(model_states).view(B, W)
    full = (beam.counts >= max_tokens) | (beam.symbols >= max_symbols_per_step)
    ranks = ranks.masked_fill(full[..., None], -torch.inf)
    ranks[..., blank] = -torch.inf
    found = extensions_of(beam, log_probs, ranks, log_durations, moves, ending, lengths, blank)

    # Complete hypotheses take no arc, and merge with those that become complete.
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
    new_ends, _ = next_beam(hypotheses, found, is_end, W)
    # But for boosts, a hypothesis only loses, and cannot overtake the W best complete ones.
    is_open = ~is_end & ~(found.scores < new_ends.scores[:, -1:])
    new_beam, arcs = next_beam(hypotheses, found, is_open, W)
    exists, origins = new_beam.scores != -torch.inf, arcs.origins.clamp(max=W - 1)
    emits = exists & (arcs.tokens != blank)
    lane = torch.arange(W, device=device)
    # Steps after the end of a sequence have no room of their own, and write what nobody reads.
    room = (progress.step[:, None] * W).clamp(max=progress.known.shape[1] - 1 - W)
    steps = beam.frames.gather(1, origins)
    event = Event(new_beam.events, arcs.tokens, steps, arcs.moves, arcs.token_scores)
    for field, value in zip(progress.events, event, strict=True):
        field.scatter_(1, room + lane, value)
    nodes = nodes_of(progress.known, new_beam.keys, emits, 1 + room[:, 0])
    new_beam = new_beam._replace(
        nodes=torch.where(emits, nodes, new_beam.nodes),
        events=torch.where(emits, room + lane, new_beam.events),
    )
    rows = (torch.arange(B, device=device)[:, None] * W + origins).flatten()
    if models:
        after = tuple(x[rows, arcs.tokens.flatten()] for x in following)
        taken = take_rows(rows, model_states)
        write_rows(emits.flatten(), leaves_of(after, taken))
        for old, new in zip(model_states, taken, strict=True):
            old.copy_(new)
    for old, *new in zip(hypotheses, new_beam, new_ends, strict=True):
        old.copy_(torch.cat(new, 1))
    progress.step.add_(1)
    progress.is_open.copy_(exists.any(1))
    progress.rows.copy_(rows)
    progress.tokens.copy_(arcs.tokens.flatten())
    progress.emits.copy_(emits.flatten())
    progress.frames.copy_(shown_frames(encoder, new_beam.frames, lengths))


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
    graphs: bool,
) -> TransducerHypotheses:
    """Return the hypotheses of checked arguments, with at least one sequence and one frame."""
    (B, T, _), device, S, W = encoder.shape, encoder.device, max_tokens, beam_width
    valid = (lengths >= 0) & (lengths <= T)
    lengths = torch.where(valid, lengths, 0)
    dims = (0, network.state_dims)
    current = own_copy(network.first(B * W, device), dims)
    model_states = tuple(x.repeat_interleave(W, 0) for x in models.start(B))
    of_labels = network.durations or (0,)
    of_blanks = tuple(d or -1 for d in network.durations or (1,))  # none has the duration 0
    moves = constant(table, of_blanks, of_labels, device=device)
    # Each arc moves on by a frame or adds a token, so that no hypothesis takes more than T + S.
    progress = start(encoder, lengths, W, T + S, network.blank)
    options, dtype = (network.blank, max_symbols_per_step, S), acc_dtype(encoder.dtype)
    has_kernels = resolve(current_backend(), device, has_cpu=False) == "gpu"
    if has_kernels:
        from .gpu import launch_transducer as kernels

    def one_round() -> None:
        nonlocal dtype
        logits = network.join(progress.frames, current[0])
        dtype = acc_dtype(logits.dtype)
        given = (encoder, lengths, moves)
        if has_kernels and not models and W <= WIDEST:
            number = len(network.durations or ())
            kernels.advance_beam(logits, *given, number, progress, *options)
        else:
            advance(network.scores(logits), *given, progress, models, model_states, *options)
        take = kernels.take_rows if has_kernels else take_rows
        taken = take(progress.rows, current, dims)
        leaves = leaves_of(network.predict(progress.tokens, taken[1]), taken, dims)
        targets = [leaf.old for leaf in leaves_of(taken, current, dims)]
        (kernels.merge_rows if has_kernels else merge_rows)(progress.emits, leaves, targets)

    repeat(one_round, progress.is_open, T + S, graphs, network.predictor)
    ends = Beam(*(x[:, W:] for x in progress.hypotheses()))
    if length_normalize:
        ends = ends._replace(scores=ends.scores / ends.counts.clamp(min=1))
    ends = Beam(*take(ends, best_first(ends.scores, nbest)[1]))
    traces = kernels.trace if has_kernels else trace
    return _traced(ends, progress.events, valid, S, dtype, traces)


def trace(
    ends: tuple[Tensor, Tensor], events: tuple[Tensor, ...], written: tuple[Tensor, ...]
) -> None:
    """Write the labels of hypotheses `[B, nbest]`, which end in these events and are so many."""
    event, lengths = ends
    place, S = lengths - 1, written[0].shape[2] - 1
    for _ in range(int(lengths.max())):
        column = torch.where(place >= 0, place, S)[..., None]
        event_before, *emitted = take(events, event.clamp(min=0))
        for field, value in zip(written, emitted, strict=True):
            field.scatter_(2, column, value[..., None])
        place, event = place - 1, event_before


def _traced(
    ends: Beam,
    events: Event,
    valid: Tensor,
    S: int,
    dtype: torch.dtype,
    write: Callable[..., None],
) -> TransducerHypotheses:
    """Return complete hypotheses with their tokens, by the events from their ends on."""
    exists = (ends.scores != -torch.inf) & valid[:, None]
    lengths = torch.where(exists, ends.counts, 0)
    # Past the last token is a column for what is no token.
    tokens, steps = (lengths.new_full((*lengths.shape, S + 1), -1) for _ in range(2))
    durations = torch.zeros_like(tokens)
    token_scores = torch.zeros_like(tokens, dtype=ends.scores.dtype)
    write((ends.events, lengths), events, (tokens, steps, durations, token_scores))
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
