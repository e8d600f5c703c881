"""Which tokens a pruned sequence keeps: how much attention each key has drawn, and what a method makes of that.

Compiled attention adds it up on its way where it is asked to (``draws`` of its memory), a tile of queries at a time.
Elsewhere, and of single queries, weights are made again, of the queries that a method looks at and the keys as they are
stored: a tile of queries against all keys before them, so that memory grows with the length and never with its square::

    column sum of key j  =  sum over queries i >= j of  exp(score(i, j) - log-sum-exp of i's scores)

summed over the query heads that share a KV head, and apart for each KV head, layer and sequence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.kernels.attention import PagedMemory
from kvist.kernels.dense import Scores
from kvist.kernels.paged import PagedAttention, PagedPlan
from kvist.kernels.spans import Span
from kvist.store.layouts import Index, Scratch
from kvist.store.survivors import Keys

# Weights that are held at a time.
_TILE_BYTES = 2 * 2**20
# Neighbours of a key whose sums count for it: the kernel size of SnapKV's own code.
_POOLED = 7


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What a method chooses by.

    Attributes:
        sums: float32 ``[layers, kv_heads, slots]``: column sums so far.
        ages: float32, broadcast to the same: observed queries that could see each key, itself included.
        recent: newest slots, which are kept whatever their scores.
    """

    sums: Tensor
    ages: Tensor
    recent: int


def h2o(seen: Observed) -> Tensor:
    """Heavy hitters: the mean weight that a key drew from the queries that could see it (arXiv:2306.14048).

    The paper adds weights up; divided by how many there were, an old key has no advantage of its age.
    """
    return seen.sums / seen.ages.clamp(min=1)


def h2o_sum(seen: Observed) -> Tensor:
    """Heavy hitters as the paper has them: all the weight that a key drew."""
    return seen.sums


def snapkv(seen: Observed) -> Tensor:
    """What the last queries of a prompt weigh, averaged over neighbours: words stay whole (arXiv:2404.14469)."""
    before = seen.sums.shape[-1] - seen.recent
    pooled = F.avg_pool1d(seen.sums[..., :before], _POOLED, 1, _POOLED // 2, count_include_pad=False)
    return F.pad(pooled, (0, seen.recent))


def streaming(seen: Observed) -> Tensor:
    """The newest tokens, whatever they are (arXiv:2309.17453)."""
    return torch.arange(seen.sums.shape[-1], dtype=torch.float32).expand(seen.sums.shape)


SCORES: Mapping[str, Callable[[Observed], Tensor]] = {
    "h2o": h2o,
    "h2o-sum": h2o_sum,
    "snapkv": snapkv,
    "streaming": streaming,
}
"""A method's scores, ``[layers, kv_heads, slots]``: of the slots that nothing protects the largest are kept."""


def select(method: str, seen: Observed, *, keep: int, sinks: int) -> Tensor:
    """Choose the slots that are kept, of each layer and head as many.

    Args:
        method: one of :data:`SCORES`.
        seen: what it chooses by.
        keep: slots that are kept; fewer than there are.
        sinks: first slots, which are kept whatever their scores.

    Returns:
        int64 ``[layers, kv_heads, keep]``, ascending.
    """
    scores = SCORES[method](seen).clone()
    slots = scores.shape[-1]
    scores[..., :sinks] = torch.inf
    scores[..., slots - seen.recent :] = torch.inf
    return scores.topk(keep, dim=-1, sorted=False).indices.sort(dim=-1).values


class Weighing:
    """What the last queries of a sequence weigh its keys, which are stored already; to be added up layer by layer.

    Args:
        memory: of the group.
        table: block ids of the sequence.
        slots: keys up to that of the last query.
        queries: how many there are.
        sums: float32 ``[layers, kv_heads, room]``, to which is added.
        dtype: of the queries.
    """

    def __init__(
        self, memory: PagedAttention | PagedMemory, table: Index, slots: int, queries: int, sums: Tensor,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.memory = memory
        self.sums = sums
        self.plan: PagedPlan | None = None
        if isinstance(memory, PagedAttention) and memory.draws:
            self.plan = memory.plan([Span(table=table, start=slots - queries, count=queries, drawn=sums)])
        else:
            self.keys = Keys(memory.store, table, slots, dtype)

    def add(self, slot: int, q: Tensor, sinks: Tensor | None) -> None:
        """Add what a layer's queries ``[queries, repeats, kv_heads, dim]`` weigh; ``sinks`` are the layer's."""
        if self.plan is not None:
            self.plan.weigh(slot, q)
            return
        keys = self.keys.read(slot)
        found = column_sums(q, keys, self.memory.scores, sinks, scratch=self.memory.store.scratch)
        self.sums[slot, :, : self.keys.tokens] += found


def column_sums(q: Tensor, keys: Tensor, scores: Scores, sinks: Tensor | None = None, *, scratch: Scratch) -> Tensor:
    """What causal queries weigh each key, added up.

    Args:
        q: ``[queries, repeats, kv_heads, dim]``, rotated; query i is of the token whose key is the i-th of the last
            ``queries``.
        keys: ``[kv_heads, slots, dim]``, at least as many slots as queries.
        scores: scale and cap.
        sinks: float32 ``[repeats, kv_heads]``: a score a head that takes part in the softmax.
        scratch: memory for a tile's weights.

    Returns:
        float32 ``[kv_heads, slots]``.
    """
    queries, repeats, heads, dim = q.shape
    slots = keys.shape[1]
    sums = torch.zeros(heads, slots)
    step = max(1, _TILE_BYTES // (4 * heads * repeats * slots))
    for begin in range(0, queries, step):
        count = min(step, queries - begin)
        rows, seen = count * repeats, slots - queries + begin + count
        tile = q[begin : begin + count].permute(2, 0, 1, 3).reshape(heads, rows, dim)
        # Fresh memory would take longer than the arithmetic: all that is large is used again, and changed in place.
        weights = scratch.rows(q.dtype, "products", heads * rows, seen).view(heads, rows, seen)
        torch.bmm(tile, keys[:, :seen].transpose(1, 2), out=weights)
        if q.dtype != torch.float32:
            weights = scratch.rows(torch.float32, "weights", heads * rows, seen).view(heads, rows, seen).copy_(weights)
        weights.mul_(scores.scale)
        if scores.softcap is not None:
            weights.div_(scores.softcap).tanh_().mul_(scores.softcap)
        if count > 1:
            ahead = torch.ones(count, count, dtype=torch.bool).triu_(1)
            weights.view(heads, count, repeats, seen)[..., seen - count :].masked_fill_(ahead[:, None], -torch.inf)
        most = weights.amax(-1, keepdim=True)
        total = weights.sub_(most).exp_().sum(-1, keepdim=True)
        if sinks is not None:
            total += torch.exp(sinks.t()[:, None].expand(-1, count, -1).reshape(heads, rows, 1) - most)
        sums[:, :seen] += torch.bmm(total.reciprocal_().transpose(1, 2), weights)[:, 0]
    return sums
