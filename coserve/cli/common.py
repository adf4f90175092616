"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from coserve.client.asynchronous import DEFAULT_URL

__all__ = ["DEFAULT_URL", "AsJson", "Key", "Url"]

Url = Annotated[str, typer.Option("--url", envvar="COSERVE_URL", help="where the daemon listens")]
Key = Annotated[str | None, typer.Option("--key", envvar="COSERVE_API_KEY", help="API key")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, one object a line")]
