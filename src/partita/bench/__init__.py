"""Timing beside PyTorch and every other implementation that is installed.

An op is a module with `cases(settings)`: what to time, at which sizes. A case makes its inputs, checks a result against fp64, and says which
parts of the work it times, and the fewest bytes that each part must move, or which provider is the yardstick. `runner` takes every case to
every provider, `report` prints, `picture` draws. Cases of rows of logits share `rows`.
"""
