"""Heads that speculators or z-lab's dflash saved, against their own modules; skipped where the package is missing.

Their passes for training read the same context as a draft after each position, and the text's own tokens before
each slot.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

import foredraft
from foredraft.doctor.teacher_forced import block_drafts, head_drafts, p_eagle_drafts, read_text
from foredraft.drafters.block_drafter import BlockHead, load_block
from foredraft.drafters.eagle3 import load_eagle3
from foredraft.drafters.heads.block_configs import read_block
from foredraft.drafters.heads.configs import read_eagle3, read_p_eagle
from foredraft.drafters.p_eagle import load_p_eagle
from foredraft.model.runner import Runner
from tests.parity.test_heads import KEYS, V
from tests.support import heads
from tests.support.checkpoints import reference_model
from tests.support.heads import BLOCK, DFLASH_2, LAYERS, RANK, SLIDING
from tests.support.heads import BLOCK_BODY as BODY

IDS = torch.tensor([0, 2, 3, 6, 7, 10])  # the draft vocabulary of a head
DRAFT_VOCAB, ANCHORS, AUX_LAYERS, STEPS = len(IDS), 24, [1, 3, 6], 3


def body_of(kind: type[PretrainedConfig], body: dict[str, Any], **more: Any) -> PretrainedConfig:
    given = {key: value for key, value in body.items() if key != "model_type"}
    made = kind(**given, vocab_size=V, **more)
    made._attn_implementation = "eager"
    return made


NAMES = {"eagle3": "Eagle3", "peagle": "PEagle", "dflash": "DFlash", "dflash2": "DFlash2", "dspark": "DSpark"}


def speculated(algorithm: str, ids: Tensor = IDS, **fields: Any) -> PreTrainedModel:
    core = pytest.importorskip(f"speculators.models.{algorithm}.core")
    config = pytest.importorskip(f"speculators.models.{algorithm}.config")
    shared = pytest.importorskip("speculators.config")
    proposals = pytest.importorskip("speculators.proposals.greedy")
    name = NAMES[algorithm]
    kind = getattr(config, f"{name}SpeculatorConfig")
    kind.model_rebuild(force=True, _types_namespace={"torch": torch})
    made = kind(
        draft_vocab_size=len(ids),
        speculators_config=shared.SpeculatorsConfig(
            algorithm=algorithm, default_proposal_method="greedy",
            proposal_methods=[proposals.GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            verifier=shared.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **fields,
    )  # fmt: skip
    module: Any = getattr(core, f"{name}DraftModel")(made)
    if len(ids) < V:
        marks = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
        module.load_vocab_mappings(marks, ids - torch.arange(len(ids)))
    return randomised(module)


def randomised(module: Any) -> Any:
    module = module.float().eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return module


def load(folder: Path, module: PreTrainedModel, target: PreTrainedModel, drafter: str) -> foredraft.LLM:
    module.save_pretrained(folder / "head")
    target.save_pretrained(folder / "target")
    return foredraft.load(
        folder / "target", draft=folder / "head", drafter=drafter, device="cpu", policy="fixed"
    )


def read_head(folder: Path, runner: Runner) -> BlockHead:
    files = read_block(folder / "head")
    return load_block(replace(files, record=files.record.for_target(runner.decoder.spec, "it")), runner)


FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual": {"norm_before_residual": True},
    "eagle-3.1": {"norm_output": True, "fc_norm": True},
    "before fc": {"norm_before_fc": True, "norm_before_residual": True},
}


@pytest.mark.parametrize("body", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("name", FLAGS)
def test_drafts_are_those_of_eagle_3(name: str, body: type[PretrainedConfig], tmp_path: Path) -> None:
    module: Any = speculated(
        "eagle3", transformer_layer_config=body_of(body, heads.BODY, head_dim=24),
        eagle_aux_hidden_state_layer_ids=AUX_LAYERS, **FLAGS[name],
    )  # fmt: skip
    llm = load(tmp_path, module, reference_model(**KEYS), "eagle3")
    runner, files = llm.loaded.runner, read_eagle3(tmp_path / "head")
    assert files.record.planned == STEPS and files.record.format == "speculators"
    files = replace(files, record=files.record.for_target(llm.loaded.spec, "the head"))
    tokens = torch.randint(0, V, (40,)).tolist()
    text = read_text(runner, tokens, AUX_LAYERS)
    drafts = head_drafts(load_eagle3(files, runner), text, STEPS, 40)
    seen: list[Tensor] = []
    hook = module.lm_head.register_forward_hook(lambda *call: seen.append(call[2][0]))
    aux_states = torch.cat([text.states[layer] for layer in AUX_LAYERS], -1)
    with torch.no_grad():
        module(
            aux_states[None, :-1].clone(), torch.tensor([tokens[1:]]),
            torch.zeros(1, len(tokens) - 1, dtype=torch.long), ttt_steps=STEPS,
        )  # fmt: skip
    hook.remove()
    assert len(seen) == STEPS and len(drafts) > 20
    for anchor, logits in drafts.items():
        want = torch.stack([step[anchor - 1] for step in seen])
        torch.testing.assert_close(logits[:, IDS], want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["plain", "residual", "before fc"])
def test_drafts_are_those_of_p_eagle(name: str, tmp_path: Path) -> None:
    module: Any = speculated(
        "peagle", transformer_layer_config=body_of(LlamaConfig, {**heads.BODY, "num_hidden_layers": 2}, head_dim=24),
        eagle_aux_hidden_state_layer_ids=AUX_LAYERS, mask_token_id=7, **FLAGS[name],
    )  # fmt: skip
    llm = load(tmp_path, module, reference_model(**KEYS), "p-eagle")
    runner, files = llm.loaded.runner, read_p_eagle(tmp_path / "head")
    files = replace(files, record=files.record.for_target(llm.loaded.spec, "the head"))
    tokens = torch.randint(0, V, (40,)).tolist()
    text = read_text(runner, tokens, AUX_LAYERS)
    drafts = p_eagle_drafts(load_p_eagle(files, runner), text, STEPS, 40)
    aux_states = torch.cat([text.states[layer] for layer in AUX_LAYERS], -1)
    seen: list[Tensor] = []
    hook = module.lm_head.register_forward_hook(lambda *call: seen.append(call[2][0]))
    losses = pytest.importorskip("speculators.losses")
    ratios = {"num_depths": STEPS, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    torch.manual_seed(2)  # some positions are left out at random
    with torch.no_grad():
        module(
            aux_states[None, :-1].clone(), torch.tensor([tokens[1:]]), torch.zeros(1, len(tokens) - 1, dtype=torch.long),
            verifier_last_hidden_states=text.states[AUX_LAYERS[0]][None, :-1].clone(), **ratios,
            loss_config=losses.resolve_loss_config("kl_div", "eager"),
        )  # fmt: skip
    hook.remove()
    data = pytest.importorskip("speculators.models.peagle.data")
    torch.manual_seed(2)
    first, depth = data.generate_cod_sample_indices(len(tokens) - 1, torch.ones(1, len(tokens) - 1), **ratios)
    compared = 0
    for anchor, logits in drafts.items():
        places = [((first == anchor - 1) & (depth == step)).nonzero().flatten() for step in range(STEPS)]
        if all(len(each) for each in places):
            torch.testing.assert_close(logits[:, IDS], seen[0][torch.cat(places)], rtol=1e-3, atol=1e-3)
            compared += 1
    assert compared > 20


SPARK: dict[str, Any] = {"markov_rank": RANK}
BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("dflash", {}, {}),
    "windows": ("dflash", {}, SLIDING),
    "free windows": ("dflash", {"sliding_window_non_causal": True, "sample_from_anchor": True}, SLIDING),
    "vanilla": ("dspark", {**SPARK, "markov_head_type": "vanilla"}, {"attention_bias": True}),
    "gated": ("dspark", {**SPARK, "markov_head_type": "gated", "enable_confidence_head": False}, {}),
    "rnn": ("dspark", {**SPARK, "markov_head_type": "rnn"}, {}),
    "dflash 2": ("dflash2", DFLASH_2, SLIDING),
    "rnn of masked slots": ("dspark", {**SPARK, "markov_head_type": "rnn", "sample_from_anchor": False}, {}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_drafts_are_those_of_a_head_of_blocks(name: str, tmp_path: Path) -> None:
    kind, fields, body = BLOCKS[name]
    target: Any = reference_model(**KEYS)
    ids_of = torch.arange(V) if kind == "dflash2" else IDS
    module: Any = speculated(
        kind, ids_of, transformer_layer_config=body_of(Qwen3Config, {**BODY, **body}),
        aux_hidden_state_layer_ids=AUX_LAYERS, mask_token_id=7, block_size=BLOCK, **fields,
    )  # fmt: skip
    with torch.no_grad():
        module.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        if len(ids_of) == V:
            module.lm_head.weight.copy_(target.lm_head.weight)
    runner = load(tmp_path, module, target, kind.rstrip("2")).loaded.runner
    head = read_head(tmp_path, runner)
    tokens = torch.randint(0, V, (40,)).tolist()
    text, length = read_text(runner, tokens, AUX_LAYERS), head.record.drafts
    drafts = block_drafts(head, text, length, 40)
    states, ids = torch.cat([text.states[k] for k in AUX_LAYERS], -1)[None], torch.tensor([tokens])
    with torch.no_grad():
        hidden, logits, *_, places = module._backbone_forward(
            states.clone(), ids, torch.ones(1, 40), states[..., : BODY["hidden_size"]].clone(),
            torch.zeros(1, 40, dtype=torch.long), max_anchors=ANCHORS,
        )  # fmt: skip
        blocks, logits = places.view(ANCHORS, BLOCK), logits.view(ANCHORS, BLOCK, -1)
        if kind == "dspark":
            before = ids[0, blocks]
            if not head.record.from_anchor:
                before = torch.cat([before[:, :1], before[:, :-1]], 1)
            logits = logits + module.markov_head.block_bias(
                prev_token_ids=before, hidden_states=hidden.view(ANCHORS, BLOCK, -1)
            )
        if kind == "dflash2":
            before = torch.cat([ids[0, blocks][:, :1], ids[0, blocks][:, :-1]], 1)
            chosen, scores = module.candidate_selector.select(logits, hidden.view(ANCHORS, BLOCK, -1), before)
            logits = torch.full_like(logits, -torch.inf).scatter(-1, chosen, scores)
    compared = 0
    for anchor, want in zip(blocks[:, 0].tolist(), logits, strict=True):
        if anchor in drafts:
            torch.testing.assert_close(
                drafts[anchor][:, ids_of], want[BLOCK - length :], rtol=1e-3, atol=1e-3
            )
            compared += 1
    assert compared > 10


SECTION: dict[str, Any] = {"mask_token_id": 7, "target_layer_ids": [0, 2, 5]}
SCALED: dict[str, Any] = {
    "mask_token_id": 4, "input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0,
}  # fmt: skip
Z_LAB: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (SECTION, {"attention_bias": True}),
    "spread layers": (SCALED, {}),
    "windows": (SECTION, SLIDING),
    "causal": (SECTION, {"is_causal": True}),
    "free windows": (SECTION, {**SLIDING, "is_causal": False}),
}


@pytest.mark.parametrize("name", Z_LAB)
def test_drafts_are_those_of_z_labs_dflash(name: str, tmp_path: Path) -> None:
    dflash = pytest.importorskip("dflash.model")
    section, body = Z_LAB[name]
    config = body_of(
        Qwen3Config, {**BODY, **body}, dflash_config=section, block_size=BLOCK, num_target_layers=LAYERS
    )
    target: Any = reference_model(**KEYS)
    module = randomised(dflash.DFlashDraftModel(config))
    runner = load(tmp_path, module, target, "dflash").loaded.runner
    head = read_head(tmp_path, runner)
    tokens = torch.randint(0, V, (40,)).tolist()
    drafts = block_drafts(head, read_text(runner, tokens, head.record.aux_layers or ()), BLOCK - 1, 12)
    target.float()
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        context = dflash.extract_context_feature(states, module.target_layer_ids)
        for anchor, logits in drafts.items():
            ids = torch.tensor([[tokens[anchor]] + [section["mask_token_id"]] * (BLOCK - 1)])
            scale = section.get("input_embedding_scale", 1.0)
            hidden = module(
                position_ids=torch.arange(anchor + BLOCK)[None], target_hidden=context[:, :anchor],
                noise_embedding=target.model.embed_tokens(ids) * scale,
            )  # fmt: skip
            want = module.compute_logits(hidden, target.lm_head)[0, 1:]
            torch.testing.assert_close(logits, want, rtol=1e-3, atol=1e-3)
    assert len(drafts) > 8


@pytest.mark.parametrize("name", ["plain", "free windows", "causal"])
def test_drafts_are_those_of_z_labs_dflash_2(name: str, tmp_path: Path) -> None:
    dflash = pytest.importorskip("dflash.model")
    section, body = Z_LAB[name]
    config = body_of(
        Qwen3Config, {**BODY, **body}, dflash_config={**section, **DFLASH_2}, block_size=BLOCK,
        num_target_layers=LAYERS, architectures=["DFlash2DraftModel"],
    )  # fmt: skip
    target: Any = reference_model(**KEYS)
    module = randomised(dflash.DFlash2DraftModel(config))
    runner = load(tmp_path, module, target, "dflash").loaded.runner
    head = read_head(tmp_path, runner)
    tokens = torch.randint(0, V, (40,)).tolist()
    target.float()
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        context = dflash.extract_context_feature(states, module.target_layer_ids)
        for anchor in range(8, 30):
            ids = torch.tensor([[tokens[anchor]] + [section["mask_token_id"]] * (BLOCK - 1)])
            hidden = module(
                position_ids=torch.arange(anchor + BLOCK)[None], target_hidden=context[:, :anchor],
                noise_embedding=target.model.embed_tokens(ids),
            )  # fmt: skip
            path, candidates, q = module.propose(hidden[:, 1:], ids[:, 0], target.lm_head, 1.0)
            text = read_text(runner, [*tokens[: anchor + 1], *path[0].tolist()], head.record.aux_layers or ())
            logits = block_drafts(head, text, BLOCK - 1, 1)[anchor]
            torch.testing.assert_close(
                logits.softmax(-1).gather(-1, candidates[0]), q[0], rtol=1e-3, atol=1e-3
            )
