"""verl's row statistics against their definitions."""

import pytest
import torch
from helpers.rows import DTYPES, devices

from partita.integrations.verl import (
    FusedLinearForPPO,
    entropy_from_logits,
    linear_cross_entropy,
    logprobs_from_logits,
)
from partita.testing.samples import in_torch


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_logprobs_from_logits(inplace: bool, dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    leaf = torch.randn(3, 4, 50, generator=g).to(dtype).to(device).requires_grad_()
    labels = torch.randint(50, (3, 4), generator=g).to(device)
    logits = leaf * 1.0
    before = logits.detach().clone()
    found = logprobs_from_logits(logits, labels, inplace_backward=inplace)
    exact = leaf.detach().double().requires_grad_()
    expected = in_torch.token_stats(exact, labels)[0]
    result = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.dtype == result
    torch.testing.assert_close(found, expected.to(result), rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(found.sum(), leaf)
    (true,) = torch.autograd.grad(expected.sum(), exact)
    eps = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(grad.double(), true, rtol=eps, atol=eps)
    assert torch.equal(logits, before) != inplace
    values = leaf.detach().clone()
    torch.autograd.grad(logprobs_from_logits(leaf, labels).sum(), leaf)
    assert torch.equal(leaf, values)  # a leaf is not overwritten


@devices
def test_entropy_from_logits(device: str) -> None:
    logits = torch.randn(3, 4, 50, device=device)
    expected = in_torch.token_stats(logits)[2]
    torch.testing.assert_close(entropy_from_logits(logits), expected, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_from_hidden_states(reduction: str, device: str) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, matrix = (
        torch.randn(*shape, generator=g).to(device).requires_grad_()
        for shape in ((3, 4, 16), (50, 16))
    )
    labels = torch.randint(50, (3, 4), generator=g).to(device)
    found = linear_cross_entropy(hidden, matrix, labels, 0.7, reduction)
    logprobs, _, entropy = in_torch.token_stats(hidden @ matrix.T / 0.7, labels)
    if reduction != "none":
        logprobs = logprobs.sum() if reduction == "sum" else logprobs.mean()
    for ours, true in zip(found, (logprobs, entropy), strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-5, atol=1e-5)
        grads, exact = (
            torch.autograd.grad(x.sum(), (hidden, matrix), retain_graph=True) for x in (ours, true)
        )
        torch.testing.assert_close(grads, exact, rtol=1e-4, atol=1e-5)
    if reduction == "none":
        module = FusedLinearForPPO(chunk_size=2)(hidden, matrix, labels, temperature=0.7)
        assert all(map(torch.equal, module, found))


@devices
def test_labels_of_any_shape(device: str) -> None:
    """verl flattens the labels, and a packed batch `[1, T]` may have logits `[T, C]`."""
    logits, labels = torch.randn(5, 7, device=device), torch.randint(7, (1, 5), device=device)
    expected = logprobs_from_logits(logits, labels[0])
    assert torch.equal(logprobs_from_logits(logits, labels), expected)
    assert torch.equal(logprobs_from_logits(logits[None], labels[0]), expected[None])
    matrix = torch.randn(9, 7, device=device)
    found = linear_cross_entropy(logits, matrix, labels)
    assert all(map(torch.equal, found, linear_cross_entropy(logits, matrix, labels[0])))
    assert FusedLinearForPPO(impl_backend="torch")(logits, matrix, labels)[0].shape == (5,)


def test_bad_input() -> None:
    logits, labels = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    hidden, matrix = logits, torch.zeros(6, 5)
    message = r"labels: expected 6 classes, one for each row of \[2, 3\], got \[1, 3\]"
    with pytest.raises(ValueError, match=message):
        logprobs_from_logits(logits, labels[:1])
    with pytest.raises(IndexError, match=r"^labels: .*to 3 .*got 4 at \[1, 0\]"):
        logprobs_from_logits(logits, labels + torch.tensor([[0], [4]]))
    with pytest.raises(ValueError, match=r"^hidden: expected shape .* with H = 5"):
        linear_cross_entropy(hidden, matrix, labels)
    with pytest.raises(IndexError, match=r"^input_ids: expected labels from 0 to 5"):
        FusedLinearForPPO()(hidden, matrix[:, 1:], labels + 6)
    with pytest.raises(TypeError, match=r"vocab_weights: expected the dtype of hidden_states"):
        FusedLinearForPPO()(hidden, matrix[:, 1:].double(), labels)
    with pytest.raises(NotImplementedError, match="dist_process_group: expected None"):
        linear_cross_entropy(logits[0], torch.zeros(5, 4), labels[0], dist_process_group=object())
    with pytest.raises(ValueError, match="reduction: expected"):
        linear_cross_entropy(logits[0], torch.zeros(5, 4), labels[0], reduction="max")
