"""Keys of a config.json that may change an LLM's structure in a way that no formula describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.errors import CatalogError

# Structures that no formula of planner/models describes -> the keys of config.json that turn them on.
UNMODELLED = {
    "some layers without experts": ("expert_layer_period", "moe_layer_start_index"),
    "layers without attention": ("attn_layer_period", "ssm_cfg", "conv_L_cache"),
    "layers that share keys and values": ("num_kv_shared_layers", "cla_share_factor"),
    "embeddings of each layer": ("hidden_size_per_layer_input",),
}
# An unknown key with one of these words in its name may change the structure of the LLM.
_STRUCTURE_WORDS = re.compile(
    r"layer|expert|moe|head|kv|attn|attention|mamba|ssm|conv|lora|rank|dim|size|intermediate|width|shared|window"
    r"|interval|period|pattern|freq|block|mlp|ffn|index|latent|compress|ratio|group|ngram|altup|laurel|loop|depth"
    r"|stride|chunk|per_tok"
)
# Keys that the readers of a config.json (llm_config.py and what it imports) read.
_READ = """
    attention_chunk_size attention_head_dim attention_k_eq_v attention_other_setting
    attention_output_gate attn_output_gate block_configs compress_ratios conv_kernel decoder_sparse_step
    dense_intermediate_size enable_moe_block experts_per_token ffn_dim ffn_hidden_size
    first_k_dense_replace full_attention_interval global_head_dim head_dim hidden_size
    hybrid_layer_pattern hybrid_override_pattern index_head_dim index_n_heads index_skip_topk_offset
    index_topk index_topk_freq index_topk_pattern indexer_types interleave_moe_layer_step
    intermediate_size intermediate_size_mlp kv_channels kv_lora_rank layer_types layers_block_type
    linear_attn_config linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
    linear_num_value_heads linear_value_head_dim mamba_d_conv mamba_d_state mamba_head_dim
    mamba_n_groups mamba_num_heads mamba_ssm_cache_dtype mamba_ssm_dtype mla_use_output_gate
    mlp_layer_types mlp_only_layers moe_intermediate_size moe_latent_size moe_layer_freq
    moe_layer_interval moe_layers moe_layers_enum moe_num_experts moe_shared_expert_intermediate_size
    moe_top_k multi_query n_embd n_embed n_group n_groups n_head n_inner n_layer n_routed_experts
    n_shared_experts no_rope_layers num_attention_groups num_attention_heads num_experts
    num_experts_per_tok num_experts_per_token num_global_key_value_heads num_heads num_hidden_layers
    num_key_value_heads num_layers num_local_experts num_nextn_predict_layers num_shared_experts
    o_groups o_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim routed_expert_hidden_size
    share_expert_dim shared_expert_intermediate_size shared_intermediate_size sliding_window
    sliding_window_pattern sparse_attention_config ssm_state_size swa_head_dim swa_num_attention_heads
    swa_num_key_value_heads swa_v_head_dim top_k_experts use_sliding_window v_head_dim vocab_size
""".split()
# Keys with a structure word in their name that do not change the structure.
_HARMLESS = """
    add_cross_attention attention_layers attention_types apply_residual_connection_post_layernorm
    attention_multiplier attention_softmax_in_fp32 attention_value_scale attn_res_block_size attn_scale
    attn_temperature_tuning chunk_size chunk_size_feed_forward clip_qkv compress_rope_theta
    do_layer_norm_before ep_size expand hc_mult head_init_scale index_block_size index_local_blocks
    index_share_for_mtp_iteration index_topk_blocks indexer_rope_interleave initializer_range
    layer_norm_elementwise_affine layerdrop max_window_layers model_max_length moe_capacity_factor
    moe_renormalize moe_router_activation_func moe_router_scaling_factor moe_router_load_balancing_type
    moe_shared_expert_overlap mscale_all_dim n_positions no_rope_layer_interval num_beam_groups
    num_expert_group num_hash_layers partial_rotary_factor qk_head_dim qk_layernorm
    query_pre_attn_scalar reorder_and_upcast_attn rescale_prenorm_residual rotary_dim
    routed_scaling_factor scale_attention_softmax_in_fp32 scale_attn_by_inverse_layer_idx
    scale_attn_weights sliding_window_size swa_rope_theta time_step_rank token_type_vocab_size
    topk_group type_vocab_size use_bidirectional_attention use_grouped_topk use_mamba_kernels
    vocab_size_per_layer_input window_size word_embed_proj_dim _attn_implementation
    _attn_implementation_autoset
""".split()
# Keys of training, of precision, or of layers for speculative decoding.
_HARMLESS_PATTERN = re.compile(
    r"^mtp_|^num_mtp|^_|^output_|^use_.*(bias|norm)$|dropout|_pdrop|bias$|_norm|norm_|_eps|_act$|_dtype$|softcap"
    r"|aux_loss|_loss_|jitter|token_i|rope|no_repeat_ngram|pruned|cross_attention_hidden|ring_|quant"
)
_KNOWN = frozenset((*_READ, *_HARMLESS))


def refuse_unmodelled(config: Mapping[str, Any], where: str) -> None:
    """Raise CatalogError for the first key that is, or may be, of a structure that no formula describes."""
    family = config.get("model_type", "")
    for what, keys in UNMODELLED.items():
        for key in keys:
            if config.get(key):
                raise CatalogError(
                    f"{where}: {key}: {what} ({family}): not modelled; nearest: a row of an LLM like it in a "
                    "llms.yaml"
                )
    types = config.get("attn_type_list")  # A key of MiniMax: 1 is softmax attention, 0 linear attention.
    if types and set(types) != {1}:
        raise CatalogError(f"{where}: attn_type_list: expected 1 for all layers, found {sorted(set(types))}")
    for key, value in config.items():
        if key == "attn_type_list" or key in _KNOWN or not value or not _STRUCTURE_WORDS.search(key):
            continue
        if not _HARMLESS_PATTERN.search(key):
            raise CatalogError(
                f"{where}: {key}: not known ({family}), and it may change the structure of the LLM; expected "
                "a config without it, or describe the LLM in a llms.yaml of your own"
            )
