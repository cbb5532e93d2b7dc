"""Models of a given shape with random weights, made on the device, whose acceptance can be arranged.

Every weight is a function of its name alone. Linear layers keep the scale of their inputs, except that
queries are three times as large: attention then concentrates on a few positions, and greedy text does not
loop. The draft model is the target's first layers. A factor scales the output of the *later* ones: at 0 both
models are equal; the larger it is, the less often both choose the same token.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foredraft import LLM
from foredraft.decode.engine import Engine
from foredraft.decode.policy import Fixed
from foredraft.drafters.draft_model import DraftModel
from foredraft.llm.loaded import Loaded
from foredraft.model.checkpoint import Shapes
from foredraft.model.decoder import Decoder
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import build_decoder

QUERY_SCALE = 3.0  # scale of queries, so that attention is not nearly uniform
OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")  # weights that add to the residual stream
COLUMNS = 256  # tokens of random text in one pass
TOLERANCE = 0.003  # of the agreement: about a quarter of its standard error over 2048 positions


@dataclass(frozen=True, slots=True)
class Shape:
    """The config keys of a model, and the number of its first layers that make up the draft model."""

    keys: dict[str, Any]
    draft_layers: int

    def config(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the config as in a config.json."""
        common = {
            "architectures": ["LlamaForCausalLM"],
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "dtype": str(dtype).removeprefix("torch."),
        }
        return common | self.keys


def _keys(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


SHAPES = {
    "llama-8b": Shape(_keys(32, 4096, 14336, 32, 8, 128256), draft_layers=2),  # the shape of Llama 3 8B
    "tiny": Shape(_keys(4, 64, 96, 4, 2, 512), draft_layers=1),
}


class RandomWeights:
    """A `TensorSource` of random weights, kept by name; what layers from `scaled_from` on add is scaled."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, scaled_from: int = 0, factor: float = 1.0
    ) -> None:
        self.device, self.dtype = device, dtype
        self.scaled_from, self.factor = scaled_from, factor
        self.tensors: dict[str, Tensor] = {}

    def load(self, shapes: Shapes) -> Tensor:
        rows = [shape[0] for shape in shapes.values()]
        columns = next(iter(shapes.values()))[1:]
        joined = torch.empty(sum(rows), *columns, device=self.device, dtype=self.dtype)
        for name, part in zip(shapes, joined.split(rows), strict=True):
            self._draw(name, part)
            self.tensors[name] = part
        return joined

    load_temporary = load  # a packed copy lies beside what is kept here

    def free_temporary(self) -> None:
        return None

    def _draw(self, name: str, weight: Tensor) -> None:
        if "norm" in name or weight.dim() == 1:  # a bias, or a factor of a layer
            weight.fill_(0.0 if name.endswith(".bias") else 1.0)
            return
        deviation = 1.0 if "embed" in name else 1.0 / math.sqrt(weight.shape[1])
        if name.endswith("q_proj.weight"):
            deviation *= QUERY_SCALE
        random = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        weight.normal_(0.0, deviation, generator=random)
        if name.endswith(OUTPUTS) and int(name.split(".")[2]) >= self.scaled_from:
            weight.mul_(self.factor)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, a draft model of its first layers, and the target's tensors by name."""

    target: Decoder
    draft: Decoder
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, shape: Shape, device: torch.device, dtype: torch.dtype, factor: float = 1.0) -> Pair:
        weights = RandomWeights(device, dtype, shape.draft_layers, factor)
        target = build_decoder(ModelSpec.from_hf(shape.config(dtype)), weights)
        few = shape.draft_layers
        spec = replace(target.spec, layers=few, windows=target.spec.windows[:few])
        draft = Decoder(spec, target.embedding, target.layers[:few], target.norm, target.output)
        return cls(target, draft, weights.tensors)


def find_factor(
    shape: Shape, device: torch.device, dtype: torch.dtype, alpha: float, steps: int = 14, columns: int = 2048
) -> tuple[float, list[tuple[float, float]]]:
    """Return the factor at which both models agree with probability `alpha`, and each (factor, agreement).

    A bisection of so many steps at most, over so many tokens (columns) of random text.
    """
    low, high = math.log(1e-3), math.log(8.0)
    tried: list[tuple[float, float]] = []
    for _ in range(steps):
        factor = math.exp((low + high) / 2)
        share = agreement(Pair.of(shape, device, dtype, factor), columns)
        tried.append((factor, share))
        if abs(share - alpha) < TOLERANCE:
            break
        low, high = (math.log(factor), high) if share > alpha else (low, math.log(factor))
    return min(tried, key=lambda pair: abs(pair[1] - alpha))[0], tried


@torch.inference_mode()
def agreement(pair: Pair, columns: int) -> float:
    """Return the share of positions of random text at which both models choose the same token."""
    runner = Runner(pair.target, deterministic=False)
    cache = runner.new_cache(1, columns)
    [tokens] = random_prompts(1, columns, pair.target.spec.vocab_size)
    text = torch.tensor([tokens], device=pair.target.device)
    depth = pair.draft.spec.layers
    same = torch.zeros((), device=text.device, dtype=torch.int64)
    for start in range(0, columns, COLUMNS):
        part = text[:, start : start + COLUMNS]
        forward = runner.forward(cache, part, [start], aux_layers=(depth,), invariant=False)
        assert forward.logits is not None
        drafted = runner.head(forward.aux_states[depth]).argmax(-1)
        same += (drafted == forward.logits.argmax(-1)).sum()
    return int(same) / columns


def random_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(1)
    made: list[list[int]] = torch.randint(0, vocabulary, (count, length), generator=random).tolist()
    return made


def make_llm(target: Runner, draft: Runner | None, positions: int, longest: int = 1) -> LLM:
    """Return an `LLM` made from runners: one sequence at a time, drafts of `longest` tokens."""
    spec = target.decoder.spec
    drafters = {} if draft is None else {"draft-model": DraftModel(draft, 1, positions)}
    engine = Engine(
        target,
        target.new_cache(1, positions),
        Fixed(longest),
        drafters,
        vocabulary=spec.vocab_size,
    )
    loaded = Loaded(
        engine=engine, runner=target, spec=spec, tokenizer=None, model="random", weights=None,
        max_length=positions, default_drafter=None,
    )  # fmt: skip
    return LLM(loaded)
