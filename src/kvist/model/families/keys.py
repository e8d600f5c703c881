"""Look-ups in a configuration from which a network is built: what is missing or not computed is named."""

from collections.abc import Mapping
from typing import Any

from kvist.errors import UnsupportedModel
from kvist.model.linear import ACTIVATIONS
from kvist.model.network import Rope
from kvist.spec.model import ModelSpec


class Keys:
    """A model's configuration.

    Args:
        spec: whose ``config`` is read; every default that its reader knows is in it.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.config: Mapping[str, Any] = spec.config

    def need(self, key: str) -> Any:
        """A key without which there is no network.

        Raises:
            UnsupportedModel: it is missing.
        """
        value = self.config.get(key)
        if value is None:
            raise UnsupportedModel(
                f"{key}: missing from {self.spec.source}, and the network is built from it; add it", key=key
            )
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """A key, or a default where it is missing or null."""
        value = self.config.get(key)
        return default if value is None else value

    def refuse(self, key: str, computed: object, why: str) -> None:
        """Refuse a key that is there and says anything else than what is computed.

        Raises:
            UnsupportedModel: names key and value.
        """
        value = self.config.get(key)
        if value is not None and value != computed:
            raise UnsupportedModel(f"{key}: {value} is not computed; {why}", key=key)

    def activation(self, key: str = "hidden_act") -> str:
        """The name of an activation.

        Raises:
            UnsupportedModel: it is missing or not computed.
        """
        name: str = self.need(key)
        if name not in ACTIVATIONS:
            raise UnsupportedModel(f"{key}: {name!r} is not computed; supported are {', '.join(ACTIVATIONS)}", key=key)
        return name

    def rope(self, width: int, *, theta: float | None = None, scaled: bool = True) -> Rope:
        """The rotary positions of heads of ``width``, of which ``partial_rotary_factor`` is turned."""
        dim = int(width * self.get("partial_rotary_factor", 1))
        return Rope(
            dim=dim,
            width=width,
            theta=self.need("rope_theta") if theta is None else theta,
            scaling=self.config.get("rope_scaling") if scaled else None,
        )
