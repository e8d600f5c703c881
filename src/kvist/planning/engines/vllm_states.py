"""Recurrent states as pages of vLLM's pool, and how blocks of attention are aligned with them.

Source: ``vllm/model_executor/layers/mamba/mamba_utils.py`` (shapes and types), ``vllm/platforms/interface.py``
(alignment) and ``vllm/platforms/cpu.py`` of 0.32.
"""

from collections.abc import Sequence

from kvist.planning.engines.state_shards import shard_state
from kvist.planning.engines.vllm_page import Page, unsupported
from kvist.planning.engines.vllm_settings import ELEMENT_BYTES, VllmSettings, text_config
from kvist.spec.layers import State
from kvist.spec.model import ModelSpec

# Recurrent layers that vLLM runs; those of RWKV and RecurrentGemma it does not.
_STATES = ("mamba", "mamba2", "gated-delta", "kda", "lightning", "short-conv")


def state_page(spec: ModelSpec, index: int, layer: State, settings: VllmSettings) -> Page:
    """A recurrent layer's page: its state, whatever the length.

    Raises:
        UnsupportedModel: vLLM does not run such layers.
        InputError: the ranks do not divide the state.
    """
    if layer.name not in _STATES:
        raise unsupported(spec, index, f"{layer.name}, which vLLM does not run")
    conv_dtype = settings.dtype if settings.mamba_cache_dtype == "auto" else settings.mamba_cache_dtype
    conv, recurrent = shard_state(spec, layer, settings.tensor_parallel_size, setting="tensor_parallel_size")
    ssm_dtype = _ssm_dtype(spec, layer, settings, conv_dtype)
    content = conv * ELEMENT_BYTES[conv_dtype] + recurrent * ELEMENT_BYTES[ssm_dtype]
    aligned = settings.enable_prefix_caching
    checkpoint = layer.name == "mamba2" or (layer.name == "kda" and settings.kda_prefill_backend == "flashkda")
    return Page(
        kind="state",
        block_tokens=state_tokens(settings, settings.block_size),
        content_bytes=content,
        # With prefix caching: the state, its last checkpoint and, of Mamba-2, one that a prefill exports.
        state_blocks=2 + checkpoint if aligned else 1,
        shape=(layer.name, conv, recurrent),
    )


def state_tokens(settings: VllmSettings, block: int) -> int:
    """Tokens from one kept state to the next: a block, or without prefix caching the longest sequence."""
    return block if settings.enable_prefix_caching else settings.max_model_len


def _ssm_dtype(spec: ModelSpec, layer: State, settings: VllmSettings, conv_dtype: str) -> str:
    """The type of a recurrent state (``MambaStateDtypeCalculator``, ``models/config.py``, ``platforms/cpu.py``)."""
    said = settings.mamba_ssm_cache_dtype
    if layer.name == "lightning":
        return conv_dtype
    if settings.device == "cpu":
        # CPUs with AVX512-BF16 keep f32, but for gated delta nets where another type was asked for.
        return said if layer.name == "gated-delta" and said in ("float16", "bfloat16") else "float32"
    if said != "auto":
        return said
    if layer.name == "kda":
        return "float32"
    config = text_config(spec)
    family = str(config.get("model_type", ""))
    if family.startswith("nemotron_h"):
        return str(config.get("mamba_ssm_cache_dtype", "float32"))
    if family.startswith("qwen3_5") and config.get("mamba_ssm_dtype") in ELEMENT_BYTES:
        return str(config["mamba_ssm_dtype"])
    return conv_dtype


def align(settings: VllmSettings, token_bytes: int, state_bytes: int, growing: Sequence[Page]) -> int:
    """Tokens of a block of attention whose page covers a state (``Platform._align_hybrid_block_size``).

    Args:
        settings: of which ``block_size`` is the least.
        token_bytes: of one token in an attention layer.
        state_bytes: of the largest state.
        growing: the pages of attention; latent ones take multiples of 128 tokens.
    """
    step = max(settings.kernel_tokens, settings.block_size)
    if any(page.latent for page in growing):
        step = max(step, 128)
    tokens = step * -(-state_bytes // (step * token_bytes))
    return max(settings.block_size, settings.kernel_tokens * -(-tokens // settings.kernel_tokens))
