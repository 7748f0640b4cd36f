"""Transducers: greedy and beam search of RNN-T and TDT under an LSTM predictor.

The frames say which tokens have to be written, so that these are known. The error is the number of
sequences for which others are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.decode.transducer import rnnt_beam_search, rnnt_greedy_search
from .case import Attempt, Buffers, Functions, Sizes, Verdict, cases_of, given
from .paths import SequencesCase

DURATIONS = (0, 1, 2, 3, 4)
LABEL_MOVE, BLANK_MOVE = 3, 2  # the durations of a TDT
CLEAR = 1000.0  # what the right class has before the others

BASE = 64  # of the digits of a token in a frame, which half types hold

# Steps, sequences, tokens, classes, hidden size and the width of the beam.
QUICK = [(20, 2, 4, 16, 8, 2)]
LARGE, SMALL = (500, 64, 130, 1025, 640, 4), (100, 4, 24, 256, 128, 4)
SIZES = Sizes([LARGE], [LARGE], [SMALL], QUICK)


class SearchInputs(NamedTuple):
    """Frames of full length. The first features of each are whether the number of the tokens that
    have to be written by then is odd, and the two digits of the last one of them."""

    encoder: Tensor  # [B, T, D]
    network: Network
    tokens: Tensor  # [B, U]
    beam_width: int


class Network:
    """A predictor of one LSTM, which also counts the labels, and a joint network."""

    def __init__(
        self, buffers: Buffers, dtype: torch.dtype, classes: int, hidden: int, durations: int
    ) -> None:
        def parameters(module: nn.Module) -> Any:
            module.to(buffers.device, dtype).requires_grad_(False)
            for name, weight in module.named_parameters():
                weight.copy_(buffers.normal(name, tuple(weight.shape), dtype) / hidden**0.5)
            return module

        self.state_dims = {"lstm": (1, 1), "is_odd": 0}
        self.embedding = parameters(nn.Embedding(classes, hidden))
        self.lstm = parameters(nn.LSTM(hidden, hidden))
        self.head = parameters(nn.Linear(hidden, classes + durations))
        self.durations, self.classes = DURATIONS[:durations] or None, classes
        self.columns = torch.arange(classes + durations, device=buffers.device)

    def predict(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        lstm, is_odd = (None, tokens < 0) if state is None else (state["lstm"], ~state["is_odd"])
        output, lstm = self.lstm(self.embedding(tokens)[None], lstm)
        output = torch.cat([is_odd[:, None].to(output.dtype), output[0, :, 1:]], 1)
        return output, {"lstm": lstm, "is_odd": is_odd}

    def join(self, frames: Tensor, output: Tensor) -> Tensor:
        logits = self.head((frames + output).relu())
        is_due = frames[..., 0] != output[..., 0]
        token = frames[..., 1].long() * BASE + frames[..., 2].long()
        is_right = self.columns == torch.where(is_due, token, 0)[..., None]
        if self.durations is not None:
            move = torch.where(is_due, LABEL_MOVE, BLANK_MOVE)[..., None]
            is_right = is_right | (self.columns == self.classes + move)
        return torch.where(is_right, logits + CLEAR, logits)


def search(inputs: SearchInputs, function: Callable[..., Any], **options: Any) -> Any:
    encoder, network = inputs.encoder, inputs.network
    lengths = torch.full(encoder.shape[:1], encoder.shape[1], device=encoder.device)
    options |= {"durations": network.durations, "state_dims": network.state_dims}
    return function(encoder, lengths, network.predict, network.join, blank=0, **options)


def greedy(inputs: SearchInputs) -> Any:
    return search(inputs, rnnt_greedy_search)


def beam(inputs: SearchInputs) -> Any:
    return search(inputs, rnnt_beam_search, beam_width=inputs.beam_width)


PROVIDERS: Functions = {
    "partita": {
        "rnnt_greedy": given(greedy),
        "tdt_greedy": given(greedy),
        "rnnt_beam": given(beam),
    }
}


@dataclass(frozen=True)
class Search(SequencesCase):
    """A batch of sequences of full length, of which each writes as many tokens."""

    sequences: int
    tokens: int
    classes: int
    hidden: int
    beam_width: int

    dimensions = ("steps", "sequences", "classes")
    sizes = (*dimensions, "tokens", "hidden", "beam_width")
    is_packed = True

    def inputs(self, buffers: Buffers) -> SearchInputs:
        B, T = self.sequences, self.steps
        generator = torch.Generator().manual_seed(0)
        # Arcs of a TDT that add up to the steps, in any order; the labels say where tokens are due.
        U = min(self.tokens, T // 4)
        blanks = (T - U * LABEL_MOVE) // BLANK_MOVE
        moves = torch.tensor([LABEL_MOVE] * U + [BLANK_MOVE] * blanks)
        order = torch.stack([torch.randperm(U + blanks, generator=generator) for _ in range(B)])
        arcs = moves[order]
        frames = (arcs.cumsum(1) - arcs)[arcs == LABEL_MOVE].view(B, U)
        due = torch.zeros(B, T, dtype=torch.int64).scatter(1, frames, 1).cumsum(1)
        tokens = torch.randint(1, self.classes, (B, U), generator=generator)
        last = torch.nn.functional.pad(tokens, (1, 0)).gather(1, due)
        features = torch.stack([due % 2, last // BASE, last % BASE], -1)
        encoder = buffers.normal("encoder", (B, T, self.hidden), self.dtype).clone()
        encoder[..., :3] = features.to(buffers.device)
        durations = len(DURATIONS) if self.op == "tdt_greedy" else 0
        network = Network(buffers, self.dtype, self.classes, self.hidden, durations)
        return SearchInputs(encoder, network, tokens.to(buffers.device), self.beam_width)

    def standard(self, inputs: SearchInputs) -> Tensor:
        return inputs.tokens

    def verdicts(self, attempt: Attempt, standard: Tensor) -> Iterator[Verdict]:
        function, inputs, _ = attempt
        found, U = function(inputs), standard.shape[1]
        right = (found.lengths[:, 0] == U) & (found.tokens[:, 0, :U] == standard).all(1)
        yield Verdict(float((~right).sum()), 0.0, (0,), float(right.sum()), float(len(right)))


OPS = {"rnnt_search": cases_of(dict.fromkeys(PROVIDERS["partita"], (Search, SIZES)), torch.float32)}
