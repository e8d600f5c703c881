"""The bound by which a text is known to be too long before it is tokenised, and tokenising beside other work."""

from __future__ import annotations

import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, read, sentencepiece_like, write_directory
from tokenizers import normalizers

from kvist.engine.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tokenizer]:
    nfkc = byte_level()
    nfkc.normalizer = normalizers.NFKC()
    kinds = {"byte level": byte_level(), "sentencepiece": sentencepiece_like(), "nfkc": nfkc}
    return {
        name: read(write_directory(tmp_path_factory.mktemp("tiny"), tokenizer)) for name, tokenizer in kinds.items()
    }.__getitem__


@pytest.mark.parametrize(("kind", "longest"), [("byte level", 10), ("sentencepiece", 5), ("nfkc", 40)])
def test_the_longest_token(tiny: Callable[[str], Tokenizer], kind: str, longest: int) -> None:
    # <|im_end|>; <unk>; and four times the former, as styled letters are normalised.
    assert tiny(kind).longest_token == longest


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "nfkc"])
@given(
    text=st.lists(
        st.sampled_from(["ab", " a", "𝐀", "Ａ", "가", "ᾂ", "🎉", "<|im_end|>", "</s>", "  ", "\n"]), max_size=30
    ).map("".join)
)
def test_no_text_has_fewer_tokens(tiny: Callable[[str], Tokenizer], kind: str, text: str) -> None:
    tokenizer = tiny(kind)
    for form in (text, unicodedata.normalize("NFD", text)):
        for parse_special in (False, True):
            ids = tokenizer.encode(form, special=False, parse_special=parse_special)
            assert len(form.encode()) <= len(ids) * tokenizer.longest_token


def test_threads_with_and_without_control_tokens_do_not_mix(tmp_path: Path) -> None:
    tokenizer = read(write_directory(tmp_path, byte_level()))
    text = "a<|im_end|>" * 50
    wanted = {special: tokenizer.encode(text, parse_special=special) for special in (False, True)}
    assert wanted[False] != wanted[True]
    wrong: list[bool] = []

    def encode(special: bool) -> None:
        wrong.extend(tokenizer.encode(text, parse_special=special) != wanted[special] for _ in range(100))

    threads = [threading.Thread(target=encode, args=(special,)) for special in (False, True) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 400
    assert not any(wrong)
