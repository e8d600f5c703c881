"""How many weights packed tensors stand for: codes of a few bits lie in wider integers, beside scales.

Sources: the layouts that the quantising packages write (AutoGPTQ, AutoAWQ, compressed-tensors, ModelOpt,
bitsandbytes) and the MXFP4 checkpoints of gpt-oss.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from kvist.spec.safetensors import SafeTensor

# Scales, zero points and indices beside the codes.
_BESIDE = (
    "_scale", "_scale_inv", "_scale_2", "_scales", "_zero_point", "_g_idx", "_shape", "_global_scale",
    ".scales", ".qzeros", ".g_idx", ".SCB", ".weight_format", ".absmax", ".nested_absmax", ".quant_map",
    ".nested_quant_map", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4",
)  # fmt: skip
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_EIGHT_BIT = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8"})


def count_parameters(tensors: Mapping[str, SafeTensor], quantization: object) -> int | None:
    """Count the weights of a checkpoint.

    Args:
        tensors: by name.
        quantization: the configuration's ``quantization_config``; None for weights that are stored as they are.

    Returns:
        None where the layout is not one that is read.
    """
    if quantization is None:
        return sum(tensor.elements for tensor in tensors.values())
    if not isinstance(quantization, Mapping):
        return None
    codes = _codes_an_element(quantization)
    if codes is None:
        return None
    total = Fraction(0)
    for name, tensor in tensors.items():
        if name.endswith(_BESIDE):
            continue
        if tensor.dtype in _FLOATS or tensor.dtype in _EIGHT_BIT:
            total += tensor.elements
        elif tensor.dtype in codes:
            total += tensor.elements * codes[tensor.dtype]
        else:
            return None
    return int(total) if total.denominator == 1 else None


def _codes_an_element(quantization: Mapping[str, Any]) -> dict[str, Fraction] | None:
    """How many weights one element of a packed type holds, by type; ``{}`` where nothing is packed."""
    match quantization:
        case {"quant_method": "gptq" | "awq" | "auto-round", "bits": int(bits)} if 1 <= bits <= 8:
            return {"I32": Fraction(32, bits)}
        case {"quant_method": "mxfp4"} | {"quant_method": "bitsandbytes", "load_in_4bit": True}:
            return {"U8": Fraction(2)}
        case {"quant_method": "fp8" | "fbgemm_fp8" | "bitsandbytes"}:
            return {}
        case {"quant_method": "modelopt", "quant_algo": "FP8"}:
            return {}
        case {"quant_method": "modelopt", "quant_algo": "NVFP4"}:
            return {"U8": Fraction(2)}
        case {"quant_method": "compressed-tensors", "format": str(form), "config_groups": dict(groups)}:
            return _compressed(form, groups)
        case _:
            return None


def _compressed(form: str, groups: Mapping[str, Any]) -> dict[str, Fraction] | None:
    if form in ("float-quantized", "int-quantized", "naive-quantized"):
        return {}
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return {"U8": Fraction(2)}
    bits = set()
    for group in groups.values():
        match group:
            case {"weights": {"num_bits": int(width)}} if 1 <= width <= 8:
                bits.add(width)
            case _:
                return None
    if form != "pack-quantized" or len(bits) != 1:
        return None
    return {"I32": Fraction(32, bits.pop())}
