"""Latent attention and Kimi delta attention in one model: Kimi Linear and K3, Ling 3, GLM-5.3-Flash."""

from typing import Any

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.families import states
from kvist.spec.families.lightning import group_kinds
from kvist.spec.families.patterns import (
    RECURRENT,
    indices_of,
    listed,
    longest,
    missing_pattern,
    number_of_layers,
    own,
    reading,
    split,
)
from kvist.spec.families.reading import FULL, Reader, Reading, Size, class_default, draft_count
from kvist.spec.layers import Indexer, Latent, Layer, State

_WORDS = {
    "linear_attention": RECURRENT, "full_attention": FULL, "attention": FULL,
    "indexed_attention": FULL, "deepseek_sparse_attention": FULL,
}  # fmt: skip
_LATENT_KEYS = ("q_lora_rank", "qk_nope_head_dim", "v_head_dim", "qk_head_dim", "num_key_value_heads", "head_dim")


def _latent(keys: ConfigKeys, *, rank: int, rope: int, least: int = 1) -> Latent:
    default = class_default(keys)
    latent = Latent(
        rank=keys.count("kv_lora_rank", default=rank, source=default),
        rope_dim=keys.count("qk_rope_head_dim", default=rope, least=least, source=default),
    )
    own(keys, *_LATENT_KEYS, prefixes=("mla_", "kda_", "linear_"))
    return latent


def _heads(keys: ConfigKeys, *, heads: int, dim: int) -> State:
    """The linear layer, whose sizes lie under ``linear_attn_config`` or, as transformers writes them, at the top."""
    default = class_default(keys)
    inner = keys.section("linear_attn_config")
    size = {}
    for printed, written, taken in (
        ("num_heads", "linear_num_heads", heads),
        ("head_dim", "linear_head_dim", dim),
        ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
    ):
        if inner.get(printed) is not None:
            size[printed] = inner.count(printed)
            if keys.get(written) not in (None, size[printed]):
                raise keys.wrong(written, f"as linear_attn_config.{printed} says ({size[printed]})")
        else:
            size[printed] = keys.count(written, default=taken, source=default)
    return states.kda(
        heads=size["num_heads"],
        dim=size["head_dim"],
        kernel=size["short_conv_kernel_size"],
        codec=states.state_codec(keys),
    )


def _named_kinds(keys: ConfigKeys, layers: int, *, first: int) -> list[str] | None:
    """Kinds as ``linear_attn_config`` names them: which layers are linear, which are full, or both."""
    inner = keys.section("linear_attn_config")
    sets: dict[str, set[int]] = {}
    for name in ("kda_layers", "full_attn_layers"):
        where = f"linear_attn_config.{name}"
        found = indices_of(keys, where, inner.get(name), layers=layers, first=first)
        if found is not None:
            sets[name] = found
    if not sets:
        return None
    full = sets.get("full_attn_layers", set(range(layers)) - sets.get("kda_layers", set()))
    linear = sets.get("kda_layers", set(range(layers)) - full)
    if full & linear or len(full) + len(linear) != layers:
        raise keys.wrong("linear_attn_config", f"lists that name each of the {layers} layers once", shown=_lists(inner))
    return split(layers, full)


def _lists(inner: ConfigKeys) -> str:
    counts: dict[str, Any] = {name: inner.get(name) for name in ("kda_layers", "full_attn_layers")}
    return " and ".join(f"{name} of length {len(value)}" for name, value in counts.items() if isinstance(value, list))


def _kimi_linear(keys: ConfigKeys) -> Reading:
    """Kimi Linear and the text model of Kimi K3; layers are counted from 1.

    Without a pattern engines differ (transformers takes every fourth layer, vLLM all as full), so that it is asked for.
    Sources: KimiLinearConfig of transformers and of vLLM; draft layers are latent attention (``mtp.py`` of vLLM).
    """
    layers = number_of_layers(keys, size=Size(layers=27))
    kinds = listed(keys, "layer_types", layers=layers, words=_WORDS)
    named = _named_kinds(keys, layers, first=1)
    if kinds is not None and named not in (None, kinds):
        raise keys.wrong("layer_types", "the layers that linear_attn_config names")
    kinds = kinds or named
    if kinds is None:
        raise missing_pattern(keys, "layer_types", "neither it nor linear_attn_config says which layers are linear")
    latent = _latent(keys, rank=512, rope=64)
    found: dict[str, Layer] = {FULL: latent}
    if RECURRENT in kinds:
        found[RECURRENT] = _heads(keys, heads=32, dim=128)
    context = longest(keys, "model_max_length", default=1048576)
    return reading(keys, [found[kind] for kind in kinds], max_context=context, draft=[latent] * draft_count(keys))


def _bailing_hybrid(keys: ConfigKeys) -> Reading:
    """Ling 3 (delta attention with a short convolution) and Ring and Ling 2.5 (lightning attention): one name for both.

    ``short_conv_kernel_size`` tells them apart, and where it is left out the class of the model does. Sources:
    BailingHybridConfig of SGLang and of transformers; ``bailing_moe_v3.py`` and ``bailing_moe_linear.py`` of vLLM.
    """
    layers = number_of_layers(keys)
    kinds = group_kinds(keys, layers)
    latent = _latent(keys, rank=512, rope=64)
    if keys.get("use_mla_nope"):
        raise keys.unread("use_mla_nope", "engines differ in whether the rotary part is stored; --assume false")
    # Saved again by transformers, head_dim is that of the rotary part, and the heads have names of their own.
    heads = keys.count("linear_num_heads" if keys.get("linear_num_heads") is not None else "num_attention_heads")
    dim = keys.count("linear_head_dim" if keys.get("linear_head_dim") is not None else "head_dim")
    keys.rename({"short_conv_kernel_size": ("linear_conv_kernel_dim",)})
    codec = states.state_codec(keys)
    if _has_convolution(keys):
        kernel = keys.count("short_conv_kernel_size", default=4, source=class_default(keys))
        state = states.kda(heads=heads, dim=dim, kernel=kernel, codec=codec)
    else:
        state = states.lightning(heads=heads, dim=dim, codec=codec)
    found = [latent if kind == FULL else state for kind in kinds]
    context = longest(keys, "model_max_length", default=262144)
    return reading(keys, found, max_context=context, draft=[latent] * draft_count(keys))


def _has_convolution(keys: ConfigKeys) -> bool:
    if keys.get("short_conv_kernel_size") is not None:
        return True
    classes = keys.get("architectures") or []
    if classes in (["BailingMoeV3ForCausalLM"], ["BailingHybridForCausalLM"]):
        return True
    if classes == ["BailingMoeV2_5ForCausalLM"]:
        return False
    raise UnsupportedModel(
        f"{keys.name}: short_conv_kernel_size is missing; it tells delta attention from lightning attention: "
        f"--assume short_conv_kernel_size=4 for Ling 3, or add architectures",
        key="short_conv_kernel_size",
    )


def _glm5_next(keys: ConfigKeys) -> Reading:
    """GLM-5.3-Flash: delta attention, and latent attention with an indexer over pools of tokens; layers from 0.

    An indexer keeps one key for each ``index_kpool`` tokens; what it keeps of a pool that is not full yet is an
    engine's business, and transformers keeps a key, a gate and a flag of every token. Layers whose indexer is
    ``shared`` keep none. Sources: Glm5NextTextConfig of transformers; ``models/glm5next`` of vLLM.
    """
    default = class_default(keys)
    layers = number_of_layers(keys, size=Size(layers=45))
    kinds = listed(keys, "layer_types", layers=layers, words=_WORDS) or _named_kinds(keys, layers, first=0)
    if kinds is None:
        keys.note("layer_types", "latent attention in every fourth layer", default)
        kinds = split(layers, range(3, layers, 4))
    latent = _latent(keys, rank=512, rope=0, least=0)
    indexer = Indexer(
        heads=1,
        dim=keys.count("index_head_dim", default=128, source=default),
        pool=keys.count("index_kpool", default=16, source=default),
    )
    indexed = Latent(rank=latent.rank, rope_dim=latent.rope_dim, indexer=indexer)
    state = _heads(keys, heads=64, dim=128)
    shared = _shares_indexer(keys, layers)
    found: list[Layer] = [
        state if kind == RECURRENT else latent if shared[index] else indexed for index, kind in enumerate(kinds)
    ]
    own(keys, prefixes=("index_", "indexer_"))
    context = longest(keys, default=1048576)
    return reading(keys, found, max_context=context, draft=[indexed] * draft_count(keys))


def _shares_indexer(keys: ConfigKeys, layers: int) -> list[bool]:
    """Which layers take over the choice of an earlier indexer and keep no keys for one of their own."""
    words = {"full": "full", "shared": "shared", "F": "full", "S": "shared"}
    kinds = listed(keys, "indexer_types", layers=layers, words=words)
    pattern = keys.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - {"F", "S"}:
            raise keys.wrong("index_topk_pattern", f"a letter F or S for each of the {layers} layers")
        kinds = [words[letter] for letter in pattern]
    if kinds is None:
        period = keys.count("index_topk_freq", default=1, source=class_default(keys))
        offset = keys.count("index_skip_topk_offset", default=2, least=0, source=class_default(keys))
        kinds = ["shared" if max(index - offset + 1, 0) % period else "full" for index in range(layers)]
    return [kind == "shared" for kind in kinds]


KDA: dict[str, Reader] = {
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _bailing_hybrid,
    "glm5_next_text": _glm5_next,
}
