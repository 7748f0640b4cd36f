"""Transducers: greedy and beam search of RNN-T and TDT under an LSTM predictor.

The frames say which tokens have to be written, so that these are known. The error is the number of
sequences for which others are found.
"""

from __future__ import annotations

import math
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
CLEAR = 1000.0  # times about 3/8 is what the right class has before the others
CELL, OPEN = 2.0, 20.0  # the weight of the code in the cell; what opens a gate or closes it

# Steps, sequences, tokens, classes, hidden size and the width of the beam.
QUICK = [(20, 2, 4, 16, 64, 2)]
LARGE, SMALL = (500, 64, 130, 1025, 640, 4), (100, 4, 24, 256, 128, 4)
SIZES = Sizes([LARGE], [LARGE], [SMALL], QUICK)


class SearchInputs(NamedTuple):
    """Frames of full length, each of which holds the code of the last token due by then."""

    encoder: Tensor  # [B, T, D]
    network: Network
    tokens: Tensor  # [B, U]
    beam_width: int


class Network:
    """A predictor of one LSTM, and a joint network `head(relu(frames + output))`.

    Each class has a code of ones and minus ones, and a frame holds that of the last token due. The
    gates of the LSTM are set such that its output is minus the code of the last token it has read.
    Where the two are equal their sum is 0, and the bias of the blank decides.
    """

    def __init__(
        self, buffers: Buffers, dtype: torch.dtype, classes: int, hidden: int, durations: int
    ) -> None:
        codes = buffers.normal("codes", (classes, hidden), torch.float32)
        codes = torch.where(codes > 0, 1.0, -1.0)
        self.embedding = nn.Embedding(classes, hidden)
        self.lstm = nn.LSTM(hidden, hidden)
        self.head = nn.Linear(hidden, classes + durations)
        modules = nn.ModuleList([self.embedding, self.lstm, self.head])
        modules.to(buffers.device).requires_grad_(False)
        self.embedding.weight.copy_(codes)
        for name, weight in self.lstm.named_parameters():
            weight.copy_(buffers.normal(name, tuple(weight.shape), torch.float32) / hidden**0.5)
            of_input, of_memory, of_cell, of_output = weight.chunk(4)  # the rows of each gate
            of_cell.zero_()
            if name == "weight_ih_l0":
                of_cell.fill_diagonal_(-CELL)
            elif name == "bias_ih_l0":
                of_input.add_(OPEN)
                of_memory.sub_(OPEN)
                of_output.add_(OPEN)
        self.head.weight.copy_(torch.cat([codes, torch.zeros_like(codes[:durations])]))
        self.head.weight[0] = 0.0
        self.head.bias.zero_()
        self.head.bias[0] = hidden / 32
        if durations:
            self.head.weight[classes + LABEL_MOVE] = 1.0
            self.head.bias[classes + BLANK_MOVE] = hidden / 32
        for parameter in self.head.parameters():
            parameter.mul_(CLEAR / hidden)
        modules.to(dtype)
        self.codes = math.tanh(math.tanh(CELL)) * codes.to(dtype)
        self.durations = DURATIONS[:durations] or None

    def predict(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, state = self.lstm(self.embedding(tokens)[None], state)
        return output[0], state

    def join(self, frames: Tensor, output: Tensor) -> Tensor:
        return self.head((frames + output).relu())


def search(inputs: SearchInputs, function: Callable[..., Any], **options: Any) -> Any:
    encoder, network = inputs.encoder, inputs.network
    lengths = torch.full(encoder.shape[:1], encoder.shape[1], device=encoder.device)
    options |= {"durations": network.durations, "state_dims": 1}
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
        # A token differs from the one before, and the first one from the blank.
        ahead = torch.randint(1, self.classes - 1, (B, U), generator=generator)
        tokens = 1 + ahead.cumsum(1) % (self.classes - 1)
        last = torch.nn.functional.pad(tokens, (1, 0)).gather(1, due)
        durations = len(DURATIONS) if self.op == "tdt_greedy" else 0
        network = Network(buffers, self.dtype, self.classes, self.hidden, durations)
        encoder = network.codes[last.to(buffers.device)]
        return SearchInputs(encoder, network, tokens.to(buffers.device), self.beam_width)

    def standard(self, inputs: SearchInputs) -> Tensor:
        return inputs.tokens

    def verdicts(self, attempt: Attempt, standard: Tensor) -> Iterator[Verdict]:
        function, inputs, _ = attempt
        found, U = function(inputs), standard.shape[1]
        right = (found.lengths[:, 0] == U) & (found.tokens[:, 0, :U] == standard).all(1)
        yield Verdict(float((~right).sum()), 0.0, (0,), float(right.sum()), float(len(right)))


OPS = {
    "rnnt_search": cases_of(
        dict.fromkeys(PROVIDERS["partita"], (Search, SIZES)), torch.float32, torch.bfloat16
    )
}
