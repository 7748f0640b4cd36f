"""Checks of fused causal language models under DDP and FSDP2."""

import torch
import torch.distributed as dist
from helpers.causal_lm import CausalLM, tokens
from helpers.rank_data import assert_close
from helpers.rows import INTERPRETING
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

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
