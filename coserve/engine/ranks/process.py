"""A follower's process: `python -m coserve.engine.ranks.process FD PLACE`.

`cli/daemon/rank_group.py` starts it with the settings as JSON on standard input. `FD`: its socket to the daemon;
`PLACE`: a `RankPlace` as JSON. It ends with its parent.
"""

from __future__ import annotations

import sys

from coserve.config import config_from_json
from coserve.core.processes import obey_parent
from coserve.engine.ranks.progress import own_rank
from coserve.engine.warming.fast_imports import fast_imports
from coserve.engine.warmup.launch import cache_bytecode, use_caches


def main() -> None:
    obey_parent()
    config, rank = config_from_json(sys.stdin.buffer.read()), own_rank(sys.argv[1:])
    assert rank is not None, "expected a place"
    cache_bytecode(config)
    warm_up = use_caches(config)
    with fast_imports():
        from coserve.engine.ranks.serve import follow  # imports torch, which takes seconds: heartbeats have begun

        if warm_up is not None:
            import torch._inductor.compile_fx  # noqa: F401 - layers are compiled soon

    follow(config, rank, warm_up)


if __name__ == "__main__":
    main()
