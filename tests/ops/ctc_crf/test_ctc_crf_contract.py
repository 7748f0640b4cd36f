"""The contract of CTC-CRF: invalid values, errors, compiled code, streams and memory."""

import numpy as np
import pytest
import torch
from helpers.ctc import BAD_SEQUENCES, CRF_SIZES, backends, crf_loss
from helpers.errors import raises

import partita


@pytest.mark.usefixtures("unchecked")
@backends
def test_unchecked_values_make_nan_of_their_sequence(backend: str) -> None:
    x = torch.zeros(4, 7, 9, 4, requires_grad=True)
    targets = torch.tensor([[1, 2], [1, 9], [-3, 1], [1, 2], [1, 2], [0, 1], [1, 2]])
    rest = targets, [2, 2, 2, 2, -1, 2, 3], [3, 4, 4, 5, 4, 4, 4]
    with partita.backend(backend):
        losses = crf_loss(x, rest, reduction="none")
        assert losses.isnan().tolist() == [False] + [True] * 6
        (grad,) = torch.autograd.grad(losses.sum(), x)
        assert grad[:, 0].isfinite().all() and grad[:, 1:].isnan().all()
        joined = crf_loss(
            x[:, :3],
            (torch.tensor([1, 2, 1, 9, 2]), torch.tensor([2, 2, 3]), None),
            reduction="none",
        )
        assert joined.isnan().tolist() == [False, True, True]


@pytest.mark.gpu
def test_peak_memory() -> None:
    """The peak is the gradient, the states of all k-mers, the lattice's marginals and one slab.

    The first three take 1 + 0.4 + 2 · 160 / 1,280 of the memory of the scores.
    """
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1000, 32, 256 * 5, generator=g, device="cuda", requires_grad=True)
    targets, lengths = (
        torch.randint(1, 5, (32, 163), generator=g, device="cuda"),
        torch.full((32,), 163, device="cuda"),
    )
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(
            partita.ctc_crf_loss(x, targets, lengths, state_len=4, alphabet_size=5), x
        )
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 2.5 * x.numel() * x.element_size()


BAD = {
    "TypeError: scores: expected a floating dtype": {"scores": torch.zeros(3, 2, 36).long()},
    r"ValueError: scores: expected shape \[T, N, C \* A\] or \[T, N, C, A\] with C = 3\^2 = 9 and"
    " A = 4": {"scores": torch.zeros(3, 36)},
    r"ValueError: scores: expected shape .*, got \[3, 2, 35\]": {"scores": torch.zeros(3, 2, 35)},
    "ValueError: state_len: expected a number of at least 1, got 0": {"state_len": 0},
    "TypeError: state_len: expected an int, got float": {"state_len": 1.5},
    "ValueError: alphabet_size: expected a number of at least 2, got 1": {"alphabet_size": 1},
    **BAD_SEQUENCES,
    r"IndexError: targets: expected labels from 1 to 3, got 4 at \[1, 1\]": {
        "targets": torch.tensor([[1, 2], [3, 4]])
    },
    r"IndexError: targets: expected labels from 1 to 3, got 0 at \[1\]": {
        "targets": torch.tensor([1, 0, 3, 3])
    },
}


@pytest.mark.parametrize("error", BAD)
def test_bad_input(error: str) -> None:
    good = {
        "scores": torch.zeros(3, 2, 36),
        "targets": torch.ones(2, 2).long(),
        "target_lengths": [2, 2],
        **CRF_SIZES,
    }
    with raises(error):
        partita.ctc_crf_loss(**{**good, **BAD[error]})


@pytest.mark.parametrize(
    ("sizes", "error"),
    [((0, 1), ValueError), ((4, 0), ValueError), ((4, 1.5), TypeError), ((True, 2), TypeError)],
)
def test_bad_sizes_of_a_table(sizes: tuple[int, int], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"expected (an int|a number of at least 1)"):
        partita.debruijn_source(*sizes)


def test_sizes_may_be_integers_of_numpy() -> None:
    expected = partita.debruijn_source(4, 2)
    assert partita.debruijn_source(np.int64(4), np.int64(2)).equal(expected)
    scores, targets = torch.randn(3, 1, 20), torch.tensor([[1, 2]])
    sizes = {"state_len": np.int64(1), "alphabet_size": np.int64(5)}
    expected = partita.ctc_crf_loss(scores, targets, [2], state_len=1, alphabet_size=5)
    assert partita.ctc_crf_loss(scores, targets, [2], **sizes).equal(expected)
