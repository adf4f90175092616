"""Makes the registry's record of an adapter from its files. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coserve.core.names import ADAPTER_CONFIG
from coserve.core.types import AdapterRef, BaseSpec
from coserve.lora.files.peft import inspect_adapter
from coserve.lora.files.tensorfile import digest_file
from coserve.state.registry.records import AdapterRecord


def record_adapter(
    folder: Path,
    ref: AdapterRef,
    base: BaseSpec,
    *,
    source: str,
    created_at: float,
    progress: Callable[[], None] = lambda: None,
) -> AdapterRecord:
    """Return the registry's record of the PEFT files in `folder`. Raises subclasses of `AdapterError`, and
    `StorageError`.

    `source`: as `AdapterRecord.source`; `created_at`: seconds since the epoch; `progress`: as for `inspect_adapter`.
    """
    config_sha256 = digest_file(folder, ADAPTER_CONFIG)
    info = inspect_adapter(folder, base, progress)
    return AdapterRecord(
        ref=ref,
        rank=info.rank,
        alpha=info.alpha,
        targets=tuple(info.targets),
        base_fingerprint=base.fingerprint,
        base_name=base.name,
        source=source,
        created_at=created_at,
        bytes=info.bytes,
        sha256=info.sha256,
        config_sha256=config_sha256,
        alphas=info.alphas,
        bd_blocks=info.settings.bd_blocks,
        cartridge=info.settings.cartridge,
        prefix_tokens=info.settings.prefix_tokens,
    )
