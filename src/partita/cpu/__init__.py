"""How the CPU does it where ATen has no such op: Numba."""
