"""partita.nn.CRF: the interface of pytorch-crf, against the enumeration of all taggings."""

import itertools

import pytest
import torch
from helpers.errors import raises
from torch import Tensor

import partita

T, N, C = 4, 3, 3
LENGTHS = torch.tensor([4, 2, 1])


def batch() -> tuple[partita.nn.CRF, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    crf = partita.nn.CRF(C)
    emissions = torch.randn(T, N, C, generator=generator)
    tags = torch.randint(0, C, (T, N), generator=generator)
    return crf, emissions, tags, torch.arange(T)[:, None] < LENGTHS


def score(crf: partita.nn.CRF, emissions: Tensor, tags: tuple[int, ...]) -> Tensor:
    total = crf.start_transitions[tags[0]] + crf.end_transitions[tags[-1]]
    total = total + emissions[range(len(tags)), tags].sum()
    return total + sum(crf.transitions[i, j] for i, j in itertools.pairwise(tags))


def enumerated(crf: partita.nn.CRF, emissions: Tensor, tags: Tensor) -> tuple[Tensor, list]:
    likelihoods, best = [], []
    for n, length in enumerate(LENGTHS.tolist()):
        taggings = list(itertools.product(range(C), repeat=length))
        scores = torch.stack([score(crf, emissions[:, n], y) for y in taggings])
        own = score(crf, emissions[:, n], tuple(tags[:length, n].tolist()))
        likelihoods.append(own - scores.logsumexp(0))
        best.append(list(taggings[scores.argmax()]))
    return torch.stack(likelihoods), best


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("batch_first", [False, True])
def test_likelihoods_and_best_tags(batch_first: bool, dtype: torch.dtype) -> None:
    crf, emissions, tags, mask = batch()
    expected, best = enumerated(crf, emissions, tags)
    arguments = emissions, tags.masked_fill(~mask, -100), mask.to(dtype)
    if batch_first:
        state = crf.state_dict()
        crf = partita.nn.CRF(C, batch_first=True)
        crf.load_state_dict(state)
        arguments = tuple(t.transpose(0, 1) for t in arguments)
    torch.testing.assert_close(crf(*arguments, reduction="none"), expected)
    torch.testing.assert_close(crf(*arguments), expected.sum())
    torch.testing.assert_close(crf(*arguments, "mean"), expected.mean())
    torch.testing.assert_close(crf(*arguments, "token_mean"), expected.sum() / LENGTHS.sum())
    assert crf.decode(arguments[0], arguments[2]) == best


def test_all_tokens_without_a_mask() -> None:
    crf, emissions, tags, _ = batch()
    full = torch.ones(T, N, dtype=torch.bool)
    for reduction in ("none", "sum", "mean", "token_mean"):
        torch.testing.assert_close(
            crf(emissions, tags, reduction=reduction), crf(emissions, tags, full, reduction)
        )
    assert crf.decode(emissions) == crf.decode(emissions, full)


def test_parameters_are_those_of_pytorch_crf() -> None:
    crf = partita.nn.CRF(5)
    shapes = {name: tuple(value.shape) for name, value in crf.state_dict().items()}
    assert shapes == {"start_transitions": (5,), "end_transitions": (5,), "transitions": (5, 5)}
    assert all(p.abs().max() <= 0.1 and p.requires_grad for p in crf.parameters())
    assert "num_tags=5" in repr(crf)
    loss = -crf(torch.zeros(3, 2, 5), torch.zeros(3, 2, dtype=torch.int64))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in crf.parameters())


@pytest.mark.parametrize(
    ("error", "change"),
    {
        r"ValueError: emissions: expected shape \[T, N, C\]": {"emissions": torch.zeros(T, N)},
        "ValueError: emissions: expected 3 tags": {"emissions": torch.zeros(T, N, C + 1)},
        "ValueError: tags: expected shape": {"tags": torch.zeros(T, N + 1).long()},
        "IndexError: tags: expected classes from 0 to 2": {"tags": torch.full((T, N), C)},
        "ValueError: mask: expected shape": {"mask": torch.ones(T, N + 1).bool()},
        "ValueError: mask: expected at least one token": {"mask": torch.zeros(T, N).bool()},
        r"ValueError: mask: expected a prefix .* at \[2, 0\]": {
            "mask": torch.tensor([[1, 0, 1, 1]] * N).bool().T
        },
        "ValueError: reduction: expected one of 'none', 'sum'": {"reduction": "median"},
    }.items(),
)
def test_errors(error: str, change: dict) -> None:
    crf, emissions, tags, mask = batch()
    arguments = {"emissions": emissions, "tags": tags, "mask": mask, **change}
    with raises(error):
        crf(**arguments)


def test_a_number_of_tags_is_positive() -> None:
    with pytest.raises(ValueError, match="num_tags: expected a number of tags"):
        partita.nn.CRF(0)
