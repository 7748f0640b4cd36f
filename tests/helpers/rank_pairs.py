"""Contrastive losses over ranks, against one process and against open_clip's formulas."""

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.contrastive import clip_loss, features, siglip_loss
from helpers.errors import raises
from helpers.rank_data import assert_close, assert_same_on_all_ranks
from torch import Tensor, nn

import partita
from partita import parallel
from partita.ops.contrastive.common import row_bytes

N, D, IN = 5, 12, 7  # pairs of a rank, and the sizes of the encoders


class Model(nn.Module):
    """Two encoders and the numbers of a loss, equal on all ranks."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"images": (D, IN), "texts": (D, IN)}.items():
            weight = torch.randn(shape, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(weight.to(device)))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64, device=device))
        self.bias = nn.Parameter(torch.tensor(-3.0, dtype=torch.float64, device=device))

    def features(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        a, b = images @ self.images.T, texts @ self.texts.T
        return nn.functional.normalize(a, dim=1), nn.functional.normalize(b, dim=1)

    def mean_gradients(self, loss: Tensor) -> list[Tensor]:
        """Return the gradients as DDP has them, the mean over ranks."""
        found = torch.autograd.grad(loss, list(self.parameters()), materialize_grads=True)
        for grad in found:
            dist.all_reduce(grad)
        return [grad / dist.get_world_size() for grad in found]


def own(x: Tensor) -> Tensor:
    """Return this rank's part of what all ranks have."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def batch(device: torch.device, more: int = 0) -> tuple[Tensor, Tensor]:
    """Return the images and texts of all ranks."""
    world = dist.get_world_size()
    sizes = (world * N, world * (N + more))
    return tuple(features(n, IN, torch.float64, str(device), n).detach() for n in sizes)


def check_pairs_against_open_clip(device: torch.device) -> None:
    """Compare losses, and gradients of all parameters under DDP, with its `local_loss`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    images, texts = batch(device)
    for kind in ("softmax", "sigmoid"):
        model = Model(device)
        a, b = model.features(images, texts)
        # `gather_with_grad` gives the others' features their gradient, as one process does.
        if kind == "softmax":
            losses = [
                clip_loss(x, a, y, b, model.scale, r)
                for r, (x, y) in enumerate(zip(a.chunk(world), b.chunk(world), strict=True))
            ]
        else:
            parts = b.chunk(world)
            numbers = (model.scale, model.bias)
            losses = [siglip_loss(x, parts, *numbers, r) for r, x in enumerate(a.chunk(world))]
        total = sum(losses) / world
        expected = torch.autograd.grad(total, list(model.parameters()), materialize_grads=True)
        for local in (True, False):
            for budget in (None, 2 * row_bytes(world * N, torch.float64)):
                numbers = {"logit_bias": model.bias, "kind": kind, "memory_budget": budget}
                pair = model.features(own(images), own(texts))
                loss = parallel.contrastive_loss(*pair, model.scale, **numbers, local=local)
                torch.testing.assert_close(loss, losses[rank] if local else total)
                if not local:
                    assert_same_on_all_ranks(loss.detach())
                found = model.mean_gradients(loss)
                for ours, truth in zip(found, expected, strict=True):
                    torch.testing.assert_close(ours, truth)


def check_pairs_of_wrapped_models(device: torch.device) -> None:
    """Take a step of PyTorch's DDP, and compare it with one process that has the whole batch."""

    class Loss(nn.Module):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: Tensor, texts: Tensor) -> Tensor:
            pair = self.model.features(images, texts)
            options = {"logit_bias": self.model.bias, "kind": "sigmoid"}
            return parallel.contrastive_loss(*pair, self.model.scale, **options)

    images, texts = batch(device)
    model = Model(device)
    wrapped = nn.parallel.DistributedDataParallel(Loss(model))
    wrapped(own(images), own(texts)).backward()
    whole = Model(device)
    a, b = whole.features(images, texts)
    partita.contrastive_loss(a, b, whole.scale, logit_bias=whole.bias, kind="sigmoid").backward()
    for ours, truth in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, truth.grad)


def check_pairs_beside_hard_negatives(device: torch.device) -> None:
    """Each rank's rows have the columns of all ranks; the pair of row i is its rank's column i."""
    rank, world, more = dist.get_rank(), dist.get_world_size(), 2
    images, texts = batch(device, more)
    for kind in ("softmax", "sigmoid"):
        for dtype in (torch.float32, torch.bfloat16):
            a, b = (own(x).to(dtype).requires_grad_() for x in (images, texts))
            loss = parallel.contrastive_loss(a, b, 3.0, kind=kind, symmetric=False, local=False)
            found = torch.autograd.grad(loss, (a, b))
            # In one process the pairs come first.
            first = torch.arange(world * (N + more)).reshape(world, N + more)
            order = torch.cat([first[:, :N].flatten(), first[:, N:].flatten()]).to(device)
            whole = [x.to(dtype).double().requires_grad_() for x in (images, texts)]
            pair = (whole[0], whole[1][order])
            truth = partita.contrastive_loss(*pair, 3.0, kind=kind, symmetric=False)
            assert_close(loss, truth)
            for ours, exact in zip(found, torch.autograd.grad(truth, whole), strict=True):
                assert ours.dtype == dtype
                assert_close(ours, world * exact.chunk(world)[rank], dtype)


def check_compiled_and_frozen_pairs(device: torch.device) -> None:
    images, texts = (x.float() for x in batch(device))
    scale = torch.tensor(4.0, device=device, requires_grad=True)

    def function(a: Tensor, b: Tensor) -> Tensor:
        return parallel.contrastive_loss(a, b, scale)

    def run(function: Any, *leaves: bool) -> list[Tensor]:
        parts = zip((images, texts), leaves, strict=True)
        pair = [own(x).clone().requires_grad_(leaf) for x, leaf in parts]
        loss = function(*pair)
        wanted = [x for x in (*pair, scale) if x.requires_grad]
        return [loss.detach(), *torch.autograd.grad(loss, wanted)]

    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
        expected = run(function, True, True)
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for ours, truth in zip(run(compiled, True, True), expected, strict=True):
            assert_close(ours, truth)
    for leaves, places in (((True, False), (0, 1, 3)), ((False, True), (0, 2, 3))):
        for ours, place in zip(run(function, *leaves), places, strict=True):
            assert torch.equal(ours, expected[place])


def check_refused_pairs(device: torch.device) -> None:
    a = torch.ones(3 + dist.get_rank(), 4, device=device)
    checked = mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"})
    with checked, raises("ValueError: a, b: expected the same sizes on all ranks"):
        parallel.contrastive_loss(a, a, 1.0)
    x = torch.ones(3, 4, device=device, requires_grad=True)
    loss = parallel.contrastive_loss(x, x, 1.0)
    with raises("RuntimeError: .* no second derivative; gather the features"):
        torch.autograd.grad(loss, x, create_graph=True)
