"""How many weights packed checkpoints stand for, by the layouts that quantising packages write."""

from typing import Any

import pytest

from kvist.spec.packed import count_parameters
from kvist.spec.safetensors import SafeTensor

ROWS, COLUMNS = 256, 512


def tensors(kinds: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, SafeTensor]:
    return {
        f"model.layers.0.mlp.up_proj.{name}": SafeTensor(dtype=dtype, shape=shape, bytes=0)
        for name, (dtype, shape) in kinds.items()
    } | {"model.norm.weight": SafeTensor(dtype="BF16", shape=(COLUMNS,), bytes=0)}


GPTQ = {
    "qweight": ("I32", (COLUMNS // 8, ROWS)),
    "qzeros": ("I32", (4, ROWS // 8)),
    "scales": ("F16", (4, ROWS)),
    "g_idx": ("I32", (COLUMNS,)),
}
GROUPS = {"group_0": {"weights": {"num_bits": 4}}}


@pytest.mark.parametrize(
    ("quantization", "stored"),
    [
        (None, {"weight": ("BF16", (ROWS, COLUMNS))}),
        ({"quant_method": "gptq", "bits": 4}, GPTQ),
        ({"quant_method": "gptq", "bits": 3}, GPTQ | {"qweight": ("I32", (COLUMNS * 3 // 32, ROWS))}),
        ({"quant_method": "awq", "bits": 4}, GPTQ | {"qweight": ("I32", (COLUMNS, ROWS // 8))}),
        (
            {"quant_method": "fp8"},
            {"weight": ("F8_E4M3", (ROWS, COLUMNS)), "weight_scale_inv": ("F32", (2, 4))},
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            {
                "weight": ("U8", (ROWS, COLUMNS // 2)),
                "weight_scale": ("F8_E4M3", (ROWS, COLUMNS // 16)),
                "weight_scale_2": ("F32", ()),
                "input_scale": ("F32", ()),
            },
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": GROUPS},
            {
                "weight_packed": ("I32", (ROWS, COLUMNS // 8)),
                "weight_scale": ("BF16", (ROWS, 4)),
                "weight_shape": ("I64", (2,)),
            },
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            {
                "weight": ("U8", (ROWS * COLUMNS // 2, 1)),
                "weight.absmax": ("U8", (2048,)),
                "weight.quant_map": ("F32", (16,)),
                "weight.quant_state.bitsandbytes__nf4": ("U8", (80,)),
            },
        ),
    ],
)
def test_layouts(quantization: dict[str, Any] | None, stored: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    assert count_parameters(tensors(stored), quantization) == ROWS * COLUMNS + COLUMNS


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "hqq", "bits": 4},
        {"quant_method": "gptq"},
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {}}},
        {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": GROUPS},
        {"quant_method": "fp8"},
        {},
        [],
        "gptq",
    ],
)
def test_layouts_that_are_not_read_have_no_count(quantization: object) -> None:
    assert count_parameters(tensors({"qweight": ("I32", (64, 256))}), quantization) is None


def test_mxfp4_experts() -> None:
    experts = {
        "model.layers.0.mlp.experts.down_proj_blocks": SafeTensor(dtype="U8", shape=(4, 64, 2, 16), bytes=0),
        "model.layers.0.mlp.experts.down_proj_scales": SafeTensor(dtype="U8", shape=(4, 64, 2), bytes=0),
        "model.layers.0.mlp.experts.down_proj_bias": SafeTensor(dtype="BF16", shape=(4, 64), bytes=0),
    }
    assert count_parameters(experts, {"quant_method": "mxfp4"}) == 4 * 64 * 64 + 4 * 64
