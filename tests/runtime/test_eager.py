"""Calls of plain eager mode whose ops the C module replays, on the CPU.

A program is the function of Python that serves the op there, so results and gradients of a replay
are those of the plain path.
"""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from helpers.eager import Served
from helpers.eager_cases import (
    CASES,
    LABELS,
    REPLAYED,
    WITHOUT,
    assert_equal,
    leaves_of,
    numbers,
    results,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import partita


@pytest.mark.parametrize(("name", "without"), WITHOUT)
def test_replays_have_the_results_of_the_plain_path(
    name: str, without: int | None, served: Served
) -> None:
    ops, _, function = CASES[name]
    leaves = leaves_of(name, without)
    expected = results(function, leaves)
    assert served.recorded[:1] == [ops[0]] and not served.replayed
    for _ in range(2):  # A scaling is recorded when it is seen again.
        assert_equal(results(function, leaves), expected)
    assert served.recorded == list(ops)
    for _ in range(2):
        served.replayed.clear()
        assert_equal(results(function, leaves), expected)
        assert served.replayed == list(ops)
    other = [torch.randn_like(x).requires_grad_(x.requires_grad) for x in leaves]
    found = results(function, other)
    assert served.recorded == list(ops) and not torch.equal(found[0], expected[0])


@pytest.mark.parametrize("name", CASES)
def test_calls_without_a_gradient(name: str, served: Served) -> None:
    function = CASES[name][2]
    leaves = leaves_of(name)
    expected = results(function, leaves)[0]
    results(function, leaves)
    for _ in range(3):
        with torch.no_grad():
            value = function(*leaves)
        assert not value.requires_grad
        torch.testing.assert_close(value, expected)
    value = function(*(x.detach() for x in leaves))
    assert not value.requires_grad
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("name", REPLAYED)
def test_second_derivatives(name: str, served: Served) -> None:
    function = CASES[name][2]
    leaves = [x.detach().double().requires_grad_() for x in leaves_of(name)]
    expected = results(function, leaves)[1:]
    results(function, leaves)
    value = function(*leaves)
    total = (value * numbers(*value.shape)).sum()
    grads = torch.autograd.grad(total, leaves, create_graph=True)
    assert any(grad.requires_grad for grad in grads)
    torch.testing.assert_close(grads, expected)
    second = torch.autograd.grad(sum(grad.sum() for grad in grads), leaves, allow_unused=True)
    assert any(grad is not None and bool(grad.any()) for grad in second)


@pytest.mark.parametrize("name", [name for name in REPLAYED if "linear" not in name])
def test_batched_gradients(name: str, served: Served) -> None:
    function, leaves = CASES[name][2], leaves_of(name)
    results(function, leaves)
    value = function(*leaves)
    batch = numbers(3, *value.shape)
    found = torch.autograd.grad(value, leaves, batch, retain_graph=True, is_grads_batched=True)
    for i in range(3):
        expected = torch.autograd.grad(value, leaves, batch[i], retain_graph=True)
        for got, truth in zip(found, expected, strict=True):
            torch.testing.assert_close(got[i], truth)


@pytest.mark.parametrize("name", CASES)
def test_other_modes_take_the_plain_path(
    name: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, leaves = CASES[name][2], leaves_of(name)
    expected = results(function, leaves)
    results(function, leaves)
    for variable, value in (("PARTITA_REPLAY", "0"), ("PARTITA_CHECK", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            served.replayed.clear()
            assert_equal(results(function, leaves), expected)
            assert not served.replayed
    served.replayed.clear()
    with partita.backend("reference"):
        found = results(function, leaves)
    torch.testing.assert_close(found, expected)
    others = [x.detach() for x in leaves[1:]]
    transformed = torch.func.grad(lambda x: function(x, *others).sum())(leaves[0].detach())
    direct = torch.autograd.grad(function(*leaves).sum(), leaves[0])[0]
    torch.testing.assert_close(transformed, direct)
    if "linear_chain" not in name:  # which has no batching rule
        batch = torch.stack([leaves[0].detach()] * 2)
        mapped = torch.func.vmap(lambda x: function(x, *others))(batch)
        torch.testing.assert_close(mapped[1], expected[0])
    served.replayed.clear()
    served.driver.knobs.launch_enter_hook.calls.append(print)
    assert_equal(results(function, leaves), expected)
    assert not served.replayed


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_is_refused(name: str, served: Served) -> None:
    function, leaves = CASES[name][2], leaves_of(name)
    results(function, leaves)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(leaves[0].detach(), torch.ones_like(leaves[0]))
        with pytest.raises((NotImplementedError, RuntimeError)):
            function(dual, *leaves[1:])


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("name", REPLAYED)
def test_other_tensors_take_the_plain_path(name: str, served: Served) -> None:
    function, leaves = CASES[name][2], leaves_of(name)
    expected = results(function, leaves)
    results(function, leaves)
    served.replayed.clear()
    subclass = leaves[0].detach().as_subclass(Subclass).requires_grad_()
    found = [x.as_subclass(Tensor) for x in results(function, [subclass, *leaves[1:]])]
    torch.testing.assert_close(found, expected)
    negated = torch._neg_view(-leaves[0].detach()).requires_grad_()
    torch.testing.assert_close(results(function, [negated, *leaves[1:]]), expected)
    assert not served.replayed


def test_a_program_serves_inputs_that_need_other_gradients(served: Served) -> None:
    function = CASES["linear_chain"][2]
    cases = [leaves_of("linear_chain", without) for without in (None, 0, 1, 2, 3)]
    expected = [results(function, leaves) for leaves in cases]
    served.recorded.clear()
    for _ in range(2):
        for leaves, truth in zip(cases, expected, strict=True):
            assert_equal(results(function, leaves), truth)
    assert not served.recorded


def test_unused_values_have_no_gradient(served: Served) -> None:
    x = numbers(3, 4).requires_grad_()
    expected = torch.autograd.grad(partita.token_stats(x, LABELS).entropy.sum(), x)[0]
    for _ in range(2):
        stats = partita.token_stats(x, LABELS)
        assert not stats.argmax.requires_grad and stats.entropy.requires_grad
        assert torch.equal(torch.autograd.grad(stats.entropy.sum(), x)[0], expected)


def test_a_gradient_that_does_not_arrive(served: Served) -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> None:
            return None

    for name in ("ctc", "crf", "statistics"):
        leaves = leaves_of(name)
        for _ in range(3):
            Nothing.apply(CASES[name][2](*leaves)).sum().backward()
        assert leaves[0].grad is None or not leaves[0].grad.any()


def test_eight_threads(served: Served) -> None:
    function, leaves = CASES["linear_chain"][2], leaves_of("linear_chain")
    expected = results(function, leaves)
    results(function, leaves)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                assert_equal(results(function, leaves), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_errors_of_python_and_of_the_driver_are_raised(served: Served) -> None:
    function, leaves = CASES["linear_chain"][2], leaves_of("linear_chain")
    results(function, leaves)
    value = function(*leaves)
    total = (value * numbers(*value.shape)).sum()
    served.driver.status = 701
    with pytest.raises(RuntimeError, match="out of resources"):
        function(*leaves)
    with pytest.raises(RuntimeError, match="out of resources"):
        total.backward()
    served.driver.status = 0


def test_the_best_alignment_and_lengths_on_the_host(served: Served) -> None:
    x, targets = numbers(6, 2, 4), torch.tensor([[1, 2, 2], [3, 1, 0]])
    rest = (targets, torch.tensor([6, 5]), torch.tensor([3, 2]))
    expected = partita.ctc_align(x, *rest, from_logits=True)
    assert served.recorded == ["ctc_align"] and expected.longest == 3
    found = partita.ctc_align(x.requires_grad_(), *rest, from_logits=True)
    assert served.replayed == ["ctc_align"] and found.longest == 3
    for got, truth in zip(found[:4], expected[:4], strict=True):
        assert torch.equal(got, truth) and not got.requires_grad


@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("name", REPLAYED)
def test_saved_tensors_are_checked_and_unpacked_once(
    name: str, is_replayed: bool, served: Served
) -> None:
    function, leaves = CASES[name][2], leaves_of(name)
    if is_replayed:
        results(function, leaves)
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.data_ptr())
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        value = function(*leaves)
    found = torch.autograd.grad(value.sum(), leaves)
    assert leaves[0].data_ptr() in packed and len(packed) == len(unpacked)
    value = function(*leaves)
    expected = torch.autograd.grad(value.sum(), leaves, retain_graph=True)
    assert_equal(list(found), list(expected))
    assert_equal(list(torch.autograd.grad(value.sum(), leaves)), list(expected))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(value.sum(), leaves)
    value = function(*leaves)
    with torch.no_grad():
        leaves[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


@pytest.mark.parametrize("name", CASES)
def test_checkpoints_and_hooks(name: str, served: Served) -> None:
    function, leaves = CASES[name][2], leaves_of(name)
    expected = results(function, leaves)
    for _ in range(3):
        found = results(lambda *x: checkpoint(function, *x, use_reentrant=False), leaves)
        assert_equal(found, expected)
    value, seen = function(*leaves), []
    node: Any = value.grad_fn
    node.register_hook(lambda grads, outputs: seen.append(len(grads)))
    value.register_hook(lambda grad: 2 * grad)
    torch.autograd.backward((value * numbers(*value.shape)).sum())
    assert seen
    for leaf, grad in zip(leaves, expected[1:], strict=True):
        torch.testing.assert_close(leaf.grad, 2 * grad)


@pytest.mark.parametrize("name", CASES)
def test_nothing_keeps_tensors_alive(name: str, served: Served) -> None:
    function, leaves = CASES[name][2], leaves_of(name)
    for _ in range(3):
        results(function, leaves)
    gc.disable()
    try:
        leaves = leaves_of(name)
        value = function(*leaves)
        value.sum().backward()
        gone = [weakref.ref(x) for x in (*leaves, value)]
        del leaves, value
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()
