"""Checkpoints: the folders of the target and the draft model, with their specs and tokenizers.

Contract: no weight is read here. A tokenizer that cannot be its model's is refused, and so is a GGUF file
whose vocabulary makes no tokenizer, unless another one is given.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from foredraft.decode.params import SamplingParams
from foredraft.drafters.vocabulary import same_tokenizer
from foredraft.errors import CheckpointError, ConfigError, RequestError
from foredraft.loading.options import DTYPES, LoadOptions
from foredraft.model.generation import FILE as GENERATION
from foredraft.model.generation import generation_defaults
from foredraft.model.gguf.folder import check_vocabulary
from foredraft.model.gguf.tensors import source_of
from foredraft.model.hub import resolve
from foredraft.model.quantisation import BITS
from foredraft.model.spec import CONFIG, ModelSpec
from foredraft.model.tokenizer import GIVE_TOKENIZER, Tokenizer

__all__ = ["Checkpoint", "Checkpoints", "default_params", "find_checkpoints"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One model before its weights are read.

    Attributes:
        folder: The local folder; of a GGUF file, the one that was made from it.
        spec: The model's shape, from config.json.
        tokenizer: None where the folder has none.
        dtype: The dtype to run it in.
        bits: Of the codes that its weights are quantised to; None leaves them as they are.
    """

    folder: Path
    spec: ModelSpec
    tokenizer: Tokenizer | None
    dtype: torch.dtype
    bits: int | None = None

    @property
    def coded_bits(self) -> int | None:
        """Bits of the codes that its weights have in memory; None where they are not codes."""
        stored = self.spec.quantisation
        return stored.bits if self.bits is None and stored is not None else self.bits

    @property
    def weights(self) -> str | None:
        """How its weights are quantised, as people say it: "int4", or "gptq, 4 bits in groups of 128"."""
        if self.bits is not None:
            return next(name for name, bits in BITS.items() if bits == self.bits)
        return None if self.spec.quantisation is None else self.spec.quantisation.described

    @property
    def source(self) -> Path:
        """The folder or the GGUF file that the user has."""
        return source_of(self.folder)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The models to load.

    Attributes:
        target: The target.
        draft: The draft model; None without one.
        other_tokenizer: The draft model has another tokenizer than the target.
    """

    target: Checkpoint
    draft: Checkpoint | None
    other_tokenizer: bool

    @property
    def all(self) -> tuple[Checkpoint, ...]:
        """The target and, where there is one, the draft model."""
        return (self.target,) if self.draft is None else (self.target, self.draft)


def find_checkpoints(options: LoadOptions, *, weights: bool = True) -> Checkpoints:
    """Resolve the folders, fetching hub ids, and read specs and tokenizers.

    Args:
        options: The options of `load`.
        weights: Fetch the weights of hub ids too.

    Raises:
        CheckpointError: A folder is not a checkpoint, or its tokenizer is another model's.
        ConfigError: A revision does not apply, the two vocabularies cannot be matched, or the weights are
            quantised already.
    """
    folders = [resolve(str(options.model), options.revision, options.report, weights=weights)]
    if options.draft is not None:
        folders.append(resolve(str(options.draft), options.draft_revision, options.report, weights=weights))
    dtype = None if options.dtype is None else DTYPES[str(options.dtype)]
    target = _read(folders[0], dtype, _tokenizer_folder(options.tokenizer))
    rest = [_read(folder, dtype, like=target.tokenizer) for folder in folders[1:]]
    if options.weights is not None:
        if target.spec.quantisation is not None:
            raise ConfigError(
                f"but {target.source} is quantised already ({target.spec.quantisation.described})",
                option="weights", value=options.weights, remedy="leave it out",
            )  # fmt: skip
        target = replace(target, bits=BITS[options.weights])
    draft = rest[0] if rest else None
    return Checkpoints(target, draft, draft is not None and not _same_vocabulary(target, draft))


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
        check_vocabulary(folder)
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
        if tokenizer_folder == folder != source_of(folder):
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
    source = source_of(folder)
    return folder / file if source == folder else source


def _same_vocabulary(target: Checkpoint, draft: Checkpoint) -> bool:
    """Return whether the draft model's ids mean what the target's do, padding and special tokens aside.

    Without both tokenizers, vocabularies of the same size count as the same.
    """
    if target.tokenizer is not None and draft.tokenizer is not None:
        return same_tokenizer(target.tokenizer, draft.tokenizer)
    sizes = target.spec.vocab_size, draft.spec.vocab_size
    if sizes[0] != sizes[1]:
        without = target if target.tokenizer is None else draft
        raise ConfigError(
            f"the draft model {draft.source} has a vocabulary of {sizes[1]} and the target {target.source}"
            f" one of {sizes[0]}",
            remedy=f"to match their tokens, give {without.source} as a folder with its tokenizer.json",
        )
    return True


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
