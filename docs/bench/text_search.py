"""Time search to text with a language model on the CPU, beside kenlm and other decoders.

    pip install flashlight-text pyctcdecode kenlm
    python docs/bench/text_search.py --out docs/bench/text_search.csv

Times are those that a processor works on one thread. The providers of a case take turns, and the
median of their times counts. What takes seconds, such as reading a file, is done three times.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kenlm
import numba
import torch

from partita import CTCDecoder, NgramLM
from partita.bench import decode, language_model
from partita.bench.case import Buffers
from partita.cli.info import cpu

WORDS, CLASSES, STEPS, BEAM_WIDTH = 100_000, 31, 500, 16
PIECES = 1001
WORDS_OF_A_LARGE_FILE = 200_000  # with 5 million n-grams
CHUNK, CHUNKS_OF_AN_HOUR, CHUNKS_OF_A_MINUTE = 50, 3600, 60
COLUMNS = ("op", "size", "provider", "median_ms", "repetitions", "machine", "torch")


class Row(NamedTuple):
    op: str
    size: str
    provider: str
    times: list[float]  # ms


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - start)


def turns(op: str, size: str, calls: dict[str, Callable[[], Any]], number: int) -> Iterator[Row]:
    """Time some calls in turn, after two rounds that are not timed."""
    times = [{name: milliseconds(call) for name, call in calls.items()} for _ in range(number + 2)]
    for name in calls:
        yield Row(op, size, name, [each[name] for each in times[2:]])


def searches(inputs: decode.TextInputs, number: int) -> Iterator[Row]:
    """Time one utterance: one whose words were written into the logits, and one of noise."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(inputs.scores.shape, generator=generator).log_softmax(-1)
    decoders = {
        "partita with unigrams_only": CTCDecoder(
            inputs.labels, unigrams=inputs.words, unigrams_only=True
        ),
        "partita without a model": CTCDecoder(inputs.labels),
    }
    for kind, scores in (("peaky", inputs.scores), ("random", noise)):
        of_kind = inputs._replace(scores=scores)
        functions = {
            "partita": decode.text_search(True),
            "flashlight-text": decode.flashlight_text(),
            "pyctcdecode": decode.pyctcdecode_text(True),
        }
        calls: dict[str, Callable[[], Any]] = {
            name: (lambda f=function, x=of_kind: f(x)) for name, function in functions.items()
        }
        for name, decoder in decoders.items():
            calls[name] = lambda d=decoder, x=scores: d(x, beam_width=BEAM_WIDTH)
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
        calls = {"partita without a model": lambda x=scores: decoder(x, beam_width=BEAM_WIDTH)}
        yield from turns("search", f"1 × {STEPS} × {PIECES} {kind}", calls, number)


def stream(inputs: decode.TextInputs) -> Iterator[Row]:
    """Time the chunks of a stream of an hour, and the first call of a new decoder."""

    def new_decoder() -> CTCDecoder:
        return CTCDecoder(inputs.labels, language_model=inputs.model)

    chunks = [chunk.contiguous() for chunk in inputs.scores.split(CHUNK)]
    hearing = new_decoder().stream(1, beam_width=BEAM_WIDTH)
    hearing.feed(chunks[0])
    times = [
        milliseconds(lambda i=i: hearing.feed(chunks[i % len(chunks)]))
        for i in range(1, CHUNKS_OF_AN_HOUR)
    ]
    size = f"1 × {CHUNK} × {CLASSES}"
    yield Row("chunk", size, "first minute", times[:CHUNKS_OF_A_MINUTE])
    yield Row("chunk", size, "last minute", times[-CHUNKS_OF_A_MINUTE:])
    first = [milliseconds(lambda: new_decoder()(inputs.scores)) for _ in range(3)]
    yield Row("first call", f"{WORDS} words", "partita", first)


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
        yield Row("read", size, name, [milliseconds(call) for _ in range(3)])
    for states, labels in ((128, 32), (128, 1000), (16, 100_000)):
        some = NgramLM.load(saved, labels=words[:labels])
        histories = some.start(states)
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            column = torch.randint(labels, (states, 1), generator=generator)
            histories = some.advance(histories)[1].gather(1, column)[:, 0]
        call = {"partita": lambda m=some, h=histories: m.advance(h)}
        yield from turns("advance", f"{states} × {labels}", call, 10)


def cases(number: int) -> Iterator[Row]:
    case = decode.Text("ctc_decoder_lm", torch.float32, STEPS, 1, CLASSES, BEAM_WIDTH, WORDS)
    inputs = case.inputs(Buffers(torch.device("cpu")))
    yield from searches(inputs, number)
    yield from pieces_of_words(number)
    yield from stream(inputs)
    yield from ngrams()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time search to text on the CPU.")
    parser.add_argument("--out", type=Path, required=True, help="table to write")
    parser.add_argument("--repetitions", type=int, default=30, help="(default 30)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    machine = (cpu().partition(",")[0], torch.__version__)
    records = []
    for op, size, provider, times in cases(options.repetitions):
        median = f"{statistics.median(times):.4g}"
        records.append((op, size, provider, median, len(times), *machine))
        print(*records[-1], flush=True)
    with options.out.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerows([COLUMNS, *records])


if __name__ == "__main__":
    main()
