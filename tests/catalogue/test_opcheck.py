"""torch.library.opcheck on each registered op, with the arguments that the catalogue gives it.

It tests the schema, the fake, the autograd registration and AOT dispatch.
"""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.catalogue import BACKEND
from helpers.rows import INTERPRETING, devices

import partita
import partita.parallel
from partita.testing import poisoned_memory
from partita.testing.samples import CALLS, Call, Draw, OpCall, Sample, recorded_ops
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


def all_samples(call: Call, device: str) -> Iterator[Sample]:
    """Yield samples without and with gradients, so that all that an op saves is written."""
    for draw in (Draw(device=device, grad=grad, ragged=False) for grad in (True, False)):
        if INTERPRETING:
            yield call.sample(draw)
            continue
        yield from call.samples(draw)
        if call.name == "cross_entropy":
            # The gradient of fewer logits is scaled by a function of PyTorch.
            yield call.sample(draw, "all options, mean", sizes=call.checked[1])


@functools.cache
def op_calls(device: str) -> dict[str, list[OpCall]]:
    """Return calls of each op, one of each kind, as compiled code makes them, or else eager code.

    The backward ops of plain eager code may write over logits that the forward op has saved.
    """
    found: dict[bool, dict[tuple[Any, ...], OpCall]] = {False: {}, True: {}}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with partita.backend(BACKEND):
            for call in (*CALLS.values(), *SHARDS.values()):
                for sample in all_samples(call, device):
                    for eager, calls in found.items():
                        with recorded_ops(eager=eager) as noted:
                            sample.gradients(sample.run())
                        for each in noted:
                            calls.setdefault(kind(each), each)
    finally:
        dist.destroy_process_group()
    compiled, eager = ([*calls.values()] for calls in found.values())
    known = {call.name for call in compiled}
    served = [*compiled, *(call for call in eager if call.name not in known)]
    return {name: [call for call in served if call.name == name] for name in OPS}


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
