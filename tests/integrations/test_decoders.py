"""The decoders with the names of torchaudio and fast-ctc-decode."""

from pathlib import Path

import pytest
import torch

import partita
from partita.integrations import fast_ctc_decode
from partita.integrations.torchaudio import cuda_ctc_decoder


def test_the_decoder_of_torchaudio(tmp_path: Path) -> None:
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    lengths = torch.tensor([9, 5], dtype=torch.int32)
    names = tmp_path / "tokens.txt"
    names.write_text("- 0\na 1\nb 2\nc 3\n", encoding="utf-8")
    found = cuda_ctc_decoder(str(names), nbest=3, beam_size=8, blank_skip_threshold=1.0)(x, lengths)
    expected = partita.ctc_beam_search(x.transpose(0, 1), lengths, beam_width=8, nbest=3)
    for n, hypotheses in enumerate(found):
        for i, each in enumerate(hypotheses):
            assert each.tokens == expected.tokens[n, i, : expected.lengths[n, i]].tolist()
            assert each.words == ["-abc"[token] for token in each.tokens]
            assert each.score == float(expected.scores[n, i])
    with pytest.raises(ValueError, match="log_prob: expected shape"):
        cuda_ctc_decoder(["-", "a"])(x, lengths)


def test_the_functions_of_fast_ctc_decode() -> None:
    p = torch.randn(9, 4, generator=torch.Generator().manual_seed(1)).softmax(-1)
    expected = partita.ctc_beam_search(p.log(), beam_width=5)
    tokens = expected.tokens[0, 0, : expected.lengths[0, 0]].tolist()
    text, path = fast_ctc_decode.beam_search(p.numpy(), "NABC")
    assert text == "".join("NABC"[token] for token in tokens)
    assert path == expected.steps[0, 0, : len(text)].tolist()
    best = partita.ctc_greedy_search(p.log())
    length = int(best.lengths[0, 0])
    text, path = fast_ctc_decode.viterbi_search(p, "NABC")
    assert text == "".join("NABC"[token] for token in best.tokens[0, 0, :length].tolist())
    assert path == best.steps[0, 0, :length].tolist()
    for options in ({"collapse_repeats": False}, {"beam_size": 0}, {"beam_cut_threshold": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            fast_ctc_decode.beam_search(p, "NABC", **options)
    with pytest.raises(ValueError, match="network_output: expected shape"):
        fast_ctc_decode.beam_search(p, "NAB")


@pytest.mark.parametrize("bad", ["nan", "inf", "logarithms", "zeros"])
def test_fast_ctc_decode_raises_where_there_is_no_text(bad: str) -> None:
    p = torch.randn(5, 4, generator=torch.Generator().manual_seed(2)).softmax(-1)
    if bad in ("nan", "inf"):
        p[1, 2] = float(bad)
        for search in (fast_ctc_decode.beam_search, fast_ctc_decode.viterbi_search):
            with pytest.raises(RuntimeError, match=rf"network_output: .* got {bad} at \[1, 2\]"):
                search(p, "NABC")
        return
    p = p.log() if bad == "logarithms" else torch.zeros_like(p)
    with pytest.raises(RuntimeError, match="network_output: expected probabilities"):
        fast_ctc_decode.beam_search(p, "NABC")
    best = p.argmax(1).unique_consecutive()  # only the order of the classes counts
    text = "".join("NABC"[label] for label in best if label)
    assert fast_ctc_decode.viterbi_search(p, "NABC")[0] == text


def test_the_decoder_of_torchaudio_speaks_of_its_arguments() -> None:
    x = torch.zeros(2, 5, 3)
    decoder = cuda_ctc_decoder(["-", "a", "b"])
    with pytest.raises(ValueError, match=r"encoder_out_lens: .* got 6 at \[1\]"):
        decoder(x, torch.tensor([5, 6]))
    x[1, 3, 0] = torch.nan
    assert decoder(x, torch.tensor([5, 3]))  # past the length
    with pytest.raises(ValueError, match=r"log_prob: .* NaN or \+inf in the sequence at \[1\]"):
        decoder(x, torch.tensor([5, 5]))
    with pytest.raises(ValueError, match="beam_size: expected 1 to 256, got 0"):
        cuda_ctc_decoder(["-", "a"], beam_size=0)


def test_the_package_finds_the_same_texts() -> None:
    """With a beam of all prefixes, and beside greedy search, where fast-ctc-decode is installed."""
    package = pytest.importorskip("fast_ctc_decode")
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        p = torch.randn(8, 4, generator=generator).mul(2).softmax(-1)
        found = fast_ctc_decode.beam_search(p, "NABC", beam_size=256)
        assert found[0] == package.beam_search(p.numpy(), "NABC", 256)[0]
        text, path = package.viterbi_search(p.numpy(), "NABC")
        assert fast_ctc_decode.viterbi_search(p, "NABC") == (text, list(path))
