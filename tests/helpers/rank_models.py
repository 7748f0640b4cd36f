"""A check of transducers under DDP."""

import torch
import torch.distributed as dist
from helpers.rank_data import assert_close
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import partita

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
