"""What the weights weigh: in all, on a rank of tensor parallelism, in a stage of a pipeline, and when they are read."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from kvist.errors import InputError, UnsupportedModel
from kvist.spec.model import Assumption, ModelSpec
from kvist.spec.parameters import Inventory
from kvist.spec.parameters.inventory import Placed, Tensor
from kvist.spec.parameters.storage import Storage, StoredSize, storage_of, weight_codec_named

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
        inventory: their shapes; None where the family's are not known.
        sizes: how each is stored in each layer; None where a file says how much there is of what, not of which tensor.
        source: where the bytes come from.
        stated: whether they are read from a file rather than counted from shapes.
        assumed: what was taken for granted.
        notes: what is not counted.
        reason: why there is no inventory.
    """

    by_type: Mapping[str, int]
    parameters: int | None
    inventory: Inventory | None
    sizes: Mapping[Tensor, Mapping[int | None, StoredSize]] | None
    source: str
    stated: bool
    assumed: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""

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
        """Bytes that a rank reads in a step of ``tokens``: of the experts those that one of them is sent to.

        Tokens are taken to choose experts independently and evenly, so that of E experts, k chosen by each token,
        ``E x (1 - (1 - k/E) ** tokens)`` are read.
        """
        if self.inventory is None:
            return float(self.held(first, end, layers=layers, tp=tp))
        stated = self.total / self.inventory.parameters if self.sizes is None else None
        size = 0.0
        for placed in self.inventory.stage(first, end):
            tensor = placed.tensor
            if tensor.role == "embedding" and not (self.inventory.tied and tensor is self.inventory.table):
                continue
            read = 1.0
            if tensor.used < tensor.copies:
                read = 1 - (1 - tensor.used / tensor.copies) ** tokens
            if stated is None:
                assert self.sizes is not None
                size += read * sum(tensor.share(each, tp) for each in _of(self.sizes, placed))
            else:
                size += read * stated * placed.times * tensor.share(tensor.elements, tp)
        return size


def weights_of(spec: ModelSpec, codec: str | None = None) -> Weights:
    """Say what the weights of a model weigh.

    In this order: in the codec that is asked for, from the shapes; as a file lists them; from the shapes, in the types
    that the configuration names; from the number of parameters.

    Raises:
        InputError: no such codec, or nothing tells; names what is missing and what would help.
    """
    if codec is not None:
        weight_codec_named(codec)
    inventory, reason = _inventory(spec)
    if codec is None and spec.weights_by_type:
        return Weights(
            by_type=spec.weights_by_type, parameters=spec.parameters, inventory=inventory, sizes=None,
            source=f"tensors listed in {spec.source}", stated=True, reason=reason,
        )  # fmt: skip
    if codec is None:
        _refuse_contradiction(spec)
    try:
        storage = storage_of(spec.config, codec)
    except UnsupportedModel as error:
        raise InputError(f"weights: {spec.name}: {error}", key="weights") from error
    assumed = _assumed(storage)
    if inventory is not None:
        sizes = {tensor: storage.sizes(tensor) for tensor in inventory.tensors}
        return Weights(
            by_type=_by_type(sizes.values()), parameters=inventory.parameters, inventory=inventory, sizes=sizes,
            source=f"shapes of model_type {spec.config.get('model_type')}, types by {storage.source}",
            stated=False, assumed=assumed, notes=_beside(spec, inventory),
        )  # fmt: skip
    if spec.parameters is not None and not storage.groups:
        name = storage.rest.name
        return Weights(
            by_type={name: spec.parameters * _PLAIN_BYTES[name]}, parameters=spec.parameters, inventory=None,
            sizes=None, source=f"{spec.parameters:,} parameters of {spec.source}, types by {storage.source}",
            stated=True, assumed=assumed, reason=reason,
        )  # fmt: skip
    raise InputError(
        f"weights: those of {spec.name} are not known from {spec.source}: {reason}; name a model directory or a .gguf "
        f"file, or give the cache alone with `cache_memory`",
        key="weights",
    )


def _inventory(spec: ModelSpec) -> tuple[Inventory | None, str]:
    from kvist.spec.parameters import inventory_of

    try:
        return inventory_of(spec.config, spec.layers), ""
    except UnsupportedModel as error:
        return None, str(error)


def _refuse_contradiction(spec: ModelSpec) -> None:
    """A model that is called quantised, and whose configuration does not say how, cannot be counted from it."""
    said = _QUANTISED_NAME.search(spec.name)
    if said and not spec.config.get("quantization_config"):
        raise InputError(
            f"weights: {spec.name} is called {said[0].upper()}, but its configuration has no quantization_config that "
            f"says how its weights are stored: say it with `weights`",
            key="weights",
        )


def _assumed(storage: Storage) -> tuple[Assumption, ...]:
    if not storage.assumed_type:
        return ()
    return (
        Assumption(
            key="dtype", value=storage.rest.name, source="what engines load where the file names no type; or --weights"
        ),
    )


def _beside(spec: ModelSpec, inventory: Inventory) -> tuple[str, ...]:
    if not inventory.beside:
        return ()
    what = " and ".join(inventory.beside)
    return (f"{spec.name} comes with {what}, whose weights are not counted: add them to the overhead where it is used",)


def _by_type(sizes: Iterable[Mapping[int | None, StoredSize]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for tensor in sizes:
        for stored in tensor.values():
            found[stored.codec] = found.get(stored.codec, 0) + stored.size
    return found


def _of(sizes: Mapping[Tensor, Mapping[int | None, StoredSize]], placed: Placed) -> Iterable[int]:
    """Bytes of a tensor in each layer of a stage."""
    tensor = sizes[placed.tensor]
    return (tensor[layer].size for layer in placed.layers or (None,))
