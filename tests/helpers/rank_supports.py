"""Recorded supports over ranks: rows that are invalid, and bits that depend on the row alone."""

import os
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from helpers.invariance import differences, of_rows, rows_of
from helpers.rank_catalogue import shard
from helpers.rank_data import (
    CLASSES,
    HIDDEN,
    TOKENS,
    assert_same_on_all_ranks,
    shard_sizes,
)
from helpers.shard_calls import SHARDS
from helpers.support import recorded
from torch import Tensor

import partita
from partita.testing.samples import Draw, Sample

NAMES = ("parallel.support_stats", "parallel.linear_support_stats")


def local_sample(name: str, device: torch.device, **inputs: Tensor) -> Sample:
    sizes = {"rows": TOKENS, "classes": CLASSES, "hidden": HIDDEN}
    sample = SHARDS[name].sample(Draw(device=str(device)), sizes=sizes)
    classes = shard_sizes(dist.get_world_size())[1]
    local, _ = shard(replace(sample, inputs={**sample.inputs, **inputs}), classes)
    return replace(local, inputs={**local.inputs, "classes": classes})


def check_invalid_supports(device: torch.device) -> None:
    """One label or id out of range makes its row NaN on every rank, and no other row."""
    given = recorded(TOKENS, CLASSES, str(device), empty=False)
    row, others = 2, torch.arange(TOKENS, device=device) != 2
    assert given.target[row] >= 0
    for name in NAMES:
        right = local_sample(name, device, **given._asdict())
        truth = right.run()
        for changed, place, number in (
            ("target", row, CLASSES),
            ("ids", int(given.offsets[row]), CLASSES),
            ("ids", int(given.offsets[row]), -(2**40)),
        ):
            wrong = getattr(given, changed).clone()
            wrong[place] = number
            sample = local_sample(name, device, **{**given._asdict(), changed: wrong})
            with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}):
                found = sample.run()
                rows = sample.inputs["input" if "linear" in name else "logits"]
                (grad,) = torch.autograd.grad(found[0].sum() + found[1].sum(), rows)
            for field, expected in zip(found[:2], truth[:2], strict=True):
                assert field[row].isnan() and torch.equal(field[others], expected[others])
                assert_same_on_all_ranks(field.detach()[others])
            assert not found[2][row]
            assert grad[row].isnan().all() and not grad[others].isnan().any(), (name, changed)


def check_bits_of_supports(device: torch.device) -> None:
    """Rows with ids have the same bits in every batch, in the batch-invariant mode and outside."""
    for name in NAMES:
        for invariant in (False, True):
            sample = local_sample(name, device)
            where, numbers = rows_of(sample), sample.inputs["offsets"].diff()
            assert where is not None and (numbers == 0).any()
            # From logits, rows without ids have bits of their own too.
            some = (numbers > 0).nonzero()[:, 0] if "linear" in name else torch.arange(TOKENS)
            chosen = of_rows(sample, where, some.tolist(), lambda x: x)
            with partita.batch_invariant(invariant):
                assert not list(differences(chosen, (1, 2, 7, 33), ("",)))
