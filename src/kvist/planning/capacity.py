"""How many sequences a cache holds, by the very arithmetic with which the engine cuts and lends its arena.

The engine and the planner both call :func:`allocated_bytes`; that is why they cannot disagree.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvist.cache.groups import Group
from kvist.cache.layout import ArenaLayout
from kvist.cache.lead_groups import lead_blocks
from kvist.errors import DoesNotFit, InputError
from kvist.planning.cartridge import pinned_blocks
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Cross
from kvist.spec.model import ModelSpec
from kvist.units import counted, format_size

DEFAULT_CHUNK = 1024
"""Most prompt tokens of a step, unless it is said. On CPUs more fill prompts no faster, and whoever decodes beside
them, or hangs up, waits for the step."""

DEVICE_CHUNK = 2048
"""The same on accelerators, which need more tokens to be busy."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a cache of some size holds.

    Attributes:
        cache_bytes: given to the cache.
        cache_tokens: tokens that it holds; with windows, states or an encoder, when they are those of sequences of
            ``context``.
        context: tokens of each sequence.
        block_tokens: of every group, but for those of compressed layers, whose blocks are whole entries.
        layout: how the memory is cut.
        groups: what it is cut for.
        users_slab: sequences when each reserves its longest context in one piece.
        users_paged: sequences of ``context`` that decode at once.
        waste_slab: bytes that ``users_slab`` reserve beyond what ``context`` tokens need.
        waste_paged: bytes in the blocks of ``users_paged`` that hold no token.
        sequence_blocks: blocks of one sequence at ``context`` in each group, one token in flight.
        prefill_chunk: most prompt tokens that the last of them can compute in one step beside the others.
        pinned_blocks: blocks in each group of a cartridge that all of them share.
    """

    cache_bytes: int
    cache_tokens: int
    context: int
    block_tokens: int
    layout: ArenaLayout
    groups: tuple[Group, ...]
    users_slab: int
    users_paged: int
    waste_slab: int
    waste_paged: int
    sequence_blocks: tuple[int, ...]
    prefill_chunk: int
    pinned_blocks: tuple[int, ...] = ()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the blocks of the cartridge."""
        return sum(count * group.block_bytes for count, group in zip(self.pinned_blocks, self.groups, strict=False))

    @property
    def sequence_allocated(self) -> int:
        """Bytes of the blocks of one sequence at ``context`` while it decodes."""
        return sum(count * group.block_bytes for count, group in zip(self.sequence_blocks, self.groups, strict=True))

    def require(self, users: int) -> None:
        """Raise :class:`DoesNotFit`, with the sum, unless ``users`` sequences of ``context`` fit."""
        if users > self.users_paged:
            pinned = self.pinned_blocks or (0,) * len(self.groups)
            counts = [once + users * count for once, count in zip(pinned, self.sequence_blocks, strict=True)]
            needed = self.layout.slabs_for(counts) * self.layout.slab_bytes
            beside = f", {format_size(self.pinned_bytes)} of a cartridge" if self.pinned_bytes else ""
            raise DoesNotFit(
                f"{counted(users, 'user')} x {counted(self.context, 'token')} need {format_size(needed)} of blocks "
                f"({format_size(self.sequence_allocated)} each{beside}); the cache of {format_size(self.cache_bytes)} "
                f"holds {self.users_paged:,}"
            )


def allocated_bytes(groups: Sequence[Group], length: int, in_flight: int = 0, pruned: int = 0, before: int = 0) -> int:
    """Bytes of the blocks that a sequence of ``length`` stored tokens holds while ``in_flight`` more are computed.

    Whole blocks in every group; a window or chunk has given back the blocks that its next query does not see, and a
    state is one block a layer. Groups that are pruned lack ``pruned`` of the tokens. Of what stands ``before`` it, in a
    format of its own, the blocks are counted that it refers to beside others.
    """
    return sum(
        (first + group.live_blocks(length - pruned if group.prunable else length, in_flight)) * group.block_bytes
        for group, first in zip(groups, lead_blocks(groups, before), strict=True)
    )


def capacity_of(
    spec: ModelSpec,
    fmt: CacheFormat,
    groups: tuple[Group, ...],
    *,
    cache_bytes: int,
    context: int,
    chunk: int = DEFAULT_CHUNK,
    cartridge: int = 0,
) -> Capacity:
    """Count what fits into ``cache_bytes``.

    Args:
        spec: whose groups they are.
        fmt: how keys and values are stored.
        groups: as the engine makes them.
        cache_bytes: for the cache alone.
        context: tokens of each sequence, prompt and answer together.
        chunk: most prompt tokens that a step computes.
        cartridge: tokens of a trained cache that is stored once, and behind which all sequences begin.

    Raises:
        DoesNotFit: there is not one slab for each group, or no room for the cartridge.
        InputError: no context, or no chunk, or no cartridge can stand for what the groups keep.
    """
    for key, value in (("context", context), ("chunk", chunk)):
        if value < 1:
            raise InputError(f"{key}: {value} tokens; at least 1", key=key)
    layout = ArenaLayout.of(groups, cache_bytes)
    blocks = tuple(group.peak_blocks(context, 1) for group in groups)
    pinned = pinned_blocks(groups, cartridge)
    if layout.slabs_for(pinned) > layout.num_slabs:
        needed = sum(count * group.block_bytes for count, group in zip(pinned, groups, strict=True))
        raise DoesNotFit(
            f"memory: a cartridge of {counted(cartridge, 'token')} takes {format_size(needed)}, and the cache has "
            f"{format_size(cache_bytes)}"
        )

    def fits(users: int, chunk: int) -> bool:
        """One of them still computes its prompt: only then are there chunks in flight, and one is the least."""
        counts = [
            once + (users - 1) * count + group.peak_blocks(context, chunk)
            for group, count, once in zip(groups, blocks, pinned, strict=True)
        ]
        return layout.slabs_for(counts) <= layout.num_slabs

    block_tokens = min(group.block_tokens for group in groups)
    least_chunk = min(block_tokens, context, chunk)
    most_blocks = layout.num_slabs * max(layout.blocks_per_slab)
    users = most_that_fit(lambda count: fits(count, least_chunk), most_blocks)
    last_chunk = most_that_fit(lambda count: fits(users, count), min(chunk, context)) if users else 0
    encoder = sum(_encoder_bytes(group) for group in groups)
    reserved = spec.sequence_bytes(max(spec.max_context, context), fmt) + encoder
    needed = spec.sequence_bytes(context, fmt) + encoder
    once = sum(count * group.block_bytes for count, group in zip(pinned, groups, strict=True))
    slab_users = (cache_bytes - once) // reserved if reserved else 0
    held = sum(count * group.block_bytes for count, group in zip(blocks, groups, strict=True))
    return Capacity(
        cache_bytes=cache_bytes,
        cache_tokens=_tokens_held(groups, layout, blocks, pinned, context, users),
        context=context,
        block_tokens=block_tokens,
        layout=layout,
        groups=groups,
        users_slab=slab_users,
        users_paged=users,
        waste_slab=slab_users * (reserved - needed),
        waste_paged=users * (held - needed),
        sequence_blocks=blocks,
        prefill_chunk=last_chunk,
        pinned_blocks=pinned,
    )


def tokens_at_fullest(groups: Sequence[Group], layout: ArenaLayout, context: int) -> int:
    """Tokens of the groups that keep all, or of the first where there is none, that the arena holds at its fullest.

    Every other group has what one sequence of ``context`` tokens takes of it.
    """
    full = [index for index, group in enumerate(groups) if group.keeps_all] or [0]
    blocks = [group.peak_blocks(context, 1) for group in groups]

    def fits(tokens: int) -> bool:
        for index in full:
            blocks[index] = -(-tokens // groups[index].block_tokens)
        return layout.slabs_for(blocks) <= layout.num_slabs

    most = min(layout.num_slabs * layout.blocks_per_slab[index] * groups[index].block_tokens for index in full)
    return most_that_fit(fits, most)


def _encoder_bytes(group: Group) -> int:
    """Logical bytes that a sequence keeps of its encoder in a group."""
    match group.layer:
        case Cross(encoder_tokens=int(tokens)):
            return len(group.layers) * tokens * group.layer.cross_bytes_per_encoder_token(group.format)
        case _:
            return 0


def most_that_fit(fits: Callable[[int], bool], limit: int) -> int:
    """Largest n up to ``limit`` that fits, where all smaller ones do too; 0 where none does."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _tokens_held(
    groups: Sequence[Group],
    layout: ArenaLayout,
    blocks: Sequence[int],
    pinned: Sequence[int],
    context: int,
    users: int,
) -> int:
    """Tokens of as many sequences of ``context`` as fit, and of a shorter last one, beside what is pinned.

    Where every layer keeps every token it makes no difference how the tokens are spread over sequences that fill
    their blocks, and the number is that of the whole blocks.
    """
    if all(group.lifetime in ("full", "lead") for group in groups):
        users, limit = 0, layout.num_slabs * max(layout.blocks_per_slab) * min(group.block_tokens for group in groups)
    else:
        limit = context - 1

    def fits(length: int) -> bool:
        counts = [
            once + users * count + group.peak_blocks(length, 1)
            for group, count, once in zip(groups, blocks, pinned, strict=True)
        ]
        return layout.slabs_for(counts) <= layout.num_slabs

    return users * context + most_that_fit(fits, limit)
