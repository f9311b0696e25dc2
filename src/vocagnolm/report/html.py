"""One self-contained HTML file: template, style, script and data, with no way out.

The page may hold any text, so it is built to be inert: the data sit in a JSON block that cannot
end early, the script only ever sets text content, and a content security policy with hashes lets
nothing else run and nothing be fetched.
"""

import base64
import hashlib
import os
from html import escape
from importlib.resources import files
from pathlib import Path

from vocagnolm.files import local_path, write_text
from vocagnolm.report.page_data import Page, to_json

# Order matters: later files use what earlier ones define. They become one script.
SCRIPTS = (
    "core.js",
    "tokens.js",
    "inspector.js",
    "rows.js",
    "charts.js",
    "sections.js",
    "main.js",
)


def _resource(name: str) -> str:
    return files("vocagnolm.report").joinpath("page", name).read_text(encoding="utf-8")


def _csp_hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def inert_json(data: str) -> str:
    """JSON that can stand inside a script element: no `<`, `>` or `&` is left to the parser, and
    no line separator that older parsers trip over. All of them can only occur inside strings."""
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data


def render_page(page: Page) -> str:
    """The page as one HTML document."""
    style = "\n" + _resource("page.css")
    scripts = "\n".join(_resource(name) for name in SCRIPTS)
    script = f'\n"use strict";\n(() => {{\n{scripts}\n}})();\n'
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src {_csp_hash(script)}; style-src {_csp_hash(style)}"
    )
    parts = {
        "policy": escape(policy, quote=True),
        "title": escape(page.title),
        "style": style,
        "script": script,
        "data": inert_json(to_json(page)),
    }
    pieces = _resource("page.html").split("@@")
    # template text and slot names alternate; the slots' content is never scanned again
    return "".join(parts[piece] if at % 2 else piece for at, piece in enumerate(pieces))


def write_page(page: Page, path: str | os.PathLike[str]) -> Path:
    """Write the page; the file appears by rename, so a reader never sees half of it."""
    target = local_path(path)
    write_text(target, render_page(page))
    return target
