"""What a model's files say of its tokens, in one form for every kind of file."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from re import Pattern
from typing import TypeAlias

# Branches by their first letter; "" where a text ends.
_Tree: TypeAlias = dict[str, "_Tree"]

# Tokens that end an assistant's turn, by the names that published chat models give them; a model may name only
# its end of text as eos (source: llama.cpp, src/llama-vocab.cpp, special_eot_id).
TURN_ENDS = frozenset({"<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end|>", "<|eom_id|>", "<EOT>", "<turn|>"})

NORMALISED = 4
"""`Vocabulary.shrinks` where a text is normalised: four bytes of a styled letter become one, nine of Korean three."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Text to ids and back, before anything that concerns a request.

    Attributes:
        encode: text, and whether control tokens written in it count as such, to ids; adds no bos or eos.
        token_bytes: what an id writes; empty for an id that there is not.
        size: one more than the highest id.
        control: id by text of the tokens that steer the model and that no answer shows.
        prefix: ids that the model's files put before a text.
        suffix: ids that they put after it.
        bos_id: the beginning of a text, where the model has one.
        eos_ids: every id that ends an answer.
        leading_space: encoding puts a space before the text, which decoding takes off again.
        templates: chat template by name.
        shrinks: bytes of a text, at most, that one byte of a token stands for; above 1 where texts are normalised.
        variables: text by the name under which templates know it, such as ``bos_token``.
    """

    encode: Callable[[str, bool], list[int]]
    token_bytes: Callable[[int], bytes]
    size: int
    control: Mapping[str, int]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    bos_id: int | None
    eos_ids: frozenset[int]
    leading_space: bool
    templates: Mapping[str, str]
    variables: Mapping[str, str]
    shrinks: int = 1


def turn_ends(control: Mapping[str, int]) -> set[int]:
    """Return the ids among ``control`` that end an assistant's turn."""
    return {control[text] for text in TURN_ENDS if text in control}


def any_of(texts: Iterable[str]) -> Pattern[str]:
    """Compile a pattern that matches the longest of ``texts`` at a place; without texts it matches nowhere.

    The texts are folded into a tree by their first letters, so that thousands of them cost a place no more than
    a few comparisons.
    """
    tree: _Tree = {}
    for text in texts:
        branch = tree
        for char in text:
            branch = branch.setdefault(char, {})
        branch[""] = {}
    return re.compile(_alternatives(tree) if tree else "(?!)")


def _alternatives(tree: _Tree) -> str:
    ends = "" in tree
    branches = [re.escape(char) + _alternatives(branch) for char, branch in tree.items() if char]
    if not branches:
        return ""
    whole = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return f"{whole}?" if ends else whole
