"""Ask one planner for the bytes of one sequence's cache, from local configurations.

Run by `planners.py` with the interpreter of the planner's own environment, so only the standard library and that
planner are imported. Standard input: JSON, ``{"planner": name, "asks": [{"directory", "tokens"}]}``. Standard output:
one JSON object with the version, then one an ask, in their order: ``{"bytes": …, "seconds": …}``, or ``"refused"`` or
``"crashed"`` with the reason in place of the bytes.

Each planner is asked in bf16, one sequence, no parallelism, through its public functions on the local file. Where its
command wants a hub, the functions behind the command are called with what the hub would have told it; the
comments say what is replaced.

An exception is a refusal where the planner raises it itself, and a crash where Python does: a missing key, a division
by zero.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

Ask = Callable[[Path, int], "float | None"]
GIB = 1024**3


class Refused(Exception):
    """The planner has no number for this model, and says so without raising."""


def kvfit() -> Ask:
    from kvfit.architectures import estimate_cache

    def ask(directory: Path, tokens: int) -> float:
        return float(estimate_cache(config(directory), context_tokens=tokens, kv_bytes=2.0).total_bytes)

    return ask


def ridgepoint() -> Ask:
    import ridgepoint
    from ridgepoint import hf

    # The hub's config.json is the local one; the count of parameters does not enter the cache.
    hf._download_json = lambda repo, filename, revision: config(Path(repo))
    hf._params_from_index = lambda *_: 10**9

    def ask(directory: Path, tokens: int) -> float:
        try:
            answer = ridgepoint.fit(str(directory), "h100-80gb", ctx=tokens, as_json=True)
        except ValueError as error:
            # Its core is not in Python, where the trace would show who raised this.
            raise Refused(str(error)) from error
        return float(json.loads(answer)["capacity"]["bytes_per_seq"])

    return ask


def hf_mem() -> Ask:
    from hf_mem.safetensors.kv_cache import compute_safetensors_kv_cache_size, resolve_kv_cache_dtype

    def ask(directory: Path, tokens: int) -> float:
        # The steps of hf_mem.run between the hub's answer and the sum, with the same conditions.
        found = config(directory)
        kinds = [kind for kind in found.get("architectures", []) if "ForC" in kind]
        if not kinds:
            raise Refused("neither …ForCausalLM nor …ForConditionalGeneration in architectures")
        if any("ForConditionalGeneration" in kind for kind in kinds) and "text_config" in found:
            found = found["text_config"]
        missing = {"hidden_size", "num_hidden_layers", "num_attention_heads"} - set(found)
        if missing:
            raise Refused(f"config.json does not contain {sorted(missing)}")
        dtype = resolve_kv_cache_dtype(found, "bfloat16", None, str(directory))
        return float(compute_safetensors_kv_cache_size(found, dtype, tokens))

    return ask


def vramscout() -> Ask:
    from vramscout import modern_v06, modern_v07

    # A local directory has no count of parameters, without which mixtures of experts are refused: the hub tells it.
    modern_v06._selected_hub_metadata = lambda *_: (10**9, 2 * 10**9)
    apart = ("Model weights", "CUDA / runtime", "Prefill scratch", "Safety reserve")

    def ask(directory: Path, tokens: int) -> float:
        plan = modern_v07.plan_modern(
            str(directory), context=tokens, kv_dtype="bf16", indexer_dtype="bf16", weight_dtype="bf16", vram_gib=141.0
        )
        return GIB * sum(size for part, size in plan.parts_gib.items() if not part.startswith(apart))

    return ask


def sparkfit() -> Ask:
    import sparkfit

    def ask(directory: Path, tokens: int) -> float:
        return float(sparkfit.kv_total_bytes(sparkfit.load_local_config(str(directory)), tokens, 1, "fp16"))

    return ask


def aiconfigurator() -> Ask:
    from aiconfigurator_core.sdk import common
    from aiconfigurator_core.sdk.config import ModelConfig
    from aiconfigurator_core.sdk.models import get_model

    def ask(directory: Path, tokens: int) -> float:
        settings = ModelConfig(kvcache_quant_mode=common.KVCacheQuantMode.bfloat16, moe_tp_size=1, moe_ep_size=1)
        return float(get_model(str(directory), settings, "vllm").get_kvcache_bytes_per_sequence(tokens))

    return ask


def vramcalc() -> Ask:
    from vramcalc.loaders import load_arch
    from vramcalc.memory import kv_cache

    return lambda directory, tokens: float(kv_cache(load_arch(directory), 1, tokens, 2))


def hf_vram_calc() -> Ask:
    from hf_vram_calc import ConfigManager, ConfigParser, VRAMCalculator

    calculator = VRAMCalculator(ConfigManager())

    def ask(directory: Path, tokens: int) -> float:
        parsed = ConfigParser.load_and_parse_config(directory.name, str(directory))
        return GIB * float(calculator.calculate_kv_cache_memory(parsed, "bf16", 1, tokens))

    return ask


def llm_mem_planner() -> Ask:
    from llm_mem_planner import cli

    def ask(directory: Path, tokens: int) -> float:
        dims = cli.load_dims(config(directory))
        # The command counts parameters first, and so refuses what is no latent attention.
        cli.estimate_params(dims)
        index = cli.estimate_nsa_index_cache_gib(dims, batch=1, seq_len=tokens) or 0.0
        return GIB * float(index + cli.estimate_kv_cache_gib(dims, batch=1, seq_len=tokens, kv_dtype_bytes=2))

    return ask


def modelinfo_cli() -> Ask:
    from modelinfo.calculator import calculate_footprint

    def ask(directory: Path, tokens: int) -> float:
        found = calculate_footprint({}, context_length=tokens, config=config(directory))
        if not found["num_layers"] or not found["kv_dim"]:
            raise Refused("config.json does not say it; shapes of tensors would be guessed from")
        return float(found["kv_cache_bytes"])

    return ask


def kvist() -> Ask:
    from kvist import CacheFormat, ModelSpec

    bf16 = CacheFormat(key="bf16", value="bf16")
    return lambda directory, tokens: float(ModelSpec.read(directory / "config.json").sequence_bytes(tokens, bf16))


PLANNERS: dict[str, Callable[[], Ask]] = {
    "kvist": kvist,
    "kvfit": kvfit,
    "vramscout": vramscout,
    "aiconfigurator": aiconfigurator,
    "sparkfit": sparkfit,
    "ridgepoint": ridgepoint,
    "hf-mem": hf_mem,
    "hf-vram-calc": hf_vram_calc,
    "modelinfo-cli": modelinfo_cli,
    "vramcalc": vramcalc,
    "llm-mem-planner": llm_mem_planner,
}


def config(directory: Path) -> dict[str, Any]:
    """The configuration, read anew: a planner may change what it is given."""
    found = json.loads((directory / "config.json").read_text())
    assert isinstance(found, dict)
    return found


def raised_on_purpose(error: BaseException) -> bool:
    """Whether the innermost line of the trace is a ``raise``."""
    if isinstance(error, (Refused, SystemExit)):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return line.strip().startswith("raise")


def answer(ask: Ask, directory: Path, tokens: int) -> dict[str, Any]:
    """One ask: bytes and seconds, or why not."""
    start = perf_counter()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = ask(directory, tokens)
    except (Exception, SystemExit) as error:
        kind = "refused" if raised_on_purpose(error) else "crashed"
        return {kind: f"{type(error).__name__}: {error}"[:300], "seconds": perf_counter() - start}
    return {"bytes": found, "seconds": perf_counter() - start}


def main() -> None:
    report = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    job = json.load(sys.stdin)
    # Nothing may wait for an answer from a person.
    sys.stdin = io.StringIO()
    start = perf_counter()
    ask = PLANNERS[job["planner"]]()
    loaded = {"version": version(job["planner"]), "load_seconds": perf_counter() - start}
    print(json.dumps(loaded), file=report, flush=True)
    for item in job["asks"]:
        print(json.dumps(answer(ask, Path(item["directory"]), item["tokens"])), file=report, flush=True)


if __name__ == "__main__":
    main()
