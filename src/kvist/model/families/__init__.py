"""From a configuration to a network: one function a family, most of them a line of data."""

from collections.abc import Callable, Mapping

from kvist.errors import UnsupportedModel
from kvist.model.experts import Experts
from kvist.model.families import deepseek, dense, gpt2, hybrids, llama4, mixtures, qwen3_next, states
from kvist.model.families.keys import Keys
from kvist.model.network import Network
from kvist.spec.layers import Attention, Indexer, Latent, Layer
from kvist.spec.model import ModelSpec

FAMILIES: Mapping[str, Callable[[Keys], Network]] = {
    **dense.FAMILIES,
    **gpt2.FAMILIES,
    **llama4.FAMILIES,
    **mixtures.FAMILIES,
    **qwen3_next.FAMILIES,
    **deepseek.FAMILIES,
    **states.FAMILIES,
    **hybrids.FAMILIES,
}


def network_of(spec: ModelSpec) -> Network:
    """Describe the network of a model.

    Raises:
        UnsupportedModel: a family, a kind of layer or a mechanism is not computed, or a key is missing that the
            network is built from; names it.
    """
    family = spec.config.get("model_type")
    read = FAMILIES.get(family) if isinstance(family, str) else None
    if read is None:
        raise UnsupportedModel(
            f"model_type: {family!r} is not computed; supported are {', '.join(FAMILIES)}", key="model_type"
        )
    for layer in spec.layers:
        said = _not_computed(layer)
        if said:
            raise _refusal(spec, said)
    keys = Keys(spec)
    keys.refuse("is_causal", True, "tokens see those before them alone")
    keys.refuse("quantization_config", None, "packed weights are read from GGUF files only")
    network = read(keys)
    for product in [block.mlp for block in network.blocks if isinstance(block.mlp, Experts)]:
        _check_routing(product)
    for block, layer in zip(network.blocks, spec.layers, strict=False):
        if block.stores != {type(piece) for piece in layer.stored}:
            raise _refusal(spec, f"layers of kind {layer.kind}")
    if len(network.blocks) != len(spec.layers):
        raise _refusal(spec, f"{len(spec.layers)} layers that store something, of {len(network.blocks)}")
    return network


def _check_routing(product: Experts) -> None:
    """Refuse a choice of experts that there are not.

    Raises:
        UnsupportedModel: names the key.
    """
    net, count = product.routing, product.count
    if net.kept_groups < net.groups:
        if count % net.groups:
            raise UnsupportedModel(f"n_group: {count} experts are not {net.groups} equal groups", key="n_group")
        count = count // net.groups * net.kept_groups
        if product.count // net.groups < net.group_best:
            raise UnsupportedModel(
                f"n_group: {net.groups} groups of {product.count} experts; a group is as good as its "
                f"{net.group_best} best, and has fewer",
                key="n_group",
            )
    if net.chosen > count:
        raise UnsupportedModel(
            f"num_experts_per_tok: {net.chosen} of {count} experts cannot be chosen", key="num_experts_per_tok"
        )


def _refusal(spec: ModelSpec, said: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"layers: {spec.name} has {said}, which is not computed; `kvist plan` counts this kind too", key="layers"
    )


def _not_computed(layer: Layer) -> str | None:
    """What a family's function does not look at: it knows its own mechanism, and not all that a layer may keep."""
    match layer:
        case Attention(indexer=Indexer()) | Latent(indexer=Indexer()):
            return "attention with an indexer"
        case Latent(window=int()):
            return "latents in a window"
        case _:
            return None
