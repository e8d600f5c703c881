"""Families that say by keys of their own what others say by Hugging Face's.

Most functions here settle ``num_key_value_heads``; each is called before heads and widths are read.
"""

from kvist.errors import UnsupportedModel
from kvist.spec.config_keys import ConfigKeys

_KV = "num_key_value_heads"


def all_heads(keys: ConfigKeys) -> None:
    """Every query head has a key and a value of its own; the class knows no other number."""
    _store(keys, keys.get("num_attention_heads"))


def all_heads_unless_printed(keys: ConfigKeys) -> None:
    """XVERSE: the first models have a key and a value for every query head and print no number of them."""
    if keys.get(_KV) is None:
        all_heads(keys)


def _store(keys: ConfigKeys, heads: int | None) -> None:
    """Settle the number, which a file may repeat and the user override."""
    printed = keys.get(_KV)
    if printed is not None and printed != heads and _KV not in keys.overrides:
        raise keys.unread(_KV, f"model_type {keys.family} stores {heads} heads here")
    keys.settle(_KV, heads)


def multi_query_heads(keys: ConfigKeys) -> None:
    """StarCoder 1: one head, unless ``multi_query`` is off. Source: GPTBigCodeConfig of transformers."""
    _store(keys, 1 if keys.flag("multi_query", default=True) else keys.get("num_attention_heads"))


def gpt2_heads(keys: ConfigKeys) -> None:
    """GPT-2, and SantaCoder, which publishes under its name with ``attention_head_type``."""
    one = keys.named("attention_head_type", {"multihead": False, "multiquery": True}, default="multihead")
    _store(keys, 1 if one else keys.get("num_attention_heads"))


def falcon_heads(keys: ConfigKeys) -> None:
    """Falcon: ``num_kv_heads`` counts in the new architecture alone; before it, ``multi_query`` means one head.

    Falcon-7B prints 71 KV heads and stores one. Source: FalconAttention of transformers.
    """
    keys.rename({"num_kv_heads": ("n_head_kv",)})
    keys.get("multi_query")
    if keys.flag("new_decoder_architecture", default=False):
        grouped = keys.get("num_kv_heads")
        _store(keys, keys.get("num_attention_heads") if grouped is None else grouped)
    else:
        keys.get("num_kv_heads")
        _store(keys, 1 if keys.flag("multi_query", default=True) else keys.get("num_attention_heads"))


def old_falcon_heads(keys: ConfigKeys) -> None:
    """Falcon as first published: ``n_head_kv`` groups in RefinedWeb (40B), ``multi_query`` in RefinedWebModel."""
    keys.config.setdefault("new_decoder_architecture", keys.get("n_head_kv") is not None)
    falcon_heads(keys)


def chatglm_heads(keys: ConfigKeys) -> None:
    """ChatGLM: ``multi_query_group_num`` heads where ``multi_query_attention`` is on.

    ChatGLM2 and later print both; the class has it off, so that a group count alone does not say.
    """
    groups = keys.get("multi_query_group_num")
    if groups is not None and keys.get("multi_query_attention") is None:
        raise UnsupportedModel(
            f"{keys.name}: multi_query_attention is missing, and multi_query_group_num ({groups!r}) counts with it "
            f"alone: write it, or --assume multi_query_attention=true",
            key="multi_query_attention",
        )
    shared = keys.flag("multi_query_attention", default=False)
    _store(keys, keys.count("multi_query_group_num") if shared else keys.get("num_attention_heads"))


def mpt_heads(keys: ConfigKeys) -> None:
    """MPT: by ``attn_config.attn_type``; grouped queries have ``kv_n_heads``. Source: MosaicML's llm-foundry."""
    attention = keys.section("attn_config")
    for key in ("sliding_window_size", "reuse_kv_layer_idx"):
        if attention.get(key) not in (None, -1):
            raise attention.unread(key, "it is not read for model_type mpt")
    kinds = {"multihead_attention": "all", "multiquery_attention": "one", "grouped_query_attention": "groups"}
    match attention.named("attn_type", kinds, default="multihead_attention"):
        case "one":
            _store(keys, 1)
        case "groups":
            _store(keys, attention.count("kv_n_heads"))
        case _:
            all_heads(keys)


def dbrx_heads(keys: ConfigKeys) -> None:
    """DBRX: ``attn_config.kv_n_heads``; extracts of the file give it at the top."""
    attention = keys.section("attn_config")
    if attention.get("kv_n_heads") is not None or keys.get(_KV) is None:
        _store(keys, attention.count("kv_n_heads", default=1, source="default of dbrx in transformers"))


def jetmoe_heads(keys: ConfigKeys) -> None:
    """JetMoE: each of ``num_experts_per_tok`` experts brings its own queries to the same keys."""
    keys.rename({"head_dim": ("kv_channels",)})
    source = "default of jetmoe in transformers"
    stored = keys.count(_KV, default=16, source=source)
    experts = keys.count("num_experts_per_tok", default=2, source=source)
    keys.settle("num_attention_heads", stored * experts)


def phi_heads(keys: ConfigKeys) -> None:
    """Phi 1 and 2 as first published: ``n_head_kv``, or all heads where that is null."""
    grouped = keys.get("n_head_kv")
    _store(keys, keys.get("num_attention_heads") if grouped is None else grouped)


def olmo_heads(keys: ConfigKeys) -> None:
    """OLMo 1 as first published: ``n_kv_heads``, or one head where ``multi_query_attention`` is on."""
    if keys.get("n_kv_heads") is not None:
        keys.rename({_KV: ("n_kv_heads",)})
        keys.get("multi_query_attention")
    else:
        shared = keys.flag("multi_query_attention", default=False)
        _store(keys, 1 if shared else keys.get("num_attention_heads"))


def attention_everywhere(keys: ConfigKeys) -> None:
    """MiniMax-M2 prints ``attn_type_list`` with a 1 for each layer of attention; it has no other."""
    listed = keys.get("attn_type_list")
    if listed is not None and not (isinstance(listed, list) and all(kind == 1 for kind in listed)):
        raise keys.unread("attn_type_list", f"model_type {keys.family} has attention (1) on every layer")


def phi3_layers(keys: ConfigKeys) -> None:
    """Phi-4-mini prints ``full_attn_mod``; what another value than 1 means is not published."""
    if keys.get("full_attn_mod") not in (None, 1):
        raise keys.unread("full_attn_mod", "1 is read, for all layers alike")


def modernbert_window(keys: ConfigKeys) -> None:
    """ModernBERT's decoder sees half of ``local_attention``. Source: ModernBertDecoderConfig of transformers."""
    if keys.get("sliding_window") is None:
        source = "default of modernbert-decoder in transformers"
        keys.settle("sliding_window", keys.count("local_attention", default=128, least=2, source=source) // 2)
    keys.get("local_attention")
    all_heads(keys)
