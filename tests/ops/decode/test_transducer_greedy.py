"""Greedy search of transducers, against a loop over the frames of one sequence."""

import io
import math
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.ngrams import corpus, model_of
from helpers.transducers import (
    BLANK,
    Cached,
    Found,
    Recurrent,
    Stateless,
    Transducer,
    greedy,
    transducer,
)

from partita import NgramLM, PhraseBoost, rnnt_beam_search, rnnt_greedy_search

LABELS = ["-", "w1", "w2", "w3", "w4", "w5"]
SEEDS = range(4)
TDT = (0, 1, 2, 4)


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


@pytest.fixture(scope="module")
def model() -> NgramLM:
    return model_of(corpus(200, words=6), 3, labels=LABELS)


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


def chunks(network: Transducer, sizes: list[int], **options: Any) -> list[Any]:
    """Decode a network's frames in chunks, and return the hypotheses of each."""
    found, state, first = [], None, 0
    for size in sizes:
        lengths = [min(max(T - first, 0), size) for T in network.lengths]
        part = network.encoder[:, first : first + size]
        chunk = network._replace(encoder=part, lengths=lengths)
        found.append(chunk.search(rnnt_greedy_search, state=state, **options))
        state, first = found[-1].state, first + size
    return found


@pytest.mark.parametrize("kind", [Recurrent, Stateless, Cached])
@pytest.mark.parametrize("durations", [None, TDT, (0, 1, 6)])
def test_chunks_give_what_one_call_gives(
    kind: Any, durations: tuple[int, ...] | None, model: NgramLM
) -> None:
    boost = PhraseBoost([["w1", "w2"], ["w3"]], LABELS, 2.0)
    for seed, options in enumerate(({}, {"language_model": model}, {"boost": boost})):
        network = transducer(kind, durations=durations, seed=seed)
        given = {"max_symbols_per_step": 3, "max_tokens": 40, **options}
        whole = network.search(rnnt_greedy_search, **given)
        for sizes in ([13], [1] * 13, [5, 0, 1, 7], [2, 11]):
            parts = chunks(network, sizes, **given)
            for b in range(len(network.lengths)):
                tokens, steps, scores, first = [], [], 0.0, 0
                for size, part in zip(sizes, parts, strict=True):
                    n = int(part.lengths[b, 0])
                    tokens += part.tokens[b, 0, :n].tolist()
                    steps += (part.steps[b, 0, :n] + first).tolist()
                    scores, first = scores + float(part.scores[b, 0]), first + size
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


def test_a_model_of_ones_own() -> None:
    class Never:
        """Gives no probability to one label; its states have two numbers."""

        def start(self, B: int) -> torch.Tensor:
            return torch.zeros(B, 2)

        def advance(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = torch.zeros(len(states), len(LABELS))
            scores[:, 2] = -torch.inf
            return scores, (states + 1)[:, None].expand(-1, len(LABELS), -1)

        def final(self, states: torch.Tensor) -> torch.Tensor:
            return states[:, 0]

    network = transducer(blank_bias=0.0, seed=1)
    assert (network.search(rnnt_greedy_search).tokens == 2).any()
    found = network.search(rnnt_greedy_search, language_model=Never(), alpha=1.0)
    assert not (found.tokens == 2).any()
    without = network.search(rnnt_greedy_search, language_model=Never(), alpha=0.0)
    assert torch.equal(without.scores, network.search(rnnt_greedy_search).scores)
    (states,) = found.state.models
    assert torch.equal(states, found.lengths.expand(-1, 2).float())


def test_a_model_without_a_possible_label() -> None:
    class Nothing:
        def start(self, B: int) -> torch.Tensor:
            return torch.zeros(B)

        def advance(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = torch.full((len(states), len(LABELS)), -torch.inf)
            return scores, states[:, None].expand(-1, len(LABELS))

        def final(self, states: torch.Tensor) -> torch.Tensor:
            return states

    network = transducer()
    plain = network.search(rnnt_greedy_search)
    found = network.search(rnnt_greedy_search, language_model=Nothing())
    assert torch.equal(found.tokens, plain.tokens)
    assert (found.scores[:, 0] == -torch.inf).tolist() == [n > 0 for n in plain.lengths[:, 0]]


def test_two_runs_give_the_same_bits_and_neighbours_do_not_matter() -> None:
    network = transducer(durations=TDT, seed=3)
    found, again = (network.search(rnnt_greedy_search) for _ in range(2))
    for a, b in zip(found[:-1], again[:-1], strict=True):
        assert torch.equal(a, b)
    poisoned = network.encoder.clone()
    poisoned[0] = torch.nan
    other = network._replace(encoder=poisoned).search(rnnt_greedy_search)
    assert other.scores[0].isnan().all()
    for a, b in zip(found[:-1], other[:-1], strict=True):
        assert torch.equal(a[1:], b[1:])


def test_without_frames_there_are_no_tokens() -> None:
    network = transducer(lengths=(0, 0, 3))
    found = network.search(rnnt_greedy_search)
    assert found.lengths[:2].tolist() == [[0], [0]]
    assert found.scores[:2].tolist() == [[0.0], [0.0]]
    assert (found.tokens[:2] == -1).all()
    state = found.state
    none = network._replace(encoder=network.encoder[:, :0], lengths=[0, 0, 0])
    found = none.search(rnnt_greedy_search, state=state)
    assert found.state is state
    assert found.lengths.tolist() == [[0]] * 3
    nobody = network._replace(encoder=network.encoder[:0], lengths=[])
    assert nobody.search(rnnt_greedy_search).tokens.shape == (0, 1, 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    network = transducer(Stateless, dtype=dtype, durations=TDT)
    found = network.search(rnnt_greedy_search)
    assert found.scores.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (found.lengths[[0, 1, 3]] > 0).all()


@pytest.mark.usefixtures("unchecked")
def test_an_invalid_length_has_no_tokens() -> None:
    network = transducer(lengths=(5, 5, 5))
    found = network.search(rnnt_greedy_search)
    wrong = network._replace(lengths=[5, 6, -1]).search(rnnt_greedy_search)
    assert wrong.lengths[1:].tolist() == [[0], [0]]
    assert wrong.scores.isnan().tolist() == [[False], [True], [True]]
    assert torch.equal(wrong.tokens[0], found.tokens[0])


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
        (lambda: search(language_model=fewer), "ValueError: language_model: expected a column for"),
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


@pytest.mark.parametrize(
    ("kind", "dims", "message"),
    [
        (Recurrent, 0, r"ValueError: state_dims: .* got 0 for one of shape \[2, \d+, 8\]"),
        (Recurrent, -2, r"ValueError: state_dims: .* got -2 for one of shape"),
        (Recurrent, 3, r"ValueError: state_dims: .* got 3 for one of shape"),
        (Recurrent, None, "ValueError: state_dims: expected a number or .* which has 0, got None"),
        (Recurrent, (1,), r"ValueError: state_dims: expected a .* which has 1, got \(1,\)"),
        (Recurrent, "1", "TypeError: state_dims: expected an int, got str"),
        (Cached, 1, r"ValueError: state_dims: .* got 1 for one of shape \[\d+\]"),
        (
            Cached,
            {"cache": 1},
            "ValueError: state_dims: expected a number .* which has 'place', got",
        ),
    ],
)
@pytest.mark.parametrize("search", [rnnt_greedy_search, rnnt_beam_search])
def test_wrong_dimensions_of_a_state_are_named(
    search: Any, kind: Any, dims: Any, message: str
) -> None:
    with raises(message):
        transducer(kind).search(search, state_dims=dims)


@pytest.mark.parametrize("search", [rnnt_greedy_search, rnnt_beam_search])
def test_a_state_that_grows_is_refused(search: Any) -> None:
    class Growing(Stateless):
        """Attention over a cache that has one more row after each label."""

        def forward(self, tokens: torch.Tensor, state: Any) -> Any:
            output = self.embeddings[0](tokens)[:, None]
            return output[:, 0], output if state is None else torch.cat([state, output], 1)

    shapes = r"\[\d+, 2, 8\] .* after \[\d+, 1, 8\]"
    with raises(f"ValueError: predict: .* tensors keep their shapes and dtypes, got {shapes}"):
        transducer(Growing).search(search)


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        (
            "start",
            lambda B: None,
            r"ValueError: language_model: .*states \[4, \.\.\.\] from `start`, got NoneType",
        ),
        (
            "start",
            lambda B: torch.zeros(3),
            r"ValueError: language_model: .*from `start`, got \[3\]",
        ),
        (
            "advance",
            lambda x: x,
            "TypeError: language_model: .*a pair .* from `advance`, got Tensor",
        ),
        (
            "advance",
            lambda x: (torch.zeros(6), x),
            r"ValueError: language_model: .*from `advance` .* got \[6\]",
        ),
        (
            "advance",
            lambda x: (torch.zeros(len(x), 6), x),
            "ValueError: language_model: .*from `advance` with B =",
        ),
        (
            "advance",
            lambda x: (torch.zeros(len(x), 5), torch.zeros(len(x), 5)),
            "ValueError: language_model: .*a column for each of the 6 classes .*, got 5",
        ),
        (
            "final",
            lambda x: None,
            r"ValueError: language_model: .*scores \[32\] from `final`, got NoneType",
        ),
        (
            "final",
            lambda x: torch.zeros(1),
            r"ValueError: language_model: .*from `final`, got \[1\]",
        ),
    ],
)
def test_errors_of_a_model_of_ones_own(method: str, result: Any, message: str) -> None:
    methods = {
        "start": torch.zeros,
        "advance": lambda x: (torch.zeros(len(x), 6), x[:, None].expand(-1, 6)),
        "final": torch.zeros_like,
    }
    for search in (rnnt_greedy_search, rnnt_beam_search):
        if search is rnnt_beam_search or method != "final":  # greedy search asks for no end
            model = SimpleNamespace(**{**methods, method: result})
            with raises(message):
                transducer().search(search, language_model=model)


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
@pytest.mark.parametrize("durations", [None, TDT])
def test_a_gpu_finds_the_same(durations: tuple[int, ...] | None, model: NgramLM) -> None:
    boost = PhraseBoost([["w1", "w2"], ["w3"]], LABELS, 2.0)
    for seed in SEEDS:
        network = transducer(durations=durations, seed=seed, dtype=torch.float64)
        expected = network.search(rnnt_greedy_search, language_model=model, boost=boost)
        moved = network._replace(
            predict=network.predict.cuda(),
            join=network.join.cuda(),
            encoder=network.encoder.cuda(),
        )
        options = {"language_model": model.to("cuda"), "boost": [boost] * 4}
        found = moved.search(rnnt_greedy_search, **options)
        for name in ("tokens", "lengths", "steps", "durations"):
            assert torch.equal(getattr(found, name).cpu(), getattr(expected, name))
        torch.testing.assert_close(found.scores.cpu(), expected.scores)
    assert BLANK not in found.tokens


@pytest.mark.gpu
def test_the_host_does_not_wait() -> None:
    network = transducer(Stateless, lengths=(40,) * 3, blank_bias=0.0)
    moved = network._replace(
        predict=network.predict.cuda(),
        join=network.join.cuda(),
        encoder=network.encoder.cuda(),
        lengths=torch.tensor([40, 30, 20], device="cuda"),
    )
    moved.search(rnnt_greedy_search)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            moved.search(rnnt_greedy_search)
            moved.search(rnnt_greedy_search, graphs=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [each for each in found if "synchronizing" in str(each.message)]
