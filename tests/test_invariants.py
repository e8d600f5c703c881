"""The invariants that tie planner, scheduler and engine together, on tiny models with real tensors.

The others are held elsewhere: one state for every block and failed reservations that change nothing in
test_cache_machine.py; the prefix key, agreeing groups and refusals in test_cache.py and test_scheduler.py; clients
that hang up in test_server.py.
"""

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_tokenizers import byte_level, write_directory

from kvist.batch import Batch, Chunk, Request
from kvist.cache.arena import ArenaLayout
from kvist.cache.grouping import groups_of
from kvist.cache.manager import CacheManager
from kvist.engine.answer import Event
from kvist.engine.engine import Engine
from kvist.engine.loop import EngineLoop
from kvist.engine.sampler import SamplingParams
from kvist.errors import DoesNotFit, EngineFailure, InputError, UnsupportedModel
from kvist.planning.planner import plan
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat
from kvist.spec.layers import Attention
from kvist.spec.model import ModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gemma": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **SIZES,
            sliding_window=40,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with random weights and a tokenizer of bytes."""
    folder = write_directory(tmp_path_factory.mktemp(request.param), byte_level())
    torch.manual_seed(3)
    MODELS[request.param]().eval().save_pretrained(folder)
    return folder


def engine(directory: Path, **settings: Any) -> Engine:
    return Engine(directory, **{"memory": "2MiB", "dtype": "f32", **settings})


FORMATS = [
    CacheFormat(key=key, value=value)
    for key, value in [("f32", "f32"), ("bf16", "bf16"), ("f32", "bf16"), ("f16", "f32")]
] + [
    CacheFormat(key="bf16", value="f16", keep_layers=1),
    CacheFormat(layers={1: CacheFormat(key="f32", value="f16")}),
]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("block", [8, 16, 32])
def test_planned_bytes_are_allocated_bytes(directory: Path, fmt: CacheFormat, block: int) -> None:
    """In every group, with tail blocks and past the window, from the plan's arithmetic to the tensor's strides."""
    made = engine(directory, format=fmt, block_tokens=block)
    layout = made.cache.layout
    assert made.runner.arena.numel() == made.runner.arena.untyped_storage().nbytes() == layout.total_bytes
    assert made.prefix_key("a").format == f"{made.format}, computed in f32"
    assert made.snapshot()["format"] == made.format.to_dict()
    spec = ModelSpec.read(directory)
    for tokens in (1, block - 1, block, 41, 100, 163):
        (answer,) = made.generate([[7] * tokens], max_tokens=5, temperature=0, ignore_eos=True)
        stored = tokens + 4
        planned = plan(spec, format=made.format, cache_memory=layout.total_bytes, context=stored, block_tokens=block)
        assert planned.capacity is not None
        assert planned.capacity.sequence_allocated >= answer.account["allocated_bytes"]
        by_hand = sum(
            (-(-stored // block) - (max(0, stored - layer.window + 1) // block if layer.window else 0))
            * block
            * layer.token_bytes(made.format.of_layer(index, len(spec.layers)))
            for index, layer in enumerate(spec.layers)
        )
        assert answer.account["planned_bytes"] == answer.account["allocated_bytes"] == by_hand
        assert answer.account["waste_bytes"] == -stored % block * spec.append_bytes_per_token(made.format)


def test_blocks_do_not_overlap(directory: Path) -> None:
    """Each block that is written changes its own bytes of the arena, and no other block's."""
    made = engine(directory)
    made.generate([[5] * 60], max_tokens=1, temperature=0)
    before = made.runner.arena.clone()
    sequence = made.cache.begin([9] * 50)
    reservation = made.cache.reserve(sequence, 50)
    batch = Batch([Chunk(Request("x", sequence, 1), sequence.length, reservation.limit - sequence.length, True)], [])
    made.runner.run(batch)
    changed = (made.runner.arena != before).nonzero().flatten()
    layout = made.cache.layout
    owned = torch.zeros(layout.total_bytes, dtype=torch.bool)
    for group, per_slab in enumerate(layout.blocks_per_slab):
        for block in sequence.tables[group].tolist():
            start = block // per_slab * layout.slab_bytes + block % per_slab * layout.block_bytes[group]
            assert not owned[start : start + layout.block_bytes[group]].any(), "two blocks share bytes"
            owned[start : start + layout.block_bytes[group]] = True
    assert owned[changed].all()
    assert len(changed) > 0


def test_simulator_and_engine_decide_alike(directory: Path) -> None:
    """One trace through the engine, and the same trace through the scheduler alone: every block of every step."""
    chance = random.Random(11)
    shared = [chance.randrange(250) for _ in range(96)]
    trace = []
    for index in range(24):
        prompt = shared[: chance.choice([0, 32, 70, 96])] + [
            chance.randrange(250) for _ in range(chance.randrange(1, 60))
        ]
        trace.append((index // 3 * 2, prompt, chance.randrange(1, 40)))

    memory = "200KiB" if directory.name.startswith("gemma") else "340KiB"
    made = engine(directory, memory=memory, max_batch_tokens=64, max_running=6)
    tokens: dict[str, list[int]] = {}
    real = list(replay_engine(made, trace, tokens))
    simulated = list(replay_scheduler(made, trace, tokens))
    assert simulated == real
    assert made.scheduler.counters.preempted > 0
    assert made.scheduler.counters.hit_tokens > 0


def picture(batch: Batch) -> Any:
    return (
        [
            (chunk.request.id, chunk.start, chunk.count, [table.tolist() for table in chunk.request.sequence.tables])
            for chunk in batch.chunks
        ],
        [request.id for request in batch.preempted],
    )


def replay_engine(made: Engine, trace: list[Any], tokens: dict[str, list[int]]) -> Iterator[Any]:
    run, pictures = made.runner.run, []

    def seen(batch: Batch) -> torch.Tensor:
        pictures.append(picture(batch))
        return run(batch)

    made.runner.run = seen  # type: ignore[method-assign]
    step, waiting = 0, list(trace)
    while waiting or made.has_work():
        while waiting and waiting[0][0] <= step:
            _, prompt, count = waiting.pop(0)
            answer: list[int] = []
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            request = made.submit(prompt, params, on_event=lambda event, to=answer: to.extend(event.token_ids))
            tokens[request] = answer
        made.step()
        step += 1
    return iter(pictures)


def replay_scheduler(made: Engine, trace: list[Any], tokens: dict[str, list[int]]) -> Iterator[Any]:
    scheduler = Scheduler(manager=CacheManager(made.groups, made.cache.layout), limits=made.scheduler.limits)
    key = made.prefix_key("")
    step, waiting = 0, list(trace)
    while waiting or scheduler.has_work():
        while waiting and waiting[0][0] <= step:
            _, prompt, count = waiting.pop(0)
            scheduler.add(f"request-{len(trace) - len(waiting)}", prompt, count, key)
        batch = scheduler.step()
        if batch.chunks:
            yield picture(batch)
        scheduler.commit(batch)
        for chunk in batch.chunks:
            if chunk.samples:
                request = chunk.request
                scheduler.append(request, tokens[request.id][request.generated])
                if request.generated >= request.max_tokens:
                    scheduler.finish(request)
        step += 1


def test_the_picture_adds_up_to_the_arena(directory: Path) -> None:
    """Free, cached, held and waste are counted apart, while requests run and after."""
    made = engine(directory)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for number in range(5):
        made.submit([number + 3] * (20 + 13 * number), params, on_event=lambda event: None)
    while made.has_work():
        made.step()
        seen = made.snapshot()
        assert sum(seen["bytes"].values()) == seen["arena"]["bytes"] == made.runner.arena.numel()
        for request in seen["requests"]:
            assert request["bytes"] == request["planned_bytes"]
    assert made.snapshot()["bytes"]["held"] == made.snapshot()["bytes"]["waste"] == 0


def test_warm_equals_cold_and_another_salt_never_hits(directory: Path) -> None:
    made = engine(directory)
    prompt = [chance % 250 for chance in range(7, 150)]
    cold, warm, other = (
        made.generate([prompt], max_tokens=20, temperature=0, ignore_eos=True, cache_salt=salt)[0]
        for salt in ("", "", "tenant")
    )
    assert (cold.account["prefix_hit_tokens"], warm.account["prefix_hit_tokens"]) == (0, 142 // 16 * 16)
    assert other.account["prefix_hit_tokens"] == 0
    assert cold.tokens == warm.tokens == other.tokens


def test_positions_are_stored_not_inferred(directory: Path) -> None:
    """Past a window a sequence holds fewer tokens than its position; what it generates is as without a cache."""
    prompt = [(index * 37) % 250 for index in range(120)]
    settings = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    made = engine(directory, max_batch_tokens=33)
    plain = engine(directory, reuse=False)
    assert made.generate([prompt], **settings)[0].tokens == plain.generate([prompt], **settings)[0].tokens


def test_a_fork_goes_on_like_its_twin(directory: Path) -> None:
    made = engine(directory)
    prompt = [(index * 31) % 250 for index in range(75)]
    sequence = made.cache.begin(prompt)
    made.cache.reserve(sequence, 200)
    made.runner.run(Batch([Chunk(Request("a", sequence, 9), 0, 75, True)], []))
    made.cache.commit(sequence, 75)
    fork = made.cache.fork(sequence)
    assert fork is not None
    made.runner.copy(fork.copies)
    # The first goes its own way in the open block; the twin must not notice.
    for one, token in ((sequence, 3), (fork.sequence, 4), (sequence, 8), (fork.sequence, 4)):
        one.append(token)
        made.cache.reserve(one, 1)
        twin = made.runner.run(Batch([Chunk(Request("b", one, 9), one.length, 1, True)], []))
        made.cache.commit(one, one.size)
    alone = engine(directory)
    sequence = alone.cache.begin([*prompt, 4, 4])
    alone.cache.reserve(sequence, 200)
    logits = alone.runner.run(Batch([Chunk(Request("c", sequence, 9), 0, 77, True)], []))
    torch.testing.assert_close(twin, logits, rtol=1e-4, atol=1e-5)


def test_a_step_that_fails_ends_its_requests_and_loses_nothing(directory: Path) -> None:
    made = engine(directory)
    run = made.runner.run
    made.runner.run = lambda batch: 1 / 0  # type: ignore[assignment]
    with pytest.raises(EngineFailure, match="ZeroDivisionError"):
        made.generate([[5] * 100, [5] * 90], max_tokens=3)
    made.runner.run = run  # type: ignore[method-assign]
    for group in range(len(made.groups)):
        assert made.cache.arena.held(group) == made.cache.arena.cached(group) == 0
    assert made.generate([[5] * 100], max_tokens=3, temperature=0)[0].account["prefix_hit_tokens"] == 0


def test_an_interrupt_after_the_reservation_leaves_nothing_to_be_found(directory: Path) -> None:
    made = engine(directory)
    prompt = [(index * 7) % 250 for index in range(100)]
    step = made.scheduler.step

    def interrupted() -> Batch:
        step()
        raise KeyboardInterrupt

    made.scheduler.step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        made.generate([prompt], max_tokens=3)
    made.scheduler.step = step  # type: ignore[method-assign]
    assert list(made.cache.tree.nodes()) == []
    answer = made.generate([prompt], max_tokens=4, temperature=0)[0]
    assert answer.account["prefix_hit_tokens"] == 0
    assert answer.tokens == engine(directory).generate([prompt], max_tokens=4, temperature=0)[0].tokens


def test_threads_may_generate_at_the_same_time(directory: Path) -> None:
    made = engine(directory)
    prompts = [[(index * 7 + thread) % 250 for index in range(40)] for thread in range(6)]
    alone = [engine(directory).generate([prompt], max_tokens=6, temperature=0)[0].tokens for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: made.generate([prompt], max_tokens=6, temperature=0)[0].tokens, prompts))
    assert answers == alone


def test_a_listener_may_abort_while_others_submit(directory: Path) -> None:
    """Listeners run without the engine's lock, so that no order of locks can block."""
    loop = EngineLoop(engine(directory))
    loop.start()
    done = [threading.Event() for _ in range(12)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def client(number: int) -> None:
        def listen(event: Event) -> None:
            loop.abort(f"request-{number + 1}")
            if event.finish_reason:
                done[number].set()

        loop.submit([number + 2] * 20, params, on_event=listen)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(12)]
    for thread in threads:
        thread.start()
    assert all(event.wait(60) for event in done)
    loop.stop(drain=True)


def test_a_listener_that_fails_loses_its_request_only(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = engine(directory)
    events: list[Event] = []
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    made.submit([5] * 20, params, on_event=lambda event: 1 / 0)
    made.submit([6] * 20, params, on_event=events.append)
    while made.has_work():
        made.step()
    assert [token for event in events for token in event.token_ids]
    assert events[-1].finish_reason == "length"
    assert "a listener of request-1 failed" in caplog.text


def test_bad_calls_are_named(directory: Path) -> None:
    made = engine(directory)
    with pytest.raises(InputError, match="token id 100000 is not a whole number in 0"):
        made.generate([[100000]])
    for name, value in [("seed", 1.5), ("stop", [1]), ("stop_token_ids", [[1]]), ("top_k", 1.5), ("logprobs", True)]:
        with pytest.raises(InputError, match=name):
            made.generate([[5] * 20], max_tokens=2, **{name: value})
    for prompts in ("text", [[1.5]], [[True]], [b"x"]):
        with pytest.raises(InputError, match="prompt"):
            made.generate(prompts)  # type: ignore[arg-type]
    for block in (0, -3, 1.5, "16"):
        with pytest.raises(InputError, match="block_tokens"):
            engine(directory, block_tokens=block)
    with pytest.raises(InputError, match="format: 'bf16'"):
        engine(directory, format="bf16")
    with pytest.raises(DoesNotFit, match="cannot be allocated; this machine has"):
        engine(directory, memory="500GiB")
    assert made.generate([[5] * 20], max_tokens=2)[0].finish_reason
    with pytest.raises(InputError, match=r"temprature: is not a sampling parameter"):
        made.generate([[1]], temprature=1)
    with pytest.raises(InputError, match="dtype: 'int3' is not a compute type"):
        engine(directory, dtype="int3")
    with pytest.raises(InputError, match="max_context: 4096"):
        engine(directory, max_context=4096)
    with pytest.raises(DoesNotFit, match=r"memory: .* at least"):
        engine(directory, memory="1KiB")
    with pytest.raises(DoesNotFit, match="900 prompt tokens"):
        engine(directory, memory="64KiB").generate([[5] * 900], max_tokens=10)
    assert not made.has_work()


def test_a_description_without_weights_is_not_mistaken_for_a_known_model(tmp_path: Path) -> None:
    config = {**SIZES, "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    (tmp_path / "smollm2-135m.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="describes a model but holds no weights"):
        Engine(tmp_path / "smollm2-135m.json")


def test_the_plans_users_are_the_schedulers_users() -> None:
    """Gemma-3-1B's shape in 1 GiB at 8k: the windows allow 23, the plan says 23, and the scheduler runs 23 at once."""
    full = Attention(kv_heads=1, key_dim=256, value_dim=256)
    window = Attention(kv_heads=1, key_dim=256, value_dim=256, window=512)
    layers = tuple(full if index % 6 == 5 else window for index in range(26))
    spec = ModelSpec(name="gemma-3-1b", source="its config.json", layers=layers, max_context=32768)
    planned = plan(spec, cache_memory=1 << 30, context=8192)
    assert planned.capacity is not None
    assert planned.capacity.users_paged == 23

    groups = groups_of(spec, CacheFormat())
    manager = CacheManager(groups, ArenaLayout.of(groups, 1 << 30))
    made = Scheduler(manager=manager, limits=Limits(max_context=32768))
    for user in range(23):
        made.add(f"user {user}", range(user * 10_000, user * 10_000 + 8000), 193)
    while any(request.sequence.size < 8192 for request in made.running) or made.waiting:
        batch = made.step()
        made.commit(batch)
        assert not batch.preempted
        for chunk in batch.chunks:
            # Whoever is done waits for the others at full length.
            if chunk.samples and chunk.request.sequence.size < 8192:
                made.append(chunk.request, 0)
    assert len(made.running) == 23
    assert all(request.sequence.size == 8192 for request in made.running)
