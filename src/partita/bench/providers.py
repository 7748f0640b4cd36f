"""The providers: Partita, PyTorch in several ways, and other libraries that are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import (
    chain_peers,
    ctc_peers,
    decode_peers,
    divergence_peers,
    linear_chain_peers,
    linear_peers,
    rnnt_peers,
    semi_markov_peers,
)

Function = Callable[..., Any]
CUPY = f"cupy-cuda{(torch.version.cuda or '12').partition('.')[0]}x"


@dataclass(frozen=True)
class Provider:
    """An implementation of some ops.

    Fields:
        name: the name on the command line and in the tables.
        ops: a function for each op, which imports or compiles the op; it is called for each case.
        packages: the modules that must be installed.
        install: the command that installs them.
        overwrites: whether the gradient of a loss is left in the memory of the logits.
        beyond: returns why the provider cannot take the inputs of a case, or None.
    """

    name: str
    ops: Mapping[str, Callable[[], Function]]
    packages: tuple[str, ...] = ()
    install: str = ""
    overwrites: bool = False
    beyond: Callable[[Any], str | None] = lambda inputs: None

    def missing(self) -> str | None:
        """Return why the provider cannot be timed on this machine, or None."""
        if any(importlib.util.find_spec(package) is None for package in self.packages):
            return f"{self.name}: not installed ({self.install})"
        return None


def naive_softmax(x: Tensor) -> Tensor:
    """Compute softmax in five calls, which read the matrix five times and write it three times."""
    z = x - x.amax(-1, keepdim=True)
    numerator = z.exp()
    return numerator / numerator.sum(-1, keepdim=True)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def eager_token_stats(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute log-probability, log-sum-exp, entropy and arg-max with PyTorch's ops."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logp = x.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, target.unsqueeze(-1)).squeeze(-1), x.logsumexp(-1), entropy, x.argmax(-1)


def eager_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Compute the log-probabilities of the ids of each row with PyTorch's ops."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.log_softmax(-1, dtype=dtype).gather(-1, ids)


EAGER: dict[str, Function] = {
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "cross_entropy": F.cross_entropy,
    "token_stats": eager_token_stats,
    "logprobs": eager_logprobs,
    "divergence": divergence_peers.mean_of_logits,
}
FROM_HIDDEN: dict[str, Function] = {
    "linear_cross_entropy": linear_peers.composed_loss,
    "linear_divergence": divergence_peers.composed_divergence,
}
OVER_TIME: dict[str, Function] = {
    "chain": chain_peers.loop_logz,
    "viterbi": chain_peers.loop_viterbi,
    "linear_chain": linear_chain_peers.loop_logz,
    "linear_viterbi": linear_chain_peers.loop_viterbi,
    "semi_markov": semi_markov_peers.loop_logz,
    "ctc": ctc_peers.native_loss,
    "ctc_crf": ctc_peers.loop_crf_loss,
    "rnnt": rnnt_peers.reference_rnnt,
    "tdt": rnnt_peers.reference_rnnt,
    "linear_rnnt": rnnt_peers.with_joint(rnnt_peers.reference_rnnt),
}


def _compiled(function: Function) -> Function:
    # Without a reset, a function is compiled for a few shapes and then runs eagerly.
    torch.compiler.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


def _import(module: str, name: str) -> Function:
    return getattr(importlib.import_module(module), name)


def _partita(name: str) -> Function:
    return _import("partita", name)


class _SameMemory(torch.autograd.Function):
    """A result in the memory of the input, as `inplace=True` does not write to a leaf."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _partita_inplace() -> Function:
    cross_entropy = _partita("cross_entropy")
    return lambda logits, target: cross_entropy(_SameMemory.apply(logits), target, inplace=True)


def _partita_viterbi() -> Function:
    chain = _partita("Chain")
    return lambda scores, source, initial, final: (
        chain(scores, source, initial, final).viterbi().edges
    )


def _partita_linear_chain() -> Function:
    linear_chain = _partita("LinearChain")
    return lambda *inputs: linear_chain(*inputs).logz()


def _partita_linear_viterbi() -> Function:
    linear_chain = _partita("LinearChain")
    return lambda *inputs: linear_chain(*inputs).viterbi().states


def _partita_semi_markov() -> Function:
    semi_markov_chain = _partita("SemiMarkovChain")
    return lambda *inputs: semi_markov_chain(*inputs).logz()


def _partita_semi_markov_viterbi() -> Function:
    semi_markov_chain = _partita("SemiMarkovChain")
    return lambda *inputs: semi_markov_chain(*inputs).viterbi()[1:]


def _partita_ctc() -> Function:
    ctc_loss = _partita("ctc_loss")
    return lambda *inputs: ctc_loss(*inputs, reduction="sum", from_logits=True)


def _partita_ctc_crf() -> Function:
    ctc_crf_loss = _partita("ctc_crf_loss")
    return lambda scores, source, targets, lengths, state_len: ctc_crf_loss(
        scores, targets, lengths, state_len=state_len, alphabet_size=scores.shape[-1]
    )


def _partita_ctc_align() -> Function:
    ctc_align = _partita("ctc_align")
    return lambda *inputs: ctc_align(*inputs).labels


def _liger_softmax() -> Function:
    function: Any = _import("liger_kernel.ops.softmax", "LigerSoftmaxFunction")
    return function.apply


def _liger_cross_entropy() -> Function:
    function: Any = _import("liger_kernel.ops.cross_entropy", "LigerCrossEntropyFunction")
    return lambda logits, target: function.apply(logits, target, None)[0]


def _liger_linear_cross_entropy() -> Function:
    function: Any = _import(
        "liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"
    )
    return lambda *inputs: function.apply(*inputs)[0]


PARTITA = Provider(
    "partita",
    {name: lambda name=name: _partita(name) for name in EAGER}
    | {"divergence": divergence_peers.partita_rows}
    | {"chain": lambda: _partita("logz"), "viterbi": _partita_viterbi}
    | {"linear_chain": _partita_linear_chain, "linear_viterbi": _partita_linear_viterbi}
    | {"semi_markov": _partita_semi_markov, "semi_markov_viterbi": _partita_semi_markov_viterbi}
    | {"ctc": _partita_ctc, "ctc_crf": _partita_ctc_crf, "ctc_align": _partita_ctc_align}
    | {
        "rnnt": lambda: rnnt_peers.partita_rnnt,
        "tdt": lambda: rnnt_peers.partita_rnnt,
        "linear_rnnt": lambda: rnnt_peers.partita_joint,
    }
    | decode_peers.PARTITA_OPS,
)
PARTITA_INPLACE = Provider("partita-inplace", {"cross_entropy": _partita_inplace}, overwrites=True)
PARTITA_FAST = Provider(
    "partita-fast",
    {
        "linear_cross_entropy": lambda: linear_peers.partita_linear(linear_peers.fast_budget),
        "linear_divergence": lambda: divergence_peers.partita_divergence(
            divergence_peers.fast_budget
        ),
    },
)
PARTITA_LEAN = Provider(
    "partita-lean",
    {
        "linear_cross_entropy": lambda: linear_peers.partita_linear(linear_peers.lean_budget),
        "linear_divergence": lambda: divergence_peers.partita_divergence(
            divergence_peers.lean_budget
        ),
    },
)
OURS = (PARTITA, PARTITA_INPLACE, PARTITA_FAST, PARTITA_LEAN)

# The yardstick is timed with Partita, whatever the peers.
PRODUCTS = Provider(
    "products",
    {
        "linear_cross_entropy": linear_peers.products,
        "linear_divergence": divergence_peers.products,
    },
)
TORCH = Provider(
    "torch",
    {
        name: lambda function=function: function  # type: ignore[misc]
        for name, function in (EAGER | FROM_HIDDEN | OVER_TIME).items()
    },
    beyond=linear_chain_peers.beyond_loop,
)
PEERS = (
    TORCH,
    Provider(
        "torch-linear",
        {"linear_cross_entropy": linear_peers.torch_linear},
        packages=("torch.nn.modules.linear_cross_entropy",),
        install="pip install 'torch>=2.13'",
    ),
    Provider(
        "compile",
        {
            name: lambda function=function: _compiled(function)  # type: ignore[misc]
            for name, function in (EAGER | FROM_HIDDEN).items()
        },
    ),
    Provider("chunked", {"linear_divergence": lambda: divergence_peers.chunked_divergence}),
    Provider("naive", {"softmax": lambda: naive_softmax}),
    Provider(
        "quack",
        {
            "softmax": lambda: _import("quack.softmax", "softmax"),
            "cross_entropy": lambda: _import("quack.cross_entropy", "cross_entropy"),
            "linear_cross_entropy": linear_peers.quack,
        },
        packages=("quack",),
        install="pip install quack-kernels",
        beyond=linear_peers.beyond_quack,
    ),
    Provider(
        "liger",
        {
            "softmax": _liger_softmax,
            "cross_entropy": _liger_cross_entropy,
            "linear_cross_entropy": _liger_linear_cross_entropy,
            "linear_divergence": divergence_peers.liger_divergence,
        },
        packages=("liger_kernel",),
        install="pip install liger-kernel",
        overwrites=True,
    ),
    Provider(
        "liger-cute",
        {"linear_cross_entropy": linear_peers.liger_cute},
        packages=("liger_kernel", "cutlass"),
        install="pip install 'liger-kernel[cutedsl]'",
        beyond=linear_peers.beyond_liger_cute,
    ),
    *(
        Provider(
            name,
            {"linear_cross_entropy": partial(linear_peers.cut_cross_entropy, exact=exact)},
            packages=("cut_cross_entropy",),
            install="pip install cut-cross-entropy",
            beyond=linear_peers.beyond_cut_cross_entropy,
        )
        for name, exact in (("cce", False), ("cce-exact", True))
    ),
    Provider(
        "koi",
        chain_peers.library("koi.ctc", "logZ_cu_sparse")
        | {"ctc_crf": ctc_peers.koi_crf_loss, "ctc_crf_beam": decode_peers.koi_beam},
        packages=("koi",),
        install="pip install ont-koi",
        beyond=decode_peers.on_a_gpu(ctc_peers.beyond_seqdist_or_koi),
    ),
    Provider(
        "seqdist",
        chain_peers.library("seqdist.sparse", "logZ") | {"ctc": ctc_peers.seqdist_loss},
        packages=("cupy", "seqdist"),
        install=f"pip install {CUPY} && pip install --no-deps seqdist",
        beyond=ctc_peers.beyond_seqdist_or_koi,
    ),
    Provider(
        "torch-struct",
        {
            "linear_chain": linear_chain_peers.torch_struct_logz,
            "linear_viterbi": linear_chain_peers.torch_struct_viterbi,
            "semi_markov": semi_markov_peers.torch_struct_logz,
        },
        packages=("torch_struct",),
        install="pip install torch-struct",
        beyond=semi_markov_peers.beyond_torch_struct,
    ),
    Provider(
        "flash-semicrf",
        {"semi_markov": semi_markov_peers.flash_semicrf_logz},
        packages=("flash_semicrf",),
        install="pip install flash-semicrf",
        beyond=semi_markov_peers.beyond_flash_semicrf,
    ),
    Provider(
        "pytorch-crf",
        {
            "linear_chain": linear_chain_peers.pytorch_crf_logz,
            "linear_viterbi": linear_chain_peers.pytorch_crf_viterbi,
        },
        packages=("torchcrf",),
        install="pip install pytorch-crf",
        beyond=linear_chain_peers.beyond_loop,
    ),
    Provider(
        "torchaudio",
        {
            "ctc_align": ctc_peers.torchaudio_align,
            "rnnt": rnnt_peers.torchaudio_rnnt,
            "linear_rnnt": lambda: rnnt_peers.with_joint(rnnt_peers.torchaudio_rnnt()),
            "ctc_beam": decode_peers.torchaudio_beam,
        },
        packages=("torchaudio",),
        install="pip install torchaudio",
        beyond=decode_peers.on_a_gpu(rnnt_peers.beyond_torchaudio),
    ),
    Provider(
        "warprnnt",
        {"rnnt": rnnt_peers.warprnnt_rnnt},
        packages=("warprnnt_numba",),
        install="pip install warprnnt-numba",
        beyond=rnnt_peers.beyond_warprnnt,
    ),
    Provider(
        "fast-ctc-decode",
        {
            "ctc_greedy": decode_peers.fast_ctc_decode_greedy,
            "ctc_beam": decode_peers.fast_ctc_decode_beam,
        },
        packages=("fast_ctc_decode",),
        install="pip install fast-ctc-decode",
        beyond=decode_peers.runs_on_the_host,
    ),
    Provider(
        "pyctcdecode",
        {"ctc_beam": decode_peers.pyctcdecode_beam},
        packages=("pyctcdecode",),
        install="pip install pyctcdecode",
        beyond=decode_peers.runs_on_the_host,
    ),
)


def is_ours(name: str) -> bool:
    return name in {provider.name for provider in OURS}


def choose(names: list[str]) -> list[Provider]:
    """Return Partita and the yardstick, then the peers of these names in their order."""
    known = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in known:
            raise ValueError(f"--peers: expected some of {', '.join(known)}, got {name!r}")
    return [*OURS, PRODUCTS, *(known[name] for name in names)]
