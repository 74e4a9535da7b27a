"""Put the page together: one document, its style and script inside, and the policy that allows just these.

The script writes text only as text, never as markup; the policy makes sure of that: no other script runs,
nothing is loaded from or sent to anywhere but the dashboard itself.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import NamedTuple


class Page(NamedTuple):
    """The document and its Content-Security-Policy."""

    document: bytes
    policy: str


def load_page() -> Page:
    """Read the parts, which are installed beside this module, and join them."""
    folder = files("ftkit.dashboard") / "page"
    html, style, script = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    document = html.replace("/* page.css */", style).replace("/* page.js */", script)
    policy = (
        "default-src 'none'",
        f"script-src '{_digest(script)}'",
        f"style-src '{_digest(style)}'",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
    return Page(document.encode(), "; ".join(policy))


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
