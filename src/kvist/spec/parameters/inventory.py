"""The weights of a network as a list of shapes, and what is asked of that list.

Shapes are enough for everything that planning asks: how many parameters there are, how many of them one token passes
through, how many bytes they take in some codec, which of them a quantised checkpoint leaves alone, and what a rank of
tensor parallelism or a stage of a pipeline holds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from kvist.errors import UnsupportedModel
from kvist.spec.layers import Layer, Parallel

Role = Literal["embedding", "head", "linear", "router", "norm", "other"]


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Tensors of one shape and place: one in each of some layers, or one for each expert of these.

    Attributes:
        name: of the module in the published checkpoint, such as ``model.layers.#.self_attn.q_proj``; a ``#`` stands
            for the number of the layer, a ``*`` for that of the expert.
        shape: of one, ``[out, in]`` where it is a matrix.
        role: ``linear`` is what quantisers work on; ``router``, ``norm`` and ``other`` (biases, sinks, states,
            convolutions) they leave alone.
        layers: indices of the decoder layers that have it; none for what lies outside of them.
        block: the part of the layer, such as ``attention`` or ``mlp``.
        units: pieces that tensor parallelism may deal out: heads, experts' widths, words; 1 where each rank holds
            all of it.
        copies: experts of this shape.
        used: of them, those that one token passes through.
        rows: whether ranks cut it along what it reads, so that each writes all of what it writes.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layers: tuple[int, ...] = ()
    block: str = ""
    units: int = 1
    copies: int = 1
    used: int = 1
    rows: bool = False

    @property
    def elements(self) -> int:
        """In one layer, of all copies."""
        return self.copies * prod(self.shape)

    @property
    def active(self) -> int:
        """Elements in one layer with which a token is multiplied; an embedding is looked up instead."""
        return 0 if self.role == "embedding" else self.used * prod(self.shape)

    @property
    def times(self) -> int:
        """How often it is there."""
        return len(self.layers) or 1

    def share(self, count: int, ranks: int) -> int:
        """Of ``count`` (elements, bytes) what the fullest of ``ranks`` has; too few units are replicated."""
        return -(-count * -(-self.units // ranks) // self.units)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A tensor, and the layers of a pipeline stage that have it; none for one outside of layers."""

    tensor: Tensor
    layers: tuple[int, ...]

    @property
    def times(self) -> int:
        """How often the stage has it."""
        return len(self.layers) or 1


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All weights of a network.

    Attributes:
        tensors: in the order of the network.
        layers: decoder layers.
        tied: whether the output head is the embedding table, which is then listed once.
        beside: what the checkpoint holds beyond these weights, such as ``a vision tower``; not counted.
    """

    tensors: tuple[Tensor, ...]
    layers: int
    tied: bool
    beside: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(tensor.elements * tensor.times for tensor in self.tensors)

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with: no look-ups, of experts only the chosen ones, the head always."""
        active = sum(tensor.active * tensor.times for tensor in self.tensors)
        return active + (self.table.elements if self.tied else 0)

    @property
    def table(self) -> Tensor:
        """The embedding table of tokens."""
        return next(tensor for tensor in self.tensors if tensor.role == "embedding")

    def stage(self, first: int, end: int) -> Iterator[Placed]:
        """What the pipeline stage with the layers ``first`` to ``end`` holds.

        The first stage has the embeddings; the last has the final norm and the head, and once more the table where
        that is the head.
        """
        opens, closes = first == 0, end == self.layers
        for tensor in self.tensors:
            if tensor.layers:
                inside = tuple(index for index in tensor.layers if first <= index < end)
                if inside:
                    yield Placed(tensor=tensor, layers=inside)
            elif opens if tensor.role == "embedding" else closes:
                yield Placed(tensor=tensor, layers=())
        if closes and self.tied and not opens:
            yield Placed(tensor=self.table, layers=())


class Keys:
    """A configuration, of which every number that is missing is named."""

    def __init__(self, config: Mapping[str, Any], layers: Sequence[Layer] = ()) -> None:
        self.config = config
        self.layers = tuple(layers)
        self.family = str(config.get("model_type"))

    def keeps(self, index: int, kind: type[Layer]) -> bool:
        """Whether a layer has memory of this kind, be it among others."""
        layer = self.layers[index]
        parts = layer.parts if isinstance(layer, Parallel) else (layer,)
        return any(isinstance(part, kind) for part in parts)

    def __contains__(self, key: str) -> bool:
        return self.config.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or ``default`` where it is null or left out."""
        value = self.config.get(key)
        return default if value is None else value

    def whole(self, *keys: str, default: int | None = None, least: int = 0) -> int:
        """The number under the first of these keys that is there.

        Raises:
            UnsupportedModel: none is, or it is no whole number of ``least`` or more.
        """
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 2**40:
                raise self.unknown(f"{key} is {str(value)[:40]!r}", keys[0])
            return value
        if default is None:
            raise self.unknown(f"{keys[0]} is not given", keys[0])
        return default

    def flag(self, *keys: str, default: bool) -> bool:
        """The truth value under the first of these keys that is there."""
        return next((bool(self.config[key]) for key in keys if self.config.get(key) is not None), default)

    def part(self, key: str) -> "Keys":
        """An object inside of the configuration."""
        value = self.config.get(key)
        if not isinstance(value, Mapping):
            raise self.unknown(f"{key} is not given", key)
        return Keys(value)

    def listed(self, key: str, length: int) -> list[Any]:
        """A list with one entry a layer."""
        value = self.config.get(key)
        if not isinstance(value, (list, tuple)) or len(value) < length:
            raise self.unknown(f"{key} has no entry for each of the {length} layers", key)
        return list(value[:length])

    def unknown(self, why: str, key: str) -> UnsupportedModel:
        """Return the error for weights that cannot be counted."""
        return UnsupportedModel(f"the weights of model_type {self.family} cannot be counted: {why}", key=key)


class Network:
    """Gathers tensors; :meth:`outside`, :meth:`layer` and :meth:`part` say where the following ones lie."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.count = 0
        self._prefix = self._of_layer = self._block = ""
        self._layers: tuple[int, ...] = ()

    def outside(self, prefix: str = "") -> None:
        """Put what follows outside of the layers."""
        self._prefix, self._layers, self._block = prefix and f"{prefix}.", (), ""

    def layer(self, prefix: str, indices: Iterable[int]) -> None:
        """Put what follows into each of these layers, whose names begin with ``prefix``."""
        self._of_layer, self._layers = f"{prefix}.", tuple(indices)
        self.count += len(self._layers)
        self.part("", block="norm")

    def part(self, name: str, *, block: str) -> None:
        """Put what follows into a part of the layers, which computes beside or after the other ``blocks``."""
        self._prefix, self._block = self._of_layer + (name and f"{name}."), block

    def add(
        self,
        name: str,
        *shape: int,
        role: Role = "other",
        units: int = 1,
        copies: int = 1,
        used: int | None = None,
        rows: bool = False,
    ) -> None:
        """Add ``copies`` tensors of one shape; ones without elements are not there."""
        if prod(shape) and copies:
            self.tensors.append(
                Tensor(
                    name=self._prefix + name,
                    shape=shape,
                    role=role,
                    layers=self._layers,
                    block=self._block,
                    units=units,
                    copies=copies,
                    used=copies if used is None else used,
                    rows=rows,
                )
            )

    def linear(
        self,
        name: str,
        out: int,
        into: int,
        *,
        bias: bool = False,
        units: int = 1,
        copies: int = 1,
        used: int | None = None,
        rows: bool = False,
        role: Role = "linear",
    ) -> None:
        """Add a matrix ``[out, in]`` and its bias; cut along ``in`` (``rows``), every rank holds the bias."""
        self.add(name, out, into, role=role, units=units, copies=copies, used=used, rows=rows)
        if bias:
            self.add(f"{name}.bias", out, units=1 if rows else units, copies=copies, used=used)

    def norm(self, name: str, width: int, *, bias: bool = False, units: int = 1) -> None:
        """Add the scale of a normalisation, and its shift."""
        self.add(name, width, role="norm", units=units)
        if bias:
            self.add(f"{name}.bias", width, role="norm", units=units)

    def inventory(self, *, tied: bool, beside: Iterable[str] = ()) -> Inventory:
        """Everything that was gathered.

        Raises:
            UnsupportedModel: there is no table of words.
        """
        if not any(tensor.role == "embedding" for tensor in self.tensors):
            raise UnsupportedModel("the weights cannot be counted: they have no table of words", key="vocab_size")
        return Inventory(tensors=tuple(self.tensors), layers=self.count, tied=tied, beside=tuple(beside))
