"""Safetensors -> decoder: the only place that knows Hugging Face tensor names.

Contract: strict. Every tensor that the spec asks for is there in the right shape, and nothing else is, save a
few extras that are known to carry no information; a shard cut short by a broken download is named.

Memory: files are mapped while they are read, and a decoder keeps nothing of a map, so whoever replaces a
checkpoint later, in place even, changes no model that runs. Each weight goes from the map to its place on the
device, fused (q, k, v and gate, up) and converted on the way; where products are packed, they all pass
through one buffer. So the host holds the weights once, plus the embedding where the head is tied to it (the
head is packed, the embedding cannot be) and for a while that buffer; and nothing but single tensors where the
device is not the host. `weight_bytes` counts that before a file is opened.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foredraft.errors import CheckpointError
from foredraft.kernels.huge_pages import Arena
from foredraft.model.config import read_json
from foredraft.model.decoder import MLP, Attention, Decoder, Layer
from foredraft.model.layers import Product, RMSNorm
from foredraft.model.runner.native import pack_native
from foredraft.model.runner.packed import pack, packs
from foredraft.model.spec import ModelSpec

__all__ = ["Shapes", "Source", "build_decoder", "load_decoder", "weight_bytes", "weight_headers"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> the shape it must have
FLOATS = {"F64", "F32", "F16", "BF16"}
# buffers that old versions saved; the decoder computes them from the spec
IGNORED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class Source(Protocol):
    """Where a decoder's tensors come from, by name; they are made on `device`, in `dtype`."""

    device: torch.device
    dtype: torch.dtype

    def take(self, shapes: Shapes) -> Tensor:
        """The named tensors, joined along their first dimension, to keep."""
        ...

    def lend(self, shapes: Shapes) -> Tensor:
        """The same to read and forget: the next loan may overwrite it."""
        ...

    def end_loans(self) -> None:
        """Nobody reads what was lent any more."""
        ...


def load_decoder(
    folder: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    native: bool = False,
) -> Decoder:
    """The decoder of a checkpoint folder, on `device`, in `dtype` (None: the checkpoint's own). native: laid
    out for the kernels, which serve it (`runner.native`)."""
    spec = ModelSpec.from_folder(folder)
    chosen: torch.dtype = dtype or getattr(torch, spec.dtype)
    with ExitStack() as stack:
        tensors = _Tensors(folder, stack, torch.device(device), chosen)
        decoder = build_decoder(spec, tensors, native)
        tensors.refuse_rest(spec)
    return decoder


def weight_bytes(spec: ModelSpec, device: torch.device, dtype: torch.dtype, *, native: bool = False) -> int:
    """What the weights of such a model take on the device once `load_decoder` has loaded them."""
    sizes = _Sizes(device, dtype)
    build_decoder(spec, sizes, native)
    return sizes.values * dtype.itemsize


def weight_headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape, as the files have it, of every tensor of a checkpoint; no value is read."""
    with ExitStack() as stack:
        files = _Tensors(folder, stack, torch.device("cpu"), torch.float32).files
        slices = {name: file.get_slice(name) for name, file in files.items()}
        return {name: (found.get_dtype(), tuple(found.get_shape())) for name, found in slices.items()}


def build_decoder(spec: ModelSpec, tensors: Source, native: bool = False) -> Decoder:
    """The whole table of names."""
    copies = native or packs(tensors.device, tensors.dtype)
    hidden, inner, eps, offset = spec.hidden_size, spec.intermediate_size, spec.norm_eps, spec.norm_offset
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    arena = Arena()

    def norm(name: str, size: int = hidden) -> RMSNorm:
        weight = tensors.take({f"{name}.weight": (size,)})
        return RMSNorm(weight.float() + 1.0 if offset else weight, eps, offset)

    def linear(names: dict[str, int], columns: int, bias: bool = False) -> Product:
        weights: Shapes = {f"{name}.weight": (rows, columns) for name, rows in names.items()}
        biases: Shapes = {f"{name}.bias": (rows,) for name, rows in names.items()}
        weight = tensors.lend(weights) if copies else tensors.take(weights)
        offset = tensors.take(biases) if bias else None
        return pack_native(weight, offset, arena) if native and not weight.is_meta else pack(weight, offset)

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
            q_norm=norm(f"{at}.self_attn.q_norm", spec.head_dim) if spec.head_norms else None,
            k_norm=norm(f"{at}.self_attn.k_norm", spec.head_dim) if spec.head_norms else None,
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

    head = linear({EMBEDDING if spec.tied else HEAD: spec.vocab_size}, hidden)
    layers = tuple(layer(index) for index in range(spec.layers))
    tensors.end_loans()
    if spec.tied and not copies:
        embedding = head.dense()  # the very same tensor
    else:  # it passes through no buffer: coming last, it takes the place of the largest that did
        embedding = tensors.take({f"{EMBEDDING}.weight": (spec.vocab_size, hidden)})
    return Decoder(spec, embedding, layers, norm("model.norm"), head)


class _Sizes:
    """Counts what a decoder keeps, a copy of each loan included. Nothing is allocated."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.values = 0

    def take(self, shapes: Shapes) -> Tensor:
        self.values += sum(math.prod(shape) for shape in shapes.values())
        return torch.empty(_joined(shapes), device="meta", dtype=self.dtype)

    lend = take

    def end_loans(self) -> None:
        return None


class _Tensors:
    """The tensors of a folder by name, mapped."""

    def __init__(self, folder: Path, stack: ExitStack, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.files: dict[str, Any] = {}  # tensor name -> open file
        self.taken: set[str] = set()
        self.shards: dict[str, str] = {}  # tensor name -> file name
        self.buffer = torch.empty(0)  # what `lend` lends
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

    def take(self, shapes: Shapes) -> Tensor:
        return self._fill(shapes, torch.empty(_joined(shapes), device=self.device, dtype=self.dtype))

    def lend(self, shapes: Shapes) -> Tensor:
        """On the map itself, or in a buffer that the next loan overwrites."""
        if len(shapes) == 1:
            [(name, shape)] = shapes.items()
            if (view := self.view(name, shape)).dtype == self.dtype:
                return view
        values = sum(math.prod(shape) for shape in shapes.values())
        if self.buffer.numel() < values:
            self.buffer = torch.empty(0)  # gone before the next one comes
            self.buffer = torch.empty(values, device=self.device, dtype=self.dtype)
        columns = next(iter(shapes.values()))[1:]
        return self._fill(shapes, self.buffer[:values].view(-1, *columns))

    def end_loans(self) -> None:
        """Give the buffer's memory back."""
        self.buffer = torch.empty(0)

    def _fill(self, shapes: Shapes, joined: Tensor) -> Tensor:
        end = 0
        for name, shape in shapes.items():
            joined[end : end + shape[0]].copy_(self.view(name, shape))
            end += shape[0]
        return joined

    def view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor as the file has it; on a map of the file, so not to be kept."""
        if name not in self.files:
            raise CheckpointError(f"tensor {name} is missing from the checkpoint")
        found = self.files[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(found.get_shape())}, but config.json asks for {list(shape)}"
            )
        if found.get_dtype() not in FLOATS:
            raise CheckpointError(
                f"tensor {name} is stored as {found.get_dtype()}; quantised checkpoints are not supported, "
                "use one in float32, bfloat16 or float16"
            )
        self.taken.add(name)
        try:
            tensor: Tensor = self.files[name].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self.shards[name]}: tensor {name} cannot be read ({error})") from error
        return tensor

    def refuse_rest(self, spec: ModelSpec) -> None:
        for name in sorted(set(self.files) - self.taken):
            if IGNORED.fullmatch(name):
                continue
            if name == f"{HEAD}.weight" and spec.tied:
                vocabulary = (spec.vocab_size, spec.hidden_size)
                embedding = self.view(f"{EMBEDDING}.weight", vocabulary)
                if not torch.equal(self.view(name, vocabulary).to(embedding.dtype), embedding):
                    raise CheckpointError(
                        f"tensor {name} differs from {EMBEDDING}.weight, but config.json ties them "
                        "(tie_word_embeddings)"
                    )
                continue
            raise CheckpointError(
                f"tensor {name} in {self.shards[name]} is not part of a {spec.architecture}"
            )


def _joined(shapes: Shapes) -> tuple[int, ...]:
    """The shape of these tensors, joined along their first dimension."""
    several = list(shapes.values())
    return sum(shape[0] for shape in several), *several[0][1:]


def _open(path: Path, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    try:
        file: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is broken or cut short ({error}); download it again") from error
    for name in file.keys():  # noqa: SIM118 - safe_open offers no iteration
        yield name, file
