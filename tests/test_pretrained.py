"""Small pretrained networks: a sorter with all its intermediate tensors, and a teller of stories with its story."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pretrained import convert_llama2c, convert_sorter, pretrained, read_llama2c_pieces, read_tensors
from served import Served, Session, open_saved

from kvist.model.decoder import Step

# What llama2.c writes with this model at temperature 0, and holds its own code against.
STORY = (
    " Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She said, \"I want to "
    "play with your ball, but I can't find it.\"\n"
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"\n"
    "Lily didn't want to help her mom, so she"
)


class Watched:
    """A callable part of the network that keeps what went in and came out."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __call__(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.inputs = x.clone()
        self.outputs: torch.Tensor = self.part(x, *rest)
        return self.outputs


@pytest.fixture(scope="module")
def sorter(tmp_path_factory: pytest.TempPathFactory) -> Served:
    path = pretrained("gpt-nano-sort-model.json.gz")
    return open_saved(convert_sorter(path, tmp_path_factory.mktemp("sorter")), None, memory=2**22)


def test_the_sorter_sorts(sorter: Served) -> None:
    """Every list of six numbers from 0 to 2, all in one batch as it comes."""
    lists = [list(numbers) for numbers in product(range(3), repeat=6)]
    requests = Session(sorter).run(lists, steps=6)
    for request, numbers in zip(requests, lists, strict=True):
        assert request.sequence.known()[6:].tolist() == sorted(numbers)


def test_every_intermediate_tensor_of_the_sorter_is_the_published_one(
    sorter: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, expected = read_tensors(pretrained("gpt-nano-sort-t0-partials.json.gz"))
    decoder = sorter.runner.decoder
    first = decoder.layers[0]
    parts: dict[str, Watched] = {}
    for owner, name in (
        (first, "mixer"), (first.mixer, "qkv"), (first.mixer, "output"), (first, "mlp"), (first.mlp, "up"),
        (first.mlp, "down"), (decoder, "head"),
    ):  # fmt: skip
        parts[name] = Watched(getattr(owner, name))
        monkeypatch.setattr(owner, name, parts[name])
    streams: list[torch.Tensor] = []
    for layer in decoder.layers:
        monkeypatch.setattr(layer, "before_mixer", recorded(layer.before_mixer, streams))
    monkeypatch.setattr(decoder, "norm", recorded(decoder.norm, streams))
    step = sorter.runner._step
    monkeypatch.setattr(sorter.runner, "_step", lambda chunks: all_rows(step(chunks)))

    for row, tokens in enumerate(expected["idx"].int().tolist()):
        streams.clear()
        scheduler = Session(sorter, prefix_cache=False).scheduler
        scheduler.add("0", np.array(tokens, np.int32), 1)
        logits = sorter.runner.run(scheduler.step())
        heads = parts["qkv"].outputs.view(11, 3, config["n_head"], -1).permute(1, 2, 0, 3)
        found = {
            "x": streams[0], "ln1": parts["mixer"].inputs, "qkv": parts["qkv"].outputs, "q": heads[0], "k": heads[1],
            "v": heads[2], "y": parts["output"].inputs, "yProj": parts["mixer"].outputs,
            "attnResid": streams[0] + parts["mixer"].outputs, "ln2": parts["mlp"].inputs, "fc": parts["up"].outputs,
            "gelu": parts["down"].inputs, "mlp": parts["mlp"].outputs, "mlpResid": streams[1], "block0": streams[1],
            "block1": streams[2], "block2": streams[3], "ln_f": parts["head"].inputs, "lm_head": logits,
            "probs": logits.softmax(-1),
        }  # fmt: skip
        for name, tensor in found.items():
            assert torch.allclose(tensor, expected[name][row], rtol=1e-4, atol=2e-5), name


def recorded(norm: Any, streams: list[torch.Tensor]) -> Any:
    """The norm, keeping the stream that it is given."""

    class Recorded(type(norm)):  # type: ignore[misc]
        def __call__(self, x: torch.Tensor) -> Any:
            streams.append(x.clone())
            return super().__call__(x)

    return Recorded(norm.multiplier, norm.bias, norm.eps)


def all_rows(step: Step) -> Step:
    """The same step with the logits of all its tokens."""
    return replace(step, sampled=torch.arange(len(step.tokens)))


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert_llama2c(pretrained("stories260K.bin"), tmp_path_factory.mktemp("stories"))


def test_the_story_is_the_published_one(stories: Path) -> None:
    pieces = read_llama2c_pieces(pretrained("tok512.bin"))
    (request,) = Session(open_saved(stories, None)).run([[1]], steps=200)
    text = b"".join(pieces[token] for token in request.sequence.known()[1:]).decode()
    assert text.replace("<0x0A>", "\n").startswith(STORY)


def test_stories_are_those_of_transformers(stories: Path) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.LlamaForCausalLM.from_pretrained(stories, dtype=torch.float32)
    served = open_saved(stories, oracle)
    prompts = [[1, 403, 407], [1, *range(300, 460)], [1]]
    session = Session(served, budget=50, max_context=512)
    assert session.worst_error(session.run(prompts, steps=64)) < 1e-4
