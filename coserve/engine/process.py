"""The engine process: `python -m coserve.engine.process FD [PLACE]`.

`cli/daemon/engine_process.py` starts it with the settings as JSON on standard input and one end of a socket pair as
file descriptor FD. Its only other connections are to its warm-up's process and, with tensor parallelism (`PLACE`: a
`RankPlace` as JSON), to the other ranks. It ends with its parent.
"""

from __future__ import annotations

import sys

from coserve.config import config_from_json
from coserve.core.processes import obey_parent
from coserve.data.pretrained.read_ahead import read_ahead, weight_files
from coserve.engine.ranks.progress import own_rank
from coserve.engine.warming.fast_imports import fast_imports
from coserve.engine.warmup.launch import cache_bytecode, start_warm_up


def main() -> None:
    obey_parent()
    config, rank = config_from_json(sys.stdin.buffer.read()), own_rank(sys.argv[1:])
    cache_bytecode(config)
    warm_up = start_warm_up(config)
    if config.load_format == "auto":
        read_ahead(weight_files(config.model))
    with fast_imports():
        from coserve.engine.worker import serve  # imports torch, which takes seconds; the warm-up starts meanwhile

        if warm_up is not None:
            import torch._inductor.compile_fx  # noqa: F401 - layers are compiled soon

    serve(config, int(sys.argv[1]), warm_up, rank)


if __name__ == "__main__":
    main()
