"""Formats as the options of commands write them, there and back.

::

    --key int8 --value int4 --rotate --keep-layers 2 --layer-format 7=int8/int8 --state bf16 --tail 32
"""

from collections.abc import Iterable

from kvist.errors import InputError
from kvist.spec.formats import CacheFormat, codec_named, keep_codec_named, key_codec_named

_MOST_LAYERS = 10**6


def pair(text: str, *, key: str = "format") -> tuple[str, str]:
    """Read ``int8/int4``, or one codec for keys and values.

    Raises:
        InputError: one of them is no codec.
    """
    first, sign, second = text.partition("/")
    return key_codec_named(first, key=key).name, codec_named(second if sign else first, key=key).name


def layer_format(text: str) -> tuple[int, str]:
    """Read ``7=int8/int4``: the index of a layer, and its codecs as they are written.

    Raises:
        InputError: it is written otherwise, or one of the codecs is none.
    """
    index, sign, codecs = text.partition("=")
    if not sign:
        raise InputError(f"layer_format: {text!r}; write LAYER=KEY/VALUE, such as 0=bf16 or 7=int8/int4")
    pair(codecs, key="layer_format")
    return _whole(index, key="layer_format"), codecs


def kept_layers(text: str) -> tuple[int, str | None]:
    """Read ``2`` or ``2=f32``: layers at either end, and their codec where it is said.

    Raises:
        InputError: it is written otherwise, or kept layers are not stored so.
    """
    count, sign, codec = text.partition("=")
    return _whole(count, key="keep_layers"), keep_codec_named(codec, key="keep_layers").name if sign else None


def format_of(
    *,
    key: str,
    value: str,
    rotate: bool = False,
    keep_layers: tuple[int, str | None] | None = None,
    layer_formats: Iterable[tuple[int, str]] = (),
    state: str | None = None,
    tail: int = 0,
) -> CacheFormat:
    """Make a format of what options say; ``rotate`` is of single layers' formats too.

    Raises:
        InputError: a value is wrong, or a layer is there twice.
    """
    layers: dict[int, CacheFormat] = {}
    for index, codecs in layer_formats:
        if index in layers:
            raise InputError(f"layer_formats: layer {index} is there twice; give it one format", key="layer_formats")
        own_key, own_value = pair(codecs, key="layer_formats")
        layers[index] = CacheFormat(key=own_key, value=own_value, rotate=rotate)
    count, keep = keep_layers or (0, None)
    return CacheFormat(
        key=key,
        value=value,
        rotate=rotate,
        keep_layers=count,
        keep=keep,
        layers=layers,
        state=state,
        tail=tail,
    )


def options_of(fmt: CacheFormat) -> tuple[str, ...]:
    """The options that ask for a format, word by word."""
    words = ["--key", fmt.key, "--value", fmt.value]
    if fmt.rotates:
        words.append("--rotate")
    if fmt.keep_layers or fmt.keep is not None:
        words += ["--keep-layers", f"{fmt.keep_layers}={fmt.keep or 'bf16'}"]
    for index, own in fmt.own.items():
        words += ["--layer-format", f"{index}={own.key}/{own.value}"]
    if fmt.tail:
        words += ["--tail", str(fmt.tail)]
    return (*words, *(("--state", fmt.state) if fmt.state is not None else ()))


def _whole(text: str, *, key: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 7 and int(text) <= _MOST_LAYERS):
        raise InputError(f"{key}: {text!r} is not a whole number of layers, 0 or more", key=key)
    return int(text)
