"""``kvist plan --engine``: the same answer for every engine, in JSON, as a table and explained."""

import json
from typing import Any

import pytest

import kvist
from kvist.cli import main
from kvist.errors import InputError
from kvist.planning.engines import ENGINES, EngineBudget, engine_account
from kvist.planning.explain import explain
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

PLAN = ["plan", "smollm2-135m", "--cache-memory", "1GiB", "--context", "4096"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*PLAN, *words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_answers_alike(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    account = planned(capsys, "--engine", engine)["engine"]
    assert account["name"] == engine
    assert {"num_blocks", "cache_tokens", "max_concurrency", "flags", "groups", "settings"} <= account.keys()
    # 23,040 B a token in bf16: no engine makes more of a gibibyte than it holds
    assert 11 <= account["max_concurrency"] <= 2**30 / 23040 / 4096
    assert account["allocated_bytes"] <= account["cache_bytes"] + 23040
    assert account["flags"]
    assert main([*PLAN, "--engine", engine]) == 0
    shown = capsys.readouterr().out
    assert f"{account['num_blocks']:,}; {account['cache_tokens']:,} tokens" in shown


@pytest.mark.parametrize("engine", ENGINES)
def test_every_figure_is_explained(engine: str) -> None:
    plan = kvist.plan("gemma-3-270m", cache_memory="1GiB", context=4096, engine=engine)
    rows = {row.what: row for row in explain(plan)}
    assert plan.engine is not None
    assert plan.engine.figures
    for figure in plan.engine.figures:
        row = rows[f"{engine}, {figure.what}"]
        assert float(row.value) == figure.value
        assert row.formula
        assert row.source


def test_settings_go_by_the_engines_own_names(capsys: pytest.CaptureFixture[str]) -> None:
    halved = planned(capsys, "--engine", "vllm", "--set", "kv_cache_dtype=fp8", "--set", "block-size=32")["engine"]
    assert (halved["num_blocks"], halved["block_tokens"]) == (2912, 32)
    assert halved["flags"][-6:-2] == ["--kv-cache-dtype", "fp8", "--block-size", "32"]
    for engine in ENGINES:
        assert main([*PLAN, "--engine", engine, "--set", "no_such=1"]) == 2
        said = capsys.readouterr().err
        assert f"--set: no_such=1 is no setting of {engine} that is accounted for; known are " in said
        assert said.count("\n") == 1


def test_no_such_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--engine", "tgi"]) == 2
    assert "kvist, vllm, sglang, llama.cpp, transformers" in capsys.readouterr().err
    with pytest.raises(InputError, match="'tgi' is not accounted for; choose one of vllm, sglang"):
        engine_account(
            ModelSpec.read("smollm2-135m"), CacheFormat(), engine="tgi", budget=EngineBudget(cache=1), context=1
        )


def test_a_device_is_cut_by_the_engines_own_rule() -> None:
    # vLLM takes 0.92 of a device by default, whatever else the plan would leave
    shares = [
        kvist.plan(
            "smollm2-135m", memory="10GiB", context=4096, engine="vllm", settings={"gpu_memory_utilization": one}
        )
        for one in (0.5, 0.92)
    ]
    least, most = (plan.engine.cache_bytes for plan in shares if plan.engine)
    assert most - least == -(-10 * 2**30 * 92 // 100) - 5 * 2**30
