"""What the engine does not run is refused by name, before anything is fetched or loaded."""

import socket
from typing import Any

import pytest

from kvist.engine.engine import Engine
from kvist.errors import UnsupportedModel
from kvist.spec.known import KNOWN
from kvist.spec.layers import Attention, Compressed, Cross, Indexer, Latent, Layer, Nothing, Parallel, State
from kvist.spec.model import ModelSpec

OWN = Attention(kv_heads=2, key_dim=16, value_dim=16)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the engine reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def model(*layers: Layer, **config: Any) -> ModelSpec:
    known = ModelSpec.read("smollm2-135m")
    return ModelSpec(
        name="smollm2-135m",
        source=KNOWN["smollm2-135m"].source,
        layers=layers,
        max_context=64,
        config={**known.config, **config},
    )


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (Latent(rank=32, rope_dim=0), "layers of kind latent"),
        (State(name="mamba2", state_elements=4), "layers of kind state"),
        (Compressed(rank=32, rope_dim=0, ratio=4), "layers of kind compressed"),
        (Nothing(), "layers of kind nothing"),
        (Parallel(parts=(OWN, Cross(kv_heads=1, key_dim=16, value_dim=16))), "layers of kind parallel"),
        (
            Attention(kv_heads=2, key_dim=16, value_dim=16, indexer=Indexer(heads=1, dim=16)),
            "attention with an indexer",
        ),
    ],
)
def test_other_kinds_of_memory_are_not_run(layer: Layer, says: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"layers: smollm2-135m has {says}, which is not computed") as caught:
        Engine(model(OWN, layer))
    assert caught.value.key == "layers"


@pytest.mark.parametrize("family", ["rwkv", "deepseek_v4", None, 3])
def test_other_families_are_not_run(family: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"model_type: {family!r} is not computed; supported are llama"):
        Engine(model(OWN, model_type=family))


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size", "head_dim", "layer_types"])
def test_what_the_network_is_built_from_must_be_there(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key}: missing from .*, and the network is built from it"):
        Engine(model(OWN, **{key: None}))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx: True is not",
        ),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention: True is not computed"),
        ({"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm: True is not computed"),
        (
            {"model_type": "olmo3", "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention: 'linear' is not computed",
        ),
    ],
)
def test_what_a_configuration_says_and_nobody_computes_is_named(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        Engine(model(OWN, **config))
