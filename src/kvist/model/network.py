"""What a decoder computes: frozen descriptions, one a mechanism, that a family reads from a configuration.

A family (:mod:`kvist.model.families`) says which blocks there are and under which names their tensors lie; the decoder
(:mod:`kvist.model.decoder`) assembles them. Names are those of the files, beginning at the decoder itself, so that a
tensor is looked for by the name that is written here; where a file holds several as one, or turned,
:attr:`Network.parts` says how to take them out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from kvist.spec.layers import Attention, Layer


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm over the hidden width.

    Attributes:
        name: of its tensors, without ``.weight`` and ``.bias``.
        eps: added to the mean square, or the variance.
        kind: ``rms``, ``layer`` with a mean and a bias, or ``unbiased`` with a mean alone.
    """

    name: str
    eps: float
    kind: Literal["rms", "layer", "unbiased"] = "rms"


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions of some layers.

    Attributes:
        dim: leading elements of a head that are turned.
        width: of a head.
        theta: base of the frequencies.
        scaling: ``rope_scaling`` of the configuration, or None.
        trained: ``max_position_embeddings`` of the configuration.
        longest: tokens of the longest sequence that will be computed.
    """

    dim: int
    width: int
    theta: float
    scaling: Mapping[str, Any] | None = None
    trained: int | None = None
    longest: int | None = None


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Sharper attention far into a sequence, where there are many keys (arXiv:2501.19399).

    The query at position ``p`` is multiplied by ``1 + scale x ln(1 + floor((p + 1) / floor))``.
    """

    floor: float
    scale: float


@dataclass(frozen=True, kw_only=True)
class SelfAttention:
    """Attention whose keys and values are stored: MHA, GQA and MQA are ``kv_heads`` alone.

    Attributes:
        prefix: of its tensors, such as ``model.layers.0.self_attn``.
        hidden: width of the stream.
        heads: query heads.
        kv_heads: that share one key and value.
        dim: of a head.
        rope: which of the network's rotary positions turn queries and keys; None for none.
        scale: of the scores.
        softcap: scores become ``softcap x tanh(score / softcap)``.
        qkv_bias: whether queries, keys and values have one; likewise ``out_bias``.
        head_norm: an RMS norm of queries and keys: of ``each`` head, or of ``all`` heads as one vector; ``unit`` as
            ``each``, without multipliers.
        eps: of that norm.
        temperature: by which queries far into a sequence grow; None for none.
        gated: the query's product holds a gate beside each head, whose sigmoid the head's output is multiplied by.
        sinks: name of one score a head that takes part in the softmax and has no value.
    """

    prefix: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    rope: int | None
    scale: float
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: Literal["each", "all", "unit"] | None = None
    eps: float = 0.0
    temperature: Temperature | None = None
    gated: bool = False
    sinks: str | None = None

    stores: ClassVar[tuple[type[Layer], ...]] = (Attention,)


@dataclass(frozen=True, kw_only=True)
class Together:
    """Mixers side by side.

    Attributes:
        parts: their descriptions.
        factors: of what each adds.
    """

    parts: tuple[Any, ...]
    factors: tuple[float, ...]

    @property
    def stores(self) -> tuple[type[Layer], ...]:
        """What the parts store."""
        return tuple(kind for part in self.parts for kind in part.stores)


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """``down(act(up(x)))``, or with a gate ``down(act(gate(x)) * up(x))``.

    Attributes:
        prefix: of its tensors.
        hidden: width of the stream.
        inner: width between the products.
        activation: its name in :mod:`kvist.model.feed_forward`.
        gate: name of the gate's product below ``prefix``; None where there is no gate. Likewise ``up`` and ``down``.
        bias: whether the products have one.
    """

    prefix: str
    hidden: int
    inner: int
    activation: str
    gate: str | None = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Block:
    """One layer: a mixer of tokens, then a product for each token, each added to the stream.

    Attributes:
        mixer: a description that :mod:`kvist.model.mixers` builds; None for a layer that mixes nothing.
        mlp: a description that :mod:`kvist.model.feed_forward` builds; None for a mixer alone.
        before_mixer: norm of what goes into it; None: the stream itself does.
        after_mixer: norm of what it adds.
        before_mlp: likewise.
        after_mlp: likewise.
        parallel: the product sees what the mixer sees, instead of the stream after it.
        scale: factor of what mixer and product give; None for none.
    """

    mixer: Any
    mlp: Any = None
    before_mixer: Norm | None = None
    after_mixer: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None
    parallel: bool = False
    scale: float | None = None

    @property
    def stores(self) -> set[type[Layer]]:
        """The kinds of memory that its mixer has."""
        return set() if self.mixer is None else set(self.mixer.stores)

    @property
    def attention(self) -> tuple[SelfAttention, ...]:
        """The attention in it whose keys and values are stored."""
        parts = self.mixer.parts if isinstance(self.mixer, Together) else (self.mixer,)
        return tuple(part for part in parts if isinstance(part, SelfAttention))


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where a tensor of the network lies.

    Attributes:
        name: of the stored tensor.
        index: along its first dimension, of what is read; None for all. The rest stays in the file.
        take: what to take of that, a view where that will do; None for all.
    """

    name: str
    index: int | None = None
    take: Callable[[Tensor], Tensor] | None = None


def whole(name: str) -> Part:
    """A tensor that lies under its own name."""
    return Part(name=name)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A decoder.

    Attributes:
        vocab: rows of the embedding.
        hidden: width of the stream.
        blocks: first to last.
        ropes: rotary positions that blocks name by number.
        norm: behind the last block.
        embedding: name of its tensor, which begins with the decoder's prefix.
        head: name of the tensor that makes logits; the embedding's where they are tied.
        embedding_scale: factor of the embeddings, rounded to their type.
        positions: name and rows of a learned embedding of positions, or None.
        softcap: logits become ``softcap x tanh(logit / softcap)``.
        logits_scale: factor of the logits.
        wide: the stream of residuals is float32 whatever the compute type.
        norm_offset: added to the multipliers of norms in safetensors (Gemma publishes them as offsets from one).
        parts: where a tensor lies in safetensors.
        ignored: endings of stored names that are no part of the network, such as buffers.
        drafts: beginnings of names of draft layers, which are no part of it either.
    """

    vocab: int
    hidden: int
    blocks: tuple[Block, ...]
    ropes: tuple[Rope, ...] = ()
    norm: Norm
    embedding: str = "model.embed_tokens.weight"
    head: str = "lm_head.weight"
    embedding_scale: float | None = None
    positions: tuple[str, int] | None = None
    softcap: float | None = None
    logits_scale: float | None = None
    wide: bool = False
    norm_offset: float = 0.0
    parts: Callable[[str], Part] = whole
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    drafts: tuple[str, ...] = ()

    @property
    def tied(self) -> bool:
        """Whether logits are made with the table of embeddings."""
        return self.head == self.embedding
