"""Every type of a GGUF file, made of a real model: logits and greedy text are those of transformers (float32).

Types whose quantisation needs a matrix of importances (IQ1, IQ2) are only tested on random blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foredraft.kernels.compilation import library
from foredraft.model.locate import resolve
from foredraft.model.runner import Runner
from foredraft.model.weights import load_decoder
from tests.support import real_models

# Most widths of both models are no multiple of 256; there ik_llama.cpp's program makes types without blocks of 256,
# one of which, Q6_0, is its own. So types of 256 are given to one matrix of a layer.
KINDS = ["Q4_0", "Q5_0", "Q5_1", "Q8_0", "pure IQ4_NL", "pure MXFP4", "Q6_K", "IQ3_S"]
KINDS += ["Q4_1 Q2_K", "Q5_0 Q3_K", "Q8_0 Q4_K", "Q5_1 Q5_K", "Q4_0 IQ4_XS"]
PROMPT, GREEDY = 24, 12  # tokens of a prompt, and of a greedy text


def check(file: Path) -> None:
    """Hold logits [T, V], and the greedy continuation, against transformers' reading of the file."""
    reference = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    runner = Runner(load_decoder(resolve(file), dtype=torch.float32, native=library() is not None))
    tokens = torch.randint(3, 40_000, (1, PROMPT), generator=torch.Generator().manual_seed(7))
    cache = runner.new_cache(1, PROMPT + GREEDY)
    given, logits, text = tokens, [], []
    for at in (0, *range(PROMPT, PROMPT + GREEDY - 1)):
        scored = runner.forward(cache, given, [at]).logits
        assert scored is not None
        logits.append(scored[0])
        text.append(int(scored[0, -1].argmax()))
        given = torch.tensor([[text[-1]]])
    with torch.inference_mode():
        expected = reference(torch.cat([tokens, torch.tensor([text[:-1]])], dim=1)).logits[0]
    found = torch.cat(logits)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert text == expected[PROMPT - 1 :].argmax(-1).tolist()


@pytest.mark.heavy
def test_smollm2_as_it_is(smollm2: Path) -> None:
    check(smollm2)


@pytest.mark.heavy
def test_smollm2_in_a_mixture(smollm2: Path, made: Path) -> None:
    """Values in Q8_0 beside queries and keys in Q5_0, as in every small Q4_K_M."""
    check(real_models.requantised(smollm2, "Q4_K_M", made))


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_smollm2_in_every_type(smollm2: Path, kind: str, made: Path) -> None:
    check(real_models.requantised(smollm2, kind, made))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gemma_as_it_is(gemma: Path) -> None:
    check(gemma)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_gemma_in_every_type(gemma: Path, kind: str, made: Path) -> None:
    check(real_models.requantised(gemma, kind, made))
