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


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """Tensors of one shape in one module.

    Attributes:
        name: of the module in the published checkpoint, such as ``model.layers.0.self_attn.q_proj``; a ``*`` stands
            for the number of each of several ``copies``.
        shape: of one, ``[out, in]`` where it is a matrix.
        role: ``linear`` is what quantisers work on; ``router``, ``norm`` and ``other`` (biases, sinks, states,
            convolutions) they leave alone.
        layer: index of its decoder layer; None outside of them.
        block: the part of the layer, such as ``attention`` or ``mlp``.
        units: pieces that tensor parallelism may deal out: heads, experts' widths, words; 1 where each rank holds
            all of it.
        copies: experts of this shape.
        used: of them, those that one token passes through; 0 where it only looks a row up.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    block: str = ""
    units: int = 1
    copies: int = 1
    used: int = 1

    @property
    def elements(self) -> int:
        """Of all copies."""
        return self.copies * prod(self.shape)

    def rank_elements(self, ranks: int) -> int:
        """Elements on the fullest of ``ranks``; where there are fewer units than ranks, units are replicated."""
        return self.elements * -(-self.units // ranks) // self.units


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """All weights of a network.

    Attributes:
        tensors: in the order of the network.
        tied: whether the output head is the embedding table, which is then listed once.
        beside: what the checkpoint holds beyond these weights, such as ``a vision tower``; not counted.
    """

    tensors: tuple[Tensor, ...]
    tied: bool
    beside: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """How many there are."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with: no look-ups, of experts only the chosen ones, the head always."""
        return sum(tensor.used * prod(tensor.shape) for tensor in self.tensors if tensor.role != "embedding") + (
            self.head_parameters if self.tied else 0
        )

    @property
    def head_parameters(self) -> int:
        """Of the output head, be it the embedding table or not."""
        wanted = "embedding" if self.tied else "head"
        return max((tensor.elements for tensor in self.tensors if tensor.role == wanted), default=0)

    def of_layers(self, first: int, end: int, layers: int) -> Iterator[Tensor]:
        """Tensors of the pipeline stage with the layers ``first`` to ``end``.

        The first stage has the embeddings, the last the final norm and the head (and the table once more where it
        serves as head).
        """
        for tensor in self.tensors:
            if tensor.layer is not None:
                if first <= tensor.layer < end:
                    yield tensor
            elif tensor.role == "embedding":
                if first == 0 or (self.tied and end == layers):
                    yield tensor
            elif end == layers:
                yield tensor


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
    """Gathers tensors; :meth:`enter` says where the following ones lie."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.prefix = ""
        self.layer: int | None = None
        self.block = ""

    def enter(self, prefix: str, *, layer: int | None = None, block: str = "") -> None:
        """Put what follows under ``prefix``."""
        self.prefix, self.layer, self.block = f"{prefix}." if prefix else "", layer, block

    def add(
        self, name: str, *shape: int, role: Role = "other", units: int = 1, copies: int = 1, used: int | None = None
    ) -> None:
        """Add ``copies`` tensors of one shape; ones without elements are not there."""
        if prod(shape) and copies:
            self.tensors.append(
                Tensor(
                    name=self.prefix + name,
                    shape=shape,
                    role=role,
                    layer=self.layer,
                    block=self.block,
                    units=units,
                    copies=copies,
                    used=copies if used is None else used,
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
        self.add(name, out, into, role=role, units=units, copies=copies, used=used)
        if bias:
            self.add(f"{name}.bias", out, units=1 if rows else units, copies=copies, used=used)

    def norm(self, name: str, width: int, *, bias: bool = False, units: int = 1) -> None:
        """Add the scale of a normalisation, and its shift."""
        self.add(name, width, role="norm", units=units)
        if bias:
            self.add(f"{name}.bias", width, role="norm", units=units)

    def inventory(self, *, tied: bool, beside: Iterable[str] = ()) -> Inventory:
        """Everything that was gathered."""
        return Inventory(tensors=tuple(self.tensors), tied=tied, beside=tuple(beside))
