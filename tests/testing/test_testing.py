"""partita.testing: that it finds what it is meant to find."""

import io
import math
import re

import pytest
import torch
from helpers.errors import raises
from helpers.rows import devices
from torch import Tensor

import partita
from partita.testing import (
    EDGES,
    Timing,
    assert_within_budget,
    contract_errors,
    edge_rows,
    forward_backward_difference,
    poisoned_memory,
    report,
    sample_labels,
    sample_rows,
    time_forward_backward,
    ulp_error,
)

FP32_ULP = 2.0**-23


def truth(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("dtype", "value", "ulp"),
    [
        (torch.float32, 1.0, 2.0**-23),
        (torch.float32, 1.999, 2.0**-23),
        (torch.float32, -1000.0, 2.0**-14),
        (torch.bfloat16, 3.0, 2.0**-6),
        (torch.float16, 1.0, 2.0**-10),
        (torch.float16, 1e-6, 2.0**-24),
        (torch.float32, 0.0, 2.0**-126),
        (torch.float64, 1.0, 2.0**-52),
        (torch.float64, 1e300, math.ulp(1e300)),
    ],
)
def test_an_ulp(dtype: torch.dtype, value: float, ulp: float) -> None:
    expected = torch.tensor([value]).to(dtype).double() if dtype != torch.float64 else truth(value)
    moved = (expected + 3 * ulp).to(dtype)
    assert ulp_error(moved, expected).ulp == pytest.approx(3, rel=1e-6)


@pytest.mark.parametrize(("steps", "passed"), [(0, True), (2, True), (3, False), (-3, False)])
def test_two_ulp_without_a_baseline(steps: int, passed: bool) -> None:
    assert ulp_error(torch.tensor([1.5 + steps * FP32_ULP]), truth(1.5)).passed is passed


@pytest.mark.parametrize(("steps", "passed"), [(10, True), (11, False)])
def test_the_budget_doubles_the_worst_error_of_the_baseline(steps: int, passed: bool) -> None:
    result = torch.tensor([1.5 + steps * FP32_ULP, 1.5])
    baseline = torch.tensor([1.5, 1.5 + 5 * FP32_ULP])
    error = ulp_error(result, truth(1.5, 1.5), baseline)
    assert (error.baseline, error.budget, error.passed) == (5, 10, passed)
    assert ulp_error(result, truth(1.5, 1.5), 5.0) == error


def test_an_fp64_truth_of_an_fp64_result_doubles_the_budget() -> None:
    assert ulp_error(truth(1.0), truth(1.0)).budget == 4
    assert ulp_error(truth(1.0), truth(1.0), 3.0).budget == 12


@pytest.mark.parametrize(
    ("scale", "passed"),
    [
        ("element", False),
        ("tensor", True),
        (0, False),
        (1, True),
        (-1, True),
        (truth(0, 1000.0), True),
        (truth(1.0, 1000.0)[:1], False),
    ],
    ids=str,
)
def test_scale(scale, passed: bool) -> None:
    """An error of 2e-5 at 0.1 stands next to 1000, whose ulp is 6e-5."""
    expected = truth(1000.0, 0.1)[None]
    scale = scale.flip(0) if isinstance(scale, Tensor) and scale.numel() == 1 else scale
    assert ulp_error(torch.tensor([[1000.0, 0.10002]]), expected, scale=scale).passed is passed


def test_terms_are_counted_in_the_accumulator_and_the_result_in_its_own_dtype() -> None:
    """One ulp of bf16 at 0.5 is 2^-9, like that of terms of 2^14 in fp32."""
    result = torch.tensor([0.5 + 4 * 2.0**-8]).bfloat16()
    assert ulp_error(result, truth(0.5), scale=truth(2.0**14)).ulp == 4
    assert ulp_error(result, truth(0.5), scale=truth(2.0**16)).ulp == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_must_coincide(bad: float) -> None:
    assert ulp_error(torch.tensor([1.0, bad]), truth(1.0, bad)).passed
    for other in {math.nan, math.inf, -math.inf, 1.0} - {bad}:
        error = ulp_error(torch.tensor([1.0, other]), truth(1.0, bad))
        assert (error.ulp, error.index, error.passed) == (math.inf, (1,), False)


def test_a_baseline_that_overflows_sets_no_example() -> None:
    assert ulp_error(torch.tensor([2.0]), truth(1.0), torch.tensor([math.inf])).passed is False


def test_a_truth_beyond_the_range_is_an_infinity() -> None:
    assert ulp_error(torch.tensor([math.inf]).half(), truth(1e6)).passed


def test_empty_tensors_pass() -> None:
    empty = torch.zeros(0, 3)
    assert ulp_error(empty, empty.double(), empty, scale=-1).passed


def test_the_message_names_the_worst_element() -> None:
    expected = truth(1, 2, 4, 4).reshape(2, 2)
    message = (
        "grad: 1.05e+06 ulp at [1, 0] (got 4.5, expected 4.0); budget 2 ulp,"
        " the baseline's own error 0 ulp"
    )
    with pytest.raises(AssertionError, match=f"^{re.escape(message)}$"):
        assert_within_budget(torch.tensor([[1.0, 2.0], [4.5, 4.0]]), expected, name="grad")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2), truth(1.0)), r"result: expected the shape of truth, \[1\], got \[2\]"),
        (
            (torch.ones(1), truth(1.0), torch.ones(2)),
            r"baseline: expected the shape of truth, \[1\], got \[2\]",
        ),
        ((torch.ones(1), torch.ones(1)), "truth: expected dtype torch.float64, got torch.float32"),
        (
            (torch.ones(1, dtype=torch.int64), truth(1.0)),
            "result: expected a floating dtype, got torch.int64",
        ),
    ],
)
def test_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        ulp_error(*arguments)


@devices
def test_poisoned_memory_is_nan_and_then_as_before(device: str) -> None:
    like = torch.zeros(3, 2, device=device)

    def allocations() -> list[Tensor]:
        return [
            torch.empty(5, device=device),
            torch.empty(5, device=device, dtype=torch.bfloat16),
            torch.empty_like(like),
            like.new_empty(4),
            torch.empty_strided((2, 3), (1, 2), device=device),
            like.new_empty_strided((2,), (1,)),
        ]

    with poisoned_memory():
        assert torch.are_deterministic_algorithms_enabled()
        assert all(t.isnan().all() for t in allocations())
        assert (torch.empty(3, dtype=torch.int64, device=device) == 2**63 - 1).all()
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), poisoned_memory():
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()


def test_contract_errors_sees_what_a_function_leaves_unwritten() -> None:
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            out[1:] = x[1:]
            return out

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            result = torch.empty_like(grad)
            result[:1] = grad[:1]
            return result

    errors = contract_errors(Careless.apply, lambda x: x.clone(), sample_rows(2, 3))
    assert [error.index[0] for error in (*errors.forward, *errors.backward)] == [0, 1]
    assert not errors.passed


@pytest.mark.parametrize("factor", [1.0, 1.001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contract_errors_sees_a_wrong_result_and_a_wrong_gradient(
    dtype: torch.dtype, factor: float
) -> None:
    x = sample_rows(5, 7, dtype=dtype)
    errors = contract_errors(lambda x: (x * factor).softmax(-1), lambda x: x.softmax(-1), x)
    assert errors.forward[0].passed is errors.backward[0].passed is (factor == 1.0)

    def wrong_gradient(x: Tensor) -> Tensor:
        return (x * factor - (x * (factor - 1)).detach()).exp()

    errors = contract_errors(wrong_gradient, torch.exp, x)
    assert errors.backward[0].passed is (factor == 1.0)


def test_contract_errors_of_several_inputs_and_results() -> None:
    def function(x: Tensor, y: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return x * y, x / n

    inputs = (sample_rows(3, 4), sample_rows(3, 4, seed=1), 3)
    errors = contract_errors(function, function, *inputs, scale=("element", -1))
    assert (len(errors.forward), len(errors.backward)) == (2, 2)
    assert errors.passed
    assert str(errors).startswith("forward 0: 0")


def test_difference_is_that_of_results_and_gradients() -> None:
    x = torch.tensor([[1.0, 2.0]])
    difference = forward_backward_difference(lambda x: x + 0.5, lambda x: x, x)
    assert difference == (0.5, 0.0)
    assert str(difference) == "fwd diff: 5.00e-01\nbwd diff: 0.00e+00"
    other = forward_backward_difference(lambda x: x * 1, lambda x: x * 3 - 2 * x.detach(), x)
    assert other.backward > 0.1
    assert not x.requires_grad


@devices
def test_timing_has_one_number_a_repeat_and_adds_up(device: str) -> None:
    timing = time_forward_backward(
        partita.cross_entropy, *sample_labels(device=device), repeats=4, warmup=1
    )
    assert [len(times) for times in timing] == [4, 4, 4]
    for forward, backward, total in zip(*timing, strict=True):
        assert forward > 0 < backward
        assert total == pytest.approx(forward + backward, rel=1e-2)


def test_timing_refuses_what_it_cannot_time() -> None:
    with raises(r"ValueError: inputs: expected a floating tensor among them, got none$"):
        time_forward_backward(torch.neg, torch.ones(2, dtype=torch.int64))
    with raises("ValueError: repeats: expected at least 1, got 0$"):
        time_forward_backward(torch.neg, torch.ones(2), repeats=0)


def test_report_prints_mean_and_range() -> None:
    out = io.StringIO()
    report(Timing((1.26, 1.26), (2.0, 2.28), (3.26, 3.54)), out)
    assert out.getvalue().splitlines() == [
        "fwd: 1.26ms (1.26-1.26ms)",
        "bwd: 2.14ms (2.00-2.28ms)",
        "tot: 3.40ms (3.26-3.54ms)",
    ]


@devices
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("edge", EDGES)
def test_edges_are_what_their_names_say(edge: str, dtype: torch.dtype, device: str) -> None:
    x = edge_rows(edge, 6, 40, dtype=dtype, device=device)
    assert (x.dtype, x.device.type) == (dtype, device)
    assert not x.isnan().any()
    assert torch.equal(x, edge_rows(edge, 6, 40, dtype=dtype, device=device))
    shapes = {"one_column": (6, 1), "no_rows": (0, 40)}
    assert x.shape == shapes.get(edge, (6, 40))
    strides = {
        "transposed": (1, 6),
        "framed": (43, 1),
        "every_other": (80, 2),
        "one_row_expanded": (0, 1),
        "one_column_expanded": (40, 0),
    }
    assert x.stride() == strides.get(edge, x.stride())
    infinite = {"leading_inf": 35 * 6, "inf_rows": 3 * 40}
    if edge != "scattered_inf":
        assert int(x.isinf().sum()) == infinite.get(edge, 0)


def test_an_unknown_edge_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^edge: expected one of plain, .*, got 'round'$"):
        edge_rows("round")


def test_samples_of_the_seeds() -> None:
    assert sample_rows().shape == (1823, 781)
    logits, labels = sample_labels()
    assert (logits.shape, labels.shape, labels.dtype) == ((4, 10), (4,), torch.int64)
    x = sample_rows(2, 3, dtype=torch.float64)
    assert torch.equal(x.half(), sample_rows(2, 3, dtype=torch.float16))
