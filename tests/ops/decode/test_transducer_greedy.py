"""Greedy search of transducers, against a loop over the frames of one sequence."""

import io
import math
import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.transducers import (
    LABELS,
    TDT,
    Cached,
    Found,
    Recurrent,
    Stateless,
    chunks_of,
    greedy,
    moved,
    transducer,
)

from partita import NgramLM, PhraseBoost, rnnt_greedy_search

SEEDS = range(4)


def assert_found(found: Any, b: int, expected: Found) -> None:
    """Compare a hypothesis with that of the loop, and what lies past its length."""
    n, S = len(expected.tokens), found.tokens.shape[2]
    assert found.lengths[b, 0] == n
    filled = [-1] * (S - n)
    assert found.tokens[b, 0].tolist() == [*expected.tokens, *filled]
    assert found.steps[b, 0].tolist() == [*expected.steps, *filled]
    assert found.durations[b, 0].tolist() == [*expected.durations, *[0] * (S - n)]
    scores = torch.tensor([*expected.token_scores, *[0.0] * (S - n)])
    torch.testing.assert_close(found.token_scores[b, 0], scores)
    assert float(found.scores[b, 0]) == pytest.approx(expected.score, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("kind", [Recurrent, Stateless, Cached])
@pytest.mark.parametrize("durations", [None, TDT, (1, 2), (3, 0)])
def test_it_is_a_loop_over_frames(kind: Any, durations: tuple[int, ...] | None) -> None:
    written = 0
    for seed in SEEDS:
        network = transducer(kind, durations=durations, seed=seed)
        found = network.search(rnnt_greedy_search, max_symbols_per_step=3, max_tokens=30)
        for b in range(len(network.lengths)):
            expected = greedy(network, b, max_symbols_per_step=3, max_tokens=30)
            written += len(expected.tokens)
            assert_found(found, b, expected)
    assert written > 40


def test_long_runs_of_blanks() -> None:
    """Runs are longer than the frames that the joint network sees at once."""
    for durations, bias in ((None, 5.0), ((1, 2), 4.0), ((0, 1, 5), 4.0)):
        network = transducer(lengths=(60, 41, 3), durations=durations, blank_bias=bias)
        found = network.search(rnnt_greedy_search)
        expected = [greedy(network, b) for b in range(3)]
        assert max(len(each.tokens) for each in expected) < 20
        assert any(each.tokens for each in expected)
        for b, each in enumerate(expected):
            assert_found(found, b, each)


def test_labels_on_one_frame_are_limited() -> None:
    for limit in (1, 2, 5):
        network = transducer(blank_bias=-9.0)
        found = network.search(rnnt_greedy_search, max_symbols_per_step=limit, max_tokens=99)
        assert found.lengths[:, 0].tolist() == [limit * T for T in network.lengths]
        for b in range(len(network.lengths)):
            assert_found(found, b, greedy(network, b, limit))


@pytest.mark.parametrize("durations", [None, TDT])
def test_hypotheses_end_at_max_tokens(durations: tuple[int, ...] | None) -> None:
    network = transducer(durations=durations, blank_bias=-1.0)
    whole = network.search(rnnt_greedy_search, max_tokens=500)
    assert (whole.lengths[:2] > 4).all()
    found = network.search(rnnt_greedy_search, max_tokens=4)
    assert found.tokens.shape[2] == 4
    assert found.lengths[:, 0].tolist() == [min(4, n) for n in whole.lengths[:, 0].tolist()]
    for b in range(len(network.lengths)):
        assert_found(found, b, greedy(network, b, max_tokens=4))
    assert network.search(rnnt_greedy_search).tokens.shape[2] == 2 * network.encoder.shape[1]


@pytest.mark.parametrize(
    ("kind", "durations"),
    [(Recurrent, None), (Recurrent, TDT), (Recurrent, (0, 1, 6)), (Stateless, TDT), (Cached, None)],
)
def test_chunks_give_what_one_call_gives(
    kind: Any, durations: tuple[int, ...] | None, model: NgramLM
) -> None:
    boost = PhraseBoost([["w1", "w2"], ["w3"]], LABELS, 2.0)
    for seed, options in enumerate(({}, {"language_model": model}, {"boost": boost})):
        network = transducer(kind, durations=durations, seed=seed)
        given = {"max_symbols_per_step": 3, "max_tokens": 40, **options}
        whole = network.search(rnnt_greedy_search, **given)
        for sizes in ([13], [1] * 12, [5, 0, 1], [2]):
            parts, firsts, state, first = [], [], None, 0
            for chunk in chunks_of(network, sizes):
                parts.append(chunk.search(rnnt_greedy_search, state=state, **given))
                firsts.append(first)
                state, first = parts[-1].state, first + chunk.encoder.shape[1]
            for b in range(len(network.lengths)):
                tokens, steps, scores = [], [], 0.0
                for first, part in zip(firsts, parts, strict=True):
                    n = int(part.lengths[b, 0])
                    tokens += part.tokens[b, 0, :n].tolist()
                    steps += (part.steps[b, 0, :n] + first).tolist()
                    scores += float(part.scores[b, 0])
                n = int(whole.lengths[b, 0])
                assert tokens == whole.tokens[b, 0, :n].tolist()
                assert steps == whole.steps[b, 0, :n].tolist()
                assert scores == pytest.approx(float(whole.scores[b, 0]), rel=1e-5, abs=1e-5)


def test_a_state_can_be_saved() -> None:
    network = transducer(durations=TDT)
    file = io.BytesIO()
    torch.save(network.search(rnnt_greedy_search).state, file)
    file.seek(0)
    assert torch.load(file).skip.shape == (4,)


@pytest.mark.parametrize("durations", [None, TDT])
def test_models_choose_among_labels(durations: tuple[int, ...] | None, model: NgramLM) -> None:
    boost = PhraseBoost([["w1", "w2"], ["w3"]], LABELS, 4.0)
    others = PhraseBoost([["w5", "w5", "w5"]], LABELS, 9.0)
    changed = 0
    for seed in SEEDS:
        network = transducer(durations=durations, seed=seed, blank_bias=0.0)
        plain = network.search(rnnt_greedy_search, max_tokens=20)
        for each in (boost, [boost, None, others, others]):
            options = {"language_model": model, "alpha": 0.5, "boost": each, "max_tokens": 20}
            found = network.search(rnnt_greedy_search, **options)
            for b in range(len(network.lengths)):
                own = each[b] if isinstance(each, list) else each
                models = [(model, 0.5), *([(own, 1.0)] if own else [])]
                assert_found(found, b, greedy(network, b, max_tokens=20, models=models))
            changed += int((found.tokens != plain.tokens).any())
    assert changed > len(SEEDS)


def own_model(scores: torch.Tensor, start: Callable[[int], torch.Tensor]) -> Any:
    """Return a model that scores labels alike after anything, and whose states count them."""

    def advance(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        following = torch.stack([states + 1] * len(scores), 1)
        return scores.expand(len(states), -1), following

    return SimpleNamespace(start=start, advance=advance, final=torch.zeros_like)


def test_a_model_of_ones_own() -> None:
    """It gives no probability to one label, and its states have two numbers."""
    scores = torch.zeros(len(LABELS)).index_fill(0, torch.tensor(2), -torch.inf)
    never = own_model(scores, lambda B: torch.zeros(B, 2))
    network = transducer(blank_bias=0.0, seed=1)
    assert (network.search(rnnt_greedy_search).tokens == 2).any()
    found = network.search(rnnt_greedy_search, language_model=never, alpha=1.0)
    assert not (found.tokens == 2).any()
    without = network.search(rnnt_greedy_search, language_model=never, alpha=0.0)
    assert torch.equal(without.scores, network.search(rnnt_greedy_search).scores)
    (states,) = found.state.models
    assert torch.equal(states, found.lengths.expand(-1, 2).float())


def test_a_model_without_a_possible_label() -> None:
    nothing = own_model(torch.full((len(LABELS),), -torch.inf), torch.zeros)
    network = transducer()
    plain = network.search(rnnt_greedy_search)
    found = network.search(rnnt_greedy_search, language_model=nothing)
    assert torch.equal(found.tokens, plain.tokens)
    assert (found.scores[:, 0] == -torch.inf).tolist() == [n > 0 for n in plain.lengths[:, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    network = transducer(Stateless, dtype=dtype, durations=TDT)
    found = network.search(rnnt_greedy_search)
    assert found.scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (found.lengths[[0, 1, 3]] > 0).all()


def test_a_state_that_is_no_tensor_is_refused() -> None:
    network = transducer()

    class Counting:
        state_dims = 0

        def __call__(self, tokens: torch.Tensor, state: Any) -> Any:
            return torch.zeros(len(tokens), 4), {"position": 1 + (state or {}).get("position", 0)}

    with pytest.raises(TypeError, match=r"^predict: expected tensors, .* got int$"):
        network._replace(predict=Counting()).search(rnnt_greedy_search)


def test_wrong_arguments_are_named(model: NgramLM) -> None:
    network = transducer()

    def search(**changes: Any) -> Any:
        fields = {k: v for k, v in changes.items() if k in network._fields}
        options = {k: v for k, v in changes.items() if k not in fields}
        return network._replace(**fields).search(rnnt_greedy_search, **options)

    def predict(result: Any) -> Any:
        function = type("Predict", (), {"state_dims": 0, "__call__": lambda *_: result})
        return function()

    wide = torch.zeros(4, 8)
    fewer = NgramLM(model._trie, model.words, model._columns[:3], model.order)
    for call, message in (
        (lambda: search(encoder=network.encoder[0]), "ValueError: encoder: expected shape"),
        (lambda: search(encoder=network.encoder.long()), "TypeError: encoder: expected a float"),
        (lambda: search(lengths=[1, 2]), "ValueError: lengths: expected shape"),
        (lambda: search(lengths=[14, 1, 1, 1]), "ValueError: lengths: expected frames from 0 to"),
        (lambda: search(blank=-1), "ValueError: blank: expected a number of at least 0, got -1"),
        (
            lambda: search(blank=6, predict=predict((wide, None))),
            "ValueError: join: expected logits .* V > blank = 6, got",
        ),
        (lambda: search(max_symbols_per_step=0), "ValueError: max_symbols_per_step: expected a"),
        (lambda: search(max_tokens=0.5), "TypeError: max_tokens: expected an int, got float"),
        (lambda: search(durations=[]), "ValueError: durations: expected numbers"),
        (lambda: search(durations=[0]), "ValueError: durations: expected numbers"),
        (lambda: search(durations="01"), "TypeError: durations: expected a sequence"),
        (lambda: search(alpha=math.nan, language_model=model), "ValueError: alpha: expected a num"),
        (lambda: search(language_model=3), "TypeError: language_model: expected an object with"),
        (lambda: search(language_model=fewer), "ValueError: language_model: .* labels of"),
        (lambda: search(boost=[None]), "ValueError: boost: expected one for each of 4 sequences"),
        (lambda: search(boost=[None] * 3 + [3]), r"TypeError: boost\[3\]: expected a PhraseBoost"),
        (lambda: search(state=3), "TypeError: state: expected that of hypotheses, a T.*, got int"),
        (
            lambda: search(encoder=network.encoder[:2], lengths=[1, 2], state=search().state),
            "ValueError: state: expected that of 2 streams, got that of 4",
        ),
        (
            lambda: search(state=search().state, language_model=model),
            "ValueError: state: expected that of a search with 1 of .*, got one with 0",
        ),
        (lambda: search(predict=predict(wide)), "TypeError: predict: expected a pair"),
        (lambda: search(predict=predict((wide[:2], None))), "ValueError: predict: expected an out"),
        (
            lambda: search(predict=predict((wide, wide[:1]))),
            r"ValueError: state_dims: .* the 4 rows .* got 0 for one of shape \[1, 8\]",
        ),
        (lambda: search(predict=None), "TypeError: predict: expected a function, got NoneType"),
        (lambda: search(join=None), "TypeError: join: expected a function, got NoneType"),
        (lambda: search(join=lambda x, y: x[:, 0]), "ValueError: join: expected logits of shape"),
        (lambda: search(join=lambda x, y: None), "TypeError: join: expected a Tensor"),
    ):
        with raises(message):
            call()


def test_a_state_goes_on_with_the_same_boosts() -> None:
    network = transducer(lengths=(5, 5))
    first, second = (PhraseBoost([[word, "w2"]], LABELS, 2.0) for word in ("w1", "w3"))
    lighter = PhraseBoost([["w1", "w2"]], LABELS, 1.0)

    def state(boost: Any) -> Any:
        return network.search(rnnt_greedy_search, boost=boost).state

    for before, now, others in (
        (first, second, "0, 1"),
        (first, lighter, "0, 1"),
        (first, [first, None], "1"),
        ([first, second], [second, first], "0, 1"),
        ([None, second], [None, first], "1"),
        (first, None, "0, 1"),
        (None, first, "0, 1"),
    ):
        with raises(f"ValueError: state: .* with other boosts for the sequences \\[{others}\\]"):
            network.search(rnnt_greedy_search, boost=now, state=state(before))
    for before, now in (
        (first, [first, first]),
        ([None, None], None),
        (first, pickle.loads(pickle.dumps(first))),
    ):
        network.search(rnnt_greedy_search, boost=now, state=state(before))


@pytest.mark.gpu
def test_the_host_does_not_wait() -> None:
    network = moved(transducer(Stateless, lengths=(40,) * 3, blank_bias=0.0), "cuda")
    network = network._replace(lengths=torch.tensor([40, 30, 20], device="cuda"))
    network.search(rnnt_greedy_search)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            network.search(rnnt_greedy_search)
            network.search(rnnt_greedy_search, graphs=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [each for each in found if "synchronizing" in str(each.message)]
