"""GGUF metadata under Hugging Face's names, so that one reader a family serves every source.

What the format leaves out of a model is filled in by the rule of its family and listed as an assumption.
Source of the metadata keys: docs/gguf.md of the ggml repository; of the rules: the model loader of llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvist.errors import BadFile, UnsupportedModel
from kvist.spec.agreement import GGUF, Claim
from kvist.spec.described import checked
from kvist.spec.families import Reading
from kvist.spec.gguf.header import GGUFArray, GGUFHeader
from kvist.spec.model import Assumption

# general.architecture: model_type of Hugging Face. SmolLM2 and Mistral files call themselves llama.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

# Mechanisms that remember something else than a key and a value of one width, and experts, which are not computed.
_UNREAD = (
    "expert_count", "full_attention_interval", "decoder_block_count", "attention.chunk_size",
    "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla",
    "attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers",
)  # fmt: skip
_UNREAD_PREFIXES = ("ssm.", "wkv.", "kda.", "shortconv.", "attention.indexer.")

_SPECIAL_TOKENS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


@dataclass(frozen=True, kw_only=True)
class NamedConfig:
    """A configuration under Hugging Face's names, and what had to be filled in to write it."""

    config: dict[str, Any]
    assumed: tuple[Assumption, ...]


def read_header_config(header: GGUFHeader, assume: Mapping[str, Any]) -> Reading:
    """Read a header as the family that it belongs to, and hold it against its tensors.

    Raises:
        UnsupportedModel, BadFile: as :func:`config_of` and the family's reader.
    """
    named = config_of(header)
    reading = checked(named.config, assume, file=header.name, assumed=named.assumed)
    if not assume:
        hold(header, reading)
    return reading


def hold(header: GGUFHeader, reading: Reading) -> None:
    """Hold what was read against the tensors of the file.

    Raises:
        BadFile: other layers, or other widths of keys and values, than the metadata say.
    """
    claim = Claim(
        file=header.name,
        layers_key=f"{header.metadata['general.architecture']}.block_count",
        layers=reading.layers,
        extra=0,
        config=reading.config,
    )
    claim.hold({tensor.name: tensor.shape for tensor in header.tensors}, GGUF)


def config_of(header: GGUFHeader) -> NamedConfig:
    """Translate a header's metadata.

    Raises:
        UnsupportedModel: of another architecture, or with a mechanism that is not read.
        BadFile: a needed key is missing, of another kind, or contradicts the tensors.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{header.name}: general.architecture is {architecture!r}; supported are {', '.join(ARCHITECTURES)}",
            key="general.architecture",
        )
    return _Translation(header, architecture).run()


class _Translation:
    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self.header = header
        self.arch = architecture
        self.assumed: list[Assumption] = []

    def run(self) -> NamedConfig:
        self.refuse_unread()
        heads = self.whole("attention.head_count")
        hidden = self.whole("embedding_length")
        kv_heads = self.whole("attention.head_count_kv", default=heads)
        head_dim = self.whole("attention.key_length", default=hidden // heads if heads else 0)
        value_dim = self.whole("attention.value_length", default=head_dim)
        if value_dim != head_dim:
            raise UnsupportedModel(
                f"{self.header.name}: {self.arch}.attention.value_length is {value_dim}, the key length {head_dim}; "
                f"they must be equal in a {self.arch} model",
                key=f"{self.arch}.attention.value_length",
            )
        config: dict[str, Any] = {
            "model_type": ARCHITECTURES[self.arch],
            "num_hidden_layers": self.whole("block_count"),
            "hidden_size": hidden,
            "intermediate_size": self.whole("feed_forward_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self.whole("context_length"),
            "vocab_size": self.vocabulary(),
            "rms_norm_eps": self.real("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.rope_theta(),
            "rope_scaling": self.rope_scaling(),
            "hidden_act": "silu",
            "attention_bias": "blk.0.attn_q.bias" in self.header.tensor_by_name,
            "mlp_bias": "blk.0.ffn_up.bias" in self.header.tensor_by_name,
            "tie_word_embeddings": "output.weight" not in self.header.tensor_by_name,
        }
        rotated = self.whole("rope.dimension_count", default=head_dim)
        if rotated != head_dim:
            config["partial_rotary_factor"] = rotated / head_dim if head_dim else 0
        if self.arch in ("qwen2", "qwen3"):
            config["use_sliding_window"] = False
        if self.arch == "gemma3":
            config |= self.gemma3(hidden, heads, head_dim)
        for name, key in _SPECIAL_TOKENS.items():
            if key in self.header.metadata:
                config[name] = self.header.metadata[key]
        return NamedConfig(config=config, assumed=tuple(self.assumed))

    def gemma3(self, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
        """Gemma 3: windows in five of six layers, two rotary bases, its own attention scale."""
        config: dict[str, Any] = {
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": self.whole("attention.sliding_window"),
            "attn_logit_softcapping": self.get("attn_logit_softcapping"),
            "final_logit_softcapping": self.get("final_logit_softcapping"),
        }
        pattern = self.get("attention.sliding_window_pattern")
        if isinstance(pattern, GGUFArray):
            flags = self.header.array(f"{self.arch}.attention.sliding_window_pattern")
            config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in flags]
        elif pattern is not None:
            config["sliding_window_pattern"] = pattern
        else:
            config["sliding_window_pattern"] = 6
            self.assume("sliding_window_pattern", 6, "GGUF leaves it out; Gemma 3 has 5 sliding layers, then 1 full")
        local_base = self.get("rope.freq_base_swa")
        if local_base is None:
            local_base = 10000.0
            self.assume("rope_local_base_freq", local_base, "GGUF leaves it out; Gemma 3 rotates its windows so")
        config["rope_local_base_freq"] = local_base
        # llama.cpp scales the queries of the 27B model (62 layers) by its hidden size a head, all others by head_dim.
        scalar = hidden // heads if heads and self.whole("block_count") == 62 else head_dim
        config["query_pre_attn_scalar"] = scalar
        self.assume("query_pre_attn_scalar", scalar, "GGUF leaves it out; the rule of llama.cpp for Gemma 3")
        return config

    def refuse_unread(self) -> None:
        """Stop at mechanisms of which the cache or the network is not read, and at a part of a model."""
        if self.get("attention.causal") is False:
            raise UnsupportedModel(
                f"{self.header.name}: {self.arch}.attention.causal is false; an encoder keeps no cache",
                key=f"{self.arch}.attention.causal",
            )
        unread = list(_UNREAD) if self.arch == "gemma3" else [*_UNREAD, "attention.sliding_window"]
        named = [full.removeprefix(f"{self.arch}.") for full in self.header.metadata]
        for key in [*unread, *(key for key in named if key.startswith(_UNREAD_PREFIXES))]:
            if self.get(key):
                raise UnsupportedModel(
                    f"{self.header.name}: {self.arch}.{key} is {self.get(key)!r}; it is not read for {self.arch} files",
                    key=f"{self.arch}.{key}",
                )

    def rope_theta(self) -> float:
        base = self.get("rope.freq_base")
        if base is None:
            base = 10000.0
            self.assume("rope_theta", base, "GGUF leaves it out; the default of llama.cpp")
        return float(base)

    def rope_scaling(self) -> dict[str, Any] | None:
        """Scaled rotary frequencies; a tensor of factors (Llama 3.1) is named, not read."""
        if "rope_freqs.weight" in self.header.tensor_by_name:
            return {"rope_type": "frequency_factors", "tensor": "rope_freqs.weight"}
        kind = self.get("rope.scaling.type")
        if kind in (None, "none"):
            return None
        if kind not in ("linear", "yarn"):
            raise UnsupportedModel(
                f"{self.header.name}: {self.arch}.rope.scaling.type is {kind!r}; supported are none, linear, yarn",
                key=f"{self.arch}.rope.scaling.type",
            )
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self.real("rope.scaling.factor")}
        if self.get("rope.scaling.original_context_length") is not None:
            scaling["original_max_position_embeddings"] = self.whole("rope.scaling.original_context_length")
        return scaling

    def vocabulary(self) -> int | None:
        embedding = self.header.tensor_by_name.get("token_embd.weight")
        if embedding is not None and len(embedding.shape) == 2:
            return embedding.shape[0]
        tokens = self.header.metadata.get("tokenizer.ggml.tokens")
        return tokens.count if isinstance(tokens, GGUFArray) else None

    def assume(self, key: str, value: Any, source: str) -> None:
        self.assumed.append(Assumption(key=key, value=value, source=source))

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.arch}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, GGUFArray):
            raise UnsupportedModel(
                f"{self.header.name}: {self.arch}.{key} has a value for each layer; one number is read",
                key=f"{self.arch}.{key}",
            )
        if value is None:
            raise self.missing(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise BadFile(
                f"{self.header.name}: {self.arch}.{key} is {value!r}; a whole number was expected",
                key=f"{self.arch}.{key}",
            )
        return value

    def real(self, key: str) -> float:
        value = self.get(key)
        if value is None:
            raise self.missing(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise BadFile(
                f"{self.header.name}: {self.arch}.{key} is {value!r}; a number was expected", key=f"{self.arch}.{key}"
            )
        return float(value)

    def missing(self, key: str) -> BadFile:
        full = f"{self.arch}.{key}"
        return BadFile(f"{self.header.name}: {full} is missing; a {self.arch} file names it", key=full)
