"""Checks of fused models that are wrapped or sharded, beside a stock model in one piece.

All train for some steps with the same batches. The losses of each step, and the gradients from
which its update is made, are those of the stock model.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.causal_lm import CLASSES, HIDDEN, CausalLM, tokens
from helpers.rows import INTERPRETING
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from partita.integrations.transformers import fuse, linear_causal_lm_loss, unfuse

CASES = 1 if INTERPRETING else None
RATE = 0.5
FORMS: list[dict[str, Any]] = [{"softcap": 2.0, "bias": True}, {"tied": True}]

# The loss of one step and the gradients of all parameters, by name, which are whole tensors.
Step = tuple[Tensor, dict[str, Tensor]]


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that takes one parameter at a time, as some may be DTensors."""
    return torch.optim.SGD(module.parameters(), RATE, foreach=False)


def batches(rank: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the tokens and labels of each step of a rank: 20 with two ranks, and else few."""
    for step in range(2 if INTERPRETING or dist.get_world_size() > 2 else 20):
        input_ids, labels = tokens(100 * rank + step)
        labels[0, 4:] = -100  # sequences have unequal numbers of labels
        yield input_ids.to(device), labels.to(device)


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of the whole of a tensor, which may be a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients of a model by the name of their parameters."""
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters()}


def stock_steps(
    form: dict[str, Any], ranks: int, rank: int, device: torch.device, **arguments: Any
) -> list[Step]:
    """Train a stock model with the mean of the losses of `ranks` ranks.

    Return the loss of this rank's batch and the gradients of each step.
    """
    model, found = CausalLM(**form).to(device), []
    optimizer = sgd(model)
    for batch in zip(*(batches(each, device) for each in range(ranks)), strict=True):
        optimizer.zero_grad()
        losses = [model(input_ids, labels=labels, **arguments).loss for input_ids, labels in batch]
        torch.stack(losses).mean().backward()
        found.append((losses[rank].detach(), gradients(model)))
        optimizer.step()
    return found


def fused_steps(
    wrapped: nn.Module, model: nn.Module, rank: int, device: torch.device, **arguments: Any
) -> list[Step]:
    """Train a model through the module that wraps it, and return its losses and gradients."""
    found = []
    optimizer = sgd(wrapped)
    for input_ids, labels in batches(rank, device):
        optimizer.zero_grad()
        output = wrapped(input_ids, labels=labels, **arguments)
        assert output.logits is None, "the head returns its loss"
        output.loss.backward()
        found.append((whole(output.loss), gradients(model)))
        optimizer.step()
    return found


def assert_steps(found: list[Step], expected: list[Step]) -> None:
    """Compare losses and gradients in fp32; a step inherits the roundings of those before it."""
    assert len(found) == len(expected) > 1
    for (loss, grads), (other, others) in zip(found, expected, strict=True):
        torch.testing.assert_close(loss, other, rtol=1e-5, atol=0)
        torch.testing.assert_close(grads, others, rtol=1e-4, atol=2e-6)
        assert max(float(grad.abs().max()) for grad in others.values()) > 1e-2, "they are numbers"


def check_fused_models(device: torch.device) -> None:
    """Compare DDP and FSDP2, each before and after `fuse`."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))

    def shard_apart(model: nn.Module) -> nn.Module:
        fully_shard(model.lm_head, mesh=mesh)  # which is gathered for its own forward pass alone
        return fully_shard(model, mesh=mesh)

    def shard(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=mesh)

    for form in FORMS[:CASES]:
        items = {"num_items_in_batch": torch.tensor(9.0, device=device)} if form.get("tied") else {}
        expected = stock_steps(form, world, rank, device, **items)
        wraps: list[Callable[[nn.Module], nn.Module]] = [DistributedDataParallel, shard]
        for wrap in wraps if form.get("tied") else [*wraps, shard_apart]:
            for fuse_first in (True,) if form.get("tied") else (True, False)[:CASES]:
                model = CausalLM(**form).to(device)
                wrapped = wrap(fuse(model) if fuse_first else model)
                fuse(model)
                assert_steps(fused_steps(wrapped, model, rank, device, **items), expected)
                wrapped.eval()
                input_ids, labels = next(batches(rank, device))
                assert wrapped(input_ids, labels=labels).logits is not None


def check_tensor_parallel_heads(device: torch.device) -> None:
    """Compare heads whose classes lie on several ranks; of four, each pair has other tokens."""
    world = dist.get_world_size()
    pairs = world // 2 if world % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (pairs, world // pairs), mesh_dim_names=("data", "head"))
    batch = mesh["data"].get_local_rank()
    plans = [ColwiseParallel(output_layouts=Replicate())]
    plans += [ColwiseParallel(use_local_output=False), ColwiseParallel()]
    for plan, count in list(zip(plans, (None, 9, torch.tensor(9)), strict=True))[:CASES]:
        items = {} if count is None else {"num_items_in_batch": count}
        expected = stock_steps(FORMS[0], pairs, batch, device, **items)
        model = CausalLM(**FORMS[0]).to(device)
        if count is not None:
            fuse(model)  # before and after
        parallelize_module(model, mesh["head"], {"lm_head": plan})
        if pairs > 1:
            fully_shard(model, mesh=mesh["data"])
        assert_steps(fused_steps(fuse(model), model, batch, device, **items), expected)
        assert unfuse(model)(next(batches(batch, device))[0]).logits is not None


def check_refused_shards(device: torch.device) -> None:
    """Refuse heads that are sharded otherwise, at their first forward pass."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    input_ids, labels = next(batches(0, device))

    def refused(model: nn.Module, message: str, error: type[Exception] = ValueError) -> None:
        with pytest.raises(error, match=message):
            fuse(model)(input_ids, labels=labels)

    model = CausalLM(bias=True).to(device)
    refused(
        parallelize_module(model, mesh, {"lm_head": RowwiseParallel()}),
        r"lm_head_weight: expected a DTensor with Shard\(0\) .*, got .*Shard\(dim=1\)",
    )
    plain = torch.zeros(CLASSES, device=device)
    for bias in (plain, distribute_tensor(plain, mesh, [Replicate()])):
        model = CausalLM(bias=True).to(device)
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel()})
        model.lm_head.bias = nn.Parameter(bias)
        refused(model, "linear_bias: expected the mesh and the placements of lm_head_weight")
    model = CausalLM().to(device)
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight, mesh, [Shard(0)]))
    refused(model, "hidden_states: expected a DTensor on the mesh of lm_head_weight", TypeError)
    hidden = distribute_tensor(
        torch.randn(*labels.shape, HIDDEN, device=device), mesh, [Replicate()]
    )
    with pytest.raises(TypeError, match="lm_head_weight: expected a DTensor beside"):
        linear_causal_lm_loss(hidden, torch.zeros(CLASSES, HIDDEN, device=device), labels)


class LastStage(nn.Module):
    """The last stage of a pipeline, which is given labels and returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden_states: Tensor, labels: Tensor, items: int) -> Tensor:
        output = self.model(hidden_states, labels=labels, num_items_in_batch=items)
        assert output.logits is None
        return output.loss[None]


class FirstStage(nn.Module):
    """The first stage, which ignores the labels that all stages get."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, input_ids: Tensor, labels: Tensor, items: int) -> Tensor:
        return self.embedding(input_ids)


def check_pipeline(device: torch.device) -> None:
    """Compare a model of two stages, of which the last is fused, with three microbatches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != 2:
        return
    form, found = FORMS[0], []
    whole_model = CausalLM(**form).to(device)
    stage: nn.Module = FirstStage(whole_model.embedding)
    if rank == 1:
        whole_model.embedding = nn.Identity()
        stage = LastStage(fuse(whole_model))
    schedule = ScheduleGPipe(
        PipelineStage(stage, rank, world, device),
        n_microbatches=3,
        loss_fn=lambda losses, target: losses.sum(),
        scale_grads=False,
    )
    optimizer = sgd(stage)
    for input_ids, labels in batches(0, device):
        optimizer.zero_grad()
        arguments = {"labels": labels, "items": int((labels[:, 1:] >= 0).sum())}
        if rank == 0:
            schedule.step(input_ids, **arguments)
        else:
            losses: list[Tensor] = []
            schedule.step(target=labels, losses=losses, **arguments)
            found.append((torch.stack(losses).sum().detach(), gradients(whole_model)))
        optimizer.step()
    if rank == 1:
        expected = [
            (loss, {name: grads[name] for name in found[0][1]})
            for loss, grads in stock_steps(form, 1, 0, device)
        ]
        assert_steps(found, expected)
