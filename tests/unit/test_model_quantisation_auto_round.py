"""Configs of AutoRound: packings, blocks, and settings of single modules, as AutoRound itself reads them.

What it refuses is tested with the other methods (`test_model_quantisation_config.py`).
"""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.model.quantisation import WeightFormat
from foredraft.model.quantisation.awq import AWQFormat
from foredraft.model.quantisation.gptq import GPTQFormat
from tests.support.quantising import KINDS
from tests.unit.test_model_quantisation_config import LAYER, changed, scheme


@pytest.mark.parametrize(
    ("packing", "format"),
    [
        *((name, GPTQFormat(4, 32, symmetric=True, less_one=True)) for name in (None, "auto", "auto_round:auto_gptq", "auto_round:gptq", "auto_gptq")),
        *((name, GPTQFormat(4, 32, symmetric=True, less_one=False)) for name in ("auto_round", "auto_round:gptqmodel")),
        *((name, AWQFormat(32, symmetric=True)) for name in ("auto_round:auto_awq", "auto_round:awq", "auto_awq")),
    ],
)  # fmt: skip
def test_auto_round_has_the_format_of_its_packing(packing: str | None, format: WeightFormat) -> None:
    config = {key: value for key, value in KINDS["auto-round"].config.items() if key != "packing_format"}
    found = scheme(config if packing is None else {**config, "packing_format": packing})
    assert found.format_of(f"{LAYER}.mlp.up_proj") == format


def test_single_modules_of_auto_round_have_settings_of_their_own() -> None:
    """Names go before expressions, of which the first decides; what is not given is that of all."""
    single = {
        ".*up_proj.*": {"bits": 8}, r".*layers\.1\.mlp.*": {"bits": 16, "data_type": "float"},
        f"{LAYER}.mlp.gate_proj": {"group_size": -1, "act_bits": 16}, "lm_head": {"bits": 8, "group_size": 64, "sym": False},
        ".*k_proj": {}, "v_proj": {"bits": 8, "group_size": 64},
    }  # fmt: skip
    found = scheme(changed("auto-round", extra_config=single))
    shown = {
        f"{LAYER}.mlp.up_proj": "8 bits in groups of 32", f"{LAYER}.mlp.gate_proj": "4 bits per channel",
        f"{LAYER}.mlp.down_proj": "None", "lm_head": "8 bits in groups of 64",
        "model.layers.0.mlp.down_proj": "4 bits in groups of 32", f"{LAYER}.self_attn.k_proj": "4 bits in groups of 32",
        f"{LAYER}.self_attn.v_proj": "8 bits in groups of 64",
    }  # fmt: skip
    assert {module: str(found.format_of(module)) for module in shown} == shown


@pytest.mark.parametrize(
    ("blocks", "quantised", "plain"),
    [
        ("model.layers", "model.layers.11.mlp.up_proj", "lm_head"),
        ("model.layers.0, model.layers.2", "model.layers.2.mlp.up_proj", f"{LAYER}.mlp.up_proj"),
        (["model.layers"], f"{LAYER}.mlp.up_proj", "lm_head"),
        ([["model.layers.0", "model.layers.1"]], f"{LAYER}.mlp.up_proj", "model.layers.2.mlp.up_proj"),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["block_name_to_quantize", "to_quant_block_names", "quant_block_list"])
def test_blocks_of_auto_round_are_honoured(key: str, blocks: Any, quantised: str, plain: str) -> None:
    found = scheme({**changed("auto-round", block_name_to_quantize=None), key: blocks})
    assert found.format_of(quantised) is not None and found.format_of(plain) is None


def test_modules_that_auto_round_does_not_convert() -> None:
    found = scheme(changed("auto-round", modules_to_not_convert=["mlp", r"0\.self_attn"]))
    assert found.format_of(f"{LAYER}.mlp.up_proj") is None
    assert found.format_of("model.layers.0.self_attn.q_proj") is None
    assert found.format_of(f"{LAYER}.self_attn.q_proj") is not None
