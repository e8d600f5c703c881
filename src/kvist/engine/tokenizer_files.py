"""The tokenizer in a model directory: ``tokenizer.json`` and the small files beside it."""

import copy
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvist.engine.gguf_tokenizer import bytes_of_letters, encode_alone
from kvist.engine.sentencepiece import SPACE
from kvist.engine.vocabulary import NORMALISED, Vocabulary, turn_ends
from kvist.errors import BadFile, UnsupportedModel

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def read_tokenizer_files(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Read the tokenizer of a model directory.

    Args:
        folder: with ``tokenizer.json``; ``tokenizer_config.json``, ``special_tokens_map.json``,
            ``generation_config.json`` and ``chat_template.jinja`` are read where they are there.
        config: of the model, for ``eos_token_id`` and ``bos_token_id``.

    Raises:
        UnsupportedModel: there is no ``tokenizer.json``, or its decoder is of another kind.
        BadFile: a file is torn.
    """
    return _Files(folder, config).vocabulary()


class _Files:
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.model_config = config
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedModel(f"{folder}: has no tokenizer.json; save the model with a fast tokenizer")
        try:
            self.hf = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise BadFile(f"{path}: {error}") from error
        self.hf.no_truncation()
        self.hf.no_padding()
        self.config = self.json("tokenizer_config.json")
        self.special_map = self.json("special_tokens_map.json")
        self.added = self.hf.get_added_tokens_decoder()
        self.decoders = self.decoder_steps(path)
        self.plain: Tokenizer | None = None
        self.lock = threading.Lock()

    def json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadFile(f"{path}: is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise BadFile(f"{path}: an object was expected")
        return value

    def decoder_steps(self, path: Path) -> dict[str, dict[str, Any]]:
        decoder = self.hf.decoder
        # Decoders can be looked at only through their pickled state, which is their JSON.
        whole = json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
        steps = {str(step["type"]): step for step in whole.get("decoders", [whole])}
        if not steps.keys() & {"ByteLevel", "ByteFallback", "Metaspace"}:
            raise UnsupportedModel(
                f"{path}: decoder is {', '.join(steps)}; supported are ByteLevel, ByteFallback and Metaspace",
                key="decoder",
            )
        return steps

    def vocabulary(self) -> Vocabulary:
        """Put the parts together."""
        variables = self.variables()
        control = {token.content: index for index, token in self.added.items() if token.special}
        bos = self.id_of(variables.get("bos_token"), "bos_token_id")
        eos = self.id_of(variables.get("eos_token"), None)
        around = self.hf.encode("a", add_special_tokens=True)
        own = [place for place, added in enumerate(around.special_tokens_mask) if not added] or [len(around.ids)]
        return Vocabulary(
            encode=self.encode,
            token_bytes=self.token_bytes,
            size=1 + max(self.hf.get_vocab(with_added_tokens=True).values(), default=-1),
            control=control,
            prefix=self.switched("add_bos_token", bos, tuple(around.ids[: own[0]]), first=True),
            suffix=self.switched("add_eos_token", eos, tuple(around.ids[own[-1] + 1 :]), first=False),
            bos_id=bos,
            eos_ids=frozenset(self.end_ids(eos) | turn_ends(control)),
            leading_space=self.leading_space(),
            templates=self.templates(),
            shrinks=self.shrinks(),
            variables=variables,
        )

    def switched(self, key: str, token: int | None, around: tuple[int, ...], *, first: bool) -> tuple[int, ...]:
        """What the post-processor puts there, with bos or eos put in or left out as the settings say."""
        wanted = self.config.get(key)
        if not isinstance(wanted, bool) or token is None or wanted == (token in around):
            return around
        if not wanted:
            return tuple(index for index in around if index != token)
        return (token, *around) if first else (*around, token)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        return encode_alone(self.hf if parse_special else self.plain_hf(), text)

    def plain_hf(self) -> Tokenizer:
        """The tokenizer to which control tokens are text: the switch belongs to the object, not to a call."""
        with self.lock:
            if self.plain is None:
                plain = copy.deepcopy(self.hf)
                plain.encode_special_tokens = True
                self.plain = plain
            return self.plain

    def shrinks(self) -> int:
        normalizer = self.hf.normalizer
        whole = json.loads(normalizer.__getstate__()) if normalizer is not None else {"normalizers": []}
        steps = {step["type"] for step in whole.get("normalizers", [whole])}
        # Those that write a space in another way keep a text's length or add to it.
        return NORMALISED if steps - {"Replace", "Prepend"} else 1

    def token_bytes(self, index: int) -> bytes:
        added = self.added.get(index)
        text = self.hf.id_to_token(index) if added is None and index >= 0 else None
        if "ByteLevel" in self.decoders:
            return added.content.encode() if added is not None else bytes_of_letters(text or "")
        text = added.content if added is not None else text or ""
        byte = _BYTE_TOKEN.fullmatch(text) if "ByteFallback" in self.decoders else None
        return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE, " ").encode()

    def leading_space(self) -> bool:
        metaspace = self.decoders.get("Metaspace")
        if metaspace is not None:
            return bool(metaspace.get("prepend_scheme", "always") != "never")
        return int(self.decoders.get("Strip", {}).get("start", 0)) > 0

    def variables(self) -> dict[str, str]:
        found = {}
        for name in _NAMED:
            value = self.config.get(name, self.special_map.get(name))
            # Older files write the whole AddedToken.
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[name] = content
        return found

    def id_of(self, text: str | None, config_key: str | None) -> int | None:
        if text is not None:
            return self.hf.token_to_id(text)
        value = self.model_config.get(config_key) if config_key else None
        return value if isinstance(value, int) else None

    def end_ids(self, eos: int | None) -> set[int]:
        found = {eos} if eos is not None else set()
        for source in (self.json("generation_config.json"), self.model_config):
            value = source.get("eos_token_id")
            found |= {index for index in (value if isinstance(value, list) else [value]) if isinstance(index, int)}
        return found

    def templates(self) -> dict[str, str]:
        found: dict[str, str] = {}
        written = self.config.get("chat_template")
        if isinstance(written, str):
            found["default"] = written
        elif isinstance(written, list):
            found = {str(entry.get("name")): str(entry.get("template")) for entry in written}
        files = {"default": self.folder / "chat_template.jinja"}
        files |= {path.stem: path for path in (self.folder / "additional_chat_templates").glob("*.jinja")}
        try:
            return found | {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
        except ValueError as error:
            raise BadFile(f"{self.folder}: a chat template is not UTF-8: {error}") from error
