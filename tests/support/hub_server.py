"""A Hugging Face hub on 127.0.0.1, with the part of the protocol that downloading a model uses, and a client of it.

Each revision of a repository is a local folder. The server sends small files itself, and redirects large ones to a
storage server, which ignores tokens and serves byte ranges. The client is in this process or, where a model is loaded,
in one of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants, hf_api

from foredraft.cli import main
from foredraft.errors import CheckpointError
from foredraft.model.locate import resolve
from tests.support.running import forked, run_code

TOKEN = "hf_thetokenofthesetests"
API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    revisions: dict[str, Path]  # the folder of each revision
    gated: bool = False  # visible to all clients, but no client may download its files
    private: bool = False  # visible only to clients that send TOKEN


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class Hub:
    repositories: dict[str, Repository] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)  # how often the transfer of a file breaks halfway
    fails: set[str] = field(default_factory=set)  # files that are answered with status 500
    log: list[Request] = field(default_factory=list)
    endpoint: str = ""
    storage: str = ""

    def environment(self, home: Path, **changes: str) -> dict[str, str]:
        """Return the environment of a client process that uses this hub and the cache folder `home`."""
        foreign = [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]
        kept = {name: value for name, value in os.environ.items() if name not in foreign}
        ours = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        return kept | ours | changes

    def fetched(self) -> list[str]:
        return [Path(each.path).name for each in self.log if each.method == "GET" and _of_file(each)]


def commit(name: str, revision: str) -> str:
    return hashlib.sha1(f"{name}@{revision}".encode()).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    handlers = (type(kind.__name__, (kind,), {"hub": hub}) for kind in (HubHandler, StorageHandler))
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in handlers]
    hub.endpoint, hub.storage = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    threads = [Thread(target=server.serve_forever, args=(0.05,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown(), server.server_close()
        for thread in threads:
            thread.join()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[Hub]

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        sent = self.headers.get("Range"), self.headers.get("Authorization")
        self.hub.log.append(Request(self.command, unquote(path), *sent))
        self.answer(path)

    do_HEAD = do_GET

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str, message: str) -> None:
        self.send(status, X_Error_Code=code, X_Error_Message=message)

    def log_message(self, *arguments: Any) -> None:
        pass


class HubHandler(Handler):
    def answer(self, path: str) -> None:
        if found := API.fullmatch(path):
            name, what, revision = found.groups("main")
            folder = self.folder(name, unquote(revision), files=False)
            if folder is None:
                return
            content: Any = _tree(folder[0])
            if what != "tree":
                files = [{"rfilename": entry["path"]} for entry in content if entry["type"] == "file"]
                content = {"id": name, "sha": folder[1], "private": False, "siblings": files}
            self.send(200, json.dumps(content).encode(), Content_Type="application/json")
        elif found := RESOLVE.fullmatch(path):
            name, revision, file = map(unquote, found.groups())
            folder = self.folder(name, revision, files=True)
            if folder is not None:
                self.send_file(folder[0] / file, folder[1])
        else:
            self.send(404)

    def folder(self, name: str, revision: str, *, files: bool) -> tuple[Path, str] | None:
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            self.refuse(401, "", "Invalid credentials in Authorization header")
            return None
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and authorization is None):
            # without a token, the hub answers alike for private and for absent repositories
            self.refuse(401 if authorization is None else 404, "RepoNotFound", "Repository not found")
            return None
        if files and repository.gated:
            self.refuse(401 if authorization is None else 403, "GatedRepo", f"Access to {name} is restricted")
            return None
        for known, folder in repository.revisions.items():
            if revision in (known, commit(name, known)):
                return folder, commit(name, known)
        self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def send_file(self, file: Path, sha: str) -> None:
        if not file.is_file():
            self.refuse(404, "EntryNotFound", "Entry not found")
        elif _large(file):
            linked = {"X_Linked_Etag": f'"{_sha256(file)}"', "X_Linked_Size": str(file.stat().st_size)}
            self.send(302, Location=f"{self.hub.storage}{file}", X_Repo_Commit=sha, **linked)
        elif file.name in self.hub.fails and self.command == "GET":
            self.send(500)
        else:
            self.send(200, file.read_bytes(), ETag=f'"{_blob(file)}"', X_Repo_Commit=sha)


class StorageHandler(Handler):
    def answer(self, path: str) -> None:
        file = Path(unquote(path))
        if file.name in self.hub.fails:
            self.send(500)
            return
        content = file.read_bytes()
        start = int(re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        part = content[start:]
        breaks = self.hub.breaks.get(file.name, 0)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(part)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        self.wfile.write(part[: len(part) // 2] if breaks else part)
        if breaks:
            self.hub.breaks[file.name] -= 1
            self.close_connection = True


def _of_file(request: Request) -> bool:
    redirected = RESOLVE.fullmatch(request.path) and _large(Path(request.path))  # which sends no bytes
    return not request.path.startswith("/api/") and not redirected


def _large(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".gguf")


def _tree(folder: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            entries.append({"type": "directory", "path": name, "oid": "0" * 40, "size": 0})
            continue
        size = {"size": path.stat().st_size}
        entry = {"type": "file", "path": name, "oid": _blob(path), **size}
        if _large(path):
            entry["lfs"] = {"oid": _sha256(path), "pointerSize": 134, **size}
        entries.append(entry)
    return entries


def _blob(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@dataclass
class Client:
    hub: Hub
    home: Path

    @contextlib.contextmanager
    def reading(self, environment: dict[str, str]) -> Iterator[None]:
        """Let `huggingface_hub`, which reads its settings at import, have those of an environment."""
        self.hub.log.clear()
        with pytest.MonkeyPatch.context() as patch:
            try:
                wanted = self.hub.environment(self.home, **environment)
                for name in os.environ.keys() - wanted.keys():
                    patch.delenv(name)
                for name, value in wanted.items():
                    patch.setenv(name, value)
                importlib.reload(constants)
                patch.setattr(hf_api.api, "endpoint", constants.ENDPOINT)
                yield
            finally:
                patch.undo()
                importlib.reload(constants)

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        self.hub.log.clear()
        return forked(run_code, script, *arguments, env=self.hub.environment(self.home, **environment))

    def info(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Run `foredraft info`, and return its exit code, what it writes and what it says beside that."""
        out, err = io.StringIO(), io.StringIO()
        with self.reading(environment), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["info", *arguments])
        return code, out.getvalue(), err.getvalue()

    def resolve(self, *arguments: str, **environment: str) -> Path:
        with self.reading(environment):
            return resolve(*arguments).path

    def refused(self, *arguments: str, **environment: str) -> str:
        """Return the message of the CheckpointError that `resolve` raises."""
        with self.reading(environment), pytest.raises(CheckpointError) as caught:
            resolve(*arguments)
        message = str(caught.value)
        assert "\n" not in message
        return message
