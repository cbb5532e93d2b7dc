"""Quantised checkpoints of hybrids: what decides how fast states fade stays as it is, or has codes, too."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import foredraft
from foredraft import SamplingParams
from foredraft.kernels.compilation import library
from foredraft.model.quantisation import gptq
from foredraft.model.quantisation.scheme import Quantisation
from foredraft.model.runner import Runner
from foredraft.model.runner.native.products import NativeCodes
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.parity.test_logits import close, prompt_logits
from tests.support.checkpoints import save_variant
from tests.support.mutation import Mutant, assert_caught, caught_by
from tests.support.mutations import instead
from tests.support.quantising import KINDS, edit_config, quantise

LINEAR = re.compile(r"(model\.layers\.\d+\.\w+\.(?:\w+_proj|in_proj_\w+))\.weight")
TOKENS = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(3))
LAYERS = range(3)  # the recurrent ones
# what stays as it is: an expression of modules, and how schemes say it, by method
KEPT: dict[str, tuple[str, Callable[[str, list[str]], dict[str, Any]]]] = {
    "rates": (
        r"in_proj_[ab]",
        lambda method, named: {
            "gptq": {
                "dynamic": {"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*in_proj_[ab]": {}}
            },
            "awq": {"modules_to_not_convert": ["in_proj_a", "in_proj_b"]},
            "fp8": {"modules_to_not_convert": ["lm_head", *named]},
            "compressed-tensors": {"ignore": ["lm_head", "re:.*linear_attn.in_proj_a$", "re:.*in_proj_b"]},
        }[method],
    ),
    "attention": (  # as in Qwen's own files of GPTQ
        r"attn",
        lambda method, named: {
            "gptq": {"dynamic": {"lm_head": {}, "-:.*attn.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}}},
            "compressed-tensors": {"ignore": ["lm_head", "re:.*attn.*"]},
        }[method],
    ),
    "nothing": (r"(?!)", lambda method, named: {}),
}
CASES = [
    *(
        ("rates", name)
        for name in ("gptq", "gptq-order", "awq", "w4", "w4-zeros", "fp8-channel", "fp8-blocks")
    ),
    *(("attention", name) for name in ("gptq", "w4")),
    *(("nothing", name) for name in ("gptq-zeros", "w8-channel")),
]


@functools.cache
def saved(kept: str, name: str, **keys: Any) -> tuple[Path, Path]:
    """Save a quantised hybrid and its expanded twin."""
    skipped, told = KEPT[kept]
    model = save_variant(Path(tempfile.mkdtemp()) / "model", "qwen3_5", linear_num_value_heads=8, **keys)
    twin = quantise(model, KINDS[name], linear=LINEAR, skipped=skipped)
    named = [f"model.layers.{n}.linear_attn.in_proj_{part}" for n in LAYERS for part in "ab"]
    scheme = json.loads(json.dumps(KINDS[name].config))
    edit_config(model, {"quantization_config": scheme | told(scheme["quant_method"], named)})
    return model, twin


@functools.cache
def expected(kept: str, name: str) -> torch.Tensor:
    twin = AutoModelForCausalLM.from_pretrained(saved(kept, name)[1], dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = twin.eval()(TOKENS).logits[0]
    return logits


def check(kept: str = "rates", name: str = "gptq", native: bool = False) -> None:
    decoder = load_decoder(saved(kept, name)[0], native=native)
    assert close(prompt_logits(Runner(decoder), TOKENS), expected(kept, name))
    layers = {"rates": 3 * 4 + 4, "attention": 2 * 4, "nothing": 3 * 5 + 4}  # products with codes
    coded = sum(isinstance(product, NativeCodes) for product in decoder.products)
    assert coded == (layers[kept] if native else 0)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("kept", "name"), CASES)
def test_logits_are_those_of_transformers_on_the_expanded_twin(kept: str, name: str, native: bool) -> None:
    if native and library() is None:
        pytest.skip("no kernels")
    check(kept, name, native)


@pytest.mark.parametrize("name", ["gptq", "fp8-blocks", "w8a8"])
def test_quantised_hybrids_speculate(name: str) -> None:
    llm = foredraft.load(saved("rates", name)[0], device="cpu", max_batch=2)
    prompts = [[5, 6, 7, 8] * 8, TOKENS[0].tolist()]
    texts = {}
    for drafter in ("none", "lookup"):
        params = SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True, drafter=drafter)
        texts[drafter] = [each.token_ids for each in llm.generate(prompts, params)]
    assert texts["lookup"] == texts["none"]
    llm.close()


@pytest.mark.parametrize(
    ("name", "key"), [("w4", "ignore"), ("fp8-blocks", "modules_to_not_convert"), ("gptq", "dynamic")]
)
def test_names_of_a_multimodal_checkpoint(name: str, key: str, tmp_path: Path) -> None:
    """Its parts that no text passes through, and layers that predict further tokens, are named, too."""
    model, _ = saved("rates", name)
    prefix, tensors = "model.language_model.", load_file(model / "model.safetensors")
    kept = [
        f"{prefix}layers.{n}.linear_attn.{part}"
        for n in LAYERS
        for part in ("conv1d", "in_proj_a", "in_proj_b")
    ]
    named = [*kept, "lm_head", f"{prefix}embed_tokens", "model.visual.blocks.0.attn.qkv", "mtp.fc"]
    text = json.loads((model / "config.json").read_text())
    scheme = text.pop("quantization_config")
    if key != "dynamic":  # GPTQ's expressions are of any names
        scheme |= {key: named}
    whole = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(whole | {"quantization_config": scheme, "vision_config": {}})
    )
    nested = {own.replace("model.", prefix, 1): tensor for own, tensor in tensors.items()}
    others = {"mtp.fc.weight": torch.ones(4, 4), "mtp.layers.0.mlp.up_proj.qweight": torch.ones(4, 4)}
    others["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(4)
    save_file(nested | others, tmp_path / "model.safetensors")
    one, two = (prompt_logits(Runner(load_decoder(place)), TOKENS) for place in (tmp_path, model))
    assert torch.equal(one, two)


def test_settings_of_single_modules_are_refused() -> None:
    config = json.loads((saved("rates", "gptq")[0] / "config.json").read_text())
    for given, said in (({"-:.*attn.*": {"bits": 8}}, "they must be empty"), ({"-:(": {}}, "not a regular")):
        scheme = config["quantization_config"] | {"dynamic": given}
        with pytest.raises(foredraft.CheckpointError, match=said):
            ModelSpec.from_hf(config | {"quantization_config": scheme})


DEFECTS: dict[Callable[[], object], list[tuple[Any, ...]]] = {
    check: [
        ("modules that stay have codes", gptq._singled_out, instead(lambda read, format: read.take("dynamic") and []), foredraft.CheckpointError),
        ("all have codes", Quantisation._rule_of, lambda _: lambda own, module: own.rules[-1], foredraft.CheckpointError),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", caught_by(DEFECTS), ids=lambda mutant: str(mutant.name))
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
