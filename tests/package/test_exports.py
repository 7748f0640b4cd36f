"""The public names: sorted and all there."""

import inspect
import io
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.docstrings import MODULES, names_of

import partita

PUBLIC = [(path, name) for path in MODULES for name in names_of(sys.modules[path])]


@pytest.mark.parametrize(
    "module",
    [sys.modules[path] for path in MODULES if path != "partita.nn"],
    ids=lambda m: m.__name__,
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
    rows = {"TokenStats", "TopK", "cross_entropy", "divergence", "log_softmax", "logprobs"}
    rows |= {"logsumexp", "softmax", "token_stats", "topk_divergence", "topk_logprobs"}
    linear = {"cross_entropy", "cross_entropy_plan", "divergence", "logprobs", "token_stats"}
    linear |= {"topk_divergence", "topk_logprobs", "rnnt_loss", "rnnt_plan", "tdt_loss", "chain"}
    chains = {"Chain", "ChainSample", "ExpectedCounts", "LinearChain", "LinearPath", "LinearSample"}
    chains |= {"Log", "Max", "SemiMarkovChain", "SemiMarkovPath", "SemiMarkovSample", "Semiring"}
    chains |= {"ViterbiPath", "dense_source", "edges_from_states", "logz", "semi_markov_chain"}
    ctc = {"CTCAlignment", "TokenSpans", "ctc_align", "ctc_crf_loss", "ctc_loss", "debruijn_source"}
    decode = {"Basecalls", "Hypotheses", "ctc_beam_search", "ctc_crf_decode", "ctc_greedy_search"}
    decode |= {"stitch", "word_spans"}
    rnnt = {"RNNTAlignment", "rnnt_align", "rnnt_loss", "tdt_align", "tdt_loss"}
    namespaces = {"backend", "integrations", "nn", "parallel", "testing"}
    found = rows | {f"linear_{name}" for name in linear} | chains | ctc | decode | rnnt | namespaces
    assert set(partita.__all__) == found


def records() -> dict[str, Any]:
    """Return an instance of each public class that functions return."""
    public = (getattr(sys.modules[path], name) for path, name in PUBLIC)
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
