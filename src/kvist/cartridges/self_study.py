"""Items that teach a document: questions and answers, gaps, and passages, made of the document itself.

Self-study (arXiv:2506.06266) lets the model ask itself about chunks of the document, from seeds of five kinds, so that
the cartridge learns to answer, where reading the text again would make it learn the words by heart. Small models write
poor questions; so sentences are turned into questions and gaps by templates as well, whose answers are true whatever
the model is worth. What is learnt of an item is the distribution of a teacher that has the chunk before it: an item
need not be right, but it must ask what users ask.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from kvist.engine.engine import Engine
from kvist.engine.sampler import SamplingParams
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import InputError, UnsupportedModel

SEEDS: Mapping[str, tuple[str, ...]] = {
    "structure": (
        "In what order does the text above treat its subjects? Where does {topic} come in?",
        "Which part of the text above is about {topic}, and what stands before and after it?",
    ),
    "summary": (
        "Summarise what the text above says about {topic}, with its names and numbers.",
        "Give the facts of the text above about {topic} in one or two sentences.",
    ),
    "question": (
        "Write one short question about {topic} that the text above answers. Write nothing but the question.",
        'The text above says: "{sentence}" Write one short question that this answers, and nothing else.',
    ),
    "use": (
        "How could somebody make use of what the text above says about {topic}?",
        "I have to explain {topic} to a colleague who has not read the text. What should I say?",
    ),
    "creative": (
        "Write two lines of verse about {topic}, true to the text above.",
        "Write a short dialogue in which somebody asks about {topic} and is told what the text above says.",
    ),
}
"""What the model is asked, by kind. The question of ``question`` is asked in turn."""

_ANSWER_TOKENS = 40
_QUESTION_TOKENS = 28
_ABOUT = (
    "What does the text say about {topic}?",
    "Tell me about {topic}.",
    "What do you know about {topic}?",
    "What is said of {topic}?",
)
_GAP = ("Fill in the gap: {gap}", "What is missing here? {gap}", "Complete the sentence with one word: {gap}")
_WHOLE = ("Complete the sentence: {half} …", "How does this go on? {half} …")
_VERBS = "is|are|was|were|has|have|had|can|could|must|may|will|lies|stands|holds|makes|took|gave|became|began|ended"
_STOP = frozenset({
    "the", "a", "an", "this", "that", "these", "those", "it", "he", "she", "they", "we", "in", "on", "at", "by", "for",
    "from", "of", "and", "but", "or", "as", "to", "its",
})  # fmt: skip
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])|\n\s*\n")
# Letters of a sentence; logs, tables and verse go on without an end.
_LONGEST = 400
_NAME = re.compile(r"\b[A-Z][\w'’-]+(?:\s+(?:of|the|de|von|[A-Z][\w'’-]+))*\s+[A-Z][\w'’-]+|\b[A-Z][\w'’-]{2,}")
_FACT = re.compile(r"\b\d[\d,.:/%]*\d\b|\b\d+\b|\b[A-Z][\w'’-]{2,}\b")


@dataclass(frozen=True, kw_only=True)
class Item:
    """What stands behind a document, and what of it is to be learnt.

    Attributes:
        kind: a key of ``SEEDS``, ``template``, ``gap``, ``completion`` or ``passage``.
        chunk: which part of the document its teacher reads.
        tokens: prompt and answer, as a request's prompt and its answer are.
        learnt: index of the first token that is to be foretold.
        answer: index of the answer's first token; 0 where there is no question.
    """

    kind: str
    chunk: int
    tokens: tuple[int, ...]
    learnt: int
    answer: int = 0


class Writer:
    """Puts questions and answers as the model's requests have them: in its chat template, or in plain words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        try:
            # What stands before the question is the same for all, and not to be learnt.
            one, other = (self._chatted(word) for word in ("one", "two"))
            self.chat = True
            same = next(index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
            self.boilerplate = same
        except (UnsupportedModel, InputError, StopIteration):
            self.chat = False
            self.boilerplate = 0

    def _chatted(self, question: str) -> list[int]:
        return self.tokenizer.chat([{"role": "user", "content": question}])

    def prompt(self, question: str) -> list[int]:
        """A request behind the document."""
        if self.chat:
            return self._chatted(question)
        return self.tokenizer.encode(f"\n\nQuestion: {question}\nAnswer:", special=False)

    def item(self, kind: str, chunk: int, question: str, answer: str | Sequence[int]) -> Item:
        """Question and answer, of which all but the template's beginning is learnt."""
        prompt = self.prompt(question)
        if isinstance(answer, str):
            text = answer if self.chat else f" {answer}"
            answer = [*self.tokenizer.encode(text, special=False), *self._end()]
        learnt = max(1, self.boilerplate)
        return Item(kind=kind, chunk=chunk, tokens=(*prompt, *answer), learnt=learnt, answer=len(prompt))

    def passage(self, chunk: int, text: str) -> Item:
        """Some of the document's own words."""
        return Item(kind="passage", chunk=chunk, tokens=tuple(self.tokenizer.encode(text, special=False)), learnt=1)

    def _end(self) -> list[int]:
        return sorted(self.tokenizer.eos_ids)[-1:] if self.chat else self.tokenizer.encode("\n", special=False)


def sentences(text: str) -> list[str]:
    """The sentences of a text, without what is too short to say anything; what is too long is cut between words."""
    parts = (" ".join(part.split()) for part in _SENTENCE.split(text))
    cut = (line for part in parts for line in (wrap(part, _LONGEST) if len(part) > _LONGEST else [part]))
    # Some scripts have no spaces, and say more in a letter.
    return [part for part in cut if len(part.encode()) >= 20 and (" " in part or not part.isascii())]


def topics(sentence: str) -> list[str]:
    """What a sentence is about: its names, else what stands before its verb, else its longest words."""
    names = [name for name in _NAME.findall(sentence) if name.split()[0].lower() not in _STOP]
    subject = re.split(rf"\b(?:{_VERBS})\b", sentence, maxsplit=1)[0].strip(" ,.;:")
    if 3 < len(subject) < 60 and subject != sentence and subject.lower() not in _STOP:
        words = subject.split()
        subject = " ".join([words[0].lower() if words[0].lower() in _STOP else words[0], *words[1:]])
        names.insert(0, subject)
    if not names:
        names = sorted(re.findall(r"[\w'’-]{5,}", sentence), key=len)[-1:] or [sentence]
    return list(dict.fromkeys(names))


def template_items(writer: Writer, chunk: int, text: str, rng: random.Random) -> Iterator[Item]:
    """Items that no model needs to write, without an end: each round takes every sentence once."""
    parts = sentences(text)
    if not parts:
        raise InputError("document: holds no sentence of 20 letters; give a text", key="document")
    kinds: tuple[Callable[[str], Item | None], ...] = (
        lambda sentence: _question(writer, chunk, sentence, rng),
        lambda sentence: _gap(writer, chunk, sentence, rng),
        lambda sentence: _completion(writer, chunk, sentence, rng),
        lambda sentence: _turned(writer, chunk, sentence, rng),
    )
    turn = 0
    while True:
        order = list(range(len(parts)))
        rng.shuffle(order)
        for number, index in enumerate(order):
            made = kinds[(turn + number) % len(kinds)](parts[index])
            yield made or _question(writer, chunk, parts[index], rng)
            if number % 8 == turn % 8:
                yield writer.passage(chunk, " ".join(parts[index : index + 2]))
        turn += 1


def _question(writer: Writer, chunk: int, sentence: str, rng: random.Random) -> Item:
    question = rng.choice(_ABOUT).format(topic=rng.choice(topics(sentence)))
    return writer.item("template", chunk, question, sentence)


def _turned(writer: Writer, chunk: int, sentence: str, rng: random.Random) -> Item | None:
    """``The tower was built in 1911.`` to ``What was built in 1911?`` or ``When was the tower built?``."""
    found = re.match(rf"(.{{3,60}}?)\s+({_VERBS})\s+(.+)$", sentence)
    if found is None:
        return None
    subject, verb, rest = found.groups()
    words = subject.split()
    if words[0].lower() in _STOP:
        words[0] = words[0].lower()
    year = re.search(r"\s+in (\d{4})\b", rest)
    subject_told = " ".join(words)
    if year and rng.random() < 0.5 and verb in ("is", "are", "was", "were"):
        asked = rest[: year.start()] or rest[year.end() :]
        return writer.item("template", chunk, f"When {verb} {subject_told} {asked.strip(' .,')}?", year[1])
    if rng.random() < 0.5:
        return writer.item("template", chunk, f"Who or what {verb} {rest.rstrip('.!;')}?", subject)
    return writer.item("template", chunk, f"What {verb} {subject_told}?", sentence)


def _gap(writer: Writer, chunk: int, sentence: str, rng: random.Random) -> Item | None:
    facts = [found for found in _FACT.finditer(sentence) if found.start()]
    if not facts:
        return None
    fact = rng.choice(facts)
    gap = f"{sentence[: fact.start()]}____{sentence[fact.end() :]}"
    return writer.item("gap", chunk, rng.choice(_GAP).format(gap=gap), fact[0])


def _completion(writer: Writer, chunk: int, sentence: str, rng: random.Random) -> Item | None:
    words = sentence.split()
    if len(words) < 6:
        return None
    cut = rng.randint(len(words) // 3, 2 * len(words) // 3)
    half, rest = " ".join(words[:cut]), " ".join(words[cut:])
    return writer.item("completion", chunk, rng.choice(_WHOLE).format(half=half), rest)


def written_items(
    engine: Engine, writer: Writer, chunk: int, context: Sequence[int], text: str, count: int, rng: random.Random
) -> list[Item]:
    """Items that the model writes itself, reading a chunk.

    Args:
        engine: idle; its prefix tree keeps the chunk between the questions.
        writer: of its tokenizer.
        chunk: number of the chunk.
        context: the chunk's tokens.
        text: the chunk.
        count: of items.
        rng: draws seeds, topics and the engine's own seed.
    """
    parts = sentences(text)
    kinds = list(SEEDS)
    asked: list[tuple[str, str, str]] = []
    for number in range(count):
        kind, sentence = kinds[number % len(kinds)], rng.choice(parts)
        topic = rng.choice(topics(sentence))
        asked.append((kind, rng.choice(SEEDS[kind]).format(topic=topic, sentence=sentence), sentence))
    places = [index for index, (kind, _, _) in enumerate(asked) if kind == "question"]
    prompts = [[*context, *writer.prompt(asked[index][1])] for index in places]
    for index, tokens in zip(places, _answers(engine, prompts, _QUESTION_TOKENS, rng), strict=True):
        question = engine.tokenizer.decode(tokens).strip().split("\n")[0].strip('"* ')
        if not 12 <= len(question) <= 160 or not question.endswith("?"):
            question = rng.choice(_ABOUT).format(topic=rng.choice(topics(asked[index][2])))
        asked[index] = ("question", question, asked[index][2])
    questions = [question.replace("text above", "text") for _, question, _ in asked]
    prompts = [[*context, *writer.prompt(question)] for question in questions]
    answers = _answers(engine, prompts, _ANSWER_TOKENS, rng)
    return [
        writer.item(kind, chunk, question, tokens)
        for (kind, _, _), question, tokens in zip(asked, questions, answers, strict=True)
        if tokens
    ]


def _answers(engine: Engine, prompts: list[list[int]], most: int, rng: random.Random) -> list[list[int]]:
    params = SamplingParams(max_tokens=most, temperature=0.8, top_p=0.95, seed=rng.randrange(2**31))
    return [answer.tokens for answer in engine.generate(prompts, params=params)]
