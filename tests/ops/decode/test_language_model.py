"""N-gram language models, against back-off in a dictionary and against kenlm."""

import gzip
import io
import itertools
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers.errors import raises
from helpers.ngrams import Ngrams, arpa, corpus, log10_score, ngrams_of

from partita import NgramLM
from partita.ops.decode import arpa as reading
from partita.ops.decode import language_model

LN10 = math.log(10)
SENTENCES = corpus(40)
OTHERS = [*corpus(40, seed=1), *corpus(20, seed=2, words=15), ["w1", "new", "w2", "<unk>", "new"]]
KENLM = "kenlm is not installed, so scores are compared with a dictionary alone"


def model_of(ngrams: Ngrams, path: Path, seed: int | None = None) -> NgramLM:
    path.write_text(arpa(ngrams, seed), encoding="utf-8")
    return NgramLM.from_arpa(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.arpa"


@pytest.fixture
def trigrams(tmp_path: Path) -> NgramLM:
    return model_of(ngrams_of(SENTENCES, 3), tmp_path / "trigrams.arpa")


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("unknown", ["<unk>", "<UNK>", ""])
def test_scores_are_those_of_the_definition(path: Path, order: int, unknown: str) -> None:
    ngrams = ngrams_of(SENTENCES, order, unknown=unknown)
    model = model_of(ngrams, path)
    for bos, eos in itertools.product([True, False], repeat=2):
        found = model.score(OTHERS, bos=bos, eos=eos)
        expected = [log10_score(ngrams, sentence, bos, eos) * LN10 for sentence in OTHERS]
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("order", [2, 3, 5])  # kenlm reads no models of 1-grams alone
@pytest.mark.parametrize("unknown", ["<unk>", "<UNK>", ""])
def test_scores_are_those_of_kenlm(path: Path, order: int, unknown: str) -> None:
    kenlm = pytest.importorskip("kenlm", reason=KENLM)
    model = model_of(ngrams_of(SENTENCES, order, unknown=unknown), path)
    other = kenlm.Model(str(path))
    for sentence, (bos, eos) in itertools.product(OTHERS, [(True, True), (False, False)]):
        text = " ".join(sentence)
        words = [log10 for log10, _, _ in other.full_scores(text, bos=bos, eos=eos)]
        found = model.score(text, bos=bos, eos=eos) / LN10
        assert abs(found - sum(words)) <= 1e-5


def test_advance_adds_up_to_the_score(trigrams: NgramLM) -> None:
    words = trigrams.words
    for sentence in OTHERS:
        known = [words.index(word if word in words else "<unk>") for word in sentence]
        states, total = trigrams.start(1), torch.zeros(1, dtype=torch.float64)
        for word in known:
            scores, following = trigrams.advance(states)
            assert scores.shape == following.shape == (1, len(words))
            total, states = total + scores[:, word], following[:, word]
        total = total + trigrams.final(states)
        torch.testing.assert_close(total[0], trigrams.score(sentence), rtol=1e-12, atol=1e-12)


def test_the_order_of_the_lines_changes_nothing(tmp_path: Path, trigrams: NgramLM) -> None:
    shuffled = model_of(ngrams_of(SENTENCES, 3), tmp_path / "shuffled.arpa", seed=5)
    assert shuffled.words != trigrams.words
    assert torch.equal(shuffled.score(OTHERS), trigrams.score(OTHERS))


def test_equal_futures_are_one_state(trigrams: NgramLM) -> None:
    words, unknown = trigrams.words, trigrams.words.index("<unk>")
    _, following = trigrams.advance(trigrams.start(1, bos=False))
    states = following.flatten().unique()
    scores, _ = trigrams.advance(states)
    # The histories (a, c) and (b, c) with neither among the 2-grams are both the history (c).
    _, after_two = trigrams.advance(torch.cat([states, following[:, unknown]]))
    distinct = {tuple(row.tolist()) for row in scores}
    assert len(distinct) == len(states)
    assert len(after_two.unique()) < len(states) * len(words)


def test_a_state_that_nothing_follows_is_shortened(path: Path) -> None:
    lines = ["\\data\\", "ngram 1=4", "ngram 2=3", "ngram 3=1", "\\1-grams:", "-1 <s> -0.5"]
    lines += ["-1 </s>", "-1 a -0.25", "-1 b -0.25", "\\2-grams:", "-0.5 a b -0.125"]
    lines += ["-0.5 b a 0", "-0.5 a a", "\\3-grams:", "-0.25 a a b", "\\end\\"]
    path.write_text("\n".join(lines))
    model = NgramLM.from_arpa(path)
    a, b = model.words.index("a"), model.words.index("b")
    _, following = model.advance(model.start(1, bos=False))
    after_a, after_b = following[:, a], following[:, b]
    _, after_ab = model.advance(torch.cat([after_a, after_b]))
    assert after_ab[1, a] == after_a  # no 3-gram and no back-off weight of "b a"
    assert after_ab[0, b] != after_b  # a back-off weight
    assert after_ab[0, a] != after_a  # a 3-gram
    _, after_aab = model.advance(after_ab[0, a : a + 1])
    assert after_aab[0, b] == after_ab[0, b]  # of the last two words


def test_labels_are_the_columns(path: Path) -> None:
    whole = model_of(ngrams_of(SENTENCES, 3), path)
    model = NgramLM.from_arpa(path, labels=["", "w3", "w1", "w3"])
    states = whole.advance(whole.start(2))[1][:, 4]
    columns = [whole.words.index(word) for word in ("<unk>", "w3", "w1", "w3")]
    for ours, theirs in zip(model.advance(states), whole.advance(states), strict=True):
        assert torch.equal(ours, theirs[:, columns])
    assert torch.equal(model.score(OTHERS), whole.score(OTHERS))


def test_parts_of_the_states_are_looked_up_one_after_another(
    trigrams: NgramLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = trigrams.advance(trigrams.start(1))[1][0]
    whole = trigrams.advance(states)
    monkeypatch.setattr(language_model, "SCORES_AT_ONCE", 2 * len(trigrams.words))
    assert all(map(torch.equal, trigrams.advance(states), whole))


def test_no_states_and_no_sentences(trigrams: NgramLM) -> None:
    scores, states = trigrams.advance(trigrams.start(0))
    assert scores.shape == states.shape == (0, len(trigrams.words))
    assert trigrams.final(trigrams.start(0)).shape == (0,)
    assert trigrams.score([[], []]).tolist() == trigrams.final(trigrams.start(2)).tolist()
    assert trigrams.score("") == trigrams.score([]) == trigrams.final(trigrams.start(1))[0]


@pytest.mark.parametrize("block", [1, 7])
def test_blocks_of_lines_are_joined(
    tmp_path: Path, trigrams: NgramLM, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK", block)
    again = NgramLM.from_arpa(tmp_path / "trigrams.arpa")
    assert again.words == trigrams.words
    assert torch.equal(again.score(OTHERS), trigrams.score(OTHERS))


def test_text_before_the_data_is_skipped(path: Path) -> None:
    path.write_text(f"a model\nof two words\n\n{GOOD}".replace("\n", "\r\n"))
    assert NgramLM.from_arpa(path).words == ["<s>", "</s>", "hi", "<unk>"]


def test_the_default_device_has_no_effect(path: Path, tmp_path: Path) -> None:
    path.write_text(GOOD)
    expected = NgramLM.from_arpa(path).score("hi")
    with torch.device("meta"):
        model = NgramLM.from_arpa(path)
        model.save(tmp_path / "model.pt")
        loaded = NgramLM.load(tmp_path / "model.pt", labels=["hi"])
    assert model.score("hi") == loaded.score("hi") == expected
    assert loaded.advance(loaded.start(1))[0].device == torch.device("cpu")


def test_gzip_is_read(tmp_path: Path, trigrams: NgramLM) -> None:
    path = tmp_path / "model.arpa.gz"
    path.write_bytes(gzip.compress((tmp_path / "trigrams.arpa").read_bytes()))
    assert torch.equal(NgramLM.from_arpa(str(path)).score(OTHERS), trigrams.score(OTHERS))


GOOD = """\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-99 <s> -0.5
-1 </s>
-2 hi 0.25
-3 <unk> 0

\\2-grams:
-0.1 <s> hi
-0.2 hi </s>

\\end\\
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("\\data\\", "\\dato\\", 1, r"expected '\\data\\', got '\\dato\\'"),
        ("ngram 1=4", "ngram 2=4", 2, "expected the count of 1-grams, got 2"),
        ("ngram 1=4\nngram 2=2", "", 4, "expected the number of 1-grams"),
        ("ngram 1=4", "ngram 1=x", 2, "expected the number of 1-grams"),
        ("ngram 2=2\n", "", 5, "expected no back-off weight, as nothing follows 1-grams, got -0.5"),
        ("1=4", "1=5", 10, r"expected another one of the 5 1-grams .*, got an empty line"),
        ("1=4", "1=3", 9, r"expected '\\2-grams:' after all .*, got '-3 <unk> 0'"),
        ("2=2", "2=1", 13, r"expected '\\end\\' after all"),
        ("2=2", "2=9", 14, "expected another one of the 9 2-grams"),
        ("\\end\\\n", "", 14, r"expected '\\end\\' after all .*, got the end of the file"),
        ("-0.2 hi </s>\n\n\\end\\\n", "", 13, "the file ends 1 2-grams before their count"),
        ("-1 </s>", "-1", 7, r"expected .*\(a log-probability, 1 word, .*\), got '-1'"),
        ("-1 </s>", "-1 a b c", 7, "expected another one of the 4 1-grams"),
        ("-1 </s>", "no </s>", 7, "expected a log-probability, got 'no'"),
        ("-1 </s>", "-1 </s> no", 7, "expected a back-off weight, got 'no'"),
        ("-1 </s>", "-1_0 </s>", 7, "expected a log-probability, got '-1_0'"),
        ("-1 </s>", "-1 </s> -0.2_5", 7, "expected a back-off weight, got '-0.2_5'"),
        ("-0.2 hi", "-0_0.2 hi", 13, "expected a log-probability, got '-0_0.2'"),
        ("-1 </s>", "nan </s>", 7, "expected a log-probability of at most 0, got nan"),
        ("-1 </s>", "0.5 </s>", 7, "expected a log-probability of at most 0, got 0.5"),
        ("-1 </s>", "-1 </s> nan", 7, "expected a finite back-off weight, got nan"),
        ("-1 </s>", "-1 </s> -inf", 7, "expected a finite back-off weight, got -inf"),
        ("-2 hi", "-2 </s>", 8, "the word '</s>' is among the 1-grams twice"),
        ("-2 hi", "-2 <UNK>", 9, "the word '<unk>' is among the 1-grams twice"),
        ("hi </s>", "hi you", 13, "the word 'you' is not among the 1-grams"),
        ("hi </s>", "hi </s> 0.5", 13, "expected no back-off weight, as nothing follows 2-grams"),
        ("-0.2 hi </s>", "-0.2 <s> hi", 13, "the 2-gram '<s> hi' is in the file twice"),
        (GOOD, "", 1, r"expected '\\data\\', got the end of the file"),
    ],
)
def test_a_malformed_file_is_refused(
    path: Path, old: str, new: str, line: int, message: str
) -> None:
    path.write_text(GOOD)
    NgramLM.from_arpa(path)
    assert GOOD.count(old) == 1
    path.write_text(GOOD.replace(old, new))
    with raises(f"ValueError: {re.escape(str(path))}: line {line}: {message}"):
        NgramLM.from_arpa(path)


def test_a_context_that_is_no_ngram_is_refused(path: Path) -> None:
    text = GOOD.replace("ngram 2=2\n", "ngram 2=2\nngram 3=2\n")
    text = text.replace("\\end", "\\3-grams:\n-1 <s> hi </s>\n-1 hi hi </s>\n\n\\end")
    path.write_text(text)
    with raises(
        f"ValueError: {re.escape(str(path))}: line 18: the context 'hi hi' is not among the 2-grams"
    ):
        NgramLM.from_arpa(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"mmap lm http://kheafield.com/code format version 5\n\0", "a binary file of kenlm"),
        (b"BZh91AY&SY", "a file of bzip2"),
        (b"\xfd7zXZ\0", "a file of xz"),
        (b"\x28\xb5\x2f\xfd\0", "a file of zstd"),
        (b"PK\x03\x04", "an archive"),
        (b"\x7fELF\0\0", "a binary file"),
    ],
)
def test_another_format_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model"
    path.write_bytes(content)
    with raises(
        f"ValueError: {re.escape(str(path))}: line 1: expected an ARPA file, .*, got {message}"
    ):
        NgramLM.from_arpa(path)


def test_text_that_is_not_utf8_is_refused(path: Path) -> None:
    path.write_bytes(GOOD.replace("hi", "hü").encode("latin-1"))
    with raises(f"ValueError: {re.escape(str(path))}: line 8: expected a word in UTF-8"):
        NgramLM.from_arpa(path)


GZIP = gzip.compress(GOOD.encode())
# Cut off after some bytes, or with a wrong checksum.
BROKEN = (GZIP[:12], GZIP[:60], GZIP[:100], GZIP[:-6] + bytes([GZIP[-6] ^ 1]) + GZIP[-5:])


@pytest.mark.parametrize("content", BROKEN, ids=["12", "60", "100", "checksum"])
def test_gzip_that_is_broken_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.arpa.gz"
    path.write_bytes(content)
    with raises(rf"ValueError: {re.escape(str(path))}: line \d+: the gzip stream is broken"):
        NgramLM.from_arpa(path)


def test_a_probability_of_0_is_minus_infinity(path: Path) -> None:
    path.write_text(GOOD.replace("-3 <unk>", "-inf <unk>"))
    assert NgramLM.from_arpa(path).score("you") == -torch.inf


def test_models_without_markers_of_sentences(path: Path) -> None:
    path.write_text("\\data\\\nngram 1=1\n\\1-grams:\n-2 a\n\\end\\")
    model = NgramLM.from_arpa(path)
    assert model.words == ["a", "<unk>"]
    torch.testing.assert_close(
        model.score("a a b", bos=False, eos=False).item(), -104 * LN10, rtol=1e-12, atol=0
    )
    with raises("ValueError: expected a model with the word <s>, got one without it"):
        model.start(1)
    with raises("ValueError: expected a model with the word </s>, got one without it"):
        model.score("a", bos=False)


def test_save_and_load(tmp_path: Path, trigrams: NgramLM) -> None:
    path = tmp_path / "model.pt"
    trigrams.save(path)
    loaded = NgramLM.load(path)
    assert (loaded.words, loaded.order, repr(loaded)) == (
        trigrams.words,
        trigrams.order,
        repr(trigrams),
    )
    assert torch.equal(loaded.score(OTHERS), trigrams.score(OTHERS))
    labelled = NgramLM.load(path, labels=["w1", "w2"])
    labelled.save(path)  # the file that the model lies in
    assert torch.equal(labelled.score(OTHERS), trigrams.score(OTHERS))
    assert NgramLM.load(str(path)).advance(trigrams.start(1))[0].shape == (1, 2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.pt", "trigrams.arpa"]


def test_a_file_is_mapped_into_memory(tmp_path: Path, trigrams: NgramLM) -> None:
    path = tmp_path / "model.pt"
    trigrams.save(path)
    loaded = NgramLM.load(path)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("only Linux lists the files that are mapped")
    assert str(path) in maps.read_text()
    assert loaded.order == 3


def test_other_files_are_not_loaded(tmp_path: Path, trigrams: NgramLM) -> None:
    arpa_file, other, newer = tmp_path / "trigrams.arpa", tmp_path / "other.pt", tmp_path / "new.pt"
    expected = "expected a file that NgramLM.save has written"
    with raises(f"ValueError: {re.escape(str(arpa_file))}: {expected}"):
        NgramLM.load(arpa_file)
    torch.save({"weight": torch.zeros(2)}, other)
    with raises(f"ValueError: {re.escape(str(other))}: {expected}"):
        NgramLM.load(other)
    torch.save({"format": language_model.FORMAT, "version": 2}, newer)
    with raises(
        f"ValueError: {re.escape(str(newer))}: expected a file of version 1, got version 2"
    ):
        NgramLM.load(newer)
    trigrams.save(other)
    other.write_bytes(other.read_bytes()[:-100])
    with raises(f"ValueError: {re.escape(str(other))}: {expected}"):
        NgramLM.load(other)
    with pytest.raises(FileNotFoundError):
        NgramLM.load(tmp_path / "none.pt")
    with pytest.raises(FileNotFoundError):
        NgramLM.from_arpa(tmp_path / "none.arpa")


def test_wrong_arguments_are_named(tmp_path: Path, trigrams: NgramLM) -> None:
    path = tmp_path / "trigrams.arpa"
    for call, message in (
        (lambda: NgramLM.from_arpa(path, labels="abc"), "TypeError: labels: expected a sequence"),
        (lambda: NgramLM.from_arpa(path, labels=["a", 1]), "TypeError: labels: expected a seq"),
        (lambda: NgramLM.from_arpa(path, labels=[]), "ValueError: labels: expected at least one"),
        (lambda: trigrams.start(-1), "ValueError: B: expected a number from 0 on, got -1"),
        (lambda: trigrams.start(2.0), "TypeError: B: expected an int, got float"),
        (lambda: trigrams.advance(torch.zeros(2)), "TypeError: states: expected an integer dtype"),
        (lambda: trigrams.advance(torch.zeros(2, 1).long()), "ValueError: states: expected shape"),
        (lambda: trigrams.final(torch.tensor([0, -1])), "ValueError: states: expected states of"),
        (lambda: trigrams.score(["w1 w2"]), r"ValueError: words\[0\]: expected one word, got 'w1"),
        (lambda: trigrams.score([["a"], [3]]), r"TypeError: words\[1\]\[0\]: expected a string"),
        (lambda: trigrams.score([["a"], 3]), r"TypeError: words\[1\]: expected words, got int"),
    ):
        with raises(message):
            call()


def test_progress_is_shown_on_a_terminal(
    tmp_path: Path, trigrams: NgramLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    path = tmp_path / "trigrams.arpa"
    for seconds, stream, shown in (
        (0, Terminal(), True),
        (0, io.StringIO(), False),
        (99, Terminal(), False),
    ):
        monkeypatch.setattr(reading, "SECONDS_BEFORE_PROGRESS", seconds)
        monkeypatch.setattr(sys, "stderr", stream)
        NgramLM.from_arpa(path)
        assert bool(stream.getvalue()) is shown
        if shown:
            assert f"{path}: 100% of" in stream.getvalue()
            assert stream.getvalue().endswith("\r\x1b[K")
