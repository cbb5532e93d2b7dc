"""Collect installed Python source, clean it, and split it into training and held-out modules.

The sources are CPython's standard library and the installed packages of `PACKAGES`, all under permissive
licences. Duplicates are dropped, and training files that are near-duplicates of a held-out module. The same
package versions give the same split.

    python -m recipes.demo.corpus --out DIR
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

NgramHashes = NDArray[np.uint64]  # sorted, without repetitions

# (distribution, SPDX licence of its own Python files, largest share of it in the corpus in megabytes). The
# limits keep a few large packages from dominating.
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
HELDOUT_MODULES = 96  # for 200 prompts, two or three per module
HELDOUT_CHARACTERS = (4_000, 40_000)  # of a held-out module: long enough for prompts, quick to evaluate
NGRAM = 5  # lexical tokens
NEAR_DUPLICATE = 0.5  # Jaccard similarity of n-grams above which two files count as one
SKETCH = 64  # smallest n-gram hashes that stand for a file when the whole corpus is deduplicated

SKIPPED_FOLDERS = frozenset(
    "_vendor vendor vendored _vendored third_party thirdparty _extern externals pydoc_data lib2to3 "
    "encodings site-packages __pycache__ _generated generated cjkencodings types".split()
)
SKIPPED_NAMES = re.compile(
    r"_pb2(_grpc)?\.py$|^bad|lextab|parsetab|_tables?\.py$|^_?version\.py$|unicode|entities"
)
GENERATED = re.compile(
    r"do not edit|auto-?generated|automatically generated|generated (by|from|with|automatically)"
    r"|this file (is|was) generated|@generated|vendored from|coding[:=]\s*(?!utf-?8)",
    re.IGNORECASE,
)
WORD = re.compile(r"\w+|[^\w\s]")
LITERAL = re.compile(r"0[xX][0-9a-fA-F]+|\\x[0-9a-fA-F]{2}|\d+")


@dataclass(frozen=True)
class Source:
    """A cleaned file and its origin."""

    package: str  # distribution name, or "cpython"
    path: str  # inside the package, with forward slashes
    text: str


def strip_licence(text: str) -> str:
    """Drop a leading comment block that is a licence notice, since thousands of files repeat the same one."""
    lines = text.split("\n")
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end].strip()):
        end += 1
    header = "\n".join(lines[:end]).lower()
    if "copyright" in header or "licen" in header:
        return "\n".join(lines[end:])
    return text


def clean(raw: bytes) -> str | None:
    """Return the cleaned text of a file, or None if it is not ordinary hand-written Python.

    Not ordinary: very short or very long, generated, not UTF-8, indented with tabs, invalid, more than 12 %
    numeric literals (tables) or more than 2 % non-ASCII characters.
    """
    if not 300 <= len(raw) <= 200_000:
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    if GENERATED.search(text[:3000]) or "\r" in text or "\f" in text or "\ufeff" in text:
        return None
    text = "\n".join(line.rstrip() for line in strip_licence(text).split("\n")).strip("\n") + "\n"
    lines = text.split("\n")
    if len(text) < 300 or len(lines) < 12 or max(map(len, lines)) > 400:
        return None
    literal_characters = sum(len(found) for found in LITERAL.findall(text))
    non_ascii = sum(not character.isascii() for character in text)
    if literal_characters > 0.12 * len(text) or non_ascii > 0.02 * len(text) or "\t" in text:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return text


def is_candidate(path: Path) -> bool:
    """Return whether a relative path names a Python file outside vendored and generated folders."""
    return (
        path.suffix == ".py"
        and not SKIPPED_FOLDERS.intersection(part.lower() for part in path.parts[:-1])
        and not SKIPPED_NAMES.search(path.name)
    )


def hash_key(source: Source) -> bytes:
    """Return a sort key that gives the same pseudo-random order on every machine."""
    return hashlib.blake2b(f"{source.package}:{source.path}".encode(), digest_size=8).digest()


def read_package(package: str, root: Path, paths: Iterable[Path], megabytes: float) -> list[Source]:
    """Return the clean files of one package in hash order, while they fit into so many 10^6 characters."""
    found = []
    for path in sorted(set(paths)):
        if is_candidate(path) and (root / path).is_file():
            text = clean((root / path).read_bytes())
            if text is not None:
                found.append(Source(package, path.as_posix(), text))
    taken, size = [], 0
    for source in sorted(found, key=hash_key):
        if size + len(source.text) <= megabytes * 1e6:
            taken.append(source)
            size += len(source.text)
    return taken


def collect() -> list[Source]:
    """Return the files of the standard library and of every package of `PACKAGES` that is installed."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(stdlib) for path in stdlib.rglob("*.py")]
    sources = read_package("cpython", stdlib, paths, STDLIB_MEGABYTES)
    for name, _, megabytes in PACKAGES:
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if not files:
            continue
        root = Path(str(files[0].locate())).parents[len(files[0].parts) - 1]
        sources += read_package(name, root, (Path(file) for file in files), megabytes)
    return sources


class NgramHasher:
    """Hash the n-grams of lexical tokens. Token ids are given out in order of first occurrence."""

    def __init__(self) -> None:
        self.token_ids: dict[str, int] = {}

    def hashes(self, text: str) -> NgramHashes:
        """Return the sorted unique 64-bit hashes of the text's n-grams."""
        tokens = WORD.findall(text)
        known = self.token_ids
        ids = np.fromiter((known.setdefault(token, len(known)) for token in tokens), np.uint64, len(tokens))
        if len(ids) < NGRAM:
            return np.unique(ids)
        count = len(ids) - NGRAM + 1
        mixed = np.zeros(count, np.uint64)
        for offset in range(NGRAM):  # a polynomial hash: uint64 products wrap modulo 2**64 on purpose
            mixed = (mixed + ids[offset : count + offset]) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        return np.unique(mixed)


def near_duplicates(candidates: Sequence[NgramHashes], references: Sequence[NgramHashes]) -> list[bool]:
    """Return, for each candidate, whether its Jaccard similarity to any reference exceeds `NEAR_DUPLICATE`.

    An inverted index from n-gram to references counts the shared n-grams of all pairs exactly.
    """
    if not references:
        return [False] * len(candidates)
    ngrams = np.concatenate(references)
    owners = np.repeat(np.arange(len(references)), [len(hashes) for hashes in references])
    order = np.argsort(ngrams, kind="stable")
    ngrams, owners = ngrams[order], owners[order]
    sizes = np.array([len(hashes) for hashes in references])
    verdicts = []
    for hashes in candidates:
        low, high = np.searchsorted(ngrams, hashes, "left"), np.searchsorted(ngrams, hashes, "right")
        spans = high - low
        starts = np.repeat(low - np.concatenate([[0], np.cumsum(spans)[:-1]]), spans)
        shared = np.bincount(owners[starts + np.arange(spans.sum())], minlength=len(references))
        verdicts.append(bool((shared > NEAR_DUPLICATE * (len(hashes) + sizes - shared)).any()))
    return verdicts


def deduplicate(sources: Sequence[Source], hashes: Sequence[NgramHashes]) -> list[int]:
    """Return the indices of the first files of each group of exact or near copies.

    Near copies share more than `NEAR_DUPLICATE` of the `SKETCH` smallest n-gram hashes with an earlier file.
    """
    owners: dict[int, list[int]] = {}
    seen: set[str] = set()
    kept = []
    for index, source in enumerate(sources):
        digest = hashlib.blake2b(" ".join(source.text.split()).encode()).hexdigest()
        sketch = [int(ngram) for ngram in hashes[index][:SKETCH]]
        shared = Counter(owner for ngram in sketch for owner in owners.get(ngram, ()))
        near_copy = bool(shared) and shared.most_common(1)[0][1] > NEAR_DUPLICATE * len(sketch)
        if digest in seen or near_copy:
            continue
        seen.add(digest)
        kept.append(index)
        for ngram in sketch:
            owners.setdefault(ngram, []).append(index)
    return kept


def split_corpus(sources: Sequence[Source]) -> tuple[list[Source], list[Source]]:
    """Return (training files, held-out modules) in hash order, without near-duplicates of each other."""
    ordered = sorted(sources, key=hash_key)
    hasher = NgramHasher()
    hashes = [hasher.hashes(source.text) for source in ordered]
    kept = deduplicate(ordered, hashes)
    shortest, longest = HELDOUT_CHARACTERS
    eligible = [i for i in kept if shortest <= len(ordered[i].text) <= longest and "def " in ordered[i].text]
    heldout = eligible[:HELDOUT_MODULES]  # a random sample, since the hash order is random
    chosen = set(heldout)
    rest = [i for i in kept if i not in chosen]
    verdicts = near_duplicates([hashes[i] for i in rest], [hashes[i] for i in heldout])
    training = [i for i, duplicate in zip(rest, verdicts, strict=True) if not duplicate]
    return [ordered[i] for i in training], [ordered[i] for i in heldout]


def package_rows(training: Sequence[Source], heldout: Sequence[Source]) -> Iterator[dict[str, object]]:
    """Yield one row per package for the table of the model card."""
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


def write_jsonl(path: Path, rows: Iterable[object]) -> None:
    """Write one JSON document per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_sources(path: Path) -> list[Source]:
    """Read the files that `main` wrote."""
    return [Source(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect, clean and split the training corpus.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    training, heldout = split_corpus(collect())
    write_jsonl(out / "train.jsonl", map(asdict, training))
    write_jsonl(out / "heldout.jsonl", map(asdict, heldout))
    write_jsonl(out / "packages.jsonl", package_rows(training, heldout))
    for name, sources in (("train", training), ("held out", heldout)):
        print(f"{name}: {len(sources)} files, {sum(len(s.text) for s in sources) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
