"""Spans of words from those of tokens."""

import pytest
import torch

import partita


def test_words_of_tokens() -> None:
    """Spaces belong to no word, a token that is not aligned counts nothing."""
    spans = partita.TokenSpans(
        start=torch.tensor([[0, 3, 4, 7, -1], [2, 5, 6, 8, 9]]),
        end=torch.tensor([[2, 4, 6, 8, -1], [4, 6, 8, 9, 11]]),
        score=torch.tensor([[-1.0, -2.0, -4.0, -3.0, 0.0], [-1.0, -3.0, -2.0, -5.0, -6.0]]),
    )
    words = torch.tensor([[0, 0, -1, 2, 2], [0, -1, 0, 1, 9]])
    found = partita.word_spans(spans, words)
    assert found.start.tolist() == [[0, -1, 7, -1, -1], [2, 8, -1, -1, -1]]
    assert found.end.tolist() == [[4, -1, 8, -1, -1], [8, 9, -1, -1, -1]]
    expected = torch.tensor([[-4.0 / 3, 0, -3.0, 0, 0], [-6.0 / 4, -5.0, 0, 0, 0]])
    torch.testing.assert_close(found.score, expected)
    with pytest.raises(ValueError, match=r"word_of_token: expected shape \[N, S\] = \[2, 5\]"):
        partita.word_spans(spans, words[:, :4])
    with pytest.raises(TypeError, match="spans: expected TokenSpans, got tuple"):
        partita.word_spans(tuple(spans), words)  # type: ignore[arg-type]
