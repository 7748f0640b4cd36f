"""Statistics over recorded supports against enumeration; what does not count; bad input."""

import os
from unittest import mock

import pytest
import torch
from helpers.errors import raises
from helpers.rows import INTERPRETING, devices, devices_and_dtypes
from helpers.support import IGNORED, Recorded, enumerated, gradients, recorded

import partita
from partita.testing import poisoned_memory, sample_rows

pytestmark = pytest.mark.interpreted
ROWS = 23


@devices_and_dtypes
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (1.3, 4.0)])
@pytest.mark.parametrize("classes", [37, 2100])
def test_values_and_gradients(
    classes: int, temperature: float, softcap: float | None, dtype: torch.dtype, device: str
) -> None:
    given = recorded(ROWS, classes, device)
    x = sample_rows(ROWS, classes, device=device).to(dtype).requires_grad_()
    with poisoned_memory():
        found = partita.support_stats(x, *given, temperature=temperature, softcap=softcap)
        (grad,) = gradients(found, [x])
    exact = x.detach().double().requires_grad_()
    expected = enumerated(exact, given, temperature, softcap)
    single = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.logprob.dtype == found.entropy.dtype == single and grad.dtype == dtype
    eps = torch.finfo(single).eps
    bounds = {"rtol": 0, "atol": float(16 * eps * (exact.detach().abs().amax() + 1))}
    torch.testing.assert_close(found.logprob.double(), expected[0], **bounds)
    torch.testing.assert_close(found.entropy.double(), expected[1], **bounds)
    assert torch.equal(found.in_set, expected[2])
    # Triton's interpreter truncates to bf16, which has twice the error of rounding.
    rounding = torch.finfo(dtype).eps / (1 if INTERPRETING else 2)
    bounds["rtol"] = max(rounding * 1.01, 64 * eps)
    bounds["atol"] *= 4
    (true,) = gradients(expected, [exact])
    torch.testing.assert_close(grad.double(), true, **bounds)


@devices
def test_a_class_counts_once_and_the_target_always(device: str) -> None:
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]], device=device)
    target, offsets = torch.tensor([1], device=device), torch.tensor([0, 4], device=device)
    for ids, is_recorded, others in (
        ([1, 2, 1, 1], True, [1, 2]),
        ([2, 2, 2, 2], False, [1, 2]),
        ([3, 3, 0, 0], False, [0, 1, 3]),
        ([1, 1, 1, 1], True, [1]),
    ):
        found = partita.support_stats(x, target, torch.tensor(ids, device=device), offsets)
        expected = x[0, 1] - x[0, others].logsumexp(0)
        torch.testing.assert_close(found.logprob[0], expected)
        assert bool(found.in_set) is is_recorded
    assert found.logprob == found.entropy == 0.0


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("classes", [300, 50257])
def test_rows_without_ids_have_the_bits_of_token_stats(
    classes: int, dtype: torch.dtype, device: str
) -> None:
    """Some rows have ids and NaN outside of their sets, or all rows but one have, or none has."""
    rows = 5 if INTERPRETING and classes > 300 else ROWS
    x = sample_rows(rows, classes, device=device).to(dtype).requires_grad_()
    target = torch.arange(rows, device=device)
    stats = partita.token_stats(x, target, temperature=0.8)
    (expected,) = gradients((stats.logprob, stats.entropy), [x])
    for has_all in (target % 3 != 1, target == 2, target >= 0):
        offsets = torch.cat([target[:1], (~has_all).cumsum(0)])
        spoilt = x.detach().masked_fill(~has_all[:, None], torch.nan).requires_grad_()
        found = partita.support_stats(spoilt, target, target[~has_all], offsets, temperature=0.8)
        assert found.in_set.all()
        assert torch.equal(found.logprob[has_all], stats.logprob[has_all])
        assert torch.equal(found.entropy[has_all], stats.entropy[has_all])
        (grad,) = gradients(found, [spoilt])
        assert torch.equal(grad[has_all], expected[has_all])


@devices
def test_strides_and_leading_dimensions(device: str) -> None:
    given = recorded(24, 50, device)
    x = sample_rows(24, 50, device=device)
    leaf = x.clone().requires_grad_()
    expected = partita.support_stats(leaf, *given)
    (true,) = gradients(expected, [leaf])
    shaped = (given.target.view(4, 6), *given[1:])
    padded = torch.full((4, 6, 120), torch.nan, device=device)
    padded[..., 10:110:2] = x.view(4, 6, 50)
    transposed = x.view(4, 6, 50).permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for logits in (padded[..., 10:110:2], transposed):
        leaf = logits.detach().requires_grad_()
        found = partita.support_stats(leaf, *shaped)
        # Rows without ids are read in vectors if their classes are contiguous.
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.flatten(), b)
        (grad,) = gradients(found, [leaf])
        torch.testing.assert_close(grad.reshape(24, 50), true)
    narrow = (given.target.to(torch.int16), given.ids.to(torch.uint8), given.offsets.int())
    found = partita.support_stats(x, *narrow)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@devices
def test_nothing_but_the_set_counts(device: str) -> None:
    """Ignored rows and classes outside of the sets may hold NaN; ignored rows are zeros."""
    given = recorded(ROWS, 40, device, empty=False)
    x = sample_rows(ROWS, 40, device=device).requires_grad_()
    expected = partita.support_stats(x, *given, softcap=9.0)
    (true,) = gradients(expected, [x])
    is_outside = true == 0
    spoilt = x.detach().masked_fill(is_outside, torch.nan).requires_grad_()
    found = partita.support_stats(spoilt, *given, softcap=9.0)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(gradients(found, [spoilt])[0], true)
    ignored = given.target == IGNORED
    assert ignored.any() and is_outside[ignored].all() and not is_outside.all()
    assert not any(field[ignored].any() for field in found)


@devices
def test_masked_and_huge_logits(device: str) -> None:
    x = torch.tensor(
        [[0.0, -torch.inf, 1.0, 2.0], [1e30, 1e30, -1e30, 0.0], [3e4, 3e4 - 1, -3e4, -torch.inf]],
        device=device,
    ).requires_grad_()
    target, ids = torch.tensor([1, 0, 1], device=device), [1, 3, 3, 0, 2, 0, 3]
    ids, offsets = torch.tensor(ids, device=device), torch.tensor([0, 3, 5, 7], device=device)
    given = Recorded(target, ids, offsets)
    found, expected = partita.support_stats(x, *given), enumerated(x, given)
    torch.testing.assert_close(found.logprob, expected[0].float())
    torch.testing.assert_close(found.entropy, expected[1].float())
    assert found.logprob[0] == -torch.inf
    (grad,) = torch.autograd.grad(found.entropy.sum() + found.logprob[1:].sum(), x)
    assert not grad.isnan().any()


@devices
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    ("name", "number"),
    [("target", 40), ("target", -1), ("ids", 40), ("ids", -(2**40)), ("ids", 2**40)],
)
def test_numbers_out_of_range_spoil_their_rows_alone(
    name: str, number: int, empty: bool, device: str
) -> None:
    """All of the row is NaN, its gradient even if nothing depends on the row."""
    given = recorded(ROWS, 40, device, empty=empty)
    x = sample_rows(ROWS, 40, device=device).requires_grad_()
    right = partita.support_stats(x, *given)
    (true,) = gradients(right, [x])
    with_ids, counts = given.offsets.diff() > 0, given.target != IGNORED
    rows = [int((with_ids & counts).nonzero()[-1])]
    if empty and name == "target":
        rows.append(int((~with_ids & counts).nonzero()[0]))
    for row in rows:
        changed = getattr(given, name).clone()
        changed[row if name == "target" else given.offsets[row + 1] - 1] = number
        wrong = given._replace(**{name: changed})
        with mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"}), raises(f"IndexError: {name}: "):
            partita.support_stats(x, *wrong)
        others = torch.arange(ROWS, device=device) != row
        for offsets in (wrong.offsets, wrong.offsets.cpu()):
            with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}), poisoned_memory():
                found = partita.support_stats(x, *wrong[:2], offsets)
                (grad,) = gradients(found, [x])
                found = partita.support_stats(x, *wrong[:2], offsets)
                (idle,) = torch.autograd.grad(found.logprob[others].sum(), x)
            for field, truth in zip(found[:2], right[:2], strict=True):
                assert field[row].isnan() and torch.equal(field[others], truth[others])
            assert not found.in_set[row]
            assert torch.equal(found.in_set[others], right.in_set[others])
            assert grad[row].isnan().all() and torch.equal(grad[others], true[others])
            assert idle[row].isnan().all() and not idle[others].isnan().any()


@devices
@pytest.mark.parametrize(("place", "value"), [(0, 1), (4, -5), (4, 2**40), (ROWS, 3)])
def test_wrong_offsets_spoil_all_rows(place: int, value: int, device: str) -> None:
    given = recorded(ROWS, 40, device)
    x = sample_rows(ROWS, 40, device=device).requires_grad_()
    offsets = given.offsets.clone()
    offsets[place] = value
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "1"}), raises("ValueError: offsets: "):
        partita.support_stats(x, given.target, given.ids, offsets)
    with mock.patch.dict(os.environ, {"PARTITA_CHECK": "0"}), poisoned_memory():
        found = partita.support_stats(x, given.target, given.ids, offsets)
        (grad,) = gradients(found, [x])
    assert found.logprob.isnan().all() and found.entropy.isnan().all()
    assert grad.isnan().any(1).all()
    assert not found.in_set.any()


X, IDS = torch.zeros(2, 5), torch.zeros(3, dtype=torch.int64)
TARGET, OFFSETS = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2, 3])
BAD = {
    "TypeError: logits: expected a floating dtype, got torch.int64": {"logits": X.long()},
    "TypeError: target: expected an integer dtype, got torch.float32": {"target": TARGET.float()},
    r"ValueError: target: expected shape logits.shape\[:-1\] = \[2\], got \[3\]": {"target": IDS},
    "TypeError: ids: expected an integer dtype, got torch.float32": {"ids": IDS.float()},
    r"ValueError: ids: expected shape \[K\], got \[1, 3\]": {"ids": IDS[None]},
    "ValueError: ids: expected the device of logits, cpu, got meta": {"ids": IDS.to("meta")},
    r"IndexError: ids: expected classes from 0 to 4, got 5 at \[0\]": {"ids": IDS + 5},
    r"IndexError: target: expected labels from 0 to 4 \(or ignore_index -100\), got 5 at \[0\]": {
        "target": TARGET + 5
    },
    r"ValueError: offsets: expected shape \[M \+ 1\] for the M rows of logits = \[3\], got \[2\]": {
        "offsets": OFFSETS[:2]
    },
    r"ValueError: offsets: expected numbers from 0 to the number of ids, 3, .* got 1 at \[0\]": {
        "offsets": OFFSETS + 1
    },
    r"ValueError: offsets: expected numbers from 0 to the number of ids, 3, .* got 2 at \[2\]": {
        "offsets": OFFSETS.clamp(max=2)
    },
    r"ValueError: offsets: .* that do not decrease, got 3 at \[2\]": {
        "offsets": torch.tensor([0, 5, 3])
    },
    "ValueError: temperature: expected a number above 0.0, got 0.0": {"temperature": 0.0},
    "ValueError: softcap: expected a number above 0.0, got -1.0": {"softcap": -1.0},
}


@pytest.mark.parametrize("error", BAD)
def test_bad_input(error: str) -> None:
    good = {"logits": X, "target": TARGET, "ids": IDS, "offsets": OFFSETS}
    with raises(error):
        partita.support_stats(**{**good, **BAD[error]})
