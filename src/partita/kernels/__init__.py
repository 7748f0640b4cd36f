"""How the GPU does it: Triton. Reached through `_op` alone, and imported on first use."""
