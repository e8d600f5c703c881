"""What the weights weigh: in all, on a rank of tensor parallelism, in a stage of a pipeline, and when they are read."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from kvist.errors import InputError, UnsupportedModel
from kvist.spec.model import Assumption, ModelSpec

if TYPE_CHECKING:
    from kvist.spec.parameters.inventory import Inventory, Placed, Tensor
    from kvist.spec.parameters.storage import Storage, StoredSize

_QUANTISED_NAME = re.compile(
    r"(?<![a-z0-9])(fp8|nvfp4|mxfp4|awq|gptq|int4|int8|w4a16|w8a8|bnb)(?![a-z])", re.IGNORECASE
)
_PLAIN_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of a model, as stored or as asked for.

    Attributes:
        by_type: bytes by stored type.
        parameters: how many there are; None where the file does not tell.
        sizes: how each is stored in each layer; None where a file says how much there is of what, not of which tensor.
        source: where the bytes come from.
        stated: whether they are read from a file rather than counted from shapes.
        spec: the model.
        assumed: what was taken for granted.
        notes: what is not counted.
    """

    by_type: Mapping[str, int]
    parameters: int | None
    sizes: "Mapping[Tensor, Mapping[int | None, StoredSize]] | None"
    source: str
    stated: bool
    spec: ModelSpec = field(repr=False, compare=False)
    assumed: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def inventory(self) -> "Inventory | None":
        """The shapes; None where those of the family are not known."""
        return self._counted.inventory

    @property
    def reason(self) -> str:
        """Why there are no shapes."""
        return self._counted.reason

    @cached_property
    def _counted(self) -> "_Counted":
        return _count(self.spec)

    @cached_property
    def total(self) -> int:
        """Bytes on one device that holds them all."""
        return sum(self.by_type.values())

    def held(self, first: int, end: int, *, layers: int, tp: int) -> int:
        """Bytes on the fullest rank of the stage with the layers ``first`` to ``end`` of ``layers``.

        Where shapes are not known, all is taken to be dealt out evenly.
        """
        if first == 0 and end == layers and tp == 1:
            return self.total
        if self.inventory is None:
            return -(-self.total * (end - first) // (layers * tp))
        if self.sizes is None:
            shares = (
                placed.times * placed.tensor.share(placed.tensor.elements, tp)
                for placed in self.inventory.stage(first, end)
            )
            return -(-self.total * sum(shares) // self.inventory.parameters)
        return sum(
            placed.tensor.share(size, tp)
            for placed in self.inventory.stage(first, end)
            for size in _of(self.sizes, placed)
        )

    def read(self, first: int, end: int, *, layers: int, tp: int, tokens: int) -> float:
        """Bytes that a rank reads in a step of ``tokens``: of the experts those that one of them is sent to."""
        return self.reading(first, end, layers=layers, tp=tp).bytes(tokens)

    def reading(self, first: int, end: int, *, layers: int, tp: int) -> "Reading":
        """What a rank of the stage with the layers ``first`` to ``end`` of ``layers`` reads, however many tokens."""
        if self.inventory is None:
            return Reading(always=float(self.held(first, end, layers=layers, tp=tp)), experts={})
        stated = self.total / self.inventory.parameters if self.sizes is None else None
        always = 0.0
        experts: dict[float, float] = {}
        for placed in self.inventory.stage(first, end):
            tensor = placed.tensor
            if tensor.role == "embedding" and not (self.inventory.tied and tensor is self.inventory.table):
                continue
            if stated is None:
                assert self.sizes is not None
                size = float(sum(tensor.share(each, tp) for each in _of(self.sizes, placed)))
            else:
                size = stated * placed.times * tensor.share(tensor.elements, tp)
            if tensor.used < tensor.copies:
                left = 1 - tensor.used / tensor.copies
                experts[left] = experts.get(left, 0.0) + size
            else:
                always += size
        return Reading(always=always, experts=experts)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Bytes of weights that a rank reads in a step, by what they depend on.

    Tokens are taken to choose experts independently and evenly, so that of E experts, k chosen by each token,
    ``E x (1 - (1 - k/E) ** tokens)`` are read.

    Attributes:
        always: read in every step.
        experts: bytes of experts by ``1 - k/E``, the chance that a token is not sent to one.
    """

    always: float
    experts: Mapping[float, float]

    def bytes(self, tokens: int) -> float:
        """Read in a step of so many tokens."""
        return self.always + sum(size * (1 - left**tokens) for left, size in self.experts.items())


def weights_of(spec: ModelSpec, codec: str | None = None) -> Weights:
    """Say what the weights of a model weigh.

    In this order: in the codec that is asked for, from the shapes; as a file lists them; from the shapes, in the types
    that the configuration names; from the number of parameters.

    Raises:
        InputError: no such codec, or nothing tells; names what is missing and what would help.
    """
    if codec is None and spec.weights_by_type:
        return Weights(
            by_type=spec.weights_by_type, parameters=spec.parameters, sizes=None,
            source=f"tensors listed in {spec.source}", stated=True, spec=spec,
        )  # fmt: skip
    from kvist.spec.parameters.storage import storage_of, weight_codec_named

    if codec is None:
        _refuse_contradiction(spec)
    else:
        weight_codec_named(codec)
    try:
        storage = storage_of(spec.config, codec)
    except UnsupportedModel as error:
        raise InputError(f"weights: {spec.name}: {error}", key="weights") from error
    counted = _count(spec)
    if counted.inventory is not None:
        sizes = {tensor: storage.sizes(tensor) for tensor in counted.inventory.tensors}
        return Weights(
            by_type=_by_type(sizes.values()), parameters=counted.inventory.parameters, sizes=sizes,
            source=f"shapes of model_type {spec.config.get('model_type')}, types by {storage.source}",
            stated=False, spec=spec, assumed=_assumed(storage), notes=_beside(spec, counted.inventory),
        )  # fmt: skip
    if spec.parameters is not None and not storage.groups:
        name = storage.rest.name
        return Weights(
            by_type={name: spec.parameters * _PLAIN_BYTES[name]}, parameters=spec.parameters, sizes=None,
            source=f"{spec.parameters:,} parameters of {spec.source}, types by {storage.source}", stated=True,
            spec=spec, assumed=_assumed(storage),
        )  # fmt: skip
    raise InputError(
        f"weights: the weights of {spec.name} are not known from {spec.source}: {counted.reason}; name a model "
        f"directory or a .gguf file, or give the cache alone with `cache_memory`",
        key="weights",
    )


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """The shapes of a network, or why they are not known."""

    inventory: "Inventory | None" = None
    reason: str = ""


def _count(spec: ModelSpec) -> _Counted:
    from kvist.spec.parameters import inventory_of

    try:
        return _Counted(inventory=inventory_of(spec.config, spec.layers))
    except UnsupportedModel as error:
        return _Counted(reason=str(error))


def _refuse_contradiction(spec: ModelSpec) -> None:
    """A model that is called quantised, and whose configuration does not say how, cannot be counted from it."""
    said = _QUANTISED_NAME.search(spec.name)
    if said and not spec.config.get("quantization_config"):
        raise InputError(
            f"weights: {spec.name} is called {said[0].upper()}, but its configuration has no quantization_config that "
            f"says how its weights are stored: say it with `weights`",
            key="weights",
        )


def _assumed(storage: "Storage") -> tuple[Assumption, ...]:
    if not storage.assumed_type:
        return ()
    return (
        Assumption(
            key="dtype", value=storage.rest.name, source="what engines load where the file names no type; or --weights"
        ),
    )


def _beside(spec: ModelSpec, inventory: "Inventory") -> tuple[str, ...]:
    if not inventory.beside:
        return ()
    what = " and ".join(inventory.beside)
    return (f"{spec.name} comes with {what}, whose weights are not counted: add them to the overhead where it is used",)


def _by_type(sizes: "Iterable[Mapping[int | None, StoredSize]]") -> dict[str, int]:
    found: dict[str, int] = {}
    for tensor in sizes:
        for stored in tensor.values():
            found[stored.codec] = found.get(stored.codec, 0) + stored.size
    return found


def _of(sizes: "Mapping[Tensor, Mapping[int | None, StoredSize]]", placed: "Placed") -> Iterable[int]:
    """Bytes of a tensor in each layer of a stage."""
    tensor = sizes[placed.tensor]
    return (tensor[layer].size for layer in placed.layers or (None,))
