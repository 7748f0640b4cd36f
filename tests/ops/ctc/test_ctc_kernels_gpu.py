"""CTC's kernels on a GPU: large batches, determinism, graph capture and recompilation."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ctc import Batch, batch_of, reduced_loss, results
from helpers.memory import no_waits
from helpers.rows import KERNEL_DEVICES

import partita


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_a_reduction_of_many_is_the_same_each_time(device: str) -> None:
    x = batch_of(30, 1000, 9, 6, device=device)
    first = reduced_loss(x, "triton", "mean", True)
    torch.testing.assert_close(
        first, reduced_loss(x, "reference", "mean", True), rtol=2e-6, atol=2e-9
    )
    for _ in range(5):
        assert all(map(torch.equal, reduced_loss(x, "triton", "mean", True), first))


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize("N", [1, 4, 5])
def test_lengths_come_from_the_host(N: int, device: str) -> None:
    """Lengths on the host give the same losses; an odd N tests the alignment of the one copy."""
    x = batch_of(20, N, 9, 4, device=device)
    joined = torch.cat(
        [target[:length] for target, length in zip(x.targets, x.target_lengths, strict=True)]
    )
    for targets in (x.targets, joined):
        forms = (
            [x.input_lengths.to(a), x.target_lengths.to(b)]
            for a in ("cpu", device)
            for b in ("cpu", device)
        )
        losses = [
            partita.ctc_loss(x.logits, targets, *form, x.blank, "none", from_logits=True)
            for form in forms
        ]
        assert all(torch.equal(loss, losses[0]) for loss in losses)


def native(x: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PyTorch's losses and gradient in fp64."""
    logits = x.logits.double().requires_grad_()
    with torch.backends.cudnn.flags(enabled=False):
        losses = F.ctc_loss(
            logits.log_softmax(-1),
            x.targets,
            x.input_lengths.cpu(),
            x.target_lengths.cpu(),
            x.blank,
            "none",
        )
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


LARGE = [
    (4000, 1, 32, 1200),
    (10_000, 1, 32, 700),
    (20_000, 1, 32, 2000),
    (300, 400, 5, 100),
    (100, 3, 100_000, 30),
    (300, 70, 300, 150),
    (300, 3, 60, 60),
]


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_batches_against_pytorch_in_fp64(
    shape: tuple[int, int, int, int], device: str
) -> None:
    x = batch_of(*shape, device=device)
    x = x._replace(
        targets=torch.where(x.targets == x.blank, 0, x.targets),
        input_lengths=torch.full_like(x.input_lengths, shape[0]),
    )
    logits = x.logits.requires_grad_()
    losses = partita.ctc_loss(logits, *x[1:], "none", from_logits=True)
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    truth, expected = native(x)
    assert (grad.double() - expected).abs().max() <= 2e-6
    torch.testing.assert_close(losses.double(), truth, rtol=1e-6, atol=1e-9 * shape[0])
    repeated = partita.ctc_loss(logits, *x[1:], "none", from_logits=True)
    assert torch.equal(repeated, losses) and torch.equal(
        torch.autograd.grad(repeated.sum(), logits)[0], grad
    )


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_posteriors_of_a_hundred_thousand_steps(device: str) -> None:
    """The kernels in fp64 are the truth here; other tests compare them with the reference."""
    x = batch_of(100_000, 1, 16, 3000, device=device)
    _, _, grad = results(x, "triton")
    _, _, truth = results(x, "triton", torch.float64)
    assert (grad.double() - truth).abs().max() <= 4e-6  # the one weight is 0.5


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_an_hour_is_aligned(device: str) -> None:
    """The best path is known, because its classes have much greater logits."""
    steps, tokens = 180_000, 20_000
    g = torch.Generator(device).manual_seed(0)
    labels = torch.randint(1, 32, (tokens,), device=device, generator=g)
    logits = torch.randn(steps, 1, 32, device=device, generator=g)
    at = torch.arange(tokens, device=device) * 9 + 4
    logits[:, 0, 0] += 20.0
    logits[at, 0, labels] += 50.0
    torch.cuda.reset_peak_memory_stats()
    found = partita.ctc_align(
        logits,
        labels[None],
        torch.tensor([steps], device=device),
        torch.tensor([tokens], device=device),
        from_logits=True,
    )
    assert torch.cuda.max_memory_allocated() < 16 * 2**30
    assert torch.equal(found.tokens[0, at], torch.arange(tokens, device=device))
    assert torch.equal(found.labels[0, at], labels)
    assert (found.labels >= 0).sum() == steps


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_replay_sees_other_lengths_and_never_waits_for_the_host(
    reduction: str, device: str
) -> None:
    x = batch_of(60, 4, 20, 40, device=device)
    logits = x.logits.clone().requires_grad_()

    def step() -> tuple[Any, ...]:
        loss = partita.ctc_loss(logits, *x[1:], reduction, True, from_logits=True)
        return (
            loss,
            torch.autograd.grad(loss.sum(), logits)[0],
            partita.ctc_align(logits, *x[1:], from_logits=True).labels,
        )

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
        with no_waits():
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        other = batch_of(60, 4, 20, 40, device=device, seed=seed)
        for captured_input, new in zip((logits.data, *x[1:4]), other[:4], strict=True):
            captured_input.copy_(new)
        graph.replay()
        for found, expected in zip(captured, step(), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("device", KERNEL_DEVICES[1:])
def test_another_number_of_steps_compiles_nothing(device: str) -> None:
    from partita.ops.ctc.gpu import (
        forward_scan,
        gradient,
        label_gradient,
        loss,
        normalize,
        posterior_scan,
    )

    modules = (forward_scan, gradient, label_gradient, loss, normalize, posterior_scan)
    kernels = {
        name: k
        for module in modules
        for name, k in vars(module).items()
        if name.endswith("_kernel")
    }

    def compiled() -> dict[str, int]:
        return {
            name: sum(len(cache[0]) for cache in kernel.device_caches.values())
            for name, kernel in kernels.items()
        }

    for max_target_len in (24, 40):  # one chunk for each target, and several
        results(batch_of(64, 16, 20, max_target_len, device=device), "triton")
        results(batch_of(65, 15, 20, max_target_len + 1, device=device), "triton")
    before = compiled()
    for steps in (66, 67, 80, 100, 128, 333, 512):
        results(batch_of(steps, steps % 7 + 1, 20, steps // 3 + 2, device=device), "triton")
    assert compiled() == before and sum(before.values()) > 0
