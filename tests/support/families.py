"""Tiny random models of the causal families of transformers."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CAUSAL = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_BY_VALUE = {
    1: "n_group topk_group first_k_dense_replace mamba_n_groups mamba_expand n_groups attn_layer_offset",
    2: "num_hidden_layers n_layer num_layers encoder_layers decoder_layers num_key_value_heads num_experts_per_tok "
    "moe_topk moe_k linear_num_key_heads linear_num_value_heads attn_layer_period expert_layer_period",
    4: "num_attention_heads n_head attention_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts rotary_dim qk_rope_head_dim qk_nope_head_dim mamba_n_heads "
    "mamba_num_heads conv_kernel time_step_rank",
    8: "head_dim v_head_dim kv_channels q_lora_rank kv_lora_rank linear_key_head_dim linear_value_head_dim state_size "
    "ssm_state_size mamba_d_head mamba_head_dim mamba_d_state",
    16: "moe_intermediate_size shared_expert_intermediate_size",
    32: "hidden_size intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim word_embed_proj_dim lru_width n_embd "
    "n_inner d_model dff mamba_d_ssm intermediate_size_mlp embedding_size",
    64: "vocab_size",
    256: "max_position_embeddings n_positions",
}
# A family takes the sizes that it knows, and keeps the others as attributes that it never reads.
_SIZES = {name: value for value, names in _BY_VALUE.items() for name in names.split()}
_OWN: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_indices": [1]},
    "bamba": {"attn_layer_indices": [1]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
}


def tiny(family: str, *, spread: float = 0.3, **changes: Any) -> PreTrainedModel:
    """A random model in eval mode, the same at every call, whose distributions are far from uniform.

    Args:
        family: a key of transformers' mapping for causal language models.
        spread: standard deviation of the weights, where a family's config has it.
        changes: keys of the config.
    """
    torch.manual_seed(0)
    keys = _SIZES | {"pad_token_id": 0, "is_decoder": True, "initializer_range": spread} | _OWN.get(family, {})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(keys | changes)))
    return model.eval()
