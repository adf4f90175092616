"""An engine's process, of another base than the tests', that begins a step with a LoRA server which others use, too,
and stays in it: `python -m tests.support.lora_engine_process DATA SERVERS`, the data folder, which it fills, and the
servers'. It prints a line when it is there."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch

from coserve.config import Config
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.start import make_servers
from coserve.kernels.lora.segments import Segments
from coserve.model.base import wrap_base
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.lora_servers import REFS, digests_of, save_adapters


def main() -> None:
    data, servers = map(Path, sys.argv[1:])
    base = wrap_base(tiny_family("qwen3_moe"), name="qwen3_moe")
    save_adapters("qwen3_moe", base, data)
    config = Config(data_dir=data, device="cpu", lora_server=1, lora_server_at=servers, lora_server_timeout=60.0)
    own = make_servers(base, config, 64)
    assert own is not None
    own.wait()
    own.load(REFS[0], digests_of(DataFolder(data).adapter(REFS[0])))()
    step = own.step(Segments((0, 1), (0,)), [own.slot(REFS[0])])
    assert step is not None
    site, spec = next(iter(part_of(base.spec, 0, 1, 1).sites.items()))
    step.gate_up(site, torch.zeros(1, spec.in_features), torch.zeros(1, spec.chosen, dtype=torch.int64))()
    print("in a step", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
