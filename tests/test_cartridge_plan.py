"""A plan with a cartridge says what the engine then holds."""

import json
import random
from pathlib import Path

import pytest
from cartridge_models import reading_model
from served_cartridges import CASES, cartridge_of, engine_of

from kvist.cli import main
from kvist.engine.answer import Answer
from kvist.engine.sampler import SamplingParams
from kvist.errors import DoesNotFit, InputError
from kvist.planning.explain import explain
from kvist.planning.planner import plan
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

pytest.importorskip("transformers")

F32 = CacheFormat(key="f32", value="f32")
CONTEXT = 40


@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek-v3"])
def test_as_many_run_at_once_behind_it_as_planned(name: str, tmp_path: Path) -> None:
    reading_model(tmp_path, CASES[name])
    spec = ModelSpec.read(tmp_path)
    size = spec.sequence_bytes(16, F32)
    memory = 22 * size
    planned = plan(spec, format=F32, cache_memory=memory, context=CONTEXT, cartridge=41).capacity
    alone = plan(spec, format=F32, cache_memory=memory, context=CONTEXT).capacity
    assert planned is not None
    assert alone is not None
    assert planned.cartridge == 48
    assert planned.users_paged < alone.users_paged
    for more in (0, 1):
        engine = engine_of(tmp_path, memory=memory, cartridges={"it": cartridge_of(tmp_path)})
        assert engine.snapshot()["cartridges"][0]["bytes"] == planned.cartridge_bytes
        rng = random.Random(more)
        answers = []
        for _ in range(planned.users_paged + more):
            answers.append(Answer(prompt_tokens=8))
            prompt = [rng.randrange(3, 200) for _ in range(8)]
            params = SamplingParams(max_tokens=CONTEXT - 7, temperature=0, ignore_eos=True)
            engine.submit(prompt, params, cartridge="it", on_event=answers[-1].add)
        while any(answer.finish_reason is None for answer in answers):
            engine.step()
        assert (engine.scheduler.counters.preempted > 0) == bool(more)


def test_what_is_planned_is_explained() -> None:
    spec = ModelSpec.read("smollm2-135m")
    found = plan(spec, cache_memory="64MiB", context=256, cartridge=250)
    budget = found.capacity
    assert budget is not None
    assert budget.to_dict()["cartridge"] == {"tokens": 256, "bytes": 256 * 30 * 2 * 3 * 64 * 2}
    assert budget.users_paged == (2**26 - budget.cartridge_bytes) // budget.sequence_allocated
    rows = {row.what: row for row in explain(found)}
    assert rows["cartridge of 256 tokens"].value == budget.cartridge_bytes
    assert "beside 5,898,240 B of the cartridge" in rows["users, paged"].formula
    # Questions share what they begin with behind it, besides.
    shared = plan(spec, cache_memory="64MiB", context=256, cartridge=250, shared_prefix=64).capacity
    assert shared is not None
    assert shared.users_prefix is not None
    assert shared.users_prefix > shared.users_paged == budget.users_paged
    # Devices that hold it, and what their caches read of it.
    sets = plan(spec, users=100, context="4k", cartridge="4k").sets
    assert sets is not None
    plain = plan("llama-3-8b", gpu="H100", context="1k", users=32).speed
    behind = plan("llama-3-8b", gpu="H100", context="1k", users=32, cartridge="7k").speed
    assert plain is not None
    assert behind is not None
    assert behind.decode_rate < plain.decode_rate
    ranks = plan("llama-3-8b", gpu="H100x2", tp=2, cartridge="1k").capacity
    assert ranks is not None
    assert ranks.cartridge_bytes == 1024 * 131072


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("mamba-1.4b", {"cache_memory": "1GiB"}, "no trained cache can stand for it"),
        ("smollm2-135m", {"cache_memory": "1GiB", "context": 8000}, "1 to 7,936 behind a cartridge of 256"),
        ("smollm2-135m", {"cache_memory": "1GiB", "cartridge": "8k"}, "reads 8,192, of which one at least"),
        ("smollm2-135m", {"cache_memory": "1GiB", "engine": "vllm"}, "vllm has none"),
        ("smollm2-135m", {"cache_memory": "1GiB", "lengths": "x.txt"}, "beside the lengths of x.txt"),
        ("smollm2-135m", {}, "needs a memory to count in"),
    ],
)
def test_what_is_not_counted_is_refused(model: str, settings: dict[str, str | int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(model, **{"cartridge": 256, **settings})


def test_one_that_does_not_fit() -> None:
    with pytest.raises(DoesNotFit, match=r"a cartridge of 256 tokens takes 5\.625 MiB"):
        plan("smollm2-135m", cache_memory="4MiB", context=16, cartridge=256)
    with pytest.raises(DoesNotFit, match=r"5\.625 MiB of a cartridge"):
        plan("smollm2-135m", cache_memory="64MiB", context=256, cartridge=256, users=11)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["plan", "smollm2-135m", "--cache-memory", "64MiB", "--context", "256", "--cartridge", "256"]
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["capacity"]["cartridge"]["tokens"] == 256
    assert main(call) == 0
    assert "5.625 MiB of 256 tokens, once for all" in capsys.readouterr().out
