"""Models that Foredraft does not run: what each one is, and a supported model of about its size.

Contract: every model that is refused for its kind gets one line that says the kind, and what to give instead.
The tables hold the known values of `model_type`, and the known architectures of GGUF files; of any other
model the keys of its config tell the kind. The error for a misspelt `model_type` names the nearest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from foredraft.errors import CheckpointError, did_you_mean, shortened

__all__ = ["INSTEAD", "KINDS", "PAGE", "kind_of", "refusal", "refusal_of_gguf"]

PAGE = "docs/models.md lists the models that are supported"
KINDS = {
    "experts": "a mixture of experts",
    "latent": "a mixture of experts with latent attention",
    "latent-dense": "a model with latent attention",
    "hybrid": "a model with recurrent layers",
    "hybrid-experts": "a mixture of experts with recurrent layers",
    "encoder": "an encoder, which writes no text",
    "encoder-decoder": "an encoder-decoder",
    "vision": "a model of images, with or without text",
    "audio": "a model of speech or sound",
    "diffusion": "a model that writes by diffusion, not token by token",
}
# A supported model of about a size: of the weights that one token reads, or of all where memory is the bound.
SMALL, MEDIUM, LARGE, LARGEST = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B"
EIGHT = "Qwen/Qwen3-8B"
# What each name is the checkpoint of, for the tests.
INSTEAD = dict.fromkeys((SMALL, MEDIUM, EIGHT, LARGE, LARGEST), "qwen3")
# Kind -> what to give instead -> values of `model_type`, and architectures of GGUF files where these differ.
_TABLE: dict[str, dict[str, str]] = {
    "experts": {
        SMALL: "flex_olmo granitemoe granitemoe_swa granitemoeshared jetmoe nllb_moe olmoe",
        MEDIUM: """
            afmoe bailingmoe bailingmoe2 doge dots1 ernie4_5-moe ernie4_5_moe gpt-oss gpt_oss grovemoe
            hunyuan-moe hunyuan_v1_moe phimoe qwen2_moe qwen2moe qwen3_moe qwen3moe smallthinker
            """,
        LARGE: """
            aria cohere2_moe dbrx exaone-moe exaone_moe glm4_moe glm4moe minimax_m2 mixtral solar_open
            """,
        LARGEST: "grok grok-1 llama4 llama4_text qwen3_omni_moe qwen3_vl_moe",
    },
    "latent": {
        MEDIUM: "deepseek2 deepseek_v2",
        LARGEST: """
            axk1 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl_v2 glm4_moe_lite glm_moe_dsa kimi_k2
            kimi_k25 longcat_flash mistral4 mistral_large4
            """,
    },
    "latent-dense": {MEDIUM: "minicpm3 plm youtu"},
    "hybrid": {
        SMALL: """
            arwkv7 bamba falcon-h1 falcon_h1 falcon_mamba lfm2 lfm3 mamba mamba2 plamo2 recurrent_gemma
            recurrentgemma rwkv rwkv6 rwkv7 xlstm zamba zamba2
            """,
        MEDIUM: "nemotron_h olmo_hybrid qwen35 qwen3_5 qwen3_5_text",
    },
    "hybrid-experts": {
        SMALL: "granitehybrid granitemoehybrid lfm2_moe lfm2moe",
        MEDIUM: "jamba kimi_linear qwen35moe qwen3_5_moe qwen3_5_moe_text qwen3_next qwen3next",
        LARGE: "bailing_hybrid minimax nemotron_h_moe nemotron_h_omni",
    },
    "encoder": {
        SMALL: """
            albert bert big_bird camembert canine clip convbert data2vec deberta deberta_v2 distilbert electra
            embedding_gemma2 ernie esm eurobert flaubert fnet funnel gemma-embedding ibert jina-bert-v2
            jina_embeddings_v3 layoutlm longformer luke megatron_bert mobilebert modern-bert modernbert mpnet
            mra neo-bert nomic-bert nomic_bert nystromformer rembert roberta roberta_prelayernorm roformer
            siglip siglip2 splinter squeezebert xlm xlm_roberta xlm_roberta_xl xmod yoso
            """,
    },
    "encoder-decoder": {
        SMALL: """
            bart barthez bartpho bigbird_pegasus blenderbot blenderbot_small byt5 encoder_decoder fsmt led
            longt5 m2m_100 marian mbart mbart50 mt5 mvp myt5 nllb pegasus pegasus_x plbart prophetnet
            switch_transformers t5 t5encoder t5gemma t5gemma2 udop umt5
            """,
    },
    "vision": {
        MEDIUM: """
            aya_vision blip blip_2 chameleon cogvlm cohere2_vision deepseek_vl dinov2 dinov3_vit emu3
            florence2 fuyu gemma3n glm46v glm4v got_ocr2 idefics idefics2 idefics3 internvl janus kosmos2
            lfm2_vl llava llava_next llava_onevision mllama molmo2 ovis2 paligemma phi4_multimodal pixtral
            qwen2_5_omni qwen2_5_vl qwen2_vl qwen2vl qwen3_vl qwen3vl smolvlm video_llava vipllava vit
            """,
    },
    "audio": {
        SMALL: """
            audioflamingo3 bark csm dia granite_speech hubert kyutai_speech_to_text moshi musicgen parakeet
            qwen2_audio qwen3_asr seamless_m4t seamless_m4t_v2 speech_to_text speecht5 voxtral wav2vec2
            wavtokenizer-dec whisper
            """,
    },
    "diffusion": {EIGHT: "diffusion_gemma dream llada llada-moe"},
}
KNOWN: dict[str, tuple[str, str]] = {
    name: (kind, instead)
    for kind, rows in _TABLE.items()
    for instead, names in rows.items()
    for name in names.split()
}
# Keys of a config.json, or of a GGUF file behind the architecture, that tell what an unknown model is.
EXPERTS = """
    enable_moe_block expert_count moe_num_experts n_routed_experts num_experts num_local_experts
    """.split()
RECURRENT = """
    conv_L_cache linear_num_value_heads mamba_d_state rnn_width shortconv.l_cache ssm.conv_kernel
    ssm.state_size ssm_cfg ssm_state_size state_size wkv.head_size
    """.split()
RECURRENT_LAYERS = ("mamba", "linear_attention", "recurrent", "conv", "kda", "ssm")  # how `layer_types` begin
LATENT = ("kv_lora_rank", "attention.kv_lora_rank")


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Return what kind of model a config describes, by its keys alone; None where they do not tell.

    Examples:
        >>> kind_of({"num_experts": 64, "layer_types": ["linear_attention"]}), kind_of({"hidden_size": 64})
        ('hybrid-experts', None)
    """
    layers = config.get("layer_types")
    kinds = [kind for kind in layers if isinstance(kind, str)] if isinstance(layers, list) else []
    experts = any(_counts(config.get(key)) for key in EXPERTS)
    recurrent = any(config.get(key) for key in RECURRENT)
    recurrent = recurrent or any(kind.startswith(RECURRENT_LAYERS) for kind in kinds)
    if config.get("is_encoder_decoder") is True:
        return "encoder-decoder"
    if recurrent:
        return "hybrid-experts" if experts else "hybrid"
    if any(config.get(key) for key in LATENT):
        return "latent" if experts else "latent-dense"
    return "experts" if experts else None


def _counts(value: object) -> bool:
    """Return whether a number of experts, or a list of numbers, is more than one; or a flag is set."""
    numbers = value if isinstance(value, list) else [value]
    return value is True or any(isinstance(each, int) and each > 1 for each in numbers)


def refusal(config: Mapping[str, Any], supported: Iterable[str]) -> CheckpointError:
    """Return the error of a config.json whose architecture is not supported.

    Args:
        config: Its content.
        supported: The values of `model_type` that are.
    """
    names, given, text = config.get("architectures"), config.get("model_type"), config.get("text_config")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else names
    found = f"model_type {shortened(given)}"
    if given is None:
        found = f"architecture {shortened(architecture)}"
    kind, instead = _known(given, config)
    if kind is None and isinstance(text, dict):
        kind, instead = _known(text.get("model_type"), text)
    nearest = given if isinstance(given, str) else str(architecture).removesuffix("ForCausalLM").lower()
    return CheckpointError(
        f"config.json: {found} is not supported{_clause(kind)}",
        remedy=_remedy(kind, instead, nearest, supported),
    )


def refusal_of_gguf(
    architecture: object, metadata: Mapping[str, Any], supported: Iterable[str]
) -> tuple[str, str]:
    """Return the problem and the remedy of a GGUF file whose architecture is not supported.

    Args:
        architecture: Its `general.architecture`.
        metadata: What else it says.
        supported: The architectures that are.
    """
    own = {
        key.partition(".")[2]: value for key, value in metadata.items() if key.startswith(f"{architecture}.")
    }
    kind, instead = _known(architecture, own)
    nearest = architecture if isinstance(architecture, str) else ""
    return (
        f"has the architecture {shortened(architecture)}, which is not supported{_clause(kind)}",
        _remedy(kind, instead, nearest, supported),
    )


def _known(name: object, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the kind of a model and what to give instead; no kind where neither name nor keys tell."""
    if isinstance(name, str) and name in KNOWN:
        return KNOWN[name]
    return kind_of(config), MEDIUM


def _clause(kind: str | None) -> str:
    return "" if kind is None else f": it is {KINDS[kind]}"


def _remedy(kind: str | None, instead: str, name: str, supported: Iterable[str]) -> str:
    if kind is not None:
        return f"give a dense model of its size that is supported, such as {instead}; {PAGE}"
    return f"supported are {', '.join(sorted(supported))}; {PAGE}{did_you_mean(name, supported)}"
