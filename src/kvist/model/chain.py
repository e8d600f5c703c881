"""Plain layers run as one call: attention with rotary positions, a gated product, root-mean-square norms.

A step that decodes few sequences takes as long between operators as inside them: of SmolLM2 240 of them. Layers from
the first on that are of this kind, as those of Llama, Mistral, Qwen, Gemma and their like are, run on the C++ kernels
without coming back; the others run as in all steps, and so does the last where some of its rows are chosen.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvist.kernels.cpu import Cpu
from kvist.kernels.matrix import Matrix
from kvist.kernels.paged import PagedPlan
from kvist.model.feed_forward import GatedMlp
from kvist.model.layer import Layer
from kvist.model.mixers.attention import AttentionMixer
from kvist.model.mixers.places import Pass
from kvist.model.norms import FusedResidual, RMSNorm
from kvist.model.rotary import FusedRotation

MOST_ROWS = 64
"""Larger steps hide what is between operators; and what is worked in grows with them."""


class Chain:
    """Layers ``0 … count - 1`` of a decoder.

    Args:
        kernels: of this machine.
        layers: that :func:`plain` describes, in their order.
    """

    def __init__(self, kernels: Cpu, layers: Sequence[Layer]) -> None:
        self.kernels = kernels
        self.count = len(layers)
        self.chain = kernels.module.Chain()
        self.groups: set[int] = set()
        # Of each layer: group, slot, and the shape of one token's queries.
        self.queries: list[tuple[int, int, tuple[int, int, int]]] = []
        # Norms and biases are read where they are; the matrices are held by the chain.
        self.held: list[Tensor] = []
        for layer in layers:
            self._add(layer)
        self.after = [layer.after_mlp for layer in layers]

    @classmethod
    def of(cls, kernels: Cpu | None, layers: Sequence[Layer]) -> "Chain | None":
        """Those layers from the first on that can; None where there are fewer than two."""
        count = 0
        while count < len(layers) and plain(layers[count]):
            count += 1
        return cls(kernels, layers[:count]) if kernels is not None and count > 1 else None

    def _add(self, layer: Layer) -> None:
        mixer, mlp = layer.mixer, layer.mlp
        assert isinstance(mixer, AttentionMixer)
        assert isinstance(mlp, GatedMlp)
        matrices = [mixer.qkv.matrix, mixer.output.matrix, mlp.gate_up.matrix, mlp.down.matrix]
        qkv, output, gate_up, down = [matrix for matrix in matrices if matrix is not None]
        norms = [layer.before_mixer, layer.after_mixer, layer.before_mlp, layer.after_mlp, mixer.norm]
        eps = [norm.eps if norm is not None else 0.0 for norm in (layer.before_mixer, layer.before_mlp, mixer.norm)]
        self.groups.add(mixer.group)
        self.queries.append((mixer.group, mixer.slot, (mixer.repeats, mixer.kv_heads, mixer.dim)))
        self.chain.add(
            qkv=qkv.packed,
            output=output.packed,
            gate_up=gate_up.packed,
            down=down.packed,
            biases=[self._address(matrix.bias) for matrix in (qkv, output, gate_up, down)],
            norms=[self._address(norm.multiplier if isinstance(norm, RMSNorm) else None) for norm in norms],
            eps=eps,
            slot=mixer.slot,
            group=mixer.group,
            rope=mixer.rope,
            queries=mixer.turned - mixer.kv_heads,
            kv_heads=mixer.kv_heads,
            dim=mixer.dim,
            spread_begin=mixer.spread.start,
            spread_end=mixer.spread.stop,
            turns_back=mixer.turns_back,
            spread=mixer.factor,
        )

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self.held.append(tensor)
        return tensor.data_ptr()

    def suits(self, stream: object, step: Pass) -> bool:
        """Whether a step can be run so: a small one, on the C++ kernels."""
        return (
            isinstance(stream, FusedResidual)
            and len(stream.x) <= MOST_ROWS
            and all(isinstance(step.plans[group], PagedPlan) for group in self.groups)
            and all(isinstance(rotation, FusedRotation) for rotation in step.rotations)
        )

    def _neighbours(self, count: int) -> list[tuple[int, slice, tuple[int, int, int]]]:
        """Of the first layers, neighbours of one group: its number, their slots, and the shape of a token's queries."""
        found: list[tuple[int, slice, tuple[int, int, int]]] = []
        for group, slot, shape in self.queries[:count]:
            first = found.pop()[1].start if found and found[-1][0] == group else slot
            found.append((group, slice(first, slot + 1), shape))
        return found

    def __call__(self, stream: FusedResidual, step: Pass, count: int) -> None:
        """Run the first layers over the stream, which holds nothing to be added yet; stores what they remember."""
        change = torch.empty_like(stream.x)
        plans: list[object] = [None] * len(step.plans)
        for group in self.groups:
            plan = step.plans[group]
            assert isinstance(plan, PagedPlan)
            plans[group] = plan.plan
        tables = []
        for rotation in step.rotations:
            assert isinstance(rotation, FusedRotation)
            tables += [rotation.cos.data_ptr(), rotation.sin.data_ptr()]
        rows = len(change)
        kept, seen = None, []
        if step.observer is not None and step.observer.looks:
            seen = self._neighbours(count)
            sizes = [rows * (slots.stop - slots.start) * math.prod(shape) for _, slots, shape in seen]
            kept = torch.empty(sum(sizes), dtype=change.dtype)
        self.chain.run(
            self.kernels.kind,
            plans,
            tables,
            stream.x.data_ptr(),
            change.data_ptr(),
            0 if kept is None else kept.data_ptr(),
            rows,
            count,
        )
        stream.add(change, self.after[count - 1])
        if step.observer is None or kept is None:
            return
        for part, (group, slots, shape) in zip(torch.split(kept, sizes), seen, strict=True):
            step.observer.see(group, slots, part.view(-1, rows, *shape), None)


def plain(layer: Layer) -> bool:
    """Whether a layer is of this kind, with all its weights on the C++ kernels."""
    mixer, mlp = layer.mixer, layer.mlp
    if not isinstance(mixer, AttentionMixer) or not isinstance(mlp, GatedMlp) or layer.parallel:
        return False
    norms = (layer.before_mixer, layer.before_mlp)
    others = (layer.after_mixer, layer.after_mlp)
    matrices: tuple[Matrix | None, ...] = (
        mixer.qkv.matrix, mixer.output.matrix, mlp.gate_up.matrix, mlp.down.matrix
    )  # fmt: skip
    special = (layer.scale, mixer.whole_norms, mixer.temperature, mixer.sinks)
    return (
        all(isinstance(norm, RMSNorm) for norm in norms)
        and all(norm is None or isinstance(norm, RMSNorm) for norm in others)
        and None not in matrices
        and all(each is None for each in special)
        and mixer.rope is not None
        and (mixer.hadamard is None or mixer.spreader is not None)
        and not mixer.gates
    )
