"""The benchmark of losses from hidden states: sizes, verdicts, calls of the peers, and tables."""

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.bench import (
    CPU,
    inputs_of,
    installed,
    machine_with,
    note_of_wrong,
    print_tables,
    row_of,
    run,
    run_as,
    settings_with,
    stand_in,
    texts_of,
    with_gradient_times,
)
from helpers.rows import devices
from torch import Tensor

import partita
from partita.bench import heads, picture, providers, report, rows, support
from partita.bench.case import Attempt, Case, Function, Provider
from partita.bench.providers import PARTITA_FAST, PARTITA_LEAN, PRODUCTS, TORCH
from partita.ops.linear_heads.plan import MemoryPlan

CASE = heads.LinearCrossEntropy("linear_cross_entropy", torch.float32, 96, 16, 300)
DIVERGENCE = heads.LinearDivergence("linear_divergence", torch.float32, 96, 16, 300, 0.5)
PARTS = report.PARTS[:4]


def test_inputs() -> None:
    hidden, matrix, target = inputs = inputs_of(CASE)
    assert (hidden.shape, matrix.shape, target.shape) == ((96, 16), (300, 16), (96,))
    assert float((hidden @ matrix.T).std()) == pytest.approx(1, rel=0.1)
    assert int(target.min()) >= 0 and int(target.max()) < 300
    assert all(torch.equal(a, b) for a, b in zip(inputs, inputs_of(CASE), strict=True))
    assert CASE.bytes == 4 * 96 * 300 and not CASE.moves


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [*heads.FULL_SIZES, *heads.SIZES.cpu, *heads.SIZES.cpu_quick])
def test_plans_of_ours(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    def plan(budget: int) -> MemoryPlan:
        return partita.linear_cross_entropy_plan(*size, dtype, memory_budget=budget)

    fast = plan(heads.fast_budget())
    assert (fast.name, fast.chunk) == ("fast", size[0])
    budget = heads._lean_budget(*size, dtype)
    assert plan(budget).name == "lean"
    assert budget == 7 * 2**26 or plan(2 * budget).name == "fast"
    if dtype == torch.bfloat16 and size[2] > 100000:
        assert budget == 7 * 2**26


def test_a_vocabulary_too_small_for_a_lean_plan() -> None:
    for size in ((128, 64, 2), (1, 64, 16), (5, 3, 128)):
        budget = heads._lean_budget(*size, torch.bfloat16)
        plan = partita.linear_cross_entropy_plan(*size, torch.bfloat16, memory_budget=budget)
        assert plan.name == "fast"
        case = heads.LinearCrossEntropy("linear_cross_entropy", torch.bfloat16, *size)
        assert [row.part for row in run([case], PARTITA_LEAN) if row.timing] == list(PARTS)


def test_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "ELEMENTS_AT_ONCE", 7 * 300)
    inputs = inputs_of(CASE)
    leaves = [tensor.double().requires_grad_() for tensor in inputs[:2]]
    expected = heads.composed_loss(*leaves, inputs.target)
    gradients = torch.autograd.grad(expected, leaves)
    loss, _, samples, _ = CASE.truth(inputs)
    torch.testing.assert_close(loss, expected.detach())
    for sample in samples:
        torch.testing.assert_close(sample.truth, gradients[sample.leaf][sample.where])
    tokens, labels, others = samples
    assert (tokens.leaf, labels.leaf, others.leaf) == (0, 1, 1)
    assert (len(tokens.where), len(labels.where), len(others.where)) == (64, 32, 32)
    assert (int(tokens.where[0]), int(tokens.where[-1])) == (0, 95)
    assert torch.isin(labels.where, inputs.target).all()
    assert not torch.isin(others.where, inputs.target).any()


def test_truth_where_every_class_is_a_label() -> None:
    case = dataclasses.replace(CASE, vocabulary=2)
    samples = case.truth(inputs_of(case)).gradients
    assert [(sample.leaf, len(sample.where)) for sample in samples] == [(0, 64), (1, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@devices
def test_ours_and_pytorch_are_right(device: str, dtype: torch.dtype) -> None:
    who = (PARTITA_FAST, PARTITA_LEAN, PRODUCTS, TORCH)
    rows = run([dataclasses.replace(CASE, dtype=dtype)], *who, machine=machine_with(device))
    measured = [(row.provider, row.part) for row in rows if row.timing]
    assert measured == [(each.name, part) for each in who for part in PARTS]
    for row in rows:
        if row.provider == "products":
            assert math.isnan(row.error)
        else:
            assert row.error <= 16 * torch.finfo(dtype).eps
        assert (row.extra_memory is not None) == (device == "cuda")


def test_the_products() -> None:
    hidden, matrix, target = inputs_of(CASE)
    leaves = [hidden.requires_grad_(), matrix.requires_grad_()]
    function = heads.products()
    for _ in range(2):
        gradients = torch.autograd.grad(function(*leaves, target), leaves)
        logits = (hidden @ matrix.T).detach()
        torch.testing.assert_close(gradients[0], logits @ matrix)
        torch.testing.assert_close(gradients[1], logits.T @ hidden)


def bent(
    loss: float = 1.0, leaf: int = 0, rows: Any = ..., factor: float = 1.0
) -> Callable[..., Tensor]:
    """Return the loss times a factor, with one gradient that is wrong in some rows."""

    def function(*inputs: Tensor) -> Tensor:
        right = heads.composed_loss(*inputs)
        return right + (loss - 1) * right.detach()

    return with_gradient_times(factor, function, leaf, rows)


@pytest.mark.parametrize(
    "changes",
    [{"loss": 1.001}, {"leaf": 0, "factor": 0.999}, {"leaf": 1, "factor": 1.001}],
    ids=str,
)
def test_the_bound_of_peers_is_looser_than_the_error_of_pytorch(changes: dict[str, float]) -> None:
    assert all(row.timing for row in run_as("another", CASE, bent(**changes)))
    note_of_wrong(CASE, bent(**changes), "partita-fast")


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": 1.1},
        {"loss": math.nan},
        *({"leaf": leaf, "factor": factor} for leaf in (0, 1) for factor in (0.0, -1.0, math.nan)),
    ],
    ids=str,
)
def test_the_wrong_are_not_timed(changes: dict[str, float]) -> None:
    note_of_wrong(CASE, bent(**changes))


def test_the_place_of_an_error_is_told() -> None:
    assert " at [95, " in note_of_wrong(CASE, bent(leaf=0, rows=slice(95, 96), factor=2.0))


def test_small_gradients_may_be_left_out_by_others_alone() -> None:
    *_, others = CASE.truth(inputs_of(CASE)).gradients
    without = bent(leaf=1, rows=others.where, factor=0.0)
    rows = [*run_as("another", CASE, without), *run_as("partita-lean", CASE, without)]
    assert [row.error for row in rows] == [pytest.approx(1.0)] * 5
    assert [bool(row.timing) for row in rows] == [True] * 4 + [False]


def test_what_pytorch_has_no_memory_for_is_judged_as_peers_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*inputs: Tensor) -> Tensor:
        if inputs[0].dtype == torch.float64:  # a part of the truth
            return heads.composed_loss(*inputs)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setitem(heads.TORCH, "linear_cross_entropy", none)
    rows = run([CASE], PARTITA_FAST)
    rows += run_as("partita-lean", CASE, bent(factor=0.8)) + run_as("torch", CASE, none)
    assert [row.note.partition(":")[0] for row in rows] == [""] * 4 + ["wrong", "refuses"]


def test_times_the_products_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row_of("products", CASE, 2.0, memory=2**29),
        row_of("partita-fast", CASE, 2.1, memory=2**30),
        row_of("torch", CASE, 5.0, memory=3 * 2**30),
        row_of("cce", CASE, None),
    ]
    print_tables([*rows, row_of("torch", CASE, 5.0, "inference")])
    printed = capsys.readouterr().out
    title = "linear_cross_entropy fp32"
    times = printed.partition(f"{title}, total: times the products\n")[2].splitlines()
    assert times[0].split()[-4:] == ["products", "partita-fast", "torch", "cce"]
    assert times[2].split() == ["96", "×", "16", "×", "300", "1.00", "1.05", "2.50", "refuses"]
    memory = printed.partition(f"{title}: extra memory, GiB\n")[2].splitlines()
    assert memory[2].split()[-4:] == ["0.50", "1.00", "3.00", "refuses"]
    assert all(word not in printed for word in ("inference", "faster", "percent"))
    print_tables([row_of("torch", CASE, 5.0)])
    assert capsys.readouterr().out == ""


def test_a_picture_without_a_limit(tmp_path: Path) -> None:
    larger = dataclasses.replace(CASE, vocabulary=400)
    rows = [
        row_of(name, case, 2.0)
        for case in (CASE, larger)
        for name in ("partita-fast", "products", "torch")
    ]
    panels = picture.panels(rows)
    assert panels == [rows]
    (tmp_path / "x.svg").write_bytes(picture.render(panels, CPU, "svg"))
    texts = texts_of(tmp_path / "x.svg")
    title = "Cross-entropy from hidden states and its gradients, fp32 logits, a CPU"
    assert {title, "partita-fast", "products", "torch", "96 × 16 ×", "400"} <= texts
    assert "copy" not in texts


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has no such op")
def test_the_op_of_pytorch() -> None:
    torch_linear = providers.choose(["torch-linear"])[-1]
    assert torch_linear.missing() is None
    cases = [dataclasses.replace(CASE, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    rows = run(cases, torch_linear)
    assert [row.part for row in rows if row.timing] == [*PARTS, *PARTS]


def test_liger_is_called_as_it_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(hidden: Tensor, matrix: Tensor, target: Tensor) -> tuple[Tensor, None, None, None]:
        assert (hidden.shape, matrix.shape, target.shape) == ((96, 16), (300, 16), (96,))
        return heads.composed_loss(hidden, matrix, target), None, None, None

    members = {"LigerFusedLinearCrossEntropyFunction": SimpleNamespace(apply=apply)}
    stand_in(monkeypatch, "liger_kernel.ops.fused_linear_cross_entropy", **members)
    assert all(row.timing for row in run([CASE], installed("liger")))


def test_quack_is_imported_with_a_key_for_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own function keys what it knows and raises for the rest."""

    def strict(value: object, seen: set[object]) -> object:
        if isinstance(value, tuple):
            return tuple(identity.semantic_value_key(part, seen) for part in value)
        if isinstance(value, int):
            return value
        raise TypeError("no key")

    identity = SimpleNamespace(semantic_value_key=strict)
    monkeypatch.setitem(sys.modules, "quack.gemm_runtime.identity", identity)
    members = {"chunked_linear_cross_entropy": heads.composed_loss}
    stand_in(monkeypatch, "quack.linear_cross_entropy", **members)
    for _ in range(2):  # the second import adds no second wrapper
        assert heads.quack() is heads.composed_loss
    key = identity.semantic_value_key((3, 4.0), set())
    assert key == (3, ("type", "builtins", "float"))
    assert identity.semantic_value_key.__wrapped__ is strict
    half = dataclasses.replace(CASE, dtype=torch.bfloat16)
    assert all(row.timing for row in run([half], installed("quack")))
    assert heads.beyond_quack(inputs_of(CASE)) is not None
    assert installed("quack").refusal("softmax", (torch.zeros(2),)) is None


def test_what_the_kernels_of_liger_in_cute_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    members = {"liger_fused_linear_cross_entropy_sm90": heads.composed_loss}
    stand_in(monkeypatch, name, **members)
    assert heads.liger_cute() is heads.composed_loss
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))

    def reason(
        device: str, dtype: torch.dtype = torch.bfloat16, tokens: int = 128, classes: int = 512
    ) -> str | None:
        hidden = SimpleNamespace(device=torch.device(device), dtype=dtype)
        inputs = heads.LinearInputs(hidden, torch.empty(classes, 1), torch.empty(tokens))
        return heads.beyond_liger_cute(inputs)

    assert reason("cuda:0") is None
    assert reason("cuda:1") == reason("cpu") == "needs a GPU of compute capability 9.0"
    assert reason("cuda:0", torch.float16) == "takes bf16 only"
    assert "128 tokens" in str(reason("cuda:0", tokens=120))
    assert "256 classes" in str(reason("cuda:0", classes=500))


@pytest.mark.parametrize(
    ("names", "options"),
    [(("CCE",), {"filter_eps": None}), (("CCE", "CCE_EXACT"), {"impl": "cce_exact"})],
    ids=["released", "newer"],
)
def test_cut_cross_entropy_is_called_as_it_wants_it(
    names: tuple[str, ...], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def loss(e: Tensor, c: Tensor, targets: Tensor, **given: object) -> Tensor:
        told.append(given)
        return heads.composed_loss(e, c, targets)

    members = {"LinearCrossEntropyImpl": SimpleNamespace(**dict.fromkeys(names))}
    stand_in(monkeypatch, "cut_cross_entropy", linear_cross_entropy=loss, **members)
    for name, expected in (("cce", {}), ("cce-exact", options)):
        told.clear()
        assert all(row.timing for row in run([CASE], installed(name)))
        assert told and all(given == expected for given in told)


def test_what_cut_cross_entropy_cannot_take() -> None:
    def reason(device: str, dtype: torch.dtype) -> str | None:
        hidden = SimpleNamespace(device=torch.device(device), dtype=dtype)
        inputs = inputs_of(CASE)
        return heads.beyond_cut_cross_entropy(inputs._replace(hidden=hidden))

    assert reason("cuda", torch.bfloat16) is reason("cuda", torch.float16) is None
    assert reason("cuda", torch.float32) == "takes fp16 and bf16 only"
    assert reason("cpu", torch.bfloat16) == "needs a GPU"


def failed(case: Case, function: Function, name: str) -> list[bool]:
    """Return which gradients and results of a function are wrong, as those of this provider."""
    inputs = inputs_of(case)
    attempt = Attempt(function, inputs, Provider(name, {}))
    return [verdict.failed for verdict in case.verdicts(attempt, case.standard(inputs))]


@pytest.mark.parametrize("beta", heads.BETAS)
def test_the_chunked_divergence_is_right(beta: float) -> None:
    case = dataclasses.replace(DIVERGENCE, beta=beta)
    assert failed(case, heads.chunked_divergence, "chunked") == [False] * 3


def test_wrong_divergences_are_found() -> None:
    ours = heads.composed_divergence

    def without_gradient(*inputs: Any) -> Tensor:
        loss = ours(*inputs)
        return loss.detach() + 0 * (inputs[0].sum() + inputs[1].sum())

    case = dataclasses.replace(DIVERGENCE, beta=0.0)
    assert failed(case, lambda *x: 1.2 * ours(*x), "peer") == [True] * 3
    assert failed(case, without_gradient, "peer") == [True, False, False]
    assert failed(case, lambda *x: 1.001 * ours(*x), "partita-fast") == [True] * 3


def test_liger_computes_divergences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's function takes labels and beta after the heads, and beta means the same."""
    called = []

    class Function:
        @staticmethod
        def apply(*arguments: Any) -> Tensor:
            called.append(arguments)
            return heads.composed_divergence(*arguments[:4], arguments[5])

    stand_in(monkeypatch, "liger_kernel.ops.fused_linear_jsd", LigerFusedLinearJSDFunction=Function)
    function = heads.liger_divergence()
    assert not any(failed(DIVERGENCE, function, "liger"))
    assert all(arguments[4] is None for arguments in called)


def test_sizes_and_the_yardstick_of_divergences() -> None:
    first, *found = heads.divergence_cases(settings_with(dtypes=()))
    assert first.op == "divergence" and first.dtype == torch.bfloat16
    found = [case for case in found if case.op == "linear_divergence"]
    assert [case.beta for case in found] == list(heads.BETAS)
    assert {case.dtype for case in found} == {torch.bfloat16}
    inputs = inputs_of(DIVERGENCE)
    function = PRODUCTS.ops["linear_divergence"]()
    assert failed(DIVERGENCE, function, "products") == []
    leaf = inputs.hidden.clone().requires_grad_()
    loss = function(leaf, *inputs[1:])
    (grad,) = torch.autograd.grad(loss, leaf)
    expected = inputs.hidden @ inputs.matrix.T @ inputs.matrix
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


def test_log_probabilities() -> None:
    case = rows.Logprobs("logprobs", torch.float32, 4, 60)
    assert inputs_of(case).target.shape == (4, rows.CLASSES)
    assert failed(case, partita.logprobs, "partita") == [False] * 2
    assert failed(case, lambda *x: 1.1 * partita.logprobs(*x), "torch") == [True] * 2
    assert case.moves["total"].bytes == 3 * case.bytes


def test_recorded_supports() -> None:
    case = support.LinearSupport("linear_support_stats", torch.float32, 150, 16, 20_000)
    inputs = inputs_of(case)
    numbers = inputs.offsets.diff()
    assert numbers.min() >= 1 and numbers.max() == 512 and len(inputs.ids) == numbers.sum()
    assert failed(case, support.mean_loss, "partita") == [False] * 5
    assert failed(case, support.composed_loss, "torch") == [False] * 5

    def without_ids(*x: Tensor) -> Tensor:
        return support.mean_loss(*x[:3], x[3][:0], torch.zeros_like(x[4]))

    assert sum(failed(case, without_ids, "partita")) >= 4
    assert not any(failed(case, support.products_of_head(), "products"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_classes(dtype: torch.dtype) -> None:
    case = heads.LinearTruncated("linear_truncated_stats", dtype, 96, 64, 2000)
    assert failed(case, heads.truncated_loss, "partita") == [False] * 5
    assert failed(case, heads.composed_truncated_loss, "torch") == [False] * 5
    assert any(failed(case, heads.composed_loss, "partita"))  # of all classes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_beside_a_frozen_matrix(dtype: torch.dtype) -> None:
    case = heads.LinearLoRA("linear_cross_entropy_lora", dtype, 96, 64, 2000)
    assert failed(case, heads.lora_loss, "partita") == [False] * 6
    assert failed(case, heads.composed_lora_loss, "torch") == [False] * 6
    assert not any(failed(case, heads.frozen_products(), "products"))

    def without_lora(hidden: Tensor, A: Tensor, B: Tensor, *others: Tensor) -> Tensor:
        return heads.composed_loss(hidden, *others) + 0 * (A.sum() + B.sum())

    assert any(failed(case, without_lora, "partita"))


@pytest.mark.parametrize("beta", heads.BETAS)
def test_divergences_of_logits(beta: float) -> None:
    case = heads.DivergenceRows("divergence", torch.float32, 5, 60, beta)
    for provider in (providers.PARTITA, providers.TORCH):
        assert failed(case, provider.ops["divergence"](), provider.name) == [False] * 3
    ours = providers.PARTITA.ops["divergence"]()
    assert failed(case, lambda *x: 1.001 * ours(*x), "partita") == [True] * 3
    assert case.bytes == 5 * 60 * 4
    assert {part: moves.bytes for part, moves in case.moves.items()} == {
        "inference": 2 * case.bytes,
        "total": 3 * case.bytes,
    }
