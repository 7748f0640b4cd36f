"""The decoders against the enumeration of all paths, and the contract of their results."""

import math

import pytest
import torch
from helpers.ctc import NEEDS_NUMBA, backends
from helpers.decode import assert_same, batch, collapse, enumerate_prefixes

import partita
from partita.ops.decode import reference


@backends
@pytest.mark.parametrize(("T", "C", "blank"), [(5, 3, 0), (4, 4, 2), (1, 2, 1), (3, 1, 0)])
def test_scores_of_a_beam_that_holds_all_prefixes(T: int, C: int, blank: int, backend: str) -> None:
    x = batch(T, 1, C, seed=T)[0]
    expected = enumerate_prefixes(x[:, 0].log_softmax(-1), blank)
    nbest = len(expected)
    with partita.backend(backend):
        found = partita.ctc_beam_search(
            x, blank=blank, beam_width=max(nbest, 130), nbest=nbest, from_logits=True
        )
    scores = found.scores[0].tolist()
    assert scores == sorted(scores, reverse=True)
    tokens = [
        tuple(row[:n]) for row, n in zip(found.tokens[0].tolist(), found.lengths[0], strict=True)
    ]
    assert dict(zip(tokens, scores, strict=True)) == pytest.approx(expected, abs=1e-12)


@backends
def test_steps_are_those_of_the_best_alignment(backend: str) -> None:
    """With all alignments in the beam, they are where `ctc_align` starts each token."""
    x, lengths = batch(6, 4, 3, seed=3)
    with partita.backend(backend):
        found = partita.ctc_beam_search(x, lengths, beam_width=200, nbest=3, from_logits=True)
        for i in range(3):
            tokens = found.tokens[:, i].clamp(min=0)
            aligned = partita.ctc_align(x, tokens, lengths, found.lengths[:, i], from_logits=True)
            start = aligned.spans().start
            S = start.shape[1]
            has = found.scores[:, i] > -torch.inf
            assert torch.equal(found.steps[has, i, :S], start[has])
            assert (found.steps[:, i, S:] == -1).all()


@NEEDS_NUMBA
@pytest.mark.parametrize("seed", range(12))
def test_numba_agrees_with_the_reference(seed: int) -> None:
    T, C, width = 2 + 3 * (seed % 5), 1 + seed % 6, 1 + 4 * (seed % 7)
    x, lengths = batch(T, 3, C, seed, round=seed % 3 == 1, forbidden=seed % 4 == 2)
    options = {"blank": seed % C, "from_logits": seed % 2 == 0}
    searches = [
        lambda: partita.ctc_greedy_search(x, lengths, **options),
        lambda: partita.ctc_beam_search(
            x, lengths, beam_width=width, nbest=min(width, 3), **options
        ),
        lambda: partita.ctc_beam_search(
            x, lengths, beam_width=width, cutoff_top_n=2, blank_skip_threshold=0.5, **options
        ),
    ]
    for search in searches:
        with partita.backend("reference"):
            expected = search()
        with partita.backend("numba"):
            assert_same(search(), expected)


@pytest.mark.parametrize(("width", "seed"), [(1, 0), (2, 1), (3, 2), (5, 3)])
def test_no_more_labels_than_the_beam_and_one_can_enter_it(width: int, seed: int) -> None:
    x, lengths = batch(9, 2, 12, seed, round=seed % 2 == 1)
    everything = reference.ctc_beam_search(x, lengths, 0, width, width, 12, 0.0, True)
    limited = reference.ctc_beam_search(x, lengths, 0, width, width, width + 1, 0.0, True)
    assert_same(limited, everything, 0.0)


@backends
def test_a_prefix_that_comes_back_is_the_same_prefix(backend: str) -> None:
    """No prefix is found more than one time, also where prefixes leave the beam and return."""
    x, lengths = batch(40, 6, 3, 5)
    with partita.backend(backend):
        found = partita.ctc_beam_search(x, lengths, beam_width=4, nbest=4, from_logits=True)
    for tokens, scores in zip(found.tokens.tolist(), found.scores, strict=True):
        number = int((scores > -torch.inf).sum())
        assert len({tuple(row) for row in tokens[:number]}) == number


@backends
def test_greedy_search_decodes_the_best_path(backend: str) -> None:
    x, lengths = batch(9, 3, 4, 1)
    with partita.backend(backend):
        found = partita.ctc_greedy_search(x, lengths, blank=1, from_logits=True)
    best, path = x.log_softmax(-1).max(-1)
    for n, length in enumerate(lengths.tolist()):
        tokens = collapse(tuple(path[:length, n].tolist()), 1)
        assert tuple(found.tokens[n, 0, : len(tokens)].tolist()) == tokens
        assert (found.tokens[n, 0, len(tokens) :] == -1).all()
        assert int(found.lengths[n, 0]) == len(tokens)
        steps = found.steps[n, 0, : len(tokens)]
        assert path[steps, n].tolist() == list(tokens)
        torch.testing.assert_close(found.scores[n, 0], best[:length, n].sum())


@backends
def test_skipped_steps_are_blanks(backend: str) -> None:
    """Where the blank is above the threshold, the other classes do not matter."""
    x = batch(8, 2, 4, 2)[0].log_softmax(-1)
    other = x.clone()
    x[[1, 4]] = torch.tensor([0.8, 0.1, 0.05, 0.05]).double().log()
    other[[1, 4]] = torch.tensor([0.8, 0.0, 0.0, 0.2]).double().log()
    with partita.backend(backend):
        found, expected = (
            partita.ctc_beam_search(y, blank_skip_threshold=0.79, nbest=4) for y in (x, other)
        )
        assert_same(found, expected)
        assert (partita.ctc_beam_search(x).scores > found.scores[:, :1]).all()


@pytest.mark.usefixtures("unchecked")
@backends
def test_invalid_sequences_spoil_no_other(backend: str) -> None:
    x = batch(5, 5, 4)[0].log_softmax(-1)
    expected = [partita.ctc_beam_search(x), partita.ctc_greedy_search(x)]
    x[3, 1, 2], x[0, 2, 0] = torch.nan, torch.inf
    lengths = [5, 5, 5, 6, -1]
    with partita.backend(backend):
        found = [partita.ctc_beam_search(x, lengths), partita.ctc_greedy_search(x, lengths)]
    for a, b in zip(found, expected, strict=True):
        assert a.scores[:, 0].isnan().tolist() == [False, True, True, True, True]
        assert_same(
            partita.Hypotheses(*(t[:1] for t in a)), partita.Hypotheses(*(t[:1] for t in b))
        )
        assert (a.tokens[1:] == -1).all() and (a.steps[1:] == -1).all() and not a.lengths[1:].any()


@backends
def test_impossible_steps_and_empty_inputs(backend: str) -> None:
    x = torch.full((3, 1, 3), -torch.inf)
    with partita.backend(backend):
        found = partita.ctc_beam_search(x, nbest=2)
        assert found.scores.tolist() == [[-math.inf] * 2] and not found.lengths.any()
        for shape in ((0, 2, 3), (4, 0, 3)):
            for search in (partita.ctc_beam_search, partita.ctc_greedy_search):
                found = search(torch.zeros(shape))
                assert found.tokens.shape == (shape[1], 1, shape[0])
                assert found.scores.tolist() == [[0.0]] * shape[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes_strides_and_forms_of_the_arguments(dtype: torch.dtype) -> None:
    x = batch(7, 3, 5)[0].to(dtype)
    plain = partita.ctc_beam_search(x, [7, 3, 0], from_logits=True)
    assert plain.scores.dtype == torch.promote_types(dtype, torch.float32)
    other = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    found = partita.ctc_beam_search(other, torch.tensor([7, 3, 0]), from_logits=True)
    assert_same(found, plain, 0.0)
    alone = partita.ctc_beam_search(x[:, 0], from_logits=True)
    assert_same(alone, partita.Hypotheses(*(t[:1] for t in plain)), 0.0)
    with partita.backend("reference"):
        assert_same(plain, partita.ctc_beam_search(x, [7, 3, 0], from_logits=True), 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width: expected a number from 1 to 256, got 0"),
        ({"beam_width": 257}, "beam_width: expected a number from 1 to 256, got 257"),
        ({"beam_width": 2, "nbest": 3}, "nbest: expected a number from 1 to 2, got 3"),
        ({"cutoff_top_n": 0}, "cutoff_top_n: expected a number of at least 1, got 0"),
        ({"blank_skip_threshold": 1.5}, "blank_skip_threshold: expected a number above 0.0"),
        ({"blank": 5}, "blank: expected a class from 0 to 3, got 5"),
        ({"input_lengths": [4, 9]}, r"input_lengths: expected steps from 0 to 4, got 9 at \[1\]"),
        ({"input_lengths": [4]}, r"input_lengths: expected shape \[N\]"),
    ],
)
def test_errors_name_the_argument(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partita.ctc_beam_search(torch.zeros(4, 2, 4), **options)


def test_errors_of_the_scores() -> None:
    for search in (partita.ctc_beam_search, partita.ctc_greedy_search):
        with pytest.raises(ValueError, match=r"log_probs: expected shape \[T, N, C\]"):
            search(torch.zeros(4))
        with pytest.raises(TypeError, match="log_probs: expected a floating dtype"):
            search(torch.zeros(4, 2, 3, dtype=torch.int64))


@pytest.mark.parametrize("value", [-1e30, torch.finfo(torch.float32).min])
def test_a_step_whose_logits_are_all_huge_is_as_probable_for_each_class(value: float) -> None:
    logits = torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(0))
    results = []
    for fill in (value, 0.0):
        logits[1] = fill
        x = logits.clone().requires_grad_()
        loss = partita.ctc_loss(x, torch.tensor([[1, 2]]), [4], [2], from_logits=True)
        found = partita.ctc_align(x, torch.tensor([[1, 2]]), [4], [2], from_logits=True)
        scores = [partita.ctc_greedy_search(x, from_logits=True).scores]
        scores += [partita.ctc_beam_search(x, from_logits=True, nbest=3).scores]
        results.append([loss, *torch.autograd.grad(loss, x), found.scores, found.score, *scores])
    torch.testing.assert_close(*results)
