"""Small transducers, their searches as plain loops, and all of their sequences."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

import partita

BLANK = 0
LABELS = ["-", "w1", "w2", "w3", "w4", "w5"]
TDT = (0, 1, 2, 4)


class Recurrent(nn.Module):
    """An LSTM as predictor; the batch is dimension 1 of its state."""

    state_dims: Any = 1

    def __init__(self, classes: int, hidden: int, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = self.lstm(self.embedding(tokens)[None], state)
        return 3 * output[0], state


class Stateless(nn.Module):
    """A predictor of the last two labels."""

    state_dims: Any = 0

    def __init__(self, classes: int, hidden: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(classes, hidden) for _ in range(2))

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        before = torch.zeros_like(tokens) if state is None else state
        return self.embeddings[0](tokens) + self.embeddings[1](before), tokens


class Cached(nn.Module):
    """Attention of the last label over a static cache of keys and values, as transformers have."""

    state_dims: ClassVar[Any] = {"cache": (1, 1), "place": 0}
    ROOM = 64

    def __init__(self, classes: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, hidden)
        self.projections = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        x = self.embedding(tokens)
        if state is None:
            empty = x.new_zeros(self.ROOM, *x.shape)
            state = {"cache": (empty, empty), "place": torch.zeros_like(tokens)}
        place, rows = state["place"], torch.arange(len(tokens), device=tokens.device)
        caches = []
        for cache, project in zip(state["cache"], self.projections, strict=True):
            caches.append(cache.index_put((place, rows), project(x)))
        keys, values = caches
        past = torch.arange(self.ROOM, device=x.device)[:, None] <= place
        weights = (keys * x).sum(-1).masked_fill(~past, -torch.inf).softmax(0)
        output = (weights[..., None] * values).sum(0)
        return 3 * output, {"cache": (keys, values), "place": place + 1}


class Joint(nn.Module):
    def __init__(self, hidden: int, classes: int, durations: int, blank_bias: float) -> None:
        super().__init__()
        self.head = nn.Linear(hidden, classes + durations)
        self.head.weight.data *= 3
        self.head.bias.data[BLANK] += blank_bias

    def forward(self, frames: Tensor, output: Tensor) -> Tensor:
        return self.head((frames + output).tanh())


class Transducer(NamedTuple):
    """A network, and the frames that it decodes, `[B, T, D]`, of these lengths."""

    predict: Any
    join: Joint
    encoder: Tensor
    lengths: list[int]
    durations: tuple[int, ...] | None

    def search(self, function: Callable[..., Any], **options: Any) -> Any:
        state_dims = getattr(self.predict, "state_dims", 0)
        given = {"blank": BLANK, "durations": self.durations, "state_dims": state_dims, **options}
        return function(self.encoder, self.lengths, self.predict, self.join, **given)

    def at(self, b: int, t: int, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the log-probabilities of tokens and durations at a frame, in fp64."""
        logits = self.join(self.encoder[b : b + 1, t : t + 1], output[:, None])[0, 0].double()
        if self.durations is None:
            return logits.log_softmax(-1), None
        K = len(self.durations)
        return logits[:-K].log_softmax(-1), logits[-K:].log_softmax(-1)


def transducer(
    kind: Callable[[int, int], Any] = Recurrent,
    lengths: Sequence[int] = (13, 9, 0, 12),
    durations: tuple[int, ...] | None = None,
    classes: int = 6,
    blank_bias: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Transducer:
    """Return a network with random weights, and frames that are NaN past the lengths."""
    torch.manual_seed(seed)
    hidden = 8
    predict = kind(classes, hidden).to(dtype)
    join = Joint(hidden, classes, len(durations or ()), blank_bias).to(dtype)
    encoder = 2 * torch.randn(len(lengths), max(lengths), hidden, dtype=dtype)
    for b, length in enumerate(lengths):
        encoder[b, length:] = torch.nan
    return Transducer(predict, join, encoder, list(lengths), durations)


def moved(network: Transducer, device: str) -> Transducer:
    """Return a copy on a device; modules would move in place."""
    predict, join = (deepcopy(each).to(device) for each in (network.predict, network.join))
    return network._replace(predict=predict, join=join, encoder=network.encoder.to(device))


def chunks_of(network: Transducer, sizes: Iterable[int]) -> Iterator[Transducer]:
    """Yield a network with the frames of one chunk after another; the last has all that is left."""
    first, T = 0, network.encoder.shape[1]
    for size in [*sizes, T]:
        end = min(first + size, T)
        lengths = [min(max(length - first, 0), end - first) for length in network.lengths]
        yield network._replace(encoder=network.encoder[:, first:end], lengths=lengths)
        first = end


class Found(NamedTuple):
    tokens: list[int]
    steps: list[int]
    durations: list[int]
    token_scores: list[float]
    score: float


@torch.no_grad()
def greedy(
    network: Transducer,
    b: int,
    max_symbols_per_step: int = 10,
    max_tokens: float = math.inf,
    models: Sequence[tuple[Any, float]] = (),
) -> Found:
    """Decode one sequence frame by frame, as NeMo does.

    At a frame, the network's greatest token is taken, and its greatest duration. A label is
    written, and the predictor reads it. Time moves on by the duration, which is 0 for a label of
    RNN-T, and 1 for a blank and where a blank has the duration 0. After `max_symbols_per_step`
    labels on one frame it moves on by 1.
    """
    tokens, steps, durations, token_scores, score = [], [], [], [], 0.0
    output, state = network.predict(torch.tensor([BLANK]), None)
    states = [model.start(1) for model, _ in models]
    t = symbols = 0
    while t < network.lengths[b] and len(tokens) < max_tokens:
        log_probs, log_durations = network.at(b, t, output)
        token, duration, of_duration = int(log_probs.argmax()), 0, 0.0
        if log_durations is not None and network.durations is not None:
            chosen = int(log_durations.argmax())
            duration, of_duration = network.durations[chosen], float(log_durations[chosen])
        if token == BLANK:
            score += float(log_probs[BLANK]) + of_duration
            t, symbols = t + max(duration, 1), 0
            continue
        ranks, following = log_probs.clone(), []
        for (model, weight), each in zip(models, states, strict=True):
            added, after = model.advance(each)
            ranks, following = ranks + weight * added[0], [*following, after]
        ranks[BLANK] = -math.inf
        token = int(ranks.argmax())
        states = [after[:, token] for after in following]
        score += float(ranks[token]) + of_duration
        tokens.append(token)
        steps.append(t)
        durations.append(duration)
        token_scores.append(float(log_probs[token]) + of_duration)
        output, state = network.predict(torch.tensor([token]), state)
        symbols += 1
        if duration:
            t, symbols = t + duration, 0
        elif symbols == max_symbols_per_step:
            t, symbols = t + 1, 0
    return Found(tokens, steps, durations, token_scores, score)


@torch.no_grad()
def exact_scores(network: Transducer, b: int, targets: Sequence[Sequence[int]]) -> Tensor:
    """Return the log-probabilities of targets, summed over all alignments, in fp64."""
    T, U = network.lengths[b], max(map(len, targets))
    tokens = torch.tensor([[*each, *[1] * (U - len(each))] for each in targets]).view(-1, U)
    outputs, state = [], None
    for u in range(U + 1):
        last = tokens[:, u - 1] if u else torch.full((len(targets),), BLANK)
        output, state = network.predict(last, state)
        outputs.append(output)
    frames = network.encoder[b : b + 1, :T].expand(len(targets), -1, -1)
    joined = [network.join(frames, output[:, None]) for output in outputs]
    logits = torch.stack(joined, 2).double()  # [targets, T, U + 1, V + K]
    sizes = torch.tensor([T] * len(targets)), torch.tensor([len(each) for each in targets])
    if network.durations is None:
        losses = partita.rnnt_loss(logits, tokens, *sizes, blank=BLANK, reduction="none")
        return -losses
    K = len(network.durations)
    arguments = (logits[..., :-K], logits[..., -K:], tokens, *sizes, BLANK, network.durations)
    return -partita.tdt_loss(*arguments, reduction="none")


class Path(NamedTuple):
    """A hypothesis of the beam search by loops, and its most probable alignment."""

    tokens: tuple[int, ...]
    frame: int
    score: float
    best: float
    emitted: tuple[tuple[int, int, float], ...]  # step, duration and score of each token
    symbols: int

    def extended(self, token: int, duration: int, gain: float, arc: float) -> "Path":
        frame, symbols = self.frame + duration, self.symbols + (token != BLANK)
        emitted = self.emitted
        if token != BLANK:
            emitted = (*emitted, (self.frame, duration, arc))
        tokens = self.tokens if token == BLANK else (*self.tokens, token)
        scores = self.score + gain, self.best + gain
        return Path(tokens, frame, *scores, emitted, 0 if duration else symbols)


def merged(paths: Sequence[Path], number: int) -> list[Path]:
    """Return the best hypotheses, of which those with equal tokens and frames are one."""
    groups: dict[Any, list[Path]] = {}
    for path in paths:
        groups.setdefault((path.tokens, path.frame), []).append(path)
    sums = []
    for group in groups.values():
        score = float(torch.tensor([p.score for p in group], dtype=torch.float64).logsumexp(0))
        sums.append(max(group, key=lambda p: p.best)._replace(score=score))
    return sorted(sums, key=lambda p: -p.score)[:number]


@torch.no_grad()
def beam(
    network: Transducer,
    b: int,
    width: int,
    max_tokens: int,
    max_symbols_per_step: int = 10,
    models: Sequence[tuple[Any, float]] = (),
) -> list[Path]:
    """Return the complete hypotheses of a beam search by loops, the best first."""
    T = network.lengths[b]
    known: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def states(tokens: tuple[int, ...]) -> tuple[Any, ...]:
        """Return output and state of the predictor, and the states of the models."""
        if tokens not in known and not tokens:
            first = network.predict(torch.tensor([BLANK]), None)
            known[tokens] = (*first, *(model.start(1) for model, _ in models))
        elif tokens not in known:
            _, state, *before = states(tokens[:-1])
            after = network.predict(torch.tensor(tokens[-1:]), state)
            of_models = (
                model.advance(each)[1][:, tokens[-1]]
                for (model, _), each in zip(models, before, strict=True)
            )
            known[tokens] = (*after, *of_models)
        return known[tokens]

    paths = [Path((), 0, 0.0, 0.0, (), 0)]
    complete: list[Path] = []
    if not T:
        return paths
    while paths:
        found = []
        for path in paths:
            output, _, *of_models = states(path.tokens)
            log_probs, log_durations = network.at(b, path.frame, output)
            ranks, end = log_probs.clone(), 0.0
            for (model, weight), each in zip(models, of_models, strict=True):
                ranks += weight * model.advance(each)[0][0]
                end += weight * float(model.final(each))
            arcs = [(BLANK, float(log_probs[BLANK]))]
            if len(path.tokens) < max_tokens and path.symbols < max_symbols_per_step:
                labels = sorted(range(1, len(ranks)), key=lambda c: -float(ranks[c]))[:width]
                arcs += [(c, float(ranks[c])) for c in labels]
            for token, gain in arcs:
                moves = [(1 if token == BLANK else 0, 0.0)]
                if network.durations is not None and log_durations is not None:
                    moves = list(zip(network.durations, log_durations.tolist(), strict=True))
                for duration, of_duration in moves:
                    after = path.frame + duration
                    if (duration or token != BLANK) and (
                        after < T or (after == T and token == BLANK)
                    ):
                        add = end if after == T else 0.0
                        arc = float(log_probs[token]) + of_duration
                        found.append(path.extended(token, duration, gain + of_duration + add, arc))
        found = sorted(found, key=lambda p: -p.score)[: 4 * width]
        complete = merged([*complete, *(p for p in found if p.frame == T)], width)
        least = complete[-1].score if len(complete) == width else -math.inf
        paths = merged([p for p in found if p.frame < T], width)
        paths = [p for p in paths if p.score >= least]
    return complete


def sequences(classes: int, longest: int) -> list[tuple[int, ...]]:
    """Return all sequences of labels of up to so many labels."""
    labels = [c for c in range(classes) if c != BLANK]
    return [each for U in range(longest + 1) for each in itertools.product(labels, repeat=U)]
