"""Access to a configuration that checks each key and remembers what was filled in."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from kvist.errors import BadFile, UnsupportedModel
from kvist.spec.model import Assumption

_MOST = 2**40

_STORED_TYPES = frozenset(
    {"auto", "float64", "float32", "float", "float16", "half", "bfloat16", "int8", "uint8"}
    | {"float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
)
# Rotary scaling: what must be a number, and what must be a list of them, one a frequency.
_ROPE_NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow",
)  # fmt: skip
_ROPE_LISTS = ("long_factor", "short_factor")


class ConfigKeys:
    """A configuration being read.

    ``config`` is a completed copy, with ``overrides`` in place of what is published; ``assumed`` lists the defaults
    that were taken, ``asked`` the keys that were looked at.
    """

    def __init__(self, config: Mapping[str, Any], *, name: str, overrides: Mapping[str, Any] | None = None) -> None:
        self.overrides = overrides or {}
        self.config: dict[str, Any] = {**config, **self.overrides}
        self.name = name
        self.assumed: list[Assumption] = []
        self.asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self.asked.add(key)
        return key in self.config

    @property
    def family(self) -> str:
        """The model type."""
        return str(self.config.get("model_type"))

    def get(self, key: str) -> Any:
        """Return the value, or None where it is null or left out."""
        self.asked.add(key)
        return self.config.get(key)

    def set(self, key: str, value: Any) -> None:
        """Write what follows from other keys."""
        self.config[key] = value

    def note(self, key: str, value: Any, source: str) -> None:
        """List that ``value`` is taken for ``key``."""
        self.assumed.append(Assumption(key=key, value=value, source=source))

    def fill(self, key: str, value: Any) -> None:
        """Take a default that no cache byte depends on and that published files commonly leave out."""
        if self.get(key) is None:
            self.config[key] = value

    def count(
        self, key: str, *, default: int | None = None, least: int = 1, most: int = _MOST, source: str = ""
    ) -> int:
        """Return a whole number of at least ``least``; a null counts as left out."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            value = self.config[key] = default
            self.note(key, default, source)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, *, default: float, source: str) -> float:
        """Return a positive finite number."""
        value = self.get(key)
        if value is None:
            value = self.config[key] = default
            self.note(key, default, source)
        if not _is_positive(value):
            raise self.wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false; left out, the default that every source agrees on."""
        value = self.get(key)
        if value is None:
            value = self.config[key] = default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def optional_number(self, key: str) -> int | float | None:
        """Return a positive finite number, or None where it is null or left out."""
        value = self.get(key)
        if value is None:
            return None
        if not _is_positive(value):
            raise self.wrong(key, "a positive number or null")
        number: int | float = value
        return number

    def optional_text(self, key: str) -> None:
        """Check that the value is a string where it is given."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")

    def stored_type(self) -> None:
        """Check the type that the weights are said to have, under its names of all transformers versions."""
        for key in ("dtype", "torch_dtype"):
            value = self.get(key)
            if value is None:
                continue
            if not isinstance(value, str) or value.removeprefix("torch.") not in _STORED_TYPES:
                raise self.wrong(key, "a type such as bfloat16, float16 or float32")

    def text(self, key: str, *, default: str | None, source: str) -> str:
        """Return a string."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise UnsupportedModel(f"{self.name}: {key} is missing; it must name the model's family", key=key)
            value = self.config[key] = default
            self.note(key, default, source)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def nested(self, key: str, *, model_type: str) -> "ConfigKeys":
        """Return the part of a multimodal configuration that describes its text model.

        What only the outer level says (special tokens, tied embeddings, the stored type) goes along.
        """
        part = self.config.get(key)
        if not isinstance(part, dict):
            raise self.missing(key) if part is None else self.wrong(key, "an object")
        found = part.get("model_type", model_type)
        if found != model_type:
            raise UnsupportedModel(
                f"{self.name}: {key}.model_type is {found!r}; {model_type} was expected", key=f"{key}.model_type"
            )
        outer = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "torch_dtype", "dtype")
        carried = {name: self.config[name] for name in (*outer, "quantization_config") if name in self.config}
        overrides = {name: value for name, value in self.overrides.items() if name != "model_type"}
        inner = ConfigKeys(carried | part | {"model_type": model_type}, name=f"{self.name}: {key}", overrides=overrides)
        inner.assumed, inner.asked = self.assumed, self.asked
        return inner

    def flatten_rope(self, *, theta: float, local_theta: float | None, source: str) -> None:
        """Bring the rotary keys of every transformers version to ``rope_theta`` and ``rope_scaling``.

        Version 5 writes one ``rope_parameters`` object, or one for each kind of layer.
        """
        parameters = self.get("rope_parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise self.wrong("rope_parameters", "an object")
        wide = dict(parameters or {})
        local: dict[str, Any] = {}
        if "full_attention" in wide or "sliding_attention" in wide:
            local, wide = wide.get("sliding_attention") or {}, wide.get("full_attention") or {}
        if not isinstance(wide, dict) or not isinstance(local, dict):
            raise self.wrong("rope_parameters", "an object of objects")
        self.fill("rope_theta", wide.get("rope_theta"))
        self.number("rope_theta", default=theta, source=source)
        if local_theta is not None:
            self.fill("rope_local_base_freq", local.get("rope_theta"))
            self.number("rope_local_base_freq", default=local_theta, source=source)
        scaling = self.get("rope_scaling")
        if scaling is None and wide.get("rope_type", "default") != "default":
            scaling = {key: value for key, value in wide.items() if key != "rope_theta"}
        if scaling is not None and not isinstance(scaling, dict):
            raise self.wrong("rope_scaling", "an object or null")
        if scaling is not None and "rope_type" not in scaling and "type" in scaling:
            scaling = {**scaling, "rope_type": scaling["type"]}
        self.config["rope_scaling"] = scaling
        if scaling is not None:
            self._check_scaling(scaling)

    def _check_scaling(self, scaling: Mapping[str, Any]) -> None:
        """Check what the rotary frequencies are computed from."""
        kind = scaling.get("rope_type")
        if not isinstance(kind, str):
            raise self.wrong("rope_scaling", "an object with a rope_type", shown=f"of rope_type {_short(kind)}")
        for key in _ROPE_NUMBERS:
            value = scaling.get(key)
            if value is not None and not _is_positive(value):
                raise self.wrong(f"rope_scaling.{key}", "a positive number", shown=_short(value))
        for key in _ROPE_LISTS:
            value = scaling.get(key)
            if value is not None and not (isinstance(value, list) and value and all(map(_is_positive, value))):
                raise self.wrong(f"rope_scaling.{key}", "a list of positive numbers", shown=_short(value))

    def missing(self, key: str) -> BadFile:
        """Return the error for a key that must be there."""
        return BadFile(f"{self.name}: {key} is missing; a {self.family} configuration names it", key=key)

    def wrong(self, key: str, expected: str, *, shown: str | None = None) -> BadFile:
        """Return the error for a value that cannot be."""
        value = shown if shown is not None else _short(self.config.get(key))
        return BadFile(f"{self.name}: {key} is {value}; it must be {expected}", key=key)


def _is_positive(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return isfinite(value) and value > 0
    except OverflowError:
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
