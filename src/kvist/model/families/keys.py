"""Look-ups in a configuration from which a network is built: what is missing or not computed is named."""

from collections.abc import Mapping
from typing import Any

from kvist.errors import BadFile, UnsupportedModel
from kvist.model.families.key_kinds import wanted
from kvist.model.linear import ACTIVATIONS
from kvist.model.network import Rope
from kvist.spec.config_keys import ConfigKeys
from kvist.spec.model import ModelSpec


class Keys:
    """A model's configuration.

    Args:
        spec: whose ``config`` is read; every default that its reader knows is in it.
    """

    def __init__(self, spec: ModelSpec, config: Mapping[str, Any] | None = None) -> None:
        self.spec = spec
        self.config: Mapping[str, Any] = spec.config if config is None else config

    def completed(self, defaults: Mapping[str, Any]) -> "Keys":
        """The same configuration with what its family's class fills in, and one name for each rotary key.

        Args:
            defaults: taken for keys that are left out; a null that is printed stays.

        Raises:
            BadFile: a rotary key cannot be.
            UnsupportedModel: layers with a window have scaled positions.
        """
        filled: dict[str, Any] = {"rope_theta": 10000.0, "tie_word_embeddings": False, **defaults}
        keys = ConfigKeys(self.config, name=self.spec.name)
        keys.flatten_rope(
            theta=filled["rope_theta"], local_theta=filled.get("rope_local_base_freq"), source="default of its class"
        )
        config = {**filled, **keys.config}
        rotary = config.get("rope_parameters") or {}
        local = rotary.get("sliding_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise UnsupportedModel(
                f"rope_parameters.sliding_attention: {local['rope_type']!r} is not computed; "
                f"layers with a window turn their positions unscaled",
                key="rope_parameters",
            )
        inner = (rotary.get("full_attention") or rotary).get("partial_rotary_factor")
        if inner is not None:
            config["partial_rotary_factor"] = inner
        original = config.get("original_max_position_embeddings")
        if config["rope_scaling"] is not None and original is not None:
            # Beside the scaling in files of Phi-3, where it counts above what stands inside.
            config["rope_scaling"] = {**config["rope_scaling"], "original_max_position_embeddings": original}
        return Keys(self.spec, config)

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
        return self._checked(key, value)

    def get(self, key: str, default: Any = None) -> Any:
        """A key, or a default where it is missing or null."""
        value = self.config.get(key)
        return default if value is None else self._checked(key, value)

    def _checked(self, key: str, value: Any) -> Any:
        said = wanted(key, value)
        if said is not None:
            raise BadFile(f"{self.spec.source}: {key} is {value!r}; it must be {said}", key=key)
        return value

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
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise UnsupportedModel(f"{key}: {name!r} is not computed; supported are {', '.join(ACTIVATIONS)}", key=key)
        return name

    def rope(
        self,
        width: int,
        *,
        theta: float | None = None,
        scaled: bool = True,
        by_kind: bool = False,
        partial: bool = False,
    ) -> Rope:
        """The rotary positions of heads of ``width``.

        Args:
            width: of a head.
            theta: in place of ``rope_theta``.
            scaled: whether ``rope_scaling`` scales them.
            by_kind: whether layers with and without a window may have positions of their own.
            partial: whether ``partial_rotary_factor`` says how much of a head is turned; a GGUF file always says.

        Raises:
            UnsupportedModel: the family's class computes otherwise than the configuration says.
        """
        if not by_kind:
            parameters = self.config.get("rope_parameters") or {}
            for kind in ("full_attention", "sliding_attention"):
                if kind not in parameters:
                    continue
                raise UnsupportedModel(
                    f"rope_parameters.{kind}: positions of its own are not computed for this kind of layer; "
                    f"all layers of the family turn alike",
                    key=f"rope_parameters.{kind}",
                )
        turned = self.config.get("rotary_elements")
        if turned is None:
            if not partial:
                self.refuse("partial_rotary_factor", 1.0, "heads of the family are turned whole")
            turned = int(width * self.get("partial_rotary_factor", 1))
        scaling = self.config.get("rope_scaling") if scaled else None
        return Rope(
            dim=turned,
            width=width,
            theta=self.need("rope_theta") if theta is None else theta,
            scaling=scaling,
            trained=self.get("max_position_embeddings"),
            longest=self.spec.max_context,
        )
