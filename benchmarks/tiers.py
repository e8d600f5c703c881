"""What a prefix of 4,000 tokens costs that the cache had to give up: computed again, or brought back from a tier.

    python benchmarks/tiers.py --json tiers.json

SmolLM2, in bf16. A prompt of 4,032 tokens, whose first 4,000 are everybody's and whose last 32 are new each time, is
answered with one token. *in the cache* has the prefix in the arena; in the other rows an arena for little more than one
request has given it up to another prompt of the same length, and it is computed again, or lies in a tier on the host or
on a disk. Seconds are from the submission to the first token, the least of the rounds and the median. A file that was
just written is in the system's memory, so that there are two rows of a disk: as it comes, and after its pages were
dropped (`posix_fadvise`), so that the device itself is read. Rows take turns in every round. In each the first token is
held against that of *in the cache*.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from serving import machine

from kvist.cache.grouping import groups_of
from kvist.engine.engine import Engine
from kvist.engine.tier_memory import Disk
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.units import format_size

PREFIX, QUESTION = 4000, 32
TIER = {"host": ("host=1GiB",), "disk": ("disk=1GiB",), "disk, dropped": ("disk=1GiB",)}


@dataclass(kw_only=True)
class Row:
    """How a prefix was had; seconds to the first token of each round."""

    where: str
    engine: Engine
    ttft: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    tier_hit_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    read_bytes: int = 0


def rows_of(fmt: CacheFormat, directory: str) -> list[Row]:
    """An engine a row: one with room for everything, the others with room for one request."""
    spec = ModelSpec.read("smollm2-135m")
    little = sum(group.all_blocks(PREFIX + QUESTION) * group.block_bytes for group in groups_of(spec, fmt))
    settings = {"format": fmt, "max_context": PREFIX + QUESTION + 64, "dtype": "bf16"}
    rows = [
        Row(where="in the cache", engine=Engine("smollm2-135m", memory=4 * little, **settings)),
        Row(where="computed again", engine=Engine("smollm2-135m", memory=little, **settings)),
    ]
    for where, tiers in TIER.items():
        place = directory if where != "host" else None
        rows.append(
            Row(
                where=where,
                engine=Engine("smollm2-135m", memory=little, tiers=tiers, tier_directory=place, **settings),
            )
        )
    return rows


def measure(row: Row, prefix: list[int], other: list[int], question: list[int]) -> None:
    """One round: the prefix is there or was given up, and a question follows it."""
    engine = row.engine
    if row.where != "in the cache":
        engine.generate([other], max_tokens=1, temperature=0)
    if row.where == "disk, dropped":
        for store in engine.runner.tiers.stores:
            assert isinstance(store, Disk)
            os.fsync(store.file)
            os.posix_fadvise(store.file, 0, 0, os.POSIX_FADV_DONTNEED)
    tiers = engine.runner.tiers
    before = sum(tiers.read) if tiers else 0
    (answer,) = engine.generate([[*prefix, *question]], max_tokens=1, temperature=0)
    row.ttft.append(answer.timing["ttft"])
    row.hit_tokens = answer.account["prefix_hit_tokens"]
    row.tier_hit_tokens = answer.account["tier_hit_tokens"]
    row.tokens.append(answer.tokens[0])
    row.read_bytes = sum(tiers.read) - before if tiers else 0
    expected = 0 if row.where == "computed again" else PREFIX
    assert row.hit_tokens == expected, f"{row.where}: {row.hit_tokens} tokens were found"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--key", default="bf16")
    parser.add_argument("--value", default="bf16")
    parser.add_argument("--directory", help="of the disk's file (a temporary one)")
    parser.add_argument("--json", metavar="FILE", help="all numbers")
    args = parser.parse_args()
    rng = np.random.default_rng(7)

    def draw(count: int) -> list[int]:
        drawn: list[int] = rng.integers(1000, 40000, count).tolist()
        return drawn

    with tempfile.TemporaryDirectory() as temporary:
        rows = rows_of(CacheFormat(key=args.key, value=args.value), args.directory or temporary)
        prefix, other = draw(PREFIX), draw(PREFIX + QUESTION)
        for row in rows:
            row.engine.generate([prefix + draw(QUESTION)], max_tokens=1, temperature=0)
        for _ in range(args.rounds):
            question = draw(QUESTION)
            for row in rows:
                measure(row, prefix, other, question)
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores; cache {args.key}/{args.value}, {args.rounds} rounds")
    print(f"{'prefix':<16}{'least s':>9}{'median s':>10}{'from a tier':>13}{'read':>12}  same first token")
    for row in rows:
        same = "yes" if row.tokens == rows[0].tokens else f"{row.tokens} beside {rows[0].tokens}"
        print(
            f"{row.where:<16}{min(row.ttft):>9.3f}{statistics.median(row.ttft):>10.3f}{row.tier_hit_tokens:>13,}"
            f"{format_size(row.read_bytes):>12}  {same}"
        )
    if args.json:
        content = [{key: value for key, value in vars(row).items() if key != "engine"} for row in rows]
        Path(args.json).write_text(json.dumps({"rows": content, "machine": machine()}, indent=1))


if __name__ == "__main__":
    main()
