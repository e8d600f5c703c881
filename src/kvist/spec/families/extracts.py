"""Extracts of hybrid configurations, which drop the type and count layers by kind instead of naming each.

Such a file is read where its keys belong to one mechanism alone and every size is there; on the order of the layers no
byte depends, and it is said that the order is not known.
"""

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families import states
from kvist.spec.families.patterns import own, reading
from kvist.spec.families.reading import Reader, Reading, draft_count
from kvist.spec.families.recurrent import RECURRENT_MODELS
from kvist.spec.layers import Attention, Indexer, Latent, Layer, Parallel

_HARMLESS = frozenset(
    {"vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "swa_num_attention_heads"}
    | {"index_n_heads", "index_topk", "index_topk_freq", "index_share_for_mtp_iteration", "draft_indexer_layers"}
    | {"qk_nope_head_dim", "qk_head_dim", "v_head_dim", "model_type"}
)


def _gated_delta(keys: ConfigKeys) -> Reading:
    """Keys that Qwen3-Next and what follows it have, under the names of their published files."""
    full, linear = _counts(keys, "full_attention_layers", "linear_attention_layers")
    dim = keys.count("head_dim")
    attention = Attention(kv_heads=keys.count("num_key_value_heads"), key_dim=dim, value_dim=dim)
    state = states.gated_delta(
        key_heads=keys.count("linear_num_key_heads"),
        key_dim=keys.count("linear_key_head_dim"),
        value_heads=keys.count("linear_num_value_heads"),
        value_dim=keys.count("linear_value_head_dim"),
        kernel=keys.count("linear_conv_kernel_dim"),
        codec=states.state_codec(keys),
    )
    return _finished(keys, [attention] * full + [state] * linear, [attention] * draft_count(keys))


def _kda(keys: ConfigKeys) -> Reading:
    """Keys of Kimi delta attention beside latents, with an indexer (GLM-5.3-Flash) or without."""
    full, linear = _counts(keys, "full_attention_layers", "kda_layers")
    latent = Latent(rank=keys.count("kv_lora_rank"), rope_dim=keys.count("qk_rope_head_dim", least=0))
    if keys.get("index_head_dim") is not None:
        if keys.count("indexer_full_layers", least=0) != full:
            raise keys.unread("indexer_full_layers", f"an indexer in each of the {full} layers is described")
        own(keys, "indexer_shared_layers")
        indexer = Indexer(heads=1, dim=keys.count("index_head_dim"), pool=keys.count("index_kpool"))
        latent = Latent(rank=latent.rank, rope_dim=latent.rope_dim, indexer=indexer)
    heads, dim = keys.count("kda_num_heads"), keys.count("kda_head_dim")
    for name in ("kda_num_key_heads", "kda_num_value_heads"):
        if keys.get(name) not in (None, heads):
            raise keys.unread(name, f"as many heads as kda_num_heads ({heads}) are described")
    if keys.get("kda_key_head_dim") not in (None, dim):
        raise keys.unread("kda_key_head_dim", f"keys of the width of a head ({dim}) are described")
    state = states.kda(heads=heads, dim=dim, kernel=keys.count("kda_conv_kernel_size"))
    own(keys, prefixes=("kda_", "index_", "indexer_"))
    return _finished(keys, [latent] * full + [state] * linear, [latent] * draft_count(keys))


def _short_convolutions(keys: ConfigKeys) -> Reading:
    """Keys of Inkling, whose layers convolve their keys, their values and the outputs of both halves."""
    full, sliding = _counts(keys, "full_attention_layers", "sliding_attention_layers")
    kernel, hidden = keys.count("sconv_kernel_size"), keys.count("hidden_size")
    window = keys.count("sliding_window")
    if keys.get("sliding_window_size") not in (None, window):
        raise keys.wrong("sliding_window_size", f"as sliding_window says ({window})")
    dim, near_dim = keys.count("head_dim"), keys.count("swa_head_dim")
    far = Attention(kv_heads=keys.count("num_key_value_heads"), key_dim=dim, value_dim=dim)
    heads = keys.count("swa_num_key_value_heads")
    near = Attention(kv_heads=heads, key_dim=near_dim, value_dim=near_dim, window=window)

    def convolved(attention: Attention) -> Layer:
        channels = 2 * (attention.kv_heads * attention.key_dim + hidden)
        return Parallel(parts=(attention, states.short_conv(channels=channels, kernel=kernel)))

    drafts = draft_count(keys)
    own(keys, "sconv_state_bytes_per_element", "draft_full_attention_layers", "draft_sliding_attention_layers")
    draft_far = keys.count("draft_full_attention_layers", least=0) if drafts else 0
    draft = [convolved(far)] * draft_far + [convolved(near)] * (drafts - draft_far)
    return _finished(keys, [convolved(far)] * full + [convolved(near)] * sliding, draft)


def _mamba_ssm(keys: ConfigKeys) -> Reading:
    """The original files of Mamba and Mamba-2, whole, which never had a type."""
    keys.note("model_type", "mamba_ssm", "implied by `ssm_cfg`")
    keys.set("model_type", "mamba_ssm")
    return RECURRENT_MODELS["mamba_ssm"](keys)


# Each is recognised by one key, which no other mechanism has.
_EXTRACTS: dict[str, Reader] = {
    "linear_num_value_heads": _gated_delta,
    "kda_num_heads": _kda,
    "sconv_kernel_size": _short_convolutions,
    "ssm_cfg": _mamba_ssm,
}


def reader_of_extract(keys: ConfigKeys) -> Reader | None:
    """Return the reader of a hybrid model's extract, or of a file that never had a type; None where it is neither."""
    return next((reader for key, reader in _EXTRACTS.items() if keys.config.get(key) is not None), None)


def _counts(keys: ConfigKeys, first: str, second: str) -> tuple[int, int]:
    total = keys.count("num_hidden_layers", most=10_000)
    counts = keys.count(first, least=0), keys.count(second, least=0)
    if sum(counts) != total:
        raise keys.wrong(second, f"{total - counts[0]}, so that both make up num_hidden_layers ({total})")
    return counts


def _finished(keys: ConfigKeys, layers: list[Layer], draft: list[Layer]) -> Reading:
    keys.count("max_position_embeddings")
    for key, value in keys.config.items():
        known = key in keys.asked or key in _HARMLESS or str(key).startswith(("_", "default_"))
        if not known and value not in (None, False, 0):
            raise UnsupportedModel(
                f"{keys.name}: model_type is missing, and what {key} means depends on it; --assume model_type=TYPE",
                key="model_type",
            )
    own(keys, *_HARMLESS)
    keys.note("model_type", None, "left out: every size is explicit, and its keys belong to one mechanism")
    keys.note("layer_types", None, "left out: on the order of the layers no byte depends")
    return reading(keys, layers, max_context=keys.count("max_position_embeddings"), draft=draft)
