"""The account of SGLang against its sources (0.5.23) and against start-up logs that others published.

SGLang does not run without a GPU, so nothing here asks it; the logs are of servers of 2026.
"""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvist.errors import DoesNotFit, InputError, UnsupportedModel
from kvist.planning.engines import EngineBudget, engine_account
from kvist.planning.engines.sglang import SglangPools, pools_of
from kvist.planning.engines.sglang_cells import stages
from kvist.planning.engines.sglang_memory import static_fraction
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention, Cross, Indexer, Latent, Layer, Nothing, Parallel, State
from kvist.spec.model import ModelSpec

BF16 = CacheFormat()
GIB = 2**30


def model(*layers: Layer, max_context: int = 131072, **config: Any) -> ModelSpec:
    return ModelSpec(name="a model", source="a test", layers=layers, max_context=max_context, config=config)


def attention(heads: int = 8, width: int = 128, **limits: int) -> Attention:
    return Attention(kv_heads=heads, key_dim=width, value_dim=width, **limits)


def pools(spec: ModelSpec, memory: int, **settings: Any) -> SglangPools:
    return pools_of(spec, BF16, budget=EngineBudget(cache=memory), settings=settings)


def printed(size: int) -> str:
    """As SGLang prints sizes: its GB is 2**30."""
    return f"{size / GIB:.2f}"


QWEN3_235B = model(*[attention(heads=4)] * 94, model_type="qwen3_moe")
QWEN25_05B = model(*[attention(heads=2, width=64)] * 24, model_type="qwen2")
KIMI_K25 = model(*[Latent(rank=512, rope_dim=64)] * 61, model_type="kimi_k25")
MIMO_V2_FLASH = model(
    *[Attention(kv_heads=4, key_dim=192, value_dim=128)] * 9,
    *[Attention(kv_heads=8, key_dim=192, value_dim=128, window=128)] * 39,
    model_type="mimo_v2_flash",
)
QWEN35_9B = model(
    *[
        State(name="gated-delta", conv_elements=3 * 8192, conv_columns=3, state_elements=32 * 128 * 128),
        attention(heads=4, width=256),
    ]
    * 8,
    *[State(name="gated-delta", conv_elements=3 * 8192, conv_columns=3, state_elements=32 * 128 * 128)] * 16,
    model_type="qwen3_5_text",
)
NEMOTRON_3_NANO = model(
    *[State(name="mamba2", conv_elements=3 * 6144, conv_columns=3, state_elements=64 * 64 * 128)] * 23,
    *[attention(heads=2)] * 6,
    *[Nothing()] * 23,
    model_type="nemotron_h",
    n_groups=8,
    ssm_state_size=128,
)
GRANITE_4_SMALL = model(
    *[State(name="mamba2", conv_elements=3 * 8448, conv_columns=3, state_elements=128 * 64 * 128)] * 36,
    *[attention()] * 4,
    model_type="granitemoehybrid",
    mamba_n_groups=1,
    mamba_d_state=128,
)


# ------------------------------------------------------------------------------------------------ published logs


@pytest.mark.parametrize(
    ("spec", "settings", "tokens", "key", "value"),
    [
        # vllm-project/vllm#21348, Qwen3-235B-A22B-FP8 on four ranks with one KV head each
        (QWEN3_235B, {"tp_size": 4}, 367404, "8.23", "8.23"),
        # Qwen2.5-0.5B with --max-total-tokens 20480
        (QWEN25_05B, {"max_total_tokens": 20480}, 20480, "0.12", "0.12"),
        # Kimi K2.5 on eight ranks, each with the whole latent: KV size 160.63 GB
        (KIMI_K25, {"tp_size": 8}, 2454421, "160.63", "0.00"),
        # Nemotron-3-Nano in fp8 on four ranks, of which two share a KV head
        (NEMOTRON_3_NANO, {"tp_size": 4, "kv_cache_dtype": "fp8_e4m3"}, 19644177, "14.05", "14.05"),
    ],
)
def test_keys_and_values_are_as_large_as_printed(
    spec: ModelSpec, settings: dict[str, Any], tokens: int, key: str, value: str
) -> None:
    made = pools(spec, 10**15, **settings | {"max_total_tokens": tokens})
    assert made.tokens == tokens
    assert (printed(made.key_bytes), printed(made.value_bytes)) == (key, value)


@pytest.mark.parametrize(
    ("spec", "settings", "states", "conv", "ssm"),
    [
        # Nemotron-3-Nano on four ranks; Granite-4-Small on one; Qwen3.5-9B on two: slots, conv_state and ssm_state
        (NEMOTRON_3_NANO, {"tp_size": 4}, 2211, "0.44", "24.84"),
        (GRANITE_4_SMALL, {}, 218, "0.37", "30.80"),
        (QWEN35_9B, {"tp_size": 2}, 186, "0.10", "4.38"),
    ],
)
def test_states_are_as_large_as_printed(
    spec: ModelSpec, settings: dict[str, Any], states: int, conv: str, ssm: str
) -> None:
    made = pools(spec, 10**15, **settings | {"max_mamba_cache_size": states})
    # One slot more is there for padding; a convolution's columns are in bf16, a state in f32.
    recurrent = sum(piece.state_elements for piece in spec.layers if isinstance(piece, State))
    share = 4 * recurrent // settings.get("tp_size", 1) * (states + 1)
    assert (printed(made.state_bytes - share), printed(share)) == (conv, ssm)


def test_states_and_tokens_share_as_printed() -> None:
    # Qwen3.5-9B on two ranks: max_mamba_cache_size 186 beside 327,310 tokens of K 2.50 GB and V 2.50 GB, which a
    # budget of 9.48 GB at the default ratio of 0.9 makes
    state = (2**20 * 24) + 3 * 4096 * 2 * 24
    made = pools(QWEN35_9B, 187 * state + 327310 * 16384, tp_size=2)
    assert (made.cells.state, made.states, made.tokens) == (state, 186, 327310)
    assert (printed(made.key_bytes), printed(made.value_bytes)) == ("2.50", "2.50")


def test_windows_of_a_pool_of_their_own() -> None:
    # sgl-project/sglang#18039, MiMo-V2-Flash on four ranks with pages of 64: full_layer_tokens=375360,
    # swa_layer_tokens=300288; the windows' keys 8.38 GB, values 5.59 GB
    cell = 9 * 320 * 2 + 0.8 * 39 * 2 * 320 * 2
    made = pools(MIMO_V2_FLASH, int(375360 * cell) + 1, tp_size=4, page_size=64)
    assert (made.tokens, made.window_tokens) == (375360, 300288)
    assert (printed(made.cells.window_key * 300352), printed(made.cells.window_value * 300352)) == ("8.38", "5.59")


# ------------------------------------------------------------------------------------------------ its rules by hand


def test_a_cell_of_each_kind() -> None:
    plain = pools(model(*[attention()] * 32), GIB)
    assert (plain.cells.full, plain.tokens) == (131072, 8192)
    assert pools(model(*[attention()] * 32), GIB, kv_cache_dtype="fp8_e4m3").tokens == 16384
    # mxfp8 has one byte of scale for 32 elements
    assert pools(model(*[attention()] * 32), GIB, kv_cache_dtype="mxfp8").cells.full == 32 * 2 * 1024 * 33 // 32
    latent = Latent(rank=512, rope_dim=64)
    assert pools(model(latent), GIB).cells.full == 1152
    assert pools(model(latent), GIB, kv_cache_dtype="fp8_e4m3").cells.full == 576
    # With an indexer fp8 keeps four f32 scales and the rotary part in bf16; the indexer's key has a scale too.
    sparse = Latent(rank=512, rope_dim=64, indexer=Indexer(heads=1, dim=128))
    assert pools(model(sparse), GIB, kv_cache_dtype="fp8_e4m3").cells.full == 656 + 132
    assert pools(model(sparse), GIB).cells.full == 1152 + 132


def test_ranks_divide_heads_or_share_them() -> None:
    spec = model(attention(heads=8))
    assert [pools(spec, GIB, tp_size=ranks).cells.full for ranks in (1, 2, 8, 16)] == [4096, 2048, 512, 512]
    with pytest.raises(InputError, match="tp_size=3 and 8 KV heads"):
        pools(spec, GIB, tp_size=3)


def test_a_pipeline_is_as_short_as_its_heaviest_rank() -> None:
    # get_pp_indices: what is left over goes to the last ranks
    assert stages(10, 4) == [range(0, 2), range(2, 4), range(4, 7), range(7, 10)]
    spec = model(*[attention()] * 3, *[Nothing()] * 3)
    assert pools(spec, GIB, pp_size=2).tokens == pools(spec, GIB).tokens


def test_windows_are_kept_whole_but_in_some_families() -> None:
    layers = [attention(window=1024)] * 5 + [attention()]
    assert pools(model(*layers, model_type="gemma3_text"), GIB).window_tokens == 0
    apart = pools(model(*layers, model_type="gemma4_text"), GIB)
    assert (apart.tokens, apart.window_tokens) == (GIB // (4096 + 4 * 4096), int(GIB // 20480 * 0.8))
    fewer = pools(model(*layers, model_type="gemma4_text"), GIB, swa_full_tokens_ratio=0.1)
    assert fewer.tokens > apart.tokens
    alone = pools(model(attention(window=128), model_type="gpt_oss"), GIB)
    assert alone.tokens == alone.window_tokens == GIB // 4096


def test_states_by_setting() -> None:
    spec = QWEN35_9B
    few = engine_account(
        spec,
        BF16,
        engine="sglang",
        budget=EngineBudget(cache=20 * GIB),
        context=8192,
        settings={"max_mamba_cache_size": 9},
    )
    # With the prefix cache a request may hold three states.
    assert (few.details["max_mamba_cache_size"], few.max_concurrency) == (9, 3.0)
    plain = pools(spec, 20 * GIB, disable_radix_cache=True, max_running_requests=40)
    assert (plain.states, plain.sequences(8192)) == (40, 40)
    assert pools(spec, 20 * GIB, mamba_ssm_dtype="bfloat16").states > 1.9 * pools(spec, 20 * GIB).states


@pytest.mark.parametrize(
    ("gib", "options", "reserved"),
    [
        # 512 + 1.5 x tokens of a step (>= 2,048) + 1,024/8 a rank + 2 x largest decode batch + 8 x prompt lengths
        (16, {}, 512 + 3072 + 128 + 2 * 8 + 8 * 42),
        (24, {}, 512 + 6144 + 128 + 2 * 48 + 8 * 50),
        (48, {"tp_size": 4}, 512 + 6144 + 512 + 2 * 160 + 8 * 50),
        (24, {"chunked_prefill_size": 1024, "max_running_requests": 4}, 512 + 3072 + 128 + 2 * 4 + 8 * 38),
        (24, {"latent": True}, 512 + 6144 + 128 + 2 * 48 + 1536),
        # at least 10 GiB above 60
        (80, {"chunked_prefill_size": 1024, "max_running_requests": 4}, 10240),
        (141, {"tp_size": 8}, 512 + 12288 + 1024 + 2 * 512 + 8 * 58),
        (192, {}, 512 + 24576 + 128 + 2 * 512 + 8 * 74),
    ],
)
def test_the_static_fraction(gib: int, options: dict[str, Any], reserved: float) -> None:
    assert static_fraction(gib * GIB, **options) == round((gib * 1024 - reserved) / (gib * 1024), 3)


def test_the_budget_of_a_device() -> None:
    spec = model(*[attention()] * 32)
    budget = EngineBudget(device=80 * GIB, taken=16 * GIB)
    made = pools_of(spec, BF16, budget=budget, settings={"mem_fraction_static": 0.9})
    assert made.budget == int(64 * GIB - 80 * GIB * (1 - 0.9))
    with pytest.raises(InputError, match="sglang needs a memory"):
        pools_of(spec, BF16, budget=EngineBudget(), settings={})


# ----------------------------------------------------------------------------------------------------- the answer


def test_the_account_and_its_command() -> None:
    made = engine_account(
        model(*[attention()] * 32),
        BF16,
        engine="sglang",
        budget=EngineBudget(cache=10 * GIB),
        context=8192,
        settings={"page_size": "64", "kv_cache_dtype": "fp8_e5m2", "disable_radix_cache": True},
    )
    assert (made.cache_tokens, made.num_blocks, made.max_concurrency) == (163840, 2560, 20.0)
    assert made.start("a/model") == (
        "python -m sglang.launch_server --model-path a/model --context-length 8192 --kv-cache-dtype fp8_e5m2 "
        "--page-size 64 --disable-radix-cache"
    )
    assert [figure.value for figure in made.figures] == [65536.0, 163840]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 16}, "block_size=16 is no setting of sglang that is accounted for; known are mem_fraction"),
        ({"page_size": 0}, "page_size=0: 0 is out of range"),
        ({"swa_full_tokens_ratio": "1.5"}, "above 0, at most 1"),
        ({"kv_cache_dtype": "int8"}, "is not one of auto, bfloat16"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        pools(model(attention()), GIB, **settings)
    assert caught.value.key == "set"


def test_what_is_not_accounted_for() -> None:
    for layer in (
        Cross(kv_heads=8, key_dim=64, value_dim=64),
        State(name="rwkv", state_elements=8),
        Parallel(parts=(attention(), State(name="rg-lru", state_elements=8))),
    ):
        with pytest.raises(UnsupportedModel, match="does not cover"):
            pools(model(attention(), layer), GIB)
    with pytest.raises(UnsupportedModel, match="differ in their heads"):
        pools(model(attention(), attention(heads=4)), GIB)
    with pytest.raises(InputError, match="stores keys and values alike"):
        pools_of(model(attention()), CacheFormat(key="int8"), budget=EngineBudget(cache=GIB), settings={})
    with pytest.raises(DoesNotFit, match="hold 0 tokens"):
        engine_account(model(*[attention()] * 32), BF16, engine="sglang", budget=EngineBudget(cache=100), context=8192)


@given(
    memory=st.integers(10**8, 10**11),
    more=st.integers(0, 10**10),
    page=st.sampled_from([1, 16, 64]),
    ratio=st.sampled_from([0.1, 0.5, 0.8, 1.0]),
    spec=st.sampled_from([QWEN3_235B, KIMI_K25, MIMO_V2_FLASH, QWEN35_9B, NEMOTRON_3_NANO, GRANITE_4_SMALL]),
)
def test_more_memory_holds_no_less_and_never_more_than_it_is(
    memory: int, more: int, page: int, ratio: float, spec: ModelSpec
) -> None:
    small = pools(spec, memory, page_size=page, swa_full_tokens_ratio=ratio)
    large = pools(spec, memory + more, page_size=page, swa_full_tokens_ratio=ratio)
    assert small.window_tokens <= large.window_tokens
    assert small.states <= large.states
    assume(small.tokens and (small.states or not small.cells.state))
    # Both pools have one page beyond their tokens, which the budget does not pay for.
    spare = page * (small.cells.full + small.cells.window_bytes)
    assert small.bytes <= small.budget + spare
    if not small.cells.state or small.states == large.states:
        assert small.tokens <= large.tokens
