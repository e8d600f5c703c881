"""Hold a description against the tensors beside it: a wrong count on one side must not be planned.

Tensors have names of the family's network, and what they are for is read off those names. What is not recognised is
not judged; what is recognised must have the shape that the layer's memory needs: a layer that stores ``kv_heads`` keys
of ``key_dim`` computes them with a matrix of as many rows.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from kvist.errors import BadFile
from kvist.spec.layers import Attention, Latent, Layer, Nothing, Parallel, State
from kvist.spec.safetensors import SafeTensor

# Of each tensor by name: outermost dimension first; None where codes are packed, whose shape is not the matrix's.
Shapes = Mapping[str, tuple[int, ...] | None]


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How a kind of file names the tensors of the decoder.

    Attributes:
        layer: of a whole name: the layer's index and the rest.
        roles: of the rest: what the tensor does.
        fixed: every such file uses these names, so that one without them is wrong.
    """

    layer: re.Pattern[str]
    roles: Mapping[str, re.Pattern[str]]
    fixed: bool = False

    def role(self, rest: str) -> str | None:
        """Return what the tensor called ``rest`` within its layer does, where that is known."""
        return next((role for role, pattern in self.roles.items() if pattern.fullmatch(rest)), None)


_ATTENTION = r"(?:self_attn|self_attention|attention|attn|mixer|temporal_block|norm_attn_norm\.attn)"
_MATRIX = r"(?:weight|qweight|weight_packed)"

# Prefixes of the text decoders, alone or inside a multimodal model; towers for images and sound have others.
HUGGING_FACE = Naming(
    layer=re.compile(
        r"(?:transformer\.encoder\.|(?:(?:model|language_model|text_model|llm|lm|transformer|decoder|gpt_neox|backbone"
        r"|thinker|base_model)\.)*)(?:layers|h|blocks|block)\.(0|[1-9][0-9]{0,5})\.(.+)"
    ),
    roles={
        role: re.compile(pattern)
        for role, pattern in {
            "query": rf"{_ATTENTION}\.q_proj\.{_MATRIX}",
            "key": rf"{_ATTENTION}\.(?:k_proj|wk)\.{_MATRIX}",
            "value": rf"{_ATTENTION}\.(?:v_proj|wv)\.{_MATRIX}",
            "fused": rf"{_ATTENTION}\.(?:qkv_proj|query_key_value|W_pack|Wqkv|wqkv|c_attn|qkv)\.{_MATRIX}",
            "latent": rf"{_ATTENTION}\.kv_a_proj_with_mqa\.{_MATRIX}",
            "convolution": rf"(?:{_ATTENTION}|mamba|linear_attn|conv)\.(?:[qkv]_)?conv(?:_?1d)?\.weight",
        }.items()
    },
)
GGUF = Naming(
    fixed=True,
    layer=re.compile(r"(?:dec\.)?blk\.(0|[1-9][0-9]{0,5})\.(.+)"),
    roles={
        role: re.compile(pattern)
        for role, pattern in {
            "query": r"attn_q\.weight",
            "key": r"attn_k\.weight",
            "value": r"attn_v\.weight",
            "fused": r"attn_qkv\.weight",
            "latent": r"attn_kv_a_mqa\.weight",
            "convolution": r"(?:ssm_conv1d(?:_[qkv])?|shortconv\.conv)\.weight",
        }.items()
    },
)

# Elements that are weights, and not codes packed into wider integers.
_WHOLE_TYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
_DRAFT_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")

# Families whose queries are heads x head width with nothing else in the matrix, computed from the hidden state.
_PLAIN = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3"})


# Keys by which layers have query heads of their own number.
_OWN_QUERIES = frozenset(
    {"per_layer_config", "num_query_heads", "attention_other_setting", "num_attention_heads_per_layer"}
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a description says of the tensors.

    Attributes:
        file: the file that says so, for messages.
        layers_key: under which it gives the number of layers.
        layers: what each layer of the checkpoint remembers.
        extra: layers behind them that draft tokens.
        config: the completed configuration.
    """

    file: str
    layers_key: str
    layers: tuple[Layer, ...]
    extra: int
    config: Mapping[str, Any]

    def hold(self, tensors: Shapes, naming: Naming) -> None:
        """Hold the tensors that ``naming`` recognises against this.

        Raises:
            BadFile: other layers, or other widths of keys and values.
        """
        present: set[int] = set()
        found: dict[int, dict[str, dict[str, tuple[int, ...]]]] = {}
        for name, shape in tensors.items():
            match = naming.layer.fullmatch(name)
            if not match:
                continue
            index = int(match[1])
            present.add(index)
            role = naming.role(match[2])
            if role is not None:
                known = found.setdefault(index, {}).setdefault(role, {})
                if shape is not None:
                    known[name] = shape
        storing = {role for roles in found.values() for role in roles} & {"key", "fused", "latent", "convolution"}
        if not storing and not naming.fixed:
            return
        self._hold_layers(present)
        self._hold_stored(found)
        for index, roles in found.items():
            if index < len(self.layers):
                for part in self.layers[index].stored:
                    self._hold_shapes(part, roles)

    def _hold_layers(self, present: Iterable[int]) -> None:
        """The tensors must be those of layers 0 to N - 1, and of no other but the drafting ones behind."""
        found = set(present)
        needed = {index for index, layer in enumerate(self.layers) if not isinstance(layer, Nothing)}
        if needed <= found and max(found) < len(self.layers) + self.extra:
            return
        self._refuse_layers("weights", found, needed)

    def _hold_stored(self, found: Mapping[int, Mapping[str, Any]]) -> None:
        """Where keys and values have matrices of their own, each layer that stores them must have both."""
        needed = {index for index, layer in enumerate(self.layers) if _attention(layer) is not None}
        fused = {index for index, roles in found.items() if "fused" in roles}
        for role, what in (("key", "keys"), ("value", "values")):
            having = {index for index, roles in found.items() if role in roles and index < len(self.layers)}
            if role == "value" and self.config.get("attention_k_eq_v"):
                continue
            if having & needed and not needed <= having | fused:
                self._refuse_layers(what, having, needed)

    def _refuse_layers(self, what: str, found: set[int], needed: set[int]) -> None:
        count = len(found)
        said = f"the tensors hold {what} of {count} {'layer' if count == 1 else 'layers'}"
        gap = min(needed - found, default=None)
        if gap is not None and gap < max(found, default=-1):
            said += f", the last {max(found)}, without {gap}"
        raise BadFile(
            f"{self.file}: {self.layers_key} is {len(self.layers)}, but {said}; "
            f"one of the two is wrong: fetch it again",
            key=self.layers_key,
        )

    def _hold_shapes(self, part: Layer, roles: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
        match part:
            case Attention(kv_heads=heads, key_dim=key, value_dim=value):
                for name, shape in roles.get("key", {}).items():
                    self._hold_width(name, shape, heads * key, "KV heads x head width")
                for name, shape in roles.get("value", {}).items():
                    self._hold_width(name, shape, heads * value, "KV heads x head width")
                for name, shape in roles.get("fused", {}).items():
                    self._hold_fused(name, shape, heads * (key + value), key)
                queries = self.config.get("num_attention_heads")
                if self.config.get("model_type") in _PLAIN and isinstance(queries, int):
                    for name, shape in roles.get("query", {}).items():
                        self._hold_width(name, shape, queries * key, "query heads x head width")
            case Latent(rank=rank, rope_dim=rope):
                for name, shape in roles.get("latent", {}).items():
                    self._hold_width(name, shape, rank + rope, "latent + rotary key")
            case State(conv_elements=elements) if elements:
                self._hold_convolution(roles.get("convolution", {}), elements)

    def _hold_width(self, name: str, shape: tuple[int, ...], width: int, what: str) -> None:
        if not shape or shape[0] != width:
            raise BadFile(
                f"{self.file}: {name} gives {shape[0] if shape else 0} values a token, the metadata {width} ({what})",
                key=name,
            )
        hidden = self.config.get("hidden_size")
        if self.config.get("model_type") in _PLAIN and len(shape) == 2 and shape[1] != hidden and hidden is not None:
            raise BadFile(f"{self.file}: {name} takes {shape[1]} values, the hidden size is {hidden}", key=name)

    def _hold_fused(self, name: str, shape: tuple[int, ...], stored: int, key_dim: int) -> None:
        """Queries, keys and values in one matrix: what is not stored must be the queries."""
        if len(shape) != 2:
            return
        # GPT-2 keeps its matrices the other way round.
        widths = [side - stored for side in (shape if name.endswith("c_attn.weight") else shape[:1])]
        queries = self.config.get("num_attention_heads")
        if isinstance(queries, int) and not _OWN_QUERIES & set(self.config):
            fits, asked = queries * key_dim in widths, f"{queries} queries"
        else:
            fits, asked = any(width > 0 and width % key_dim == 0 for width in widths), "whole queries"
        if not fits:
            raise BadFile(
                f"{self.file}: {name} gives {shape[0]} values a token, which are not {asked} of width {key_dim} beside "
                f"{stored} of keys and values",
                key=name,
            )

    def _hold_convolution(self, convolutions: Mapping[str, tuple[int, ...]], elements: int) -> None:
        """``kernel - 1`` columns of all channels; a weight is ``[channels, 1, kernel]`` or ``[channels, kernel]``."""
        if not convolutions or not all(len(shape) > 1 for shape in convolutions.values()):
            return
        stored = sum(prod(shape[:-1]) * (shape[-1] - 1) for shape in convolutions.values())
        if stored != elements:
            name = next(iter(convolutions))
            raise BadFile(
                f"{self.file}: {name} needs {stored} of the last inputs of its convolution, the metadata {elements}",
                key=name,
            )


def _attention(layer: Layer) -> Attention | None:
    parts = layer.parts if isinstance(layer, Parallel) else (layer,)
    return next((part for part in parts if isinstance(part, Attention)), None)


def hold_safetensors(
    layers: tuple[Layer, ...], config: Mapping[str, Any], tensors: Mapping[str, SafeTensor], *, file: str
) -> None:
    """Hold a completed configuration against the tensors of its directory, where their names are known.

    Args:
        layers: what the configuration was read as.
        config: the configuration, completed.
        tensors: of a safetensors checkpoint, by name.
        file: what messages call it.

    Raises:
        BadFile: other layers, or other widths of keys and values, than the configuration says.
    """
    key = next((name for name in _LAYER_COUNTS if config.get(name) is not None), _LAYER_COUNTS[0])
    # A reader may find more than one memory in a layer of the checkpoint; then the tensors' indices mean another thing.
    if config.get(key, len(layers)) != len(layers):
        return
    drafting = [config.get(name) for name in _DRAFT_COUNTS]
    claim = Claim(
        file=file,
        layers_key=key,
        layers=layers,
        extra=max([count for count in drafting if isinstance(count, int)], default=0),
        config=config,
    )
    shapes = {name: tensor.shape if tensor.dtype in _WHOLE_TYPES else None for name, tensor in tensors.items()}
    claim.hold(shapes, HUGGING_FACE)
