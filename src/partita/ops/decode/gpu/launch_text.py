"""Beam search from CTC to text on a GPU: tables, allocation and launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ....runtime.launch import launch, next_power_of_2
from ..language_model import Trie
from ..phrase_boost import Arcs
from ..text_tables import (
    BOUNDARY,
    LN10,
    Lexicon,
    Options,
    PhraseTables,
    TextBatch,
    Vocabulary,
    Words,
    empty_texts,
)
from .plan import text_beam_options
from .text_beam import (
    INTEGERS_OF_BEAM,
    NUMBERS_OF_BEAM,
    Automata,
    Beams,
    Model,
    Steps,
    Tables,
    Weights,
    ctc_text_finish_kernel,
    ctc_text_search_kernel,
    ctc_text_steps_kernel,
)


def decoder_tables(
    vocabulary: Vocabulary,
    words: Words,
    lexicon: Lexicon,
    only: bool,
    score_boundary: bool,
    device: torch.device,
) -> Tables:
    """Return the tables of a decoder on a device, without phrases."""
    by_token = vocabulary.by_token
    symbols = [each[0] if each else -1 for each in vocabulary.spelling]
    trie = model = None
    if only or words.model is not None:
        integers = (each.to(device, torch.int32) for each in lexicon[:3])
        trie = Lexicon(*integers, *(each.to(device, torch.int8) for each in lexicon[3:]))
    if words.model is not None:
        W, ngrams = len(words.places), words.model._trie
        first = torch.searchsorted(ngrams.pairs, torch.arange(len(ngrams.backoffs) + 1) * W)
        ngrams = ngrams._replace(states=ngrams.states.int(), suffixes=ngrams.suffixes.int())
        model = Model(
            trie=Trie(*(each.to(device) for each in ngrams)),
            first=first.to(device, torch.int32),
            words=W,
            unknown=words.unknown,
            final=words.places.get("</s>", 0),
            start=int(words.model.start(1, bos=score_boundary)),
        )
    return Tables(
        symbols=torch.tensor(symbols, dtype=torch.int32).to(device),
        lexicon=trie,
        model=model,
        hotwords=None,
        boost=None,
        C=len(symbols),
        blank=vocabulary.spelling.index(()),
        boundary=-1 if by_token or BOUNDARY not in symbols else symbols.index(BOUNDARY),
        only=int(only),
        by_token=1 if by_token else None,
    )


def device_automata(each: Sequence[Arcs], device: torch.device) -> Automata | None:
    """Return the automata of all sequences, each different one once, on a device, or None.

    Without phrases there are none.
    """
    if all(len(arcs.credits) == 1 for arcs in each):
        return None
    different = list({id(arcs): arcs for arcs in each}.values())
    symbols, firsts, places = len(different[0].start_targets), [], {}
    pairs, start, state = 0, sum(len(arcs.pairs) for arcs in different), 0
    for arcs in different:
        S = len(arcs.credits)
        places[id(arcs)] = start, state
        firsts.append(pairs + torch.searchsorted(arcs.pairs, torch.arange(S + 1) * symbols))
        pairs, start, state = pairs + len(arcs.pairs), start + symbols, state + S + 1
    return Automata(
        pairs=torch.cat([arcs.pairs for arcs in different]).to(device),
        targets=torch.cat([a.targets for a in different] + [a.start_targets for a in different]).to(
            device
        ),
        scores=torch.cat([a.scores for a in different] + [a.start_scores for a in different]).to(
            device
        ),
        credits=torch.cat([F.pad(arcs.credits, (0, 1)) for arcs in different]).to(device),
        first=torch.cat(firsts).to(device, torch.int32),
        places=torch.tensor([places[id(arcs)] for arcs in each]).to(device),
        symbols=symbols,
    )


def ctc_text_search(
    logits: Tensor,
    lengths: Tensor,
    tables: Tables,
    phrases: Sequence[PhraseTables],
    options: Options,
) -> TextBatch:
    """Return the best texts of each sequence of logits `[T, N, C]` with lengths `[N]`."""
    (T, N, C), device, width, nbest = logits.shape, logits.device, options.width, options.nbest
    K = options.labels
    blocks = text_beam_options(width, K)
    found = empty_texts(N, nbest, T, device)
    if not N:
        return found

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    steps = Steps(
        counts=empty(torch.int32, T * N),
        labels=empty(torch.int32, T * N, K),
        log_probs=empty(torch.float64, T * N, K),
        norms=empty(torch.float64, T * N, 2),
    )
    memory = Beams(
        numbers=empty(torch.float64, N, 3 * NUMBERS_OF_BEAM, width),
        integers=empty(torch.int64, N, 3 * INTEGERS_OF_BEAM, width),
        ranks=empty(torch.float64, N, 2, blocks["BLOCK_W"]),
        chosen=empty(torch.int32, N, blocks["BLOCK_W"]),
        taken=torch.zeros((N, width, C), dtype=torch.int32, device=device),
        events=empty(torch.int64, N, T, width),
        ends=empty(torch.int32, N, T, width),
        last=empty(torch.int32, N),
        width=width,
    )
    numbers = Weights(
        alpha=options.alpha,
        beta=options.beta,
        unknown=LN10 * options.unknown,
        unfinished=options.unknown,
        least=options.min_logp,
        skipped=options.skipped,
    )
    weights = torch.tensor(numbers, dtype=torch.float64, device=device)
    strides = dict(zip(("stride_t", "stride_n", "stride_c"), logits.stride(), strict=True))
    launch(
        ctc_text_steps_kernel,
        T * N,
        logits_ptr=logits,
        steps=steps,
        N=N,
        C=C,
        blank=options.blank,
        most_labels=K,
        weights_ptr=weights,
        **strides,
        FROM_LOGITS=options.from_logits,
        BLOCK_C=max(next_power_of_2(C), 32),
        num_warps=min(max(next_power_of_2(C) // 512, 1), 16),
    )
    tables = tables._replace(
        hotwords=device_automata([each.hotwords for each in phrases], device),
        boost=device_automata([each.boost for each in phrases], device),
    )
    launch(
        ctc_text_search_kernel,
        N,
        logits_ptr=logits,
        input_lengths_ptr=lengths,
        steps=steps,
        tables=tables,
        weights_ptr=weights,
        batch=memory,
        T=T,
        N=N,
        most_labels=K,
        **strides,
        **blocks,
    )
    launch(
        ctc_text_finish_kernel,
        N,
        tables=tables,
        weights_ptr=weights,
        batch=memory,
        results=found,
        T=T,
        nbest=nbest,
        SCORE_BOUNDARY=options.score_boundary,
        BLOCK_W=blocks["BLOCK_W"],
        num_warps=1,
    )
    return found
