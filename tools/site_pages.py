"""A hook of mkdocs: what the site does not have or know becomes plain.

Links to files outside of docs become their texts; of a fence's words, which say to tests what a block is, the language
stays.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:  # noqa: ANN401 - mkdocs' Page
    def inside(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), link[2]))
        return link[1] if target.startswith("..") else link[0]

    markdown = re.sub(r"^(```\w+) .*$", r"\1", markdown, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((\.\./[^)\s]+)\)", inside, markdown)
