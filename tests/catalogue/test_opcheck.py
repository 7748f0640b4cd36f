"""torch.library.opcheck on each registered op, with the arguments that the catalogue gives it.

It tests the schema, the fake, the autograd registration and AOT dispatch.
"""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.catalogue import BACKEND
from helpers.rows import INTERPRETING, devices

import partita
import partita.parallel
from partita.testing import poisoned_memory
from partita.testing.samples import CALLS, Draw, OpCall, recorded_ops
from partita.testing.samples.shards import CALLS as SHARDS

OPS = sorted(
    name.removeprefix("partita::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("partita::")
)


def kind(call: OpCall) -> tuple[Any, ...]:
    """Return what decides about the code of an op: ranks, dtypes and options, not sizes."""
    return call.name, *(
        (arg.ndim, arg.dtype, bool(arg.numel()))
        if isinstance(arg, torch.Tensor)
        else arg
        if isinstance(arg, bool | str | torch.dtype | None)
        else bool(arg)
        for arg in call.args
    )


@functools.cache
def op_calls(device: str) -> dict[str, list[OpCall]]:
    """Return calls of each op, one of each kind, as compiled and as plain eager code makes them."""
    found: dict[tuple[Any, ...], OpCall] = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with partita.backend(BACKEND):
            for call in (*CALLS.values(), *SHARDS.values()):
                for draw in (Draw(device=device), Draw(device=device, grad=False)):
                    samples = [call.sample(draw)] if INTERPRETING else call.samples(draw)
                    for sample in samples:
                        for eager in (False, True):
                            with recorded_ops(eager=eager) as noted:
                                sample.gradients(sample.run())
                            for each in noted:
                                found.setdefault(kind(each), each)
    finally:
        dist.destroy_process_group()
    return {name: [call for call in found.values() if call.name == name] for name in OPS}


# The GPU alone has these.
GPU_ONLY = {"divergence_one_pass", "linear_divergence_one_pass", "linear_packed_one_pass"}


def test_the_catalogue_calls_every_op() -> None:
    assert {name for name, calls in op_calls("cpu").items() if not calls} <= GPU_ONLY


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str, device: str) -> None:
    for call in op_calls(device)[name]:
        with poisoned_memory():
            torch.library.opcheck(call.op, call.args)
