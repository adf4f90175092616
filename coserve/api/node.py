"""The things that most parts of the API process need."""

from __future__ import annotations

from dataclasses import dataclass

from coserve.api.engine_client import EngineClient
from coserve.config import Config
from coserve.data.pretrained.tokenizer import Tokenizer
from coserve.state.folder import DataFolder
from coserve.state.thread import RegistryThread


@dataclass(frozen=True)
class Node:
    """Settings, data folder, registry, tokenizer and engine of a daemon."""

    config: Config
    folder: DataFolder
    registry: RegistryThread
    tokenizer: Tokenizer
    engine: EngineClient
