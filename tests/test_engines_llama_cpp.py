"""The account of llama.cpp against what llama.cpp printed: recorded runs, and small models of zeros."""

import re
from typing import Any

import pytest
from engine_peers import ask, recorded
from golden_llama_cpp import ASKED, Asked
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import DoesNotFit, InputError, UnsupportedModel
from kvist.planning.engines import EngineBudget, engine_account
from kvist.planning.engines.llama_cells import ROW_TYPES, Cells, LlamaContext, context_of
from kvist.planning.engines.llama_cpp import resolve
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Cross, Indexer, Latent, Layer, Parallel, State
from kvist.spec.model import ModelSpec

BF16 = CacheFormat()
MIB = 2**20


def model(layers: list[Layer], model_type: str = "llama") -> ModelSpec:
    return ModelSpec(
        name="a model", source="a test", layers=tuple(layers), max_context=131072, config={"model_type": model_type}
    )


def heads(**limits: int) -> Attention:
    return Attention(kv_heads=2, key_dim=64, value_dim=64, **limits)


def context(spec: ModelSpec, **settings: Any) -> LlamaContext:
    return context_of(spec, resolve(spec, BF16, settings))


def printed(cache: Cells, settings: Any) -> str:
    """A cache as llama.cpp prints it, without the number of layers, which it counts otherwise for states."""
    cells = cache.cells * cache.streams
    sizes = [size / MIB for size in (cache.bytes, cache.key_bytes * cells, cache.value_bytes * cells)]
    if cache.name == "recurrent":
        return f"{sizes[0]:.2f} MiB ({cache.cells} cells), R (f32): {sizes[1]:.2f} MiB, S (f32): {sizes[2]:.2f} MiB"
    types = settings.type_k, settings.type_v
    return (
        f"{sizes[0]:.2f} MiB ({cache.cells} cells, {cache.layers} layers, {settings.n_seq_max}/{cache.streams} seqs), "
        f"K ({types[0]}): {sizes[1]:.2f} MiB, V ({types[1]}): {sizes[2]:.2f} MiB"
    )


def shortened(line: str) -> str:
    """Its line without what we do not tell: of states the number of all layers and the same of sequences."""
    return re.sub(r", [0-9]+ layers, [0-9]+ seqs [0-9]+ rs_seq\)", ")", line).removesuffix(", P (f32): 0.00 MiB")


def test_recorded_runs() -> None:
    runs = recorded("llamacpp")
    if not runs:
        pytest.skip("the shared folder is not there")
    models = {"smollm2.gguf": "smollm2-135m", "gemma.gguf": "gemma-3-270m"}
    for run in runs:
        spec = ModelSpec.read(models[run["model"]])
        settings = run["args"] | {"flash_attn": run["args"].get("flash_attn", "on")}
        if not run["ok"]:
            with pytest.raises(InputError, match="refuses without flash_attn"):
                context(spec, **settings)
            continue
        made = context(spec, **settings)
        assert (made.n_ctx, made.n_ctx_seq) == (run["n_ctx_effective"], run["n_ctx_seq"]), run["id"]
        lines = [line.partition("size = ")[2] for line in run["log"] if "llama_kv_cache: size" in line]
        told = [re.sub(r"\s+", " ", line).replace("( ", "(").strip() for line in lines]
        assert [printed(cache, made.settings) for cache in made.caches] == told, run["id"]


@pytest.mark.parametrize("name", ASKED)
def test_small_models(name: str) -> None:
    compare(ASKED[name], [lines for _, lines in ASKED[name].contexts])


def compare(asked: Asked, answers: list[list[str]]) -> None:
    spec = model(asked.layers, asked.model_type)
    for (settings, _), lines in zip(asked.contexts, answers, strict=True):
        if not lines:
            with pytest.raises(InputError, match=r"llama\.cpp"):
                context(spec, **settings)
            continue
        made = context(spec, **settings)
        assert [printed(cache, made.settings) for cache in made.caches] == [shortened(line) for line in lines], settings


def test_llama_cpp_says_so_itself() -> None:
    cases = [
        {"metadata": asked.gguf(), "asks": [settings for settings, _ in asked.contexts]} for asked in ASKED.values()
    ]
    for asked, answers in zip(ASKED.values(), ask("llama", "ask_llama_cpp.py", "contexts", cases), strict=True):
        found = [
            [
                line.partition("size = ")[2].replace("( ", "(")
                for line in lines
                if re.match(r"llama_\w+: size = .* cells", line)
            ]
            for lines in answers
        ]
        compare(asked, found)


@pytest.mark.parametrize(
    ("name", "size"),
    [("f16", 64), ("q8_0", 34), ("q5_1", 24), ("q5_0", 22), ("q4_1", 20), ("q4_0", 18), ("iq4_nl", 18), ("f32", 128)],
)
def test_bytes_of_32_elements(name: str, size: int) -> None:
    assert ROW_TYPES[name].row_bytes(32) == size


def test_values_of_different_widths_are_padded_without_flash_attention() -> None:
    # llama-kv-cache.cpp, [TAG_V_CACHE_VARIABLE]
    wide, narrow = Attention(kv_heads=2, key_dim=64, value_dim=128), heads()
    plain, transposed = (context(model([wide, narrow]), n_ctx=256, flash_attn=flag) for flag in (True, False))
    assert plain.caches[0].value_bytes == (256 + 128) * 2
    assert transposed.caches[0].value_bytes == (256 + 256) * 2


def test_a_sparse_model_has_a_cache_for_its_indexers() -> None:
    # llama-kv-cache-dsa.cpp: one key of the indexer's width in the type of keys, no value
    sparse = Latent(rank=512, rope_dim=64, indexer=Indexer(heads=1, dim=128))
    made = context(model([sparse] * 3, "deepseek_v32"), n_ctx=1024, type_k="q8_0", type_v="q8_0")
    assert [(cache.name, cache.key_bytes, cache.value_bytes) for cache in made.caches] == [
        ("base", 3 * 576 // 32 * 34, 0),
        ("indexer", 3 * 128 // 32 * 34, 0),
    ]


def test_windows_depend_on_the_class() -> None:
    windows = [heads(window=512)] * 4
    assert [cache.name for cache in context(model(windows, "mistral"), n_ctx=4096).caches] == ["base"]
    assert [cache.name for cache in context(model(windows, "gemma3_text"), n_ctx=4096).caches] == ["base", "swa"]
    with pytest.raises(UnsupportedModel, match="model_type 'something'"):
        context(model(windows, "something"), n_ctx=4096)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_ctxs": 4096}, "n_ctxs=4096 is no setting of llama.cpp.*known are n_ctx, n_seq_max"),
        ({"type_k": "q4_k"}, "q4_k is not one of f32, f16"),
        ({"n_ctx": 4096, "type_v": "q4_0", "flash_attn": False}, "without flash_attn"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        context(model([heads()]), **settings)


def test_what_llama_cpp_refuses() -> None:
    with pytest.raises(InputError, match="do not divide a head of 80"):
        context(model([Attention(kv_heads=2, key_dim=80, value_dim=80)]), type_k="q8_0")
    with pytest.raises(InputError, match=r"differ, which llama\.cpp refuses for MLA"):
        context(model([Latent(rank=512, rope_dim=64)]), type_k="q8_0")
    with pytest.raises(UnsupportedModel, match="kind cross"):
        context(model([Parallel(parts=(heads(), Cross(kv_heads=2, key_dim=64, value_dim=64)))]))


def test_a_memory_is_given_to_streams() -> None:
    spec = ModelSpec.read("smollm2-135m")
    account = engine_account(
        spec, BF16, engine="llama.cpp", budget=EngineBudget(cache=2**30), context=4000, settings={}
    )
    # 22.5 KiB a token, 4,096 cells a stream: 11 of 90 MiB
    assert (account.max_concurrency, account.cache_tokens) == (11.0, 11 * 4096)
    assert account.allocated_bytes == 11 * 90 * MIB
    assert account.start("m.gguf").startswith("llama-server -m m.gguf --ctx-size 45056 --parallel 11 --no-kv-unified")
    with pytest.raises(DoesNotFit, match="1 sequence of 4,096 cells in all: 90 MiB; there are 89 MiB"):
        engine_account(spec, BF16, engine="llama.cpp", budget=EngineBudget(cache=89 * MIB), context=4000, settings={})
    with pytest.raises(InputError, match="needs a length or a memory"):
        engine_account(spec, BF16, engine="llama.cpp", budget=EngineBudget(), context=4000, settings={})


def test_one_stream_for_all() -> None:
    account = engine_account(
        ModelSpec.read("smollm2-135m"), CacheFormat(key="int8", value="int4"), engine="llama.cpp", context=1000,
        budget=EngineBudget(), settings={"n_ctx": "8k", "n_seq_max": 16, "kv_unified": "true"},
    )  # fmt: skip
    assert (account.max_concurrency, account.cache_tokens) == (8.0, 8192)
    # q8_0 and q4_0: 52 bytes where f16 has 128
    assert account.allocated_bytes == 8192 * 23040 * 52 // 128
    assert "--cache-type-k q8_0 --cache-type-v q4_0" in account.start("m")


@given(
    st.integers(1, 64), st.integers(0, 16), st.integers(0, 8), st.integers(1, 65536), st.integers(0, 65536),
    st.integers(1, 16), st.booleans(),
)  # fmt: skip
def test_longer_contexts_never_take_less(
    full: int, windows: int, states: int, n_ctx: int, more: int, sequences: int, unified: bool
) -> None:
    layers: list[Layer] = [
        *[heads()] * full, *[heads(window=512)] * windows, *[State(name="mamba2", state_elements=999)] * states
    ]  # fmt: skip
    spec = model(layers, "gemma3_text")
    settings = {"n_seq_max": sequences, "kv_unified": unified}
    small, large = context(spec, n_ctx=n_ctx, **settings), context(spec, n_ctx=n_ctx + more, **settings)
    assert small.n_ctx >= n_ctx
    assert small.n_ctx % 256 == 0
    assert small.bytes <= large.bytes
    assert context(spec, n_ctx=n_ctx, swa_full=True, **settings).bytes >= small.bytes
    # One sequence as long as it may be finds all that it must remember, in f16.
    assert small.bytes >= sum(layer.bytes(small.n_ctx_seq, BF16) for layer in [*[heads()] * full])
