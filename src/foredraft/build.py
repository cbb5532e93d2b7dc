"""The composition root: names and options -> objects, by the tables of `kinds`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import torch

from foredraft import demo
from foredraft.decode.engine import Engine
from foredraft.decode.params import SamplingParams
from foredraft.drafters.vocabulary import VocabularyMap, same_tokenizer
from foredraft.errors import CheckpointError, ConfigError, RequestError
from foredraft.kinds import DRAFTERS, POLICIES, DrafterKind, Parts, default_drafter
from foredraft.llm import LLM
from foredraft.model.cache import KVCache
from foredraft.model.generation import generation_defaults
from foredraft.model.hub import resolve
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.tokenizer import Tokenizer
from foredraft.model.weights import load_decoder

__all__ = ["DRAFTERS", "POLICIES", "load"]

Progress = Callable[[str, int, int], None]
Needs = Callable[[Tokenizer | None, SamplingParams], tuple[int, int]]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Caches may take this share of what is free: the rest is for passes and other programs.
_SHARE = {"cpu": 0.5, "cuda": 0.8}
# Rows unless asked for: more seldom pay, and a new cache is written to, so its memory is taken at once.
_ROWS = {"cpu": 8, "cuda": 32}
# Long models give up positions down to this many so that so many rows fit,
_ENOUGH_ROWS, _ENOUGH_POSITIONS = 8, 4096
_FEWEST_POSITIONS = 512  # and down to this many so that anything does.


def load(
    path: str | Path | None = None,
    *,
    drafter: str | None = None,
    draft: str | Path | None = None,
    revision: str | None = None,
    draft_revision: str | None = None,
    policy: str = "fixed",
    max_draft: int | None = None,
    draft_sampling: Literal["sampled", "greedy"] = "sampled",
    dtype: str | None = None,
    device: str | None = None,
    max_batch: int | None = None,
    max_length: int | None = None,
    deterministic: bool = True,
    needs: Needs | None = None,
    progress: Progress | None = None,
) -> LLM:
    """Load a Hugging Face checkpoint, and whatever drafts for it.

    Args:
        path: A folder or a hub id; None is the demo pair, with its draft model.
        drafter: Who drafts unless a request says otherwise: "none", "lookup", "draft-model" or "retokenize".
            None means "none" without a draft, "draft-model" with one that has the target's tokenizer, and
            "retokenize" with any other.
        draft: The draft model's folder or hub id.
        revision: The branch, tag or commit of a hub id; "owner/name@revision" says the same.
        draft_revision: The same of the draft model.
        policy: How long a draft is: "fixed" or "heuristic".
        max_draft: Tokens drafted in a round at most, by default the policy's own number.
        draft_sampling: "sampled" drafts from q, "greedy" drafts its argmax (a one-hot q); both are exact.
        dtype: "bfloat16", "float16" or "float32", by default the checkpoint's.
        device: "cpu", "cuda", "cuda:1", ...; by default "cuda" where there is one.
        max_batch: Sequences decoded together, by default as many as fit, 8 at most on a CPU and 32 on a GPU.
        max_length: Positions of each, by default the model's. Where memory cannot hold 8 sequences of them,
            they are halved until it can, but not below 4096; where it cannot hold even one (or max_batch), on
            to 512.
        deterministic: Greedy output is bit-identical whatever drafts and whoever shares the batch.
        needs: Given the tokenizer and the model's default parameters, the sequences and the positions that
            will be used; no more are made room for than that, unless max_batch or max_length says so.
        progress: Called as (stage, done, total) while loading and prefilling.

    Raises:
        ConfigError: An option has a value that cannot be honoured.
        CheckpointError: The folder, or what the hub has, cannot be loaded or run exactly.
    """
    _check_name("drafter", drafter, (None, *DRAFTERS))
    _check_name("policy", policy, POLICIES)
    _check_name("draft_sampling", draft_sampling, ("sampled", "greedy"))
    _check_name("dtype", dtype, (None, *DTYPES))
    for option, value in (("max_draft", max_draft), ("max_batch", max_batch), ("max_length", max_length)):
        if value is not None and value < 1:
            instead = ", or drafter='none'" if option == "max_draft" else ""
            raise ConfigError(f"{option} is {value}; give 1 or more{instead}")
    for option, wanted, of in (("revision", revision, path), ("draft_revision", draft_revision, draft)):
        if wanted is not None and of is None:
            raise ConfigError(f"{option} is {wanted!r}, but no hub id is given that has it; leave it out")
    if path is None:
        path, draft = demo.target_path(), demo.draft_path() if draft is None else draft
    if drafter is not None and DRAFTERS[drafter].needs_draft and draft is None:
        raise ConfigError(
            f"drafter is {drafter!r}; give draft=, the folder or hub id of the small model, too"
        )
    if draft_sampling == "greedy" and draft is None:
        raise ConfigError("draft_sampling is 'greedy', but no model drafts; give draft=, or leave it out")
    where = _device(device)

    report = progress or _silent
    folders = [resolve(str(path), revision, report)]
    if draft is not None:
        folders.append(resolve(str(draft), draft_revision, report))
    tokenizers = tuple(_tokenizer(folder) for folder in folders)
    other = draft is not None and not _same_vocabulary(folders, tokenizers)
    drafter = drafter or default_drafter(draft is not None, other)
    kinds = _kinds(draft is not None, other)
    _check_kind(drafter, draft_sampling, kinds, folders)
    runners: list[Runner] = []
    for folder in folders:
        report("load", len(runners), len(folders))
        decoder = load_decoder(folder, where, _dtype(dtype, folder))
        runners.append(Runner(decoder, deterministic=deterministic and not runners))
    report("load", len(folders), len(folders))
    target = runners[0]
    longest = _longest_draft(policy, max_draft, target)
    tokenizer = tokenizers[0]
    default_params = _default_params(folders[0])
    needed = (None, None) if needs is None else needs(tokenizer, default_params)
    stretch = max(kind.stretch for kind in kinds.values())
    rows, positions = _capacity(runners, where, (max_batch, max_length), needed, stretch)

    vocabulary = None if other else _vocabulary(runners, tokenizers, where)
    parts = Parts(target, runners[1] if len(runners) == 2 else None, rows, positions, tokenizers, vocabulary)
    spec = target.decoder.spec
    engine = Engine(
        target,
        target.new_cache(rows, positions),
        POLICIES[policy].make(longest),
        {name: kind.make(parts) for name, kind in kinds.items() if kind.make is not None},
        vocabulary=spec.vocab_size,
        device=where,
        greedy_drafts=draft_sampling == "greedy",
    )
    return LLM(
        engine,
        spec,
        tokenizer,
        default_drafter=None if DRAFTERS[drafter].make is None else drafter,
        max_length=positions,
        default_params=default_params,
        lossless={name: kind.lossless for name, kind in DRAFTERS.items()},
        deterministic=deterministic,
        progress=progress,
    )


def _check_name(option: str, value: str | None, known: Iterable[str | None]) -> None:
    if value not in known:
        raise ConfigError(f"{option} is {value!r}; give one of {', '.join(filter(None, known))}")


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
    if device.type == "cpu" and device.index is not None:
        raise ConfigError(f"device is {name!r}, but there is one CPU; give 'cpu'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise ConfigError(f"device is {name!r}, but this PyTorch sees no CUDA device; give 'cpu'")
        if (device.index or 0) >= count:
            known = ", ".join(f"cuda:{index}" for index in range(count))
            raise ConfigError(f"device is {name!r}, but this PyTorch sees only {known}; give one of these")
    return device


def _dtype(name: str | None, folder: Path) -> torch.dtype:
    return DTYPES[ModelSpec.from_folder(folder).dtype if name is None else name]


def _default_params(folder: Path) -> SamplingParams:
    try:
        return SamplingParams(**generation_defaults(folder))
    except RequestError as error:
        raise CheckpointError(f"{folder}: generation_config.json asks for what cannot be: {error}") from error


def _tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, where it can be its model's.

    A model's vocabulary is often padded beyond its tokenizer's, never the other way round; and the tokens
    that the model begins and ends with have to be there.
    """
    tokenizer, spec = Tokenizer.from_folder(folder), ModelSpec.from_folder(folder)
    if tokenizer is None:
        return None
    found = ""
    if tokenizer.size > spec.vocab_size:
        found = f"ids up to {tokenizer.size - 1}, but the model's vocabulary is {spec.vocab_size}"
    bos = () if spec.bos_token_id is None else (spec.bos_token_id,)
    for name, ids in (("bos_token_id", bos), ("eos_token_id", spec.eos_token_ids)):
        for id in ids:
            if not found and not tokenizer.has(id):
                found = f"no token {id}, which is the model's {name}"
    if found:
        raise CheckpointError(
            f"{folder / 'tokenizer.json'} is not the tokenizer of {folder / 'config.json'}: it has {found};"
            " put the model's own tokenizer there"
        )
    return tokenizer


def _longest_draft(policy: str, max_draft: int | None, target: Runner) -> int:
    most = target.max_queries - 1
    if max_draft is None:
        return min(POLICIES[policy].max_draft, most)
    if max_draft > most:
        raise ConfigError(f"max_draft is {max_draft}; this model's verifying pass takes {most} at most")
    return max_draft


def _same_vocabulary(folders: list[Path], tokenizers: tuple[Tokenizer | None, ...]) -> bool:
    """Whether the draft's ids mean what the target's do, padding and special tokens aside."""
    if tokenizers[0] is not None and tokenizers[1] is not None:
        return same_tokenizer(tokenizers[0], tokenizers[1])
    sizes = [ModelSpec.from_folder(folder).vocab_size for folder in folders]
    if sizes[0] != sizes[1]:
        without = folders[0] if tokenizers[0] is None else folders[1]
        raise ConfigError(
            f"the draft model {folders[1]} has a vocabulary of {sizes[1]} and the target {folders[0]} one of"
            f" {sizes[0]}; to match their tokens, put the tokenizer.json that is missing into {without}"
        )
    return True  # sizes are all there is to go by


def _kinds(draft_given: bool, other_tokenizer: bool) -> dict[str, DrafterKind]:
    """Those there is all for that they need: whoever drafts by default, a request may name any of them."""
    return {
        name: kind
        for name, kind in DRAFTERS.items()
        if not kind.needs_draft or (draft_given and kind.retokenizes == other_tokenizer)
    }


def _check_kind(
    drafter: str, draft_sampling: str, kinds: dict[str, DrafterKind], folders: list[Path]
) -> None:
    """A draft model is for the drafters that its tokenizer fits."""
    fitting = " or ".join(repr(name) for name, kind in kinds.items() if kind.needs_draft)
    if drafter not in kinds:
        has = "the tokenizer of" if DRAFTERS[drafter].retokenizes else "another tokenizer than"
        raise ConfigError(
            f"drafter is {drafter!r}, but the draft model {folders[1]} has {has} the target {folders[0]};"
            f" give drafter={fitting}, or leave it out"
        )
    if draft_sampling == "greedy" and not any(kind.stepper for kind in kinds.values()):
        raise ConfigError(
            f"draft_sampling is 'greedy', but the draft model {folders[1]} has another tokenizer than the"
            f" target {folders[0]}, and is never sampled from; leave it out"
        )


def _vocabulary(
    runners: list[Runner], tokenizers: tuple[Tokenizer | None, ...], device: torch.device
) -> VocabularyMap | None:
    if len(runners) < 2 or tokenizers[0] is None or tokenizers[1] is None:
        return None
    target, draft = (runner.decoder.spec.vocab_size for runner in runners)
    return VocabularyMap.between(tokenizers[0], tokenizers[1], (target, draft), device)


def _capacity(
    runners: list[Runner],
    device: torch.device,
    given: tuple[int | None, int | None],
    needed: tuple[int | None, int | None],
    stretch: int = 1,
) -> tuple[int, int]:
    """Rows and positions of the caches, within free memory; both arguments are pairs of these. stretch: of
    the draft's positions."""
    (max_batch, max_length), (rows_needed, positions_needed) = given, needed
    most = runners[0].decoder.spec.max_positions
    if max_length is not None and max_length > most:
        raise ConfigError(f"max_length is {max_length}; the model was trained for {most} positions")
    budget = int(_free_memory(device) * _SHARE[device.type])

    def bytes_of(positions: int) -> int:
        lengths = (positions, stretch * positions)
        return sum(
            KVCache.bytes_per_row(runner.decoder.spec, length, runner.decoder.dtype)
            for runner, length in zip(runners, lengths, strict=False)
        )

    def shrunk(positions: int, rows: int, fewest: int) -> int:
        while positions > fewest and rows * bytes_of(positions) > budget:
            positions = max(positions // 2, fewest)
        return positions

    positions = max_length or min(most, positions_needed or most)
    if max_length is None:
        if max_batch is None and positions_needed is None:
            positions = shrunk(positions, _ENOUGH_ROWS, _ENOUGH_POSITIONS)
        positions = shrunk(positions, max_batch or 1, _FEWEST_POSITIONS)
    most_rows = _ROWS[device.type] if rows_needed is None else min(_ROWS[device.type], rows_needed)
    rows = max_batch or min(most_rows, budget // bytes_of(positions))
    taken = max(rows, 1) * bytes_of(positions)
    if rows < 1 or taken > budget:
        raise ConfigError(
            f"{max(rows, 1)} sequences of {positions} positions need {taken / 2**20:.0f} MiB of cache, but"
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
