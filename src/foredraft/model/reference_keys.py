"""The config keys that transformers 5.23.0 reads.

`python -m recipes.reference_keys` makes this file, and says what reading means. Do not edit it.
"""

from __future__ import annotations

# of every supported model type
SHARED = frozenset(
    """
    _attn_implementation _attn_implementation_internal _commit_hash _experts_implementation
    _experts_implementation_internal _heterogeneity_spec _name_or_path _output_attentions architectures
    attn_implementation auto_map base_model_ep_plan base_model_fsdp_plan base_model_pp_plan
    base_model_tp_plan bos_token_id chunk_size_feed_forward configuration_files decoder dtype eos_token_id
    experts_implementation fusion_config generator gradient_checkpointing head_dim hidden_size id2label
    initializer_range is_causal is_encoder_decoder label2id layer_types max_position_embeddings model_type
    mtp_layer_types name_or_path num_attention_heads num_hidden_layers num_labels output_attentions
    output_hidden_states pad_token_id partial_rotary_factor per_layer_config problem_type
    quantization_config return_dict rope_parameters rope_scaling rope_theta sliding_window
    sub_configs_defaults text_config tie_word_embeddings torch_dtype transformers_version
    transformers_weights use_cache vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    vocab_size
    """.split()
)
# of each model type
CONFIG = {
    "cohere2": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_dropout default_rope_type default_theta hidden_act
        ignore_keys_at_rope_validation intermediate_size kv_sharing_modes layer_norm_eps logit_scale
        mlp_layer_types num_heads num_key_value_heads original_max_position_embeddings
        sliding_window_pattern
        """.split()
    ),
    "exaone4": SHARED
    | frozenset(
        """
        _rope_type_labels attention_dropout default_rope_type default_theta hidden_act
        ignore_keys_at_rope_validation intermediate_size kv_sharing_modes mlp_layer_types num_heads
        num_key_value_heads original_max_position_embeddings rms_norm_eps sliding_window_pattern
        """.split()
    ),
    "gemma": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_chunk_size attention_dropout default_rope_type
        default_theta hidden_act ignore_keys_at_rope_validation intermediate_size kv_sharing_modes
        num_heads num_key_value_heads original_max_position_embeddings rms_norm_eps
        use_bidirectional_attention
        """.split()
    ),
    "gemma2": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_dropout attn_logit_softcapping default_rope_type
        default_theta final_logit_softcapping hidden_activation ignore_keys_at_rope_validation
        intermediate_size kv_sharing_modes mlp_layer_types num_key_value_heads
        original_max_position_embeddings query_pre_attn_scalar rms_norm_eps use_bidirectional_attention
        """.split()
    ),
    "gemma3_text": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_dropout attn_logit_softcapping default_rope_type
        default_theta final_logit_softcapping hidden_activation ignore_keys_at_rope_validation
        intermediate_size kv_sharing_modes mlp_layer_types num_key_value_heads query_pre_attn_scalar
        rms_norm_eps rope_local_base_freq sliding_window_pattern use_bidirectional_attention
        """.split()
    ),
    "gemma4_text": SHARED
    | frozenset(
        """
        _rope_type_labels allow_global_per_layer_attribute_access attention_bias attention_dropout
        attention_k_eq_v default_rope_type enable_moe_block final_logit_softcapping global_head_dim
        hidden_activation hidden_size_per_layer_input ignore_keys_at_rope_validation intermediate_size
        mlp_layer_types moe_intermediate_size num_experts num_global_key_value_heads num_heads
        num_key_value_heads num_kv_shared_layers output_router_logits rms_norm_eps
        serialize_explicit_per_layer_config top_k_experts use_bidirectional_attention use_double_wide_mlp
        vocab_size_per_layer_input
        """.split()
    ),
    "gemma4_unified_text": SHARED
    | frozenset(
        """
        _rope_type_labels allow_global_per_layer_attribute_access attention_bias attention_dropout
        attention_k_eq_v default_rope_type final_logit_softcapping global_head_dim hidden_activation
        ignore_keys_at_rope_validation intermediate_size mlp_layer_types num_global_key_value_heads
        num_heads num_key_value_heads num_kv_shared_layers output_router_logits rms_norm_eps
        serialize_explicit_per_layer_config use_bidirectional_attention use_double_wide_mlp
        """.split()
    ),
    "glm4": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_chunk_size attention_dropout default_rope_type
        default_theta hidden_act ignore_keys_at_rope_validation intermediate_size kv_sharing_modes
        num_heads num_key_value_heads original_max_position_embeddings rms_norm_eps
        """.split()
    ),
    "gpt2": SHARED
    | frozenset(
        """
        activation_function add_cross_attention attention_chunk_size attn_pdrop embd_pdrop
        kv_sharing_modes layer_norm_epsilon n_embd n_head n_inner n_layer n_positions num_heads
        output_cross_attentions reorder_and_upcast_attn resid_pdrop scale_attn_by_inverse_layer_idx
        scale_attn_weights summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj
        """.split()
    ),
    "gpt_neox": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_chunk_size attention_dropout classifier_dropout
        default_rope_type default_theta hidden_act hidden_dropout ignore_keys_at_rope_validation
        intermediate_size is_decoder kv_sharing_modes layer_norm_eps original_max_position_embeddings
        rotary_emb_base rotary_pct use_parallel_residual
        """.split()
    ),
    "granite": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_chunk_size attention_dropout attention_multiplier
        default_rope_type default_theta embedding_multiplier hidden_act ignore_keys_at_rope_validation
        intermediate_size kv_sharing_modes logits_scaling mlp_bias num_heads num_key_value_heads
        original_max_position_embeddings residual_multiplier rms_norm_eps
        """.split()
    ),
    "llama": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_chunk_size attention_dropout default_rope_type
        default_theta hidden_act ignore_keys_at_rope_validation intermediate_size kv_sharing_modes
        mlp_bias num_key_value_heads original_max_position_embeddings pretraining_tp rms_norm_eps
        """.split()
    ),
    "ministral": SHARED
    | frozenset(
        """
        _rope_type_labels attention_dropout default_rope_type default_theta hidden_act
        ignore_keys_at_rope_validation intermediate_size kv_sharing_modes mlp_layer_types num_heads
        num_key_value_heads original_max_position_embeddings rms_norm_eps
        """.split()
    ),
    "ministral3": SHARED
    | frozenset(
        """
        _rope_type_labels attention_chunk_size attention_dropout default_rope_type default_theta
        hidden_act ignore_keys_at_rope_validation intermediate_size kv_sharing_modes num_heads
        num_key_value_heads original_max_position_embeddings rms_norm_eps
        """.split()
    ),
    "mistral": SHARED
    | frozenset(
        """
        _rope_type_labels attention_chunk_size attention_dropout default_rope_type default_theta
        hidden_act ignore_keys_at_rope_validation intermediate_size kv_sharing_modes num_heads
        num_key_value_heads original_max_position_embeddings rms_norm_eps
        """.split()
    ),
    "olmo2": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_chunk_size attention_dropout default_rope_type
        default_theta hidden_act ignore_keys_at_rope_validation intermediate_size kv_sharing_modes
        num_heads num_key_value_heads original_max_position_embeddings rms_norm_eps
        """.split()
    ),
    "olmo3": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_dropout default_rope_type default_theta hidden_act
        ignore_keys_at_rope_validation intermediate_size kv_sharing_modes mlp_layer_types num_heads
        num_key_value_heads rms_norm_eps
        """.split()
    ),
    "opt": SHARED
    | frozenset(
        """
        _remove_final_layer_norm activation_function attention_chunk_size attention_dropout
        do_layer_norm_before dropout enable_bias ffn_dim init_std kv_sharing_modes
        layer_norm_elementwise_affine layerdrop num_heads word_embed_proj_dim
        """.split()
    ),
    "phi": SHARED
    | frozenset(
        """
        _rope_type_labels attention_chunk_size attention_dropout default_rope_type default_theta
        embd_pdrop hidden_act ignore_keys_at_rope_validation intermediate_size kv_sharing_modes
        layer_norm_eps num_heads num_key_value_heads original_max_position_embeddings qk_layernorm
        resid_pdrop
        """.split()
    ),
    "phi3": SHARED
    | frozenset(
        """
        _rope_type_labels attention_chunk_size attention_dropout default_rope_type embd_pdrop hidden_act
        ignore_keys_at_rope_validation intermediate_size kv_sharing_modes num_heads num_key_value_heads
        original_max_position_embeddings resid_pdrop rms_norm_eps
        """.split()
    ),
    "qwen2": SHARED
    | frozenset(
        """
        _rope_type_labels attention_dropout default_rope_type default_theta hidden_act
        ignore_keys_at_rope_validation intermediate_size kv_sharing_modes max_window_layers
        mlp_layer_types num_heads num_key_value_heads original_max_position_embeddings rms_norm_eps
        use_sliding_window
        """.split()
    ),
    "qwen3": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_dropout default_rope_type default_theta hidden_act
        ignore_keys_at_rope_validation intermediate_size kv_sharing_modes max_window_layers
        mlp_layer_types num_heads num_key_value_heads original_max_position_embeddings rms_norm_eps
        use_sliding_window
        """.split()
    ),
    "seed_oss": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_chunk_size attention_dropout attention_out_bias
        default_rope_type default_theta hidden_act ignore_keys_at_rope_validation intermediate_size
        kv_sharing_modes mlp_bias num_heads num_key_value_heads original_max_position_embeddings
        pretraining_tp residual_dropout rms_norm_eps
        """.split()
    ),
    "smollm3": SHARED
    | frozenset(
        """
        _rope_type_labels attention_bias attention_dropout default_rope_type default_theta hidden_act
        ignore_keys_at_rope_validation intermediate_size kv_sharing_modes mlp_bias mlp_layer_types
        no_rope_layer_interval no_rope_layers num_heads num_key_value_heads
        original_max_position_embeddings rms_norm_eps use_sliding_window
        """.split()
    ),
    "stablelm": SHARED
    | frozenset(
        """
        _rope_type_labels attention_chunk_size attention_dropout default_rope_type default_theta
        hidden_act hidden_dropout ignore_keys_at_rope_validation intermediate_size kv_sharing_modes
        layer_norm_eps num_heads num_key_value_heads original_max_position_embeddings qk_layernorm
        use_parallel_residual use_qkv_bias
        """.split()
    ),
    "starcoder2": SHARED
    | frozenset(
        """
        _rope_type_labels attention_chunk_size attention_dropout default_rope_type default_theta
        embedding_dropout hidden_act ignore_keys_at_rope_validation intermediate_size kv_sharing_modes
        norm_epsilon num_heads num_key_value_heads original_max_position_embeddings residual_dropout
        use_bias
        """.split()
    ),
}
# of rotary parameters, by their type
ROPE = {
    "default": frozenset(
        """
        partial_rotary_factor rope_theta rope_type type
        """.split()
    ),
    "dynamic": frozenset(
        """
        factor partial_rotary_factor rope_theta rope_type type
        """.split()
    ),
    "linear": frozenset(
        """
        factor partial_rotary_factor rope_theta rope_type type
        """.split()
    ),
    "llama3": frozenset(
        """
        factor high_freq_factor low_freq_factor original_max_position_embeddings partial_rotary_factor
        rope_theta rope_type type
        """.split()
    ),
    "longrope": frozenset(
        """
        attention_factor factor long_factor original_max_position_embeddings partial_rotary_factor
        rope_theta rope_type short_factor type
        """.split()
    ),
    "proportional": frozenset(
        """
        factor partial_rotary_factor rope_theta rope_type type
        """.split()
    ),
    "yarn": frozenset(
        """
        attention_factor beta_fast beta_slow factor mscale mscale_all_dim original_max_position_embeddings
        partial_rotary_factor rope_theta rope_type truncate type
        """.split()
    ),
}
# of rotary parameters that hold those of each kind of layer
ROPE_BY_LAYER = frozenset(
    """
    full_attention sliding_attention truncate
    """.split()
)
# of generation_config.json
GENERATION = frozenset(
    """
    _from_model_config assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind bad_words_ids begin_suppress_tokens bos_token_id cache_config
    cache_implementation compile_config constraints continuous_batching_config decoder_start_token_id
    disable_compile diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale is_assistant length_penalty
    low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens max_time min_length
    min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule
    num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states output_logits
    output_scores pad_token_id penalty_alpha prefill_chunk_size prompt_lookup_num_tokens
    remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate sequence_bias
    speculation_type stop_strings suppress_tokens target_lookbehind temperature token_healing top_h top_k
    top_p transformers_version typical_p use_cache use_mtp watermarking_config
    """.split()
)
