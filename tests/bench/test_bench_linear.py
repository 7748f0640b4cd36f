"""The benchmark of losses from hidden states: sizes, verdicts, calls of the peers, and tables."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from helpers.bench import CPU, SETTINGS, devices, read, run
from torch import Tensor

import partita
from partita.__main__ import main
from partita.bench import heads, picture, providers, report
from partita.bench.case import Buffers, Provider
from partita.bench.measure import Timing
from partita.bench.providers import PARTITA_FAST, PARTITA_LEAN, PRODUCTS, TORCH
from partita.bench.runner import Row
from partita.cli.console import print_table
from partita.ops.linear_heads.plan import MemoryPlan

CASE = heads.LinearCrossEntropy("linear_cross_entropy", torch.float32, 96, 16, 300)
PARTS = report.PARTS[:4]


def named(name: str, function: Callable[..., Tensor]) -> Provider:
    return Provider(name, {"linear_cross_entropy": lambda: function})


def test_sizes() -> None:
    def shapes(**changes: object) -> list[tuple[int, ...]]:
        settings = dataclasses.replace(
            SETTINGS, **{"columns": (), "elements": None, "dtypes": (), **changes}
        )
        cases = list(heads.linear_cross_entropy_cases(settings))
        assert {case.dtype for case in cases} == {torch.bfloat16}
        return [(case.tokens, case.hidden, case.vocabulary) for case in cases]

    gpu = torch.device("cuda")
    full = [(8192, 4096, 128256), (16384, 2048, 262144), (8192, 2048, 32768), (4096, 4096, 128256)]
    assert shapes(device=gpu, quick=False) == full
    assert shapes(device=gpu) == full[2:3]
    assert shapes(quick=False) == [(256, 128, 4000)]
    assert shapes() == [(128, 64, 1000)]
    assert shapes(columns=(1, 50)) == [(128, 64, 2), (128, 64, 50)]
    assert shapes(elements=5000) == [(5, 64, 1000)]
    assert shapes(elements=10) == [(1, 64, 1000)]
    assert [
        case.dtype
        for case in heads.linear_cross_entropy_cases(dataclasses.replace(SETTINGS, columns=()))
    ] == list(SETTINGS.dtypes)


def test_inputs() -> None:
    hidden, matrix, target = inputs = CASE.inputs(Buffers(CPU.device))
    assert (hidden.shape, matrix.shape, target.shape) == ((96, 16), (300, 16), (96,))
    assert float((hidden @ matrix.T).std()) == pytest.approx(1, rel=0.1)
    assert int(target.min()) >= 0 and int(target.max()) < 300
    assert all(
        torch.equal(a, b) for a, b in zip(inputs, CASE.inputs(Buffers(CPU.device)), strict=True)
    )
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
        assert (
            partita.linear_cross_entropy_plan(*size, torch.bfloat16, memory_budget=budget).name
            == "fast"
        )
        case = heads.LinearCrossEntropy("linear_cross_entropy", torch.bfloat16, *size)
        assert [row.part for row in run(iter([case]), PARTITA_LEAN) if row.timing] == list(PARTS)


def test_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "ELEMENTS_AT_ONCE", 7 * 300)
    inputs = CASE.inputs(Buffers(CPU.device))
    leaves = [tensor.double().requires_grad_() for tensor in inputs[:2]]
    expected = heads.composed_loss(*leaves, inputs.target)
    gradients = torch.autograd.grad(expected, leaves)
    loss, samples = CASE.truth(inputs)
    torch.testing.assert_close(loss, expected.detach())
    for sample in samples:
        torch.testing.assert_close(sample.gradient, gradients[sample.leaf][sample.rows])
    tokens, labels, others = samples
    assert (tokens.leaf, labels.leaf, others.leaf) == (0, 1, 1)
    assert (len(tokens.rows), len(labels.rows), len(others.rows)) == (64, 32, 32)
    assert (int(tokens.rows[0]), int(tokens.rows[-1])) == (0, 95)
    assert (
        torch.isin(labels.rows, inputs.target).all()
        and not torch.isin(others.rows, inputs.target).any()
    )


def test_truth_where_every_class_is_a_label() -> None:
    _, samples = dataclasses.replace(CASE, vocabulary=2).truth(
        dataclasses.replace(CASE, vocabulary=2).inputs(Buffers(CPU.device))
    )
    assert [(sample.leaf, len(sample.rows)) for sample in samples] == [(0, 64), (1, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@devices
def test_ours_and_pytorch_are_right(device: str, dtype: torch.dtype) -> None:
    here = dataclasses.replace(CPU, device=torch.empty(0, device=device).device)
    rows = run(
        iter([dataclasses.replace(CASE, dtype=dtype)]),
        PARTITA_FAST,
        PARTITA_LEAN,
        PRODUCTS,
        TORCH,
        machine=here,
    )
    assert [(row.provider, row.part) for row in rows if row.timing] == [
        (name, part)
        for name in ("partita-fast", "partita-lean", "products", "torch")
        for part in PARTS
    ]
    for row in rows:
        assert (
            math.isnan(row.error)
            if row.provider == "products"
            else row.error <= 16 * torch.finfo(dtype).eps
        )
        assert (row.extra_memory is not None) == (device == "cuda")


def test_the_products() -> None:
    hidden, matrix, target = CASE.inputs(Buffers(CPU.device))
    leaves = [hidden.requires_grad_(), matrix.requires_grad_()]
    function = heads.products()
    for _ in range(2):
        gradients = torch.autograd.grad(function(*leaves, target), leaves)
        logits = (hidden @ matrix.T).detach()
        torch.testing.assert_close(gradients[0], logits @ matrix)
        torch.testing.assert_close(gradients[1], logits.T @ hidden)


def bent(
    loss: float = 1.0, leaf: int = 0, rows: slice = slice(None), factor: float = 1.0
) -> Callable[..., Tensor]:
    """Return the loss times a factor, with one gradient that is wrong in some rows."""

    def function(*inputs: Tensor) -> Tensor:
        *leaves, target = inputs
        scale = torch.ones_like(leaves[leaf])
        scale[rows] = factor
        leaves[leaf] = leaves[leaf].detach() + scale * (leaves[leaf] - leaves[leaf].detach())
        right = heads.composed_loss(*leaves, target)
        return right + (loss - 1) * right.detach()

    return function


@pytest.mark.parametrize(
    "changes",
    [{"loss": 1.001}, {"leaf": 0, "factor": 0.999}, {"leaf": 1, "factor": 1.001}],
    ids=str,
)
def test_the_bound_of_peers_is_looser_than_the_error_of_pytorch(
    changes: dict[str, float],
) -> None:
    assert all(row.timing for row in run(iter([CASE]), named("another", bent(**changes))))
    (row,) = run(iter([CASE]), named("partita-fast", bent(**changes)))
    assert row.timing is None and row.note.startswith("wrong: ")


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
    (row,) = run(iter([CASE]), named("another", bent(**changes)))
    assert row.timing is None and row.note.startswith("wrong: ")


def test_the_place_of_an_error_is_told() -> None:
    (row,) = run(iter([CASE]), named("another", bent(leaf=0, rows=slice(95, 96), factor=2.0)))
    assert row.note.startswith("wrong: ") and " at [95, " in row.note


def test_small_gradients_may_be_left_out_by_others_alone() -> None:
    _, _, others = CASE.truth(CASE.inputs(Buffers(CPU.device)))[1]
    without = bent(leaf=1, rows=others.rows, factor=0.0)
    rows = run(iter([CASE]), named("another", without), named("partita-lean", without))
    assert [row.error for row in rows] == [pytest.approx(1.0)] * 5
    assert [bool(row.timing) for row in rows] == [True] * 4 + [False]


def test_what_pytorch_has_no_memory_for_is_judged_as_peers_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*inputs: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    broken = named("torch", none)
    monkeypatch.setitem(heads.TORCH, "linear_cross_entropy", none)
    rows = run(iter([CASE]), PARTITA_FAST, named("partita-lean", bent(factor=0.8)), broken)
    assert [row.note.partition(":")[0] for row in rows] == [""] * 4 + ["wrong", "refuses"]


def row(
    provider: str,
    part: str,
    milliseconds: float | None,
    memory: int | None = None,
    case: heads.LinearCrossEntropy = CASE,
) -> Row:
    timing = None if milliseconds is None else Timing.of([milliseconds])
    return Row(
        case, provider, part if timing else "", timing, 0.0, memory, "" if timing else "refuses: no"
    )


def print_summary(rows: list[Row]) -> None:
    for table in report.summary(rows, CPU):
        print_table(*table)


def test_times_the_products_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("products", "total", 2.0, 2**29),
        row("partita-fast", "total", 2.1, 2**30),
        row("torch", "total", 5.0, 3 * 2**30),
        row("cce", "", None),
    ]
    print_summary([*rows, row("torch", "inference", 5.0)])
    printed = capsys.readouterr().out
    title = "linear_cross_entropy fp32"
    times = printed.partition(f"{title}, total: times the products\n")[2].splitlines()
    assert times[0].split()[-4:] == ["products", "partita-fast", "torch", "cce"]
    assert times[2].split() == ["96", "×", "16", "×", "300", "1.00", "1.05", "2.50", "refuses"]
    memory = printed.partition(f"{title}: extra memory, GiB\n")[2].splitlines()
    assert memory[2].split()[-4:] == ["0.50", "1.00", "3.00", "refuses"]
    assert (
        "inference" not in printed and "faster" not in printed and "percent" not in printed
    )  # products had no such part
    print_summary([row("torch", "total", 5.0)])
    assert capsys.readouterr().out == ""


def test_a_picture_without_a_limit(tmp_path: Path) -> None:
    larger = dataclasses.replace(CASE, vocabulary=400)
    rows = [
        row(name, "total", 2.0, case=case)
        for case in (CASE, larger)
        for name in ("partita-fast", "products", "torch")
    ]
    panels = picture.panels(rows)
    assert [panel.rows for panel in panels] == [rows]
    (tmp_path / "x.svg").write_bytes(picture.render(panels, CPU, "svg"))
    texts = {
        element.text
        for element in ElementTree.parse(tmp_path / "x.svg").iter()
        if element.tag.endswith("text")
    }
    assert {
        "partita-fast",
        "products",
        "torch",
        "96 × 16 ×",
        "400",
    } <= texts and "copy" not in texts


def test_table_csv_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--quick",
        "--repetitions",
        "2",
        "--peers",
        "torch,cce",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    assert main(["bench", "linear_cross_entropy", *arguments]) == 0
    measured = read(tmp_path / "bench.csv")[1]
    names = ("partita-fast", "partita-lean", "products", "torch")
    assert [(row["provider"], row["part"]) for row in measured] == [
        (name, part) for name in names for part in PARTS
    ]
    assert {
        (row["dtype"], row["tokens"], row["hidden"], row["vocabulary"]) for row in measured
    } == {("bf16", "128", "64", "1000")}
    for row in measured:
        assert (
            row["error"] == "" if row["provider"] == "products" else 0 < float(row["error"]) < 0.05
        )
    texts = {
        element.text
        for element in ElementTree.parse(tmp_path / "bench.svg").iter()
        if element.tag.endswith("text")
    }
    assert "Cross-entropy from hidden states and its gradients, bf16 logits, CPU" in texts
    printed = capsys.readouterr().out
    for part in PARTS:
        assert (
            f"\nlinear_cross_entropy bf16, {part}: times the products\n"
            "tokens × hidden × vocabulary  partita-fast" in printed
        )


def test_ours_must_be_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "OURS", (named("partita-lean", bent(factor=0.9)),))
    arguments = [
        "--quick",
        "--dtype",
        "fp64",
        "--repetitions",
        "2",
        "--device",
        "cpu",
        "--only-ours",
    ]
    assert main(["bench", "linear_cross_entropy", *arguments]) == 1
    assert capsys.readouterr().err.count("partita-lean wrong: ") == 1
