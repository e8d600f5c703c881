"""The model that has a cartridge in the place of a document: frozen weights, gradients for the cartridge alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.cache.grouping import groups_of
from kvist.cache.groups import Group
from kvist.kernels.dense import Scores
from kvist.kernels.gradients import differentiable
from kvist.kernels.segment import Items, ItemsPlan, LatentItemsPlan
from kvist.model.decoder import Decoder, Step
from kvist.model.mixers.latent import LatentAttention
from kvist.model.weights import dtype_named
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Latent
from kvist.spec.model import ModelSpec
from kvist.store.cartridge_file import stored_shape
from kvist.store.layouts import check_format

Segments = Mapping[int, Tensor]
"""By layer, float32 ``[2 x kv_heads, tokens, dim]``, or of latents ``[1, tokens, rank + rope]``."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Items to be computed at once.

    Attributes:
        tokens: int64 ``[items, length]``, filled up with zeros.
        rows: of ``tokens`` flattened, those whose logits are wanted, int64 ``[rows]``.
    """

    tokens: Tensor
    rows: Tensor


class Student:
    """Computes items behind a segment.

    Args:
        spec: of a model whose files are on disk.
        dtype: to compute in; a segment stays in float32.

    Attributes:
        groups: of its layers.

    Raises:
        InputError: its layers keep something that no cartridge stands for.
        UnsupportedModel, BadFile: the weights do not make this model.
    """

    def __init__(self, spec: ModelSpec, dtype: str) -> None:
        plain = CacheFormat(key=dtype, value=dtype)
        self.groups: tuple[Group, ...] = groups_of(spec.computed_in(dtype), plain)
        for group in self.groups:
            stored_shape(group, 1)
            check_format(group)
        with differentiable(), torch.no_grad():
            self.decoder = Decoder(spec, self.groups, dtype_named(dtype))
        self.scores = [self._scores(group) for group in self.groups]

    def _scores(self, group: Group) -> Scores:
        blocks = [self.decoder.network.blocks[layer] for layer in group.layers]
        if isinstance(group.layer, Latent):
            (scale,) = {block.mixer.scale for block in blocks if isinstance(block.mixer, LatentAttention)}
            return Scores(scale=scale)
        (scores,) = {Scores(scale=net.scale, softcap=net.softcap) for block in blocks for net in block.attention}
        return scores

    def read(self, tokens: Sequence[int]) -> dict[int, Tensor]:
        """What the cache would hold of a text: a segment to begin with."""
        items = Items(count=1, length=len(tokens), first=0)
        empty = {
            layer: torch.zeros(width, 0, dim)
            for group in self.groups
            for _, width, dim in [stored_shape(group, 0)]
            for layer in group.layers
        }
        plans = self._plans(empty, items, collect=True)
        with torch.no_grad():
            self.decoder.logits(self._step(torch.tensor([list(tokens)]), items, plans, torch.tensor([len(tokens) - 1])))
        return {
            layer: plan.seen[slot].float().transpose(0, 1).contiguous()
            for group, plan in zip(self.groups, plans, strict=True)
            for slot, layer in enumerate(group.layers)
        }

    def logits(self, segments: Segments, batch: Batch) -> Tensor:
        """Float32 logits ``[rows, vocab]`` behind the batch's rows."""
        first = next(iter(segments.values())).shape[1]
        count, length = batch.tokens.shape
        items = Items(count=count, length=length, first=first)
        return self.decoder.logits(self._step(batch.tokens, items, self._plans(segments, items), batch.rows))

    def _plans(self, segments: Segments, items: Items, *, collect: bool = False) -> list[ItemsPlan | LatentItemsPlan]:
        plans: list[ItemsPlan | LatentItemsPlan] = []
        for group, scores in zip(self.groups, self.scores, strict=True):
            parts = [segments[layer] for layer in group.layers]
            if isinstance(group.layer, Latent):
                plans.append(LatentItemsPlan([part[0] for part in parts], items, scores, collect=collect))
            else:
                plans.append(ItemsPlan(parts, items, scores, window=group.window, chunk=group.chunk, collect=collect))
        return plans

    def _step(self, tokens: Tensor, items: Items, plans: Sequence[ItemsPlan | LatentItemsPlan], rows: Tensor) -> Step:
        positions = torch.arange(items.first, items.first + items.length).repeat(items.count)
        return Step(tokens=tokens.flatten(), positions=positions, plans=plans, sampled=rows)


def to_cache(segments: Segments) -> dict[int, Tensor]:
    """Segments as a cache stores them: tokens first."""
    return {layer: segment.detach().transpose(0, 1).contiguous() for layer, segment in segments.items()}


def from_cache(layers: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The way back."""
    return {layer: stored.transpose(0, 1).contiguous() for layer, stored in layers.items()}
