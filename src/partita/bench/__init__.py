"""Timing of the ops beside PyTorch and all other implementations that are installed.

A family of ops is a module that declares who serves its ops (`PROVIDERS`), and cases: their sizes
and inputs, the fewest bytes that each part of the work must move or the provider that is the
yardstick, and the truth in fp64. Its docstring is a part of `partita bench --help`. `case` says how
all cases are timed, and `paths` how those whose results are sums over paths are judged. `runner`
takes each case to each provider, `report` prints, and `picture` draws.
"""
