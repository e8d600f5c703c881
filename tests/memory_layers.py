"""Layers of every kind, as hypothesis draws them, and models made of them."""

from hypothesis import strategies as st

from kvist.spec.layers import (
    Attention,
    Compressed,
    Cross,
    Indexer,
    Latent,
    Layer,
    Nothing,
    Parallel,
    Shared,
    State,
)  # fmt: skip
from kvist.spec.model import ModelSpec

WIDTHS = st.sampled_from([32, 64, 128])
LIMITS = st.sampled_from([1, 3, 16, 100, 129])


@st.composite
def indexers(draw: st.DrawFn) -> Indexer:
    return Indexer(heads=draw(st.integers(1, 2)), dim=draw(WIDTHS), pool=draw(st.sampled_from([1, 4])))


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    seen = draw(st.sampled_from(["all", "window", "chunk"]))
    return Attention(
        kv_heads=draw(st.integers(1, 4)),
        key_dim=draw(WIDTHS),
        value_dim=draw(WIDTHS),
        window=draw(LIMITS) if seen == "window" else None,
        chunk=draw(LIMITS) if seen == "chunk" else None,
        indexer=draw(st.none() | indexers()) if seen == "all" else None,
    )


@st.composite
def latents(draw: st.DrawFn) -> Latent:
    window = draw(st.none() | LIMITS)
    return Latent(
        rank=draw(WIDTHS),
        rope_dim=draw(st.sampled_from([0, 32])),
        window=window,
        indexer=None if window else draw(st.none() | indexers()),
    )


@st.composite
def compressed(draw: st.DrawFn) -> Compressed:
    return Compressed(
        rank=draw(WIDTHS),
        rope_dim=draw(st.sampled_from([0, 32])),
        ratio=draw(st.sampled_from([1, 4, 48])),
        window=draw(st.none() | LIMITS),
        indexer=draw(st.none() | indexers()),
    )


@st.composite
def states(draw: st.DrawFn) -> State:
    return State(
        name=draw(st.sampled_from(["mamba2", "gated-delta"])),
        conv_elements=draw(st.integers(0, 300)),
        state_elements=draw(st.integers(1, 4000)),
        state_codec=draw(st.sampled_from(["f32", "bf16"])),
    )


@st.composite
def crosses(draw: st.DrawFn, fixed: bool | None = None) -> Cross:
    lengths = st.integers(1, 200)
    return Cross(
        kv_heads=draw(st.integers(1, 4)),
        key_dim=draw(WIDTHS),
        value_dim=draw(WIDTHS),
        encoder_tokens=draw(lengths if fixed else st.none() | lengths),
    )


STORING = attentions() | latents() | compressed() | states()
LAYERS: st.SearchStrategy[Layer] = (
    STORING
    | st.just(Nothing())
    | st.builds(lambda parts: Parallel(parts=tuple(parts)), st.lists(STORING | crosses(fixed=True), max_size=3))
)


@st.composite
def models(draw: st.DrawFn, *, max_context: int = 4096) -> ModelSpec:
    """A model that stores something; what it has of encoders is of fixed length."""
    layers = [draw(STORING), *draw(st.lists(LAYERS | crosses(fixed=True), max_size=4))]
    if draw(st.booleans()):
        layers.append(Shared(source=0))
    return ModelSpec(name="toy", source="test", layers=tuple(layers), max_context=max_context)
