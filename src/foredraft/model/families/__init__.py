"""The supported architectures: which keys of a `config.json` each one reads, and how.

A family is one line of `FAMILIES` and one function, in the file of its lineage, that turns config keys into
fields of `ModelSpec`. An absent key has the default that `transformers` gives it in that family. Papers:

    Gemma     arXiv:2403.08295    OPT          arXiv:2205.01068    EXAONE 4   arXiv:2507.11407
    Gemma 2   arXiv:2408.00118    GPT-NeoX     arXiv:2204.06745    GLM-4      arXiv:2406.12793
    Gemma 3   arXiv:2503.19786    StableLM     arXiv:2402.17834    Cohere 2   arXiv:2504.00698
    Qwen 2    arXiv:2407.10671    Phi          arXiv:2306.11644    Granite    arXiv:2405.04324
    Qwen 3    arXiv:2505.09388    StarCoder 2  arXiv:2402.19173    InternLM   arXiv:2403.17297
    Mistral   arXiv:2310.06825    OLMo 2       arXiv:2501.00656    Phi 3      arXiv:2404.14219
    SmolLM 3  arXiv:2305.19466    OLMo 3       arXiv:2512.13961
"""

from __future__ import annotations

from foredraft.model.config import SHARED_KEYS
from foredraft.model.families import gemma, gpt, llama
from foredraft.model.families.shared import Family

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {
    "Cohere2ForCausalLM": Family("cohere2", llama.cohere2, eos=255001, bos=5, positions=8192),
    "Exaone4ForCausalLM": Family("exaone4", llama.exaone4, eos=2, bos=0, positions=2048),
    "GPT2LMHeadModel": Family(
        "gpt2", gpt.gpt2, eos=50256, bos=50256, positions=1024, spelled=gpt.GPT2_KEYS, inner_key="n_inner"
    ),
    "GPTNeoXForCausalLM": Family("gpt_neox", gpt.gpt_neox, eos=2, bos=0, positions=2048),
    "GemmaForCausalLM": Family("gemma", gemma.gemma, eos=1, bos=2, positions=8192),
    "GraniteForCausalLM": Family("granite", llama.granite, eos=2, bos=1, positions=2048),
    "InternLM2ForCausalLM": Family(
        "internlm2", llama.internlm2, eos=2, bos=1, positions=2048, keys=SHARED_KEYS | llama.KEYS
    ),
    "Gemma2ForCausalLM": Family("gemma2", gemma.gemma2, eos=1, bos=2, positions=8192),
    "Gemma3ForCausalLM": Family("gemma3_text", gemma.gemma3, eos=1, bos=2, positions=131_072),
    "Gemma4ForCausalLM": Family("gemma4_text", gemma.gemma4, eos=1, bos=2, positions=131_072),
    "Gemma4UnifiedForCausalLM": Family(
        "gemma4_unified_text", gemma.gemma4_unified, eos=1, bos=2, positions=262_144
    ),
    "Glm4ForCausalLM": Family("glm4", llama.glm4, eos=llama.ENDS, bos=None, positions=131_072),
    "LlamaForCausalLM": Family("llama", llama.llama, eos=2, bos=1, positions=2048),
    "Ministral3ForCausalLM": Family("ministral3", llama.ministral3, eos=2, bos=1, positions=262_144),
    "MinistralForCausalLM": Family("ministral", llama.mistral, eos=2, bos=1, positions=131_072),
    "MistralForCausalLM": Family("mistral", llama.mistral, eos=2, bos=1, positions=131_072),
    "OPTForCausalLM": Family("opt", gpt.opt, eos=2, bos=2, positions=2048, inner_key="ffn_dim"),
    "Olmo2ForCausalLM": Family("olmo2", llama.olmo2, eos=50279, bos=None, positions=2048),
    "Olmo3ForCausalLM": Family("olmo3", llama.olmo3, eos=50279, bos=None, positions=2048),
    "Phi3ForCausalLM": Family("phi3", llama.phi3, eos=32_000, bos=1, positions=4096),
    "PhiForCausalLM": Family("phi", gpt.phi, eos=2, bos=1, positions=2048),
    "Qwen2ForCausalLM": Family("qwen2", llama.qwen2, eos=None, bos=None, positions=32_768),
    "Qwen3ForCausalLM": Family("qwen3", llama.qwen3, eos=None, bos=None, positions=32_768),
    "SeedOssForCausalLM": Family("seed_oss", llama.seed_oss, eos=2, bos=0, positions=524_288),
    "SmolLM3ForCausalLM": Family("smollm3", llama.smollm3, eos=128_001, bos=128_000, positions=32_768),
    "StableLmForCausalLM": Family("stablelm", gpt.stablelm, eos=0, bos=0, positions=4096),
    "Starcoder2ForCausalLM": Family("starcoder2", gpt.starcoder2, eos=50256, bos=50256, positions=4096),
}
