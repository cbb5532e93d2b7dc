"""The command: checks of the options, the folder, and its card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from foredraft import demo
from foredraft.errors import ConfigError
from foredraft.files import replacing_folder
from foredraft.loading import options_for
from foredraft.loading.checkpoints import find_target
from foredraft.loading.threads import use_threads
from foredraft.model.quantisation import BITS
from foredraft.model.unread import Checkpoint
from foredraft.quantise.quality import Quality, measure_quality
from foredraft.quantise.writing import write_quantised
from foredraft.train.preparation import check_out
from foredraft.train.texts import Reader

__all__ = ["QuantiseResult", "quantise_checkpoint"]

LENGTH = 512  # tokens of a document of the card, at most
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class QuantiseResult:
    """What was written.

    Attributes:
        out: The folder.
        weights: "int4" or "int8".
        bytes: Of its tensors.
        quality: What it lost; None without data.
    """

    out: str
    weights: str
    bytes: int
    quality: Quality | None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)


def quantise_checkpoint(
    model: str | None, weights: str, out: Path, *, data: Sequence[Path] = (), **load: Any
) -> QuantiseResult:
    """Write a model with weights of few bits as a checkpoint of its own.

    Args:
        model: A folder, a GGUF file or a hub id; None is the demo target.
        weights: "int4" or "int8".
        out: The folder to write.
        data: Files of text to compare the models on, as `foredraft train` reads them; a "prompt" alone is a
            text, too, as in a file of prompts.
        **load: Of the arguments of `foredraft.load`: revision, dtype, threads.

    Raises:
        ConfigError: An option or a file cannot be used, the folder holds other files, or the model is
            quantised already.
        CheckpointError: The model cannot be loaded.
    """
    draft = {} if model is None else {"draft": None}
    given = options_for(model or demo.target_path(), device="cpu", weights=weights, **draft, **load)
    use_threads(given.threads)
    checkpoint = find_target(replace(given, weights=None))
    if checkpoint.weights is not None:
        raise ConfigError(
            f"which is quantised already ({checkpoint.weights})", option="model",
            value=str(checkpoint.source), remedy="give the model that it was made from",
        )  # fmt: skip
    check_out(out, lambda folder: False)
    documents = _documents(checkpoint, data)
    try:
        with replacing_folder(out) as new:
            size = write_quantised(checkpoint.folder, new, checkpoint.spec, BITS[weights], checkpoint.dtype)
            quality = None
            if documents:
                quality = measure_quality(checkpoint.folder, new, checkpoint.dtype, documents)
            (new / CARD).write_text(_card(model or "the demo target", weights, quality), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"which cannot be written ({error.strerror})", option="out", value=str(out),
            remedy="give a folder that can be",
        ) from error  # fmt: skip
    return QuantiseResult(str(out), weights, size, quality)


def _documents(checkpoint: Checkpoint, data: Sequence[Path]) -> list[Any]:
    if not data:
        return []
    if checkpoint.tokenizer is None:
        raise ConfigError(
            f"but {checkpoint.source} has no tokenizer", option="data", value=" ".join(map(str, data)),
            remedy="give the model's folder, with its tokenizer.json",
        )  # fmt: skip
    length = min(LENGTH, checkpoint.spec.max_positions)
    return Reader(checkpoint.tokenizer, None, length, prompts_count=True).corpus(data).documents


def _card(model: str, weights: str, quality: Quality | None) -> str:
    lines = [
        f"# {model}, {weights}", "",
        f"Linear layers, head and embedding in {BITS[weights]} bits, symmetric, in groups of 32 weights with"
        " scales by least squares; written by `foredraft quantise`.", "",
    ]  # fmt: skip
    if quality is not None:
        lines += [
            "| beside the original | |", "|---|---|",
            f"| tokens of text | {quality.tokens:,} |",
            f"| KL divergence, mean; exceeded by 1 in 1,000 | {quality.kl:.4f}; {quality.kl_999:.3f} nats |",
            f"| of it by the embedding alone, mean | {quality.embedding_kl:.4f} nats |",
            f"| same likeliest token | {quality.same_top:.1%} |",
            f"| perplexity ratio | {quality.perplexity_ratio:.4f} |", "",
        ]  # fmt: skip
    return "\n".join(lines)
