"""Backward passes of the autograd functions with a replay that calls the op itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita.ops.chain.autograd import logz_gradient as chain_gradient
from partita.ops.chain.eager import eager_partition
from partita.ops.cross_entropy.autograd import token_stats_backward_op
from partita.ops.ctc.autograd import gradient as ctc_gradient
from partita.ops.linear_chain.autograd import logz_gradient as linear_chain_gradient
from partita.runtime.register import Op

OPS = (chain_gradient, token_stats_backward_op, ctc_gradient, linear_chain_gradient)


class Replay:
    """Stands in for the C module's replay of an op.

    `served` has the number of calls. With `is_new`, each is the first call of its key.
    """

    def __init__(self, op: Op) -> None:
        self.op, self.served, self.is_new = op, 0, False

    def gradients(
        self,
        grads: tuple[Any, ...],
        saved: tuple[Any, ...],
        options: tuple[Any, ...],
        needed: tuple[bool, ...],
        positions: tuple[int | None, ...],
    ) -> tuple[Any, ...] | bytes | None:
        if torch.is_grad_enabled() or not isinstance(grads[0], Tensor):
            return None
        self.served += 1
        if self.is_new:
            return str(self.served).encode()
        results = self.op.run(*grads, *saved, *options)
        results = (results,) if isinstance(results, Tensor) else results
        padded = (*positions, *[None] * (len(needed) - len(positions)))
        return tuple(
            results[i] if i is not None and needs else None
            for i, needs in zip(padded, needed, strict=True)
        )


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> dict[Op, Replay]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    found = {op: Replay(op) for op in OPS}
    for op, replay in found.items():
        monkeypatch.setattr(op, "_replay", replay)
        op.tries.clear()
    return found


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ctc(logits: Tensor, **options: Any) -> Tensor:
    targets = torch.tensor([[1, 2, 2], [3, 1, 0]])
    return partita.ctc_loss(logits, targets, [6, 5], [3, 2], from_logits=True, **options)


def chain(scores: Tensor, initial: Tensor, final: Tensor) -> partita.Chain:
    source = partita.debruijn_source(2, 2)
    return partita.Chain(scores, source, initial, final, lengths=[5, 3])


CHAIN = (numbers(5, 2, 4, 3), numbers(2, 4), numbers(2, 4))
TAGS = (numbers(5, 2, 3), numbers(3, 3), numbers(3), numbers(2, 3))
LABELS = torch.tensor([0, 2, -100])
Case = tuple[Op, Callable[..., Tensor], tuple[Tensor, ...]]
CASES: dict[str, Case] = {
    "logprob": (
        token_stats_backward_op,
        lambda x: partita.token_stats(x, LABELS, temperature=2.0).logprob,
        (numbers(3, 4),),
    ),
    "statistics": (
        token_stats_backward_op,
        lambda x: torch.stack(partita.token_stats(x, LABELS, softcap=3.0)[:3]),
        (numbers(3, 4),),
    ),
    "ctc": (ctc_gradient, ctc, (numbers(6, 2, 4),)),
    "ctc, options": (
        ctc_gradient,
        lambda x: ctc(x, reduction="none", label_priors=-numbers(4).abs(), prior_scale=0.5),
        (numbers(6, 2, 4),),
    ),
    "ctc, star": (ctc_gradient, lambda x: ctc(x, star=7, reduction="sum"), (numbers(6, 2, 4),)),
    "logz": (chain_gradient, lambda *x: chain(*x).logz(), CHAIN),
    "logz of a known call": (
        chain_gradient,
        lambda *x: eager_partition(x[0], partita.debruijn_source(2, 2), *x[1:], torch.float32),
        CHAIN,
    ),
    "entropy": (chain_gradient, lambda *x: chain(*x).entropy(), CHAIN),
    "linear chain": (
        linear_chain_gradient,
        lambda e, t, s, f: partita.linear_chain(e, t, start=s, end=f, lengths=[5, 2]).logz(),
        TAGS,
    ),
    "linear chain without ends": (
        linear_chain_gradient,
        lambda e, t: partita.linear_chain(e, t).logz(),
        TAGS[:2],
    ),
}


# The inputs without a gradient: none, and each of several.
WITHOUT = [
    (name, i)
    for name, (_, _, inputs) in CASES.items()
    for i in (None, *(range(len(inputs)) if len(inputs) > 1 else ()))
]


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize(("name", "without"), WITHOUT)
def test_a_replay_gets_the_arguments_of_the_plain_path(
    name: str,
    without: int | None,
    is_new: bool,
    replays: dict[Op, Replay],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op, function, inputs = CASES[name]
    replays[op].is_new = is_new
    leaves = [x.clone().requires_grad_(i != without) for i, x in enumerate(inputs)]
    wanted = [x for x in leaves if x.requires_grad]
    weights = numbers(*function(*leaves).shape)
    found = torch.autograd.grad((function(*leaves) * weights).sum(), wanted)
    assert replays[op].served > 0
    for each in OPS:
        monkeypatch.setattr(each, "_replay", None)
    expected = torch.autograd.grad((function(*leaves) * weights).sum(), wanted)
    for got, truth in zip(found, expected, strict=True):
        assert torch.equal(got, truth)


@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_no_replay(name: str, replays: dict[Op, Replay]) -> None:
    op, function, inputs = CASES[name]
    leaves = [x.double().requires_grad_() for x in inputs]
    value = function(*leaves).sum()
    grads = torch.autograd.grad(value, leaves, create_graph=True)
    served = replays[op].served
    assert any(grad.requires_grad for grad in grads) and served == 0


@pytest.mark.parametrize("name", CASES)
def test_saved_tensors_are_checked_and_unpacked_once(name: str, replays: dict[Op, Replay]) -> None:
    op, function, inputs = CASES[name]
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.data_ptr())
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        value = function(*leaves)
    torch.autograd.grad(value.sum(), leaves)
    assert replays[op].served > 0
    assert leaves[0].data_ptr() in packed and len(packed) == len(unpacked)
    value = function(*leaves)
    with torch.no_grad():
        leaves[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()
