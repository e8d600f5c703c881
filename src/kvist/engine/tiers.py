"""Real memory behind the arena: blocks go there as their codes, byte for byte, and come back.

::

    arena ──reclaimed──▶ host: memory of the machine ──evicted──▶ disk: one file, which nobody else sees
          ◀──────────────────────── loaded, before the step that reads it

Which bytes move is decided by :mod:`kvist.cache.tiers`, for the engine as for a simulation; here they are moved.
"""

import os
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from torch import Tensor

from kvist.cache.groups import Group, unit_of
from kvist.cache.places import DEVICE, Transfer
from kvist.cache.tier import Tier
from kvist.engine.machine import machine_memory
from kvist.engine.tier_memory import Disk, Host, Store
from kvist.errors import DoesNotFit, EngineFailure, InputError
from kvist.model_files import cache_dir
from kvist.units import format_size

KINDS = ("host", "disk")


def tiers_of(given: object) -> tuple[Tier, ...]:
    """The tiers that are asked for, the nearest first: ``host=4GiB``, ``disk=20GiB``.

    Raises:
        InputError: one is written otherwise, says a rate, or is neither host nor disk.
    """
    asked = given if isinstance(given, Iterable) and not isinstance(given, str | bytes) else (given,)
    tiers: list[Tier] = []
    for each in asked:
        tier = Tier.parse_real(each) if isinstance(each, str) else each
        if not isinstance(tier, Tier):
            raise InputError(f"tier: {tier!r}; write host=4GiB or disk=20GiB", key="tier")
        tiers.append(tier)
        if tier.name not in KINDS:
            raise InputError(
                f"tier: {tier.name!r} is no memory of this machine; {' or '.join(KINDS)}, such as host=4GiB", key="tier"
            )
    if len({tier.name for tier in tiers}) < len(tiers):
        raise InputError(f"tier: {', '.join(tier.name for tier in tiers)}; each name once", key="tier")
    return tuple(tiers)


def check_tiers(tiers: Seq[Tier], groups: Seq[Group], *, prefixes: bool, directory: str | Path | None) -> None:
    """See that the tiers of an engine are of use, and that each holds a block of the prefix.

    Args:
        tiers: as they are asked for.
        groups: of what is stored.
        prefixes: whether the engine keeps any.
        directory: where the disk's file is to be put, if it is said.

    Raises:
        DoesNotFit: one does not hold a block.
        InputError: there is nothing for them to keep, or no disk for the directory.
    """
    unit = unit_of(groups)
    paged = [group for group in groups if group.fixed_blocks is None and group.lifetime != "tail"]
    least = sum(unit // group.block_tokens * group.block_bytes for group in paged)
    least += sum((group.fixed_blocks or 0) * group.block_bytes for group in groups)
    for tier in tiers:
        if tier.capacity_bytes < least:
            raise DoesNotFit(
                f"tier: {tier.name}={format_size(tier.capacity_bytes)} does not hold one block of {unit} tokens; "
                f"at least {format_size(least)}"
            )
    if tiers and not prefixes:
        raise InputError("tier: it keeps prefixes, and nothing keeps any here; leave it out", key="tier")
    if directory is not None and not any(tier.name == "disk" for tier in tiers):
        raise InputError(
            "tier_directory: there is no tier on a disk; add one, such as disk=20GiB", key="tier_directory"
        )


def _folder(directory: str | Path | None) -> Path:
    if directory is None:
        return cache_dir() / "tiers"
    try:
        if not os.fspath(directory):
            raise ValueError("an empty name")
        return Path(directory).expanduser()
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"tier_directory: {directory!r}: {error}; name one that can be written to", key="tier_directory"
        ) from error


class TierBytes:
    """The bytes of all tiers of one arena.

    Args:
        tiers: what they hold, the nearest first.
        arena_bytes: of the arena before them.
        directory: where the disk's file is put; a folder of the user's cache directory where it is left out.

    Attributes:
        stores: of each tier.
        read: bytes that each has given so far.
        written: bytes that each was given.
        torn: why a move could not be done; what the tiers hold is not to be relied on then, until :meth:`renew`.

    Raises:
        InputError, DoesNotFit: the machine or the directory does not have as much.
        EngineFailure: something else was allocated than was asked for.
    """

    def __init__(self, tiers: Seq[Tier], arena_bytes: int, directory: str | Path | None = None) -> None:
        self.torn: OSError | None = None
        # Where bytes are not, or may not be, what they should.
        self._doubtful: set[int] = set()
        self.stores: list[Store] = []
        self.read = [0] * len(tiers)
        self.written = [0] * len(tiers)
        machine = machine_memory()
        host = sum(tier.capacity_bytes for tier in tiers if tier.name == "host")
        if host and machine is not None and host + arena_bytes > machine:
            raise DoesNotFit(
                f"tier: host={format_size(host)} beside a cache of {format_size(arena_bytes)}; this machine has "
                f"{format_size(machine)} in all"
            )
        place = _folder(directory)
        for tier in tiers:
            size = tier.capacity_bytes
            self.stores.append(Disk(size, place) if tier.name == "disk" else Host(size))
        planned = sum(tier.capacity_bytes for tier in tiers)
        if self.allocated_bytes != planned:
            raise EngineFailure(f"{planned} bytes of tiers were planned, {self.allocated_bytes} allocated")

    @property
    def allocated_bytes(self) -> int:
        """Of all tiers."""
        return sum(store.size for store in self.stores)

    @property
    def lost(self) -> bool:
        """Whether the arena did not get what it was to get; what only a tier did not get is computed again some day."""
        return DEVICE in self._doubtful

    def renew(self) -> None:
        """Nothing that the tiers hold is relied on any more: what was :attr:`torn` is forgotten."""
        self.torn = None
        self._doubtful.clear()
        for store in self.stores:
            store.restore()

    def move(self, transfer: Transfer, arena: Tensor) -> None:
        """Copy bytes between tiers and the arena, uint8 ``[bytes]``; :attr:`torn`, :attr:`lost` tell if that failed."""
        source, target = transfer.source.level, transfer.target.level
        try:
            for start, end, size in transfer.runs():
                # One side at least is memory, which the other reads or writes: of two files there is never more than
                # one.
                if target != DEVICE and (memory := self._memory(source, arena)) is not None:
                    self.stores[target].write(end, memory[start : start + size])
                elif (memory := self._memory(target, arena)) is not None:
                    self.stores[source].read(start, memory[end : end + size])
                if source != DEVICE:
                    self.read[source] += size
                if target != DEVICE:
                    self.written[target] += size
        except OSError as error:
            self.torn = self.torn or error
            self._doubtful.add(target)
        if source in self._doubtful:
            self._doubtful.add(target)

    def _memory(self, level: int, arena: Tensor) -> Tensor | None:
        if level == DEVICE:
            return arena
        store = self.stores[level]
        return store.bytes if isinstance(store, Host) else None

    def snapshot(self, counted: Seq[dict[str, Any]], hit_tokens: Mapping[str, int]) -> list[dict[str, Any]]:
        """What the cache counts of each tier, with what is real of it."""
        return [
            {
                **tier,
                "allocated_bytes": store.size,
                "hit_tokens": hit_tokens.get(tier["name"], 0),
                "read_bytes": read,
                "written_bytes": written,
            }
            for tier, store, read, written in zip(counted, self.stores, self.read, self.written, strict=True)
        ]

    def close(self) -> None:
        """Give everything back; nothing can be moved any more."""
        for store in self.stores:
            store.close()
