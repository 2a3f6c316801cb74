"""A tiny random config of any causal language model in transformers, made from its default by the names of its fields."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, LAYERS = 96, 3
#: Token ids of models stay below it, so that no drawn token means an image or an end.
FIRST_PLAIN_TOKEN = 8

#: Tiny size -> fields that a tiny config keeps at or below it. Where a field is smaller, absent or None by default it stays.
_AT_MOST: tuple[tuple[int, tuple[str, ...]], ...] = (
    (VOCABULARY, (
        "vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "audio_vocab_size",
        "encoder_hash_byte_group_vocab", "pronunciation_vocab_size", "shape_vocab_size", "ngram_vocab_size_base")),
    (LAYERS, (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "num_blocks",
        "num_layers_per_stack", "max_window_layers")),
    (1, ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "attn_layer_offset", "num_mtp_layers")),
    (2, ("attn_layer_period", "expert_layer_period", "global_attn_every_n_layers", "layer_group_size", "no_rope_layer_interval",
        "encoder_layers", "num_encoder_layers", "sliding_window_pattern", "_sliding_window_pattern",
        "interleave_moe_layer_step", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts",
        "n_group", "topk_group", "num_expert_group",
        "n_groups", "o_groups", "mamba_n_groups", "mamba_ngroups", "cross_attn_k", "linear_num_key_heads",
        "n_layers_per_attn_res_block", "index_topk_blocks", "heads_per_ngram", "split_ngram_parts")),
    (4, ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
        "num_decoder_attention_heads", "num_encoder_attention_heads", "attention_heads", "swa_num_attention_heads",
        "index_n_heads", "indexer_n_heads", "linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads",
        "moe_layer_interval", "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num",
        "mamba_dt_rank", "time_step_rank", "index_topk", "index_block_size", "axial_pos_embds_dim", "d_rel",
        "make_ngram_vocab_size_divisible_by")),
    (8, ("head_dim", "swa_head_dim", "attention_head_dim", "dim_head", "d_head", "kv_channels", "qk_nope_head_dim",
        "v_head_dim", "qk_rope_head_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim",
        "indexer_head_dim", "sliding_window", "sliding_window_size", "attention_window_size", "local_attention", "window_size",
        "attention_chunk_size", "keep_window_size", "q_lora_rank", "kv_lora_rank", "o_lora_rank", "mamba_d_state",
        "state_size", "ssm_state_size", "chunk_size", "mamba_chunk_size", "query_pre_attn_scalar",
        "global_head_dim", "rotary_dim", "gated_norm_rank", "adapter_rank", "laurel_rank", "hc_lowrank",
        "hidden_size_per_layer_input", "rel_extent", "ple_embed_dim", "lsh_attn_chunk_length",
        "local_attn_chunk_length", "block_size", "position_bias_num_buckets")),
    (16, ("qk_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_headdim")),
    (32, ("hidden_size", "n_embd", "d_model", "attention_hidden_size", "word_embed_proj_dim", "embedding_size",
         "lru_width", "embedding_dim", "emb_dim", "input_embedding_size", "output_embedding_size", "pronunciation_embed_dim",
         "shape_embed_dim", "router_hidden_size", "backbone_hidden_size", "moe_latent_size", "attention_head_size",
         "hidden_size_global")),
    (48, ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
         "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "ffn_hidden_size", "d_inner", "dff", "dim_ff",
         "dense_intermediate_size", "intermediate_size_mlp", "expert_ffn_hidden_size", "feed_forward_size",
         "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size", "prefix_dense_intermediate_size",
         "n_inner")),
    (64, ("mamba_d_ssm", "patch_size", "image_size")),
    (4096, ("max_position_embeddings", "n_positions")),
)
_TINY = {name: size for size, names in _AT_MOST for name in names}
_LAYERS, _HEADS = (
    next(names for _, names in _AT_MOST if name in names) for name in ("num_hidden_layers", "num_attention_heads"))
_KEY_VALUE_HEADS = ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "num_query_groups", "indexer_kv_heads",
                    "num_global_key_value_heads")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_SOME_SLIDE = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 8}
_FIRST_IS_DENSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}

#: What the names do not tell, by model type: sizes, and kinds of layers that the default config does not have.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4}
                            for kind in ("sliding_attention", "full_attention")}},
    "cohere2_moe": {**_FIRST_IS_DENSE, "prefix_dense_intermediate_size": 48},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"]},
    "dots1": {**_SOME_SLIDE, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_rms_norm": True},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "granitemoe_swa": {"shared_intermediate_size": 48},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
                         "position_embedding_type": "rope"},
    "granitemoeshared": {"shared_intermediate_size": 48},
    "inkling_text": _FIRST_IS_DENSE,
    "laguna": _SOME_SLIDE,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "mellum": _SOME_SLIDE | _FIRST_IS_DENSE,
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
    "ministral": _SOME_SLIDE,
    "nemotron": {"num_key_value_heads": 2},
    "qwen2": {**_SOME_SLIDE, "use_sliding_window": True},
    "qwen2_moe": {**_SOME_SLIDE, "use_sliding_window": True},
    "qwen3": {**_SOME_SLIDE, "use_sliding_window": True},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_embds": False, "lsh_attn_chunk_length": 29, "local_attn_chunk_length": 29},
    "smollm3": {**_SOME_SLIDE, "use_sliding_window": True},
    "stablelm": {"qk_layernorm": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 64,
              "attention_head_dim": 16},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 64,
               "attention_head_dim": 16, "mamba_headdim": 8, "n_mamba_heads": 8,
               "use_mem_rope": True},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 8},
}

#: Settings without which a model is refused, by model type; the page says them.
SETTINGS: dict[str, dict[str, Any]] = {"big_bird": {"attention_type": "original_full"}}

#: Why transformers trains no model of a type on tokens alone, by model type.
NOT_ALONE = {
    "gemma3n": "its vision tower needs timm, which is not installed",
    "gemma4_assistant": "a draft model: it reads another model's keys and values",
    "gemma4_unified_assistant": "a draft model: it reads another model's keys and values",
    "git": "its loss needs images",
    "musicgen": "it reads audio codes of several codebooks, and no text tokens",
    "musicgen_melody": "it reads audio codes of several codebooks, and no text tokens",
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default config of `model_type`, made small, a decoder, without dropout and without a cache."""
    cls = CONFIG_MAPPING[model_type]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[cls]
    config = _shrunk(model_class.config_class or cls, model_type)
    config.use_cache = False
    if getattr(config, "is_decoder", True) is False:
        config.is_decoder = True
    return config


def _shrunk(cls: type[PreTrainedConfig], model_type: str) -> PreTrainedConfig:
    fields = {key: value for key, value in vars(cls()).items() if not key.startswith("_") or key in _TINY}
    return cls(**{**dict(_tiny_fields(fields)), **OVERRIDES.get(model_type, {}),
                  **SETTINGS.get(model_type, {})})


def _tiny_fields(fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    layers = next((fields[name] for name in _LAYERS if isinstance(fields.get(name), int)), None)
    heads = next((fields[name] for name in _HEADS if isinstance(fields.get(name), int)), None)
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            yield name, _shrunk(type(value), value.model_type)
        elif name in _KEY_VALUE_HEADS and isinstance(value, int):
            yield name, 4 if value == heads else min(value, 2)
        elif name in _TINY and isinstance(value, int) and not isinstance(value, bool):
            yield name, min(value, _TINY[name])
        elif name == "head_dim" and value is None:
            yield name, _TINY[name]  # some models read it as it is
        elif name in _TOKENS:
            yield name, _TOKENS[name]
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            yield name, min(value, FIRST_PLAIN_TOKEN - 1)
        elif ("drop" in name or "jitter" in name) and isinstance(value, float):
            yield name, 0.0
        elif isinstance(value, list) and layers is not None and len(value) == layers > LAYERS:
            kinds = list(dict.fromkeys(value))  # each kind of layer, by turns
            yield name, [kinds[i % len(kinds)] for i in range(LAYERS)]


def classes() -> dict[str, str]:
    """Class name -> model type, of every causal language model that transformers knows; a class that serves several types
    by that of its text alone, else by its first."""
    found: dict[str, str] = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in (names,) if isinstance(names, str) else names:
            if name not in found or model_type == f"{found[name]}_text":
                found[name] = model_type
    return found
