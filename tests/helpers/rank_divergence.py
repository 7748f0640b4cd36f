"""Checks of divergences and log-probabilities over a sharded vocabulary, which every rank runs."""

import torch
import torch.distributed as dist
from helpers.rank_data import (
    CLASSES,
    HIDDEN,
    TOKENS,
    assert_close,
    assert_same_on_all_ranks,
    local_shard,
    normal,
    shard_sizes,
    upstream,
)
from torch import Tensor

import partita
from partita import parallel

OPTIONS = ({}, {"temperature": 0.7, "softcap": 4.0})


def check_divergence(device: torch.device) -> None:
    full, teacher = (
        3 * normal(TOKENS, CLASSES, device=device),
        normal(TOKENS, CLASSES, device=device, seed=1),
    )
    full[2, :20] = teacher[2, :20] = -torch.inf
    mask = torch.arange(TOKENS, device=device) % 4 != 1
    for i, sizes in enumerate(shard_sizes(dist.get_world_size())):
        for beta in (0.0, 0.3, 1.0):
            for reduction, options in zip(("none", "mean"), OPTIONS, strict=True):
                chosen = {"beta": beta, "mask": mask, "reduction": reduction, **options}
                exact = full.double().requires_grad_()
                with partita.backend("reference"):
                    truth = partita.divergence(exact, teacher.double(), **chosen)
                (grad,) = torch.autograd.grad(truth, exact, upstream(truth))
                local = local_shard(full, sizes, 1).clone().requires_grad_()
                loss = parallel.divergence(
                    local,
                    local_shard(teacher, sizes, 1),
                    classes=CLASSES if i == 0 else sizes,
                    **chosen,
                )
                assert_close(loss, truth)
                assert_same_on_all_ranks(loss.detach())
                (found,) = torch.autograd.grad(loss, local, upstream(loss))
                assert_close(found, local_shard(grad, sizes, 1))


def check_linear_divergence(device: torch.device) -> None:
    hidden, teacher_hidden = (
        normal(TOKENS, size, device=device).unflatten(0, (1, -1)) for size in (HIDDEN, 5)
    )
    matrix, teacher_matrix = (normal(CLASSES, size, device=device) for size in (HIDDEN, 5))
    bias = normal(CLASSES, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        heads = [t.to(dtype) for t in (hidden, matrix, teacher_hidden, teacher_matrix, bias)]
        exact = [t.double().requires_grad_() for t in heads]
        with partita.backend("reference"):
            truth = partita.linear_divergence(*exact[:4], linear_bias=exact[4], beta=0.5)
        grads = torch.autograd.grad(truth, (exact[0], exact[1], exact[4]), upstream(truth))
        for sizes in shard_sizes(dist.get_world_size()):
            leaf = heads[0].clone().requires_grad_()
            local, teacher, offset = (
                local_shard(heads[i], sizes, 0).clone().requires_grad_() for i in (1, 3, 4)
            )
            loss = parallel.linear_divergence(
                leaf, local, heads[2], teacher, linear_bias=offset, classes=sizes, beta=0.5
            )
            assert_same_on_all_ranks(loss.detach())
            assert_close(loss, truth, dtype)
            found = torch.autograd.grad(loss, (leaf, local, offset), upstream(loss))
            right = (grads[0], *(local_shard(grads[i], sizes, 0) for i in (1, 2)))
            for a, b in zip(found, right, strict=True):
                assert_close(a, b, dtype)


def check_logprobs(device: torch.device) -> None:
    hidden, matrix = normal(TOKENS, HIDDEN, device=device), normal(CLASSES, HIDDEN, device=device)
    ids = torch.arange(TOKENS * 4, device=device).view(-1, 4) * 7 % CLASSES
    ids[::3, 1], ids[::4, 2] = ids[::3, 0], 0
    weights = normal(TOKENS, 4, device=device)

    def gradients(found: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(found, leaves, weights.to(found.dtype), retain_graph=True)

    for options in OPTIONS:
        exact = [t.double().requires_grad_() for t in (hidden, matrix)]
        logits = exact[0] @ exact[1].T
        with partita.backend("reference"):
            truth = partita.logprobs(logits, ids, **options)
        for sizes in shard_sizes(dist.get_world_size()):
            local = local_shard(logits.detach().float(), sizes, 1).clone().requires_grad_()
            found = parallel.logprobs(local, ids, classes=sizes, **options)
            assert_same_on_all_ranks(found.detach())
            assert_close(found, truth)
            (grad,) = gradients(found, local)
            assert_close(grad, local_shard(gradients(truth, logits)[0], sizes, 1))
            leaf = hidden.clone().requires_grad_()
            rows = local_shard(matrix, sizes, 0).clone().requires_grad_()
            found = parallel.linear_logprobs(leaf, rows, ids, classes=sizes, **options)
            assert_close(found, truth)
            right = gradients(truth, *exact)
            of_hidden, of_rows = gradients(found, leaf, rows)
            assert_close(of_hidden, right[0])
            assert_close(of_rows, local_shard(right[1], sizes, 0))
    none = parallel.logprobs(local.detach(), ids[:, :0], classes=sizes)
    assert none.shape == (TOKENS, 0)
