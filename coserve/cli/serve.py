"""The command `coserve serve`: one option per setting of `config.Config`."""

from __future__ import annotations

import asyncio
import logging

from coserve.cli.daemon.start_warnings import start_warnings
from coserve.cli.settings_options import settings_command
from coserve.cli.status_lines import StatusLines
from coserve.config import load_config

log = logging.getLogger(__name__)


def _serve(given: dict[str, object]) -> None:
    """Start the daemon. Settings also come from COSERVE_<NAME> and from the TOML file of --config."""
    config = load_config(given)
    from coserve.cli.daemon.serve import serve
    from coserve.core.logs import set_up_logging

    set_up_logging("api", config.logs)
    for warning in start_warnings(config, given):
        log.warning("%s", warning)
    asyncio.run(serve(config, report=StatusLines(config.host, tls=config.tls_cert is not None).show))


serve = settings_command(_serve, argument="model")
