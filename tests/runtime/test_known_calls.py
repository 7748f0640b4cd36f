"""Stored decisions: what their key depends on, and the functions that use them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.eager import Served
from helpers.replay import Ops
from torch import Tensor

import partita
from partita.ops.chain import api as chain_api
from partita.ops.cross_entropy import api as rows_api
from partita.ops.ctc import api as ctc_api
from partita.ops.ctc import arguments as ctc_arguments
from partita.ops.linear_chain import inputs as linear_chain_inputs
from partita.ops.linear_heads import loss as linear_loss
from partita.runtime import autograd
from partita.runtime.known_calls import KnownCalls


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


class Subclass(torch.Tensor):
    pass


@pytest.fixture
def known(compiled: Ops) -> Any:
    return compiled.driver.module.KnownCalls({}, True)


def test_the_key_has_what_checks_look_at(known: Any) -> None:
    x, labels = leaf(4, 5), torch.zeros(4, dtype=torch.int64)
    calls: list[tuple[Any, ...]] = [
        (x, labels, 1.0),
        (leaf(4, 6), labels, 1.0),
        (leaf(4, 5, dtype=torch.float64), labels, 1.0),
        (x, labels.int(), 1.0),
        (x, leaf(4), 1.0),
        (x, leaf(4).detach(), 1.0),
        (x, None, 1.0),
        (x, labels, 1),
        (x, labels, True),
        (x, labels, 2.0),
        (x, labels, "1.0"),
        (x[:, None], labels, 1.0),
    ]
    keys = [known(*call) for call in calls]
    assert all(type(key) is bytes for key in keys) and len(set(keys)) == len(calls)
    same = [(leaf(5, 4).T, labels, 1.0), (torch.nn.Parameter(x.detach()), labels.clone(), 1.0)]
    assert [known(*call) for call in same] == [keys[0], keys[0]]


def test_only_the_equality_of_sizes_counts_where_sizes_do_not(compiled: Ops) -> None:
    known = compiled.driver.module.KnownCalls({}, False)
    labels = torch.zeros(4, 3, dtype=torch.int64)
    key = known(leaf(7, 4, 5), labels)
    assert type(key) is bytes and key == known(leaf(9, 2, 6), labels[:2])
    others: list[tuple[Tensor, Tensor]] = [
        (leaf(7, 5, 6), labels),  # another number of sequences than of labels
        (leaf(4, 4, 5), labels),
        (leaf(7, 4, 3), labels),
        (leaf(7, 4, 5), labels[0]),
        (leaf(7, 4, 5), labels.int()),
        (leaf(7, 4, 5)[None], labels),
        (leaf(7, 4, 0), labels),
        (leaf(0, 4, 5), labels),
    ]
    keys = {key, *(known(*other) for other in others)}
    assert len(keys) == 1 + len(others) and None not in keys
    assert known(*[leaf(2, 3)] * 32) is not None and known(*[leaf(2, 3)] * 33) is None


def test_what_is_stored_is_decisions(compiled: Ops) -> None:
    calls = KnownCalls("test_what_is_stored_is_decisions")
    assert calls.find(leaf(2)) is None  # only a tensor on a GPU loads the C module
    calls._look_up = compiled.driver.module.KnownCalls(calls._decisions, True)
    key = calls.find(leaf(2), 3)
    calls.store(key, (1, "a"))
    assert calls.find(leaf(2), 3) == (1, "a")
    assert type(calls.find(leaf(2), 4)) is bytes
    calls.store(None, 5)
    assert list(calls._decisions.values()) == [(1, "a")]


@pytest.mark.parametrize(
    "args",
    [
        (leaf(2, dtype=torch.bfloat16),),
        (leaf(2), leaf(2, dtype=torch.float16)),
        (leaf(2).detach().as_subclass(Subclass).requires_grad_(),),
        (leaf(2), torch.ones(2, device="meta")),
        (leaf(2), torch.ones(2).to_sparse()),
        (leaf(2), [1]),
        (leaf(2), 2**70),
    ],
)
def test_other_arguments_are_left_to_python(args: tuple[Any, ...], known: Any) -> None:
    assert known(*args) is None


def test_a_decision_holds_in_every_mode(known: Any) -> None:
    x = leaf(3)
    key = known(x)
    with torch.no_grad():
        assert known(x) == key
    found: list[Any] = []
    torch.func.vmap(lambda row: found.extend((known(x), known(row))) or row)(leaf(2, 2).detach())
    torch.func.grad(lambda row: found.append(known(row)) or row.sum())(leaf(2).detach())
    assert found == [key, None, None]  # tensors of a transform have no memory


LABELS = torch.tensor([0, 2, -100])
LABELS_OF_CTC = torch.tensor([[1, 2, 2], [3, 1, 0]])
SOURCE = partita.debruijn_source(2, 2)
Call = Callable[..., Tensor]
CALLS: dict[str, tuple[Call, tuple[Tensor, ...], Any, str]] = {
    # On a CPU a call without a soft-cap is PyTorch's own.
    "cross_entropy": (
        lambda x: partita.cross_entropy(x, LABELS, softcap=3.0, reduction="sum"),
        (leaf(3, 4),),
        rows_api,
        "check_inputs",
    ),
    "token_stats": (
        lambda x: torch.stack(partita.token_stats(x, LABELS, temperature=2.0)[:3]),
        (leaf(3, 4),),
        rows_api.checks,
        "floating",
    ),
    "logz": (
        lambda *x: partita.logz(x[0], SOURCE, *x[1:]),
        (leaf(5, 2, 4, 3), leaf(2, 4), leaf(2, 4)),
        chain_api,
        "check_chain",
    ),
    "ctc_loss": (
        lambda x: partita.ctc_loss(x, LABELS_OF_CTC, [6, 5], [3, 2], from_logits=True),
        (leaf(6, 2, 4),),
        ctc_arguments,
        "check_tensors",
    ),
    "linear_cross_entropy": (
        lambda *x: partita.linear_cross_entropy(*x, LABELS[:2], softcap=3.0),
        (leaf(2, 3), leaf(4, 3)),
        linear_loss,
        "is_usual",
    ),
    "linear_chain": (
        lambda *x: partita.linear_chain(*x).logz(),
        (leaf(5, 2, 3), leaf(3, 3)),
        linear_chain_inputs.checks,
        "floating",
    ),
}


def results(function: Call, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    value = function(*leaves)
    return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_a_stored_decision_has_the_results_of_a_checked_one(
    name: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, leaves, module, check = CALLS[name]
    expected = results(function, leaves)
    checked: list[str] = []
    original = getattr(module, check)

    def noted(*args: Any) -> Any:
        checked.append(check)
        return original(*args)

    monkeypatch.setattr(module, check, noted)
    for got, truth in zip(results(function, leaves), expected, strict=True):
        assert torch.equal(got, truth)
    assert not checked
    other = tuple(torch.randn_like(x).requires_grad_() for x in leaves)
    assert not torch.equal(results(function, other)[0], expected[0])
    assert not checked
    served.replayed.clear()
    with partita.backend("reference"):
        torch.testing.assert_close(results(function, leaves), expected)
    assert not served.replayed


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_another_shape_is_checked(name: str, served: Served) -> None:
    function, leaves, *_ = CALLS[name]
    results(function, leaves)
    with pytest.raises(ValueError, match="expected"):
        function(leaves[0][None], *leaves[1:])


@pytest.mark.parametrize(
    ("name", "shape", "decisions"),
    [
        ("ctc_loss", (9, 2, 5), ctc_api._known_losses),
        ("cross_entropy", (3, 7), rows_api._known_losses),
        ("token_stats", (3, 7), rows_api._known_statistics),
    ],
)
def test_a_decision_serves_other_sizes(
    name: str,
    shape: tuple[int, ...],
    decisions: KnownCalls,
    served: Served,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, leaves, module, check = CALLS[name]
    function(*leaves)
    assert len(decisions._decisions) == 1
    with monkeypatch.context() as patch:
        patch.setattr(module, check, None)  # which no call may reach
        expected = results(function, (leaf(*shape),))
    assert len(decisions._decisions) == 1
    monkeypatch.setattr(decisions, "_look_up", lambda *args: None)
    for got, truth in zip(results(function, (leaf(*shape),)), expected, strict=True):
        assert torch.equal(got, truth)


def test_sizes_that_only_checks_know_are_checked(served: Served) -> None:
    partita.token_stats(leaf(3, 4), LABELS, temperature=2.0)
    assert len(rows_api._known_statistics._decisions) == 1
    with pytest.raises(ValueError, match="at least one class"):
        partita.token_stats(leaf(3, 0), LABELS, temperature=2.0)
    partita.cross_entropy(leaf(3, 4), LABELS, softcap=3.0, reduction="sum")
    with pytest.raises(ValueError, match="target: expected shape"):
        partita.cross_entropy(leaf(5, 4), LABELS, softcap=3.0, reduction="sum")


@pytest.mark.parametrize(
    ("classes", "options", "message"),
    [
        (3, {"blank": 3}, "blank: expected a class from 0 to 2, got 3"),
        (6, {"star": 5, "blank": 3}, "star: expected an index of at least C = 6, got 5"),
        (0, {"blank": 3}, "expected at least one class"),
    ],
)
def test_what_a_decision_about_ctc_does_not_know_is_checked(
    classes: int, options: dict[str, Any], message: str, served: Served
) -> None:
    def call(C: int) -> Tensor:
        labels = torch.tensor([[1, 2, 2], [2, 1, 0]])
        return partita.ctc_loss(leaf(6, 2, C), labels, [6, 5], [3, 2], from_logits=True, **options)

    call(5)
    assert len(ctc_api._known_losses._decisions) == 1
    call(4)
    with pytest.raises(ValueError, match=message):
        call(classes)


def test_no_decision_is_stored_for_a_flag_that_is_a_tensor(served: Served) -> None:
    x, labels = leaf(2, 1, 4), torch.tensor([[1, 1]])  # which cannot be aligned to two steps
    for flag, expected in ((torch.tensor(True), 0.0), (torch.tensor(False), float("inf"))):
        options: dict[str, Any] = {"zero_infinity": flag, "from_logits": True}
        assert partita.ctc_loss(x, labels, [2], [2], **options).item() == expected
    assert not ctc_api._known_losses._decisions


@pytest.mark.parametrize("name", CALLS)
def test_a_stored_decision_serves_under_transforms_and_for_second_derivatives(
    name: str, served: Served
) -> None:
    function, leaves, *_ = CALLS[name]
    leaves = tuple(x.detach().double().requires_grad_() for x in leaves)
    expected = results(function, leaves)[1]
    value = function(*leaves)
    grad = torch.autograd.grad(value.sum(), leaves[0], create_graph=True)[0]
    assert torch.equal(grad, expected) and grad.requires_grad
    transformed = torch.func.grad(lambda x: function(x, *leaves[1:]).sum())(leaves[0].detach())
    torch.testing.assert_close(transformed, expected)
    assert autograd.plain_eager()


def test_autocast_decides_about_a_linear_head(served: Served) -> None:
    function, leaves, *_ = CALLS["linear_cross_entropy"]
    expected = function(*leaves)
    assert torch.equal(function(*leaves), expected)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = function(*leaves)
    assert not torch.equal(rounded, expected)
    linear_loss._known_small._decisions.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(function(*leaves), rounded)
        assert not linear_loss._known_small._decisions
