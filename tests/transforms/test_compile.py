"""torch.compile without a graph break, with dynamic shapes too, and torch.export."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from helpers.rows import class_weights, devices, leaf, targets_for
from torch import Tensor

import partita
from partita.testing import sample_labels, sample_rows

ALL = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-3}
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def run(function: Callable, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    result = function(x, target)
    upstream = (
        torch.linspace(0.5, 2.5, result.numel(), device=x.device)
        .reshape(result.shape)
        .to(result.dtype)
    )
    return result, torch.autograd.grad(result, x, upstream)[0]


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="Inductor needs a C++ compiler")
@devices
def test_inductor(device: str) -> None:
    def loss(x: Tensor, target: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(x)
        stats = partita.token_stats(h, target)
        return (
            partita.cross_entropy(h, target, **ALL)
            + stats.entropy.mean()
            + partita.softmax(h).square().sum()
            + partita.logsumexp(h, 0).sum()
        )

    x = leaf(6, 37, device=device)
    target = targets_for(x, "labels")
    ours, expected = run(torch.compile(loss, fullgraph=True), x, target), run(loss, x, target)
    torch.testing.assert_close(ours, expected)


@devices
def test_inplace_has_no_effect_in_compiled_code(device: str) -> None:
    logits, target = sample_labels(6, 37, device=device)
    x = logits.requires_grad_()
    h = x * 1
    before = h.detach().clone()
    torch.compile(
        lambda h: partita.cross_entropy(h, target, inplace=True),
        fullgraph=True,
        backend="aot_eager",
    )(h).backward()
    assert torch.equal(h, before)


@devices
def test_the_backend_is_chosen_at_each_call(device: str) -> None:
    """Tracing fixes the backend of compiled code, and a guard checks it at each call."""
    compiled = torch.compile(lambda x: partita.softmax(x), fullgraph=True, backend="aot_eager")
    x = sample_rows(3, 5, device=device)
    compiled(x)
    with partita.backend("numba"), pytest.raises(RuntimeError, match=r"backend 'numba'"):
        compiled(x)


@devices
def test_labels_are_checked_in_compiled_code(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTITA_CHECK", "1")
    logits, target = sample_labels(6, 37, device=device)
    target[3] = 37
    with pytest.raises(IndexError, match=r"got 37 at \[3\]"):
        torch.compile(partita.cross_entropy, fullgraph=True, backend="aot_eager")(logits, target)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 7)
        self.loss = partita.nn.CrossEntropyLoss(
            class_weights(7, torch.float32, "cpu"), ignore_index=3, **ALL
        )

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = self.linear(x)
        entropy = partita.token_stats(logits, target, ignore_index=3).entropy
        return (
            self.loss(logits, target),
            entropy,
            partita.log_softmax(logits, 0),
            partita.logsumexp(logits, (0, 1), keepdim=True),
        )


@devices
def test_export(device: str) -> None:
    model = Model().to(device)
    rows = torch.export.Dim("rows", min=2)
    x, target = sample_rows(6, 8, device=device), torch.arange(6, device=device)
    exported = torch.export.export(
        model, (x, target), dynamic_shapes={"x": {0: rows}, "target": {0: rows}}
    ).module()
    for size in (6, 9):
        x, target = sample_rows(size, 8, device=device), torch.arange(size, device=device) % 7
        torch.testing.assert_close(exported(x, target), model(x, target))
