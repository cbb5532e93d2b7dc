"""The page at `/`: a playground of plain HTML, CSS and JavaScript modules over the public API.

Contract: it holds no secret, so it asks for no key. It loads nothing from other origins, and its policy of
content lets a browser run no other script, whatever a model or a prompt writes.
"""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import Response

from foredraft.pages.origins import ORIGINS, stylesheet

__all__ = ["add_page"]

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'; object-src 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks whether its copy is still the server's
}


def add_page(app: FastAPI) -> None:
    """Add the routes of the page: `/`, and `/page/NAME` for its files."""
    for name, content in _files().items():
        _add(app, "/" if name == "index.html" else f"/page/{name}", content, TYPES[name.rpartition(".")[2]])


def _add(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}

    async def answer(request: Request) -> Response:
        known = request.headers.get("if-none-match", "").replace("W/", "").split(",")
        if tag in [each.strip() for each in known]:  # the browser's copy is good
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    app.router.add_route(path, answer, methods=["GET"])


def _files() -> dict[str, bytes]:
    """Return all files by name: those of the page, and what it shares with the trace page."""
    contents = {
        file.name: file.read_bytes()
        for file in (files("foredraft.serve") / "static").iterdir()
        if file.is_file()
    }
    contents["rounds.js"] = (files("foredraft.pages") / "rounds.js").read_bytes()
    contents["tokens.css"] = stylesheet().encode()
    meanings = {name: origin.meaning for name, origin in ORIGINS.items()}
    contents["origins.js"] = f"export const ORIGINS = {json.dumps(meanings)};\n".encode()
    return contents
