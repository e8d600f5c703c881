"""A model's layers as pages of vLLM's pool.

Source: ``vllm/model_executor/layers/attention`` (what a layer asks for) and ``vllm/platforms/interface.py`` (blocks
where types are mixed) of 0.32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvist.errors import InputError
from kvist.planning.engines.vllm_page import Page, content_bytes, shard, unsupported
from kvist.planning.engines.vllm_settings import ELEMENT_BYTES, TURBOQUANT, VllmSettings, text_config
from kvist.planning.engines.vllm_states import align, state_page, state_tokens
from kvist.spec.layers import Attention, Cross, Indexer, Latent, Layer, State
from kvist.spec.model import ModelSpec
from kvist.units import counted


@dataclass(frozen=True, kw_only=True)
class ModelPages:
    """The pages of a model.

    Attributes:
        pages: of all layers, each with the index of its layer.
        block_tokens: of a block of attention, after alignment.
    """

    pages: tuple[tuple[int, Page], ...]
    block_tokens: int


def pages_of(spec: ModelSpec, settings: VllmSettings) -> ModelPages:
    """The pages of a model's layers.

    Raises:
        UnsupportedModel: a layer remembers what is not accounted for.
        InputError: a setting does not fit the model.
    """
    pieces = [(index, piece) for index, layer in enumerate(spec.layers) for piece in layer.stored]
    _check_heads(spec, settings)
    block = _mixed_types_block(spec, settings, [piece for _, piece in pieces])
    settings = replace(settings, block_size=block)
    pages = [(index, page) for index, piece in pieces for page in _pages(spec, index, piece, settings)]
    states = [page for _, page in pages if page.kind == "state"]
    growing = [page for _, page in pages if page.kind != "state"]
    if states and growing:
        token_bytes = _aligned_token_bytes(spec, settings, growing, [piece for _, piece in pieces])
        block = align(settings, token_bytes, max(page.bytes for page in states), growing)
        # Attention takes the longer block, a state as many bytes as attention's page then has.
        page_bytes, distance = block * token_bytes, state_tokens(settings, block)
        pages = [
            (
                index,
                replace(page, block_tokens=distance, padded_bytes=page_bytes)
                if page.kind == "state"
                else replace(page, block_tokens=block),
            )
            for index, page in pages
        ]
    return ModelPages(pages=tuple(pages), block_tokens=block)


def _check_heads(spec: ModelSpec, settings: VllmSettings) -> None:
    heads = text_config(spec).get("num_attention_heads")
    if isinstance(heads, int) and heads % settings.tensor_parallel_size:
        raise InputError(
            f"set: tensor_parallel_size={settings.tensor_parallel_size} does not divide the {heads} attention heads of "
            f"{spec.name}, which vLLM refuses",
            key="set",
        )


def _pages(spec: ModelSpec, index: int, layer: Layer, settings: VllmSettings) -> list[Page]:
    match layer:
        case Attention():
            if layer.indexer is not None:
                raise unsupported(spec, index, "an indexer beside keys and values")
            return [_attention_page(spec, index, _own_width(spec, layer), settings)]
        case Latent():
            return _latent_pages(spec, index, layer, settings)
        case State():
            return [state_page(spec, index, layer, settings)]
        case Cross():
            heads = shard(layer.kv_heads, settings)
            return [
                Page(
                    kind="cross",
                    block_tokens=settings.block_size,
                    content_bytes=heads
                    * content_bytes(layer.key_dim, layer.value_dim, settings.kv_cache_dtype, settings),
                    # The encoder's budget of a step, and at least one input (``max_num_encoder_input_tokens``).
                    limit=max(settings.max_num_batched_tokens, layer.encoder_tokens or 0),
                    shape=("cross", heads, layer.key_dim, layer.value_dim),
                )
            ]
        case _:
            raise unsupported(spec, index, f"{layer.kind} attention, which vLLM packs in blocks of its own")


def _attention_page(spec: ModelSpec, index: int, layer: Attention, settings: VllmSettings) -> Page:
    dtype = _dtype_of(spec, index, settings)
    heads = shard(layer.kv_heads, settings)
    page = Page(
        kind="full",
        block_tokens=settings.block_size,
        content_bytes=heads * content_bytes(layer.key_dim, layer.value_dim, dtype, settings),
        shape=("attention", heads, layer.key_dim, layer.value_dim, dtype),
    )
    if settings.disable_hybrid_kv_cache_manager and _sees_everything(spec):
        return page
    if layer.window is not None:
        # The largest multiple of the kernel's block that is not above the others'.
        kernel = settings.kernel_tokens
        tokens = max(kernel, settings.block_size // kernel * kernel)
        return replace(page, kind="window", limit=layer.window, block_tokens=tokens)
    return page if layer.chunk is None else replace(page, kind="chunk", limit=layer.chunk)


def _own_width(spec: ModelSpec, layer: Attention) -> Attention:
    """Jamba in vLLM has heads of ``hidden_size // num_attention_heads``, even where ``head_dim`` says otherwise."""
    config = text_config(spec)
    if config.get("model_type") != "jamba":
        return layer
    width = int(config["hidden_size"]) // int(config["num_attention_heads"])
    return replace(layer, key_dim=width, value_dim=width)


def _sees_everything(spec: ModelSpec) -> bool:
    """Whether some layer is full attention: only then are the others promoted (``_promote_local_kv_cache_specs``)."""
    return any(
        isinstance(piece, (Attention, Latent)) and piece.window is None and getattr(piece, "chunk", None) is None
        for layer in spec.layers
        for piece in layer.stored
    )


def _latent_pages(spec: ModelSpec, index: int, layer: Latent, settings: VllmSettings) -> list[Page]:
    dtype, backend = settings.kv_cache_dtype, settings.attention_backend
    if layer.indexer is not None and settings.device == "cpu":
        raise unsupported(spec, index, "sparse attention, which vLLM does not run on a CPU")
    if layer.indexer is not None and dtype.startswith("fp8") and backend in (None, "FLASHMLA_SPARSE"):
        dtype = "fp8_ds_mla"
    packed = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
    if dtype in packed:
        # 512 fp8, four f32 scales and 64 rotary bf16; fixed, whatever the widths (``mla_attention.py``).
        if (layer.rank, layer.rope_dim) != (512, 64):
            raise InputError(f"set: kv_cache_dtype={dtype} is made for a latent of 512 + 64 elements", key="set")
        content = packed[dtype]
    elif dtype != "auto" and dtype not in ELEMENT_BYTES:
        raise InputError(f"set: kv_cache_dtype={dtype} is not for MLA models; take auto, fp8 or fp8_ds_mla", key="set")
    else:
        content = (layer.rank + layer.rope_dim) * ELEMENT_BYTES[settings.dtype if dtype == "auto" else dtype]
    page = Page(
        kind="full",
        block_tokens=settings.block_size,
        content_bytes=content,
        shape=("latent", layer.rank, layer.rope_dim),
        latent=True,
    )
    if layer.window is not None:
        page = replace(page, kind="window", limit=layer.window)
    return [page] if layer.indexer is None else [page, _indexer_page(spec, index, layer.indexer, settings)]


def _indexer_page(spec: ModelSpec, index: int, indexer: Indexer, settings: VllmSettings) -> Page:
    if indexer.pool != 1 or indexer.heads != 1:
        raise unsupported(
            spec, index, f"an indexer of {counted(indexer.heads, 'head')} that pools {counted(indexer.pool, 'token')}"
        )
    return Page(
        kind="full",
        block_tokens=settings.block_size,
        # fp8 with one f32 scale for 128 elements (``DeepseekV32IndexerCache``).
        content_bytes=indexer.dim + indexer.dim // 128 * 4,
        shape=("indexer", indexer.dim),
        latent=True,
    )


def _dtype_of(spec: ModelSpec, index: int, settings: VllmSettings) -> str:
    """TurboQuant leaves the first and last two layers of a model without states as they are."""
    dtype, layers = settings.kv_cache_dtype, len(spec.layers)
    if dtype not in TURBOQUANT or _is_hybrid(spec):
        return dtype
    edge = min(2, layers // 2)
    return "auto" if index < edge or index >= layers - edge else dtype


def _is_hybrid(spec: ModelSpec) -> bool:
    return any(isinstance(piece, State) for layer in spec.layers for piece in layer.stored)


def _mixed_types_block(spec: ModelSpec, settings: VllmSettings, pieces: Sequence[Layer]) -> int:
    """Tokens of a block where TurboQuant layers stand beside plain ones: the packed page must cover the plain one.

    Source: ``Platform._align_heterogeneous_kv_block_size``; a plain page of the kernel's 16 tokens.
    """
    block = settings.block_size
    if settings.kv_cache_dtype not in TURBOQUANT:
        return block
    if any(getattr(piece, name, None) for piece in pieces for name in ("window", "chunk")) or settings.device == "cpu":
        raise InputError(
            f"set: kv_cache_dtype={settings.kv_cache_dtype} is accounted for on GPUs and without windows; take fp8",
            key="set",
        )
    first = next((piece for piece in pieces if isinstance(piece, Attention)), None)
    if first is None or _is_hybrid(spec):
        return block
    plain = content_bytes(first.key_dim, first.value_dim, "auto", settings)
    packed = content_bytes(first.key_dim, first.value_dim, settings.kv_cache_dtype, settings)
    aligned = max(settings.kernel_tokens, block)
    return max(block, aligned * -(-plain * settings.kernel_tokens // (aligned * packed)))


def _aligned_token_bytes(
    spec: ModelSpec, settings: VllmSettings, growing: Sequence[Page], pieces: Sequence[Layer]
) -> int:
    """Bytes of a token in one attention layer as the alignment reckons them: by the model's own ``head_dim``."""
    contents = {page.content_bytes for page in growing}
    attention = next((piece for piece in pieces if isinstance(piece, Attention)), None)
    head_dim = text_config(spec).get("head_dim")
    if attention is not None and isinstance(head_dim, int) and head_dim != _own_width(spec, attention).key_dim:
        heads = shard(attention.kv_heads, settings)
        return heads * content_bytes(head_dim, head_dim, settings.kv_cache_dtype, settings)
    if len(contents) == 1:
        return contents.pop()
    raise InputError(
        f"engine: the attention layers beside the states of {spec.name} differ in size ("
        f"{', '.join(str(size) for size in sorted(contents))} bytes a token); the account of vLLM does not cover that",
        key="engine",
    )
