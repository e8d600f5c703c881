"""``kvist formats``: codecs and what was measured of them, as rows and as tables."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvist.report.tables import Column, print_facts, print_table
from kvist.spec.fidelity import Fidelity, measured
from kvist.spec.formats import CODECS, KEY_CODECS, CacheFormat, Codec
from kvist.units import counted

_UNIT = 32
# Whose divergence stands beside each codec.
_MODEL = "smollm2-135m"


def format_rows() -> list[dict[str, Any]]:
    """One row a codec.

    ``kl`` and ``kl_rotated`` are SmolLM2-135M's with keys and values both stored in it; None where not measured.
    """
    found = {
        (entry.key, entry.value, entry.rotate): entry.kl
        for entry in measured()
        if entry.model == _MODEL and not entry.tail
    }
    return [
        {
            "name": codec.name,
            "bits": codec.bits,
            "group": codec.group,
            "scale_bytes": codec.scale_bytes,
            f"bytes_per_{_UNIT}": codec.vector_bytes(_UNIT),
            "bits_per_element": codec.vector_bytes(_UNIT) * 8 / _UNIT,
            "stores": codec.stores,
            "affine": codec.affine,
            "rotatable": codec.rotatable,
            "keys_only": codec.name in KEY_CODECS,
            "kl": found.get((codec.name, codec.name, False)),
            "kl_rotated": found.get((codec.name, codec.name, True)),
        }
        for codec in (CODECS | KEY_CODECS).values()
    ]


def fidelity_rows() -> list[dict[str, Any]]:
    """All that was measured, of any model."""
    return [asdict(entry) for entry in measured()]


def print_formats() -> int:
    """Print the codecs; return exit code 0."""
    print_table(
        (
            Column(title="codec", whole=True),
            Column(title="bytes/32", number=True),
            Column(title="bits", number=True),
            Column(title="stores", whole=True),
            Column(title="turned", whole=True),
        ),
        [
            (
                codec.name,
                str(codec.vector_bytes(_UNIT)),
                f"{codec.vector_bytes(_UNIT) * 8 / _UNIT:g}",
                _stores(codec),
                "yes" if codec.rotatable else "",
            )
            for codec in (CODECS | KEY_CODECS).values()
        ],
    )
    print_facts(
        [
            ("bytes/32", "of 32 elements, scales included; bits: of an element, likewise"),
            ("turned", "with --rotate: by a Hadamard matrix over each head, which spreads outliers"),
            ("int4c", "is sealed 32 tokens at a time, as computed until then: --tail"),
            ("+32", "a tail of 32 tokens as computed"),
            ("latents", "in the key codec; in fp8 their rotary elements are in bf16"),
        ]
    )
    for model in dict.fromkeys(entry.model for entry in measured()):
        _print_measured(model, [entry for entry in measured() if entry.model == model])
    return 0


def _stores(codec: Codec) -> str:
    return f"{codec.stores} of {codec.group}" if codec.scale_bytes and codec.run == 1 else codec.stores


def _print_measured(model: str, found: Sequence[Fidelity]) -> None:
    """A line a pair of codecs, the largest first, with and without rotation."""
    by_format = {(entry.key, entry.value, entry.tail, entry.rotate): entry for entry in found}
    kinds = list(dict.fromkeys((entry.key, entry.value, entry.tail) for entry in found))
    kinds.sort(key=lambda kind: -_pair_bytes(*kind[:2]))
    tokens = " and ".join(counted(count, "token") for count in sorted({entry.tokens for entry in found}))

    def cells(kind: tuple[str, str, int], rotate: bool) -> tuple[str, str, str]:
        entry = by_format.get((*kind, rotate))
        if entry is None:
            return "", "", ""
        ratio = f"{(entry.perplexity_ratio - 1) * 100:+.2f} %"
        return f"{entry.kl:.2g}", ratio, f"{entry.top1_agreement * 100:.1f} %"

    print_table(
        (
            Column(title="keys/values", whole=True),
            Column(title="bytes", number=True),
            Column(title="KL", number=True),
            Column(title="ppl", number=True),
            Column(title="top-1", number=True),
            Column(title="KL turned", number=True),
            Column(title="ppl", number=True),
        ),
        [
            (
                "/".join(kind[:2]) + (f"+{kind[2]}" if kind[2] else ""),
                str(_pair_bytes(*kind[:2])),
                *cells(kind, False),
                *cells(kind, True)[:2],
            )
            for kind in kinds
        ],
        title=f"Measured: {model}, {tokens}, against an unquantised cache",
    )


def _pair_bytes(key: str, value: str) -> int:
    """Of 32 elements of a key and of a value."""
    fmt = CacheFormat(key=key, value=value)
    return fmt.key_bytes(_UNIT) + fmt.value_bytes(_UNIT)
