"""Plans with a cartridge in a format of its own, and the commands that take one."""

import json

import numpy as np
import pytest
from served_cartridges import OPTIONS, PROMPTS, asked, cartridge_of, engine_of
from test_leads import INT8_INT4, llama  # noqa: F401 (a fixture)

from kvist import CacheFormat, ModelSpec, plan
from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.lead_groups import lead_groups
from kvist.cache.manager import CacheManager
from kvist.cache.prefix import PrefixKey
from kvist.cli import main
from kvist.errors import DoesNotFit, InputError, UnsupportedModel
from kvist.planning.explain import explain

BYTES = 256 * 30 * 3 * (68 + 36)


@pytest.mark.parametrize("fmt", [CacheFormat(), CacheFormat(key="int8", value="int4", tail=32, keep_layers=1)], ids=str)
def test_as_many_fit_as_planned(fmt):
    """The manager holds as many sequences behind it as the plan says, and gives every block back."""
    spec, memory, context = ModelSpec.read("smollm2-135m"), 24 << 20, 127
    found = plan(spec, format=fmt, cache_memory=memory, context=context, cartridge=250, cartridge_format=INT8_INT4)
    budget = found.capacity
    assert budget.to_dict()["cartridge"] == {"tokens": 256, "bytes": BYTES, "format": INT8_INT4.to_dict()}
    groups = groups_of(spec, fmt) + lead_groups(spec, INT8_INT4, 16)
    manager = CacheManager(groups, ArenaLayout.of(groups, memory))
    lead = manager.pins.pin(256, PrefixKey())
    manager.pins.filled(lead)
    assert manager.held_bytes(lead) == manager.pins.bytes == BYTES
    running = []
    while True:
        sequence = manager.begin(np.random.default_rng(len(running)).integers(0, 1000, context).astype(np.int32))
        sequence.lead = lead
        while manager.reserve(sequence, 16, admit_chunk=None if sequence.begun else 16).granted:
            manager.commit(sequence, sequence.length + sequence.in_flight)
            if sequence.length == context:
                break
        else:
            break
        running.append(sequence)
    assert len(running) == budget.users_paged > 0
    assert {manager.held_bytes(sequence) for sequence in running} == {BYTES + budget.sequence_allocated}
    for one in (*running, sequence):
        manager.release(one)
    manager.pins.unpin(lead)
    manager.clear()
    assert manager.arena.free_slabs == manager.layout.num_slabs


def test_plans_are_explained_and_refused(capsys):
    found = plan("smollm2-135m", cache_memory="64MiB", context=256, cartridge=256, cartridge_format=INT8_INT4)
    rows = {row.what: row for row in explain(found)}
    assert rows["cartridge of 256 tokens"].value == BYTES
    assert rows["cartridge of 256 tokens"].source == "--cartridge, in int8/int4"
    # Ranks hold their heads of it.
    ranks = plan("llama-3-8b", gpu="H100x2", tp=2, cartridge="1k", cartridge_format=INT8_INT4)
    assert ranks.capacity.cartridge_bytes == 1024 * 32 * 8 * (136 + 72)
    assert any("as if it were stored as the cache is" in note for note in ranks.notes)
    with pytest.raises(DoesNotFit, match=r"a cartridge of 256 tokens takes 2\.285 MiB"):
        plan("smollm2-135m", cache_memory="2MiB", context=16, cartridge=256, cartridge_format=INT8_INT4)
    with pytest.raises(UnsupportedModel, match=r"gemma-3-1b.* has window-512 layers"):
        plan("gemma-3-1b", cache_memory="64MiB", context=16, cartridge=256, cartridge_format=INT8_INT4)
    with pytest.raises(InputError, match=r"cartridge_format: there is no cartridge"):
        plan("smollm2-135m", cache_memory="64MiB", cartridge_format=INT8_INT4)
    call = ["plan", "smollm2-135m", "--cache-memory", "64MiB", "--context", "256", "--cartridge", "256"]
    assert main([*call, "--cartridge-format", "int8/int4"]) == 0
    assert "2.285 MiB of 256 tokens, once for all in int8/int4" in capsys.readouterr().out
    for wrong in ("int9", "int8/int4+rotate", "int8/int4c"):
        assert main([*call, "--cartridge-format", wrong]) == 2
        assert capsys.readouterr().err.startswith("kvist: --cartridge-format: ")


def test_commands_take_it(llama, tmp_path, capsys):  # noqa: F811
    engine = engine_of(llama, cartridge_format=INT8_INT4)
    path = tmp_path / "a.cartridge"
    cartridge_of(llama).save(path, engine.groups)
    engine.load_cartridge("a", path)
    (before,) = asked(engine, PROMPTS[:1], "a")
    stored = ["--cartridge-format", "int8/int4"]
    assert main(["generate", str(llama), PROMPTS[0], *OPTIONS, *stored, "--cartridge", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] == before
    assert answer["account"]["planned_bytes"] == answer["account"]["allocated_bytes"]
    assert main(["generate", str(llama), PROMPTS[0], *OPTIONS, *stored]) == 2
    assert "--cartridge-format: there is no cartridge to store so; name one with --cartridge" in capsys.readouterr().err
