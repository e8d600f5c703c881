"""The GGUF header reader, against the `gguf` package's own writer and against broken files."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from fixtures_models import gemma_path, smollm2_path  # noqa: F401
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf_files import GEMMA3, LLAMA, entry, header, tensor, text, write_gguf

from kvist.errors import BadFile, UnsupportedModel
from kvist.spec.formats import CacheFormat
from kvist.spec.gguf import GGML_TYPES, GGUFArray, read_gguf
from kvist.spec.gguf.config import config_of, read_header_config
from kvist.spec.model import ModelSpec


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


def test_type_sizes_are_those_of_the_gguf_package() -> None:
    for kind, (name, block, size) in GGML_TYPES.items():
        # Q8_1 is never stored in files; the package counts its two scales as f32, ggml-common.h as f16.
        if name != "Q8_1" and kind in GGML_QUANT_SIZES:
            assert (block, size) == GGML_QUANT_SIZES[kind], name
    assert set(GGML_QUANT_SIZES) <= set(GGML_TYPES)


def test_reads_what_the_writer_wrote(small: Path) -> None:
    found = read_gguf(small)
    assert found.metadata["general.architecture"] == "llama"
    assert found.metadata["llama.attention.head_count_kv"] == 2
    assert found.array("tokenizer.ggml.tokens") == ["<s>", "</s>", "naïve"]
    assert found.array("tokenizer.ggml.scores") == [0.0, -1.0, -2.5]
    assert found.array("tokenizer.ggml.token_type") == [3, 3, 1]
    theirs = GGUFReader(small)
    for ours, other in zip(found.tensors, theirs.tensors, strict=True):
        assert (ours.name, ours.offset, ours.bytes) == (other.name, other.data_offset, other.n_bytes)
        assert ours.shape == tuple(reversed(other.shape.tolist()))
    assert found.parameters == 3 * 64 + 2 * (64 + 32 + 32) * 64
    assert found.weights_by_type == {"F16": 2 * 128 * 64 * 2, "F32": 3 * 64 * 4}


def test_arrays_are_not_decoded_until_asked(small: Path) -> None:
    found = read_gguf(small)
    tokens = found.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GGUFArray)
    assert (tokens.count, tokens.end - tokens.start) == (3, 3 * 8 + len("<s></s>naïve".encode()))
    with pytest.raises(BadFile, match="an array was expected"):
        found.array("general.architecture")


def test_bytes_of_a_prefix_are_enough(small: Path) -> None:
    whole = read_gguf(small)
    prefix = read_gguf(small.read_bytes()[: whole.data_start], name="prefix")
    assert prefix.tensors == whole.tensors
    assert prefix.array("tokenizer.ggml.tokens") == ["<s>", "</s>", "naïve"]


def test_every_cut_of_a_header_is_refused(small: Path) -> None:
    data = small.read_bytes()
    end = read_gguf(small).data_start
    for length in range(0, end - 32, 7):
        with pytest.raises(BadFile, match="fetch it again"):
            read_gguf(data[:length], name="cut")


def test_every_cut_of_a_file_says_fetch_it_again(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (*range(0, 40), *range(40, len(data), 211), len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(BadFile, match="fetch it again"):
            read_gguf(path)


def test_a_file_without_its_last_tensor_bytes_is_cut(small: Path, tmp_path: Path) -> None:
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(small.read_bytes()[:-1])
    with pytest.raises(BadFile, match="cut: tensor"):
        read_gguf(torn)


_KEY = text("a.key")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "cut"),
        (b"GGU", "cut"),
        (b"PK\x03\x04" + bytes(40), "does not begin"),
        (header(version=1), "version 1"),
        (header(version=0x03000000), "version 50331648"),
        (header(keys=2**63), "more than"),
        (header(tensors=2**40), "more than"),
        (header(struct.pack("<Q", 2**62), bytes(40), keys=1), "claims"),
        (header(text(""), bytes(40), keys=1), "empty"),
        (header(_KEY, struct.pack("<I", 99), bytes(40), keys=1), "value type 99"),
        (header(_KEY, struct.pack("<IQ", 8, 2**60), bytes(40), keys=1), "cut"),
        (header(_KEY, struct.pack("<IIQ", 9, 8, 2**60), bytes(40), keys=1), "strings do not fit"),
        (header(_KEY, struct.pack("<IIQ", 9, 4, 2**60), bytes(40), keys=1), "cut"),
        (header(_KEY, struct.pack("<IIQ", 9, 9, 1), bytes(40), keys=1), "arrays of type 9"),
        (header(_KEY, struct.pack("<IIQQ", 9, 8, 2, 2**63), bytes(40), keys=1), "cut"),
        (header(_KEY, struct.pack("<IB", 0, 1), _KEY, struct.pack("<IB", 0, 1), bytes(20), keys=2), "occurs twice"),
        (header(_KEY, struct.pack("<IQ", 8, 2), b"\xff\xfe", bytes(20), keys=1), "not UTF-8"),
        (header(tensor("w", [32], kind=4), bytes(64), tensors=1), "ggml type 4"),
        (header(tensor("w", [33], kind=3), bytes(64), tensors=1), "no multiple of the 32 elements of a Q4_1 block"),
        (header(tensor("w", [2**32, 2**32]), bytes(64), tensors=1), "not possible"),
        (header(tensor("w", [1, 1, 1, 1, 1]), bytes(64), tensors=1), "5 dimensions"),
        (header(tensor("w", [8], offset=1), bytes(64), tensors=1), "no multiple of 32"),
        (header(tensor("w", [8]), tensor("w", [8]), bytes(64), tensors=2), "occurs twice"),
    ],
)
def test_broken_headers_name_what_is_wrong(data: bytes, says: str) -> None:
    with pytest.raises(BadFile, match=says):
        read_gguf(data, name="broken")


def test_missing_files_and_directories_are_bad_files(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="No such file"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(BadFile, match="directory"):
        read_gguf(tmp_path)


def test_llama_gets_hugging_face_names(small: Path) -> None:
    named = config_of(read_gguf(small))
    assert named.assumed == ()
    assert named.config | {"rms_norm_eps": 0} == {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "vocab_size": 3,
        "rms_norm_eps": 0,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def test_the_output_matrix_says_whether_embeddings_are_tied(tmp_path: Path) -> None:
    untied = write_gguf(tmp_path / "untied.gguf", tied=False)
    assert config_of(read_gguf(untied)).config["tie_word_embeddings"] is False


def test_qwen2_has_biases_and_no_window(tmp_path: Path) -> None:
    spec = ModelSpec.read(write_gguf(tmp_path / "qwen.gguf", architecture="qwen2", bias=True))
    assert spec.config["attention_bias"] is True
    assert {layer.window for layer in spec.layers} == {None}
    assert spec.name == "qwen"


def test_qwen3_takes_its_head_width_from_the_file(tmp_path: Path) -> None:
    keys = LLAMA | {"attention.key_length": 32, "attention.value_length": 32}
    spec = ModelSpec.read(write_gguf(tmp_path / "qwen3.gguf", architecture="qwen3", keys=keys))
    assert {(layer.kv_heads, layer.key_dim) for layer in spec.layers} == {(2, 32)}


def test_gemma3_names_no_pattern_so_the_family_rule_is_said(tmp_path: Path) -> None:
    spec = ModelSpec.read(write_gguf(tmp_path / "gemma.gguf", architecture="gemma3", keys=GEMMA3))
    assert [layer.window for layer in spec.layers] == [64] * 5 + [None] + [64] * 2
    assert {entry.key: entry.value for entry in spec.assumed} == {
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 32,
    }
    assert spec.config["model_type"] == "gemma3_text"


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [(4, [64, 64, 64, None] * 2), ([True, False] * 4, [64, None] * 4)],
)
def test_gemma3_pattern_in_the_file_is_honoured(tmp_path: Path, pattern: object, windows: list[int | None]) -> None:
    keys = GEMMA3 | {"attention.sliding_window_pattern": pattern}
    spec = ModelSpec.read(write_gguf(tmp_path / "gemma.gguf", architecture="gemma3", keys=keys))
    assert [layer.window for layer in spec.layers] == windows
    assert "sliding_window_pattern" not in {entry.key for entry in spec.assumed}


@pytest.mark.parametrize(
    ("architecture", "keys", "error", "says"),
    [
        ("lama", LLAMA, UnsupportedModel, "'lama', which is not among the .* that are read .nearest: llama"),
        ("bert", LLAMA, UnsupportedModel, "general.architecture is 'bert': an encoder keeps no cache"),
        ("llama", LLAMA | {"attention.sliding_window": 64}, UnsupportedModel, "llama.attention.sliding_window is 64"),
        ("llama", LLAMA | {"ssm.state_size": 16}, UnsupportedModel, "llama.ssm.state_size is 16; it is not read"),
        ("llama", LLAMA | {"attention.kv_lora_rank": 8}, UnsupportedModel, "attention.kv_lora_rank is 8"),
        ("llama", LLAMA | {"attention.indexer.top_k": 8}, UnsupportedModel, "attention.indexer.top_k is 8"),
        ("gemma3", GEMMA3 | {"attention.shared_kv_layers": 2}, UnsupportedModel, "attention.shared_kv_layers is 2"),
        ("gemma3", GEMMA3 | {"attention.causal": False}, UnsupportedModel, "an encoder keeps no cache"),
        ("llama", LLAMA | {"attention.value_length": 8}, UnsupportedModel, "attention.value_length is 8"),
        ("llama", LLAMA | {"context_length": "long"}, BadFile, "llama.context_length is 'long'"),
        ("llama", LLAMA | {"context_length": 0}, BadFile, r"llama.context_length \(max_position_embeddings\) is 0"),
        ("llama", LLAMA | {"rope.scaling.type": 7}, BadFile, "rope.scaling.type is 7; it must be a string"),
        (
            "gemma3",
            {key: value for key, value in GEMMA3.items() if key != "attention.sliding_window"},
            BadFile,
            "gemma3.attention.sliding_window is missing",
        ),
    ],
)
def test_what_cannot_be_read_exactly_is_refused(
    tmp_path: Path, architecture: str, keys: dict[str, object], error: type[Exception], says: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", architecture=architecture, keys=keys)
    with pytest.raises(error, match=says):
        ModelSpec.read(path)


def test_heads_for_each_layer_are_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        keys={key: value for key, value in LLAMA.items() if key != "attention.head_count_kv"},
        extra={"llama.attention.head_count_kv": [2, 1]},
        kv_width=32,
    )
    with pytest.raises(UnsupportedModel, match=r"head_count_kv has values for each layer \(2 different ones\)"):
        ModelSpec.read(path)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"block_count": 9999}, r"llama\.block_count is 9999, but the tensors hold weights of 2 layers"),
        ({"block_count": 1}, r"llama\.block_count is 1, but the tensors hold weights of 2 layers"),
        ({"attention.head_count_kv": 4}, r"blk\.0\.attn_k\.weight gives 32 values a token, the metadata 64"),
        ({"attention.head_count": 8}, r"blk\.0\.attn_k\.weight gives 32 values a token, the metadata 16"),
        (
            {"attention.head_count_kv": 4, "attention.key_length": 8, "attention.value_length": 8},
            r"blk\.0\.attn_q\.weight gives 64 values a token, the metadata 32 \(query heads",
        ),
        ({"embedding_length": 128, "attention.key_length": 16, "attention.value_length": 16}, "takes 64 values"),
    ],
)
def test_patched_metadata_is_held_against_the_tensors(
    small: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, int], says: str
) -> None:
    found = read_gguf(small)
    patched = {f"llama.{key}": value for key, value in keys.items()}
    with pytest.raises(BadFile, match=says):
        read_header_config(replace(found, metadata={**found.metadata, **patched}), {})


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ("blk.0.", "weights of 1 layer, the last 1, without 0"),
        ("blk.1.attn_v", "values of 1 layer"),
        ("blk.0.attn_k", "keys of 1 layer, the last 1, without 0"),
        ("blk.", "weights of 0 layers"),
    ],
)
def test_layers_without_their_tensors_are_refused(small: Path, without: str, says: str) -> None:
    found = read_gguf(small)
    left = tuple(tensor for tensor in found.tensors if not tensor.name.startswith(without))
    with pytest.raises(BadFile, match=says):
        read_header_config(replace(found, tensors=left), {})


@pytest.mark.parametrize("key", [key for key in LLAMA if key not in ("attention.head_count_kv", "rope.freq_base")])
def test_a_missing_key_is_called_missing(small: Path, key: str) -> None:
    found = read_gguf(small)
    left = {name: value for name, value in found.metadata.items() if name != f"llama.{key}"}
    with pytest.raises(BadFile, match=f"llama.{key} is missing"):
        config_of(replace(found, metadata=left))


def test_metadata_that_contradicts_the_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"blk\.0\.attn_k\.weight gives 16 values a token, the metadata 32"):
        ModelSpec.read(write_gguf(tmp_path / "model.gguf", kv_width=16))


@pytest.mark.parametrize(
    ("name", "fixture", "append", "retained", "weights", "parameters"),
    [
        ("smollm2-135m", "smollm2_path", 23040, 23040, 96_576_768, 134_515_008),
        ("gemma-3-270m", "gemma_path", 18432, 3072, 246_587_904, 268_098_176),
    ],
)
def test_real_files_are_what_the_built_in_descriptions_say(
    request: pytest.FixtureRequest,
    name: str,
    fixture: str,
    append: int,
    retained: int,
    weights: int,
    parameters: int,
) -> None:
    real, known = ModelSpec.read(request.getfixturevalue(fixture)), ModelSpec.read(name)
    fmt = CacheFormat()
    for spec in (real, known):
        assert (spec.name, spec.append_bytes_per_token(fmt)) == (name, append)
        assert (spec.retained_bytes_per_token(fmt), spec.weights_bytes) == (retained, weights)
        assert spec.parameters == parameters
    assert real.config == known.config
    assert [(entry.key, entry.value) for entry in real.assumed] == [(entry.key, entry.value) for entry in known.assumed]
    assert real.weights_by_type == known.weights_by_type


def write_parts(directory: Path, name: str = "model") -> list[Path]:
    """The small model in three files, as llama-gguf-split writes them: the first has the metadata and no tensor."""
    small = read_gguf(write_gguf(directory / "whole.gguf"))
    names = [[], ["token_embd.weight", "blk.0."], ["blk.1."]]
    paths = []
    for number, prefixes in enumerate(names):
        entries = [entry("split.no", number), entry("split.count", 3), entry("split.tensors.count", 7)]
        if number == 0:
            entries += [entry("general.architecture", "llama"), *(entry(f"llama.{key}", LLAMA[key]) for key in LLAMA)]
        held = [tensor for tensor in small.tensors if tensor.name.startswith(tuple(prefixes))]
        at, listed = 0, []
        for found in held:
            listed.append(
                tensor(found.name, list(reversed(found.shape)), kind=0 if found.type == "F32" else 1, offset=at)
            )
            at += -(-found.bytes // 32) * 32
        path = directory / f"{name}-{number + 1:05}-of-00003.gguf"
        data = header(*entries, *listed, keys=len(entries), tensors=len(listed))
        path.write_bytes(data + bytes(-len(data) % 32 + at))
        paths.append(path)
    (directory / "whole.gguf").rename(directory.parent / "whole.gguf")
    return paths


def test_a_model_in_several_files_is_one_model(tmp_path: Path) -> None:
    directory = tmp_path / "parts"
    directory.mkdir()
    paths = write_parts(directory)
    whole = ModelSpec.read(tmp_path / "whole.gguf")
    for named in (*paths, directory):
        spec = ModelSpec.read(named)
        assert (spec.layers, spec.weights_by_type) == (whole.layers, whole.weights_by_type)
        assert spec.parameters == whole.parameters
    (directory / "mmproj-model-f16.gguf").write_bytes(b"")
    assert ModelSpec.read(directory).layers == whole.layers


def test_a_model_whose_files_are_not_all_there_is_refused(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    lone = tmp_path / "lone.gguf"
    lone.write_bytes(paths[0].read_bytes())
    with pytest.raises(BadFile, match=r"split\.count is 3, but the name does not say which part"):
        ModelSpec.read(lone)
    second, other = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(other)
    with pytest.raises(BadFile, match=r"split\.no and split\.count are 2 and 3; 1 and 3 were expected"):
        ModelSpec.read(paths[0])
    paths[1].write_bytes(second.replace(b"blk.0.attn_q", b"blk.1.attn_q"))
    with pytest.raises(BadFile, match=r"tensor 'blk\.1\.attn_q\.weight' is in an earlier part already"):
        ModelSpec.read(paths[0])
    paths[1].unlink()
    with pytest.raises(BadFile, match=r"is one of 3 parts, and model-00002-of-00003\.gguf is not beside it"):
        ModelSpec.read(paths[2])


def test_a_string_of_megabytes_is_stepped_over() -> None:
    long = entry("tokenizer.huggingface.json", "x" * (2**20 + 1))
    found = read_gguf(header(long, entry("a.key", "b"), keys=2) + bytes(32))
    assert isinstance(found.metadata["tokenizer.huggingface.json"], GGUFArray)
    assert found.metadata["a.key"] == "b"
