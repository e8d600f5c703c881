"""Start-up logs of other engines against the plan: recorded runs, logs that others published, and what is no log."""

import gzip
import io
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_peers import recorded, spec_of
from hypothesis import given
from hypothesis import strategies as st

from kvist.cli import main
from kvist.errors import BadFile, InputError
from kvist.planning.log_check import check_log
from kvist.planning.logs import lines
from kvist.planning.logs.figures import GIB, MIB, LogCheck, Rounded, value_of
from kvist.planning.logs.lines import lines_with
from kvist.spec.layers import Attention, Latent, Layer, State
from kvist.spec.model import ModelSpec


def model(*layers: Layer, max_context: int = 131072, **config: Any) -> ModelSpec:
    return ModelSpec(name="a model", source="a test", layers=layers, max_context=max_context, config=config)


def attention(heads: int = 8, width: int = 128, **limits: int) -> Attention:
    return Attention(kv_heads=heads, key_dim=width, value_dim=width, **limits)


def check(log: str | bytes, spec: ModelSpec, **settings: Any) -> LogCheck:
    return check_log(io.BytesIO(log if isinstance(log, bytes) else log.encode()), spec, settings=settings)


LLAMA_8B = model(*[attention()] * 32, model_type="llama")
LLAMA2_7B = model(*[attention(heads=32)] * 32, max_context=4096, model_type="llama")
QWEN3_14B = model(*[attention()] * 40, model_type="qwen3")
QWEN3_235B = model(*[attention(heads=4)] * 94, model_type="qwen3_moe")
GEMMA4_31B = model(
    *[*[attention(heads=16, width=256, window=1024)] * 5, attention(heads=4, width=512)] * 10, model_type="gemma4_text"
)
DELTA = State(name="gated-delta", conv_elements=3 * 10240, conv_columns=3, state_elements=48 * 128 * 128)
QWEN35_27B = model(
    *[DELTA, DELTA, DELTA, attention(heads=4, width=256)] * 16,
    model_type="qwen3_5_text",
    mamba_ssm_dtype="float32",
    head_dim=256,
)
MIMO_V2_FLASH = model(
    *[Attention(kv_heads=4, key_dim=192, value_dim=128)] * 9,
    *[Attention(kv_heads=8, key_dim=192, value_dim=128, window=128)] * 39,
    model_type="mimo_v2_flash",
)


# ----------------------------------------------------------------------------------------------------------- vLLM


@pytest.mark.parametrize("run", recorded("vllm"), ids=lambda run: run["id"])
def test_recorded_starts_of_vllm(run: dict[str, Any]) -> None:
    text = "\n".join([line for every in run["log_lines"].values() for line in every] + run.get("error", []))
    # The recorded lines leave the command line out; these were runs of the LLM class.
    assert check(text, spec_of(run["config"]), usage="offline", **run["args"]).agrees


@pytest.mark.parametrize(
    ("spec", "log", "settings", "blocks"),
    [
        # LMCache/LMCache#1739, Qwen3-14B, size and concurrency in two lines
        (
            QWEN3_14B,
            "INFO 09-25 06:55:58 [gpu_worker.py:276] Available KV cache memory: 6.51 GiB\n"
            "INFO 09-25 06:55:58 [kv_cache_utils.py:864] GPU KV cache size: 42,656 tokens\n"
            "INFO 09-25 06:55:58 [kv_cache_utils.py:868] Maximum concurrency for 32,768 tokens per request: 1.30x\n",
            {},
            2666,
        ),
        # vllm-project/vllm#10517, Llama-3.1-8B, twice: the wording of 0.6
        (
            LLAMA_8B,
            "gpu_executor.py:122] # GPU blocks: 1952, # CPU blocks: 2048\n"
            "gpu_executor.py:126] Maximum concurrency for 20000 tokens per request: 1.56x\n"
            "worker.py:232] Memory profiling results: total_gpu_memory=23.64GiB kv_cache_size=3.81GiB\n",
            {},
            1952,
        ),
        (
            LLAMA_8B,
            "# GPU blocks: 1478, # CPU blocks: 2048\nkv_cache_size=2.89GiB gpu_memory_utilization=0.90\n",
            {},
            1478,
        ),
        # alvarobartt/hf-mem#61, gemma-4-31B-it: five of six layers have windows
        (
            GEMMA4_31B,
            '(EngineCore pid=118) level=INFO name=vllm.v1.worker.gpu_worker msg="Available KV cache memory: 24.54 GiB"'
            '\n(EngineCore pid=118) level=INFO msg="GPU KV cache size: 26,800 tokens"\n',
            {},
            10050,
        ),
        # vllm-project/vllm#40691, Qwen3.5-27B in 0.19, which also says num_blocks: 1487
        (
            QWEN35_27B,
            "GPU KV cache size: 290,864 tokens\nMaximum concurrency for 32,768 tokens per request: 33.04x\n",
            {"num_gpu_blocks_override": 1487, "enable_prefix_caching": False},
            1487,
        ),
    ],
)
def test_published_starts_of_vllm(spec: ModelSpec, log: str, settings: dict[str, Any], blocks: int) -> None:
    made = check(log, spec, **settings)
    assert (made.engine, made.agrees, made.difference_bytes, made.explained_by) == ("vllm", True, 0, ())
    assert abs(made.planned["num_blocks"] - blocks) <= 5


def test_the_rank_with_the_least_memory_decides() -> None:
    # vllm-project/vllm#21348, Qwen3-235B-A22B-FP8 on four GPUs; only one rank's memory is quoted
    quoted = (
        "non-default args: {'tensor_parallel_size': 4, 'max_model_len': 40960}\n"
        "(VllmWorker rank=0) Available KV cache memory: 8.11 GiB\n"
        "GPU KV cache size: 178,880 tokens\n"
    )
    made = check(quoted, QWEN3_235B)
    assert (made.agrees, made.difference_bytes) == (False, (11180 - 11308) * 770048)
    assert made.explained_by == (
        "another rank: the one of 4 with the least memory decides, and it may not be in the log",
    )
    assert check(quoted + "(VllmWorker rank=3) Available KV cache memory: 8.02 GiB\n", QWEN3_235B).agrees


def test_settings_of_a_whole_log() -> None:
    log = (
        "INFO [api_server.py:1839] vLLM API server version 0.32.0\n"
        "INFO [utils.py:253] non-default args: {'model': 'a', 'max_model_len': 16384, 'block_size': 32, "
        "'kv_cache_dtype': 'fp8', 'max_num_seqs': 64, 'enable_prefix_caching': True}\n"
        "INFO [core.py:93] Initializing a V1 LLM engine (v0.32.0) with config: model='a', speculative_config=None, "
        "dtype=torch.bfloat16, max_seq_len=16384, tensor_parallel_size=2, pipeline_parallel_size=1, "
        "kv_cache_dtype=fp8, device_config=cuda, enable_prefix_caching=True\n"
        "INFO Chunked prefill is enabled with max_num_batched_tokens=8192.\n"
        "\x1b[36m(Worker_TP0 pid=7)\x1b[0;0m INFO Available KV cache memory: 10.00 GiB\n"
        "INFO GPU KV cache size: 327,680 tokens, Maximum concurrency for 16,384 tokens per request: 20.00x\n"
        "INFO:     Application startup complete.\n"
        "INFO GPU KV cache size: 1 tokens\n"
    )
    made = check(log, LLAMA_8B)
    assert made.found["settings"] == {
        "usage": "server",
        "max_model_len": 16384,
        "block_size": "32",
        "kv_cache_dtype": "fp8",
        "max_num_seqs": "64",
        "enable_prefix_caching": "True",
        "dtype": "bfloat16",
        "tensor_parallel_size": "2",
        "pipeline_parallel_size": "1",
        "max_num_batched_tokens": "8192",
    }
    assert (made.agrees, made.found["version"], made.found["cache_bytes"]) == (True, "0.32.0", 10 * GIB)
    # --set goes before what the log says
    assert not check(log, LLAMA_8B, tensor_parallel_size=1).agrees


NEW = (
    "Available KV cache memory: 4.00 GiB\n"
    "{} KV cache size: {:,} tokens, Maximum concurrency for {:,} tokens per request: {:.2f}x"
)


@pytest.mark.parametrize(
    ("tokens", "effect", "settings"),
    [
        (65536, "other dtype: keys and values as fp8", {}),
        (32768, "other dtype: keys and values as bfloat16", {"kv_cache_dtype": "fp8"}),
        (32768 * 8, "tensor_parallel_size=16: KV heads are replicated on its ranks", {}),
        (32752, "null block: one block fewer is lent", {}),
    ],
)
def test_effects_on_a_plain_model(tokens: int, effect: str, settings: dict[str, Any]) -> None:
    made = check(NEW.format("GPU", tokens, 8192, tokens / 8192).replace("4.00", "4"), LLAMA_8B, **settings)
    # A memory of exactly 4 GiB, so that a single block is seen.
    exact = check(NEW.format("GPU", tokens, 8192, tokens / 8192), LLAMA_8B, kv_cache_memory_bytes=4 * GIB, **settings)
    assert not exact.agrees
    assert effect in exact.explained_by
    assert exact.difference_bytes % exact.planned["block_bytes"] == 0
    assert (exact.difference_bytes > 0) == (tokens > exact.planned["cache_tokens"])
    assert made.engine == "vllm"


def test_effects_of_blocks_windows_and_states() -> None:
    # 1 GiB and 100 tokens: 512 blocks of 16 hold 73.14 sequences, 64 of 128 hold 64
    cpu = "Explicitly set (1.0/23.54) GiB for KV cache on node 0.\n" + NEW.partition("\n")[2]
    made = check(cpu.format("CPU", 7314, 100, 73.14), LLAMA_8B)
    assert made.explained_by == ("block size: 128 is the default on a CPU; blocks of 16 tokens, not 128",)
    windows = model(*[*[attention(window=512)] * 5, attention()] * 6, model_type="gemma3_text")
    whole = 4 * GIB // (36 * 4096 * 16) * 16
    made = check(NEW.format("GPU", whole, 8192, whole / 8192), windows)
    assert any(effect.startswith("grouping waste") for effect in made.explained_by)
    made = check(
        "Available KV cache memory: 20.00 GiB\nGPU KV cache size: 290,864 tokens\n"
        "Maximum concurrency for 32,768 tokens per request: 33.04x\n",
        QWEN35_27B,
    )
    assert not made.agrees


def test_a_refused_start() -> None:
    # As vLLM 0.32.0 said of DeepSeek-V3's layers in 1 GiB
    refusal = (
        "ValueError: To serve at least one request with the model's max seq len (16384), (1.07 GiB KV cache is needed, "
        "which is larger than the available KV cache memory ({} GiB). Based on the available memory, the estimated "
        "maximum model length is {}. Try increasing `gpu_memory_utilization`"
    )
    latents = model(*[Latent(rank=512, rope_dim=64)] * 61, model_type="deepseek_v3")
    made = check("Available KV cache memory: 1.00 GiB\n" + refusal.format("1.0", 15248), latents)
    assert (made.agrees, made.found["longest_sequence"], made.found["needed_bytes"]) == (True, 15248, 1148903752)
    # Its memory may stand in the refusal alone
    assert check(refusal.format("1.0", 15248), latents).agrees
    assert not check(refusal.format("1.0", 20000), latents).agrees
    other = check(refusal.format("1.0", 15248), LLAMA_8B)
    assert (other.agrees, other.difference_bytes) == (False, 1148903752 - 2 * GIB)
    # The wording of 0.6: 3,660 blocks of 16
    old = "max seq len (131072) is larger than the maximum number of tokens that can be stored in KV cache (58560)."
    assert check(f"# GPU blocks: 3660, # CPU blocks: 2048\n reserved for KV Cache is 7.15GiB.\n{old}", LLAMA_8B).agrees


def test_memory_that_is_not_there() -> None:
    with pytest.raises(BadFile, match="not the memory they are for; add --set kv_cache_memory_bytes=SIZE"):
        check("GPU KV cache size: 42,656 tokens", QWEN3_14B)
    assert check("GPU KV cache size: 42,656 tokens", QWEN3_14B, kv_cache_memory_bytes=42656 * 163840).agrees
    hinted = "'speculative_config': {'method': 'eagle3'} non-default args\n"
    made = check(hinted + NEW.format("GPU", 30000, 8192, 3.66), LLAMA_8B)
    assert made.explained_by == ("draft model: its layers take part of the cache, which may be the difference",)


# --------------------------------------------------------------------------------------------------------- SGLang


def test_published_starts_of_sglang() -> None:
    # vllm-project/vllm#21348: the same model as above in SGLang
    log = (
        "[2025-07-22 TP0] server_args=ServerArgs(model_path='a', tp_size=4, page_size=1, kv_cache_dtype='auto', "
        "mem_fraction_static=0.9, max_total_tokens=None)\n"
        "[2025-07-22 TP1] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB\n"
        "[2025-07-22 TP0] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB\n"
        "[2025-07-22 TP0] max_total_num_tokens=367404, chunked_prefill_size=8192, context_len=40960\n"
    )
    made = check(log, QWEN3_235B)
    assert (made.engine, made.agrees, made.found["cache_tokens"]) == ("sglang", True, 367404)
    assert made.found["settings"] == {"tp_size": "4", "page_size": "1"}
    # Without the line of settings, ranks are counted by the prefixes of the lines
    quoted = "[TP3] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB"
    assert check(quoted, QWEN3_235B).agrees
    alone = check(quoted.removeprefix("[TP3] "), QWEN3_235B)
    assert alone.explained_by == (
        "tp_size=4",
        "tp_size=8: KV heads are replicated on its ranks",
        "tp_size=16: KV heads are replicated on its ranks",
        "tp_size=32: KV heads are replicated on its ranks",
    )
    fp8 = check(log.replace("8.23", "4.12"), QWEN3_235B)
    assert "other dtype: keys and values as fp8_e4m3" in fp8.explained_by


def test_pools_of_windows_and_states() -> None:
    # sgl-project/sglang#18039, MiMo-V2-Flash
    log = (
        "[TP0] server_args=ServerArgs(tp_size=4, page_size=64)\n"
        "[TP0] Use sliding window memory pool. full_layer_tokens=375360, swa_layer_tokens=300288\n"
        "[TP0] KV Cache is allocated. #tokens: 300288, K size: 8.38 GB, V size: 5.59 GB\n"
        "[TP0] KV Cache is allocated. #tokens: 375360, K size: 1.21 GB, V size: 0.81 GB\n"
    )
    assert check(log, MIMO_V2_FLASH).agrees
    labelled = log.replace("KV Cache is allocated. #tokens: 3002", "SWA KV Cache is allocated. #tokens: 3002").replace(
        "KV Cache is allocated. #tokens: 3753", "Full KV Cache is allocated. dtype: torch.bfloat16, #tokens: 3753"
    )
    assert check(labelled, MIMO_V2_FLASH).agrees
    # Kimi K2.5 keeps latents, of which there is one size
    kimi = model(*[Latent(rank=512, rope_dim=64)] * 61, model_type="kimi_k25")
    assert check("[TP0] KV Cache is allocated. #tokens: 2454421, KV size: 160.63 GB", kimi).agrees
    # Nemotron-3-Nano on four ranks in fp8, with the states of 2,211 slots
    nemotron = model(
        *[State(name="mamba2", conv_elements=3 * 6144, conv_columns=3, state_elements=64 * 64 * 128)] * 23,
        *[attention(heads=2)] * 6,
        model_type="nemotron_h",
        n_groups=8,
        ssm_state_size=128,
    )
    states = (
        "Mamba Cache is allocated. max_mamba_cache_size: 2211, conv_state size: 0.44GB, ssm_state size: 24.84GB\n"
        "KV Cache is allocated. dtype: float8_e4m3fn, #tokens: 19644177, K size: 14.05 GB, V size: 14.05 GB\n"
    )
    made = check(states, nemotron, tp_size=4)
    assert (made.agrees, made.planned["state_slot_bytes"]) == (True, 46 * MIB // 4 + 6144 // 4 * 3 * 2 * 23)
    assert check(states.replace("24.84", "12.42"), nemotron, tp_size=4).explained_by == (
        "other dtype: recurrent states as bfloat16",
    )


def test_tokens_without_a_size() -> None:
    with pytest.raises(BadFile, match="no size of a pool to hold it against"):
        check("max_total_num_tokens=367404, chunked_prefill_size=8192", QWEN3_235B)
    draft = (
        "Load weight end. elapsed=1 s\nLoad weight end. elapsed=1 s\n"
        "KV Cache is allocated. #tokens: 1000, K size: 9.00 GB, V size: 9.00 GB\n"
    )
    assert check(draft, LLAMA_8B).explained_by == (
        "draft model: a second model was loaded, whose pool may be the printed one",
    )


# ------------------------------------------------------------------------------------------------------ llama.cpp


@pytest.mark.parametrize("run", recorded("llamacpp"), ids=lambda run: run["id"])
def test_recorded_starts_of_llama_cpp(run: dict[str, Any]) -> None:
    spec = ModelSpec.read({"smollm2.gguf": "smollm2-135m", "gemma.gguf": "gemma-3-270m"}[run["model"]])
    log = "\n".join(run.get("log", []))
    if not run["ok"]:
        with pytest.raises(BadFile, match="no figure of a cache"):
            check(log, spec)
        return
    assert check(log, spec).agrees


def test_older_wordings_of_llama_cpp() -> None:
    old = (
        "llama_new_context_with_model: n_ctx      = {}\nllama_new_context_with_model: flash_attn = 0\n"
        "llama_kv_cache_init:        CPU KV buffer size =  2048.00 MiB\n"
        "llama_new_context_with_model: KV self size  = {:.2f} MiB, K (f16): {:.2f} MiB, V (f16): {:.2f} MiB\n"
    )
    made = check(old.format(4096, 2048, 1024, 1024), LLAMA2_7B)
    assert (made.engine, made.agrees, made.found["allocated_bytes"]) == ("llama.cpp", True, 2 * GIB)
    # Contexts were padded to 32 cells
    made = check(old.format(2016, 1008, 504, 504), LLAMA2_7B)
    assert (made.difference_bytes, made.explained_by) == (
        -16 * MIB,
        ("padding to 256: 2016 cells, as before llama.cpp padded them",),
    )
    unified = (
        "llama_kv_cache_unified: size = 2048.00 MiB (  4096 cells,  32 layers,  1 seqs), "
        "K (f16): 1024.00 MiB, V (f16): 1024.00 MiB"
    )
    assert check(unified, LLAMA2_7B).agrees


def test_effects_in_llama_cpp() -> None:
    cache = (
        "llama_kv_cache: size = {:.2f} MiB ( {} cells, {} layers, 1/1 seqs), K ({}): {:.2f} MiB, V ({}): {:.2f} MiB\n"
    )
    head = "llama_context: n_ctx = 32768\nllama_context: n_ctx_seq = 32768\nllama_context: n_seq_max = 1\n"
    windows = model(*[*[attention(window=1024)] * 5, attention()] * 4, model_type="gemma3_text")
    full = 4 * 2048 * 32768 / MIB
    whole = head + cache.format(12 * full, 32768, 24, "f16", 6 * full, "f16", 6 * full)
    assert check(whole, windows).explained_by == ("SWA full: windows are kept as if they saw everything",)
    assert check("llama_kv_cache_iswa: using full-size SWA cache (ref: a pull request)\n" + whole, windows).agrees
    step = 20 * 2048 * 3072 / MIB
    wide = (
        head
        + cache.format(2 * full, 32768, 4, "f16", full, "f16", full)
        + cache.format(2 * step, 3072, 20, "f16", step, "f16", step)
    )
    assert check(wide, windows).explained_by == ("n_ubatch=2048, held beside windows",)
    assert check("llama_context: n_ubatch = 2048\nllama_context: n_batch = 2048\n" + wide, windows).agrees
    # What a second context says, of a draft model, is not held against this one
    plain = head + cache.format(4096, 32768, 32, "f16", 2048, "f16", 2048)
    assert check(plain + "llama_context: n_ctx = 512\n" + cache.format(2, 512, 1, "f16", 1, "f16", 1), LLAMA_8B).agrees
    other = check(plain.replace("2048.00", "1088.00").replace("4096.00", "2176.00"), LLAMA_8B)
    assert other.explained_by == ("other dtype: keys and values as q8_0",)
    assert other.difference_bytes == -1920 * MIB


def test_recurrent_tensors_of_llama_cpp() -> None:
    mamba = State(name="mamba", conv_elements=3 * 5120, conv_columns=3, state_elements=5120 * 16)
    log = (
        "llama_context: n_seq_max = 4\n"
        "llama_memory_recurrent: size = {:.2f} MiB ( 4 cells, 64 layers, 4 seqs 0 rs_seq), R (f32): {:.2f} MiB, "
        "S (f32): {:.2f} MiB\n"
    )
    conv, state = 64 * 4 * 4 * 3 * 5120 / MIB, 64 * 4 * 4 * 5120 * 16 / MIB
    spec = model(*[mamba] * 64, model_type="mamba")
    assert check(log.format(conv + state, conv, state), spec).agrees
    fewer = check(log.format(conv + state, conv / 4, state / 4), spec)
    assert fewer.explained_by == ("n_seq_max=1: other streams and states",)


# ------------------------------------------------------------------------------------------- what is not a log

START = "Available KV cache memory: 6.51 GiB\nGPU KV cache size: 42,656 tokens\n"


def answered(log: str | bytes, spec: ModelSpec) -> None:
    """A log is held against the plan, or refused in one line."""
    try:
        made = check(log, spec)
    except InputError as error:
        refusal = str(error)
        assert "\n" not in refusal
        return
    assert not (made.agrees and made.difference_bytes)
    json.dumps(made.to_dict(), allow_nan=False)


@given(st.binary(max_size=3000), st.booleans())
def test_any_bytes_are_answered(content: bytes, cut: bool) -> None:
    text = START.encode() if not cut else START.encode()[: len(content) % len(START)]
    for log in (content, content + b"\n" + text, text + content, content[:10] + text):
        answered(log, QWEN3_14B)


SEEN = st.lists(
    st.sampled_from(
        [
            "GPU KV cache size: {} tokens", "Available KV cache memory: {} GiB", "# GPU blocks: {}, # CPU blocks: 1",
            "Maximum concurrency for {} tokens per request: {}x", "tensor_parallel_size={} LLM engine (v{})",
            "non-default args: {{'block_size': {}}}", "max seq len ({}), ({} GiB KV cache is needed",
            "available KV cache memory ({} GiB)", "KV Cache is allocated. #tokens: {}, K size: {} GB, V size: {} GB",
            "Mamba Cache is allocated. max_mamba_cache_size: {}, conv_state size: {}GB, ssm_state size: {}GB",
            "max_total_num_tokens={}", "llama_context: n_ctx = {}", "llama_context: n_seq_max = {}",
            "llama_kv_cache: size = {} MiB ( {} cells, {} layers, {}/1 seqs), K (f16): {} MiB, V (q9): {} MiB",
            "KV self size = {} MiB, K (f16): {} MiB, V (f16): {} MiB", "server_args tp_size={} page_size={}",
        ]
    ),
    max_size=6,
)  # fmt: skip


@given(SEEN, st.lists(st.sampled_from(["0", "1", "7", "16", "3.50", "4096", "99999999999", "1e9", "."]), min_size=1))
def test_any_figures_are_answered(wordings: list[str], numbers: list[str]) -> None:
    def numbered() -> Iterator[str]:
        while True:
            yield from numbers

    number = numbered()
    log = "\n".join(wording.format(*(next(number) for _ in range(wording.count("{}")))) for wording in wordings)
    for spec in (QWEN3_14B, QWEN35_27B):
        answered(log, spec)


@pytest.mark.parametrize(
    "write",
    [
        lambda text: text.encode("utf-16"),
        lambda text: gzip.compress(text.encode(), mtime=0),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: ("loading 1%\rloading 2%\r" * 9000 + text).encode(),
        lambda text: b"\0" * 3_000_000 + b"\n" + text.encode(),
        lambda text: ("x" * 3_000_000 + text).encode(),
        lambda text: text.replace("\n", " ").encode(),
        lambda text: json.dumps({"log": text}).encode(),
        lambda text: "\n".join(
            f"vllm-1  | \x1b[0;36m(EngineCore pid=7)\x1b[0;0m INFO {line}" for line in text.splitlines()
        ).encode(),
        lambda text: json.dumps({"log": text.replace(": ", ": \x1b[1;32m").replace(" G", "\x1b[0m G")}).encode(),
        lambda text: text.replace(" KV cache", " \x1b[1mKV\x1b[0m cache").encode(),
    ],
)
def test_a_log_of_any_form(write: Callable[[str], bytes]) -> None:
    assert check(write(START), QWEN3_14B).agrees


def test_a_figure_across_pieces_is_found() -> None:
    for before in range(2**20 - 40, 2**20 + 8, 7):
        assert check(b"." * before + START.replace("\n", " ").encode(), QWEN3_14B).agrees


class Endless(io.RawIOBase):
    """A stream without an end, that counts what was read of it."""

    given = 0

    def __init__(self, start: bytes, again: bytes) -> None:
        super().__init__()
        self.start, self.again = start, again

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        content, self.start = self.start, b""
        content = (content or self.again)[: len(into)]
        into[: len(content)] = content
        self.given += len(content)
        return len(content)


def test_a_log_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_BYTES", 2**22)
    zeros = Endless(b"", b"\0" * 2**16)
    with pytest.raises(BadFile, match="no figure of a cache in its first"):
        check_log(zeros, QWEN3_14B)
    assert zeros.given <= 2**22 + 2**21
    # A server that serves is not read on.
    serving = Endless(f"{START}INFO: Application startup complete.\n".encode(), b"INFO 127.0.0.1 GET /health\n")
    assert check_log(serving, QWEN3_14B).agrees
    assert serving.given < 2**17


def test_only_wanted_lines_are_looked_at() -> None:
    log = io.BytesIO(b"a\nb KV\nKV c\r\n" * 2)
    assert list(lines_with(log, (b"KV",), source="log")) == ["b KV", "KV c"] * 2


def test_values_of_settings() -> None:
    line = "args(tp_size=4, page_size=1, kv_cache_dtype='auto', chunked_prefill_size=-1, 'dtype': 'half', size: 3.)"
    keys = ("tp_size", "page_size", "kv_cache_dtype", "chunked_prefill_size", "dtype", "size", "none")
    assert [value_of(line, key) for key in keys] == ["4", "1", None, None, "half", "3", None]


def test_rounding() -> None:
    one = Rounded.of("1.00", MIB)
    assert [one.difference(size) for size in (MIB, MIB + 5242, MIB - 5242)] == [0, 0, 0]
    assert one.difference(MIB - 6000) == 6000
    assert Rounded.exactly(7).difference(8) == -1


def test_a_start_after_one_that_failed() -> None:
    """What a server said before it was started again is not held against the next start."""
    failed = (
        "vLLM API server version 0.32.0\nnon-default args: {'model': 'a', 'block_size': 32, 'kv_cache_dtype': 'fp8'}\n"
        "LLM engine (v0.32.0) with config: model='a', dtype=torch.bfloat16, tensor_parallel_size=2\n"
        "Available KV cache memory: 1.00 GiB\ntorch.OutOfMemoryError: CUDA out of memory\n"
    )
    again = (
        "vLLM API server version 0.32.0\nnon-default args: {'model': 'a', 'max_model_len': 16384}\n"
        "LLM engine (v0.32.0) with config: model='a', dtype=torch.bfloat16, tensor_parallel_size=1\n"
        + NEW.format("GPU", 32768, 16384, 2.0)
    )
    made = check(failed + again, LLAMA_8B)
    assert (made.agrees, "block_size" in made.found["settings"]) == (True, False)
    first = "server_args=ServerArgs(model_path='a', tp_size=8, page_size=64)\n[TP7] Load weight end.\nKilled\n"
    second = (
        "server_args=ServerArgs(model_path='a', tp_size=4, page_size=1)\n"
        "[TP0] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB\n"
    )
    assert check(first + second, QWEN3_235B).agrees
    # The server is told to stop and started again: the first start is what counts
    assert check(again + "\nINFO: Shutting down\n" + failed, LLAMA_8B).agrees


@pytest.mark.parametrize(
    "log",
    [
        "LLM engine (v0.32.0) with config: model='Qwen/Qwen3-14B', speculative_config=None, dtype=torch.bfloat16\n"
        + NEW.format("GPU", 60000, 8192, 7.32),
        "server_args=ServerArgs(model_path='/hub/models--Qwen--Qwen3-14B/snapshots/0a1b', tp_size=1)\n"
        "KV Cache is allocated. #tokens: 1000, K size: 9.00 GB, V size: 9.00 GB\n",
        "llama_model_loader: loaded meta data with 28 key-value pairs and 443 tensors from C:\\models\\Qwen3-14B.gguf "
        "(version GGUF V3 (latest))\n"
        "llama_kv_cache: size = 9.00 MiB ( 4096 cells, 40 layers, 1/1 seqs), K (f16): 4.50 MiB, V (f16): 4.50 MiB\n",
    ],
    ids=["vllm", "sglang", "llama.cpp"],
)
def test_a_log_of_another_model(log: str) -> None:
    hint = "another model: the log is of Qwen3-14B, the plan of llama-3-8b, which may be the difference"
    made = check(log, replace(LLAMA_8B, name="llama-3-8b"))
    assert (made.found["model"], made.agrees, made.explained_by[-1]) == ("Qwen3-14B", False, hint)
    for name in ("qwen3-14b", "Qwen3-14B-AWQ", "models/qwen3_14b"):
        assert hint[:14] not in " ".join(check(log, replace(LLAMA_8B, name=name)).explained_by)


def test_a_torn_log_says_what_is_before_the_tear() -> None:
    noise = random.Random(0).randbytes(3_000_000)
    torn = gzip.compress(START.encode() + b"\n" + noise, mtime=0)[:-100_000]
    assert check(torn, QWEN3_14B).agrees
    with pytest.raises(BadFile, match="end-of-stream"):
        check(gzip.compress(noise, mtime=0)[:-100_000], QWEN3_14B)


# --------------------------------------------------------------------------------------------------- the command


def write(tmp_path: Path, content: str | bytes) -> str:
    path = tmp_path / "start.log"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # SmolLM2-135M, 23,040 B a token in bf16: 64 MiB hold 182 blocks of 16 tokens
    log = write(tmp_path, "Available KV cache memory: 1.00 GiB\nGPU KV cache size: 46,592 tokens\n")
    assert main(["check", log, "--model", "smollm2-135m", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == ["engine", "found", "planned", "agrees", "difference_bytes", "explained_by"]
    assert (answer["engine"], answer["agrees"], answer["planned"]["cache_tokens_before_0_21"]) == ("vllm", True, 46592)
    assert main(["check", log, "--model", "smollm2-135m", "--set", "kv_cache_dtype=fp8"]) == 3
    shown = capsys.readouterr().out
    assert "differ by 512.1 MiB less than planned" in shown
    assert "other dtype: keys and values as bfloat16" in " ".join(shown.split())


def test_the_command_says_what_it_cannot_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path, "Available KV cache memory: 1.00 GiB\nGPU KV cache size: 1,234 tokens\n")
    assert main(["check", log, "--model", "smollm2-135m"]) == 3
    assert re.search(r"explained by +no known effect; --set says", capsys.readouterr().out)
    # A model that the engine's account does not cover; there is no --engine to leave out here
    assert main(["check", log, "--model", "deepseek-v4-pro"]) == 2
    said = capsys.readouterr().err
    assert "compressed attention" in said
    assert said.endswith("there is no account to hold the log against\n")
    assert "--engine" not in said
    assert main(["check", "", "--model", "smollm2-135m"]) == 2
    assert capsys.readouterr().err == "kvist: log: '': Is a directory\n"


def test_the_command_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    log = io.TextIOWrapper(io.BytesIO(b"Available KV cache memory: 1.00 GiB\nGPU KV cache size: 46,592 tokens\n"))
    monkeypatch.setattr("sys.stdin", log)
    assert main(["check", "-", "--model", "smollm2-135m"]) == 0
    assert "agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\xff" * 500, b"hello\n", gzip.compress(b"hello", mtime=0), gzip.compress(b"x" * 999, mtime=0)[:20]],
)
def test_the_command_refuses_what_has_no_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    assert main(["check", write(tmp_path, content), "--model", "smollm2-135m", "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kvist: log: ")
    assert said.err.count("\n") == 1


def test_the_command_refuses_what_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for log, why in ((str(tmp_path), "Is a directory"), (str(tmp_path / "none"), "No such file"), ("a\0b", "null")):
        assert main(["check", log, "--model", "smollm2-135m"]) == 2
        assert why in capsys.readouterr().err


def test_settings_are_read_as_on_the_command_line() -> None:
    small = model(*[attention(heads=3, width=64)] * 30, max_context=8192, model_type="llama")
    line = "GPU KV cache size: 46,592 tokens, Maximum concurrency for 4,096 tokens per request: 11.38x"
    for size in ("1GiB", str(2**30), 2**30):
        assert check(line, small, **{"kv-cache-memory-bytes": size, "block_size": "128"}).agrees
    for name, value in (("kv_cache_memory_bytes", "much"), ("max_model_len", "foo"), ("block_size", "1.5")):
        with pytest.raises(InputError, match=name):
            check(line, small, **{"kv_cache_memory_bytes": "1GiB", name: value})
    with pytest.raises(InputError, match="n_ctx"):
        check(
            "llama_kv_cache: size = 2048.00 MiB ( 4096 cells, 32 layers, 1/1 seqs), K (f16): 1024.00 MiB, "
            "V (f16): 1024.00 MiB",
            LLAMA2_7B,
            n_ctx="4 thousand",
        )
