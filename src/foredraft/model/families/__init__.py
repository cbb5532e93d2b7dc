"""The supported architectures: which keys of a `config.json` each one reads, and how.

Contract: a family is one line of `FAMILIES` and one function, in the file of its lineage, that turns config
keys into fields of `ModelSpec`. An absent key has the default that `transformers` gives it in that family.

    Gemma     norms that multiply by 1 + weight, scaled embeddings (arXiv:2403.08295)
    Qwen 2    biases of queries, keys and values (arXiv:2407.10671)
    Qwen 3    norms of queries and keys (arXiv:2505.09388)
    Gemma 2   soft-caps, alternating sliding windows (arXiv:2408.00118)
    Gemma 3   norms of queries and keys, a rotary base of its own in windowed layers (arXiv:2503.19786)
    Gemma 4   larger heads in layers with full attention, shared keys and values
    GPT-2     layer norms, learned positions, an MLP without a gate
    OPT       the same with ReLU (arXiv:2205.01068)
    GPT-NeoX  attention and MLP side by side, a part of each head rotated (arXiv:2204.06745)
    StableLM  layer norms, a part of each head rotated (arXiv:2402.17834)
    Phi       one norm for attention and MLP (arXiv:2306.11644)
    StarCoder 2   layer norms, an MLP without a gate (arXiv:2402.19173)
    OLMo 2    norms after sub-layers, and of whole queries and keys (arXiv:2501.00656)
    OLMo 3    the same with sliding windows in three of four layers (arXiv:2512.13961)
    EXAONE 4  norms after sub-layers, no rotation in layers with full attention (arXiv:2507.11407)
    GLM-4     norms before and after sub-layers (arXiv:2406.12793)
    Cohere 2  attention and MLP of one norm, logits times a factor (arXiv:2504.00698)
    Granite   factors on embeddings, sub-layers, scores and logits (arXiv:2405.04324)
    InternLM  weights stored by key heads (arXiv:2403.17297)
    Mistral   sliding window in every layer (arXiv:2310.06825)
    Phi 3     fused weights, a rotation of a part of each head, LongRoPE (arXiv:2404.14219)
"""

from __future__ import annotations

from foredraft.model.families import (
    cohere,
    exaone,
    gemma,
    gemma4,
    glm,
    gpt,
    granite,
    internlm,
    llama,
    ministral,
    neox,
    olmo,
    phi,
    qwen,
    seed,
    smollm,
    starcoder,
)
from foredraft.model.families.family import Family
from foredraft.model.reference_keys import SHARED

__all__ = ["FAMILIES", "Family"]

FAMILIES: dict[str, Family] = {
    "Cohere2ForCausalLM": Family("cohere2", cohere.cohere2, eos=255001, bos=5, positions=8192),
    "Exaone4ForCausalLM": Family("exaone4", exaone.exaone4, eos=2, bos=0, positions=2048),
    "GPT2LMHeadModel": Family(
        "gpt2", gpt.gpt2, eos=50256, bos=50256, positions=1024, spelled=gpt.GPT2_KEYS, inner_key="n_inner"
    ),
    "GPTNeoXForCausalLM": Family("gpt_neox", neox.gpt_neox, eos=2, bos=0, positions=2048),
    "GemmaForCausalLM": Family("gemma", gemma.gemma, eos=1, bos=2, positions=8192),
    "GraniteForCausalLM": Family("granite", granite.granite, eos=2, bos=1, positions=2048),
    "InternLM2ForCausalLM": Family(
        "internlm2", internlm.internlm2, eos=2, bos=1, positions=2048, keys=SHARED | internlm.KEYS
    ),
    "Gemma2ForCausalLM": Family("gemma2", gemma.gemma2, eos=1, bos=2, positions=8192),
    "Gemma3ForCausalLM": Family("gemma3_text", gemma.gemma3, eos=1, bos=2, positions=131_072),
    "Gemma4ForCausalLM": Family("gemma4_text", gemma4.gemma4, eos=1, bos=2, positions=131_072),
    "Gemma4UnifiedForCausalLM": Family(
        "gemma4_unified_text", gemma4.gemma4_unified, eos=1, bos=2, positions=262_144
    ),
    "Glm4ForCausalLM": Family("glm4", glm.glm4, eos=glm.ENDS, bos=None, positions=131_072),
    "LlamaForCausalLM": Family("llama", llama.llama, eos=2, bos=1, positions=2048),
    "Ministral3ForCausalLM": Family("ministral3", ministral.ministral3, eos=2, bos=1, positions=262_144),
    "MinistralForCausalLM": Family("ministral", llama.mistral, eos=2, bos=1, positions=131_072),
    "MistralForCausalLM": Family("mistral", llama.mistral, eos=2, bos=1, positions=131_072),
    "OPTForCausalLM": Family("opt", gpt.opt, eos=2, bos=2, positions=2048, inner_key="ffn_dim"),
    "Olmo2ForCausalLM": Family("olmo2", olmo.olmo2, eos=50279, bos=None, positions=2048),
    "Olmo3ForCausalLM": Family("olmo3", olmo.olmo3, eos=50279, bos=None, positions=2048),
    "Phi3ForCausalLM": Family("phi3", phi.phi3, eos=32_000, bos=1, positions=4096),
    "PhiForCausalLM": Family("phi", neox.phi, eos=2, bos=1, positions=2048),
    "Qwen2ForCausalLM": Family("qwen2", qwen.qwen2, eos=None, bos=None, positions=32_768),
    "Qwen3ForCausalLM": Family("qwen3", qwen.qwen3, eos=None, bos=None, positions=32_768),
    "SeedOssForCausalLM": Family("seed_oss", seed.seed_oss, eos=2, bos=0, positions=524_288),
    "SmolLM3ForCausalLM": Family("smollm3", smollm.smollm3, eos=128_001, bos=128_000, positions=32_768),
    "StableLmForCausalLM": Family("stablelm", neox.stablelm, eos=0, bos=0, positions=4096),
    "Starcoder2ForCausalLM": Family("starcoder2", starcoder.starcoder2, eos=50256, bos=50256, positions=4096),
}
