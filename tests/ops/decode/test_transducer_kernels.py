"""The kernels of the searches of transducers against PyTorch, and rounds as a CUDA graph."""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from helpers.rows import kernel_devices
from helpers.transducers import (
    TDT,
    Cached,
    Recurrent,
    Stateless,
    Transducer,
    chunks_of,
    moved,
    transducer,
)
from torch import Tensor

import partita
from partita import rnnt_beam_search, rnnt_greedy_search
from partita.ops.decode import transducer_rounds


class Shifted(Stateless):
    """A predictor of the last three labels, whose state keeps the same tensors in other places."""

    state_dims: ClassVar[Any] = (0, 0)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        last, before = state or (torch.zeros_like(tokens), torch.zeros_like(tokens))
        output, _ = super().forward(tokens, before)
        return output + self.embeddings[1](last), (tokens, last)


def compare(
    network: Transducer, function: Any, device: str, rows: Any = None, **options: Any
) -> Any:
    """Compare rows of what a search finds by kernels with what it finds in PyTorch on the CPU."""
    rows = slice(None) if rows is None else rows
    with partita.backend("reference"):
        expected = network.search(function, **options)
    with partita.backend("triton"):
        found = moved(network, device).search(function, **options)
    for name in ("tokens", "lengths", "steps", "durations"):
        assert torch.equal(getattr(found, name)[rows].cpu(), getattr(expected, name)[rows]), name
    for name in ("scores", "token_scores"):
        torch.testing.assert_close(getattr(found, name)[rows].cpu(), getattr(expected, name)[rows])
    return found


@kernel_devices
@pytest.mark.parametrize("kind", [Recurrent, Shifted, Cached])
@pytest.mark.parametrize("durations", [None, TDT])
def test_greedy_search(kind: Any, durations: tuple[int, ...] | None, device: str) -> None:
    network = transducer(kind, (6, 9, 0, 1), durations, blank_bias=-4.0, dtype=torch.float64)
    found = compare(network, rnnt_greedy_search, device, max_symbols_per_step=2, max_tokens=3)
    assert (found.lengths == 3).any()


@kernel_devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_many_classes_and_half_types(dtype: torch.dtype, device: str) -> None:
    network = transducer(Stateless, (4, 6), TDT, classes=1100, dtype=dtype)
    network.join.head.weight.data *= 4
    compare(network, rnnt_greedy_search, device, max_tokens=4)


@kernel_devices
@pytest.mark.parametrize("durations", [None, TDT])
def test_of_equal_classes_the_lowest_is_taken(
    durations: tuple[int, ...] | None, device: str
) -> None:
    network = transducer(Stateless, (6, 6), durations, classes=40, seed=1)

    def join(frames: Tensor, output: Tensor) -> Tensor:
        return head(frames, output).round()

    head = network.join
    with partita.backend("reference"):
        expected = network._replace(join=join).search(rnnt_greedy_search, max_tokens=9)
    network, head = moved(network, device), network.join.to(device)
    with partita.backend("triton"):
        found = network._replace(join=join).search(rnnt_greedy_search, max_tokens=9)
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert torch.equal(found.durations.cpu(), expected.durations)


@kernel_devices
@pytest.mark.parametrize("function", [rnnt_greedy_search, rnnt_beam_search])
def test_nan_stays_in_its_sequence(function: Callable[..., Any], device: str) -> None:
    network = transducer(Recurrent, (5, 6, 4), TDT, dtype=torch.float64)  # no TF32 of an LSTM
    network.encoder[1, 2:] = torch.nan
    found = compare(network, function, device, rows=[0, 2], max_tokens=6)
    assert found.scores[1].isnan().all()
    assert (found.tokens[1] < 6).all()


@kernel_devices
def test_chunks(device: str) -> None:
    network = transducer(Recurrent, (9, 6), TDT, dtype=torch.float64)
    whole = compare(network, rnnt_greedy_search, device, max_tokens=30)
    network, tokens, state = moved(network, device), [], None
    for part in chunks_of(network, [4]):
        before = None if state is None else state.output.clone()
        with partita.backend("triton"):
            found = part.search(rnnt_greedy_search, state=state, max_tokens=30)
        if state is not None:
            assert torch.equal(state.output, before)  # that of the user stays as it is
        state = found.state
        tokens.append(found.tokens[0, 0, : found.lengths[0, 0]])
    assert torch.equal(torch.cat(tokens), whole.tokens[0, 0, : whole.lengths[0, 0]])


@kernel_devices
@pytest.mark.parametrize("durations", [None, TDT])
@pytest.mark.parametrize("width", [1, 3])
def test_beam_search(width: int, durations: tuple[int, ...] | None, device: str) -> None:
    network = transducer(Recurrent, (4, 3, 0), durations, dtype=torch.float64)
    options = {"max_symbols_per_step": 2, "max_tokens": 5, "beam_width": width, "nbest": width}
    compare(network, rnnt_beam_search, device, **options)


@kernel_devices
def test_beam_search_over_few_classes(device: str) -> None:
    """The beam is wider than there are labels, and blanks complete hypotheses of one frame."""
    network = transducer(Recurrent, (3, 1), classes=3, dtype=torch.float64)
    compare(network, rnnt_beam_search, device, beam_width=5, nbest=5, max_tokens=3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Recurrent, Stateless, Cached, Shifted])
@pytest.mark.parametrize("function", [rnnt_greedy_search, rnnt_beam_search])
@pytest.mark.parametrize("durations", [None, TDT])
def test_graphs_give_the_same_bits(
    function: Any, kind: Any, durations: tuple[int, ...] | None
) -> None:
    lengths = (13, 9, 0, 12) if kind is Cached else (40, 60, 33, 1)
    network = moved(transducer(kind, lengths, durations), "cuda")
    expected, *graphs = (network.search(function, graphs=graphs) for graphs in (False, True, True))
    for found in graphs:
        for a, b in zip(found[:-1], expected[:-1], strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("lengths", [(13, 9, 0, 12), (40, 60, 33, 1)])
@pytest.mark.parametrize("durations", [None, TDT, (1, 2)])
def test_many_steps_of_beam_search_on_a_gpu(
    durations: tuple[int, ...] | None, lengths: tuple[int, ...], graphs: bool
) -> None:
    """A predictor of all labels: one of the last labels alone gives equal scores to some texts."""
    network = transducer(Recurrent, lengths, durations, dtype=torch.float64)
    options = {"beam_width": 4, "nbest": 4, "max_tokens": 40, "graphs": graphs}
    found = [compare(network, rnnt_beam_search, "cuda", **options) for _ in range(2)]
    for a, b in zip(found[0][:-1], found[1][:-1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_a_search_on_another_stream() -> None:
    network = moved(transducer(lengths=(40, 30)), "cuda")
    expected = network.search(rnnt_greedy_search)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = network.search(rnnt_greedy_search)
        tokens = found.tokens + 1
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(tokens, expected.tokens + 1)


@pytest.mark.gpu
def test_models_are_captured_too() -> None:
    boost = partita.PhraseBoost([["b", "c"]], ["-", *"abcde"], 4.0)
    network = moved(transducer(lengths=(40, 30)), "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function in (rnnt_greedy_search, rnnt_beam_search):
            expected = network.search(function, boost=[boost, None], graphs=False)
            found = network.search(function, boost=[boost, None])
            assert torch.equal(found.tokens, expected.tokens)


@pytest.mark.gpu
def test_a_capture_that_fails_is_told_once_and_leaves_nothing() -> None:
    network = moved(transducer(Stateless, lengths=(40, 30)), "cuda")
    expected = network.search(rnnt_greedy_search)

    class Waits:
        state_dims = 0

        def __call__(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
            int(tokens.max())
            return network.predict(tokens, state)

    waits = network._replace(predict=Waits())
    with pytest.warns(RuntimeWarning, match="cannot be captured in a CUDA graph.*capturing"):
        assert torch.equal(waits.search(rnnt_greedy_search).tokens, expected.tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(waits.search(rnnt_greedy_search).tokens, expected.tokens)
        assert torch.equal(network.search(rnnt_greedy_search).tokens, expected.tokens)
    assert torch.randn(4, device="cuda").isfinite().all()
    index = torch.cuda.current_device()
    assert index in transducer_rounds._latest.graphs
