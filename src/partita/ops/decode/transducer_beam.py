"""Beam search of a transducer, for all sequences of a batch side by side.

At each step every hypothesis takes one arc, a blank or a label, so for RNN-T all of them have the
same number of frames plus labels (alignment-length synchronous). Hypotheses whose tokens and frames
agree are one, and their probabilities are added. A blank that leads exactly to the end of the
frames completes a hypothesis. The best complete ones are kept apart from the beam.

The tokens of a hypothesis are a node of a trie, which is known by its key: the node without the
last token, and that token. All keys of a sequence are in a table, in which new ones are looked up,
so that equal tokens are always one node. What was emitted when is a list of events, each of which
leads to the one before, along the most probable alignment.

In a stream, a sequence waits while one of its hypotheses may move to a frame that has not arrived.
Until then no step depends on the number of frames. So the steps are the same for chunks of any
sizes, and so are the bits of what they find.

All that a round changes is in memory that stays where it is, so that a CUDA graph can repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...runtime.backend import current_backend, resolve
from ...runtime.constants import constant
from ...runtime.dtypes import acc_dtype
from .transducer_common import (
    CANDIDATES,
    NODE_BITS,
    Beam,
    Event,
    LabelModels,
    Network,
    NodeScores,
    Progress,
    TransducerBeamState,
    TransducerHypotheses,
    leaves_of,
    merge_rows,
    own_copy,
    rows_at,
    table,
    take_rows,
    write_rows,
)
from .transducer_rounds import repeat
from .transducer_stream import first_state, later_state, with_kept_frames

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


def start(
    state: TransducerBeamState,
    encoder: Tensor,
    lengths: Tensor,
    valid: Tensor,
    steps: int,
    blank: int,
    look: int,
) -> Progress:
    """Return the progress of a state with the frames that are there, and room for some steps.

    A sequence that is not `valid`, `[B]`, has the score NaN. `look` is as in `goes_on`.
    """
    B, W = len(lengths), state.numbers.shape[2] // 2
    integers, (live, ends) = state.integers.clone(), state.numbers.split(W, 2)
    if not look:  # without any frame, the empty hypothesis is complete
        is_empty = (lengths == 0)[:, None, None]
        ends = torch.where(is_empty, torch.maximum(live, ends), ends)
        live = live.masked_fill(is_empty, -torch.inf)
    numbers = torch.cat([live, ends.masked_fill(~valid[:, None, None], torch.nan)], 2)
    progress = Progress(
        integers,
        numbers,
        known=pad(state.known, (0, steps * W), value=-2),
        events=Event(*(pad(x, (0, steps * W)) for x in state.events)),
        step=lengths.new_full((B,), state.events.tokens.shape[1] // W),
        is_open=torch.ones_like(valid),
        rows=torch.arange(B * W, device=lengths.device),
        tokens=lengths.new_full((B * W,), blank),
        emits=torch.zeros(B * W, dtype=torch.bool, device=lengths.device),
        frames=shown_frames(encoder, integers[:, 2, :W], lengths),
    )
    return progress._replace(is_open=goes_on(*progress.halves(), lengths, look))


def goes_on(beam: Beam, ends: Beam, lengths: Tensor, look: int) -> Tensor:
    """Return which sequences take a further step, `[B]`.

    Args:
        beam, ends: hypotheses that go on, and complete ones, which are NaN after a NaN.
        lengths: `[B]`, the number of frames that are there.
        look: the most frames by which an arc moves on, where more frames may come; otherwise 0.
    """
    is_live = beam.scores > -torch.inf
    has_frames = ~is_live | (beam.frames + look < lengths[:, None])
    return is_live.any(1) & has_frames.all(1) & ~ends.scores.isnan().any(1)


def shown_frames(encoder: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """Return the frame of each hypothesis, `[B * W, 1, D]`, the last one for what is past it."""
    shown = torch.minimum(frames, lengths[:, None] - 1).clamp_(min=0)
    return rows_at(encoder, shown).flatten(0, 1)[:, None]


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
    extended = (beam.nodes[..., None] << NODE_BITS) + tokens
    keys = torch.where(tokens == blank, beam.keys[..., None], extended)
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
    look: int,
) -> None:
    """Let each hypothesis take an arc, and keep the best ones.

    A sequence that is not open stays as it is. NaN in a score ends a sequence.

    Args:
        scores: those of the frames `progress.frames`.
        encoder: `[B, T, D]`.
        lengths: `[B]`.
        moves: `[2, D]`, the frames by which a blank and a label move on; -1 for none.
        progress, model_states: what is written to.
        models: the language model and boosted phrases.
        blank, max_symbols_per_step, max_tokens: as in `rnnt_beam_search`.
        look: as in `goes_on`.
    """
    B, V, W = len(encoder), scores.tokens.shape[2], progress.numbers.shape[2] // 2
    device = encoder.device
    hypotheses, (beam, ends) = progress.hypotheses(), progress.halves()
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
    is_nan = found.scores.isnan().any(1, keepdim=True)
    new_ends = new_ends._replace(scores=new_ends.scores.masked_fill(is_nan, torch.nan))
    # But for boosts, a hypothesis only loses, and cannot overtake the W best complete ones.
    is_open = ~is_end & ~(found.scores < new_ends.scores[:, -1:])
    new_beam, arcs = next_beam(hypotheses, found, is_open, W)
    was_open, lane = progress.is_open[:, None], torch.arange(W, device=device)
    emits = (new_beam.scores != -torch.inf) & (arcs.tokens != blank) & was_open
    origins = torch.where(was_open, arcs.origins.clamp(max=W - 1), lane)
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
        old.copy_(torch.where(was_open, torch.cat(new, 1), old))
    progress.step.add_(progress.is_open)
    progress.is_open.logical_and_(goes_on(beam, ends, lengths, look))  # views of what is new
    progress.rows.copy_(rows)
    progress.tokens.copy_(arcs.tokens.flatten())
    progress.emits.copy_(emits.flatten())
    progress.frames.copy_(shown_frames(encoder, beam.frames, lengths))


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
    state: TransducerBeamState | None,
    final: bool,
    graphs: bool,
) -> TransducerHypotheses:
    """Return the hypotheses of checked arguments, with at least one sequence."""
    device, S, W = encoder.device, max_tokens, beam_width
    valid = (lengths >= 0) & (lengths <= encoder.shape[1])
    before = first_state(encoder, network, models, W) if state is None else state
    encoder, lengths = with_kept_frames(before, encoder, torch.where(valid, lengths, 0))
    dims = (0, network.state_dims)
    current = own_copy((before.output, before.predictor), dims)
    model_states = own_copy(before.models)
    of_labels = network.durations or (0,)
    of_blanks = tuple(d or -1 for d in network.durations or (1,))  # none has the duration 0
    moves = constant(table, of_blanks, of_labels, device=device)
    look = 0 if final else max(of_blanks)
    # Each arc moves on by a frame or adds a token, so that no hypothesis takes more steps.
    steps = encoder.shape[1] + S
    progress = start(before, encoder, lengths, valid, steps, network.blank, look)
    options, dtype = (network.blank, max_symbols_per_step, S, look), acc_dtype(encoder.dtype)
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

    repeat(one_round, progress.is_open, steps, graphs, network.predictor)
    beam, ends = progress.halves()
    if not final:
        ends = beam._replace(scores=torch.where(ends.scores.isnan(), ends.scores, beam.scores))
    if length_normalize:
        counts = ends.counts + before.before[:, None]
        ends = ends._replace(scores=ends.scores / counts.clamp(min=1))
    ends = Beam(*take(ends, best_first(ends.scores, nbest)[1]))
    traces = kernels.trace if has_kernels else trace
    found = _traced(ends, progress.events, before.offset, S, dtype, traces)
    if final:
        return found
    after = later_state(before, progress, encoder, lengths)
    output, predictor = current
    after = after._replace(output=output, predictor=predictor, models=model_states)
    return found._replace(state=after)


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
    offset: Tensor,
    S: int,
    dtype: torch.dtype,
    write: Callable[..., None],
) -> TransducerHypotheses:
    """Return hypotheses with their tokens, by the events from their ends on.

    Steps of events are counted from a frame of each sequence, which is its `offset`, `[B]`.
    """
    lengths = torch.where(ends.scores > -torch.inf, ends.counts, 0)
    # Past the last token is a column for what is no token.
    tokens, steps = (lengths.new_full((*lengths.shape, S + 1), -1) for _ in range(2))
    durations = torch.zeros_like(tokens)
    token_scores = torch.zeros_like(tokens, dtype=ends.scores.dtype)
    write((ends.events, lengths), events, (tokens, steps, durations, token_scores))
    steps = torch.where(tokens >= 0, steps + offset[:, None, None], -1)
    return TransducerHypotheses(
        tokens=tokens[..., :S],
        lengths=lengths,
        scores=ends.scores.to(dtype),
        steps=steps[..., :S],
        durations=durations[..., :S],
        token_scores=token_scores[..., :S].to(dtype),
        state=None,
    )
