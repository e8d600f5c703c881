"""Engines behind cartridges: how these are made, asked, and held against the dense student."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cartridge_models import LLAMA, TEXT, reading_model
from served import Case
from served_latent import CASES as LATENT

from kvist.cartridges.student import Batch, Student, from_cache, to_cache
from kvist.cli import main
from kvist.engine.answer import Answer
from kvist.engine.engine import Engine
from kvist.engine.sampler import SamplingParams
from kvist.engine.tokenizer import Tokenizer
from kvist.model.fingerprints import model_digest, rotary_positions
from kvist.spec.model import ModelSpec
from kvist.store.cartridge_file import Cartridge, Manifest

TOKENS = 48
PROMPTS = ["Who built it?", "When was the tower built, and by whom? Say it in one sentence.", "Who?"]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
CASES = {
    "llama": LLAMA,
    # Caps, norms before and behind, windows shorter than the cartridge.
    "gemma2": Case(
        model="Gemma2ForCausalLM",
        config={
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
            "sliding_window": 12, "attn_logit_softcapping": 20.0,
        },
    ),
    # Sinks; all experts of each token, as choosing leaps.
    "gpt_oss": Case(
        model="GptOssForCausalLM",
        config={
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2,
            "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 12, "intermediate_size": 48,
        },
    ),
    "deepseek-v3": LATENT["deepseek-v3"],
}  # fmt: skip


def cartridge_of(directory: Path, *, noise: float = 0.3, tokens: int = TOKENS, seed: int = 0) -> Cartridge:
    """What the model makes of a text, moved at random as training would."""
    spec = ModelSpec.read(directory)
    tokenizer = Tokenizer.read(spec)
    segments = Student(spec, "f32").read(tokenizer.encode(TEXT)[:tokens])
    torch.manual_seed(seed)
    layers = {layer: part + noise * torch.randn_like(part) for layer, part in to_cache(segments).items()}
    manifest = Manifest(
        model=spec.name,
        model_digest=model_digest(spec),
        tokenizer_digest=tokenizer.digest,
        rope=rotary_positions(spec),
        tokens=tokens,
        frozen=1,
        document="varde.txt",
        document_digest=str(seed),
        document_tokens=200,
        seed=seed,
        steps=0,
    )
    return Cartridge.of(manifest, layers)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    reading_model(directory, LLAMA)
    return directory


def engine_of(directory: Path, **settings: Any) -> Engine:
    return Engine(directory, **{"memory": "8MiB", "dtype": "f32", **settings})


def watched(engine: Engine) -> list[torch.Tensor]:
    """The logits of every step from now on."""
    seen: list[torch.Tensor] = []
    run: Callable[[Any], torch.Tensor] = engine.runner.run

    def watch(batch: Any) -> torch.Tensor:
        logits = run(batch)
        seen.append(logits.clone())
        return logits

    engine.runner.run = watch  # type: ignore[method-assign]
    return seen


def started(engine: Engine, prompts: Sequence[str], cartridge: str | Sequence[str] | None, **more: Any) -> list[Answer]:
    answers = []
    for prompt in prompts:
        ids = engine.tokenizer.encode(prompt, special=False)
        answer = Answer(prompt_tokens=len(ids))
        engine.submit(ids, GREEDY, cartridge=cartridge, on_event=answer.add, **more)
        answers.append(answer)
    return answers


def finished(engine: Engine, answers: Sequence[Answer]) -> list[list[int]]:
    while any(answer.finish_reason is None for answer in answers):
        engine.step()
    assert all(answer.finish_reason == "length" for answer in answers)
    assert all(answer.account["planned_bytes"] == answer.account["allocated_bytes"] for answer in answers)
    return [answer.tokens for answer in answers]


def asked(
    engine: Engine, prompts: Sequence[str], cartridge: str | Sequence[str] | None, **more: Any
) -> list[list[int]]:
    return finished(engine, started(engine, prompts, cartridge, **more))


def expected(directory: Path, cartridge: Cartridge, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The dense student's logits before each token of an answer."""
    student = Student(ModelSpec.read(directory), "f32")
    rows = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
    with torch.no_grad():
        batch = Batch(tokens=torch.tensor([[*prompt, *answer[:-1]]]), rows=rows)
        return student.logits(from_cache(cartridge.layers), batch)


def check_against_dense(engine: Engine, names: str | Sequence[str], directory: Path, cartridge: Cartridge) -> None:
    """Logits and tokens behind cartridges of an engine are those of the dense student behind one."""
    logits = watched(engine)
    for prompt in PROMPTS:
        logits.clear()
        (tokens,) = asked(engine, [prompt], names)
        found = torch.cat(logits)
        dense = expected(directory, cartridge, engine.tokenizer.encode(prompt, special=False), tokens)
        assert (found - dense).abs().max() < 1e-4 * max(1.0, float(dense.abs().max()))
        assert tokens == dense.argmax(1).tolist()


OPTIONS = ("--dtype", "f32", "--memory", "8MiB", "--max-tokens", "8", "--temperature", "0", "--ignore-eos", "--raw")
"""Of ``kvist generate``, to answer as :func:`asked` does."""


def check_command(directory: Path, files: Sequence[Path], tokens: list[int], capsys: pytest.CaptureFixture[str]) -> str:
    """``kvist generate`` behind these files answers the first prompt so; returns what it says of them."""
    chosen = [option for file in files for option in ("--cartridge", str(file))]
    assert main(["generate", str(directory), PROMPTS[0], *OPTIONS, *chosen, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens"] == tokens
    return err
