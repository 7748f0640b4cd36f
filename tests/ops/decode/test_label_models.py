"""What n-gram models and boosted phrases have in common as scores of labels."""

from typing import NamedTuple

import pytest
import torch
from helpers.memory import no_waits
from helpers.ngrams import corpus, model_of

from partita import NgramLM, PhraseBoost

OTHERS = [*corpus(40, seed=1), ["w1", "new", "w2", "<unk>"]]


class Scorer(NamedTuple):
    model: NgramLM | PhraseBoost
    number_of_states: int


@pytest.fixture(params=["n-grams", "phrases"])
def scorer(request: pytest.FixtureRequest) -> Scorer:
    if request.param == "n-grams":
        model = model_of(corpus(40), 3)
        return Scorer(model, len(model._trie.backoffs))
    boost = PhraseBoost(["ab", "abcab", "bca", "b", "cc"], ["-", "a", "b", "c"], [4, 3, 2, 0.5, -1])
    return Scorer(boost, len(boost._arcs.credits))


def test_advance_is_one_graph(scorer: Scorer) -> None:
    states = torch.arange(scorer.number_of_states)
    compiled = torch.compile(scorer.model.advance, backend="eager", fullgraph=True)
    for ours, theirs in zip(compiled(states), scorer.model.advance(states), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_state_has_no_score(scorer: Scorer) -> None:
    model, S = scorer
    states = torch.tensor([0, -1, S, S - 1])
    scores, _ = model.advance(states)
    assert scores.isnan().all(1).tolist() == [False, True, True, False]
    assert model.final(states).isnan().tolist() == [False, True, True, False]
    assert torch.equal(scores[[0, 3]], model.advance(states[[0, 3]])[0])


@pytest.mark.gpu
def test_a_gpu_has_the_same_scores(scorer: Scorer) -> None:
    model, S = scorer
    moved, states = model.to("cuda"), torch.arange(S)
    with no_waits():
        found = moved.advance(moved.start(3))
    assert found[0].shape == model.advance(model.start(3))[0].shape
    for ours, theirs in zip(moved.advance(states.cuda()), model.advance(states), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    if isinstance(model, NgramLM):
        assert moved.device.type == "cuda"
        assert torch.equal(moved.score(OTHERS).cpu(), model.score(OTHERS))
