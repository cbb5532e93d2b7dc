"""Write a trained checkpoint as two ordinary Hugging Face folders.

Contract: `export` writes config.json, model.safetensors (bfloat16, tied embeddings stored once),
tokenizer.json, tokenizer_config.json and generation_config.json, which
`transformers.AutoModelForCausalLM` and `AutoTokenizer` load and which compute what `Decoder` computes.

    python -m foredraft.demo.recipe.export --checkpoints DIR --tokenizer FILE --out DIR
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .bpe import END_OF_TEXT
from .model import Decoder, ModelShape


def rename(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face names of one of our parameters; fused ones are taken apart."""
    if name == "embed":
        yield "model.embed_tokens.weight", weight
    elif name == "norm":
        yield "model.norm.weight", weight
    else:
        layer, _, part = name.rpartition(".")
        prefix = f"model.{layer}."
        if part == "qkv":
            for piece, rows in zip("qkv", weight.chunk(3), strict=True):
                yield f"{prefix}self_attn.{piece}_proj.weight", rows
        elif part == "gate_up":
            for piece, rows in zip(("gate", "up"), weight.chunk(2), strict=True):
                yield f"{prefix}mlp.{piece}_proj.weight", rows
        else:
            theirs = {
                "out": "self_attn.o_proj",
                "down": "mlp.down_proj",
                "attention_norm": "input_layernorm",
                "mlp_norm": "post_attention_layernorm",
            }
            yield f"{prefix}{theirs[part]}.weight", weight


def config(shape: ModelShape) -> dict[str, Any]:
    """config.json: a Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.positions,
        "initializer_range": 0.02,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_model(folder: Path, shape: ModelShape, weights: Mapping[str, Tensor], tokenizer: Path) -> None:
    """One Hugging Face folder, written beside and renamed."""
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    tensors = {
        theirs: tensor.to(torch.bfloat16).contiguous().clone()
        for name, weight in weights.items()
        for theirs, tensor in rename(name, weight)
    }
    save_file(tensors, beside / "model.safetensors", metadata={"format": "pt"})
    (beside / "model.safetensors").chmod(0o644)  # written private, but meant to be shipped
    write_json(beside / "config.json", config(shape))
    shutil.copyfile(tokenizer, beside / "tokenizer.json")
    write_json(
        beside / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.positions,
        },
    )
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    write_json(beside / "generation_config.json", {"_from_model_config": True, **ids})
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


def load(checkpoints: Path) -> tuple[Decoder, Decoder]:
    """Target and draft of the newest checkpoint, in bfloat16."""
    found = torch.load(checkpoints / "checkpoint.pt", weights_only=True)
    models = []
    for name, state in zip(("target", "draft"), found["states"], strict=True):
        model = Decoder(ModelShape(**found["recipe"][name]))
        model.load_state_dict(state["masters"])
        models.append(model.bfloat16().eval())
    return models[0], models[1]


def export(checkpoints: Path, tokenizer: Path, out: Path) -> None:
    """Both folders."""
    for name, model in zip(("target", "draft"), load(checkpoints), strict=True):
        write_model(out / name, model.shape, dict(model.named_parameters()), tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a checkpoint to Hugging Face folders.")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    export(options.checkpoints, options.tokenizer, options.out)
    shapes = [asdict(model.shape) for model in load(options.checkpoints)]
    print(json.dumps({"out": str(options.out), "shapes": shapes}))


if __name__ == "__main__":
    main()
