"""How fast a deployment could be at best: operations against compute, bytes against bandwidth.

A step takes at least the longer of ``operations / peak rate`` and ``bytes / peak bandwidth`` of a rank, and what its
ranks send each other. Counted are

    operations = 2 x parameters that a token is multiplied with + attention over what each layer keeps
    bytes      = weights, of experts those that the batch is sent to, + the caches of all sequences
    sent       = two all-reduces of the hidden states a layer, ``2 (tp - 1) / tp`` of them a link

This is a bound, not a forecast: it knows no launch, no scheduling and no loss of clock, and takes transfers and
computation inside a step to overlap perfectly; experts are taken to be chosen evenly. Decoding has been measured at
33 % of it (Mistral-7B, one sequence, A100, vLLM of 2023: ggml-org/llama.cpp#3479) to 66 % (a 27B model on RTX 3090:
ashalliants/ninfer-3090#36). Small models on fast devices, whose steps are a few launches long, reach less.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvist.hardware import Accelerator, Fact
from kvist.planning.deployment import Deployment, Stage
from kvist.planning.sharding import query_heads
from kvist.planning.weights import Weights
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Compressed, Cross, Latent, Layer, Parallel, State
from kvist.spec.model import ModelSpec
from kvist.spec.parameters import Inventory

Ceiling = Literal["memory", "bandwidth", "compute"]

# A multiply-add is two operations; a state is decayed, updated by an outer product and read.
_STATE_OPERATIONS = 6


@dataclass(frozen=True, kw_only=True)
class Step:
    """The least time of a step, and what it goes to, on the slowest stage's ranks.

    Attributes:
        tokens: computed in it.
        operations: of a rank.
        weights_bytes: that a rank reads.
        cache_bytes: that a rank reads and writes.
        compute_seconds: operations over the peak rate; 0 where it is not known.
        memory_seconds: bytes over the peak bandwidth.
        link_seconds: what ranks send each other; 0 where there is one or nothing is known of their link.
        stages: of the pipeline, which a token passes one after the other.
    """

    tokens: int
    operations: float
    weights_bytes: float
    cache_bytes: float
    compute_seconds: float
    memory_seconds: float
    link_seconds: float
    stages: int

    @property
    def stage_seconds(self) -> float:
        """Of the slowest stage."""
        return max(self.compute_seconds, self.memory_seconds) + self.link_seconds

    @property
    def seconds(self) -> float:
        """Of all stages."""
        return self.stages * self.stage_seconds

    @property
    def binds(self) -> Literal["bandwidth", "compute"]:
        """The longer of the two."""
        return "compute" if self.compute_seconds >= self.memory_seconds else "bandwidth"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Bounds on the speed of a deployment.

    Attributes:
        users: sequences that decode at once, over all replicas.
        context: tokens of each.
        decode: one step of all of a replica's sequences.
        prefill: the prompt of one sequence; None where the device's rate is not known.
        prompt: its tokens.
        replicas: that run beside each other.
        binds: what to raise to serve more users.
    """

    users: int
    context: int
    decode: Step
    prefill: Step | None
    prompt: int
    replicas: int
    binds: Ceiling

    @property
    def decode_rate(self) -> float:
        """Tokens a second of all users; stages work on different sequences at once."""
        return self.replicas * self.decode.tokens / self.decode.stage_seconds

    @property
    def user_rate(self) -> float:
        """Tokens a second of each user."""
        return self.decode_rate / self.users

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second, of one replica."""
        return None if self.prefill is None else self.prompt / self.prefill.seconds

    def to_dict(self) -> dict[str, Any]:
        """As under ``speed`` in the JSON of ``kvist plan``."""
        return {
            "users": self.users,
            "context": self.context,
            "binds": self.binds,
            "decode": {
                "seconds": self.decode.seconds,
                "tokens_per_second": self.decode_rate,
                "tokens_per_second_per_user": self.user_rate,
                **_parts(self.decode),
            },
            "prefill": None
            if self.prefill is None
            else {
                "tokens": self.prompt,
                "seconds": self.prefill.seconds,
                "tokens_per_second": self.prefill_rate,
                **_parts(self.prefill),
            },
        }


def _parts(step: Step) -> dict[str, Any]:
    return {
        "binds": step.binds,
        "compute_seconds": step.compute_seconds,
        "memory_seconds": step.memory_seconds,
        "link_seconds": step.link_seconds,
        "operations": step.operations,
        "weights_bytes": step.weights_bytes,
        "cache_bytes": step.cache_bytes,
    }


def rate_of(accelerator: Accelerator, weights: Weights) -> Fact | None:
    """The peak rate at which a device multiplies such weights, where it is known.

    Types that it multiplies directly have their own; all others are widened to bf16 first.
    """
    codec = max(weights.by_type, key=lambda name: weights.by_type[name])
    wanted = {"fp8": "fp8", "F8_E4M3": "fp8", "nvfp4": "fp4"}.get(codec, "bf16")
    return accelerator.rates.get(wanted) or accelerator.rates.get("bf16")


def speed_of(
    spec: ModelSpec,
    fmt: CacheFormat,
    deployment: Deployment,
    weights: Weights,
    *,
    users: int,
    context: int,
    prompt: int,
    fills: bool,
) -> Speed:
    """Bound the speed of a deployment; where its device's rate is not known, by bandwidth alone.

    Args:
        spec: the model.
        fmt: how keys and values are stored.
        deployment: where it runs; with a device.
        weights: with their shapes.
        users: sequences at once, over all replicas.
        context: tokens of each.
        prompt: tokens of a prompt.
        fills: whether more users would not fit into the memory.

    Raises:
        InputError: the bandwidth of the device is not known.
    """
    machine = deployment.machine
    accelerator = machine.accelerator
    assert accelerator is not None
    assert weights.inventory is not None
    rate = rate_of(accelerator, weights)
    if accelerator.bandwidth is None:
        raise accelerator.unknown("memory bandwidth")
    # While one stage works on some sequences, the others work on other ones.
    together = -(-users // (machine.replicas * machine.pp))
    bound = _Bound(
        spec=spec,
        fmt=fmt,
        weights=weights,
        inventory=weights.inventory,
        tp=machine.tp,
        rate=None if rate is None else rate.value,
        bandwidth=accelerator.bandwidth.value,
        link=None if accelerator.link is None else accelerator.link.value,
    )
    decodes = [bound.decode(stage, together, context, len(deployment.stages)) for stage in deployment.stages]
    decode = max(decodes, key=lambda step: step.stage_seconds)
    prefill = None
    if rate is not None:
        prefills = [bound.prefill(stage, prompt, len(deployment.stages)) for stage in deployment.stages]
        prefill = max(prefills, key=lambda step: step.stage_seconds)
    return Speed(
        users=users,
        context=context,
        decode=decode,
        prefill=prefill,
        prompt=prompt,
        replicas=machine.replicas,
        binds=_binds(decode, fills=fills),
    )


def _binds(decode: Step, *, fills: bool) -> Ceiling:
    """What to raise to serve more users.

    Where a step computes longer than it reads, compute. Where it reads caches for longer than weights, bandwidth: each
    further user makes the step longer by as much. Otherwise a further user costs next to nothing, and memory is what is
    lacking, if it is full.
    """
    if decode.binds == "compute":
        return "compute"
    return "memory" if fills and decode.weights_bytes > decode.cache_bytes else "bandwidth"


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """What the steps of one deployment have in common; sizes are a rank's."""

    spec: ModelSpec
    fmt: CacheFormat
    weights: Weights
    inventory: Inventory
    tp: int
    rate: float | None
    bandwidth: float
    link: float | None

    def decode(self, stage: Stage, sequences: int, context: int, stages: int) -> Step:
        """One token for each of some sequences of ``context`` tokens."""
        attended = sum(self._attention(layer, context) for layer in stage.spec.layers)
        read = sum(self._read(layer, context) for layer in stage.spec.layers)
        return self._step(
            stage,
            tokens=sequences,
            operations=sequences * (self._multiplied(stage, head=True) + attended),
            cache=sequences * read,
            stages=stages,
            passes=sequences,
        )

    def prefill(self, stage: Stage, prompt: int, stages: int) -> Step:
        """A prompt, of which each token attends to those before it, in one pass over the weights."""
        attended = sum(self._prompt_attention(layer, prompt) for layer in stage.spec.layers)
        written = sum(layer.bytes(prompt, self.fmt) for layer in stage.spec.layers)
        return self._step(
            stage,
            tokens=prompt,
            operations=prompt * self._multiplied(stage, head=False) + attended + self._head(stage),
            cache=2.0 * written,
            stages=stages,
            passes=prompt,
        )

    def _step(self, stage: Stage, *, tokens: int, operations: float, cache: float, stages: int, passes: int) -> Step:
        part = stage.layers
        read = self.weights.read(part.first, part.end, layers=len(self.spec.layers), tp=self.tp, tokens=passes)
        return Step(
            tokens=tokens,
            operations=operations,
            weights_bytes=read,
            cache_bytes=cache,
            compute_seconds=operations / self.rate if self.rate else 0.0,
            memory_seconds=(read + cache) / self.bandwidth,
            link_seconds=self._sent(part.count, tokens) / self.link if self.link else 0.0,
            stages=stages,
        )

    def _sent(self, layers: int, tokens: int) -> float:
        """Bytes over a rank's link: ring all-reduces of bf16 states, one behind attention and one behind the MLP."""
        hidden = self.inventory.table.shape[1]
        return 2 * layers * tokens * hidden * 2 * 2 * (self.tp - 1) / self.tp

    def _multiplied(self, stage: Stage, *, head: bool) -> float:
        """Operations of a token in a rank's matrices, a multiply-add being two."""
        total = 0.0
        for placed in self.inventory.stage(stage.layers.first, stage.layers.end):
            tensor = placed.tensor
            if tensor.layers:
                total += placed.times * tensor.share(tensor.active, self.tp)
        return 2 * total + (self._head(stage) if head else 0.0)

    def _head(self, stage: Stage) -> float:
        """Operations of the output head, of the last stage."""
        if stage.layers.end != len(self.spec.layers):
            return 0.0
        table = self.inventory.table
        return 2.0 * table.share(table.elements, self.tp)

    def _heads(self) -> float:
        """Query heads of a rank."""
        heads = query_heads(self.spec.config)
        return 0.0 if heads is None else heads / self.tp

    def _attention(self, layer: Layer, context: int) -> float:
        """Operations of one token's attention over ``context`` tokens, in a rank."""
        heads = self._heads()
        match layer:
            case Attention():
                seen = _seen(layer.window or layer.chunk, context)
                scored = 0.0 if layer.indexer is None else 2.0 * layer.indexer.heads * layer.indexer.dim * context
                return 2.0 * heads * seen * (layer.key_dim + layer.value_dim) + scored
            case Latent():
                seen = _seen(layer.window, context)
                if layer.indexer is not None:
                    seen = min(seen, self._picked(context))
                per_token = 2.0 * heads * (2 * layer.rank + layer.rope_dim)
                return seen * per_token + self._indexed(layer.indexer is not None, context)
            case Compressed():
                seen = _seen(layer.window, context) if layer.window else 0
                return 2.0 * heads * (seen + context / layer.ratio) * (2 * layer.rank + layer.rope_dim)
            case State():
                return _STATE_OPERATIONS * layer.state_elements + 2.0 * layer.conv_elements
            case Parallel():
                return sum(self._attention(part, context) for part in layer.parts)
            case Cross():
                tokens = layer.encoder_tokens or 0
                return 2.0 * heads * tokens * (layer.key_dim + layer.value_dim)
            case _:
                return 0.0

    def _picked(self, context: int) -> int:
        """Tokens that sparse attention attends to."""
        return min(context, _number(self.spec.config, "index_topk", context))

    def _indexed(self, indexed: bool, context: int) -> float:
        """Operations of the indexer, whose heads are on every rank."""
        if not indexed:
            return 0.0
        heads, dim = _number(self.spec.config, "index_n_heads", 1), _number(self.spec.config, "index_head_dim", 128)
        return 2.0 * heads * dim * context

    def _prompt_attention(self, layer: Layer, prompt: int) -> float:
        """Operations of a whole prompt's attention: the sum over its tokens, each seeing those before it."""
        window = layer.window or layer.chunk if isinstance(layer, Attention) else None
        if isinstance(layer, Latent):
            window = layer.window
        if isinstance(layer, State):
            return prompt * self._attention(layer, 1)
        if isinstance(layer, Parallel):
            return sum(self._prompt_attention(part, prompt) for part in layer.parts)
        whole = min(prompt, window) if window else prompt
        # Up to the window each token sees one more, then always as many.
        seen = whole * (whole + 1) / 2 + (prompt - whole) * whole
        return self._attention(layer, prompt) / max(1, _seen(window, prompt)) * seen

    def _read(self, layer: Layer, context: int) -> float:
        """Bytes of one sequence that a step reads and writes in a layer."""
        if isinstance(layer, State):
            return 2.0 * layer.state_bytes(self.fmt)
        if isinstance(layer, Parallel):
            return sum(self._read(part, context) for part in layer.parts)
        if isinstance(layer, Latent) and layer.indexer is not None:
            picked = self._picked(context) * layer.token_bytes(self.fmt)
            return picked + layer.indexer.bytes(context, self.fmt) + float(layer.append_bytes(self.fmt))
        cross = (
            (layer.encoder_tokens or 0) * layer.cross_bytes_per_encoder_token(self.fmt)
            if isinstance(layer, Cross)
            else 0
        )
        return layer.bytes(context, self.fmt) + float(layer.append_bytes(self.fmt)) + cross


def _seen(window: int | None, context: int) -> int:
    return context if window is None else min(window, context)


def _number(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default
