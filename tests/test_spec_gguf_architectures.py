"""GGUF metadata of every architecture, held against what llama.cpp's own cache takes from the same keys."""

from typing import Any

import pytest
from gguf_files import entry, header, metadata_header
from gguf_models import BASE, CASES, FLAGS, HYBRID, INDEXER, MAMBA2, MLA, PATTERN, SSM, WINDOW, N, keys_of

from kvist.errors import BadFile, UnsupportedModel
from kvist.spec.families import FAMILIES, Reading
from kvist.spec.gguf import read_gguf
from kvist.spec.gguf.architectures import ARCHITECTURES, REFUSED
from kvist.spec.gguf.config import config_of, read_header_config
from kvist.spec.layers import Attention, Compressed, Cross, Latent, Layer, Nothing, Parallel, Shared, State

# Layers that are full, where the pattern is llama.cpp's rule for the architecture and not the file's.
FULL_BY_RULE = {
    "gemma2": {1, 3, 5, 7}, "gemma3": {5}, "llama4": {3, 7}, "cohere2": {3, 7}, "cohere2moe": {0, 4},
    "exaone-moe": {3, 7}, "gpt-oss": {1, 3, 5, 7}, "afmoe": {3, 7}, "laguna": {0, 4}, "mellum": {3, 7},
    "muse-glimmer": {3, 7}, "olmo2": {3, 7}, "smallthinker": {0, 4}, "plamo3": {7},
}  # fmt: skip


def read(architecture: str, keys: dict[str, Any]) -> Reading:
    from kvist.spec.described import checked

    named = config_of(read_gguf(metadata_header(architecture, keys), name="file"))
    return checked(named.config, {}, file="file", assumed=named.assumed)


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] * N


def cache_of_llama_cpp(architecture: str, keys: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """Elements that llama.cpp keeps of a layer: of a key row, a value row, the convolution and the state.

    As ``llama_hparams`` computes them: ``n_embd_k_gqa``, ``n_embd_v_gqa``, ``n_embd_r`` and ``n_embd_s``.
    """
    get = keys.get
    queries = listed(keys["attention.head_count"])
    stored = listed(get("attention.head_count_kv", queries[0] if len(set(queries)) == 1 else queries))
    hidden = keys["embedding_length"]
    first = next((count for count in queries if count), 0)
    wide = get("attention.key_length", hidden // first if first else 0)
    value = get("attention.value_length", hidden // first if first else 0)
    near, near_value = get("attention.key_length_swa", wide), get("attention.value_length_swa", value)
    sliding = get("attention.sliding_window_pattern", [False] * N)
    interval = get("full_attention_interval")
    by_interval = [bool((index + 1) % interval) for index in range(N)] if interval else [False] * N
    recurrent = get("attention.recurrent_layers", by_interval)
    kernel, inner = get("ssm.conv_kernel", 0), get("ssm.inner_size", 0)
    rows: list[tuple[int, int, int, int]] = []
    for index in range(N):
        has_state = recurrent[index] or stored[index] == 0 or architecture in ("mamba", "mamba2", "falcon-h1")
        if listed(keys["feed_forward_length"])[index] and architecture.startswith("nemotron_h"):
            rows.append((0, 0, 0, 0))
            continue
        if "wkv.head_size" in keys:
            state = (2 * hidden, hidden * keys["wkv.head_size"])
        elif "shortconv.l_cache" in keys:
            state = (hidden * (keys["shortconv.l_cache"] - 1), 0)
        elif "kda.head_dim" in keys:
            width = first * keys["kda.head_dim"]
            state = (3 * (kernel - 1) * width, width * keys["kda.head_dim"])
        elif architecture == "minimax-01":
            state = (0, wide * wide * first)
        elif kernel:
            channels = inner + 2 * get("ssm.group_count", 0) * keys["ssm.state_size"]
            state = ((kernel - 1) * channels, keys["ssm.state_size"] * inner)
        else:
            state = (0, 0)
        latent = "attention.key_length_mla" in keys
        kv_heads = 0 if recurrent[index] else stored[index]
        row = (near if sliding[index] else wide) * kv_heads
        value_row = 0 if latent else (near_value if sliding[index] else value) * kv_heads
        rows.append((row, value_row, *(state if has_state else (0, 0))))
    return rows


def elements(layer: Layer) -> tuple[int, int, int, int]:
    match layer:
        case Attention(kv_heads=heads, key_dim=key, value_dim=value):
            return heads * key, heads * value, 0, 0
        case Latent(rank=rank, rope_dim=rope):
            return rank + rope, 0, 0, 0
        case State(conv_elements=conv, state_elements=state):
            return 0, 0, conv, state
        case Parallel(parts=parts):
            return tuple(map(sum, zip(*map(elements, parts), strict=True)))  # type: ignore[return-value]
    assert isinstance(layer, (Nothing, Shared))
    return 0, 0, 0, 0


def test_every_name_of_llama_cpp_is_read_or_refused_with_a_reason() -> None:
    from gguf.constants import MODEL_ARCH_NAMES

    assert set(MODEL_ARCH_NAMES.values()) <= {*ARCHITECTURES, *REFUSED}
    assert not set(ARCHITECTURES) & set(REFUSED)
    families = {entry.family for entry in ARCHITECTURES.values() if isinstance(entry.family, str)}
    assert families <= set(FAMILIES)


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - {"deepseek4", "t5"}))
def test_layers_keep_what_llama_cpp_keeps(architecture: str) -> None:
    keys = keys_of(architecture)
    reading = read(architecture, keys)
    expected = cache_of_llama_cpp(architecture, keys)
    shared = keys.get("attention.shared_kv_layers", 0)
    expected[N - shared :] = [(0, 0, 0, 0)] * shared
    assert [elements(layer) for layer in reading.layers] == expected


@pytest.mark.parametrize(
    "architecture", sorted(set(FULL_BY_RULE) | {key for key in CASES if FLAGS.items() <= CASES[key].items()})
)
def test_windows_are_where_the_file_or_llama_cpp_has_them(architecture: str) -> None:
    keys = keys_of(architecture)
    reading = read(architecture, keys)
    full = FULL_BY_RULE.get(architecture, {index for index, flag in enumerate(PATTERN) if not flag})
    seen = {
        index
        for index, layer in enumerate(reading.layers)
        if isinstance(layer, Shared) or (layer.window is None and getattr(layer, "chunk", None) is None)  # type: ignore[attr-defined]
    }
    stored = {index for index, layer in enumerate(reading.layers) if not isinstance(layer, Shared)}
    assert seen & stored == full & stored
    if architecture in FULL_BY_RULE:
        assert "is left out" in str([entry.source for entry in reading.assumed])


def test_deepseek_v4_has_windows_and_entries() -> None:
    keys = BASE | INDEXER | WINDOW | {
        "attention.head_count_kv": 1, "attention.key_length": 128, "attention.value_length": 128,
        "rope.dimension_count": 32, "attention.compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0],
        "nextn_predict_layers": 1, "attention.q_lora_rank": 64,
    }  # fmt: skip
    reading = read("deepseek4", keys)
    kinds = [(type(layer), getattr(layer, "ratio", None)) for layer in reading.layers]
    assert kinds == [(Latent, None)] * 2 + [(Compressed, ratio) for ratio in (4, 128, 4, 128, 4)]
    assert [bool(layer.indexer) for layer in reading.layers] == [ratio == 4 for _, ratio in kinds]  # type: ignore[attr-defined]
    assert len(reading.draft_layers) == 1


def test_blocks_that_draft_are_counted_apart() -> None:
    reading = read("glm4moe", BASE | {"nextn_predict_layers": 1})
    assert (len(reading.layers), len(reading.draft_layers)) == (N - 1, 1)
    with pytest.raises(BadFile, match=r"glm4moe.nextn_predict_layers is 8; it must be less than block_count"):
        read("glm4moe", BASE | {"nextn_predict_layers": N})


def test_latents_of_files_made_before_llama_cpp_kept_them() -> None:
    old = {key: value for key, value in MLA.items() if not key.endswith("_mla")}
    old |= {"attention.head_count_kv": 8, "attention.key_length": 48, "attention.value_length": 32}
    assert read("deepseek2", BASE | old).layers == read("deepseek2", BASE | MLA).layers


def test_an_old_glm_5_has_indexers_everywhere_and_a_new_one_must_say_where() -> None:
    assert all(layer.indexer for layer in read("glm-dsa", BASE | MLA | INDEXER).layers)  # type: ignore[attr-defined]
    with pytest.raises(BadFile, match=r"glm-dsa.attention.indexer.types is missing"):
        read("glm-dsa", BASE | MLA | INDEXER | {"context_length": 2**20})
    types = {"attention.indexer.types": PATTERN, "context_length": 2**20}
    found = [bool(layer.indexer) for layer in read("glm-dsa", BASE | MLA | INDEXER | types).layers]  # type: ignore[attr-defined]
    assert found == PATTERN


@pytest.mark.parametrize(
    ("architecture", "keys", "error", "says"),
    [
        (
            "qwen3",
            {"attention.head_count_kv": [2] * 7},
            BadFile,
            "7 entries; it must be an array of at least 8 entries",
        ),
        (
            "qwen3",
            {"attention.head_count_kv": [2, 4] * 4},
            UnsupportedModel,
            r"values for each layer \(2 different ones\)",
        ),
        ("qwen3", {"attention.value_length": 16}, UnsupportedModel, "value_length is 16, the key length 64"),
        ("qwen3", {"ssm.state_size": 8}, UnsupportedModel, "qwen3.ssm.state_size is 8; it is not read for qwen3 files"),
        ("qwen3", {"attention.kv_lora_rank": 8}, UnsupportedModel, "qwen3.attention.kv_lora_rank is 8"),
        ("qwen3", {"num_loops": 2}, UnsupportedModel, "qwen3.num_loops is 2"),
        (
            "jamba",
            SSM | {"attention.head_count_kv": [0, 2, 0, 4] * 2},
            UnsupportedModel,
            "has 2 different numbers of heads",
        ),
        (
            "mamba2",
            MAMBA2 | {"ssm.time_step_rank": 7},
            BadFile,
            r"time_step_rank is 7; .* divides ssm.inner_size \(1024\)",
        ),
        ("mamba2", MAMBA2 | {"ssm.inner_size": 0}, BadFile, "mamba2.ssm.inner_size is 0"),
        ("gpt-oss", {}, BadFile, "gpt-oss.attention.sliding_window is missing"),
        ("spark2_5", WINDOW, BadFile, "sliding_window_pattern is missing"),
        (
            "deepseek2",
            MLA | {"attention.key_length": 90},
            BadFile,
            r"key_length is 90; it must be the latent \(96\) and",
        ),
        (
            "rwkv7",
            {"attention.head_count": 0, "wkv.head_size": 64, "token_shift_count": 1},
            UnsupportedModel,
            "token_shift_count is 1",
        ),
        ("lfm2", CASES["lfm2"] | WINDOW, UnsupportedModel, "attention.sliding_window is set"),
        ("nemotron_h", MAMBA2 | HYBRID, UnsupportedModel, "gives layer 1 heads, and feed_forward_length a width"),
        (
            "gemma4",
            CASES["gemma4"] | {"attention.head_count_kv": [4, 2, 1, 4] * 2},
            UnsupportedModel,
            "differs among layers of",
        ),
        ("t5encoder", {}, UnsupportedModel, "general.architecture is 't5encoder': an encoder keeps no cache"),
        ("clip", {}, UnsupportedModel, "name the file of the model itself"),
        ("mamba", {"ssm.conv_kernel": 0}, BadFile, "mamba.ssm.inner_size is missing"),
    ],
)
def test_what_cannot_be_read_exactly_names_the_key_of_the_file(
    architecture: str, keys: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        read(architecture, BASE | keys)


def blocks(*, count: int = N, **shapes: list[int]) -> dict[str, list[int]]:
    return {f"blk.{index}.{name}.weight": shape for index in range(count) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("architecture", "tensors", "wrong", "says"),
    [
        (
            "qwen3moe",
            {"attn_k": [128, 512], "attn_v": [128, 512]},
            {"attn_k": [64, 512]},
            "attn_k.weight gives 64 values",
        ),
        (
            "phi3",
            {"attn_qkv": [768, 512]},
            {"attn_qkv": [700, 512]},
            "attn_qkv.weight gives 700 values a token, which are not 8 queries",
        ),
        (
            "deepseek2",
            {"attn_kv_a_mqa": [112, 512]},
            {"attn_kv_a_mqa": [96, 512]},
            "gives 96 values a token, the metadata 112",
        ),
        (
            "mamba",
            {"ssm_conv1d": [1024, 4]},
            {"ssm_conv1d": [1024, 3]},
            "needs 2048 of the last inputs .* the metadata 3072",
        ),
        (
            "mamba2",
            {"ssm_conv1d": [1152, 4]},
            {"ssm_conv1d": [1024, 4]},
            "needs 3072 of the last inputs .* the metadata 3456",
        ),
    ],
)
def test_tensors_of_every_kind_of_layer_are_held_against_the_metadata(
    architecture: str, tensors: dict[str, list[int]], wrong: dict[str, list[int]], says: str
) -> None:
    keys = keys_of(architecture)

    def given(shapes: dict[str, list[int]], count: int = N) -> Reading:
        data = metadata_header(architecture, keys, blocks(count=count, **shapes))
        return read_header_config(read_gguf(data, name="file"), {})

    assert len(given(tensors).layers) == N
    with pytest.raises(BadFile, match=says):
        given(tensors | wrong)
    with pytest.raises(BadFile, match=rf"{architecture}.block_count is 8, but the tensors hold weights of 7 layers"):
        given(tensors, N - 1)


def test_assumptions_name_the_keys_of_the_file() -> None:
    def assumed(architecture: str, keys: dict[str, Any]) -> dict[str, str]:
        data = metadata_header(architecture, keys, blocks(attn_k=[128, 512], attn_v=[128, 512]))
        reading = read_header_config(read_gguf(data, name="file"), {})
        return {entry.key: entry.source for entry in reading.assumed}

    windows = assumed("gpt-oss", BASE | WINDOW)
    assert windows["layer_types"].startswith("gpt-oss.attention.sliding_window_pattern is left out; llama.cpp's rule")
    theta = assumed("qwen3", BASE)["rope_theta"]
    assert theta == "qwen3.rope.freq_base is left out; the default of llama.cpp"
    kept = read_header_config(
        read_gguf(metadata_header("qwen3", BASE, blocks(attn_k=[128, 512], attn_v=[128, 512])), name="file"),
        {"num_key_value_heads": 8},
    )
    assert next((entry.key, entry.source) for entry in kept.assumed) == ("num_key_value_heads", "--assume")


def test_a_window_that_conversion_drops_is_said() -> None:
    assert [entry.key for entry in read("starcoder2", BASE).assumed] == ["sliding_window"]
    kept = read("starcoder2", BASE | WINDOW)
    assert {layer.window for layer in kept.layers} == {128}  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["adapter", "imatrix", "mmproj", 7])
def test_files_beside_a_model_are_no_model(kind: Any) -> None:
    entries = [entry("general.type", kind), entry("general.architecture", "llama")]
    with pytest.raises(UnsupportedModel, match=rf"general.type is {kind!r}; name the file of the model itself"):
        config_of(read_gguf(header(*entries, keys=2) + bytes(32), name="file"))


def test_the_decoder_of_an_encoder_decoder() -> None:
    keys = {key: value for key, value in BASE.items() if key != "attention.head_count_kv"}
    shapes = {"attn_k": [512, 512], "attn_v": [512, 512], "cross_attn_k": [512, 512]}
    tensors = {f"enc.blk.{index}.attn_k.weight": [512, 512] for index in range(N)}
    tensors |= {f"dec.blk.{index}.{name}.weight": shape for index in range(6) for name, shape in shapes.items()}
    data = metadata_header("t5", keys | WIDTHS_64 | {"decoder_block_count": 6}, tensors)
    reading = read_header_config(read_gguf(data, name="file"), {})
    assert reading.layers == (Parallel(parts=(_eight_of_64(Attention), _eight_of_64(Cross))),) * 6
    assert len(read("t5", keys | WIDTHS_64).layers) == N


WIDTHS_64 = {"attention.key_length": 64, "attention.value_length": 64}


def _eight_of_64(kind: Any) -> Any:
    return kind(kv_heads=8, key_dim=64, value_dim=64)
