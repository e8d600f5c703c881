"""What vLLM's start-up log says: old and new wording, CPU and GPU, and the refusal to start.

The wording is that of 0.6 (``# GPU blocks``) to 0.32 (size and concurrency in one line).
"""

import re
from dataclasses import dataclass, field
from typing import Any

from kvist.planning.logs.figures import (
    COUNT,
    NUMBER,
    WHOLE,
    count_of,
    named_model,
    value_of,
)

WORDS = (
    b" KV cache size: ", b"KV cache memory", b"Maximum concurrency for ", b"KV cache on node", b"KV cache is needed",
    b"for KV Cache", b"kv_cache_size=", b"non-default args", b"LLM engine (v", b"API server version", b" blocks: ",
    b"max_num_batched_tokens=", b"attention block size to", b"MLA", b"in KV cache (",
)  # fmt: skip
READY = b"Application startup complete"

_START = re.compile(r"API server version ([0-9][0-9.]{0,20})|LLM engine \(v([0-9][0-9.]{0,20})")
_SIZE = re.compile(rf"([A-Z]{{3,5}})(?: \+ host)? KV cache size: {COUNT} tokens")
_CONCURRENCY = re.compile(rf"Maximum concurrency for {COUNT} tokens per request: {NUMBER}x")
_BLOCKS = re.compile(rf"# [A-Za-z]{{1,9}} blocks: {WHOLE}, # CPU blocks")
_MEMORY = (
    re.compile(rf"Available KV cache memory: {NUMBER} GiB"),
    re.compile(rf"set \({NUMBER}/[0-9.]{{1,20}}\) GiB for KV cache on node"),
    re.compile(rf"Reserved {NUMBER} GiB memory for KV Cache"),
    re.compile(rf"reserved for KV Cache is {NUMBER}GiB"),
    re.compile(rf"kv_cache_size={NUMBER}GiB"),
)
_NEEDED = re.compile(rf"max seq len \({WHOLE}\), \(?{NUMBER} GiB KV cache is needed")
_AVAILABLE = re.compile(rf"available KV cache memory \({NUMBER} GiB\)")
_ESTIMATE = re.compile(rf"estimated maximum model length is {WHOLE}")
_STORED = re.compile(rf"max seq len \({WHOLE}\) is larger than .{{0,80}}stored in KV cache \({WHOLE}\)")
_ALIGNED = re.compile(rf"Setting attention block size to {WHOLE} tokens")
_MODEL = re.compile(r"(?<![A-Za-z_])model(?:_tag)?['\"]?[=:] ?['\"]([^'\"]{1,300})['\"]")
_BACKEND = re.compile(r"Using ([A-Za-z_]{0,40}[ _]?MLA[A-Z_]{0,40})(?: attention)? backend")
# Settings by the names under which the log has them.
_KEYS = {
    "max_seq_len": "max_model_len",
    **{
        key: key
        for key in (
            "block_size", "max_model_len", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size",
            "enable_prefix_caching", "max_num_batched_tokens", "max_num_seqs", "mamba_cache_dtype",
            "mamba_ssm_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override", "attention_backend",
            "disable_hybrid_kv_cache_manager", "async_scheduling",
        )
    },
}  # fmt: skip
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32"}


@dataclass
class VllmLog:
    """What lines of one start say.

    Attributes:
        version: as printed.
        model: its name.
        settings: of :data:`kvist.planning.engines.vllm.SETTINGS`.
        memory: for the cache, of each rank that says so.
        blocks: of the pool, where old versions print them.
        tokens: ``KV cache size``, of each rank that prints it.
        length: of the sequences that ``concurrency`` counts.
        concurrency: as printed.
        in_one_line: size and concurrency stand together, as in new versions.
        needed: memory that a refused start would have needed.
        available: what it had, as the refusal says.
        estimate: the longest sequence, as the refusal says.
        aligned: tokens of a block after alignment with states.
        drafts: there is a draft model.
        engine_seen: the engine of this start has said its configuration.
    """

    version: str | None = None
    model: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    memory: list[str] = field(default_factory=list)
    blocks: int | None = None
    tokens: list[int] = field(default_factory=list)
    length: int | None = None
    concurrency: str | None = None
    in_one_line: bool = False
    needed: str | None = None
    available: str | None = None
    estimate: int | None = None
    aligned: int | None = None
    drafts: bool = False
    engine_seen: bool = False

    engine = "vllm"

    @property
    def has_figure(self) -> bool:
        """Whether there is something to hold against the plan."""
        return bool(self.tokens) or self.blocks is not None or self.needed is not None

    def see(self, line: str) -> bool:
        """Take what a line says; False where another start begins, which is not read."""
        if found := _START.search(line):
            if self.has_figure:
                return False
            if found[1] and self.engine_seen:
                # An earlier start that did not come to its cache says nothing of this one.
                self.settings.clear()
                self.memory.clear()
                self.aligned, self.drafts, self.engine_seen = None, False, False
            self.engine_seen |= found[2] is not None
            self.version = found[1] or found[2]
            # Its command line comes next, or the class has none.
            self.settings.setdefault("usage", "server" if found[1] else "offline")
        if "non-default args" in line or "LLM engine (v" in line or "max_num_batched_tokens=" in line:
            self._settings(line)
        for pattern in _MEMORY:
            if found := pattern.search(line):
                self.memory.append(found[1])
                if "on node" in line:
                    self.settings["device"] = "cpu"
        self._figures(line)
        return True

    def _settings(self, line: str) -> None:
        for key, setting in _KEYS.items():
            if (value := value_of(line, key)) is not None:
                # An enumeration is printed with its name.
                self.settings[setting] = value.removeprefix("AttentionBackendEnum.")
        if (dtype := (value_of(line, "dtype") or "").removeprefix("torch.")) in _DTYPES:
            self.settings["dtype"] = _DTYPES[dtype]
        if found := _MODEL.search(line):
            self.model = named_model(found[1])
        self.drafts |= value_of(line, "speculative_config") is not None or "'speculative_config': {" in line

    def _figures(self, line: str) -> None:
        if found := _SIZE.search(line):
            self.tokens.append(count_of(found[2]))
            if found[1].endswith("CPU"):
                self.settings["device"] = "cpu"
        if match := _CONCURRENCY.search(line):
            self.length, self.concurrency = count_of(match[1]), match[2]
            self.in_one_line |= found is not None
        if found := _BLOCKS.search(line):
            self.blocks = int(found[1])
        if found := _NEEDED.search(line):
            self.length, self.needed = int(found[1]), found[2]
            self.available = match[1] if (match := _AVAILABLE.search(line)) else self.available
            self.estimate = int(match[1]) if (match := _ESTIMATE.search(line)) else self.estimate
        if found := _STORED.search(line):
            self.length = int(found[1])
            self.tokens.append(int(found[2]))
        if found := _ALIGNED.search(line):
            self.aligned = int(found[1])
        if found := _BACKEND.search(line):
            self.settings.setdefault("attention_backend", found[1].upper().replace(" ", "_"))
