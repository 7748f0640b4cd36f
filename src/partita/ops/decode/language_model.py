"""N-gram language models with back-off, as tensors on any device.

The n-grams form a trie: the node of an n-gram is the child of the node of its first n - 1 words by
its last word. Node 0 has no words, nodes 1 to W are the 1-grams, and each following order is sorted
by (parent, word). So the pairs of all children are one sorted list of integers, the place in the
list is the node, and a lookup is one binary search, which is one operation of PyTorch. A hash table
with open addressing takes an operation for each step of its longest probe sequence: with 5 million
n-grams 19 steps, and 5 times as long on a CPU. Failure links lead from each node to that of the
longest of its proper suffixes (Aho and Corasick, Efficient string matching, 1975).
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from .arpa import UNKNOWN, ArpaFile, Section

FORMAT, VERSION = "partita.NgramLM", 1
SCORES_AT_ONCE = 2**22  # words after states that are looked up together, for their memory


class Trie(NamedTuple):
    """The n-grams of a model with W words: K nodes, of which the first S can be states.

    Fields:
        pairs: `[K - W - 1]` int64, sorted: parent · W + word of each n-gram of two words or more.
        log_probs: `[K]` float64, natural logarithms as `backoffs`.
        states: `[K]` int64, the state after each n-gram.
        backoffs: `[S]` float64, the back-off weights.
        suffixes: `[S]` int64, the node of the longest proper suffix.
    """

    pairs: Tensor
    log_probs: Tensor
    states: Tensor
    backoffs: Tensor
    suffixes: Tensor


def checked_states(states: Tensor, S: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return states as int64, with 0 for what is none of the S states, and which of them are some.

    They have to be on the device of the table.
    """
    checks.integer("states", states)
    if states.ndim != 1:
        raise ValueError(f"states: expected shape [B], got {list(states.shape)}")
    checks.device("states", states, table, "the model")
    checks.within("states", states, 0, S - 1, "states of the model")
    states = states.long()
    exist = (states >= 0) & (states < S)
    return torch.where(exist, states, 0), exist


def check_batch(name: str, size: Any) -> None:
    """Raise unless the size of a batch is an integer from 0 on."""
    checks.python_int(name, size)
    if size < 0:
        raise ValueError(f"{name}: expected a number from 0 on, got {size}")


def check_model(name: str, model: Any) -> None:
    """Raise unless an object has the methods of a language model."""
    for method in ("start", "advance", "final"):
        if not callable(getattr(model, method, None)):
            raise TypeError(
                f"{name}: expected an object with the methods start, advance and final,"
                f" got {type(model).__name__}"
            )


def advance_states(name: str, model: Any, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores `[B, V]` and states `[B, V, ...]` after states `[B, ...]` of any model."""
    found = model.advance(states)
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(
            f"{name}: expected a pair (scores, states) from `advance`, got {type(found).__name__}"
        )
    scores, following = found
    if scores.ndim != 2 or len(scores) != len(states) or following.shape[:2] != scores.shape:
        raise ValueError(
            f"{name}: expected scores of shape [B, V] and states of shape [B, V, ...] from"
            f" `advance` with B = {len(states)}, got {list(scores.shape)} and"
            f" {list(following.shape)}"
        )
    return scores, following


def final_scores(name: str, model: Any, states: Tensor) -> Tensor:
    """Return what the end adds after states `[B, ...]` of any model, `[B]`."""
    scores: Any = model.final(states)
    if not isinstance(scores, Tensor) or scores.shape != states.shape[:1]:
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"{name}: expected scores [{len(states)}] from `final`, got {got}")
    return scores


def _children(trie: Trie, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nodes of pairs of a parent and a word, and whether the model has them."""
    unigrams = len(trie.log_probs) - len(trie.pairs)
    if not len(trie.pairs):
        return pairs, torch.zeros_like(pairs, dtype=torch.bool)
    places = torch.searchsorted(trie.pairs, pairs).clamp_(max=len(trie.pairs) - 1)
    return places + unigrams, trie.pairs[places] == pairs


def _look_up(trie: Trie, depth: int, contexts: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the longest n-gram that ends in each word after its context, and the log-probability.

    The contexts are nodes with at most `depth` words. Both are int64 and broadcast together.
    """
    W = len(trie.log_probs) - len(trie.pairs) - 1
    backoffs = trie.backoffs.new_zeros(()).expand(contexts.shape)
    suffixes = []  # of the contexts, and what it costs to back off to them
    for _ in range(depth):
        suffixes.append((contexts, backoffs))
        contexts, backoffs = trie.suffixes[contexts], backoffs + trie.backoffs[contexts]
    nodes, log_probs = torch.broadcast_tensors(words + 1, backoffs + trie.log_probs[words + 1])
    for contexts, backoffs in reversed(suffixes):
        # The node without words has no pairs, since the 1-grams are not in the list.
        children, exist = _children(trie, contexts * W + words)
        nodes = torch.where(exist, children, nodes)
        log_probs = torch.where(exist, backoffs + trie.log_probs[nodes], log_probs)
    return nodes, log_probs


def _build(file: ArpaFile) -> Trie:
    """Read the n-grams of a file into a trie."""
    sections = file.sections()
    unigrams = next(sections)
    root, W = torch.zeros(1, dtype=torch.int64), len(file.words)
    trie = Trie(
        pairs=torch.empty(0, dtype=torch.int64),
        log_probs=torch.cat([root.double(), unigrams.log_probs]),
        states=root,  # until all children are known
        backoffs=torch.cat([root.double(), unigrams.backoffs]),
        suffixes=root.repeat(W + 1),
    )
    ends = [1, W + 1]  # of the nodes of each order, from 0 words on
    for section in sections:
        trie = _with_order(trie, section, file)
        ends.append(len(trie.log_probs))
    # What follows a node without children and without a back-off weight follows its suffix with the
    # same probability. They are one state, so that equal futures are found to be equal.
    shortens = trie.backoffs == 0
    shortens[trie.pairs // W] = False
    states = torch.arange(len(shortens))
    for n in range(1, len(ends)):
        order = slice(ends[n - 1], ends[n])
        shorter = states[trie.suffixes[order]]
        states[order] = torch.where(shortens[order], shorter, states[order])
    S = int(states.max()) + 1
    backoffs, suffixes = trie.backoffs[:S].clone(), trie.suffixes[:S].clone()
    return trie._replace(states=states, backoffs=backoffs, suffixes=suffixes)


def _with_order(trie: Trie, section: Section, file: ArpaFile) -> Trie:
    """Append the n-grams of the next order to a trie."""
    W, n = len(file.words), section.words.shape[1]

    def text(row: int, length: int) -> str:
        return repr(" ".join(file.words[word] for word in section.words[row, :length].tolist()))

    first, *context, last = section.words.unbind(1)
    parents = first + 1
    for word in context:
        parents, exist = _children(trie, parents * W + word)
        if (missing := checks.first_index(~exist)) is not None:
            line, gram = section.first_line + missing[0], text(missing[0], n - 1)
            file.fail(line, f"the context {gram} is not among the {n - 1}-grams")
    pairs, order = (parents * W + last).sort(stable=True)
    repeats = order[1:][pairs[1:] == pairs[:-1]]
    if len(repeats):
        row = int(repeats.min())
        file.fail(section.first_line + row, f"the {n}-gram {text(row, n)} is in the file twice")
    suffixes, _ = _look_up(trie, n - 2, trie.suffixes[parents[order]], last[order])
    return trie._replace(
        pairs=torch.cat([trie.pairs, pairs]),
        log_probs=torch.cat([trie.log_probs, section.log_probs[order]]),
        backoffs=torch.cat([trie.backoffs, section.backoffs[order]]),
        suffixes=torch.cat([trie.suffixes, suffixes]),
    )


class NgramLM:
    r"""An n-gram language model with back-off, in natural logarithms, on any device.

    Args:
        trie: the n-grams, as `from_arpa` and `load` make them.
        words: the words of the model.
        columns: `[V]` int64, the word of each column of `advance`.
        order: the number of words of the longest n-grams.

    A state is an integer, which stands for the longest end of what has been read that the model has
    and that still changes a probability. Hypotheses with equal states have equal probabilities of
    all that can follow, so a search may merge them. A word that the model does not have is `<unk>`.

    Any object with the methods `start`, `advance` and `final` is a language model too. Its states
    may be tensors of any kind with B first.

    Raises:
        TypeError, ValueError: see `from_arpa` and `load`, which make a model.

    Source: Katz, Estimation of probabilities from sparse data for the language model component of a
        speech recognizer, 1987, for back-off; Heafield, KenLM: faster and smaller language model
        queries, 2011, for states that are as short as possible.

    Example:
        >>> import pathlib, tempfile, partita
        >>> path = pathlib.Path(tempfile.mkdtemp(), "hi.arpa")
        >>> _ = path.write_text(r'''\data\
        ... ngram 1=3
        ... ngram 2=1
        ...
        ... \1-grams:
        ... -99 <s> -0.25
        ... -1.5 </s>
        ... -2 hi 0
        ...
        ... \2-grams:
        ... -0.5 <s> hi
        ...
        ... \end\
        ... ''')
        >>> model = partita.NgramLM.from_arpa(path, labels=["-", "hi"])
        >>> states = model.start(1)
        >>> scores, states = model.advance(states)  # "-" is no word of the model: <unk>
        >>> scores / 2.302585  # log10
        tensor([[-100.2500,   -0.5000]], dtype=torch.float64)
        >>> model.final(states[:, 1]) / 2.302585
        tensor([-1.5000], dtype=torch.float64)
        >>> model.score("hi hi") / 2.302585  # -0.5 - 2 - 1.5
        tensor(-4.0000, dtype=torch.float64)
    """

    def __init__(self, trie: Trie, words: Sequence[str], columns: Tensor, order: int) -> None:
        self.words: Sequence[str] = words
        self.order = order
        self._trie, self._columns = trie, columns
        self._places = {word: place for place, word in enumerate(words)}
        self._unknown = self._places[UNKNOWN.decode()]

    @classmethod
    def from_arpa(
        cls, path: str | os.PathLike[str], labels: Sequence[str] | None = None
    ) -> NgramLM:
        r"""Read a model of any order from an ARPA file.

        Args:
            path: the file, as text or compressed by gzip, in UTF-8.
            labels: the tokens of a network, which are the columns of `advance`. One that is no word
                of the model, as the blank, is read as `<unk>`. By default the columns are the words
                of the model, `words`.

        Returns:
            A model on the CPU. `<UNK>` is read as `<unk>`. A file without it gets it with the
            probability 10^-100, as in kenlm. Reading shows its progress on a terminal.

        Raises:
            TypeError: `labels` is no sequence of strings.
            ValueError: the file is malformed, is compressed otherwise, or is a binary file. The
                message has the path, the line and the reason.

        Example:
            >>> import pathlib, tempfile, partita
            >>> path = pathlib.Path(tempfile.mkdtemp(), "hi.arpa")
            >>> text = r"\data\ / ngram 1=3 / \1-grams: / -9 <s> / -1 </s> / -2 hi / \end\ "
            >>> _ = path.write_text(text.replace(" / ", "\n"))
            >>> model = partita.NgramLM.from_arpa(path)
            >>> model
            NgramLM(order=1, words=4, ngrams=4, columns=4, device=cpu)
            >>> model.words
            ['<s>', '</s>', 'hi', '<unk>']
        """
        file = ArpaFile(path)
        with torch.device("cpu"):  # whatever the default device is
            trie, columns = _build(file), torch.arange(len(file.words))
        order = max(n for n, count in enumerate(file.counts, 1) if count)
        return cls(trie, file.words, columns, order)._with_labels(labels)

    @classmethod
    def load(cls, path: str | os.PathLike[str], labels: Sequence[str] | None = None) -> NgramLM:
        r"""Map a file that `save` has written into memory.

        The file is read where the model looks, and processes that load it share its memory.

        Args:
            path: the file.
            labels: as in `from_arpa`; by default the columns of the model that was saved.

        Returns:
            A model on the CPU, with the numbers of the one that was saved.

        Raises:
            TypeError: `labels` is no sequence of strings.
            ValueError: the file is another one, is cut off, or is of a later version of the format.

        Example:
            >>> import pathlib, tempfile, partita
            >>> path = pathlib.Path(tempfile.mkdtemp(), "hi.arpa")
            >>> text = r"\data\ / ngram 1=3 / \1-grams: / -9 <s> / -1 </s> / -2 hi / \end\ "
            >>> _ = path.write_text(text.replace(" / ", "\n"))
            >>> model = partita.NgramLM.from_arpa(path)
            >>> model.save(path.with_suffix(".pt"))
            >>> partita.NgramLM.load(path.with_suffix(".pt"), labels=["hi"])
            NgramLM(order=1, words=4, ngrams=4, columns=1, device=cpu)
        """
        path = os.fspath(path)
        problem = f"{path}: expected a file that NgramLM.save has written"
        with open(path, "rb"):  # a file that is not there, or must not be read, is none of those
            pass
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (RuntimeError, pickle.UnpicklingError, OSError) as error:
            raise ValueError(f"{problem}, got one that cannot be loaded") from error
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"{problem}, got one with other contents")
        if found["version"] > VERSION:
            raise ValueError(
                f"{path}: expected a file of version {VERSION}, got version {found['version']},"
                " which a later version of partita has written"
            )
        trie = Trie(*(found[name] for name in Trie._fields))
        model = cls(trie, found["words"].split("\n"), found["columns"], found["order"])
        return model._with_labels(labels)

    def save(self, path: str | os.PathLike[str]) -> None:
        r"""Write the model to a file that `load` maps into memory.

        An existing file is replaced when the new one is complete, so that processes that have
        loaded it keep what they have.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be written.

        Example:
            >>> import pathlib, tempfile, partita
            >>> path = pathlib.Path(tempfile.mkdtemp(), "hi.arpa")
            >>> text = r"\data\ / ngram 1=3 / \1-grams: / -9 <s> / -1 </s> / -2 hi / \end\ "
            >>> _ = path.write_text(text.replace(" / ", "\n"))
            >>> model = partita.NgramLM.from_arpa(path)
            >>> model.save(path.with_suffix(".pt"))
            >>> partita.NgramLM.load(path.with_suffix(".pt"))
            NgramLM(order=1, words=4, ngrams=4, columns=4, device=cpu)
        """
        contents = {
            "format": FORMAT,
            "version": VERSION,
            "order": self.order,
            "words": "\n".join(self.words),
            "columns": self._columns.cpu(),
            **{name: x.cpu() for name, x in self._trie._asdict().items()},
        }
        path = os.fspath(path)
        part = f"{path}.{os.getpid()}.part"
        try:
            torch.save(contents, part)
            os.replace(part, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(part)

    def to(self, device: torch.device | str) -> NgramLM:
        r"""Return the model with its tables on a device.

        Args:
            device: the device.

        Returns:
            A model that shares the words, and the tables too if they are there already.

        Raises:
            RuntimeError: the device cannot be used.

        Example:
            >>> import pathlib, tempfile, partita
            >>> path = pathlib.Path(tempfile.mkdtemp(), "hi.arpa")
            >>> text = r"\data\ / ngram 1=3 / \1-grams: / -9 <s> / -1 </s> / -2 hi / \end\ "
            >>> _ = path.write_text(text.replace(" / ", "\n"))
            >>> model = partita.NgramLM.from_arpa(path)
            >>> model.to("cpu").device
            device(type='cpu')
        """
        trie = Trie(*(x.to(device) for x in self._trie))
        return NgramLM(trie, self.words, self._columns.to(device), self.order)

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return self._trie.log_probs.device

    def start(self, B: int, bos: bool = True) -> Tensor:
        r"""Return the state of each of B hypotheses that have read nothing.

        Args:
            B: the number of hypotheses.
            bos: whether a sentence begins here, after `<s>`.

        Returns:
            `[B]` int64, states.

        Raises:
            TypeError, ValueError: `B` is no number from 0 on; with `bos`, the model has no `<s>`.

        Example:
            >>> import pathlib, tempfile, partita
            >>> path = pathlib.Path(tempfile.mkdtemp(), "hi.arpa")
            >>> text = r"\data\ / ngram 1=3 / \1-grams: / -9 <s> / -1 </s> / -2 hi / \end\ "
            >>> _ = path.write_text(text.replace(" / ", "\n"))
            >>> model = partita.NgramLM.from_arpa(path)
            >>> model.start(2)
            tensor([0, 0])
        """
        check_batch("B", B)
        states = torch.zeros(B, dtype=torch.int64, device=self.device)
        return self._trie.states[states + 1 + self._place("<s>")] if bos else states

    def advance(self, states: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return the log-probability of each column after each state, and the states that follow.

        The host does not wait for the device.

        Args:
            states: `[B]` integers, states of this model on its device.

        Returns:
            `(scores, next_states)`: `[B, V]` float64 natural log-probabilities, and `[B, V]` int64.
            The columns are the labels, or else the words of the model.

        Raises:
            TypeError, ValueError: states of another dtype, shape or device; numbers that are no
                states of the model. On a GPU the latter are checked only with `PARTITA_CHECK=1`;
                otherwise such a row has the scores NaN.

        Example:
            >>> import pathlib, tempfile, partita
            >>> path = pathlib.Path(tempfile.mkdtemp(), "hi.arpa")
            >>> text = r"\data\ / ngram 1=3 / \1-grams: / -9 <s> / -1 </s> / -2 hi / \end\ "
            >>> _ = path.write_text(text.replace(" / ", "\n"))
            >>> model = partita.NgramLM.from_arpa(path)
            >>> scores, states = model.advance(model.start(1))
            >>> scores / 2.302585  # <s>, </s>, hi and <unk>, in log10
            tensor([[  -9.0000,   -1.0000,   -2.0000, -100.0000]], dtype=torch.float64)
            >>> states  # no word changes what follows in this model
            tensor([[0, 0, 0, 0]])
        """
        states, exist = checked_states(states, len(self._trie.backoffs), self._columns)
        rows = max(1, SCORES_AT_ONCE // len(self._columns))
        parts = [self._look_up(part[:, None], self._columns) for part in states.split(rows)]
        log_probs, following = (torch.cat(each) for each in zip(*parts, strict=True))
        return log_probs.masked_fill(~exist[:, None], torch.nan), following

    def final(self, states: Tensor) -> Tensor:
        r"""Return the log-probability that a sentence ends after each state.

        Args:
            states: `[B]` integers, as in `advance`.

        Returns:
            `[B]` float64, natural log-probabilities of `</s>`.

        Raises:
            TypeError, ValueError: as in `advance`; the model has no `</s>`.

        Example:
            >>> import pathlib, tempfile, partita
            >>> path = pathlib.Path(tempfile.mkdtemp(), "hi.arpa")
            >>> text = r"\data\ / ngram 1=3 / \1-grams: / -9 <s> / -1 </s> / -2 hi / \end\ "
            >>> _ = path.write_text(text.replace(" / ", "\n"))
            >>> model = partita.NgramLM.from_arpa(path)
            >>> model.final(model.start(1)) / 2.302585  # log10
            tensor([-1.0000], dtype=torch.float64)
        """
        states, exist = checked_states(states, len(self._trie.backoffs), self._columns)
        ends = torch.full_like(states, self._place("</s>"))
        return self._look_up(states, ends)[0].masked_fill(~exist, torch.nan)

    def score(
        self,
        words: str | Sequence[str] | Sequence[Sequence[str]],
        bos: bool = True,
        eos: bool = True,
    ) -> Tensor:
        r"""Return the log-probability of sentences.

        Args:
            words: the words of one sentence, as a sequence of strings or as one string with spaces
                between them; or a batch, a sequence of sequences of strings.
            bos: whether the sentences begin after `<s>`, which is not among their words.
            eos: whether they end, which adds the log-probability of `</s>`.

        Returns:
            `[]` or `[N]` float64, natural logarithms, on the device of the model.

        Raises:
            TypeError: something among the words is no string.
            ValueError: a word has a space inside; the model has no `<s>` or `</s>` that is needed.

        Example:
            >>> import pathlib, tempfile, partita
            >>> path = pathlib.Path(tempfile.mkdtemp(), "hi.arpa")
            >>> text = r"\data\ / ngram 1=3 / \1-grams: / -9 <s> / -1 </s> / -2 hi / \end\ "
            >>> _ = path.write_text(text.replace(" / ", "\n"))
            >>> model = partita.NgramLM.from_arpa(path)
            >>> model.score("hi hi") / 2.302585  # log10
            tensor(-5.0000, dtype=torch.float64)
            >>> model.score([["hi"], ["you"]], eos=False) / 2.302585
            tensor([  -2.0000, -100.0000], dtype=torch.float64)
        """
        is_batch = not isinstance(words, str) and not all(isinstance(x, str) for x in words)
        batch: Sequence[Any] = words if is_batch else [words]
        names = [f"words[{i}]" if is_batch else "words" for i in range(len(batch))]
        rows = list(map(self._word_ids, names, batch))
        lengths = list(map(len, rows))
        L = max(lengths, default=0)
        ids = torch.tensor([row + [0] * (L - len(row)) for row in rows], dtype=torch.int64)
        ids, counts = ids.to(self.device), torch.tensor(lengths, device=self.device)
        states = self.start(len(rows), bos)
        total = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        for i in range(L):
            log_probs, following = self._look_up(states, ids[:, i])
            inside = i < counts
            total = total + torch.where(inside, log_probs, 0.0)
            states = torch.where(inside, following, states)
        total = total + self.final(states) if eos else total
        return total if is_batch else total[0]

    def __repr__(self) -> str:
        ngrams, columns = len(self._trie.log_probs) - 1, len(self._columns)
        sizes = f"order={self.order}, words={len(self.words)}, ngrams={ngrams}, columns={columns}"
        return f"NgramLM({sizes}, device={self.device})"

    def _look_up(self, states: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of words after states, and the states that follow."""
        nodes, log_probs = _look_up(self._trie, self.order - 1, states, words)
        return log_probs, self._trie.states[nodes]

    def _place(self, word: str) -> int:
        """Return the place of a marker of sentences among the words."""
        if word not in self._places:
            raise ValueError(f"expected a model with the word {word}, got one without it")
        return self._places[word]

    def _word_ids(self, name: str, sentence: str | Sequence[str]) -> list[int]:
        """Return the places of the words of a sentence."""
        if not isinstance(sentence, (str, list, tuple)):
            raise TypeError(f"{name}: expected words, got {type(sentence).__name__}")
        words = sentence.split() if isinstance(sentence, str) else sentence
        for i, word in enumerate(words):
            if not isinstance(word, str):
                raise TypeError(f"{name}[{i}]: expected a string, got {type(word).__name__}")
            if len(word.split()) > 1:
                raise ValueError(
                    f"{name}[{i}]: expected one word, got {word!r}; a batch is a list of lists"
                )
        return [self._places.get(word, self._unknown) for word in words]

    def _with_labels(self, labels: Sequence[str] | None) -> NgramLM:
        """Return the model with a column for each label."""
        if labels is None:
            return self
        if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
            raise TypeError("labels: expected a sequence of strings, a token each")
        if not len(labels):
            raise ValueError("labels: expected at least one")
        places = [self._places.get(label, self._unknown) for label in labels]
        columns = torch.tensor(places, device=self.device)
        return NgramLM(self._trie, self.words, columns, self.order)
