"""Caches inside transformers on one prompt: bytes held, divergence from the full cache, CPU time a token.

    python benchmarks/transformers_cache.py DIRECTORY TEXT [--prompt 1000] [--tokens 64] [--rounds 3]

DIRECTORY is a model in bf16 with its tokenizer. All caches read one prompt and then the same tokens of the text, one
at a time, so that their distributions can be held against those of ``DynamicCache``. Times are of the process on one
thread, the least of the rounds, which take turns. Caches of transformers that need optimum-quanto or hqq are left out
where these are not installed.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache

from kvist import CacheFormat
from kvist.hf import KvistCache

FORMATS = (
    CacheFormat(),
    CacheFormat(key="int8", value="int8"),
    CacheFormat(key="int8", value="int4"),
    CacheFormat(key="int4a", value="int4a"),
    CacheFormat(key="int4", value="int4", rotate=True),
    CacheFormat(key="int4c", value="int4a"),
)


def caches(config: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "transformers, bf16", lambda: DynamicCache(config=config)
    for backend in ("fp8", "quanto", "hqq"):
        made = {} if backend == "fp8" else {"nbits": 4, "axis_key": 0 if backend == "quanto" else 1}
        try:
            QuantizedCache(backend, config, **made)
        except ImportError:
            continue
        yield (
            f"transformers, {backend} {made.get('nbits', '')}",
            lambda b=backend, m=made: QuantizedCache(b, config, **m),
        )
    for fmt in FORMATS:
        yield f"kvist, {fmt}", lambda fmt=fmt: KvistCache(config, format=fmt)


def held(value: Any, seen: set[int]) -> int:
    """Bytes of every tensor that is reached from here, each storage once."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            return sum(held(getattr(value, name), seen) for name in value.__tensor_flatten__()[0])
        storage = value.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()
    if isinstance(value, dict):
        return sum(held(each, seen) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(held(each, seen) for each in value)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("text", type=Path)
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.directory, dtype=torch.bfloat16).eval()
    ids = AutoTokenizer.from_pretrained(args.directory)(args.text.read_text(), return_tensors="pt").input_ids
    ids = ids[:, : args.prompt + args.tokens]
    print(f"{ids.shape[1] - 1} tokens: MiB held (planned), KL, top-1 agreement, ms a token, prefill s")
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(args.rounds):
        for name, make in caches(model.config):
            row = rows.setdefault(name, {"prefill": [], "token": []})
            cache = make()
            with torch.inference_mode():
                begun = time.process_time()
                logits = [model(ids[:, : args.prompt], cache=cache, logits_to_keep=1).logits[0, -1].float()]
                row["prefill"].append(time.process_time() - begun)
                begun = time.process_time()
                for at in range(args.prompt, ids.shape[1] - 1):
                    logits.append(model(ids[:, at : at + 1], cache=cache).logits[0, -1].float())
                row["token"].append((time.process_time() - begun) / (args.tokens - 1))
            row["logits"] = F.log_softmax(torch.stack(logits), dim=-1)
            ours = isinstance(cache, KvistCache)
            row["held"] = cache.nbytes if ours else sum(held(vars(layer), set()) for layer in cache.layers)
            row["planned"] = cache.planned_bytes if ours else 0
            if len(row["token"]) == args.rounds:
                print(line(name, row, rows["transformers, bf16"]["logits"]), flush=True)


def line(name: str, row: dict[str, Any], full: torch.Tensor) -> str:
    kl = F.kl_div(row["logits"], full, log_target=True, reduction="none").sum(-1).mean()
    same = (row["logits"].argmax(-1) == full.argmax(-1)).float().mean()
    return (
        f"{name:32} {row['held'] / 2**20:7.2f} ({row['planned'] / 2**20:5.2f})  {kl:8.5f}  {same:6.1%}"
        f"  {1000 * min(row['token']):6.1f}  {min(row['prefill']):5.2f}"
    )


if __name__ == "__main__":
    main()
