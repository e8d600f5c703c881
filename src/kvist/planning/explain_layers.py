"""The products from which the bytes of layers come, written out so that they can be worked out again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvist.planning.plan import LayerRow
from kvist.spec.formats import CacheFormat, Codec
from kvist.spec.layers import Attention, Compressed, Cross, Indexer, Latent, Layer, Parallel, State
from kvist.spec.model import ModelSpec

# Under these names configurations say what a cache is made of; a source lists those that a model has.
_KEYS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers",
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query", "num_attention_heads", "n_head", "n_heads",
    "head_dim", "hidden_size", "n_embd", "d_model", "v_head_dim",
    "kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "compress_ratios",
    "layer_types", "layers_block_type", "hybrid_override_pattern",
    "sliding_window", "attention_chunk_size", "num_kv_shared_layers",
)  # fmt: skip
# What is not asked where the more exact key is there.
_IMPLIED = {"num_attention_heads": "num_key_value_heads", "hidden_size": "head_dim"}
_MOST_KEYS = 6
# What the keys and values are made for that latents stand for; the rotary width is the layer's.
_HEADS = ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")


@dataclass(frozen=True, kw_only=True)
class Term:
    """One product of a sum: so many layers, each with so many bytes a token, an entry or a sequence.

    Attributes:
        unit: ``15 layers x 1 head x (512 + 512 B)``.
        per: tokens that share one unit.
        limit: tokens of a window or chunk.
        fixed: the product where it does not depend on the tokens; empty otherwise.
        indexer: whether it is of indexer keys.
        encoder_tokens: where it is of an encoder whose length is fixed.
        run: where it is of runs of so many tokens that are sealed, or of the tail that is not.
        tail: whether it is of the latter.
    """

    unit: str
    per: int = 1
    limit: int | None = None
    fixed: str = ""
    indexer: bool = False
    encoder_tokens: int = 0
    run: int = 0
    tail: bool = False

    @property
    def append(self) -> str:
        """Bytes of one more token; empty where a token adds none."""
        if self.fixed or self.tail:
            return ""
        return self.unit if self.per == 1 else f"{self.unit} / {self.per}"

    def held(self, tokens: int) -> str:
        """Units of a sequence."""
        if self.run:
            rest = f"{tokens:,} % {self.run:,}"
            return rest if self.tail else f"({tokens:,} - {rest})"
        held = f"{tokens:,}" if self.limit is None else f"min({tokens:,}, {self.limit:,})"
        return held if self.per == 1 else f"{held} // {self.per}"


@dataclass(frozen=True, kw_only=True)
class Vector:
    """One vector that a layer stores."""

    what: str
    size: int
    formula: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Expanded:
    """What a token of latents would take as keys and values of every head.

    Attributes:
        size: bytes of a token.
        latent_size: bytes of its latents, without an indexer's keys.
        formula: of ``size``.
        source: keys of the configuration.
    """

    size: int
    latent_size: int
    formula: str
    source: str


def terms_of(rows: Sequence[LayerRow], *, cross: bool = False) -> list[Term]:
    """The products whose sum is a model's bytes; with ``cross`` those of its encoder instead."""
    return [
        term
        for row in rows
        for layer in _leaves(row.layer)
        if isinstance(layer, Cross) == cross
        for term in _terms(layer, row.count, row.format)
    ]


def expanded_of(spec: ModelSpec, rows: Sequence[LayerRow]) -> Expanded | None:
    """What latents stand for; None where there are none, or where the configuration leaves the heads' widths out."""
    latents = [(leaf, row) for row in rows for leaf in _leaves(row.layer) if isinstance(leaf, Latent) and leaf.rank]
    found = [value for key in _HEADS if type(value := spec.config.get(key)) is int and value > 0]
    # Latents in a window have heads of their own, under keys of their own.
    if not latents or len(found) != len(_HEADS) or any(latent.window is not None for latent, _ in latents):
        return None
    heads, nope, value = found
    terms, size, latent_size = [], 0, 0
    for latent, row in latents:
        fmt, count = row.format, row.count
        key_bytes = fmt.key_bytes(nope + latent.rope_dim)
        value_bytes = fmt.value_bytes(value)
        terms.append(f"{counted(count, 'layer')} x {counted(heads, 'head')} x ({key_bytes} + {value_bytes} B)")
        size += count * heads * (key_bytes + value_bytes)
        latent_size += count * latent.token_bytes(fmt)
    return Expanded(size=size, latent_size=latent_size, formula=" + ".join(terms), source=", ".join(_HEADS))


def _leaves(layer: Layer) -> Iterator[Layer]:
    if isinstance(layer, Parallel):
        for part in layer.parts:
            yield from _leaves(part)
    else:
        yield layer


def _terms(layer: Layer, count: int, fmt: CacheFormat) -> Iterator[Term]:
    layers = counted(count, "layer")
    match layer:
        case Attention() | Cross():
            key, value = fmt.key_bytes(layer.key_dim), fmt.value_bytes(layer.value_dim)
            unit = f"{layers} x {counted(layer.kv_heads, 'head')} x ({key} + {value} B)"
            if isinstance(layer, Cross):
                yield Term(unit=unit, encoder_tokens=layer.encoder_tokens or 0)
                return
            if fmt.tail and layer.endless:
                kept = fmt.of_tail
                exact = f"({kept.key_bytes(layer.key_dim)} + {kept.value_bytes(layer.value_dim)} B)"
                yield Term(unit=unit, run=fmt.tail)
                yield Term(unit=f"{layers} x {counted(layer.kv_heads, 'head')} x {exact}", run=fmt.tail, tail=True)
                return
            limit = layer.window if layer.chunk is None else layer.chunk
            yield Term(unit=unit, limit=limit)
            yield from _indexer(layer.indexer, layers, fmt, limit=limit)
        case Latent():
            yield Term(unit=f"{layers} x {layer.token_bytes(fmt):,} B", limit=layer.window)
            yield from _indexer(layer.indexer, layers, fmt, limit=layer.window)
        case Compressed():
            unit = f"{layers} x {layer.vector_bytes(fmt):,} B"
            if layer.window is not None:
                yield Term(unit=unit, limit=layer.window)
            yield Term(unit=unit, per=layer.ratio)
            yield from _indexer(layer.indexer, layers, fmt, per=layer.ratio)
        case State():
            fixed = f"{layers} x ({layer.conv_bytes():,} + {layer.recurrent_bytes():,} B)"
            yield Term(unit=fixed, fixed=fixed)
        case _:
            return


def counted(count: int, what: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _indexer(
    indexer: Indexer | None, layers: str, fmt: CacheFormat, *, limit: int | None = None, per: int = 1
) -> Iterator[Term]:
    if indexer is not None:
        unit = f"{layers} x {counted(indexer.heads, 'head')} x {fmt.key_bytes(indexer.dim)} B"
        yield Term(unit=unit, per=per * indexer.pool, limit=limit, indexer=True)


def explain_vectors(layer: Layer, fmt: CacheFormat) -> Iterator[Vector]:
    """Every kind of vector that a layer stores."""
    for leaf in _leaves(layer):
        match leaf:
            case Attention() | Cross():
                yield _vector("key", leaf.key_dim, fmt.key_codec)
                yield _vector("value", leaf.value_dim, fmt.value_codec)
                if fmt.tail and isinstance(leaf, Attention) and leaf.endless:
                    yield _vector("key", leaf.key_dim, fmt.of_tail.key_codec, note=", of the tail")
                    yield _vector("value", leaf.value_dim, fmt.of_tail.value_codec, note=", of the tail")
            case Latent() | Compressed():
                what = "latent" if isinstance(leaf, Latent) else "compressed"
                yield _latent(what, leaf, fmt)
            case State():
                yield _state(leaf)
            case _:
                pass
        if isinstance(leaf, Attention | Latent | Compressed) and leaf.indexer is not None:
            yield _vector("indexer key", leaf.indexer.dim, fmt.key_codec)


def _vector(what: str, width: int, codec: Codec, *, note: str = "") -> Vector:
    data = f"{width} x {codec.bits} bit"
    scale = "scale and minimum" if codec.affine else "scale"
    return Vector(
        what=f"one {what}" if what.endswith("key") and " " in what else f"one {what} vector",
        size=codec.vector_bytes(width),
        formula=f"{data} + {width // codec.group} x {codec.scale_bytes} B {scale}" if codec.scale_bytes else data,
        source=f"codec {codec.name}{note}",
    )


def _latent(what: str, layer: Latent | Compressed, fmt: CacheFormat) -> Vector:
    note = ": keys and values in one"
    if fmt.key != "fp8" or not layer.rope_dim:
        return _vector(what, layer.rank + layer.rope_dim, fmt.key_codec, note=note)
    return Vector(
        what=f"one {what} vector",
        size=fmt.latent_bytes(layer.rank, layer.rope_dim),
        formula=f"{layer.rank} x 8 bit + {layer.rope_dim} x 16 bit",
        source=f"codec fp8, the rotary elements in bf16{note}",
    )


def _state(state: State) -> Vector:
    sizes = [
        f"{elements:,} {codec}"
        for elements, codec in ((state.conv_elements, state.conv_codec), (state.state_elements, state.state_codec))
        if elements
    ]
    return Vector(
        what=f"one {state.name} state",
        size=state.conv_bytes() + state.recurrent_bytes(),
        formula=" + ".join(sizes),
        source="last columns of the convolution, then the recurrent state" if len(sizes) == 2 else "what a layer keeps",
    )


def config_keys(spec: ModelSpec) -> str:
    """The keys of a model's configuration that its layers come from, and where they were read."""
    given = {key for key in _KEYS if spec.config.get(key) is not None}
    found = [key for key in _KEYS if key in given and _IMPLIED.get(key) not in given]
    named = ", ".join(found[:_MOST_KEYS]) + (", …" if len(found) > _MOST_KEYS else "")
    return f"{named}; {spec.source}" if found else spec.source
