"""``kvist check``: whether a plan and the start-up log of an engine agree, and if not by which known effect."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvist.errors import BadFile, UnsupportedModel
from kvist.planning.logs import llama_cpp, sglang, vllm
from kvist.planning.logs.figures import LogCheck
from kvist.planning.logs.lines import MOST_BYTES, lines_with
from kvist.spec.files import open_regular
from kvist.spec.model import ModelSpec

_WORDS = (*vllm.WORDS, *sglang.WORDS, *llama_cpp.WORDS)
# What an engine says once it serves; nothing about its start comes after.
_READY = (vllm.READY, sglang.READY, llama_cpp.READY)


@contextmanager
def open_log(name: str) -> Iterator[IO[bytes]]:
    """Open a log; ``-`` is standard input.

    Raises:
        BadFile: it is not there, may not be read, or is no file.
    """
    if name == "-":
        if sys.stdin is None:
            raise BadFile("log: -: standard input is closed", key="log")
        yield sys.stdin.buffer
        return
    try:
        file = open_regular(Path(name).expanduser())
    except BadFile as error:
        raise BadFile(f"log: {error}; give - and pass it to standard input", key="log") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise BadFile(f"log: {name or repr(name)}: {getattr(error, 'strerror', None) or error}", key="log") from error
    with file:
        yield file


def check_log(
    stream: IO[bytes], spec: ModelSpec, *, source: str = "log", settings: Mapping[str, Any] | None = None
) -> LogCheck:
    """Find the figures of a cache in a log, and hold them against the account of its engine.

    The first start in the log that shows a figure counts; reading ends where the engine says that it serves. The
    engine's settings are taken from the log as well.

    Args:
        stream: the log: of any length, text or not, gzip or not.
        spec: the model that was started.
        source: the log's name, for errors.
        settings: the engine's own, by its own names, where the log does not say them.

    Raises:
        BadFile: there is no figure in it, or it cannot be read.
        InputError: a setting is wrong.
        UnsupportedModel: the account of that engine does not cover the model.
    """
    given = dict(settings or {})
    of_vllm, of_sglang, of_llama = vllm.VllmLog(), sglang.SglangLog(), llama_cpp.LlamaLog()
    logs = (of_vllm, of_sglang, of_llama)
    ready = tuple(word.decode() for word in _READY)
    try:
        for line in lines_with(stream, (*_WORDS, *_READY), source=source):
            if any(log.has_figure for log in logs) and any(word in line for word in ready):
                break
            goes_on = [log.see(line) for log in logs]
            if not all(goes_on):
                break
    except BadFile:
        # What a torn log says before it is torn stands.
        if not any(log.has_figure for log in logs):
            raise
    try:
        if of_vllm.has_figure:
            return vllm.hold(of_vllm, spec, given)
        if of_sglang.has_figure:
            return sglang.hold(of_sglang, spec, given)
        if of_llama.has_figure:
            return llama_cpp.hold(of_llama, spec, given)
    except UnsupportedModel as error:
        # The remedy of a plan, to leave the engine out, is none here.
        why = str(error).removeprefix("engine: ").partition("; plan ")[0]
        raise UnsupportedModel(f"{why}: there is no account to hold the log against", key=error.key) from error
    raise BadFile(
        f"log: {source}: no figure of a cache in its first {MOST_BYTES >> 20} MiB; a start-up of vLLM has 'KV cache "
        f"size', of SGLang 'KV Cache is allocated', of llama.cpp 'llama_kv_cache: size'",
        key="log",
    )
