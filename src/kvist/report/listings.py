"""``kvist models`` and ``kvist formats``: lists as rows, and rows as tables."""

from typing import Any

from kvist.report.tables import Column, print_table
from kvist.spec.formats import CODECS, CacheFormat
from kvist.spec.known import KNOWN
from kvist.spec.model import ModelSpec
from kvist.units import format_size

_UNIT = 32


def model_rows() -> list[dict[str, Any]]:
    """One row a known model; costs in bf16."""
    fmt = CacheFormat()
    rows = []
    for name, known in KNOWN.items():
        spec = ModelSpec.read(name)
        rows.append(
            {
                "name": name,
                "parameters": spec.parameters,
                "weights_bytes": spec.weights_bytes,
                "append_bytes_per_token": spec.append_bytes_per_token(fmt),
                "retained_bytes_per_token": spec.retained_bytes_per_token(fmt),
                "max_context": spec.max_context,
                "license": known.license,
                "source": known.source,
            }
        )
    return rows


def print_models() -> int:
    """Print the known models; return exit code 0."""
    print_table(
        (
            Column(title="model", whole=True),
            Column(title="parameters", number=True),
            Column(title="weights", number=True),
            Column(title="append", number=True),
            Column(title="retained", number=True),
            Column(title="context", number=True),
        ),
        [
            (
                row["name"],
                f"{row['parameters'] / 1e6:.1f} M",
                format_size(row["weights_bytes"]),
                format_size(row["append_bytes_per_token"]),
                format_size(row["retained_bytes_per_token"]),
                f"{row['max_context']:,}",
            )
            for row in model_rows()
        ],
    )
    return 0


def format_rows() -> list[dict[str, Any]]:
    """One row a codec."""
    return [
        {
            "name": codec.name,
            "bits": codec.bits,
            "group": codec.group,
            "scale_bytes": codec.scale_bytes,
            f"bytes_per_{_UNIT}": codec.vector_bytes(_UNIT),
        }
        for codec in CODECS.values()
    ]


def print_formats() -> int:
    """Print the codecs; return exit code 0."""
    print_table(
        (
            Column(title="codec", whole=True),
            Column(title="bits", number=True),
            Column(title="bytes per 32 elements", number=True),
            Column(title="scale"),
        ),
        [
            (
                row["name"],
                str(row["bits"]),
                str(row[f"bytes_per_{_UNIT}"]),
                f"{row['scale_bytes']} bytes for each {row['group']} elements" if row["scale_bytes"] else "none",
            )
            for row in format_rows()
        ],
    )
    return 0
