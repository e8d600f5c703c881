"""Of GGUF metadata under Hugging Face's names: sizes, norms, rotary bases and special tokens, which all models have."""

from typing import Any

from kvist.spec.gguf.attention import one_width
from kvist.spec.gguf.header import GGUFArray
from kvist.spec.gguf.metadata import Metadata

# Families whose network the engine builds: their configurations are completed with what it asks for.
COMPUTED = frozenset({"llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt2"})
# Of these, such as learn a vector for each position.
_LEARNED = frozenset({"gpt2"})

_SPECIAL_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}


def sizes(m: Metadata) -> dict[str, Any]:
    """Layers, widths, context, vocabulary, experts and special tokens."""
    config: dict[str, Any] = {
        "num_hidden_layers": m.layers,
        "hidden_size": m.count(m.named("hidden_size", "embedding_length")),
        "intermediate_size": max(m.each("feed_forward_length", default=0)) or None,
        "max_position_embeddings": m.count(m.named("max_position_embeddings", "context_length"), least=0),
        "vocab_size": _vocabulary(m),
    }
    m.named("num_hidden_layers", "block_count")
    if m.drafting:
        m.named("num_nextn_predict_layers", "nextn_predict_layers")
        config["num_nextn_predict_layers"] = m.drafting
    for name, key in _EXPERTS.items():
        values = m.each(key, default=0)
        if any(values):
            config[name] = max(values)
    for name, key in _SPECIAL_TOKENS.items():
        if key in m.header.metadata:
            config[name] = m.header.metadata[key]
    return config


def network(m: Metadata, *, family: str) -> dict[str, Any]:
    """Norms, rotary bases and biases; of a family that is computed all that the engine needs, or an error."""
    config: dict[str, Any] = {}
    computed = family in COMPUTED and family not in _LEARNED
    for name, key in (("rms_norm_eps", "layer_norm_rms_epsilon"), ("layer_norm_eps", "layer_norm_epsilon")):
        if (computed and name == "rms_norm_eps") or m.get(f"attention.{key}") is not None:
            config[name] = m.real(f"attention.{key}")
    theta = m.get("rope.freq_base")
    if theta is not None:
        config["rope_theta"] = m.real(m.named("rope_theta", "rope.freq_base"))
    elif computed:
        config["rope_theta"] = 10000.0
        m.assume("rope_theta", 10000.0, f"{m.full('rope.freq_base')} is left out; the default of llama.cpp")
    if computed:
        m.count("feed_forward_length")
        config |= {"rope_scaling": _rope_scaling(m), "hidden_act": "silu", **_from_tensors(m)}
        width = one_width(m)
        rotated = m.count("rope.dimension_count", default=width)
        if rotated != width:
            config["rotary_elements"] = rotated
    return config


def gpt2(m: Metadata) -> dict[str, Any]:
    """GPT-2: the names of its own keys."""
    key = m.named("layer_norm_epsilon", "attention.layer_norm_epsilon")
    return {
        "layer_norm_epsilon": None if m.get(key) is None else m.real(key),
        "activation_function": "gelu_new",
        "n_inner": m.count(m.named("n_inner", "feed_forward_length")),
        "tie_word_embeddings": "output.weight" not in m.tensors,
    }


def gemma2(m: Metadata) -> dict[str, Any]:
    """Gemma 2: soft caps, and its own attention scale; windows apart."""
    config: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}
    for key, usual in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        config[key] = m.real(m.named(key, key), default=usual)
        if m.get(key) is None:
            m.assume(key, usual, f"{m.full(key)} is left out; the rule of llama.cpp for Gemma 2")
    return config | _query_scale(m, "Gemma 2", widest=46)


def phi3(m: Metadata) -> dict[str, Any]:
    """Phi 3: of long contexts two tensors of rotary factors, which are named, not read."""
    if "rope_factors_long.weight" not in m.tensors:
        return {}
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_tensor": "rope_factors_long.weight",
        "short_tensor": "rope_factors_short.weight",
        "original_max_position_embeddings": m.count("rope.scaling.original_context_length"),
    }
    if m.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = m.real("rope.scaling.attn_factor")
    return {"rope_scaling": scaling}


def _query_scale(m: Metadata, name: str, *, widest: int) -> dict[str, Any]:
    """llama.cpp scales the queries of the 27B models, ``widest`` layers, by hidden size a head, others by head_dim."""
    heads, width = m.count("attention.head_count"), one_width(m)
    scalar = m.count("embedding_length") // heads if m.layers == widest else width
    m.assume("query_pre_attn_scalar", scalar, f"GGUF has no key for it; the rule of llama.cpp for {name}")
    return {"query_pre_attn_scalar": scalar}


def gemma3(m: Metadata) -> dict[str, Any]:
    """Gemma 3: windows in five of six layers, two rotary bases, its own attention scale."""
    key = m.named("sliding_window", "attention.sliding_window")
    if m.get(key) is None:
        raise m.missing(key)
    config: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": m.count(key),
        "attn_logit_softcapping": m.get("attn_logit_softcapping"),
        "final_logit_softcapping": m.get("final_logit_softcapping"),
    }
    pattern = m.get("attention.sliding_window_pattern")
    if isinstance(pattern, GGUFArray):
        flags = m.flags(m.named("layer_types", "attention.sliding_window_pattern"))
        config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in flags]
    else:
        m.named("sliding_window_pattern", "attention.sliding_window_pattern")
        config["sliding_window_pattern"] = 6 if pattern is None else pattern
        if pattern is None:
            said = (
                f"{m.full('attention.sliding_window_pattern')} is left out; Gemma 3 has 5 sliding layers, then 1 full"
            )
            m.assume("sliding_window_pattern", 6, said)
    local = m.get("rope.freq_base_swa")
    if local is None:
        local = 10000.0
        said = f"{m.full('rope.freq_base_swa')} is left out; Gemma 3 rotates its windows so"
        m.assume("rope_local_base_freq", local, said)
    config["rope_local_base_freq"] = local
    return config | _query_scale(m, "Gemma 3", widest=62)


def _from_tensors(m: Metadata) -> dict[str, bool]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in m.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in m.tensors,
        "tie_word_embeddings": "output.weight" not in m.tensors,
    }


def _rope_scaling(m: Metadata) -> dict[str, Any] | None:
    """Scaled rotary frequencies; a tensor of factors (Llama 3.1) is named, not read."""
    if "rope_freqs.weight" in m.tensors:
        return {"rope_type": "frequency_factors", "tensor": "rope_freqs.weight"}
    kind = m.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if not isinstance(kind, str):
        raise m.wrong("rope.scaling.type", "a string")
    scaling: dict[str, Any] = {"rope_type": kind}
    if kind in ("linear", "yarn") or m.get("rope.scaling.factor") is not None:
        scaling["factor"] = m.real("rope.scaling.factor")
    if m.get("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = m.count("rope.scaling.original_context_length")
    return scaling


def _vocabulary(m: Metadata) -> int | None:
    embedding = m.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[0]
    tokens = m.header.metadata.get("tokenizer.ggml.tokens")
    return tokens.count if isinstance(tokens, GGUFArray) else None
