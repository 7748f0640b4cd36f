"""Beam search of transducers in chunks, against one call for all frames."""

import io
import pickle
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.errors import raises
from helpers.rows import kernel_devices
from helpers.transducers import (
    LABELS,
    TDT,
    Cached,
    Recurrent,
    Stateless,
    Transducer,
    chunks_of,
    moved,
    transducer,
)

import partita
from partita import NgramLM, PhraseBoost, rnnt_beam_search, rnnt_greedy_search

FIELDS = ("tokens", "steps", "durations", "token_scores")


def chunks(network: Transducer, sizes: Iterable[int], **options: Any) -> list[Any]:
    """Decode a network's frames in chunks, the last of which is final."""
    found, state, parts = [], None, list(chunks_of(network, sizes))
    for part in parts:
        final = part is parts[-1]
        found.append(part.search(rnnt_beam_search, state=state, final=final, **options))
        state = found[-1].state
    assert state is None
    return found


def joined(parts: list[Any], b: int, i: int) -> list[Any]:
    """Return the tokens, steps, durations and scores of tokens of hypothesis i of a sequence."""
    fields: list[list[Any]] = [[], [], [], []]
    for part in parts:
        is_last = part.state is None
        n = int(part.lengths[b, i] if is_last else part.state.committed[b])
        for field, name in zip(fields, FIELDS, strict=True):
            field += getattr(part, name)[b, i if is_last else 0, :n].tolist()
    return fields


def assert_same(parts: list[Any], whole: Any) -> None:
    """Compare the bits of what chunks and one call have found."""
    assert torch.equal(parts[-1].scores, whole.scores)
    for b, i in torch.nonzero(whole.scores > -torch.inf).tolist():
        n = int(whole.lengths[b, i])
        expected = [getattr(whole, name)[b, i, :n].tolist() for name in FIELDS]
        assert joined(parts, b, i) == expected


@pytest.mark.parametrize(
    ("kind", "durations"),
    [(Recurrent, None), (Recurrent, TDT), (Recurrent, (1, 3)), (Stateless, TDT), (Cached, None)],
)
def test_chunks_give_the_bits_of_one_call(
    kind: Any, durations: tuple[int, ...] | None, model: NgramLM
) -> None:
    boost = PhraseBoost([["w1", "w2"], ["w3"]], LABELS, 2.0)
    boosts = [boost, None, boost, PhraseBoost([["w5"]], LABELS, 4.0)]
    rng, committed = random.Random(0), 0
    for seed, models in enumerate(({}, {"language_model": model}, {"boost": boosts})):
        network = transducer(kind, (23, 17, 0, 22), durations, seed=seed, blank_bias=2.0)
        options = {"max_symbols_per_step": 2, "max_tokens": 60, "beam_width": 3, "nbest": 3}
        options |= {**models, "length_normalize": seed == 1}
        whole = network.search(rnnt_beam_search, **options)
        for sizes in ([], [23], [1] * 23, [3] * 7, [rng.choice([0, 1, 5]) for _ in range(9)]):
            parts = chunks(network, sizes, **options)
            assert_same(parts, whole)
            committed += sum(int(part.state.committed.sum()) for part in parts[:-1])
    assert committed > 20


def test_a_chunk_returns_the_beam_before_a_frame_is_missing() -> None:
    """Of 3 frames, 2 steps are taken: a third one might lead to a frame that is not there yet."""
    network = transducer(lengths=(6,), dtype=torch.float64, classes=3)
    part, _ = chunks_of(network, [3])
    found = part.search(rnnt_beam_search, final=False, beam_width=30, nbest=30, max_tokens=2)
    rows = zip(found.tokens[0].tolist(), found.lengths[0].tolist(), strict=True)
    texts = [tuple(row[:n]) for row, n in rows]
    number = int((found.scores[0] > -torch.inf).sum())
    scores = dict(zip(texts[:number], found.scores[0].tolist(), strict=False))
    output, state = network.predict(torch.tensor([0]), None)
    blanks, labels = (
        [float(network.at(0, t, output)[0][c].detach()) for t in range(2)] for c in (0, 1)
    )
    after, _ = network.predict(torch.tensor([1]), state)
    blank_after = float(network.at(0, 0, after)[0][0].detach())
    either = torch.tensor([labels[0] + blank_after, blanks[0] + labels[1]], dtype=torch.float64)
    assert len(scores) == number == 1 + 2 + 4
    assert scores[()] == pytest.approx(sum(blanks), rel=1e-12)
    assert scores[1,] == pytest.approx(float(either.logsumexp(0)), rel=1e-12)


@pytest.mark.parametrize("kind", [Recurrent, Cached])
def test_a_state_can_be_saved_and_is_not_written(kind: Any) -> None:
    network = transducer(kind, durations=TDT, seed=2)
    part, rest = chunks_of(network, [7])
    options = {"beam_width": 3, "nbest": 3, "max_tokens": 30}
    state = part.search(rnnt_beam_search, final=False, **options).state
    file, pickled = io.BytesIO(), pickle.dumps(state)
    torch.save(state, file)
    file.seek(0)
    states = [state, pickle.loads(pickled), torch.load(file), state]
    found = [rest.search(rnnt_beam_search, state=each, **options) for each in states]
    assert torch.equal(found[0].scores, network.search(rnnt_beam_search, **options).scores)
    for each in found[1:]:
        for a, b in zip(each[:-1], found[0][:-1], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("durations", "lengths"), [(None, (150, 140)), (TDT, (300, 280))])
def test_a_long_stream_takes_the_same_memory(
    durations: tuple[int, ...] | None, lengths: tuple[int, ...]
) -> None:
    network = transducer(Stateless, lengths, durations, blank_bias=2.0)
    options = {"beam_width": 3, "max_tokens": 100}
    parts = chunks(network, [5] * (lengths[0] // 5 - 1), **options)
    states = [part.state for part in parts[:-1]]
    third = len(states) // 3

    def bytes_of(state: Any) -> int:
        return len(pickle.dumps(state))

    assert max(map(bytes_of, states[third:])) < 2 * max(map(bytes_of, states[:third]))
    assert max(state.encoder.shape[1] for state in states) < 40
    assert max(state.known.shape[1] for state in states) <= 181
    assert max(state.longest for state in states) <= 60
    assert int(states[-1].before.min()) > 60
    whole = network.search(rnnt_beam_search, **options | {"max_tokens": 1000})
    assert_same(parts, whole)


def test_a_stream_may_have_no_frames_or_begin_without() -> None:
    network = transducer(lengths=(5, 0))
    options = {"nbest": 2, "max_tokens": 20}
    whole = network.search(rnnt_beam_search, **options)
    assert_same(chunks(network, [0, 0, 2, 0], **options), whole)
    none = network._replace(encoder=network.encoder[:, :0], lengths=[0, 0])
    parts = chunks(none, [0], **options)
    assert parts[0].scores.tolist() == parts[1].scores.tolist() == [[0.0, -torch.inf]] * 2
    nobody = network._replace(encoder=network.encoder[:0], lengths=[])
    assert nobody.search(rnnt_beam_search, final=False, **options).tokens.shape == (0, 2, 20)


def test_tokens_of_a_chunk_have_room() -> None:
    """By default there is room for what is not committed, and for as much as a call would have."""
    network = transducer(Stateless, (30, 28), blank_bias=4.0)
    whole = network.search(rnnt_beam_search)
    for sizes in ([1] * 29, [7] * 4):
        parts = chunks(network, sizes)
        assert_same(parts, whole)
        for part in parts[:-1]:
            assert int(part.lengths.max()) <= part.state.longest + part.state.committed.max()


def test_nan_stays_in_its_stream() -> None:
    network = transducer(lengths=(12, 12, 12))
    whole = chunks(network, [4, 4])
    network.encoder[1, 5] = torch.nan
    parts = chunks(network, [4, 4])
    for part, other in zip(parts, whole, strict=True):
        for a, b in zip(part[:-1], other[:-1], strict=True):
            assert torch.equal(a[::2], b[::2])
    assert [bool(part.scores[1, 0].isnan()) for part in parts] == [False, True, True]
    assert parts[-1].lengths[1, 0] == 0


@pytest.mark.usefixtures("unchecked")
def test_an_invalid_length_ends_its_stream() -> None:
    network = transducer(lengths=(8, 8, 8))
    part = network._replace(encoder=network.encoder[:, :4])
    state = part._replace(lengths=[4, 5, -1]).search(rnnt_beam_search, final=False).state
    found = part._replace(lengths=[4, 4, 4]).search(rnnt_beam_search, state=state)
    assert found.scores[:, 0].isnan().tolist() == [False, True, True]
    assert found.lengths[1:].tolist() == [[0], [0]]


def test_wrong_states_are_named(model: NgramLM) -> None:
    network = transducer(lengths=(5, 5))
    boost = PhraseBoost([["w1"]], LABELS, 1.0)
    state = network.search(rnnt_beam_search, final=False).state
    greedy = network.search(rnnt_greedy_search).state
    for changes, options, message in (
        ({}, {"state": 3}, "TypeError: state: .* a TransducerBeamState, got int"),
        ({}, {"state": greedy}, "TypeError: state: .* TransducerBeamState, got TransducerState"),
        (
            {"encoder": network.encoder[:1], "lengths": [5]},
            {},
            "ValueError: state: .* of 1 str",
        ),
        ({}, {"beam_width": 4}, "ValueError: state: .* beam_width=4, got one with 8"),
        ({}, {"boost": boost}, r"ValueError: state: .* boosts for the sequences \[0, 1\]"),
        ({}, {"language_model": model}, "ValueError: state: .* with 1 of .*, got one with 0"),
        (
            {"encoder": network.encoder[..., :4]},
            {},
            "ValueError: encoder: .* chunks before, 8, .*, got 4",
        ),
        ({"encoder": network.encoder.double()}, {}, "ValueError: encoder: .*float32.*got 8, .*64"),
        ({}, {"max_tokens": state.longest - 1}, "ValueError: max_tokens: expected at least .* got"),
    ):
        with raises(message):
            network._replace(**changes).search(rnnt_beam_search, **{"state": state, **options})
    with raises("TypeError: state: .* a TransducerState, got TransducerBeamState"):
        network.search(rnnt_greedy_search, state=state)


@kernel_devices
@pytest.mark.parametrize("durations", [None, TDT])
def test_chunks_by_kernels(durations: tuple[int, ...] | None, device: str) -> None:
    network = transducer(lengths=(5, 3, 0), durations=durations, dtype=torch.float64)
    options = {"max_symbols_per_step": 2, "max_tokens": 12, "beam_width": 3, "nbest": 3}
    with partita.backend("reference"):
        expected = chunks(network, [3, 1], **options)
    with partita.backend("triton"):
        network = moved(network, device)
        parts = chunks(network, [3, 1], **options)
        whole = network.search(rnnt_beam_search, **options)
    assert_same(parts, whole)
    for part, other in zip(parts, expected, strict=True):
        assert torch.equal(part.tokens.cpu(), other.tokens)
        torch.testing.assert_close(part.scores.cpu(), other.scores)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", [Recurrent, Cached])
@pytest.mark.parametrize("durations", [None, TDT])
@pytest.mark.parametrize("with_models", [False, True])
def test_chunks_on_a_gpu(
    with_models: bool,
    durations: tuple[int, ...] | None,
    kind: Any,
    graphs: bool,
    model: NgramLM,
) -> None:
    lengths = (13, 9, 0, 12) if kind is Cached else (60, 47, 0, 58)
    network = moved(transducer(kind, lengths, durations, blank_bias=2.0), "cuda")
    options: dict[str, Any] = {"beam_width": 4, "nbest": 3, "max_tokens": 130, "graphs": graphs}
    options["max_symbols_per_step"] = 2
    if with_models:
        boost = PhraseBoost([["w1", "w2"], ["w3"]], LABELS, 2.0)
        options |= {"language_model": model.to("cuda"), "boost": [boost, None, None, boost]}
    whole = network.search(rnnt_beam_search, **options)
    for sizes in ([1] * 12, [5, 0, 9, 3, 16], [40]):
        assert_same(chunks(network, sizes, **options), whole)
