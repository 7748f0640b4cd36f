"""Arithmetic of sizes, which plans and launches share."""

from __future__ import annotations


def cdiv(number: int, by: int) -> int:
    """Return the quotient rounded up. Triton's own takes the host as long as making a tensor."""
    return -(-number // by)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is not below a positive number."""
    return 1 << (number - 1).bit_length()
