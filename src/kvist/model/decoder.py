"""A decoder, assembled from the description of its network: embeddings, blocks, logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.cache.groups import Group
from kvist.errors import UnsupportedModel
from kvist.kernels.cpu import Cpu, kernels_of
from kvist.kernels.gradients import gradients_wanted
from kvist.model.families import network_of
from kvist.model.feed_forward import feed_forward_of
from kvist.model.linear import Logits
from kvist.model.mixers import Pass, Places, mixer_of
from kvist.model.mixers.places import Observer, Plan
from kvist.model.network import Block, Norm
from kvist.model.norms import AnyNorm, FusedResidual, LayerNorm, PlainResidual, Residual, RMSNorm, Stream
from kvist.model.rotary import Rotary
from kvist.model.weights import Checkpoint
from kvist.spec.model import ModelSpec

_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one pass computes.

    Attributes:
        tokens: int64 ``[tokens]``.
        positions: int64 ``[tokens]``.
        plans: one for each group.
        sampled: rows whose logits are wanted, int64.
        observer: what looks at attention's queries, if anything does.
    """

    tokens: Tensor
    positions: Tensor
    plans: Sequence[Plan]
    sampled: Tensor
    observer: Observer | None = None


class Decoder:
    """The network; built inside :func:`kvist.kernels.gradients.differentiable`, one that gradients pass.

    Args:
        spec: names the weights and describes the network.
        groups: of the layers, as the cache orders them.
        dtype: to compute in.

    Raises:
        UnsupportedModel: a mechanism of the configuration is not computed; names it.
        BadFile: a tensor is missing or misshapen; names it.
    """

    def __init__(self, spec: ModelSpec, groups: Sequence[Group], dtype: torch.dtype) -> None:
        self.network = network = network_of(spec)
        checkpoint = Checkpoint(spec, dtype, network)
        self.dtype = dtype
        self.kernels: Cpu | None = kernels_of(dtype)
        self.differentiable = gradients_wanted()
        self.vocab = network.vocab
        hidden = network.hidden
        self.embedding = checkpoint.tensor(network.embedding, (self.vocab, hidden))
        self.embedding_scale: float | None = None
        if network.embedding_scale is not None:
            # As transformers does, the factor is rounded to the type of the embeddings.
            self.embedding_scale = float(torch.tensor(network.embedding_scale).to(dtype))
        self.positions: Tensor | None = None
        if network.positions is not None:
            name, count = network.positions
            self.positions = checkpoint.tensor(name, (count, hidden))
        self.rotaries = [Rotary.of(rope, checkpoint) for rope in network.ropes]
        places = Places.by_layer(groups, len(spec.layers))
        self.layers = [
            Layer(checkpoint, block, hidden, where) for block, where in zip(network.blocks, places, strict=True)
        ]
        self.norm = _norm(checkpoint, network.norm, hidden)
        head = self.embedding if network.tied else checkpoint.tensor(network.head, (self.vocab, hidden))
        if network.tied and checkpoint.has(_HEAD):
            self._check_tied(checkpoint)
        self.head = Logits(head, checkpoint.codes([network.head]), tied=network.tied)
        checkpoint.finish()

    def _check_tied(self, checkpoint: Checkpoint) -> None:
        """Hold a head that is stored beside the embeddings, of which it is said to be a copy, against them.

        Raises:
            UnsupportedModel: they differ.
        """
        if not torch.equal(checkpoint.tensor(_HEAD, self.embedding.shape), self.embedding):
            raise UnsupportedModel(
                f"tie_word_embeddings: true, but {_HEAD} is no copy of the embeddings; say false to compute with it",
                key="tie_word_embeddings",
            )

    def logits(self, step: Step) -> Tensor:
        """Run the network; stores what it remembers of the step's tokens.

        Returns:
            float32 ``[sampled rows, vocab]``.
        """
        network = self.network
        x = F.embedding(step.tokens, self.embedding)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if self.positions is not None:
            x = x + F.embedding(step.positions, self.positions)
        run = Pass(
            positions=step.positions,
            rotations=[rotary.tables(step.positions, self.dtype, self.kernels) for rotary in self.rotaries],
            plans=step.plans,
            observer=step.observer,
        )
        stream: Stream
        if self.differentiable:
            stream = PlainResidual(x.float() if network.wide else x, self.dtype)
        elif self.kernels is None or network.wide:
            stream = Residual(x.float() if network.wide else x, self.dtype)
        else:
            stream = FusedResidual(x, self.kernels)
        for layer in self.layers:
            # Behind the last mixer only what is sampled is read, in the order of the step's chunks.
            rows = step.sampled if layer is self.layers[-1] else None
            stream = layer(stream, run, rows)
        logits = self.head(stream.normed(self.norm))
        if network.logits_scale is not None:
            logits = logits * network.logits_scale
        if network.softcap is not None:
            logits = torch.tanh(logits / network.softcap) * network.softcap
        return logits


class Layer:
    """One block: a mixer, then a product for each token, each added to the stream of residuals."""

    def __init__(self, checkpoint: Checkpoint, block: Block, hidden: int, places: Places) -> None:
        def norm(described: Norm | None) -> AnyNorm | None:
            return None if described is None else _norm(checkpoint, described, hidden)

        self.before_mixer, self.after_mixer = norm(block.before_mixer), norm(block.after_mixer)
        self.before_mlp, self.after_mlp = norm(block.before_mlp), norm(block.after_mlp)
        self.mixer = None if block.mixer is None else mixer_of(checkpoint, block.mixer, places)
        self.mlp = None if block.mlp is None else feed_forward_of(checkpoint, block.mlp)
        self.parallel, self.scale = block.parallel, block.scale

    def __call__(self, stream: Stream, step: Pass, rows: Tensor | None = None) -> Stream:
        """Add to the stream ``[tokens, hidden]`` and return it; stores what the layer remembers of the tokens.

        With ``rows`` nothing but these is computed behind the mixer, and returned.
        """
        seen = change = None
        if self.mixer is not None:
            seen = stream.normed(self.before_mixer)
            change = self.mixer(seen, step, rows)
        if rows is not None:
            stream = stream.rows(rows)
        if change is not None:
            stream.add(self._scaled(change), self.after_mixer)
        if self.mlp is not None:
            if not self.parallel or seen is None:
                seen = stream.normed(self.before_mlp)
            elif rows is not None:
                seen = seen.index_select(0, rows)
            stream.add(self._scaled(self.mlp(seen)), self.after_mlp)
        return stream

    def _scaled(self, change: Tensor) -> Tensor:
        return change if self.scale is None else change * self.scale


def _norm(checkpoint: Checkpoint, norm: Norm, width: int) -> AnyNorm:
    if norm.kind != "rms":
        bias = checkpoint.vector(f"{norm.name}.bias", width) if norm.kind == "layer" else None
        return LayerNorm(checkpoint.vector(f"{norm.name}.weight", width), bias, norm.eps)
    return RMSNorm(checkpoint.norm(f"{norm.name}.weight", width), norm.eps)
