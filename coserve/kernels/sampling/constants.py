"""Constants shared by the sampling kernels and their callers."""

from __future__ import annotations

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy sampling."""
NOT_FINITE = -1
"""Returned in place of a token if the logits are not finite."""
NONE_LEFT = -2
"""Returned in place of a token if logit bias, penalties and banned tokens leave none."""
UNIT = 2.0**34
"""The largest weight, chosen so that sums over up to 2^19 tokens are exact in fp64."""
COLUMNS = 5
"""Number of parameters per row (`generate.sampling.draws.draw`)."""
