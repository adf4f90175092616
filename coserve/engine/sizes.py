"""Settings whose defaults depend on the device."""

from __future__ import annotations

STEP_TOKENS = {"cpu": 512, "cuda": 2048}
"""Default of the setting `step_tokens`, by device type."""
