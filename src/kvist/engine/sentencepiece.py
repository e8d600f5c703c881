"""SentencePiece's BPE over a vocabulary with scores, as GGUF files of the ``llama`` tokenizer carry it.

A text is a row of characters; again and again the two neighbours that together make the best-scored token are
joined, the leftmost first where scores are equal, until no two neighbours make a token. What is still no token is
written as its UTF-8 bytes.

Why not the ``tokenizers`` library: it wants a list of merges, which these files lack. Rebuilding the half million
merges of Gemma's 262,144 tokens takes seconds at every start, and a merge list cannot say "leftmost first" for two
ways to the same token.

Sources: sentencepiece, src/bpe_model.cc; llama.cpp, src/llama-vocab.cpp (llm_tokenizer_spm).
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush

SPACE = "\u2581"
"""Stands for a space in tokens (LOWER ONE EIGHTH BLOCK)."""

# One run of spaces and what follows it: where no token has a space after a letter, no merge crosses its end.
_WORD = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
_CACHED_WORDS = 2**15
_CACHED_LENGTH = 64


class SentencePiece:
    """Encodes plain text; control tokens, user-defined tokens and bos are the caller's.

    Args:
        ids: id by text of the tokens that merges may make.
        scores: by id; a higher one is joined first.
        byte_ids: id of the token of each byte, 256 of them; empty where the vocabulary has none.
        unknown_id: of what no token can write, where there are no bytes; None leaves it out.
    """

    def __init__(
        self,
        *,
        ids: Mapping[str, int],
        scores: Sequence[float],
        byte_ids: Sequence[int],
        unknown_id: int | None,
    ) -> None:
        self._ids = ids
        self._scores = scores
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        self._words_are_apart = not any(SPACE in text.lstrip(SPACE) for text in ids)
        self._cached = lru_cache(maxsize=_CACHED_WORDS)(self._merged)

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, in which spaces are still spaces."""
        text = text.replace(" ", SPACE)
        found: list[int] = []
        for word in _WORD.findall(text) if self._words_are_apart else [text]:
            found += self._cached(word) if len(word) <= _CACHED_LENGTH else self._merged(word)
        return found

    def _merged(self, word: str) -> tuple[int, ...]:
        ids, scores = self._ids, self._scores
        # parts[i] is the symbol that begins at character i, "" where it was joined to one on its left.
        parts = list(word)
        after = list(range(1, len(parts) + 1))
        before = list(range(-1, len(parts) - 1))
        candidates = []
        for left in range(len(parts) - 1):
            token = ids.get(parts[left] + parts[left + 1])
            if token is not None:
                candidates.append((-scores[token], left, parts[left], parts[left + 1]))
        heapify(candidates)
        while candidates:
            _, left, left_part, right_part = heappop(candidates)
            right = after[left]
            # A candidate is stale where either side was joined to something meanwhile.
            if parts[left] != left_part or right == len(parts) or parts[right] != right_part:
                continue
            joined = left_part + right_part
            parts[left], parts[right] = joined, ""
            after[left] = after[right]
            if after[left] < len(parts):
                before[after[left]] = left
                following = parts[after[left]]
                token = ids.get(joined + following)
                if token is not None:
                    heappush(candidates, (-scores[token], left, joined, following))
            if before[left] >= 0:
                preceding = parts[before[left]]
                token = ids.get(preceding + joined)
                if token is not None:
                    heappush(candidates, (-scores[token], before[left], preceding, joined))
        return tuple(token for part in parts if part for token in self._written(part))

    def _written(self, part: str) -> Sequence[int]:
        token = self._ids.get(part)
        if token is not None:
            return (token,)
        if self._byte_ids:
            return [self._byte_ids[byte] for byte in part.encode()]
        return () if self._unknown_id is None else (self._unknown_id,)
