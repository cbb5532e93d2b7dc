"""The page at `/`: a playground of plain HTML, CSS and JavaScript modules over the public API.

Contract: it holds no secret, so it asks for no key. It loads nothing from other origins, and its policy of
content lets a browser run no other script, whatever a model or a prompt writes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page.

    Attributes:
        content: Its bytes.
        media_type: Its content type.
    """

    content: bytes
    media_type: str

    @property
    def tag(self) -> str:
        """Its ETag."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    def response(self, request: Request) -> Response:
        """Return the file, or only that the browser's copy is good."""
        headers = {**HEADERS, "ETag": self.tag}
        known = request.headers.get("if-none-match", "").replace("W/", "").split(",")
        if self.tag in [each.strip() for each in known]:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


def add_page(app: FastAPI) -> None:
    """Add the routes of the page: `/`, and `/page/NAME` for its files."""
    assets = _assets()
    _add(app, "/", assets.pop("index.html"))
    for name, asset in assets.items():
        _add(app, f"/page/{name}", asset)


def _add(app: FastAPI, path: str, asset: Asset) -> None:
    async def answer(request: Request) -> Response:
        return asset.response(request)

    app.router.add_route(path, answer, methods=["GET"])


def _assets() -> dict[str, Asset]:
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
    return {name: Asset(content, TYPES[name.rpartition(".")[2]]) for name, content in contents.items()}
