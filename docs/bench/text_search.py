"""Time search to text with a language model on the CPU, beside kenlm and other decoders.

    pip install flashlight-text pyctcdecode kenlm
    python docs/bench/text_search.py --out docs/bench/text_search.csv

Times are those that a processor works on one thread. The providers of a case take turns, and the
median of their times counts. What takes seconds, such as reading a file, is done three times.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kenlm
import torch
from cpu import Row, write_table

from partita import CTCDecoder, NgramLM
from partita.bench import decode, language_model
from partita.bench.case import Buffers

WORDS, CLASSES, STEPS, BEAM_WIDTH = 100_000, 31, 500, 16
PIECES = 1001
WORDS_OF_A_LARGE_FILE = 200_000  # with 5 million n-grams
CHUNK, CHUNKS_OF_AN_HOUR, CHUNKS_OF_A_MINUTE = 50, 3600, 60


def median(op: str, size: str, provider: str, times: list[float]) -> Row:
    return op, size, provider, statistics.median(times), len(times)


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - start)


def turns(op: str, size: str, calls: dict[str, Callable[[], Any]], number: int) -> Iterator[Row]:
    """Time some calls in turn, after two rounds that are not timed."""
    times = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(number + 2)]
    for name in calls:
        yield median(op, size, name, [each[name] for each in times[2:]])


def searches(inputs: decode.TextInputs, number: int) -> Iterator[Row]:
    """Time one utterance: one whose words were written into the logits, and one of noise."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(inputs.scores.shape, generator=generator).log_softmax(-1)
    lexicon = CTCDecoder(inputs.labels, unigrams=inputs.words, unigrams_only=True)
    plain = CTCDecoder(inputs.labels)
    functions: dict[str, decode.Decoder] = {
        "partita": decode.text_search(True),
        "flashlight-text": decode.flashlight_text(),
        "pyctcdecode": decode.pyctcdecode_text(True),
        "partita with unigrams_only": lambda x: lexicon(x.scores, beam_width=x.beam_width),
        "partita without a model": lambda x: plain(x.scores, beam_width=x.beam_width),
    }
    for kind, scores in (("peaky", inputs.scores), ("random", noise)):
        of_kind = inputs._replace(scores=scores)
        calls = {name: partial(function, of_kind) for name, function in functions.items()}
        yield from turns("search", f"1 × {STEPS} × {CLASSES} {kind}", calls, number)


def pieces_of_words(number: int) -> Iterator[Row]:
    """Time labels that are pieces of words, a third of which begin one."""
    letters = decode.characters(PIECES)
    labels = ["", *("▁" * (i % 3 == 0) + letters[i] for i in range(1, PIECES))]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(STEPS, 1, PIECES, generator=generator)
    peaks = torch.zeros(noise.shape)
    right = torch.randint(PIECES, (STEPS, 1, 1), generator=generator)
    peaks.scatter_(2, right, decode.PEAK)
    decoder = CTCDecoder(labels)
    for kind, logits in (("peaky", noise + peaks), ("random", noise)):
        scores = logits.log_softmax(-1)
        calls = {"partita without a model": partial(decoder, scores, beam_width=BEAM_WIDTH)}
        yield from turns("search", f"1 × {STEPS} × {PIECES} {kind}", calls, number)


def stream(inputs: decode.TextInputs) -> Iterator[Row]:
    """Time the chunks of a stream of an hour, and the first call of a new decoder."""

    def new_decoder() -> CTCDecoder:
        return CTCDecoder(inputs.labels, language_model=inputs.model)

    chunks = [chunk.contiguous() for chunk in inputs.scores.split(CHUNK)]
    hearing = new_decoder().stream(1, beam_width=BEAM_WIDTH)
    hearing.feed(chunks[0])
    times = [
        milliseconds(partial(hearing.feed, chunks[i % len(chunks)]))
        for i in range(1, CHUNKS_OF_AN_HOUR)
    ]
    size = f"1 × {CHUNK} × {CLASSES}"
    yield median("chunk", size, "first minute", times[:CHUNKS_OF_A_MINUTE])
    yield median("chunk", size, "last minute", times[-CHUNKS_OF_A_MINUTE:])
    first = [milliseconds(lambda: new_decoder()(inputs.scores)) for _ in range(3)]
    yield median("first call", f"{WORDS} words", "partita", first)


def ngrams() -> Iterator[Row]:
    """Time reading a large model, and its scores of all labels after some histories."""
    words = [f"w{i}" for i in range(WORDS_OF_A_LARGE_FILE)]
    drawn = language_model.drawn_ngrams(words, random.Random(0))
    size = f"{len(drawn)} n-grams"
    folder, path = language_model.write_model(drawn)
    del drawn
    saved = Path(folder.name, "model.pt")
    model = NgramLM.from_arpa(path)
    model.save(saved)
    calls: dict[str, Callable[[], Any]] = {
        "from_arpa": lambda: NgramLM.from_arpa(path),
        "load": lambda: NgramLM.load(saved),
        "kenlm": lambda: kenlm.Model(str(path)),
    }
    for name, call in calls.items():
        yield median("read", size, name, [milliseconds(call) for _ in range(3)])
    for states, labels in ((128, 32), (128, 1000), (16, 100_000)):
        some = NgramLM.load(saved, labels=words[:labels])
        histories = some.start(states)
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            column = torch.randint(labels, (states, 1), generator=generator)
            histories = some.advance(histories)[1].gather(1, column)[:, 0]
        call = {"partita": partial(some.advance, histories)}
        yield from turns("advance", f"{states} × {labels}", call, 10)


def measured(number: int) -> Iterator[Row]:
    case = decode.Text("ctc_decoder_lm", torch.float32, STEPS, 1, CLASSES, BEAM_WIDTH, WORDS)
    inputs = case.inputs(Buffers(torch.device("cpu")))
    yield from searches(inputs, number)
    yield from pieces_of_words(number)
    yield from stream(inputs)
    yield from ngrams()


if __name__ == "__main__":
    write_table("Time search to text on the CPU.", "median_ms", measured)
