"""The same behaviours with the real engine and a real model behind the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures_models import smollm2_path
from server_checks import CHAT, CHECKS, HELLO, Served, serving, wait_until

__all__ = ["smollm2_path"]


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Iterator[Served]:
    from kvist.engine.engine import Engine
    from kvist.engine.loop import EngineLoop

    # Small enough that 64 streams crowd it, large enough that each of them fits.
    loop = EngineLoop(Engine(smollm2_path, memory="64MiB", dtype="f32", max_context=1024))
    loop.start()
    with serving(loop) as served:
        yield served


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_behaviour(check: Callable[[Served], None], real: Served) -> None:
    check(real)


def test_it_answers_sensibly(real: Served) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    answer = real.client.chat.completions.create(model=real.model, messages=messages, temperature=0, max_tokens=24)
    assert "Paris" in (answer.choices[0].message.content or "")


def test_every_byte_is_accounted(real: Served) -> None:
    status, answer, _ = real.call("POST", CHAT, real.chat(n=2, max_tokens=20))
    assert status == 200
    for entry in answer["kvist"]:
        assert entry["account"]["planned_bytes"] == entry["account"]["allocated_bytes"] > 0
    wait_until(lambda: not real.loop.snapshot()["requests"])


def test_a_warm_answer_is_the_cold_one(real: Served) -> None:
    fields: dict[str, Any] = {"model": real.model, "messages": HELLO, "temperature": 0, "max_tokens": 16}
    cold = real.client.chat.completions.create(**fields, extra_body={"cache_salt": "cold"})
    warm = real.client.chat.completions.create(**fields, extra_body={"cache_salt": "cold"})
    assert cold.usage is not None
    assert cold.usage.prompt_tokens_details is not None
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage is not None
    assert warm.usage.prompt_tokens_details is not None
    assert (warm.usage.prompt_tokens_details.cached_tokens or 0) >= 16
    assert warm.choices[0].message.content == cold.choices[0].message.content
