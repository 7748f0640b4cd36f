"""The names of torchaudio for forced alignment: results against every alignment, and errors."""

import itertools
from dataclasses import astuple

import pytest
import torch
from helpers.errors import raises
from helpers.rows import devices
from torch import Tensor

from partita.integrations.torchaudio import TokenSpan, forced_align, merge_tokens


def sample(
    B: int, T: int, C: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Tensor:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, C, generator=g, dtype=torch.float64)
    return logits.log_softmax(-1).to(device, dtype)


def collapsed(path: list[int], blank: int) -> list[int]:
    return [label for label, _ in itertools.groupby(path) if label != blank]


def best(log_probs: Tensor, target: list[int], blank: int) -> tuple[float, list[int]]:
    """Return the score of the best alignment of `[T, C]`, and the alignment."""
    alignments = [
        list(path)
        for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs))
        if collapsed(list(path), blank) == target
    ]
    return max((float(log_probs[range(len(path)), path].sum()), path) for path in alignments)


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize(
    "targets", [[[1, 3], [3, 1]], [[1, 1, 1], [3, 1, 1]], [[3], [1]], [[], []]], ids=str
)
def test_the_best_of_all_alignments(targets: list[list[int]], blank: int) -> None:
    log_probs = sample(2, 6, 4)
    labels = torch.tensor(targets, dtype=torch.int64).reshape(2, -1)
    paths, scores = forced_align(log_probs, labels, blank=blank)
    for n, target in enumerate(targets):
        score, path = best(log_probs[n], target, blank)
        assert paths[n].tolist() == path
        torch.testing.assert_close(scores[n], log_probs[n, range(6), path], rtol=0, atol=0)
        assert float(scores[n].sum()) == pytest.approx(score)


@devices
@pytest.mark.parametrize("targets_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_shapes_and_dtypes(dtype: torch.dtype, targets_dtype: torch.dtype, device: str) -> None:
    log_probs = sample(3, 9, 5, dtype, device)
    targets = torch.tensor([[1, 2, 2], [4, 3, 4], [2, 2, 2]], dtype=targets_dtype, device=device)
    paths, scores = forced_align(log_probs.requires_grad_(), targets)
    assert paths.shape == scores.shape == (3, 9)
    assert (paths.dtype, scores.dtype) == (targets_dtype, dtype)
    assert paths.device == scores.device == log_probs.device
    assert not scores.requires_grad
    for n in range(3):
        assert collapsed(paths[n].tolist(), 0) == targets[n].tolist()
    assert torch.equal(scores, log_probs.detach().gather(2, paths.long()[..., None]).squeeze(-1))


@devices
@pytest.mark.parametrize("lengths_device", ["cpu", "the same"])
def test_padding_past_the_lengths_is_ignored(lengths_device: str, device: str) -> None:
    """A batch gives the results of its sequences one by one, whatever the padding contains."""
    log_probs = sample(3, 8, 5, torch.float32, device)
    inputs, lengths = [8, 5, 0], [2, 3, 0]
    targets = torch.tensor([[1, 2, 0], [3, 3, 4], [-7, 99, 0]], device=device)
    alone = [
        forced_align(log_probs[n : n + 1, : inputs[n]], targets[n : n + 1, : lengths[n]])
        for n in range(3)
    ]
    log_probs[1, 5:] = torch.nan
    where = "cpu" if lengths_device == "cpu" else device
    paths, scores = forced_align(
        log_probs,
        targets,
        torch.tensor(inputs, device=where),
        torch.tensor(lengths, dtype=torch.int32, device=where),
    )
    for n in range(3):
        assert torch.equal(paths[n, : inputs[n]], alone[n][0][0])
        assert torch.equal(scores[n, : inputs[n]], alone[n][1][0])
        assert not paths[n, inputs[n] :].any() and not scores[n, inputs[n] :].any()
        tokens = [span.token for span in merge_tokens(paths[n], scores[n])]
        assert tokens == targets[n, : lengths[n]].tolist()


def test_a_blank_after_the_classes_fills_the_steps_past_a_length() -> None:
    paths, scores = forced_align(
        sample(1, 6, 4), torch.tensor([[0, 1]]), torch.tensor([4]), blank=3
    )
    assert paths[0, 4:].tolist() == [3, 3]
    assert [span.token for span in merge_tokens(paths[0], scores[0], blank=3)] == [0, 1]


def test_just_enough_steps() -> None:
    assert forced_align(sample(1, 5, 4), torch.tensor([[1, 1, 1]]))[0].tolist() == [[1, 0, 1, 0, 1]]
    assert forced_align(sample(1, 3, 4), torch.tensor([[1, 2, 3]]))[0].tolist() == [[1, 2, 3]]


def test_merged_tokens() -> None:
    tokens = torch.tensor([5, 5, 0, 0, 5, 2, 2, 2, 0])
    scores = torch.tensor([-1.0, -2.0, -9.0, -9.0, -3.0, -1.0, -2.0, -6.0, -torch.inf])
    expected = [TokenSpan(5, 0, 2, -1.5), TokenSpan(5, 4, 5, -3.0), TokenSpan(2, 5, 8, -3.0)]
    spans = merge_tokens(tokens, scores)
    assert spans == expected
    assert [len(span) for span in spans] == [2, 1, 3]
    assert [span.token for span in merge_tokens(tokens, scores, blank=5)] == [0, 2, 0]
    assert merge_tokens(torch.zeros(4, dtype=torch.int32), scores[:4]) == []
    assert merge_tokens(tokens[:0], scores[:0]) == []
    assert merge_tokens(torch.tensor([1]), torch.tensor([-2.0])) == [TokenSpan(1, 0, 1, -2.0)]
    assert [type(value) for value in astuple(spans[0])] == [int, int, int, float]


@pytest.mark.parametrize(("tokens", "scores"), [((2, 3), (2, 3)), ((3,), (4,)), ((), ())])
def test_tokens_of_other_shapes(tokens: tuple[int, ...], scores: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected one shape \[T\]"):
        merge_tokens(torch.zeros(tokens), torch.zeros(scores))


LOG_PROBS, TARGETS = sample(2, 4, 3), torch.tensor([[1, 2], [2, 1]])


@pytest.mark.parametrize(
    ("error", "changes"),
    {
        "TypeError: log_probs: expected a floating dtype": {"log_probs": LOG_PROBS.long()},
        r"ValueError: log_probs: expected shape \[B, T, C\], got \[4, 3\]": {
            "log_probs": LOG_PROBS[0]
        },
        "TypeError: targets: expected int32 or int64, got torch.float64": {
            "targets": TARGETS.double()
        },
        r"ValueError: targets: expected shape \[B, L\] with B = 2, got \[1, 2\]": {
            "targets": TARGETS[:1]
        },
        r"ValueError: targets: expected shape \[B, L\] with B = 2, got \[2\]": {
            "targets": TARGETS[0]
        },
        r"ValueError: targets: .*without the blank 0, got 0 at \[0, 0\]": {"targets": TARGETS - 1},
        r"ValueError: targets: .*without the blank 2, got 2 at \[0, 1\]": {"blank": 2},
        r"ValueError: targets: expected labels from 0 to 2 without the blank 0, got 3 at"
        r" \[0, 1\]": {"targets": TARGETS + 1},
        r"ValueError: targets: .*got -1 at \[0, 0\]": {"targets": TARGETS - 2},
        "ValueError: blank: expected a class from 0 to 2, got 3": {"blank": 3},
        r"ValueError: input_lengths: expected lengths from 0 to 4, got 5 at \[1\]": {
            "input_lengths": torch.tensor([4, 5])
        },
        r"ValueError: target_lengths: expected lengths from 0 to 2, got -1 at \[0\]": {
            "target_lengths": torch.tensor([-1, 2])
        },
        r"ValueError: target_lengths: expected shape \[B\] = \[2\], got \[1, 2\]": {
            "target_lengths": torch.tensor([[1, 2]])
        },
        "TypeError: input_lengths: expected an integer dtype": {
            "input_lengths": torch.tensor([4.0, 4.0])
        },
        r"ValueError: targets: expected at most 1 labels and repeats, got 2 and 0 at \[1\]": {
            "input_lengths": torch.tensor([4, 1])
        },
        r"ValueError: targets: .*got 2 and 1 at \[1\]": {
            "targets": torch.tensor([[1, 2], [2, 2]]),
            "input_lengths": torch.tensor([4, 2]),
        },
        r"ValueError: log_probs: .*a probability above 0, got none for the target at \[0\]": {
            "log_probs": LOG_PROBS.where(torch.arange(3) != 1, -torch.inf)
        },
    }.items(),
)
def test_bad_input(error: str, changes: dict[str, object]) -> None:
    with raises(error):
        forced_align(**{"log_probs": LOG_PROBS, "targets": TARGETS, **changes})


@pytest.mark.parametrize("targets", [[1, 2], [1, 1, 1, 3], [2]], ids=str)
def test_as_torchaudio(targets: list[int]) -> None:
    theirs = pytest.importorskip("torchaudio.functional", exc_type=ImportError)
    if not hasattr(theirs, "forced_align"):
        pytest.skip("torchaudio without forced_align")
    log_probs, labels = sample(1, 20, 4, torch.float32), torch.tensor([targets])
    ours, expected = forced_align(log_probs, labels), theirs.forced_align(log_probs, labels)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
    for span, other in zip(
        merge_tokens(ours[0][0], ours[1][0]),
        theirs.merge_tokens(expected[0][0], expected[1][0]),
        strict=True,
    ):
        assert (span.token, span.start, span.end) == (other.token, other.start, other.end)
        assert span.score == pytest.approx(other.score)
