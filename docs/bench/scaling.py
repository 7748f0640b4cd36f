"""The loss from hidden states over many GPUs, on paper: the arithmetic of docs/parallel.md.

The work of one GPU is measured: the three products, and three passes over the logits at the copy
bandwidth. Links have their nominal bandwidths.
"""

from __future__ import annotations

from quoted_rows import number

LINEAR = "h200/linear_cross_entropy.csv"  # as the measured times of that page
TOKENS, HIDDEN, CLASSES = 8192, 4096, 128256
BYTES_OF_BF16 = 2
PRODUCTS_MS = number(
    LINEAR,
    "mean_ms",
    part="total",
    provider="products",
    tokens=TOKENS,
    hidden=HIDDEN,
    vocabulary=CLASSES,
)
COPY_BANDWIDTH = 1e9 * number(LINEAR, "gb_per_s", op="machine", part="copy")
PASSES_MS = 3e3 * TOKENS * CLASSES * BYTES_OF_BF16 / COPY_BANDWIDTH
EXCHANGED_BYTES = 4 * HIDDEN * TOKENS  # the gradient of the hidden states, in fp32
MATRIX_BYTES = BYTES_OF_BF16 * HIDDEN * CLASSES
MACHINE_RANKS = 8  # GPUs of a machine
LINK, NETWORK = 450e9, 50e9  # nominal bytes a second in each direction, in and between machines


def work_ms(vocabulary_ranks: int, token_ranks: int) -> float:
    """Return the milliseconds of the products and passes of a rank."""
    return (PRODUCTS_MS + PASSES_MS) / (vocabulary_ranks * token_ranks)


def exchange_ms(vocabulary_ranks: int, token_ranks: int) -> float:
    """Return the milliseconds in which a ring adds up the gradient of the hidden states."""
    link = LINK if vocabulary_ranks <= MACHINE_RANKS else NETWORK
    return 2e3 * (1 - 1 / vocabulary_ranks) * EXCHANGED_BYTES / token_ranks / link


def matrix_ms(vocabulary_ranks: int, token_ranks: int) -> float:
    """Return the milliseconds in which rings over machines add up the gradient of the matrix."""
    return 2e3 * (1 - 1 / token_ranks) * MATRIX_BYTES / vocabulary_ranks / NETWORK


def loss_ms(vocabulary_ranks: int, token_ranks: int) -> float:
    """Return the milliseconds of the loss; a third of the products hides the exchange."""
    hidden = PRODUCTS_MS / 3 / (vocabulary_ranks * token_ranks)
    sizes = vocabulary_ranks, token_ranks
    return work_ms(*sizes) + max(0.0, exchange_ms(*sizes) - hidden)
