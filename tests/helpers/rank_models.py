"""Checks of fused causal language models under DDP and FSDP2, and of transducers under DDP."""

import torch
import torch.distributed as dist
from helpers.causal_lm import CausalLM, tokens
from helpers.rank_data import assert_close
from helpers.rows import INTERPRETING
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import partita
from partita.integrations.transformers import fuse


def check_fused_models(device: torch.device) -> None:
    """Compare the loss and the mean gradient of the ranks with those of a model with logits."""
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))

    def shard_apart(model: nn.Module) -> nn.Module:
        fully_shard(model.lm_head, mesh=mesh)  # which is gathered for its own forward pass alone
        return fully_shard(model, mesh=mesh)

    input_ids, labels = (tensor.to(device) for tensor in tokens(dist.get_rank()))
    items = torch.tensor(9.0, device=device)
    orders = ((False, True), (False, False), (True, True))
    for tied, fuse_first in orders[:1] if INTERPRETING else orders:
        stock = CausalLM(softcap=2.0, tied=tied).to(device)
        expected = stock(input_ids, labels=labels, num_items_in_batch=items).loss
        expected.backward()
        for parameter in stock.parameters():
            dist.all_reduce(parameter.grad)
        for wrap in (
            DistributedDataParallel,
            lambda model: fully_shard(model, mesh=mesh),
            *([shard_apart] if not tied else []),
        ):
            model = CausalLM(softcap=2.0, tied=tied).to(device)
            if fuse_first:
                wrapped = wrap(fuse(model))
            else:
                wrapped = wrap(model)
                fuse(model)
            output = wrapped(input_ids, labels=labels, num_items_in_batch=items)
            assert output.logits is None
            output.loss.backward()
            assert_close(output.loss.detach(), expected.detach())
            for own, other in zip(model.parameters(), stock.parameters(), strict=True):
                grad = own.grad
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
                assert_close(grad * dist.get_world_size(), other.grad)
            wrapped.eval()
            assert wrapped(input_ids, labels=labels).logits is not None


B, T, U, V, D = 2, 5, 3, 6, 4


class Transducer(nn.Module):
    """Encoder and predictor of one layer each, and the losses of RNN-T and TDT over them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = nn.Linear(D, D), nn.Embedding(V, D)
        self.joint, self.durations = nn.Linear(D, V), nn.Linear(D, 3)

    def forward(self, x: Tensor, targets: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        encoder = self.encoder(x)
        predictor = self.predictor(nn.functional.pad(targets, (1, 0)))
        logits = self.joint((encoder[:, :, None] + predictor[:, None]).relu())
        linear = partita.linear_rnnt_loss(
            *(encoder, predictor, self.joint.weight, targets, steps, labels),
            linear_bias=self.joint.bias,
            blank=0,
        )
        tdt = partita.tdt_loss(
            *(logits, self.durations(encoder[:, :, None] + predictor[:, None])),
            *(targets, steps, labels, 0, (0, 1, 2)),
        )
        return linear + partita.rnnt_loss(logits, targets, steps, labels, blank=0) + tdt


def check_transducers(device: torch.device) -> None:
    """Compare the mean gradient of the ranks with the gradients of one process."""
    torch.manual_seed(0)
    model = Transducer().to(device)
    batches = []
    for rank in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(B, T, D, generator=generator)
        targets = torch.randint(1, V, (B, U), generator=generator)
        steps, labels = torch.tensor([T, T - 1 - rank % 2]), torch.tensor([U - rank % 2, U])
        batches.append([each.to(device) for each in (x, targets, steps, labels)])
    loss = torch.stack([model(*batch) for batch in batches]).mean()
    expected = torch.autograd.grad(loss, tuple(model.parameters()))
    wrapped = DistributedDataParallel(model)
    wrapped(*batches[dist.get_rank()]).backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None and grad.any()
        assert_close(parameter.grad, grad)
