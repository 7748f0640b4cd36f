"""Distillation losses over ranks, compared with those of all classes in fp64."""

import os
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from helpers.distillation import WEIGHTS
from helpers.errors import raises
from helpers.rank_data import (
    CLASSES,
    HIDDEN,
    TOKENS,
    assert_same_on_all_ranks,
    labels,
    local_shard,
    normal,
    shard_sizes,
)
from helpers.rows import INTERPRETING, upstream
from torch import Tensor

import partita
from partita import parallel

OPTIONS: tuple[dict[str, Any], ...] = (
    {"reduction": "none"},
    {"temperature": 0.7, "beta": 0.2},
    {"temperature": 1.5, "softcap": 4.0, "reduction": "none"},
)


def compare(x: Tensor, t: Tensor, target: Tensor, sizes: tuple[int, ...], **options: Any) -> None:
    """Compare each field and the gradient of the logits, which have the same bits on all ranks."""
    options = {"weights": WEIGHTS, **options}
    exact = x.double().requires_grad_()
    with partita.backend("reference"):
        truth = partita.distillation_loss(exact, t.double(), target, **options)
    (true,) = torch.autograd.grad(truth.loss, exact, upstream(truth.loss))
    leaf = local_shard(x, sizes, -1).clone().requires_grad_()
    found = parallel.distillation_loss(
        leaf, local_shard(t, sizes, -1), target, classes=sizes, **options
    )
    single = torch.float64 if torch.float64 in (x.dtype, t.dtype) else torch.float32
    eps = torch.finfo(single).eps
    for name, ours, right in zip(found._fields, found, truth, strict=True):
        if ours is None or right is None:
            assert ours is right, name
        elif name == "teacher_argmax":
            assert torch.equal(ours, right)
        else:
            assert ours.dtype == single
            assert_same_on_all_ranks(ours.detach())
            torch.testing.assert_close(ours.double(), right, rtol=64 * eps, atol=64 * eps)
    (grad,) = torch.autograd.grad(found.loss, leaf, upstream(found.loss))
    bound = max(1.01 * torch.finfo(x.dtype).eps, 512 * eps)
    expected = local_shard(true, sizes, -1)
    torch.testing.assert_close(grad.double(), expected, rtol=bound, atol=64 * eps)


def logits_of_pair(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits of a student, and of a teacher that is like it."""
    x = 2 * normal(TOKENS, CLASSES, device=device)
    t = 0.5 * x + normal(TOKENS, CLASSES, device=device, seed=1)
    return x.to(dtype), t.to(dtype)


def check_distillation(device: torch.device) -> None:
    """Check dtypes, shards, options, weights of rows, leading dimensions, and great offsets."""
    world, target = dist.get_world_size(), labels(device)
    all_sizes = (*shard_sizes(world), (*(0,) * (world - 1), CLASSES))
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    for dtype, options in product(dtypes[: 2 if INTERPRETING else 4], OPTIONS):
        x, t = logits_of_pair(device, dtype)
        for sizes in all_sizes[1:2] if INTERPRETING else all_sizes:
            compare(x, t, target, sizes, **options)
    sizes = all_sizes[1]
    x, t = logits_of_pair(device, torch.float32)
    compare(x.bfloat16(), t, target, sizes)
    compare(x, t.double(), target, sizes)
    weight = torch.linspace(0, 1, TOKENS, device=device)
    weights = {"hard": weight, "kl": 1 - weight, "tv": torch.tensor(2.0, device=device)}
    for reduction in ("none", "mean", "sum"):
        scale = {"temperature": 2.0, "scale_by_temperature_squared": True}
        compare(x, t, target, sizes, weights=weights, reduction=reduction, **scale)
    for name in WEIGHTS:
        compare(x, t, target, sizes, weights={name: 1.0}, temperature=0.7, reduction="none")
    stacked = (each[:12].reshape(2, 6, -1) for each in (x, t, target[:, None]))
    x, t, label = stacked
    compare(x, t, label[..., 0].to(torch.int32), sizes, reduction="none")
    compare(x[:, :0], t[:, :0], label[:, :0, 0], sizes, reduction="sum")
    x, t = logits_of_pair(device, torch.float32)
    offset = torch.linspace(5000, 12000, TOKENS, device=device)[:, None]
    for options in OPTIONS[:2]:
        compare(x + offset, t - 0.7 * offset, target, sizes, **options)


def check_rows_without_terms(device: torch.device) -> None:
    """Rows that do not count hold NaN and change nothing. Classes without probability are 0."""
    world, target = dist.get_world_size(), labels(device)
    sizes = shard_sizes(world)[1]
    x, t = logits_of_pair(device, torch.float32)
    mask = torch.arange(TOKENS, device=device) % 4 != 1
    clean = x.clone(), t.clone()
    x[target == -100], t[(target == -100) | ~mask] = torch.nan, torch.nan
    mask &= target != -100
    target = target.where(torch.arange(TOKENS, device=device) != 2, -100)
    for reduction in ("none", "mean", "sum"):
        found = []
        for pair in ((x, t), clean):
            leaf = local_shard(pair[0], sizes, 1).clone().requires_grad_()
            teacher = local_shard(pair[1], sizes, 1)
            options = {"classes": sizes, "mask": mask, "reduction": reduction, "weights": WEIGHTS}
            loss = parallel.distillation_loss(leaf, teacher, target, **options)  # type: ignore
            grad = torch.autograd.grad(loss.loss, leaf, upstream(loss.loss))[0]
            found.append((*loss[:6], grad))
        for ours, expected in zip(*found, strict=True):
            assert ours.isfinite().all() and torch.equal(ours, expected)
    x, t = clean
    target, finite = target.clamp(min=1), {"hard": 1.0, "kl": 1.0, "jsd": 1.0, "tv": 1.0}
    x[:, 0], t[:, :20] = -torch.inf, -torch.inf
    for sizes in shard_sizes(world):
        compare(x, t, target, sizes, weights=finite, reduction="none")
    x, t = logits_of_pair(device, torch.float32)
    x[:, :3], t[:, :3] = -3000, -torch.inf  # a shard of a probability that underflows
    compare(
        x,
        t,
        target,
        (3, CLASSES - 3, *(0,) * (world - 2)),
        weights={"reverse_kl": 1.0},
        reduction="none",
    )


def check_bad_distillation(device: torch.device) -> None:
    """A label that is no class makes its row NaN; what is not served is refused."""
    target, sizes = labels(device), shard_sizes(dist.get_world_size())[1]
    x, t = (local_shard(each, sizes, 1) for each in logits_of_pair(device, torch.float32))
    call = {"weights": {"hard": 1.0, "kl": 1.0}, "classes": sizes, "reduction": "none"}
    wrong, others = target.clone(), torch.arange(TOKENS, device=device) != 2
    wrong[2] = CLASSES
    leaf = x.clone().requires_grad_()
    right = parallel.distillation_loss(x, t, target, **call)  # type: ignore[arg-type]
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
        found = parallel.distillation_loss(leaf, t, wrong, **call)  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad(found.loss.sum(), leaf)
    assert found.loss[2].isnan() and torch.equal(found.loss[others], right.loss[others])
    assert grad[2].isnan().all() and not grad[others].isnan().any()
    with (
        mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"}),
        raises("IndexError: target: expected"),
    ):
        parallel.distillation_loss(x, t, wrong, **call)  # type: ignore[arg-type]
    ids = torch.arange(CLASSES, device=device)
    with raises("ValueError: teacher_classes: expected None over several ranks"):
        parallel.distillation_loss(x, t, target, teacher_classes=ids, **call)  # type: ignore
    with raises("ValueError: target: expected the labels of the term 'hard', got None"):
        parallel.distillation_loss(x, t, **call)  # type: ignore[arg-type]
    matrix = torch.zeros(sizes[dist.get_rank()], HIDDEN, device=device)
    hidden = torch.zeros(TOKENS, HIDDEN, device=device)
    heads = (hidden, matrix, hidden, matrix, target)
    with raises("ValueError: teacher_classes: expected None over several ranks"):
        parallel.linear_distillation_loss(*heads, teacher_classes=ids, **call)  # type: ignore
