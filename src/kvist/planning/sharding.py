"""What one of several devices remembers: heads are dealt out over ranks, layers over the stages of a pipeline.

Tensor parallelism gives each rank a share of the KV heads; where there are fewer heads than ranks, several ranks hold
the same one. A latent serves all heads and is on every rank, its indexer too. States are dealt out by heads. A
pipeline stage remembers its own layers alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvist.errors import InputError
from kvist.spec.layers import Attention, Cross, Layer, Parallel, State
from kvist.spec.model import ModelSpec
from kvist.units import counted

_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
_STATE_SIZE = ("mamba_d_state", "ssm_state_size", "state_size")


@dataclass(frozen=True, kw_only=True)
class LayerRange:
    """The layers ``first`` to ``end``, without the latter."""

    first: int
    end: int

    @property
    def count(self) -> int:
        """How many they are."""
        return self.end - self.first


def split_layers(layers: int, stages: int) -> tuple[LayerRange, ...]:
    """Deal layers out to the stages of a pipeline, as vLLM does.

    What does not divide goes to the stages before the last, which has the head. Source: ``get_pp_indices`` in
    vllm/distributed/utils.py.

    Raises:
        InputError: there are fewer layers than stages.
    """
    if stages > layers:
        raise InputError(f"pp: {stages} stages for {counted(layers, 'layer')}; at most one stage a layer", key="pp")
    sizes = [layers // stages] * stages
    for behind in range(2, layers % stages + 2):
        sizes[-behind] += 1
    ranges, first = [], 0
    for size in sizes:
        ranges.append(LayerRange(first=first, end=first + size))
        first += size
    return tuple(ranges)


def rank_spec(spec: ModelSpec, part: LayerRange, tp: int) -> ModelSpec:
    """What a rank of one stage remembers.

    Raises:
        InputError: heads cannot be dealt out to so many ranks; names them and what divides.
    """
    if tp == 1 and part.count == len(spec.layers):
        return spec
    heads = query_heads(spec.config)
    if heads is not None and heads % tp:
        raise _indivisible(spec, tp, heads, "query head")
    layers = tuple(_share(layer, tp, spec) for layer in spec.layers[part.first : part.end])
    return replace(spec, layers=layers, draft_layers=())


def query_heads(config: Mapping[str, Any]) -> int | None:
    """Query heads of a layer, where the configuration says so."""
    return _first(config, _QUERY_HEADS)


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _share(layer: Layer, tp: int, spec: ModelSpec) -> Layer:
    match layer:
        case Attention() | Cross():
            return replace(layer, kv_heads=_heads(layer.kv_heads, tp, spec))
        case State():
            return _state(layer, tp, spec)
        case Parallel():
            return replace(layer, parts=tuple(_share(part, tp, spec) for part in layer.parts))
        case _:
            return layer


def _heads(heads: int, tp: int, spec: ModelSpec) -> int:
    """A rank's KV heads: an even share, or one that several ranks hold."""
    if heads % tp and tp % heads:
        raise _indivisible(spec, tp, heads, "KV head")
    return max(1, heads // tp)


def _state(layer: State, tp: int, spec: ModelSpec) -> State:
    """A rank's share; the groups of Mamba-2 that do not divide are repeated until they do, as in vLLM."""
    conv = layer.conv_elements
    if layer.name == "mamba2":
        groups, size = _first(spec.config, _GROUPS), _first(spec.config, _STATE_SIZE)
        if groups is not None and size is not None:
            conv += 2 * (-groups % tp) * size * layer.conv_columns
    if conv % tp or layer.state_elements % tp:
        raise InputError(
            f"tp: {tp} ranks cannot share the {layer.name} states of {spec.name} "
            f"({conv:,} and {layer.state_elements:,} elements) evenly; choose a divisor",
            key="tp",
        )
    return replace(layer, conv_elements=conv // tp, state_elements=layer.state_elements // tp)


def _indivisible(spec: ModelSpec, tp: int, heads: int, what: str) -> InputError:
    divisors = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
    return InputError(
        f"tp: {tp} ranks cannot share the {counted(heads, what)} of {spec.name}; {divisors} can", key="tp"
    )
