"""GGUF metadata under Hugging Face's names, so that one reader a family serves every source.

What the format leaves out of a model is filled in by the rule that llama.cpp has for its architecture and listed as an
assumption. Sources: docs/gguf.md of the ggml repository for the keys; LLM_ARCH_NAMES of llama.cpp for the
architectures, and the file of each for what it reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvist.errors import BadFile, InputError, KvistError, UnsupportedModel
from kvist.spec.agreement import GGUF, Claim
from kvist.spec.described import OVERRIDE, checked
from kvist.spec.families import Reading
from kvist.spec.gguf.architectures import ARCHITECTURES, REFUSED
from kvist.spec.gguf.header import GGUFArray, GGUFHeader
from kvist.spec.gguf.metadata import Metadata
from kvist.spec.gguf.network import network, sizes
from kvist.spec.json_file import shown
from kvist.spec.model import Assumption

# Keys of such mechanisms on which no byte of a cache depends.
_HARMLESS = frozenset(
    f"attention.{key}"
    for key in (
        "layer_norm_epsilon", "layer_norm_rms_epsilon", "group_norm_epsilon", "group_norm_groups", "max_alibi_bias",
        "clamp_kqv", "causal", "scale", "output_scale", "value_scale", "temperature_length", "temperature_scale",
        "rope_pattern", "relative_buckets_count", "q_lora_rank", "decay_lora_rank", "iclr_lora_rank",
        "value_residual_mix_lora_rank", "gate_lora_rank", "output_group_count", "output_lora_rank",
        "compress_rope_freq_base", "value_length_mla",
    )
) | frozenset(
    {"kda.safe_gate", "kda.gate_lower_bound", "ssm.dt_b_c_rms", "ple.heads_per_ngram", "ple.eos_token_id"}
    | {"ple.image_token_id", "ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes"}
)  # fmt: skip
# Keys elsewhere by which a model remembers something else.
_MECHANISMS = ("attention.", "ssm.", "wkv.", "kda.", "shortconv.", "ple.", "hrm.")
_OTHER_MECHANISMS = frozenset({"full_attention_interval", "decoder_block_count", "num_loops", "token_shift_count"})


@dataclass(frozen=True, kw_only=True)
class NamedConfig:
    """A configuration under Hugging Face's names.

    Attributes:
        config: its keys.
        assumed: what had to be filled in to write it.
        names: the file's own name of a key, where it has one.
        extra: blocks behind the layers, which draft tokens.
    """

    config: dict[str, Any]
    assumed: tuple[Assumption, ...]
    names: Mapping[str, str]
    extra: int


def read_header_config(header: GGUFHeader, assume: Mapping[str, Any]) -> Reading:
    """Read a header as the family that it belongs to, and hold it against its tensors.

    Raises:
        UnsupportedModel, BadFile: as :func:`config_of` and the family's reader; messages name the file's own keys.
    """
    named = config_of(header)
    try:
        reading = checked(named.config, assume, file=header.name, assumed=named.assumed)
    except (BadFile, UnsupportedModel) as error:
        raise _in_terms_of_the_file(error, named) from error
    reading = replace(reading, assumed=tuple(_said_of_the_file(entry, named) for entry in reading.assumed))
    if not assume:
        claim = Claim(
            file=header.name,
            layers_key=f"{header.metadata['general.architecture']}.block_count",
            layers=reading.layers,
            extra=named.extra,
            config=reading.config,
        )
        claim.hold({tensor.name: tensor.shape for tensor in header.tensors}, GGUF)
    return reading


def _said_of_the_file(entry: Assumption, named: NamedConfig) -> Assumption:
    """An assumption of a family's reader, with the key that a GGUF file would have; overrides stay as they are."""
    if entry in named.assumed or entry.source == OVERRIDE:
        return entry
    own = named.names.get(entry.key)
    where = f"{own} is left out" if own else "GGUF has no key for it"
    return replace(entry, source=f"{where}; {entry.source}")


def _in_terms_of_the_file(error: InputError, named: NamedConfig) -> KvistError:
    """The error of a family's reader, with the file's own name of the key that stopped it."""
    own = named.names.get((error.key or "").partition("[")[0])
    if own is None:
        return error
    return type(error)(str(error).replace(error.key or "", f"{own} ({error.key})", 1), key=own)


def config_of(header: GGUFHeader) -> NamedConfig:
    """Translate a header's metadata.

    Raises:
        UnsupportedModel: of another architecture, or with a mechanism that is not read.
        BadFile: a needed key is missing or of another kind.
    """
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(
            f"{header.name}: general.type is {shown(kind)}; name the file of the model itself", key="general.type"
        )
    name = header.metadata.get("general.architecture")
    if isinstance(name, str) and name in REFUSED:
        raise UnsupportedModel(
            f"{header.name}: general.architecture is {name!r}: {REFUSED[name]}", key="general.architecture"
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise _unknown(header, name)
    m = Metadata(header, name)
    if m.get("attention.causal") is False:
        raise m.unread("attention.causal", "is false; an encoder keeps no cache")
    architecture = ARCHITECTURES[name]
    family = architecture.family_of(m)
    config = {"model_type": family, **sizes(m), **network(m, family=family)}
    for step in architecture.steps:
        config |= step(m)
    _refuse_unread(m)
    return NamedConfig(config=config, assumed=tuple(m.assumed), names=m.names, extra=m.drafting)


def _unknown(header: GGUFHeader, name: object) -> UnsupportedModel:
    from difflib import get_close_matches

    near = get_close_matches(str(name)[:60], ARCHITECTURES, n=3)
    nearest = f" (nearest: {', '.join(near)})" if near else ""
    return UnsupportedModel(
        f"{header.name}: general.architecture is {shown(name)}, which is not among the {len(ARCHITECTURES)} that are "
        f"read{nearest}",
        key="general.architecture",
    )


def _refuse_unread(m: Metadata) -> None:
    """Stop at a key of a mechanism that nothing has asked for; 0, false and empty values are off."""
    for key in m.keys:
        if key in m.asked or key in _HARMLESS or not (key.startswith(_MECHANISMS) or key in _OTHER_MECHANISMS):
            continue
        value = m.header.metadata[m.full(key)]
        if value and not (isinstance(value, GGUFArray) and not value.count):
            raise m.unread(key, f"is {shown(value)}; it is not read for {m.architecture} files")
