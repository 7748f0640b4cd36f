"""Memory plans of losses from hidden states, and the memory that calls use."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.fresh import run_fresh
from helpers.linear import batch_of, ours
from helpers.memory import extra_memory
from helpers.rows import INTERPRETING

import partita
from partita.ops.linear_heads.autograd import LinearRows
from partita.ops.linear_heads.divergence import LinearDivergence
from partita.ops.linear_heads.logprobs import LinearLogprobs, LinearTopK
from partita.ops.linear_heads.truncated import LinearTruncated


def test_plans() -> None:
    plan, bf16 = partita.linear_cross_entropy_plan, torch.bfloat16
    sizes, product = (8192, 4096, 128256, bf16), 2 * 8192 * 4096 * 128256
    fast, lean = plan(*sizes), plan(*sizes, memory_budget=2**29)
    loss = plan(*sizes, input_grad=False, weight_grad=False)
    assert (fast.name, fast.chunk, fast.flops) == ("fast", 8192, 3 * product)
    assert (lean.name, lean.flops) == ("lean", 4 * product) and lean.workspace_bytes <= 2**29
    assert (loss.name, loss.flops) == ("loss", product) and loss.workspace_bytes <= 2**28
    assert plan(*sizes, weight_grad=False).flops == 2 * product
    many = (2**17, 4096, 128256, bf16)
    long = plan(*many, memory_budget=2**33)
    assert long.name == "fast" and 2048 <= long.chunk < 2**17 and long.workspace_bytes <= 2**33
    assert plan(*many, memory_budget=2**33, reduced=False).name == "lean"
    assert plan(2**17, 4096, 128256, torch.float16).name == "fast"
    with pytest.raises(
        ValueError, match=r"memory_budget: expected at least .* bytes for 8,192 tokens"
    ):
        plan(*sizes, memory_budget=2**20)
    with pytest.raises(ValueError, match="tokens: expected an int of at least 0, got -1"):
        plan(-1, 2, 3, torch.float32)


def test_plans_of_several_ranks() -> None:
    """They have the gradient of hidden states in fp32, sent and received, and a copy in bf16."""
    plan, sizes = partita.linear_cross_entropy_plan, (8192, 4096, 64128, torch.bfloat16)
    one, several = (plan(*sizes, parallel=parallel) for parallel in (False, True))
    assert several.workspace_bytes - one.workspace_bytes == (8 + 2) * 8192 * 4096
    frozen = plan(*sizes, parallel=True, input_grad=False)
    assert frozen.workspace_bytes - one.workspace_bytes == 2 * 8192 * 4096
    many = (2**17, 4096, 64128, torch.bfloat16)
    assert plan(*many, memory_budget=2**33, parallel=True).name == "lean"


@pytest.mark.parametrize(
    ("sizes", "dtype", "chunk", "gibibytes"),
    [
        ((8192, 4096, 128256), torch.bfloat16, 8192, 2.0),  # all logits
        ((16384, 1024, 128256), torch.bfloat16, 2048, 0.8),  # eight chunks of 0.5 GiB
        ((16384, 2048, 262144), torch.bfloat16, 2048, 2.1),  # the logits take 1 GiB
        ((32768, 4096, 128256), torch.bfloat16, 4096, 2.0),  # as much as the rounded gradient
        ((8192, 8192, 256000), torch.bfloat16, 8192, 4.0),  # all logits take less than the gradient
        ((16384, 4096, 128256), torch.float32, 2048, 1.1),  # no gradient beside the result
    ],
)
def test_the_default_workspace_recomputes_no_logits(
    sizes: tuple[int, int, int], dtype: torch.dtype, chunk: int, gibibytes: float
) -> None:
    plan = partita.linear_cross_entropy_plan(*sizes, dtype)
    assert (plan.name, plan.chunk) == ("fast", chunk)
    assert plan.workspace_bytes <= gibibytes * 2**30
    assert plan.flops == 6 * sizes[0] * sizes[1] * sizes[2]


def test_the_plan_says_why() -> None:
    plan, sizes = partita.linear_cross_entropy_plan, (16384, 2048, 262144, torch.bfloat16)
    assert plan(*sizes).reason == "the workspace holds chunks of tokens, but not all logits"
    assert plan(*sizes, memory_budget=2**34).reason == "the workspace holds all logits at once"
    assert "no chunk of 2,048 tokens" in plan(*sizes, memory_budget=2**30).reason
    assert "unreduced" in plan(*sizes, reduced=False).reason
    assert "without gradients" in plan(*sizes, input_grad=False, weight_grad=False).reason


@pytest.mark.gpu
@pytest.mark.parametrize("budget", [2**31, 700 * 2**20, 200 * 2**20])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_is_what_the_plan_promises(reduction: str, budget: int) -> None:
    """The results come on top: the gradients, and for `none` the small tensors of the loss."""
    sizes, dtype = (4096, 1024, 65_537), torch.bfloat16
    x = torch.randn(sizes[0], sizes[1], device="cuda", dtype=dtype, requires_grad=True)
    matrix = torch.randn(sizes[2], sizes[1], device="cuda", dtype=dtype).mul_(0.03).requires_grad_()
    target = torch.randint(sizes[2], (sizes[0],), device="cuda")
    plan = partita.linear_cross_entropy_plan(
        *sizes, dtype, memory_budget=budget, reduced=reduction == "mean"
    )
    assert plan.workspace_bytes <= budget

    def train() -> Any:
        loss = partita.linear_cross_entropy(
            x, matrix, target, reduction=reduction, memory_budget=budget
        )
        return torch.autograd.grad(loss.sum(), (x, matrix))

    gradients = 2 * (x.numel() + matrix.numel())
    assert extra_memory(train) <= gradients + plan.workspace_bytes + 2**20
    with torch.no_grad():
        promised = partita.linear_cross_entropy_plan(
            *sizes, dtype, input_grad=False, weight_grad=False
        ).workspace_bytes
        assert (
            extra_memory(lambda: partita.linear_cross_entropy(x, matrix, target))
            <= promised + 2**20
            <= 2**28
        )


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_more_than_2_31_logits() -> None:
    """There are three distinct tokens, so the logits of three rows give the expected result."""
    tokens, classes = 34_000, 65_537
    few, matrix = (
        torch.randn(3, 64, device="cuda", dtype=torch.bfloat16),
        torch.randn(classes, 64, device="cuda", dtype=torch.bfloat16).mul_(0.125),
    )
    target = torch.tensor([5, 65_536, 40_000], device="cuda")
    which = torch.arange(tokens, device="cuda") % 3
    expected = F.cross_entropy((few.double() @ matrix.double().T), target, reduction="none")[which]
    for reduction in ("none", "mean"):
        hidden = few[which].requires_grad_()
        loss = partita.linear_cross_entropy(
            hidden, matrix, target[which], reduction=reduction, memory_budget=2**34
        )
        (grad,) = torch.autograd.grad(loss.sum(), hidden)
        torch.testing.assert_close(
            loss.double(),
            expected if reduction == "none" else expected.mean(),
            rtol=2e-3,
            atol=1e-3,
        )
        assert torch.equal(
            grad[-3:].float().norm(dim=1) > 0, torch.ones(3, dtype=torch.bool, device="cuda")
        )
        torch.testing.assert_close(grad[which == 0][-1], grad[0])


@pytest.mark.skipif(INTERPRETING, reason="the CPU backend only")
def test_ignored_tokens_cost_no_memory_on_a_cpu() -> None:
    """The budget suffices for the tokens that are not ignored, and for no more."""
    x = batch_of(4000, 300)
    target = torch.full_like(x.target, -100)
    target[:20] = 7
    budget = 24 * 4 * 20 + 20 * 304 * 4
    loss = ours(x._replace(target=target), budget)
    torch.testing.assert_close(loss, F.cross_entropy(x.input[:20] @ x.weight.T, target[:20]))


@pytest.mark.parametrize("call", [partita.linear_cross_entropy, partita.linear_token_stats])
def test_a_budget_holds_on_a_cpu(call: Callable[..., Any]) -> None:
    """The peak of resident memory grows by less than the logits, which would take 250 MB."""
    code = f"""
import torch, partita
torch.set_num_threads(1)
h, w = torch.randn(2048, 64, requires_grad=True), torch.randn(32000, 64, requires_grad=True)
t = torch.randint(32000, (2048,))
def peak():
    lines = open("/proc/self/status")
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
def run(h, t):
    found = partita.{call.__name__}(h, w, t, memory_budget=2**26)
    (found if isinstance(found, torch.Tensor) else found.entropy.sum()).backward()
run(h[:256].detach().requires_grad_(), t[:256])
w.grad = None
open("/proc/self/clear_refs", "w").write("5")
before = peak()
run(h, t)
print(peak() - before)
"""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs Linux")
    assert float(run_fresh(code).stdout) < 150


ROOM = {"memory_budget": 2**25}
ONE_OF_SEVERAL: dict[Any, Callable[..., Any]] = {
    LinearRows: lambda x, w: partita.linear_token_stats(x, w, **ROOM).logprob,
    LinearLogprobs: lambda x, w: partita.linear_logprobs(x, w, torch.zeros(9, 2).long(), **ROOM),
    LinearTopK: lambda x, w: partita.linear_topk_logprobs(x, w, 2, **ROOM).logprobs,
    LinearTruncated: lambda x, w: partita.linear_truncated_stats(x, w, top_k=2, **ROOM).entropy,
    LinearDivergence: lambda x, w: partita.linear_divergence(x, w, x, w, reduction="none", **ROOM),
}


@pytest.mark.parametrize("function", ONE_OF_SEVERAL)
def test_unused_results_cost_no_memory_in_the_backward_pass(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch gives zeros for them otherwise, for the saved logits of all tokens too."""
    given: list[Any] = []
    backward = function.backward

    def noted(ctx: Any, *grads: Any) -> Any:
        given.extend(grads)
        return backward(ctx, *grads)

    monkeypatch.setattr(function, "backward", staticmethod(noted))
    x, w = torch.randn(9, 16, requires_grad=True), torch.randn(2**18, 16, requires_grad=True)
    ONE_OF_SEVERAL[function](x, w).sum().backward()
    assert sum(grad is not None for grad in given) == 1 and len(given) > 2
