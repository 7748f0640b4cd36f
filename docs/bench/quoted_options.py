"""The signatures of functions and tables of their arguments; the name of a quote is `options_PAGE`.

Names and defaults are those that `inspect.signature` finds, and meanings are the first sentences of
the docstrings, or the first two where one is short.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from quoted_rows import FIGURES, table

PAGES = {
    "softmax": "softmax log_softmax logsumexp",
    "cross_entropy": "cross_entropy",
    "token_stats": "token_stats linear_token_stats",
    "truncated_stats": "truncated_stats linear_truncated_stats",
    "support_stats": "support_stats linear_support_stats",
    "logprobs": "logprobs topk_logprobs linear_logprobs linear_topk_logprobs",
    "divergence": "divergence topk_divergence linear_divergence linear_topk_divergence",
    "distillation": "distillation_loss linear_distillation_loss",
    "linear_cross_entropy": "linear_cross_entropy",
    "linear_plans": "linear_cross_entropy_plan",
    "contrastive_loss": "contrastive_loss parallel.contrastive_loss",
    "parallel": "parallel.cross_entropy parallel.linear_cross_entropy",
    "chain": "Chain logz",
    "linear_chain": "linear_chain",
    "semi_markov": "semi_markov_chain",
    "hmm": "hmm.GaussianHMM hmm.CategoricalHMM hmm.PoissonHMM",
    "ctc": "ctc_loss ctc_align",
    "ctc_crf": "ctc_crf_loss",
    "rnnt": "rnnt_loss rnnt_align",
    "linear_rnnt": "linear_rnnt_loss",
    "tdt": "tdt_loss tdt_align linear_tdt_loss",
    "decode": "ctc_greedy_search ctc_beam_search",
    "ctc_crf_decode": "ctc_crf_decode stitch",
    "ctc_decoder": "CTCDecoder CTCDecoder.__call__",
    "language_models": "NgramLM.from_arpa PhraseBoost",
    "transducer_search": "rnnt_greedy_search rnnt_beam_search",
}
SHORT = 40  # letters
SECTION = re.compile(r"^Args:\n(.*?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
ENTRY = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", re.MULTILINE)


def _found(name: str) -> Any:
    import partita

    value: Any = partita
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _default(parameter: inspect.Parameter) -> str:
    import partita

    value = parameter.default
    if value is inspect.Parameter.empty:
        return ""
    if isinstance(value, partita.Semiring):
        return next(name for name in partita.__all__ if getattr(partita, name) is value)
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _parameters(name: str) -> list[inspect.Parameter]:
    return [x for x in inspect.signature(_found(name)).parameters.values() if x.name != "self"]


def signature(name: str) -> str:
    """Return the signature of a function without its annotations, in lines of 88 columns."""
    words, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for each in _parameters(name):
        if each.kind is each.KEYWORD_ONLY != kind:
            words.append("*")
        kind = each.kind
        words.append(f"{each.name}={_default(each)}" if _default(each) else each.name)
    shown = "decoder" if name == "CTCDecoder.__call__" else f"partita.{name}"
    line = f"{shown}({', '.join(words)})"
    if len(line) <= 88:
        return line
    # Spaces are between arguments only.
    return f"{shown}(\n{textwrap.indent(textwrap.fill(', '.join(words), 84), '    ')}\n)"


def _entries(name: str) -> Iterator[tuple[list[str], str]]:
    """Yield arguments that a docstring describes together, and the first sentence about them."""
    section = SECTION.search(inspect.getdoc(_found(name)) or "")
    for names, meaning in ENTRY.findall(section[1] if section else ""):
        sentences = re.split(r"(?<=\.) (?=[A-Z`])", " ".join(meaning.split()))
        while len(sentences) > 1 and len(sentences[0]) < SHORT:
            sentences[:2] = [" ".join(sentences[:2])]
        sentence = sentences[0].removesuffix(".")
        if other := re.match(r"as in `(\w+)`", sentence):
            place = f"{name.rpartition('.')[0]}.{other[1]}".lstrip(".")
            others = {n: text for ns, text in _entries(place) for n in ns}
            for each in names.split(", "):
                yield [each], others[each]
        else:
            yield names.split(", "), sentence


def options(page: str) -> str:
    """Return the signatures of a page, and a table of all their arguments."""
    functions = PAGES[page].split()
    defaults: dict[str, list[str]] = {}
    for function in functions:
        for each in _parameters(function):
            found = defaults.setdefault(each.name, [])
            if _default(each) not in found:
                found.append(_default(each))
    entries = [entry for function in functions for entry in _entries(function)]
    if differ := {name for names, _ in entries for name in names} ^ set(defaults):
        raise LookupError(
            f"{page}: docstrings and signatures differ in {', '.join(sorted(differ))}"
        )
    lines, done = [], set()
    for names, meaning in entries:
        for alike in dict.fromkeys(tuple(defaults[n]) for n in names if n not in done):
            same = [n for n in names if tuple(defaults[n]) == alike and n not in done]
            done |= set(same)
            default = ", ".join(f"`{text}`" for text in alike if text)
            lines.append([", ".join(f"`{n}`" for n in same), default, meaning])
    for above, line in list(pairwise(lines))[::-1]:
        if above[1:] == line[1:]:
            above[0] += f", {line[0]}"
            lines.remove(line)
    lines = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    block = "\n".join(signature(function) for function in functions)
    return f"\n```text\n{block}\n```\n{table(['argument', 'default', ''], lines)}"


FIGURES.update({f"options_{page}": partial(options, page) for page in PAGES})
