"""In how many bytes a checkpoint stores its weights: plain types, codecs with scales, and ``quantization_config``.

Quantisers work on linear layers. Embeddings, the output head, norms, routers, convolutions and biases keep the
checkpoint's own type unless the configuration says otherwise. What a scheme stores beside the codes (scales, zeros,
permutations) is counted where every tensor of its published checkpoints has it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from kvist.errors import InputError, UnsupportedModel
from kvist.spec.formats import CODECS
from kvist.spec.parameters.inventory import Tensor


@dataclass(frozen=True, kw_only=True)
class WeightCodec:
    """How a matrix ``[out, in]`` is stored.

    Attributes:
        name: as the user writes it.
        bits: of one element.
        rows: rows that share one scale; 0: all of them.
        columns: columns that share one; 0: all of them.
        scale_bits: of what a group has: its scale and, where there is one, its zero.
        column_bytes: bytes for each column, such as GPTQ's order of groups.
        matrix_bytes: bytes for each matrix.
    """

    name: str
    bits: int
    rows: int = 1
    columns: int = 1
    scale_bits: int = 0
    column_bytes: int = 0
    matrix_bytes: int = 0

    def matrix(self, out: int, into: int) -> int:
        """Bytes of one matrix."""
        groups = -(-out // (self.rows or out)) * -(-into // (self.columns or into))
        data = -(-out * into * self.bits // 8)
        return data + -(-groups * self.scale_bits // 8) + into * self.column_bytes + self.matrix_bytes


def _plain(name: str) -> WeightCodec:
    codec = CODECS[name]
    return WeightCodec(name=name, bits=codec.bits, columns=codec.group, scale_bits=8 * codec.scale_bytes)


# NVIDIA's 4 bits: an fp8 scale for 16 elements, and an f32 scale for the matrix and for what it is multiplied with.
_NVFP4 = WeightCodec(name="nvfp4", bits=4, columns=16, scale_bits=8, matrix_bytes=8)
# Microscaling, OCP: one exponent byte for 32 elements.
_MXFP4 = WeightCodec(name="mxfp4", bits=4, columns=32, scale_bits=8)
# bitsandbytes: an f32 scale for each 64 elements.
_NF4 = WeightCodec(name="nf4", bits=4, columns=64, scale_bits=32)
# The common choice of AWQ: groups of 128 with an f16 scale and a 4-bit zero.
_AWQ = WeightCodec(name="awq", bits=4, columns=128, scale_bits=20)

WEIGHT_CODECS: dict[str, WeightCodec] = {
    **{name: _plain(name) for name in CODECS if CODECS[name].bits <= 32},
    "mxfp4": _MXFP4,
    "nvfp4": _NVFP4,
    "nf4": _NF4,
    "awq": _AWQ,
    "gptq": WeightCodec(name="gptq", bits=4, columns=128, scale_bits=20, column_bytes=4),
}

# What a configuration calls the type of its weights.
_TYPES = {
    "bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32",
    "float8_e4m3fn": "fp8", "float8_e5m2": "fp8",
}  # fmt: skip
_PLAIN = ("f32", "f16", "bf16")


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How each tensor of a checkpoint is stored.

    Attributes:
        rest: the type of what is not quantised.
        groups: codecs, and which linear layers each is for; the first that takes one counts.
        source: where that is said.
        assumed_type: whether ``rest`` is a default that nothing says.
    """

    rest: WeightCodec
    groups: tuple[tuple[WeightCodec, Callable[[str], bool]], ...] = ()
    source: str
    assumed_type: bool = False

    def codec(self, tensor: Tensor, layer: int | None) -> WeightCodec:
        """Of a tensor in one of its layers."""
        if self.groups and len(tensor.shape) == 2 and tensor.role in ("linear", "head", "router", "embedding"):
            name = tensor.name if layer is None else tensor.name.replace("#", str(layer))
            # Experts are treated alike; lists that name each of them name the first.
            name = name.replace("*", "0")
            for codec, takes in self.groups:
                if takes(f"{tensor.role}:{name}"):
                    return codec
        return self.rest

    def sizes(self, tensor: Tensor) -> dict[int | None, "StoredSize"]:
        """Of a tensor in each of its layers, all copies together; under None outside of layers."""
        out, into = (tensor.shape[0], prod(tensor.shape[1:])) if len(tensor.shape) > 1 else (1, tensor.shape[0])
        places: tuple[int | None, ...] = tensor.layers or (None,)
        codecs = {layer: self.codec(tensor, layer) for layer in places}
        by_codec = {
            codec: StoredSize(codec=codec.name, size=tensor.copies * codec.matrix(out, into))
            for codec in set(codecs.values())
        }
        return {layer: by_codec[codec] for layer, codec in codecs.items()}


@dataclass(frozen=True, kw_only=True)
class StoredSize:
    """In which codec a tensor is stored, and its bytes."""

    codec: str
    size: int


def storage_of(config: Mapping[str, Any], weights: str | None) -> Storage:
    """Return how the weights are stored: in the codec ``weights``, or as the configuration says.

    Raises:
        InputError: no such codec.
        UnsupportedModel: a quantisation that is not known here; names what stopped it.
    """
    rest, assumed = _type_of(config)
    if weights is not None:
        codec = weight_codec_named(weights)
        if weights in _PLAIN:
            return Storage(rest=codec, source="--weights")
        return Storage(rest=rest, groups=((codec, _only_linear),), source="--weights", assumed_type=assumed)
    scheme = config.get("quantization_config")
    if isinstance(scheme, Mapping) and config.get("expert_dtype") == "fp4" and "config_groups" not in scheme:
        groups = ((_MXFP4, _takes(["Linear"], [], only_experts=True)), *_groups(scheme))
        return Storage(rest=rest, groups=groups, source="quantization_config", assumed_type=assumed)
    if not isinstance(scheme, Mapping):
        return Storage(rest=rest, source="dtype", assumed_type=assumed)
    return Storage(rest=rest, groups=_groups(scheme), source="quantization_config", assumed_type=assumed)


def weight_codec_named(name: object, *, key: str = "weights") -> WeightCodec:
    """Return the codec of this name.

    Raises:
        InputError: there is none.
    """
    if not isinstance(name, str) or name not in WEIGHT_CODECS:
        raise InputError(
            f"{key}: {name!r} is not a codec for weights; choose one of {', '.join(WEIGHT_CODECS)}", key=key
        )
    return WEIGHT_CODECS[name]


def _type_of(config: Mapping[str, Any]) -> tuple[WeightCodec, bool]:
    for key in ("dtype", "torch_dtype"):
        named = config.get(key)
        if isinstance(named, str):
            name = _TYPES.get(named.removeprefix("torch."))
            if name is not None:
                return WEIGHT_CODECS[name], False
    return WEIGHT_CODECS["bf16"], True


def _only_linear(place: str) -> bool:
    return place.startswith("linear:")


def _groups(scheme: Mapping[str, Any]) -> tuple[tuple[WeightCodec, Callable[[str], bool]], ...]:
    """Codecs of a ``quantization_config``, and what each is for."""
    method = scheme.get("quant_method")
    ignored = [
        *_names(scheme, "modules_to_not_convert"), *_names(scheme, "ignore"), *_names(scheme, "ignored_layers"),
        *_names(scheme, "exclude_modules"), *_names(scheme, "llm_int8_skip_modules"),
    ]  # fmt: skip
    if "config_groups" in scheme:
        return _config_groups(scheme, ignored)
    if isinstance(method, str) and method in _METHODS:
        codec = _METHODS[method](scheme)
        only_experts = method == "mxfp4"
        return ((codec, _takes(["Linear"], ignored, only_experts=only_experts)),)
    raise UnsupportedModel(
        f"quantization_config.quant_method {str(method)[:40]!r} is not known here; known are {', '.join(_METHODS)}, "
        f"compressed-tensors and modelopt: say how the weights are stored with `weights`",
        key="quantization_config",
    )


def _names(scheme: Mapping[str, Any], key: str) -> list[str]:
    value = scheme.get(key)
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def _number(scheme: Mapping[str, Any], key: str, default: int | None) -> int:
    value = scheme.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= 2**20:
        raise UnsupportedModel(
            f"quantization_config.{key} is {str(value)[:40]!r}; a whole number was expected", key="quantization_config"
        )
    return value


def _fp8(scheme: Mapping[str, Any]) -> WeightCodec:
    """One byte an element; an f32 scale for a block of 128 x 128 (DeepSeek-V3), or for the matrix."""
    block = scheme.get("weight_block_size")
    if block is None:
        return WeightCodec(name="fp8", bits=8, rows=0, columns=0, scale_bits=32, matrix_bytes=_activation_bytes(scheme))
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(side, int) and side > 0 for side in block):
        raise UnsupportedModel(
            f"quantization_config.weight_block_size is {str(block)[:40]}; two numbers were expected",
            key="quantization_config",
        )
    return WeightCodec(name="fp8", bits=8, rows=block[0], columns=block[1], scale_bits=32)


def _activation_bytes(scheme: Mapping[str, Any]) -> int:
    """An f32 scale of what the matrix is multiplied with, where that is fixed."""
    return 4 if scheme.get("activation_scheme") == "static" else 0


def _awq(scheme: Mapping[str, Any]) -> WeightCodec:
    """Codes, and an f16 scale and a zero for each group."""
    bits, group = _number(scheme, "bits", 4), _number(scheme, "group_size", 128)
    return WeightCodec(name=f"int{bits}", bits=bits, columns=max(0, group), scale_bits=16 + bits)


def _gptq(scheme: Mapping[str, Any]) -> WeightCodec:
    """The same, and the group of each column in 4 bytes."""
    bits, group = _number(scheme, "bits", 4), _number(scheme, "group_size", 128)
    return WeightCodec(name=f"int{bits}", bits=bits, columns=max(0, group), scale_bits=16 + bits, column_bytes=4)


def _bitsandbytes(scheme: Mapping[str, Any]) -> WeightCodec:
    """4 bits with a scale for 64 elements, which may be quantised in its turn; or int8 with a scale a row."""
    if scheme.get("load_in_8bit") or scheme.get("_load_in_8bit"):
        return WeightCodec(name="int8", bits=8, columns=0, scale_bits=32)
    if not (scheme.get("load_in_4bit") or scheme.get("_load_in_4bit")):
        raise UnsupportedModel(
            "quantization_config of bitsandbytes says neither load_in_4bit nor load_in_8bit", key="quantization_config"
        )
    nested = bool(scheme.get("bnb_4bit_use_double_quant"))
    # Nested: one byte for 64 elements, and 4 bytes for 256 of those.
    return WeightCodec(name="nf4", bits=4, columns=64, scale_bits=8) if nested else _NF4


def _fbgemm(scheme: Mapping[str, Any]) -> WeightCodec:
    """fp8 with an f32 scale a row."""
    return WeightCodec(name="fp8", bits=8, columns=0, scale_bits=32)


_METHODS: dict[str, Callable[[Mapping[str, Any]], WeightCodec]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": lambda scheme: _MXFP4,
}


def _config_groups(
    scheme: Mapping[str, Any], ignored: list[str]
) -> tuple[tuple[WeightCodec, Callable[[str], bool]], ...]:
    """Groups of compressed-tensors and of ModelOpt: bits, kind of number and scales, for layers by name or all."""
    groups = scheme["config_groups"]
    if not isinstance(groups, Mapping) or not groups:
        raise UnsupportedModel("quantization_config.config_groups holds no groups", key="quantization_config")
    found = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise UnsupportedModel(
                f"quantization_config.config_groups.{str(name)[:40]} says nothing of weights", key="quantization_config"
            )
        targets = _names(group, "targets") or ["Linear"]
        only_experts = scheme.get("quant_algo") == "MIXED_PRECISION" and "moe_quant_algo" in scheme
        found.append((_group_codec(weights), _takes(targets, ignored, only_experts=only_experts)))
    if scheme.get("quant_algo") == "MIXED_PRECISION" and scheme.get("quant_method") == "fp8":
        # What the groups leave alone is what the checkpoint was before: fp8.
        found.append((_fp8(scheme), _takes(["Linear"], [], only_experts=False)))
    return tuple(found)


def _group_codec(weights: Mapping[str, Any]) -> WeightCodec:
    bits, kind = _number(weights, "num_bits", None), weights.get("type", "int")
    group = _number(weights, "group_size", 0)
    strategy = weights.get("strategy") or ("group" if group else "tensor")
    block = weights.get("block_structure")
    name = ("fp8" if bits == 8 else "nvfp4") if kind == "float" else f"int{bits}"
    if kind not in ("float", "int") or bits not in ((4, 8) if kind == "float" else range(2, 9)):
        return _unknown_group(weights)
    if kind == "float" and bits == 4:
        return _NVFP4 if group == 16 else _MXFP4 if group == 32 else _unknown_group(weights)
    if strategy in ("group", "tensor_group") and group > 0:
        zero = 0 if weights.get("symmetric", True) else bits
        return WeightCodec(name=name, bits=bits, columns=group, scale_bits=16 + zero, matrix_bytes=16)
    if strategy == "channel":
        return WeightCodec(name=name, bits=bits, columns=0, scale_bits=32 if bits == 8 else 16)
    if strategy == "tensor":
        return WeightCodec(name=name, bits=bits, rows=0, columns=0, scale_bits=32, matrix_bytes=4)
    if strategy == "block" and isinstance(block, list) and len(block) == 2 and all(isinstance(x, int) for x in block):
        return WeightCodec(name=name, bits=bits, rows=block[0], columns=block[1], scale_bits=32)
    return _unknown_group(weights)


def _unknown_group(weights: Mapping[str, Any]) -> WeightCodec:
    raise UnsupportedModel(
        f"quantization_config has weights {str(dict(weights))[:80]}, which are not known here: say how they are stored "
        f"with `weights`",
        key="quantization_config",
    )


def _takes(targets: Iterable[str], ignored: Iterable[str], *, only_experts: bool) -> Callable[[str], bool]:
    """Which ``role:name`` a group is for: targets but not what is ignored."""
    wanted, left = _matcher(entry for entry in targets if entry != "Linear"), _matcher(ignored)
    linear = "Linear" in targets

    def takes(place: str) -> bool:
        role, _, name = place.partition(":")
        name = _short_of_parts(name)
        if only_experts and ".experts." not in name:
            return False
        return wanted(name) or (linear and role == "linear" and not left(name))

    return takes


def _short_of_parts(name: str) -> str:
    return name.replace("model.language_model.", "model.").replace("language_model.model.", "model.")


def _matcher(entries: Iterable[str]) -> Callable[[str], bool]:
    """Whether one of some entries names a module.

    Lists name modules whole or by what holds them, by a part's own name (``gate``), with wildcards, or as a pattern
    after ``re:``. They can be hundreds long, so that each kind is looked up together.
    """
    whole, parts, beginnings, expressions = set(), set(), [], []
    for entry in entries:
        plain = _short_of_parts(entry)
        if entry.startswith("re:"):
            expressions.append(entry[3:])
        elif plain.find("*") == len(plain) - 1 > 0:
            beginnings.append(plain[:-1])
        elif "*" in plain:
            expressions.append(".*".join(re.escape(piece) for piece in plain.split("*")) + r"(\..*)?$")
        elif "." in plain:
            whole.add(plain)
        else:
            parts.add(plain)
    try:
        expression = re.compile("|".join(f"(?:{each})" for each in expressions)) if expressions else None
    except re.error as error:
        raise UnsupportedModel(
            f"quantization_config lists a module by a pattern that is none: {error}", key="quantization_config"
        ) from error
    begins = tuple(beginnings)

    def match(name: str) -> bool:
        pieces = name.split(".")
        if name.startswith(begins) or not parts.isdisjoint(pieces):
            return True
        if whole and any(".".join(pieces[:end]) in whole for end in range(1, len(pieces) + 1)):
            return True
        return expression is not None and expression.match(name) is not None

    return match
