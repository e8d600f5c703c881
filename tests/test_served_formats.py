"""Every codec of keys and of values in the engine, through the scheduler, the cache manager and the runner.

What comes out must be what transformers computes over the very numbers that are stored: in one pass, in chunks, in a
batch of mixed lengths, warm from a prefix, past every window, after forks and preemption.
"""

from dataclasses import replace

import pytest
import torch
from served import Case, Served, Session, build, open_saved, oracle_logits, prompts_of
from served_formats import FormatSession
from served_latent import CASES as LATENT
from served_states import CASES as STATES

from kvist.spec.formats import CacheFormat

pytest.importorskip("transformers")

RELATIVE = 1e-4

# GQA, layers with a window and without, a soft cap.
GEMMA = Case(
    model="Gemma2ForCausalLM",
    config={
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 48,
        "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0,
    },
)  # fmt: skip

FORMATS = [
    CacheFormat(key="int8", value="int4"),
    CacheFormat(key="int4", value="int8", rotate=True),
    CacheFormat(key="int4a", value="fp8"),
    CacheFormat(key="fp8", value="int4a", rotate=True),
    CacheFormat(key="bf16", value="int4", rotate=True),
    CacheFormat(key="int4", value="f16"),
    CacheFormat(key="f32", value="bf16"),
    CacheFormat(key="f16", value="f32"),
    CacheFormat(key="int8", value="int4", rotate=True, keep_layers=1),
    CacheFormat(key="int8", value="int8", layers={0: CacheFormat(key="int4a", value="int4a", rotate=True)}),
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return build(GEMMA, tmp_path_factory.mktemp("gemma"))


def stored_in(served: Served, fmt: CacheFormat, *, memory: int = 2**26) -> Served:
    return open_saved(served.directory, served.oracle, fmt=fmt, memory=memory)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_codec_served(gemma: Served, fmt: CacheFormat) -> None:
    served = stored_in(gemma, fmt)
    # A batch of mixed lengths, prompts in pieces of odd sizes, with decodes between them.
    session = FormatSession(served, budget=37, prefix_cache=False)
    assert session.worst_error(session.run(prompts_of(90, 5, 71, 1), steps=4)) < RELATIVE
    # The second turn begins where the first ended, as far as all groups can reuse it.
    session = FormatSession(served)
    first = session.run(prompts_of(40, 9, shared=96), steps=4)
    assert session.worst_error(first) < RELATIVE
    again = session.run([[*request.sequence.known().tolist(), 5, 6, 7] for request in first], steps=4)
    assert session.worst_error(again) < RELATIVE
    for request in again:
        assert request.first_hit_tokens is not None
        assert request.first_hit_tokens >= 96


@pytest.mark.parametrize("fmt", FORMATS[:2], ids=str)
def test_past_every_window(gemma: Served, fmt: CacheFormat) -> None:
    session = FormatSession(stored_in(gemma, fmt), budget=96)
    assert session.worst_error(session.run(prompts_of(300, 130), steps=40)) < RELATIVE


@pytest.mark.parametrize("fmt", [FORMATS[0], FORMATS[8]], ids=str)
def test_after_forks(gemma: Served, fmt: CacheFormat) -> None:
    """Twins share whole blocks; the open one is copied, codes and scales, and each writes its own behind."""
    session = FormatSession(stored_in(gemma, fmt))
    (prompt,) = prompts_of(75)
    one = session.begin("one", prompt)
    session.advance([one])
    fork = session.manager.fork(one.sequence)
    assert fork is not None
    session.served.runner.copy(fork.copies)
    assert len(fork.copies) >= 2
    two = session.begin("two", prompt)
    two.sequence = fork.sequence
    for step in range(20):
        one.sequence.append(10 + step)
        two.sequence.append(200 - step)
        session.advance([one, two])
    assert session.worst_error([one, two]) < RELATIVE


def test_after_preemption(gemma: Served) -> None:
    fmt = FORMATS[8]
    needed = sum(group.peak_blocks(120, 64) * group.block_bytes for group in stored_in(gemma, fmt).groups)
    session = FormatSession(stored_in(gemma, fmt, memory=needed * 8 // 5), budget=64, max_context=160)
    requests = session.run(prompts_of(40, 44, 50, 36), steps=60)
    assert session.scheduler.counters.preempted > 0
    assert session.worst_error(requests) < RELATIVE


def test_blocks_are_cleared_where_bytes_change_their_meaning(gemma: Served) -> None:
    """Not within one group, nor where all that was ever written is numbers of one type."""
    for fmt, unclean in ((None, []), (FORMATS[0], [0, 1]), (FORMATS[6], [0, 1]), (FORMATS[8], [0, 1, 2, 3])):
        assert open_saved(gemma.directory, gemma.oracle, fmt=fmt).runner.unclean == unclean


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_other_types_compute_with_codes_too(gemma: Served, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's operators; a slab may be lent to another group, whose codes lie where scales were."""
    monkeypatch.setenv("KVIST_KERNELS", "torch")
    fmt = CacheFormat(key="int8", value="int4", rotate=True)
    served = open_saved(gemma.directory, gemma.oracle, dtype=dtype, fmt=fmt)
    with torch.inference_mode():
        served.runner.arena.fill_(0xFF)
    session = FormatSession(served, budget=48)
    assert session.worst_error(session.run(prompts_of(90, 7), steps=6)) < 0.05


def test_latents_in_fp8(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Close to latents as they are computed, and the same in one pass, in pieces and behind a prefix."""
    served = build(LATENT["deepseek-v3"], tmp_path_factory.mktemp("latents"))
    fp8 = open_saved(served.directory, served.oracle, fmt=CacheFormat(key="fp8", value="fp8"))
    assert fp8.groups[0].token_bytes == 2 * (512 + 2 * 64)
    prompts = prompts_of(90, 40, shared=32)
    plain = Session(served).run(prompts, steps=1)
    answers = []
    for budget in (2048, 37):
        session = Session(fp8, budget=budget)
        requests = session.run(prompts, steps=1)
        answers.append(torch.stack([session.logits[request.id][0] for request in requests]))
    exact = torch.stack([oracle_logits(served.oracle, request.sequence.known()[:-1])[-1] for request in plain])
    assert (answers[0] - answers[1]).abs().max() < 0.02 * exact.abs().max()
    assert 1e-4 < (answers[0] - exact).abs().max() / exact.abs().max() < 0.1


@pytest.mark.parametrize("case", ["mamba-2", "jamba", "falcon-h1"])
def test_states_in_bf16(case: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Half the bytes; held is planned, and turns begin where the ones before them ended."""
    served = build(STATES[case], tmp_path_factory.mktemp("states"))
    small = open_saved(served.directory, served.oracle, fmt=CacheFormat(key="f32", value="f32", state="bf16"))
    group, whole = (next(group for group in side.groups if group.lifetime == "state") for side in (small, served))
    assert group.layer == replace(whole.layer, state_codec="bf16")
    session = Session(small, budget=37)
    requests = session.run(prompts_of(90, 7, shared=48), steps=8)
    again = session.run([[*request.sequence.known().tolist(), 5, 6, 7] for request in requests], steps=8)
    assert all(request.first_hit_tokens for request in again)
    worst = 0.0
    for request in (*requests, *again):
        expected = oracle_logits(small.oracle, request.sequence.known()[:-1])[request.prompt_tokens - 1 :]
        ours = torch.stack(session.logits[request.id])
        worst = max(worst, float((expected - ours).abs().max() / expected.abs().max()))
    assert 1e-5 < worst < 0.05


def test_a_large_bias_of_a_key_breaks_four_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As Qwen2's keys have: 8 bits hold, 4 do not, nor with a rotation, which spreads the bias; by channel they do."""
    config = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    served = build(Case(model="Qwen2ForCausalLM", config=config), tmp_path_factory.mktemp("biased"))
    prompt, answer = prompts_of(40, 40)

    def divergence(oracle: Served, key: str, *, rotate: bool) -> float:
        """Mean KL of the answers' tokens from those of a cache in float32, in nats."""
        logits = []
        for fmt in (CacheFormat(key="f32", value="f32"), CacheFormat(key=key, value="f32", rotate=rotate)):
            session = FormatSession(stored_in(oracle, fmt))
            request = session.begin(str(fmt), prompt)
            rows = [session.advance([request])[0]]
            for token in answer:
                request.sequence.append(token)
                rows += session.advance([request])
            logits.append(torch.log_softmax(torch.stack(rows), dim=-1))
        return float((logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean())

    assert stored_in(served, CacheFormat(key="int4", value="int8")).runner.unclean == []
    biased = served.oracle
    with torch.no_grad():
        for layer in biased.model.layers:
            # A channel of low frequency, which positions hardly turn.
            layer.self_attn.k_proj.bias[30] = 30.0
    directory = tmp_path_factory.mktemp("with bias")
    biased.save_pretrained(directory, max_shard_size="300KB")
    with_bias = replace(served, directory=directory)
    plain = divergence(served, "int4", rotate=False)
    eight, four, rotated = (
        divergence(with_bias, key, rotate=rotate) for key, rotate in (("int8", False), ("int4", False), ("int4", True))
    )
    assert eight < 0.01
    assert four > 10 * plain
    assert rotated > 10 * eight
    # Scales of its own take the bias out of a channel, in 4 bits too.
    assert divergence(with_bias, "int4c", rotate=False) < min(plain, four / 10)
