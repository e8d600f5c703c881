"""Of GGUF metadata under Hugging Face's names: latent attention, indexers and compressed entries.

Files made for latent attention give the width of what is stored as ``attention.key_length`` and that of a head under
``_mla``; older ones give the head's width alone. The model, and what it must remember, is the same.
Sources: ``load_arch_hparams`` of llama.cpp's architectures, and its conversion scripts.
"""

from typing import Any

from kvist.spec.gguf.attention import SLIDING, Windows, stored_heads, widths
from kvist.spec.gguf.header import GGUFArray
from kvist.spec.gguf.metadata import Metadata


def latent(m: Metadata) -> dict[str, Any]:
    """Rank, rotary width and the widths of a head's parts."""
    return {"num_attention_heads": m.count(m.named("num_attention_heads", "attention.head_count")), **latent_widths(m)}


def latent_widths(m: Metadata) -> dict[str, Any]:
    """The same without the number of heads."""
    rank = m.count(m.named("kv_lora_rank", "attention.kv_lora_rank"))
    key = m.named("qk_rope_head_dim", "rope.dimension_count")
    rope = m.count(key, least=0) if m.get(key) is not None else None
    head = m.get("attention.key_length_mla")
    stored = m.count("attention.key_length") if m.get("attention.key_length") is not None else None
    if head is not None:
        if stored is None or stored < rank:
            raise m.wrong("attention.key_length", f"the latent ({rank}) and its rotary key together")
        rope = stored - rank
    elif rope is None:
        raise m.missing("rope.dimension_count")
    width = m.count("attention.key_length_mla" if head is not None else "attention.key_length")
    if width < rope:
        raise m.wrong("attention.key_length_mla", f"at least the rotary width {rope}", given=str(width))
    config: dict[str, Any] = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": width - rope}
    # One head of all that is stored, or in older files those of the queries: neither says more than the rank does.
    m.get("attention.head_count_kv"), m.get("attention.value_length")
    value = "attention.value_length_mla" if head is not None else "attention.value_length"
    if m.get(value) is not None:
        config["v_head_dim"] = m.count(value)
    if m.get("attention.q_lora_rank"):
        config["q_lora_rank"] = m.count("attention.q_lora_rank")
    return config


def indexer(m: Metadata) -> dict[str, Any]:
    """The indexer of sparse attention."""
    return {
        "index_head_dim": m.count(m.named("index_head_dim", "attention.indexer.key_length")),
        "index_n_heads": m.count("attention.indexer.head_count"),
        "index_topk": m.count("attention.indexer.top_k"),
    }


def indexed(m: Metadata) -> dict[str, Any]:
    """DeepSeek-V3.2: an indexer on every layer."""
    return latent(m) | indexer(m)


def scheduled(m: Metadata) -> dict[str, Any]:
    """GLM-5: some layers may take over an earlier indexer's choice.

    Files of GLM-5 and 5.1, whose layers all have one, do not say so; those of 5.2, with a context of a million, must,
    for the list that llama.cpp has built in belongs to one model.
    """
    config = indexed(m) | {"index_topk_freq": 1}
    key = m.named("indexer_types", "attention.indexer.types")
    if m.get(key) is None:
        if m.count("context_length") >= 2**20:
            raise m.missing(key)
        m.assume("indexer_types", "full", f"{m.full(key)} is left out; llama.cpp's rule for contexts below 2^20")
        return config | {"indexer_types": ["full"] * m.layers}
    return config | {"indexer_types": indexer_types(m)}


def sometimes_indexed(m: Metadata) -> dict[str, Any]:
    """Hunyuan 4: an indexer on some layers, or on none."""
    if not m.count("attention.indexer.top_k", default=0, least=0):
        return latent(m) | {"index_topk": None}
    return indexed(m) | {"indexer_types": indexer_types(m)}


def indexer_types(m: Metadata) -> list[str]:
    """Which layers have an indexer of their own, as flags in the file."""
    flags = m.flags(m.named("indexer_types", "attention.indexer.types"))
    return ["full" if flag else "shared" for flag in flags]


def pooled(m: Metadata) -> dict[str, Any]:
    """GLM-5.3: delta attention where there are no KV heads, latents with a pooled indexer elsewhere."""
    config = linear_by_heads(m) | indexer(m)
    m.get("attention.indexer.kpool_select_tail")
    config["index_kpool"] = m.count(m.named("index_kpool", "attention.indexer.kpool"))
    listed = isinstance(m.get("attention.indexer.types"), GGUFArray)
    return config | {"indexer_types": indexer_types(m) if listed else ["full"] * m.layers}


def linear_by_heads(m: Metadata) -> dict[str, Any]:
    """Kimi Linear and its kin: delta attention in the layers without KV heads, latents in the others."""
    stored, found = stored_heads(m)
    queries, width = found["num_attention_heads"], m.count(m.named("linear_head_dim", "kda.head_dim"))
    kernel = m.count(m.named("linear_conv_kernel_dim", "ssm.conv_kernel"))
    return {
        "num_attention_heads": queries,
        **latent_widths(m),
        "layer_types": ["full_attention" if count else "linear_attention" for count in stored],
        "linear_attn_config": {"num_heads": queries, "head_dim": width, "short_conv_kernel_size": kernel},
    }


def bailing3(m: Metadata) -> dict[str, Any]:
    """Ling 3: the same under names of its own."""
    found = linear_by_heads(m)
    sizes = found.pop("linear_attn_config")
    return found | {
        "short_conv_kernel_size": sizes["short_conv_kernel_size"],
        "linear_num_heads": sizes["num_heads"],
        "linear_head_dim": sizes["head_dim"],
    }


def compressed(m: Metadata) -> dict[str, Any]:
    """DeepSeek-V4: a window on every layer, and entries of 4 or 128 tokens on most."""
    ratios = m.array(m.named("compress_ratios", "attention.compress_ratios"), m.blocks)
    if m.count("attention.head_count_kv", default=1) != 1:
        raise m.unread("attention.head_count_kv", "is not 1; one vector a token is read for deepseek4 files")
    key, value = widths(m)
    if key != value:
        raise m.unread("attention.value_length", f"is {value}, the key length {key}; one vector is both")
    m.named("head_dim", "attention.key_length")
    return indexer(m) | {
        "num_attention_heads": m.count("attention.head_count"),
        "head_dim": key,
        "qk_rope_head_dim": m.count(m.named("qk_rope_head_dim", "rope.dimension_count")),
        "sliding_window": m.count(m.named("sliding_window", "attention.sliding_window")),
        "compress_ratios": ratios,
    }


def windowed_latents(m: Metadata) -> dict[str, Any]:
    """dots3: latents of two widths, those of window layers and those of the others with an indexer."""
    found = Windows(period=None, required=True)(m)
    kinds = found["layer_types"]
    flags = m.flags("attention.indexer.types")
    if flags != [kind != SLIDING for kind in kinds]:
        raise m.unread("attention.indexer.types", "does not name the full layers; an indexer on each of these is read")
    rank = m.count(m.named("swa_kv_lora_rank", "attention.kv_lora_rank_swa"))
    for key in ("value_length_swa", "key_length_mla_swa", "value_length_mla_swa"):
        m.get(f"attention.{key}")
    stored = m.count("attention.key_length_swa")
    if stored < rank:
        raise m.wrong("attention.key_length_swa", f"the latent ({rank}) and its rotary key together")
    return {
        **latent_widths(m),
        **indexer(m),
        **found,
        "num_attention_heads": max(m.each("attention.head_count", least=1)),
        "swa_kv_lora_rank": rank,
        "swa_qk_rope_head_dim": stored - rank,
    }
