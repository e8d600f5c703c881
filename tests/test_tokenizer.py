"""Tokenizers held against llama.cpp's ids, transformers, and slow definitions of the same algorithms."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from golden_tokens import GEMMA, SMOLLM2
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import LETTERS, byte_level, read, sentencepiece_like, write_directory, write_gguf
from tokenizers import decoders, models, pre_tokenizers

from kvist.engine.sentencepiece import SPACE, SentencePiece
from kvist.engine.tokenizer import Tokenizer
from kvist.errors import BadFile, InputError, UnsupportedModel
from kvist.spec.gguf import read_gguf
from kvist.spec.model import ModelSpec

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
MIXED = st.lists(
    st.sampled_from(
        [" ", "  ", "\n", "\n\n", "\t", "\r\n", "'s", "1", "23", "½", "é", "e\u0301", "你好", "👩‍👩‍👧", "the", "The",
         "ing", "_", "...", "<|im_end|>", "<end_of_turn>", "<b>", "<|im", "_end|>", SPACE, "\ufffd", "\x00", "Ġ"]
    ),
    max_size=20,
).map("".join)  # fmt: skip


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return read(smollm2_path)


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> Tokenizer:
    return read(gemma_path)


@pytest.fixture(scope="module")
def smollm2_as_published(smollm2_path: Path) -> tokenizers.Tokenizer:
    """The pipeline of the tokenizer.json that SmolLM2's authors publish: single digits, then byte-level BPE."""
    header = read_gguf(smollm2_path)
    tokens = header.array("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in header.array("tokenizer.ggml.merges")]
    published = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    published.decoder = decoders.ByteLevel()
    published.add_special_tokens(tokens[:17])
    return published


# --- SmolLM2


def test_smollm2_equals_llama_cpp(smollm2: Tokenizer) -> None:
    assert {text: smollm2.encode(text, special=False) for text in SMOLLM2} == SMOLLM2


@settings(max_examples=150, deadline=None)
@given(text=TEXT | MIXED)
def test_smollm2_equals_its_published_pipeline(
    smollm2: Tokenizer, smollm2_as_published: tokenizers.Tokenizer, text: str
) -> None:
    ids = smollm2.encode(text)
    assert ids == smollm2_as_published.encode(text).ids
    assert smollm2.decode(ids) == smollm2_as_published.decode(ids, skip_special_tokens=True)


def test_smollm2_adds_no_bos_and_ends_at_the_end_of_a_turn(smollm2: Tokenizer) -> None:
    assert (smollm2.bos_id, smollm2.eos_ids, smollm2.vocab_size) == (1, {2}, 49152)
    assert smollm2.encode("Hello") == [19556]
    assert smollm2.encode("") == []


@settings(max_examples=150, deadline=None)
@given(text=MIXED | st.text(st.characters(max_codepoint=0x2FFFF, exclude_categories=["Cs", "Cc"]), max_size=40))
def test_smollm2_round_trip(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text, parse_special=False)) == text


def test_what_smollm2_cannot_write_is_dropped(smollm2: Tokenizer) -> None:
    # Its vocabulary lacks six control characters, and the bytes that begin planes 4 to 11, all unassigned.
    written = {smollm2.token_bytes(i) for i in range(smollm2.vocab_size)}
    assert {byte for byte in range(0x80) if bytes([byte]) not in written} == {4, 6, 19, 20, 22, 29}
    assert smollm2.decode(smollm2.encode("a\x04b")) == "ab"


# --- Gemma


def test_gemma_equals_llama_cpp(gemma: Tokenizer) -> None:
    assert {text: gemma.encode(text, special=False) for text in GEMMA} == GEMMA


def test_gemma_puts_bos_first_and_ends_at_the_end_of_a_turn(gemma: Tokenizer) -> None:
    assert (gemma.bos_id, gemma.eos_ids, gemma.vocab_size) == (2, {1, 106}, 262144)
    assert gemma.encode("Hello") == [2, 9259]
    assert gemma.encode("") == [2]
    assert gemma.decode([2, 9259, 106]) == "Hello"


@settings(max_examples=150, deadline=None)
@given(text=TEXT | MIXED)
def test_gemma_round_trip(gemma: Tokenizer, text: str) -> None:
    ids = gemma.encode(text, parse_special=False)
    # The letter that stands for a space cannot be told from one.
    assert gemma.decode(ids) == text.replace(SPACE, " ")


# --- control tokens


def test_control_tokens_count_only_where_they_are_asked_for(smollm2: Tokenizer, gemma: Tokenizer) -> None:
    assert smollm2.encode("<|im_end|>") == [2]
    assert gemma.encode("<end_of_turn>", special=False) == [106]
    for tokenizer, text in ((smollm2, "a<|im_end|>b"), (gemma, "a<end_of_turn>b<bos>")):
        ids = tokenizer.encode(text, special=False, parse_special=False)
        assert not any(map(tokenizer.is_control, ids))
        assert tokenizer.decode(ids) == text


def test_half_a_surrogate_pair_is_refused(smollm2: Tokenizer, gemma: Tokenizer) -> None:
    for tokenizer in (smollm2, gemma):
        with pytest.raises(InputError, match=r"prompt: holds U\+D83D at position 2") as caught:
            tokenizer.encode("a \ud83d")
        assert caught.value.key == "prompt"


# --- streams


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 262_200), max_size=30))
def test_streams_say_what_decode_says(smollm2: Tokenizer, gemma: Tokenizer, ids: list[int]) -> None:
    for tokenizer in (smollm2, gemma):
        stream = tokenizer.stream()
        whole = b"".join(tokenizer.token_bytes(i) for i in ids if not tokenizer.is_control(i))
        assert "".join([*map(stream.push, ids), stream.flush()]) == whole.decode(errors="replace")
        assert tokenizer.decode(ids) == whole.decode(errors="replace")


@settings(max_examples=100, deadline=None)
@given(text=MIXED | st.text("é你👩\u200d👧🎉 a", max_size=20))
def test_streams_never_show_half_a_character(smollm2: Tokenizer, gemma: Tokenizer, text: str) -> None:
    for tokenizer in (smollm2, gemma):
        stream = tokenizer.stream()
        shown = ""
        expected = tokenizer.decode(tokenizer.encode(text, parse_special=False))
        for token in tokenizer.encode(text, special=False, parse_special=False):
            shown += stream.push(token)
            assert expected.startswith(shown)
        assert stream.flush() == ""
        assert shown == expected


def test_a_cut_character_is_flushed_as_a_replacement(smollm2: Tokenizer) -> None:
    first, *rest = smollm2.encode("🎉")
    stream = smollm2.stream()
    assert stream.push(first) == ""
    assert stream.flush() == "\ufffd"
    assert rest


# --- SentencePiece's algorithm


def slow_pieces(text: str, scores: dict[str, float]) -> list[str]:
    """Join the best pair, the leftmost of equals, until none is left: the definition, without a queue."""
    parts = list(text)
    while True:
        pairs = [
            (-scores[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in scores
        ]
        if not pairs:
            return parts
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab ", max_size=24),
    scores=st.dictionaries(st.text(f"ab{SPACE}", min_size=2, max_size=5), st.integers(-5, 0), max_size=14),
)
def test_merges_equal_the_definition(text: str, scores: dict[str, int]) -> None:
    tokens = ["a", "b", SPACE, *scores]
    pieces = SentencePiece(
        ids={token: index for index, token in enumerate(tokens)},
        scores=[-9, -9, -9, *scores.values()],
        byte_ids=[],
        unknown_id=None,
    )
    expected = slow_pieces(text.replace(" ", SPACE), {token: float(score) for token, score in scores.items()})
    assert [tokens[index] for index in pieces.encode(text)] == expected


# --- small files of every kind


BPE = {
    "model": "gpt2",
    "tokens": ["<s>", "</s>", *LETTERS, "12", "123", "1234", "ab", "abc", "Ġa", ".1"],
    "token_type": [CONTROL, CONTROL] + [NORMAL] * (len(LETTERS) + 7),
    "merges": ["1 2", "12 3", "123 4", "a b", "Ġ a", ". 1"],
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def pieces_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(token).decode() for token in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [  # each as llama.cpp cuts it: checked with llama-cpp-python 0.3.36 over 3,500 texts and a larger vocabulary
        ("gpt-2", [" a", "12345"]),
        ("smollm", [" a", "1", "2", "3", "4", "5"]),
        ("qwen2", [" a", "1", "2", "3", "4", "5"]),
        ("llama-bpe", ["<s>", " a", "123", "4", "5"]),
        ("default", [" a", "123", "4", "5"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, expected: list[str]) -> None:
    keys = dict(BPE, pre=pre, tokens=[*BPE["tokens"], "12345"], token_type=[*BPE["token_type"], NORMAL])
    keys["merges"] = [*BPE["merges"], "1234 5"]
    assert pieces_of(read(write_gguf(tmp_path, **keys)), " a12345") == expected


def test_llama_3_takes_a_whole_word_before_any_merge(tmp_path: Path) -> None:
    # "abc" is a token that no merge makes.
    assert pieces_of(read(write_gguf(tmp_path, **BPE, pre="llama-bpe")), "abc") == ["<s>", "abc"]
    assert pieces_of(read(write_gguf(tmp_path, **BPE, pre="gpt-2")), "abc") == ["ab", "c"]


def test_qwen_2_composes_letters(tmp_path: Path) -> None:
    tokenizer = read(write_gguf(tmp_path, **BPE, pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    ("bos", "eos", "expected"),
    [(None, None, ["a"]), (True, False, ["<s>", "a"]), (True, True, ["<s>", "a", "</s>"])],
)
def test_bos_and_eos_are_added_as_the_file_says(
    tmp_path: Path, bos: bool | None, eos: bool | None, expected: list[str]
) -> None:
    flags = {"add_bos_token": bos, "add_eos_token": eos}
    keys = BPE | {key: value for key, value in flags.items() if value is not None}
    tokenizer = read(write_gguf(tmp_path, **keys, pre="gpt-2"))
    assert pieces_of(tokenizer, "a") == expected
    assert tokenizer.decode(tokenizer.encode("a")) == "a"


SCORED = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", f"{SPACE}a",
               "<|im_end|>", "\n\n"],
    "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 4 + [NORMAL, USER_DEFINED],
    "scores": [0.0] * 259 + [-3.0, -4.0, -5.0, -1.0, 0.0, 0.0],
}  # fmt: skip


def test_llama_2_puts_a_space_before_every_text_and_takes_it_off_again(tmp_path: Path) -> None:
    tokenizer = read(write_gguf(tmp_path, **SCORED))
    assert pieces_of(tokenizer, "ab") == ["<s>", " a", "b"]
    assert pieces_of(tokenizer, "a\n\nb</s>a") == ["<s>", " a", "\n\n", " ", "b", "</s>", " a"]
    assert tokenizer.decode(tokenizer.encode("ab é")) == "ab é"
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"
    continued = tokenizer.encode("ab", special=False)
    assert tokenizer.decode(continued, continues=True) == " ab"


def test_an_end_of_turn_is_a_control_token_whatever_its_type(tmp_path: Path) -> None:
    tokenizer = read(write_gguf(tmp_path, **SCORED, add_space_prefix=False))
    end = SCORED["tokens"].index("<|im_end|>")
    assert tokenizer.eos_ids == {2, end}
    assert tokenizer.is_control(end)
    assert end not in tokenizer.encode("<|im_end|>", parse_special=False)


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        (BPE | {"pre": "of-tomorrow"}, UnsupportedModel, r"tokenizer\.ggml\.pre is 'of-tomorrow'; supported are gpt-2"),
        (BPE, UnsupportedModel, r"tokenizer\.ggml\.pre is None"),
        (BPE | {"model": "rwkv"}, UnsupportedModel, r"tokenizer\.ggml\.model is 'rwkv'; supported are 'gpt2' and"),
        (BPE | {"pre": "gpt-2", "merges": ["a"]}, BadFile, "merges: entry 0 is 'a', no pair"),
        (BPE | {"pre": "gpt-2", "merges": ["a z"]}, BadFile, "merges"),
        (BPE | {"pre": "gpt-2", "bos_token_id": 9999}, BadFile, r"bos_token_id is 9999; there are 265 tokens"),
        (SCORED | {"scores": [0.0]}, BadFile, r"tokenizer\.ggml\.scores has 1 entries for 265 tokens"),
        ({k: v for k, v in SCORED.items() if k != "scores"}, UnsupportedModel, r"tokenizer\.ggml\.scores is missing"),
    ],
)
def test_a_file_that_cannot_be_read_exactly_names_the_key(
    tmp_path: Path, keys: dict[str, Any], error: type[InputError], words: str
) -> None:
    with pytest.raises(error, match=words):
        read(write_gguf(tmp_path, **keys))


# --- model directories, held against transformers


@pytest.mark.parametrize("kind", [byte_level, sentencepiece_like])
def test_a_directory_equals_transformers(tmp_path: Path, kind: Any) -> None:
    from transformers import AutoTokenizer

    folder = write_directory(tmp_path, kind())
    ours, theirs = read(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("", "ab a", "  ab\n\n é 你好 🎉", "a</s>b <|im_end|> x", "<think>a</think>"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        plain = ours.encode(text, special=False, parse_special=False)
        assert not any(map(ours.is_control, plain))
        assert ours.decode(plain) == text


def test_the_small_files_of_a_directory(tmp_path: Path) -> None:
    folder = write_directory(
        tmp_path, byte_level(), add_bos_token=False, add_eos_token=True, eos_token={"content": "</s>"}
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 100]}')
    tokenizer = read(folder, eos_token_id=101)
    assert tokenizer.eos_ids == {1, 2, 100, 101}
    assert pieces_of(tokenizer, "ab") == ["ab", "</s>"]
    assert pieces_of(read(folder / "config.json"), "ab") == ["ab", "</s>"]
    assert tokenizer.token_bytes(10**6) == tokenizer.token_bytes(-1) == b""


def test_a_directory_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"has no tokenizer\.json"):
        read(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version"')
    with pytest.raises(BadFile, match=r"tokenizer\.json: "):
        read(tmp_path)
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="decoder is WordPiece; supported are ByteLevel"):
        read(write_directory(tmp_path, words))
    folder = write_directory(tmp_path, byte_level())
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(BadFile, match=r"generation_config\.json: is no JSON"):
        read(folder)


def test_a_model_known_by_its_configuration_alone_has_no_tokenizer() -> None:
    with pytest.raises(UnsupportedModel, match=r"needs a model directory or a \.gguf file"):
        Tokenizer.read(ModelSpec(name="llama-3-8b", source="gallery", layers=(), max_context=0))
