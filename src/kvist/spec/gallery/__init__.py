"""Published models by name: what each must remember, restated from its configuration in a schema of our own.

``models.jsonl`` has one model a line, by name. ``config`` holds those of its published keys that a number of a plan
depends on, under Hugging Face's names; ``source`` says who published them and where they were read. The file is
written by ``tools/gallery.py``; its facts are others', its lines are ours.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["GALLERY_FILE", "IMMATERIAL", "GalleryModel", "every_model", "gallery_model", "names"]

GALLERY_FILE = Path(__file__).with_name("models.jsonl")

# Keys on which no byte depends. The gallery leaves them out, and so does not list what readers take for them.
IMMATERIAL = frozenset(
    {"rms_norm_eps", "layer_norm_eps", "norm_eps", "rope_theta", "rope_local_base_freq", "attention_bias", "mlp_bias"}
    | {"hidden_act", "query_pre_attn_scalar", "norm_epsilon", "layer_norm_epsilon", "layernorm_epsilon"}
)


@dataclass(frozen=True, kw_only=True)
class GalleryModel:
    """One published model.

    Attributes:
        name: how kvist calls it: its hub id in lower case, without the organisation.
        hub: ``organisation/name`` on Hugging Face's hub.
        aliases: other names, lower case and without the organisation.
        also: other ids under which it is published.
        like: the model of which it is a tuned or quantised copy, with the same memory; None for the others.
        released: month of its announcement, ``YYYY-MM``; None where it is not known.
        seen: month in which its configuration was read, where its announcement is not known: it is no younger.
        license: of the weights; None where it is not known.
        source: where the configuration was read.
        parameters: number of weights, counted from the configuration; None where its shapes are not known.
        weights_bytes: their bytes as published; None where the type is not known either.
        config: published keys under Hugging Face's names.
    """

    name: str
    hub: str
    aliases: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    like: str | None = None
    released: str | None = None
    seen: str | None = None
    license: str | None = None
    source: str
    parameters: int | None = None
    weights_bytes: int | None = None
    config: Mapping[str, Any] = field(repr=False)

    @property
    def organisation(self) -> str:
        """Who published it."""
        return self.hub.partition("/")[0]

    def is_called(self, name: str) -> bool:
        """Whether ``name``, lower case and with or without an organisation, means this model."""
        organisation, _, plain = name.rpartition("/")
        if not organisation:
            return plain == self.name or plain in self.aliases or plain in self.also
        ids = (self.hub, *self.also)
        if any(name == one.lower() for one in ids):
            return True
        owners = {one.partition("/")[0].lower() for one in ids}
        return organisation in owners and (plain == self.name or plain in self.aliases)


def every_model() -> Iterator[GalleryModel]:
    """All models, by name."""
    for line in _lines():
        yield _model(line)


def names() -> tuple[str, ...]:
    """The names of all models."""
    return tuple(_name_of(line) for line in _lines())


def gallery_model(name: str) -> GalleryModel | None:
    """Return the model of this name; case and organisation are optional, another organisation's is another model."""
    wanted = name.strip().lower()
    plain = f'"{wanted.rpartition("/")[2]}'
    for line in _lines():
        # Most lines cannot be meant, and need not be parsed.
        head = line.partition('"source":')[0].lower()
        if plain in head or f'/{plain[1:]}"' in head:
            model = _model(line)
            if model.is_called(wanted):
                return model
    return None


@cache
def _lines() -> tuple[str, ...]:
    return tuple(GALLERY_FILE.read_text(encoding="utf-8").splitlines())


def _name_of(line: str) -> str:
    return line.split('"', 4)[3]


def _model(line: str) -> GalleryModel:
    entry = json.loads(line)
    return GalleryModel(
        name=entry["name"],
        hub=entry["hub"],
        aliases=tuple(entry.get("aliases", ())),
        also=tuple(entry.get("also", ())),
        like=entry.get("like"),
        released=entry.get("released"),
        seen=entry.get("seen"),
        license=entry.get("license"),
        source=entry["source"],
        parameters=entry.get("parameters"),
        weights_bytes=entry.get("weights"),
        config=entry["config"],
    )
