"""How memory is given to sequences: the policies that are set side by side.

All of them are the engine's own scheduler and cache. A slab allocator, which reserves the longest sequence in one
piece, is a paged one whose blocks are as long as that.
"""

from dataclasses import dataclass

from kvist.cache.grouping import DEFAULT_BLOCK_TOKENS
from kvist.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A way to give memory to sequences.

    Attributes:
        name: as users ask for it.
        one_block: a block is as long as the longest sequence, and each sequence has one.
        prefix_cache: blocks are shared, and kept for prompts that begin alike.
        summary: what it is, in a line.
    """

    name: str
    one_block: bool
    prefix_cache: bool
    summary: str

    def block_tokens(self, block_tokens: int | None) -> int:
        """Tokens of a block, where it is not as long as the longest sequence."""
        return block_tokens or DEFAULT_BLOCK_TOKENS


POLICIES = {
    "slab": Policy(name="slab", one_block=True, prefix_cache=False, summary="the longest sequence, reserved at once"),
    "paged": Policy(name="paged", one_block=False, prefix_cache=False, summary="blocks as tokens come"),
    "prefix": Policy(name="prefix", one_block=False, prefix_cache=True, summary="blocks, shared by equal prefixes"),
}


def policy_named(name: str) -> Policy:
    """Look a policy up.

    Raises:
        InputError: there is none of that name.
    """
    policy = POLICIES.get(name.casefold())
    if policy is None:
        raise InputError(f"policy: {name!r} is none; choose one of {', '.join(POLICIES)}", key="policy")
    return policy
