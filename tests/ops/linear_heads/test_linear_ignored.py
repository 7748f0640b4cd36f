"""The loss from hidden states whose rows are packed (`PARTITA_PACK_ROWS=1`)."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.linear import Batch, batch_of, budgets, check, ours, results
from helpers.memory import no_waits
from helpers.rows import kernel_devices

import partita
from partita.ops.cross_entropy.common import checked_options
from partita.ops.linear_heads import autograd, loss, packing
from partita.ops.linear_heads.plan import MemoryPlan

TOKENS, CLASSES = 20, 48  # classes and hidden size are multiples of 16
PATTERNS = {
    "none": [],
    "prefix": list(range(7)),
    "end": list(range(12, TOKENS)),
    "alternating": list(range(0, TOKENS, 2)),
    "all but one": [*range(9), *range(10, TOKENS)],
    "all": list(range(TOKENS)),
}
OPTIONS = {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 1e-2}


@pytest.fixture(autouse=True)
def spy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """Set the variable, and yield a mock that notes the calls of the op of packed rows.

    On a CPU PyTorch's grouped product serves the op too, and ignored rows are not left out before.
    """
    monkeypatch.setenv("PARTITA_PACK_ROWS", "1")
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if request.node.get_closest_marker("gpu") or params.get("device") == "cuda":
        if not packing.has_grouped_product(torch.device("cuda", 0)):
            pytest.skip("needs a GPU of sm_90 or sm_100")
    else:
        monkeypatch.setattr(packing, "has_grouped_product", lambda device: True)
        monkeypatch.setattr(loss, "_loss_without_ignored", loss._loss)
    op = autograd.packed_one_pass
    with mock.patch.object(autograd, "packed_one_pass", side_effect=op) as noted:
        yield noted


def batch(dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **others: bool) -> Batch:
    return batch_of(TOKENS, CLASSES, hidden=32, dtype=dtype, device=device, **others)


def with_ignored(x: Batch, ignored: list[int]) -> Batch:
    """Return the batch in which these labels, and no others, are ignored."""
    target = x.target.clamp(min=0)
    target[ignored] = -100
    return x._replace(target=target)


def train(x: Batch, plan: str = "fast", **options: Any) -> list[torch.Tensor]:
    """Return the loss and its gradients with the budget of this plan."""
    budget = budgets(x)[plan]
    return results(lambda x: ours(x, budget, **options), x)


@kernel_devices
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_labels_may_be_ignored(pattern: str, device: str, spy: mock.Mock) -> None:
    ignored = PATTERNS[pattern]
    for weighted, options in (
        (False, {"reduction": "mean"}),
        (True, {"reduction": "mean", **OPTIONS}),
        (True, {"reduction": "sum", **OPTIONS}),
    ):
        x = with_ignored(batch(weighted=weighted, device=device), ignored)
        if pattern != "all":
            check(x, budgets(x)["fast"], **options)
        first, second = train(x, **options), train(x, **options)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b) or (a.isnan().all() and b.isnan().all())
        total, grad, matrix = first
        assert total.isnan() == (pattern == "all" and options["reduction"] == "mean")
        assert pattern != "all" or total.nan_to_num() == 0
        assert not grad[ignored].any() and matrix.isfinite().all()
        assert (pattern == "all") == (not matrix.any())
    assert spy.call_count == (6 if pattern == "all" else 9)


@kernel_devices
@pytest.mark.parametrize("ignored", [0, 7, 15, TOKENS])
def test_chunks_of_packed_rows(ignored: int, device: str) -> None:
    """Chunks of 8 rows, of which some have no row, give what the plain op gives."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    x = with_ignored(batch(weighted=True, device=device), order[:ignored].tolist())
    head = (*x[:3], None, None, 0, False, *x[3:], None)
    no_others = (False, False, False)
    options = (-100, 0.1, 0.0, 1e-2, "mean" if ignored < TOKENS else "sum")
    plain = autograd.one_pass(*head, *options, TOKENS, True, True, *no_others, "triton")
    for chunk in (TOKENS, 8):
        for wanted in ((True, True), (True, False), (False, True))[: 3 if ignored == 7 else 1]:
            found = autograd.packed_one_pass(*head, *options, chunk, *wanted, *no_others, "triton")
            for a, b, want in zip(found, plain, (True, *wanted, *no_others), strict=True):
                assert a.dtype == b.dtype and a.shape == (b.shape if want else (0,))
                if want:
                    bound = 4 * torch.finfo(torch.bfloat16).eps * b.abs().max()
                    assert ((a.float() - b.float()).abs() <= bound).all()
            assert not wanted[0] or not found[1][x.target == -100].any()


@kernel_devices
def test_the_hidden_states_of_ignored_tokens_are_not_read(device: str) -> None:
    x = batch(device=device)
    ignored = x.target == -100
    spoiled = x._replace(input=x.input.masked_fill(ignored[:, None], torch.nan))
    for a, b in zip(train(spoiled), train(x), strict=True):
        assert torch.equal(a, b) and b.isfinite().all()


@kernel_devices
@pytest.mark.parametrize("wrong_label", [-1, CLASSES, 2**40])
def test_a_wrong_label_is_not_ignored(wrong_label, device, monkeypatch) -> None:
    """Its token and the matrix become NaN, and the other tokens of the batch stay as they are."""
    x = batch(device=device)
    budget = budgets(x)["fast"]
    bad = x._replace(target=x.target.index_fill(0, x.target.new_tensor([4]), wrong_label))
    f = lambda x: ours(x, budget, reduction="sum")  # noqa: E731
    monkeypatch.setenv("PARTITA_CHECK", "1")
    with pytest.raises(IndexError, match=str(wrong_label)):
        f(bad._replace(input=bad.input.clone().requires_grad_()))
    monkeypatch.setenv("PARTITA_CHECK", "0")
    (total, grad, matrix), (_, right, _) = results(f, bad), results(f, x)
    others = torch.arange(TOKENS, device=device) != 4
    assert total.isnan() and grad[4].isnan().all() and matrix.isnan().all()
    assert torch.equal(grad[others], right[others])


@kernel_devices
def test_strided_hidden_states_and_a_class_that_is_ignored(device: str, spy: mock.Mock) -> None:
    x = batch(device=device)
    x = x._replace(target=torch.arange(TOKENS, device=device) % 4)
    columns, padded = x.input.T.contiguous(), torch.nn.functional.pad(x.weight, (0, 16))
    expected = train(x, ignore_index=3)
    leaves = [columns.requires_grad_(), padded.requires_grad_()]
    total = partita.linear_cross_entropy(
        leaves[0].T, leaves[1][:, :32], x.target, ignore_index=3, memory_budget=budgets(x)["fast"]
    )
    by_columns, by_padded = torch.autograd.grad(total, leaves, expected[0].new_tensor(0.5))
    assert torch.equal(total, expected[0]) and spy.call_count == 2
    assert torch.equal(by_columns.T, expected[1]) and torch.equal(by_padded[:, :32], expected[2])
    assert not by_columns.T[x.target == 3].any() and by_columns.T[x.target == 2].any()


@kernel_devices
def test_a_denominator_and_more_than_one_backward_pass(device: str, spy: mock.Mock) -> None:
    x = batch(device=device)
    leaves = [x.input.requires_grad_(), x.weight.requires_grad_()]
    args = (None, None, checked_options(-100, 0.0, None, 0.0, "sum"), budgets(x)["fast"])
    quotient = loss.linear_loss(x.input, x.weight, x.target, *args, denominator=7.0)
    first = torch.autograd.grad(quotient, leaves, retain_graph=True)
    second = torch.autograd.grad(quotient, leaves, retain_graph=True)
    double = torch.autograd.grad(quotient, leaves, create_graph=True)
    assert spy.call_count == 2
    total = loss.linear_loss(x.input, x.weight, x.target, *args)
    torch.testing.assert_close(7 * quotient, total)
    gradients = torch.autograd.grad(total, leaves)
    for a, b, c, whole in zip(first, second, double, gradients, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(7 * a.float(), whole.float(), rtol=0.02, atol=1e-2)
        torch.testing.assert_close(c.float(), a.float(), rtol=0.02, atol=1e-2)


def without_gradient() -> list[torch.Tensor]:
    x = batch()
    with torch.no_grad():
        return [ours(x, budgets(x)["fast"])]


def by_reference() -> list[torch.Tensor]:
    with partita.backend("reference"):
        return train(batch())


def with_an_offset() -> list[torch.Tensor]:
    """Train a matrix that starts on no multiple of 32 bytes."""
    x = batch()
    memory = x.weight.new_empty(x.weight.numel() + 1)
    matrix = memory[1:].view_as(x.weight).copy_(x.weight).requires_grad_()
    # Without a gradient of the hidden states, a copy of these has memory of its own.
    total = ours(x._replace(weight=matrix), budgets(x)["fast"] + x.input.nbytes)
    return [total, *torch.autograd.grad(total, matrix)]


def compiled() -> list[torch.Tensor]:
    return results(torch.compile(lambda x: ours(x, 20_000), backend="aot_eager"), batch())


def of_sizes(classes: int, hidden: int) -> Batch:
    return batch_of(TOKENS, classes, hidden=hidden, dtype=torch.bfloat16)


PLAIN_CALLS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "bias": lambda: train(batch(bias=True)),
    "float16": lambda: train(batch(torch.float16)),
    "float32": lambda: train(batch(torch.float32)),
    "hidden size": lambda: train(of_sizes(CLASSES, 24)),
    "classes": lambda: train(of_sizes(41, 32)),
    "unreduced": lambda: train(batch(), reduction="none"),
    "small": lambda: train(batch(), "small"),
    "lean": lambda: train(of_sizes(336, 32), "lean"),
    "no gradient": without_gradient,
    "matrix": with_an_offset,
    "reference": by_reference,
    "compiled": compiled,
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_other_calls_take_the_plain_path(name, spy, monkeypatch) -> None:
    found = PLAIN_CALLS[name]()
    if name not in ("small", "compiled", "no gradient"):
        monkeypatch.setenv("PARTITA_PACK_ROWS", "0")
        assert all(map(torch.equal, found, PLAIN_CALLS[name]()))
        monkeypatch.setenv("PARTITA_PACK_ROWS", "1")
    assert not spy.called
    train(batch())
    assert spy.call_count == 1


def test_gpus_with_a_grouped_product(monkeypatch) -> None:
    monkeypatch.undo()
    serves = packing.has_grouped_product
    assert not serves(torch.device("cpu"))
    cuda = torch.device("cuda", 0)
    for major, cuda_version, expected in (
        (8, "13.0", False),
        (9, "13.0", True),
        (10, "13.0", True),
        (12, "13.0", False),
        (9, None, False),  # an AMD GPU
    ):
        with (
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(major, 0)),
            mock.patch.object(torch.version, "cuda", cuda_version),
        ):
            assert serves(cuda) is expected


def test_the_variable_is_read_at_each_call(spy, monkeypatch) -> None:
    for setting, calls in (("0", 0), ("1", 1), ("", 1), ("1", 2)):
        monkeypatch.setenv("PARTITA_PACK_ROWS", setting)
        train(batch())
        assert spy.call_count == calls
    monkeypatch.delenv("PARTITA_PACK_ROWS")
    train(batch())
    assert spy.call_count == 2
    budget = budgets(batch())["fast"]
    monkeypatch.setenv("PARTITA_PACK_ROWS", "yes")
    message = "^PARTITA_PACK_ROWS: expected 0, 1 or nothing, got 'yes'$"
    with pytest.raises(ValueError, match=message):
        ours(batch(), budget)
    with pytest.raises(ValueError, match=message):
        partita.linear_cross_entropy_plan(1, 16, 16, torch.bfloat16)


def test_the_plan_has_room_for_the_packed_rows(monkeypatch) -> None:
    def plans(*sizes: int, dtype=torch.bfloat16, **options: Any) -> list[MemoryPlan]:
        """Return the plan without packed rows and with them."""
        found = []
        for setting in ("0", "1"):
            monkeypatch.setenv("PARTITA_PACK_ROWS", setting)
            found.append(partita.linear_cross_entropy_plan(*sizes, dtype, **options))
        return found

    for sizes in ((8192, 4096, 128256), (16384, 2048, 262144)):
        plain, packed = plans(*sizes)
        assert (packed.name, packed.chunk) == (plain.name, plain.chunk)
        assert packed.workspace_bytes - plain.workspace_bytes == 2 * plain.chunk * sizes[1]
        budget = plain.workspace_bytes
        assert plans(*sizes, memory_budget=budget)[1].workspace_bytes <= budget
    sizes = (8192, 4096, 128256)
    for same in (
        plans(*sizes, reduced=False),
        plans(*sizes, parallel=True),
        plans(*sizes, input_grad=False, weight_grad=False),
        plans(*sizes, dtype=torch.float16),
        plans(*sizes, dtype=torch.float32),
        plans(8192, 4104, 128256),
        plans(8192, 4096, 128255),
        plans(0, 0, 0),
    ):
        assert same[0] == same[1]


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("classes", [32_768, 50_272])
@pytest.mark.parametrize("chunked", [False, True])
def test_large_batches(chunked, classes, share, spy, monkeypatch) -> None:
    """Nothing waits for the host, the workspace is that of the plan, and the bits are the same."""
    M, H, dtype = 4608, 512, torch.bfloat16
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(M, H, device="cuda", generator=g).to(dtype).requires_grad_()
    matrix = torch.randn(classes, H, device="cuda", generator=g).mul_(H**-0.5)
    matrix = matrix.to(dtype).requires_grad_()
    target = torch.randint(classes, (M,), device="cuda", generator=g)
    target[torch.rand(M, device="cuda", generator=g) < share] = -100
    plan = partita.linear_cross_entropy_plan
    budget = plan(M, H, classes, dtype).workspace_bytes
    if chunked:
        budget = 2200 * 2 * (classes + H) + 4 * classes * H + (96 + classes // 512) * M
        assert 2048 <= plan(M, H, classes, dtype, memory_budget=budget).chunk < M

    def train() -> tuple[torch.Tensor, ...]:
        options = {"reduction": "sum", "memory_budget": budget}
        total = partita.linear_cross_entropy(hidden, matrix, target, **options)
        return total, *torch.autograd.grad(total, (hidden, matrix))

    for _ in range(3):  # later calls of an op may be recorded
        train()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with no_waits():
        found = train()
        peak = torch.cuda.max_memory_allocated() - before
        second = train()
    assert spy.call_count == 5
    assert all(torch.equal(a, b) for a, b in zip(found, second, strict=True))
    assert peak <= 2 * (hidden.numel() + matrix.numel()) + budget + 2**21
    del second
    valid = target != -100
    monkeypatch.setenv("PARTITA_PACK_ROWS", "0")
    plain = train()
    monkeypatch.delenv("PARTITA_PACK_ROWS")
    assert all(torch.equal(a, b) for a, b in zip(train(), plain, strict=True))
    assert spy.call_count == 5
    for result, right in zip(found, plain, strict=True):
        assert (result.float() - right.float()).abs().max() <= 1e-2 * right.float().abs().max()
    assert not found[1][~valid].any() and found[1][valid].any(1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("chunked", [False, True])
def test_a_capture_serves_other_labels(chunked: bool) -> None:
    """One CUDA graph serves any number of ignored labels."""
    M, H, C, dtype = 4096, 256, 16_384, torch.bfloat16
    hidden = torch.randn(M, H, device="cuda").to(dtype).requires_grad_()
    matrix = torch.randn(C, H, device="cuda").mul_(0.06).to(dtype).requires_grad_()
    labels = torch.randint(C, (M,), device="cuda")
    target = labels.clone()
    budget = 2**31
    if chunked:
        budget = 2200 * 2 * (C + H) + 4 * C * H + (96 + C // 512) * M

    def train() -> tuple[torch.Tensor, ...]:
        total = partita.linear_cross_entropy(hidden, matrix, target, memory_budget=budget)
        return total, *torch.autograd.grad(total, (hidden, matrix))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train()
    for first in (0, 1000, 4000, 4096, 10):
        target.copy_(labels)
        target[:first] = -100
        graph.replay()
        for a, b in zip(captured, train(), strict=True):
            assert torch.equal(a, b) or (first == M and a.isnan().all() and b.isnan().all())
