"""What llama.cpp allocates for a context: caches of equal cells, in streams, and tensors of recurrent states.

Source: ``src/llama-context.cpp`` (contexts), ``llama-kv-cache.cpp``, ``llama-kv-cache-iswa.cpp``,
``llama-kv-cache-dsa.cpp`` and ``llama-memory-recurrent.cpp`` (tensors), ``llama-hparams.cpp`` (widths) and
``models/*.cpp`` (whose windows are kept apart) of the llama.cpp in llama-cpp-python 0.3.36.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvist.errors import InputError, UnsupportedModel
from kvist.spec.layers import Attention, Latent, Layer, State
from kvist.spec.model import ModelSpec

PAD = 256


@dataclass(frozen=True, kw_only=True)
class RowType:
    """How ggml stores a row: blocks of ``elements`` in ``size`` bytes."""

    elements: int
    size: int

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row (``ggml_row_size``)."""
        return elements // self.elements * self.size


# ``ggml_type_size`` and ``ggml_blck_size``.
ROW_TYPES = {
    "f32": RowType(elements=1, size=4),
    "f16": RowType(elements=1, size=2),
    "bf16": RowType(elements=1, size=2),
    "q8_0": RowType(elements=32, size=34),
    "q5_1": RowType(elements=32, size=24),
    "q5_0": RowType(elements=32, size=22),
    "q4_1": RowType(elements=32, size=20),
    "q4_0": RowType(elements=32, size=18),
    "iq4_nl": RowType(elements=32, size=18),
}
# Families whose windows llama.cpp keeps apart; the classes of the others, which it runs with full caches.
_WINDOWED = {
    "afmoe", "cohere2", "exaone4", "exaone_moe", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4",
    "gemma4_text", "gpt_oss", "llama4", "llama4_text", "mimo_v2", "mimo_v2_flash", "olmo3", "plamo3", "smallthinker",
    "step3p5",
}  # fmt: skip
_WINDOWS_IGNORED = {"mistral", "mixtral", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"}


@dataclass(frozen=True, kw_only=True)
class LlamaSettings:
    """Every setting that decides, with a value; names as llama.cpp's.

    ``n_ctx`` is None where the account is to choose it.
    """

    n_ctx: int | None
    n_seq_max: int
    kv_unified: bool
    n_ubatch: int
    n_batch: int
    swa_full: bool
    type_k: str
    type_v: str
    flash_attn: bool


@dataclass(frozen=True, kw_only=True)
class Cells:
    """One cache of llama.cpp: equal cells for some layers.

    Attributes:
        name: ``base``, ``swa``, ``indexer`` or ``recurrent``.
        layers: in it.
        cells: of one stream; of ``recurrent``, sequences.
        streams: of them.
        key_bytes: of one cell in all layers: keys, or what convolutions keep (R).
        value_bytes: likewise values, or recurrent states (S).
    """

    name: str
    layers: int
    cells: int
    streams: int
    key_bytes: int
    value_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of all cells, the ``size`` that llama.cpp prints."""
        return (self.key_bytes + self.value_bytes) * self.cells * self.streams


@dataclass(frozen=True, kw_only=True)
class LlamaContext:
    """What ``llama_context`` makes of the settings.

    Attributes:
        settings: all that decide.
        n_ctx: cells of all sequences, padded.
        n_ctx_seq: the longest sequence.
        caches: allocated for it.
    """

    settings: LlamaSettings
    n_ctx: int
    n_ctx_seq: int
    caches: tuple[Cells, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all caches."""
        return sum(cache.bytes for cache in self.caches)


def context_of(spec: ModelSpec, settings: LlamaSettings) -> LlamaContext:
    """Allocate for ``settings.n_ctx``.

    Without a unified cache each sequence has its own stream of ``n_ctx / n_seq_max`` cells, padded, and ``n_ctx``
    becomes what these make together, which may be more than was asked for.

    Raises:
        UnsupportedModel: a layer is not accounted for.
        InputError: llama.cpp refuses these settings for this model.
    """
    asked = spec.max_context if settings.n_ctx is None else settings.n_ctx
    n_ctx = padded(asked)
    n_ctx_seq = n_ctx
    if not settings.kv_unified:
        n_ctx_seq = padded(n_ctx // settings.n_seq_max)
        n_ctx = n_ctx_seq * settings.n_seq_max
    _check_types(spec, settings)
    # A step is no longer than a batch, and a batch than what was asked for.
    settings = replace(settings, n_ubatch=min(settings.n_ubatch, settings.n_batch, asked))
    return LlamaContext(
        settings=settings, n_ctx=n_ctx, n_ctx_seq=n_ctx_seq, caches=tuple(_caches(spec, settings, n_ctx_seq))
    )


def padded(tokens: int) -> int:
    """A length of cells: a multiple of 256, and at least one."""
    return max(PAD, -(-tokens // PAD) * PAD)


def _caches(spec: ModelSpec, settings: LlamaSettings, n_ctx_seq: int) -> Iterator[Cells]:
    pieces = [piece for layer in spec.layers for piece in layer.stored]
    strange = next((piece for piece in pieces if not isinstance(piece, (Attention, Latent, State))), None)
    if strange is not None:
        raise UnsupportedModel(
            f"engine: {spec.name} has layers of the kind {strange.kind}, which the account of llama.cpp does not "
            f"cover; plan it without --engine",
            key="engine",
        )
    kept = _keeps_windows(spec, pieces)
    attention = [piece for piece in pieces if isinstance(piece, (Attention, Latent))]
    windows = sorted({limit for piece in attention if (limit := _limit(piece)) is not None})
    streams = 1 if settings.kv_unified else settings.n_seq_max
    base = [piece for piece in attention if not (kept and _limit(piece) is not None)]
    if base or kept:
        yield _cells("base", base, n_ctx_seq, streams, settings, all_layers=attention)
    if kept:
        if len(windows) > 1:
            raise UnsupportedModel(
                f"engine: {spec.name} has windows of {' and '.join(map(str, windows))} tokens; llama.cpp knows one",
                key="engine",
            )
        sequences = settings.n_seq_max if settings.kv_unified else 1
        cells = padded(min(n_ctx_seq, windows[0] * sequences + settings.n_ubatch))
        cells = n_ctx_seq if settings.swa_full else cells
        swa = [piece for piece in attention if _limit(piece) is not None]
        yield _cells("swa", swa, cells, streams, settings, all_layers=attention)
    indexers = [piece.indexer for piece in attention if piece.indexer is not None]
    if indexers:
        if any(indexer.heads != 1 or indexer.pool != 1 for indexer in indexers):
            raise UnsupportedModel(
                f"engine: the indexers of {spec.name} are not accounted for; plan it without --engine", key="engine"
            )
        row = sum(ROW_TYPES[settings.type_k].row_bytes(indexer.dim) for indexer in indexers)
        yield Cells(
            name="indexer", layers=len(indexers), cells=n_ctx_seq, streams=streams, key_bytes=row, value_bytes=0
        )
    states = [piece for piece in pieces if isinstance(piece, State)]
    if states:
        yield Cells(
            name="recurrent",
            layers=len(states),
            cells=max(1, settings.n_seq_max),
            streams=1,
            key_bytes=4 * sum(state.conv_elements for state in states),
            value_bytes=4 * sum(state.state_elements for state in states),
        )


def _limit(piece: Attention | Latent) -> int | None:
    return piece.window if piece.window is not None else getattr(piece, "chunk", None)


def _keeps_windows(spec: ModelSpec, pieces: Sequence[Layer]) -> bool:
    """Whether llama.cpp keeps this model's windows apart, which depends on its class alone."""
    if all(_limit(piece) is None for piece in pieces if isinstance(piece, (Attention, Latent))):
        return False
    nested = spec.config.get("text_config")
    family = (nested if isinstance(nested, Mapping) else spec.config).get("model_type")
    if family in _WINDOWED:
        return True
    if family in _WINDOWS_IGNORED:
        return False
    raise UnsupportedModel(
        f"engine: whether llama.cpp keeps the windows of model_type {family!r} is not known; plan {spec.name} without "
        f"--engine",
        key="engine",
    )


def _cells(
    name: str,
    layers: Sequence[Attention | Latent],
    cells: int,
    streams: int,
    settings: LlamaSettings,
    *,
    all_layers: Sequence[Attention | Latent],
) -> Cells:
    key_type, value_type = ROW_TYPES[settings.type_k], ROW_TYPES[settings.type_v]
    # Without flash attention values lie transposed, and all layers have rows as wide as the widest.
    widest = max((_value_width(layer) for layer in all_layers), default=0)
    values = [_value_width(layer) for layer in layers]
    if not settings.flash_attn:
        values = [0 if isinstance(layer, Latent) else widest for layer in layers]
    return Cells(
        name=name,
        layers=len(layers),
        cells=cells,
        streams=streams,
        key_bytes=sum(key_type.row_bytes(_key_width(layer)) for layer in layers),
        value_bytes=sum(value_type.row_bytes(width) for width in values),
    )


def _key_width(layer: Attention | Latent) -> int:
    return layer.rank + layer.rope_dim if isinstance(layer, Latent) else layer.kv_heads * layer.key_dim


def _value_width(layer: Attention | Latent) -> int:
    """A latent is stored once, as a key."""
    return 0 if isinstance(layer, Latent) else layer.kv_heads * layer.value_dim


def _check_types(spec: ModelSpec, settings: LlamaSettings) -> None:
    """What ``llama_init_from_model`` refuses."""
    if ROW_TYPES[settings.type_v].elements > 1 and not settings.flash_attn:
        raise InputError(
            f"set: type_v={settings.type_v} is quantised, which llama.cpp refuses without flash_attn; set it true",
            key="set",
        )
    for layer in (piece for one in spec.layers for piece in one.stored if isinstance(piece, (Attention, Latent))):
        if isinstance(layer, Latent) and settings.type_k != settings.type_v:
            raise InputError(
                f"set: type_k={settings.type_k} and type_v={settings.type_v} differ, which llama.cpp refuses for MLA; "
                f"make them equal",
                key="set",
            )
        key = layer.rank + layer.rope_dim if isinstance(layer, Latent) else layer.key_dim
        value = layer.rank if isinstance(layer, Latent) else layer.value_dim
        for side, width in (("type_k", key), ("type_v", value)):
            name = getattr(settings, side)
            if width % ROW_TYPES[name].elements:
                raise InputError(
                    f"set: {side}={name} stores {ROW_TYPES[name].elements} elements at once, which do not divide a "
                    f"head of {width}; llama.cpp refuses this, take f16",
                    key="set",
                )
