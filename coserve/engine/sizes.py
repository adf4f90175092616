"""Defaults that depend on the device."""

from __future__ import annotations

STEP_TOKENS = {"cpu": 512, "cuda": 2048}
"""Most tokens of a generation step unless told otherwise."""
