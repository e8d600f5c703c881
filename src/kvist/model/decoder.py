"""A decoder from a configuration: embeddings, layers, logits. Llama, Mistral, SmolLM2, Qwen 2 and 3, Gemma 3."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.cache.groups import Group
from kvist.errors import UnsupportedModel
from kvist.kernels.attention import AttentionPlan
from kvist.kernels.cpu import Cpu, PagedPlan, kernels_of
from kvist.kernels.dense import Scores
from kvist.model.linear import Gated, Linear, Logits
from kvist.model.mixers import AttentionMixer
from kvist.model.norms import FusedResidual, Residual, RMSNorm
from kvist.model.rotary import FusedRotation, Rotary, Rotation
from kvist.model.weights import Checkpoint
from kvist.spec.layers import Attention
from kvist.spec.layers import Layer as MemoryLayer
from kvist.spec.model import ModelSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma3_text")

_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")

_NEEDED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "layer_types", "rope_theta", "rms_norm_eps", "tie_word_embeddings", "hidden_act",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one pass computes.

    Attributes:
        tokens: int64 ``[tokens]``.
        positions: int64 ``[tokens]``.
        attention: a plan for each group.
        sampled: rows whose logits are wanted, int64.
    """

    tokens: Tensor
    positions: Tensor
    attention: Sequence[AttentionPlan | PagedPlan]
    sampled: Tensor


class Decoder:
    """The network.

    Args:
        spec: names the weights and describes the network.
        groups: of the layers, as the cache orders them.
        dtype: to compute in.

    Raises:
        UnsupportedModel: a mechanism of the configuration is not computed; names it.
        BadFile: a tensor is missing or misshapen; names it.
    """

    def __init__(self, spec: ModelSpec, groups: Sequence[Group], dtype: torch.dtype) -> None:
        config = spec.config
        check_network(spec)
        checkpoint = Checkpoint(spec, dtype)
        self.dtype = dtype
        self.kernels: Cpu | None = kernels_of(dtype)
        self.vocab: int = config["vocab_size"]
        hidden = config["hidden_size"]
        self.embedding = checkpoint.tensor("model.embed_tokens.weight", (self.vocab, hidden))
        self.embedding_scale: float | None = None
        if config["model_type"].startswith("gemma"):
            # As transformers does, the factor is rounded to the type of the embeddings.
            self.embedding_scale = float(torch.tensor(hidden**0.5).to(dtype))
        self.rotaries = _rotaries(config, checkpoint)
        place = {layer: (number, slot) for number, g in enumerate(groups) for slot, layer in enumerate(g.layers)}
        self.layers = [
            Layer(checkpoint, config, index, group=place[index][0], slot=place[index][1])
            for index in range(config["num_hidden_layers"])
        ]
        self.norm = RMSNorm(checkpoint.norm("model.norm.weight", hidden), config["rms_norm_eps"])
        tied = config["tie_word_embeddings"]
        head = self.embedding if tied else checkpoint.tensor("lm_head.weight", (self.vocab, hidden))
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        self.head = Logits(head, checkpoint.codes([name]))
        self.final_softcap: float | None = config.get("final_logit_softcapping")
        scale = config.get("query_pre_attn_scalar") if config["model_type"].startswith("gemma") else None
        self.repeats: int = config["num_attention_heads"] // config["num_key_value_heads"]
        self.scores = Scores(
            scale=float(scale or config["head_dim"]) ** -0.5, softcap=config.get("attn_logit_softcapping")
        )
        checkpoint.finish(ignored=["lm_head.weight"] if tied else [])

    def logits(self, step: Step) -> Tensor:
        """Run the network; stores the step's keys and values.

        Returns:
            float32 ``[sampled rows, vocab]``.
        """
        x = F.embedding(step.tokens, self.embedding)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        rotations = [rotary.tables(step.positions, self.dtype, self.kernels) for rotary in self.rotaries]
        stream = Residual(x) if self.kernels is None else FusedResidual(x, self.kernels)
        for layer in self.layers:
            # Behind the last attention only what is sampled is read, in the order of the step's chunks.
            rows = step.sampled if layer is self.layers[-1] else None
            stream = layer(stream, rotations[layer.rotary], step.attention[layer.group], rows)
        logits = self.head(stream.normed(self.norm))
        if self.final_softcap is not None:
            logits = torch.tanh(logits / self.final_softcap) * self.final_softcap
        return logits


class Layer:
    """One decoder layer: attention, then a gated product, each added to the stream of residuals."""

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any], index: int, *, group: int, slot: int) -> None:
        self.group = group
        prefix = f"model.layers.{index}"
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        sliding = config["layer_types"][index] == "sliding_attention"
        self.rotary = 1 if sliding and "rope_local_base_freq" in config else 0

        def norm(name: str) -> RMSNorm:
            return RMSNorm(checkpoint.norm(f"{prefix}.{name}.weight", hidden), eps)

        self.before_mixer = norm("input_layernorm")
        self.mixer = AttentionMixer(checkpoint, config, f"{prefix}.self_attn", slot)
        self.after_mixer: RMSNorm | None = None
        self.after_mlp: RMSNorm | None = None
        if config["model_type"].startswith("gemma"):
            self.after_mixer = norm("post_attention_layernorm")
            self.before_mlp = norm("pre_feedforward_layernorm")
            self.after_mlp = norm("post_feedforward_layernorm")
        else:
            self.before_mlp = norm("post_attention_layernorm")
        self.mlp = GatedMLP(checkpoint, config, f"{prefix}.mlp")

    def __call__(
        self,
        stream: Residual | FusedResidual,
        rotation: Rotation | FusedRotation,
        attention: AttentionPlan | PagedPlan,
        rows: Tensor | None = None,
    ) -> Residual | FusedResidual:
        """Add to the stream ``[tokens, hidden]`` and return it; stores the tokens' keys and values.

        With ``rows`` nothing but these is computed behind the attention, and returned.
        """
        change = self.mixer(stream.normed(self.before_mixer), rotation, attention, rows)
        if rows is not None:
            stream = stream.rows(rows)
        stream.add(change, self.after_mixer)
        stream.add(self.mlp(stream.normed(self.before_mlp)), self.after_mlp)
        return stream


class GatedMLP:
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, checkpoint: Checkpoint, config: Mapping[str, Any], prefix: str) -> None:
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        bias = bool(config.get("mlp_bias"))
        names = [f"{prefix}.{part}" for part in ("gate_proj", "up_proj")]
        weights = [f"{name}.weight" for name in names]
        self.gate_up = Gated(
            checkpoint.rows(weights, [(inner, hidden)] * 2),
            checkpoint.rows([f"{name}.bias" for name in names], [(inner,)] * 2) if bias else None,
            config["hidden_act"],
            checkpoint.codes(weights),
        )
        self.down = Linear(
            checkpoint.tensor(f"{prefix}.down_proj.weight", (hidden, inner)),
            checkpoint.tensor(f"{prefix}.down_proj.bias", (hidden,)) if bias else None,
            checkpoint.codes([f"{prefix}.down_proj.weight"]),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]`` to the same shape."""
        return self.down(self.gate_up(x))


def _rotaries(config: Mapping[str, Any], checkpoint: Checkpoint) -> list[Rotary]:
    dim, scaling = config["head_dim"], config.get("rope_scaling")
    factors = None
    if scaling and scaling.get("rope_type") == "frequency_factors":
        factors = torch.empty(dim // 2)
        checkpoint.read(scaling["tensor"], (dim // 2,), factors)
    rotaries = [Rotary(dim, config["rope_theta"], scaling, factors)]
    if "rope_local_base_freq" in config:
        rotaries.append(Rotary(dim, config["rope_local_base_freq"]))
    return rotaries


def _kind(layer: MemoryLayer) -> str:
    if not isinstance(layer, Attention):
        return f"layers of kind {layer.kind}"
    return "attention in chunks" if layer.chunk is not None else "attention with an indexer"


def check_network(spec: ModelSpec) -> None:
    """Refuse what this decoder does not compute.

    Raises:
        UnsupportedModel: a family, a kind of layer or a mechanism is not computed, or a key is missing that the
            network is built from; names it.
    """
    config = spec.config
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"model_type: {family!r} is not computed; supported are {', '.join(FAMILIES)}", key="model_type"
        )
    for layer in spec.layers:
        if not isinstance(layer, Attention) or layer.chunk is not None or layer.indexer is not None:
            raise UnsupportedModel(
                f"layers: {spec.name} has {_kind(layer)}, which is not computed; the engine runs attention over all "
                f"tokens or a window, and `kvist plan` counts the other kinds",
                key="layers",
            )
    for key in _NEEDED:
        if config.get(key) is None:
            raise UnsupportedModel(
                f"{key}: missing from {spec.source}, and the network is built from it; add it", key=key
            )
    activation = config["hidden_act"]
    if activation not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"hidden_act: {activation!r} is not computed; supported are {', '.join(_ACTIVATIONS)}", key="hidden_act"
        )
    if config.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedModel(
            f"partial_rotary_factor: {config['partial_rotary_factor']} is not computed; heads are turned whole",
            key="partial_rotary_factor",
        )
    if config.get("quantization_config") is not None:
        raise UnsupportedModel(
            "quantization_config: packed weights are read from GGUF files only", key="quantization_config"
        )
