"""In how many bytes a key or a value is stored.

A :class:`Codec` stores one vector; a :class:`CacheFormat` is the pair that a cache uses. Codecs with a scale
group 32 elements along the head dimension under one f16 scale, the sizes of ggml's q8_0 (34 bytes) and q4_0
(18 bytes).
"""

from dataclasses import dataclass

from kvist.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How one vector is stored.

    Attributes:
        name: as the user writes it.
        bits: of one element.
        group: elements that share one scale; 1 where there is none.
        scale_bytes: bytes of that scale.
    """

    name: str
    bits: int
    group: int = 1
    scale_bytes: int = 0

    def vector_bytes(self, elements: int) -> int:
        """Bytes of one vector of ``elements``.

        Raises:
            InputError: the width is not a whole number of groups or bytes.
        """
        if elements % self.group or elements * self.bits % 8:
            raise InputError(
                f"codec {self.name} stores groups of {self.group} elements; a width of {elements} is not a "
                f"multiple: choose a codec without groups, such as bf16",
                key="format",
            )
        return elements * self.bits // 8 + elements // self.group * self.scale_bytes


CODECS = {
    codec.name: codec
    for codec in (
        Codec(name="f32", bits=32),
        Codec(name="f16", bits=16),
        Codec(name="bf16", bits=16),
        Codec(name="fp8", bits=8),
        Codec(name="int8", bits=8, group=32, scale_bytes=2),
        Codec(name="int4", bits=4, group=32, scale_bytes=2),
    )
}


def codec_named(name: str, *, key: str = "codec") -> Codec:
    """Return the codec of this name.

    Raises:
        InputError: there is none.
    """
    if not isinstance(name, str) or name not in CODECS:
        raise InputError(f"{key}: {name!r} is not a codec; choose one of {', '.join(CODECS)}", key=key)
    return CODECS[name]


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """The codecs in which keys and values are stored, by name."""

    key: str = "bf16"
    value: str = "bf16"

    def __post_init__(self) -> None:
        codec_named(self.key, key="key")
        codec_named(self.value, key="value")

    @property
    def key_codec(self) -> Codec:
        """The codec of the keys."""
        return CODECS[self.key]

    @property
    def value_codec(self) -> Codec:
        """The codec of the values."""
        return CODECS[self.value]

    def __str__(self) -> str:
        return f"{self.key}/{self.value}"


def require_format(fmt: object) -> CacheFormat:
    """Return ``fmt``.

    Raises:
        InputError: it is something else than a :class:`CacheFormat`, such as the name of a codec.
    """
    if isinstance(fmt, CacheFormat):
        return fmt
    example = fmt if isinstance(fmt, str) and fmt in CODECS else "bf16"
    raise InputError(
        f"format: {fmt!r} is not a CacheFormat; write kvist.CacheFormat(key={example!r}, value={example!r})",
        key="format",
    )
