"""An engine's process, of another base than the tests', that makes a step with a LoRA server which others use, too,
begins another one, and stays in it: `python -m tests.support.lora_engine_process DATA SERVERS DEVICE TIMEOUT`, the data
folder, which it fills, and the servers'. It prints a line when it is there."""

from __future__ import annotations

import sys
import threading
from itertools import islice
from pathlib import Path

import torch

from coserve.config import Config
from coserve.engine.lora_server.placement import part_of
from coserve.engine.lora_server.servers import LoraServers
from coserve.engine.lora_server.start import make_servers
from coserve.kernels.lora.segments import Segments
from coserve.model.base import Base, wrap_base
from coserve.model.load import load_base
from coserve.state.folder import DataFolder
from tests.support.families import tiny_family
from tests.support.lora_servers import REFS, digests_of, save_adapters


def main() -> None:
    data, servers, device, timeout = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    base = wrap_base(tiny_family("qwen3_moe"), name="qwen3_moe")
    save_adapters("qwen3_moe", base, data)
    if device != "cpu":
        tiny_family("qwen3_moe").save_pretrained(data / "base")
        base = load_base(str(data / "base"), device=device, dtype="float32")
    kind = device.partition(":")[0]
    config = Config(data_dir=data, device=kind, lora_server=1, lora_server_at=servers, lora_server_timeout=timeout)
    own = make_servers(base, config, 64)
    assert own is not None
    own.wait()
    own.load(REFS[0], digests_of(DataFolder(data).adapter(REFS[0])))()
    exchange(
        base, own, device, 1 << 10
    )  # the server loads its kernels in the first step, which may wait for all streams
    exchange(base, own, device, 1)
    assert not own.troubles or device == "cpu", own.troubles
    print("in a step", flush=True)
    threading.Event().wait()


def exchange(base: Base, own: LoraServers, device: str, most: int) -> None:
    """Begin a step of one token, and make so many of its exchanges, or all."""
    step = own.step(Segments((0, 1), (0,)), [own.slot(REFS[0])])
    assert step is not None
    for number, (site, spec) in enumerate(islice(part_of(base.spec, 0, 1, 1).sites.items(), most)):
        chosen = torch.zeros(1, spec.chosen, dtype=torch.float32 if number % 2 else torch.int64, device=device)
        x_ND = torch.zeros(spec.chosen if number % 2 else 1, spec.in_features, device=device)
        (step.down if number % 2 else step.gate_up)(site, x_ND, chosen)().cpu()


if __name__ == "__main__":
    main()
