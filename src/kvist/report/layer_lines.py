"""Layers in words, a line for equal ones."""

from collections import defaultdict
from collections.abc import Sequence

from kvist.planning.plan import LayerRow
from kvist.spec.layers import Attention, Compressed, Cross, Indexer, Latent, Layer, Parallel, Shared, State
from kvist.spec.rates import Rate
from kvist.units import counted

_MOST_SOURCES = 6


def layer_lines(rows: Sequence[LayerRow]) -> list[str]:
    """One line for each row; layers that share another's memory are in one line together, at the end."""
    lines = [
        f"{row.count} x {_described(row.layer)}{f', stored in {row.format}' if row.special else ''}"
        for row in rows
        if not isinstance(row.layer, Shared)
    ]
    readers: dict[int, int] = defaultdict(int)
    for row in rows:
        if isinstance(row.layer, Shared):
            readers[row.layer.source] += row.count
    if readers:
        shown = ", ".join(f"{source}" for source in sorted(readers)[:_MOST_SOURCES])
        more = ", …" if len(readers) > _MOST_SOURCES else ""
        plural = "layers" if len(readers) > 1 else "layer"
        lines.append(f"{sum(readers.values())} x shared: reads what {plural} {shown}{more} stored, adds nothing")
    return lines


def format_rate(rate: Rate) -> str:
    """Bytes, whole or with up to three decimals."""
    return f"{rate:,}" if isinstance(rate, int) else f"{float(rate):,.3f}".rstrip("0")


def _described(layer: Layer) -> str:
    match layer:
        case Attention():
            heads = _heads(layer.kv_heads, layer.key_dim, layer.value_dim)
            return f"attention: {heads}, {_seen(layer.window, layer.chunk)}{_indexed(layer.indexer)}"
        case Latent():
            return f"latent: {layer.rank} + {layer.rope_dim} wide, {_seen(layer.window)}{_indexed(layer.indexer)}"
        case Compressed():
            near = "" if layer.window is None else f", the last {layer.window:,} singly"
            return (
                f"compressed: {layer.rank} + {layer.rope_dim} wide, one for {counted(layer.ratio, 'token')}{near}"
                f"{_indexed(layer.indexer)}"
            )
        case State():
            sizes = (
                f"{elements:,} {codec}"
                for elements, codec in (
                    (layer.conv_elements, layer.conv_codec),
                    (layer.state_elements, layer.state_codec),
                )
                if elements
            )
            return f"state ({layer.name}): {' + '.join(sizes)}"
        case Shared():
            return f"shared: reads what layer {layer.source} stored"
        case Cross():
            length = "" if layer.encoder_tokens is None else f", {counted(layer.encoder_tokens, 'token')}"
            return f"cross: {_heads(layer.kv_heads, layer.key_dim, layer.value_dim)}, sees the encoder{length}"
        case Parallel():
            return " and ".join(_described(part) for part in layer.parts)
        case _:
            return f"{layer.kind}: stores nothing" if layer.kind == "nothing" else layer.kind


def _heads(count: int, key: int, value: int) -> str:
    return f"{counted(count, 'KV head')}, key {key}, value {value}"


def _seen(window: int | None, chunk: int | None = None) -> str:
    if chunk is not None:
        return f"sees its chunk of {counted(chunk, 'token')}"
    return "sees all tokens" if window is None else f"sees the last {counted(window, 'token')}"


def _indexed(indexer: Indexer | None) -> str:
    if indexer is None:
        return ""
    keys = f"{indexer.dim}" if indexer.heads == 1 else f"{indexer.heads} x {indexer.dim}"
    return f", indexer key {keys}" + ("" if indexer.pool == 1 else f" for {indexer.pool}")
