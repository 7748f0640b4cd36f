"""The state of a transducer's beam search between the chunks of its streams.

What no live hypothesis can reach is dropped after each chunk, so that a stream of any length takes
the same memory: frames that all of them have passed, and the labels that all of them share or none
of them has. These are nodes of two trees, the trie of tokens and that of events.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...runtime.sizes import cdiv
from .transducer_common import (
    NODE_BITS,
    Beam,
    Event,
    LabelModels,
    Network,
    Progress,
    TransducerBeamState,
    rows_at,
)


class Branches(NamedTuple):
    """The nodes of each sequence's tree that hypotheses have, but not all of them.

    Fields:
        places: `[B, n]` int64, their numbers when the others are dropped; -1 for the others.
        number: `[B]` int64, how many these are.
        common: `[B]` int64, the number of nodes that all hypotheses share.
    """

    places: Tensor
    number: Tensor
    common: Tensor

    def at(self, nodes: Tensor) -> Tensor:
        """Return the new numbers of nodes, `[B, m]`; -1 stays."""
        return torch.where(nodes < 0, -1, self.places.gather(1, nodes.clamp(min=0)))

    def kept(self, values: Tensor, number: int, fill: int = 0) -> Tensor:
        """Return the values of these nodes, `[B, number]`, with a fill past them."""
        found = values.new_full((len(values), number + 1), fill)
        column = torch.where(self.places < 0, number, self.places)  # the last one is for the others
        return found.scatter_(1, column, values)[:, :number].contiguous()


def branches(parents: Tensor, ends: Tensor, alive: Tensor) -> Branches:
    """Return the branches of trees that lead to the ends of live hypotheses.

    Args:
        parents: `[B, n]`, a node before each; less than 0 for none.
        ends: `[B, W]`, the node of each hypothesis, -1 for none.
        alive: `[B, W]` bool.
    """
    n = parents.shape[1]
    up = pad(torch.where(parents < 0, n, parents), (0, 1), value=n)  # the last node stands for none
    passing = torch.zeros_like(up)  # the number of hypotheses that have each node
    passing.scatter_add_(1, torch.where(alive & (ends >= 0), ends, n), alive.long())
    for _ in range(n.bit_length()):  # from each node to the one 1, 2, 4, ... before it
        passing, up = passing.scatter_add(1, up, passing), up.gather(1, up)
    passing, node = passing[:, :n], torch.arange(n, device=up.device)
    is_common = (passing == alive.sum(1, keepdim=True)) & (passing > 0)
    last = torch.where(is_common, node, -1).amax(1, keepdim=True)
    keep = (passing > 0) & (node > last)
    places = torch.where(keep, keep.cumsum(1) - 1, -1)
    return Branches(places, keep.sum(1), is_common.sum(1))


def first_state(
    encoder: Tensor, network: Network, models: LabelModels, W: int
) -> TransducerBeamState:
    """Return the state before the first frame, with the empty hypothesis for each sequence."""
    B, device = len(encoder), encoder.device
    output, predictor = network.first(B * W, device)
    zeros = torch.zeros(B, dtype=torch.int64, device=device)
    integers = zeros.new_zeros(B, len(Beam._fields) - 2, 2 * W)
    integers[:, [Beam._fields.index(name) for name in ("keys", "events")]] = -1
    numbers = torch.full((B, 2, 2 * W), -torch.inf, dtype=torch.float64, device=device)
    numbers[:, :, 0] = 0.0
    none = zeros.new_zeros(B, 0)
    return TransducerBeamState(
        committed=zeros,
        before=zeros,
        offset=zeros,
        encoder=encoder[:, :0],
        lengths=zeros,
        output=output,
        predictor=predictor,
        models=tuple(x.repeat_interleave(W, 0) for x in models.start(B)),
        boosts=models.boosts,
        integers=integers,
        numbers=numbers,
        known=zeros.new_full((B, 1), -1),
        events=Event(none, none, none, none, none.double()),
        longest=0,
    )


def with_kept_frames(
    state: TransducerBeamState, encoder: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the frames of a state and after them those of a chunk, at least one, and lengths."""
    (B, K, D), held = state.encoder.shape, state.lengths[:, None]
    if not K:
        return encoder if encoder.shape[1] else encoder.new_zeros(B, 1, D), lengths
    frames = torch.cat([state.encoder, encoder], 1)
    place = torch.arange(frames.shape[1], device=frames.device)
    place = torch.where(place < held, place, (place - held + K).clamp(max=len(place) - 1))
    return rows_at(frames, place), state.lengths + lengths


def later_state(
    state: TransducerBeamState, progress: Progress, encoder: Tensor, lengths: Tensor
) -> TransducerBeamState:
    """Return the state after a chunk, with the network's and the models' of the state before it.

    The host waits for the device, since it has to know how much is kept. `encoder` and `lengths`
    are the frames of which the search knew.
    """
    (beam, ends), known, events = progress.halves(), progress.known, progress.events
    alive = (beam.scores > -torch.inf) & ~ends.scores.isnan()
    frame = torch.where(alive, beam.frames, lengths[:, None]).amin(1, keepdim=True)
    parents = known >> NODE_BITS
    of_tokens = branches(parents, beam.nodes, alive)
    of_events = branches(events.before, beam.events, alive)
    counts = torch.where(alive, beam.counts - of_events.common[:, None], 0)
    kept_frames = lengths - frame[:, 0]
    sizes = (of_tokens.number, of_events.number, counts.amax(1), kept_frames)
    nodes_kept, events_kept, longest, K = torch.stack(sizes).amax(1).tolist()
    W = alive.shape[1]
    room = W * cdiv(max(nodes_kept, events_kept), W)  # the steps that come have W places each

    # The last node that all hypotheses share becomes the root.
    keys = ((of_tokens.at(parents) + 1) << NODE_BITS) + known % (1 << NODE_BITS)
    known = pad(of_tokens.kept(keys, room, fill=-2), (1, 0), value=-1)
    nodes = torch.where(alive, of_tokens.at(beam.nodes) + 1, 0)
    beam = beam._replace(
        nodes=nodes,
        keys=known.gather(1, nodes),
        frames=torch.where(alive, beam.frames - frame, 0),
        counts=counts,
        events=torch.where(alive, of_events.at(beam.events), -1),
    )
    integers, numbers = torch.stack(beam[:-2], 1), torch.stack(beam[-2:], 1)
    numbers = torch.where(alive[:, None], numbers, -torch.inf)
    events = events._replace(before=of_events.at(events.before), steps=events.steps - frame)
    place = frame + torch.arange(max(K, 1), device=frame.device)
    return state._replace(
        committed=of_events.common,
        before=state.before + of_events.common,
        offset=state.offset + frame[:, 0],
        encoder=rows_at(encoder, place.clamp(max=encoder.shape[1] - 1)),
        lengths=kept_frames,
        integers=torch.cat([integers, state.integers[..., W:]], 2),
        numbers=torch.cat([numbers, progress.numbers[..., W:]], 2),
        known=known,
        events=Event(*(of_events.kept(x, room) for x in events)),
        longest=longest,
    )
