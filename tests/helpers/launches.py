"""The launches of real calls, recorded on the CPU without running a kernel."""

import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from helpers.ngrams import model_of
from triton.runtime.jit import JITFunction

import partita
from partita.runtime import backend as backend_module
from partita.runtime.caches import clear_caches
from partita.runtime.launcher import members

SOURCES = sorted(Path(partita.__file__).parent.glob("ops/*/gpu/*.py"))
NAMES = sorted(
    name
    for source in SOURCES
    for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(encoding="utf-8"), re.M)
)
# Compile-time arguments whose variants need registers of their own.
OPTIONS = ("HAS_SMOOTHING", "SMOOTHING_MODE", "HAS_SOFTCAP")
# All that say what a call asks for. The others say how it is cut.
CHOICES = (
    *(*OPTIONS, "HAS_Z_LOSS", "HAS_ENTROPY", "MEAN", "READS_IGNORED", "KEEPS_TARGET"),
    *("SCAN", "NUM_TERMS", "NUM_MEANS", "KIND"),  # the terms of a divergence
    *("IS_MAX", "REVERSE"),
)
# The dtypes of three kinds of scores of a chain, as of emissions, transitions and ends.
MIXTURES = (
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32, torch.float64),
)


class Launch(NamedTuple):
    """One launch of a kernel.

    Fields:
        kernel: the kernel.
        args: the run-time arguments in order; what belongs together is a tuple.
        options: the compile-time arguments by name.
        is_mixture: whether dtypes of its tensors occur in calls of `call_mixture` alone.
    """

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    is_mixture: bool = False

    @property
    def values(self) -> list[Any]:
        """Return the run-time arguments, and those of tuples one by one."""
        return list(members(self.args))

    @property
    def floating(self) -> list[torch.Tensor]:
        """Return the floating tensors."""
        tensors = [value for value in self.values if isinstance(value, torch.Tensor)]
        return [tensor for tensor in tensors if tensor.is_floating_point()]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the dtypes of all floating tensors."""
        return tuple(tensor.dtype for tensor in self.floating)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of a chain's scores or of the largest floating tensor, else int64."""
        floating = self.floating
        scores = [tensor for tensor in floating if tensor.dim() == 4]
        largest = max(scores or floating[::-1], key=torch.Tensor.numel, default=None)
        return torch.int64 if largest is None else largest.dtype

    @property
    def plain(self) -> bool:
        """Return whether the launch has no smoothing, class weights, probabilities and softcap.

        Kernels without these options are always plain.
        """
        has_softcap = any(getattr(arg, "softcap", None) for arg in self.args)
        return not has_softcap and not any(self.options.get(name) for name in OPTIONS)

    @property
    def demand(self) -> tuple[int, int]:
        """Return the number of elements of a program and the number of its branches."""
        sizes = [value for name, value in self.options.items() if name in ("ROWS", "BLOCK_V")]
        elements = functools.reduce(lambda a, b: a * b, sizes, 1)
        return elements, sum(map(bool, members(tuple(self.options.values()))))

    @property
    def variant(self) -> str:
        """Return what the kernel is compiled for, apart from the dtypes of its tensors."""
        return f"{self.options} {[value is None for value in self.values]}"

    @property
    def choice(self) -> str:
        """Return the options of the op that the kernel is compiled for."""
        chosen = {name: value for name, value in self.options.items() if name in CHOICES}
        return f"{chosen} {[value is None for value in self.values]}"

    @property
    def plan(self) -> str:
        """Return the blocks and other constants that the kernel is compiled for."""
        return str({name: value for name, value in self.options.items() if name not in CHOICES})

    def __str__(self) -> str:
        return f"{self.kernel.__name__} {self.dtype} {self.options}"


@contextmanager
def recording(launches: list[Launch], cuda: str | None) -> Iterator[None]:
    """Append all launches to the list, as on an NVIDIA GPU, or on an AMD GPU without `cuda`."""
    # These modules must be loaded before their names are patched.
    from partita.ops.divergence.gpu import launch
    from partita.primitives.gpu import math, target

    del launch, math

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        constexprs = {kernel.arg_names[i] for i in kernel.constexprs}
        by_name = [name for name in kernel.arg_names if name in options and name not in constexprs]
        args += tuple(options.pop(name) for name in by_name)
        launches.append(Launch(kernel, args, options))

    with (
        mock.patch.object(JITFunction, "run", note),
        mock.patch.object(backend_module, "interpreting", lambda: True),
        mock.patch.object(torch.version, "cuda", cuda),
        mock.patch.object(target, "assumed", target.MI300 if cuda is None else target.H100),
        partita.backend("triton"),
    ):
        clear_caches()
        try:
            yield
        finally:
            clear_caches()


def call_chains(dtype: torch.dtype, C: int, K: int) -> None:
    """Call the ops of chains over a table whose edges leave a few states.

    With a negative C, the edges leave all states equally often.
    """
    even, C = C < 0, abs(C)
    source = (torch.arange(C)[:, None] * even + torch.arange(K)) % C
    scores = torch.zeros(3, 2, C, K, dtype=dtype, requires_grad=True)
    lengths = torch.ones(2, dtype=torch.int64)
    ends = torch.zeros(2, 2, C, dtype=dtype)
    chain = partita.Chain(scores, source, *ends, lengths=lengths)
    torch.autograd.grad(chain.logz().sum(), scores)
    value = torch.zeros((), dtype=dtype, requires_grad=True)
    torch.autograd.grad(chain.expectation(value).sum(), scores)
    call_without_gradient(partita.Chain(scores.detach(), source))
    many_steps = scores.detach()[:1].expand(100, 2, C, K)  # whose paths have several segments
    partita.Chain(many_steps, source).viterbi()


def call_without_gradient(chain: Any) -> None:
    """Call the ops of a chain that have no gradient, or another kernel for it."""
    chain.logz()
    chain.viterbi()
    chain.sample(2)
    if isinstance(chain, partita.Chain):
        chain.logz(partita.Max)
        for semiring in (partita.Log, partita.Max):
            chain.forward_scores(semiring)
            chain.backward_scores(semiring)
    if isinstance(chain, partita.SemiMarkovChain):
        chain.segment_marginals()
        if chain.emissions.shape[2] < 64:  # The k best paths of more states have no kernel.
            chain.nbest(2)


def call_long_chains(dtype: torch.dtype) -> None:
    """Call the ops of chains that are parallel in time, with few and many edges into a state."""
    for C, K in ((4, 4), (16, 5), (32, 12)):
        source = torch.arange(K).expand(C, K).contiguous() % C
        scores = torch.zeros(1, 1, C, K, dtype=dtype).expand(3000, -1, -1, -1).requires_grad_()
        chain = partita.Chain(scores, source, torch.zeros(1, C), torch.zeros(1, C))
        torch.autograd.grad(chain.logz().sum(), scores)
        chain = partita.Chain(scores.detach(), source, lengths=torch.ones(1, dtype=torch.int64))
        chain.logz()
        chain.logz(partita.Max)
        chain.viterbi()


def call_linear_chains(dtype: torch.dtype) -> None:
    """Call the ops of dense chains, of few and many states and tokens, with each kind of steps."""
    long = ((300, 1, 5), (300, 1, 8), (300, 1, 16), (300, 2, 30), (300, 2, 100))
    few = (
        (3, 2, 5),
        (3, 2, 30),
        (70, 2, 5),
        (70, 2, 30),
        *((3, 2, C) for C in (50, 200, 500, 600)),
    )
    for T, N, C in (*few, *long):
        emissions = torch.zeros(T, N, C, dtype=dtype, requires_grad=True)
        transitions = torch.zeros(C, C, dtype=dtype, requires_grad=True)
        chain = partita.linear_chain(emissions, transitions)
        torch.autograd.grad(chain.logz().sum(), (emissions, transitions))
        torch.autograd.grad(chain.state_marginals().sum(), emissions)
        call_without_gradient(partita.linear_chain(emissions.detach(), transitions.detach()))
        if T <= 70 and C < 50:
            end = torch.zeros(C, dtype=dtype, requires_grad=True)
            chain = partita.linear_chain(emissions, transitions, end, end, lengths=[3, 2])
            torch.autograd.grad(chain.logz().sum(), (emissions, transitions, end))
    for shape in ((2, 50, 50), (2, 2, 200, 200)):
        emissions, transitions = torch.zeros(3, 2, shape[-1], dtype=dtype), torch.zeros(shape)
        chain = partita.linear_chain(emissions, transitions.to(dtype))
        chain.viterbi()


def call_mixture(*dtypes: torch.dtype) -> None:
    """Call the ops of chains whose scores have several dtypes, or the same half type.

    The dtypes are those of emissions or scores, of transitions, and of the ends.
    """
    for C, K in ((3, 2), (64, 5), (1024, 5), (40, 40)):
        source = (torch.arange(C)[:, None] + torch.arange(K)) % C
        for T in (3, 100) if C < 100 else (3,):
            shapes = ((T, 2, C, K), (2, C), (2, C))
            scores, initial, final = map(zeros_with_gradient, shapes, dtypes)
            chain = partita.Chain(scores, source, initial, final)
            torch.autograd.grad(chain.logz().sum(), (scores, initial, final))
            torch.autograd.grad(chain.entropy().sum(), scores)
            value = zeros_with_gradient((), dtypes[2])
            torch.autograd.grad(chain.expectation(value).sum(), (scores, value))
            chain = partita.Chain(scores.detach(), source, initial.detach(), final.detach())
            call_without_gradient(chain)
    short, long = (5, 30, 50, 200, 500), (5, 16, 100)
    for T, C in (*((3, C) for C in short), (70, 30), *((300, C) for C in long)):
        shapes = ((T, 2, C), (C, C), (C,), (C,))
        scores = tuple(map(zeros_with_gradient, shapes, (*dtypes, dtypes[2])))
        chain = partita.linear_chain(*scores)
        torch.autograd.grad(chain.logz().sum(), scores)
        call_without_gradient(partita.linear_chain(*(tensor.detach() for tensor in scores)))
    for C, D in ((24, 50), (64, 65)):
        shapes = ((3, 2, C), (C, C), (D, C), (C,), (C,))
        scores = tuple(map(zeros_with_gradient, shapes, (*dtypes, *dtypes[1:])))
        chain = partita.semi_markov_chain(*scores)
        torch.autograd.grad(chain.logz().sum(), scores)
        call_without_gradient(partita.semi_markov_chain(*(tensor.detach() for tensor in scores)))


def zeros_with_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def call_semi_markov(dtype: torch.dtype, C: int, D: int) -> None:
    """Call the ops of semi-Markov chains."""
    scores = [zeros_with_gradient(shape, dtype) for shape in ((3, 2, C), (C, C), (D, C))]
    lengths = torch.ones(2, dtype=torch.int64)
    chain = partita.semi_markov_chain(*scores, lengths=lengths)
    torch.autograd.grad(chain.logz().sum(), scores)
    scores = [tensor.detach() for tensor in scores]
    call_without_gradient(partita.semi_markov_chain(*scores, lengths=lengths))


def call_chains_with_ends(C: int, transposed: bool) -> None:
    """Call the ops of chains whose ends have a stride of 1 over states, or over sequences."""
    shape = (C, 2) if transposed else (2, C)
    start, end = (torch.zeros(shape, requires_grad=True) for _ in range(2))
    if transposed:
        start, end = start.T, end.T
    emissions, matrix = torch.zeros(3, 2, C), torch.zeros(C, C).T
    edges, lengths = torch.zeros(C, 2, dtype=torch.int64), torch.tensor([3, 2])
    for chain in (
        partita.semi_markov_chain(
            emissions, matrix, torch.zeros(50, C), start, end, lengths=lengths
        ),
        partita.linear_chain(emissions, matrix, start, end, lengths=lengths),
        partita.Chain(torch.zeros(3, 2, C, 2), edges, start, end, lengths=lengths),
    ):
        torch.autograd.grad(chain.logz().sum(), (start, end))
        chain.viterbi()
        chain.sample(2)


def call_ctc(dtype: torch.dtype, N: int, C: int, S: int, from_logits: bool, **options: Any) -> None:
    logits = torch.zeros(3, N, C, dtype=dtype, requires_grad=True)
    targets, ones = torch.ones(N, S, dtype=torch.int64), torch.ones(N, dtype=torch.int64)
    loss = partita.ctc_loss(logits, targets, ones, ones * S, from_logits=from_logits, **options)
    torch.autograd.grad(loss, logits)
    partita.ctc_loss(logits.detach(), targets, ones, ones, **options)
    partita.ctc_align(logits, targets, ones, ones, from_logits=from_logits, **options)


def call_decode(dtype: torch.dtype) -> None:
    """Search with narrow and wide beams, over few and many classes."""
    for C, width in ((5, 4), (5000, 16), (40, 64)):
        logits = torch.zeros(3, 2, C, dtype=dtype)
        for from_logits in (False, True):
            partita.ctc_greedy_search(logits, from_logits=from_logits)
            partita.ctc_beam_search(logits, beam_width=width, from_logits=from_logits)
    texts = torch.zeros(300, 1, 31, dtype=dtype)  # more scores than the beam has numbers
    labels = ["", *map(chr, range(0x61, 0x7E)), " "]
    boost = {"hotwords": ["a"], "boost": partita.PhraseBoost(["b"], labels, 1.0)}
    model = model_of([["a"]], 2)
    partita.CTCDecoder(labels)(texts, beam_width=1)
    for from_logits, given, width in ((True, {}, 64), (False, boost, 16)):
        decoder = partita.CTCDecoder(labels, language_model=model)
        decoder(texts, beam_width=width, from_logits=from_logits, **given)
    partita.CTCDecoder(labels, language_model=model, unit="token")(texts)
    scores = torch.zeros(3, 2, 4**3, 5, dtype=dtype)
    for width in (32, 256):
        options = {"state_len": 3, "alphabet_size": 5, "method": "beam", "beam_width": width}
        partita.ctc_crf_decode(scores, **options)
    for method in ("viterbi", "posterior"):
        partita.ctc_crf_decode(scores, state_len=3, alphabet_size=5, method=method)
    for bases, k in ((1, 1), (3, 5), (4, 5)):  # whose posteriors are summed in other ways
        scores = torch.zeros(3, 2, bases**k * (bases + 1), dtype=dtype)
        partita.ctc_crf_decode(scores, state_len=k, alphabet_size=bases + 1)


def call_transducers(dtype: torch.dtype) -> None:
    """Search a transducer with and without durations, whose state has rows in two dimensions."""

    def predict(tokens: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        shape = (1, len(tokens), 700)
        return torch.zeros(shape[1:], dtype=dtype), [torch.zeros(shape, dtype=dtype), tokens]

    for V, durations in ((6, None), (1000, (0, 1, 2, 4))):

        def join(frames: torch.Tensor, output: torch.Tensor, V: int = V) -> torch.Tensor:
            return torch.zeros(*frames.shape[:2], V + 4, dtype=dtype)

        options = {"blank": 0, "durations": durations, "state_dims": (1, 0)}
        encoder = torch.zeros(2, 3, 700, dtype=dtype)
        partita.rnnt_greedy_search(encoder, [3, 2], predict, join, **options)
        for width in (4, 8):
            partita.rnnt_beam_search(encoder, [3, 2], predict, join, beam_width=width, **options)


def call_crf(dtype: torch.dtype, T: int) -> None:
    """Call CTC-CRF with targets of as many labels as there are steps, padded and concatenated."""
    scores = torch.zeros(T, 2, 4 * 5, dtype=dtype, requires_grad=True)
    targets, lengths = torch.ones(2, T, dtype=torch.int64), torch.full((2,), T)
    sizes = {"state_len": 1, "alphabet_size": 5}
    loss = partita.ctc_crf_loss(scores, targets, lengths, **sizes, input_lengths=lengths)
    torch.autograd.grad(loss, scores)
    for reduction in ("sum", "none"):
        options = {**sizes, "reduction": reduction}
        losses = partita.ctc_crf_loss(scores, targets.flatten(), lengths, **options)
        torch.autograd.grad(losses, scores, torch.ones_like(losses))


def call_rnnt(dtype: torch.dtype, U: int, V: int) -> None:
    """Call the ops of transducers, from logits and from encoder and predictor."""
    logits = torch.zeros(2, 3, U + 1, V, dtype=dtype, requires_grad=True)
    durations = torch.zeros(2, 3, U + 1, 2, dtype=dtype, requires_grad=True)
    sequences = torch.ones(2, U, dtype=torch.int64), torch.full((2,), 3), torch.full((2,), U)
    others = ({"hat": True, "clamp": 0.5}, {"fused_log_softmax": False}) if V < 1000 else ()
    for options in ({}, *others):
        loss = partita.rnnt_loss(logits, *sequences, 0, **options)
        torch.autograd.grad(loss, logits)
    partita.rnnt_loss(logits.detach(), *sequences, 0)
    partita.rnnt_align(logits.detach(), *sequences, 0)
    loss = partita.tdt_loss(logits, durations, *sequences, 0, [0, 1])
    torch.autograd.grad(loss, (logits, durations))
    partita.tdt_align(logits.detach(), durations.detach(), *sequences, 0, [0, 1])
    hidden = torch.zeros(2, 3, 16, dtype=dtype, requires_grad=True)
    predictor = torch.zeros(2, U + 1, 16, dtype=dtype, requires_grad=True)
    weight = torch.zeros(V, 16, dtype=dtype)
    for activation in ("relu", "tanh") if V < 1000 else ():
        joint = (hidden, predictor, weight, *sequences)
        losses = partita.linear_rnnt_loss(*joint, blank=0, activation=activation, reduction="none")
        torch.autograd.grad(losses.sum(), (hidden, predictor))
    if V < 1000:
        joint = (hidden, predictor, weight, torch.zeros(2, 16, dtype=dtype), *sequences)
        torch.autograd.grad(partita.linear_tdt_loss(*joint, 0, [0, 1]), (hidden, predictor))


def call_rnnt_overlap(dtype: torch.dtype) -> None:
    """Call transducers with few sequences, whose scan runs beside the pass over the logits."""
    for V, options in ((1025, {}), (1024, {}), (1025, {"hat": True})):
        logits = torch.zeros(1, 250, 40, V, dtype=dtype, requires_grad=True)
        sequence = torch.ones(1, 39, dtype=torch.int64), torch.tensor([250]), torch.tensor([39])
        partita.rnnt_loss(logits, *sequence, 0, **options)
        partita.rnnt_loss(logits.detach(), *sequence, 0, **options)
        if not options:  # Durations have no HAT.
            durations = torch.zeros(1, 250, 40, 5, dtype=dtype)
            partita.tdt_loss(logits, durations, *sequence, 0, [0, 1, 2, 3, 4])
            partita.tdt_loss(logits.detach(), durations, *sequence, 0, [0, 1, 2, 3, 4])


def call_linear(dtype: torch.dtype, C: int) -> None:
    hidden = torch.zeros(3, 8, dtype=dtype, requires_grad=True)
    matrix, offset = torch.zeros(C, 8, dtype=dtype), torch.zeros(C, dtype=dtype)
    target, weight = torch.zeros(3, dtype=torch.int64), torch.ones(C, dtype=dtype)
    # Without a budget so small a call takes no kernel of its own.
    budget = partita.linear_cross_entropy_plan(3, 8, C, dtype).workspace_bytes
    for options in ({}, {"weight": weight, "label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.1}):
        options = {**options, "reduction": "none", "memory_budget": budget}
        losses = partita.linear_cross_entropy(hidden, matrix, target, **options)
        torch.autograd.grad(losses.sum(), hidden)
    for field in partita.linear_token_stats(hidden, matrix, target, memory_budget=budget)[:3]:
        torch.autograd.grad(field.sum(), hidden, retain_graph=True)
    stats = partita.linear_token_stats(hidden, matrix, softcap=5.0, memory_budget=budget)
    torch.autograd.grad(stats.entropy.sum(), hidden)
    for beta in (0.0, 0.5, 1.0):
        heads = (hidden, matrix, hidden.detach(), matrix)
        loss = partita.linear_divergence(*heads, beta=beta, memory_budget=2 * budget)
        torch.autograd.grad(loss, hidden)
    found = partita.linear_logprobs(hidden, matrix, target[:, None], memory_budget=budget)
    torch.autograd.grad(found.sum(), hidden)
    offsets, wide = torch.arange(4), zeros_with_gradient((3, 4096), dtype)
    for states, leaves, softcap in (
        (hidden, (matrix, offset), None),
        (wide, (torch.zeros_like(wide), None), 5.0),
    ):
        leaves = [t if t is None else t.detach().requires_grad_() for t in leaves]
        head = (states, leaves[0], target, target, offsets)
        found = partita.linear_support_stats(*head, linear_bias=leaves[1], softcap=softcap)
        leaves = [states, *(t for t in leaves if t is not None)]
        torch.autograd.grad((found.logprob + found.entropy).sum(), leaves)


def call_low_rank(dtype: torch.dtype) -> None:
    """Call a head of many classes with factors of low rank, in the ranks that differ in tiles."""
    hidden, matrix = torch.zeros(3, 8, dtype=dtype), torch.zeros(2**16, 8, dtype=dtype)
    for rank in (16, 32):
        factors = [zeros_with_gradient((n, rank), dtype) for n in (3, 2**16)]
        loss = partita.linear_cross_entropy(hidden, matrix, torch.arange(3), low_rank=factors)
        torch.autograd.grad(loss, factors)


def call_contrastive(dtype: torch.dtype) -> None:
    """Call losses of pairs whose logits fit the budget, and of chunks of rows."""
    features = [zeros_with_gradient((300, 8), dtype) for _ in range(2)]
    scale, bias = (zeros_with_gradient((), torch.float32) for _ in range(2))
    for options in ({}, {"symmetric": False}, {"kind": "sigmoid"}):
        for memory_budget in (None, 2**19):
            numbers = {"logit_bias": bias, "memory_budget": memory_budget, **options}
            loss = partita.contrastive_loss(*features, scale, **numbers)
            torch.autograd.grad(loss, (*features, scale, bias))
    from partita.ops.contrastive.common import Logits, LogSumExp
    from partita.ops.contrastive.gpu.kernels import gradient

    # On the CPU the products of half types are in fp32, and so is the gradient of the logits.
    similarities = torch.zeros(300, 300, dtype=torch.promote_types(dtype, torch.float32))
    numbers = LogSumExp(*similarities[:2])
    for columns, sigmoid in ((numbers, False), (None, False), (None, True)):
        number = similarities[0, 0]
        logits = Logits(similarities, number, number if sigmoid else None, 0)
        gradient(logits, sigmoid, numbers, columns, 1.0, similarities.to(dtype), similarities[:2])


def call_parallel(dtype: torch.dtype) -> None:
    """Merge the statistics of two ranks, and call the kernel in which ranks wait."""
    from partita.ops.vocab_parallel import autograd

    target, acc_dtype = torch.zeros(3, dtype=torch.int64), torch.promote_types(dtype, torch.float32)
    for smoothing, entropy in ((False, False), (True, False), (False, True)):
        words = torch.zeros(2, 4 + 3 * smoothing + 2 * entropy, 3, dtype=acc_dtype)
        options = (4, 0, 0, 1.0, 0.0, -100, smoothing, entropy, "triton")
        fields = autograd.parallel_fields(words, target, *options)
        grads = (fields[2] if smoothing else None, fields[3] if entropy else None)
        numbers = (4, 1.0, -100, "triton")
        autograd.parallel_coefficients(target, *fields[:2], *grads, None, fields[3], *numbers)
    if dtype == torch.float64:
        return
    from partita.ops.cross_entropy.common import LossOptions
    from partita.ops.vocab_parallel.gpu.launch import parallel_one_pass
    from partita.ops.vocab_parallel.gpu.plan import RankMemory

    words = torch.zeros(64, dtype=torch.int64)
    memory = RankMemory(words, words, words, torch.zeros(1, dtype=torch.int32))
    for sizes in ((65_536,) * 2, (25_129, 25_128), (12_565,) * 4):
        for numbers in ((0.0, 0.0, "mean"), (0.0, 0.0, "sum"), (5.0, 0.1, "mean")):
            logits, options = (
                torch.zeros(3, sizes[0], dtype=dtype),
                LossOptions(-100, 0.0, *numbers),
            )
            parallel_one_pass(logits, target, memory, 1, sizes, 0, options)


def call_rows(x: torch.Tensor) -> None:
    """Call the ops of rows of logits with and without their options."""
    target = torch.zeros(x.shape[0], dtype=torch.int64)
    weight = torch.ones(x.shape[1], dtype=x.dtype)
    probabilities = torch.zeros_like(x)
    all_options = {"weight": weight, "label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.1}
    x.requires_grad_()
    results = [
        partita.softmax(x),
        partita.log_softmax(x),
        partita.logsumexp(x),
        *partita.token_stats(x, target)[:3],
        *partita.token_stats(x, softcap=5.0)[:3],
        *(partita.logprobs(x, target[:, None].expand(-1, 3), softcap=c) for c in (None, 5.0)),
    ]
    results += [partita.topk_logprobs(x, 3, softcap=c).logprobs for c in (None, 5.0)]
    for softcap in (None, 5.0):
        offsets = torch.arange(len(x) + 1)
        results += partita.support_stats(x, target, target, offsets, softcap=softcap)[:2]
    everything = {"top_k": 3, "top_p": 0.9, "min_p": 0.1, "temperature": 0.7}
    for options in ({"top_p": 0.9}, everything, {**everything, "missing": "inf", "softcap": 5.0}):
        results += partita.truncated_stats(x, target, **options)[:4]
    indices = torch.arange(2).expand(len(x), -1)
    teacher = partita.TopK(torch.zeros(len(x), 2, dtype=x.dtype), indices, x.detach()[:, 0])
    results += [partita.topk_divergence(x, teacher, softcap=c) for c in (None, 5.0)]
    for names, options in (
        (("hard", "kl"), {}),
        (("hard", "kl", "reverse_kl", "jsd", "tv"), {"temperature": 0.7}),
        (("reverse_kl", "tv"), {"softcap": 5.0}),
    ):
        weights = dict.fromkeys(names, 1.0)
        results.append(
            partita.distillation_loss(x, x.detach(), target, weights=weights, **options).loss
        )
    for beta, softcap in ((0.0, None), (0.5, None), (0.5, 5.0), (1.0, 5.0)):
        results += [
            partita.divergence(x, x.detach(), beta=beta, softcap=softcap, reduction=reduction)
            for reduction in ("none", "mean")
        ]
    for options in ({}, all_options):
        results += [
            partita.cross_entropy(x, t, reduction=r, **options)
            for t in (target, probabilities)
            for r in ("none", "mean")
        ]
        partita.cross_entropy(x.detach(), target, **options)
    results.append(partita.integrations.transformers.causal_lm_loss(x, target, x.shape[1], 3))
    for result in results:  # a factor of 1 would not scale the gradient
        torch.autograd.grad(result, x, torch.full_like(result, 2.0), retain_graph=True)


def call_long_rows(x: torch.Tensor) -> None:
    """Call the ops in whose kernels one program may hold the whole of a long row."""
    x.requires_grad_()
    loss = partita.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.int64))
    torch.autograd.grad(loss, x)
    torch.autograd.grad(partita.softmax(x), x, torch.ones_like(x))


def call_all(dtype: torch.dtype) -> None:
    """Call all ops over narrow and long rows, aligned and not, over columns, and over chains."""
    for width in (100, 5000, 50_257, 131_072):
        call_rows(torch.zeros(3, width, dtype=dtype))
    call_rows(torch.zeros(5000, 3, dtype=dtype).T)
    call_long_rows(torch.zeros(3, 32_768, dtype=dtype))
    chains = ((3, 2), (64, 5), (1024, 5), (2000, 3), (40, 40), (-64, 5), (-1024, 5))
    for C, K in chains:
        call_chains(dtype, C, K)
    call_long_chains(dtype)
    call_linear_chains(dtype)
    for C, D in ((24, 50), (64, 65)):
        call_semi_markov(dtype, C, D)
    scores = (torch.zeros(shape, dtype=dtype) for shape in ((3, 2, 8), (8, 8), (32, 8)))
    partita.semi_markov_chain(*scores).nbest(5)
    for T in (3, 600):
        call_crf(dtype, T)
    for C in (100, 5000, 50_257):
        call_linear(dtype, C)
    call_low_rank(dtype)
    call_contrastive(dtype)
    call_parallel(dtype)
    call_decode(dtype)
    call_transducers(dtype)
    batches = ((2, 5, 10), (2, 5, 40), (600, 20, 100), (2, 5000, 10), (2, 500, 300))
    for from_logits in (False, True):
        for N, C, S in batches:
            call_ctc(dtype, N, C, S, from_logits)
    if dtype == torch.float32:
        for N, C, S in batches[1:4]:
            priors = torch.zeros(C)
            call_ctc(dtype, N, C, S, True, label_priors=priors, star=C)
    for U, V in ((2, 40), (40, 1025)):
        call_rnnt(dtype, U, V)
    call_rnnt_overlap(dtype)


@functools.cache
def recorded(cuda: str | None) -> dict[torch.dtype | None, list[Launch]]:
    """Return the launches of the calls in each dtype, and last those of mixtures of dtypes."""
    found: dict[torch.dtype | None, list[Launch]] = defaultdict(list)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        with recording(found[dtype], cuda):
            call_all(dtype)
    with recording(found[None], cuda):
        for dtypes in MIXTURES:
            call_mixture(*dtypes)
    return found


@functools.cache
def launches(cuda: str | None) -> dict[str, list[Launch]]:
    """Return the launches of each kernel, one for each set of compile-time arguments and dtype.

    Mixtures of dtypes that do not occur otherwise come last.
    """
    *of_dtypes, mixtures = recorded(cuda).values()
    noted = [launch for of_dtype in of_dtypes for launch in of_dtype]
    found: dict[str, dict[str, Launch]] = defaultdict(dict)
    for each in noted:
        found[each.kernel.__name__].setdefault(f"{each.dtype} {each.variant}", each)
    known = {(each.kernel.__name__, each.dtypes) for each in noted}
    for each in mixtures:
        if (each.kernel.__name__, each.dtypes) not in known:
            mixture = each._replace(is_mixture=True)
            found[each.kernel.__name__].setdefault(f"{each.dtypes} {each.variant}", mixture)
    return {name: list(each.values()) for name, each in found.items()}
