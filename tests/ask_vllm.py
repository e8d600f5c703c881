"""Asks vLLM what it makes of models and memories: run by vLLM's own interpreter, never imported by a test.

    python ask_vllm.py models < CASES.json      # [{"config", "args", "memory"}, …]
    python ask_vllm.py pools  < CASES.json      # [{"pages", "layers", "length", "in_flight", "aligned", "memory"}, …]

``models`` builds each model on the meta device, no weight and no engine, and lets vLLM's own functions plan the cache:
what is printed is what ``vllm serve`` would print. ``pools`` asks them for layers that no model has.
"""

import json
import logging
import os
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_DIST_IDENT": f"kvist{os.getppid()}",
}

import torch
import torch.multiprocessing
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs


def answer_of(config: Any, groups: Any, vllm_config: Any) -> dict[str, Any]:
    scheduled = kv_cache_utils.generate_scheduler_kv_cache_config([config])
    tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(vllm_config, scheduled)
    return {
        "num_blocks": scheduled.num_blocks,
        "block_bytes": kv_cache_utils._pool_bytes_per_block(vllm_config, groups),
        "tokens": tokens,
        "concurrency": concurrency,
        "needed": kv_cache_utils._max_memory_usage_bytes_from_groups(vllm_config, groups),
        "groups": sorted(len(group.layer_names) for group in groups),
    }


def ask_model(case: dict[str, Any], rank: int = 0, port: int | None = None) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment, parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    args = dict(case["args"])
    ranks = args.get("tensor_parallel_size", 1) * args.get("pipeline_parallel_size", 1)
    # Some classes read the folder again while they are built.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case["config"]))
        asked = EngineArgs(
            model=folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", enforce_eager=True, **args
        ).create_engine_config(UsageContext.LLM_CLASS)
        with set_current_vllm_config(asked):
            if not torch.distributed.is_initialized():
                init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port or free_port()}", rank, "gloo")
            parallel_state.destroy_model_parallel()
            ensure_model_parallel_initialized(
                args.get("tensor_parallel_size", 1), args.get("pipeline_parallel_size", 1)
            )
            build(asked)
            current_platform.update_block_size_for_backend(asked)
            specs = layer_specs(asked)
            gathered: list[Any] = [None] * ranks
            if ranks > 1:
                torch.distributed.all_gather_object(gathered, specs)
            else:
                gathered = [specs]
            try:
                configs = kv_cache_utils.get_kv_cache_configs(asked, gathered, [case["memory"]] * ranks)
            except ValueError as refusal:
                return {"refused": str(refusal)}
            return answer_of(configs[0], configs[0].kv_cache_groups, asked)


def build(asked: Any) -> None:
    """Build the model without memory; some classes look at values, and are then built in full."""
    from vllm.model_executor.model_loader.utils import initialize_model

    before = torch.get_default_dtype()
    torch.set_default_dtype(asked.model_config.dtype)
    try:
        with torch.device("meta"):
            initialize_model(asked)
    except Exception:
        asked.compilation_config.static_forward_context.clear()
        with torch.device("cpu"):
            initialize_model(asked)
    finally:
        torch.set_default_dtype(before)


def layer_specs(asked: Any) -> dict[str, Any]:
    """As ``GPUModelRunner.get_kv_cache_spec`` and ``EngineCore._initialize_kv_caches``."""
    from vllm.config.vllm import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.kv_cache_interface import AttentionSpec
    from vllm.v1.worker.utils import customize_attention_spec

    register_all_kvcache_specs(asked)
    layers = get_layers_from_vllm_config(asked, AttentionLayerBase)
    specs: dict[str, Any] = {}
    for name, layer in layers.items():
        if isinstance(layer, Attention) and layer.kv_sharing_target_layer_name:
            continue
        spec = layer.get_kv_cache_spec(asked)
        if isinstance(spec, AttentionSpec):
            spec = customize_attention_spec(layer.get_attn_backend(), spec)
        if spec is not None:
            specs[name] = spec
    layouts = get_supported_kv_cache_layouts({layer.get_attn_backend(): None for layer in layers.values()})
    resolve_kv_cache_layout(asked, [[layout.name for layout in layouts]], specs.values())
    return specs


def ask_pool(case: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.kv_cache_layout import KVCacheLayout

    mode = "align" if case["aligned"] else "none"

    def spec(page: dict[str, Any]) -> Any:
        page = dict(page)
        kind = page.pop("kind")
        if kind == "state":
            return interface.MambaSpec(
                block_size=page["block_tokens"], shapes=((page["content_bytes"],),), dtypes=(torch.uint8,),
                mamba_cache_mode=mode, num_prefill_checkpoint_blocks=1,
            )  # fmt: skip
        shape = {"block_size": page["block_tokens"], "dtype": torch.uint8, "head_size": page["head_dim"]}
        if kind == "latent":
            return interface.MLAAttentionSpec(num_kv_heads=1, **shape)
        shape |= {"num_kv_heads": page["heads"], "head_size_v": page["value_dim"]}
        match kind:
            case "window":
                return interface.SlidingWindowSpec(sliding_window=page["limit"], **shape)
            case "chunk":
                return interface.ChunkedLocalAttentionSpec(attention_chunk_size=page["limit"], **shape)
            case "cross":
                return interface.CrossAttentionSpec(**shape)
        return interface.FullAttentionSpec(**shape)

    pages = [spec(page) for page in case["pages"]]
    asked: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=case["length"]),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None, mamba_cache_mode=mode, prefix_cache_retention_interval=0,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False, max_num_encoder_input_tokens=4096),
        attention_config=SimpleNamespace(hisparse_config=None),
        max_in_flight_tokens=case["in_flight"],
        speculative_config=None,
    )  # fmt: skip
    register_all_kvcache_specs(asked)
    specs = {f"model.layers.{index}.attn": pages[which] for index, which in enumerate(case["layers"])}
    try:
        groups = kv_cache_utils.get_kv_cache_groups(asked, specs)
    except (NotImplementedError, ValueError) as refusal:
        return {"refused": str(refusal)}
    config = kv_cache_utils.get_kv_cache_config_from_groups(asked, groups, case["memory"])
    return answer_of(config, groups, asked)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def on_rank(rank: int, case: dict[str, Any], port: int, into: str) -> None:
    answer = ask_model(case, rank, port)
    if rank == 0:
        Path(into).write_text(json.dumps(answer))


def ask_ranks(case: dict[str, Any], ranks: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "answer.json"
        torch.multiprocessing.spawn(on_rank, args=(case, free_port(), str(into)), nprocs=ranks)
        return json.loads(into.read_text())


def main(what: str) -> None:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    answers = []
    for case in json.load(sys.stdin):
        if what == "pools":
            answers.append(ask_pool(case))
            continue
        ranks = case["args"].get("tensor_parallel_size", 1) * case["args"].get("pipeline_parallel_size", 1)
        answers.append(ask_model(case) if ranks == 1 else ask_ranks(case, ranks))
    # vLLM prints to standard output too; this is the last line of it.
    print(f"\n{json.dumps(answers)}")


if __name__ == "__main__":
    main(sys.argv[1])
