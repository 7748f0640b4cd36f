"""The benchmarks of divergences of two heads and of log-probabilities."""

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import partita
from partita.bench import heads, providers, rows
from partita.bench.case import Attempt, Buffers, Function, Provider, Settings

CASE = heads.LinearDivergence("linear_divergence", torch.float32, 96, 16, 300, 0.5)
SETTINGS = Settings((), (), None, True, False, 2, torch.device("cpu"))


def verdicts(function: Function, name: str, beta: float) -> list[Any]:
    case = heads.LinearDivergence("linear_divergence", torch.float32, 96, 16, 300, beta)
    inputs = case.inputs(Buffers(torch.device("cpu")))
    provider = Provider(name, {"linear_divergence": lambda: function})
    return list(case.verdicts(Attempt(function, inputs, provider), case.standard(inputs)))


@pytest.mark.parametrize("beta", heads.BETAS)
def test_all_implementations_agree(beta: float) -> None:
    for name, function in (
        ("partita-fast", heads.partita_divergence(heads.fast_budget)),
        ("partita-lean", heads.partita_divergence(heads.lean_divergence_budget)),
        ("torch", heads.composed_divergence),
        ("chunked", heads.chunked_divergence),
    ):
        found = verdicts(function, name, beta)
        assert len(found) == 3 and not any(verdict.failed for verdict in found)


def test_wrong_results_are_found() -> None:
    ours = heads.composed_divergence

    def without_gradient(*inputs: Any) -> Tensor:
        loss = ours(*inputs)
        return loss.detach() + 0 * (inputs[0].sum() + inputs[1].sum())

    assert [v.failed for v in verdicts(lambda *x: 1.2 * ours(*x), "peer", 0.0)] == [True] * 3
    assert [v.failed for v in verdicts(without_gradient, "peer", 0.0)] == [False, False, True]
    off = [v.failed for v in verdicts(lambda *x: 1.001 * ours(*x), "partita-fast", 0.0)]
    assert off == [True] * 3


def test_liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's function takes labels and beta after the heads, and beta means the same."""
    called = []

    class Function:
        @staticmethod
        def apply(*arguments: Any) -> Tensor:
            called.append(arguments)
            return heads.composed_divergence(*arguments[:4], arguments[5])

    module = types.ModuleType("liger_kernel.ops.fused_linear_jsd")
    module.LigerFusedLinearJSDFunction = Function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_linear_jsd", module)
    function = heads.liger_divergence()
    assert not any(verdict.failed for verdict in verdicts(function, "liger", 0.5))
    assert all(arguments[4] is None for arguments in called)


def test_sizes_and_the_yardstick() -> None:
    found = [case for case in heads.divergence_cases(SETTINGS) if case.op == "linear_divergence"]
    assert [case.beta for case in found] == list(heads.BETAS)
    assert {case.dtype for case in found} == {torch.bfloat16}
    inputs = CASE.inputs(Buffers(torch.device("cpu")))
    function = providers.PRODUCTS.ops["linear_divergence"]()
    assert not list(
        CASE.verdicts(Attempt(function, inputs, providers.PRODUCTS), CASE.standard(inputs))
    )
    leaf = inputs.hidden.clone().requires_grad_()
    loss = function(leaf, *inputs[1:])
    (grad,) = torch.autograd.grad(loss, leaf)
    expected = inputs.hidden @ inputs.matrix.T @ inputs.matrix
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


def test_log_probabilities() -> None:
    case = rows.Logprobs("logprobs", torch.float32, 4, 60)
    inputs = case.inputs(Buffers(torch.device("cpu")))
    assert inputs.target.shape == (4, rows.CLASSES)
    own = case.standard(inputs)
    found = list(case.verdicts(Attempt(partita.logprobs, inputs, providers.PARTITA), own))
    assert len(found) == 2 and not any(verdict.failed for verdict in found)
    scaled = list(
        case.verdicts(Attempt(lambda *x: 1.1 * partita.logprobs(*x), inputs, providers.TORCH), own)
    )
    assert all(verdict.failed for verdict in scaled)
    assert case.moves["total"].bytes == 3 * case.bytes


@pytest.mark.parametrize("beta", heads.BETAS)
def test_divergences_of_logits(beta: float) -> None:
    case = heads.DivergenceRows("divergence", torch.float32, 5, 60, beta)
    inputs = case.inputs(Buffers(torch.device("cpu")))
    own = case.standard(inputs)
    for provider in (providers.PARTITA, providers.TORCH):
        found = list(case.verdicts(Attempt(provider.ops["divergence"](), inputs, provider), own))
        assert len(found) == 3 and not any(verdict.failed for verdict in found)
    ours = providers.PARTITA.ops["divergence"]()
    scaled = case.verdicts(Attempt(lambda *x: 1.001 * ours(*x), inputs, providers.PARTITA), own)
    assert all(verdict.failed for verdict in scaled)
    assert case.bytes == 5 * 60 * 4
    assert {part: moves.bytes for part, moves in case.moves.items()} == {
        "inference": 2 * case.bytes,
        "total": 3 * case.bytes,
    }
    first = next(iter(heads.divergence_cases(SETTINGS)))
    assert first.op == "divergence" and first.dtype == torch.bfloat16
