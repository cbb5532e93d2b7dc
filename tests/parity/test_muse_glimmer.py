"""Muse Glimmer: the logits of transformers by kernels and by operators, the same bits in passes of any width."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

import foredraft
from foredraft import CheckpointError, SamplingParams
from foredraft.doctor.teacher_forced import block_drafts, read_text
from foredraft.drafters import block_drafter
from foredraft.drafters.heads import block_configs
from foredraft.model import checkpoint, tensor_names
from foredraft.model.families import muse
from foredraft.model.runner import Runner
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import load_decoder
from tests.parity.test_hybrids import logits_of
from tests.support.mutation import Mutant, Mutation, assert_caught, caught_by
from tests.support.mutations import around, changed
from tests.support.wrapped import NEWER, edit_config, save_wrapped

LENGTH = 300


@functools.cache
def saved(dtype: str = "float32") -> tuple[Path, Tensor, list[int]]:
    folder = save_wrapped(Path(tempfile.mkdtemp()), "muse-glimmer", NEWER)
    tokens = torch.randint(3, 90, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype))
        return folder, model(tokens).logits[0].float(), tokens[0].tolist()


def ours(native: bool, dtype: torch.dtype = torch.float32, bits: int | None = None) -> Tensor:
    folder, _, tokens = saved()
    return logits_of(Runner(load_decoder(folder, dtype=dtype, native=native, bits=bits)), tokens).float()


def check(native: bool = True) -> None:
    torch.testing.assert_close(ours(native), saved()[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("native", [True, False])
def test_logits_equal_those_of_transformers(native: bool) -> None:
    check(native)


@functools.cache
def assistant() -> tuple[Path, dict[int, Tensor]]:
    """Return a random DFlash head, and the reference's logits of its block after some places of the text."""
    folder, _, tokens = saved()
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    text, place = model.config.text_config, Path(tempfile.mkdtemp())
    torch.manual_seed(5)
    config = MuseGlimmerAssistantConfig(
        hidden_size=text.hidden_size, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=12, block_size=5, mask_token_id=7, target_layer_ids=[0, 2],
        bos_token_id=1, eos_token_id=2, pad_token_id=0, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    head: Any = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(0.0, 1.3 * weight.shape[-1] ** -0.5) if weight.dim() > 1 else weight.add_(
                0.2 * torch.randn_like(weight)
            )
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        table, found = model.get_input_embeddings().weight, dict[int, Tensor]()
        for anchor in (9, 30, 100):
            contexts = torch.cat([states[layer + 1][:, :anchor] for layer in config.target_layer_ids], -1)
            noise = table[torch.tensor([[tokens[anchor]] + [7] * 4])]
            cache = DFlashCache(config=config)
            cache.activate_past_recording()
            cache.set_previous_accepted_tokens(anchor)
            given = {"context_hidden_states": contexts, "position_ids": torch.arange(anchor + 5)[None]}
            mask = torch.ones(1, anchor + 5, dtype=torch.long)
            left = head(
                noise_embeds=noise, attention_mask=mask, past_key_values=cache, **given
            ).last_hidden_state[0, 1:]
            logits = model.get_output_embeddings()(left) * text.output_multiplier
            found[anchor] = torch.tanh(logits / text.final_logit_softcapping) * text.final_logit_softcapping
    head.save_pretrained(place)
    return place, found


def check_assistant() -> None:
    place, expected = assistant()
    folder, _, tokens = saved()
    llm = foredraft.load(
        folder, draft=place, device="cpu", max_length=400, max_batch=1, dtype="float32", policy="fixed"
    )
    head: Any = llm.loaded.engine.drafters["dflash"].head
    runner, layers = llm.loaded.runner, head.record.aux_layers
    for anchor, logits in expected.items():
        text = read_text(runner, tokens[: anchor + 6], layers)
        own = block_drafts(head, text, 4, 1000)[anchor]
        torch.testing.assert_close(own, logits, rtol=0, atol=2e-4)
    params = SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True)
    plain, drafted = (
        llm.generate([tokens[:40]], params.replace(drafter=name))[0] for name in ("none", "dflash")
    )
    assert plain.token_ids == drafted.token_ids and drafted.stats.drafted
    llm.close()


def test_its_dflash_head_drafts_what_the_reference_drafts() -> None:
    check_assistant()


@pytest.mark.parametrize("native", [True, False])
def test_in_bfloat16_they_are_as_near_to_those_of_float32(native: bool) -> None:
    wide, theirs = saved()[1], saved("bfloat16")[1]
    error = (ours(native, torch.bfloat16) - wide).square().mean()
    assert error < 1.2 * (theirs - wide).square().mean()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("bits", [None, 4])
def test_passes_of_any_width_give_the_same_bits(bits: int | None, native: bool) -> None:
    """`logits_of` reads in passes of 1, 2, 5 and 16 behind a chunk of a prompt, and then one by one."""
    folder, _, tokens = saved()
    runner = Runner(load_decoder(folder, dtype=torch.bfloat16, native=native, bits=bits))
    found, cache = logits_of(runner, tokens), runner.new_cache(1, LENGTH)
    runner.prefill(cache, 0, tokens[:256], 0)
    for at in range(256, LENGTH):
        cache.lengths[0] = at
        logits = runner.forward(cache, torch.tensor([tokens[at : at + 1]]), [at]).logits
        assert logits is not None and torch.equal(logits[0, 0], found[at])


def test_texts_are_those_of_plain_decoding() -> None:
    plain = SamplingParams(temperature=0, max_new_tokens=40, ignore_eos=True, drafter="none")
    llm = foredraft.load(saved()[0], device="cpu", max_batch=2, max_length=400)
    prompts: list[Any] = [[*range(3, 30)] * 3, [5, 6, 7]]
    texts = [each.token_ids for each in llm.generate(prompts, plain)]
    found = llm.generate(prompts, replace(plain, drafter="lookup", policy="fixed"))
    assert [each.token_ids for each in found] == texts and any(each.stats.drafted for each in found)
    llm.close()


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"layer_rope_theta": [0, 1e4, 5e5, 0, 0]}, "it must hold 10000 or 0 for each of the 5 layers"),
        ({"tie_word_embeddings": True}, "only false is supported"),
        ({"attn_temperature": 0.1, "layer_types": ["chunked_attention"] * 5}, "layer_types"),
    ],
)
def test_what_is_no_such_model_is_refused(keys: dict[str, object], problem: str, tmp_path: Path) -> None:
    folder = save_wrapped(tmp_path, "muse-glimmer", NEWER)
    edit_config(folder, lambda config: config["text_config"].update(keys))
    with pytest.raises(CheckpointError, match=problem):
        ModelSpec.from_folder(folder)


def spec_of(**fields: Any) -> Mutation:
    """Let the spec of a model have other fields."""
    return changed(lambda spec: replace(spec, **fields))


def check_operators() -> None:
    check(native=False)


DEFECTS: dict[Callable[[], object], list[tuple[Any, ...]]] = {
    check_assistant: [
        ("rows of the embedding enter normed", block_drafter.sizes_of_rows, around(lambda sizes, *given: torch.ones_like(sizes(*given)))),
        ("the state before a layer is read", block_configs.aux_ids, around(lambda ids, *given, shift, **more: ids(*given, shift=shift - 1, **more))),
    ],
    check_operators: [
        ("the embedding is not normed", muse._naming, lambda _: lambda eps: tensor_names.AS_STORED),
        ("one epsilon for all norms", ModelSpec.from_hf, spec_of(post_norm_eps=None)),
        ("the final norm adds 1", ModelSpec.from_hf, spec_of(plain_last_norm=False)),
        ("all layers rotate", ModelSpec.from_hf, spec_of(unrotated=())),
        ("gates are stored beside queries", checkpoint.qkv_order, around(lambda order, spec: order(replace(spec, gates_apart=False)))),
        ("heads are not normed", ModelSpec.from_hf, spec_of(head_norms=False)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", caught_by(DEFECTS), ids=lambda mutant: str(mutant.name))
def test_defects_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
