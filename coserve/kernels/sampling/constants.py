"""Numbers that the sampling kernels and their callers agree on."""

from __future__ import annotations

GREEDY_BELOW = 1e-5
"""A temperature below this means the likeliest token."""
NOT_FINITE = -1
"""In place of a token: the logits were not finite."""
NONE_LEFT = -2
"""In place of a token: logit bias, penalties and banned tokens left no token to choose."""
UNIT = 2.0**34
"""The largest weight: sums over up to 2^19 tokens are exact in fp64."""
COLUMNS = 5
"""Of a row's parameters (`generate.sampling.draws.draw`)."""
