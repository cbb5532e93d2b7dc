"""Write a quantised checkpoint of compressed-tensors, and its card, which says what it lost.

The linear layers and the head are coded; a tied head becomes a tensor of its own. The embedding is stored as
the values that its codes stand for, because the format has no codes of embeddings. Every other tensor and
file is copied, with those that predict further tokens. Of a multimodal checkpoint the text model alone is
written. The card has, over held-out text, the KL divergence from the original, how often both find the same
token likeliest, the ratio of perplexities, and the embedding's share of the divergence.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft import demo
from foredraft.errors import ConfigError
from foredraft.files import errors_named, replacing_folder
from foredraft.loading import options_for
from foredraft.loading.checkpoints import find_target
from foredraft.loading.machine_limits import use_threads
from foredraft.model.checkpoint import named_tensors, weight_headers
from foredraft.model.decoder import Decoder
from foredraft.model.quantisation.codes import BITS, GROUP, CodeFormat, quantise
from foredraft.model.quantisation.gptq import pack
from foredraft.model.safetensors_file import INDEX, SINGLE, write_tensors
from foredraft.model.source import ModelSource
from foredraft.model.spec import CONFIG, EMBEDDING_COPIES, ModelSpec, with_dtype
from foredraft.model.tensor_names import EMBEDDING, HEAD, predicts_further
from foredraft.model.weights import read_tensors
from foredraft.model.wrappers import text_config_of
from foredraft.train.preparation import check_out
from foredraft.train.target import Batches, Document, FrozenTarget, Packed
from foredraft.train.texts import DocumentReader

MODULES = re.compile(
    r"model\.layers\.\d+\.((self_attn|mlp)\.\w+_proj|(linear_attn|mamba|conv)\.(in_proj\w*|out_proj))"
)
# the numbers of recurrent layers, which keep their dtype, and small layers that decide how fast states fade
EXACT = re.compile(r"model\.layers\.\d+\.(linear_attn|mamba|conv)\.(?!in_proj|out_proj)\S+")
RATES = re.compile(r"model\.layers\.\d+\.linear_attn\.in_proj_(?:a|b|ba)\Z")
MOST = 4 << 30  # bytes of a file


def write_quantised(source: ModelSource, out: Path, spec: ModelSpec, bits: int, dtype: torch.dtype) -> int:
    """Write a checkpoint with weights of so many bits into an empty folder, and return its bytes."""
    source.write_others(out)
    plain: list[str] = []  # linear layers that keep their weights
    classes: set[str] = set()  # of those that are coded
    files: dict[str, str] = {}  # tensor -> file
    filled: dict[str, Tensor] = {}
    total = held = 0
    for name, tensor in _tensors(source, spec, bits, dtype, plain, classes):
        if held and held + tensor.nbytes > MOST:
            files |= _save(out, filled, len(set(files.values())))
            filled, held = {}, 0
        filled[name] = tensor
        held, total = held + tensor.nbytes, total + tensor.nbytes
    if files:
        files |= _save(out, filled, len(set(files.values())))
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (out / INDEX).write_text(json.dumps(index), encoding="utf-8")
    else:
        write_tensors(out / SINGLE, filled, {"format": "pt"})
    weights = {
        "num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
        "dynamic": False,
    }  # fmt: skip
    group = {
        "targets": sorted(classes), "weights": weights, "input_activations": None, "output_activations": None,
    }  # fmt: skip
    scheme = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": plain, "kv_cache_scheme": None,
    }  # fmt: skip
    config = with_dtype(text_config_of(source.config), dtype) | {"tie_word_embeddings": False}
    config |= spec.naming.written_keys
    config |= {EMBEDDING_COPIES: spec.tied, "quantization_config": scheme}
    (out / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    return total


def _tensors(
    source: ModelSource, spec: ModelSpec, bits: int, dtype: torch.dtype, plain: list[str], classes: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the new checkpoint, by its stored name; gather `plain` layers and `classes`."""
    head, naming = f"{HEAD}.weight", spec.naming
    for name in weight_headers(source):
        if predicts_further(name, spec.layers, spec.further_layers):  # as it is, for drafters
            with ExitStack() as stack:
                tensor = named_tensors(source, stack)[name].whole().to(dtype, copy=True)
            plain += [name.removesuffix(".weight")] if tensor.dim() == 2 else []
            yield name, tensor
            continue
        if (name == head and spec.tied) or spec.leaves_unread(name):
            continue
        [tensor] = read_tensors(source, name.__eq__).values()
        tensor = tensor if EXACT.fullmatch(name) else tensor.to(dtype)
        module = name.removesuffix(".weight")
        linear = name == head or bool(name.endswith(".weight") and MODULES.fullmatch(module))
        if not linear and module != EMBEDDING:
            yield naming.stored_name(name), tensor
            continue
        coded = CodeFormat(bits).holds(tensor.shape[1]) and not RATES.fullmatch(module)
        codes = quantise(tensor, bits) if coded else None
        if module == EMBEDDING:
            yield naming.stored_name(name), tensor if codes is None else codes.expand(dtype)
            if not spec.tied:
                continue
            module = HEAD
        stored = naming.stored_module(module)
        if codes is None:
            plain.append(stored)
            name = f"{module}.weight"
            yield naming.stored_name(name), naming.stored_values(name, tensor).clone()
            continue
        classes.add(naming.layer_class(module))
        yield f"{stored}.weight_packed", pack(codes.codes, bits)
        yield f"{stored}.weight_scale", codes.scales.to(dtype)
        yield f"{stored}.weight_shape", torch.tensor(codes.shape)


def _save(out: Path, tensors: dict[str, Tensor], count: int) -> dict[str, str]:
    """Save tensors as one more file, and return in which file each of them is."""
    file = f"model-{count + 1:05}.safetensors"
    write_tensors(out / file, tensors, {"format": "pt"})
    return dict.fromkeys(tensors, file)


GROUP_TOKENS = 2048  # of one pass


@dataclass(frozen=True, slots=True)
class Quality:
    """What quantising changed."""

    tokens: int  # that were predicted
    kl: float  # mean KL divergence, in nats
    kl_999: float  # its 99.9 % quantile, in nats
    same_top: float  # share of the tokens at which both models' likeliest token is the same
    perplexity_ratio: float  # the quantised model's perplexity over the original's
    embedding_kl: float  # mean KL divergence where the embedding alone is quantised, in nats


@torch.no_grad()
def measure_quality(
    original: ModelSource, quantised: ModelSource, dtype: torch.dtype, documents: Sequence[Document]
) -> Quality:
    """Compare two checkpoints on documents."""
    device = torch.device("cpu")
    targets = [FrozenTarget(source, device, dtype) for source in (original, quantised)]
    # the original with the quantised embedding shares all other weights
    with_embedding, own = copy(targets[0]), targets[0].decoder
    parts = own.layers, own.norm, own.output, own.learned_positions, own.inputs
    with_embedding.decoder = Decoder(own.spec, targets[1].decoder.embedding, *parts)
    targets.append(with_embedding)
    batches = Batches(documents, GROUP_TOKENS, 0)
    divergences, of_embedding = list[Tensor](), list[Tensor]()
    same = total = 0
    gap = 0.0  # of the summed log-probabilities of the text
    for group in range(len(batches)):
        packed = Packed.of(batches.documents_of(group), device)
        p, q, half = (target.log_probs(target.states(packed, ()).last) for target in targets)
        for found, other in ((divergences, q), (of_embedding, half)):
            found.append((p.exp() * (p - other)).sum(-1))  # of log-probabilities [M, V]
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        said = packed.tokens[packed.predicting + 1][:, None]
        gap += float((p.gather(1, said) - q.gather(1, said)).double().sum())
        total += len(said)
    kl = torch.cat(divergences).double()
    return Quality(
        tokens=total,
        kl=float(kl.mean()),
        kl_999=float(kl.sort().values[math.ceil(0.999 * len(kl)) - 1]),
        same_top=same / total,
        perplexity_ratio=math.exp(gap / total),
        embedding_kl=float(torch.cat(of_embedding).double().mean()),
    )


LENGTH = 512  # tokens of a document of the card, at most
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class QuantiseResult:
    """What was written."""

    out: str  # the folder
    weights: str  # "int4" or "int8"
    bytes: int  # of its tensors
    quality: Quality | None  # what it lost; None without data

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return asdict(self)


def quantise_checkpoint(
    model: str | None, weights: str, out: Path, *, data: Sequence[Path] = (), **load: Any
) -> QuantiseResult:
    """Write a model with weights of few bits as a checkpoint of its own."""
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
    documents: list[Document] = []
    if data:
        if checkpoint.spec.recurrent_layers:
            problem = f"but what {checkpoint.source} loses is not measured, since its layers are recurrent"
            raise ConfigError(problem, option="data", remedy="leave it out")
        if checkpoint.tokenizer is None:
            raise ConfigError(
                f"but {checkpoint.source} has no tokenizer", option="data", value=" ".join(map(str, data)),
                remedy="give the model's folder, with its tokenizer.json",
            )  # fmt: skip
        length = min(LENGTH, checkpoint.spec.max_positions)
        reader = DocumentReader(checkpoint.tokenizer, None, length, prompts_count=True)
        documents = reader.corpus(data)
    with errors_named(out, "out", "give a folder that can be"), replacing_folder(out) as new:
        size = write_quantised(checkpoint.source, new, checkpoint.spec, BITS[weights], checkpoint.dtype)
        quality = None
        if documents:
            quality = measure_quality(checkpoint.source, ModelSource(new), checkpoint.dtype, documents)
        (new / CARD).write_text(_card(model or "the demo target", weights, quality), encoding="utf-8")
    return QuantiseResult(str(out), weights, size, quality)


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
