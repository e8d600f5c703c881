"""transformers' models with kvist's cache: the tokens of its own cache in f32, and of the engine in every format."""

import copy
import doctest
import io
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_tokenizers import byte_level, write_directory
from transformers import DynamicCache

from kvist import CacheFormat, DoesNotFit, Engine, InputError, UnsupportedModel
from kvist.hf import KvistCache
from kvist.kernels.hadamard import hadamard
from kvist.spec.model import ModelSpec
from kvist.store.codecs import Coding

VOCAB, WINDOW, PROMPT, NEW = 300, 20, 37, 16
ENDS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
# Wide weights, so that every answer has many different tokens.
SHAPE = ENDS | {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "initializer_range": 0.4, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS = {
    "llama": ("LlamaConfig", SHAPE | {"num_hidden_layers": 4}),
    "qwen3": ("Qwen3Config", SHAPE | {"num_hidden_layers": 2}),
    "mistral": ("MistralConfig", SHAPE | {"num_hidden_layers": 2, "sliding_window": WINDOW}),
    "gemma3": ("Gemma3TextConfig", SHAPE | {"num_hidden_layers": 6, "sliding_window": WINDOW}),
    "gpt2": (
        "GPT2Config",
        ENDS | {"n_layer": 2, "n_head": 2, "n_embd": 64, "initializer_range": 0.4, "tie_word_embeddings": False},
    ),
}
F32 = CacheFormat(key="f32", value="f32")
FORMATS = {
    "bf16": CacheFormat(),
    "f16": CacheFormat(key="f16", value="f16"),
    "fp8": CacheFormat(key="fp8", value="fp8"),
    "int8": CacheFormat(key="int8", value="int8"),
    "int4": CacheFormat(key="int4", value="int4"),
    "int4a": CacheFormat(key="int8", value="int4a"),
    "rotated": CacheFormat(key="int4", value="int4", rotate=True),
    "kept layers": CacheFormat(key="int4", value="int4", keep_layers=1),
    "single layers": CacheFormat(key="int8", value="int4", layers={1: CacheFormat(key="f32", value="f16")}),
    "tail": CacheFormat(key="int4", value="int8", tail=32),
    "int4c": CacheFormat(key="int4c", value="int4a"),
}


@cache
def model_of(name: str) -> Any:
    kind, keys = CONFIGS[name]
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**keys)).eval()


def prompts(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(seed))


def generate(name: str, ids: torch.Tensor, held: Any, *, padding: int = 0, **more: Any) -> torch.Tensor:
    """Tokens behind ``ids``, of which the first row begins with padding."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    torch.manual_seed(7)
    given = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": mask, "cache": held} | more
    out: torch.Tensor = model_of(name).generate(ids, **given)
    return out[:, ids.shape[1] :]


def both(name: str, fmt: CacheFormat = F32) -> tuple[DynamicCache, KvistCache]:
    config = model_of(name).config
    return DynamicCache(config=config), KvistCache(config, format=fmt)


def check_bytes(held: KvistCache) -> None:
    assert held.planned_bytes == held.allocated_bytes
    assert held.snapshot()["bytes"]["held"] <= held.nbytes


WAYS = {
    "greedy": {"padding": 9},
    "sampling": {"padding": 9, "do_sample": True, "temperature": 0.7, "top_k": 50},
    "beams": {"padding": 9, "num_beams": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CONFIGS)
def test_in_f32_tokens_are_those_of_transformers_own_cache(name: str, way: str) -> None:
    ids = prompts(2, seed=len(name) + len(way))
    own, held = both(name)
    expected, made = (generate(name, ids, each, **WAYS[way]) for each in (own, held))
    assert torch.equal(made, expected)
    assert len(expected[0].unique()) > NEW // 3
    check_bytes(held)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_prompts_may_come_in_chunks(name: str) -> None:
    ids = prompts(1, seed=16)
    own, held = both(name)
    assert torch.equal(generate(name, ids, held, prefill_chunk_size=10), generate(name, ids, own))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_that_are_taken_back_leave_no_trace(name: str) -> None:
    ids = prompts(1, seed=3)[:, :9].repeat(1, 5)
    own, held = both(name)
    expected, made = (generate(name, ids, each, prompt_lookup_num_tokens=4) for each in (own, held))
    assert torch.equal(made, expected)
    assert torch.equal(made, generate(name, ids, DynamicCache(config=model_of(name).config)))
    check_bytes(held)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_crop_and_rows_do_what_they_do_in_transformers(name: str) -> None:
    model, ids = model_of(name), prompts(3, seed=4)
    own, held = both(name)
    seen = []
    for each in (own, held):
        model(ids, cache=each)
        each.activate_past_recording()
        model(ids[:, :7], cache=each)
        each.crop(-5)
        each.batch_select_indices(torch.tensor([2, 0]))
        each.batch_repeat_interleave(2)
        each.crop(0)
        each.reorder_cache(torch.tensor([3, 0, 0, 1]))
        seen.append(model(ids[[0, 1, 2, 0], :4], cache=each).logits)
        each.crop(0)
        seen[-1] = torch.cat((seen[-1], model(ids[:1].repeat(4, 1)[:, :3], cache=each).logits), dim=1)
        each.crop(0)
    assert torch.equal(*seen)
    for mine, theirs in zip(held.layers, own.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
    assert held.get_seq_length() == own.get_seq_length() == PROMPT + 9
    check_bytes(held)


def test_rows_that_were_one_share_their_blocks() -> None:
    _, held = both("llama")
    generate("llama", prompts(1, seed=5), held, num_beams=4)
    sizes = held.snapshot()["bytes"]
    assert sizes["held"] < sizes["allocated"] / 2
    check_bytes(held)


def test_a_conversation_goes_on_in_the_same_cache_and_in_copies_of_it() -> None:
    config, ids = model_of("gemma3").config, prompts(1, seed=6)
    held = KvistCache(config, format=F32)
    first = torch.cat((ids, generate("gemma3", ids, held)), dim=1)
    assert held.get_seq_length() == first.shape[1] - 1
    twin = copy.deepcopy(held)
    for seed, each in ((8, held), (9, twin)):
        turn = torch.cat((first, prompts(1, seed=seed)), dim=1)
        fresh = KvistCache(config, format=F32)
        assert torch.equal(generate("gemma3", turn, each), generate("gemma3", turn, fresh))
        assert each.planned_bytes == fresh.planned_bytes
        check_bytes(each)
    held.reset()
    assert (held.get_seq_length(), held.nbytes, held.rows) == (0, 0, 0)
    assert torch.equal(generate("gemma3", ids, held), first[:, PROMPT:])


@pytest.mark.parametrize("fmt", ["f16", "int8", "int4c"])
@pytest.mark.parametrize("load", [pickle.loads, lambda data: torch.load(io.BytesIO(data), weights_only=False)])
def test_a_cache_can_be_put_away_and_taken_up_again(fmt: str, load: Callable[[bytes], KvistCache]) -> None:
    ids, held = prompts(2, seed=17), KvistCache(model_of("gemma3").config, format=FORMATS[fmt])
    first = torch.cat((ids, generate("gemma3", ids, held)), dim=1)
    file = io.BytesIO()
    pickle.dump(held, file) if load is pickle.loads else torch.save(held, file)
    twin = load(file.getvalue())
    turn = torch.cat((first, prompts(2, seed=18)), dim=1)
    assert torch.equal(generate("gemma3", turn, twin), generate("gemma3", turn, held))
    assert (twin.planned_bytes, twin.nbytes) == (held.planned_bytes, held.nbytes)
    check_bytes(twin)


def test_a_type_that_changes_within_the_first_step_loses_nothing() -> None:
    """What layers have stored is kept, in the type of the first."""
    held = KvistCache(model_of("llama").config, format=CacheFormat(key="int8", value="int8", tail=32))
    given = torch.randn(2, 1, 2, 5, 32, generator=torch.Generator().manual_seed(19))
    for layer, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float32)):
        assert held.update(*given.to(dtype), layer)[0].dtype == dtype
    assert torch.equal(held.layers[0].keys, given[0])
    assert held.get_seq_length() == 5
    check_bytes(held)


def test_under_autocast_keys_may_be_wider_than_values() -> None:
    ids = prompts(1, seed=20)
    own, held = both("qwen3")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(generate("qwen3", ids, held), generate("qwen3", ids, own))
    check_bytes(held)


def test_past_key_values_is_another_name() -> None:
    held = KvistCache(model_of("llama").config, format=F32)
    with pytest.warns(FutureWarning, match="past_key_values"):
        model_of("llama").generate(prompts(1, seed=1), max_new_tokens=2, past_key_values=held)
    assert held.get_seq_length() == PROMPT + 1


# -- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codecs", [("int8", "int4"), ("int4a", "fp8"), ("f16", "bf16"), ("int4", "int4a")])
@pytest.mark.parametrize("rotate", [False, True])
def test_what_comes_back_is_the_codecs_own_round_trip(codecs: tuple[str, str], rotate: bool) -> None:
    held = KvistCache(model_of("gemma3").config, format=CacheFormat(key=codecs[0], value=codecs[1], rotate=rotate))
    generator = torch.Generator().manual_seed(11)
    given = torch.randn(2, 2, 2, 50, 32, generator=generator)
    turn = hadamard(32, torch.float32)
    expected = []
    for side, codec, x in zip(("key", "value"), codecs, given, strict=True):
        turned = rotate and codec not in ("f16", "bf16")
        coding = Coding(codec, side=side, dim=32, tokens=16)
        back = coding.rounded(x @ turn if turned else x)
        expected.append(back @ turn if turned else back)
    for start, end in ((0, 33), (33, 34), (34, 50)):
        for layer in range(6):
            got = held.update(given[0][:, :, start:end], given[1][:, :, start:end], layer)
            window = held.layers[layer].is_sliding
            begin = max(0, start - WINDOW + 1) if window else 0
            assert held.layers[layer].get_mask_sizes(0)[1] == (max(0, end - WINDOW + 1) if window else 0)
            for mine, wanted in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, wanted[:, :, begin:end], rtol=0, atol=2e-6 if rotate else 0)
    check_bytes(held)


def test_tails_are_exact_until_they_are_sealed() -> None:
    fmt = CacheFormat(key="int4c", value="int4a", tail=32)
    held = KvistCache(model_of("llama").config, format=fmt)
    given = torch.randn(2, 1, 2, 80, 32, generator=torch.Generator().manual_seed(12))
    keys = Coding("int4c", side="key", dim=32, tokens=32)
    sealed = keys.rounded(given[0][:, :, :64]), Coding("int4a", side="value", dim=32, tokens=32).rounded(given[1])
    for start, end in ((0, 30), (30, 31), (31, 70), (70, 80)):
        for layer in range(4):
            got = held.update(given[0][:, :, start:end], given[1][:, :, start:end], layer)
            whole = start // 32 * 32
            for mine, exact, coded in zip(got, given, sealed, strict=True):
                assert torch.equal(mine[:, :, :whole], coded[:, :, :whole])
                assert torch.equal(mine[:, :, whole:], exact[:, :, whole:end])
        check_bytes(held)
    held.activate_past_recording()
    for layer in range(4):
        held.update(given[0][:, :, :20], given[1][:, :, :20], layer)
    held.crop(-15)
    assert torch.equal(held.layers[0].keys[:, :, 64:], torch.cat((given[0][:, :, 64:], given[0][:, :, :5]), dim=2))
    check_bytes(held)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        model_of(name).save_pretrained(folder)
        return write_directory(folder, byte_level())

    return save


@pytest.mark.parametrize(
    ("name", "fmt"), [*(("llama", fmt) for fmt in FORMATS), ("gemma3", "int8"), ("gemma3", "int4c")]
)
def test_in_every_format_tokens_and_bytes_are_the_engines(name: str, fmt: str, saved: Callable[[str], Path]) -> None:
    ids = prompts(1, seed=13)
    engine = Engine(str(saved(name)), memory="8MiB", format=FORMATS[fmt], dtype="f32")
    (answer,) = engine.generate([ids[0].tolist()], max_tokens=NEW, temperature=0, ignore_eos=True)
    held = KvistCache(model_of(name).config, format=FORMATS[fmt])
    # The engine seals a prompt's runs as they become whole.
    chunks = {"prefill_chunk_size": 32} if FORMATS[fmt].plain.tail else {}
    assert generate(name, ids, held, **chunks)[0].tolist() == answer.tokens
    assert held.planned_bytes == answer.account["planned_bytes"]
    check_bytes(held)


def test_bytes_are_what_the_layers_say() -> None:
    config, fmt = model_of("gemma3").config, CacheFormat(key="int8", value="int4")
    held = KvistCache(config, format=fmt)
    generate("gemma3", prompts(2, seed=14), held)
    tokens = held.get_seq_length()
    vector = 32 + 2 + 16 + 2
    # Windows keep the blocks of the 19 tokens that the next query sees.
    live = -(-tokens // 16) - (tokens - WINDOW + 1) // 16
    assert held.planned_bytes == 2 * 2 * 16 * vector * (-(-tokens // 16) + 5 * live)
    assert isinstance(held.spec, ModelSpec)
    assert held.planned_bytes <= held.nbytes
    json.dumps(held.snapshot())


# -- what is refused --------------------------------------------------------------------------------------------


def one_line(error: Exception) -> str:
    text = str(error)
    assert "\n" not in text
    return text


CARELESS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "a model": (lambda: KvistCache(model_of("llama")), ("config", "LlamaForCausalLM", ".config")),
    "a name": (lambda: KvistCache("llama"), ("config", "str", "model.config")),
    "a codec": (lambda: KvistCache(model_of("llama").config, format="int8"), ("format", "'int8'", "CacheFormat(")),
    "an unknown one": (
        lambda: KvistCache(model_of("llama").config, format=CacheFormat(key="int3")),
        ("key", "'int3'", "int8"),
    ),
    "too many kept layers": (
        lambda: KvistCache(model_of("llama").config, format=CacheFormat(key="int8", value="int8", keep_layers=3)),
        ("keep_layers", "3", "at most 2"),
    ),
    "narrow heads": (
        lambda: KvistCache(
            transformers.LlamaConfig(**(SHAPE | {"num_hidden_layers": 2, "head_dim": 24})),
            format=CacheFormat(key="int8"),
        ),
        ("key", "24", "bf16"),
    ),
    "blocks": (lambda: KvistCache(model_of("llama").config, block_tokens=0), ("block_tokens", "0", "1 to")),
    "memory": (lambda: KvistCache(model_of("llama").config, memory="much"), ("memory", "'much'")),
    "another model": (
        lambda: generate("qwen3", prompts(1, seed=1), KvistCache(model_of("llama").config)),
        ("layers", "2 of the 4 layers", "configuration of the model that runs"),
    ),
    "more layers": (
        lambda: generate("llama", prompts(1, seed=1), KvistCache(model_of("qwen3").config)),
        ("layer_idx", "2", "configuration of the model that runs"),
    ),
    "other heads": (
        lambda: generate(
            "gpt2", prompts(1, seed=1), KvistCache(transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64))
        ),
        ("keys", "[1, 2, 37, 32]", "[rows, 4, tokens, 16]"),
    ),
    "another batch": (
        lambda: [generate("llama", prompts(rows, seed=1), LENT) for rows in (2, 3)],
        ("batch", "3 rows", "2 sequences", "reset()"),
    ),
    "a crop": (lambda: KvistCache(model_of("llama").config).crop(-1), ("crop", "1", "0 tokens")),
    "rows": (lambda: filled().reorder_cache(torch.tensor([0, 5])), ("indices", "[0, 5]", "0 to 1")),
    "no rows": (lambda: filled().batch_repeat_interleave(0), ("indices", "[]", "reset()")),
    "rows of rows": (lambda: filled().reorder_cache(torch.tensor([[0, 1]])), ("indices", "[[0, 1]]", "0 to 1")),
    "half a crop": (lambda: filled().crop(1.5), ("crop", "1.5", "whole number")),
    "a window that is gone": (lambda: filled("mistral").crop(-30), ("crop", "30", "activate_past_recording()")),
    "a layer alone": (lambda: filled().layers[0].crop(-1), ("layers", "KvistCache")),
    "no rows at all": (
        lambda: KvistCache(model_of("llama").config).update(*torch.zeros(2, 0, 2, 3, 32), 0), ("keys", "[0, 2, 3, 32]"),
    ),
    "no tensors": (lambda: KvistCache(model_of("llama").config).update([1], None, 0), ("keys", "list", "no tensor")),
    "no layer": (lambda: filled().update(*torch.zeros(2, 2, 2, 3, 32), [0]), ("layer_idx", "[0]")),
    "another batch in the first step": (
        lambda: [
            LENT.reset(),
            *(LENT.update(*torch.zeros(2, rows, 2, 3, 32), layer) for layer, rows in enumerate((2, 3))),
        ],
        ("batch", "3 rows", "2 sequences", "reset()"),
    ),
    "values of another type": (
        lambda: filled().update(torch.zeros(2, 2, 3, 32), torch.zeros(2, 2, 3, 32, dtype=torch.long), 0),
        ("values", "torch.int64", "torch.float32"),
    ),
    "values elsewhere": (
        lambda: filled().update(torch.zeros(2, 2, 3, 32), torch.zeros(2, 2, 3, 32, device="meta"), 0),
        ("values", "meta", "cpu"),
    ),
    "no repeats": (lambda: filled().batch_repeat_interleave(-1), ("repeats", "-1", "whole number")),
    "half a repeat": (lambda: filled().batch_repeat_interleave(1.5), ("repeats", "1.5", "whole number")),
    "doubles": (
        lambda: KvistCache(model_of("llama").config).update(*torch.zeros(2, 1, 2, 3, 32, dtype=torch.double), 0),
        ("dtype", "torch.float64", "torch.bfloat16"),
    ),
}  # fmt: skip
LENT = KvistCache(transformers.LlamaConfig(**(SHAPE | {"num_hidden_layers": 4})))


def filled(name: str = "llama") -> KvistCache:
    held = KvistCache(model_of(name).config)
    generate(name, prompts(2, seed=2), held)
    return held


@pytest.mark.parametrize("what", CARELESS)
def test_careless_calls_are_answered_in_a_line(what: str) -> None:
    call, words = CARELESS[what]
    with pytest.raises(InputError) as raised:
        call()
    text = one_line(raised.value)
    for word in words:
        assert word in text, text


def test_a_memory_that_is_too_small_says_how_much_is_needed() -> None:
    config, ids = model_of("llama").config, prompts(2, seed=15)
    held = KvistCache(config, format=F32, memory="192KiB")
    with pytest.raises(DoesNotFit, match="memory: 192 KiB is too little for 2 sequences of 49 tokens") as raised:
        generate("llama", ids, held)
    assert "at least 256 KiB" in one_line(raised.value)
    assert (held.get_seq_length(), held.nbytes) == (48, 192 * 1024)
    generate("llama", ids[:1], KvistCache(config, format=F32, memory="128KiB"))


NO_KEYS = {
    "MambaConfig": ({"num_hidden_layers": 2}, "layer 0 of mamba keeps"),
    "JambaConfig": ({"num_hidden_layers": 8}, "layer 0 of jamba keeps"),
    "FalconH1Config": ({"num_hidden_layers": 2}, "layer 0 of falcon_h1 keeps"),
    "DeepseekV3Config": ({"num_hidden_layers": 2}, r"layer 0 of deepseek_v3 keeps latents \(MLA\)"),
    "T5Config": ({"num_layers": 2}, "t5 is an encoder with a decoder"),
    "BertConfig": ({"num_hidden_layers": 2}, "bert"),
}


@pytest.mark.parametrize("kind", NO_KEYS)
def test_models_that_keep_something_else_are_refused_by_name(kind: str) -> None:
    keys, match = NO_KEYS[kind]
    with pytest.raises(UnsupportedModel, match=match) as raised:
        KvistCache(getattr(transformers, kind)(**keys))
    one_line(raised.value)


@pytest.mark.parametrize("absent", ["transformers", "torch"])
def test_without_transformers_one_line_says_what_to_install(absent: str) -> None:
    code = (
        "import sys, kvist\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        f"sys.modules[{absent!r}] = None\n"
        "try: from kvist.hf import KvistCache\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{absent} is not installed; kvist.hf needs it: pip install 'kvist[hf]'\n"


def test_what_the_page_shows() -> None:
    failed, attempted = doctest.testfile(
        str(Path(__file__).parents[1] / "docs/transformers.md"), module_relative=False, verbose=False
    )
    assert attempted > 10
    assert failed == 0


def test_the_sizes_that_the_page_measured_are_planned() -> None:
    page = (Path(__file__).parents[1] / "docs/transformers.md").read_text()
    rows = re.findall(r"^\| kvist, (\w+)/(\w+)( rotated)? \| ([\d.]+) \|", page, re.MULTILINE)
    assert len(rows) == 6
    config = transformers.LlamaConfig(
        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576, dtype="bfloat16"
    )
    for key, value, rotated, size in rows:
        held = KvistCache(config, format=CacheFormat(key=key, value=value, rotate=bool(rotated)))
        held.memory.blocks.begin(1, 1031)
        held.memory.blocks.end()
        check_bytes(held)
        assert size == f"{held.planned_bytes / 2**20:.2f}"
