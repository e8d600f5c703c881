"""The gallery priced: a row a model, filtered, sorted and set side by side."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvist.errors import InputError
from kvist.planning.kinds import KINDS, kind_of
from kvist.spec.formats import CacheFormat
from kvist.spec.gallery import GalleryModel, every_model, gallery_model
from kvist.spec.known import KNOWN, KnownModel, find_known
from kvist.spec.model import ModelSpec
from kvist.spec.rates import rate_in_json
from kvist.spec.read import read_gallery, read_model

# Lengths at which models are compared.
LENGTHS = (8192, 32768, 131072)


@dataclass(frozen=True, kw_only=True)
class Listing:
    """A model and who published it.

    Attributes:
        spec: what it must remember.
        hub: ``organisation/name``; None for a file.
        aliases: other names that mean it.
        like: the model of which it is a copy with the same memory.
        released: ``YYYY-MM``.
        seen: month in which it was there, where its release is not known.
        license: of the weights.
    """

    spec: ModelSpec
    hub: str | None = None
    aliases: tuple[str, ...] = ()
    like: str | None = None
    released: str | None = None
    seen: str | None = None
    license: str | None = None

    @property
    def kind(self) -> str:
        """What kind of memory it has, one of :data:`kvist.planning.kinds.KINDS`."""
        return kind_of(self.spec)

    def has(self, word: str) -> bool:
        """Whether a word is part of a name of it, or is its kind."""
        word = word.lower()
        names = (self.spec.name, self.hub or "", *self.aliases)
        return word == self.kind.lower() or any(word in name.lower() for name in names)

    def to_dict(self, fmt: CacheFormat, lengths: Iterable[int] = LENGTHS) -> dict[str, Any]:
        """A row of ``kvist models --json``: bytes, tokens; logical, in ``fmt``."""
        spec = self.spec
        return {
            "name": spec.name,
            "hub": self.hub,
            "aliases": list(self.aliases),
            "like": self.like,
            "released": self.released,
            "seen": self.seen,
            "license": self.license,
            "kind": self.kind,
            "parameters": spec.parameters,
            "weights_bytes": spec.weights_bytes,
            "layers": len(spec.layers),
            "append_bytes_per_token": rate_in_json(spec.append_bytes_per_token(fmt)),
            "retained_bytes_per_token": rate_in_json(spec.retained_bytes_per_token(fmt)),
            "indexer_bytes_per_token": rate_in_json(spec.indexer_bytes_per_token(fmt)),
            "state_bytes": spec.state_bytes(fmt),
            "cross_bytes_per_encoder_token": spec.cross_bytes_per_encoder_token(fmt),
            "sequence_bytes": {str(tokens): spec.sequence_bytes(tokens, fmt) for tokens in lengths},
            "max_context": spec.max_context,
            "exact": spec.exact,
            "assumed": [{"key": a.key, "value": a.value, "source": a.source} for a in spec.assumed],
            "source": spec.source,
        }


# By what a list can be sorted; what is not known comes last.
SORTS: Mapping[str, str] = {
    "name": "by name",
    "released": "oldest first",
    "append": "bytes of a token while every layer grows",
    "retained": "bytes of a token once windows are full",
    "state": "bytes whatever the length",
    "parameters": "smallest first",
    "context": "longest sequence",
}


def listings(words: Sequence[str] = (), *, kind: str | None = None, sort: str = "name") -> list[Listing]:
    """The gallery, and the models that wheels carry: those with every word, of the kind, sorted.

    Args:
        words: parts of names, or kinds.
        kind: one of :data:`kvist.planning.kinds.KINDS`, in any case.
        sort: one of :data:`SORTS`.

    Raises:
        InputError: no such kind or order, or no model fits; says what would.
    """
    if sort not in SORTS:
        raise InputError(f"sort: {sort!r} is no order; choose one of {', '.join(SORTS)}", key="sort")
    wanted = None if kind is None else kind_named(kind)
    every = [*map(_of_wheel, KNOWN.values()), *map(_of_gallery, every_model())]
    found = [
        each for each in every if (wanted is None or each.kind == wanted) and all(each.has(word) for word in words)
    ]
    if not found:
        what = " ".join([*words, *([f"of kind {wanted}"] if wanted else [])])
        raise InputError(f"words: none of {len(every)} models is called {what}; kvist models lists them", key="words")
    fmt = CacheFormat()
    return sorted(found, key=lambda each: _order(each, sort, fmt))


def storable(found: Iterable[Listing], fmt: CacheFormat) -> tuple[list[Listing], dict[str, str]]:
    """The models that can be stored so, and why others cannot, by name: widths that are no whole groups, few layers."""
    kept, refused = [], {}
    for each in found:
        try:
            each.spec.sequence_bytes(0, fmt)
            each.spec.cross_bytes_per_encoder_token(fmt)
            each.spec.append_bytes_per_token(fmt)
        except InputError as error:
            refused[each.spec.name] = str(error)
        else:
            kept.append(each)
    return kept, refused


def kind_named(name: str) -> str:
    """The kind of this name, in any case.

    Raises:
        InputError: there is none.
    """
    for kind in KINDS:
        if kind.lower() == name.lower():
            return kind
    raise InputError(f"kind: {name!r} is no kind; choose one of {', '.join(KINDS)}", key="kind")


def _order(each: Listing, sort: str, fmt: CacheFormat) -> tuple[bool, str | int | Fraction, str]:
    spec = each.spec
    value: str | int | Fraction | None
    match sort:
        case "released":
            value = each.released or each.seen
        case "append":
            value = spec.append_bytes_per_token(fmt)
        case "retained":
            value = spec.retained_bytes_per_token(fmt)
        case "state":
            value = spec.state_bytes(fmt)
        case "parameters":
            value = spec.parameters
        case "context":
            value = spec.max_context
        case _:
            value = spec.name
    return value is None, "" if value is None else value, spec.name


def listed(model: str, *, assume: Mapping[str, Any] | None = None) -> Listing:
    """One model by whatever names it; of a file only what it must remember is known.

    Raises:
        UnknownModel, UnsupportedModel, BadFile, InputError: as :func:`kvist.spec.read.read_model`.
    """
    spec = read_model(model, assume=assume)
    if spec.path is None:
        known = find_known(model)
        if known is not None:
            return _of_wheel(known, spec)
        entry = gallery_model(model)
        if entry is not None and spec.name == entry.name:
            return _of_gallery(entry, spec)
    return Listing(spec=spec)


def _of_wheel(model: KnownModel, spec: ModelSpec | None = None) -> Listing:
    return Listing(
        spec=spec or read_model(model.name),
        hub=model.hubs[0],
        aliases=model.aliases,
        released=model.released,
        license=model.license,
    )


def _of_gallery(model: GalleryModel, spec: ModelSpec | None = None) -> Listing:
    return Listing(
        spec=spec or read_gallery(model),
        hub=model.hub,
        aliases=model.aliases,
        like=model.like,
        released=model.released,
        seen=model.seen,
        license=model.license,
    )
