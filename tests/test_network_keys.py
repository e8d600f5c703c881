"""Configurations that no network can be built from are refused in a line, whatever stands in whichever key."""

import json
from contextlib import suppress
from typing import Any

import pytest
from served import COMMON, Case
from test_served import CASES

from kvist.errors import KvistError, UnsupportedModel
from kvist.model.families import network_of
from kvist.spec.described import described
from kvist.spec.families import read_config
from kvist.spec.read import read_description

transformers = pytest.importorskip("transformers")
WRONG: tuple[Any, ...] = ("x", -1, 0, None, [], {}, 1.5, True, [1])


def configuration(case: Case) -> dict[str, Any]:
    keys = {key: value for key, value in {**COMMON, **case.config}.items() if value is not None}
    built = getattr(transformers, case.model).config_class(**keys)
    read: dict[str, Any] = json.loads(built.to_json_string(use_diff=False))
    return read


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(CASES))
def test_any_key_may_be_wrong(name: str) -> None:
    config = configuration(CASES[name])
    assert network_of(read_description(config, name="m")).blocks
    for number, key in enumerate(config):
        for shift in (0, 4):
            wrong = WRONG[(number + shift + len(name)) % len(WRONG)]
            with suppress(KvistError):
                network_of(read_description({**config, key: wrong}, name="m"))


@pytest.mark.parametrize("said", ["auto", 64])
def test_falcon_h1_may_leave_the_width_of_its_states_heads_open(said: str | int) -> None:
    config = configuration(CASES["falcon-h1"]) | {"mamba_d_head": said}
    (_, state) = network_of(read_description(config, name="m")).blocks[0].mixer.parts
    assert (state.heads, state.dim) == (4, 64)


_CAPPED = "attn_logit_softcapping"
_NESTED = {"rope_type": "default", "rope_theta": 10000.0, "full_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("name", "said", "key"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": _NESTED}, "rope_parameters.full_attention"),
        ("llama", {_CAPPED: 30.0}, _CAPPED),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"is_causal": False}, "is_causal"),
        ("gemma", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("deepseek-v3", {"n_group": 3}, "n_group"),
        ("deepseek-v3", {"n_group": 8}, "n_group"),
        ("deepseek-v3", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
    ],
)
def test_what_the_class_computes_otherwise_is_refused(name: str, said: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        network_of(read_description(configuration(CASES[name]) | said, name="m"))
    assert caught.value.key == key


def test_a_rotary_base_inside_counts_above_one_beside_it() -> None:
    inside = {"rope_type": "default", "rope_theta": 500.0}
    config = configuration(CASES["llama"]) | {"rope_theta": 9.0, "rope_parameters": inside}
    assert network_of(read_description(config, name="m")).ropes[0].theta == 500.0
    (rope,) = network_of(
        described(read_config(config, name="m", overrides={"rope_theta": 77.0}), name="m", source="m")
    ).ropes
    assert rope.theta == 77.0
