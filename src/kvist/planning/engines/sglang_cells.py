"""What one token and one state take of SGLang's pools on one rank.

Source: ``sglang/srt/model_executor/pool_configurator.py`` (cells), ``mem_cache/memory_pool.py`` (keys and values),
``configs/model_config.py`` (``is_hybrid_swa_model``) and ``configs/mamba_utils.py`` (states) of 0.5.23.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from kvist.errors import InputError, UnsupportedModel
from kvist.planning.engines.state_shards import shard_state
from kvist.spec.layers import Attention, Latent, Layer, State
from kvist.spec.model import ModelSpec

_ELEMENT = {"bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "mxfp8": 1, "float32": 4}
# Families whose windows have a pool of their own; those of all others are kept whole.
_WINDOWED = {
    "gemma4", "gemma4_text", "gpt_oss", "laguna", "llama4", "llama4_text", "mimo_v2", "mimo_v2_flash", "step3p5",
}  # fmt: skip
_STATES = ("mamba", "mamba2", "gated-delta", "kda", "short-conv", "lightning")


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Bytes of one token in the pool of full attention and in that of windows, and of one state in all layers.

    Attributes:
        full_key: of the keys of layers that keep everything.
        full_value: of their values.
        full_more: of what lies beside them: indexer keys, scales.
        window_key: of the keys of layers with a window of their own pool.
        window_value: of their values.
        full_layers: of the first kind.
        window_layers: of the second.
        state_layers: recurrent ones.
        window: its tokens; None where there is no such pool.
        state: of one state.
        total: of one token of ``max_total_num_tokens``: both pools, the windows' at its ratio.
        latent: keys are latents.
    """

    full_key: int
    full_value: int
    full_more: int
    window_key: int
    window_value: int
    full_layers: int
    window_layers: int
    state_layers: int
    window: int | None
    state: int
    total: float
    latent: bool

    @property
    def full(self) -> int:
        """Of one token in the pool of full attention."""
        return self.full_key + self.full_value + self.full_more

    @property
    def window_bytes(self) -> int:
        """Of one token in the windows' pool."""
        return self.window_key + self.window_value


def stages(layers: int, count: int) -> list[range]:
    """The layers of each rank of a pipeline; what is left over goes to the last ranks (``get_pp_indices``)."""
    bounds = [index * (layers // count) + max(0, index - count + layers % count) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def cells_of(spec: ModelSpec, *, layers: range, dtype: str, ranks: int, ssm_dtype: str | None, ratio: float) -> Cells:
    """Add up some layers of a model.

    Args:
        spec: the model.
        layers: those of one rank of a pipeline.
        dtype: of keys and values.
        ranks: that share heads.
        ssm_dtype: of recurrent states; by default the configuration's, else f32.
        ratio: tokens of the windows' pool for one of the other.

    Raises:
        UnsupportedModel: a layer is not accounted for.
        InputError: the ranks do not divide the model.
    """
    pieces = [piece for index in layers for piece in spec.layers[index].stored]
    apart = _family(spec) in _WINDOWED
    full: list[Layer] = []
    windows: list[Attention] = []
    states: list[State] = []
    for piece in pieces:
        match piece:
            case State() if piece.name in _STATES:
                states.append(piece)
            case Attention() if piece.indexer is None:
                limited = piece.window is not None or piece.chunk is not None
                (windows if apart and limited else full).append(piece)
            case Latent() if piece.indexer is None or (piece.indexer.heads, piece.indexer.pool) == (1, 1):
                full.append(piece)
            case _:
                raise UnsupportedModel(
                    f"engine: {spec.name} has layers of the kind {piece.kind}, which the account of SGLang does not "
                    f"cover; plan it without --engine",
                    key="engine",
                )
    limits = {piece.window if piece.window is not None else piece.chunk for piece in windows}
    full_cells = [_cell(spec, piece, dtype, ranks) for piece in full]
    window_cells = [_cell(spec, piece, dtype, ranks) for piece in windows]
    if len(set(full_cells)) > 1 or len(set(window_cells)) > 1 or len(limits) > 1:
        raise UnsupportedModel(
            f"engine: the layers of {spec.name} differ in their heads; SGLang takes one size for all of a pool",
            key="engine",
        )
    full_bytes = sum(sum(cell) for cell in full_cells)
    window_bytes = sum(sum(cell) for cell in window_cells)
    return Cells(
        full_key=sum(key for key, _, _ in full_cells),
        full_value=sum(value for _, value, _ in full_cells),
        full_more=sum(more for _, _, more in full_cells),
        window_key=sum(key for key, _, _ in window_cells),
        window_value=sum(value for _, value, _ in window_cells),
        full_layers=len(full),
        window_layers=len(windows),
        state_layers=len(states),
        window=next(iter(limits), None),
        state=sum(_state_bytes(spec, state, ranks, ssm_dtype) for state in states),
        total=full_bytes + (ratio if full else 1) * window_bytes,
        latent=any(isinstance(piece, Latent) for piece in full),
    )


def _family(spec: ModelSpec) -> str:
    nested = spec.config.get("text_config")
    return str((nested if isinstance(nested, Mapping) else spec.config).get("model_type"))


def _cell(spec: ModelSpec, piece: Layer, dtype: str, ranks: int) -> tuple[int, int, int]:
    """Bytes of one token's key, of its value, and of what lies beside them, on one rank."""
    element = _ELEMENT[dtype]
    if isinstance(piece, Latent):
        width = piece.rank + piece.rope_dim
        if piece.indexer is None:
            return width * element, 0, 0
        if dtype.startswith("fp8"):
            # fp8 with one f32 scale for 128 elements, the rotary part in bf16 (``calculate_mla_kv_cache_dim``).
            width = piece.rank + piece.rank // 128 * 4 + piece.rope_dim * 2
        return width * element, 0, piece.indexer.dim + piece.indexer.dim // 128 * 4
    assert isinstance(piece, Attention)
    if max(piece.kv_heads, ranks) % min(piece.kv_heads, ranks):
        raise InputError(f"set: tp_size={ranks} and {piece.kv_heads} KV heads do not divide each other", key="set")
    heads = max(1, piece.kv_heads // ranks)
    more = heads * (piece.key_dim + piece.value_dim) // 32 if dtype == "mxfp8" else 0
    return heads * piece.key_dim * element, heads * piece.value_dim * element, more


def _state_bytes(spec: ModelSpec, state: State, ranks: int, ssm_dtype: str | None) -> int:
    """Columns in bf16, the state in f32 unless the configuration says otherwise (``mamba2_state_dtype``)."""
    conv, recurrent = shard_state(spec, state, ranks, setting="tp_size")
    nested = spec.config.get("text_config")
    config = nested if isinstance(nested, Mapping) else spec.config
    dtype = ssm_dtype or str(config.get("mamba_ssm_dtype") or "float32")
    return conv * 2 + recurrent * _ELEMENT.get(dtype, 4)
