"""The providers: Partita, PyTorch in several ways, and other libraries that are installed.

Each family declares its functions by provider; here they are put together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from ..cli.console import UsageError
from . import (
    chain,
    ctc,
    decode,
    heads,
    hmm,
    language_model,
    linear_chain,
    pairs,
    rnnt,
    rnnt_search,
    rows,
    support,
)
from .case import Function, Load, Provider, given

FAMILIES = (
    *(rows, heads, support, pairs),
    *(chain, linear_chain, hmm, ctc, rnnt, rnnt_search, decode, language_model),
)
CUPY = f"cupy-cuda{(torch.version.cuda or '12').partition('.')[0]}x"
# PyTorch's functions that take few operations, so that its compiler is quick. The others have
# PyTorch's functions too, with loops over the steps.
COMPILED: dict[str, Function] = {**rows.TORCH, **heads.TORCH, **support.TORCH, **pairs.TORCH}


def _compiled(function: Function) -> Function:
    # Without a reset, a function is compiled for a few shapes and then runs eagerly.
    torch.compiler.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


EXTRA: dict[str, dict[str, Load]] = {
    "torch": {op: given(function) for op, function in {**COMPILED, **rnnt.TORCH}.items()},
    "compile": {op: functools.partial(_compiled, function) for op, function in COMPILED.items()},
}


def _provider(
    name: str, install: str = "", packages: tuple[str, ...] = (), *, overwrites: bool = False
) -> Provider:
    """Return the provider with the ops that the families declare for it.

    `pip install` and `install` bring `packages`, by default the module of its name.
    """
    ops = dict(EXTRA.get(name, {}))
    for family in FAMILIES:
        ops |= family.PROVIDERS.get(name, {})
    if not install:
        return Provider(name, ops, overwrites=overwrites)
    modules = packages or (name.replace("-", "_"),)
    return Provider(name, ops, modules, f"pip install {install}", overwrites)


PARTITA = _provider("partita")
PARTITA_INPLACE = _provider("partita-inplace", overwrites=True)
PARTITA_FAST = _provider("partita-fast")
PARTITA_LEAN = _provider("partita-lean")
OURS = (PARTITA, PARTITA_INPLACE, PARTITA_FAST, PARTITA_LEAN)
PRODUCTS = _provider("products")  # the yardstick is timed with Partita, whatever the peers
TORCH = _provider("torch")
PEERS = (
    TORCH,
    _provider("torch-linear", "'torch>=2.13'", ("torch.nn.modules.linear_cross_entropy",)),
    _provider("compile"),
    _provider("chunked"),
    _provider("naive"),
    _provider("quack", "quack-kernels"),
    _provider("liger", "liger-kernel", ("liger_kernel",), overwrites=True),
    _provider("liger-cute", "'liger-kernel[cutedsl]'", ("liger_kernel", "cutlass")),
    _provider("cce", "cut-cross-entropy", ("cut_cross_entropy",)),
    _provider("cce-exact", "cut-cross-entropy", ("cut_cross_entropy",)),
    _provider("open-clip", "open-clip-torch", ("open_clip",)),
    _provider("koi", "ont-koi"),
    _provider("seqdist", f"{CUPY} && pip install --no-deps seqdist", ("cupy", "seqdist")),
    _provider("torch-struct", "torch-struct"),
    _provider("flash-semicrf", "flash-semicrf"),
    _provider("pytorch-crf", "pytorch-crf", ("torchcrf",)),
    _provider("torchaudio", "torchaudio"),
    _provider("fast-ctc-decode", "fast-ctc-decode"),
    _provider("pyctcdecode", "pyctcdecode"),
    _provider("flashlight-text", "flashlight-text", ("flashlight",)),
    _provider("kenlm", "kenlm"),
    _provider("hmmlearn", "hmmlearn"),
)


def missing(providers: Iterable[Provider]) -> dict[str, str]:
    """Return the command that installs each provider that is missing."""
    return {each.name: message for each in providers if (message := each.missing())}


def choose(names: list[str]) -> list[Provider]:
    """Return Partita and the yardstick, then the peers of these names in their order."""
    known = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in known:
            raise UsageError(f"--peers: expected some of {', '.join(known)}, got {name!r}")
    return [*OURS, PRODUCTS, *(known[name] for name in names)]
