"""The shared parts of transducer searches: the user's network, models of labels, and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.dtypes import acc_dtype
from .language_model import advance_states, check_model, final_scores
from .phrase_boost import Arcs, PhraseBoost, automaton, follow

Predict = Callable[[Tensor, Any], tuple[Tensor, Any]]
Join = Callable[[Tensor, Tensor], Tensor]

NODE_BITS = 32  # a key has the token in its low bits, and the node before it above them
CANDIDATES = 4  # for each place of the beam, the extensions among which equal ones are looked for


class TransducerState(NamedTuple):
    """Where a greedy search of B streams has stopped.

    Fields:
        output: `[B, P]`, the output of the predictor after the last label.
        predictor: the state of the predictor after the last label.
        skip: `[B]` int64, the frames of the next chunk that the last duration skips.
        models: the states of the language model and of the boosted phrases, those that are given.
        boosts: a number for each stream, which stands for its boosted phrases; 0 without.
    """

    output: Tensor
    predictor: Any
    skip: Tensor
    models: tuple[Tensor, ...]
    boosts: tuple[int, ...] = ()


class TransducerHypotheses(NamedTuple):
    """The decoded sequences of a batch, the best first; S is `max_tokens`.

    Fields:
        tokens: `[B, nbest, S]` int64, without blanks; -1 past the length.
        lengths: `[B, nbest]` int64, the number of tokens. A hypothesis of S tokens has reached
            `max_tokens` and may be cut off.
        scores: `[B, nbest]`, what the hypotheses are ranked by, in nats: log-probabilities, and
            what the language model and boosted phrases add; -inf where there are fewer hypotheses,
            NaN for an invalid sequence.
        steps: `[B, nbest, S]` int64, the frame at which each token is emitted; -1 past the length.
        durations: `[B, nbest, S]` int64, the frames by which each token moves on; 0 past the
            length and without durations.
        token_scores: `[B, nbest, S]`, the log-probability that the network gives to each token, and
            to its duration; 0 past the length.
        state: what goes on with the next chunk; None after the last one of a beam search.
    """

    tokens: Tensor
    lengths: Tensor
    scores: Tensor
    steps: Tensor
    durations: Tensor
    token_scores: Tensor
    state: Any


class Walk(NamedTuple):
    """The place of a greedy search in each of B sequences, which each round writes over.

    Fields:
        t: `[B]` int64, the frame.
        counts: `[B]` int64, the number of tokens.
        symbols: `[B]` int64, the number of labels on the frame.
        total: `[B]` fp64, the score.
        is_open: `[B]` bool, whether the sequence goes on.
        emits: `[B]` bool, whether the round has found a label.
        token: `[B]` int64, which the predictor reads next; the blank where there is no label.
        frames: `[B, K, D]`, which the joint network sees next.
    """

    t: Tensor
    counts: Tensor
    symbols: Tensor
    total: Tensor
    is_open: Tensor
    emits: Tensor
    token: Tensor
    frames: Tensor


class Written(NamedTuple):
    """The results of a greedy search, `[B, S + 1]`, with a last column that is none.

    Fields:
        tokens, steps, durations: int64.
        token_scores: fp64.
    """

    tokens: Tensor
    steps: Tensor
    durations: Tensor
    token_scores: Tensor


class Beam(NamedTuple):
    """Hypotheses of each sequence, each field `[B, W]`.

    Fields:
        nodes, keys: the tokens, as a node of the trie and by its key; -1 is that of no tokens.
        frames: the frame that each has reached.
        counts: the number of tokens.
        symbols: the number of labels on the frame.
        events: the last event of the most probable alignment, -1 for none.
        scores: what they are ranked by, -inf where there is none.
        best: the score of the most probable alignment.
    """

    nodes: Tensor
    keys: Tensor
    frames: Tensor
    counts: Tensor
    symbols: Tensor
    events: Tensor
    scores: Tensor
    best: Tensor


class Event(NamedTuple):
    """The labels that hypotheses have emitted, each field `[B, number of steps * W]`."""

    before: Tensor  # the event before, -1 for none
    tokens: Tensor
    steps: Tensor
    durations: Tensor
    token_scores: Tensor


class Progress(NamedTuple):
    """How far a beam search of B sequences is. Each round writes over it.

    Fields:
        integers: `[B, 6, 2 W]` int64, and
        numbers: `[B, 2, 2 W]` fp64: the fields of `Beam`, of hypotheses that go on and of complete
            ones.
        known: `[B, 1 + number of steps * W]` int64, the keys of the nodes; -2 for none.
        events: `Event`, W of each step.
        step: `[B]` int64.
        is_open: `[B]` bool, whether the sequence goes on.
        rows: `[B * W]` int64, the hypothesis, of all sequences, that each goes on from.
        tokens: `[B * W]` int64, which the predictor reads next.
        emits: `[B * W]` bool, whether that is a label.
        frames: `[B * W, 1, D]`, which the joint network sees next.
    """

    integers: Tensor
    numbers: Tensor
    known: Tensor
    events: Event
    step: Tensor
    is_open: Tensor
    rows: Tensor
    tokens: Tensor
    emits: Tensor
    frames: Tensor

    def hypotheses(self) -> Beam:
        """Return those that go on, and the complete ones, as views."""
        return Beam(*self.integers.unbind(1), *self.numbers.unbind(1))

    def halves(self) -> tuple[Beam, Beam]:
        """Return those that go on, and then the complete ones, as views."""
        live, complete = zip(*(x.chunk(2, 1) for x in self.hypotheses()), strict=True)
        return Beam(*live), Beam(*complete)


class TransducerBeamState(NamedTuple):
    """Where a beam search of B streams waits for frames.

    Fields:
        committed: `[B]` int64, the number of tokens that all hypotheses of a stream share at their
            start, and that no later chunk changes. Those of the next chunk begin after them.
        before: `[B]` int64, the number of tokens that were committed in all chunks.
        offset: `[B]` int64, the number of frames before those that are kept.
        encoder: `[B, K, D]`, the frames from the least one of a live hypothesis on.
        lengths: `[B]` int64, the number of these frames.
        output: `[B * W, P]`, the output of the predictor after each hypothesis.
        predictor: the state of the predictor, in the same rows.
        models: the states of the language model and of the boosted phrases, in the same rows.
        boosts: as in `TransducerState`.
        integers, numbers: as in `Progress`.
        known: `[B, 1 + E * W]`, the keys of the nodes below the last one that all hypotheses share.
        events: `[B, E * W]`, the `Event` of each label that is not committed.
        longest: the most tokens of a hypothesis that are not committed.
    """

    committed: Tensor
    before: Tensor
    offset: Tensor
    encoder: Tensor
    lengths: Tensor
    output: Tensor
    predictor: Any
    models: tuple[Tensor, ...]
    boosts: tuple[int, ...]
    integers: Tensor
    numbers: Tensor
    known: Tensor
    events: Event
    longest: int


class NodeScores(NamedTuple):
    """The logits that the joint network returns for R nodes, or for K frames at each.

    Fields:
        tokens: `[R, K, V]` logits of the blank and of the labels.
        durations: `[R, K, D]` logits; None for RNN-T.
    """

    tokens: Tensor
    durations: Tensor | None


def map_leaves(function: Callable[..., Tensor], dims: Any, *states: Any) -> Any:
    """Return the state that `function(dim, *tensors)` makes of the tensors of equal structures."""
    first = states[0]

    def part(key: Any) -> Any:
        try:
            of_part = dims if isinstance(dims, int) else dims[key]
        except (TypeError, LookupError):
            raise ValueError(
                "state_dims: expected a number or a structure like that of the state, which has"
                f" {key!r}, got {dims!r}"
            ) from None
        return map_leaves(function, of_part, *(state[key] for state in states))

    if isinstance(first, Tensor):
        return function(dims, *states)
    if isinstance(first, dict):
        return {key: part(key) for key in first}
    if isinstance(first, (list, tuple)):
        parts = [part(i) for i in range(len(first))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if first is None:
        return None
    raise TypeError(
        "predict: expected tensors, None, or lists, tuples and dictionaries of them in the state,"
        f" got {type(first).__name__}"
    )


class Leaf(NamedTuple):
    """A tensor of a predictor's state, with its rows in dimension `dim`."""

    dim: int
    new: Tensor
    old: Tensor


def leaves_of(new: Any, old: Any, dims: Any = 0) -> list[Leaf]:
    """Return the tensors of a new state beside those of the old one, which have equal shapes."""
    found: list[Leaf] = []

    def add(dim: int, a: Tensor, b: Tensor) -> Tensor:
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                "predict: expected a state whose tensors keep their shapes and dtypes, got"
                f" {list(a.shape)} {a.dtype} after {list(b.shape)} {b.dtype}"
            )
        found.append(Leaf(dim, a, b))
        return a

    map_leaves(add, dims, new, old)
    return found


def write_rows(mask: Tensor, leaves: Sequence[Leaf]) -> None:
    """Write the rows of the new tensors over those of the old ones where the mask `[R]` says so."""
    selected = [
        torch.where(mask.view([-1 if i == dim else 1 for i in range(new.ndim)]), new, old)
        for dim, new, old in leaves
    ]
    for leaf, tensor in zip(leaves, selected, strict=True):
        leaf.old.copy_(tensor)


def merge_rows(mask: Tensor, leaves: Sequence[Leaf], targets: Sequence[Tensor]) -> None:
    """Write the rows of the new tensors where the mask `[R]` says so, and those of the old ones."""
    write_rows(mask, leaves)
    for leaf, target in zip(leaves, targets, strict=True):
        target.copy_(leaf.old)


def own_copy(state: Any, dims: Any = 0) -> Any:
    """Return a state in memory of its own, which may be written to."""
    return map_leaves(lambda dim, x: x.clone(memory_format=torch.contiguous_format), dims, state)


def take_rows(rows: Tensor, state: Any, dims: Any = 0) -> Any:
    """Return a state whose rows are these rows of another one."""
    return map_leaves(lambda dim, x: x.index_select(dim, rows), dims, state)


def rows_at(frames: Tensor, places: Tensor) -> Tensor:
    """Return the frames `[B, K, D]` of a batch at places `[B, K]`."""
    return frames[torch.arange(len(frames), device=frames.device)[:, None], places]


class Network:
    """The user's predictor and joint network, with checks of what they return."""

    def __init__(
        self,
        predict: Predict,
        join: Join,
        blank: int,
        durations: tuple[int, ...] | None,
        state_dims: Any,
    ) -> None:
        for name, function in (("predict", predict), ("join", join)):
            if not callable(function):
                raise TypeError(f"{name}: expected a function, got {type(function).__name__}")
        self.predictor, self._join = predict, join
        self.blank, self.durations, self.state_dims = blank, durations, state_dims

    def predict(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the output `[R, P]` of the predictor after tokens `[R]`, and its state."""
        found = self.predictor(tokens, state)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[0], Tensor):
            raise TypeError(f"predict: expected a pair (output, state), got {type(found).__name__}")
        output, state = found
        R = len(tokens)
        if output.ndim != 2 or len(output) != R:
            raise ValueError(
                f"predict: expected an output of shape [B, P] with B = {R},"
                f" got {list(output.shape)}"
            )

        def check(dim: int, x: Tensor) -> Tensor:
            checks.python_int("state_dims", dim)
            if not 0 <= dim < x.ndim or x.shape[dim] != R:
                raise ValueError(
                    f"state_dims: expected the dimension of the {R} rows in each tensor of the"
                    f" state that predict returns, got {dim} for one of shape {list(x.shape)}"
                )
            return x

        return output, map_leaves(check, self.state_dims, state)

    def join(self, frames: Tensor, output: Tensor) -> Tensor:
        """Return the logits of K frames `[R, K, D]` after outputs of the predictor `[R, P]`."""
        logits = self._join(frames, output[:, None])
        checks.floating("join", logits)
        K, least = len(self.durations or ()), self.blank + 1
        if logits.ndim != 3 or logits.shape[:2] != frames.shape[:2] or logits.shape[2] < least + K:
            raise ValueError(
                "join: expected logits of shape [B, K, V"
                f"{' + number of durations' if K else ''}] with [B, K] = {list(frames.shape[:2])}"
                f" and V > blank = {self.blank}, got {list(logits.shape)}"
            )
        return logits

    def scores(self, logits: Tensor) -> NodeScores:
        """Return logits of the joint network as those of tokens and durations, fp32 at least."""
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        K = len(self.durations or ())
        return NodeScores(logits[..., :-K], logits[..., -K:]) if K else NodeScores(logits, None)

    def first(self, B: int, device: torch.device) -> tuple[Tensor, Any]:
        """Return the output and the state of the predictor before the first label."""
        return self.predict(torch.full((B,), self.blank, device=device), None)


class PhraseBoosts:
    """A `PhraseBoost` for each utterance, as one automaton with the methods of a language model.

    The states of all automata are numbered one after another, so a state says whose it is.
    """

    def __init__(self, boosts: Sequence[PhraseBoost | None], C: int, device: torch.device) -> None:
        arcs = {
            boost: automaton({}, C) if boost is None else boost.to("cpu")._arcs
            for boost in dict.fromkeys(boosts)
        }
        sizes = [len(x.credits) for x in arcs.values()]
        firsts = {boost: sum(sizes[:i]) for i, boost in enumerate(arcs)}
        parts = [(firsts[boost], x) for boost, x in arcs.items()]
        _, no_pair = parts[0]  # the first pair of each is none
        of_all = Arcs(
            pairs=torch.cat([no_pair.pairs[:1], *(x.pairs[1:] + f * C for f, x in parts)]),
            targets=torch.cat([no_pair.targets[:1], *(x.targets[1:] + f for f, x in parts)]),
            scores=torch.cat([no_pair.scores[:1], *(x.scores[1:] for _, x in parts)]),
            # The arcs of each automaton that are in no pair, `[number of automata, C]`.
            start_targets=torch.stack([x.start_targets + f for f, x in parts]),
            start_scores=torch.stack([x.start_scores for _, x in parts]),
            credits=torch.cat([x.credits for _, x in parts]),
        )
        self._arcs = Arcs(*(x.to(device) for x in of_all))
        owners = torch.arange(len(parts)).repeat_interleave(torch.tensor(sizes))
        self._owners = owners.to(device)  # the automaton of each state
        self._roots = torch.tensor([firsts[boost] for boost in boosts]).to(device)

    def start(self, B: int) -> Tensor:
        """Return the state of each utterance before its first label."""
        return self._roots

    def advance(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each label adds after each state, `[R, C]`, and the states that follow."""
        owners, arcs = self._owners[states], self._arcs
        return follow(arcs, states, arcs.start_targets[owners], arcs.start_scores[owners])

    def final(self, states: Tensor) -> Tensor:
        """Return what the end adds, `[R]`: it takes back the credit of an open phrase."""
        return -self._arcs.credits[states]


def weighted(scores: Tensor, weight: float) -> Tensor:
    """Return scores times their weight, with 0 · -inf = 0."""
    return weight * scores if weight else torch.zeros_like(scores)


class LabelModels:
    """A language model and boosted phrases, of which each may be absent, as one model."""

    def __init__(
        self, language_model: Any, alpha: float, boost: Any, B: int, device: torch.device
    ) -> None:
        checks.number("alpha", alpha, low=0.0)
        each_boost = boost if isinstance(boost, (list, tuple)) else [boost] * B
        self.boosts = tuple(x._key if isinstance(x, PhraseBoost) else 0 for x in each_boost)
        self.weights: list[float] = []
        self._models: list[tuple[str, Any]] = []
        if language_model is not None:
            self._add("language_model", language_model, alpha)
        if isinstance(boost, (list, tuple)):
            if len(boost) != B:
                raise ValueError(f"boost: expected one for each of {B} sequences, got {len(boost)}")
            for i, each in enumerate(boost):
                if each is not None and not isinstance(each, PhraseBoost):
                    raise TypeError(
                        f"boost[{i}]: expected a PhraseBoost or None, got {type(each).__name__}"
                    )
            columns = {each.number_of_labels for each in boost if each is not None}
            if len(columns) > 1:
                raise ValueError(f"boost: expected equal numbers of labels, got {sorted(columns)}")
            for C in columns:
                self._add("boost", PhraseBoosts(boost, C, device), 1.0)
        elif boost is not None:
            moves = isinstance(boost, PhraseBoost)
            self._add("boost", boost.to(device) if moves else boost, 1.0)
        self._device = device

    def _add(self, name: str, model: Any, weight: float) -> None:
        check_model(name, model)
        self._models.append((name, model))
        self.weights.append(weight)

    def __len__(self) -> int:
        return len(self._models)

    def start(self, B: int) -> tuple[Tensor, ...]:
        """Return the states before the first label."""
        states = tuple(model.start(B) for _, model in self._models)
        for (name, _), state in zip(self._models, states, strict=True):
            if not isinstance(state, Tensor) or state.shape[:1] != (B,):
                got = list(state.shape) if isinstance(state, Tensor) else type(state).__name__
                raise ValueError(f"{name}: expected states [{B}, ...] from `start`, got {got}")
            if state.device != self._device:
                raise ValueError(
                    f"{name}: expected a model on {self._device}, got one on {state.device}"
                )
        return states

    def advance(self, states: tuple[Tensor, ...], V: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what each of V classes adds after each state, `[R, V]`, and what follows."""
        total, following = torch.zeros((), dtype=torch.float64, device=self._device), []
        for (name, model), weight, state in zip(self._models, self.weights, states, strict=True):
            scores, after = advance_states(name, model, state)
            if scores.shape[1] != V:
                raise ValueError(
                    f"{name}: expected a column for each of the {V} classes of the network,"
                    f" got {scores.shape[1]}; labels of an NgramLM make them"
                )
            total = total + weighted(scores, weight)
            following.append(after)
        return total, tuple(following)

    def final(self, states: tuple[Tensor, ...]) -> Tensor:
        """Return what the end of a hypothesis adds, `[R]`."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for (name, model), weight, state in zip(self._models, self.weights, states, strict=True):
            total = total + weighted(final_scores(name, model, state), weight)
        return total


def table(*rows: Any, device: torch.device) -> Tensor:
    """Return a table of numbers, for `constant`, which copies it to a GPU one time."""
    return torch.tensor(rows, device=device)


def checked_durations(durations: Any) -> tuple[int, ...] | None:
    """Return the durations of a TDT; None for RNN-T."""
    if durations is None:
        return None
    durations = checks.python_ints("durations", durations)
    if not durations or min(durations) < 0 or max(durations) < 1:
        raise ValueError(
            "durations: expected numbers of 0 or more, of which one is above 0,"
            f" got {list(durations)}"
        )
    return tuple(int(value) for value in durations)


def no_hypotheses(encoder: Tensor, nbest: int, max_tokens: int, state: Any) -> TransducerHypotheses:
    """Return what a search finds without frames: one empty hypothesis for each sequence."""
    shape = (len(encoder), nbest, max_tokens)
    scores = encoder.new_zeros(shape[:2], dtype=acc_dtype(encoder.dtype))
    scores[:, 1:] = -torch.inf
    tokens = encoder.new_full(shape, -1, dtype=torch.int64)
    return TransducerHypotheses(
        tokens=tokens,
        lengths=tokens.new_zeros(shape[:2]),
        scores=scores,
        steps=tokens.clone(),
        durations=torch.zeros_like(tokens),
        token_scores=scores.new_zeros(shape),
        state=state,
    )
