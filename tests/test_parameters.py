"""Weights counted from configurations: against networks, published numbers and published file sizes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from network_shapes import CASES, UNBUILT

import kvist
from kvist.errors import InputError, UnsupportedModel
from kvist.planning.weights import weights_of
from kvist.spec.model import ModelSpec
from kvist.spec.parameters import FAMILIES, inventory_of
from kvist.spec.parameters.inventory import Tensor
from kvist.spec.parameters.storage import WEIGHT_CODECS, storage_of
from kvist.spec.read import read_description

FULL = Path(__file__).parents[2] / "shared" / "data" / "configs" / "full"
needs_configs = pytest.mark.skipif(not FULL.is_dir(), reason=f"{FULL} is not there")

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 32, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def llama(**keys: Any) -> ModelSpec:
    return read_description(LLAMA | keys, name="llama")


def built(family: str, keys: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The configuration of a network that transformers builds, and the elements that it would store."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    # MiniMax keeps constants of its decay among its weights, which its published files do not.
    stored = {
        id(tensor): tensor.numel()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not name.endswith(("_decay", "slope_rate"))
    }
    return config.to_dict(), sum(stored.values())


def test_every_family_is_tried() -> None:
    assert {name.removesuffix("_text") if name not in FAMILIES else name for name in CASES} | UNBUILT == set(FAMILIES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "keys"), [pytest.param(family, keys, id=family) for family, cases in CASES.items() for keys in cases]
)
def test_the_count_is_that_of_the_network(family: str, keys: dict[str, Any]) -> None:
    config, elements = built(family, keys)
    spec = read_description(config, name=family)
    found = inventory_of(spec.config, spec.layers)
    assert found.parameters == elements
    assert 0 < found.active_parameters <= found.parameters + found.table.elements
    # Every layer is somewhere, and what a rank of one holds is all.
    assert {layer for tensor in found.tensors for layer in tensor.layers} == set(range(found.layers))
    assert all(tensor.share(tensor.elements, 1) == tensor.elements for tensor in found.tensors)


# Parameters as the publishers' safetensors files list them on their pages, draft heads and vision towers left out.
PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "meta-llama--Meta-Llama-3.1-70B": 70_553_706_496,
    "llama-2-7b": 6_738_415_616,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistralai--Mixtral-8x22B-v0.1": 140_620_634_112,
    "Qwen--Qwen3-32B": 32_762_123_264,
    "Qwen--Qwen3-30B-A3B": 30_532_122_624,
    "qwen2.5-7b": 7_615_616_512,
    "gpt2": 124_439_808,
    "openai--gpt-oss-120b": 116_829_156_672,
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_940_288,
    "kimi-linear-48b": 49_122_681_728,
    "phi-3-mini-4k": 3_821_079_552,
}


@needs_configs
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_numbers_of_parameters(model: str) -> None:
    assert weights_of(ModelSpec.read(FULL / f"{model}.json")).parameters == PUBLISHED[model]


@needs_configs
def test_gpt_oss_weighs_what_its_files_hold() -> None:
    # metadata.total_size of openai/gpt-oss-120b: 4-bit experts with their exponents, all else in bf16.
    assert weights_of(ModelSpec.read(FULL / "openai--gpt-oss-120b.json")).total == 65_248_815_744


@needs_configs
def test_every_shared_configuration_is_weighed_or_says_why_not() -> None:
    weighed = 0
    for path in sorted(FULL.glob("*.json")):
        try:
            spec = ModelSpec.read(path)
        except UnsupportedModel:
            continue
        try:
            found = weights_of(spec)
        except InputError as error:
            said = str(error)
        else:
            said = "weights"
            assert found.total >= (found.parameters or 0) // 2
            weighed += 1
        assert "weights" in said
        assert "\n" not in said
    assert weighed >= 60


def test_active_parameters_are_those_that_a_token_meets() -> None:
    dense = llama()
    inventory = weights_of(dense).inventory
    assert inventory is not None
    # All but the table, whose rows are looked up.
    assert inventory.active_parameters == inventory.parameters - 128256 * 4096
    tied = weights_of(llama(tie_word_embeddings=True)).inventory
    assert tied is not None
    assert tied.active_parameters == inventory.active_parameters
    assert tied.parameters == inventory.parameters - 128256 * 4096


def matrices(per: int) -> int:
    """Elements of Llama's linear layers, by elements that share something: how many they share."""
    attention = 2 * 4096 * 4096 + 2 * 1024 * 4096
    return 32 * (attention + 3 * 4096 * 14336) // per


REST = 2 * (2 * 128256 * 4096 + 65 * 4096)


@pytest.mark.parametrize(
    ("keys", "codec", "size"),
    [
        ({}, None, 2 * 8_030_261_248),
        ({"torch_dtype": "float32"}, None, 4 * 8_030_261_248),
        ({}, "f16", 2 * 8_030_261_248),
        ({}, "fp8", REST + matrices(1)),
        ({}, "int4", REST + matrices(2) + 2 * matrices(32)),
        ({}, "mxfp4", REST + matrices(2) + matrices(32)),
        ({}, "nf4", REST + matrices(2) + 4 * matrices(64)),
        # fp8 in blocks of 128 x 128 with an f32 scale each.
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, None,
         REST + matrices(1) + 4 * matrices(128 * 128)),
        # 7 matrices a layer with one f32 scale each.
        ({"quantization_config": {"quant_method": "fp8"}}, None, REST + matrices(1) + 32 * 7 * 4),
        # AWQ: an f16 scale and a 4-bit zero for 128 elements.
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, None,
         REST + matrices(2) + 5 * matrices(256)),
        # GPTQ: and four bytes for each input.
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, None,
         REST + matrices(2) + 5 * matrices(256) + 32 * 4 * (6 * 4096 + 14336)),
        # NVFP4: a byte for 16 elements, 8 bytes a matrix.
        ({"quantization_config": {"quant_method": "modelopt", "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}}}}, None,
         REST + matrices(2) + matrices(16) + 32 * 7 * 8),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, None,
         REST + matrices(1) + 32 * 4 * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)),
    ],
)  # fmt: skip
def test_quantised_weights_are_counted_with_their_scales(keys: dict[str, Any], codec: str | None, size: int) -> None:
    assert weights_of(llama(**keys), codec).total == size


def test_layers_that_a_checkpoint_leaves_alone_keep_their_type() -> None:
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    everything = weights_of(llama(quantization_config=scheme)).by_type["fp8"]
    for ignored in (
        ["model.layers.0.self_attn.q_proj"],
        ["model.layers.0.self_attn.q*"],
        ["re:.*layers.0.self_attn.q_p"],
    ):
        left = weights_of(llama(quantization_config=scheme | {"modules_to_not_convert": ignored})).by_type["fp8"]
        assert everything - left == 4096 * 4096 + 32 * 32 * 4
    no_mlps = weights_of(llama(quantization_config=scheme | {"ignored_layers": ["mlp"]})).by_type["fp8"]
    assert no_mlps == 32 * (1 + 4 / 128**2) * (2 * 4096 * 4096 + 2 * 1024 * 4096)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm' is not known here.*with `weights`"),
        ({"quantization_config": {"quant_method": "awq", "bits": "four"}}, "quantization_config.bits is 'four'"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "neither load_in_4bit nor load_in_8bit"),
        (
            {"quantization_config": {"config_groups": {"a": {"weights": {"num_bits": 3, "type": "float"}}}}},
            "which are not known here",
        ),
        ({"quantization_config": {"config_groups": {"a": {}}}}, "config_groups.a says nothing of weights"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 1]}}, "two numbers were expected"),
        ({"quantization_config": {"quant_method": "fp8", "ignored_layers": ["re:("]}}, "by a pattern that is none"),
        ({"intermediate_size": None}, "intermediate_size is not given"),
    ],
)
def test_what_cannot_be_weighed_says_why(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        kvist.plan(llama(**keys), memory="80GiB")
    # Costs of a sequence need no weights.
    assert kvist.plan(llama(**keys)).to_dict()["append_bytes_per_token"] == 131072


def test_a_name_that_says_quantised_against_a_configuration_that_does_not_is_refused() -> None:
    spec = read_description(LLAMA, name="Llama-3-8B-NVFP4")
    with pytest.raises(InputError, match="is called NVFP4, but its configuration has no quantization_config"):
        weights_of(spec)
    assert weights_of(spec, "nvfp4").total < 6.1 * 10**9
    assert weights_of(read_description(LLAMA, name="Swallow-8B")).total == 2 * 8_030_261_248


def test_a_type_that_nothing_names_is_listed_as_assumed() -> None:
    untyped = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    plan = kvist.plan(read_description(untyped, name="untyped"))
    assert plan.spec.weights_bytes == 2 * 8_030_261_248
    assert "dtype" in [entry.key for entry in plan.spec.assumed]


def test_wider_codecs_never_weigh_less() -> None:
    sizes = [weights_of(llama(), codec).total for codec in ("int4", "int8", "bf16", "f32")]
    assert sizes == sorted(sizes)
    with pytest.raises(InputError, match="weights: 'q4' is not a codec for weights; choose one of f32"):
        weights_of(llama(), "q4")


def test_codecs_round_up_what_does_not_fill_a_group() -> None:
    assert WEIGHT_CODECS["int8"].matrix(3, 33) == 99 + 3 * 2 * 2
    assert WEIGHT_CODECS["awq"].matrix(1, 1) == 1 + 3
    storage = storage_of(LLAMA, "int4")
    odd = Tensor(name="odd", shape=(5, 7), role="linear")
    assert storage.sizes(odd)[None].size == 18 + 5 * 2


@needs_configs
def test_experts_are_read_as_far_as_a_batch_is_sent_to_them() -> None:
    spec = ModelSpec.read(FULL / "Qwen--Qwen3-30B-A3B.json")
    weights = weights_of(spec)
    assert weights.inventory is not None
    layers = len(spec.layers)
    read = [weights.read(0, layers, layers=layers, tp=1, tokens=tokens) for tokens in (1, 8, 64, 10_000)]
    assert read == sorted(read)
    # One token reads what it is multiplied with, and the norms; many read everything but the table.
    assert read[0] == pytest.approx(2 * weights.inventory.active_parameters, rel=1e-3)
    assert read[-1] == pytest.approx(weights.total - 2 * weights.inventory.table.elements, rel=1e-3)


def test_the_configurations_are_plain_data() -> None:
    assert json.loads(json.dumps(CASES)) == CASES


NONSENSE: tuple[Any, ...] = (
    None, 0, -1, 3, 2**40, 2**80, "x", "", [], [1, 2], ["a"], {}, {"a": 1}, True, 1.5, float("inf"), float("nan"),
)  # fmt: skip


@settings(max_examples=400)
@given(st.sampled_from(sorted(CASES)), st.integers(0, 10**6), st.sampled_from(NONSENSE))
def test_nonsense_in_a_configuration_is_weighed_or_refused(family: str, place: int, value: Any) -> None:
    try:
        spec = read_description({"model_type": family} | CASES[family][0], name=family)
    except kvist.KvistError:
        return
    keys = sorted(spec.config)
    broken = {**spec.config, keys[place % len(keys)]: value}
    try:
        found = inventory_of(broken, spec.layers)
        sizes = [storage_of(broken, None).sizes(tensor) for tensor in found.tensors]
    except kvist.KvistError as error:
        said = str(error)
    else:
        said = "weighed"
        assert found.parameters > 0
        assert all(stored.size > 0 for tensor in sizes for stored in tensor.values())
    assert "\n" not in said
