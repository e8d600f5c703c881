"""What is asked of a cache: pieces of a user's text with what follows them, and facts hidden in them at some depths.

A fact reads ``Note: the colour of the lamp is green.`` It is put between two tokens of a piece, and asked for behind
the piece: once by a question that nobody knew when the cache was pruned, and once by one that stood before it. Its
answer is the likeliest token, or the likeliest of all the colours: multiple choice by likelihood.

Where cartridges are compared, which stand for a whole text, the whole text is the context of every piece, and what
follows it are questions about it with their answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvist.cartridges.evaluation import Question, made_questions
from kvist.cartridges.self_study import Writer
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import InputError

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where facts stand in a piece, as a share of it."""

_THINGS = """
    lamp chair boat hat plate book drum clock flag rope bell kite basket ladder mirror barrel candle bridge
""".split()  # noqa: SIM905
_COLOURS = "red blue green yellow black white brown pink orange purple grey silver".split()  # noqa: SIM905


@dataclass(frozen=True, kw_only=True)
class Fact:
    """Something that was told, and how it is asked for.

    Attributes:
        question: tokens.
        answer: how the answer begins.
        told: the next token, if the fact is remembered.
        choices: next tokens of all answers that might be; the one that was told is among them.
    """

    question: tuple[int, ...]
    answer: tuple[int, ...]
    told: int
    choices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of the text.

    Attributes:
        context: tokens that are read, and pruned.
        following: what comes behind them.
        hidden: the context with facts in it, as long.
        facts: these, by their depth.
        weighed: indices of what follows whose distributions are compared; none: all but the first.
        asked: questions with answers to choose from, each asked right behind the context.
    """

    context: tuple[int, ...]
    following: tuple[int, ...]
    hidden: tuple[int, ...]
    facts: tuple[Fact, ...]
    weighed: tuple[int, ...] = ()
    asked: tuple[Question, ...] = ()

    @property
    def compared(self) -> tuple[int, ...]:
        """Indices of what follows whose distributions are compared."""
        return self.weighed or tuple(range(1, len(self.following)))


def pieces_of(tokenizer: Tokenizer, text: str, *, context: int, following: int, pieces: int, seed: int) -> list[Piece]:
    """Cut a text into pieces, evenly spread over it, and hide facts in each.

    Args:
        tokenizer: the model's.
        text: of enough tokens for one piece.
        context: tokens of a piece.
        following: tokens behind them.
        pieces: most of them that are cut; they do not overlap.
        seed: of things and colours.

    Raises:
        InputError: the text is too short for one piece, or the context for its facts.
    """
    tokens = tokenizer.encode(text, special=False, parse_special=False)
    begin = tokenizer.encode("", special=True)
    size = context - len(begin) + following
    if len(tokens) < size:
        raise InputError(
            f"text: {len(tokens):,} tokens; a piece takes {size:,}: give a longer text or a smaller context",
            key="text",
        )
    count = min(pieces, len(tokens) // size)
    spare = len(tokens) - count * size
    rng = np.random.default_rng(seed)
    colours = _distinct(tokenizer)
    found = []
    for number in range(count):
        start = number * size + spare * number // max(1, count - 1) if count > 1 else 0
        own = tokens[start : start + size]
        hidden, facts = _hide(tokenizer, own[: context - len(begin)], colours, rng)
        found.append(
            Piece(
                context=(*begin, *own[: context - len(begin)]),
                following=tuple(own[context - len(begin) :]),
                hidden=(*begin, *hidden),
                facts=facts,
            )
        )
    return found


def asked_of(
    tokenizer: Tokenizer,
    text: str,
    questions: Sequence[Question] | None,
    *,
    following: int,
    pieces: int,
    seed: int,
) -> list[Piece]:
    """A text as a whole, and conversations about it; facts are hidden in it as in other pieces.

    Args:
        tokenizer: the model's.
        text: that is read.
        questions: about it, in their order; None makes them of its sentences.
        following: tokens of questions and answers behind it, in whole questions.
        pieces: conversations; as many as there are questions for.
        seed: of things and colours.

    Raises:
        InputError: the text is too short for the facts, or holds no sentence.
    """
    begin = tokenizer.encode("", special=True)
    own = tokenizer.encode(text, parse_special=False)[len(begin) :]
    if questions is None:
        # The shortest question takes some ten tokens.
        questions = made_questions(text, Writer(tokenizer), 1 + pieces * following // 10)
    rng = np.random.default_rng(seed)
    colours = _distinct(tokenizer)
    found: list[Piece] = []
    left = list(questions)
    while left and len(found) < pieces:
        tokens: list[int] = []
        weighed: list[int] = []
        while left and (not tokens or len(tokens) + len(left[0].tokens) <= following):
            question = left.pop(0)
            weighed += range(len(tokens) + question.answer, len(tokens) + len(question.tokens))
            tokens += question.tokens
        hidden, facts = _hide(tokenizer, own, colours, rng)
        found.append(
            Piece(
                context=(*begin, *own),
                following=tuple(tokens),
                hidden=(*begin, *hidden),
                facts=facts,
                weighed=tuple(weighed),
                # All pieces have one context.
                asked=() if found else tuple(question for question in questions if question.choices),
            )
        )
    return found


def _distinct(tokenizer: Tokenizer) -> dict[str, int]:
    """Colours whose first tokens differ."""
    first: dict[int, str] = {}
    for colour in _COLOURS:
        first.setdefault(tokenizer.encode(f" {colour}", special=False)[0], colour)
    return {colour: token for token, colour in first.items()}


def _hide(
    tokenizer: Tokenizer, own: Sequence[int], colours: dict[str, int], rng: np.random.Generator
) -> tuple[list[int], tuple[Fact, ...]]:
    things = [str(thing) for thing in rng.permutation(_THINGS)[: len(DEPTHS)]]
    told = [str(colour) for colour in rng.choice(list(colours), len(DEPTHS))]
    notes = [
        tokenizer.encode(f"\nNote: the colour of the {thing} is {colour}.\n", special=False)
        for thing, colour in zip(things, told, strict=True)
    ]
    room = len(own) - sum(map(len, notes))
    if room < len(DEPTHS):
        raise InputError(
            f"context: {len(own):,} tokens hold no {len(DEPTHS)} facts and a text around them; give 256 or more",
            key="context",
        )
    hidden: list[int] = []
    taken = 0
    for depth, note in zip(DEPTHS, notes, strict=True):
        until = int(depth * room)
        hidden += [*own[taken:until], *note]
        taken = until
    hidden += own[taken:room]
    facts = tuple(
        Fact(
            question=tuple(tokenizer.encode(f"\nQuestion: What is the colour of the {thing}?\n", special=False)),
            answer=tuple(tokenizer.encode(f"Answer: The colour of the {thing} is", special=False)),
            told=colours[colour],
            choices=tuple(colours.values()),
        )
        for thing, colour in zip(things, told, strict=True)
    )
    return hidden, facts
