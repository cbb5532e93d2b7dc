"""Planted defects of the kernels' passes: each makes values differ from PyTorch's, or bits depend on shape or threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch

from foredraft import kernels
from foredraft.model.runner import unserved_because
from foredraft.model.runner.native import check
from tests.support.compiling import Defects
from tests.unit import test_kernels_passes as passes

pytestmark = pytest.mark.skipif(kernels.library() is None, reason="no C compiler")


@cache
def logits_of_pytorch(family: str) -> Callable[[], None]:
    """Return the comparison of the logits of a family that shows the defect."""
    return partial(passes.test_logits_equal_those_of_pytorch, family)


def check_bits() -> None:
    """Hold the bits by the self-check of loading, which may find the defect, and by further shapes."""
    spec = passes.decoders("mistral", torch.float32)[0].spec
    check.unserved_because.cache_clear()
    try:
        assert unserved_because(spec, passes.CPU, torch.float32) is None
    finally:
        check.unserved_because.cache_clear()
    passes.test_every_shape_has_the_same_bits("mistral", torch.float32)
    passes.test_a_window_longer_than_a_block_of_keys_has_the_same_bits()


def check_threads() -> None:
    passes.test_any_number_of_threads_gives_the_same_bits("gemma2", torch.float32)


# name: (check, old source, new source)
DEFECTS: dict[str, tuple[Callable[[], None], str, str]] = {
    "embedding scale left out": (logits_of_pytorch("gemma2"), "m->embedding_scale != 0 && i < n", "0"),
    "a query sees the next position": (logits_of_pytorch("llama"), "I seen = key <= (int32_t)at;", "I seen = key <= (int32_t)at + 1;"),
    "window edge off by one": (logits_of_pytorch("gemma2"), "seen &= key > (int32_t)(at - window)", "seen &= key >= (int32_t)(at - window)"),
    "soft-cap of scores left out": (logits_of_pytorch("gemma2"), "if (m->softcap != 0)", "if (0)"),
    "last channels of a block not written": (logits_of_pytorch("llama"), "if (left <= 0) break;", "if (left <= LANES) break;"),
    "keys stored before their rotation": (
        logits_of_pytorch("llama"), "NAME(rotate)(to, h < heads_per_kv ? queries : keys, l->rotated);",
        "if (h < heads_per_kv) NAME(rotate)(to, queries, l->rotated);",
    ),
    "attended length of the first group": (passes.test_rows_at_other_positions_equal_those_of_pytorch, "at[r] = p->start[rows.group] + t;", "at[r] = p->start[0] + t;"),
    "key in the lane of its neighbour": (logits_of_pytorch("llama"), "words * BLOCK + slot % BLOCK;", "words * BLOCK + (slot ^ 1) % BLOCK;"),
    "block of keys written from its end": (logits_of_pytorch("llama"), "slot / BLOCK * words * BLOCK + slot % BLOCK", "slot / BLOCK * words * BLOCK + (31 - slot % BLOCK)"),
    "words of a key in reverse": (logits_of_pytorch("llama"), "to + w * BLOCK, key + w * WORD", "to + (words - 1 - w) * BLOCK, key + w * WORD"),
    "queries rotated as keys are": (logits_of_pytorch("ministral3"), "h < heads_per_kv ? queries : keys, l->rotated", "keys, l->rotated"),
    "the whole head rotated": (logits_of_pytorch("phi3"), "queries : keys, l->rotated);", "queries : keys, dim);"),
    "factor on what a sub-layer adds left out": (logits_of_pytorch("granite"), "if (linear->scale != 0) v = NAME(rounded)(v * splat(linear->scale));", ";"),
    "factor on logits left out": (logits_of_pytorch("granite"), "if (linear->scale != 0) v *= splat(linear->scale);", ";"),
    "norm of keys left out": (logits_of_pytorch("qwen3"), "h == heads_per_kv ? &l->k : &l->v", "h == heads_per_kv ? &l->q : &l->v"),
    "gate and up projection swapped": (
        logits_of_pytorch("llama"), "activation(NAME(read_some)(row + i, n), m->activation)",
        "activation(NAME(read_some)(row + inner + i, n), m->activation)",
    ),
    "mean not subtracted": (logits_of_pytorch("gpt2"), "NAME(read_some)(x + i, n - i) - mean) * inverse", "NAME(read_some)(x + i, n - i)) * inverse"),
    "bias of a norm left out": (logits_of_pytorch("gpt2"), "if (norm->bias)", "if (0)"),
    "lanes past the end in the variance": (passes.test_sizes_within_a_vector_equal_those_of_pytorch, "choose(LANE_INDEX < (int32_t)(n - i), ", "choose(LANE_INDEX < LANES, "),
    "parallel residual made sequential": (logits_of_pytorch("cohere2"), "m->parallel && run->attention[i] && mlp", "0"),
    "a sub-layer without a norm reads the states of another": (logits_of_pytorch("olmo2"), "else memmove(y, x, n * sizeof(E));", ""),
    "queries normed by head": (logits_of_pytorch("olmo2"), "if (norm->weight && !m->together)", "if (norm->weight)"),
    "keys normed with the queries' width": (logits_of_pytorch("olmo2"), "columns, width, l->kv_heads * l->dim", "columns, width, m->heads * l->dim"),
    "learned position off by one": (logits_of_pytorch("gpt2"), "const int64_t at = p->start[g] + t;", "const int64_t at = p->start[g] + t + 1;"),
    "learned positions of the first group": (passes.test_rows_at_other_positions_equal_those_of_pytorch, "const int64_t at = p->start[g] + t;", "const int64_t at = p->start[0] + t;"),
    "ReLU taken for GELU": (logits_of_pytorch("gpt_neox"), "if (kind == GELU)", "if (kind == GELU) return choose(x < splat(0.0f), splat(0.0f), x);\n    if (kind == GELU)"),
    "negative values pass ReLU": (logits_of_pytorch("opt"), "const V positive = choose(x < splat(0.0f), splat(0.0f), x);", "const V positive = x;"),
    "norms of outputs, not of sums": (logits_of_pytorch("opt-sums-normed"), "if (after->weight && !m->sums)", "if (after->weight)"),
    "the first head's norm for all": (logits_of_pytorch("stablelm-head-norms"), "if (norm->apart)", "if (0)"),
    "queries' norms taken for keys": (logits_of_pytorch("stablelm-head-norms"), "run->kv * heads_per_kv + h : run->kv, to", "run->kv * heads_per_kv + h : run->kv + 1, to"),
    "half of an MLP without a gate": (logits_of_pytorch("gpt2"), "width = m->gated ? 2 * inner : inner;", "width = 2 * inner;"),
    "norm of values left out": (logits_of_pytorch("gemma4-k-eq-v"), "if (norm->weight && !m->together)\n", "if (norm->weight && h <= heads_per_kv)\n"),
    "values are rotated keys": (logits_of_pytorch("gemma4-k-eq-v"), "const E *value = heads > heads_per_kv + 1 ? key + dim", "const E *value = heads > heads_per_kv + 1 ? key"),
    "values rotated": (logits_of_pytorch("gemma4-k-eq-v"), "if (h <= heads_per_kv) NAME(rotate)", "NAME(rotate)"),
    "scalar of a layer left out": (logits_of_pytorch("gemma4-k-eq-v"), "if (l->scalar != 1)", "if (0)"),
    "size of the windowed heads for all": (
        logits_of_pytorch("gemma4-k-eq-v"), "const int64_t dim = l->dim, words = dim / WORD, split",
        "const int64_t dim = m->layer->dim, words = dim / WORD, split",
    ),
    "inputs of the first layer": (logits_of_pytorch("gemma4-shared"), "(const E *)p->inputs + layer * n", "(const E *)p->inputs"),
    "tokens' own inputs left out": (logits_of_pytorch("gemma4-shared"), "NAME(read_some)(to + i, n - i) + NAME(read_some)(inputs + r * n + i, n - i)", "NAME(read_some)(to + i, n - i)"),
    "inputs not normed": (logits_of_pytorch("gemma4-shared"), "NAME(norm)(&m->input_norm, to, to, n);", ""),
    "gate of inputs left out": (logits_of_pytorch("gemma4-shared"), "gate * NAME(read_some)(inputs + r * stride + i, n - i)", "NAME(read_some)(inputs + r * stride + i, n - i)"),
    "narrow MLP in layers that share keys": (
        logits_of_pytorch("gemma4-double-wide"), "NAME(gate)(w, m, wide, narrow, columns, l->inner);",
        "NAME(gate)(w, m, wide, narrow, columns, m->layer->inner);",
    ),
    "blocks of keys start where the window does": (check_bits, "reach > 0 ? reach / KEYS * KEYS : 0", "reach > 0 ? reach : 0"),
    "a single row summed in reverse": (
        check_bits, "for (int64_t k = 0; k < words; k++) {\n        for (int i = 0; i < BLOCK",
        "for (int64_t j = 0, k; j < words; j++) {\n        k = R == 1 ? words - 1 - j : j;\n        for (int i = 0; i < BLOCK",
    ),
    "softmax maximum that depends on the neighbours": (check_bits, "top[r] = -FLT_MAX;", "top[r] = R;"),
    "a key head of the next piece stored as well": (
        check_threads, "if (!commits(w)) continue;\n        for (int64_t unit = piece.from; unit < piece.to; unit++) {\n            const KeyRun run = key_run(l, p, unit);",
        "if (!commits(w)) continue;\n        for (int64_t unit = piece.from; unit < piece.to; unit++) {\n            const KeyRun run = key_run(l, p, unit + 1 < units ? unit + 1 : unit);",
    ),
    "query rows computed again by the next thread": (check_threads, "query = index % query_rows(m, l, p, g);", "query = index % query_rows(m, l, p, g) / QUERIES * QUERIES;"),
}  # fmt: skip


PLANTED = Defects(edit for _, *edit in DEFECTS.values())


@pytest.mark.heavy
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, *edit = DEFECTS[name]
    PLANTED.assert_caught(check, edit, monkeypatch)
