"""torch.library.opcheck on each registered op, with the arguments that the catalogue gives it.

It tests the schema, the fake, the autograd registration and AOT dispatch.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.catalogue import BACKEND, EVERY, is_score, one_rank
from helpers.rows import INTERPRETING, devices
from torch import Tensor
from torch.utils._pytree import tree_leaves

import partita
import partita.parallel
from partita.testing import poisoned_memory
from partita.testing.samples import Call, Draw, OpCall, Sample, recorded_ops


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


def written_samples(call: Call, device: str) -> Iterator[Sample]:
    """Yield samples without and with gradients, so that all that an op saves is written."""
    for draw in (Draw(device=device, grad=grad, ragged=False) for grad in (True, False)):
        if INTERPRETING:
            yield call.sample(draw)
            continue
        yield from call.samples(draw)
        if call.name == "cross_entropy":
            # The gradient of fewer logits is scaled by a function of PyTorch.
            yield call.sample(draw, "all options, mean", sizes=call.checked[1])


def checks_of(call: OpCall) -> tuple[str, ...]:
    """Return the names of the checks: all, or those that compare no values with themselves.

    A kernel saves memory of which nothing reads some, which is NaN where it is poisoned. On a GPU,
    the tests of compiled calls take the way of AOT dispatch.
    """
    plain = ("test_schema", "test_autograd_registration", "test_faketensor")
    if any(isinstance(x, Tensor) and x.is_cuda for x in call.args):
        return plain
    results = call.op(*(x.clone() if isinstance(x, Tensor) else x for x in call.args))
    has_nan = any(x.isnan().any() for x in tree_leaves(results) if is_score(x))
    return plain if has_nan else (*plain, "test_aot_dispatch_dynamic")


def op_calls(name: str, device: str) -> list[OpCall]:
    """Return the calls of ops that a call makes, one of each kind.

    They are those that compiled code makes, or else eager code. The backward ops of plain eager
    code may write over logits that the forward op has saved.
    """
    found: dict[bool, dict[tuple[Any, ...], OpCall]] = {False: {}, True: {}}
    with partita.backend(BACKEND):
        for sample in written_samples(EVERY[name], device):
            for eager, calls in found.items():
                with recorded_ops(eager=eager) as noted:
                    sample.gradients(sample.run())
                for each in noted:
                    calls.setdefault(kind(each), each)
    compiled, eager = ([*calls.values()] for calls in found.values())
    known = {call.name for call in compiled}
    return [*compiled, *(call for call in eager if call.name not in known)]


OPS = {
    name.removeprefix("partita::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("partita::")
}
GPU_ONLY = {"divergence_one_pass", "linear_divergence_one_pass", "linear_packed_one_pass"}
_checked: set[tuple[Any, ...]] = set()  # kinds of calls, as functions may make the same


def test_the_catalogue_calls_every_op() -> None:
    with one_rank("cpu"):
        assert OPS - {call.name for name in EVERY for call in op_calls(name, "cpu")} <= GPU_ONLY


@pytest.mark.interpreted
@devices
@pytest.mark.parametrize("name", EVERY)
def test_opcheck(name: str, device: str) -> None:
    with one_rank(device):
        for call in op_calls(name, device):
            if (device, *kind(call)) not in _checked:
                with poisoned_memory():
                    torch.library.opcheck(call.op, call.args, test_utils=checks_of(call))
                _checked.add((device, *kind(call)))
