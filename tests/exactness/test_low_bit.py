"""Few bits: a quantised target, and one that drafts with its own copy, say what plain decoding says, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft import LLM, ConfigError, SamplingParams
from foredraft.decode.policy import Fixed
from foredraft.drafters.layer_skip import LayerSkip, LowBit, low_bit_copy
from foredraft.drafters.plan_files import Skips
from foredraft.kernels.compilation import library
from foredraft.model.decoder import Decoder
from foredraft.model.quantisation.codes import quantise
from foredraft.model.runner.native.products import NativeCodes
from foredraft.model.weights import weight_bytes
from tests.exactness.matrix import *  # noqa: F403
from tests.exactness.matrix import PROMPTS, accepted_of
from tests.support import assistants
from tests.support.checkpoints import VARIANTS, reference_model, save_checkpoint
from tests.support.coded import LOADED, SEEDS, VOCABULARY
from tests.support.mutation import assert_caught, defect
from tests.support.mutations import Function, around

pytestmark = pytest.mark.skipif(library() is None, reason="no kernels")
NEW = 40
GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW, ignore_eos=True)
KINDS = ("low-bit", "skipping", "eight", "layer-skip", "exit", "lookup", "none")
POLICIES = [Fixed(n) for n in (1, 4, 7, 3, 2)]
WHOLE = {"hidden_size": 64, "intermediate_size": 96}  # whole groups of 32
FAMILIES = ("llama", "gemma2", "qwen3")
GEMMA4 = "gemma4-shared"  # layers 1 and 3 have the keys that layers 4 to 6 read
# family or variant, dtype, weights; with layer norms, biases, parallel residuals and learned positions
WORLDS = [
    ("llama", "bfloat16", "int8"),
    ("gemma2", "bfloat16", None),
    ("gemma2", "float32", "int8"),
    ("qwen3", "bfloat16", "int8"),
    *((name, "bfloat16", None) for name in ("cohere2", "gpt2", "gpt_neox", "opt-sums-normed", "phi")),
    ("stablelm-head-norms", "bfloat16", None),
    (GEMMA4, "float32", None),
    (GEMMA4, "bfloat16", "int8"),
]


def load(folder: Path, name: str, dtype: str, weights: str | None, **more: Any) -> LLM:
    if name == GEMMA4:
        assistants.save_target(folder, "shared", VOCABULARY)
    else:
        family, keys = (name, WHOLE) if name in FAMILIES else VARIANTS[name]
        given = {"vocab_size": VOCABULARY, "tie_word_embeddings": False, "seed": SEEDS.get(family, 0), **keys}
        save_checkpoint(folder, family, **given)
    return foredraft.load(folder, dtype=dtype, weights=weights, **LOADED, **{"drafter": "low-bit", **more})


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    found = load(tmp_path_factory.mktemp("model"), *request.param)
    engine: Any = found.loaded.engine
    skips = Skips((2, 4, 5), (0, 6)) if request.param[0] == GEMMA4 else Skips((1,), (0, 2))
    engine.drafters |= {
        "skipping": LowBit(low_bit_copy(engine.target, 4), engine.cache, skips),
        "eight": LowBit(low_bit_copy(engine.target, 8), engine.cache),
        "layer-skip": LayerSkip(engine.target, engine.cache, skips),
        "exit": LayerSkip(engine.target, engine.cache, Skips(exit=found.loaded.spec.layers - 1)),
    }
    for name, drafter in engine.drafters.items():
        drafter.name = name
    return found


def check_agreement(llm: LLM) -> None:
    engine: Any = llm.loaded.engine
    engine.policy = Fixed(4)
    engine.drafters["eight"] = LowBit(low_bit_copy(engine.target, 8), engine.cache)
    engine.drafters["eight"].name = "eight"
    accepted, drafted = accepted_of(llm.generate(PROMPTS, replace(GREEDY, drafter="eight")))
    if isinstance(engine.target.decoder.output, NativeCodes):  # a target of eight bits is its own copy
        assert accepted == drafted
    assert accepted > 0.8 * drafted


def test_a_copy_in_eight_bits_agrees(llm: LLM) -> None:
    check_agreement(llm)


@around
def without_positions(decoder: Function, own: Decoder, *parts: Any) -> None:
    decoder(own, *parts[:5])
    own.learned_positions = None


def with_spec(**changed: Any) -> Function:
    return lambda init: lambda own, spec, *parts: init(own, replace(spec, **changed), *parts)


# a defect of the copy of a family
DEFECTS: dict[str, tuple[str, Function]] = {
    "gpt2": ("learned positions left out", without_positions),
    "gpt_neox": ("parallel residual made sequential", with_spec(parallel_residual=False)),
    "opt-sums-normed": ("norms of outputs instead of sums", with_spec(sum_norms=False)),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_copy_without_a_part_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what, mutation = DEFECTS[name]
    llm = load(tmp_path, name, "bfloat16", None)
    assert_caught(defect(what, Decoder.__init__, mutation, lambda: check_agreement(llm)), monkeypatch)


@pytest.mark.parametrize("kernels", [True, False])
def test_a_quantised_target_is_the_model_of_its_codes(tmp_path: Path, kernels: bool) -> None:
    """Against transformers, given the weights that the codes stand for."""
    llm = load(tmp_path, "llama", "float32", "int4", drafter="lookup", kernels=None if kernels else False)
    model = reference_model("llama", vocab_size=VOCABULARY, tie_word_embeddings=False, **WHOLE)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.weight.copy_(quantise(module.weight, 4).expand(torch.float32))
        ids = torch.tensor([PROMPTS[4][:20]])
        want = model(ids).logits[0]
    runner = llm.loaded.runner
    cache = runner.new_cache(1, 64)
    found = runner.forward(cache, ids, [0]).logits
    torch.testing.assert_close(found[0], want, rtol=1e-4, atol=1e-4)
    if kernels:
        held = sum(product.weight.numel() for product in runner.decoder.products)
        whole, coded = (
            weight_bytes(runner.decoder.spec, torch.device("cpu"), torch.float32, native=True, bits=bits)
            for bits in (None, 4)
        )
        assert held < coded < whole / 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weights": "int3"}, "weights"),
        ({"draft_weights": "int3"}, "draft_weights"),
        ({"kernels": False, "drafter": "lookup", "draft_weights": "int8"}, "they are off"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(tmp_path, "llama", "bfloat16", options.pop("weights", None), **options)
