"""Tiny configurations of transformers, and what `fuse` does with each; docs has the same table."""

from typing import Any, NamedTuple

CLASSES = 37
LLAMA: dict[str, Any] = {
    "vocab_size": CLASSES,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT = {"vocab_size": CLASSES, "n_embd": 16, "n_layer": 1, "n_head": 2}
GPT |= {"bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
OPT = {"vocab_size": CLASSES, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 1}
OPT |= {"num_attention_heads": 2, "word_embed_proj_dim": 16, "max_position_embeddings": 64}
BLOOM = {"vocab_size": CLASSES, "hidden_size": 16, "n_layer": 1, "n_head": 2}
BART = {"vocab_size": CLASSES, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
BART |= {"decoder_ffn_dim": 16, "is_encoder_decoder": False}
T5 = {"vocab_size": CLASSES, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
MUSICGEN = {"vocab_size": CLASSES, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1}
MUSICGEN |= {"num_attention_heads": 2, "num_codebooks": 2}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
VISION |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
TEXT = LLAMA | {"model_type": "llama"}
DEPTH = LLAMA | {"num_codebooks": 2, "backbone_hidden_size": 16}
CODEC = {"model_type": "mimi", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
CODEC |= {"num_attention_heads": 2, "num_filters": 2, "codebook_size": 8, "codebook_dim": 4}
CODEC |= {"vector_quantization_hidden_dimension": 4, "upsample_groups": 2}
CHAMELEON_VQ = {"embed_dim": 8, "num_embeddings": 8, "latent_dim": 8, "base_channels": 32}
CHAMELEON_VQ |= {"channel_multiplier": [1], "num_res_blocks": 1, "resolution": 8}


class Served(NamedTuple):
    """A family whose fused loss and gradients are the stock ones."""

    model: str
    sizes: dict[str, Any]
    config: str | None = None  # the class; None for the one of the model


class Refused(NamedTuple):
    """A family that `fuse`, or its first step, refuses."""

    model: str
    sizes: dict[str, Any]
    error: type[Exception]
    message: str
    reason: str  # as the documentation says it
    at_step: bool = False
    config: str | None = None


def _llama(name: str, **sizes: Any) -> Served:
    return Served(f"{name}ForCausalLM", LLAMA | sizes)


SERVED = (
    _llama("Llama"),
    _llama("Qwen2", tie_word_embeddings=True),
    _llama("Qwen3", head_dim=8),
    _llama("Qwen3Moe", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, head_dim=8),
    _llama("Gemma", head_dim=8),
    _llama("Gemma2", head_dim=8, final_logit_softcapping=1.5),
    Served("Gemma3ForCausalLM", LLAMA | {"head_dim": 8}, "Gemma3TextConfig"),
    _llama("Mistral"),
    _llama("Mixtral", num_local_experts=2, output_router_logits=True),
    _llama("Phi"),
    _llama("Phi3"),
    Served("GPT2LMHeadModel", GPT, "GPT2Config"),
    Served("GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    _llama("GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0),
    _llama("GptOss", num_local_experts=2, num_experts_per_tok=1, head_dim=8),
    Served("OPTForCausalLM", OPT | {"dropout": 0.0}),
    Served("BloomForCausalLM", BLOOM),
    _llama("Falcon"),
    _llama("Cohere", logit_scale=0.3),
    _llama("Cohere2", logit_scale=0.3),
    _llama("Granite", logits_scaling=3.0),
    _llama("Olmo2"),
    _llama("StableLm"),
    _llama("Starcoder2"),
    _llama("Nemotron"),
    _llama("SmolLM3"),
    _llama("Glm4", head_dim=8),
    Served("MambaForCausalLM", {"vocab_size": CLASSES, "hidden_size": 16, "num_hidden_layers": 1}),
    _llama(
        "FalconH1",
        lm_head_multiplier=0.5,
        **{"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8},
        mamba_n_groups=1,
    ),
    Served(
        "LlavaForConditionalGeneration",
        {
            "text_config": TEXT,
            "vision_config": VISION | {"model_type": "clip_vision_model"},
            "image_token_index": 36,
        },
    ),
)
SERVED_BY_NAME = {case.model: case for case in SERVED}
REFUSED = (
    Refused(
        "T5ForConditionalGeneration",
        T5,
        ValueError,
        "got T5ForConditionalGeneration, an encoder with a decoder",
        "an encoder with a decoder",
    ),
    Refused(
        "BartForCausalLM",
        BART,
        ValueError,
        "got BartForCausalLM, which computes its loss itself",
        "computes its loss itself",
    ),
    Refused(
        "BertForMaskedLM",
        LLAMA,
        ValueError,
        "got BertForMaskedLM, which computes its loss itself",
        "computes its loss itself",
    ),
    Refused(
        "MusicgenForCausalLM",
        MUSICGEN,
        TypeError,
        "expected a head that is a torch.nn.Linear",
        "several heads",
        config="MusicgenDecoderConfig",
    ),
    Refused(
        "CsmForConditionalGeneration",
        LLAMA | {"num_codebooks": 2, "depth_decoder_config": DEPTH, "codec_config": CODEC},
        ValueError,
        "whose depth_decoder, CsmDepthDecoderForCausalLM, has a head of its own",
        "a second head with labels",
    ),
    Refused(
        "ChameleonForConditionalGeneration",
        LLAMA | {"vocabulary_map": {"<image>": 36}, "vq_config": CHAMELEON_VQ},
        AttributeError,
        "a fused model has no logits in training",
        "masks its logits",
        at_step=True,
    ),
)


def model_of(case: Served | Refused) -> Any:
    """Return a model with random weights, in training mode."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, case.model)
    config = kind.config_class if case.config is None else getattr(transformers, case.config)
    return kind(config(**case.sizes)).train()
