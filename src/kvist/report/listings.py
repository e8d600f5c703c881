"""``kvist formats``: codecs as rows, and rows as a table."""

from typing import Any

from kvist.report.tables import Column, print_table
from kvist.spec.formats import CODECS

_UNIT = 32


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
