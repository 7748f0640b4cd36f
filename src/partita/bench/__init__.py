"""Timing of the ops beside PyTorch and all other implementations that are installed.

An op is a module with `cases(settings)`, which yields what is timed at which sizes. A case makes
its inputs, checks results against fp64, and names the parts of the work that it times, with the
fewest bytes that each part must move, or with the provider that is the yardstick. `runner` takes
each case to each provider, `report` prints, and `picture` draws. Cases of rows of logits share
`rows`.
"""
