"""Tensors that no op serves: each op refuses them with one error that names the argument."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import partita
from partita.testing.samples import CALLS, Draw

DENSE = "expected a dense Tensor, got "
KINDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "float8_e4m3fn": (
        lambda x: x.to(torch.float8_e4m3fn),
        "expected float16, bfloat16, float32 or float64, got torch.float8_e4m3fn",
    ),
    "float8_e5m2": (
        lambda x: x.to(torch.float8_e5m2),
        "expected float16, bfloat16, float32 or float64, got torch.float8_e5m2",
    ),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[0]]), f"{DENSE}a nested one"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged),
        f"{DENSE}a nested one",
    ),
    "sparse": (lambda x: x.to_sparse(), f"{DENSE}one of layout torch.sparse_coo"),
    "csr": (lambda x: x.flatten(0, -2).to_sparse_csr(), f"{DENSE}one of layout torch.sparse_csr"),
    "mkldnn": (lambda x: x.to_mkldnn(), f"{DENSE}one of layout torch._mkldnn"),
    "masked": (
        lambda x: torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool)),
        f"{DENSE}a MaskedTensor",
    ),
    "complex": (
        lambda x: x.to(torch.complex64),
        "expected a floating dtype, got torch.complex64",
    ),
}
TARGETS = torch.ones(2, 2, dtype=torch.int64)
# These make a tensor or a chain of the argument before they call the function.
INDIRECT = ("cross_entropy, in place", "rnnt_loss, in place", "Chain.kl", "LinearChain.kl")


@pytest.mark.filterwarnings("ignore")  # PyTorch calls some of these kinds prototypes
@pytest.mark.parametrize("name", [name for name in CALLS if name not in INDIRECT])
def test_each_op_refuses_it_by_name(name: str) -> None:
    leaves = CALLS[name].sample(Draw()).leaves
    sample = CALLS[name].sample(Draw(grad=False))
    for argument, (make, message) in itertools.product(leaves, KINDS.values()):
        if leaves[argument].ndim < 2:  # as these kinds never have
            continue
        with pytest.raises(TypeError) as raised:
            sample.run(**{argument: make(sample.inputs[argument])})
        assert str(raised.value) == f"{argument}: {message}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_target_probabilities(kind: str) -> None:
    make, _ = KINDS[kind]
    with pytest.raises(TypeError, match=r"^target: expected "):
        partita.cross_entropy(torch.zeros(4, 5), make(torch.rand(4, 5)))


@pytest.mark.parametrize("kind", ["nested", "jagged", "sparse"])
@pytest.mark.filterwarnings("ignore")
def test_integers(kind: str) -> None:
    make, message = KINDS[kind]
    odd = make(torch.ones(2, 2, dtype=torch.int64))
    x = torch.zeros(6, 2, 5)
    with pytest.raises(TypeError, match=f"^targets: {message}$"):
        partita.ctc_loss(x, odd, [6, 6], [2, 2])
    with pytest.raises(TypeError, match=f"^target_lengths: {message}$"):
        partita.ctc_loss(x, TARGETS, [6, 6], odd)
    with pytest.raises(TypeError, match=f"^source: {message}$"):
        partita.logz(torch.zeros(3, 2, 2, 2), odd)
    with pytest.raises(TypeError, match=f"^target: {message}$"):
        partita.token_stats(torch.zeros(2, 2, 5), odd)
