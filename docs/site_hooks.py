"""Hooks of the site: links to research/, which is not on the site, and formulas as MathML."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(research/[^)#\s]*)[^)\s]*\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
TAG = re.compile(r"\\tag\{(\w+)\}")
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
OPTION = re.compile(r"(?<![\w#/-])--[a-z][a-z-]*")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The link's text, and the file's name in the repository instead of a broken address."""
    return LINK.sub(r"\1 (`\2`)", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """MathML instead of TeX: browsers draw it, and nothing is loaded from elsewhere. Options in
    tables stay on one line: browsers would break them behind their hyphens."""
    content = CELL.sub(
        lambda cell: OPTION.sub(r'<span class="option">\g<0></span>', cell[0]), content
    )
    return FORMULA.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    tex = html.unescape(found[2])
    if found[1] == "span":
        return convert(tex)
    number = TAG.search(tex)
    tag = f"<span>({number[1]})</span>" if number else ""
    formula = convert(TAG.sub("", tex).strip(), display="block")
    return f'<div class="formula">{formula}{tag}</div>'
