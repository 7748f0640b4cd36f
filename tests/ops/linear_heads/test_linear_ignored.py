"""Cross-entropy from hidden states whose labels are partly ignored: their rows cost nothing."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from helpers.linear import CLASSES, Batch, batch_of, budgets, check, ours, results
from helpers.rows import INTERPRETING, devices

import partita
from partita.ops.linear_heads import autograd
from partita.runtime.caches import clear_caches

HALF_TYPES = (torch.bfloat16, torch.float16)
# The grouped product serves GPUs alone.
PRODUCTS = ("own", "descriptor") if INTERPRETING else ("own", "descriptor", "grouped")
PATTERNS = {
    "none": [],
    "first": list(range(13)),
    "last": list(range(25, 40)),
    "scattered": list(range(0, 40, 3)),
    "all but one": [*range(17), *range(18, 40)],
    "all": list(range(40)),
}
variants = pytest.mark.parametrize("products", PRODUCTS)


@pytest.fixture(autouse=True)
def products_of_rows(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choose the products of packed rows by the parameter of the test."""
    if not INTERPRETING and request.node.callspec.params.get("device") == "cpu":
        pytest.skip("a CPU leaves out ignored tokens before it plans")
    launch = pytest.importorskip("partita.ops.linear_heads.gpu.packed")
    with mock.patch.object(launch, "PRODUCTS", request.getfixturevalue("products")):
        clear_caches()
        yield
    clear_caches()


def with_ignored(x: Batch, ignored: list[int]) -> Batch:
    """Return the batch in which these labels, and no others, are ignored."""
    target = x.target.clamp(min=0)
    target[ignored] = -100
    return x._replace(target=target)


@pytest.mark.interpreted
@devices
@variants
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_labels_may_be_ignored(pattern, reduction, dtype, products, device) -> None:
    x = batch_of(bias=True, weighted=True, dtype=dtype, device=device)
    x = with_ignored(x, PATTERNS[pattern])
    budget = budgets(x)["fast"]
    if pattern != "all" or reduction == "none":
        check(x, budget, reduction=reduction, label_smoothing=0.1, softcap=5.0, z_loss=1e-2)
    first, *grads = results(lambda x: ours(x, budget, reduction=reduction), x)
    second, *second_grads = results(lambda x: ours(x, budget, reduction=reduction), x)
    assert torch.equal(first.nan_to_num(), second.nan_to_num())
    assert all(torch.equal(a, b) for a, b in zip(grads, second_grads, strict=True))
    assert not grads[0][PATTERNS[pattern]].any()


@pytest.mark.interpreted
@devices
@variants
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_hidden_states_of_ignored_tokens_are_not_read(reduction, products, device) -> None:
    x = batch_of(dtype=torch.bfloat16, device=device)
    ignored = x.target == -100
    spoiled = x._replace(input=x.input.masked_fill(ignored[:, None], torch.nan))
    budget = budgets(x)["fast"]
    found, expected = (
        results(lambda x: ours(x, budget, reduction=reduction), batch) for batch in (spoiled, x)
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b) and b.isfinite().all()


@pytest.mark.interpreted
@devices
@variants
@pytest.mark.parametrize("ignored", [0, 13, 30, 40])
def test_chunks_of_packed_rows(ignored: int, products: str, device: str) -> None:
    """Chunks of 16 rows, of which some have no row, give what one chunk gives."""
    x = batch_of(40, bias=True, weighted=True, dtype=torch.bfloat16, device=device)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    x = with_ignored(x, order[:ignored].tolist())
    head, options = (*x, None), (-100, 0.1, 0.0, 1e-2, ignored < 40)
    wanted = (True, True, True)
    one, several = (
        autograd.one_pass(*head, *options, chunk, *wanted, "triton") for chunk in (40, 16)
    )
    assert len(one) == len(several) == 4
    for a, b in zip(several, one, strict=True):
        size = b.abs().max().item()
        bound = 4 * torch.finfo(torch.bfloat16).eps * size
        assert (a.float() - b.float()).abs().max() <= bound
    assert not several[1][x.target == -100].any()
    assert (ignored == 40) == (not several[2].any())


@pytest.mark.interpreted
@devices
@variants
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=["bfloat16", "float16"])
def test_a_wrong_label_counts(dtype: torch.dtype, products: str, device: str) -> None:
    """Its token and the matrix become NaN, and the other tokens of the batch stay as they are."""
    x = batch_of(dtype=dtype, device=device)
    budget = budgets(x)["fast"]
    with mock.patch.dict("os.environ", {"PARTITA_CHECK": "0"}):
        for wrong_label in (CLASSES,) if INTERPRETING else (-1, CLASSES, 2**40):
            bad = x._replace(target=x.target.index_fill(0, x.target.new_tensor([4]), wrong_label))
            loss, grad, matrix = results(lambda x: ours(x, budget, reduction="none"), bad)
            right, right_grad, _ = results(lambda x: ours(x, budget, reduction="none"), x)
            others = torch.arange(len(loss), device=device) != 4
            assert loss[4].isnan() and grad[4].isnan().all() and matrix.isnan().all()
            assert torch.equal(loss[others], right[others])
            assert torch.equal(grad[others], right_grad[others])


@pytest.mark.interpreted
@devices
@variants
def test_strided_hidden_states_and_a_label_that_is_ignored(products: str, device: str) -> None:
    """The ignored label is a class, and no row or column of the operands lies close together."""
    x = batch_of(21, 50, dtype=torch.bfloat16, device=device)
    x = x._replace(target=torch.arange(21, device=device) % 4)
    strided = x._replace(input=x.input.T.contiguous().T, weight=x.weight.T.contiguous().T)
    budget = budgets(x)["fast"]
    found, expected = (
        results(lambda x: ours(x, budget, ignore_index=3), batch) for batch in (strided, x)
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert not found[1][x.target == 3].any() and found[1][x.target == 2].any()


@pytest.mark.gpu
@variants
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("classes", "chunked"), [(32_768, False), (32_768, True), (50_257, False)])
def test_large_batches(classes, chunked, share, dtype, products) -> None:
    """Nothing waits for the host, the workspace is that of the plan, and the bits are the same."""
    M, H = 4608, 512
    if chunked and dtype == torch.float16:
        pytest.skip("fp16 has no chunks of tokens")
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(M, H, device="cuda", generator=g).to(dtype).requires_grad_()
    matrix = torch.randn(classes, H, device="cuda", generator=g).mul_(H**-0.5)
    matrix = matrix.to(dtype).requires_grad_()
    target = torch.randint(classes, (M,), device="cuda", generator=g)
    target[torch.rand(M, device="cuda", generator=g) < share] = -100
    plan = partita.linear_cross_entropy_plan
    budget = plan(M, H, classes, dtype).workspace_bytes
    if chunked:
        budget = 2200 * (2 * classes + 2 * H) + 4 * classes * H + (96 + classes // 512) * M
        assert 2048 <= plan(M, H, classes, dtype, memory_budget=budget).chunk < M

    def train() -> tuple[torch.Tensor, ...]:
        options = {"reduction": "sum", "memory_budget": budget}
        loss = partita.linear_cross_entropy(hidden, matrix, target, **options)
        return loss, *torch.autograd.grad(loss, (hidden, matrix))

    train()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = train()
        peak = torch.cuda.max_memory_allocated() - before
        second = train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, second, strict=True))
    gradients = 2 * (hidden.numel() + matrix.numel())
    assert peak <= gradients + budget + 2**21
    logits = hidden.detach().float() @ matrix.detach().float().T
    valid = target != -100
    dlogits = logits.softmax(-1)
    dlogits[torch.arange(M, device="cuda"), target.clamp(min=0)] -= 1.0
    dlogits *= valid[:, None]
    losses = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
    expected = losses, dlogits @ matrix.detach().float(), dlogits.T @ hidden.detach().float()
    for result, right in zip(found, expected, strict=True):
        error = (result.float() - right).abs().max()
        assert error <= 1e-2 * right.abs().max()
    assert not found[1][~valid].any()
