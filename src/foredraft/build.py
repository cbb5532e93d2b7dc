"""The composition root: names and options -> objects. The only table of kinds.

A new drafter or policy is one file and one line here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from foredraft import demo
from foredraft.decode.draft import Drafter
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Fixed, Heuristic, Policy
from foredraft.drafters.draft_model import DraftModel
from foredraft.drafters.lookup import Lookup
from foredraft.errors import ConfigError
from foredraft.llm import LLM
from foredraft.model.cache import KVCache
from foredraft.model.hub import resolve
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer
from foredraft.model.weights import load_decoder

__all__ = ["DRAFTERS", "POLICIES", "load"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """A line of the drafters' table. lossless: the output has exactly the target's law."""

    summary: str
    lossless: bool = True


DRAFTERS: dict[str, Kind] = {
    "none": Kind("plain decoding"),
    "draft-model": Kind("a small model with the same tokenizer drafts"),
    "lookup": Kind("the text so far drafts: what followed the latest match"),
}

POLICIES: dict[str, Callable[[int], Policy]] = {
    "fixed": lambda max_draft: Fixed(max_draft),
    "heuristic": lambda max_draft: Heuristic(max_draft),
}

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# Caches may take this share of what is free: the rest is for passes, other programs, and the draft's.
_SHARE = {"cpu": 0.5, "cuda": 0.8}
_ROWS = 32  # at most, unless asked for: more sequences than that seldom pay


def load(
    path: str | Path | None = None,
    *,
    drafter: str | None = None,
    draft: str | Path | None = None,
    policy: str = "fixed",
    max_draft: int = 5,
    draft_sampling: Literal["sampled", "greedy"] = "sampled",
    dtype: str | None = None,
    device: str | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    deterministic: bool = True,
    progress: Progress | None = None,
) -> LLM:
    """Load a Hugging Face checkpoint, and whatever drafts for it.

    path: a folder or a hub id; None is the demo pair, with its draft model.
    drafter: "none", "draft-model" or "lookup", who drafts unless a request says otherwise; None means
    "draft-model" where a draft is given and "none" otherwise. draft: the draft model's folder or id.
    policy: "fixed" or "heuristic"; max_draft: tokens drafted in a round at most.
    draft_sampling: "sampled" drafts from q, "greedy" drafts its argmax (a one-hot q); both are exact.
    dtype: "bfloat16" or "float32", by default the checkpoint's. device: "cpu", "cuda", "cuda:1", ...
    max_batch: sequences decoded together; max_length: positions of each; from free memory unless given.
    deterministic: greedy output is bit-identical whatever drafts and whoever shares the batch.
    progress: called as (stage, done, total) while loading and prefilling.

    Raises ConfigError (an option), CheckpointError (a folder).
    """
    if drafter is not None and drafter not in DRAFTERS:
        raise ConfigError(f"drafter is {drafter!r}; give one of {', '.join(DRAFTERS)}")
    if policy not in POLICIES:
        raise ConfigError(f"policy is {policy!r}; give one of {', '.join(POLICIES)}")
    if draft_sampling not in ("sampled", "greedy"):
        raise ConfigError(f"draft_sampling is {draft_sampling!r}; give 'sampled' or 'greedy'")
    if max_draft < 1:
        raise ConfigError(f"max_draft is {max_draft}; give 1 or more, or drafter='none'")
    if path is None:
        path, draft = demo.target_path(), demo.draft_path() if draft is None else draft
    drafter = drafter or ("draft-model" if draft is not None else "none")
    if drafter == "draft-model" and draft is None:
        raise ConfigError("drafter 'draft-model' needs draft=, the folder or hub id of the small model")
    where = _device(device)

    report = progress or _silent
    folders = [resolve(str(path))]
    if draft is not None:  # whoever drafts by default: a request may name it
        folders.append(resolve(str(draft)))
    runners: list[Runner] = []
    for folder in folders:
        report("load", len(runners), len(folders))
        decoder = load_decoder(folder, where, _dtype(dtype, folder))
        runners.append(Runner(decoder, deterministic=deterministic and not runners))
    report("load", len(folders), len(folders))
    target = runners[0]
    if max_draft >= target.max_queries:
        raise ConfigError(
            f"max_draft is {max_draft}; this model's verifying pass takes {target.max_queries - 1} at most"
        )
    tokenizer = Tokenizer.from_folder(folders[0])
    if len(runners) == 2:
        _check_vocabulary(folders, runners, tokenizer)
    rows, positions = _capacity(runners, where, max_batch, max_length)

    kinds: list[Drafter] = [Lookup()]
    if len(runners) == 2:
        kinds.append(DraftModel(runners[1], rows, positions))
    spec = target.decoder.spec
    engine = Engine(
        target,
        target.new_cache(rows, positions),
        POLICIES[policy](max_draft),
        {kind.name: kind for kind in kinds},
        vocabulary=spec.vocab_size,
        device=where,
        greedy_drafts=draft_sampling == "greedy",
    )
    return LLM(
        engine,
        spec,
        tokenizer,
        default_drafter=None if drafter == "none" else drafter,
        max_length=positions,
        progress=progress,
    )


def _silent(stage: str, done: int, total: int) -> None:
    return None


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}; give 'cpu', 'cuda' or 'cuda:N'") from None
    if device.type not in _SHARE:
        raise ConfigError(f"device is {name!r}; give 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but this PyTorch sees no CUDA device; give 'cpu'")
    return device


def _dtype(name: str | None, folder: Path) -> torch.dtype:
    if name is None:
        name = ModelSpec.from_folder(folder).dtype
        if name not in DTYPES:
            raise ConfigError(f"{folder} is stored as {name}; give dtype='bfloat16' or 'float32'")
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; give one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _check_vocabulary(folders: list[Path], runners: list[Runner], tokenizer: Tokenizer | None) -> None:
    """A draft's ids must mean the same as the target's."""
    sizes = [runner.decoder.spec.vocab_size for runner in runners]
    other = Tokenizer.from_folder(folders[1])
    same = tokenizer is None or other is None or tokenizer.fingerprint == other.fingerprint
    if sizes[0] != sizes[1] or not same:
        raise ConfigError(
            f"the draft model {folders[1]} (vocabulary {sizes[1]}) has another tokenizer than the target"
            f" {folders[0]} (vocabulary {sizes[0]}); give a draft model of the same family"
        )


def _capacity(
    runners: list[Runner], device: torch.device, max_batch: int | None, max_length: int | None
) -> tuple[int, int]:
    """Rows and positions of the caches, within free memory."""
    most = runners[0].decoder.spec.max_positions
    for name, value in (("max_batch", max_batch), ("max_length", max_length)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; give 1 or more")
    if max_length is not None and max_length > most:
        raise ConfigError(f"max_length is {max_length}; the model was trained for {most} positions")
    budget = int(_free_memory(device) * _SHARE[device.type])

    def bytes_of(positions: int) -> int:
        return sum(KVCache.bytes_per_row(r.decoder.spec, positions, r.decoder.dtype) for r in runners)

    positions = max_length or most
    while max_length is None and positions > 512 and bytes_of(positions) * (max_batch or 1) > budget:
        positions //= 2
    rows = max_batch or min(_ROWS, budget // bytes_of(positions))
    needed = max(rows, 1) * bytes_of(positions)
    if rows < 1 or needed > budget:
        raise ConfigError(
            f"{max(rows, 1)} sequences of {positions} positions need {needed / 2**20:.0f} MiB of cache, but"
            f" {budget / 2**20:.0f} MiB may be used; lower max_batch or max_length"
        )
    return rows, positions


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
