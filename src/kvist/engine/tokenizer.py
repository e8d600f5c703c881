"""Text to token ids and back, as the model's own files say."""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from re import Pattern
from typing import Any

from kvist.engine.chat import ChatTemplate, fence_control_tokens
from kvist.engine.gguf_tokenizer import read_gguf_tokenizer
from kvist.engine.tokenizer_files import read_tokenizer_files
from kvist.engine.vocabulary import Vocabulary, any_of
from kvist.errors import InputError, UnsupportedModel
from kvist.spec.model import ModelSpec


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads.

    Attributes:
        bos_id: the beginning of a text, where the model has one.
        eos_ids: every id that ends an answer: eos, and the ends of a turn.
        vocab_size: one more than the highest id; a model's logits may be padded beyond it.
    """

    def __init__(self, vocabulary: Vocabulary, *, name: str) -> None:
        self._vocabulary = vocabulary
        self._control_ids = frozenset(vocabulary.control.values())
        self._pieces: dict[int, bytes] = {}
        self._template = ChatTemplate(vocabulary.templates, vocabulary.variables, name)
        self.bos_id = vocabulary.bos_id
        self.eos_ids = vocabulary.eos_ids
        self.vocab_size = vocabulary.size

    @classmethod
    def read(cls, spec: ModelSpec) -> "Tokenizer":
        """Read the tokenizer beside or inside the model's file.

        Raises:
            UnsupportedModel: there is none, or one of another kind; names the key.
            BadFile: its file is torn.
        """
        if spec.path is None:
            raise UnsupportedModel(
                f"{spec.name}: known by its configuration alone; a tokenizer needs a model directory or a .gguf file"
            )
        if not spec.path.is_dir() and spec.path.suffix != ".json":
            return cls(read_gguf_tokenizer(spec.path), name=spec.name)
        folder = spec.path if spec.path.is_dir() else spec.path.parent
        return cls(read_tokenizer_files(folder, spec.config), name=spec.name)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest text that one id stands for: a text of n times that has n ids at least.

        Not counted is what a tokenizer leaves out, such as white space around words, or letters that it cannot write.
        """
        written = map(self._vocabulary.token_bytes, range(self.vocab_size))
        return max(1, max(map(len, written), default=1) * self._vocabulary.shrinks)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that ids write, and of those that begin and end texts."""
        found = sha256(f"{self.vocab_size} {self.bos_id} {sorted(self.eos_ids)}".encode())
        for token in range(self.vocab_size):
            written = self._vocabulary.token_bytes(token)
            found.update(len(written).to_bytes(4, "little") + written)
        return found.hexdigest()

    def encode(self, text: str, *, special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the ids of ``text``.

        Args:
            text: any Unicode text.
            special: add what the model's files put around a text, such as bos.
            parse_special: control tokens written in the text count as such, as in a prompt of /v1/completions;
                otherwise they are text like any other, as in what a stranger wrote.

        Raises:
            InputError: the text holds half of a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"prompt: holds U+{ord(text[error.start]):04X} at position {error.start}, half of a surrogate pair; "
                f"send whole Unicode characters",
                key="prompt",
            ) from error
        ids = self._vocabulary.encode(text, parse_special)
        return [*self._vocabulary.prefix, *ids, *self._vocabulary.suffix] if special else ids

    def decode(self, ids: Iterable[int], *, continues: bool = False) -> str:
        """Return the text of ``ids`` without control tokens; what is not UTF-8 becomes U+FFFD.

        Args:
            ids: of a whole text; unknown ones write nothing.
            continues: the ids follow others, so that a space at their start belongs to the text. Otherwise the
                space that some tokenizers put before every text is taken off.
        """
        stream = self.stream(continues=continues)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, *, continues: bool = False) -> "DetokenStream":
        """Return a decoder that takes one id at a time; ``continues`` as in :meth:`decode`."""
        return DetokenStream(self, strip_space=self._vocabulary.leading_space and not continues)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what this id writes, control tokens included; it may be a part of a character."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._vocabulary.token_bytes(int(token_id))
        return piece

    def is_control(self, token_id: int) -> bool:
        """Tell whether this id steers the model and is left out of decoded text."""
        return token_id in self._control_ids

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation, through the model's own chat template.

        Control tokens that stand in ``messages`` or ``tools`` are encoded as text: no client can end a turn or
        speak as another role. Without any, the ids are those of transformers' ``apply_chat_template``.

        Raises:
            InputError: the messages are malformed, or the template refuses them.
            UnsupportedModel: the model has no chat template.
        """
        (messages, tools), fence = fence_control_tokens([messages, tools], self._control_pattern)
        prompt = self._template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        if fence.char is None:
            return self.encode(prompt, special=False)
        ids: list[int] = []
        for piece in fence.pieces(prompt):
            ids += self.encode(piece.text, special=False, parse_special=piece.control)
        return ids

    @cached_property
    def _control_pattern(self) -> Pattern[str]:
        return any_of(text for text in self._vocabulary.control if len(text) > 1)


class DetokenStream:
    """Decodes one id at a time, each at the cost of its own bytes.

    A character whose bytes are spread over several tokens is held back until it is whole; bytes that cannot
    become one are replaced by U+FFFD. All pushes and the flush together are what ``Tokenizer.decode`` returns.
    """

    def __init__(self, tokenizer: Tokenizer, *, strip_space: bool) -> None:
        self._tokenizer = tokenizer
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that is now complete, "" while a character is not."""
        if self._tokenizer.is_control(token_id):
            return ""
        return self._shown(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """Return what is held back, as U+FFFD, and begin anew."""
        return self._shown(self._utf8.decode(b"", final=True))

    def _shown(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text
