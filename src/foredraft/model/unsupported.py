"""What Foredraft does not run: keys of a `config.json` that no reader takes, and models, each with a
supported one.

The reference is `transformers`. A key that its class of the model type does not read is ignored, and the
caller names it. A key that it reads is refused by name and value, unless it changes no text or has a value
that switches it off; so is a key to which another implementation gives a meaning. Where no table knows a
model, the keys of its config tell the kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from foredraft.errors import CheckpointError, did_you_mean, shortened
from foredraft.model.config import GENERATION_KEYS, ConfigReader

# Keys of how a model is saved, trained, run or called; options of `generate` count in their own file only.
HARMLESS = GENERATION_KEYS | frozenset(
    """
    _attn_implementation _attn_implementation_internal _commit_hash _experts_implementation
    _experts_implementation_internal _name_or_path _output_attentions
    allow_global_per_layer_attribute_access architectures attention_dropout attn_implementation attn_pdrop
    base_model_ep_plan base_model_fsdp_plan base_model_pp_plan
    base_model_tp_plan chunk_size_feed_forward classifier_dropout dropout embd_pdrop embedding_dropout
    experts_implementation gradient_checkpointing hidden_dropout id2label init_std initializer_range
    is_decoder label2id layerdrop model_type name_or_path num_labels output_cross_attentions pretraining_tp
    problem_type reorder_and_upcast_attn resid_pdrop residual_dropout return_dict
    serialize_explicit_per_layer_config summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    """.split()
)
NEUTRAL: dict[str, tuple[object, ...]] = {  # values, besides null, that switch a key off
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "output_router_logits": (False,),
    "partial_rotary_factor": (1.0,),
    "per_layer_config": ({},),
    "use_bidirectional_attention": (False,),
}
CODE = "auto_map"
WITHOUT_NUMBERS = ("AutoTokenizer", "AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor")
Meanings = Mapping[str, tuple[tuple[object, ...], str]]
# Keys that another implementation reads -> the values without effect, besides null, and what it does.
#   exllamav2: https://github.com/turboderp-org/exllamav2/blob/master/exllamav2/config.py
#   MLX: https://github.com/ml-explore/mlx-lm/tree/main/mlx_lm/models
#   nanotron: https://github.com/huggingface/nanotron/blob/main/src/nanotron/config/models_config.py
#   vLLM: https://github.com/vllm-project/vllm/tree/main/vllm/model_executor
ELSEWHERE: Meanings = {
    "attn_logit_softcapping": ((), "exllamav2 caps attention scores"),
    CODE: (({},), "the checkpoint has modelling code of its own"),
    "dual_chunk_attention_config": ((), "vLLM attends in chunks"),
    "embedding_multiplier": ((1.0,), "exllamav2 scales embeddings"),
    "final_logit_softcapping": ((), "exllamav2 caps logits"),
    "llama_4_scaling": ((), "vLLM scales queries by their position"),
    "logit_scale": ((1.0,), "vLLM and exllamav2 scale logits"),
    "logits_scaling": ((1.0,), "exllamav2 divides logits"),
    "norm_head": ((0,), "exllamav2 norms the rows of the head"),
    "quantization": ((), "MLX packs weights in a format of its own"),
    "query_pre_attn_scalar": ((), "exllamav2 scales attention scores"),
    "residual_multiplier": ((1.0,), "exllamav2 scales what each sub-layer adds"),
    "rope_global_base_freq": ((1_000_000.0,), "MLX takes it as the rotary base"),
    "rope_interleaved": ((False,), "nanotron rotates neighbouring dimensions together"),
    "rope_traditional": ((False,), "MLX rotates neighbouring dimensions together"),
    "scale_depth": ((), "exllamav2 scales what each sub-layer adds"),
    "scale_emb": ((1,), "exllamav2 scales embeddings"),
}
# The same, of rotary parameters: https://github.com/vllm-project/vllm/tree/main/vllm/model_executor/layers
ELSEWHERE_IN_ROPE: Meanings = {
    "alpha": ((), "vLLM multiplies the rotary base by a power of it"),
    "apply_yarn_scaling": ((True,), "vLLM leaves out the attention factor"),
    "extrapolation_factor": ((1.0,), "vLLM blends frequencies by it"),
}


def check_unread(
    read: ConfigReader, reference: Collection[str], elsewhere: Meanings = ELSEWHERE
) -> dict[str, object]:
    """Return the keys that are ignored, with their values; refuse those that could change the output."""
    ignored: dict[str, object] = {}
    for key, value in read.unread().items():
        neutral, meaning = elsewhere.get(key, (NEUTRAL.get(key, ()), "ignoring it could change the output"))
        if key not in elsewhere and key not in reference:
            ignored[read.named(key)] = value
        elif value not in neutral and not (key == CODE and _is_reference(value, read.config)):
            problem = f"{read.where}: {key} = {shortened(value)} is not supported: {meaning}"
            remedy = "use a checkpoint without it, or remove the key if the model was made without it"
            raise CheckpointError(problem, remedy=remedy)
    return ignored


def _is_reference(code: object, config: Mapping[str, Any]) -> bool:
    """Return whether all classes of a model in its `auto_map` are named as the reference's own.

    `transformers` runs its own classes of those names, unless the user lets it trust the checkpoint's code.
    """
    names = config.get("architectures")
    own = names[0].removesuffix("ForCausalLM") if isinstance(names, list) and names else None
    if not isinstance(code, dict) or not isinstance(own, str) or not own:
        return False
    classes = [place for kind, place in code.items() if kind not in WITHOUT_NUMBERS]
    return all(isinstance(place, str) and place.rpartition(".")[2].startswith(own) for place in classes)


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
# Kind and what to give instead -> values of `model_type`, and architectures of GGUF files where these differ.
_TABLE = {
    ("experts", SMALL): "flex_olmo granitemoe granitemoe_swa granitemoeshared jetmoe nllb_moe olmoe",
    ("experts", MEDIUM): """
        afmoe bailingmoe bailingmoe2 doge dots1 ernie4_5-moe ernie4_5_moe gpt-oss gpt_oss grovemoe
        hunyuan-moe hunyuan_v1_moe phimoe qwen2_moe qwen2moe qwen3_moe qwen3moe smallthinker
        """,
    ("experts", LARGE): """
        aria cohere2_moe dbrx exaone-moe exaone_moe glm4_moe glm4moe minimax_m2 mixtral solar_open
        """,
    ("experts", LARGEST): "grok grok-1 llama4 llama4_text qwen3_omni_moe qwen3_vl_moe",
    ("latent", MEDIUM): "deepseek2 deepseek_v2",
    ("latent", LARGEST): """
        axk1 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl_v2 glm4_moe_lite glm_moe_dsa kimi_k2
        kimi_k25 longcat_flash mistral4 mistral_large4
        """,
    ("latent-dense", MEDIUM): "minicpm3 plm youtu",
    ("hybrid", SMALL): """
        arwkv7 bamba falcon-h1 falcon_h1 falcon_mamba lfm3 mamba mamba2 plamo2 recurrent_gemma
        recurrentgemma rwkv rwkv6 rwkv7 xlstm zamba zamba2
        """,
    ("hybrid", MEDIUM): "olmo_hybrid",
    ("hybrid-experts", SMALL): "granitehybrid lfm2_moe lfm2moe",
    ("hybrid-experts", MEDIUM): """
        jamba kimi-linear kimi_linear qwen35moe qwen3_5_moe qwen3_5_moe_text qwen3_next qwen3next qwen4_exp
        qwen4_exp_text qwen4exp
        """,
    ("hybrid-experts", LARGE): """
        bailing_hybrid bailingmoe3 glm5-next glm5_next glm5_next_text inkling2 inkling2_text inkling_mm_model
        inkling_text minimax nemotron_h_moe nemotron_h_omni
        """,
    ("encoder", SMALL): """
        albert bert big_bird camembert canine clip convbert data2vec deberta deberta_v2 distilbert electra
        embedding_gemma2 ernie esm eurobert flaubert fnet funnel gemma-embedding ibert jina-bert-v2
        jina_embeddings_v3 layoutlm longformer luke megatron_bert mobilebert modern-bert modernbert mpnet
        mra neo-bert nomic-bert nomic_bert nystromformer rembert roberta roberta_prelayernorm roformer
        siglip siglip2 splinter squeezebert xlm xlm_roberta xlm_roberta_xl xmod yoso
        """,
    ("encoder-decoder", SMALL): """
        bart barthez bartpho bigbird_pegasus blenderbot blenderbot_small byt5 encoder_decoder fsmt led
        longt5 m2m_100 marian mbart mbart50 mt5 mvp myt5 nllb pegasus pegasus_x plbart prophetnet
        switch_transformers t5 t5encoder t5gemma t5gemma2 udop umt5
        """,
    ("vision", MEDIUM): """
        aya_vision blip blip_2 chameleon cogvlm cohere2_vision deepseek_vl dinov2 dinov3_vit emu3
        florence2 fuyu gemma3n glm46v glm4v got_ocr2 idefics idefics2 idefics3 internvl janus kosmos2
        llava llava_next llava_onevision mllama molmo2 ovis2 paligemma phi4_multimodal pixtral
        qwen2_5_omni qwen2_5_vl qwen2_vl qwen2vl qwen3_vl qwen3vl smolvlm video_llava vipllava vit
        """,
    ("audio", SMALL): """
        audioflamingo3 bark csm dia granite_speech hubert kyutai_speech_to_text moshi musicgen parakeet
        qwen2_audio qwen3_asr seamless_m4t seamless_m4t_v2 speech_to_text speecht5 voxtral wav2vec2
        wavtokenizer-dec whisper
        """,
    ("diffusion", EIGHT): "diffusion_gemma dream llada llada-moe",
}  # fmt: skip
KNOWN = {name: row for row, names in _TABLE.items() for name in names.split()}
# Keys of a config.json, or of a GGUF file behind the architecture, that tell what an unknown model is.
EXPERTS = """
    enable_moe_block expert_count moe_num_experts n_routed_experts num_experts num_local_experts
    """.split()
RECURRENT = """
    conv_L_cache kda.head_dim linear_num_value_heads mamba_d_state rnn_width shortconv.l_cache
    ssm.conv_kernel ssm.state_size ssm_cfg ssm_state_size state_size wkv.head_size
    """.split()
# how `layer_types` begin
RECURRENT_LAYERS = ("mamba", "linear_attention", "recurrent", "conv", "kda", "ssm", "hybrid")
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
    recurrent = any(kind.startswith(RECURRENT_LAYERS) for kind in kinds)
    recurrent = recurrent or (not kinds and any(config.get(key) for key in RECURRENT))
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
    names, given, text = config.get("architectures"), config.get("model_type"), config.get("text_config")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else names
    found = f"model_type {shortened(given)}"
    if given is None:
        found = f"architecture {shortened(architecture)}"
    kind, instead = _known(given, config)
    if kind is None and isinstance(text, dict):
        kind, instead = _known(text.get("model_type"), text)
    nearest = given if isinstance(given, str) else str(architecture).removesuffix("ForCausalLM").lower()
    problem = f"config.json: {found} is not supported"
    problem, remedy = _refused(problem, kind, instead, nearest, supported)
    return CheckpointError(problem, remedy=remedy)


def refusal_of_gguf(
    architecture: object, metadata: Mapping[str, Any], supported: Iterable[str]
) -> tuple[str, str]:
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    kind, instead = _known(architecture, own)
    nearest = architecture if isinstance(architecture, str) else ""
    problem = f"has the architecture {shortened(architecture)}, which is not supported"
    return _refused(problem, kind, instead, nearest, supported)


def _known(name: object, config: Mapping[str, Any]) -> tuple[str | None, str]:
    kind, instead = KNOWN.get(name, (None, None)) if isinstance(name, str) else (None, None)
    counts = [config[key] for key in EXPERTS if key in config]
    if kind is None or ("experts" in KINDS[kind] and counts and not any(map(_counts, counts))):
        kind, instead = kind_of(config), None  # the values decide where they say that there are no experts
    return kind, instead or _of_size(config)


def _of_size(config: Mapping[str, Any]) -> str:
    """Return a supported model of about the size of a config's."""
    size = config.get("hidden_size", config.get("embedding_length"))
    sizes = {1536: SMALL, 3072: MEDIUM, 4608: EIGHT, 6144: LARGE}
    if not isinstance(size, int):
        return MEDIUM
    return next((name for most, name in sizes.items() if size <= most), LARGEST)


def _refused(
    problem: str, kind: str | None, instead: str, name: str, supported: Iterable[str]
) -> tuple[str, str]:
    """Return a problem, with what the model is, and the remedy."""
    if kind is None:
        listed = ", ".join(sorted(supported))
        remedy = f"give a model of its size that is supported, such as {instead}; supported are {listed}"
        return problem, f"{remedy}; {PAGE}{did_you_mean(name, supported)}"
    remedy = f"give a dense model of its size that is supported, such as {instead}; {PAGE}"
    return f"{problem}: it is {KINDS[kind]}", remedy
