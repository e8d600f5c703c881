"""What a cartridge is worth: questions behind it, behind the whole document, and behind other short memories of it.

All answer the same questions, which none of them knew when it was made: a pruned cache has read the document and
dropped tokens before the question is read. Of each the distributions before the answers' tokens are compared with those
of the model that has the whole document before the question.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvist.batch import Batch, Chunk, Request
from kvist.cache.sequence import Sequence as Stored
from kvist.cartridges.self_study import Writer, template_items
from kvist.cartridges.teacher import Teacher
from kvist.engine.cartridges import Joined, Loaded
from kvist.engine.engine import Engine
from kvist.errors import BadFile, DoesNotFit, InputError
from kvist.spec.pruning import METHODS, Pruning

_CHUNK = 512
# Of questions that are made of the document's sentences: no seed of a training.
_SEED = "evaluation"


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question as a request has it, and its answer.

    Attributes:
        tokens: of both.
        answer: index of the answer's first token.
        choices: the question with each of the answers that might be, as ``tokens``; none where it is not said.
        right: index of ``tokens`` among them.
    """

    tokens: tuple[int, ...]
    answer: int
    choices: tuple[tuple[int, ...], ...] = ()
    right: int = 0


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """How one memory of a document answers.

    Attributes:
        memory: ``document``, ``cartridge``, ``truncated``, or a method of pruning.
        tokens: that it keeps.
        kl: divergence from the whole document's distributions, mean over the answers' tokens, in nats.
        top1_agreement: share of them at which both find the same likeliest.
        likelihood: geometric mean of the probabilities of the answers' tokens.
        answered: tokens of the answers.
    """

    memory: str
    tokens: int
    kl: float
    top1_agreement: float
    likelihood: float
    answered: int

    def to_dict(self) -> dict[str, Any]:
        """As ``kvist cartridge eval --json`` prints it."""
        return asdict(self)


class _Sums:
    def __init__(self) -> None:
        self.kl = self.agreed = self.likelihood = 0.0
        self.rows = 0

    def add(self, reference: Tensor, found: Tensor, answer: Sequence[int]) -> None:
        reference, found = reference.log_softmax(1), found.log_softmax(1)
        self.kl += float((reference.exp() * (reference - found)).sum())
        self.agreed += int((reference.argmax(1) == found.argmax(1)).sum())
        self.likelihood += float(found.gather(1, torch.tensor(answer)[:, None]).double().sum())
        self.rows += len(found)

    def fidelity(self, memory: str, tokens: int) -> Fidelity:
        rows = max(1, self.rows)
        return Fidelity(
            memory=memory,
            tokens=tokens,
            kl=self.kl / rows,
            top1_agreement=self.agreed / rows,
            likelihood=float(np.exp(self.likelihood / rows)),
            answered=self.rows,
        )


def evaluate(
    engine: Engine,
    document: Sequence[int],
    questions: Sequence[Question],
    cartridges: Mapping[str, tuple[Engine, Loaded | Joined]],
    *,
    tokens: int,
    against: Sequence[str] = ("truncated", *METHODS),
    told: Callable[[float], None] = lambda done: None,
) -> list[Fidelity]:
    """Ask questions behind a document, and behind shorter memories of it.

    Args:
        engine: idle, with its cache in the type of computation; answers with the document, and prunes it.
        document: its tokens.
        questions: to ask.
        cartridges: by what they are to be called, each in an engine of this model.
        tokens: that truncation and pruning keep.
        against: ``truncated``, which reads the first tokens alone, and methods of pruning; those that the model cannot
            be pruned by are left out.
        told: hears which share is done.

    Raises:
        InputError: the model does not read as much as document and question.
        DoesNotFit: the cache cannot hold them.
    """
    longest, reads = len(document) + max(len(question.tokens) for question in questions), engine.spec.max_context
    if longest > reads:
        raise InputError(
            f"document: it and a question are {longest:,} tokens, and {engine.model_id} reads {reads:,}; nothing is to "
            f"be held against what it cannot read: name a shorter part",
            key="document",
        )
    teacher = Teacher(engine)
    prunable = any(group.prunable for group in engine.groups)
    methods = [name for name in against if name == "truncated" or prunable]
    names = ["document", *cartridges, *methods]
    sums = {name: _Sums() for name in names}
    teachers = {name: Teacher(other) for name, (other, _) in cartridges.items()}
    pruned = {name: _Pruned(engine, document, f"{name}:{tokens}") for name in methods if name != "truncated"}
    try:
        for number, question in enumerate(questions):
            told(number / len(questions))
            answer, given = question.tokens[question.answer :], (question.tokens, question.answer)
            reference = teacher.logits(document, *given)
            sums["document"].add(reference, reference, answer)
            for name, (_, loaded) in cartridges.items():
                sums[name].add(reference, teachers[name].logits([], *given, behind=loaded), answer)
            if "truncated" in sums:
                sums["truncated"].add(reference, teacher.logits(document[:tokens], *given), answer)
            for name, memory in pruned.items():
                sums[name].add(reference, memory.logits(*given), answer)
    finally:
        for memory in pruned.values():
            memory.release()
    kept = {"document": len(document)} | {name: loaded.tokens for name, (_, loaded) in cartridges.items()}
    return [sums[name].fidelity(name, kept.get(name, tokens)) for name in names]


class _Pruned:
    """A document that was read and pruned; questions are asked of copies of what is left."""

    def __init__(self, engine: Engine, document: Sequence[int], evict: str) -> None:
        self.engine = engine
        self.evict = evict
        pruning = Pruning.read(evict)
        assert pruning is not None
        cache, runner = engine.cache, engine.runner
        self.sequence = cache.begin(np.array(document, np.int32), engine.prefix_key("pruned"))
        self.sequence.pruning = pruning.of_prompt(len(document))
        request = Request(evict, self.sequence, 0)
        while self.sequence.length < len(document):
            chunk = self._reserved(request, _CHUNK)
            runner.run(Batch([chunk], []))
            runner.copy(cache.commit(self.sequence, chunk.start + chunk.count))
            engine.pruner.prune([chunk])
        engine.pruner.forget(evict)

    def _reserved(self, request: Request, budget: int) -> Chunk:
        sequence = request.sequence
        reservation = self.engine.cache.reserve(sequence, budget)
        if not reservation.granted:
            raise DoesNotFit(f"memory: the cache cannot hold {sequence.size} tokens and {self.evict}; give it more")
        self.engine.runner.copy(reservation.copies)
        return Chunk(request, sequence.length, reservation.limit - sequence.length, samples=True)

    def logits(self, tokens: Sequence[int], first: int) -> Tensor:
        """As :meth:`Teacher.logits`."""
        cache, runner = self.engine.cache, self.engine.runner
        fork = cache.fork(self.sequence)
        if fork is None:
            raise DoesNotFit(f"memory: the cache cannot hold a second {self.evict}; give it more")
        runner.copy(fork.copies)
        twin: Stored = fork.sequence
        # It is pruned no further.
        twin.pruning = None
        try:
            for token in tokens[:-1]:
                twin.append(token)
            chunk = self._reserved(Request(f"{self.evict} asked", twin, 0), len(tokens))
            logits = runner.score([chunk])
            runner.copy(cache.commit(twin, chunk.start + chunk.count))
            return logits[first - 1 :]
        finally:
            cache.release(twin, keep=False)

    def release(self) -> None:
        """Give its blocks back."""
        self.engine.cache.release(self.sequence, keep=False)


def read_questions(path: Path, writer: Writer) -> list[Question]:
    """Questions of a file: JSON, a list of ``[question, answer]``; or a line of JSON each, with answers to choose from.

    Such a line is ``{"question": text, "choices": [text, …], "answer": index of the right one}``.

    Raises:
        BadFile: it is written otherwise.
        InputError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"questions: {path}: {error.strerror}", key="questions") from error
    except UnicodeDecodeError as error:
        raise BadFile(f"{path}: is no text in UTF-8 (byte {error.start:,})") from error
    if text.lstrip().startswith("{"):
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        return [_with_choices(f"{path}: line {number}", line, writer) for number, line in lines]
    try:
        pairs = json.loads(text)
    except ValueError as error:
        raise BadFile(f"{path}: no JSON: {error}") from error
    if not isinstance(pairs, list) or not pairs:
        raise BadFile(f"{path}: a list of [question, answer] was expected, or lines of questions with choices")
    found = []
    for number, pair in enumerate(pairs):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) and part for part in pair)):
            raise BadFile(f"{path}: entry {number} is no [question, answer] of two texts")
        item = writer.item("question", 0, pair[0], pair[1])
        found.append(Question(tokens=item.tokens, answer=len(writer.prompt(pair[0]))))
    return found


def _with_choices(where: str, line: str, writer: Writer) -> Question:
    """One line of a file of questions with answers to choose from."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise BadFile(f"{where}: no JSON: {error}") from error
    if not isinstance(entry, dict) or set(entry) != {"question", "choices", "answer"}:
        given = ", ".join(entry) if isinstance(entry, dict) else repr(entry)[:40]
        raise BadFile(f"{where}: {given or 'nothing'}; write question, choices and answer, all three and no more")
    question, choices, right = entry["question"], entry["choices"], entry["answer"]
    if not isinstance(question, str) or not question.strip():
        raise BadFile(f"{where}: question: {question!r}; write a text")
    texts = (
        [choice for choice in choices if isinstance(choice, str) and choice.strip()] if type(choices) is list else []
    )
    if len(texts) < 2 or texts != choices or len(set(texts)) < len(texts):
        raise BadFile(f"{where}: choices: {str(choices)[:60]}; write a list of two or more texts, no two the same")
    if type(right) is not int or not 0 <= right < len(texts):
        raise BadFile(f"{where}: answer: {right!r}; write the right choice's index, from 0 to {len(texts) - 1}")
    tokens = tuple(writer.item("question", 0, question, text).tokens for text in texts)
    return Question(tokens=tokens[right], answer=len(writer.prompt(question)), choices=tokens, right=right)


def made_questions(text: str, writer: Writer, count: int) -> list[Question]:
    """Questions made of the document's own sentences, where nobody has written better ones."""
    made = template_items(writer, 0, text, random.Random(_SEED))
    items = (item for item in made if item.kind != "passage")
    found: list[Question] = []
    while len(found) < count:
        item = next(items)
        found.append(Question(tokens=item.tokens, answer=item.answer))
    return found
