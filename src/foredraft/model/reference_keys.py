"""The config keys that transformers 5.23.0 reads.

`python -m recipes.reference_keys` makes this file, and says what reading means. Do not edit it.
"""

from __future__ import annotations

# of every supported model type
SHARED = frozenset(
    """
    _attn_implementation _attn_implementation_internal _commit_hash _experts_implementation
    _experts_implementation_internal _heterogeneity_spec _name_or_path _output_attentions
    _rope_type_labels architectures attention_dropout attn_implementation auto_map base_model_ep_plan
    base_model_fsdp_plan base_model_pp_plan base_model_tp_plan bos_token_id chunk_size_feed_forward
    configuration_files decoder default_rope_type default_theta dtype eos_token_id experts_implementation
    fusion_config generator gradient_checkpointing head_dim hidden_size id2label
    ignore_keys_at_rope_validation initializer_range intermediate_size is_causal is_encoder_decoder
    kv_sharing_modes label2id layer_types max_position_embeddings model_type mtp_layer_types name_or_path
    num_attention_heads num_hidden_layers num_key_value_heads num_labels output_attentions
    output_hidden_states pad_token_id partial_rotary_factor per_layer_config problem_type
    quantization_config return_dict rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window
    sub_configs_defaults text_config tie_word_embeddings torch_dtype transformers_version
    transformers_weights use_cache vision_aspect_ratio vision_feature_layer vision_feature_select_strategy
    vocab_size
    """.split()
)
# of each model type
CONFIG = {
    "gemma2": SHARED
    | frozenset(
        """
        attention_bias attn_logit_softcapping final_logit_softcapping hidden_activation mlp_layer_types
        original_max_position_embeddings query_pre_attn_scalar use_bidirectional_attention
        """.split()
    ),
    "gemma3_text": SHARED
    | frozenset(
        """
        attention_bias attn_logit_softcapping final_logit_softcapping hidden_activation mlp_layer_types
        query_pre_attn_scalar rope_local_base_freq sliding_window_pattern use_bidirectional_attention
        """.split()
    ),
    "llama": SHARED
    | frozenset(
        """
        attention_bias attention_chunk_size hidden_act mlp_bias original_max_position_embeddings
        pretraining_tp
        """.split()
    ),
    "mistral": SHARED
    | frozenset(
        """
        attention_chunk_size hidden_act num_heads original_max_position_embeddings
        """.split()
    ),
    "qwen2": SHARED
    | frozenset(
        """
        hidden_act max_window_layers mlp_layer_types num_heads original_max_position_embeddings
        use_sliding_window
        """.split()
    ),
    "qwen3": SHARED
    | frozenset(
        """
        attention_bias hidden_act max_window_layers mlp_layer_types num_heads
        original_max_position_embeddings use_sliding_window
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
