"""Arithmetic of sizes, which plans and launches share."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def cdiv(number: int, by: int) -> int:
    """Return the quotient rounded up. Triton's own takes the host as long as making a tensor."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def larger(a: int, b: int) -> int:
    """Return the maximum of two sizes, of which a compiler may not know each."""
    # Dynamo makes this a `sym_max`, which older versions of it do not take for two known numbers.
    number: int = max(a, b) if torch.compiler.is_dynamo_compiling() else torch.sym_max(a, b)
    return number


def smaller(a: int, b: int) -> int:
    """Return the minimum of two sizes, as `larger` does."""
    number: int = min(a, b) if torch.compiler.is_dynamo_compiling() else torch.sym_min(a, b)
    return number


def holds(condition: bool | torch.SymBool) -> bool:
    """Return whether a condition on sizes holds that every call has to meet.

    Compiled code may serve sizes that its compiler does not know. Then the condition is taken to
    hold, and the compiled code checks it.
    """
    if condition is True or condition is False:
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # which imports SymPy

    if not guard_or_true(condition):
        return False
    torch._check(condition)
    return True


def same_sizes(sizes: Sequence[int], expected: Sequence[int]) -> bool:
    """Return whether sizes are the expected ones, of which a compiler may not know all."""
    if not torch.compiler.is_compiling():
        return tuple(sizes) == tuple(expected)
    return len(sizes) == len(expected) and all(
        holds(size == number) for size, number in zip(sizes, expected, strict=True)
    )


def decide(condition: bool | torch.SymBool, otherwise: bool) -> bool:
    """Return whether a condition on sizes holds, or `otherwise` where a compiler cannot know it.

    The compiled code then serves all sizes, so what follows must be right in either case.
    """
    if condition is True or condition is False:
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports SymPy

    if otherwise:
        return not statically_known_true(torch.sym_not(condition))
    return statically_known_true(condition)


def choose(condition: bool | torch.SymBool, number: int, otherwise: int) -> int:
    """Return one of two numbers; compiled code decides when it runs."""
    if decide(condition, otherwise=False):
        return number
    if not decide(condition, otherwise=True):
        return otherwise
    return otherwise + torch.sym_ite(condition, 1, 0) * (number - otherwise)
