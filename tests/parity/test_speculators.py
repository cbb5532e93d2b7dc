"""EAGLE-3 heads that speculators itself saved, against its own module; skipped where it is not installed.

Its training-time test reads the same pairs as a draft after every position of a text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foredraft
from foredraft.doctor.teacher_forced import head_drafts, read_text
from foredraft.drafters.heads.eagle3_files import read_eagle3
from foredraft.drafters.heads.eagle3_head import load_eagle3
from tests.parity.test_heads import KEYS, V
from tests.support.checkpoints import reference_model
from tests.support.heads import BODY

STEPS, WORDS = 3, 6
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual": {"norm_before_residual": True},
    "eagle-3.1": {"norm_output": True, "fc_norm": True},
    "before fc": {"norm_before_fc": True, "norm_before_residual": True},
}


@pytest.mark.parametrize("body", ["llama", "qwen3"])
@pytest.mark.parametrize("name", FLAGS)
def test_drafts_are_those_of_the_reference(name: str, body: str, tmp_path: Path) -> None:
    eagle3 = pytest.importorskip("speculators.models.eagle3.core")
    config = pytest.importorskip("speculators.models.eagle3.config")
    shared = pytest.importorskip("speculators.config")
    proposals = pytest.importorskip("speculators.proposals.greedy")
    from transformers import LlamaConfig, Qwen3Config

    kind = {"llama": LlamaConfig, "qwen3": Qwen3Config}[body]
    layer = kind(
        **{key: value for key, value in BODY.items() if key != "model_type"}, vocab_size=V, head_dim=24
    )
    layer._attn_implementation = "eager"
    proposal = proposals.GreedyTokenProposalConfig(speculative_tokens=STEPS)
    config.Eagle3SpeculatorConfig.model_rebuild(force=True, _types_namespace={"torch": torch})
    made = config.Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=WORDS, eagle_aux_hidden_state_layer_ids=[1, 3, 6],
        speculators_config=shared.SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=shared.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **FLAGS[name],
    )  # fmt: skip
    torch.manual_seed(1)
    module = eagle3.Eagle3DraftModel(made).float().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    ids = torch.tensor([0, 2, 3, 6, 7, 10])
    module.load_vocab_mappings(
        torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True), ids - torch.arange(WORDS)
    )
    module.save_pretrained(tmp_path / "head")
    reference_model(**KEYS).save_pretrained(tmp_path / "target")
    llm = foredraft.load(
        tmp_path / "target", draft=tmp_path / "head", drafter="eagle3", device="cpu", policy="fixed"
    )
    runner, spec = llm.loaded.runner, llm.loaded.spec
    files = read_eagle3(tmp_path / "head")
    assert files.record.planned == STEPS and files.record.spelling == "speculators"
    head = load_eagle3(
        type(files)(files.folder, files.record.for_target(spec, "the head"), files.shapes), runner
    )
    tokens = torch.randint(0, V, (40,)).tolist()
    text = read_text(runner, tokens, (1, 3, 6))
    drafts = head_drafts(head, text, STEPS, 40)
    seen: list[Tensor] = []
    hook = module.lm_head.register_forward_hook(lambda *call: seen.append(call[2][0]))
    taps = torch.cat([text.states[tap] for tap in (1, 3, 6)], -1)
    with torch.no_grad():
        module(
            taps[None, :-1].clone(), torch.tensor([tokens[1:]]),
            torch.zeros(1, len(tokens) - 1, dtype=torch.long), ttt_steps=STEPS,
        )  # fmt: skip
    hook.remove()
    assert len(seen) == STEPS and len(drafts) > 20
    for anchor, logits in drafts.items():
        want = torch.stack([step[anchor - 1] for step in seen])
        torch.testing.assert_close(logits[:, ids], want, rtol=1e-3, atol=1e-3)
