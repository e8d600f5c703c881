"""Training of cartridges: gradients against other ways to them, and a loop that learns and resumes."""

import inspect
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cartridge_models import LLAMA, TEXT, reading_model, taught
from served import VOCAB, build
from served_cartridges import CASES

from kvist.cartridges.distillation import Targets, divergence
from kvist.cartridges.self_study import Writer, sentences, template_items, topics
from kvist.cartridges.student import Batch, Student
from kvist.cartridges.teacher import Teacher
from kvist.cartridges.training import Settings, Training, batch_of
from kvist.engine.engine import Engine
from kvist.errors import BadFile, InputError
from kvist.spec.model import ModelSpec

pytest.importorskip("transformers")

PREFIX = 16


def tokens_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Student, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    served = build(CASES[request.param], directory)
    return Student(ModelSpec.read(directory), "f32"), served.oracle


def padded(items: list[list[int]]) -> Batch:
    length = max(map(len, items))
    tokens = torch.tensor([[*item, *[0] * (length - len(item))] for item in items])
    rows = [torch.arange(number * length, number * length + len(item)) for number, item in enumerate(items)]
    return Batch(tokens=tokens, rows=torch.cat(rows))


def test_behind_what_was_read_it_computes_as_transformers(case: tuple[Student, Any]) -> None:
    student, oracle = case
    document, *items = tokens_of(PREFIX, 9, 14, 5)
    with torch.no_grad():
        found = student.logits(student.read(document), padded(items))
        expected = torch.cat([oracle(torch.tensor([document + item])).logits[0, PREFIX:] for item in items])
    assert (found - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


def test_gradients_are_the_slopes(case: tuple[Student, Any]) -> None:
    """Along random directions, by central differences."""
    student, _ = case
    document, *items = tokens_of(PREFIX, 9, 14, seed=1)
    batch = padded(items)
    with torch.no_grad():
        given = student.logits(student.read(tokens_of(PREFIX, seed=2)[0]), batch)
    targets = Targets.of(given)
    segments = {layer: part.requires_grad_() for layer, part in student.read(document).items()}
    loss = divergence(student.logits(segments, batch), targets)
    loss.backward()
    torch.manual_seed(3)
    step = 3e-3
    for _ in range(2):
        ahead = {layer: torch.randn_like(part) for layer, part in segments.items()}
        slope = sum(float((part.grad * ahead[layer]).sum()) for layer, part in segments.items())
        with torch.no_grad():
            sides = [
                divergence(
                    student.logits(
                        {layer: part + sign * step * ahead[layer] for layer, part in segments.items()}, batch
                    ),
                    targets,
                ).item()
                for sign in (1, -1)
            ]
        assert slope == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=0.02, abs=1e-3)


def test_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    """Of a cache whose keys and values are trained."""
    import transformers

    served = build(LLAMA, tmp_path)
    student = Student(ModelSpec.read(tmp_path), "f32")
    document, item = tokens_of(PREFIX, 12)
    segments = {layer: part.requires_grad_() for layer, part in student.read(document).items()}
    rows = torch.arange(12)
    weights = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(1))
    (student.logits(segments, Batch(tokens=torch.tensor([item]), rows=rows)) * weights).sum().backward()

    cache = transformers.DynamicCache(config=served.oracle.config)
    sides = {}
    for layer, part in segments.items():
        keys, values = (side[None].detach().clone().requires_grad_() for side in part.chunk(2))
        sides[layer] = keys, values
        cache.update(keys, values, layer)
    # Renamed in transformers 5.
    name = "cache" if "cache" in inspect.signature(served.oracle.forward).parameters else "past_key_values"
    logits = served.oracle(torch.tensor([item]), **{name: cache}).logits[0]
    (logits * weights).sum().backward()
    for layer, part in segments.items():
        for mine, theirs in zip(part.grad.chunk(2), sides[layer], strict=True):
            assert torch.allclose(mine, theirs.grad[0], rtol=1e-3, atol=1e-4 * float(theirs.grad.abs().max()))


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Student:
    directory = tmp_path_factory.mktemp("llama")
    build(LLAMA, directory)
    return Student(ModelSpec.read(directory), "f32")


def begun(student: Student, settings: Settings) -> Training:
    document, *items = tokens_of(96, *[10, 13, 17, 21] * 10, seed=4)
    lessons = taught(student, document, items)
    return Training(student, student.read(document[:PREFIX]), lessons[8:], lessons[:8], settings, {"of": "a test"})


def test_it_learns_what_the_document_does(student: Student) -> None:
    training = begun(student, Settings(steps=30, rate=0.05, batch_tokens=256))
    first = {layer: part.detach().clone() for layer, part in training.segments.items()}
    heard: list[float] = []
    training.run(lambda progress: heard.append(progress.share))
    assert training.step == 30
    assert heard == sorted(heard)
    assert heard[-1] == 1
    # Items that it has not seen.
    assert training.losses["after"] < 0.8 * training.losses["before"]
    for layer, part in training.segments.items():
        assert torch.equal(part[:, :1], first[layer][:, :1]), "the first token stays"
        assert not torch.equal(part[:, 1:], first[layer][:, 1:])


def test_a_resumed_training_ends_where_an_uninterrupted_one_does(student: Student, tmp_path: Path) -> None:
    settings = Settings(steps=6, rate=0.01, batch_tokens=128)
    whole = begun(student, settings)
    whole.run()
    path = tmp_path / "c.checkpoint"

    def interrupt(progress: Any) -> None:
        if progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begun(student, settings).run(interrupt, checkpoint=path)
    resumed = Training.resume(student, path, settings, {"of": "a test"})
    assert resumed.step == 4
    resumed.run()
    for layer, part in whole.segments.items():
        assert torch.equal(part, resumed.segments[layer])
    assert whole.losses == resumed.losses
    for other, told, said in (
        (replace(settings, rate=1.0), {"of": "a test"}, "rate 0.01, not 1.0"),
        (settings, {"of": "another"}, "of a test, not another"),
    ):
        with pytest.raises(InputError, match=said):
            Training.resume(student, path, other, told)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(BadFile, match="torn"):
        Training.resume(student, path, settings, {"of": "a test"})


def test_minutes_end_it_too(student: Student) -> None:
    training = begun(student, Settings(steps=None, minutes=0.02, batch_tokens=64))
    training.run()
    assert training.step >= 1
    with pytest.raises(InputError, match="steps or minutes"):
        Settings(steps=3, minutes=1.0)


def test_the_teacher_reads_the_document_first(tmp_path: Path) -> None:
    """Its distributions are transformers' behind document and item, whatever its tree has kept of items before."""
    directory, oracle = reading_model(tmp_path)
    engine = Engine(directory, memory="4MiB", dtype="f32")
    context = engine.tokenizer.encode(TEXT)
    writer = Writer(engine.tokenizer)
    made = template_items(writer, 0, TEXT, random.Random(1))
    items = [next(made) for _ in range(12)]
    assert {item.kind for item in items} >= {"template", "gap", "completion", "passage"}
    teacher = Teacher(engine)
    for item in [*items, items[0]]:
        found = teacher.targets(context, item)
        with torch.no_grad():
            logits = oracle(torch.tensor([[*context, *item.tokens]])).logits[0]
        expected = logits[len(context) + item.learnt - 1 : -1].log_softmax(1)
        assert found.ids.shape == (len(item.tokens) - item.learnt, 20)
        assert torch.allclose(found.logs, expected.gather(1, found.ids.long()), atol=1e-4)
        assert torch.allclose(found.logs, expected.topk(20).values, atol=1e-4)
    assert engine.cache.arena.held(0) == 0
    assert batch_of(items).rows.numel() == sum(len(item.tokens) - item.learnt for item in items)


def test_questions_are_made_of_sentences() -> None:
    found = sentences(TEXT)
    assert len(found) == 4
    assert topics(found[0])[:2] == ["the Varde Light", "The Varde Light"] or "Ida Holm" in topics(found[0])
    assert sentences("Short. \n\n Too.") == []
