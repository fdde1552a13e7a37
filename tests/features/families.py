"""Tiny random targets of the model families that transformers has, and batches to run on them."""

from __future__ import annotations

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HyperCLOVAXConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    StableLmConfig,
)

from stages.features.states import TokenBatch
from stages.targets import Target

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}

FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen 2, biases": Qwen2Config(**SIZES),
    "qwen 3, heads wider than h / heads": Qwen3Config(**SIZES, head_dim=16),
    "qwen 2, experts": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=16),
    "qwen 3, experts": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16),
    "mistral, window": MistralConfig(**SIZES, sliding_window=6),
    "mixtral, experts": MixtralConfig(**SIZES, num_local_experts=4),
    "gemma 2, window and caps": Gemma2Config(
        **SIZES,
        head_dim=16,
        sliding_window=6,
        query_pre_attn_scalar=16,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=2.0,
    ),
    "gemma 3, window": Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=6),
    "phi, layer norms and biases": PhiConfig(**(SIZES | {"num_key_value_heads": 4})),
    "phi 3, fused projections": Phi3Config(**SIZES),
    "cohere, scaled logits": CohereConfig(**SIZES, logit_scale=0.25),
    "cohere 2, window": Cohere2Config(**SIZES, sliding_window=6),
    "granite, multipliers": GraniteConfig(
        **SIZES, logits_scaling=4.0, residual_multiplier=0.5, embedding_multiplier=3.0
    ),
    "hyperclova x, scaled logits": HyperCLOVAXConfig(**SIZES, logits_scaling=0.25),
    "olmo 2, norms behind": Olmo2Config(**SIZES),
    "gpt-oss, sinks and experts": GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, head_dim=16
    ),
    "stablelm": StableLmConfig(**SIZES),
    "glm 4, experts": Glm4MoeConfig(
        **SIZES,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        head_dim=16,
        n_group=1,
        topk_group=1,
    ),
    "deepseek 3, latent attention": DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}),
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
    ),
    "llama 4, chunked attention": Llama4TextConfig(
        **SIZES, num_local_experts=4, intermediate_size_mlp=48, head_dim=16, attention_chunk_size=8
    ),
    "qwen 3 next, linear attention": Qwen3NextConfig(
        **SIZES,
        **EXPERTS,
        shared_expert_intermediate_size=16,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "bamba, state space": BambaConfig(**SIZES, **SSM, attn_layer_indices=[2, 5]),
    "granite 4, state space and experts": GraniteMoeHybridConfig(
        **SIZES,
        **SSM,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        layer_types=["mamba", "mamba", "attention", "mamba"] * 2,
    ),
    "falcon h1, both at once": FalconH1Config(**SIZES, **SSM, mamba_d_ssm=64, lm_head_multiplier=0.5),
    "lfm 2, convolutions": Lfm2Config(
        **SIZES, layer_types=["conv", "conv", "full_attention", "conv"] * 2, block_auto_adjust_ff_dim=False
    ),
    "gpt 2, learned positions": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=8, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=1
    ),
    "opt": OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
    "bloom, alibi": BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=8, n_head=4),
}


def make_target(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Target:
    """With the attention that extraction runs with."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).to(dtype).eval()
    if getattr(config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
    return Target(name="tiny", model=model, tokenizer=None, device=torch.device("cpu"), dtype=dtype)


def make_batch(*masks: str) -> TokenBatch:
    """A row for each loss mask, with random ids."""
    loss_mask = torch.tensor([int(c) for c in "".join(masks)], dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    return TokenBatch(
        row_ids=tuple(range(len(masks))),
        input_ids=torch.randint(2, VOCAB, (len(loss_mask),), generator=generator, dtype=torch.int32),
        loss_mask=loss_mask,
        row_offsets=torch.tensor([0, *(len(mask) for mask in masks)]).cumsum(0),
    )
