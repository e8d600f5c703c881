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
from kvist.model.chain import Chain
from kvist.model.families import network_of
from kvist.model.layer import Layer, norm_of
from kvist.model.linear import Logits
from kvist.model.mixers import Pass, Places
from kvist.model.mixers.places import Observer, Plan
from kvist.model.norms import FusedResidual, PlainResidual, Residual, Stream
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
        self.chain = None if self.differentiable or network.wide else Chain.of(self.kernels, self.layers)
        self.norm = norm_of(checkpoint, network.norm, hidden)
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
        layers = self.layers
        if self.chain is not None and isinstance(stream, FusedResidual) and self.chain.suits(stream, run):
            # Where every row is sampled, as in steps that only decode, so may the last layer.
            every = len(step.sampled) == len(step.tokens)
            count = min(self.chain.count, len(layers) if every else len(layers) - 1)
            self.chain(stream, run, count)
            layers = layers[count:]
            if not layers and len(step.sampled) > 1:
                stream = stream.rows(step.sampled)
        for layer in layers:
            # Behind the last mixer only what is sampled is read, in the order of the step's chunks.
            rows = step.sampled if layer is self.layers[-1] else None
            stream = layer(stream, run, rows)
        logits = self.head(stream.normed(self.norm))
        if network.logits_scale is not None:
            logits = logits * network.logits_scale
        if network.softcap is not None:
            logits = torch.tanh(logits / network.softcap) * network.softcap
        return logits
