"""Of GGUF metadata under Hugging Face's names: heads and widths of attention, and which layers have windows.

Sources: ``load_hparams`` of llama.cpp's llama-model.cpp, and ``load_arch_hparams`` of the file of each architecture.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvist.spec.gguf.header import GGUFArray
from kvist.spec.gguf.metadata import Metadata

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

Step = Callable[[Metadata], dict[str, Any]]


def widths(m: Metadata, *, suffix: str = "") -> tuple[int, int]:
    """Width of a key and of a value: hidden size / heads of the first layer that has any, unless given."""
    given = m.get(f"attention.key_length{suffix}") is not None and m.get(f"attention.value_length{suffix}") is not None
    heads = next((count for count in m.each("attention.head_count", default=0 if given else None) if count), 0)
    by_hidden = m.count("embedding_length") // heads if heads else None
    key = m.count(f"attention.key_length{suffix}", default=by_hidden)
    return key, m.count(f"attention.value_length{suffix}", default=by_hidden)


def one_width(m: Metadata) -> int:
    """Width of a head where keys and values of all layers share it."""
    key, value = widths(m)
    m.named("head_dim", "attention.key_length")
    if value != key:
        raise m.unread(
            "attention.value_length",
            f"is {value}, the key length {key}; they must be equal in a {m.architecture} model",
        )
    for side in ("key", "value"):
        if m.count(f"attention.{side}_length_swa", default=key) != key:
            raise m.unread(f"attention.{side}_length_swa", f"is not the {side} length {key}; one width is read")
    return key


def heads(m: Metadata) -> dict[str, Any]:
    """As many heads in all layers."""
    queries = m.count(m.named("num_attention_heads", "attention.head_count"))
    stored = m.count(m.named("num_key_value_heads", "attention.head_count_kv"), default=queries)
    return {"num_attention_heads": queries, "num_key_value_heads": stored, "head_dim": one_width(m)}


def stored_heads(m: Metadata) -> tuple[list[int], dict[str, Any]]:
    """KV heads of each layer, 0 where it is of another kind, and the keys for one number of heads elsewhere."""
    queries = [count for count in m.each("attention.head_count", default=0) if count]
    if len(set(queries)) > 1:
        raise m.unread("attention.head_count", "differs between layers; one number of query heads is read")
    m.named("num_attention_heads", "attention.head_count")
    m.named("num_key_value_heads", "attention.head_count_kv")
    stored = m.each("attention.head_count_kv", default=queries[0] if queries else 0)
    counts = {count for count in stored if count}
    if len(counts) > 1:
        raise m.unread(
            "attention.head_count_kv", f"has {len(counts)} different numbers of heads; one for all attention is read"
        )
    heads = queries[0] if queries else 1
    return stored, {"num_attention_heads": heads, "num_key_value_heads": counts.pop() if counts else heads}


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Where an architecture has windows.

    Attributes:
        period: of the pattern, where the file gives none; None: it must.
        first: the full layer begins a period instead of ending it.
        width: where the file leaves it out; None: no windows then.
        width_of_64: the same for models of 64 layers alone (EXAONE 4 of 32B parameters).
        required: the file must give it.
        chunks: they are chunks (Llama 4).
    """

    period: int | None
    first: bool = False
    width: int | None = None
    width_of_64: int | None = None
    required: bool = False
    chunks: bool = False

    def __call__(self, m: Metadata) -> dict[str, Any]:
        """Return the kinds of all layers, and the width where the file does not switch windows off."""
        return self.over(m, m.layers)

    def over(self, m: Metadata, layers: int) -> dict[str, Any]:
        """Return them for the first ``layers`` blocks, those that draft included where they are asked for."""
        key = "attention.sliding_window"
        name = "attention_chunk_size" if self.chunks else "sliding_window"
        if self.required and m.get(key) is None:
            raise m.missing(key)
        width = m.count(m.named(name, key), default=self._default(m), least=0)
        if not width:
            return {"layer_types": [FULL] * layers}
        if m.get(key) is None:
            m.assume(name, width, f"{m.full(key)} is left out; the rule of llama.cpp for {m.architecture}")
        return {"layer_types": self._kinds(m, layers), name: width}

    def _default(self, m: Metadata) -> int:
        return self.width or (self.width_of_64 if m.layers == 64 else 0) or 0

    def _kinds(self, m: Metadata, layers: int) -> list[str]:
        limited = CHUNKED if self.chunks else SLIDING
        key = m.named("layer_types", "attention.sliding_window_pattern")
        if isinstance(m.get(key), GGUFArray) or self.period is None:
            return [limited if flag else FULL for flag in m.flags(key, layers)]
        period = m.count(key, default=self.period, least=0)
        if m.get(key) is None:
            where = "first" if self.first else "last"
            said = f"{m.full(key)} is left out; llama.cpp's rule for {m.architecture}: the {where} of {period} is full"
            m.assume("layer_types", f"1 full layer in {period}", said)
        return [limited if self._is_limited(index, period) else FULL for index in range(layers)]

    def _is_limited(self, index: int, period: int) -> bool:
        """As llama.cpp counts: 0 limits every layer, 1 none."""
        if period == 0:
            return True
        return bool(index % period) if self.first else index % period < period - 1


def window_everywhere(m: Metadata) -> dict[str, Any]:
    """Phi 3: one window for all layers, where the file gives one.

    llama.cpp reads it and sees everything nevertheless; the model's own class does not.
    """
    width = m.count(m.named("sliding_window", "attention.sliding_window"), default=0, least=0)
    return {"sliding_window": width or None}


def window_left_out(m: Metadata) -> dict[str, Any]:
    """StarCoder 2: its published configurations have a window, which conversion drops and llama.cpp does not know."""
    found = window_everywhere(m)
    if found["sliding_window"] is None:
        said = f"{m.full('attention.sliding_window')} is left out; llama.cpp sees all, published models 4,096 tokens"
        m.assume("sliding_window", None, said)
    return found


def no_window(m: Metadata) -> dict[str, Any]:
    """Families whose class asks whether there is a window: llama.cpp knows none for them."""
    return {"sliding_window": None}


def switched_off(m: Metadata) -> dict[str, Any]:
    """Qwen 2 and 3: their windows are off, and files do not say so."""
    return {"use_sliding_window": False}


def one_head(m: Metadata) -> dict[str, Any]:
    """StarCoder 1 and Refact: one KV head."""
    found = heads(m)
    return found | {"multi_query": found["num_key_value_heads"] == 1 != found["num_attention_heads"]}


def falcon_heads(m: Metadata) -> dict[str, Any]:
    """Falcon: one KV head, groups of the new architecture, or as many as query heads."""
    found = heads(m)
    stored = found.pop("num_key_value_heads")
    one, all_ = stored == 1, stored == found["num_attention_heads"]
    grouped = {"num_kv_heads": stored} if not one and not all_ else {}
    return found | {"new_decoder_architecture": bool(grouped), "multi_query": one and not all_, **grouped}


def chatglm_heads(m: Metadata) -> dict[str, Any]:
    """ChatGLM: groups, where there are fewer than query heads."""
    found = heads(m)
    stored = found.pop("num_key_value_heads")
    return found | {
        "multi_query_attention": stored != found["num_attention_heads"],
        "multi_query_group_num": stored,
    }


def mpt_heads(m: Metadata) -> dict[str, Any]:
    """MPT: all heads, one, or groups."""
    found = heads(m)
    stored = found.pop("num_key_value_heads")
    kind = "multihead" if stored == found["num_attention_heads"] else "grouped_query"
    return found | {"attn_config": {"attn_type": f"{kind}_attention", "kv_n_heads": stored}}


def dbrx_heads(m: Metadata) -> dict[str, Any]:
    """DBRX: groups."""
    found = heads(m)
    return found | {"attn_config": {"kv_n_heads": found.pop("num_key_value_heads")}}


def openelm_heads(m: Metadata) -> dict[str, Any]:
    """OpenELM: heads by layer."""
    return {
        "num_query_heads": m.each(m.named("num_query_heads", "attention.head_count"), least=1),
        "num_kv_heads": m.each(m.named("num_kv_heads", "attention.head_count_kv"), least=1),
        "head_dim": one_width(m),
    }


def deci_heads(m: Metadata) -> dict[str, Any]:
    """Models found by search over layers: KV heads by layer, 0 where attention was cut away or made linear."""
    queries = m.each("attention.head_count")
    stored = m.each(m.named("block_configs", "attention.head_count_kv"), default=max(queries))
    most = max(queries, default=0)
    if set(queries) - {0, most} or not most:
        raise m.unread("attention.head_count", "differs between layers; one number of query heads is read")
    blocks: list[dict[str, Any]] = []
    for index, (asked, kept) in enumerate(zip(queries, stored, strict=True)):
        if kept and (not asked or asked % kept):
            raise m.wrong(f"attention.head_count_kv[{index}]", f"a divisor of {asked} query heads", given=str(kept))
        blocks.append({"attention": {"n_heads_in_group": asked // kept} if kept else {"no_op": True}})
    m.named("num_attention_heads", "attention.head_count")
    return {"num_attention_heads": most, "block_configs": blocks, "head_dim": one_width(m)}


def gemma3n(m: Metadata) -> dict[str, Any]:
    """Gemma 3n: windows, and layers behind the first twenty that read what these have stored."""
    key = m.named("num_kv_shared_layers", "attention.shared_kv_layers")
    shared = m.count(key, default=max(m.layers - 20, 0), least=0, most=m.layers)
    if m.get(key) is None:
        said = f"{m.full(key)} is left out; llama.cpp's rule for gemma3n: 20 layers store"
        m.assume("num_kv_shared_layers", shared, said)
    return heads(m) | {"num_kv_shared_layers": shared} | Windows(period=5, required=True)(m)


def gemma4(m: Metadata) -> dict[str, Any]:
    """Gemma 4: full layers have wider heads, and a number of their own of them."""
    found = Windows(period=None, required=True)(m)
    wide, near = _one_of_two(m, ""), _one_of_two(m, "_swa")
    stored = m.each(m.named("num_key_value_heads", "attention.head_count_kv"), least=1)
    kinds = found["layer_types"]
    counts = {kind: _same(m, stored, kinds, kind) for kind in set(kinds)}
    full = counts.get(FULL, counts.get(SLIDING, 0))
    sliding = counts.get(SLIDING, full)
    values = all(f"blk.{i}.attn_v.weight" in m.tensors for i, kind in enumerate(kinds) if kind == FULL)
    return found | {
        "num_attention_heads": m.count(m.named("num_attention_heads", "attention.head_count")),
        "num_key_value_heads": sliding,
        "num_global_key_value_heads": full,
        "attention_k_eq_v": full != sliding or not values,
        "head_dim": near,
        "global_head_dim": wide,
        "num_kv_shared_layers": m.count(
            m.named("num_kv_shared_layers", "attention.shared_kv_layers"), default=0, least=0, most=m.layers
        ),
    }


def _one_of_two(m: Metadata, suffix: str) -> int:
    key, value = widths(m, suffix=suffix)
    if key != value:
        raise m.unread(f"attention.value_length{suffix}", f"is {value}, the key length {key}; they must be equal")
    return key


def _same(m: Metadata, counts: Sequence[int], kinds: Sequence[str], kind: str) -> int:
    found = {count for count, of in zip(counts, kinds, strict=True) if of == kind}
    if len(found) != 1:
        raise m.unread("attention.head_count_kv", f"differs among layers of {kind}; one number for each kind is read")
    return found.pop()


def mimo2(m: Metadata) -> dict[str, Any]:
    """MiMo-V2: keys wider than values, and windows with KV heads of their own."""
    found = Windows(period=None, required=True)(m)
    kinds = found.pop("layer_types")
    stored = m.each(m.named("num_key_value_heads", "attention.head_count_kv"), least=1)
    key, value = widths(m)
    config = found | {
        "num_attention_heads": m.count(m.named("num_attention_heads", "attention.head_count")),
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in kinds],
        "head_dim": key,
        "v_head_dim": value,
        "swa_head_dim": key,
        "swa_v_head_dim": value,
    }
    sides = {"num_key_value_heads": FULL, "swa_num_key_value_heads": SLIDING}
    counts = {name: _same(m, stored, kinds, kind) for name, kind in sides.items() if kind in kinds}
    return config | {name: counts.get(name, next(iter(counts.values()))) for name in sides}


def step35(m: Metadata) -> dict[str, Any]:
    """Step 3.5: windows with heads of their own; kinds of the blocks that draft follow those of the layers."""
    found = Windows(period=None, required=True).over(m, m.blocks)
    kinds = found["layer_types"][: m.layers]
    stored = m.each(m.named("num_attention_groups", "attention.head_count_kv"), least=1)
    queries = m.each(m.named("num_attention_heads", "attention.head_count"), least=1)
    width = one_width(m)
    if FULL in kinds:
        found |= {"num_attention_heads": _same(m, queries, kinds, FULL)}
        found |= {"num_attention_groups": _same(m, stored, kinds, FULL)}
    if SLIDING in kinds:
        other = {"num_attention_heads": _same(m, queries, kinds, SLIDING), "head_dim": width}
        found["attention_other_setting"] = other | {"num_attention_groups": _same(m, stored, kinds, SLIDING)}
    return found | {"head_dim": width}


def minimax_m3(m: Metadata) -> dict[str, Any]:
    """MiniMax-M3: an indexer on the layers behind the leading dense ones."""
    dense = m.count("leading_dense_block_count", default=0, least=0)
    for key in ("top_k", "block_size", "local_blocks"):
        m.get(f"attention.indexer.{key}")
    sparse = "minimax_m3_sparse"
    return heads(m) | {
        "layer_types": [FULL if index < dense else sparse for index in range(m.layers)],
        "index_head_dim": m.count(m.named("index_head_dim", "attention.indexer.key_length")),
        "index_n_heads": m.count("attention.indexer.head_count"),
    }


def t5(m: Metadata) -> dict[str, Any]:
    """T5: what its decoder keeps; ``block_count`` is the encoder's, and the decoder's where that is left out."""
    layers = m.count(m.named("num_decoder_layers", "decoder_block_count"), default=m.layers)
    queries = m.count(m.named("num_heads", "attention.head_count"))
    return {
        "num_layers": m.layers,
        "num_decoder_layers": layers,
        "num_hidden_layers": layers,
        "num_heads": queries,
        "d_kv": one_width(m),
    }
