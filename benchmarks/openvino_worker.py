"""Forwards of OpenVINO on a checkpoint in few bits, timed on demand: the other end of `few_bits.OpenVINO`.

Runs in a Python of its own, which has optimum-intel and no torchvision:

    python -m benchmarks.openvino_worker FOLDER BITS CONTEXT

It writes "ready" when the model is loaded. Then, for each line with a number of tokens, it reads a context of
CONTEXT tokens anew, times a pass over so many tokens after it, and writes the seconds.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

GROUP = 32  # weights that share a scale, with 4 bits


def inputs(start: int, count: int) -> dict[str, Any]:
    return {
        "input_ids": np.zeros((1, count), np.int64),
        "attention_mask": np.ones((1, start + count), np.int64),
        "position_ids": np.arange(start, start + count)[None],
        "beam_idx": np.zeros(1, np.int32),
    }


def main() -> None:
    folder, bits, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    settings: dict[str, Any] = {"bits": bits, "sym": True}
    if bits == 4:
        settings |= {"group_size": GROUP, "ratio": 1.0, "all_layers": True}  # the head, too
    model = OVModelForCausalLM.from_pretrained(
        folder,
        export=True,
        quantization_config=OVWeightQuantizationConfig(**settings),
        ov_config={"INFERENCE_NUM_THREADS": "2", "PERFORMANCE_HINT": "LATENCY"},
    )
    model.compile()
    request = model.request
    print("ready", flush=True)
    for line in sys.stdin:
        request.reset_state()
        request.infer(inputs(0, context))
        started = time.perf_counter()
        request.infer(inputs(context, int(line)))
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
