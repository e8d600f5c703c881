"""How many weights a network has, from its configuration: exact for the families listed here, unknown for others.

Each count was held against the network that transformers builds from the same configuration; where a family is not
in transformers, against its published files.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvist.errors import UnsupportedModel
from kvist.spec.layers import Layer
from kvist.spec.parameters.classic import CLASSIC
from kvist.spec.parameters.decoders import DECODERS
from kvist.spec.parameters.experts import EXPERTS
from kvist.spec.parameters.inventory import Inventory, Keys, Tensor
from kvist.spec.parameters.recurrent import RECURRENT

__all__ = ["FAMILIES", "Inventory", "Tensor", "inventory_of"]

FAMILIES: dict[str, Callable[[Keys], Inventory]] = {**DECODERS, **CLASSIC, **EXPERTS, **RECURRENT}


def inventory_of(config: Mapping[str, Any], layers: Sequence[Layer]) -> Inventory:
    """List the weights of the network that a configuration describes, under Hugging Face's names.

    Draft heads (multi-token prediction) are left out, as engines leave them out unless told otherwise.

    Args:
        config: completed, as a family's reader leaves it.
        layers: what its layers remember, which tells attention from recurrence.

    Raises:
        UnsupportedModel: the family is not known here, or a key that its shapes depend on is missing; names it.
    """
    keys = Keys(config, layers)
    family = FAMILIES.get(keys.family) or FAMILIES.get(keys.family.removesuffix("_text"))
    if family is None:
        raise UnsupportedModel(
            f"the weights of model_type {keys.family} cannot be counted: its shapes are not known here",
            key="model_type",
        )
    return family(keys)
