"""Collect Python source that every machine with this project has, clean it, and split it.

Contract: `collect` reads CPython's standard library (tests included) and the packages of `PACKAGES`,
all permissively licensed and installed with this project; drops vendored, generated and machine-made
files, licence headers and duplicates; `split` holds some modules out and drops from training every file
whose 5-gram Jaccard similarity to a held-out one exceeds 0.5. Same packages, same files, same split.

    python -m foredraft.demo.recipe.corpus --out DIR
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import json
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Grams = NDArray[np.uint64]

# (distribution, SPDX licence of its own Python files, most megabytes taken from it)
PACKAGES: tuple[tuple[str, str, float], ...] = (
    ("torch", "BSD-3-Clause", 6.0),
    ("transformers", "Apache-2.0", 5.0),
    ("ray", "Apache-2.0", 4.0),
    ("sympy", "BSD-3-Clause", 3.0),
    ("scipy", "BSD-3-Clause", 3.0),
    ("numpy", "BSD-3-Clause", 3.0),
    ("networkx", "BSD-3-Clause", 3.0),
    ("SQLAlchemy", "MIT", 3.0),
    ("matplotlib", "PSF-2.0", 3.0),
    ("mypy", "MIT", 2.0),
    ("huggingface_hub", "Apache-2.0", 1.5),
    ("pip", "MIT", 1.0),
    ("setuptools", "MIT", 1.0),
    ("fonttools", "MIT", 1.5),
    ("Pygments", "BSD-2-Clause", 1.0),
    ("mpmath", "BSD-3-Clause", 1.0),
    ("openai", "Apache-2.0", 0.5),
    ("tensorboard", "Apache-2.0", 1.0),
    *(
        (name, licence, 1.5)
        for name, licence in (
            ("pydantic", "MIT"), ("optuna", "MIT"), ("pytest", "MIT"), ("rich", "MIT"),
            ("pillow", "MIT-CMU"), ("cyclopts", "Apache-2.0"), ("aiohttp", "Apache-2.0"),
            ("alembic", "MIT"), ("protobuf", "BSD-3-Clause"), ("google-auth", "Apache-2.0"),
            ("fastapi", "MIT"), ("fsspec", "BSD-3-Clause"), ("websockets", "BSD-3-Clause"),
            ("Werkzeug", "BSD-3-Clause"), ("google-api-core", "Apache-2.0"),
            ("grpcio", "Apache-2.0"), ("filelock", "MIT"), ("anyio", "MIT"),
            ("opentelemetry-sdk", "Apache-2.0"), ("opentelemetry-api", "Apache-2.0"),
            ("Jinja2", "BSD-3-Clause"), ("packaging", "Apache-2.0"), ("pyparsing", "MIT"),
            ("absl-py", "Apache-2.0"), ("click", "BSD-3-Clause"), ("typer", "MIT"),
            ("urllib3", "MIT"), ("cryptography", "Apache-2.0"), ("virtualenv", "MIT"),
            ("distlib", "PSF-2.0"), ("Markdown", "BSD-3-Clause"), ("jsonschema", "MIT"),
            ("psutil", "BSD-3-Clause"), ("python-dateutil", "BSD-3-Clause"),
            ("httpx", "BSD-3-Clause"), ("uvicorn", "BSD-3-Clause"), ("httpcore", "BSD-3-Clause"),
            ("Mako", "MIT"), ("starlette", "BSD-3-Clause"), ("markdown-it-py", "MIT"),
            ("structlog", "Apache-2.0"), ("PyYAML", "MIT"), ("cmaes", "MIT"),
            ("requests", "Apache-2.0"), ("smart_open", "MIT"), ("prometheus_client", "Apache-2.0"),
            ("limits", "MIT"), ("attrs", "MIT"), ("charset-normalizer", "MIT"),
            ("wrapt", "BSD-2-Clause"), ("platformdirs", "MIT"), ("import-linter", "BSD-2-Clause"),
            ("pytest-xdist", "MIT"), ("sortedcontainers", "Apache-2.0"), ("contourpy", "BSD-3-Clause"),
            ("execnet", "MIT"), ("referencing", "MIT"), ("h11", "MIT"), ("yarl", "Apache-2.0"),
            ("pluggy", "MIT"), ("grimp", "BSD-2-Clause"), ("docstring_parser", "MIT"),
            ("tokenizers", "Apache-2.0"), ("multidict", "Apache-2.0"), ("safetensors", "Apache-2.0"),
            ("watchfiles", "MIT"), ("pytest-asyncio", "Apache-2.0"), ("python-dotenv", "BSD-3-Clause"),
            ("typing_extensions", "PSF-2.0"), ("six", "MIT"), ("cycler", "BSD-3-Clause"),
        )
    ),
)  # fmt: skip
STDLIB_MEGABYTES = 24.0
HELDOUT_MODULES = 96
NEAR_DUPLICATE = 0.5

SKIPPED_FOLDERS = frozenset(
    "_vendor vendor vendored _vendored third_party thirdparty _extern externals pydoc_data lib2to3 "
    "encodings site-packages __pycache__ _generated generated cjkencodings types".split()
)
SKIPPED_NAMES = re.compile(
    r"_pb2(_grpc)?\.py$|^bad|lextab|parsetab|_tables?\.py$|^_?version\.py$|unicode|entities"
)
MACHINE_MADE = re.compile(
    r"do not edit|auto-?generated|automatically generated|generated (by|from|with|automatically)"
    r"|this file (is|was) generated|@generated|vendored from|coding[:=]\s*(?!utf-?8)",
    re.IGNORECASE,
)
WORD = re.compile(r"\w+|[^\w\s]")
LITERAL = re.compile(r"0[xX][0-9a-fA-F]+|\\x[0-9a-fA-F]{2}|\d+")


@dataclass(frozen=True)
class Source:
    """One cleaned file and where it came from."""

    package: str
    path: str
    text: str


def strip_licence(text: str) -> str:
    """Drop a leading comment block that is a licence or copyright notice: thousands of equal copies."""
    lines = text.split("\n")
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end].strip()):
        end += 1
    header = "\n".join(lines[:end]).lower()
    if "copyright" in header or "licen" in header:
        return "\n".join(lines[end:])
    return text


def clean(raw: bytes) -> str | None:
    """The file's text if it is ordinary, hand-written, parsing Python; None otherwise."""
    if not 300 <= len(raw) <= 200_000:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    if MACHINE_MADE.search(text[:3000]) or "\r" in text or "\f" in text or "\ufeff" in text:
        return None
    text = "\n".join(line.rstrip() for line in strip_licence(text).split("\n")).strip("\n") + "\n"
    lines = text.split("\n")
    if len(text) < 300 or len(lines) < 12 or max(map(len, lines)) > 400:
        return None
    literal = sum(len(found) for found in LITERAL.findall(text))
    foreign = sum(not character.isascii() for character in text)
    if literal > 0.12 * len(text) or foreign > 0.02 * len(text) or "\t" in text:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return text


def wanted(path: Path) -> bool:
    """Whether a relative path is worth opening."""
    return (
        path.suffix == ".py"
        and not SKIPPED_FOLDERS.intersection(part.lower() for part in path.parts[:-1])
        and not SKIPPED_NAMES.search(path.name)
    )


def order_key(source: Source) -> bytes:
    """A fixed pseudo-random order that does not depend on the machine."""
    return hashlib.blake2b(f"{source.package}:{source.path}".encode(), digest_size=8).digest()


def read_folder(package: str, root: Path, paths: Iterable[Path], megabytes: float) -> list[Source]:
    """Clean files of one package, in hash order, up to a share."""
    found = []
    for path in sorted(set(paths)):
        if wanted(path) and (root / path).is_file():
            text = clean((root / path).read_bytes())
            if text is not None:
                found.append(Source(package, path.as_posix(), text))
    taken, size = [], 0
    for source in sorted(found, key=order_key):
        if size + len(source.text) <= megabytes * 1e6:
            taken.append(source)
            size += len(source.text)
    return taken


def collect() -> list[Source]:
    """The standard library and every listed package that is installed."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(stdlib) for path in stdlib.rglob("*.py")]
    sources = read_folder("cpython", stdlib, paths, STDLIB_MEGABYTES)
    for name, _, megabytes in PACKAGES:
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if not files:
            continue
        root = Path(str(files[0].locate())).parents[len(files[0].parts) - 1]
        sources += read_folder(name, root, (Path(file) for file in files), megabytes)
    return sources


class Grammar:
    """5-grams of lexical tokens as sorted unique 64-bit numbers; token ids follow first sight."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def grams(self, text: str) -> Grams:
        tokens = WORD.findall(text)
        ids = np.fromiter((self.ids.setdefault(t, len(self.ids)) for t in tokens), np.uint64, len(tokens))
        if len(ids) < 5:
            return np.unique(ids)
        mixed = np.zeros(len(ids) - 4, np.uint64)
        for offset in range(5):  # wraps modulo 2**64, which is what a polynomial hash wants
            mixed = (mixed + ids[offset : len(ids) - 4 + offset]) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        return np.unique(mixed)


def jaccard(first: Grams, second: Grams) -> float:
    """Shared 5-grams over all 5-grams."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / max(1, len(first) + len(second) - shared)


def near_duplicates(candidates: Sequence[Grams], references: Sequence[Grams]) -> list[bool]:
    """For each candidate, whether it is too similar to any reference (exact, by an inverted index)."""
    if not references:
        return [False] * len(candidates)
    keys = np.concatenate(references)
    owners = np.repeat(np.arange(len(references)), [len(grams) for grams in references])
    order = np.argsort(keys, kind="stable")
    keys, owners = keys[order], owners[order]
    sizes = np.array([len(grams) for grams in references])
    verdicts = []
    for grams in candidates:
        low, high = np.searchsorted(keys, grams, "left"), np.searchsorted(keys, grams, "right")
        spans = high - low
        starts = np.repeat(low - np.concatenate([[0], np.cumsum(spans)[:-1]]), spans)
        shared = np.bincount(owners[starts + np.arange(spans.sum())], minlength=len(references))
        verdicts.append(bool((shared > NEAR_DUPLICATE * (len(grams) + sizes - shared)).any()))
    return verdicts


def deduplicate(sources: Sequence[Source], grams: Sequence[Grams]) -> list[int]:
    """Indices to keep: exact copies and, by a sketch of the 64 smallest 5-grams, near copies go."""
    owners: dict[int, list[int]] = {}
    seen: set[str] = set()
    kept = []
    for index, source in enumerate(sources):
        normal = hashlib.blake2b(" ".join(source.text.split()).encode()).hexdigest()
        sketch = [int(gram) for gram in grams[index][:64]]
        votes = Counter(owner for gram in sketch for owner in owners.get(gram, ()))
        alike = bool(votes) and votes.most_common(1)[0][1] > NEAR_DUPLICATE * len(sketch)
        if normal in seen or alike:
            continue
        seen.add(normal)
        kept.append(index)
        for gram in sketch:
            owners.setdefault(gram, []).append(index)
    return kept


def split(sources: Sequence[Source]) -> tuple[list[Source], list[Source]]:
    """(training, held out), both in hash order and free of near-duplicates of each other."""
    ordered = sorted(sources, key=order_key)
    grammar = Grammar()
    grams = [grammar.grams(source.text) for source in ordered]
    kept = deduplicate(ordered, grams)
    # The hash order is already random: the first eligible modules are a fair draw.
    eligible = [i for i in kept if 4_000 <= len(ordered[i].text) <= 40_000 and "def " in ordered[i].text]
    heldout = eligible[:HELDOUT_MODULES]
    chosen = set(heldout)
    rest = [i for i in kept if i not in chosen]
    verdicts = near_duplicates([grams[i] for i in rest], [grams[i] for i in heldout])
    training = [i for i, alike in zip(rest, verdicts, strict=True) if not alike]
    return [ordered[i] for i in training], [ordered[i] for i in heldout]


def describe(training: Sequence[Source], heldout: Sequence[Source]) -> Iterator[dict[str, object]]:
    """One row per package for the model card."""
    licences = {"cpython": "PSF-2.0"} | {name: licence for name, licence, _ in PACKAGES}
    for package in sorted({source.package for source in [*training, *heldout]}, key=str.lower):
        stdlib = package == "cpython"
        yield {
            "package": package,
            "version": platform.python_version() if stdlib else importlib.metadata.version(package),
            "licence": licences[package],
            "training_files": sum(s.package == package for s in training),
            "training_bytes": sum(len(s.text.encode()) for s in training if s.package == package),
            "heldout_files": sum(s.package == package for s in heldout),
        }


def write_lines(path: Path, rows: Iterable[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_sources(path: Path) -> list[Source]:
    return [Source(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect, clean and split the training corpus.")
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    training, heldout = split(collect())
    write_lines(out / "train.jsonl", map(asdict, training))
    write_lines(out / "heldout.jsonl", map(asdict, heldout))
    write_lines(out / "packages.jsonl", describe(training, heldout))
    for name, sources in (("train", training), ("held out", heldout)):
        print(f"{name}: {len(sources)} files, {sum(len(s.text) for s in sources) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
