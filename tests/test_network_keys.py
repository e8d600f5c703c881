"""Configurations that no network can be built from are refused in a line, whatever stands in whichever key."""

import json
from contextlib import suppress
from typing import Any

import pytest
from served import COMMON, Case
from test_served import CASES

from kvist.errors import KvistError
from kvist.model.families import network_of
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
