"""Training: the throughput of an adapter beside bare matrix products, and α after equal steps of each loss.

Throughput: one step's work on a group of documents (the frozen target's forward, the adapter's forward and
backward pass, the optimiser) takes turns with the matrix products that it consists of alone, at the same
shapes and in the same dtype, by the same library; for the demo target, and at a real model's shape. Losses:
the demo target's adapter, from the same start, on the same groups.

    python -m benchmarks.training throughput
    python -m benchmarks.training losses --data FILE --validation FILE --steps 60
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.shape import SHAPES, random_checkpoint
from benchmarks.timing import interleaved, spread
from benchmarks.workload import machine, write
from foredraft import demo
from foredraft.drafters.adapter import adapter_spec
from foredraft.model.weights import layer_tensors
from foredraft.train.adapter import train_adapter
from foredraft.train.losses import FUNCTIONS, overlap
from foredraft.train.packed_documents import Document, Packed
from foredraft.train.students import AdapterStudent
from foredraft.train.target import FrozenTarget
from foredraft.train.training_options import AdapterOptions

DEPTH, LENGTH = 1, 512  # layers below the adapter; tokens of a document
GROUP, LARGE = 4096, 2048  # tokens of a group, of the demo and of a real model's shape


def products(spec: Any, layers: int, columns: int, *, head: bool) -> list[tuple[int, int, int]]:
    """Return (columns, inputs, outputs) of every product of a forward."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention = spec.heads * spec.head_dim
    qkv = attention + 2 * spec.kv_heads * spec.head_dim
    each = [(hidden, qkv), (attention, hidden), (hidden, 2 * inner), (inner, hidden)]
    found = [(columns, *shape) for _ in range(layers) for shape in each]
    return [*found, (columns, hidden, spec.vocab_size)] if head else found


def bare(spec: Any, columns: int, predicted: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return the products of one group: the target forward; the adapter forward, and twice as many backward.

    The head of the adapter is frozen, so its backward pass is one product.
    """
    target = [
        *products(spec, spec.layers, columns, head=False),
        (predicted, spec.hidden_size, spec.vocab_size),
    ]
    layer = products(adapter_spec(spec), 1, columns, head=False)
    head = (predicted, spec.hidden_size, spec.vocab_size)
    forward = [*target, *layer, head]
    back = [shape for n, k, m in layer for shape in ((n, m, k), (m, n, k))]  # of inputs and of weights
    back.append((predicted, spec.vocab_size, spec.hidden_size))
    shapes = [*forward, *back]
    x = {shape: torch.randn(shape[0], shape[1]).to(dtype) for shape in set(shapes)}
    w = {shape: torch.randn(shape[2], shape[1]).to(dtype) for shape in set(shapes)}

    @torch.no_grad()
    def run() -> None:
        for shape in shapes:
            torch.nn.functional.linear(x[shape], w[shape])

    return run


def throughput(folder: Path, repeats: int, group: int = GROUP) -> dict[str, Any]:
    """Time a step's work on a group of random tokens beside its products."""
    target = FrozenTarget(folder, torch.device("cpu"), torch.bfloat16)
    spec = target.spec
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(spec.vocab_size, (group // LENGTH, LENGTH), generator=random).tolist()
    packed = Packed.of([Document(tuple(row), (True,) * LENGTH) for row in ids], torch.device("cpu"))
    start = layer_tensors(folder, spec.layers - 1)
    student = AdapterStudent(spec, target.head_weight, start, DEPTH, mlp=True)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5)

    def step() -> None:
        states = target.states(packed, student.taps)

        def compare(logits: Tensor, rows: slice) -> Tensor:
            log_p, log_q = target.log_probs(states.last[rows]), logits.float().log_softmax(-1)
            return torch.stack([FUNCTIONS["kl"](log_p, log_q).sum(), overlap(log_p, log_q.detach()).sum()])

        with torch.autocast("cpu", torch.bfloat16):
            sums = student(packed, states.tapped, compare)
        (sums[0] / len(packed.predicting)).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    columns, predicted = len(packed.tokens), len(packed.predicting)
    works = {"step": step, "products": bare(spec, columns, predicted, torch.bfloat16)}
    seconds = interleaved(works, torch.device("cpu"), repeats)
    ratios = [b / a for a, b in zip(seconds["step"], seconds["products"], strict=True)]
    return {
        "tokens": columns,
        "tokens_per_second": spread([columns / s for s in seconds["step"]]),
        "products_over_step": spread(ratios),
    }


def losses(data: Path, validation: Path, steps: int) -> dict[str, Any]:
    """Train an adapter with each loss, and return how it validates."""
    found: dict[str, Any] = {}
    for name in [*FUNCTIONS, "ce=0.1,tv=0.9"]:
        with tempfile.TemporaryDirectory() as folder:
            options = AdapterOptions(
                data=(data,), validation=(validation,), length=LENGTH, steps=steps, step_tokens=2 * GROUP,
                warm_up=10, learning_rate=2e-3, loss=name, validate_every=steps, patience=0, depth=DEPTH,
                work=Path(folder) / "work", out=Path(folder) / "adapter",
            )  # fmt: skip
            train_adapter(options)
            entries = [json.loads(line) for line in (Path(folder) / "work" / "metrics.jsonl").open()]
        found[name] = {
            key: entries[-1][key] for key in ("alpha", "tau", "agreement", "predicted", "alpha_by_position")
        }
        print(name, found[name], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Training throughput, and the losses compared.")
    parser.add_argument("what", choices=("throughput", "losses"))
    parser.add_argument("--data", type=Path, help="file of documents, for the losses")
    parser.add_argument("--validation", type=Path, help="file of other documents")
    parser.add_argument("--steps", type=int, default=60, help="steps of each loss")
    parser.add_argument("--repeats", type=int, default=15, help="turns")
    given = parser.parse_args()
    if given.what == "throughput":
        figures = {"demo": throughput(demo.target_path(), given.repeats)}
        for name, keys in SHAPES.items():
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = random_checkpoint(Path(folder), keys)
                figures[name] = throughput(checkpoint, max(3, given.repeats // 3), LARGE)
    else:
        figures = losses(given.data, given.validation, given.steps)
    write(f"training_{given.what}", {"machine": machine(), given.what: figures})


if __name__ == "__main__":
    main()
