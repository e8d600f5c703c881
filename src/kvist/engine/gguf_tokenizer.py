"""The tokenizer in a GGUF file's metadata.

Two kinds are read: ``gpt2``, byte-level BPE with merges, and ``llama``, SentencePiece with scores. Both cut the
text at control and user-defined tokens first.

Sources: docs/gguf.md of the ggml repository (keys, token types); llama.cpp, src/llama-vocab.cpp (defaults, pre-
tokenizers); the ``tokenizer.json`` that the models' authors published (normalisation, pre-tokenizers).
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvist.engine.sentencepiece import SPACE, SentencePiece
from kvist.engine.vocabulary import NORMALISED, TURN_ENDS, Vocabulary, any_of, turn_ends
from kvist.errors import BadFile, UnsupportedModel
from kvist.spec.gguf import GGUFHeader, read_gguf

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# tokenizer.ggml.pre: patterns that cut a text one after the other, each match being a piece of its own.
_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_PUNCTUATION}",),
    "qwen2": (rf"{_CONTRACTIONS}|\p{{N}}|{_PUNCTUATION}",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_LLAMA3, _QWEN2 = "llama-bpe", "qwen2"

_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def read_gguf_tokenizer(path: Path) -> Vocabulary:
    """Read the tokenizer of a GGUF file.

    Raises:
        UnsupportedModel: of another kind; names the key.
        BadFile: the file is torn, or its tokenizer contradicts itself.
    """
    header = read_gguf(path)
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _ByteLevel(header).vocabulary()
    if kind == "llama":
        return _Scored(header).vocabulary()
    raise UnsupportedModel(
        f"{header.name}: tokenizer.ggml.model is {kind!r}; supported are 'gpt2' and 'llama'",
        key="tokenizer.ggml.model",
    )


class _Metadata:
    """What both kinds share: token lists, named ids, templates, and the cut at special tokens."""

    default_ids: Mapping[str, int] = {}
    default_bos = False
    leading_space = False
    shrinks = 1

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.tokens: list[str] = header.array("tokenizer.ggml.tokens")
        self.types = self.listed("token_type") or [1] * len(self.tokens)

    def listed(self, key: str) -> list[Any] | None:
        """Return one entry a token, or None where the file has no such list."""
        full = f"tokenizer.ggml.{key}"
        if full not in self.header.metadata:
            return None
        values = self.header.array(full)
        if len(values) != len(self.tokens):
            raise BadFile(
                f"{self.header.name}: {full} has {len(values)} entries for {len(self.tokens)} tokens", key=full
            )
        return values

    def token_id(self, key: str) -> int | None:
        full = f"tokenizer.ggml.{key}"
        value = self.header.metadata.get(full, self.default_ids.get(key))
        if value is None:
            return None
        # Files write -1, as a signed or an unsigned number, for "there is none".
        if value in (-1, 2**32 - 1):
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise BadFile(f"{self.header.name}: {full} is {value!r}; there are {len(self.tokens)} tokens", key=full)
        return value

    def of_type(self, *types: int) -> dict[str, int]:
        return {self.tokens[index]: index for index, kind in enumerate(self.types) if kind in types}

    @cached_property
    def control(self) -> dict[str, int]:
        # Some files call the ends of a turn, or even eos, ordinary tokens: no client may write those.
        named = {self.token_id("bos_token_id"), self.token_id("eos_token_id"), self.token_id("eot_token_id")}
        ends = {index for index, text in enumerate(self.tokens) if text in TURN_ENDS}
        steering = {self.tokens[index]: index for index in named | ends if index is not None}
        return self.of_type(_CONTROL, _UNKNOWN) | steering

    @cached_property
    def user_defined(self) -> dict[str, int]:
        return {text: index for text, index in self.of_type(_USER_DEFINED).items() if text not in self.control}

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.header.metadata.get(f"tokenizer.ggml.{key}", default))

    def vocabulary(self) -> Vocabulary:
        """Put the parts together."""
        bos, eos = self.token_id("bos_token_id"), self.token_id("eos_token_id")
        ends = {eos, self.token_id("eot_token_id"), self.token_id("eom_token_id"), *turn_ends(self.control)}
        return Vocabulary(
            encode=self.encoder(self.plain_encoder()),
            token_bytes=self.token_bytes,
            size=len(self.tokens),
            control=self.control,
            prefix=(bos,) if bos is not None and self.flag("add_bos_token", self.default_bos) else (),
            suffix=(eos,) if eos is not None and self.flag("add_eos_token", False) else (),
            bos_id=bos,
            eos_ids=frozenset(index for index in ends if index is not None),
            leading_space=self.leading_space,
            templates=self.templates(),
            shrinks=self.shrinks,
            variables={
                name: self.tokens[index]
                for name, key in _NAMED_IDS.items()
                if (index := self.token_id(key)) is not None
            },
        )

    def templates(self) -> dict[str, str]:
        prefix = "tokenizer.chat_template"
        return {
            key.removeprefix(prefix).removeprefix(".") or "default": value
            for key, value in self.header.metadata.items()
            if key.startswith(prefix) and isinstance(value, str)
        }

    def encoder(self, plain: Callable[[str], list[int]]) -> Callable[[str, bool], list[int]]:
        user_defined, control = self.user_defined, self.control
        all_ids = control | user_defined
        without_control, with_control = any_of(user_defined), any_of(all_ids)

        def encode(text: str, parse_special: bool) -> list[int]:
            found: list[int] = []
            at = 0
            for match in (with_control if parse_special else without_control).finditer(text):
                if match.start() > at:
                    found += plain(text[at : match.start()])
                found.append(all_ids[match[0]])
                at = match.end()
            return found + plain(text[at:]) if at < len(text) else found

        return encode

    def plain_encoder(self) -> Callable[[str], list[int]]:
        raise NotImplementedError

    def token_bytes(self, index: int) -> bytes:
        raise NotImplementedError


class _ByteLevel(_Metadata):
    """``gpt2``: BPE over bytes that are written as printable letters."""

    def __init__(self, header: GGUFHeader) -> None:
        super().__init__(header)
        name = header.metadata.get("tokenizer.ggml.pre")
        self.pre = _ALIASES.get(str(name), str(name))
        if self.pre not in _PRE_TOKENIZERS:
            raise UnsupportedModel(
                f"{header.name}: tokenizer.ggml.pre is {name!r}; supported are "
                f"{', '.join([*_PRE_TOKENIZERS, *_ALIASES])}",
                key="tokenizer.ggml.pre",
            )
        self.default_bos = self.pre == _LLAMA3

    def plain_encoder(self) -> Callable[[str], list[int]]:
        merges: list[tuple[str, str]] = []
        for number, merge in enumerate(self.header.array("tokenizer.ggml.merges")):
            left, space, right = merge.partition(" ")
            if not space or not right:
                raise BadFile(f"{self.header.name}: tokenizer.ggml.merges: entry {number} is {merge!r}, no pair")
            merges.append((left, right))
        # Without control tokens, so that no merge of plain text can make one.
        ids = {text: index for index, text in enumerate(self.tokens) if text not in self.control}
        try:
            hf = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=self.pre == _LLAMA3))
        except Exception as error:  # the library raises bare Exceptions
            raise BadFile(f"{self.header.name}: tokenizer.ggml.merges: {error}") from error
        hf.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PRE_TOKENIZERS[self.pre]),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        if self.pre == _QWEN2:
            # As in the tokenizer.json that the model was trained with; llama.cpp leaves it out.
            hf.normalizer = normalizers.NFC()
            self.shrinks = NORMALISED
        return lambda text: encode_alone(hf, text)

    def token_bytes(self, index: int) -> bytes:
        if not 0 <= index < len(self.tokens):
            return b""
        text = self.tokens[index]
        if text in self.control or text in self.user_defined:
            return text.encode()
        return bytes_of_letters(text)


class _Scored(_Metadata):
    """``llama``: SentencePiece; the best-scored pair is joined first, and what is left is written as bytes."""

    default_ids = _LLAMA_IDS
    default_bos = True

    def __init__(self, header: GGUFHeader) -> None:
        super().__init__(header)
        self.leading_space = self.flag("add_space_prefix", True)

    def plain_encoder(self) -> Callable[[str], list[int]]:
        scores = self.listed("scores")
        if scores is None or "tokenizer.ggml.precompiled_charsmap" in self.header.metadata:
            key = "tokenizer.ggml.scores" if scores is None else "tokenizer.ggml.precompiled_charsmap"
            raise UnsupportedModel(
                f"{self.header.name}: {key} is {'missing' if scores is None else 'not read'} for a 'llama' tokenizer",
                key=key,
            )
        apart = {_UNKNOWN, _CONTROL, _BYTE}
        pieces = SentencePiece(
            ids={
                text: index
                for index, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
                if kind not in apart and text not in self.control
            },
            scores=scores,
            byte_ids=self.byte_ids,
            unknown_id=self.token_id("unknown_token_id"),
        )
        if self.leading_space:
            return lambda text: pieces.encode(" " + text)
        return pieces.encode

    @cached_property
    def byte_ids(self) -> list[int]:
        written = self.of_type(_BYTE)
        if written and not all(f"<0x{byte:02X}>" in written for byte in range(256)):
            raise BadFile(f"{self.header.name}: tokenizer.ggml.tokens has some byte tokens, but not all 256")
        return [written[f"<0x{byte:02X}>"] for byte in range(256)] if written else []

    def token_bytes(self, index: int) -> bytes:
        if not 0 <= index < len(self.tokens):
            return b""
        text = self.tokens[index]
        if self.types[index] == _BYTE:
            return bytes([int(text[3:5], 16)])
        return text.replace(SPACE, " ").encode()


def encode_alone(hf: Tokenizer, text: str) -> list[int]:
    """Return the ids of one text and let other threads run meanwhile, which ``Tokenizer.encode`` does not."""
    return list(hf.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _letters() -> dict[str, int]:
    """Byte by the letter that stands for it: printable Latin-1 as it is, the rest from U+0100 on.

    Source: GPT-2, src/encoder.py, bytes_to_unicode.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTE_BY_LETTER = _letters()


def bytes_of_letters(text: str) -> bytes:
    """Return the bytes that a byte-level token's letters stand for; any other text as UTF-8."""
    try:
        return bytes([_BYTE_BY_LETTER[letter] for letter in text])
    except KeyError:
        return text.encode()
