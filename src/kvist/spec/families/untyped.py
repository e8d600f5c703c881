"""Files without a ``model_type``: read where every count is explicit and no key speaks of anything else.

Extracts of configurations often drop the type. What a class would fill in is then unknown, so that all that the
memory depends on must be there, and every other key must be one that no byte depends on.
"""

from dataclasses import replace

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families.extracts import reader_of_extract
from kvist.spec.families.reading import SLIDING, Reading, draft_count, finished, layer_types
from kvist.spec.layers import Attention, Indexer, Latent, Layer, Shared

_HARMLESS = frozenset(
    {"vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps", "hidden_act"}
    | {"rope_theta", "rope_scaling", "rope_parameters", "rope_adjustments", "rope_local_base_freq", "rotary_dim"}
    | {"partial_rotary_factor", "norm_qk", "attention_bias", "mlp_bias", "tie_word_embeddings", "torch_dtype", "dtype"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "transformers_version", "use_cache"}
    | {"n_expert", "n_expert_per_token", "num_experts", "num_experts_per_tok", "moe_intermediate_size"}
    | {"first_k_dense_replace", "model_max_length", "config_max_position_embeddings", "layer_cycle_interval"}
    | {"q_lora_rank", "qk_nope_head_dim", "qk_head_dim", "swa_num_attention_heads", "architectures", "model_type"}
    | {"index_n_heads", "index_topk", "index_topk_freq", "index_skip_topk_offset", "index_share_for_mtp_iteration"}
)


def read_untyped(keys: ConfigKeys) -> Reading:
    """Read a file that names neither type nor class.

    Raises:
        UnsupportedModel: something depends on the type, or may; names the key that stopped it.
    """
    extract = reader_of_extract(keys)
    if extract is not None:
        return extract(keys)
    layers = _needed(keys, "num_hidden_layers", most=10_000)
    _needed(keys, "max_position_embeddings")
    found = _latents(keys, layers) if keys.get("kv_lora_rank") is not None else _attention(keys, layers)
    draft_count(keys)
    for key, value in keys.config.items():
        if key in _HARMLESS:
            keys.get(key)
        read = key in keys.asked or str(key).startswith("_")
        if not read and value is not None and value is not False:
            raise _untyped(keys, key, "what it means depends on the type")
    keys.note("model_type", None, "left out: every count is explicit, and no key speaks of another memory")
    same = len(set(found)) == 1
    return finished(keys, found, draft=found[0] if same else None)


def _attention(keys: ConfigKeys, layers: int) -> list[Layer]:
    width = _needed(keys, "head_dim")
    value = width if keys.get("v_head_dim") is None else keys.count("v_head_dim")
    full = Attention(kv_heads=_needed(keys, "num_key_value_heads"), key_dim=width, value_dim=value)
    sliding = _sliding(keys, full)
    full = _wider(keys, full)
    if keys.get("layer_types") is not None:
        kinds = layer_types(keys, layers)
        if SLIDING in kinds and sliding is None:
            raise _untyped(keys, "layer_types", "it names windows, but sliding_window is missing")
        return [sliding if kind == SLIDING and sliding else full for kind in kinds]
    if keys.get("full_attention_layers") is not None:
        return _counted(keys, layers, full, sliding)
    if sliding is not None:
        raise _untyped(keys, "sliding_window", "which layers have it depends on the type")
    return [full] * layers


def _sliding(keys: ConfigKeys, full: Attention) -> Attention | None:
    """A layer with a window, which may have heads and widths of its own; None where there is no window."""
    if keys.get("use_sliding_window") is False:
        for key in ("sliding_window", "max_window_layers"):
            keys.get(key)
        return None
    if keys.get("sliding_window") is None:
        return None
    if keys.get("sliding_window_size") not in (None, keys.get("sliding_window")):
        raise _untyped(keys, "sliding_window_size", f"sliding_window says {keys.get('sliding_window')!r}")
    names = ("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim")
    own = {key: keys.count(key) for key in names if keys.get(key) is not None}
    width = own.get("swa_head_dim", full.key_dim)
    value = width if keys.get("v_head_dim") is None else full.value_dim
    return Attention(
        kv_heads=own.get("swa_num_key_value_heads", full.kv_heads),
        key_dim=width,
        value_dim=own.get("swa_v_head_dim", value),
        window=keys.count("sliding_window"),
    )


def _wider(keys: ConfigKeys, full: Attention) -> Attention:
    """Full layers with wider heads than those with windows."""
    if keys.get("global_head_dim") is None:
        return full
    width = keys.count("global_head_dim")
    heads = full.kv_heads
    if keys.get("num_global_key_value_heads") is not None:
        heads = keys.count("num_global_key_value_heads")
    return Attention(kv_heads=heads, key_dim=width, value_dim=width)


def _counted(keys: ConfigKeys, layers: int, full: Attention, sliding: Attention | None) -> list[Layer]:
    """Numbers of layers of each kind; on their order no byte depends."""
    counts = {key: keys.count(key, default=0, least=0) if keys.get(key) is not None else 0 for key in _COUNTS}
    shared = counts["num_kv_shared_layers"]
    if counts["full_attention_layers"] + counts["sliding_attention_layers"] + shared != layers:
        raise _untyped(keys, "full_attention_layers", f"the numbers by kind do not make up {layers} layers")
    if counts["stored_layers"] not in (0, layers - shared):
        raise _untyped(keys, "stored_layers", f"{layers - shared} of {layers} layers share nothing")
    if sliding is None and counts["sliding_attention_layers"]:
        raise _untyped(keys, "sliding_attention_layers", "sliding_window is missing")
    keys.get("sliding_window_pattern")
    keys.note("layer_types", None, "left out: on the order of the layers no byte depends")
    stored: list[Layer] = [full] * counts["full_attention_layers"]
    if sliding is not None:
        stored += [sliding] * counts["sliding_attention_layers"]
    if not stored:
        raise _untyped(keys, "full_attention_layers", "no layer stores anything")
    return [*stored, *[Shared(source=0)] * shared]


_COUNTS = ("full_attention_layers", "sliding_attention_layers", "num_kv_shared_layers", "stored_layers")


def _latents(keys: ConfigKeys, layers: int) -> list[Layer]:
    """Latents are what they are in every family; so is an indexer, once it is said which layers have one."""
    for key in ("num_key_value_heads", "v_head_dim"):
        keys.get(key)
    plain = Latent(rank=keys.count("kv_lora_rank"), rope_dim=_needed(keys, "qk_rope_head_dim", least=0))
    if keys.get("index_head_dim") is None:
        return [plain] * layers
    width = keys.count("index_head_dim")
    choosing = _needed(keys, "indexer_full_layers", least=0, most=layers)
    if keys.get("indexer_shared_layers") not in (None, layers - choosing):
        raise _untyped(keys, "indexer_shared_layers", f"{choosing} of {layers} layers have an indexer")
    keys.get("draft_indexer_layers")
    indexed = replace(plain, indexer=Indexer(heads=1, dim=width))
    keys.note("indexer_types", None, "left out: on the order of the layers no byte depends")
    return [*[indexed] * choosing, *[plain] * (layers - choosing)]


def _needed(keys: ConfigKeys, key: str, *, least: int = 1, most: int = 2**40) -> int:
    if keys.get(key) is None:
        raise UnsupportedModel(
            f"{keys.name}: model_type is missing, and so is {key}, which its class might fill in: "
            f"add one of them, or --assume model_type=TYPE",
            key="model_type",
        )
    return keys.count(key, least=least, most=most)


def _untyped(keys: ConfigKeys, key: str, why: str) -> UnsupportedModel:
    value = repr(keys.config.get(key))
    return UnsupportedModel(
        f"{keys.name}: model_type is missing, and {key} is {value if len(value) <= 60 else value[:57] + '…'}: {why}; "
        f"--assume model_type=TYPE",
        key="model_type",
    )
