"""DFlash and DSpark heads that speculators itself saved, against its own modules; skipped where it is not installed.

Its pass over anchored blocks reads the same context as a draft after each anchor, and the text's own tokens before
each slot.
"""

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
from tests.support.blocks import BLOCK, BODY, RANK, SLIDING
from tests.support.checkpoints import reference_model

WORDS, ANCHORS, TAPS = 6, 24, [1, 3, 6]
SPARK: dict[str, Any] = {"markov_rank": RANK}
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("dflash", {}, {}),
    "windows": ("dflash", {}, SLIDING),
    "free windows": ("dflash", {"sliding_window_non_causal": True, "sample_from_anchor": True}, SLIDING),
    "vanilla": ("dspark", {**SPARK, "markov_head_type": "vanilla"}, {"attention_bias": True}),
    "gated": ("dspark", {**SPARK, "markov_head_type": "gated", "enable_confidence_head": False}, {}),
    "rnn": ("dspark", {**SPARK, "markov_head_type": "rnn"}, {}),
    "rnn of masked slots": ("dspark", {**SPARK, "markov_head_type": "rnn", "sample_from_anchor": False}, {}),
}


@pytest.mark.parametrize("name", FORMS)
def test_drafts_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    kind, fields, body = FORMS[name]
    core = pytest.importorskip(f"speculators.models.{kind}.core")
    config = pytest.importorskip(f"speculators.models.{kind}.config")
    shared = pytest.importorskip("speculators.config")
    proposals = pytest.importorskip("speculators.proposals.greedy")
    from transformers import Qwen3Config

    given = {key: value for key, value in {**BODY, **body}.items() if key != "model_type"}
    layer = Qwen3Config(**given, vocab_size=V)
    layer._attn_implementation = "eager"
    proposal = proposals.GreedyTokenProposalConfig(speculative_tokens=3)
    made = getattr(config, {"dflash": "DFlash", "dspark": "DSpark"}[kind] + "SpeculatorConfig")(
        transformer_layer_config=layer, draft_vocab_size=WORDS, aux_hidden_state_layer_ids=TAPS, mask_token_id=7,
        block_size=BLOCK,
        speculators_config=shared.SpeculatorsConfig(
            algorithm=kind, proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=shared.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **fields,
    )  # fmt: skip
    torch.manual_seed(1)
    target = reference_model(**KEYS)
    module = getattr(core, {"dflash": "DFlash", "dspark": "DSpark"}[kind] + "DraftModel")(made).float().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
        module.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    ids = torch.tensor([0, 2, 3, 6, 7, 10])
    marks = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    module.load_vocab_mappings(marks, ids - torch.arange(WORDS))
    module.save_pretrained(tmp_path / "head")
    target.save_pretrained(tmp_path / "target")
    llm = foredraft.load(
        tmp_path / "target", draft=tmp_path / "head", drafter=kind, device="cpu", policy="fixed"
    )
    runner, files = llm.loaded.runner, read_block(tmp_path / "head")
    head = load_block(
        BlockFiles(files.folder, files.record.for_target(llm.loaded.spec, "it"), files.shapes), runner
    )
    tokens = torch.randint(0, V, (40,)).tolist()
    text = read_text(runner, tokens, TAPS)
    length = files.record.drafts
    drafts = block_drafts(head, text, length, 40)
    taps, given_ids = torch.cat([text.states[tap] for tap in TAPS], -1)[None], torch.tensor([tokens])
    with torch.no_grad():
        hidden, logits, *_, places = module._backbone_forward(
            taps.clone(), given_ids, torch.ones(1, 40), taps[..., : BODY["hidden_size"]].clone(),
            torch.zeros(1, 40, dtype=torch.long), max_anchors=ANCHORS,
        )  # fmt: skip
        blocks, logits = places.view(ANCHORS, BLOCK), logits.view(ANCHORS, BLOCK, -1)
        if kind == "dspark":
            before = given_ids[0, blocks]
            if not files.record.from_anchor:
                before = torch.cat([before[:, :1], before[:, :-1]], 1)
            logits = logits + module.markov_head.block_bias(
                prev_token_ids=before, hidden_states=hidden.view(ANCHORS, BLOCK, -1)
            )
    compared = 0
    for anchor, want in zip(blocks[:, 0].tolist(), logits, strict=True):
        if anchor in drafts:
            torch.testing.assert_close(drafts[anchor][:, ids], want[BLOCK - length :], rtol=1e-3, atol=1e-3)
            compared += 1
    assert compared > 10
