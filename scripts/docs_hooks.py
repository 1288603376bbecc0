"""Hooks of mkdocs: files outside docs/ are in the repository and not on the site, so links to them become names."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, page: Any, **more: Any) -> str:
    """Name files of the repository instead of linking to them."""

    def named(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[2]))
        return link[0] if target.startswith("docs/") else f"{link[1]} (`{target}` in the repository)"

    return LINK.sub(named, markdown)
