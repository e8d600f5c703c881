"""The account of vLLM against figures that vLLM printed: recorded runs, its own functions, logs of others."""

import json
import re
from collections import Counter
from typing import Any

import pytest
from engine_peers import DATA, ask, load, recorded, spec_of
from golden_vllm import ASKED, SMALL, Asked
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import DoesNotFit, InputError, UnsupportedModel
from kvist.planning.engines import EngineBudget, engine_account
from kvist.planning.engines.vllm import VllmPool, pool_of
from kvist.planning.engines.vllm_groups import group_pages, stages
from kvist.planning.engines.vllm_page import Page, content_bytes
from kvist.planning.engines.vllm_settings import resolve
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Compressed, Indexer, Latent, Layer, State
from kvist.spec.model import ModelSpec

BF16 = CacheFormat()
GIB = 2**30
# What the recorded runs and ``ask_vllm.py`` used: the LLM class on a CPU.
OFFLINE = {"device": "cpu", "usage": "offline"}

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")


def pool(spec: ModelSpec, memory: int | None, **settings: Any) -> VllmPool:
    return pool_of(spec, BF16, budget=EngineBudget(cache=memory), context=8192, settings=settings)


def model(*layers: Layer, max_context: int = 131072, **config: Any) -> ModelSpec:
    return ModelSpec(name="a model", source="a test", layers=layers, max_context=max_context, config=config)


def attention(heads: int = 8, width: int = 128, **limits: int) -> Attention:
    return Attention(kv_heads=heads, key_dim=width, value_dim=width, **limits)


# ------------------------------------------------------------------------------------------------ recorded runs


@pytest.mark.parametrize("run", recorded("vllm"), ids=lambda run: run["id"])
def test_recorded_runs(run: dict[str, Any]) -> None:
    settings = OFFLINE | {"cpu_kvcache_space": run["env"]["VLLM_CPU_KVCACHE_SPACE"]} | run["args"]
    if run["log_lines"]["mla_backend"]:
        # That machine had no AMX, where vLLM takes a kernel with blocks of 16.
        settings["attention_backend"] = "CPU_MLA"
    made = pool_of(spec_of(run["config"]), BF16, budget=EngineBudget(), context=8192, settings=settings)
    expected = run["expected"]
    length = expected["max_model_len"]
    assert made.settings.max_num_batched_tokens == run["max_num_batched_tokens_effective"]
    if "needed_gib" in expected:
        assert round(made.needed_bytes(length) / GIB, 2) == expected["needed_gib"]
        assert round(made.available_bytes / GIB, 2) == expected["available_gib"]
        assert made.longest(length) == expected["estimated_max_model_len"]
        return
    assert made.num_blocks == run["num_blocks"]
    assert made.cache_tokens == expected["kv_cache_size_tokens"]
    assert round(made.max_concurrency, 2) == expected["max_concurrency"]
    assert Counter(len(group.members) for group in made.groups) == Counter(group["layers"] for group in run["groups"])
    if "blocks_per_request_at_max_len_derived" in expected:
        assert made.sequence_blocks(length) == expected["blocks_per_request_at_max_len_derived"]
    if "cache_config" in run and run["cache_config"]["effective_attention_block_size"]:
        blocks = {g.page.block_tokens for g in made.groups if g.page.kind == "full"}
        assert blocks == {run["cache_config"]["effective_attention_block_size"]}


@needs_data
def test_a_real_model_in_one_gib() -> None:
    # shared README: SmolLM2 in bf16 and 1 GiB prints 46,592 tokens, 11.38x for 4,096
    made = pool(ModelSpec.read("smollm2-135m"), GIB, device="cpu", max_model_len=4096)
    assert (made.cache_tokens, round(made.max_concurrency, 2)) == (46592, 11.38)


# --------------------------------------------------------------------------------------------- its own functions


def config_of(asked: Asked) -> dict[str, Any]:
    if asked.published:
        config = load(f"full/{asked.published}.json")
        if isinstance(config.get("text_config"), dict):
            # vLLM was asked about the language model alone.
            text = {"gemma3n": "Gemma3n", "gemma4": "Gemma4", "llama4": "Llama4"}[config["model_type"]]
            config = config["text_config"] | {"architectures": [f"{text}ForCausalLM"]}
        config = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    elif asked.facts:
        config = load(f"facts/{asked.facts}.json")
    elif asked.recorded:
        config = next(run["config"] for run in recorded("vllm") if run["id"] == asked.recorded)
    else:
        config = SMALL
    return {key: value for key, value in (config | asked.changed).items() if key not in asked.without}


@needs_data
@pytest.mark.parametrize("name", ASKED)
def test_answers_of_its_own_functions(name: str) -> None:
    asked = ASKED[name]
    made = pool(spec_of(config_of(asked)), asked.gib * GIB, **OFFLINE | {"max_model_len": 8192} | asked.args)
    assert (made.num_blocks, made.block_bytes) == (asked.num_blocks, asked.block_bytes)
    assert (made.cache_tokens, made.max_concurrency) == (asked.tokens, asked.concurrency)


@pytest.mark.slow
@needs_data
def test_vllm_says_so_itself() -> None:
    cases = [
        {"config": config_of(asked), "args": {"max_model_len": 8192} | asked.args, "memory": asked.gib * GIB}
        for asked in ASKED.values()
    ]
    for name, answer in zip(ASKED, ask("vllm", "ask_vllm.py", "models", cases), strict=True):
        asked = ASKED[name]
        found = (answer["num_blocks"], answer["block_bytes"], answer["tokens"], answer["concurrency"])
        assert found == (asked.num_blocks, asked.block_bytes, asked.tokens, asked.concurrency), name


PAGES = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["full", "window", "chunk", "cross"]),
            "heads": st.sampled_from([1, 2, 3, 4, 8]),
            "head_dim": st.sampled_from([64, 96, 128, 192, 256]),
            "value_dim": st.sampled_from([64, 128, 256]),
            "limit": st.sampled_from([128, 511, 1024, 4096]),
            "times": st.sampled_from([1, 1, 1, 2]),
        }
    ),
    st.fixed_dictionaries({"kind": st.just("latent"), "head_dim": st.sampled_from([132, 512, 576, 656, 1152])}),
    st.fixed_dictionaries({"kind": st.just("state"), "content_bytes": st.sampled_from([2000, 140_000, 1_000_000])}),
)
POOLS = st.fixed_dictionaries(
    {
        "menu": st.lists(PAGES, min_size=1, max_size=3),
        "block_tokens": st.sampled_from([16, 32, 64, 128]),
        "layers": st.lists(st.integers(0, 2), min_size=1, max_size=40),
        "length": st.integers(1, 20_000),
        "in_flight": st.sampled_from([512, 2048, 4096, 16384]),
        "aligned": st.booleans(),
        "memory": st.integers(2**28, 2**34),
    }
)


def asked_pool(drawn: dict[str, Any]) -> dict[str, Any]:
    menu, length = drawn["menu"], drawn["length"]
    state = drawn["block_tokens"] if drawn["aligned"] else length
    pages = [
        {key: value for key, value in page.items() if key != "times"}
        | {"block_tokens": state if page["kind"] == "state" else drawn["block_tokens"] * page.get("times", 1)}
        for page in menu
    ]
    return drawn | {"pages": pages, "layers": [which % len(menu) for which in drawn["layers"]]}


def own_pages(case: dict[str, Any]) -> list[tuple[int, Page]]:
    def page(asked: dict[str, Any]) -> Page:
        block = asked["block_tokens"]
        match asked["kind"]:
            case "state":
                blocks = 3 if case["aligned"] else 1
                return Page(kind="state", block_tokens=block, content_bytes=asked["content_bytes"], state_blocks=blocks)
            case "latent":
                return Page(kind="full", block_tokens=block, content_bytes=asked["head_dim"], shape=("l",), latent=True)
        limit = {"full": None, "cross": 4096}.get(asked["kind"], asked["limit"])
        shape = (asked["heads"], asked["head_dim"], asked["value_dim"])
        content = asked["heads"] * (asked["head_dim"] + asked["value_dim"])
        return Page(kind=asked["kind"], block_tokens=block, content_bytes=content, limit=limit, shape=shape)

    pages = [page(asked) for asked in case["pages"]]
    return [(index, pages[which]) for index, which in enumerate(case["layers"])]


@pytest.mark.slow
def test_vllm_groups_layers_that_no_model_has_as_we_do() -> None:
    drawn: list[dict[str, Any]] = []

    @given(POOLS)
    def draw(case: dict[str, Any]) -> None:
        drawn.append(asked_pool(case))

    for _ in range(8):
        draw()
    for case, answer in zip(drawn, ask("vllm", "ask_vllm.py", "pools", drawn), strict=True):
        try:
            groups = group_pages(own_pages(case))
        except InputError:
            assert "refused" in answer, case
            continue
        block = max(group.bytes() for group in groups)
        blocks = sum(group.blocks(case["length"], case["in_flight"]) for group in groups)
        count = case["memory"] // block
        assert answer == {
            "num_blocks": count,
            "block_bytes": block,
            "tokens": int(count / blocks * case["length"]),
            "concurrency": count / blocks,
            "needed": block * blocks,
            "groups": sorted(len(group.members) for group in groups),
        }, case


# ------------------------------------------------------------------------------------------- rules, worked by hand


@pytest.mark.parametrize(
    ("full", "windows", "sizes"),
    [(1, 1, [1, 1]), (2, 4, [2, 2, 2]), (3, 7, [3, 3, 2, 2]), (6, 5, [6, 5]), (12, 13, [13, 12]), (10, 20, [10] * 3)],
)
def test_groups_are_as_long_as_the_rarest_kind_or_the_commonest_of_near_equals(
    full: int, windows: int, sizes: list[int]
) -> None:
    # vllm/v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size; 1.5 is its heuristic
    made = pool(model(*[attention()] * full, *[attention(window=1024)] * windows), GIB)
    assert sorted((len(group.members) for group in made.groups), reverse=True) == sizes


@pytest.mark.parametrize(("full", "windows", "blocks", "groups"), [(1, 1, 64, 2), (2, 4, 32, 3)])
def test_blocks_in_the_memory_of_64_pages(full: int, windows: int, blocks: int, groups: int) -> None:
    page = 16 * 8 * 256 * 2
    made = pool(model(*[attention()] * full, *[attention(window=1024)] * windows), 64 * page)
    assert (made.num_blocks, len(made.groups)) == (blocks, groups)


def test_blocks_of_one_sequence() -> None:
    # 16,384 tokens, window 1,024, steps of 1,024 one at a time: 1,024 full blocks and 129 of the window
    made = pool(
        model(attention(), attention(window=1024)), GIB, max_num_batched_tokens=1024, async_scheduling=False
    )  # fmt: skip
    assert [group.blocks(16384, made.settings.in_flight_tokens) for group in made.groups] == [1024, 129]
    # Two steps are in flight with asynchronous scheduling, the default on GPUs.
    assert pool(model(attention()), GIB, max_num_batched_tokens=1024).settings.in_flight_tokens == 2048


def test_the_longest_sequence_in_eight_gib() -> None:
    # 32 layers x 32 heads x 128 in fp16: 16,384 tokens less the null block, which is not lent
    made = pool(model(*[attention(heads=32)] * 32), 8 * GIB)
    assert made.num_blocks * 16 == 16384
    assert made.longest(131072) == 16384 - 16


@pytest.mark.parametrize(
    ("dtype", "widths", "expected"),
    [
        # the backends' own customize_spec on pages of one token and head, vllm 0.32.0
        ("int8_per_token_head", [(64, 64), (128, 128), (192, 128)], [136, 264, 328]),
        ("fp8_per_token_head", [(64, 64), (128, 128), (192, 128)], [136, 264, 328]),
        ("int4_per_token_head", [(64, 64), (128, 128), (192, 128)], [72, 136, 168]),
        ("turboquant_k8v4", [(width, width) for width in (64, 80, 96, 128, 256)], [100, 124, 148, 196, 388]),
        ("turboquant_4bit_nc", [(width, width) for width in (64, 80, 96, 128, 256)], [70, 86, 102, 134, 262]),
        ("turboquant_k3v4_nc", [(width, width) for width in (64, 80, 96, 128, 256)], [62, 76, 90, 118, 230]),
        ("turboquant_3bit_nc", [(width, width) for width in (64, 80, 96, 128, 256)], [54, 66, 78, 102, 198]),
        # nvfp4_kv_cache_full_dim: d / 2 + d / 16 a vector
        ("nvfp4", [(64, 64), (128, 128), (256, 256)], [72, 144, 288]),
        ("fp8", [(128, 128), (192, 128)], [256, 320]),
    ],
)
def test_bytes_of_a_token_and_head(dtype: str, widths: list[tuple[int, int]], expected: list[int]) -> None:
    settings = resolve(model(attention()), BF16, {}, context=8192, device_bytes=None)
    assert [content_bytes(key, value, dtype, settings) for key, value in widths] == expected


@pytest.mark.parametrize(
    ("dtype", "block", "aligned"),
    [
        # Platform._align_heterogeneous_kv_block_size itself, vllm 0.32.0, heads of 128
        ("turboquant_k8v4", 16, 48),
        ("turboquant_k8v4", 32, 64),
        ("turboquant_3bit_nc", 16, 96),
        ("turboquant_3bit_nc", 32, 96),
    ],
)
def test_turboquant_leaves_the_outer_layers_plain_and_lengthens_blocks(dtype: str, block: int, aligned: int) -> None:
    made = pool(model(*[attention()] * 10), GIB, kv_cache_dtype=dtype, block_size=block)
    contents = [page.content_bytes for _, page in made.groups[0].members]
    packed = {"turboquant_k8v4": 196, "turboquant_3bit_nc": 102}[dtype]
    assert contents == [8 * 512] * 2 + [8 * packed] * 6 + [8 * 512] * 2
    assert (made.block_tokens, len(made.groups)) == (aligned, 1)


def test_latents() -> None:
    plain = Latent(rank=512, rope_dim=64)
    sparse = Latent(rank=512, rope_dim=64, indexer=Indexer(heads=1, dim=128))

    def contents(layer: Layer, **settings: Any) -> list[int]:
        return [page.content_bytes for _, page in pool(model(layer), GIB, **settings).groups[0].members]

    assert contents(plain) == [1152]
    assert contents(plain, kv_cache_dtype="fp8") == [576]
    # fp8_ds_mla: 512 fp8, four f32 scales, 64 bf16; the indexer 128 fp8 and one f32 scale
    assert contents(sparse, kv_cache_dtype="fp8") == [656, 132]
    assert contents(sparse, kv_cache_dtype="fp8", attention_backend="FLASHINFER_MLA_SPARSE") == [576, 132]
    assert contents(sparse, kv_cache_dtype="nvfp4_ds_mla") == [352, 132]
    assert contents(sparse) == [1152, 132]


def test_hybrid_blocks_cover_a_state() -> None:
    # 1,634,304 bytes of state, 2,048 a token, blocks in steps of 16: 800 tokens
    state = State(name="gated-delta", conv_elements=3 * 8192, conv_columns=3, state_elements=(1_634_304 - 49152) // 2)
    made = pool(model(*[state] * 3, attention(heads=2, width=256)), GIB)
    assert made.block_tokens == 800
    assert {group.bytes() for group in made.groups} == {800 * 2048}


def test_the_old_and_the_present_meaning_of_kv_cache_size() -> None:
    # vllm-project/vllm#40691, 0.19.0: Qwen3.5-27B, 32,768 tokens: "GPU KV cache size: 290,864 tokens",
    # "Maximum concurrency for 32,768 tokens per request: 33.04x"; no prefix caching of hybrid models then
    linear = State(name="gated-delta", conv_elements=3 * 10240, conv_columns=3, state_elements=48 * 128 * 128)
    qwen = model(*[linear, linear, linear, attention(heads=4, width=256)] * 16, model_type="qwen3_5_text",
                 mamba_ssm_dtype="float32")  # fmt: skip
    made = pool(qwen, None, max_model_len=32768, enable_prefix_caching=False, num_gpu_blocks_override=1487)
    assert made.cache_tokens_before == 290864
    assert round(made.max_concurrency, 2) == 33.04
    assert made.cache_tokens == int(1487 / 45 * 32768)


def test_logs_of_dense_models_on_gpus() -> None:
    # LMCache/LMCache#1739: Qwen3-14B, 6.51 GiB for the cache: 42,656 tokens, 1.30x for 32,768
    qwen = model(*[attention()] * 40)
    low, high = (pool(qwen, int(gib * GIB), max_model_len=32768) for gib in (6.505, 6.515))
    assert low.cache_tokens <= 42656 <= high.cache_tokens
    assert round(42656 / 32768, 2) == 1.30
    # vllm-project/vllm#10517: Llama-3.1-8B, 3.81 GiB: 1,952 blocks
    llama = model(*[attention()] * 32)
    assert pool(llama, int(3.805 * GIB)).num_blocks <= 1952 <= pool(llama, int(3.815 * GIB)).num_blocks


def test_ranks() -> None:
    wide = model(*[attention()] * 31)
    assert pool(wide, GIB, tensor_parallel_size=4).block_bytes == pool(wide, GIB).block_bytes // 4
    # Fewer heads than ranks are replicated, latents always.
    assert pool(wide, GIB, tensor_parallel_size=16).block_bytes == pool(wide, GIB, tensor_parallel_size=8).block_bytes
    latent = model(*[Latent(rank=512, rope_dim=64)] * 4)
    assert pool(latent, GIB, tensor_parallel_size=8).block_bytes == pool(latent, GIB).block_bytes
    # The rank with the most layers decides: 16 and 15.
    assert pool(wide, GIB, pipeline_parallel_size=2).block_bytes == 16 * 16 * 4096
    with pytest.raises(InputError, match="tensor_parallel_size=3 and 8 KV heads"):
        pool(wide, GIB, tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("layers", "ranks", "expected"),
    [(32, 1, [32]), (31, 2, [16, 15]), (10, 4, [2, 3, 3, 2]), (61, 8, [7, 7, 8, 8, 8, 8, 8, 7])],
)
def test_layers_of_a_pipeline(layers: int, ranks: int, expected: list[int]) -> None:
    found = stages(layers, ranks)
    assert [len(part) for part in found] == expected
    assert [index for part in found for index in part] == list(range(layers))


# ----------------------------------------------------------------------------------------- the account and its words


def test_a_share_of_a_device() -> None:
    # request_memory: ceil(total x utilisation); then what is not for the cache goes off
    account = engine_account(
        model(*[attention()] * 32), BF16, engine="vllm", context=8192,
        budget=EngineBudget(device=80 * GIB + 1, taken=20 * GIB), settings={"gpu_memory_utilization": "0.9"},
    )  # fmt: skip
    assert account.cache_bytes == -(-(80 * GIB + 1) * 9 // 10) - 20 * GIB
    assert "--gpu-memory-utilization 0.9" in account.start("m")
    assert account.settings["max_num_batched_tokens"] == 8192


def test_the_account_explains_itself() -> None:
    spec = model(*[attention(window=512)] * 22, *[attention()] * 4)
    account = engine_account(
        spec, BF16, engine="vllm", budget=EngineBudget(cache=4 * GIB), context=8192, settings={"block-size": 32}
    )
    told = account.to_dict()
    assert told["num_blocks"] == account.num_blocks == 4 * GIB // (4 * 32 * 4096)
    assert told["block_bytes"] * told["num_blocks"] == told["allocated_bytes"] <= told["cache_bytes"]
    assert told["usable_blocks"] == told["num_blocks"] - 1
    assert told["padding_layers"] == 2
    assert sum(group["sequence_blocks"] for group in told["groups"]) == told["sequence_blocks"]
    assert account.start("m").startswith("vllm serve m --max-model-len 8192 --dtype bfloat16 --block-size 32")
    assert {figure.what for figure in account.figures} >= {"num_blocks", "maximum concurrency", "KV cache size, tokens"}
    assert any("before 0.21" in note for note in account.notes)
    assert json.loads(json.dumps(told)) == told


def test_what_does_not_fit_says_how_much_would() -> None:
    spec = model(*[attention()] * 32)
    with pytest.raises(DoesNotFit) as refusal:
        engine_account(spec, BF16, engine="vllm", budget=EngineBudget(cache=GIB), context=131072, settings={})
    assert "16 GiB" in str(refusal.value)
    longest = int(re.search(r"holds ([0-9,]+) tokens", str(refusal.value))[1].replace(",", ""))  # type: ignore[index]
    assert longest == 8192 - 16
    engine_account(spec, BF16, engine="vllm", budget=EngineBudget(cache=GIB), context=longest, settings={})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_sise": "16"}, r"block_sise=16 is no setting of vllm.*known are device, block_size"),
        ({"block_size": "many"}, r"block_size=many: 'many' is not a token count"),
        ({"block_size": "24"}, r"block_size=24: 24 is no multiple of 16; 32 is"),
        ({"block_size": "0"}, r"block_size=0: 0 is out of range; 16 to"),
        ({"kv_cache_dtype": "q8_0"}, r"q8_0 is not one of auto"),
        ({"gpu_memory_utilization": "1.5"}, r"above 0, at most 1"),
        ({"enable_prefix_caching": "maybe"}, r"neither true nor false"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, r"MLA models only"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words) as refusal:
        pool(model(attention()), GIB, **settings)
    assert refusal.value.key == "set"


def test_lengths_beyond_the_model_are_counted_with_a_note() -> None:
    def notes(length: int) -> tuple[str, ...]:
        settings = {"max_model_len": length}
        spec = model(attention(), max_context=8192)
        return engine_account(
            spec, BF16, engine="vllm", budget=EngineBudget(cache=GIB), context=8192, settings=settings
        ).notes

    assert not notes(8192)
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" in " ".join(notes(8193))


def test_formats_that_vllm_has_not() -> None:
    for key, value in (("int8", "int8"), ("bf16", "fp8")):
        with pytest.raises(InputError, match="vLLM stores keys and values alike"):
            pool_of(
                model(attention()),
                CacheFormat(key=key, value=value),
                budget=EngineBudget(cache=GIB),
                context=1,
                settings={},
            )
    assert pool_of(
        model(attention()), CacheFormat(key="fp8", value="fp8"), budget=EngineBudget(cache=GIB), context=1, settings={}
    ).groups[0].page.content_bytes == 8 * 256  # fmt: skip


@pytest.mark.parametrize(
    "layer",
    [
        Compressed(rank=448, rope_dim=64, ratio=4, window=128),
        State(name="rwkv", state_elements=64 * 64),
        Attention(kv_heads=1, key_dim=64, value_dim=64, indexer=Indexer(heads=1, dim=128)),
    ],
)
def test_what_is_not_accounted_for_is_refused(layer: Layer) -> None:
    with pytest.raises(UnsupportedModel, match="layer 1 of a model has"):
        pool(model(attention(), layer), GIB)


def test_checkpoints_that_declare_their_cache() -> None:
    declared = {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}
    assert pool(model(attention(), quantization_config=declared), GIB).settings.kv_cache_dtype == "fp8_e4m3"
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    assert pool(model(attention(), quantization_config=scheme), GIB).settings.kv_cache_dtype == "fp8"
    # "auto" asks the checkpoint; only another type overrides it.
    for said, found in (("auto", "fp8_e4m3"), ("bfloat16", "bfloat16")):
        made = pool(model(attention(), quantization_config=declared), GIB, kv_cache_dtype=said)
        assert made.settings.kv_cache_dtype == found


@needs_data
def test_every_published_model_is_accounted_for_or_refused_in_words() -> None:
    accounted, refused = 0, []
    for path in sorted((DATA / "configs" / "full").glob("*.json")):
        try:
            spec = ModelSpec.read(path)
            made = pool(spec, 256 * GIB)
        except (UnsupportedModel, InputError) as refusal:
            refused.append(refusal.key)
            continue
        accounted += 1
        assert made.num_blocks * made.block_bytes <= 256 * GIB
    assert accounted >= 60
    assert None not in refused


LAYERS = st.lists(
    st.builds(
        lambda heads, width, window: (
            attention(heads, width) if window is None else attention(heads, width, window=window)
        ),
        st.sampled_from([1, 2, 4, 8]),
        st.sampled_from([64, 128, 256]),
        st.sampled_from([None, None, 128, 1024]),
    ),
    min_size=1,
    max_size=24,
)


@given(LAYERS, st.integers(2**24, 2**34), st.integers(0, 2**30), st.integers(1, 65536))
def test_more_memory_is_never_less(layers: list[Layer], memory: int, more: int, length: int) -> None:
    spec = model(*layers)
    small, large = pool(spec, memory, max_model_len=length), pool(spec, memory + more, max_model_len=length)
    assert small.num_blocks <= large.num_blocks
    assert small.cache_tokens <= large.cache_tokens
    assert small.num_blocks * small.block_bytes <= memory < (small.num_blocks + 1) * small.block_bytes
    assert small.longest(length) <= large.longest(length)
    # Every layer lies in exactly one group, and what vLLM needs is never less than what must be remembered.
    assert sorted(index for group in small.groups for index, _ in group.members) == list(range(len(layers)))
    assert small.needed_bytes(length) >= spec.sequence_bytes(length, BF16)
