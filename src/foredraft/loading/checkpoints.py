"""Checkpoints: the folders of the target and of a draft model, with their specs and tokenizers.

Contract: no weight is read here. A tokenizer that cannot be its model's is refused, and so is a GGUF file
whose vocabulary makes no tokenizer, unless another one is given.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from foredraft.decode.params import SamplingParams
from foredraft.errors import CheckpointError, ConfigError, RequestError
from foredraft.loading.options import DTYPES, LoadOptions
from foredraft.model.generation import FILE as GENERATION
from foredraft.model.generation import generation_defaults
from foredraft.model.gguf.folder import check_vocabulary
from foredraft.model.gguf.tensors import source_of
from foredraft.model.hub import existing, resolve
from foredraft.model.lora.folder import with_loras
from foredraft.model.lora.record import base_of
from foredraft.model.quantisation import BITS
from foredraft.model.spec import CONFIG, ModelSpec
from foredraft.model.tokenizer import GIVE_TOKENIZER, Tokenizer
from foredraft.model.unread import Checkpoint

__all__ = ["default_params", "find_draft", "find_target", "read_draft"]

logger = logging.getLogger(__name__)


def find_target(options: LoadOptions, *, weights: bool = True) -> Checkpoint:
    """Resolve the target's folder and its LoRAs, fetching hub ids, and read its spec and its tokenizer.

    Args:
        options: The options of `load`.
        weights: Fetch the weights of a hub id too.

    Raises:
        CheckpointError: The folder is not a checkpoint, its tokenizer is another model's, or a LoRA cannot be
            used.
        ConfigError: A revision does not apply, or the weights are quantised already.
    """
    folder = resolve(str(options.model), options.revision, options.report, weights=weights)
    assert isinstance(options.lora, tuple)  # as its declaration keeps it
    folder = with_loras(folder, options.lora, options.report)
    target = _read(folder, _dtype(options), _tokenizer_folder(options.tokenizer))
    if options.weights is None:
        return target
    if target.spec.quantisation is not None:
        raise ConfigError(
            f"but {target.source} is quantised already ({target.spec.quantisation.described})",
            option="weights", value=options.weights, remedy="leave it out",
        )  # fmt: skip
    return replace(target, bits=BITS[options.weights])


def find_draft(options: LoadOptions, *, weights: bool = True) -> Path | None:
    """Return the folder or the GGUF file that option `draft` names, fetching a hub id; None without one.

    It may hold a whole model, or what another kind of drafter reads.

    Args:
        options: The options of `load`.
        weights: Fetch the weights of a hub id too.

    Raises:
        CheckpointError: A hub id has no model.
        ConfigError: A revision does not apply.
    """
    if options.draft is None:
        return None
    local = existing(options.draft)
    if local is not None and options.draft_revision is None:
        return local
    return resolve(str(options.draft), options.draft_revision, options.report, weights=weights, drafter=True)


def read_draft(options: LoadOptions, draft: Path, target: Checkpoint) -> Checkpoint:
    """Read the spec and the tokenizer of a draft model.

    Args:
        options: The options of `load`.
        draft: As `find_draft` returns it.
        target: The target.

    Raises:
        CheckpointError: It is not a checkpoint, or its tokenizer is another model's.
    """
    return _read(resolve(draft), _dtype(options), like=target.tokenizer)


def _dtype(options: LoadOptions) -> torch.dtype | None:
    return None if options.dtype is None else DTYPES[str(options.dtype)]


def _tokenizer_folder(given: str | Path | None) -> Path | None:
    """Return the folder of the tokenizer that is given in place of the target's own.

    Raises:
        ConfigError: It holds no tokenizer.
    """
    if given is None:
        return None
    if not (Path(given) / "tokenizer.json").is_file():
        raise ConfigError(
            "which has no tokenizer.json",
            option="tokenizer",
            value=str(given),
            remedy="give the folder of a checkpoint",
        )
    return Path(given)


def _read(
    folder: Path,
    dtype: torch.dtype | None,
    tokenizer_folder: Path | None = None,
    like: Tokenizer | None = None,
) -> Checkpoint:
    """Read a checkpoint; its tokenizer comes from another folder where one is given.

    Where it is equal to the tokenizer `like`, its tables are not read again.
    """
    spec = ModelSpec.from_folder(folder)
    if spec.ignored:
        ignored = ", ".join(spec.ignored)
        logger.info("%s: ignored, because transformers does not read it: %s", _named(folder, CONFIG), ignored)
    tokenizer = Tokenizer.from_folder(tokenizer_folder or folder, spec.vocab_size, like=like)
    if tokenizer is None:
        check_vocabulary(base_of(folder))
    else:
        _check_tokenizer(tokenizer_folder or folder, folder, spec, tokenizer)
    return Checkpoint(folder, spec, tokenizer, DTYPES[spec.dtype] if dtype is None else dtype)


def _check_tokenizer(tokenizer_folder: Path, folder: Path, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Raise CheckpointError where a tokenizer cannot be the model's.

    A model's vocabulary is often padded beyond its tokenizer's. The other way round, only added tokens may
    lie beyond the model's: the text models of Gemma 3 share a tokenizer with the multimodal ones. The tokens
    that begin and end the model's texts must exist.
    """
    found = ""
    if tokenizer.size > spec.vocab_size:
        found = f"ids up to {tokenizer.size - 1}, but the model's vocabulary is {spec.vocab_size}"
    bos = () if spec.bos_token_id is None else (spec.bos_token_id,)
    for name, ids in (("bos_token_id", bos), ("eos_token_id", spec.eos_token_ids)):
        for id in ids:
            if not found and not tokenizer.has(id):
                found = f"no token {id}, which is the model's {name}"
    if found:
        if tokenizer_folder == folder and source_of(folder) != base_of(folder):
            raise CheckpointError(
                f"{source_of(folder)} has a vocabulary that is not its model's: it has {found}",
                remedy=GIVE_TOKENIZER,
            )
        tokenizer_file, model = tokenizer_folder / "tokenizer.json", _named(folder, CONFIG)
        raise CheckpointError(
            f"{tokenizer_file} is not the tokenizer of {model}: it has {found}",
            remedy="put the model's own tokenizer there",
        )


def _named(folder: Path, file: str) -> Path:
    """Return the path of a checkpoint's file, or the GGUF file that the folder was made from."""
    base, source = base_of(folder), source_of(folder)
    return base / file if source == base else source


def default_params(checkpoint: Checkpoint) -> SamplingParams:
    """Return the sampling parameters that the checkpoint's generation_config.json asks for.

    A value that no request may have is left out with a warning, because the model can run without it.
    """
    params = SamplingParams()
    for option, value in generation_defaults(checkpoint.folder, checkpoint.spec.vocab_size).items():
        try:
            params = replace(params, **{option: value})
        except RequestError as error:
            logger.warning("%s: %s; it is left out", _named(checkpoint.folder, GENERATION), error)
    return params
