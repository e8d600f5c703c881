"""What to say of a name that no model has: whose it is, what it may be short for, or what is spelt like it."""

from kvist.errors import UnknownModel
from kvist.spec.gallery import GalleryModel, every_model
from kvist.spec.known import KNOWN

_SHOWN = 8
_NEAREST = 3
_LIKENESS = 0.75


def unknown_model(name: str) -> UnknownModel:
    """The error for a name that no model has; it lists the nearest."""
    shown = repr(name) if len(name) <= 80 else f"{name[:60]!r}…"
    near = _near(name)
    return UnknownModel(f"no model {shown}: neither a file or directory here nor a known name; {near}", key="model")


def _near(name: str) -> str:
    organisation, _, plain = name.strip().lower().rpartition("/")
    models = list(every_model())
    if organisation:
        for owner, own in _owned(models, plain):
            return f"{own} is known of {owner}, not of {organisation}"
    names = [*KNOWN, *(model.name for model in models)]
    short_for = [own for own in names if plain and own.startswith(plain)] or [own for own in names if plain in own]
    if plain and short_for:
        more = f" and {len(short_for) - _SHOWN} more" if len(short_for) > _SHOWN else ""
        what = "it may be short for" if len(short_for) == 1 else "it may be any of"
        return f"{what} {', '.join(short_for[:_SHOWN])}{more}"
    from difflib import get_close_matches

    spelt = {own: own for own in names} | {alias: model.name for model in models for alias in model.aliases}
    near = get_close_matches(plain[:100], spelt, n=_NEAREST, cutoff=_LIKENESS)
    if near:
        return f"nearest: {', '.join(dict.fromkeys(spelt[each] for each in near))}"
    return f"{len(names)} are known: kvist models lists them"


def _owned(models: list[GalleryModel], plain: str) -> list[tuple[str, str]]:
    """Organisations that have a model of this name, and how it is called."""
    known = [
        (each.hubs[0].partition("/")[0], each.name) for each in KNOWN.values() if plain in (each.name, *each.aliases)
    ]
    return known + [(each.organisation, each.name) for each in models if plain in (each.name, *each.aliases)]
