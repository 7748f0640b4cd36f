"""Models whose training loss needs no logits: values, gradients, calls, and what is refused."""

import copy
import inspect
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.causal_lm import CLASSES, INPUT_IDS, LABELS, CausalLM, step
from helpers.fresh import SOURCE, run_fresh
from torch import Tensor, nn

import partita
from partita.integrations.transformers import causal_lm_loss, fuse, unfuse


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("tied", "bias"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("items", [None, 4, torch.tensor(4)], ids=str)
@pytest.mark.parametrize("given", ["labels", "both"])
def test_loss_and_gradients(
    given: str, items: Any, tied: bool, bias: bool, softcap: float | None
) -> None:
    model = CausalLM(softcap, tied, bias)
    arguments: dict[str, Any] = {"labels": LABELS}
    if given == "both":
        arguments["shift_labels"] = LABELS.roll(2, 1)
    if items is not None:
        arguments["num_items_in_batch"] = items
    expected, gradients = step(model, **arguments)
    assert fuse(model) is model
    found, others = step(model, **arguments)
    assert expected.logits is not None and found.logits is None
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(others, gradients, rtol=1e-5, atol=1e-6)


def test_options_are_those_of_the_loss() -> None:
    model = CausalLM()
    logits = model(INPUT_IDS).logits
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    expected = causal_lm_loss(logits, LABELS, CLASSES, **options)
    fuse(model, **options, memory_budget=2**20)
    torch.testing.assert_close(model(INPUT_IDS, labels=LABELS).loss, expected)
    with pytest.raises(ValueError, match="memory_budget: expected at least"):
        fuse(model, memory_budget=1)(INPUT_IDS, labels=LABELS)
    torch.testing.assert_close(
        fuse(model)(INPUT_IDS, labels=LABELS).loss, causal_lm_loss(logits, LABELS, CLASSES)
    )
    labels = LABELS.masked_fill(LABELS == -100, 5)
    expected = causal_lm_loss(logits, labels, CLASSES, ignore_index=5)
    torch.testing.assert_close(model(INPUT_IDS, labels=labels, ignore_index=5).loss, expected)


def test_when_logits_are_made() -> None:
    model = fuse(CausalLM())
    stock = CausalLM()
    logits = stock(INPUT_IDS).logits
    for training in (True, False):
        model.train(training)
        assert torch.equal(model(INPUT_IDS).logits, logits)
        assert (model(INPUT_IDS, labels=LABELS).logits is None) == training
        whole = model(INPUT_IDS, labels=LABELS, skip_logits=False)
        assert torch.equal(whole.logits, logits)
        assert torch.equal(whole.loss, stock(INPUT_IDS, labels=LABELS).loss)
        skipped = model(INPUT_IDS, labels=LABELS, skip_logits=True)
        assert skipped.logits is None
        torch.testing.assert_close(skipped.loss, whole.loss)
        with pytest.raises(ValueError, match="skip_logits: expected labels or shift_labels"):
            model(INPUT_IDS, skip_logits=True)
    assert torch.equal(model.lm_head(torch.zeros(2, 8)), torch.zeros(2, CLASSES))


def test_ways_to_give_labels() -> None:
    model = fuse(CausalLM())
    expected = model(INPUT_IDS, labels=LABELS).loss
    assert torch.equal(model(INPUT_IDS, LABELS).loss, expected)
    assert torch.equal(model.forward(INPUT_IDS, LABELS).loss, expected), "as PEFT calls it"
    shifted = nn.functional.pad(LABELS, (0, 1), value=-100)[:, 1:]
    for arguments in ((INPUT_IDS,), (INPUT_IDS, None)):
        output = model(*arguments, shift_labels=shifted)
        assert torch.equal(output.loss, expected) and output.logits is None
    loss, logits = model(INPUT_IDS, LABELS, return_dict=False)
    assert torch.equal(loss, expected) and logits is None
    model.eval()
    assert model(INPUT_IDS, shift_labels=shifted).loss is None, "as without fuse"


def test_a_pass_that_fails_leaves_nothing() -> None:
    model = fuse(CausalLM())
    with pytest.raises(IndexError):
        model(INPUT_IDS + CLASSES, labels=LABELS)
    assert model(INPUT_IDS).logits is not None


def test_unfuse() -> None:
    model = CausalLM()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    assert unfuse(model) is model
    signature = inspect.signature(model.forward)
    fuse(fuse(model))
    assert inspect.signature(model.forward) == signature, "trainers look at it"
    assert unfuse(model) is model
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not model._forward_pre_hooks
    assert model(INPUT_IDS, labels=LABELS).logits is not None
    model.loss_function = causal_lm_loss
    unfuse(fuse(model))
    assert model.loss_function is causal_lm_loss


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_is_a_model_of_its_own(copied: Callable[[nn.Module], Any]) -> None:
    model = fuse(CausalLM())
    other = copied(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(3)
    expected = unfuse(copy.deepcopy(other))(INPUT_IDS, labels=LABELS)
    output, _ = step(other)
    assert expected.logits is not None and output.logits is None
    torch.testing.assert_close(output.loss, expected.loss)
    assert model(INPUT_IDS, labels=LABELS).loss < output.loss
    assert model.lm_head.weight.grad is None


def test_a_fused_model_is_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    model = fuse(CausalLM(), label_smoothing=0.1)
    loss = float(model(INPUT_IDS, labels=LABELS).loss)
    torch.save(model, tmp_path / "model.pt")
    code = f"""
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
output = model(torch.tensor({INPUT_IDS.tolist()}), labels=torch.tensor({LABELS.tolist()}))
print(output.logits, float(output.loss) == {loss})
"""
    path = os.pathsep.join(map(str, (SOURCE, Path(__file__).parents[1])))
    finished = run_fresh(code, {**os.environ, "PYTHONPATH": path})
    assert finished.stdout == "None True\n", finished.stderr
    assert list(model.state_dict()) == list(CausalLM().state_dict())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_compiled(softcap: float | None) -> None:
    model = fuse(CausalLM(softcap))
    expected, gradients = step(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, others = step(compiled)
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(others, gradients)
    model.eval()
    assert compiled(INPUT_IDS, labels=LABELS).logits is not None


def test_autocast_and_accumulation() -> None:
    model = CausalLM()
    with torch.autocast("cpu", torch.bfloat16):
        expected, gradients = step(model)
        found, others = step(fuse(model))
    assert found.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, expected.loss, rtol=0.02, atol=0)
    torch.testing.assert_close(others, gradients, rtol=0.05, atol=2e-3)
    items = (LABELS[:, 1:] >= 0).sum()
    _, whole = step(model, num_items_in_batch=items)
    model.zero_grad()
    for ids, labels in zip(INPUT_IDS.split(1), LABELS.split(1), strict=True):
        model(ids, labels=labels, num_items_in_batch=items).loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(whole.values()))


class OwnLoss(CausalLM):
    """A model that ignores its loss function, as those of earlier years do."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.lm_head(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Adapted(nn.Linear):
    """A head with an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_models_that_are_refused() -> None:
    with pytest.raises(TypeError, match="expected a causal language model of transformers, got Li"):
        fuse(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"call unfuse before DistributedDataParallel"):
        unfuse(torch.nn.Sequential(CausalLM()))
    model = CausalLM()
    model.lm_head = Adapted(8, CLASSES)
    with pytest.raises(TypeError, match=r"quantization and other adapters, got .*Adapted"):
        fuse(model)
    model = CausalLM()
    model.lm_head.forward = lambda input: input
    with pytest.raises(TypeError, match="expected a head with its own forward"):
        fuse(model)
    model = CausalLM()
    model.loss_function = nn.functional.cross_entropy
    with pytest.raises(ValueError, match="whose loss is ForCausalLMLoss, got cross_entropy"):
        fuse(model)
    model = CausalLM()
    model.get_output_embeddings = lambda: None
    with pytest.raises(TypeError, match="expected one with a head, got CausalLM"):
        fuse(model)
    model = CausalLM()
    model.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="got CausalLM, an encoder with a decoder"):
        fuse(model)
    model = OwnLoss()
    with pytest.raises(ValueError, match="got OwnLoss, which computes its loss itself"):
        fuse(model)
    assert partita.integrations.transformers.STATE not in vars(model)


def test_a_head_that_is_replaced_afterwards() -> None:
    model = fuse(CausalLM())
    model.lm_head = nn.Linear(8, CLASSES)
    with pytest.raises(RuntimeError, match=r"expected the head that fuse\(model\) was given"):
        model(INPUT_IDS, labels=LABELS)
    assert model.eval()(INPUT_IDS, labels=LABELS).logits is not None
    assert fuse(model.train())(INPUT_IDS, labels=LABELS).logits is None


def test_replicas_are_refused() -> None:
    model = fuse(CausalLM())
    model._is_replica = True
    with pytest.raises(RuntimeError, match=r"got a replica of nn\.DataParallel"):
        model(INPUT_IDS, labels=LABELS)


class Custom(CausalLM):
    """A model that computes something of its own from its logits, or from its labels."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.embedding(input_ids))
        match self.what:
            case "scale":
                logits = logits * 0.5
            case "slice":
                logits = logits[..., :5]
            case "attribute":
                logits = logits.masked_fill(input_ids[..., None] == 3, 0.0)
            case "function":
                logits = torch.relu(logits)
            case "sum":
                logits = logits + 1
            case "labels":
                labels = labels.clone()
            case "vocabulary":
                self.config.vocab_size = 5
            case "arguments":
                kwargs = {}
        loss = None
        if self.what != "no loss":
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("scale", ValueError, r"that its configuration names, \(\), got \('\*', 0.5\)"),
        ("slice", TypeError, "a fused model has no logits in training"),
        ("attribute", AttributeError, "masked_fill: a fused model has no logits in training"),
        ("function", TypeError, "relu: a fused model has no logits in training"),
        ("sum", TypeError, "a fused model has no logits in training"),
        ("labels", ValueError, "expected one that passes on to its loss the labels"),
        ("vocabulary", ValueError, "the size of the whole vocabulary"),
        ("arguments", ValueError, "labels and other arguments as it gets them"),
        ("no loss", ValueError, "expected one that computes a loss from its logits"),
    ],
)
def test_what_a_model_may_not_compute(what: str, error: type[Exception], message: str) -> None:
    model = fuse(Custom(what))
    with pytest.raises(error, match=message):
        model(INPUT_IDS, labels=LABELS, num_items_in_batch=3)


@pytest.mark.parametrize(("name", "scale"), [("logit_scale", 0.3), ("logits_scaling", 3.0)])
def test_a_scale_that_the_configuration_names(name: str, scale: float) -> None:
    class Scaled(CausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.embedding(input_ids))
            logits = scale * logits if name == "logit_scale" else logits / scale
            return {"loss": self.loss_function(logits, labels, CLASSES, **kwargs), "logits": logits}

    model = Scaled(bias=True)
    setattr(model.config, name, scale)
    expected = model(INPUT_IDS, labels=LABELS)["loss"]
    used = [model.embedding.weight, *model.lm_head.parameters()]
    gradients = torch.autograd.grad(expected, used)
    found = fuse(model)(INPUT_IDS, labels=LABELS)["loss"]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, used), gradients)


def test_a_soft_cap_that_the_configuration_names_and_the_model_does_not_apply() -> None:
    model = CausalLM(2.0)
    fuse(model)
    model.config.final_logit_softcapping = None
    with pytest.raises(ValueError, match=r"\('/', 2.0, 'tanh', '\*', 2.0\), got \(\)"):
        model(INPUT_IDS, labels=LABELS)
