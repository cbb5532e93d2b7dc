"""Quantised weights of families that name, join or transpose their tensors unlike Llama.

Code that knows no layout quantises each checkpoint under the family's own names.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from foredraft.cli import main
from foredraft.errors import CheckpointError
from foredraft.kernels.compilation import library
from foredraft.model.quantisation.codes import Codes, quantise
from foredraft.model.quantisation.scheme import Quantisation
from foredraft.model.runner import Runner
from foredraft.model.runner.native.products import NativeCodes
from foredraft.model.spec import ModelSpec
from foredraft.model.tensor_names import Naming
from foredraft.model.weights import load_decoder
from tests.parity.test_logits import close, prompt_logits
from tests.support.checkpoints import save_variant
from tests.support.mutation import assert_caught, defect
from tests.support.quantising import KINDS, SINGLE, Kind, edit_config
from tests.support.quantising import quantise as save_quantised

# variant -> how the family names the linear layers of a layer, one of them that stays as it is, and methods
NAMES = r"model\.layers\.\d+\.\w+\."
OPT = r"model\.decoder\.layers\.\d+\.(?:self_attn\.\w+_proj|fc\d)", "model.decoder.layers.1.fc2"
NEOX = r"gpt_neox\.layers\.\d+\.\w+\.(?:query_key_value|dense\w*)", "gpt_neox.layers.1.attention.dense"
MODULES = {
    "gpt2": (r"transformer\.h\.\d+\.\w+\.c_\w+", "transformer.h.1.mlp.c_proj", "gptq-order w4-zeros"),
    "gpt_neox": (*NEOX, "gptq-order awq fp8-blocks"),
    "opt": (*OPT, "awq int8"),
    "opt-sums-normed": (*OPT, "gptq"),
    "phi": (rf"{NAMES}(?:\w_proj|dense|fc\d)", "model.layers.1.self_attn.dense", "gptq w4-zeros"),
    "phi3": (rf"{NAMES}\w+_proj", "model.layers.1.self_attn.o_proj", "gptq-order awq"),
    "starcoder2": (rf"{NAMES}(?:\w_proj|c_\w+)", "model.layers.1.mlp.c_fc", "fp8-blocks w4-zeros"),
}
TOKENS = torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(3))
TRANSPOSED = {"gpt2"}


def config_of(name: str, kind: Kind, kept: str) -> dict[str, Any]:
    """Return the scheme of a checkpoint in which one module stays as it is, in the words of its method."""
    config = json.loads(json.dumps(kind.config))
    if config["quant_method"] == "compressed-tensors":
        config["ignore"] = ["re:.*(lm_head|embed_out)", kept]
        if name in TRANSPOSED:
            config["config_groups"]["group_0"]["targets"] = ["Conv1D"]
    elif config["quant_method"] in ("awq", "fp8"):
        config["modules_to_not_convert"] = [kept, "lm_head", "embed_out"]
    return config  # type: ignore[no-any-return]


@contextmanager
def checkpoint(name: str, method: str) -> Iterator[tuple[Path, Path]]:
    """Save a quantised checkpoint and its expanded twin; the configs of GPTQ name no modules to keep."""
    names, kept, _ = MODULES[name]
    kind = KINDS[method]
    with tempfile.TemporaryDirectory() as folder:
        model = save_variant(Path(folder) / "model", name)
        skipped = r"(?!)" if method.startswith("gptq") else re.escape(kept)
        linear = re.compile(rf"({names})\.weight")
        twin = save_quantised(model, kind, linear=linear, skipped=skipped, transposed=name in TRANSPOSED)
        edit_config(model, {"quantization_config": config_of(name, kind, kept)})
        yield model, twin


@functools.cache
def expected(name: str, method: str) -> torch.Tensor:
    with checkpoint(name, method) as (_, twin), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(twin, attn_implementation="eager", dtype=torch.float32)
        logits: torch.Tensor = model.eval()(TOKENS).logits[0]
    return logits


def check(name: str, method: str, native: bool = False) -> None:
    want = expected(name, method)
    with checkpoint(name, method) as (model, _):
        decoder = load_decoder(model, native=native)
        assert close(prompt_logits(Runner(decoder), TOKENS), want)
    kept = 0 if method.startswith("gptq") else 1  # and the head
    coded = sum(isinstance(product, NativeCodes) for product in decoder.products)
    assert not native or coded == len(decoder.products) - 1 - kept


CASES = [(name, method) for name, (_, _, methods) in MODULES.items() for method in methods.split()]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_logits_are_those_of_transformers_on_the_expanded_twin(name: str, method: str) -> None:
    check(name, method)
    if library() is not None:
        check(name, method, native=True)


def test_what_no_program_defines_is_refused() -> None:
    """Of a weight that is stored transposed, scales by row may be those of rows or of columns."""
    with checkpoint("gpt2", "int8") as (model, _), pytest.raises(CheckpointError) as caught:
        load_decoder(model, "meta")
    assert "transformer.h.0.attn.c_attn is stored transposed" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_for_linear_layers_leave_transposed_ones() -> None:
    """Programs that quantise the class Linear leave GPT-2's Conv1D as they are."""
    spec = ModelSpec.from_folder
    with checkpoint("gpt2", "gptq") as (model, twin):
        for method in ("awq", "fp8-blocks", "w4"):
            edit_config(twin, {"quantization_config": dict(KINDS[method].config)})
            found = spec(twin).quantisation
            assert found is not None and found.format_of("model.layers.0.mlp.up_proj") is None
        found = spec(model).quantisation
        assert found is not None and found.format_of("model.layers.0.mlp.up_proj") is not None
        assert found.format_of("lm_head") is None


@pytest.mark.parametrize("name", [*MODULES, "glm4"])
def test_a_copy_in_few_bits_stands_for_the_codes(name: str, tmp_path: Path) -> None:
    model, few = save_variant(tmp_path / "model", name), tmp_path / "few"
    words = ("--model", str(model), "--weights", "int8", "--out", str(few), "--dtype", "float32")
    assert main(["quantise", *words]) == 0
    found, original = load_decoder(few), load_decoder(model)
    for one, other in zip(found.products, original.products, strict=True):
        want = other.dense()
        assert torch.equal(one.dense(), quantise(want, 8).expand(torch.float32))
    stored = {name.rpartition(".")[0] for name in load_file(few / SINGLE) if name.endswith("_packed")}
    heads = {"lm_head", "embed_out"}
    if name in MODULES:
        assert all(re.fullmatch(MODULES[name][0], module) for module in stored - heads) and stored & heads
    if name not in (*TRANSPOSED, "opt-sums-normed"):
        theirs = AutoModelForCausalLM.from_pretrained(few, dtype=torch.float32)
        with torch.no_grad():
            assert close(prompt_logits(Runner(found), TOKENS), theirs(TOKENS).logits[0])


Function = Callable[..., Any]


def of_decoders_names(rule_of: Function) -> Function:
    return lambda own, module: next((rule for rule in own.rules if re.match(rule.pattern, module)), None)


def codes_transposed(is_transposed: Function) -> Function:
    return lambda own, name: is_transposed(own, name.replace(".qweight", ".weight"))


def as_stored(in_order: Function) -> Function:
    return lambda own, order: own


RULES, ORDER, TRANSPOSED_OF = Quantisation._rule_of, Codes.in_order, Naming._is_transposed
DEFECTS = [
    defect("rules by other names", RULES, of_decoders_names, lambda: check("opt", "awq"), CheckpointError),
    defect("rows as stored", ORDER, as_stored, lambda: check("gpt_neox", "gptq", native=True)),
    defect("codes turned", TRANSPOSED_OF, codes_transposed, lambda: check("gpt2", "gptq"), CheckpointError),
]


@pytest.mark.skipif(library() is None, reason="no kernels")
@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.check()
    assert_caught(mutant, monkeypatch)
