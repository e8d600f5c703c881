"""The account of transformers' caches: tensors of one length for a whole batch, no blocks and no pool.

Source: ``src/transformers/cache_utils.py`` of 5.24. Sizes of the quantised caches are those of ``optimum-quanto`` 0.2
and ``hqq`` 0.2 with groups along the first axis.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvist.errors import DoesNotFit, InputError, UnsupportedModel
from kvist.planning.engines.account import EngineAccount, EngineBudget, EngineFigure, EngineGroup
from kvist.planning.engines.settings import Setting, one_of, read_settings, whole
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Latent, Layer, State
from kvist.spec.model import ModelSpec
from kvist.units import counted, format_size

VERSION = "5.24"

SETTINGS = {
    "cache": Setting(
        read=one_of("dynamic", "dynamic-without-config", "static", "quantized"), help="which cache (dynamic)"
    ),
    "batch_size": Setting(read=whole(1, 2**20), help="sequences of the batch; by default as many as the memory holds"),
    "max_cache_len": Setting(read=whole(1), help="of a static cache; by default the planned context"),
    "dtype": Setting(read=one_of("float32", "bfloat16", "float16"), help="of the network, and so of what is stored"),
    "backend": Setting(read=one_of("quanto", "hqq", "fp8"), help="of a quantized cache (quanto)"),
    "nbits": Setting(read=whole(1, 8), help="of a quantized cache: quanto 2 or 4, hqq 2, 4 or 8 (4)"),
    "q_group_size": Setting(read=whole(1, 2**20), help="elements that share a scale and a zero (64)"),
    "residual_length": Setting(read=whole(1), help="decoded tokens that are kept plain before all is quantised (128)"),
    "decoded_tokens": Setting(read=whole(0), help="of the context, those that were decoded one at a time (0)"),
}

_ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}
# Types in which its classes keep recurrent states: f32, or the network's own.
_RECURRENT = {
    "mamba": "float32",
    "mamba2": "float32",
    "gated-delta": "float32",
    "kda": "float32",
    "short-conv": "float32",
    "lightning": "own",
}
# Bits of one value that each backend is accounted for with.
_BITS = {"quanto": (2, 4), "hqq": (2, 4, 8)}


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Every setting that decides, with a value; names as in :data:`SETTINGS`."""

    cache: str
    dtype: str
    max_cache_len: int
    backend: str
    nbits: int
    q_group_size: int
    residual_length: int
    decoded_tokens: int


def sequence_bytes(spec: ModelSpec, settings: CacheSettings, tokens: int) -> int:
    """Bytes of keys, values and states of one sequence of ``tokens``; counters of static layers are left out.

    Raises:
        UnsupportedModel: a layer is not accounted for, or transformers refuses this cache for it.
        InputError: a setting does not fit the model.
    """
    return sum(_layer_bytes(spec, index, piece, settings, tokens) for index, piece in _pieces(spec))


def _pieces(spec: ModelSpec) -> Iterator[tuple[int, Layer]]:
    for index, layer in enumerate(spec.layers):
        for piece in layer.stored:
            yield index, piece


def _layer_bytes(spec: ModelSpec, index: int, piece: Layer, settings: CacheSettings, tokens: int) -> int:
    element = _ELEMENT[settings.dtype]
    match piece:
        case Attention() if piece.indexer is None:
            limit = piece.window if piece.window is not None else piece.chunk
            held = _held(settings, tokens, limit)
            if settings.cache != "quantized":
                return held * piece.kv_heads * (piece.key_dim + piece.value_dim) * element
            if limit is not None:
                raise _refused(spec, index, "a window, which QuantizedCache refuses")
            widths = (piece.kv_heads * piece.key_dim, piece.kv_heads * piece.value_dim)
            return sum(_quantized(settings, tokens, width, element) for width in widths)
        case Latent() if piece.indexer is None or piece.indexer.pool == 1:
            if settings.cache == "quantized":
                if piece.indexer is not None or piece.window is not None:
                    raise _refused(spec, index, "an indexer or a window, which QuantizedCache refuses")
                # The latent is stored as a key, the rotary part as a value.
                return sum(_quantized(settings, tokens, width, element) for width in (piece.rank, piece.rope_dim))
            indexed = 0 if piece.indexer is None else piece.indexer.heads * piece.indexer.dim
            return _held(settings, tokens, piece.window) * (piece.rank + piece.rope_dim + indexed) * element
        case State():
            return _state_bytes(spec, index, piece, settings, element)
        case _:
            raise _refused(spec, index, f"{piece.kind} memory, which the account of transformers does not cover")


def _refused(spec: ModelSpec, index: int, what: str) -> UnsupportedModel:
    return UnsupportedModel(f"engine: layer {index} of {spec.name} has {what}; plan it without --engine", key="engine")


def _held(settings: CacheSettings, tokens: int, limit: int | None) -> int:
    """Tokens of which keys and values are there.

    A dynamic layer with a window keeps what the next token will see beside itself, one less than the window; without a
    configuration the cache knows of no windows. A static layer is allocated whole.
    """
    if settings.cache == "static":
        return settings.max_cache_len if limit is None else min(limit, settings.max_cache_len)
    if limit is None or settings.cache == "dynamic-without-config":
        return tokens
    return min(tokens, limit - 1)


def _state_bytes(spec: ModelSpec, index: int, state: State, settings: CacheSettings, element: int) -> int:
    """All ``kernel`` columns of a convolution, where one less would do, in the network's type."""
    if settings.cache == "quantized":
        raise _refused(spec, index, "a state, which QuantizedCache refuses")
    if state.name not in _RECURRENT:
        raise _refused(spec, index, f"{state.name}, whose state transformers keeps apart from its caches")
    conv = state.conv_elements // state.conv_columns * (state.conv_columns + 1) if state.conv_elements else 0
    recurrent = 4 if _RECURRENT[state.name] == "float32" else element
    return conv * element + state.state_elements * recurrent


def _quantized(settings: CacheSettings, tokens: int, width: int, element: int) -> int:
    """Bytes of one side of a layer: the prompt quantised whole, decoded tokens plain until they are as many.

    Source: ``QuantizedLayer.update``; quanto packs groups into bytes and rounds their number up, hqq packs within them.
    """
    if settings.backend == "fp8":
        return tokens * width + 4
    plain = settings.decoded_tokens % settings.residual_length
    elements = (tokens - plain) * width
    groups = elements // settings.q_group_size
    if elements % settings.q_group_size:
        raise InputError(
            f"set: q_group_size={settings.q_group_size} does not divide {elements} elements, which {settings.backend} "
            f"refuses; take a divisor of {width}",
            key="set",
        )
    per_byte = 8 // settings.nbits
    packed = -(-groups // per_byte) * settings.q_group_size if settings.backend == "quanto" else elements // per_byte
    return packed + groups * 2 * element + plain * width * element


def resolve(fmt: CacheFormat, given: Mapping[str, Any], *, context: int) -> CacheSettings:
    """Fill in what transformers takes by itself.

    Raises:
        InputError: a setting is unknown or wrong, or no cache stores this format.
    """
    said = read_settings("transformers", SETTINGS, given)
    types = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    if "dtype" not in said and (fmt.key not in types or fmt.key != fmt.value):
        raise InputError(
            f"format: transformers stores keys and values as the network computes, not as {fmt}; plan with bf16, f16 "
            f"or f32, or --set cache=quantized",
            key="format",
        )
    backend = said.get("backend", "quanto")
    bits = said.get("nbits", 4)
    if bits not in _BITS.get(backend, (bits,)):
        raise InputError(
            f"set: nbits={bits}; {backend} is accounted for with {' or '.join(map(str, _BITS[backend]))}", key="set"
        )
    decoded = said.get("decoded_tokens", 0)
    if decoded > context:
        raise InputError(f"set: decoded_tokens={decoded}; the context has {context}", key="set")
    return CacheSettings(
        cache=said.get("cache", "dynamic"),
        dtype=said.get("dtype") or types[fmt.key],
        max_cache_len=said.get("max_cache_len", context),
        backend=backend,
        nbits=bits,
        q_group_size=said.get("q_group_size", 64),
        residual_length=said.get("residual_length", 128),
        decoded_tokens=decoded,
    )


def account(
    spec: ModelSpec, fmt: CacheFormat, *, budget: EngineBudget, context: int, settings: Mapping[str, Any]
) -> EngineAccount:
    """What a batch of sequences of ``context`` tokens takes.

    Args:
        spec: the model.
        fmt: the network's type.
        budget: memory; the batch is as large as it allows unless ``batch_size`` is set. Without either, one sequence.
        context: tokens of each sequence, all of them prompt unless ``decoded_tokens`` says otherwise.
        settings: by name (:data:`SETTINGS`).

    Raises:
        DoesNotFit: the batch is larger than the memory.
        InputError: a setting is wrong.
        UnsupportedModel: a layer is not accounted for, or transformers refuses this cache for it.
    """
    resolved = resolve(fmt, settings, context=context)
    one = sequence_bytes(spec, resolved, context)
    memory = budget.left
    asked = read_settings("transformers", SETTINGS, settings).get("batch_size")
    batch = asked or (1 if memory is None else max(1, memory // one if one else 1))
    if memory is not None and batch * one > memory:
        raise DoesNotFit(
            f"transformers: {counted(batch, 'sequence')} of {counted(context, 'token')}: "
            f"{format_size(batch * one)}; there are {format_size(max(0, memory))}"
        )
    return EngineAccount(
        name="transformers",
        version=VERSION,
        num_blocks=batch,
        cache_tokens=batch * context,
        max_concurrency=float(batch),
        cache_bytes=batch * one if memory is None else memory,
        allocated_bytes=batch * one,
        sequence_bytes=one,
        groups=tuple(_groups(spec, resolved, context)),
        settings=asdict(resolved) | {"batch_size": batch},
        figures=(
            EngineFigure(
                what="one sequence",
                value=one,
                formula=f"tensors of all layers at {counted(context, 'token')}",
                source="transformers/cache_utils.py",
            ),
            EngineFigure(
                what="batch", value=batch, formula=f"{memory:,} // {one:,}" if memory else "as set", source="memory"
            ),
        ),
        notes=_notes(spec, resolved),
        command="model.generate(**inputs)",
        flags=tuple(_flags(resolved)),
        details={"batch_size": batch, "counter_bytes": _counters(spec, resolved)},
    )


def _groups(spec: ModelSpec, settings: CacheSettings, tokens: int) -> Iterator[EngineGroup]:
    kinds: dict[str, list[int]] = {}
    for index, piece in _pieces(spec):
        limit = getattr(piece, "window", None) or getattr(piece, "chunk", None)
        name = piece.kind if limit is None else f"window-{limit}"
        kinds.setdefault(name, []).append(_layer_bytes(spec, index, piece, settings, tokens))
    for name, sizes in kinds.items():
        yield EngineGroup(name=name, layers=len(sizes), block_bytes=sum(sizes), sequence_blocks=1)


def _counters(spec: ModelSpec, settings: CacheSettings) -> int:
    """A static attention layer counts its tokens in a tensor of one int64."""
    if settings.cache != "static":
        return 0
    return 8 * sum(1 for _, piece in _pieces(spec) if isinstance(piece, (Attention, Latent)))


def _notes(spec: ModelSpec, settings: CacheSettings) -> tuple[str, ...]:
    windows = any(getattr(piece, "window", None) or getattr(piece, "chunk", None) for _, piece in _pieces(spec))
    if settings.cache == "dynamic-without-config" and windows:
        return ("DynamicCache() without the model's configuration keeps every token of every window",)
    return ()


def _flags(settings: CacheSettings) -> Iterator[str]:
    match settings.cache:
        case "static":
            yield f"cache_implementation=static max_cache_len={settings.max_cache_len}"
        case "quantized":
            yield f"cache_implementation=quantized backend={settings.backend}"
            if settings.backend != "fp8":
                yield f"nbits={settings.nbits} q_group_size={settings.q_group_size}"
                yield f"residual_length={settings.residual_length}"
        case "dynamic":
            yield "past_key_values=DynamicCache(config=model.config)"
        case _:
            yield "past_key_values=DynamicCache()"


__all__ = ["SETTINGS", "account", "resolve", "sequence_bytes"]
