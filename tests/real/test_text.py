"""Text of real models: tokens, conversations, the README, and speculative decoding that writes what plain decoding writes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.cli import main
from foredraft.model.locate import resolve
from tests.support import real_models
from tests.support.running import ROOT
from tests.support.strings import strings

TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_new_tokens=TOKENS)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_new_tokens=TOKENS)
# dtype, weights and what the target's file is made of; None: as it is
ARITHMETIC: dict[str, dict[str, Any]] = {
    "Q4_1, bfloat16": {"dtype": "bfloat16"},
    "Q4_1, float32": {"dtype": "float32"},
    "BF16, bfloat16": {"kind": "BF16"},
    "BF16, int4": {"kind": "BF16", "weights": "int4"},
    "BF16, int8": {"kind": "BF16", "weights": "int8"},
}


def check_same(llm: LLM, prompts: list[str]) -> None:
    """Check that every drafter writes the plain text: greedy and seeded in a batch, and greedy alone."""
    for params in (GREEDY, SEEDED):
        plain = llm.generate(prompts, params, drafter="none")
        assert sum(len(output.token_ids) for output in plain) > TOKENS
        for drafter in llm.loaded.engine.drafters:
            given = {"prediction": prompts[0]} if drafter == "prediction" else {}
            batch = llm.generate(prompts, params, drafter=drafter, **given)
            assert [output.token_ids for output in batch] == [output.token_ids for output in plain], drafter
            assert sum(output.stats.drafted for output in batch) > 0, drafter
            if params is GREEDY:
                [alone] = llm.generate(prompts[0], params, drafter=drafter, **given)
                assert alone.token_ids == plain[0].token_ids, drafter


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_every_drafter_writes_the_plain_text(smollm2: Path, name: str, made: Path) -> None:
    options = {"draft": real_models.requantised(smollm2, "Q2_K", made), "plan": "exit:12"} | ARITHMETIC[name]
    kind = options.pop("kind", None)
    if kind is not None and "weights" not in options:
        options["draft_weights"] = "int4"
    target = smollm2 if kind is None else real_models.requantised(smollm2, kind, made)
    with foredraft.load(target, device="cpu", policy="fixed", max_length=2048, **options) as llm:
        check_same(llm, real_models.prompts(2))


@pytest.mark.heavy
def test_tokens_are_those_of_transformers(smollm2: Path) -> None:
    """Without digits, of which transformers 5.23 does not know the rule of these vocabularies ("smollm")."""
    found = Tokenizer.from_buffer(resolve(smollm2).tokenizer_json)
    reference = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    compared = [text for text in strings(2000) if not any(each.isnumeric() for each in text)]
    assert len(compared) > 1000
    for text in compared:
        ids = found.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text, add_special_tokens=False), text


def test_digits_are_words_of_their_own(smollm2: Path) -> None:
    """The spaces before a digit are a word, too; GPT-2 leaves the last of them to the digit."""
    found = Tokenizer.from_buffer(resolve(smollm2).tokenizer_json)
    assert found.encode("12  1").tokens == ["1", "2", "ĠĠ", "1"]


@pytest.mark.heavy
def test_the_end_of_a_turn_ends_a_reply(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--model", str(smollm2), "--temperature", "0", "--max-new-tokens", "200", "--json"]
    assert main([*command, "--chat", "What is 2+2?"]) == 0
    [output] = json.loads(capsys.readouterr().out)["outputs"]
    assert output["finish_reason"] == "eos" and "<|im_end|>" not in output["text"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_gemma_past_its_window(gemma: Path, smollm2: Path) -> None:
    """Layers see 512 positions; a draft model of another tokenizer drafts, too."""
    prompt = "\n".join(real_models.prompts(8))
    with foredraft.load(gemma, draft=smollm2, device="cpu", policy="fixed", plan="exit:6") as llm:
        assert len(llm.encode(prompt)[0]) > 512
        check_same(llm, [prompt, *real_models.prompts(3)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gemmas_tokens_are_those_of_transformers(gemma: Path) -> None:
    """But for a spelt U+2581 and long runs of spaces, which transformers reads unlike the model's own tokenizer."""
    found = Tokenizer.from_buffer(resolve(gemma).tokenizer_json)
    reference = AutoTokenizer.from_pretrained(gemma.parent, gguf_file=gemma.name)
    for text in strings(2000):
        if "\N{LOWER ONE EIGHTH BLOCK}" not in text and " " * 17 not in text:
            ids = found.encode(text, add_special_tokens=False).ids
            assert ids == reference.encode(text, add_special_tokens=False), text


EXAMPLE = re.search(
    r"<!-- a real model -->\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_the_example_runs(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert EXAMPLE is not None
    lines = [line for line in EXAMPLE[1].splitlines() if line.startswith("foredraft ")]
    assert len(lines) == 3
    for line in lines:
        _, *words = shlex.split(line)
        assert main([word.replace("$MODEL", str(smollm2)) for word in words]) == 0, line
        assert capsys.readouterr().out
