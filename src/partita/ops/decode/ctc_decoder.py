"""Decoding of CTC to text, with a language model, a lexicon and boosted phrases, in streams too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.backend import Table, current_backend, resolve
from ...runtime.lengths import Lengths, as_lengths, on_device
from ...runtime.register import resolved
from .common import MAX_BEAM_WIDTH, Hypotheses
from .language_model import NgramLM, advance_states, check_batch, check_model, final_scores
from .phrase_boost import PhraseBoost
from .text_tables import (
    BOUNDARIES,
    Found,
    Options,
    PhraseTables,
    TextBatch,
    Vocabulary,
    Words,
    boost_phrases,
    build_lexicon,
    empty_texts,
    hotword_phrases,
    once_each,
    phrase_tables,
)

INF = math.inf
Word = tuple[str, int, int]  # the word, its first step, and the step after its last one
Boosts = PhraseBoost | Sequence[PhraseBoost | None] | None
Phrases = tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], float]]  # words, and a boost
# The limits of the kernels: what one program ranks at a step, and the classes of a row.
MAX_CANDIDATES, MAX_CLASSES = 4096, 8192


class Transcripts(NamedTuple):
    """The texts of a batch, the best first.

    Fields:
        text: the texts, `[N][nbest]`; empty where there are fewer.
        words: the words of each, `[N][nbest]`, as tuples of the word, its first step and the step
            after its last one, in the most probable alignment.
        hypotheses: the labels of that alignment with the log-probability of the text, summed over
            alignments, in fp64; see `Hypotheses`.
        lm_scores: `[N, nbest]` fp64, what language model and phrases add to that. The sum of both
            ranks a text.
    """

    text: list[list[str]]
    words: list[list[list[Word]]]
    hypotheses: Hypotheses
    lm_scores: Tensor


class PartialText(NamedTuple):
    """The best text of a stream so far, in two parts.

    Fields:
        committed: what no later step changes.
        open: what follows it and may change.
    """

    committed: str
    open: str


class CTCDecoder:
    r"""Beam search from CTC to text with a language model, a lexicon and boosted phrases.

    Args:
        labels: the text of each class. `" "` is the boundary of words, and so is a leading `"▁"`.
        blank: the class of the blank, whose text does not count.
        language_model: an `NgramLM`, or an object with `words` and the methods `start`, `advance`
            and `final`; see the page on language models.
        unigrams: the known words; all words of the model by default.
        unigrams_only: whether a text may have no other words. This needs no model.
        unit: `"word"`, or `"token"` where the words of the model are the labels.
        alpha: the weight of the language model.
        beta: what each word adds.
        unk_score_offset: what an unknown word adds to its log10-probability, and an unfinished word
            that begins no known one to the score.
        score_boundary: whether the model scores the start and the end of a sentence.

    A hypothesis is a text. Its score is the log-probability of all its alignments, plus alpha times
    the natural log-probability of its words, plus beta for each word, plus what boosted phrases
    add. The arithmetic is that of pyctcdecode. `alpha`, `beta` and `unk_score_offset` can be set.

    Scores on a GPU are searched there if labels are characters, and else are copied to the CPU. The
    host waits for the texts. A model other than `NgramLM` is served by the reference, in Python.

    Raises:
        TypeError, ValueError: labels that are no strings, equal or empty; a model without the
            methods or words that it needs; unigrams without a use; a number that is not finite.

    Source: Hannun et al., First-pass large vocabulary continuous speech recognition using
        bi-directional recurrent DNNs, 2014; pyctcdecode 0.5, 2023, for what a text adds.

    Example:
        >>> import torch, partita
        >>> words = {"unigrams": ["ab", "b"], "unigrams_only": True}
        >>> decoder = partita.CTCDecoder(["", "a", "b", " "], **words)
        >>> probs = torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.1, 0.1, 0.2, 0.6], [0.1, 0.1, 0.7, 0.1]])
        >>> found = decoder(probs.log(), nbest=2)
        >>> found.text  # "a b" is the best path, and "a" is no word
        [['ab', 'b']]
        >>> found.words[0][0]  # with the first step and the step after the last
        [('ab', 0, 3)]
        >>> found.hypotheses.scores.exp()
        tensor([[0.2060, 0.1980]], dtype=torch.float64)
        >>> decoder(probs.log(), hotwords=["b"]).text
        [['b b']]
    """

    def __init__(
        self,
        labels: Sequence[str],
        *,
        blank: int = 0,
        language_model: Any = None,
        unigrams: Iterable[str] | None = None,
        unigrams_only: bool = False,
        unit: str = "word",
        alpha: float = 0.5,
        beta: float = 1.5,
        unk_score_offset: float = -10.0,
        score_boundary: bool = True,
    ) -> None:
        checks.choice("unit", unit, ("word", "token"))
        labels = _checked_labels(labels, blank)
        known = None if unigrams is None else _checked_words("unigrams", unigrams)
        if unigrams_only and known is None and language_model is None:
            raise ValueError("unigrams_only: expected unigrams or a language model, got neither")
        if known is not None and (
            unit == "token" or not (unigrams_only or language_model is not None)
        ):
            needs = 'unit="word", and a language model or unigrams_only=True'
            raise ValueError(f"unigrams: expected {needs}")
        if unigrams_only and unit == "token":
            raise ValueError('unigrams_only: expected unit="word"')
        is_own = language_model is not None and not isinstance(language_model, NgramLM)
        if is_own:
            check_model("language_model", language_model)
            if unit == "word" and "<unk>" not in getattr(language_model, "words", ()):
                raise ValueError("language_model: expected `words`, one of them <unk>")
        self.labels, self.blank, self.language_model = labels, blank, language_model
        self.alpha, self.beta, self.unk_score_offset = alpha, beta, unk_score_offset
        self.score_boundary = bool(score_boundary)
        self._only = bool(unigrams_only)
        self._vocabulary = Vocabulary(labels, blank, unit == "token")
        self._words = Words(language_model, known, labels if unit == "token" else None)
        if language_model is not None:  # which may lack a marker
            state = self._words.model.start(1, bos=self.score_boundary)
            final_scores("language_model", self._words.model, state)
        if is_own:
            of = "labels" if unit == "token" else "words"
            V = len(labels if unit == "token" else language_model.words)
            columns = advance_states("language_model", language_model, state)[0].shape[1]
            if columns < V:
                raise ValueError(
                    f"language_model: expected a column of `advance` for each of the {V} {of},"
                    f" got {columns}"
                )
        self._spaced = [each.translate(BOUNDARIES) for each in self._vocabulary.texts]
        self._lexicon: Any = None  # made at the first call, as the tables of each device
        self._tables: dict[Any, Any] = {}

    def __call__(
        self,
        log_probs: Tensor,
        input_lengths: Lengths | None = None,
        *,
        boost: Boosts = None,
        hotwords: Iterable[str] = (),
        hotword_weight: float = 10.0,
        beam_width: int = 16,
        nbest: int = 1,
        from_logits: bool = False,
        cutoff_top_n: int | None = 40,
        token_min_logp: float | None = None,
        blank_skip_threshold: float | None = None,
        max_open_steps: int = 3000,
    ) -> Transcripts:
        """Return the best texts of a batch.

        Args:
            log_probs: `[T, N, C]` or `[T, C]` floating: log-probabilities of the classes at each
                step, or logits with `from_logits`.
            input_lengths: `[N]`, a tensor on any device, a list or a tuple; T by default.
            boost: phrases that raise the score of a text wherever it has them, one `PhraseBoost`
                for all sequences or a list with one or None for each.
            hotwords: words, or several words with spaces between them, that raise the score where
                the text has them as whole words.
            hotword_weight: what each occurrence of them adds.
            beam_width: the number of texts that go on after each step, from 1 to 256.
            nbest: the number of texts that are returned, up to `beam_width`.
            from_logits: whether the search takes the log-softmax itself.
            cutoff_top_n: the number of labels that may extend a text at a step; None for all.
            token_min_logp: the log-probability below which a label extends no text, unless it is
                the most probable one; none by default.
            blank_skip_threshold: a probability. Where that of the blank is above it, the step is
                taken as a blank. By default no step is.
            max_open_steps: the number of steps after which the past of the best text is final.

        Returns:
            `Transcripts(text, words, hypotheses, lm_scores)`, the best first, of equal scores the
            older first. A sequence with NaN or +inf, or with an invalid length on a GPU, has an
            empty text with the score NaN. Not differentiable.

        Raises:
            TypeError, ValueError: wrong dtypes, shapes, lengths, phrases or numbers.
            RuntimeError: the chosen backend cannot serve the call.

        Example:
            >>> import torch, partita
            >>> decoder = partita.CTCDecoder(["", "a", "b", " "])
            >>> decoder(torch.eye(4)[[1, 0, 3, 2]] * 9, from_logits=True).text
            [['a b']]
        """
        T, N, _ = log_probs_shape(log_probs)
        x, lengths = self._checked_steps(log_probs, input_lengths, N)
        settings = {
            "from_logits": from_logits,
            "cutoff_top_n": cutoff_top_n,
            "token_min_logp": token_min_logp,
            "blank_skip_threshold": blank_skip_threshold,
            "max_open_steps": max_open_steps,
        }
        options = self._options(beam_width, nbest, settings)
        phrases = self._phrases(N, boost, hotwords, hotword_weight)
        table = self._table(x.device, self._unserved(T, options))
        if table == "gpu":
            from .gpu import launch_text

            tables, automata = self._device_tables(x.device), self._automata(phrases)
            x, lengths = resolved(x), on_device(x.device, lengths)[0]
            found = launch_text.ctc_text_search(x, lengths, tables, automata, options)
            return self._transcripts(found, x.device)
        search = self._search(table, phrases, options)
        search.advance(x.cpu(), lengths.cpu(), collects=False)
        return self._transcripts(_batch_of(search.results(), options.nbest, T), x.device)

    def stream(self, N: int = 1, **options: Any) -> CTCStream:
        """Return a decoder of N sequences whose steps come in chunks.

        Args:
            N: the number of sequences.
            options: the keywords of a call.

        Returns:
            A `CTCStream`. Its `result` is that of one call on all that it was fed, bit for bit.

        Raises:
            TypeError, ValueError: as in a call.

        Example:
            >>> import torch, partita
            >>> stream = partita.CTCDecoder(["", "a", "b", " "]).stream(from_logits=True)
            >>> stream.feed(torch.eye(4)[[1, 0]] * 9)
            >>> stream.feed(torch.eye(4)[[3, 2]] * 9)
            >>> stream.result().text
            [['a b']]
        """
        return CTCStream(self, N, **options)

    def __repr__(self) -> str:
        unit = "token" if self._vocabulary.by_token else "word"
        return (
            f"CTCDecoder(labels={len(self.labels)}, unit={unit!r},"
            f" language_model={self.language_model!r})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lexicon": None, "_tables": {}}

    def _options(self, width: int, nbest: int, settings: dict[str, Any]) -> Options:
        """Return the numbers of a search after checks."""
        for name in ("alpha", "beta", "unk_score_offset"):
            checks.number(name, getattr(self, name), low=-INF)
            if getattr(self, name) == -INF:
                raise ValueError(f"{name}: expected a finite number, got -inf")
        checks.python_int("beam_width", width)
        checks.python_int("nbest", nbest)
        if not 1 <= width <= MAX_BEAM_WIDTH:
            raise ValueError(f"beam_width: expected 1 to {MAX_BEAM_WIDTH}, got {width}")
        if not 1 <= nbest <= width:
            raise ValueError(f"nbest: expected 1 to {width}, got {nbest}")
        cutoff, least = settings["cutoff_top_n"], settings["token_min_logp"]
        skipped, most_open = settings["blank_skip_threshold"], settings["max_open_steps"]
        for name, value in (("cutoff_top_n", cutoff), ("max_open_steps", most_open)):
            if value is not None or name == "max_open_steps":
                checks.python_int(name, value)
                if value < 1:
                    raise ValueError(f"{name}: expected a number from 1 on, got {value}")
        if least is not None:
            checks.number("token_min_logp", least, low=-INF, high=0.0)
        if skipped is not None:
            checks.number("blank_skip_threshold", skipped, low=0.0, high=1.0, open_low=True)
        return Options(
            blank=self.blank,
            width=int(width),
            nbest=int(nbest),
            labels=min(int(cutoff or len(self.labels)), max(1, len(self.labels) - 1)),
            min_logp=-INF if least is None else float(least),
            skipped=math.log(skipped) if skipped else INF,
            max_open_steps=int(most_open),
            alpha=float(self.alpha),
            beta=float(self.beta),
            unknown=float(self.unk_score_offset),
            score_boundary=self.score_boundary,
            from_logits=bool(settings["from_logits"]),
        )

    def _checked_steps(
        self, log_probs: Tensor, lengths: Lengths | None, N: int
    ) -> tuple[Tensor, Tensor]:
        """Return steps `[T, N, C]`, and lengths `[N]` where the user has them."""
        T, found, C = log_probs_shape(log_probs)
        if (found, C) != (N, len(self.labels)):
            size = f"[T, {N}, {len(self.labels)}]"
            raise ValueError(f"log_probs: expected shape {size}, got {list(log_probs.shape)}")
        steps = log_probs.detach().reshape(T, N, C)
        if lengths is None:
            return steps, torch.full((N,), T, dtype=torch.int64)
        lengths = as_lengths("input_lengths", lengths, N)
        checks.within("input_lengths", lengths, 0, T, "steps")
        return steps, lengths

    def _phrases(
        self, N: int, boost: Boosts, hotwords: Iterable[str], weight: float
    ) -> list[Phrases]:
        """Return the boosted words and phrases of each sequence as symbols."""
        checks.number("hotword_weight", weight, low=-INF, open_low=True)
        words = _checked_words("hotwords", hotwords)
        if words and self._vocabulary.by_token:
            raise ValueError('hotwords: expected unit="word"; boost takes phrases of tokens')
        if isinstance(boost, str) or not isinstance(boost, (PhraseBoost, Iterable, type(None))):
            raise TypeError(f"boost: expected PhraseBoosts, got {type(boost).__name__}")
        boosts = [boost] * N if isinstance(boost, PhraseBoost) or boost is None else list(boost)
        if len(boosts) != N:
            raise ValueError(f"boost: expected {N} of them, got {len(boosts)}")
        for each in boosts:
            if not isinstance(each, PhraseBoost) and each is not None:
                raise TypeError(f"boost: expected a PhraseBoost, got {type(each).__name__}")
            if each is not None and each.number_of_labels != len(self.labels):
                expected, got = len(self.labels), each.number_of_labels
                raise ValueError(f"boost: expected phrases over {expected} labels, got {got}")
        spelled = hotword_phrases(self._vocabulary, words, float(weight))
        return once_each(lambda each: (spelled, boost_phrases(self._vocabulary, each)), boosts)

    def _unserved(self, T: int, options: Options) -> str | None:
        """Return why the kernels of a GPU do not serve a call, or None."""
        if not (self.language_model is None or isinstance(self.language_model, NgramLM)):
            return "a language model of your own"
        if self._vocabulary.most_endings > 1 or max(map(len, self._vocabulary.spelling)) > 1:
            return "labels of several characters"
        if options.width * (options.labels + 1) > MAX_CANDIDATES:
            return f"a beam_width of {options.width} with {options.labels} labels"
        if len(self.labels) > MAX_CLASSES:
            return f"more than {MAX_CLASSES} classes"
        return "more steps than max_open_steps" if options.max_open_steps < T else None

    def _table(self, device: torch.device, unserved: str | None) -> Table:
        """Return the table that serves a call on a device."""
        name = current_backend()
        if name == "triton" and unserved is not None:
            raise RuntimeError(f"backend 'triton': CTCDecoder has no Triton kernel for {unserved}")
        if name in ("auto", "triton") and unserved is None:
            table = resolve(name, device, has_cpu=True)
            if table == "gpu":
                return table
        if self.language_model is not None and not isinstance(self.language_model, NgramLM):
            if name == "numba":
                raise RuntimeError("backend 'numba': expected an NgramLM as language_model")
            return "reference"
        return resolve(name, torch.device("cpu"), has_cpu=True)

    def _search(self, table: Table, phrases: Sequence[Phrases], options: Options) -> Any:
        """Return a search on the CPU over as many sequences as there are phrases."""
        vocabulary = self._vocabulary
        if table == "reference":
            from .reference_text import ReferenceSearch, TextScores

            def scores(each: Phrases) -> TextScores:
                return TextScores(vocabulary, self._words, self._only, *each, options)

            return ReferenceSearch(once_each(scores, phrases))
        from .cpu.text_beam import TextSearch

        args = self._cpu_tables(), self._automata(phrases), options, vocabulary.most_endings
        return TextSearch(*args)

    def _automata(self, phrases: Sequence[Phrases]) -> list[PhraseTables]:
        """Return the automata of each sequence's phrases."""
        return once_each(lambda each: phrase_tables(self._vocabulary, *each), phrases)

    def _tables_on(self, device: Any, make: Callable[..., Any]) -> Any:
        """Return `make(vocabulary, words, lexicon, only, score_boundary)`, once for a device."""
        if self._lexicon is None:
            self._lexicon = build_lexicon(self._vocabulary, self._words, self._only)
        if self._tables.get(device, (None, None))[0] != self.score_boundary:
            others = self._lexicon, self._only, self.score_boundary
            tables = make(self._vocabulary, self._words, *others)
            self._tables[device] = self.score_boundary, tables
        return self._tables[device][1]

    def _cpu_tables(self) -> Any:
        from .cpu.text_beam import tables_of

        return self._tables_on("numba", tables_of)

    def _device_tables(self, device: torch.device) -> Any:
        from .gpu.launch_text import decoder_tables

        return self._tables_on(device, partial(decoder_tables, device=device))

    def _transcripts(self, found: TextBatch, device: torch.device) -> Transcripts:
        """Return texts whose tensors are on a device."""
        counts = found.lengths.flatten().tolist()
        N, nbest, most = *found.lengths.shape, max(counts, default=0)
        tokens, steps, ends = (each[..., :most].flatten(0, 1).cpu() for each in found[:3])
        # The words of each text, and the places of their first and last labels among all labels.
        spelled: list[list[str]] = []
        firsts: list[int] = []
        lasts: list[int] = []
        has_pieces = any(len(text) > 1 for text in self._spaced)
        for k, (labels, S) in enumerate(zip(tokens.tolist(), counts, strict=True)):
            texts = [self._spaced[label] for label in labels[:S]]
            owner: Sequence[int] = range(k * most, k * most + S)  # the label of each character
            if has_pieces:
                owner = [i for i, text in zip(owner, texts, strict=True) for _ in text]
            matches = list(re.finditer("[^ ]+", "".join(texts)))
            spelled.append([match[0] for match in matches])
            firsts += [owner[match.start()] for match in matches]
            lasts += [owner[match.end() - 1] for match in matches]
        places = (
            x.flatten()[torch.tensor(at, dtype=torch.int64)].tolist()
            for x, at in ((steps, firsts), (ends, lasts))
        )
        spans = zip(*places, strict=True)
        timed = [[(word, *next(spans)) for word in words] for words in spelled]
        text = [" ".join(words) for words in spelled]
        tokens, steps, _, lengths, scores, lm_scores = (each.to(device) for each in found)
        return Transcripts(
            [text[n * nbest : (n + 1) * nbest] for n in range(N)],
            [timed[n * nbest : (n + 1) * nbest] for n in range(N)],
            Hypotheses(tokens, lengths, scores, steps),
            lm_scores,
        )


class CTCStream:
    """A search over N sequences whose steps come in chunks, as `CTCDecoder.stream` makes it.

    Args:
        decoder: the decoder.
        N: the number of sequences.
        boost, hotwords, hotword_weight, beam_width, nbest: as in a call.
        settings: the other keywords of a call.

    Chunks of any sizes give bit for bit what one call gives. After each chunk all that no later
    step can reach is dropped. So the memory stays the same over hours, but for 24 bytes for each
    label of the text that is committed. The weights are those that the decoder had when the stream
    was made. A stream can be pickled, with its decoder.

    Raises:
        TypeError, ValueError: as in a call.

    Source: as of `CTCDecoder`, pyctcdecode 0.5, 2023.

    Example:
        >>> import torch, partita
        >>> stream = partita.CTCDecoder(["", "a", "b", " "]).stream(2, from_logits=True)
        >>> classes = torch.tensor([[1, 2], [0, 0], [3, 1]])  # [T, N]
        >>> chunk = torch.nn.functional.one_hot(classes, 4) * 9.0  # [T, N, C]
        >>> stream.feed(chunk, [3, 2])
        >>> stream.partial()
        [PartialText(committed='', open='a '), PartialText(committed='', open='b')]
        >>> stream.reset(1)
        >>> stream.result().text
        [['a'], ['']]
    """

    def __init__(
        self,
        decoder: CTCDecoder,
        N: int,
        *,
        boost: Boosts = None,
        hotwords: Iterable[str] = (),
        hotword_weight: float = 10.0,
        beam_width: int = 16,
        nbest: int = 1,
        **settings: Any,
    ) -> None:
        check_batch("N", N)
        defaults: dict[str, Any] = CTCDecoder.__call__.__kwdefaults__ or {}
        if unknown := set(settings) - set(defaults):
            raise TypeError(f"stream: got an unexpected keyword {min(unknown)!r}")
        self.decoder, self.N = decoder, N
        self._options = decoder._options(beam_width, nbest, {**defaults, **settings})
        phrases = decoder._phrases(N, boost, hotwords, hotword_weight)
        self._steps = [0] * N
        self._committed = [(0, "")] * N  # the number of labels, and their text
        table = decoder._table(torch.device("cpu"), "streams")
        self._search = decoder._search(table, phrases, self._options)

    def feed(self, log_probs: Tensor, lengths: Lengths | None = None) -> None:
        """Search over the next steps of all sequences.

        Args:
            log_probs: `[T, N, C]`, or `[T, C]` for one sequence, as in a call, on any device.
            lengths: `[N]`, how many of these steps each sequence has; T by default.

        Raises:
            TypeError, ValueError: as in a call.

        Example:
            >>> import torch, partita
            >>> stream = partita.CTCDecoder(["", "a"]).stream()
            >>> stream.feed(torch.tensor([[0.1, 0.9]]).log())
            >>> stream.result().text
            [['a']]
        """
        steps, counts = self.decoder._checked_steps(log_probs, lengths, self.N)
        counts = counts.cpu()
        self._search.advance(steps.cpu(), counts, collects=True)
        fed = counts.clamp(0, len(steps)).tolist()  # a length out of range gives NaN
        self._steps = [a + b for a, b in zip(self._steps, fed, strict=True)]

    def partial(self) -> list[PartialText]:
        """Return the best text of each sequence so far, and how much of it is final.

        Returns:
            For each sequence `PartialText(committed, open)`. The committed part only grows. It ends
            in a space where a word has ended. The best text is the one that ranks first among those
            that go on, in which an unfinished word does not count yet.

        Example:
            >>> import torch, partita
            >>> stream = partita.CTCDecoder(["", "a", " "]).stream(from_logits=True)
            >>> stream.feed(torch.eye(3)[[1, 2, 1]] * 20)
            >>> stream.partial()  # the empty text is still in the beam
            [PartialText(committed='', open='a a')]
        """
        found = []
        paths = self._search.best_paths([number for number, _ in self._committed])
        for n, (path, final) in enumerate(paths):
            number, committed = self._committed[n]
            labels = [int(label) for label, *_ in path]
            committed += self._text(labels[: final - number], committed)
            self._committed[n] = final, committed
            found.append(PartialText(committed, self._text(labels[final - number :], committed)))
        return found

    def result(self) -> Transcripts:
        """Return the best texts of what was fed so far. The stream can go on.

        Returns:
            `Transcripts`, on the CPU, as from a call. Steps count from the start of each sequence.

        Example:
            >>> import torch, partita
            >>> stream = partita.CTCDecoder(["", "a"]).stream()
            >>> stream.result().text
            [['']]
        """
        found, T = self._search.results(), max(self._steps, default=0)
        batch = _batch_of(found, self._options.nbest, T)
        return self.decoder._transcripts(batch, torch.device("cpu"))

    def reset(self, n: int | None = None) -> None:
        """Let a sequence start anew.

        Args:
            n: its index; None for all sequences.

        Raises:
            TypeError, IndexError: no index of a sequence.

        Example:
            >>> import torch, partita
            >>> stream = partita.CTCDecoder(["", "a"]).stream()
            >>> stream.feed(torch.tensor([[0.1, 0.9]]).log())
            >>> stream.reset(0)
            >>> stream.result().text
            [['']]
        """
        chosen = range(self.N) if n is None else [checks.dimension("n", n, self.N)]
        for i in chosen:
            self._search.reset(i)
            self._steps[i], self._committed[i] = 0, (0, "")

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._search.attach(self.decoder)

    def _text(self, labels: Iterable[int], before: str) -> str:
        """Return the text of labels after another text, with one space after each finished word."""
        joined = "".join(self.decoder._spaced[label] for label in labels)
        return re.sub(" +", " ", (before[-1:] or " ") + joined)[1:]


def _batch_of(found: Sequence[Sequence[Found] | None], nbest: int, T: int) -> TextBatch:
    """Return the texts of all sequences as a batch of up to T steps."""
    batch = empty_texts(len(found), nbest, T, torch.device("cpu"))
    for n, texts in enumerate(found):
        if texts is None:
            batch.scores[n] = batch.lm_scores[n] = torch.nan
            continue
        for i, (path, score, lm_score) in enumerate(texts):
            rows = torch.as_tensor(path, dtype=torch.int64).reshape(-1, 3)
            for column, each in enumerate(batch[:3]):
                each[n, i, : len(rows)] = rows[:, column]
            batch.lengths[n, i], batch.scores[n, i] = len(rows), score
            batch.lm_scores[n, i] = lm_score
    return batch


def log_probs_shape(log_probs: Tensor) -> tuple[int, int, int]:
    """Return T, N and C of steps `[T, N, C]` or `[T, C]`, or raise."""
    checks.floating("log_probs", log_probs)
    if log_probs.ndim not in (2, 3):
        shape = list(log_probs.shape)
        raise ValueError(f"log_probs: expected shape [T, N, C] or [T, C], got {shape}")
    return log_probs.shape[0], 1 if log_probs.ndim == 2 else log_probs.shape[1], log_probs.shape[-1]


def _checked_labels(labels: Sequence[str], blank: int) -> list[str]:
    """Return the labels of a network as a list."""
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise TypeError(f"labels: expected a sequence of strings, got {type(labels).__name__}")
    if not labels:
        raise ValueError("labels: expected at least one")
    checks.blank(blank, len(labels))
    places: dict[str, int] = {}
    for c, label in enumerate(labels):
        if not isinstance(label, str):
            raise TypeError(f"labels[{c}]: expected a string, got {type(label).__name__}")
        if c != blank and not label:
            raise ValueError(f"labels[{c}]: expected a text, got '', which only the blank may have")
        if places.setdefault(label, c) != c:
            raise ValueError(f"labels[{c}]: expected different labels, got {label!r} twice")
    return list(labels)


def _checked_words(name: str, words: Iterable[str]) -> list[str]:
    """Return words as a list."""
    if isinstance(words, (str, Mapping)) or not isinstance(words, Iterable):
        got = "one string" if isinstance(words, str) else type(words).__name__
        raise TypeError(f"{name}: expected words, got {got}")
    found = list(words)
    for i, word in enumerate(found):
        if not isinstance(word, str):
            raise TypeError(f"{name}[{i}]: expected a string, got {type(word).__name__}")
    return found
