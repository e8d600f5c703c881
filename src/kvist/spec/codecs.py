"""In how many bytes one vector is stored.

Codecs with a scale group 32 elements along the head dimension under one f16 scale, the sizes of ggml's q8_0 (34 bytes),
q4_0 (18 bytes) and, with a minimum beside the scale, q4_1 (20 bytes). What the bytes are is in store/codecs.py.
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
        scale_bytes: bytes of that scale, and of the minimum beside it where the codec is affine.
        affine: whether a group has a minimum, from which its codes count.
        run: tokens, stored together, whose elements of one channel share a scale; 1 where those are of one token.
        stores: what is kept of a group or an element, in a few words.
    """

    name: str
    bits: int
    group: int = 1
    scale_bytes: int = 0
    affine: bool = False
    run: int = 1
    stores: str = ""

    @property
    def rotatable(self) -> bool:
        """Whether a rotation does it good: where outliers cost the others precision, in 8 bits and fewer.

        Not where each channel has scales of its own, which a rotation would only mix.
        """
        return self.bits <= 8 and self.run == 1

    def vector_bytes(self, elements: int, *, key: str = "format") -> int:
        """Bytes of one vector of ``elements``; ``key`` is what an error is about.

        Raises:
            InputError: the width is not a whole number of groups or bytes.
        """
        if elements % self.group or elements * self.bits % 8:
            raise InputError(
                f"{key}: codec {self.name} stores groups of {self.group} elements; a width of {elements} is not a "
                f"multiple: choose a codec without groups, such as bf16",
                key=key,
            )
        return elements * self.bits // 8 + elements // self.group * self.scale_bytes


CODECS = {
    codec.name: codec
    for codec in (
        Codec(name="f32", bits=32, stores="IEEE single"),
        Codec(name="f16", bits=16, stores="IEEE half"),
        Codec(name="bf16", bits=16, stores="the upper half of f32"),
        Codec(name="fp8", bits=8, stores="e4m3, up to 448"),
        Codec(name="int8", bits=8, group=32, scale_bytes=2, stores="-127 … 127 x f16 scale"),
        Codec(name="int4", bits=4, group=32, scale_bytes=2, stores="-8 … 7 x f16 scale"),
        Codec(name="int4a", bits=4, group=32, scale_bytes=4, affine=True, stores="f16 minimum + 0 … 15 x f16 scale"),
    )
}

KEY_CODECS = {
    codec.name: codec
    for codec in (
        Codec(
            name="int4c", bits=4, group=32, scale_bytes=4, affine=True, run=32,
            stores="keys: as int4a, a channel of 32 tokens",
        ),
    )
}  # fmt: skip
"""Codecs of keys alone. Outliers of keys stay in their channels, so that these have scales of their own over a run of
tokens, in the bytes of ``int4a`` (KIVI, arXiv:2402.02750, section 3.2)."""

SINGLE = {"int4c": "int4a"}
"""What tokens are stored in that come one by one, where no run is sealed: as many bytes."""

STATE_CODECS = ("f32", "f16", "bf16")
"""What a recurrent state can be stored in: it is read and written whole at every token, and errors add up in it."""


KEEP_CODECS = ("f32", "f16", "bf16")
"""What kept layers and open tails can be stored in: as an engine computes, or nearly."""


def codec_named(name: str, *, key: str = "codec") -> Codec:
    """Return the codec of this name, for keys and values alike.

    Raises:
        InputError: there is none.
    """
    return _named(name, tuple(CODECS), "a codec", key)


def key_codec_named(name: str, *, key: str = "key") -> Codec:
    """Return the codec of this name, for keys.

    Raises:
        InputError: there is none.
    """
    return _named(name, (*CODECS, *KEY_CODECS), "a codec", key)


def state_codec_named(name: str, *, key: str = "state") -> Codec:
    """Return the codec of this name, for recurrent states.

    Raises:
        InputError: there is none, or states are not stored in it.
    """
    return _named(name, STATE_CODECS, "a codec for recurrent states", key)


def keep_codec_named(name: str, *, key: str = "keep") -> Codec:
    """Return the codec of this name, for kept layers.

    Raises:
        InputError: there is none, or it would keep nothing.
    """
    return _named(name, KEEP_CODECS, "a codec for kept layers", key)


def _named(name: str, known: tuple[str, ...], what: str, key: str) -> Codec:
    if not isinstance(name, str) or name not in known:
        raise InputError(f"{key}: {name!r} is not {what}; choose one of {', '.join(known)}", key=key)
    return (CODECS | KEY_CODECS)[name]
