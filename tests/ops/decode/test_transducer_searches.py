"""What greedy and beam search of transducers have in common."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.transducers import LABELS, TDT, Cached, Recurrent, Stateless, moved, transducer

from partita import NgramLM, PhraseBoost, rnnt_beam_search, rnnt_greedy_search

searches = pytest.mark.parametrize("search", [rnnt_greedy_search, rnnt_beam_search])


@searches
def test_two_runs_give_the_same_bits_and_neighbours_do_not_matter(search: Any) -> None:
    network = transducer(durations=TDT, seed=3)
    options = {"beam_width": 4, "nbest": 4} if search is rnnt_beam_search else {}
    found, again = (network.search(search, **options) for _ in range(2))
    poisoned = network.encoder.clone()
    poisoned[0] = torch.nan
    other = network._replace(encoder=poisoned).search(search, **options)
    assert other.scores[0, 0].isnan()
    for a, b, c in zip(found[:-1], again[:-1], other[:-1], strict=True):
        assert torch.equal(a, b) and torch.equal(a[1:], c[1:])


@searches
def test_without_frames_there_are_no_tokens(search: Any) -> None:
    network = transducer(lengths=(0, 0, 3))
    found = network.search(search)
    assert found.lengths[:2].tolist() == [[0], [0]]
    assert found.scores[:2].tolist() == [[0.0], [0.0]]
    assert (found.tokens[:2] == -1).all()
    none = network._replace(encoder=network.encoder[:, :0], lengths=[0, 0, 0])
    assert none.search(search).scores.tolist() == [[0.0]] * 3
    if search is rnnt_greedy_search:
        found_later = none.search(search, state=found.state)
        assert found_later.state is found.state and not found_later.lengths.any()
    nobody = network._replace(encoder=network.encoder[:0], lengths=[])
    assert nobody.search(search).tokens.shape == (0, 1, 10)


@pytest.mark.usefixtures("unchecked")
@searches
def test_an_invalid_length_has_no_tokens(search: Any) -> None:
    network = transducer(lengths=(5, 5, 5))
    found = network.search(search)
    wrong = network._replace(lengths=[5, 6, -1]).search(search)
    assert wrong.lengths[1:].tolist() == [[0], [0]]
    assert wrong.scores.isnan().tolist() == [[False], [True], [True]]
    assert torch.equal(wrong.tokens[0], found.tokens[0])


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
@searches
def test_wrong_dimensions_of_a_state_are_named(
    search: Any, kind: Any, dims: Any, message: str
) -> None:
    with raises(message):
        transducer(kind).search(search, state_dims=dims)


@searches
def test_a_state_that_grows_is_refused(search: Any) -> None:
    class Growing(Stateless):
        """Attention over a cache that has one more row after each label."""

        def forward(self, tokens: torch.Tensor, state: Any) -> Any:
            output = self.embeddings[0](tokens)[:, None]
            return output[:, 0], output if state is None else torch.cat([state, output], 1)

    shapes = r"\[\d+, 2, 8\] .* after \[\d+, 1, 8\]"
    with raises(f"ValueError: predict: .* tensors keep their shapes and dtypes, got {shapes}"):
        transducer(Growing).search(search)


MODEL = "ValueError: language_model: .*"


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("start", lambda B: None, MODEL + r"states \[4, \.\.\.\] from `start`, got NoneType"),
        ("start", lambda B: torch.zeros(3), MODEL + r"from `start`, got \[3\]"),
        ("advance", lambda x: x, "TypeError: language_model: .*a pair .*`advance`, got Tensor"),
        ("advance", lambda x: (torch.zeros(6), x), MODEL + r"from `advance` .* got \[6\]"),
        ("advance", lambda x: (torch.zeros(len(x), 6), x), MODEL + "from `advance` with B ="),
        (
            "advance",
            lambda x: (torch.zeros(len(x), 5), torch.zeros(len(x), 5)),
            MODEL + "a column for each of the 6 classes .*, got 5",
        ),
        ("final", lambda x: None, MODEL + r"scores \[32\] from `final`, got NoneType"),
        ("final", lambda x: torch.zeros(1), MODEL + r"from `final`, got \[1\]"),
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


@pytest.mark.gpu
@pytest.mark.parametrize("durations", [None, TDT])
@searches
def test_a_gpu_finds_the_same(
    search: Any, durations: tuple[int, ...] | None, model: NgramLM
) -> None:
    boost = PhraseBoost([["w1", "w2"], ["w3"]], LABELS, 2.0)
    options = {"beam_width": 4, "nbest": 4} if search is rnnt_beam_search else {}
    for seed in range(4):
        network = transducer(durations=durations, seed=seed, dtype=torch.float64)
        expected = network.search(search, language_model=model, boost=boost, **options)
        on_gpu = {"language_model": model.to("cuda"), "boost": [boost] * 4, **options}
        found = moved(network, "cuda").search(search, **on_gpu)
        for name in ("tokens", "lengths", "steps", "durations"):
            assert torch.equal(getattr(found, name).cpu(), getattr(expected, name))
        torch.testing.assert_close(found.scores.cpu(), expected.scores)
