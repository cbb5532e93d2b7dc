"""GGUF files of hybrids give the bits of the checkpoints that they were made of, however many heads share a key.

`write_gguf` makes of these models the tensors that llama.cpp's own converter makes, byte for byte (b11434).
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import foredraft
from foredraft import CheckpointError, SamplingParams
from foredraft.model import layer_weights
from foredraft.model.checkpoint import named_tensors
from foredraft.model.gguf import recurrent, source, tensors
from foredraft.model.locate import resolve, with_loras
from foredraft.model.quantisation.blocks import BLOCKS
from foredraft.model.runner import Runner
from foredraft.model.runner.native.products import NativeCodes
from foredraft.model.weights import load_decoder
from foredraft.quantise.command import quantise_checkpoint
from tests.exactness.test_hybrids import check_widths
from tests.parity.test_logits import close, prompt_logits
from tests.support.checkpoints import save_variant
from tests.support.hybrids import rewrite, save_hybrid
from tests.support.loras import save_lora
from tests.support.mutation import Mutant, assert_caught, caught_by
from tests.support.mutations import around, changed, instead

gguf = pytest.importorskip("gguf")

from tests.support.gguf_files import save_dequantised, write_gguf, write_tensors  # noqa: E402

TOKENS = torch.randint(3, 97, (1, 90), generator=torch.Generator().manual_seed(7))  # [1, T]
# widths of whole blocks of 256, of which two heads of values fill one
WHOLE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}  # fmt: skip


def logits_of(place: Any, *, native: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    return prompt_logits(Runner(load_decoder(place, dtype=dtype, native=native)), TOKENS)


@functools.cache
def saved(variant: str, further: bool = False, **keys: Any) -> Path:
    folder = save_variant(Path(tempfile.mkdtemp()), variant, **keys)
    if further:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
        rewrite(folder, with_further)
    return folder


def with_further(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add a layer that predicts further tokens to a model of four layers."""
    own, random = "model.layers.3.", torch.Generator().manual_seed(5)
    hidden = len(stored["model.norm.weight"])
    shapes = {name.replace(own, "mtp.layers.0."): t.shape for name, t in stored.items() if own in name}
    shapes |= {
        f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    return stored | {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def file_of(folder: Path, kind: str = "F32", **more: Any) -> Any:
    return resolve(write_gguf(folder, Path(tempfile.mkdtemp()) / "model.gguf", kind, **more))


def check(variant: str = "qwen3_5-three-a-key", native: bool = True) -> None:
    folder = saved(variant)
    assert torch.equal(logits_of(file_of(folder), native=native), logits_of(folder, native=native))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("variant", ["three-a-key", "as-many", "wide", "tied", "interval", "rotated"])
def test_a_file_has_the_bits_of_its_checkpoint(variant: str, native: bool) -> None:
    check(f"qwen3_5-{variant}", native)


def test_a_file_of_an_older_converter_says_which_layers_attend_by_their_interval() -> None:
    folder = saved("qwen3_5", num_hidden_layers=9)

    def edit(writer: Any) -> None:
        for data in writer.kv_data:
            for key in ("attention.recurrent_layers", "rope.dimension_sections"):
                data.pop(f"qwen35.{key}", None)

    assert torch.equal(logits_of(file_of(folder, edit=edit)), logits_of(folder))


def test_a_file_of_floats_is_quantised_as_its_folder(tmp_path: Path) -> None:
    folder = saved("qwen3_5-three-a-key", dtype=torch.bfloat16)
    made = {place: tmp_path / place.name for place in (folder, file_of(folder, "BF16").path)}
    for place, out in made.items():
        quantise_checkpoint(str(place), "int8", out)
    one, two = (logits_of(out, dtype=torch.bfloat16) for out in made.values())
    assert torch.equal(one, two)


def test_loras_change_a_file_as_its_folder(tmp_path: Path) -> None:
    folder = saved("qwen3_5-three-a-key")
    lora = save_lora(folder, tmp_path / "lora", target_modules="all-linear")
    one, two = (logits_of(with_loras(place, [lora])) for place in (folder, file_of(folder)))
    assert torch.equal(one, two) and not torch.equal(one, logits_of(folder))


def check_codes(kind: str = "Q8_0", variant: str = "qwen3_5-three-a-key") -> None:
    """Codes that are expanded are those of the checkpoint with its values; the kernels multiply codes themselves."""
    folder = saved(variant, **WHOLE)
    file = write_gguf(folder, Path(tempfile.mkdtemp()) / "model.gguf", kind)
    dequantised = save_dequantised(folder, file, Path(tempfile.mkdtemp()) / "dequantised")
    found, wanted = logits_of(resolve(file), native=False), logits_of(dequantised, native=False)
    assert close(found, wanted)
    decoder = load_decoder(resolve(file), dtype=torch.float32, native=True)
    assert close(prompt_logits(Runner(decoder), TOKENS), wanted)
    coded = kind in BLOCKS and BLOCKS[kind].code_format is not None
    assert all(isinstance(product, NativeCodes) == coded for product in decoder.products)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS", "IQ3_S", "BF16"])
@pytest.mark.parametrize("variant", ["qwen3_5-three-a-key", "qwen3_5-as-many"])
def test_codes_are_those_that_a_file_stands_for(kind: str, variant: str) -> None:
    check_codes(kind, variant)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_passes_of_any_width_give_the_same_bits(kind: str) -> None:
    """Though the inputs of a product with codes are ordered first."""
    file = file_of(saved("qwen3_5-three-a-key", vocab_size=320, **WHOLE), kind)
    check_widths(Runner(load_decoder(file, native=True)))


def check_further() -> None:
    """Layers behind the model's do not run, and a drafter finds them as in the checkpoint."""
    folder = saved("qwen3_5", further=True)
    file = file_of(folder, "F32")
    assert file.spec.layers == 4 and file.config["mtp_num_hidden_layers"] == 1
    assert torch.equal(logits_of(file), logits_of(saved("qwen3_5")))
    stored = {name: t for name, t in load_file(folder / "model.safetensors").items() if "mtp." in name}
    with ExitStack() as stack:
        found = {name: t.whole() for name, t in named_tensors(file, stack).items() if "mtp." in name}
    assert found.keys() == stored.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, stored[name], rtol=0, atol=2**-22)  # of norms, one more or less


def test_layers_that_predict_further_tokens_wait_for_a_drafter() -> None:
    check_further()
    coded = file_of(saved("qwen3_5", further=True, **WHOLE), "Q8_0")
    assert str(coded.spec.quantisation.format_of("mtp.layers.0.self_attn.q_proj")) == "Q8_0"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_file_speculates(kind: str) -> None:
    folder = saved("qwen3_5", **WHOLE)
    llm = foredraft.load(file_of(folder, kind).path, device="cpu", max_batch=2)
    prompts = [[5, 6, 7, 8] * 12, TOKENS[0].tolist()]
    params = SamplingParams(temperature=0, max_new_tokens=48, ignore_eos=True, drafter="none")
    plain = llm.generate(prompts, params)
    drafted = llm.generate(prompts, replace(params, drafter="lookup"))
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert any(each.stats.drafted for each in drafted)
    llm.close()


def set_to(key: str, value: Any) -> Callable[[Any], None]:
    def edit(writer: Any) -> None:
        for data in writer.kv_data:
            if f"qwen35.{key}" in data:
                data[f"qwen35.{key}"].value = value

    return edit


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("nextn_predict_layers", 5, "nextn_predict_layers is 5; block_count, 5, must be more"),
        ("rope.dimension_sections", [1, 0, 0, 0], "it must cover 4 pairs"),
        ("rope.dimension_sections", ["x"], "it must be three whole numbers"),
        ("attention.recurrent_layers", [True], "it must say it of 5 layers"),
        ("ssm.inner_size", 130, "ssm.inner_size is 130; it must be a multiple of"),
        ("ssm.group_count", 3, "linear_num_value_heads is 4; it must be a multiple"),
        ("ssm.state_size", 16, r"tensor blk.0.ssm_conv1d.weight of shape \[256, 4\], but"),
    ],
)
def test_what_is_no_such_file_is_refused(key: str, value: Any, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        file_of(saved("qwen3_5", further=True), edit=set_to(key, value))


def test_a_file_of_further_layers_alone_is_no_model() -> None:
    def only(stored: dict[str, Any]) -> dict[str, Any]:
        return {name: t for name, t in stored.items() if not name.startswith("blk.") or name[4] == "4"}

    with pytest.raises(
        CheckpointError, match=r"holds only the layer that predicts further tokens; give the model's own"
    ):
        file_of(saved("qwen3_5", further=True), tensors=only)


DEFECTS: dict[Callable[[], object], list[tuple[Any, ...]]] = {
    check: [
        ("heads of values as they lie", recurrent._heads, instead(lambda config: None)),
        ("columns as they lie", recurrent.value_columns, instead(lambda *given: None)),
        ("rows as they lie", recurrent.value_rows, instead(lambda *given: None)),
        ("rates taken for their logarithms", layer_weights._decay_of, instead(lambda exponents: -exponents.float())),
        ("one less in every norm", tensors.adds_one, instead(lambda architecture, name: name.endswith("norm.weight"))),
    ],
    check_codes: [
        ("columns of codes as they lie", recurrent.value_columns, instead(lambda *given: None)),
        ("columns of codes the other way", tensors.StoredTensor, around(lambda made, *given: made(*given[:5], None if len(given) < 6 or given[5] is None else given[5].argsort().int()))),
    ],
    check_further: [
        ("further layers run", source.config_of, around(lambda made, file: made(file) | {"num_hidden_layers": 5}), CheckpointError),
        ("names as of layers", tensors.model_name, around(lambda named, architecture, name, layers=None: named(architecture, name)), CheckpointError),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", caught_by(DEFECTS), ids=lambda mutant: str(mutant.name))
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)


def write_lfm2(folder: Path, kind: str = "F32", kv_heads: Any = None) -> Any:
    """Write an LFM 2 as convert_hf_to_gguf.py does: its width as it is, and 0 key heads where a layer convolves."""
    config, file = json.loads((folder / "config.json").read_text()), folder / f"{kind}.gguf"
    writer, layers = gguf.GGUFWriter(file, "lfm2"), config["num_hidden_layers"]
    by_layer = [config["num_key_value_heads"] * (each != "conv") for each in config["layer_types"]]
    stored = load_file(folder / "model.safetensors")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(by_layer if kv_heads is None else kv_heads)
    writer.add_feed_forward_length(len(stored["model.layers.0.feed_forward.w1.weight"]))
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_vocab_size(config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LFM2, layers)
    arrays = {
        names.get_name(name, try_suffixes=(".weight",)): values.float().squeeze(1 if ".conv.conv." in name else ()).numpy()
        for name, values in stored.items() if name != "lm_head.weight"
    }  # fmt: skip
    write_tensors(
        writer, arrays, lambda name, values: kind if values.ndim > 1 and "conv.conv" not in name else "F32"
    )
    return resolve(file)


@functools.cache
def saved_lfm2() -> Path:
    return save_hybrid(Path(tempfile.mkdtemp()), "convolutions")


def check_lfm2(native: bool = True) -> None:
    assert torch.equal(
        logits_of(write_lfm2(saved_lfm2()), native=native), logits_of(saved_lfm2(), native=native)
    )


@pytest.mark.parametrize("native", [True, False])
def test_a_file_of_an_lfm2_has_the_bits_of_its_checkpoint(native: bool) -> None:
    check_lfm2(native)


def test_so_do_passes_over_its_codes() -> None:
    file = write_lfm2(saved_lfm2(), "Q8_0")
    assert file.spec.quantisation is not None
    check_widths(Runner(load_decoder(file, dtype=torch.bfloat16, native=True)))


@pytest.mark.parametrize("heads", [2, [2] * 3, [0, 0, 2, 0, 0, 4], [0] * 6])
def test_an_lfm2_has_one_number_of_key_heads_or_none_in_each_layer(heads: Any) -> None:
    with pytest.raises(CheckpointError, match=r"head_count_kv.*a number or 0 for each of the 6 layers"):
        write_lfm2(saved_lfm2(), kv_heads=heads)


def check_lfm2_by_operators() -> None:
    check_lfm2(native=False)


LFM2_DEFECTS: dict[Callable[[], object], list[tuple[Any, ...]]] = {
    check_lfm2_by_operators: [
        ("the width is adjusted again", source.config_of, changed(lambda config: config | {"block_auto_adjust_ff_dim": True}), CheckpointError),
        ("all layers attend", source.config_of, changed(lambda config: config | {"layer_types": ["full_attention"] * 6}), CheckpointError),
        ("taps are no matrix", recurrent.are_taps, instead(lambda name: False), CheckpointError),
        ("another epsilon", source.config_of, changed(lambda config: config | {"norm_eps": 1e-2})),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", caught_by(LFM2_DEFECTS), ids=lambda mutant: str(mutant.name))
def test_defects_in_an_lfm2_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
