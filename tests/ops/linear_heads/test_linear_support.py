"""Statistics over recorded supports from hidden states, under every plan."""

import os
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.errors import raises
from helpers.invariance import differences, of_rows, rows_of
from helpers.linear import CLASSES, PLANS, TOKENS, Batch, batch_of, budgets, leaves_of
from helpers.memory import no_waits
from helpers.rows import INTERPRETING, devices, kernel_devices
from helpers.support import IGNORED, Recorded, enumerated, gradients, recorded
from torch import Tensor

import partita
from partita.ops.linear_heads import support
from partita.ops.support import autograd
from partita.testing import poisoned_memory
from partita.testing.samples import CALLS, Draw

pytestmark = pytest.mark.interpreted


def call(x: Batch, given: Recorded, plan: str = "fast", **options: object) -> partita.SupportStats:
    budget = budgets(x)[plan]
    head = (x.input, x.weight, *given)
    return partita.linear_support_stats(*head, linear_bias=x.bias, memory_budget=budget, **options)


@devices
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("temperature", "softcap", "bias"), [(1.0, None, False), (0.7, 4.0, True)])
@pytest.mark.parametrize("empty", [False, True])
def test_values_and_gradients(
    empty: bool,
    temperature: float,
    softcap: float | None,
    bias: bool,
    dtype: torch.dtype,
    plan: str,
    device: str,
) -> None:
    x = leaves_of(batch_of(bias=bias, dtype=dtype, device=device))
    given = recorded(TOKENS, CLASSES, device, empty=empty)
    with poisoned_memory():
        found = call(x, given, plan, temperature=temperature, softcap=softcap)
        grads = gradients(found, x[:3])
    exact = leaves_of(x, torch.float64)
    logits = F.linear(exact.input, exact.weight, exact.bias)
    expected = enumerated(logits, given, temperature, softcap)
    single = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.logprob.dtype == found.entropy.dtype == single
    assert torch.equal(found.in_set, expected[2])
    # Only rows without ids round their logits, by half an eps of about 16.
    rounded = torch.finfo(dtype).eps if empty else torch.finfo(single).eps
    atol = (32 if INTERPRETING else 16) * rounded
    torch.testing.assert_close(found.logprob.double(), expected[0], rtol=0, atol=atol)
    torch.testing.assert_close(found.entropy.double(), expected[1], rtol=0, atol=atol)
    eps = torch.finfo(dtype).eps * (2 if INTERPRETING else 1)
    for grad, true in zip(grads, gradients(expected, exact[:3]), strict=True):
        assert grad.dtype == dtype
        bound = 32 * eps * true.abs().amax().item()
        torch.testing.assert_close(grad.double(), true, rtol=0, atol=bound)


@devices
@pytest.mark.parametrize("empty", [False, True])
def test_a_matrix_in_fp32(empty: bool, device: str) -> None:
    """Recorded classes take it as it is, and rows without ids take a rounded copy."""
    x = batch_of(bias=True, device=device)
    x = leaves_of(x._replace(input=x.input.bfloat16()))
    given = recorded(TOKENS, CLASSES, device, empty=empty)
    with poisoned_memory():
        found = call(x, given, logits_dtype=torch.float32)
        grads = gradients(found, x[:3])
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]
    exact = leaves_of(x, torch.float64)
    logits = F.linear(exact.input, exact.weight, exact.bias)
    rounded = F.linear(exact.input, *(t.bfloat16().double() for t in exact[1:3]))
    has_all = (given.offsets.diff() == 0)[:, None]
    assert has_all.any() == empty
    expected = enumerated(torch.where(has_all, rounded, logits), given)
    for field, true in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(field.double(), true, rtol=0, atol=1e-5)
    for grad, true in zip(grads, gradients(expected, exact[:3]), strict=True):
        eps = torch.finfo(torch.bfloat16 if empty else grad.dtype).eps
        bound = (64 if INTERPRETING else 32) * eps * true.abs().amax().item()
        torch.testing.assert_close(grad.double(), true, rtol=0, atol=bound)


@devices
def test_rows_with_ids_form_no_product(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("all logits are computed")

    monkeypatch.setattr(support, "linear_token_stats", refuse)
    x = leaves_of(batch_of(bias=True, device=device))
    given = recorded(TOKENS, CLASSES, device, empty=False)
    gradients(call(x, given), x[:3])
    # The rows without ids that are ignored need no product either.
    counts = given.offsets.diff() * (given.target != IGNORED)
    is_kept = (given.target != IGNORED).repeat_interleave(given.offsets.diff())
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    gradients(call(x, Recorded(given.target, given.ids[is_kept], offsets)), x[:3])
    with pytest.raises(AssertionError, match="all logits"):
        call(x, recorded(TOKENS, CLASSES, device))


@devices
@pytest.mark.parametrize("plan", ["fast", "lean"])
def test_rows_without_ids_are_those_of_token_stats(plan: str, device: str) -> None:
    x = leaves_of(batch_of(device=device))
    none = x.target[:0]
    offsets = torch.zeros(TOKENS + 1, dtype=torch.int64, device=device)
    found = call(x, Recorded(x.target, none, offsets), plan)
    budget = budgets(x)[plan]
    stats = partita.linear_token_stats(x.input, x.weight, x.target, memory_budget=budget)
    counts = x.target != IGNORED
    torch.testing.assert_close(found.logprob, stats.logprob)
    torch.testing.assert_close(found.entropy, torch.where(counts, stats.entropy, 0))
    assert torch.equal(found.in_set, counts)
    entropy = torch.where(counts, stats.entropy, 0)
    pairs = zip(gradients(found, x[:3]), gradients((stats.logprob, entropy), x[:3]), strict=True)
    for grad, true in pairs:
        torch.testing.assert_close(grad, true, rtol=1e-5, atol=1e-6)


@kernel_devices
@pytest.mark.parametrize("bias_alone", [False, True])
def test_sums_of_common_classes_are_cut(
    bias_alone: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One class has entries in most rows, another one in many, and others in one or two parts."""
    from partita.ops.linear_heads.gpu import support as kernels

    monkeypatch.setattr(kernels, "SPLIT", 8)
    x = leaves_of(batch_of(bias=True, device=device))
    given = recorded(TOKENS, CLASSES, device)
    given.target[4:] = 11
    given.ids[::5] = 200
    x.weight.requires_grad_(not bias_alone)
    leaves = [x.bias] if bias_alone else [x.weight, x.bias]
    found = []
    for backend in ("triton", "reference"):
        with partita.backend(backend), poisoned_memory():
            stats = call(x, given)
            loss = stats.logprob.sum() + 0.3 * stats.entropy.sum()
            found.append(torch.autograd.grad(loss, leaves))
    for grad, true in zip(*found, strict=True):
        torch.testing.assert_close(grad, true, rtol=1e-5, atol=1e-5)


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("option", ["", "many ids"])
def test_a_row_with_ids_depends_on_itself_alone(
    option: str, dtype: torch.dtype, device: str
) -> None:
    """It does so outside of the batch-invariant mode too."""
    sample = CALLS["linear_support_stats"].sample(Draw(dtype, device=device), option)
    where, numbers = rows_of(sample), sample.inputs["offsets"].diff()
    assert where is not None and (numbers == 0).any()
    with_ids = of_rows(sample, where, numbers.nonzero()[:, 0].tolist(), lambda x: x)
    assert not list(differences(with_ids, (1, 2, 7, 33)))


@devices
@pytest.mark.parametrize("plan", ["fast", "lean"])
@pytest.mark.parametrize("empty", [False, True])
def test_what_does_not_count_may_hold_nan(empty: bool, plan: str, device: str) -> None:
    """This holds for ignored rows, rows without a gradient, and classes that no row names."""
    x = batch_of(bias=True, device=device)
    given = recorded(TOKENS, CLASSES, device, empty=empty)
    counts = given.target != IGNORED
    spoilt = x._replace(input=x.input.masked_fill(~counts[:, None], torch.nan))
    if not empty:
        named = torch.cat([given.ids, given.target[counts]])
        others = torch.ones(CLASSES, dtype=torch.bool, device=device)
        others[named] = False
        spoilt.weight[others] = torch.nan
    x, spoilt = leaves_of(x), leaves_of(spoilt)
    found, expected = call(spoilt, given, plan), call(x, given, plan)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for grad, true in zip(gradients(found, spoilt[:3]), gradients(expected, x[:3]), strict=True):
        assert torch.equal(grad, true)
    loss = found.logprob[: TOKENS // 2].sum()
    half = leaves_of(spoilt._replace(input=spoilt.input.detach().clone()))
    half.input.data[TOKENS // 2 :] = torch.nan
    found = call(half, given, plan)
    expected = torch.autograd.grad(loss, spoilt[:3])
    grads = torch.autograd.grad(found.logprob[: TOKENS // 2].sum(), half[:3])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def is_in_set(given: Recorded, row: int) -> Tensor:
    """Return which classes the set of a row has, `[CLASSES]`."""
    ids = given.ids[given.offsets[row] : given.offsets[row + 1]]
    named = torch.cat([ids, given.target[row : row + 1]])
    return torch.isin(torch.arange(CLASSES, device=ids.device), named)


@devices
@pytest.mark.parametrize("plan", PLANS)
def test_numbers_out_of_range_spoil_their_rows_alone(plan: str, device: str) -> None:
    """Its gradient is NaN even if nothing depends on the row."""
    x = leaves_of(batch_of(device=device))
    given = recorded(TOKENS, CLASSES, device, empty=False)
    right = call(x, given, plan)
    true, row = gradients(right, x[:3]), 7
    others = torch.arange(TOKENS, device=device) != row
    for number in (CLASSES, -(2**40)):
        for name in ("target", "ids"):
            place = row if name == "target" else int(given.offsets[row + 1]) - 1
            changed = getattr(given, name).clone()
            changed[place] = number
            wrong = given._replace(**{name: changed})
            with mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"}), raises(f"IndexError: {name}"):
                call(x, wrong, plan)
            with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}), poisoned_memory():
                found = call(x, wrong, plan)
                grads = gradients(found, x[:3])
            for field, truth in zip(found[:2], right[:2], strict=True):
                assert field[row].isnan() and torch.equal(field[others], truth[others])
            assert grads[0][row].isnan().all() and torch.equal(grads[0][others], true[0][others])
            # The gradient of the matrix is NaN at the classes of the row's set.
            is_own, was_own = (is_in_set(each, row) for each in (wrong, given))
            assert torch.equal(grads[1].isnan().any(1), is_own)
            assert torch.equal(grads[1].isnan().all(1), is_own)
            rest = ~(is_own | was_own)
            torch.testing.assert_close(grads[1][rest], true[1][rest])
            (idle,) = torch.autograd.grad(found.logprob[others].sum(), x.input)
            assert idle[row].isnan().all() and not idle[others].isnan().any()
    wrong = given._replace(offsets=given.offsets + 1)
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}), poisoned_memory():
        found = call(x, wrong, plan)
        grads = gradients(found, x[:3])
    assert found.logprob.isnan().all() and found.entropy.isnan().all() and grads[0].isnan().all()


@devices
def test_frozen_parts_strides_and_leading_dimensions(device: str) -> None:
    x, given = batch_of(bias=True, device=device), recorded(TOKENS, CLASSES, device)
    full = leaves_of(x)
    expected = call(full, given)
    of_full = gradients(expected, full[:3])
    for wanted in ((0,), (1,), (2,), (1, 2)):
        parts = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(x[:3])]
        part = Batch(*parts, *x[3:])
        grads = gradients(call(part, given), [parts[i] for i in wanted])
        for grad, i in zip(grads, wanted, strict=True):
            torch.testing.assert_close(grad, of_full[i], rtol=1e-5, atol=1e-6)
    columns = x._replace(
        input=x.input.T.contiguous().T, weight=x.weight.repeat_interleave(2, 1)[:, ::2]
    )
    found = call(columns, given)
    for a, b in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    shaped = given._replace(target=given.target.view(2, -1))
    found = partita.linear_support_stats(
        x.input.unflatten(0, (2, -1)),
        x.weight,
        *shaped,
        linear_bias=x.bias,
        memory_budget=budgets(x)["fast"],
    )
    flat = call(x, given)  # without a gradient, as these
    assert all(torch.equal(a.flatten(), b) for a, b in zip(found, flat, strict=True))
    none, first = given.ids[:0], given.offsets[:1]
    empty = x._replace(input=x.input[:0])
    found = call(leaves_of(empty), Recorded(given.target[:0], none, first))
    assert all(field.shape == (0,) for field in found)


@devices
def test_offsets_on_the_host(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for empty in (True, False):
        x = leaves_of(batch_of(device=device))
        given = recorded(TOKENS, CLASSES, device, empty=empty)
        on_host = given._replace(offsets=given.offsets.cpu())
        expected, found = call(x, given), call(x, on_host)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        pairs = zip(gradients(found, x[:3]), gradients(expected, x[:3]), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    if device == "cuda":  # Every row has ids, so nothing waits.
        with no_waits():
            torch.autograd.grad(call(x, on_host).logprob.sum(), x[:2])
        graph, x = torch.cuda.CUDAGraph(), x._replace(input=x.input.detach())
        with torch.cuda.graph(graph):
            captured = call(x, on_host)
        x.input.copy_(x.input.flip(0).clone())
        graph.replay()
        expected = call(x, given)
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
    # All rows take the products of `linear_token_stats` in a graph that does not know the offsets.
    x, given = batch_of(device=device), recorded(TOKENS, CLASSES, device)
    expected = call(x, given)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call(x, given)
        graph.replay()
    else:
        monkeypatch.setattr(autograd, "is_capturing", lambda _: True)
        found = call(x, given)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    with raises(r"ValueError: offsets: expected .* got 1 at \[0\]"):
        call(x, on_host._replace(offsets=on_host.offsets + 1))


def test_bad_input() -> None:
    hidden, matrix = torch.zeros(2, 3), torch.zeros(5, 3)
    target, ids = torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    good = {"input": hidden, "linear_weight": matrix, "target": target, "ids": ids}
    good["offsets"] = torch.tensor([0, 2, 3])
    for error, changes in {
        "TypeError: linear_weight: expected the dtype of input": {"linear_weight": matrix.double()},
        r"ValueError: target: expected shape input.shape\[:-1\] = \[2\], got \[3\]": {
            "target": ids
        },
        r"ValueError: offsets: expected shape \[M \+ 1\] for the M rows of input = \[3\]": {
            "offsets": ids[:2]
        },
        r"IndexError: ids: expected classes from 0 to 4, got 5 at \[0\]": {"ids": ids + 5},
        "ValueError: memory_budget: expected": {"memory_budget": -1},
    }.items():
        with raises(error):
            partita.linear_support_stats(**{**good, **changes})
