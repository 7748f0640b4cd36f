"""Fused models with adapters of PEFT on the head, beside the stock loss. They skip without PEFT."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.causal_lm import CLASSES, INPUT_IDS, LABELS, step
from helpers.configurations import SERVED_BY_NAME, model_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from partita.integrations.transformers import fuse, unfuse

transformers = pytest.importorskip("transformers", exc_type=ImportError)
peft = pytest.importorskip("peft", exc_type=ImportError)

FAMILIES = ("Llama", "Qwen2", "Gemma2", "Granite")
HEAD = {"target_modules": ["lm_head"]}


def stock_model(family: str = "Llama", bias: bool = False) -> Any:
    model = model_of(SERVED_BY_NAME[f"{family}ForCausalLM"])
    if bias:
        model.lm_head.bias = nn.Parameter(torch.randn(CLASSES))
    return model


def adapted(model: Any, **options: Any) -> Any:
    """Return the model with LoRA whose factors are no zeros."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, **options)
    return with_numbers(peft.get_peft_model(model, config))


def with_numbers(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def assert_alike(model: Any) -> None:
    """Compare loss and gradients with those of the model before `fuse`."""
    expected, gradients = step(unfuse(model))
    found, others = step(fuse(model))
    assert expected.logits is not None and found.logits is None
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    assert_alike(adapted(stock_model(family), **HEAD))


def test_adapters_beside_the_head() -> None:
    model = adapted(stock_model(), target_modules=["q_proj"])
    assert_alike(model)
    assert step(unfuse(model))[0].logits is not None


@pytest.mark.parametrize(
    "options",
    [
        {**HEAD, "lora_dropout": 0.3},
        {**HEAD, "use_rslora": True, "lora_alpha": 5},
        {**HEAD, "lora_bias": True},
        {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.filterwarnings("ignore:.*lora_bias")
def test_options(options: dict[str, Any], bias: bool) -> None:
    model = adapted(stock_model(bias=bias), **options)
    assert_alike(model)
    head = model.get_base_model().lm_head
    if "modules_to_save" not in options:
        assert head.base_layer.weight.grad is None and head.lora_B["default"].weight.grad.any()
    else:
        assert head.original_module.weight.grad is None and head.weight.grad.any()


def test_tied_adapters() -> None:
    tied = {"target_modules": ["lm_head", "embed_tokens"], "ensure_weight_tying": True}
    assert_alike(adapted(stock_model("Qwen2"), **tied))
    saved = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    assert_alike(adapted(stock_model("Qwen2"), **saved, ensure_weight_tying=True))


def test_several_adapters_and_their_states(tmp_path: Path) -> None:
    model = adapted(stock_model(), **HEAD, lora_dropout=0.2)
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=7, **HEAD))
    with_numbers(fuse(model))
    losses = []
    for active in ("default", "other", ["default", "other"]):
        model.base_model.set_adapter(active)
        assert_alike(model)
        losses.append(float(model(input_ids=INPUT_IDS, labels=LABELS).loss.detach()))
    assert len(set(losses)) == 3
    model.eval()
    arguments = {"input_ids": INPUT_IDS, "labels": LABELS, "skip_logits": True}
    merged = model(**arguments).loss
    model.merge_adapter()
    torch.testing.assert_close(model(**arguments).loss, merged)
    with model.disable_adapter():
        torch.testing.assert_close(model(**arguments).loss, fuse(stock_model())(**arguments).loss)
    model.unmerge_adapter()
    torch.testing.assert_close(model(**arguments).loss, merged)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(stock_model(), tmp_path / "other", is_trainable=True)
    model.base_model.set_adapter("other")
    torch.testing.assert_close(fuse(loaded.eval())(**arguments).loss, model(**arguments).loss)
    whole = model.merge_and_unload()
    with pytest.raises(RuntimeError, match=r"PEFT adapters on the head, added or unloaded"):
        whole(**arguments)
    torch.testing.assert_close(fuse(whole)(**arguments).loss, loaded(**arguments).loss)


def test_copies_autocast_and_compilation() -> None:
    model = fuse(adapted(stock_model(), **HEAD))
    expected, gradients = step(model)
    found, others = step(copy.deepcopy(model))
    assert found.logits is None
    torch.testing.assert_close(others, gradients)
    torch._dynamo.reset()
    found, others = step(torch.compile(model, backend="aot_eager"))
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-6)
    model.get_base_model().lm_head.base_layer.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found, others = step(model)
        expected, gradients = step(unfuse(model))
    torch.testing.assert_close(found.loss, expected.loss, rtol=0.02, atol=0)
    torch.testing.assert_close(others, gradients, rtol=0.1, atol=4e-3)


class Quantized(nn.Linear):
    """A layer whose matrix has to be decoded."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(2 * input)


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"without variants \(DoRA\) and quantization, got \['Dora"):
        fuse(adapted(stock_model(), **HEAD, use_dora=True))
    with pytest.raises(TypeError, match=r"without variants .*, got \['ALora"):
        fuse(adapted(stock_model(), **HEAD, alora_invocation_tokens=[1, 2]))
    rows = {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [1, 2]}}
    with pytest.raises(TypeError, match=r"and other adapters, got peft\..*Tok"):
        fuse(adapted(stock_model(), **rows))
    tied = {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]}
    with pytest.raises(TypeError, match=r"and other adapters, got peft\..*Tok"):
        fuse(adapted(stock_model("Qwen2"), **tied))
    model = stock_model()
    model.lm_head = Quantized(16, CLASSES, bias=False)
    with pytest.raises(TypeError, match=r"other adapters, got .*Quantized"):
        fuse(adapted(model, **HEAD))
    other = peft.get_peft_model(stock_model(), peft.LoHaConfig(r=2, **HEAD))
    with pytest.raises(TypeError, match=r"other adapters, got peft\.tuners\.loha"):
        fuse(other)
    model = fuse(adapted(stock_model(), **HEAD))
    model.add_adapter("dora", peft.LoraConfig(r=2, use_dora=True, **HEAD))
    assert model(input_ids=INPUT_IDS, labels=LABELS).logits is None
    model.set_adapter("dora")
    with pytest.raises(TypeError, match="LoRA without variants on the head, got that of dora"):
        model(input_ids=INPUT_IDS, labels=LABELS)
    model.set_adapter("default")
    names = ["default"] * len(INPUT_IDS)
    with pytest.raises(TypeError, match="expected hidden states alone, got adapter_names too"):
        model.eval()(INPUT_IDS, labels=LABELS, skip_logits=True, adapter_names=names)


def test_adapters_that_come_after_fuse() -> None:
    late = adapted(fuse(stock_model()), **HEAD)
    with pytest.raises(RuntimeError, match="by PEFT adapters on the head"):
        late(input_ids=INPUT_IDS, labels=LABELS)
    assert_alike(late)


def test_lora_on_a_head_that_is_sharded_by_itself() -> None:
    """FSDP2 derives a class of the head's own from that of PEFT."""
    own, sharded = (adapted(stock_model(), **HEAD) for _ in range(2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        head = sharded.get_base_model().get_output_embeddings()
        fully_shard(head, mesh=init_device_mesh("cpu", (1,)))
        fuse(sharded.get_base_model())
        expected, of_own = step(own)
        found, of_sharded = step(sharded)
        assert torch.allclose(found.loss, expected.loss)
        assert of_own.keys() == of_sharded.keys()
        for name, gradient in of_own.items():
            local = of_sharded[name]
            local = local.to_local() if isinstance(local, DTensor) else local
            assert torch.allclose(local, gradient, atol=1e-6), name
    finally:
        dist.destroy_process_group()
