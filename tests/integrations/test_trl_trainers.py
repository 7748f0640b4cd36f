"""Trainers of TRL with the fused head of `patch`, beside their own. They skip without TRL."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import configurations
from helpers.configurations import CLASSES, LLAMA, SERVED_BY_NAME
from torch import Tensor

import partita
from partita.integrations import trl as ours
from partita.integrations.transformers import fuse, fused

transformers = pytest.importorskip("transformers", exc_type=ImportError)
trl = pytest.importorskip("trl", "1.16", exc_type=ImportError)
datasets = pytest.importorskip("datasets", exc_type=ImportError)
utils = pytest.importorskip("trl.trainer.utils", exc_type=ImportError)
distillation = pytest.importorskip("trl.trainer.distillation_trainer", exc_type=ImportError)

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, CLASSES))]


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    yield
    ours.unpatch()


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def model_of(family: str = "Llama", seed: int = 0, **sizes: Any) -> Any:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**LLAMA | sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config)


def text(seed: int, n: int) -> str:
    g = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[int(i)] for i in torch.randint(4, CLASSES, (n,), generator=g))


def rows(*names: str) -> Any:
    """Return a data set whose columns are texts, or whether an answer is wanted."""
    columns = {
        name: [i % 2 == 0 if name == "label" else text(10 * i + len(name), 4) for i in range(4)]
        for name in names
    }
    return datasets.Dataset.from_dict(columns)


def reward(completions: list[str], **kw: Any) -> list[float]:
    """Return rewards that differ between most completions."""
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def with_reference(*columns: str) -> dict[str, Any]:
    return {"train_dataset": rows(*columns), "ref_model": model_of(seed=3)}


def with_reward() -> dict[str, Any]:
    return {"train_dataset": rows("prompt"), "reward_funcs": reward}


DRAWN = {"max_completion_length": 4, "num_generations": 2, "beta": 0.0}
# The options of a trainer, and its other arguments.
TRAINERS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "SFT": ({}, lambda: {"train_dataset": rows("prompt", "completion")}),
    "DPO": ({"use_weighting": True}, lambda: with_reference("prompt", "chosen", "rejected")),
    "KTO": ({}, lambda: with_reference("prompt", "completion", "label")),
    "GRPO": (DRAWN, with_reward),
    "RLOO": (DRAWN, with_reward),
    "Distillation": (
        {"max_completion_length": 4, "beta": 0.4},
        lambda: {"train_dataset": rows("prompt"), "teacher_model": model_of(seed=7)},
    ),
}


def train(
    kind: str, folder: Path, model: Any, **changed: Any
) -> tuple[list[dict[str, float]], Any]:
    """Train for two steps, and return what the trainer logged and the model."""
    options, arguments = TRAINERS[kind]
    settings = getattr(trl, f"{kind}Config")(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=settings, processing_class=tokenizer(), **arguments() | changed
    )
    trainer.train()
    return trainer.state.log_history[:2], trainer.model


@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "linear_divergence" if kind == "Distillation" else "linear_token_stats"
    counted = mock.Mock(wraps=getattr(ours, name))
    monkeypatch.setattr(ours, name, counted)
    expected, stock = train(kind, tmp_path, model_of())
    assert not counted.called
    ours.patch()
    found, patched = train(kind, tmp_path, model_of())
    assert counted.call_count >= 2
    times = {"total_flos", "step_time", "train_runtime"}
    for a, b in zip(expected, found, strict=True):
        assert a.keys() == b.keys() and "loss" in a
        for key in a.keys() - times:
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key
    torch.testing.assert_close(
        dict(patched.named_parameters()), dict(stock.named_parameters()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Cohere", "Granite", "Phi", "Mixtral"])
@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift_labels"])
def test_every_field_of_the_output(family: str, shifted: bool) -> None:
    model = configurations.model_of(SERVED_BY_NAME[f"{family}ForCausalLM"])
    ids = torch.randint(4, CLASSES, (3, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(9) < 3, -100)
    arguments = {"shift_labels" if shifted else "labels": labels, "num_items_in_batch": 11}
    utils.add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)

    def step() -> tuple[Any, dict[str, Tensor]]:
        model.zero_grad()
        output = model(ids, **arguments, fused_lm_head=True)
        (output.loss + (output.log_probs.exp() + 0.3 * output.entropy).sum()).backward()
        return output, {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }

    expected, gradients = step()
    ours.patch()
    found, others = step()
    assert found.keys() == expected.keys() and len(found) == (8 if family == "Mixtral" else 7)
    for name in expected:
        assert found[name].dtype == expected[name].dtype, name
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-5)
    assert found.entropy.requires_grad and not found.mean_logits.requires_grad


def test_compiled() -> None:
    model = model_of().train()
    ids = torch.randint(4, CLASSES, (3, 9), generator=torch.Generator().manual_seed(0))
    utils.add_fused_lm_head(model, outputs=OUTPUTS)
    ours.patch()

    def step(function: Callable[..., Any]) -> list[Tensor]:
        model.zero_grad()
        output = function(ids, labels=ids, fused_lm_head=True)
        output.loss.backward()
        return [*output.values(), model.lm_head.weight.grad.clone()]

    torch._dynamo.reset()
    found = step(torch.compile(model, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(found, step(model), rtol=1e-5, atol=1e-6)


def head_of(dtype: torch.dtype, tokens: int, bias: bool = False) -> list[Any]:
    g = torch.Generator().manual_seed(0)
    shapes = [(tokens, 16), (CLASSES, 16), (CLASSES,)]
    tensors = [torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes]
    return tensors if bias else [*tensors[:2], None]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
@pytest.mark.parametrize("tokens", [0, 23])
def test_dtypes_of_the_head(tokens: int, dtypes: tuple[str, str], autocast: bool) -> None:
    hidden, _, _ = head_of(getattr(torch, dtypes[0]), tokens)
    _, weight, bias = head_of(getattr(torch, dtypes[1]), tokens, bias=True)
    targets = torch.arange(tokens) % CLASSES

    def step(function: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = function.apply(hidden, weight, bias, targets, 0.7, 16, 3.0, 0.5, OUTPUTS)
        leaves = [hidden, weight, bias]
        return [*found, *torch.autograd.grad((found[0] + 0.3 * found[1]).sum(), leaves)]

    own = utils._ChunkedLogProbFunction
    ours.patch()
    is_half = autocast or dtypes[0] == "bfloat16"
    for i, (a, b) in enumerate(zip(step(own), step(utils._ChunkedLogProbFunction), strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        if i == 4:  # Rounding may decide which logit is the largest.
            assert a.numel() == 0 or (a == b).float().mean() >= (0.9 if is_half else 1.0)
        else:
            torch.testing.assert_close(
                b, a, rtol=0.05 if is_half else 1e-4, atol=0.05 if is_half else 1e-5
            )


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 0.5), (0.5, 2.0)], ids=str)
@pytest.mark.parametrize("cap", [None, 3.0])
def test_divergences(cap: float | None, scales: tuple[float, float], beta: float) -> None:
    student = head_of(torch.float32, 23, bias=True)
    g = torch.Generator().manual_seed(1)
    teacher = [torch.randn(23, 12, generator=g), torch.randn(CLASSES, 12, generator=g), None]

    def step(function: Any, *caps: float | None) -> list[Tensor]:
        rest = (beta, 0.7, scales[0], caps[0], scales[1], caps[1])
        divergences, entropies = function.apply(*student, *teacher, *rest)
        assert not entropies.requires_grad
        loss = (divergences * torch.linspace(0, 1, 23)).sum()
        return [divergences, entropies, *torch.autograd.grad(loss, student)]

    own = distillation.ChunkedDivergenceFunction
    ours.patch()
    function = distillation.ChunkedDivergenceFunction
    torch.testing.assert_close(step(function, cap, cap), step(own, cap, cap), rtol=1e-4, atol=1e-5)
    with pytest.warns(UserWarning, match="TRL's own function runs, as student and teacher have"):
        found = step(function, 2.0, None)
    torch.testing.assert_close(found, step(own, 2.0, None), rtol=0, atol=0)


def test_patch_and_unpatch_are_each_others_inverse() -> None:
    import trl.kernels
    from trl.trainer import sft_trainer as sft

    def names() -> dict[str, Any]:
        modules = (utils, distillation, sft, trl.kernels, trl.kernels.chunked_divergence)
        return {f"{m.__name__}.{n}": value for m in modules for n, value in vars(m).items()}

    before = names()
    ours.unpatch()
    ours.patch()
    ours.patch(memory_budget=2**28)
    changed = {name for name, value in names().items() if value is not before[name]}
    assert {name.rpartition(".")[2] for name in changed} == {
        "BaseTunerLayer",
        "_ChunkedLogProbFunction",
        "add_fused_lm_head",
        "ChunkedLogProbFunction",
        "ChunkedDivergenceFunction",
    }
    assert len(changed) >= 4 and ours._options == {"memory_budget": 2**28}
    ours.unpatch()
    ours.unpatch()
    assert all(value is before[name] for name, value in names().items())
    with pytest.raises(ValueError, match="memory_budget: expected"):
        ours.patch(memory_budget="1 GiB")  # type: ignore[arg-type]
    assert all(value is before[name] for name, value in names().items())


def test_another_version_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, "_ChunkedLogProbFunction")
    with pytest.raises(ImportError, match=r"expected TRL 1.16, with trl.trainer.utils._Chunked"):
        ours.patch()
    assert distillation.ChunkedDivergenceFunction is not ours.Divergences


def test_a_matrix_that_zero_3_has_partitioned() -> None:
    hidden, weight, bias = head_of(torch.float32, 5)
    weight.ds_id = 0
    arguments = (hidden, weight, bias, torch.arange(5), 1.0, 16, None, 1.0, OUTPUTS)
    own = utils._ChunkedLogProbFunction
    ours.patch()
    with pytest.warns(UserWarning, match="TRL's own function runs, as ZeRO-3 has partitioned"):
        found = utils._ChunkedLogProbFunction.apply(*arguments)
    torch.testing.assert_close(found, own.apply(*arguments), rtol=0, atol=0)


def test_trl_without_patch_makes_a_fused_model_warn(tmp_path: Path) -> None:
    model = fuse(model_of())
    with pytest.warns(
        UserWarning, match=r"by one of trl\.trainer\.utils; call partita.*trl\.patch"
    ):
        train("SFT", tmp_path, model)
    report = fused(model)
    assert report.fused == 0 and sum(report.unfused.values()) == 2


def test_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)

    def adapted(**options: Any) -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, init_lora_weights=False, **options)
        return peft.get_peft_model(model_of(), config)

    saved = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "lora_dropout": 0.0}
    expected, _ = train("SFT", tmp_path, copy.deepcopy(model := adapted(**saved)))
    ours.patch()
    found, _ = train("SFT", tmp_path, model)
    assert [a["loss"] for a in found] == pytest.approx([a["loss"] for a in expected], rel=1e-4)
    for kind in ("SFT", "DPO", "KTO", "GRPO", "RLOO"):
        model = adapted(target_modules=["lm_head"])
        factor = model.get_output_embeddings().lora_B["default"].weight
        before = factor.detach().clone()
        arguments = {"ref_model": None} if kind in ("DPO", "KTO") else {}
        logged, _ = train(kind, tmp_path, model, **arguments)
        assert "loss" in logged[0] and not torch.equal(factor, before), kind
    dora = adapted(target_modules=["lm_head"], use_dora=True)
    with pytest.raises(TypeError, match=r"without variants \(DoRA\)"):
        train("SFT", tmp_path, dora)
    ours.unpatch()
    with pytest.raises(ValueError, match="adapter"):
        train("SFT", tmp_path, adapted(target_modules=["lm_head"]))


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"lora_bias": True}, {"lora_dropout": 0.4}], ids=str
)
@pytest.mark.filterwarnings("ignore:.*lora_bias")
def test_every_field_with_lora_on_the_head(options: dict[str, Any], cap: float | None) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    model = model_of("Gemma2", head_dim=8, final_logit_softcapping=cap, tie_word_embeddings=False)
    config = peft.LoraConfig(target_modules=["lm_head"], r=3, init_lora_weights=False, **options)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config).train()
    ids = torch.randint(4, CLASSES, (3, 9), generator=torch.Generator().manual_seed(0))
    leaves = [p for p in model.parameters() if p.requires_grad]

    def logits() -> Tensor:
        hidden = model.get_base_model().model(ids).last_hidden_state[:, :-1]
        torch.manual_seed(1)
        z = model.get_base_model().lm_head(hidden.reshape(24, -1)).view(3, 8, -1)
        return (z if cap is None else cap * torch.tanh(z / cap)) / 0.7

    ours.patch()
    utils.add_fused_lm_head(model.get_base_model(), temperature=0.7, outputs=OUTPUTS)

    def check() -> None:
        torch.manual_seed(1)
        found = model.get_base_model()(ids, labels=ids, fused_lm_head=True)
        z, labels = logits(), ids[:, 1:]
        logp = z.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        chosen = logp.gather(-1, labels[..., None])[..., 0]
        expected = {
            "log_probs": chosen,
            "entropy": entropy,
            "log_sum_sq_probs": (2 * logp).logsumexp(-1),
            "mean_logits": z.mean(-1),
            "is_top1": z.argmax(-1) == labels,
        }
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        if found.loss.requires_grad:
            pairs = [(found.log_probs, found.entropy), (chosen, entropy)]
            gradients = [
                torch.autograd.grad((a + 0.3 * b).sum(), leaves, allow_unused=True)
                for a, b in pairs
            ]
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)

    check()
    model.eval()
    with torch.no_grad(), model.disable_adapter():
        check()
    if "lora_bias" not in options:
        model.merge_adapter()
        with torch.no_grad():
            check()


def test_bad_input() -> None:
    hidden, weight, bias = head_of(torch.float32, 3)
    with pytest.raises(ValueError, match=r"logit_scale: expected a number above 0\.0"):
        ours.TokenStatistics.apply(hidden, weight, bias, torch.arange(3), 1.0, 16, None, 0.0)
    with pytest.raises(IndexError, match="to 36"):
        ours.TokenStatistics.apply(hidden, weight, bias, torch.tensor([1, 2, 99]), 1.0, 16)
    assert partita.integrations.trl is ours
