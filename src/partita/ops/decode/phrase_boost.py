"""Phrases that raise the score of a hypothesis, as an automaton of Aho and Corasick.

A state is the longest end of a hypothesis that is a start of a phrase, but not all of it. It has a
credit, the share of the phrase's weight that this start has earned. An arc scores the weights of
the phrases that end with it, and the credit of its target minus that of its source. So the credits
of a path cancel: what remains is the weights of the phrases that it has completed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from .language_model import check_batch, checked_states


class Arcs(NamedTuple):
    """An automaton with S states over C labels.

    Fields:
        pairs: `[A]` int64, sorted: state · C + label of each arc that differs from that of state 0.
            The first pair is -1, so that there is one.
        targets: `[A]` int64, the states to which these arcs lead.
        scores: `[A]` float64, the weights that they complete and the credits of their targets.
        start_targets: `[C]` int64, the same of the arcs of state 0.
        start_scores: `[C]` float64.
        credits: `[S]` float64.
    """

    pairs: Tensor
    targets: Tensor
    scores: Tensor
    start_targets: Tensor
    start_scores: Tensor
    credits: Tensor


def follow(
    arcs: Arcs, states: Tensor, start_targets: Tensor, start_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what each label adds after each state, `[R, C]`, and the states that follow.

    The arcs that are in no pair are those of the start, `[C]`, or `[R, C]` for each state.
    """
    C = start_targets.shape[-1]
    pairs = states[:, None] * C + torch.arange(C, device=states.device)
    places = torch.searchsorted(arcs.pairs, pairs).clamp_(max=len(arcs.pairs) - 1)
    differs = arcs.pairs[places] == pairs
    scores = torch.where(differs, arcs.scores[places], start_scores)
    following = torch.where(differs, arcs.targets[places], start_targets)
    return scores - arcs.credits[states, None], following


class PhraseBoost:
    """Phrases that raise the score of a hypothesis, from their first labels on.

    Args:
        phrases: a list. A phrase is a sequence of labels or of their indices; a string is the
            sequence of its characters.
        labels: the tokens of a network.
        weight: what each occurrence of a phrase adds to the score, in nats, or a sequence of one
            number for each phrase.

    A hypothesis that ends in the first d of the L labels of a phrase has d/L of its weight already.
    Of several such starts the longest counts, and of the phrases that it begins the shortest. The
    share is taken back where the phrase breaks off. Occurrences may overlap, and each counts whole.
    A phrase that is given twice counts once, with the greater weight.

    It has the methods of a language model, `start`, `advance` and `final`.

    Raises:
        TypeError, ValueError: no list of phrases or labels, or no labels; an empty phrase; a label
            that is none of the network's; a weight that is not finite, or more or fewer weights
            than phrases.

    Source: Aho and Corasick, Efficient string matching: an aid to bibliographic search, 1975.

    Example:
        >>> import partita
        >>> boost = partita.PhraseBoost(["ab"], labels=["-", "a", "b"], weight=4.0)
        >>> scores, states = boost.advance(boost.start(1))
        >>> scores  # half of the weight for the first label of two
        tensor([[0., 2., 0.]], dtype=torch.float64)
        >>> boost.advance(states[:, 1])[0]  # taken back, kept, or completed
        tensor([[-2.,  0.,  2.]], dtype=torch.float64)
    """

    def __init__(
        self,
        phrases: Sequence[str | Sequence[str | int]],
        labels: Sequence[str],
        weight: float | Sequence[float],
    ) -> None:
        for name, value in (("phrases", phrases), ("labels", labels)):
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError(f"{name}: expected a list, got {type(value).__name__}")
        if not labels:
            raise ValueError("labels: expected at least one")
        weights = [weight] * len(phrases) if isinstance(weight, (int, float)) else list(weight)
        if len(weights) != len(phrases):
            raise ValueError(f"weight: expected {len(phrases)} numbers, got {len(weights)}")
        for each in weights:
            if not isinstance(each, (int, float)) or not math.isfinite(each):
                raise ValueError(f"weight: expected finite numbers, got {each!r}")
        places = {label: place for place, label in reversed(list(enumerate(labels)))}
        boosts: dict[tuple[int, ...], float] = {}
        for i, (phrase, each) in enumerate(zip(phrases, weights, strict=True)):
            key = _label_ids(f"phrases[{i}]", phrase, places, len(labels))
            boosts[key] = max(each, boosts.get(key, each))
        self.phrases = boosts  # by the indices of their labels
        self._arcs = automaton(boosts, len(labels))
        self._key = hash((len(labels), *boosts.items()))  # equal for equal boosts, also when saved

    def to(self, device: torch.device | str) -> PhraseBoost:
        """Return the boost with its tables on a device.

        Args:
            device: the device.

        Returns:
            A new boost, which shares tables that are there already.

        Raises:
            RuntimeError: the device cannot be used.

        Example:
            >>> import partita
            >>> partita.PhraseBoost(["ab"], labels=["-", "a", "b"], weight=4.0).to("cpu").device
            device(type='cpu')
        """
        moved = PhraseBoost.__new__(PhraseBoost)
        moved.phrases, moved._key = self.phrases, self._key
        moved._arcs = Arcs(*(x.to(device) for x in self._arcs))
        return moved

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return self._arcs.credits.device

    @property
    def number_of_labels(self) -> int:
        """The number of labels of the network."""
        return len(self._arcs.start_targets)

    def start(self, B: int, bos: bool = True) -> Tensor:
        """Return the state of each of B hypotheses without labels.

        Args:
            B: the number of hypotheses.
            bos: has no effect; language models have it.

        Returns:
            `[B]` int64, states.

        Raises:
            TypeError, ValueError: `B` is no number from 0 on.

        Example:
            >>> import partita
            >>> partita.PhraseBoost(["ab"], labels=["-", "a", "b"], weight=4.0).start(2)
            tensor([0, 0])
        """
        check_batch("B", B)
        return torch.zeros(B, dtype=torch.int64, device=self.device)

    def advance(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each label adds to the score after each state, and the states that follow.

        The host does not wait for the device.

        Args:
            states: `[B]` integers, states of this boost on its device.

        Returns:
            `(scores, next_states)`: `[B, C]` float64 and `[B, C]` int64.

        Raises:
            TypeError, ValueError: states of another dtype, shape or device; numbers that are no
                states. On a GPU the latter are checked only with `PARTITA_CHECK=1`; otherwise such
                a row has the scores NaN.

        Example:
            >>> import partita
            >>> boost = partita.PhraseBoost(["ab", "bb"], labels=["a", "b"], weight=[4.0, 1.0])
            >>> scores, states = boost.advance(boost.start(1))
            >>> scores, states
            (tensor([[2.0000, 0.5000]], dtype=torch.float64), tensor([[1, 3]]))
        """
        arcs = self._arcs
        states, exist = checked_states(states, len(arcs.credits), arcs.pairs)
        scores, following = follow(arcs, states, arcs.start_targets, arcs.start_scores)
        return scores.masked_fill(~exist[:, None], torch.nan), following

    def final(self, states: Tensor) -> Tensor:
        """Return what the end of a hypothesis adds: it takes back the credit of an open phrase.

        Args:
            states: `[B]` integers, as in `advance`.

        Returns:
            `[B]` float64.

        Raises:
            TypeError, ValueError: as in `advance`.

        Example:
            >>> import partita
            >>> boost = partita.PhraseBoost(["ab"], labels=["a", "b"], weight=4.0)
            >>> scores, states = boost.advance(boost.start(1))
            >>> boost.final(states[:, 0])
            tensor([-2.], dtype=torch.float64)
        """
        states, exist = checked_states(states, len(self._arcs.credits), self._arcs.pairs)
        return (0.0 - self._arcs.credits[states]).masked_fill(~exist, torch.nan)

    def __repr__(self) -> str:
        sizes = f"states={len(self._arcs.credits)}, labels={self.number_of_labels}"
        return f"PhraseBoost({sizes}, device={self.device})"


def _label_ids(name: str, phrase: Any, places: dict[str, int], C: int) -> tuple[int, ...]:
    """Return the indices of the labels of a phrase."""
    if not isinstance(phrase, Sequence):
        raise TypeError(f"{name}: expected a string or labels, got {type(phrase).__name__}")
    if not len(phrase):
        raise ValueError(f"{name}: expected at least one label, got none")
    found = []
    for label in phrase:
        place = places.get(label) if isinstance(label, str) else label
        if place is None:
            advice = "; give the labels of the phrase as a list" if isinstance(phrase, str) else ""
            raise ValueError(f"{name}: expected labels of the network, got {label!r}{advice}")
        checks.python_int(name, place)
        if not 0 <= place < C:
            raise ValueError(f"{name}: expected labels from 0 to {C - 1}, got {place}")
        found.append(int(place))
    return tuple(found)


def automaton(boosts: dict[tuple[int, ...], float], C: int, margin: int = 0) -> Arcs:
    """Build the automaton of phrases, which are known by their labels.

    The first and the last `margin` labels of a phrase earn nothing of its weight.
    """
    # The nodes are the starts of phrases, in the order in which they are first met.
    nodes: dict[tuple[int, ...], int] = {(): 0}
    credits, shortest = {0: 0.0}, {0: (0, 0.0)}
    for phrase, weight in boosts.items():
        for d in range(1, len(phrase) + 1):
            node = nodes.setdefault(phrase[:d], len(nodes))
            rank = (len(phrase), -weight)
            if d < len(phrase) and rank < shortest.get(node, (math.inf, 0.0)):
                earned = (d - margin) / (len(phrase) - 2 * margin)
                shortest[node], credits[node] = rank, weight * earned
    children: list[dict[int, int]] = [{} for _ in nodes]
    for start, node in nodes.items():
        if start:
            children[nodes[start[:-1]]][start[-1]] = node
    suffixes, completed, states = [0] * len(nodes), [0.0] * len(nodes), list(range(len(nodes)))
    arcs: list[dict[int, int]] = [{} for _ in nodes]  # but those that equal the arcs of node 0
    for start, node in sorted(nodes.items(), key=lambda item: len(item[0])):
        if not start:
            continue
        parent, label = nodes[start[:-1]], start[-1]
        if parent:
            suffix = suffixes[parent]
            suffixes[node] = arcs[suffix].get(label, children[0].get(label, 0))
        completed[node] = boosts.get(start, 0.0) + completed[suffixes[node]]
        arcs[node] = {**arcs[suffixes[node]], **children[node]}
        # A node that nothing continues has the arcs and the future of its suffix.
        states[node] = node if children[node] else states[suffixes[node]]
    worth = [completed[node] + credits[states[node]] for node in range(len(nodes))]
    listed = sorted(
        (node * C + label, to)
        for node in nodes.values()
        if states[node] == node
        for label, to in arcs[node].items()
    )
    start_arcs = [children[0].get(label, 0) for label in range(C)]
    return Arcs(
        pairs=torch.tensor([-1, *(pair for pair, _ in listed)]),
        targets=torch.tensor([0, *(states[to] for _, to in listed)]),
        scores=torch.tensor([0.0, *(worth[to] for _, to in listed)], dtype=torch.float64),
        start_targets=torch.tensor([states[to] for to in start_arcs]),
        start_scores=torch.tensor([worth[to] for to in start_arcs], dtype=torch.float64),
        credits=torch.tensor([credits.get(i, 0.0) for i in range(len(nodes))], dtype=torch.float64),
    )
