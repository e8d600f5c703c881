"""How vLLM gathers layers into groups that draw their blocks from one pool, and what one block of that pool takes.

A block id belongs to one group at a time, and holds one page of each of the group's layers. All groups must take the
same bytes, so pages are made equal first, and groups equally long; what a shorter group leaves is padding.

Source: ``get_kv_cache_groups`` and what it calls in ``vllm/v1/core/kv_cache_utils.py`` of 0.32, for layouts with layers
outermost, which all backends but DeepSeek-V4's prefer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvist.errors import InputError
from kvist.planning.engines.vllm_page import Page


@dataclass(frozen=True, kw_only=True)
class PageGroup:
    """Layers that share block tables.

    Attributes:
        members: index of the layer and its page, first to last.
    """

    members: tuple[tuple[int, Page], ...]

    @property
    def page(self) -> Page:
        """The page that all members have; of different pages the first."""
        return self.members[0][1]

    def bytes(self, layers: range | None = None) -> int:
        """Bytes of one block in all members, or in those of ``layers`` (a rank's)."""
        return sum(page.bytes for index, page in self.members if layers is None or index in layers)

    def blocks(self, length: int, in_flight: int) -> int:
        """Blocks that vLLM counts for one sequence."""
        return max(page.blocks(length, in_flight) for _, page in self.members)

    @property
    def name(self) -> str:
        """Its kind, and what limits it."""
        page = self.page
        return page.kind if page.limit is None or page.kind == "cross" else f"{page.kind}-{page.limit}"


def group_pages(pages: Sequence[tuple[int, Page]]) -> tuple[PageGroup, ...]:
    """Gather the pages of all layers into groups.

    Raises:
        InputError: vLLM finds no common size for them.
    """
    if not pages:
        return ()
    if _same_slots([page for _, page in pages]):
        return (PageGroup(members=tuple(pages)),)
    try:
        return _equal_groups(_equal_pages(pages))
    except InputError:
        promoted = _without_windows(pages)
        if promoted is None:
            raise
        return (PageGroup(members=tuple(promoted)),)


def _same_slots(pages: Sequence[Page]) -> bool:
    """Whether all layers always need the same blocks, whatever their pages (``UniformTypeKVCacheSpecs``)."""
    first = pages[0]
    if any((page.kind, page.block_tokens) != (first.kind, first.block_tokens) for page in pages):
        return False
    if first.kind == "state":
        return all((page.bytes, page.state_blocks) == (first.bytes, first.state_blocks) for page in pages)
    return all(page.limit == first.limit for page in pages)


def _equal_pages(pages: Sequence[tuple[int, Page]]) -> list[tuple[int, Page]]:
    """Make all pages as large as the largest (``unify_kv_cache_spec_page_size``).

    By longer blocks where they divide it, else by padding, which a latent page does not take.
    """
    largest = max(page.bytes for _, page in pages)
    return [(index, _enlarged(page, largest)) for index, page in pages]


def _enlarged(page: Page, largest: int) -> Page:
    if page.bytes == largest:
        return page
    if page.kind == "state":
        return replace(page, padded_bytes=largest)
    if largest % page.bytes == 0:
        return replace(page, block_tokens=page.block_tokens * (largest // page.bytes))
    if page.latent:
        raise InputError(
            f"engine: pages of {page.bytes} and {largest} bytes have no common size in vLLM, and latent pages cannot "
            f"be padded; another block_size may divide them",
            key="engine",
        )
    return replace(page, padded_bytes=largest)


def _without_windows(pages: Sequence[tuple[int, Page]]) -> list[tuple[int, Page]] | None:
    """Latent pages beside windows of no common size: windows are kept whole, if that makes all alike.

    Source: ``_try_get_full_allocation_fallback_groups``.
    """
    kinds = {(page.kind, page.latent) for _, page in pages}
    if not {("full", True), ("window", False)} <= kinds or kinds & {("window", True), ("chunk", False)}:
        return None
    tokens = {page.block_tokens for _, page in pages if page.kind == "full"}
    promoted = [
        (
            index,
            replace(page, kind="full", limit=None, block_tokens=min(tokens) if len(tokens) == 1 else page.block_tokens)
            if page.kind == "window"
            else page,
        )
        for index, page in pages
    ]
    return promoted if _same_slots([page for _, page in promoted]) else None


def _equal_groups(pages: Iterable[tuple[int, Page]]) -> tuple[PageGroup, ...]:
    """Equal layers in groups of one size (``_get_kv_cache_groups_uniform_page_size``).

    The size is that of the rarest kind of layer; where the commonest is less than 1.5 times as common, its own. A kind
    that needs several groups deals its layers out in turn.
    """
    buckets: dict[Page, list[tuple[int, Page]]] = {}
    for member in pages:
        buckets.setdefault(member[1], []).append(member)
    counts = [len(members) for members in buckets.values()]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    groups: list[PageGroup] = []
    for members in buckets.values():
        count = -(-len(members) // size)
        groups.extend(PageGroup(members=tuple(members[first::count])) for first in range(count))
    return tuple(groups)


def padding_layers(groups: Sequence[PageGroup]) -> int:
    """Places in groups that no layer fills."""
    longest = max((len(group.members) for group in groups), default=0)
    return sum(longest - len(group.members) for group in groups)


def stages(layers: int, ranks: int) -> tuple[range, ...]:
    """The layers of each rank of a pipeline; what is left over goes to ranks before the last (``get_pp_indices``)."""
    counts = [layers // ranks] * ranks
    for place in range(2, layers % ranks + 2):
        counts[-place] += 1
    starts = [sum(counts[:rank]) for rank in range(ranks)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))
