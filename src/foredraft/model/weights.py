"""Safetensors -> decoder: the only place that knows Hugging Face tensor names.

Contract: strict. Every tensor that the spec asks for is there in the right shape, and nothing else is, save a
few extras that are known to carry no information; a shard cut short by a broken download is named. Tensors
are loaded, fused (q, k, v and gate, up), packed and freed one after another, so the peak stays near one copy
of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.model.config import read_json
from foredraft.model.decoder import MLP, Attention, Decoder, Layer
from foredraft.model.layers import Product, RMSNorm
from foredraft.model.runner.packed import pack
from foredraft.model.spec import ModelSpec

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}
# buffers that old versions saved; the decoder computes them from the spec
IGNORED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def load_decoder(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Decoder:
    """The decoder of a checkpoint folder, on `device`, in `dtype` (None: the checkpoint's own)."""
    spec = ModelSpec.from_folder(folder)
    chosen: torch.dtype = dtype or getattr(torch, spec.dtype)
    with ExitStack() as stack:
        tensors = _Tensors(folder, stack, torch.device(device), chosen)
        decoder = _build(spec, tensors)
        tensors.refuse_rest(spec, decoder.embedding)
    return decoder


def _build(spec: ModelSpec, tensors: _Tensors) -> Decoder:
    """The whole table of names."""
    hidden, inner, eps, offset = spec.hidden_size, spec.intermediate_size, spec.norm_eps, spec.norm_offset
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def norm(name: str) -> RMSNorm:
        weight = tensors.take(f"{name}.weight", (hidden,))
        return RMSNorm(weight.float() + 1.0 if offset else weight, eps, offset)

    def linear(names: dict[str, int], columns: int, bias: bool) -> Product:
        weight = [tensors.take(f"{name}.weight", (rows, columns)) for name, rows in names.items()]
        biases = [tensors.take(f"{name}.bias", (rows,)) for name, rows in names.items()] if bias else None
        return pack(_joined(weight), None if biases is None else _joined(biases))

    def layer(index: int) -> Layer:
        at = f"model.layers.{index}"
        qkv = {f"{at}.self_attn.q_proj": q_rows}
        qkv |= {f"{at}.self_attn.{name}_proj": kv_rows for name in "kv"}
        before_mlp = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
        attention = Attention(
            norm=norm(f"{at}.input_layernorm"),
            qkv=linear(qkv, hidden, spec.qkv_bias),
            output=linear({f"{at}.self_attn.o_proj": hidden}, q_rows, spec.output_bias),
            post_norm=norm(f"{at}.post_attention_layernorm") if spec.post_norms else None,
        )
        mlp = MLP(
            norm=norm(f"{at}.{before_mlp}"),
            gate_up=linear(
                {f"{at}.mlp.{name}_proj": inner for name in ("gate", "up")}, hidden, spec.mlp_bias
            ),
            down=linear({f"{at}.mlp.down_proj": hidden}, inner, spec.mlp_bias),
            post_norm=norm(f"{at}.post_feedforward_layernorm") if spec.post_norms else None,
        )
        return Layer(attention, mlp)

    embedding = tensors.take("model.embed_tokens.weight", (spec.vocab_size, hidden))
    layers = tuple(layer(index) for index in range(spec.layers))
    final = norm("model.norm")
    head = embedding if spec.tied else tensors.take("lm_head.weight", (spec.vocab_size, hidden))
    return Decoder(spec, embedding, layers, final, pack(head))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Tensors:
    """The tensors of a folder by name, each to be taken once."""

    def __init__(self, folder: Path, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.files: dict[str, Any] = {}  # tensor name -> open file
        self.taken: set[str] = set()
        self.shards: dict[str, str] = {}  # tensor name -> file name
        index = folder / INDEX
        if (folder / SINGLE).is_file():
            for name, file in _open(folder / SINGLE, stack):
                self.files[name], self.shards[name] = file, SINGLE
        elif index.is_file():
            self._open_shards(folder, index, stack)
        else:
            raise CheckpointError(
                f"{folder} has neither {SINGLE} nor {INDEX}; weights are read from safetensors only"
            )

    def _open_shards(self, folder: Path, index: Path, stack: ExitStack) -> None:
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
            raise CheckpointError(f"{index} has no weight_map of names to files; download it again")
        for shard in sorted(set(listed.values())):
            if Path(shard).name != shard:
                raise CheckpointError(f"{index} lists {shard!r}, which is not a file of its own folder")
            if not (folder / shard).is_file():
                raise CheckpointError(
                    f"{folder / shard} is missing, though {INDEX} lists it; download it again"
                )
            for name, file in _open(folder / shard, stack):
                if listed.get(name) != shard:
                    raise CheckpointError(f"{folder / shard} holds {name}, which {INDEX} does not list there")
                self.files[name], self.shards[name] = file, shard
        for name, shard in listed.items():
            if name not in self.files:
                raise CheckpointError(
                    f"{folder / shard} lacks {name}, which {INDEX} lists there; download it again"
                )

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.files:
            raise CheckpointError(f"tensor {name} is missing from the checkpoint")
        view = self.files[name].get_slice(name)
        if tuple(view.get_shape()) != shape:
            found = list(view.get_shape())
            raise CheckpointError(f"tensor {name} has shape {found}, but config.json asks for {list(shape)}")
        if view.get_dtype() not in FLOATS:
            raise CheckpointError(
                f"tensor {name} is stored as {view.get_dtype()}; quantised checkpoints are not supported, "
                "use one in float32, bfloat16 or float16"
            )
        self.taken.add(name)
        try:
            tensor: Tensor = self.files[name].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.shards[name]}: tensor {name} cannot be read ({error})") from error
        # a copy, never a view: on CPU `get_tensor` may map the file, which the user is free to replace
        return tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def refuse_rest(self, spec: ModelSpec, embedding: Tensor) -> None:
        for name in sorted(set(self.files) - self.taken):
            if IGNORED.fullmatch(name):
                continue
            if name == "lm_head.weight" and spec.tied:
                if not torch.equal(self.take(name, (spec.vocab_size, spec.hidden_size)), embedding):
                    raise CheckpointError(
                        "tensor lm_head.weight differs from model.embed_tokens.weight, but config.json ties "
                        "them (tie_word_embeddings)"
                    )
                continue
            raise CheckpointError(
                f"tensor {name} in {self.shards[name]} is not part of a {spec.architecture}"
            )


def _open(path: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    try:
        file: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is broken or cut short ({error}); download it again") from error
    for name in file.keys():  # noqa: SIM118 - safe_open offers no iteration
        yield name, file
