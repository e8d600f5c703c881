"""Tokenizers of a few hundred tokens, written as GGUF files and as model directories."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from gguf import GGUFWriter
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kvist.engine.sentencepiece import SPACE
from kvist.engine.tokenizer import Tokenizer
from kvist.spec.model import ModelSpec

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def read(path: Path, **config: Any) -> Tokenizer:
    return Tokenizer.read(
        ModelSpec(name=path.stem, source=str(path), layers=(), max_context=0, config=config, path=path)
    )


def write_gguf(folder: Path, **keys: Any) -> Path:
    """A GGUF file with nothing but a tokenizer."""
    path = folder / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    for key, value in keys.items():
        name = f"tokenizer.{key}" if key.startswith("chat_template") else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_directory(folder: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    return folder


def byte_level() -> tokenizers.Tokenizer:
    tokens = {text: index for index, text in enumerate(["<s>", "</s>", "<|im_end|>", *LETTERS, "ab", "Ġa"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=tokens, merges=[("a", "b"), ("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentencepiece_like() -> tokenizers.Tokenizer:
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", f"{SPACE}a"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(texts)}, merges=[(SPACE, "a")], byte_fallback=True,
            unk_token="<unk>", fuse_unk=True,
        )
    )  # fmt: skip
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer
