"""Devices: where their memory goes, what a rank or a stage holds, and which of them hold so many users."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvist
from kvist.cli import main
from kvist.errors import DoesNotFit, InputError
from kvist.hardware import accelerators
from kvist.planning.deployment import activations_of, runtime_of
from kvist.planning.explain import explain
from kvist.planning.plan import Budget
from kvist.planning.sharding import LayerRange, rank_spec, split_layers
from kvist.planning.weights import weights_of
from kvist.report.plan_tables import print_plan
from kvist.spec.layers import Attention, Latent, State
from kvist.spec.model import ModelSpec
from kvist.spec.read import read_description

FULL = Path(__file__).parents[2] / "shared" / "data" / "configs" / "full"
needs_configs = pytest.mark.skipif(not FULL.is_dir(), reason=f"{FULL} is not there")

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "num_hidden_layers": 32, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672, "num_hidden_layers": 80,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "num_hidden_layers": 61, "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def read(config: dict[str, Any], **keys: Any) -> ModelSpec:
    return read_description(config | keys, name="model")


def budget(*args: Any, **keys: Any) -> Budget:
    found = kvist.plan(*args, **keys).capacity
    assert found is not None
    return found


def test_the_parts_of_a_device_are_its_memory() -> None:
    found = budget(read(LLAMA_8B), gpu="H100")
    assert found.memory == 81_559 * 2**20
    assert found.weights == 2 * 8_030_261_248
    assert found.memory == found.weights + found.overhead + found.cache
    assert found.deployment is not None
    stage = found.deployment.stages[0]
    costs = {cost.what: cost for cost in found.deployment.costs(stage)}
    assert list(costs) == ["activations", "driver", "context", "graphs", "sampling"]
    assert sum(cost.size for cost in costs.values()) == found.overhead
    assert all(cost.formula and cost.source for cost in costs.values())


# Peaks that vLLM measured ("PyTorch activation peak memory"), in GiB: model, tokens of the step, and what is widest.
MEASURED = [
    # Start-up log of vLLM 0.8 on a T4: Qwen2.5-1.5B, 32,768 tokens.
    ({"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960,
      "vocab_size": 151936, "num_hidden_layers": 28}, 32768, 2.02),
    # vLLM 0.8 on an L4: Llama-3.1-8B, 2,048 tokens.
    ({}, 2048, 0.22),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "chunk", "gib"), MEASURED)
def test_activations_are_near_what_vllm_measures(keys: dict[str, Any], chunk: int, gib: float) -> None:
    spec = read(LLAMA_8B, **keys)
    inventory = weights_of(spec).inventory
    assert inventory is not None
    layers = LayerRange(first=0, end=len(spec.layers))
    cost = activations_of(inventory, layers, 1, chunk=chunk, width=2)
    assert cost.size / 2**30 == pytest.approx(gib, rel=0.06)


@pytest.mark.parametrize(("vocab", "gib"), [(128256, 1.26), (151936, 1.45)])
def test_sampling_is_near_what_vllm_measures(vocab: int, gib: float) -> None:
    # 256 sequences of Llama-3-8B on an H100 (vllm-project/vllm#10511) and of Qwen3-8B on four A10.
    found = budget(read(LLAMA_8B, vocab_size=vocab), gpu="MI300X", context=64)
    assert found.deployment is not None
    assert found.deployment.sampled == 256
    sampling = found.deployment.costs(found.deployment.stages[0])[-1]
    assert sampling.size / 2**30 == pytest.approx(gib, rel=0.05)


def test_several_ranks_take_more_runtime_and_an_unknown_device_none() -> None:
    h100 = next(each for each in accelerators() if each.name == "H100 SXM5 80GB")
    one, two = (sum(cost.size for cost in runtime_of(h100, devices)) for devices in (1, 2))
    assert 2**30 < one < two
    assert runtime_of(None, 8) == ()


def test_a_given_overhead_takes_the_place_of_the_formulas() -> None:
    found = budget(read(LLAMA_8B), gpu="H100", overhead="8GiB")
    assert found.overhead == 8 * 2**30
    assert found.memory == found.weights + found.overhead + found.cache


@pytest.mark.parametrize(
    ("layer", "tp", "expected"),
    [
        (Attention(kv_heads=8, key_dim=64, value_dim=64), 4, Attention(kv_heads=2, key_dim=64, value_dim=64)),
        # Fewer heads than ranks: each is on several.
        (Attention(kv_heads=2, key_dim=64, value_dim=64), 8, Attention(kv_heads=1, key_dim=64, value_dim=64)),
        (Latent(rank=512, rope_dim=64), 8, Latent(rank=512, rope_dim=64)),
        (
            State(name="gated-delta", conv_elements=96, state_elements=4096),
            8,
            State(name="gated-delta", conv_elements=12, state_elements=512),
        ),
    ],
)
def test_what_a_rank_remembers(layer: Any, tp: int, expected: Any) -> None:
    spec = ModelSpec(name="toy", source="test", layers=(layer,), max_context=64)
    assert rank_spec(spec, LayerRange(first=0, end=1), tp).layers == (expected,)


def test_groups_of_mamba2_are_repeated_where_there_are_fewer_than_ranks() -> None:
    # Nemotron-H-56B: 256 heads of 64, 8 groups of 256, 3 columns; 16 ranks hold each group twice.
    conv = 3 * (256 * 64 + 2 * 8 * 256)
    spec = ModelSpec(
        name="toy", source="test", max_context=64, config={"n_groups": 8, "ssm_state_size": 256},
        layers=(State(name="mamba2", conv_elements=conv, conv_columns=3, state_elements=2**22),),
    )  # fmt: skip
    part = LayerRange(first=0, end=1)
    (eight,), (sixteen,) = rank_spec(spec, part, 8).layers, rank_spec(spec, part, 16).layers
    assert isinstance(eight, State)
    assert isinstance(sixteen, State)
    assert eight.conv_elements == conv // 8
    assert sixteen.conv_elements == 3 * (256 * 64 + 2 * 16 * 256) // 16


def test_layers_are_dealt_out_as_vllm_does() -> None:
    # get_pp_indices: what is left over goes to the stages before the last.
    assert [part.count for part in split_layers(61, 4)] == [15, 15, 16, 15]
    assert [part.count for part in split_layers(7, 3)] == [2, 3, 2]
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            parts = split_layers(layers, stages)
            assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
            assert parts[-1].end == layers
            assert max(part.count for part in parts) - min(part.count for part in parts) <= 1


@settings(max_examples=40)
@given(st.sampled_from([LLAMA_8B, LLAMA_70B, DEEPSEEK]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 5]))
def test_ranks_and_stages_together_hold_all_weights(config: dict[str, Any], tp: int, pp: int) -> None:
    spec = read(config)
    weights = weights_of(spec)
    layers = len(spec.layers)
    held = [tp * weights.held(part.first, part.end, layers=layers, tp=tp) for part in split_layers(layers, pp)]
    assert weights.total <= sum(held) <= weights.total * 1.08
    if tp == 1:
        assert sum(held) == weights.total


def test_a_latent_is_on_every_rank_and_heads_are_not() -> None:
    one, eight = (kvist.plan(read(LLAMA_70B), cache_memory="40GiB", tp=tp).to_dict() for tp in (1, 8))
    assert eight["capacity"]["cache_tokens"] == pytest.approx(8 * one["capacity"]["cache_tokens"], rel=0.01)
    one, eight = (kvist.plan(read(DEEPSEEK), cache_memory="40GiB", tp=tp).to_dict() for tp in (1, 8))
    assert eight["capacity"]["cache_tokens"] == one["capacity"]["cache_tokens"]


memories = st.integers(20, 200).map(lambda gib: gib * 2**30)


@settings(max_examples=25)
@given(memories, st.integers(0, 2**34), st.sampled_from([64, 1000, 8192]))
def test_more_memory_never_holds_fewer_users(memory: int, more: int, context: int) -> None:
    spec = read(LLAMA_8B)
    fewer, many = (budget(spec, memory=size, context=context) for size in (memory, memory + more))
    assert fewer.users_paged <= many.users_paged
    assert fewer.users_slab <= many.users_slab
    assert fewer.users_slab <= fewer.users_paged or context == 64


@settings(max_examples=15)
@given(st.sampled_from([LLAMA_8B, LLAMA_70B]), st.sampled_from([1, 2, 4]), st.sampled_from([1024, 8192]))
def test_twice_the_ranks_never_hold_fewer_users_in_all(config: dict[str, Any], tp: int, context: int) -> None:
    spec = read(config)

    def users(ranks: int) -> int:
        try:
            return budget(spec, gpu="H100", tp=ranks, context=context).users_paged
        except DoesNotFit:
            return 0

    assert users(tp) <= users(2 * tp)


def test_devices_without_ranks_or_stages_are_shared_as_far_as_heads_allow() -> None:
    eight = budget(read(LLAMA_70B), gpu="H100x8")
    assert eight.deployment is not None
    assert (eight.deployment.machine.tp, eight.deployment.machine.replicas) == (8, 1)
    # SmolLM2 has 9 query heads: its eight devices are replicas.
    plan = kvist.plan("smollm2-135m", gpu="L4x8")
    one = budget("smollm2-135m", gpu="L4")
    assert plan.capacity is not None
    assert plan.capacity.users_paged == 8 * one.users_paged
    assert plan.capacity.memory == 8 * one.memory
    assert "8 replicas of one device each: more ranks cannot share the model's heads" in plan.notes


def test_a_pipeline_holds_what_its_worst_stage_does() -> None:
    found = budget(read(LLAMA_70B), gpu="H100x4", tp=2, pp=2)
    assert found.deployment is not None
    first, last = found.deployment.stages
    assert (first.layers.end, last.layers.first) == (40, 40)
    # The last has the head, and sampling.
    assert first.sampled == 0 < last.sampled
    assert found.memory == found.weights + found.overhead + found.cache


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"gpu": "H100", "tp": 3}, "tp: 3 ranks cannot share the 32 query heads of model; 1, 2, 4, 8, 16, 32 can"),
        ({"gpu": "H100", "tp": 0}, "tp: 0; a whole number from 1 to 1024"),
        ({"gpu": "H100", "pp": 33}, "pp: 33 stages for 32 layers; at most one stage a layer"),
        ({"gpu": "H100x6", "tp": 4}, "gpu: 6 devices cannot be shared by 4 ranks x 1 stage; name 4 or a multiple"),
        ({"gpu": "H100", "cache_memory": "1GiB"}, "`gpu` and `cache_memory` are both given"),
        ({"cache_memory": "1GiB", "overhead": "1GiB"}, "`overhead` and `cache_memory` are both given"),
        ({"gpu": "Apple M3 Max"}, "the memory of Apple M3 Max is shared with its CPU.*`memory`"),
        ({"gpu": "H100", "overhead": "much"}, "overhead: 'much' is not a size"),
        ({"tp": 2}, "tp: 2 needs a memory to count in; add `gpu`, `memory` or `cache_memory`"),
        ({"gpu": "H100", "settings": {"block_size": 32}}, "settings: block_size is a setting of no engine"),
        ({"gpu": "H100x2", "engine": "llama.cpp"}, "engine: llama.cpp is accounted for on one device, not on 2"),
        ({"cache_memory": "1GiB", "tp": 2, "engine": "transformers"}, "transformers is accounted for on one device"),
        (
            {"gpu": "H100", "engine": "vllm", "settings": {"tensor-parallel-size": 2}},
            "settings: tensor_parallel_size=2, but tp is 1 in this plan; give `tp` alone",
        ),
        ({"gpu": "H100x2", "engine": "sglang", "settings": {"tp_size": "1"}}, "settings: tp_size=1, but tp is 2"),
        ({"gpu": "H100", "tp": 2, "engine": "kvist"}, "engine: kvist runs on one device, not on 2"),
    ],
)
def test_wrong_calls_name_key_value_and_remedy(call: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        kvist.plan(read(LLAMA_8B), **call)


def test_a_device_with_shared_memory_takes_what_it_is_told() -> None:
    found = budget(read(LLAMA_8B), gpu="Apple M3 Max", memory="96GiB")
    assert found.memory == 96 * 2**30


def test_what_does_not_fit_shows_the_sum_and_what_would() -> None:
    spec = read(LLAMA_70B)
    says = (
        r"the weights of model take 131\.4 GiB and overhead 3\.617 GiB; 79\.65 GiB of H100 SXM5 80GB leaves no cache; "
        r"2 x H100 SXM5 80GB would hold them"
    )
    with pytest.raises(DoesNotFit, match=says):
        kvist.plan(spec, gpu="H100")
    says = r"500 users x 8,192 tokens need 640 MiB of blocks each on every device of 4 x H100 .* holds \d+; \d+ x H100"
    with pytest.raises(DoesNotFit, match=says):
        kvist.plan(spec, gpu="H100x4", users=500)


@pytest.mark.parametrize("tp", [None, 3])
def test_no_cache_at_all_does_not_fit(tp: int | None) -> None:
    with pytest.raises(DoesNotFit, match="the cache: 0 B holds nothing of smollm2-135m"):
        kvist.plan("smollm2-135m", cache_memory=0, tp=tp)


def test_the_question_turned_round_is_answered_by_devices_that_do_hold_the_users() -> None:
    spec = read(LLAMA_70B)
    sets = kvist.plan(spec, users=60, context="8k").sets
    assert sets is not None
    assert len(sets) > 40
    sizes = [each.devices * each.memory for each in sets]
    assert sizes == sorted(sizes)
    for each in sets[::8]:
        name = f"{each.accelerator.name} x {each.devices}"
        assert budget(spec, gpu=name, tp=each.tp, pp=each.pp, context="8k", users=60).users_paged >= 60
        if each.devices > 1:
            # A set of half as many does not.
            tp, pp = (each.tp, each.pp // 2) if each.pp > 1 else (each.tp // 2, 1)
            with pytest.raises(DoesNotFit):
                kvist.plan(spec, gpu=each.accelerator.name, tp=tp, pp=pp, context="8k", users=60)


def test_users_that_no_set_holds_are_refused_with_the_sum() -> None:
    with pytest.raises(DoesNotFit, match=r"1,000,000 users x 8,192 tokens need .* of weights on each of 64 devices"):
        kvist.plan(read(LLAMA_70B), users=10**6, context="8k")


def test_shapes_that_are_not_known_are_dealt_out_evenly_and_said() -> None:
    layer = Attention(kv_heads=8, key_dim=128, value_dim=128)
    spec = ModelSpec(
        name="foreign", source="test", layers=(layer,) * 32, max_context=8192, parameters=8 * 10**9,
        weights_by_type={"BF16": 16 * 10**9}, config={"model_type": "foreign"},
    )  # fmt: skip
    plan = kvist.plan(spec, gpu="H100x2")
    assert plan.capacity is not None
    assert plan.capacity.weights == 16 * 10**9
    assert any("activations are not counted" in note for note in plan.notes)
    assert plan.speed is None
    with pytest.raises(InputError, match="weights: the weights of foreign are not known"):
        kvist.plan(spec, gpu="H100x2", weights="int4")


def test_every_part_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    plan = kvist.plan(read(LLAMA_70B), gpu="H100x8", pp=2, context="8k")
    rows = {row.what: row for row in explain(plan)}
    assert plan.capacity is not None
    assert rows["cache"].value == plan.capacity.cache
    assert rows["memory"].value == plan.capacity.memory
    assert {"activations, layers 0 to 39", "sampling, layers 40 to 79", "decode, tokens a second at best"} <= set(rows)
    assert all(row.formula and row.source for row in rows.values())
    assert main(["plan", "smollm2-135m", "--gpu", "L4", "--users", "3", "--explain"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_json_has_what_others_rely_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gemma-3-270m", "--gpu", "H100", "--shared-prefix", "1k", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    capacity = answer["capacity"]
    assert capacity["memory_bytes"] == capacity["weights_bytes"] + capacity["overhead_bytes"] + capacity["cache_bytes"]
    assert capacity["users"]["slab"] < capacity["users"]["paged"] < capacity["users"]["paged_prefix"]
    assert capacity["binds"] in ("memory", "bandwidth", "compute")
    assert capacity["deployment"]["gpu"] == "H100 SXM5 80GB"
    assert {"decode", "prefill", "users", "binds"} <= set(answer["speed"])
    assert main(["plan", "gemma-3-270m", "--users", "200", "--json"]) == 0
    sets = json.loads(capsys.readouterr().out)["sets"]
    assert {"gpu", "devices", "tp", "pp", "memory_bytes", "speed"} <= set(sets[0])
    assert main(["plan", "gemma-3-270m", "--users", "200"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@needs_configs
@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        ("vllm", {"kv_cache_memory_bytes": "999TiB"}),
        ("vllm", {"num_gpu_blocks_override": 99_999_999}),
        ("llama.cpp", {"n_ctx": 2**31}),
        ("transformers", {"batch_size": 100_000, "cache": "static"}),
    ],
)
def test_settings_that_ask_for_more_than_a_device_has(engine: str, settings: dict[str, Any]) -> None:
    with pytest.raises(DoesNotFit, match=f"^{engine}: "):
        kvist.plan(FULL / "llama-3.1-8b.json", gpu="H100", engine=engine, settings=settings)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_other_engines_account_for_a_device_of_a_plan(engine: str) -> None:
    plan = kvist.plan(FULL / "llama-3.1-8b.json", gpu="H100", engine=engine, context="8k")
    assert plan.engine is not None
    assert plan.capacity is not None
    # vLLM leaves 8 % of the device alone, SGLang about 13 GiB for steps of 8,192 tokens.
    assert 0.75 < plan.engine.cache_tokens / plan.capacity.cache_tokens < 1


@needs_configs
def test_every_shared_configuration_is_planned_on_devices_or_says_why_not() -> None:
    planned = 0
    for path in sorted(FULL.glob("*.json")):
        try:
            plan = kvist.plan(path, gpu="H200x8", context="4k", overhead=None)
        except kvist.KvistError as error:
            said = str(error)
        else:
            said = "planned"
            planned += 1
            json.dumps(plan.to_dict())
            assert plan.capacity is not None
            assert plan.capacity.memory == plan.capacity.weights + plan.capacity.overhead + plan.capacity.cache
        assert "\n" not in said
    assert planned >= 50


def test_sets_say_where_the_time_between_ranks_is_left_out() -> None:
    sets = kvist.plan(kvist.ModelSpec.read("llama-3-8b"), users=200, context=8192).to_dict()["sets"]
    several = [each for each in sets if each["tp"] > 1]
    linked = {device.name: device.link is not None for device in accelerators()}
    assert {each["link_counted"] for each in several} == {True, False}
    for each in sets:
        counted = each["tp"] == 1 or linked[each["gpu"]]
        assert each["link_counted"] == counted


def test_what_is_explained_of_stages_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    plan = kvist.plan(read(LLAMA_8B), gpu="H100x4", tp=2, pp=2)
    assert plan.speed is not None
    rows = {row.what: row for row in explain(plan)}
    rate = rows["decode, tokens a second at best"]
    found = re.match(r"([0-9,]+) sequences every ([0-9,]+) microseconds", rate.formula)
    assert found is not None
    sequences, micros = (int(word.replace(",", "")) for word in found.groups())
    assert rate.value == pytest.approx(sequences / micros * 1e6, rel=1e-3)
    # What each device has: its weights, what is set aside, and the cache.
    parts = sum(2 * row.value for name, row in rows.items() if name.endswith(("layers 0 to 15", "layers 16 to 31")))
    assert parts + rows["cache"].value == rows["memory"].value
    print_plan(plan)
    assert "of blocks on a device, at 8,192 tokens" in capsys.readouterr().out


def test_published_and_assumed_types_of_weights() -> None:
    # DeepSeek-V3 is published in fp8, and served on eight H200
    assert kvist.plan("deepseek-v3", gpu="H200x8").weights is not None
    assert ModelSpec.read("deepseek-v3").weights_bytes == 673_150_582_112
    taken = r"kimi-k2.5 take .* \(taken to be bf16, which `weights` overrides\) and overhead"
    with pytest.raises(DoesNotFit, match=taken):
        kvist.plan("kimi-k2.5", gpu="H200x8")
