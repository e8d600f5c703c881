"""Decoders against transformers, in float32, through the scheduler, the cache manager and the runner."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kvist.cache.arena import ArenaLayout
from kvist.cache.grouping import groups_of
from kvist.cache.manager import CacheManager
from kvist.engine.runner import Runner
from kvist.errors import BadFile, InputError, UnsupportedModel
from kvist.scheduler import Limits, Scheduler
from kvist.spec.formats import CacheFormat
from kvist.spec.model import ModelSpec

VOCAB = 320
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = {
    "smollm2": (
        "Llama",
        {
            "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3": (
        "Llama",
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rope_parameters": LLAMA3},
    ),
    "llama-linear-biases": (
        "Llama",
        {
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
            "attention_bias": True, "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "mistral": ("Mistral", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 50}),
    "qwen-2": ("Qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192}),
    "qwen-3": ("Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}),
    "gemma-3": (
        "Gemma3Text",
        {
            "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 64,
            "query_pre_attn_scalar": 200, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3, "final_logit_softcapping": 20.0,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=list(FAMILIES))
def saved(request, tmp_path_factory):
    """A tiny random model of a family: its directory and transformers' own network."""
    import transformers

    family, settings = FAMILIES[request.param]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **settings})
    name = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
    torch.manual_seed(5)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            # Norms and biases that differ from the defaults, weights large enough to make attention choose.
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.3)
            elif "embed" not in key:
                tensor.normal_(0, 0.12)
    directory = tmp_path_factory.mktemp(request.param)
    # Small shards, so that the index is read as well.
    model.save_pretrained(directory, max_shard_size="300KB")
    return directory, model


def runner_of(directory: Path, *, dtype="f32", memory=2**25, block_tokens=16, key=None):
    spec = ModelSpec.read(directory)
    groups = groups_of(spec, CacheFormat(key=key or dtype, value=dtype), block_tokens)
    layout = ArenaLayout.of(groups, memory)
    return Runner(spec, groups, layout, dtype=dtype), groups, layout


def run_greedy(built, prompts, *, budget=2048, steps=4, prefix_cache=True):
    """Run prompts together; return each request's tokens and the logits of its samples."""
    runner, groups, layout = built
    manager = CacheManager(groups, layout, prefix_cache=prefix_cache)
    scheduler = Scheduler(manager=manager, limits=Limits(max_batch_tokens=budget, max_context=4096))
    requests = [scheduler.add(str(n), np.array(prompt, np.int32), steps) for n, prompt in enumerate(prompts)]
    logits = {request.id: [] for request in requests}
    while scheduler.has_work():
        batch = scheduler.step()
        out = runner.run(batch)
        scheduler.commit(batch)
        for row, chunk in zip(out, [c for c in batch.chunks if c.samples], strict=True):
            logits[chunk.request.id].append(row)
            scheduler.append(chunk.request, int(row.argmax()))
            if chunk.request.generated == steps:
                scheduler.finish(chunk.request)
    return [(request, torch.stack(logits[request.id])) for request in requests]


def worst_error(model, results) -> float:
    worst = 0.0
    for request, logits in results:
        tokens = request.sequence.known()[:-1]
        with torch.no_grad():
            expected = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, request.prompt_tokens - 1 :]
        worst = max(worst, float((expected - logits).abs().max() / expected.abs().max()))
    return worst


def prompts_of(*lengths: int, shared: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(lengths))
    prefix = rng.integers(3, VOCAB, shared)
    return [np.concatenate([prefix, rng.integers(3, VOCAB, length)]) for length in lengths]


@pytest.mark.parametrize("budget", [2048, 48], ids=["whole", "chunks"])
def test_logits_equal_transformers(saved, budget):
    directory, model = saved
    built = runner_of(directory)
    results = run_greedy(built, prompts_of(150, 3, 40, 90), budget=budget)
    assert worst_error(model, results) < 1e-4
    assert all(request.first_hit_tokens == 0 for request, _ in results)


def test_a_shared_prefix_changes_nothing(saved):
    directory, model = saved
    built = runner_of(directory)
    # A budget that lets the first prompt be stored in part before the others come, and decodes run beside prompts.
    results = run_greedy(built, prompts_of(20, 7, 33, 1, 64, shared=144), budget=170)
    assert worst_error(model, results) < 1e-4
    assert sum(request.first_hit_tokens for request, _ in results) > 0


def test_a_narrower_key_codec_stays_close(saved):
    directory, model = saved
    built = runner_of(directory, key="bf16")
    assert worst_error(model, run_greedy(built, prompts_of(100, 9), budget=64)) < 0.02


def test_bf16_stays_close(saved):
    directory, model = saved
    results = run_greedy(runner_of(directory, dtype="bf16"), prompts_of(100, 9), budget=64)
    assert worst_error(model, results) < 0.2


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    import transformers

    config = transformers.LlamaConfig(**{**COMMON, **FAMILIES["smollm2"][1]})
    directory = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def resaved(directory: Path, target: Path, change) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((directory / "config.json").read_text())
    return target


def test_a_missing_tensor_is_named(llama, tmp_path):
    target = resaved(llama, tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(BadFile, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        runner_of(target)


def test_a_misshapen_tensor_is_named(llama, tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = torch.ones(95)

    with pytest.raises(BadFile, match=r"model\.norm\.weight.*\[95\].*\[144\]"):
        runner_of(resaved(llama, tmp_path, change))


def test_a_tensor_too_many_is_named(llama, tmp_path):
    def change(tensors):
        tensors["model.layers.0.self_attn.sinks"] = torch.ones(9)

    with pytest.raises(UnsupportedModel, match=r"self_attn\.sinks"):
        runner_of(resaved(llama, tmp_path, change))


def test_a_decoder_inside_a_larger_model_is_found(llama, tmp_path):
    """Models with a vision tower keep their decoder under a longer prefix; the tower is left out."""

    def change(tensors):
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.vision_tower.patch.weight"] = torch.ones(4)

    inner = runner_of(resaved(llama, tmp_path, change))
    prompts = prompts_of(30)
    (_, found), (_, expected) = run_greedy(inner, prompts)[0], run_greedy(runner_of(llama), prompts)[0]
    assert found.equal(expected)


def test_f16_stays_close(llama):
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    assert worst_error(model, run_greedy(runner_of(llama, dtype="f16"), prompts_of(70, 4))) < 0.02


def test_a_type_that_is_not_computed_is_named(llama):
    spec = ModelSpec.read(llama)
    groups = groups_of(spec, CacheFormat(key="int8", value="f32"))
    with pytest.raises(InputError, match="fp8"):
        runner_of(llama, dtype="f32")[0].__class__(spec, groups, ArenaLayout.of(groups, 2**22), dtype="fp8")


def test_a_scaling_that_is_not_computed_is_named(llama, tmp_path):
    import json

    config = json.loads((llama / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    resaved(llama, tmp_path, lambda tensors: None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="dynamic"):
        runner_of(tmp_path)


def test_the_arena_is_what_was_planned_and_tied_embeddings_are_shared(llama):
    runner, _, layout = runner_of(llama)
    assert runner.arena_bytes == layout.total_bytes
    assert runner.decoder.head.weight.data_ptr() == runner.decoder.embedding.data_ptr()
