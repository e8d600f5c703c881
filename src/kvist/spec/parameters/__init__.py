"""How many weights a network has, from its configuration: exact for the families listed here, unknown for others.

Each count was held against the network that transformers builds from the same configuration; where a family is not
in transformers, against its published files.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from kvist.errors import UnsupportedModel
from kvist.spec.layers import Layer
from kvist.spec.parameters.inventory import Inventory, Keys, Tensor

__all__ = ["FAMILIES", "Inventory", "Tensor", "inventory_of"]

# Families by the module that knows them, in a dict of its own name; only that one is loaded.
_HOMES = {
    "classic": (
        "bloom", "falcon", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt",
    ),
    "decoders": (
        "Yi", "apertus", "apertus1p5", "aquila", "arcee", "baichuan", "cohere", "cohere2", "cwm", "diffllama",
        "ernie4_5", "exaone", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "granite", "helium",
        "hunyuan_v1_dense", "hyperclovax", "internlm2", "iquestcoder", "jais2", "llama", "minicpm", "ministral",
        "ministral3", "mistral", "nemotron", "olmo", "olmo2", "olmo3", "orion", "phi", "phi3", "qwen2",
        "qwen2_5_vl", "qwen2_vl", "qwen3", "qwen3_vl", "seed_oss", "skywork", "smollm3", "stablelm",
        "starcoder2", "vaultgemma", "xverse",
    ),
    "experts": (
        "dbrx", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
        "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoeshared",
        "hunyuan_v1_moe", "hy_v3", "kimi_k2", "llama4_text", "longcat_flash", "mellum", "mimo_v2_flash",
        "minicpm3", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe",
        "sarvam_mla", "sarvam_moe", "solar_open", "youtu",
    ),
    "recurrent": (
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe",
        "mamba", "mamba2", "minimax", "minimax_text_01", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next",
        "recurrent_gemma",
    ),
    "special": (
        "deepseek_v4", "gemma3n", "gemma4", "gemma4_unified",
    ),
}  # fmt: skip

FAMILIES = {family: home for home, families in _HOMES.items() for family in families}


def inventory_of(config: Mapping[str, Any], layers: Sequence[Layer]) -> Inventory:
    """List the weights of the network that a configuration describes, under Hugging Face's names.

    Draft heads (multi-token prediction) are left out, as engines leave them out unless told otherwise.

    Args:
        config: completed, as a family's reader leaves it.
        layers: what its layers remember, which tells attention from recurrence.

    Raises:
        UnsupportedModel: the family is not known here, or a key that its shapes depend on is missing; names it.
    """
    keys = Keys(config, layers)
    name = keys.family if keys.family in FAMILIES else keys.family.removesuffix("_text")
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"the weights of model_type {keys.family} cannot be counted: its shapes are not known here",
            key="model_type",
        )
    home = FAMILIES[name]
    readers: dict[str, Callable[[Keys], Inventory]] = getattr(
        import_module(f"kvist.spec.parameters.{home}"), home.upper()
    )
    return readers[name](keys)
