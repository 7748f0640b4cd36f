"""The calls of others' losses from hidden states, with stand-ins for their packages."""

import dataclasses
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from helpers.bench import CPU, run
from torch import Tensor

from partita.bench import heads, providers, report
from partita.bench.case import Buffers, Provider

CASE = heads.LinearCrossEntropy("linear_cross_entropy", torch.float32, 96, 16, 300)
PARTS = report.PARTS[:4]
has_torch_linear = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has no such op"
)


def peer(name: str) -> Provider:
    """Return the peer as if it were installed and took these inputs."""
    return dataclasses.replace(providers.choose([name])[-1], packages=(), beyond={})


@has_torch_linear
def test_the_op_of_pytorch() -> None:
    torch_linear = providers.choose(["torch-linear"])[-1]
    assert torch_linear.missing() is None
    rows = run(
        iter([dataclasses.replace(CASE, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]),
        torch_linear,
    )
    assert [row.part for row in rows if row.timing] == [*PARTS, *PARTS]


def test_liger_is_called_as_it_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(hidden: Tensor, matrix: Tensor, target: Tensor) -> tuple[Tensor, None, None, None]:
        assert (hidden.shape, matrix.shape, target.shape) == ((96, 16), (300, 16), (96,))
        return heads.composed_loss(hidden, matrix, target), None, None, None

    module = types.SimpleNamespace(
        LigerFusedLinearCrossEntropyFunction=types.SimpleNamespace(apply=apply)
    )
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_linear_cross_entropy", module)
    assert all(row.timing for row in run(iter([CASE]), peer("liger")))


def test_quack_is_imported_with_a_key_for_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own function keys what it knows and raises for the rest."""

    def strict(value: object, seen: set[object]) -> object:
        if isinstance(value, tuple):
            return tuple(identity.semantic_value_key(part, seen) for part in value)
        if isinstance(value, int):
            return value
        raise TypeError("no key")

    identity = types.SimpleNamespace(semantic_value_key=strict)
    module = types.SimpleNamespace(chunked_linear_cross_entropy=heads.composed_loss)
    monkeypatch.setitem(sys.modules, "quack.gemm_runtime.identity", identity)
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", module)
    for _ in range(2):  # the second import adds no second wrapper
        assert heads.quack() is heads.composed_loss
    key = identity.semantic_value_key((3, 4.0), set())
    assert key == (3, ("type", "builtins", "float"))
    assert identity.semantic_value_key.__wrapped__ is strict
    half = dataclasses.replace(CASE, dtype=torch.bfloat16)
    assert all(row.timing for row in run(iter([half]), peer("quack")))
    assert heads.beyond_quack(CASE.inputs(Buffers(CPU.device))) is not None
    assert peer("quack").refusal("softmax", (torch.zeros(2),)) is None


def test_what_the_kernels_of_liger_in_cute_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(liger_fused_linear_cross_entropy_sm90=heads.composed_loss)
    name = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
    monkeypatch.setitem(sys.modules, name, module)
    assert heads.liger_cute() is heads.composed_loss
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))

    def reason(
        device: str, dtype: torch.dtype = torch.bfloat16, tokens: int = 128, classes: int = 512
    ) -> str | None:
        hidden = types.SimpleNamespace(device=torch.device(device), dtype=dtype)
        return heads.beyond_liger_cute(
            heads.LinearInputs(hidden, torch.empty(classes, 1), torch.empty(tokens))
        )

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

    module = types.SimpleNamespace(
        linear_cross_entropy=loss,
        LinearCrossEntropyImpl=types.SimpleNamespace(**dict.fromkeys(names)),
    )
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", module)
    for name, expected in (("cce", {}), ("cce-exact", options)):
        told.clear()
        assert all(row.timing for row in run(iter([CASE]), peer(name)))
        assert told and all(given == expected for given in told)


def test_what_cut_cross_entropy_cannot_take() -> None:
    def reason(device: str, dtype: torch.dtype) -> str | None:
        hidden = types.SimpleNamespace(device=torch.device(device), dtype=dtype)
        return heads.beyond_cut_cross_entropy(
            CASE.inputs(Buffers(CPU.device))._replace(hidden=hidden)
        )

    assert reason("cuda", torch.bfloat16) is reason("cuda", torch.float16) is None
    assert reason("cuda", torch.float32) == "takes fp16 and bf16 only"
    assert reason("cpu", torch.bfloat16) == "needs a GPU"
