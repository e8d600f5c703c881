"""vLLM's settings that decide how much its cache holds, and what vLLM takes where they are left out.

Source: ``vllm/config/cache.py``, ``vllm/engine/arg_utils.py`` (batch defaults) and ``vllm/platforms/cpu.py`` of 0.32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvist.errors import InputError
from kvist.planning.engines.settings import Setting, fraction, multiple, one_of, read_settings, size, switch, whole
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Latent, Layer
from kvist.spec.model import ModelSpec

VERSION = "0.32"

GIB = 2**30

# Bytes of one element; the packed ones have a layout of their own in vllm_pages.
ELEMENT_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
TURBOQUANT = {
    "turboquant_k8v4": (8, 4),
    "turboquant_4bit_nc": (4, 4),
    "turboquant_k3v4_nc": (3, 4),
    "turboquant_3bit_nc": (3, 3),
}
PER_TOKEN_HEAD = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
CACHE_DTYPES = (
    "auto",
    *ELEMENT_BYTES,
    "fp8_ds_mla",
    "nvfp4_ds_mla",
    "nvfp4",
    "nvfp4_4over6",
    *PER_TOKEN_HEAD,
    *TURBOQUANT,
)

SETTINGS = {
    "device": Setting(read=one_of("cuda", "cpu"), help="cuda (default) or cpu; they differ in defaults"),
    # No attention kernel reads blocks of another size (get_supported_kernel_block_sizes of its backends, vllm 0.32).
    "block_size": Setting(read=multiple(16, 2**20), help="tokens of a block; by default 16, on a CPU 128"),
    "max_model_len": Setting(read=whole(1), help="longest sequence; by default the planned context"),
    "max_num_batched_tokens": Setting(read=whole(1), help="most tokens of a step; windows are held beside them"),
    "max_num_seqs": Setting(read=whole(1, 2**20), help="most sequences of a step"),
    "kv_cache_dtype": Setting(read=one_of(*CACHE_DTYPES), help="how keys and values are stored; auto is dtype"),
    "dtype": Setting(read=one_of("float32", "bfloat16", "float16"), help="of the network"),
    "gpu_memory_utilization": Setting(read=fraction(0, 1), help="share of the device that vLLM uses (0.92)"),
    "kv_cache_memory_bytes": Setting(read=size, help="the cache's bytes on one device, instead of a share"),
    "cpu_kvcache_space": Setting(read=whole(1, 2**20), help="VLLM_CPU_KVCACHE_SPACE: the cache's GiB, before all"),
    "num_gpu_blocks_override": Setting(read=whole(1), help="blocks, whatever the memory"),
    "tensor_parallel_size": Setting(read=whole(1, 2**16), help="ranks that share each layer's heads"),
    "pipeline_parallel_size": Setting(read=whole(1, 2**16), help="ranks that share the layers"),
    "enable_prefix_caching": Setting(read=switch, help="on by default, but not for pure recurrent models"),
    "mamba_cache_dtype": Setting(read=one_of("auto", *ELEMENT_BYTES), help="of recurrent states; auto is dtype"),
    "mamba_ssm_cache_dtype": Setting(read=one_of("auto", *ELEMENT_BYTES), help="of their recurrent part alone"),
    "kda_prefill_backend": Setting(read=one_of("triton", "flashkda"), help="flashkda keeps one state more"),
    "attention_backend": Setting(read=str.upper, help="of MLA: decides layouts and block sizes"),
    "async_scheduling": Setting(read=switch, help="two steps in flight; on by default, never on a CPU"),
    "disable_hybrid_kv_cache_manager": Setting(read=switch, help="keep windows as if they saw everything"),
    "usage": Setting(read=one_of("server", "offline"), help="vllm serve (default) or the LLM class"),
}


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """Every setting that decides, with a value; names as in :data:`SETTINGS`.

    ``assumed`` has those of which neither model nor caller says anything and hardware decides.
    """

    device: str
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_dtype: str
    dtype: str
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_prefix_caching: bool
    mamba_cache_dtype: str
    mamba_ssm_cache_dtype: str
    kda_prefill_backend: str
    attention_backend: str | None
    async_scheduling: bool
    disable_hybrid_kv_cache_manager: bool
    assumed: tuple[tuple[str, str], ...] = ()

    @property
    def in_flight_tokens(self) -> int:
        """Tokens that steps may compute at once before anything is given back (``VllmConfig.max_in_flight_tokens``)."""
        return self.max_num_batched_tokens * (self.pipeline_parallel_size + self.async_scheduling)

    @property
    def kernel_tokens(self) -> int:
        """Tokens of which every block of attention is a multiple."""
        return 32 if self.device == "cpu" else 16


def resolve(
    spec: ModelSpec, fmt: CacheFormat, given: Mapping[str, Any], *, context: int, device_bytes: int | None
) -> VllmSettings:
    """Fill in what vLLM takes by itself.

    Args:
        spec: the model.
        fmt: the planned format; vLLM stores keys and values alike.
        given: settings by name.
        context: tokens of the planned sequences, the longest sequence where nothing else is said.
        device_bytes: memory of one device, on which the default size of a step depends.

    Raises:
        InputError: a setting is unknown or out of range, or no setting of vLLM stores this format.
    """
    said = read_settings("vllm", SETTINGS, given)
    assumed: list[tuple[str, str]] = []
    device = said.get("device", "cpu" if "cpu_kvcache_space" in said else "cuda")
    cpu = device == "cpu"
    world = said.get("tensor_parallel_size", 1) * said.get("pipeline_parallel_size", 1)
    max_len = said.get("max_model_len", context)
    max_seqs, batched = _batch_defaults(said.get("usage", "server"), cpu=cpu, world=world, device_bytes=device_bytes)
    if "max_num_batched_tokens" not in said and device_bytes is None and not cpu and _depends_on_batch(spec):
        assumed.append(("max_num_batched_tokens", f"{batched}, of a device of less than 70 GiB; larger ones take more"))
    max_seqs = said.get("max_num_seqs", max_seqs)
    dtype = said.get("dtype") or _dtype(fmt)
    cache_dtype = said.get("kv_cache_dtype") or _cache_dtype(fmt)
    if cache_dtype == "auto" and (declared := _declared_cache_dtype(spec)) != "auto":
        cache_dtype = declared
        assumed.append(("kv_cache_dtype", f"{declared}, which the checkpoint declares; set bfloat16 for the other"))
    memory = said.get("kv_cache_memory_bytes")
    if "cpu_kvcache_space" in said:
        memory = said["cpu_kvcache_space"] * GIB
    recurrent_only = bool(_stored(spec)) and all(layer.kind == "state" for layer in _stored(spec))
    return VllmSettings(
        device=device,
        block_size=said.get("block_size") or _block_size(spec, said, cpu=cpu, assumed=assumed),
        max_model_len=max_len,
        max_num_batched_tokens=said.get("max_num_batched_tokens", min(max_seqs * max_len, batched)),
        max_num_seqs=max_seqs,
        kv_cache_dtype=cache_dtype,
        dtype=dtype,
        gpu_memory_utilization=said.get("gpu_memory_utilization", 0.92),
        kv_cache_memory_bytes=memory,
        num_gpu_blocks_override=said.get("num_gpu_blocks_override"),
        tensor_parallel_size=said.get("tensor_parallel_size", 1),
        pipeline_parallel_size=said.get("pipeline_parallel_size", 1),
        enable_prefix_caching=said.get("enable_prefix_caching", not recurrent_only and not spec.cross_layers),
        mamba_cache_dtype=said.get("mamba_cache_dtype", "auto"),
        mamba_ssm_cache_dtype=said.get("mamba_ssm_cache_dtype", "auto"),
        kda_prefill_backend=said.get("kda_prefill_backend", "triton"),
        attention_backend=said.get("attention_backend"),
        async_scheduling=said.get("async_scheduling", True) and not cpu,
        disable_hybrid_kv_cache_manager=said.get("disable_hybrid_kv_cache_manager", False),
        assumed=tuple(assumed),
    )


def text_config(spec: ModelSpec) -> Mapping[str, Any]:
    """The published configuration of the language model, without what is around it."""
    nested = spec.config.get("text_config")
    return nested if isinstance(nested, Mapping) else spec.config


def _stored(spec: ModelSpec) -> list[Layer]:
    return [piece for layer in spec.layers for piece in layer.stored]


def _depends_on_batch(spec: ModelSpec) -> bool:
    return bool(spec.cross_layers) or any(
        getattr(piece, name, None) for piece in _stored(spec) for name in ("window", "chunk")
    )


def _batch_defaults(usage: str, *, cpu: bool, world: int, device_bytes: int | None) -> tuple[int, int]:
    """``max_num_seqs`` and ``max_num_batched_tokens`` (``EngineArgs.get_batch_defaults``)."""
    offline = usage == "offline"
    if cpu:
        return (256 if offline else 128) * world, (4096 if offline else 2048) * world
    if device_bytes is not None and device_bytes >= 160 * GIB:
        return 1024, 16384
    if device_bytes is not None and device_bytes >= 70 * GIB:
        return 1024, 16384 if offline else 8192
    return 256, 8192 if offline else 2048


def _block_size(spec: ModelSpec, said: Mapping[str, Any], *, cpu: bool, assumed: list[tuple[str, str]]) -> int:
    latents = [piece for piece in _stored(spec) if isinstance(piece, Latent)]
    if not latents:
        return 128 if cpu else 16
    backend = said.get("attention_backend")
    if cpu:
        if backend is None:
            assumed.append(("attention_backend", "AMX_MLA, of a CPU with AMX; without it CPU_MLA has blocks of 16"))
        return 16 if backend == "CPU_MLA" else 128
    if backend is not None:
        blocks = {"FLASHMLA": 64, "CUTLASS_MLA": 128, "FLASHINFER_MLA": 32}
        return blocks.get(backend, 64 if "SPARSE" in backend else 16)
    if any(latent.indexer for latent in latents):
        assumed.append(("block_size", "64, of the sparse MLA kernels"))
        return 64
    assumed.append(("block_size", "16, of FLASH_ATTN_MLA on Hopper; FLASHMLA has 64, FLASHINFER_MLA 32"))
    return 16


def _dtype(fmt: CacheFormat) -> str:
    return {"f32": "float32", "f16": "float16"}.get(fmt.key, "bfloat16")


def _cache_dtype(fmt: CacheFormat) -> str:
    known = {"f32": "auto", "bf16": "auto", "f16": "auto", "fp8": "fp8"}
    if fmt.key != fmt.value or fmt.key not in known:
        raise InputError(
            f"format: vLLM stores keys and values alike, and not as {fmt}; plan with bf16, f16, f32 or fp8 for both, "
            f"or name one of its own types with --set kv_cache_dtype=…",
            key="format",
        )
    return known[fmt.key]


def _declared_cache_dtype(spec: ModelSpec) -> str:
    """What ``auto`` becomes: some quantised checkpoints say (``resolve_kv_cache_dtype_string``, ``attention.py``)."""
    quantized = spec.config.get("quantization_config")
    if not isinstance(quantized, Mapping):
        return "auto"
    method = str(quantized.get("quant_method", ""))
    if method == "compressed-tensors":
        return "fp8" if quantized.get("kv_cache_scheme") is not None else "auto"
    if not method.startswith("modelopt"):
        return "auto"
    inner = quantized.get("quantization", quantized)
    scheme = inner.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        if scheme.get("dynamic") is False and scheme.get("num_bits") == 8 and scheme.get("type") == "float":
            return "fp8"
        return "nvfp4" if scheme.get("num_bits") == 4 and scheme.get("type") == "float" else "auto"
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(str(scheme).lower(), "auto")
