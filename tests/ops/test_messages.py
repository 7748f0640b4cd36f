"""Messages that help with mistakes that users make."""

from collections.abc import Callable

import pytest
import torch
from helpers.errors import raises

import partita

X = torch.zeros(7, 4, 5)  # 7 sequences of 4 steps, as if ctc_loss took the batch first
TARGETS = torch.ones(7, 2, dtype=torch.int64)
CHAIN = partita.Chain(torch.zeros(3, 1, 3, 3), partita.dense_source(3))
EMISSIONS, MOVES = torch.zeros(5, 2, 3), torch.zeros(3, 3)
# Of batch-first tags: the second sequence has no third token.
MASK = torch.tensor([[True] * 5, [True, True, False, True, True]])
CRF = partita.nn.CRF(3, batch_first=True)


def tagger(emissions: torch.Tensor, **options: object) -> object:
    return partita.linear_chain(emissions, MOVES, **options)


def segments(emissions: torch.Tensor, **options: object) -> object:
    return partita.semi_markov_chain(emissions, MOVES, MOVES, **options)


# Mistakes in the arguments of chains over tokens: emissions, and the others.
OF_TOKENS: dict[str, tuple[torch.Tensor, dict[str, object]]] = {
    r"lengths: .* = \[2\], got \[5\]; emissions is \[T, N, C\], and batch_first=True": (
        EMISSIONS,
        {"lengths": [3] * 5},
    ),
    r"lengths: .* = \[5\], got \[2\]; .* batch_first=True takes \[N, T, C\]$": (
        EMISSIONS.transpose(0, 1),
        {"lengths": [3] * 2, "batch_first": False},
    ),
    r"lengths: .* = \[5\], got \[2\]; .* batch_first=False takes \[T, N, C\]$": (
        EMISSIONS,
        {"lengths": [3] * 2, "batch_first": True},
    ),
    r"mask: .* \[T, N\] of emissions = \[5, 2\], got \[2, 5\];": (EMISSIONS, {"mask": MASK}),
    r"mask: expected a prefix of each sequence, got a \w+ at \[1, 3\] after": (
        EMISSIONS.transpose(0, 1),
        {"mask": MASK, "batch_first": True},
    ),
    r"mask: .* got a \w+ at \[1, 1\] after .* out; .* batch_first=True takes": (
        EMISSIONS.transpose(0, 1),
        {"mask": torch.tensor([[True, False, False, False, False], [True] * 5])},
    ),
    r"emissions: expected shape \[N, T, C\] with T of at least 1, got \[2, 0, 3\]": (
        EMISSIONS[:0].transpose(0, 1),
        {"batch_first": True},
    ),
}
MISTAKES: dict[str, Callable[[], object]] = {
    r"ValueError: targets: .* got \[7, 2\]; log_probs is .*, and log_probs.transpose\(0, 1\)": (
        lambda: partita.ctc_loss(X, TARGETS, [4] * 7, [2] * 7)
    ),
    r"ValueError: input_lengths: .* \[N\] = \[4\], got \[7\]; log_probs is \[T, N, C\]": (
        lambda: partita.ctc_loss(X, TARGETS.flatten(), [4] * 7, [2] * 7)
    ),
    r"ValueError: input_lengths: expected shape \[N\] = \[4\], got \[1\]$": lambda: (
        partita.ctc_loss(X, TARGETS[:4], torch.tensor(4), [2] * 4)
    ),
    r"ValueError: target: .* = \[7, 5\], got \[7, 4\]; classes are dimension 1 of input": (
        lambda: partita.cross_entropy(X, TARGETS[:, :1].expand(7, 4))
    ),
    "IndexError: target: expected no label but .* -100, as there are 0 classes, got 1 at": (
        lambda: partita.cross_entropy(X[0, :, :0], TARGETS[:4, 0])
    ),
    r"ValueError: log_probs: expected at least one class, got shape \[7, 4, 0\]": (
        lambda: partita.ctc_loss(X[..., :0], TARGETS[:4], [7] * 4, [2] * 4)
    ),
    r"TypeError: input_lengths: expected integers, got \['7', '7', '7', '7'\]": (
        lambda: partita.ctc_loss(X, TARGETS[:4], ["7"] * 4, [2] * 4)
    ),
    r"ValueError: source: expected a state from 0 to 1, or -1 for no edge, got 7 at \[1, 0\]": (
        lambda: partita.logz(torch.zeros(2, 1, 2, 1), torch.tensor([[0], [7]]))
    ),
    r"ValueError: states: expected a state from 0 to 2, or -1 .*, got 5 at \[2, 0\]": (
        lambda: CHAIN.log_prob(states=torch.tensor([[0], [1], [5], [0]]))
    ),
    r"ValueError: states: .* \[..., T \+ 1, N\] with \[T, N\] = \[3, 1\], got \[2, 1\]": (
        lambda: CHAIN.log_prob(states=torch.tensor([[0], [5]]))
    ),
    "TypeError: generator: expected a torch.Generator or None, got int": (
        lambda: CHAIN.sample(1, generator=3)
    ),
    r"IndexError: tags: expected classes from 0 to 2, got -100 at \[0, 2\]$": (
        lambda: CRF(EMISSIONS.transpose(0, 1), torch.tensor([[0, 1, -100, 2, 1], [0] * 5]))
    ),
    r"ValueError: mask: .* \[N, T\] of emissions = \[2, 5\], got \[5, 2\]; .* batch_first=False": (
        lambda: CRF(EMISSIONS.transpose(0, 1), torch.zeros(2, 5, dtype=torch.int64), MASK.T)
    ),
    r"ValueError: tags: expected shape that of the emissions = \[2, 5\], got \[5, 2\]": (
        lambda: CRF(EMISSIONS.transpose(0, 1), torch.zeros(5, 2, dtype=torch.int64))
    ),
}


@pytest.mark.parametrize("error", MISTAKES)
def test_the_message_helps(error: str) -> None:
    with raises(error):
        MISTAKES[error]()


@pytest.mark.parametrize("message", OF_TOKENS)
@pytest.mark.parametrize("chain", [tagger, segments])
def test_the_message_helps_with_tokens(chain: Callable[..., object], message: str) -> None:
    emissions, options = OF_TOKENS[message]
    with raises(f"ValueError: {message}"):
        chain(emissions, **options)
