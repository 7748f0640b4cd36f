"""The decoder of `pyctcdecode`, on logits or probabilities of one utterance or of many.

No text is dropped for its score alone, so `beam_prune_logp` has no effect, and neither has
`prune_history`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.decode.ctc_decoder import CTCDecoder, Transcripts
from ..ops.decode.language_model import NgramLM
from ..runtime import checks

__all__ = ["BeamSearchDecoderCTC", "build_ctcdecoder"]

LEAST = 1e-15  # of a probability
Beam = tuple[str, None, list[tuple[str, tuple[int, int]]], float, float]


class BeamSearchDecoderCTC:
    """A `CTCDecoder` with the methods of pyctcdecode.

    Args:
        decoder: the decoder.

    Raises:
        TypeError, ValueError: see `build_ctcdecoder`, which makes it.

    Source: the class of this name in pyctcdecode 0.5, 2023.

    Example:
        >>> import torch
        >>> from partita.integrations.pyctcdecode import build_ctcdecoder
        >>> decoder = build_ctcdecoder(["a", "b", "|", "<pad>"])
        >>> decoder.decode((torch.eye(4)[[0, 2, 3, 1]] * 9).numpy())
        'a b'
    """

    def __init__(self, decoder: CTCDecoder) -> None:
        self.decoder = decoder

    def decode(self, logits: Any, beam_width: int = 100, **options: Any) -> str:
        """Return the best text of one utterance.

        Args:
            logits: `[T, C]`, an array or a tensor: logits, log-probabilities or probabilities.
            beam_width: the number of texts that go on after each step, up to 256.
            options: `token_min_logp=-5.0`, `hotwords=None`, `hotword_weight=10.0`; and
                `beam_prune_logp` and `prune_history`, which have no effect.

        Returns:
            The text.

        Raises:
            TypeError, ValueError: a wrong shape, dtype, number or option.

        Example:
            >>> import torch
            >>> from partita.integrations.pyctcdecode import build_ctcdecoder
            >>> logits = torch.eye(3)[[0, 2, 1]].numpy() * 9
            >>> build_ctcdecoder(["a", "b", ""]).decode(logits)
            'ab'
        """
        return self._decode([logits], beam_width, 1, options).text[0][0]

    def decode_batch(
        self, pool: Any, logits_list: Sequence[Any], beam_width: int = 100, **options: Any
    ) -> list[str]:
        """Return the best text of each utterance.

        Args:
            pool: has no effect; threads share the utterances.
            logits_list: `[T, C]` each, as in `decode`.
            beam_width, options: as in `decode`.

        Returns:
            The texts.

        Raises:
            TypeError, ValueError: as in `decode`.

        Example:
            >>> import torch
            >>> from partita.integrations.pyctcdecode import build_ctcdecoder
            >>> logits = torch.eye(3)[[0, 2, 1]] * 9
            >>> build_ctcdecoder(["a", "b", ""]).decode_batch(None, [logits, logits[:2]])
            ['ab', 'a']
        """
        return [texts[0] for texts in self._decode(logits_list, beam_width, 1, options).text]

    def decode_beams(self, logits: Any, beam_width: int = 100, **options: Any) -> list[Beam]:
        """Return the texts of one utterance, the best first.

        Args:
            logits, beam_width, options: as in `decode`.

        Returns:
            For each text a tuple of the text; None, where pyctcdecode has a state; its words as
            `(word, (first step, step after the last))`; its log-probability; and this plus the
            scores of language model and words.

        Raises:
            TypeError, ValueError: as in `decode`.

        Example:
            >>> import torch
            >>> from partita.integrations.pyctcdecode import build_ctcdecoder
            >>> decoder = build_ctcdecoder(["a", "b", ""])
            >>> [beam[:3] for beam in decoder.decode_beams(torch.eye(3)[[0, 2]] * 9, beam_width=2)]
            [('a', None, [('a', (0, 1))]), ('', None, [])]
        """
        found = self._decode([logits], beam_width, beam_width, options)
        scores, added = found.hypotheses.scores[0].tolist(), found.lm_scores[0].tolist()
        return [
            (text, None, [(word, (start, end)) for word, start, end in words], score, score + more)
            for text, words, score, more in zip(
                found.text[0], found.words[0], scores, added, strict=True
            )
            if score > -math.inf
        ]

    def reset_params(
        self,
        alpha: float | None = None,
        beta: float | None = None,
        unk_score_offset: float | None = None,
        lm_score_boundary: bool | None = None,
    ) -> None:
        """Set the weights of the language model that are not None.

        Args:
            alpha, beta, unk_score_offset, lm_score_boundary: as in `build_ctcdecoder`.

        Raises:
            TypeError, ValueError: the next search raises them for a number that is not finite.

        Source: the method of this name in pyctcdecode 0.5, 2023.

        Example:
            >>> from partita.integrations.pyctcdecode import build_ctcdecoder
            >>> decoder = build_ctcdecoder(["a", "b", ""])
            >>> decoder.reset_params(beta=0.5)
            >>> decoder.decoder.beta
            0.5
        """
        if alpha is not None:
            self.decoder.alpha = alpha
        if beta is not None:
            self.decoder.beta = beta
        if unk_score_offset is not None:
            self.decoder.unk_score_offset = unk_score_offset
        if lm_score_boundary is not None:
            self.decoder.score_boundary = lm_score_boundary

    def _decode(
        self, logits_list: Sequence[Any], beam_width: int, nbest: int, options: dict[str, Any]
    ) -> Transcripts:
        given = {"token_min_logp": -5.0, "hotwords": None, "hotword_weight": 10.0, **options}
        for name in ("beam_prune_logp", "prune_history"):
            given.pop(name, None)
        if unknown := set(given) - {"token_min_logp", "hotwords", "hotword_weight"}:
            raise TypeError(f"expected the options of pyctcdecode, got {min(unknown)!r}")
        rows = [self._log_probs(logits) for logits in logits_list]
        lengths = [len(row) for row in rows]
        empty = torch.zeros(0, 0, len(self.decoder.labels))
        batch = torch.nn.utils.rnn.pad_sequence(rows) if rows else empty
        given["hotwords"] = given["hotwords"] or ()
        given |= {"beam_width": beam_width, "nbest": nbest, "cutoff_top_n": None}
        return self.decoder(batch, lengths if rows else None, **given)

    def _log_probs(self, logits: Any) -> Tensor:
        """Return log-probabilities in fp64 that are not below those of pyctcdecode."""
        numbers = torch.as_tensor(logits)
        checks.floating("logits", numbers)
        C = len(self.decoder.labels)
        if numbers.ndim != 2 or numbers.shape[1] != C:
            raise ValueError(f"logits: expected shape [T, {C}], got {list(numbers.shape)}")
        numbers = numbers.double().cpu()
        if len(numbers) and math.isclose(float(numbers.sum(1).mean()), 1):
            return numbers.clamp(LEAST, 1).log()
        return numbers.log_softmax(-1).clamp(min=math.log(LEAST))


def build_ctcdecoder(
    labels: Sequence[str],
    kenlm_model_path: str | os.PathLike[str] | None = None,
    unigrams: Iterable[str] | None = None,
    alpha: float = 0.5,
    beta: float = 1.5,
    unk_score_offset: float = -10.0,
    lm_score_boundary: bool = True,
) -> BeamSearchDecoderCTC:
    """Return a decoder for the labels of a network.

    Args:
        labels: the text of each class. `"|"`, where there is no `" "`, is a space, and `<pad>`,
            `[PAD]` or `"_"` the blank `""`, which comes last where there is none. Labels with
            `"▁"` or `"##"` are pieces of words.
        kenlm_model_path: an ARPA file, or what `NgramLM.save` has written; no binary file of kenlm.
        unigrams: the known words; those of the model by default.
        alpha, beta, unk_score_offset: as in `CTCDecoder`.
        lm_score_boundary: `score_boundary` there.

    Returns:
        A `BeamSearchDecoderCTC`.

    Raises:
        TypeError, ValueError: as in `CTCDecoder` and `NgramLM.from_arpa`.

    Source: the function of this name in pyctcdecode 0.5, 2023; the method is that of
        `partita.CTCDecoder`.

    Example:
        >>> import torch
        >>> from partita.integrations.pyctcdecode import build_ctcdecoder
        >>> decoder = build_ctcdecoder(["[PAD]", "he", "##llo"])
        >>> decoder.decode(torch.eye(3)[[1, 2]] * 9)
        'hello'
    """
    model = None
    if kenlm_model_path is not None:
        with open(kenlm_model_path, "rb") as file:
            is_saved = file.read(2) == b"PK"
        model = (NgramLM.load if is_saved else NgramLM.from_arpa)(kenlm_model_path)
    texts = _texts(list(labels))
    decoder = CTCDecoder(
        texts,
        blank=texts.index(""),
        language_model=model,
        unigrams=unigrams if model is not None else None,
        alpha=alpha,
        beta=beta,
        unk_score_offset=unk_score_offset,
        score_boundary=lm_score_boundary,
    )
    return BeamSearchDecoderCTC(decoder)


def _texts(labels: list[str]) -> list[str]:
    """Return the texts of labels, with "" for the blank, and pieces that begin words with "▁"."""
    has_hashes = any(label.startswith("##") for label in labels)
    in_pieces = has_hashes or any(label.startswith("▁") for label in labels)
    if has_hashes:
        special = r"[<\[].+[>\]]|▁?|▁⁇▁"
        labels = [
            label[2:]
            if label[:2] == "##"
            else label
            if re.fullmatch(special, label)
            else f"▁{label}"
            for label in labels
        ]
    elif not in_pieces and "|" in labels and " " not in labels:
        labels[labels.index("|")] = " "
    for kind, text in (("pad", ""), ("unk", "▁⁇▁" if in_pieces else "⁇")):
        pattern = re.compile(rf"[<\[]{kind}[>\]]", re.IGNORECASE)
        labels = [text if pattern.fullmatch(label) else label for label in labels]
    if not in_pieces and "_" in labels and "" not in labels:
        labels[labels.index("_")] = ""
    return labels if "" in labels else [*labels, ""]
