"""The public names: sorted, documented in the same parts, and all there."""

import inspect
import io
import re
from types import ModuleType
from typing import Any

import pytest
import torch

import partita

MODULES = [
    partita,
    partita.integrations,
    partita.integrations.fast_ctc_decode,
    partita.integrations.koi,
    partita.integrations.transformers,
    partita.integrations.trl,
    partita.integrations.verl,
    partita.nn,
    partita.parallel,
    partita.testing,
]
PUBLIC = [
    (module, name)
    for module in MODULES
    for name in getattr(
        module,
        "__all__",
        [
            n
            for n, v in vars(module).items()
            if inspect.isclass(v) and v.__module__ == module.__name__
        ],
    )
]
DOCUMENTED = [(module, name) for module, name in PUBLIC if callable(getattr(module, name))]


def identify(value: ModuleType | str) -> str:
    return value if isinstance(value, str) else value.__name__


@pytest.mark.parametrize(
    "module", [module for module in MODULES if hasattr(module, "__all__")], ids=identify
)
def test_all_is_sorted_and_there(module: ModuleType) -> None:
    def natural(name: str) -> tuple[bool, bool, str]:
        return (
            not name.isupper(),
            not name[0].isupper(),
            name,
        )  # as ruff sorts: constants, classes, functions

    assert module.__all__ == sorted(module.__all__, key=natural)
    assert all(hasattr(module, name) for name in module.__all__)
    assert set(module.__all__) <= set(dir(module))
    assert dir(module) == sorted(dir(module))


def test_star_import_brings_all() -> None:
    namespace: dict[str, Any] = {}
    exec("from partita import *", namespace)
    assert set(partita.__all__) <= namespace.keys()


def test_public_names_are_those_of_the_design() -> None:
    rows = {"TokenStats", "cross_entropy", "log_softmax", "logprobs", "logsumexp", "softmax"}
    chains = {
        "Chain",
        "ChainSample",
        "ExpectedCounts",
        "LinearChain",
        "LinearPath",
        "LinearSample",
        "Log",
        "Max",
        "SemiMarkovChain",
        "SemiMarkovPath",
        "SemiMarkovSample",
        "Semiring",
        "ViterbiPath",
        "dense_source",
        "edges_from_states",
        "linear_chain",
        "logz",
        "semi_markov_chain",
    }
    ctc = {"CTCAlignment", "TokenSpans", "ctc_align", "ctc_crf_loss", "ctc_loss", "debruijn_source"}
    ctc |= {
        "stitch",
        "word_spans",
        "Basecalls",
        "ctc_crf_decode",
        "Hypotheses",
        "ctc_beam_search",
        "ctc_greedy_search",
    }
    linear = {f"linear_{name}" for name in ("cross_entropy", "cross_entropy_plan", "logprobs")}
    linear |= {"linear_token_stats", "linear_divergence", "linear_topk_logprobs"}
    rows |= {"TopK", "topk_logprobs", "token_stats", "divergence"}
    rows |= {"TopK", "topk_logprobs", "topk_divergence", "token_stats", "divergence"}
    linear |= {"linear_topk_divergence"}
    rnnt = {"RNNTAlignment", "rnnt_align", "rnnt_loss", "tdt_align", "tdt_loss"}
    rnnt |= {"linear_rnnt_loss", "linear_rnnt_plan", "linear_tdt_loss"}
    assert set(partita.__all__) == rows | linear | chains | ctc | rnnt | {
        "backend",
        "integrations",
        "nn",
        "parallel",
        "testing",
    }


def parts(doc: str) -> dict[str, str]:
    """The named parts of a docstring, and its first line under the name of nothing."""
    found = re.split(r"^(Args|Fields|Returns|Raises|Source|Example): ?", doc, flags=re.MULTILINE)
    return {"": found[0].splitlines()[0], **dict(zip(found[1::2], found[2::2], strict=True))}


@pytest.mark.parametrize(("module", "name"), DOCUMENTED, ids=identify)
def test_docstring(module: ModuleType, name: str) -> None:
    value = getattr(module, name)
    doc = parts(inspect.getdoc(value) or "")
    assert re.fullmatch(r".{10,120}[.]", doc[""]), "one line, a sentence"
    if inspect.isclass(value) and not issubclass(value, partita.nn.CrossEntropyLoss):
        described = doc.get("Fields", "")
        expected = [
            field for field in getattr(value, "_fields", getattr(value, "__dataclass_fields__", ()))
        ]
    else:
        described = doc.get("Args", "")
        expected = [name for name in inspect.signature(value).parameters]
    missing = [
        argument
        for argument in expected
        if not re.search(rf"\b{argument}\b.*:|^\s*{argument}\b", described, flags=re.MULTILINE)
    ]
    assert not missing
    # The example of a record is that of the function that returns it.
    if not inspect.isclass(value):
        assert ">>>" in doc["Example"]
        returns = inspect.signature(value).return_annotation
        assert "Returns" in doc or returns == "None" or returns.startswith("Iterator")


OPS = ["cross_entropy", "log_softmax", "logsumexp", "softmax", "token_stats"]


@pytest.mark.parametrize("name", OPS)
def test_an_op_names_its_errors_and_the_source_of_its_method(name: str) -> None:
    doc = parts(inspect.getdoc(getattr(partita, name)) or "")
    assert {"Args", "Returns", "Raises", "Source", "Example"} <= doc.keys()
    assert re.search(r"\d{4}", doc["Source"])


def records() -> dict[str, Any]:
    """Return an instance of each public class that functions return."""
    torchaudio = partita.integrations.torchaudio
    names = (*PUBLIC, *((torchaudio, name) for name in torchaudio.__all__))
    public = (getattr(module, name) for module, name in names)
    plans = (
        partita.linear_cross_entropy_plan(2, 3, 4, torch.float32),
        partita.linear_rnnt_plan(1, 2, 3, 4, 5, torch.float32),
    )
    chains = (
        partita.Chain(torch.zeros(3, 1, 2, 2), partita.dense_source(2)),
        partita.linear_chain(torch.zeros(3, 1, 2), torch.zeros(2, 2)),
        partita.semi_markov_chain(torch.zeros(3, 1, 2), torch.zeros(2, 2), torch.zeros(2, 2)),
    )
    found: dict[str, Any] = {type(record).__name__: record for record in (*plans, *chains)}
    for kind in public:
        fields = getattr(kind, "_fields", None) or list(getattr(kind, "__dataclass_fields__", ()))
        if inspect.isclass(kind) and fields and kind is not partita.Semiring:
            found[kind.__name__] = kind(*(torch.full((2,), float(i)) for i in range(len(fields))))
    return found


RECORDS = records()


@pytest.mark.parametrize("name", RECORDS)
def test_results_load_by_default(name: str) -> None:
    record, file = RECORDS[name], io.BytesIO()
    torch.save({"records": [record]}, file)
    file.seek(0)
    found = torch.load(file)["records"][0]
    assert type(found) is type(record)
    values, expected = (
        list(x) if isinstance(x, tuple) else list(vars(x).values()) for x in (found, record)
    )
    assert str(values) == str(expected)
