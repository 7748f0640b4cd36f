"""Each kernel compiles for each GPU that is supported, on a machine without one, within its shared memory and, without options, its registers.

The launches are those of real calls: the ops run on the CPU with a launch that takes note of its arguments in place of the kernel.
"""

import functools
import itertools
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from helpers.rows import INTERPRETING

import partita
from partita.runtime import backend as _backend
from partita.runtime.caches import clear_caches

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

pytestmark = pytest.mark.skipif(INTERPRETING, reason="kernels are functions of Python there")

PACKAGE = Path(partita.__file__).parent
SOURCES = sorted(PACKAGE.glob("ops/*/gpu/*.py"))
NAMES = sorted(
    name
    for source in SOURCES
    for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(encoding="utf-8"), re.M)
)
KIB = 1024
# Bytes of stack a thread that are known: ptxas keeps a scalar or two that no loop touches.
SPILLED = dict.fromkeys(
    (
        "chain_resident_gradient_kernel",
        "chain_resident_middle_kernel",
        "chain_gradient_kernel",
        "chain_logz_kernel",
        "chain_viterbi_kernel",
    ),
    8,
)
SPILLED["ctc_narrow_gradient_kernel"] = 8
SPILLED["ctc_posterior_scan_kernel"] = (
    144  # of what stands before its loop: with fewer registers more programs run at once
)
NVIDIA_ONLY = "chain_resident"  # prefix of the register-resident kernels, written in Gluon


class Target(NamedTuple):
    target: GPUTarget
    shared: int  # bytes a program may use


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * KIB),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * KIB),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * KIB),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * KIB),
}


class Launch(NamedTuple):
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """Of the scores of a chain, or of the greatest floating tensor; int64 where there is none."""
        floating = [
            arg for arg in self.args if isinstance(arg, torch.Tensor) and arg.is_floating_point()
        ]
        chosen = [arg for arg in floating if arg.dim() == 4][:1] or sorted(
            floating, key=torch.Tensor.numel
        )[-1:]
        return chosen[0].dtype if chosen else torch.int64

    @property
    def plain(self) -> bool:
        """Without smoothing, class weights, probabilities and softcap; kernels that have no such options are always plain."""
        return not any(self.options.get(name) for name in ("SPREAD", "SMOOTHING", "CAP"))

    @property
    def demand(self) -> tuple[int, int]:
        """Elements that a program holds, and the branches that it takes."""
        numbers = [value for name, value in self.options.items() if name in ("ROWS", "BLOCK_V")]
        return functools.reduce(lambda a, b: a * b, numbers, 1), sum(
            bool(value) for value in self.options.values()
        )

    def __str__(self) -> str:
        return f"{self.kernel.__name__} {self.dtype} {self.options}"


@contextmanager
def recording(launches: list[Launch], cuda: str | None) -> Iterator[None]:
    # Before they can take over what is patched here.
    from partita.ops.chain.gpu import plan as table
    from partita.primitives.gpu import math, row_plan
    from partita.runtime import launch

    del math

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(kernel, args, options))

    with (
        mock.patch.object(JITFunction, "run", note),
        mock.patch.object(_backend, "interpreting", lambda: True),
        mock.patch.object(torch.version, "cuda", cuda),
        mock.patch.object(launch, "NVIDIA", cuda is not None),
        mock.patch.object(table, "NVIDIA", cuda is not None),
        mock.patch.object(row_plan, "NVIDIA", cuda is not None),
        partita.backend("triton"),
    ):
        clear_caches()
        try:
            yield
        finally:
            clear_caches()


def call_chains(dtype: torch.dtype, states: int, slots: int) -> None:
    """A table in which all edges leave the same few states; or, for a negative number of them, one in which each is left as often."""
    even, states = states < 0, abs(states)
    source = (torch.arange(states)[:, None] * even + torch.arange(slots)) % states
    scores = torch.zeros(3, 2, states, slots, dtype=dtype, requires_grad=True)
    lengths = torch.ones(2, dtype=torch.int64)
    chain = partita.Chain(
        scores, source, torch.zeros(2, states), torch.zeros(2, states), lengths=lengths
    )
    torch.autograd.grad(chain.logz().sum(), scores)
    torch.autograd.grad(
        chain.expectation(torch.zeros((), dtype=dtype, requires_grad=True)).sum(), scores
    )
    alone = partita.Chain(scores.detach(), source)
    for semiring in (partita.Log, partita.Max):
        alone.logz(semiring)
        alone.forward_scores(semiring)
        alone.backward_scores(semiring)
    alone.viterbi()
    alone.sample(2)


def call_ctc(dtype: torch.dtype, count: int, classes: int, most: int, from_logits: bool) -> None:
    logits = torch.zeros(3, count, classes, dtype=dtype, requires_grad=True)
    targets, ones = torch.ones(count, most, dtype=torch.int64), torch.ones(count, dtype=torch.int64)
    loss = partita.ctc_loss(logits, targets, ones, ones * most, from_logits=from_logits)
    torch.autograd.grad(loss, logits)
    partita.ctc_loss(logits.detach(), targets, ones, ones)
    partita.ctc_align(logits, targets, ones, ones, from_logits=from_logits)


def call_crf(dtype: torch.dtype) -> None:
    scores = torch.zeros(3, 2, 4 * 5, dtype=dtype, requires_grad=True)
    loss = partita.ctc_crf_loss(
        scores, torch.ones(2, 4, dtype=torch.int64), [4, 4], state_len=1, alphabet_size=5
    )
    torch.autograd.grad(loss, scores)


def call_linear(dtype: torch.dtype, classes: int) -> None:
    hidden, matrix = (
        torch.zeros(3, 8, dtype=dtype, requires_grad=True),
        torch.zeros(classes, 8, dtype=dtype),
    )
    target, weight = torch.zeros(3, dtype=torch.int64), torch.ones(classes, dtype=dtype)
    for options in ({}, {"weight": weight, "label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.1}):
        losses = partita.linear_cross_entropy(hidden, matrix, target, reduction="none", **options)
        torch.autograd.grad(losses.sum(), hidden)
    for field in partita.linear_token_stats(hidden, matrix, target)[:3]:
        torch.autograd.grad(field.sum(), hidden, retain_graph=True)


def call_parallel(dtype: torch.dtype) -> None:
    """The merging, of two ranks that know nothing."""
    from partita.ops.vocab_parallel import autograd as _parallel

    target, wide = torch.zeros(3, dtype=torch.int64), torch.promote_types(dtype, torch.float32)
    for spread, entropy in ((False, False), (True, False), (False, True)):
        words = torch.zeros(2, 4 + 3 * spread + 2 * entropy, 3, dtype=wide)
        fields = _parallel.parallel_fields(
            words, target, 4, 0, 0, 1.0, -100, spread, entropy, "triton"
        )
        grads = (
            fields[0],
            fields[1],
            fields[2] if spread else None,
            fields[3] if entropy else None,
        )
        _parallel.parallel_coefficients(
            target, *grads, None, fields[3], spread, 4, 1.0, -100, "triton"
        )
    if dtype == torch.float64:
        return
    from partita.ops.vocab_parallel.gpu.launch import parallel_one_pass

    words, flag = torch.zeros(64, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    for sizes in ((65_536,) * 2, (25_129, 25_128), (12_565,) * 4):
        for softcap, z_loss, mean in ((0.0, 0.0, True), (0.0, 0.0, False), (5.0, 0.1, True)):
            parallel_one_pass(
                torch.zeros(3, sizes[0], dtype=dtype),
                target,
                words,
                words,
                words,
                flag,
                1,
                sizes,
                0,
                -100,
                softcap,
                z_loss,
                mean,
            )


def call_everything(x: torch.Tensor) -> None:
    target = torch.zeros(x.shape[0], dtype=torch.int64)
    weight = torch.ones(x.shape[1], dtype=x.dtype)
    probabilities = torch.zeros_like(x)
    everything = {"weight": weight, "label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.1}
    x.requires_grad_()
    results = [
        partita.softmax(x),
        partita.log_softmax(x),
        partita.logsumexp(x),
        *partita.token_stats(x, target)[:3],
    ]
    for options in ({}, everything):
        results += [
            partita.cross_entropy(x, t, reduction=r, **options)
            for t in (target, probabilities)
            for r in ("none", "mean")
        ]
        partita.cross_entropy(x.detach(), target, **options)
    for result in results:
        torch.autograd.grad(result, x, torch.ones_like(result), retain_graph=True)


def test_the_number_of_a_call_settles_its_launches() -> None:
    """Whatever else differs between two calls, what is compiled for them is the same."""
    from partita.runtime import launch

    seen: dict[Any, list[Any]] = {}

    def checked(kernel: Any, _: int, *args: Any, call: Any = None, **options: Any) -> None:
        kinds = [launch._kind(known) for known in launch.specialization_of(args)]
        assert (
            call is None
            or seen.setdefault((kernel.__name__, call, *options.values()), kinds) == kinds
        )

    with recording([], "13.0"), mock.patch.object(launch, "launch", checked):
        for dtype, from_logits, count in itertools.product(
            (torch.bfloat16, torch.float32, torch.float64), (False, True), (2, 3)
        ):
            for classes, most in ((5, 10), (5, 40), (20, 101), (5000, 10), (500, 301)):
                for reduction, zero_infinity in (
                    ("none", True),
                    ("mean", False),
                    ("sum", True),
                    ("mean", False),
                ):
                    logits = torch.zeros(40, count + 1, classes, dtype=dtype)[
                        :, 1:
                    ].requires_grad_()
                    targets, lengths = (
                        torch.ones(count, most, dtype=torch.int64),
                        torch.ones(count, dtype=torch.int64),
                    )
                    for x in (logits, logits.detach()):
                        loss = partita.ctc_loss(
                            x,
                            targets,
                            lengths,
                            lengths * most,
                            0,
                            reduction,
                            zero_infinity,
                            from_logits=from_logits,
                        )
                    loss = partita.ctc_loss(
                        logits,
                        targets,
                        lengths,
                        lengths,
                        0,
                        reduction,
                        zero_infinity,
                        from_logits=from_logits,
                    )
                    for grad in (
                        torch.ones_like(loss),
                        torch.ones_like(loss)[..., None].expand(*loss.shape, 2)[..., 1],
                    ):
                        torch.autograd.grad(loss, logits, grad, retain_graph=True)
    assert len(seen) > 500


@functools.cache
def launches(cuda: str | None) -> dict[str, list[Launch]]:
    """By kernel, one for each set of compile-time arguments and dtype; narrow and wide rows, aligned and not, in columns too."""
    noted: list[Launch] = []
    with recording(noted, cuda):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            for width in (100, 5000, 50_257, 131_072):
                call_everything(torch.zeros(3, width, dtype=dtype))
            call_everything(torch.zeros(5000, 3, dtype=dtype).T)
            for states, slots in (
                (3, 2),
                (64, 5),
                (1024, 5),
                (2000, 3),
                (40, 40),
                (-64, 5),
                (-1024, 5),
            ):
                call_chains(dtype, states, slots)
            call_crf(dtype)
            for classes in (100, 5000, 50_257):
                call_linear(dtype, classes)
            call_parallel(dtype)
            for from_logits in (False, True):
                for count, classes, most in (
                    (2, 5, 10),
                    (2, 5, 40),
                    (600, 20, 100),
                    (2, 5000, 10),
                    (2, 500, 300),
                ):
                    call_ctc(dtype, count, classes, most, from_logits)
    found: dict[str, dict[str, Launch]] = defaultdict(dict)
    for each in noted:
        found[each.kernel.__name__].setdefault(f"{each} {[arg is None for arg in each.args]}", each)
    return {name: list(each.values()) for name, each in found.items()}


def chosen(kernel: str, name: str) -> list[Launch]:
    """All in bf16 and fp32 for the GPU that the plans were measured on; elsewhere, and in fp64, the most demanding of each dtype, plain and not."""
    every = launches(None if name == "gfx942" else "13.0")[kernel]
    kinds = dict.fromkeys((e.dtype, e.plain) for e in every)
    if name == "gfx942" and torch.float32 in {e.dtype for e in every}:
        kinds = {
            kind: None for kind in kinds if kind[0] != torch.bfloat16
        }  # which differs in its loads alone, and compiles for minutes
    hardest = [
        max((e for e in every if (e.dtype, e.plain) == kind), key=lambda e: e.demand)
        for kind in kinds
    ]
    return (
        [e for e in every if e.dtype != torch.float64 or any(e is h for h in hardest)]
        if name == "sm_90"
        else hardest
    )


def compiled(launch: Launch, target: GPUTarget) -> Any:
    """As `JITFunction.run` compiles it, for another GPU."""
    backend = make_backend(target)
    binder = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, specialization, options = binder(*launch.args, **launch.options)
    options, signature, constexprs, attrs = launch.kernel._pack_args(
        backend, launch.options, bound, specialization, options
    )
    kind = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    return triton.compile(
        kind(launch.kernel, signature, constexprs, attrs), target=target, options=options.__dict__
    )


def spilled(result: Any, target: GPUTarget, folder: Path) -> int:
    """Bytes of stack a thread, or vector registers that did not fit."""
    if target.backend == "hip":
        return int(re.search(r"\.vgpr_spill_count:\s*(\d+)", result.asm["amdgcn"])[1])
    binary = folder / "kernel.cubin"
    binary.write_bytes(result.asm["cubin"])
    tool = (
        Path(triton.__file__).parent
        / "backends/nvidia/bin"
        / ("cuobjdump.exe" if os.name == "nt" else "cuobjdump")
    )
    done = subprocess.run(
        [tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True
    )
    return int(re.search(r"STACK:(\d+)", done.stdout)[1])


def test_every_kernel_is_launched_in_every_dtype() -> None:
    found = {name: {launch.dtype for launch in each} for name, each in launches("13.0").items()}
    assert sorted(found) == NAMES
    alone = {
        "total_kernel": torch.float32,
        "chain_resident_final_state_kernel": torch.float64,
        "chain_resident_segment_maps_kernel": torch.int64,
    }  # losses, states, pointers
    alone |= dict.fromkeys(
        ("chain_fast_trace_kernel", "ctc_label_index_kernel", "ctc_label_order_kernel"), torch.int64
    )
    # Of posteriors, or of states.
    alone |= dict.fromkeys(
        (
            "ctc_loss_kernel",
            "ctc_posterior_scan_kernel",
            "crf_subtract_kernel",
            "linear_fields_kernel",
        ),
        torch.float32,
    )
    alone |= dict.fromkeys(
        ("parallel_fields_kernel", "parallel_coefficients_kernel"), torch.float32
    )
    alone |= dict.fromkeys(
        (f"ctc_{kind}_gradient_kernel" for kind in ("lane", "narrow", "label")), torch.float32
    )
    alone["ctc_backtrace_kernel"] = torch.float64
    wanted = {
        name: {alone[name]} if name in alone else {torch.bfloat16, torch.float32} for name in NAMES
    }
    assert not {name: dtypes for name, dtypes in found.items() if not dtypes >= wanted[name]}


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (kernel, name)
        for kernel in NAMES
        for name in TARGETS
        if name != "gfx942" or not kernel.startswith(NVIDIA_ONLY)
    ],
)
def test_compiles(kernel: str, name: str, tmp_path: Path) -> None:
    target, limit = TARGETS[name]
    spills = []
    for launch in chosen(kernel, name):
        result = compiled(launch, target)
        assert result.metadata.shared <= limit, str(launch)
        # Only plain variants must fit: the options' terms spill where registers are limited, and no bound on that follows from anything. Nor
        # must fp64, whose registers are twice as many, and which is no dtype of training.
        if launch.plain and launch.dtype != torch.float64:
            count = spilled(result, target, tmp_path)
            spills += [f"{count} in {launch}"] * (count > SPILLED.get(kernel, 0))
    assert not spills, "\n".join(spills)
