"""The engine against transformers, in float32, on two real models.

Greedy tokens are checked by teacher forcing: transformers reads prompt and answer in one pass, and its likeliest token
at every position must be the one that the engine chose there. By induction that is greedy generation's answer. Other
ways to the same answers are held against these, by tokens and logits.
"""

import gzip
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from kvist.batch import Batch
from kvist.cache.groups import Group
from kvist.engine import runner
from kvist.engine.answer import Answer
from kvist.engine.engine import Engine
from kvist.model.decoder import Decoder
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

transformers = pytest.importorskip("transformers")

TOKENS = 64
RELATIVE = 1e-4
TEXT = Path(__file__).resolve().parents[2] / "shared/data/text/shakespeare_plays.txt.gz"

QUESTIONS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics are:",
    "To make pancakes you need",
    "Q: What is the largest planet?\nA:",
    "import numpy as np\n\n",
    "Die Hauptstadt von Deutschland ist",
    "She opened the letter and read:",
    "The quick brown fox",
    "In 1969, humans first",
    "A list of colours: red,",
    "The cat sat on the mat because",
    "SELECT name FROM users WHERE",
    "Shall I compare thee to a summer's day?",
    "It was the best of times,",
    "An apple a day",
]


@dataclass
class Subject:
    """A model under test: its file, transformers' reading of it, and prompts with the answers that are known right.

    ``used`` is the engine that gave them, and has the prompts in its prefix tree.
    """

    path: Path
    oracle: Any
    used: Engine
    prompts: list[list[int]]
    answers: list[list[int]]
    logits: list[torch.Tensor]

    def engine(self, **settings: Any) -> Engine:
        return Engine(self.path, dtype="f32", **{"memory": "384MiB", "prefix_cache": False, **settings})


class Reader(gguf.GGUFReader):
    """Takes the first element of a long array for all: gguf reads a vocabulary one string at a time, for minutes."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        memory = memoryview(self.data)
        kind, count = struct.unpack_from("<IQ", memory, orig_offs)
        if count < 1000:
            return super()._get_field_parts(orig_offs, raw_type)
        offset = end = orig_offs + 12
        size, parts, (place,), types = super()._get_field_parts(offset, kind)
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(count):
                end += 8 + struct.unpack_from("<Q", memory, end)[0]
        else:
            end += size * count
        return end - orig_offs, parts, [place] * count, [gguf.GGUFValueType.ARRAY, *types]


def watch(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """Record the logits that the engine samples from, by request."""
    rows: dict[str, list[torch.Tensor]] = {}
    run = engine.runner.run

    def recorded(batch: Batch) -> torch.Tensor:
        logits = run(batch)
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        for chunk, row in zip(sampling, logits, strict=True):
            rows.setdefault(chunk.request.id, []).append(row.clone())
        return logits

    engine.runner.run = recorded  # type: ignore[method-assign]
    return rows


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def forced_logits(oracle: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """What transformers thinks at each position of the answer: float32 ``[len(answer), vocab]``."""
    with torch.inference_mode():
        ids = torch.tensor([prompt + answer[:-1]])
        return oracle(ids, logits_to_keep=len(answer)).logits[0].float()


def english(tokenizer: Any, start: int, tokens: int) -> list[int]:
    """A piece of Shakespeare, where the data is there, else text made from the questions."""
    if TEXT.exists():
        with gzip.open(TEXT, "rt", encoding="utf-8") as file:
            text = file.read(start + tokens * 8)[start:]
    else:
        text = " ".join(f"{index} {question}" for index in range(start, start + 200) for question in QUESTIONS)
    return tokenizer.encode(text)[:tokens]


@pytest.fixture(scope="module", autouse=True)
def weights_loaded_once() -> Iterator[None]:
    """Engines of one model share its decoder, which keeps nothing between steps."""
    decoders: dict[Any, Decoder] = {}

    def loaded(spec: ModelSpec, groups: Sequence[Group], dtype: torch.dtype) -> Decoder:
        key = (spec.name, dtype, tuple(group.layers for group in groups))
        if key not in decoders:
            decoders[key] = Decoder(spec, groups, dtype)
        return decoders[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Decoder", loaded)
        yield


@pytest.fixture(scope="module")
def subject(smollm2_path: Path) -> Subject:
    """SmolLM2; Gemma-3 is in test_equivalence_gemma.py, which another process may run."""
    return subject_of(smollm2_path)


def subject_of(path: Path) -> Subject:
    """Twenty prompts of mixed lengths with answers of 64 tokens from a batch, each verified by transformers."""
    with pytest.MonkeyPatch.context() as patch:
        # transformers opens the file twice, and makes the names of tensors anew for each module.
        patch.setattr(gguf, "GGUFReader", cache(Reader))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        oracle = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        ).eval()
    engine = Engine(path, dtype="f32", memory="768MiB", max_running=16)
    prompts = [engine.tokenizer.encode(question) for question in QUESTIONS]
    for index in range(0, 20, 4):
        prompts[index] = english(engine.tokenizer, 4000 * index, 60 + 17 * index) + prompts[index][-3:]
    seen = watch(engine)
    answers = generate(engine, prompts)
    del engine.runner.run  # is watched no longer
    return Subject(path, oracle, engine, prompts, [answer.tokens for answer in answers], by_request(seen))


def generate(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    answers = engine.generate(prompts, max_tokens=TOKENS, temperature=0, ignore_eos=True)
    for answer in answers:
        assert len(answer.tokens) == TOKENS
        assert answer.account["allocated_bytes"] == answer.account["planned_bytes"]
    return answers


def by_request(seen: dict[str, list[torch.Tensor]]) -> list[torch.Tensor]:
    """What was watched, in the order of requests."""
    return [torch.stack(rows) for _, rows in sorted(seen.items(), key=lambda item: int(item[0].split("-")[1]))]


def generated_again(subject: Subject, engine: Engine, which: Sequence[int] | None = None) -> list[Answer]:
    """Some prompts, in one batch: tokens and logits must be those that are known right."""
    which = range(len(subject.prompts)) if which is None else which
    seen = watch(engine)
    answers = generate(engine, [subject.prompts[index] for index in which])
    for index, answer, logits in zip(which, answers, by_request(seen), strict=True):
        assert answer.tokens == subject.answers[index]
        assert relative_error(logits, subject.logits[index]) < RELATIVE
    return answers


def test_a_batch_of_mixed_lengths_is_what_transformers_says(subject: Subject) -> None:
    """Sixteen of twenty at once, prefilling and decoding side by side; logits and greedy tokens."""
    for prompt, answer, logits in zip(subject.prompts, subject.answers, subject.logits, strict=True):
        theirs = forced_logits(subject.oracle, prompt, answer)
        assert theirs.argmax(-1).tolist() == answer
        assert relative_error(logits, theirs) < RELATIVE


@pytest.mark.parametrize(
    "every", [4, pytest.param(1, marks=pytest.mark.slow)], ids=["every fourth prompt", "every prompt"]
)
def test_alone(subject: Subject, every: int) -> None:
    engine = subject.engine()
    for prompt, answer in zip(subject.prompts[::every], subject.answers[::every], strict=True):
        assert generate(engine, [prompt])[0].tokens == answer


def test_prefill_cut_in_chunks(subject: Subject) -> None:
    generated_again(subject, subject.engine(max_batch_tokens=37))


def test_warm_equals_cold(subject: Subject) -> None:
    """The second time every prompt comes from the prefix tree, whole blocks of it, and that is asserted."""
    warm = generated_again(subject, subject.used)
    for prompt, answer in zip(subject.prompts, warm, strict=True):
        assert answer.account["prefix_hit_tokens"] == (len(prompt) - 1) // 16 * 16


def test_after_preemption(subject: Subject) -> None:
    """So little memory that requests must give their blocks back and be computed again."""
    longest = max(map(len, subject.prompts)) + TOKENS
    per_token = ModelSpec.read(subject.path).append_bytes_per_token(CacheFormat(key="f32", value="f32"))
    engine = subject.engine(memory=(longest + 400) * per_token, max_batch_tokens=512)
    generated_again(subject, engine)
    assert engine.scheduler.counters.preempted > 0


def test_past_every_window(subject: Subject) -> None:
    """Prompts of 1,500 tokens: alone, in chunks, and warm from a prefix."""
    engine = subject.engine(max_batch_tokens=600, prefix_cache=True)
    text = english(engine.tokenizer, 30_000, 1_500)
    other = text[:1_200] + english(engine.tokenizer, 60_000, 300)
    seen = watch(engine)
    answers = [generate(engine, [prompt])[0].tokens for prompt in (text, other)]
    assert engine.scheduler.counters.hit_tokens == 1_200 // 16 * 16
    for prompt, answer, rows in zip([text, other], answers, by_request(seen), strict=True):
        theirs = forced_logits(subject.oracle, prompt, answer)
        assert theirs.argmax(-1).tolist() == answer
        assert relative_error(rows, theirs) < RELATIVE
    assert [answer.tokens for answer in generate(subject.engine(), [other, text])] == answers[::-1]
