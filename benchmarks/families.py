"""Plain steps of several families' geometries beside a Llama's, at about one billion weights each.

A step reads every weight once, so memory bounds it. For each shape the script shows the share of the
machine's copy bandwidth that a step of one token reaches: the bytes of the weights that it reads, over its
time, over the bandwidth of a copy in the same turn (bytes read plus written). The shapes take turns within
one run, after a warm-up, and a ratio is the median of the ratios within the turns, with quartiles. A family
falls behind where its share is below 0.9 of the Llama's.

The weights are random. All shapes have the vocabulary of Llama 3, so that heads weigh the same. A shape
whose family is not supported is left out by name. Each figure stands beside an exactness flag: the logits
of a token alone are, bit for bit, those of the same token in a wider pass and in a batch.

    python -m benchmarks.families --repeats 30
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.random_model import RandomWeights
from benchmarks.timing import interleaved, spread
from benchmarks.workload import machine, write
from foredraft.bench.model_size import model_record
from foredraft.model.checkpoint import Shapes
from foredraft.model.families import FAMILIES
from foredraft.model.runner import Runner, unserved_because
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import build_decoder

CONTEXT, POSITIONS = 128, 512  # tokens in the KV cache before a step, and its room
COPIED = 2**30  # bytes of one copy: more than any cache holds
ASKED = 0.9  # of the Llama's share
REFERENCE = "llama"
VOCABULARY = 128_256
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _shape(
    family: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, **more: Any
) -> dict[str, Any]:
    return {
        **COMMON,
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


SHAPES: dict[str, dict[str, Any]] = {
    REFERENCE: _shape("llama", 16, 2048, 8192, 32, 8),  # Llama 3.2 1B
    # layers of Phi-4-mini, fewer of them: fused weights, three quarters of each head rotated
    "phi-4-mini": _shape("phi3", 8, 3072, 8192, 24, 8, partial_rotary_factor=0.75),
    "olmo-2": _shape("olmo2", 14, 2048, 8192, 16, 16),  # norms after sub-layers, as many key heads as heads
    # layers like those of Gemma 4 12B at half its width: two kinds of heads, keys that are values
    "gemma-4": _shape(
        "gemma4_text", 15, 2048, 8192, 8, 4, head_dim=256, global_head_dim=512, num_global_key_value_heads=1,
        attention_k_eq_v=True, sliding_window=1024, hidden_size_per_layer_input=0,
    ),
}  # fmt: skip
# sizes that a test can afford
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Passing(RandomWeights):
    """Random weights that are not kept beside the decoder's own."""

    def load(self, shapes: Shapes) -> Tensor:
        loaded = super().load(shapes)
        self.tensors.clear()
        return loaded

    load_temporary = load


def made(keys: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Runner:
    """Return a runner of a shape."""
    spec = ModelSpec.from_hf({**keys, "dtype": str(dtype).removeprefix("torch.")})
    native = unserved_because(spec, device, dtype) is None
    return Runner(build_decoder(spec, Passing(device, dtype), native))


def is_exact(runner: Runner) -> bool:
    """Return whether a token's logits are the same bits alone, in a wider pass, and in a batch."""
    vocabulary = runner.decoder.spec.vocab_size
    tokens = torch.randint(0, vocabulary, (2, CONTEXT + 4), generator=torch.Generator().manual_seed(2))
    rows = []
    for batch, width in ((1, 1), (1, 4), (2, 3)):
        cache = runner.new_cache(batch, POSITIONS)
        for row in range(batch):
            runner.prefill(cache, row, tokens[row, :CONTEXT].tolist(), 0)
        asked = tokens[:batch, CONTEXT : CONTEXT + width].to(runner.decoder.device)
        logits = runner.forward(cache, asked, [CONTEXT] * batch).logits
        assert logits is not None
        rows.append(logits[0, 0])
    return all(torch.equal(rows[0], other) for other in rows[1:])


def measured(
    shapes: dict[str, dict[str, Any]], device: torch.device, dtype: torch.dtype, repeats: int, copied: int
) -> dict[str, Any]:
    """Time a step of each shape in turns, and the copy beside them."""
    runners = {name: made(keys, device, dtype) for name, keys in shapes.items()}
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    works: dict[Any, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    for name, runner in runners.items():
        cache, token = runner.new_cache(1, POSITIONS), torch.zeros(1, 1, dtype=torch.int64, device=device)
        works[name] = lambda runner=runner, cache=cache, token=token: runner.forward(cache, token, [CONTEXT])  # type: ignore[misc]
    seconds = interleaved(works, device, repeats)
    sizes = {name: model_record("target", name, runner, None).step_bytes for name, runner in runners.items()}
    shares = {
        name: [
            sizes[name] / one / (2 * copied / other)
            for one, other in zip(seconds[name], seconds["copy"], strict=True)
        ]
        for name in runners
    }
    return {
        "copy_bytes_per_second": spread([2 * copied / taken for taken in seconds["copy"]]),
        "shapes": {
            name: {
                "bytes_per_step": sizes[name],
                "by_kernels": runner.by_kernels,
                "exact": is_exact(runner),
                "milliseconds": spread([1e3 * taken for taken in seconds[name]]),
                "share_of_copy": spread(shares[name]),
                "share_over_llama": spread(
                    [own / llama for own, llama in zip(shares[name], shares[REFERENCE], strict=True)]
                ),
            }
            for name, runner in runners.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--name", default="families")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    known = {family.model_type for family in FAMILIES.values()}
    asked = {name: SHAPES[name] for name in dict.fromkeys([REFERENCE, *options.shapes.split(",")])}
    shapes = {name: keys for name, keys in asked.items() if keys["model_type"] in known}
    copied = COPIED
    if options.small:
        shapes, copied = {name: {**keys, **SMALL} for name, keys in shapes.items()}, 2**20
    found = measured(
        shapes, torch.device(options.device), getattr(torch, options.dtype), options.repeats, copied
    )
    behind = [name for name, shape in found["shapes"].items() if shape["share_over_llama"]["median"] < ASKED]
    result = {
        "what": vars(options),
        "machine": machine(),
        "asked": ASKED,
        "behind": behind,
        "left_out": sorted(asked.keys() - shapes.keys()),
        **found,
    }
    write(f"{options.name}_{options.dtype}", result)


if __name__ == "__main__":
    main()
