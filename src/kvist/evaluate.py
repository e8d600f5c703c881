"""Fidelity: what storing the cache in a format does to a model's answers, on any text.

A text is read as a prompt is, a chunk at a time, by the model with its cache in the type of computation and by the same
model with its cache in each format. Behind every token the distributions of the next one are compared: their
Kullback-Leibler divergence tells how far the format moves answers, whatever the text says; perplexity tells what the
text makes of it. Errors of reconstruction are not looked at: keys steer a softmax and values do not, so that equal
errors in them are worth different amounts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.batch import Chunk, Request
from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.engine.runner import Runner
from kvist.errors import InputError
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

CHUNK = 256
"""Tokens that are read at once: their distributions are held of all formats that are compared."""

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far one format moves a model's answers.

    Attributes:
        format: of the cache.
        kl: divergence of the next token's distribution from that with the cache in the type of computation, mean over
            the tokens, in nats.
        top1_agreement: share of the tokens at which both find the same likeliest.
        perplexity: on the texts.
        reference_perplexity: the same, with the cache in the type of computation.
        tokens: that were predicted.
    """

    format: CacheFormat
    kl: float
    top1_agreement: float
    perplexity: float
    reference_perplexity: float
    tokens: int

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity by that of the reference."""
        return self.perplexity / self.reference_perplexity


class _Reader:
    """A model with memory for one text in one format."""

    def __init__(self, spec: ModelSpec, fmt: CacheFormat, dtype: str, most: int) -> None:
        groups = groups_of(spec.computed_in(dtype), fmt.computed_in(dtype))
        # Room for every group's peak, and for a slab of each that is not full.
        blocks = [(group.peak_blocks(most, CHUNK) + 1) * group.block_bytes for group in groups]
        largest = max(group.block_bytes for group in groups)
        layout = ArenaLayout.of(groups, sum(blocks) + 16 * len(groups) * largest)
        self.manager = CacheManager(groups, layout, prefix_cache=False)
        self.runner = Runner(spec, groups, layout, dtype=dtype)
        self.request: Request | None = None

    def begin(self, tokens: Tokens) -> None:
        """Forget what was read, and begin with this."""
        if self.request is not None:
            self.manager.release(self.request.sequence)
        self.request = Request("text", self.manager.begin(tokens), 0)

    def read(self, count: int) -> Tensor:
        """Logits behind each of the next ``count`` tokens, ``[count, vocab]``."""
        assert self.request is not None
        sequence = self.request.sequence
        start = sequence.length
        reservation = self.manager.reserve(sequence, count)
        assert reservation.granted
        assert reservation.limit == start + count
        logits = self.runner.score([Chunk(self.request, start, count, samples=True)])
        self.runner.copy(self.manager.commit(sequence, start + count))
        return logits


def drift(
    spec: ModelSpec, texts: Sequence[Sequence[int]], formats: Sequence[CacheFormat], *, dtype: str
) -> list[Drift]:
    """Read texts with the cache in each format, all at the same time, and with one in the type of computation.

    Args:
        spec: of a model whose files are on disk; of each reader there is one copy of its weights.
        texts: token ids, each of two tokens or more, and read from an empty cache.
        formats: to compare.
        dtype: ``f32``, ``bf16`` or ``f16``.

    Returns:
        One of each format, in their order.

    Raises:
        InputError: there is no text, or one is too short; a format is not computed with.
    """
    if not texts or min(map(len, texts)) < 2:
        raise InputError("text: nothing to predict; give two tokens or more", key="text")
    most = max(map(len, texts))
    plain = CacheFormat(key=dtype, value=dtype)
    reference, *readers = [_Reader(spec, fmt, dtype, most) for fmt in (plain, *formats)]
    sums = torch.zeros(len(formats), 3, dtype=torch.float64)
    surprise, scored = 0.0, 0
    for text in texts:
        tokens = np.asarray(text, np.int32)
        for reader in (reference, *readers):
            reader.begin(tokens)
        for start in range(0, len(tokens), CHUNK):
            count = min(CHUNK, len(tokens) - start)
            following = torch.from_numpy(tokens[start + 1 : start + count + 1].astype(np.int64))
            expected = F.log_softmax(reference.read(count)[: len(following)], dim=1)
            surprise -= _of(expected, following)
            likeliest = expected.argmax(1)
            for number, reader in enumerate(readers):
                found = F.log_softmax(reader.read(count)[: len(following)], dim=1)
                sums[number, 0] += F.kl_div(found, expected, log_target=True, reduction="none").sum(1).double().sum()
                sums[number, 1] += (found.argmax(1) == likeliest).sum()
                sums[number, 2] -= _of(found, following)
            scored += len(following)
    return [
        Drift(
            format=fmt,
            kl=kl / scored,
            top1_agreement=agreed / scored,
            perplexity=exp(own / scored),
            reference_perplexity=exp(surprise / scored),
            tokens=scored,
        )
        for fmt, (kl, agreed, own) in zip(formats, sums.tolist(), strict=True)
    ]


def _of(logs: Tensor, tokens: Tensor) -> float:
    """Sum of what was said of the tokens that came."""
    return float(logs.gather(1, tokens[:, None]).double().sum())
