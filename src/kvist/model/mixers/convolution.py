"""A short causal convolution over each channel, which goes on from the last inputs that a sequence has stored."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.model.weights import Checkpoint
from kvist.store.states import StatePlan

ROWS = 64
"""Tokens that are computed at a time, so that they stay in a core's cache from one operator to the next."""


class Convolution:
    """``silu(sum of kernel x inputs + bias)`` of each channel; stores the inputs that the next step needs.

    Args:
        checkpoint: to read from.
        prefix: of its tensors: ``weight`` ``[channels, 1, kernel]`` and ``bias``.
        channels: of the inputs.
        kernel: inputs of one output, its own included.
        bias: whether there is one.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str, *, channels: int, kernel: int, bias: bool) -> None:
        weight = checkpoint.vector(f"{prefix}.weight", channels, 1, kernel)
        self.weight = weight[:, 0].t().contiguous()
        self.bias = checkpoint.vector(f"{prefix}.bias", channels) if bias else None
        self.columns = kernel - 1

    def __call__(self, plan: StatePlan, slot: int, x: Tensor) -> Tensor:
        """Inputs ``[tokens, channels]`` of a step to outputs in float32, of the same shape."""
        saved = plan.read_conv(slot, x.dtype).view(len(plan.counts), self.columns, -1)
        if len(x) == len(plan.counts):
            columns = torch.cat((saved, x.unsqueeze(1)), 1)
            plan.write_conv(slot, columns[:, 1:].reshape(len(x), -1))
            return self._activated((columns * self.weight).sum(1))
        parts = plan.once(_Parts, lambda plan: _Parts(plan, self.columns))
        pieces = [piece for number, part in enumerate(parts.rows) for piece in (saved[number], x[part])]
        inputs = torch.cat(pieces)
        plan.write_conv(slot, inputs.index_select(0, parts.tails).view(len(saved), -1))
        count = len(inputs) - self.columns
        out = torch.empty(count, inputs.shape[1])
        for begin in range(0, count, ROWS):
            piece = inputs[begin : begin + ROWS + self.columns].float()
            into = out[begin : begin + ROWS]
            torch.mul(piece[: len(into)], self.weight[0], out=into)
            for column in range(1, self.columns + 1):
                into.addcmul_(piece[column : column + len(into)], self.weight[column])
            self._activated(into)
        return out if parts.outputs is None else out.index_select(0, parts.outputs)

    def _activated(self, out: Tensor) -> Tensor:
        return F.silu(out if self.bias is None else out.add_(self.bias), inplace=True)


class _Parts:
    """Where each sequence's inputs lie, behind the columns that it has stored."""

    def __init__(self, plan: StatePlan, columns: int) -> None:
        counts = np.array(plan.counts)
        self.rows = [slice(start, start + count) for start, count in zip(plan.starts, plan.counts, strict=True)]
        ends = np.cumsum(counts + columns)
        self.tails = torch.from_numpy((ends[:, None] - np.arange(columns, 0, -1)).ravel())
        begins = ends - counts - columns
        self.outputs: Tensor | None = None
        if len(counts) > 1:
            places = [np.arange(begin, begin + count) for begin, count in zip(begins, counts, strict=True)]
            self.outputs = torch.from_numpy(np.concatenate(places))
