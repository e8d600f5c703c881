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
    that were taken, ``asked`` the keys that were looked at. ``part`` says that it is a part of a larger file: these
    print what differs from the defaults of their class and nothing else, where a whole file prints all it has.
    ``origin`` says where the class is.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        name: str,
        overrides: Mapping[str, Any] | None = None,
        part: bool = False,
    ) -> None:
        self.overrides = overrides or {}
        self.config: dict[str, Any] = {**config, **self.overrides}
        self.name = name
        self.part = part
        self.origin = "in transformers"
        self.assumed: list[Assumption] = []
        self.asked: set[str] = set()
        self._printed_as: dict[str, str] = {}

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

    def settle(self, key: str, value: Any) -> None:
        """Write what follows from other keys, unless it was overridden."""
        if key not in self.overrides:
            self.config[key] = value

    def section(self, key: str) -> "ConfigKeys":
        """Return an object of the configuration as keys of their own; empty where it is left out or null.

        Overrides name the keys of the configuration itself, and so do not reach inside.
        """
        part = self.get(key)
        if part is not None and not isinstance(part, dict):
            raise self.wrong(key, "an object")
        inner = ConfigKeys({**(part or {}), "model_type": self.family}, name=f"{self.name}: {key}")
        inner.assumed = self.assumed
        return inner

    def note(self, key: str, value: Any, source: str) -> None:
        """List that ``value`` is taken for ``key``."""
        self.assumed.append(Assumption(key=key, value=value, source=source))

    def rename(self, names: Mapping[str, tuple[str, ...]]) -> None:
        """Bring a family's own names of keys to Hugging Face's: ``{"num_hidden_layers": ("n_layer",)}``.

        Raises:
            BadFile: two names of one key have different values.
        """
        for standard, own in names.items():
            given = [name for name in (*own, standard) if self.get(name) is not None]
            forced = [name for name in given if name in self.overrides]
            taken = (forced or given or [standard])[0]
            for name in [] if forced else given:
                if self.config[name] != self.config[taken]:
                    raise self.wrong(name, f"as {taken} says ({_short(self.config[taken])})")
            self._printed_as[standard] = taken if given else own[0]
            if given:
                self.config[standard] = self.config[taken]

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

    def each(self, key: str, layers: int, *, least: int = 1) -> list[int]:
        """Return a list of whole numbers of at least ``least``, one a layer.

        Raises:
            BadFile: of another length, or with other values.
        """
        values = self.listed(key, layers)
        for index, value in enumerate(values):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
                raise self.wrong(f"{key}[{index}]", f"a whole number from {least} to {_MOST}", shown=_short(value))
        return values

    def listed(self, key: str, layers: int) -> list[Any]:
        """Return a list with one entry a layer."""
        values = self.get(key)
        if values is None:
            raise self.missing(key)
        if not isinstance(values, list) or len(values) != layers:
            found = len(values) if isinstance(values, list) else _short(values)
            raise self.wrong(key, f"one entry for each of the {layers} layers", shown=f"of length {found}")
        return values

    def named(self, key: str, meanings: Mapping[Any, Any], *, default: Any) -> Any:
        """Return what the value means, of the few that it may have.

        Raises:
            UnsupportedModel: it has another.
        """
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, (str, int)) or value not in meanings:
            raise self.unread(key, f"supported are {', '.join(map(str, meanings))}")
        return meanings[value]

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

    def nested(self, key: str, *, model_type: str, only: bool = True) -> "ConfigKeys":
        """Return the part of a multimodal configuration that describes its text model.

        What only the outer level says (special tokens, tied embeddings, the stored type) goes along.

        Args:
            key: of the part.
            model_type: of the part, where it does not say.
            only: whether no other is read there.
        """
        part = self.get(key)
        if not isinstance(part, dict):
            raise self.missing(key) if part is None else self.wrong(key, "an object")
        found = part.get("model_type") or model_type
        if only and found != model_type:
            raise UnsupportedModel(
                f"{self.name}: {key}.model_type is {found!r}; {model_type} was expected", key=f"{key}.model_type"
            )
        outer = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "torch_dtype", "dtype")
        beside = ("quantization_config", "vision_config", "audio_config")  # what weights come beside the text model's
        carried = {name: self.config[name] for name in (*outer, *beside) if name in self.config}
        return self._inside(carried | part | {"model_type": found}, name=f"{self.name}: {key}", part=True)

    def flat(self, *, model_type: str) -> "ConfigKeys":
        """Return the same keys as those of the text model, for files that print it at the outer level."""
        return self._inside({**self.config, "model_type": model_type}, name=self.name, part=False)

    def _inside(self, config: Mapping[str, Any], *, name: str, part: bool) -> "ConfigKeys":
        overrides = {name: value for name, value in self.overrides.items() if name != "model_type"}
        inner = ConfigKeys(config, name=name, overrides=overrides, part=part)
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
        nested = "full_attention" in wide or "sliding_attention" in wide
        if nested:
            local, wide = wide.get("sliding_attention") or {}, wide.get("full_attention") or {}
        if not isinstance(wide, dict) or not isinstance(local, dict):
            raise self.wrong("rope_parameters", "an object of objects")
        if not self.get("rope_scaling"):
            wide = self._settle_theta("rope_theta", wide)
        local = self._settle_theta("rope_local_base_freq", local)
        if nested:
            kinds = {"full_attention": wide, "sliding_attention": local}
            self.config["rope_parameters"] = {
                **(parameters or {}),
                **{kind: said for kind, said in kinds.items() if said},
            }
        elif parameters is not None:
            self.config["rope_parameters"] = wide
        self.number("rope_theta", default=theta, source=source)
        if local_theta is not None:
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

    def _settle_theta(self, key: str, inner: dict[str, Any]) -> dict[str, Any]:
        """Let the base inside ``rope_parameters`` count above ``key`` beside it, as in transformers.

        Returns:
            ``inner``, with what was overridden in its place.
        """
        if inner.get("rope_theta") is None:
            return inner
        if key in self.overrides:
            return {**inner, "rope_theta": self.config[key]}
        self.config[key] = inner["rope_theta"]
        return inner

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
        shown = self._printed_as.get(key, key)
        return BadFile(f"{self.name}: {shown} is missing; a {self.family} configuration names it", key=shown)

    def unread(self, key: str, remedy: str) -> UnsupportedModel:
        """Return the error for a value that cannot be read exactly."""
        return UnsupportedModel(f"{self.name}: {key} is {_short(self.config.get(key))}; {remedy}", key=key)

    def wrong(self, key: str, expected: str, *, shown: str | None = None) -> BadFile:
        """Return the error for a value that cannot be."""
        value = shown if shown is not None else _short(self.config.get(key))
        key = self._printed_as.get(key, key)
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
