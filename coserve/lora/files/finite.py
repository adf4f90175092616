"""Refuses weights that are not finite in the base's dtype, by testing their bits in chunks of 1 MiB. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from coserve.core.errors import CorruptAdapter
from coserve.lora.files.tensorfile import TensorEntry, TensorFile

_MAGNITUDE = {"F32": (np.uint32, 0x7FFFFFFF), "F16": (np.uint16, 0x7FFF), "BF16": (np.uint16, 0x7FFF)}
"""For each dtype in a file: an unsigned integer type of its size, and the mask that clears the sign bit."""
_INFINITY = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}
_TOO_LARGE = {
    ("F32", "bfloat16"): 0x7F7F8000,
    ("F32", "float16"): 0x477FF000,
    ("BF16", "float16"): 0x4780,
}
"""Smallest magnitude, as bits, that rounds to infinity (ties to even), by (file dtype, base dtype). Pairs that never
overflow are missing."""


def all_finite(data: npt.NDArray[np.uint8], kind: str) -> bool:
    """Whether these bytes hold no NaN or infinity, in two reads without a temporary.

    The maximum of the bits as signed integers belongs to the largest positive number, and as unsigned integers to the
    negative number of largest magnitude. Infinities and NaNs lie beyond all finite numbers of their sign.
    """
    unsigned, _ = _MAGNITUDE[kind]
    bits, infinity = data.view(unsigned).ravel(), _INFINITY[kind]
    negative = infinity | 1 << (8 * bits.itemsize - 1)
    return not bits.size or (int(bits.view(f"i{bits.itemsize}").max()) < infinity and int(bits.max()) < negative)


def refuse_non_finite(
    file: TensorFile, tensors: Mapping[str, TensorEntry], dtype: str, progress: Callable[[], None] = lambda: None
) -> None:
    """Raise `CorruptAdapter` for the first tensor with a NaN, an infinity, or a number that overflows in `dtype`."""
    for name, entry in tensors.items():
        kind, magnitude = _MAGNITUDE[entry.dtype]
        least = _TOO_LARGE.get((entry.dtype, dtype), _INFINITY[entry.dtype])
        for chunk in file.chunks(entry):
            progress()
            if chunk and int((np.frombuffer(chunk, kind) & magnitude).max()) >= least:
                raise CorruptAdapter(f"tensor {name[:120]!r}: expected weights that are finite in {dtype}")
