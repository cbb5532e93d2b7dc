"""The supported architectures: which keys of a `config.json` each one reads, and how.

A family is one entry in the file of its lineage: what turns config keys into fields of `ModelSpec`, how
GGUF files hold it, and its tensors' names. An absent key has the default that `transformers`
gives it in that family. Papers:

    Gemma     arXiv:2403.08295    OPT          arXiv:2205.01068    EXAONE 4   arXiv:2507.11407
    Gemma 2   arXiv:2408.00118    GPT-NeoX     arXiv:2204.06745    GLM-4      arXiv:2406.12793
    Gemma 3   arXiv:2503.19786    StableLM     arXiv:2402.17834    Cohere 2   arXiv:2504.00698
    Qwen 2    arXiv:2407.10671    Phi          arXiv:2306.11644    Granite    arXiv:2405.04324
    Qwen 3    arXiv:2505.09388    StarCoder 2  arXiv:2402.19173    InternLM   arXiv:2403.17297
    Mistral   arXiv:2310.06825    OLMo 2       arXiv:2501.00656    Phi 3      arXiv:2404.14219
    SmolLM 3  arXiv:2305.19466    OLMo 3       arXiv:2512.13961    Qwen 3.5   arXiv:2412.06464 (its layers)
"""

from __future__ import annotations

from foredraft.model.families import gemma, gpt, hybrid, llama, mixers, muse
from foredraft.model.families.shared import GGUF, Family

FAMILIES: dict[str, Family] = dict(
    sorted(item for lineage in (gemma, gpt, hybrid, llama, mixers, muse) for item in lineage.FAMILIES.items())
)
# architecture of a GGUF file -> that of Hugging Face, and how the file holds it
IN_GGUF: dict[str, tuple[str, GGUF]] = {
    each.architecture: (name, each) for name, family in FAMILIES.items() for each in family.gguf
}
