"""A hook of the site: pages link to research/, which is in the repository and not on the site."""

import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(research/[^)#\s]*)[^)\s]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The link's text, and the file's name in the repository instead of a broken address."""
    return LINK.sub(r"\1 (`\2`)", markdown)
