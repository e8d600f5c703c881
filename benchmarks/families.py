"""Every family on random weights of middling size: kvist against transformers' own ``generate``, in one process.

    python benchmarks/families.py
    python benchmarks/families.py --family deepseek-v3 --rounds 5 --dtype f32

Both compute the same weights, in the same type, with the same threads, on prompts that are used once, by turns. kvist
is scheduler, cache and runner as its engine has them; transformers takes the attention that it chooses by itself, and
of its dynamic and static caches the one that was faster in the warm-up.

*prefill* is prompt tokens over the time until all streams have their first token; *decode* is the tokens after that
over the time that they take. Cache bytes are those of the blocks that kvist's sequences hold at the end, and of all
tensors in transformers' cache. *error* is the largest difference of a logit behind the first prompt, relative to the
largest logit: what the type's rounding makes of random weights.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvist.cache.grouping import groups_of
from kvist.cache.layout import ArenaLayout
from kvist.cache.manager import CacheManager
from kvist.engine.runner import Runner
from kvist.errors import KvistError
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec
from kvist.units import format_size

PROMPT, ANSWER = 1024, 64
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
COMMON = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# transformers' class, and what differs from COMMON (None leaves a key out). Heads are as wide as published, and as many
# share a key; windows and chunks end within the prompt.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-2": (
        "GPT2LMHeadModel",
        {"hidden_size": None, "n_embd": 768, "num_hidden_layers": None, "n_layer": 8, "n_head": 12, "n_positions": 2048}
        | {"max_position_embeddings": None},
    ),
    "llama": (
        "LlamaForCausalLM",
        {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4},
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"hidden_size": 1024, "intermediate_size": 2048, "head_dim": 128}
        | {"num_attention_heads": 16, "num_key_value_heads": 8},
    ),
    "gemma-3": (
        "Gemma3ForCausalLM",
        {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 12, "head_dim": 256}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {"intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 384}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        | {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
        | {"moe_intermediate_size": 256, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {"intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64}
        | {"num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128, "tie_word_embeddings": False},
    ),
    "mamba-2": (
        "Mamba2ForCausalLM",
        {"num_hidden_layers": 16, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1}
        | {"max_position_embeddings": None},
    ),
    "jamba": (
        "JambaForCausalLM",
        {"intermediate_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "num_experts": 8}
        | {"num_experts_per_tok": 2, "use_mamba_kernels": False},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {"intermediate_size": 2048, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    ),
    "falcon-h1": (
        "FalconH1ForCausalLM",
        {"intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
        | {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1},
    ),
    "llama-4": (
        "Llama4ForCausalLM",
        {"intermediate_size": 768, "intermediate_size_mlp": 2048, "num_attention_heads": 10, "num_key_value_heads": 2}
        | {"head_dim": 128, "num_local_experts": 8, "interleave_moe_layer_step": 2, "attention_chunk_size": 512},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"intermediate_size": 768, "num_attention_heads": 12, "num_key_value_heads": 3, "num_local_experts": 8},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Seconds until all streams had a token and until the end, and bytes of the cache then."""

    prefill: float
    total: float
    cache_bytes: int


class Ours:
    """kvist on a saved model."""

    def __init__(self, directory: Path, dtype: str) -> None:
        spec = ModelSpec.read(directory)
        self.groups = groups_of(spec.computed_in(dtype), CacheFormat(key=dtype, value=dtype))
        self.layout = ArenaLayout.of(self.groups, 2**30)
        self.runner = Runner(spec, self.groups, self.layout, dtype=dtype)
        self.first: Tensor | None = None

    def __call__(self, prompts: np.ndarray[Any, Any], answer: int) -> Outcome:
        """Answer ``[batch, tokens]`` greedily from an empty cache."""
        manager = CacheManager(self.groups, self.layout)
        scheduler = Scheduler(manager=manager, limits=Limits())
        requests = [scheduler.add(str(number), prompt, answer) for number, prompt in enumerate(prompts)]
        begun = time.perf_counter()
        prefill, waiting, self.first, held = 0.0, len(requests), None, 0
        while scheduler.has_work():
            batch = scheduler.step()
            self.runner.copy(batch.copies)
            out = self.runner.run(batch)
            self.runner.copy(scheduler.commit(batch))
            held = max(held, sum(manager.held_bytes(request.sequence) for request in requests))
            tokens = out.argmax(-1).tolist()
            for row, chunk in enumerate(chunk for chunk in batch.chunks if chunk.samples):
                request = chunk.request
                if request is requests[0] and self.first is None:
                    self.first = out[row]
                scheduler.append(request, tokens[row])
                waiting -= request.generated == 1
                if request.generated == answer:
                    scheduler.finish(request)
            prefill = prefill or (0.0 if waiting else time.perf_counter() - begun)
        return Outcome(prefill=prefill, total=time.perf_counter() - begun, cache_bytes=held)


class Theirs:
    """transformers on the same."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = "dynamic"

    def __call__(self, prompts: np.ndarray[Any, Any], answer: int) -> Outcome:
        """Answer ``[batch, tokens]`` greedily."""
        ids = torch.from_numpy(prompts.astype(np.int64))
        times: list[float] = []

        def watch(_ids: Tensor, _scores: object, **_: object) -> Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        begun = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=answer,
                max_new_tokens=answer,
                stopping_criteria=[watch],
                cache_implementation=None if self.cache == "dynamic" else self.cache,
                return_dict_in_generate=True,
            )
        return Outcome(prefill=times[0] - begun, total=times[-1] - begun, cache_bytes=tensor_bytes(out.past_key_values))

    def choose_cache(self, prompts: np.ndarray[Any, Any]) -> None:
        """Take the cache that is faster on these prompts; recurrent models have but one."""
        seconds = {}
        for self.cache in ("dynamic", "static"):
            try:
                self(prompts, 4)
                seconds[self.cache] = self(prompts, 16).total
            except Exception:  # whatever it is, this model has no static cache
                if not seconds:
                    raise
        self.cache = min(seconds, key=seconds.__getitem__)

    def first(self, prompt: np.ndarray[Any, Any]) -> Tensor:
        """Logits behind one prompt."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.from_numpy(prompt.astype(np.int64))[None], logits_to_keep=1).logits
        return logits[0, -1].float()


def tensor_bytes(thing: object) -> int:
    """Bytes of all tensors in a cache's layers."""
    if isinstance(thing, Tensor):
        return thing.nbytes
    if isinstance(thing, list | tuple):
        return sum(map(tensor_bytes, thing))
    if isinstance(thing, dict):
        return sum(map(tensor_bytes, thing.values()))
    return tensor_bytes(vars(thing)) if type(thing).__module__ == "transformers.cache_utils" else 0


def saved(name: str, dtype: str, directory: Path) -> Any:
    """Make transformers' model of a family and save it."""
    import transformers

    kind, config = FAMILIES[name]
    keys = {key: value for key, value in {**COMMON, **config}.items() if value is not None} | NO_TOKENS
    network = getattr(transformers, kind)
    torch.manual_seed(1)
    model = network(network.config_class(**keys)).to(DTYPES[dtype]).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    return model


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one family and batch; medians in tokens a second, bytes."""

    family: str
    parameters: int
    batch: int
    prefill: tuple[float, float]
    decode: tuple[float, float]
    cache_bytes: tuple[int, int]
    cache: str
    error: float


def measure(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """Run one family, both sides by turns."""
    rng = np.random.default_rng(3)
    with tempfile.TemporaryDirectory() as folder:
        model = saved(name, args.dtype, Path(folder))
        ours = Ours(Path(folder), args.dtype)
    theirs = Theirs(model)
    vocab = int(model.config.vocab_size)

    def prompts(batch: int) -> np.ndarray[Any, Any]:
        return rng.integers(3, vocab, (batch, PROMPT), np.int32)

    for batch in args.batches:
        some = prompts(batch)
        ours(some[:, :128], 4)
        theirs.choose_cache(some[:, :256])
        found: dict[str, list[Outcome]] = {"ours": [], "theirs": []}
        for number in range(args.rounds):
            asked = prompts(batch)
            sides: list[tuple[str, Any]] = [("ours", ours), ("theirs", theirs)]
            for side, answer in sides if number % 2 else sides[::-1]:
                found[side].append(answer(asked, ANSWER + 1))
        assert ours.first is not None
        expected = theirs.first(asked[0])
        prefill, decode = (
            tuple(statistics.median(tokens / seconds(one) for one in found[side]) for side in found)
            for tokens, seconds in (
                (batch * PROMPT, lambda one: one.prefill),
                (batch * ANSWER, lambda one: one.total - one.prefill),
            )
        )
        yield Row(
            family=name,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            batch=batch,
            prefill=prefill,
            decode=decode,
            cache_bytes=(found["ours"][-1].cache_bytes, found["theirs"][-1].cache_bytes),
            cache=theirs.cache,
            error=float((ours.first - expected).abs().max() / expected.abs().max()),
        )


HEADER = (
    "| family | parameters | batch | prefill tok/s | transformers | × | decode tok/s | transformers | × "
    "| cache | transformers | × | error |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    """One row of the table; ratios are above 1 where kvist is ahead."""
    cells = [row.family, f"{row.parameters / 1e6:.0f} M", str(row.batch)]
    for ours, theirs in (row.prefill, row.decode):
        cells += [f"{ours:,.0f}", f"{theirs:,.0f}", f"**{ours / theirs:.2f}**"]
    ours, theirs = row.cache_bytes
    cells += [format_size(ours), f"{format_size(theirs)} ({row.cache})", f"{theirs / ours:.2f}"]
    return f"| {' | '.join([*cells, f'{row.error:.1e}'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()

    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(HEADER)
    rows: list[Mapping[str, Any]] = []
    for name in args.family:
        try:
            for row in measure(name, args):
                print(line(row), flush=True)
                rows.append(asdict(row))
        except KvistError as error:
            print(f"| {name} | not served: {error} |", flush=True)
        gc.collect()
        if args.json:
            args.json.write_text(json.dumps({"dtype": args.dtype, "rounds": args.rounds, "rows": rows}) + "\n")
    print(f"\n{args.dtype}, {torch.get_num_threads()} threads, medians of {args.rounds} rounds", file=sys.stderr)


if __name__ == "__main__":
    main()
