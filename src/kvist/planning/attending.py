"""What attention costs a token, as a function of its position.

Whatever the kind of layer, a token that sees ``n`` tokens costs

    operations(n) = fixed + sum over lines of operations x min(n, until)
    bytes(n)      = fixed + sum over lines of bytes x min(n, until)

where ``until`` is a window, a chunk, or as many as sparse attention picks; None where all are seen. So a whole network
is a handful of numbers, and the sum over the tokens of a chunk has a closed form: :func:`seen_by_chunk`.

What shares bytes (entries of compressed tokens, pooled keys of an indexer) is spread evenly over its tokens, and is
off by less than one such entry a sequence. A chunk of Llama 4's attention is counted as a window of its size, twice
what its tokens see on average.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvist.planning.sharding import LayerRange, query_heads, rank_spec
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Compressed, Cross, Latent, Layer, Parallel, Shared, State
from kvist.spec.model import ModelSpec
from kvist.spec.rates import Rate

# A multiply-add is two operations; a state is decayed, updated by an outer product and read.
_STATE_OPERATIONS = 6


@dataclass(frozen=True, kw_only=True)
class Line:
    """What each token that is seen costs, up to a number of them.

    Attributes:
        until: tokens that are seen at most; None for all.
        operations: for each token that is seen.
        bytes: that a decode reads for each token that is seen.
        chunk_bytes: the same of a chunk of a prompt, once for all its tokens.
    """

    until: int | None
    operations: float
    bytes: float
    chunk_bytes: float


@dataclass(frozen=True, kw_only=True)
class Attending:
    """Attention of some layers, in a rank.

    Attributes:
        lines: what grows with the tokens that are seen; one for each ``until``, that for all of them first.
        operations: of each token, whatever its position.
        bytes: that each sequence reads and writes in a step, whatever its length: states, and what an encoder left.
        appended: bytes that a token adds.
    """

    lines: tuple[Line, ...]
    operations: float
    bytes: float
    appended: float

    def operations_at(self, seen: int) -> float:
        """Operations of a token that sees ``seen`` tokens."""
        return self.operations + sum(line.operations * _clip(seen, line.until) for line in self.lines)

    def operations_of(self, start: int, count: int) -> float:
        """Operations of the tokens at the positions ``start … start + count - 1``, each of which sees itself too."""
        return count * self.operations + sum(
            line.operations * seen_by_chunk(start, count, line.until) for line in self.lines
        )

    def held(self, length: int) -> float:
        """Bytes that a decode reads of a sequence of ``length``."""
        return sum(line.bytes * _clip(length, line.until) for line in self.lines)

    def chunk_held(self, length: int) -> float:
        """Bytes that a chunk reads of a sequence of ``length``: of sparse attention all, each token picking its own."""
        return sum(line.chunk_bytes * _clip(length, line.until) for line in self.lines)


def seen_by_chunk(start: int, count: int, until: int | None) -> int:
    """Tokens that the ``count`` tokens from position ``start`` on see together: ``sum of min(start + i, until)``."""
    if until is None:
        return count * start + count * (count + 1) // 2
    # Up to the window each token sees one more, then always as many.
    growing = min(max(until - start, 0), count)
    return growing * start + growing * (growing + 1) // 2 + (count - growing) * until


def attending_of(spec: ModelSpec, fmt: CacheFormat, layers: Iterable[Layer], *, tp: int, first: int = 0) -> Attending:
    """Add up the layers of a rank.

    Args:
        spec: the whole model.
        fmt: how its keys and values are stored.
        layers: of the rank, heads dealt out.
        tp: ranks that share each layer.
        first: index in the model of the first of them.
    """
    heads = query_heads(spec.config)
    counted = _Counted(config=spec.config, heads=0.0 if heads is None else heads / tp, lines={})
    held = tuple(layers)
    everywhere: tuple[Layer, ...] = ()
    if any(isinstance(layer, Shared) for layer in held):
        everywhere = rank_spec(spec, LayerRange(first=0, end=len(spec.layers)), tp).layers
    count = len(spec.layers)
    for index, layer in enumerate(held, first):
        if isinstance(layer, Shared):
            counted.add(everywhere[layer.source], fmt.of_layer(layer.source, count), stores=False)
        else:
            counted.add(layer, fmt.of_layer(index, count))
    lines = counted.lines
    return Attending(
        lines=tuple(
            Line(until=until, operations=lines[until][0], bytes=lines[until][1], chunk_bytes=lines[until][2])
            for until in sorted(lines, key=lambda until: (until is not None, until or 0))
        ),
        operations=counted.operations,
        bytes=counted.bytes,
        appended=counted.appended,
    )


@dataclass(kw_only=True)
class _Counted:
    """The sums so far; ``lines`` are operations, bytes of a decode and bytes of a chunk by ``until``."""

    config: Mapping[str, Any]
    heads: float
    lines: dict[int | None, list[float]]
    operations: float = 0.0
    bytes: float = 0.0
    appended: float = 0.0

    def add(self, layer: Layer, fmt: CacheFormat, *, stores: bool = True) -> None:
        """Count a layer in its own format; one that does not store only reads what another has."""
        heads = self.heads
        match layer:
            case Attention():
                until = layer.window or layer.chunk
                self._line(until, 2.0 * heads * (layer.key_dim + layer.value_dim), layer.append_bytes(fmt))
                if layer.indexer is not None:
                    self._line(None, 2.0 * layer.indexer.heads * layer.indexer.dim, 0)
            case Latent():
                per_token = 2.0 * heads * (2 * layer.rank + layer.rope_dim)
                until = layer.window
                if layer.indexer is not None:
                    picked = _number(self.config, "index_topk", None)
                    until = min((limit for limit in (until, picked) if limit is not None), default=None)
                    # The heads of the indexer are on every rank.
                    indexers = _number(self.config, "index_n_heads", 1) or 1
                    dim = _number(self.config, "index_head_dim", 128) or 128
                    self._line(None, 2.0 * indexers * dim, layer.indexer_bytes(fmt))
                self._line(until, per_token, layer.token_bytes(fmt), chunk=0)
                self._line(layer.window, 0.0, 0, chunk=layer.token_bytes(fmt))
            case Compressed():
                per_token = 2.0 * heads * (2 * layer.rank + layer.rope_dim)
                self._line(None, per_token / layer.ratio, layer.retained_bytes(fmt))
                if layer.window:
                    self._line(layer.window, per_token, layer.vector_bytes(fmt))
            case State():
                self.operations += _STATE_OPERATIONS * layer.state_elements + 2.0 * layer.conv_elements
                self.bytes += 2.0 * layer.state_bytes(fmt)
            case Cross():
                tokens = layer.encoder_tokens or 0
                self.operations += 2.0 * heads * tokens * (layer.key_dim + layer.value_dim)
                self.bytes += float(tokens * layer.cross_bytes_per_encoder_token(fmt))
            case Parallel():
                for part in layer.parts:
                    self.add(part, fmt, stores=stores)
                return
            case _:
                return
        if stores:
            self.appended += float(layer.append_bytes(fmt))

    def _line(self, until: int | None, operations: float, size: Rate, chunk: "Rate | None" = None) -> None:
        line = self.lines.setdefault(until, [0.0, 0.0, 0.0])
        line[0] += operations
        line[1] += float(size)
        line[2] += float(size if chunk is None else chunk)


def _clip(tokens: int, until: int | None) -> int:
    return tokens if until is None else min(tokens, until)


def _number(config: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default
