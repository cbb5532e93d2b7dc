"""DFlash heads that z-lab's own module saved, against that module; skipped where its package is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
from foredraft.doctor.block_forced import block_drafts
from foredraft.doctor.teacher_forced import read_text
from foredraft.drafters.heads.block_files import BlockFiles, read_block
from foredraft.drafters.heads.block_head import load_block
from tests.parity.test_heads import KEYS, V
from tests.support.blocks import BLOCK, BODY, SLIDING
from tests.support.checkpoints import reference_model
from tests.support.heads import LAYERS

SECTION: dict[str, Any] = {"mask_token_id": 7, "target_layer_ids": [0, 2, 5]}
SCALED: dict[str, Any] = {
    "mask_token_id": 4, "input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0,
}  # fmt: skip
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (SECTION, {"attention_bias": True}),
    "spread taps": (SCALED, {}),
    "windows": (SECTION, SLIDING),
    "causal": (SECTION, {"is_causal": True}),
    "free windows": (SECTION, {**SLIDING, "is_causal": False}),
}


@pytest.mark.parametrize("name", FORMS)
def test_drafts_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    dflash = pytest.importorskip("dflash.model")
    from transformers import Qwen3Config

    section, body = FORMS[name]
    given = {key: value for key, value in {**BODY, **body}.items() if key != "model_type"}
    config = Qwen3Config(
        **given, vocab_size=V, dflash_config=section, block_size=BLOCK, num_target_layers=LAYERS
    )
    torch.manual_seed(1)
    target, module = reference_model(**KEYS), dflash.DFlashDraftModel(config).float().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    module.save_pretrained(tmp_path / "head")
    target.save_pretrained(tmp_path / "target")
    llm = foredraft.load(
        tmp_path / "target", draft=tmp_path / "head", drafter="dflash", device="cpu", policy="fixed"
    )
    runner, files = llm.loaded.runner, read_block(tmp_path / "head")
    head = load_block(
        BlockFiles(files.folder, files.record.for_target(llm.loaded.spec, "it"), files.shapes), runner
    )
    tokens = torch.randint(0, V, (40,)).tolist()
    drafts = block_drafts(head, read_text(runner, tokens, head.record.taps or ()), BLOCK - 1, 12)
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
