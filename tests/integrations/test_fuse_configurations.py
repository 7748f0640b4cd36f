"""Fused models of many families of transformers, beside their stock loss."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from helpers.causal_lm import INPUT_IDS, LABELS, step
from helpers.configurations import REFUSED, SERVED, Refused, Served, model_of
from torch import Tensor

from partita.integrations.transformers import fuse, fused, unfuse

transformers = pytest.importorskip("transformers", exc_type=ImportError)


@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.model)
def test_served(case: Served) -> None:
    model = model_of(case)
    expected, gradients = step(model)
    found, others = step(fuse(model))
    assert expected.logits is not None and found.logits is None
    assert fused(model)[2:4] == (1, {})
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.model)
def test_refused(case: Refused) -> None:
    model = model_of(case)
    if case.at_step:
        fuse(model)
    with pytest.raises(case.error, match=re.escape(case.message)):
        step(model) if case.at_step else fuse(model)
    if not case.at_step:
        assert fused(model) is None and "forward" not in vars(model)


def llama() -> Any:
    return model_of(SERVED[0])


def test_a_report_counts_the_forward_passes() -> None:
    model = llama()
    assert fused(model) is None
    fuse(model)
    assert "0 forward passes without logits, 0 with logits)" in repr(fused(model))
    for _ in range(2):
        model(INPUT_IDS, labels=LABELS)
    model(INPUT_IDS)
    model(INPUT_IDS, labels=LABELS, skip_logits=False)
    model.eval()(INPUT_IDS, labels=LABELS)
    report = fused(model)
    assert report.head == "lm_head, Linear" and report.fused == 2 and not report.is_compiled
    assert report.unfused == {"no labels": 1, "skip_logits=False": 1, "evaluation": 1}
    assert repr(report) == (
        "FusedReport(LlamaForCausalLM, head lm_head, Linear: 2 forward passes without logits, 3"
        " with logits (1 × no labels, 1 × skip_logits=False, 1 × evaluation))"
    )
    assert fused(copy.deepcopy(model)) == report
    assert fused(unfuse(model)) is None
    assert not model._forward_pre_hooks and not model.model._forward_pre_hooks


def test_a_compiled_model_reports_that_it_is_not_counted() -> None:
    torch._dynamo.reset()
    model = fuse(llama())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            assert compiled(INPUT_IDS, labels=LABELS).logits is None
    assert fused(model).is_compiled and "those of torch.compile are not" in repr(fused(model))


def warned(model: Any, **arguments: Any) -> list[str]:
    """Return the warnings of two steps."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            step(model, **arguments)
    return [str(w.message) for w in found if "partita" in str(w.message)]


def test_a_forward_pass_that_replaces_the_one_of_fuse() -> None:
    model = fuse(llama())
    assert warned(model) == []
    own = type(model).forward
    model.forward = lambda *args, **kwargs: own(unfused, *args, **kwargs)
    unfused = model
    (message,) = warned(model)
    assert "no effect on this model: its forward pass was replaced by one of" in message
    assert "call fuse(model) last" in message
    assert fused(model).unfused == {message.partition(": ")[2].partition(";")[0]: 2}


def test_a_forward_pass_around_the_one_of_fuse() -> None:
    model = fuse(llama())
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    assert warned(model) == [] and fused(model).fused == 2
    model.eval()
    model.model(INPUT_IDS)
    assert fused(model).unfused == {}


def test_a_head_that_does_not_get_the_labels() -> None:
    model = fuse(llama())
    head = model.lm_head
    head.forward = lambda hidden: torch.nn.functional.linear(hidden, head.weight)
    (message,) = warned(model)
    assert "the forward pass of its head was replaced; call fuse(model) last" in message
    assert fused(model).fused == 0 and sum(fused(model).unfused.values()) == 2

    class Direct(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
            hidden = self.model(input_ids).last_hidden_state
            logits = torch.nn.functional.linear(hidden, self.lm_head.weight)
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
            return transformers.modeling_outputs.CausalLMOutput(loss, logits)

    direct = fuse(Direct(llama().config).train())
    (message,) = warned(direct)
    assert "its forward pass did not call its head" in message
