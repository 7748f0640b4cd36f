"""partita.nn: modules with the constructors of torch.nn."""

import inspect

import pytest
import torch
from helpers.errors import raises

import partita
from partita.testing import sample_labels


def test_constructor_has_the_arguments_of_torch_and_ours_by_keyword() -> None:
    ours = inspect.signature(partita.nn.CrossEntropyLoss).parameters
    theirs = inspect.signature(torch.nn.CrossEntropyLoss).parameters
    assert [(p.name, p.default, p.kind) for p in ours.values()][: len(theirs)] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]
    assert {name: p.kind for name, p in ours.items() if name not in theirs} == dict.fromkeys(
        ("softcap", "z_loss", "inplace"), inspect.Parameter.KEYWORD_ONLY
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "reduction": "sum",
            "label_smoothing": 0.1,
            "softcap": 5.0,
            "z_loss": 1e-3,
            "ignore_index": 2,
        },
    ],
    ids=str,
)
def test_calls_the_function_with_its_options(options: dict) -> None:
    logits, labels = sample_labels(6, 7)
    weight = torch.linspace(0.5, 2, 7)
    module = partita.nn.CrossEntropyLoss(weight, **options)
    assert torch.equal(
        module(logits, labels), partita.cross_entropy(logits, labels, weight, **options)
    )


def test_inplace() -> None:
    logits, labels = sample_labels(6, 7)
    x = logits.requires_grad_()
    h = x * 1
    partita.nn.CrossEntropyLoss(inplace=True)(h, labels).backward()
    assert not torch.equal(h, x)


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize(
    ("arguments", "reduction"),
    [
        ({"reduce": False}, "none"),
        ({"size_average": False}, "sum"),
        ({"size_average": True}, "mean"),
    ],
)
def test_the_old_names_of_reduction(arguments: dict, reduction: str) -> None:
    assert partita.nn.CrossEntropyLoss(**arguments).reduction == reduction


def test_state_is_that_of_the_torch_module() -> None:
    weight = torch.linspace(0.5, 2, 7)
    ours, theirs = (
        partita.nn.CrossEntropyLoss(weight, z_loss=0.1),
        torch.nn.CrossEntropyLoss(weight),
    )
    assert isinstance(ours, torch.nn.CrossEntropyLoss)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours.double().weight.dtype == torch.float64


def test_representation_shows_our_options() -> None:
    assert (
        repr(partita.nn.CrossEntropyLoss(softcap=30.0))
        == "CrossEntropyLoss(ignore_index=-100, reduction='mean', label_smoothing=0.0,"
        " softcap=30.0, z_loss=0.0, inplace=False)"
    )
    for module in (
        partita.nn.CrossEntropyLoss(ignore_index=0),
        partita.nn.LinearCrossEntropyLoss(3, 4, ignore_index=0),
    ):
        assert "ignore_index=0" in repr(module)


@pytest.mark.parametrize(
    ("error", "call"),
    {
        "ValueError: reduction: expected one of ": ("CTCLoss", {"reduction": "avg"}),
        "ValueError: blank: expected a class, 0 or more, got -1": ("CTCLoss", {"blank": -1}),
        "ValueError: softcap: expected a number above 0.0": ("CrossEntropyLoss", {"softcap": -1}),
        "ValueError: label_smoothing: expected ": ("CrossEntropyLoss", {"label_smoothing": 2}),
        "TypeError: ignore_index: expected an int": ("CrossEntropyLoss", {"ignore_index": "0"}),
        "ValueError: z_loss: expected a number ": ("LinearCrossEntropyLoss", {"z_loss": -1.0}),
    }.items(),
)
def test_the_constructor_refuses_options_that_no_call_accepts(
    error: str, call: tuple[str, dict]
) -> None:
    module, arguments = call
    sizes = {"in_features": 3, "num_classes": 4} if module.startswith("Linear") else {}
    with raises(error):
        getattr(partita.nn, module)(**sizes, **arguments)
