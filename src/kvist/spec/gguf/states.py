"""Of GGUF metadata under Hugging Face's names: recurrent layers, alone or between layers of attention.

A layer is recurrent where the file gives it no KV heads, or by the period of full attention.
Sources: ``load_arch_hparams`` of llama.cpp's architectures, and its conversion scripts.
"""

from typing import Any

from kvist.spec.gguf.attention import FULL, one_width, stored_heads
from kvist.spec.gguf.header import GGUFArray
from kvist.spec.gguf.metadata import Metadata

LINEAR = "linear_attention"


def mamba(m: Metadata) -> dict[str, Any]:
    """Mamba-1."""
    return {
        "intermediate_size": m.count(m.named("intermediate_size", "ssm.inner_size")),
        "state_size": m.count(m.named("state_size", "ssm.state_size")),
        "conv_kernel": m.count(m.named("conv_kernel", "ssm.conv_kernel")),
        "time_step_rank": m.count("ssm.time_step_rank"),
    }


def mamba2(m: Metadata) -> dict[str, Any]:
    """Mamba-2: ``time_step_rank`` counts its heads."""
    inner, count, width = _mamba2_heads(m)
    return {
        "num_heads": count,
        "head_dim": width,
        "expand": _expand(m, inner),
        "intermediate_size": inner,
        "n_groups": m.count(m.named("n_groups", "ssm.group_count")),
        "state_size": m.count(m.named("state_size", "ssm.state_size")),
        "conv_kernel": m.count(m.named("conv_kernel", "ssm.conv_kernel")),
    }


def _mamba2_heads(m: Metadata) -> tuple[int, int, int]:
    inner = m.count("ssm.inner_size")
    count = m.count("ssm.time_step_rank")
    if inner % count:
        raise m.wrong("ssm.time_step_rank", f"a number of heads that divides ssm.inner_size ({inner})")
    return inner, count, inner // count


def _expand(m: Metadata, inner: int) -> int | float:
    hidden = m.count("embedding_length")
    return inner / hidden if inner % hidden else inner // hidden


def _mixer(m: Metadata, *, groups: bool = True) -> dict[str, Any]:
    """The names of Jamba, Bamba, Granite and Falcon-H1."""
    found = {
        "mamba_expand": _expand(m, m.count(m.named("mamba_expand", "ssm.inner_size"))),
        "mamba_d_state": m.count(m.named("mamba_d_state", "ssm.state_size")),
        "mamba_d_conv": m.count(m.named("mamba_d_conv", "ssm.conv_kernel")),
    }
    if not groups:
        return found
    _, count, width = _mamba2_heads(m)
    number = m.count(m.named("mamba_n_groups", "ssm.group_count"))
    return found | {"mamba_n_groups": number, "mamba_n_heads": count, "mamba_d_head": width}


def jamba(m: Metadata) -> dict[str, Any]:
    """Jamba: Mamba-1 where there are no KV heads."""
    stored, found = stored_heads(m)
    kinds = ["attention" if count else "mamba" for count in stored]
    rank = m.count("ssm.time_step_rank")
    return (
        found
        | _mixer(m, groups=False)
        | {
            "layers_block_type": kinds,
            "mamba_dt_rank": rank,
            "head_dim": one_width(m),
        }
    )


def granite(m: Metadata) -> dict[str, Any]:
    """Granite 4, and Bamba under its name: Mamba-2 where there are no KV heads."""
    stored, found = stored_heads(m)
    kinds = ["attention" if count else "mamba" for count in stored]
    mixer = _mixer(m) if "mamba" in kinds else {}
    return found | mixer | {"layer_types": kinds, "head_dim": one_width(m)}


def falcon_h1(m: Metadata) -> dict[str, Any]:
    """Falcon-H1: both in every layer."""
    _, found = stored_heads(m)
    return found | _mixer(m) | {"mamba_d_ssm": m.count("ssm.inner_size"), "head_dim": one_width(m)}


def nemotron_h(m: Metadata) -> dict[str, Any]:
    """Nemotron-H: feed-forward where there is a width for it, Mamba-2 where there are no KV heads either."""
    stored, found = stored_heads(m)
    fed = m.each("feed_forward_length")
    for index, (kept, width) in enumerate(zip(stored, fed, strict=True)):
        if kept and width:
            raise m.unread("attention.head_count_kv", f"gives layer {index} heads, and feed_forward_length a width")
    letters = "".join("*" if kept else "-" if width else "M" for kept, width in zip(stored, fed, strict=True))
    m.named("hybrid_override_pattern", "attention.head_count_kv")
    _, count, width = _mamba2_heads(m)
    return found | {
        "hybrid_override_pattern": letters,
        "head_dim": one_width(m),
        "mamba_num_heads": count,
        "mamba_head_dim": width,
        "n_groups": m.count(m.named("n_groups", "ssm.group_count")),
        "ssm_state_size": m.count(m.named("ssm_state_size", "ssm.state_size")),
        "conv_kernel": m.count(m.named("conv_kernel", "ssm.conv_kernel")),
    }


def plamo2(m: Metadata) -> dict[str, Any]:
    """PLaMo 2: attention in the middle of every so many layers; its window is left out and is the class's."""
    stored, found = stored_heads(m)
    attention = [index for index, count in enumerate(stored) if count]
    step = attention[1] - attention[0] if len(attention) > 1 else 0
    if step < 2 or [index for index in range(m.layers) if index % step == step // 2] != attention:
        raise m.unread("attention.head_count_kv", "has no regular pattern of layers with heads, as plamo2 models have")
    if m.count("ssm.group_count", default=0, least=0):
        raise m.unread("ssm.group_count", "is not 0, as in plamo2 models")
    _, count, width = _mamba2_heads(m)
    if width != one_width(m):
        raise m.unread("ssm.inner_size", f"makes heads of {width}, those of attention are {one_width(m)} wide")
    return found | {
        "mamba_step": step,
        "hidden_size_per_head": width,
        "mamba_num_heads": count,
        "mamba_d_state": m.count(m.named("mamba_d_state", "ssm.state_size")),
        "mamba_d_conv": m.count(m.named("mamba_d_conv", "ssm.conv_kernel")),
    }


def recurrent_flags(m: Metadata, period: int) -> list[bool]:
    """Which layers are recurrent: a list, or all but the last of each ``full_attention_interval``."""
    key = "attention.recurrent_layers"
    if isinstance(m.get(key), GGUFArray):
        m.get("full_attention_interval")
        return m.flags(m.named("layer_types", key))
    key = m.named("layer_types", "full_attention_interval")
    interval = m.count(key, default=period)
    if m.get(key) is None:
        said = f"{m.full(key)} is left out; llama.cpp's rule for {m.architecture}"
        m.assume("full_attention_interval", period, said)
    return [bool((index + 1) % interval) for index in range(m.layers)]


def gated_delta(m: Metadata) -> dict[str, Any]:
    """Qwen3-Next and 3.5: ``state_size`` is the width of a key, ``inner_size`` that of all values together."""
    queries = m.count(m.named("num_attention_heads", "attention.head_count"))
    stored = _nonzero(m, queries)
    _, values, width = _mamba2_heads(m)
    kinds = [LINEAR if flag else FULL for flag in recurrent_flags(m, 4)]
    return {
        "num_attention_heads": queries,
        "num_key_value_heads": stored,
        "head_dim": one_width(m),
        "layer_types": kinds,
        "linear_num_key_heads": m.count(m.named("linear_num_key_heads", "ssm.group_count")),
        "linear_num_value_heads": values,
        "linear_key_head_dim": m.count(m.named("linear_key_head_dim", "ssm.state_size")),
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": m.count(m.named("linear_conv_kernel_dim", "ssm.conv_kernel")),
    }


def _nonzero(m: Metadata, default: int) -> int:
    stored, found = stored_heads(m)
    return int(found["num_key_value_heads"]) if any(stored) else default


def qwen4_exp(m: Metadata) -> dict[str, Any]:
    """Qwen4-Exp: gated delta nets, a pooled indexer, and a convolution over n-gram embeddings in one layer."""
    found = gated_delta(m)
    ratios = set(m.each(m.named("indexer_compress_ratio", "attention.compress_ratios"), default=0)) - {0}
    if len(ratios) != 1:
        raise m.unread("attention.compress_ratios", f"has {len(ratios)} different numbers of tokens; one is read")
    m.get("attention.indexer.top_k")
    found |= {
        "indexer_compress_ratio": ratios.pop(),
        "indexer_n_heads": m.count(m.named("indexer_n_heads", "attention.indexer.head_count")),
        "indexer_head_dim": m.count(m.named("indexer_head_dim", "attention.indexer.key_length")),
        # llama.cpp stores one key a token for all heads.
        "indexer_kv_heads": 1,
        "hc_count": m.count(m.named("hc_count", "hyper_connection.count")),
    }
    embedded = m.get("ple.layers")
    if isinstance(embedded, GGUFArray) and embedded.count:
        if embedded.count > m.layers:
            raise m.wrong("ple.layers", f"at most {m.layers} layers", given=f"{embedded.count} entries")
        found |= {
            "ple_layer_ids": [index + 1 for index in m.header.array(m.full("ple.layers"))],
            "ngram_size": m.count("ple.ngram_size"),
            "ple_conv_kernel_size": m.count("ple.conv_kernel"),
        }
    return found


def minimax_01(m: Metadata) -> dict[str, Any]:
    """MiniMax-Text-01: lightning attention, and softmax attention in every eighth layer."""
    queries = m.count(m.named("num_attention_heads", "attention.head_count"))
    return {
        "num_attention_heads": queries,
        "num_key_value_heads": _nonzero(m, queries),
        "head_dim": one_width(m),
        "attn_type_list": [0 if flag else 1 for flag in recurrent_flags(m, 8)],
    }


def lfm2(m: Metadata) -> dict[str, Any]:
    """LFM2: short convolutions where there are no KV heads."""
    stored, found = stored_heads(m)
    if m.count("attention.sliding_window", default=0, least=0):
        raise m.unread("attention.sliding_window", "is set; lfm2 models are read with full attention alone")
    kinds = [FULL if count else "conv" for count in stored]
    kernel = m.count(m.named("conv_L_cache", "shortconv.l_cache"))
    return found | {"layer_types": kinds, "conv_L_cache": kernel, "head_dim": one_width(m)}


def rwkv(m: Metadata) -> dict[str, Any]:
    """RWKV-6 and 7: a matrix a head, and the last input to both halves of a layer."""
    shifts = m.count("token_shift_count", default=2)
    if shifts != 2:
        raise m.unread("token_shift_count", f"is {shifts}; {m.architecture} models keep two inputs of the last token")
    return {"head_size": m.count(m.named("head_size", "wkv.head_size"))}
