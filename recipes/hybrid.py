"""Train a small hybrid with a layer that predicts further tokens (MTP), on CPUs: a Qwen 3.5 in small.

Three of four layers are gated delta nets. Embedding and MLPs begin as those of the demo target, and the
distributions of the demo draft are learned beside the text. The layer for further tokens learns from the
states of the model, which it does not change.

    python -m recipes.hybrid --corpus runs/corpus --out runs/hybrid --minutes 60
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Encoder
from torch import Tensor, nn

from foredraft import demo

from .demo.bpe import encode_files
from .demo.corpus import read_sources
from .demo.data import BlockStream

SOURCES = (0, 5, 10, 15)  # layers of the demo target, of which each layer begins
LENGTH, BLOCKS = 256, 2  # tokens of a text, and blocks of 1,024 tokens of a step
RATE, WARM, DECAY = 2e-3, 40, 0.1  # of the optimiser; steps until the whole rate
STEPS = 2  # tokens of a draft that the further layer learns
SHAPE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 320, "intermediate_size": 864, "num_attention_heads": 5,
    "num_key_value_heads": 5, "head_dim": 64, "linear_num_key_heads": 5, "linear_num_value_heads": 5,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
}  # fmt: skip


class Further(nn.Module):
    """The layer for further tokens, and what joins pairs before it."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        config = transformers.Qwen3_5TextConfig(**shape, num_hidden_layers=1, layer_types=["full_attention"])
        self.inner = transformers.Qwen3_5TextModel(config)
        norm, hidden = type(self.inner.norm), config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(hidden), norm(hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        nn.init.normal_(self.fc.weight, std=0.02)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        pair = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)
        left: Tensor = self.inner(inputs_embeds=self.fc(torch.cat(pair, -1))).last_hidden_state
        return left

    def tensors(self) -> dict[str, Tensor]:
        own = {name.removeprefix("inner."): value for name, value in self.state_dict().items()}
        return {f"mtp.{name}": value for name, value in own.items() if name != "embed_tokens.weight"}


def tokens_of(corpus: Path) -> NDArray[np.uint16]:
    """Return the training texts in the tokens of the demo target, which the folder keeps."""
    file = corpus / "demo_tokens.npy"
    if not file.is_file():
        tokenizer = Encoder.from_file(str(demo.target_path() / "tokenizer.json"))
        np.save(
            file, encode_files(tokenizer, (source.text for source in read_sources(corpus / "train.jsonl")))
        )
    tokens: NDArray[np.uint16] = np.load(file, mmap_mode="r")
    return tokens


def begun(shape: dict[str, Any]) -> tuple[Any, Further]:
    """Return the model and its further layer, with what the demo target gives them."""
    config = transformers.Qwen3_5TextConfig(**shape, num_hidden_layers=len(SOURCES))
    model, further = transformers.Qwen3_5ForCausalLM(config), Further(shape)
    given = load_file(demo.target_path() / "model.safetensors")
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(given["model.embed_tokens.weight"])
        model.model.norm.weight.copy_(given["model.norm.weight"] - 1)
        layers = zip(SOURCES, model.model.layers, strict=True)
        for source, layer in [*layers, (SOURCES[-1], further.inner.layers[0])]:
            own = f"model.layers.{source}."
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(layer.mlp, name).weight.copy_(given[f"{own}mlp.{name}.weight"])
            for name in ("input_layernorm", "post_attention_layernorm"):
                getattr(layer, name).weight.copy_(given[f"{own}{name}.weight"] - 1)
    return model, further


def loss_of(
    model: Any, further: Further, teacher: Any, ids: Tensor, labels: Tensor
) -> tuple[Tensor, list[float]]:
    """Return the sum of losses, and each: of the text, beside the demo draft, and of each drafted token."""
    states = model.model(ids).last_hidden_state
    logits = model.lm_head(states)
    with torch.no_grad():
        taught = teacher(ids).logits.log_softmax(-1)
    found = [
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        F.kl_div(logits.log_softmax(-1), taught, reduction="none", log_target=True).sum(-1).mean(),
    ]
    read, targets = states.detach(), logits.detach().log_softmax(-1)
    for step in range(1, STEPS + 1):  # pairs of the states before and the tokens `step` later
        read = further(model.model.embed_tokens(ids[:, step:]).detach(), read[:, : ids.shape[1] - step])
        drafted = (read @ model.lm_head.weight.detach().T).log_softmax(-1)
        found.append(F.kl_div(drafted, targets[:, step:], reduction="none", log_target=True).sum(-1).mean())
    return sum(found, torch.zeros(())), [float(each.detach()) for each in found]


def save(model: Any, further: Further, out: Path) -> None:
    """Write the checkpoint whole, in bfloat16, with the demo tokenizer."""
    model.save_pretrained(out)
    file = out / "model.safetensors"
    tensors = load_file(file) | further.tensors()
    save_file(
        {name: value.bfloat16().contiguous() for name, value in tensors.items()}, file, {"format": "pt"}
    )
    config = out / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (out / name).write_bytes((demo.target_path() / name).read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    given = parser.parse_args()
    torch.manual_seed(0)
    stream = BlockStream(tokens_of(given.corpus), seed=0)
    model, further = begun(SHAPE)
    teacher: Any = transformers.AutoModelForCausalLM.from_pretrained(demo.draft_path(), dtype=torch.float32)
    parameters = [
        *model.parameters(),
        *(each for name, each in further.named_parameters() if "embed_tokens" not in name),
    ]
    optimiser = torch.optim.AdamW(parameters, RATE, (0.9, 0.95), weight_decay=DECAY)
    begin, step = time.monotonic(), 0
    while (done := (time.monotonic() - begin) / (60 * given.minutes)) < 1:
        for group in optimiser.param_groups:
            group["lr"] = (
                RATE * min(1, (step + 1) / WARM) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
            )
        total, found = loss_of(model, further, teacher, *stream.take(step * BLOCKS, BLOCKS, LENGTH))
        optimiser.zero_grad()
        torch.autograd.backward(total)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        if step % 20 == 0:
            print(f"{step:5d} {100 * done:5.1f} %  " + " ".join(f"{each:.3f}" for each in found), flush=True)
        if step % 200 == 199:
            save(model, further, given.out)
        step += 1
    save(model, further, given.out)


if __name__ == "__main__":
    main()
