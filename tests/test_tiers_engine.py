"""Tiers of the engine: what is refused, what is told of them, and that a simulation decides as the engine does."""

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cartridge_models import reading_model
from served import VOCAB
from server_checks import serving
from test_cartridge_serving import cartridge_of
from test_simulation import trace_of

from kvist.cache.digests import Digests
from kvist.cache.layout import ArenaLayout
from kvist.cache.prefix import PrefixKey
from kvist.cache.tier import Tier
from kvist.cli import main
from kvist.engine.answer import Answer
from kvist.engine.engine import Engine
from kvist.engine.loop import EngineLoop
from kvist.engine.sampler import SamplingParams
from kvist.errors import DoesNotFit, EngineFailure, InputError
from kvist.scheduler import Limits
from kvist.simulation.clock import FixedClock
from kvist.simulation.prompts import Prompts
from kvist.simulation.replica import Log, Replica, Shape

pytest.importorskip("transformers")

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _ = reading_model(tmp_path_factory.mktemp("model"))
    return path


def engine(directory: Path, blocks: int, *tiers: str, **settings: Any) -> Engine:
    """An arena of some blocks of 16 tokens, and tiers; a block has 24,576 bytes in float32."""
    made = Engine(directory, memory=blocks * 8_192, dtype="f32", tiers=tiers, max_context=512, **settings)
    (group,) = made.groups
    assert group.block_bytes == 8_192
    return made


def prompt(seed: int, size: int) -> list[int]:
    rng = np.random.default_rng(seed)
    tokens: list[int] = rng.integers(3, 250, size).tolist()
    return tokens


@pytest.mark.parametrize(
    ("tiers", "says"),
    [
        ("host=1MiB@25GB/s", "tier: 'host=1MiB@25GB/s' says a rate, which only a simulation takes.*leave @25GB/s out"),
        ("tape=1MiB", "tier: 'tape' is no memory of this machine; host or disk"),
        ("host", "tier: 'host'; write NAME=SIZE, such as host=4GiB"),
        ("host=much", "tier: 'much' is not a size"),
        ("host=1MiB,never", "tier host: write is 'never'"),
        (["host=1MiB", "host=2MiB"], "tier: host, host; each name once"),
        ([7], "tier: 7; write host=4GiB or disk=20GiB"),
        (None, "tier: None; write host=4GiB or disk=20GiB"),
        (b"host=1MiB", "tier: b'host=1MiB'; write host=4GiB or disk=20GiB"),
    ],
)
def test_tiers_are_refused_by_name(directory: Path, tiers: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        Engine(directory, tiers=tiers)
    assert caught.value.key == "tier"


def test_what_does_not_fit_is_refused_by_name(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"tier: host=1 KiB does not hold one block of 16 tokens; at least"):
        Engine(directory, tiers="host=1KiB")
    with pytest.raises(DoesNotFit, match=r"tier: host=.* beside a cache of .*; this machine has"):
        Engine(directory, tiers="host=1000000GiB")
    with pytest.raises(DoesNotFit, match=f"tier: disk=.*: {tmp_path}: .*; ask for less, or name another directory"):
        Engine(directory, tiers="disk=4000000GiB", tier_directory=tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=f"tier_directory: {tmp_path / 'file'}: .*; name one that can be written to"):
        Engine(directory, tiers="disk=1MiB", tier_directory=tmp_path / "file")
    with pytest.raises(InputError, match="tier_directory: there is no tier on a disk"):
        Engine(directory, tiers="host=1MiB", tier_directory=tmp_path)
    with pytest.raises(InputError, match="tier: it keeps prefixes, and nothing keeps any here; leave it out"):
        Engine(directory, tiers="host=1MiB", prefix_cache=False)


@pytest.mark.parametrize("given", ["", 5, b"here", "~nobody.of.this.name/tiers", "a\0b"])
def test_what_is_no_directory_is_refused_by_name(directory: Path, given: Any) -> None:
    with pytest.raises(InputError, match=r"tier_directory: .*; name one that can be written to") as caught:
        Engine(directory, tiers="disk=1MiB", tier_directory=given)
    assert caught.value.key == "tier_directory"
    assert str(caught.value).isprintable()


def test_the_users_cache_directory_is_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVIST_CACHE", "~nobody.of.this.name/kvist")
    with pytest.raises(InputError, match=r"KVIST_CACHE: '~nobody\..*no such home directory"):
        Engine(directory, tiers="disk=1MiB")


@pytest.mark.parametrize(("given", "code"), [("host=1MiB@2GB/s", 2), ("host=1KiB", 3)])
def test_commands_refuse_in_one_line(
    directory: Path, given: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(directory), "Who?", "--tier", given]) == code
    out = capsys.readouterr()
    assert not out.out
    assert "tier" in out.err
    assert "Traceback" not in out.err


def test_a_disk_is_in_the_users_cache_directory_and_leaves_nothing(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVIST_CACHE", str(tmp_path))
    assert main(["generate", str(directory), "Who?", "--tier", "disk=1MiB", "--max-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["account"]["tier_hit_tokens"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["tiers"]
    assert not list((tmp_path / "tiers").iterdir())


def test_hits_and_bytes_are_told(directory: Path, tmp_path: Path) -> None:
    """In the account, in ``/cache`` and in ``/metrics``; bytes planned are bytes allocated."""
    loop = EngineLoop(engine(directory, 16, "host=40KiB", "disk=1MiB", tier_directory=tmp_path))
    made, one, other = loop.engine, prompt(1, 161), prompt(2, 225)
    (first,) = made.generate([one], params=GREEDY)
    made.generate([other], params=GREEDY)
    (again,) = made.generate([one], params=GREEDY)
    assert again.tokens == first.tokens
    account = again.account
    assert (account["prefix_hit_tokens"], account["planned_bytes"]) == (160, account["allocated_bytes"])
    assert 0 < account["tier_hit_tokens"] <= 160
    loop.start()
    try:
        with serving(loop) as served:
            _, now, _ = served.call("GET", "/cache")
            _, metrics, _ = served.call("GET", "/metrics")
    finally:
        loop.stop(drain=False)
    host, disk = now["tiers"]
    assert (host["name"], host["bytes"], disk["name"], disk["bytes"]) == ("host", 40 << 10, "disk", 1 << 20)
    for tier in (host, disk):
        assert tier["allocated_bytes"] == tier["bytes"] == tier["cached"] + tier["swapped"] + tier["free"]
        assert tier["cached"] == tier["blocks"] * 8_192
        for key, name in (("hit_tokens", "hits_total"), ("read_bytes", "read_bytes_total")):
            assert f'kvist_tier_{name}{{tier="{tier["name"]}"}} {float(tier[key])}' in metrics["text"]
        assert f'kvist_tier_bytes{{state="cached",tier="{tier["name"]}"}} {float(tier["cached"])}' in metrics["text"]
    assert host["hit_tokens"] + disk["hit_tokens"] == account["tier_hit_tokens"]
    assert host["read_bytes"] >= host["hit_tokens"] * 8_192 // 16
    assert disk["read_bytes"] == disk["hit_tokens"] * 8_192 // 16


def test_a_disk_that_fails_ends_the_step_and_nothing_else(directory: Path, tmp_path: Path) -> None:
    """Whoever waits for what is lost is told; the tiers begin anew, and the next answers are right."""
    made = engine(directory, 16, "disk=1MiB", tier_directory=tmp_path)
    one, other = prompt(1, 161), prompt(2, 225)
    (first,) = made.generate([one], params=GREEDY)
    (second,) = made.generate([other], params=GREEDY)
    made.runner.tiers.close()
    failed = Answer(prompt_tokens=len(one))
    made.submit(one, GREEDY, on_event=failed.add)
    made.step()
    assert failed.finish_reason == "error"
    assert "OSError" in failed.error
    assert [tier["cached"] for tier in made.snapshot()["tiers"]] == [0]
    # Where nothing is to be read, what cannot be written is only lost.
    assert made.generate([other], params=GREEDY)[0].tokens == second.tokens
    assert made.cache.arena.held(0) == 0
    assert first.tokens


def test_a_disk_that_takes_nothing_costs_no_answer(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(directory, 16, "disk=1MiB", tier_directory=tmp_path)
    said = [made.generate([prompt(seed, 161)], params=GREEDY)[0].tokens for seed in (1, 2)]

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        # The first writes fail while a step is still to read what went there before.
        made.generate([prompt(3, 161)], params=GREEDY)
        for seed in (1, 2, 1):
            assert made.generate([prompt(seed, 161)], params=GREEDY)[0].tokens == said[seed - 1]
    for seed in (2, 1):
        (answer,) = made.generate([prompt(seed, 161)], params=GREEDY)
        assert answer.tokens == said[seed - 1]
    assert answer.account["tier_hit_tokens"]


def test_a_file_that_is_cut_gives_no_other_tokens(directory: Path, tmp_path: Path) -> None:
    """Not even where later writes make it as long again."""
    made = engine(directory, 16, "disk=1MiB", tier_directory=tmp_path)
    one, other = prompt(1, 161), prompt(2, 225)
    said = [made.generate([each], params=GREEDY)[0].tokens for each in (one, other)]
    os.ftruncate(made.runner.tiers.stores[0].file, 0)
    with pytest.raises(EngineFailure, match=r"what a tier held was lost, ask again: .*cut to 0 of 1048576 bytes"):
        made.generate([one], params=GREEDY)
    for expected, each in zip(said * 2, (one, other) * 2, strict=True):
        (answer,) = made.generate([each], params=GREEDY)
        assert answer.tokens == expected
    assert answer.account["tier_hit_tokens"]


def test_names_of_tenants_are_not_kept_for_ever() -> None:
    digests = Digests(16)
    names = {salt: digests.root(PrefixKey(salt=str(salt))) for salt in range(3000)}
    assert len(digests._roots) <= 1024
    assert len(set(names.values())) == 3000
    assert digests.root(PrefixKey(salt="0")) == names[0]


def test_pruning_and_cartridges_beside_tiers(directory: Path, tmp_path: Path) -> None:
    """What they write to the arena between steps comes after what goes from there to a tier."""
    seen: list[list[torch.Tensor]] = []
    for tiers in ((), ("host=40KiB", "disk=4MiB")):
        where = {"tier_directory": tmp_path} if tiers else {}
        made = engine(directory, 24, *tiers, **where)
        rows: list[torch.Tensor] = []
        seen.append(rows)
        run, compact, hits = made.runner.run, made.runner.compact, 0

        def watched(batch: Any, run: Any = run, rows: Any = rows) -> torch.Tensor:
            rows.append(run(batch).clone())
            return rows[-1]

        made.runner.run, pruned = watched, []
        made.runner.compact = lambda *args, made=made, compact=compact, pruned=pruned: (
            pruned.append(len(made.cache.moves)),
            compact(*args),
        )
        for turn in range(3):
            for seed in (1, 2, 3):
                (answer,) = made.generate([prompt(seed, 130)], params=GREEDY)
                hits += answer.account["tier_hit_tokens"]
            made.load_cartridge(f"c{turn}", cartridge_of(directory, seed=turn))
            for names in (f"c{turn}", [f"c{turn}", f"c{turn}"]):
                made.generate([prompt(1, 40)], params=GREEDY, cartridge=names)
            made.unload_cartridge(f"c{turn}")
            for seed in (1, 2, 3):
                made.generate([prompt(seed, 130)], params=GREEDY)
            # Two that share what neither may write to: what they keep goes to blocks that others must give up.
            made.generate([prompt(9 + turn, 140)] * 2, params=GREEDY, evict="streaming:4+60")
        assert pruned
        assert not any(pruned), "blocks were written to that were still to go to a tier"
        assert bool(hits) == bool(tiers)
        if tiers:
            assert made.runner.tiers.written[0]
    assert len(seen[0]) == len(seen[1])
    for plain, tiered in zip(*seen, strict=True):
        torch.testing.assert_close(plain, tiered, rtol=0, atol=1e-3)


@pytest.mark.parametrize("write", ["write-back", "write-through"])
@pytest.mark.parametrize("seed", range(3))
def test_a_simulation_decides_as_the_engine_does(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, seed: int
) -> None:
    """The same requests at once: what each finds, where, what is preempted, and what lies in each tier in the end."""
    chance = random.Random(seed)
    rows = []
    for _ in range(40):
        stem = chance.randrange(4)
        ids = [stem, 10 + 2 * stem + chance.randrange(2)]
        rows.append((0.0, chance.randrange(20, 200), chance.randrange(1, 40), ids))
    trace = trace_of([(at, size, out, ids[: -(-size // 64)]) for at, size, out, ids in rows], block=64)
    prompts = Prompts.of(trace)
    sizes = {"host": 20 * 8_192, "disk": 60 * 8_192}
    tiers = tuple(Tier(name=name, capacity_bytes=size, bandwidth=1e9, write=write) for name, size in sizes.items())
    limits = Limits(max_running=4, max_batch_tokens=64, max_context=512)
    asked = [f"{name}={size},{write}" for name, size in sizes.items()]
    made = engine(directory, 24, *asked, tier_directory=tmp_path, max_running=4, max_batch_tokens=64)
    simulated = Replica(
        shape=Shape(
            groups=made.groups, layout=ArenaLayout.of(made.groups, 24 * 8_192), limits=limits, prefix_cache=True,
            tiers=tiers,
        ),
        clock=FixedClock(prefill_rate=100.0, decode_seconds=0.1), prompts=prompts, log=Log.of(len(trace)),
    )  # fmt: skip
    for index in range(len(trace)):
        simulated.give(index)
    simulated.advance(float("inf"))

    # Answers differ from each other, and from all prompts: as those of a simulation do.
    append = made.scheduler.append
    monkeypatch.setattr(
        made.scheduler, "append", lambda request, _: append(request, prompts.own(int(request.id[8:]) - 1) % VOCAB)
    )
    answers = [Answer(prompt_tokens=int(size)) for size in trace.prompts]
    for index, answer in enumerate(answers):
        tokens = (prompts.tokens(index) % VOCAB).tolist()
        params = SamplingParams(max_tokens=int(trace.outputs[index]), temperature=0, ignore_eos=True)
        made.submit(tokens, params, on_event=answer.add)
    while made.has_work():
        made.step()
    assert [answer.account["prefix_hit_tokens"] for answer in answers] == simulated.log.hit_tokens.tolist()
    assert made.scheduler.tier_hit_tokens == simulated.scheduler.tier_hit_tokens
    assert sum(made.scheduler.tier_hit_tokens.values())
    assert made.scheduler.counters == simulated.scheduler.counters
    ours, theirs = made.cache.tiers, simulated.manager.tiers
    assert ours.occupied() == theirs.occupied()
    for mine, other in zip(ours._shelves, theirs._shelves, strict=True):
        assert list(mine.blocks.values()) == list(other.blocks.values())
