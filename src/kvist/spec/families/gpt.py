"""Families of the GPT-2 generation and after it, whose configurations have names of their own.

Source of each line: the configuration and modelling files of that name in transformers 5.24; for names that
transformers does not have, the code that is published with the models.
"""

from kvist.spec.families.dense import Dense, readers_of
from kvist.spec.families.own_keys import (
    all_heads,
    chatglm_heads,
    dbrx_heads,
    falcon_heads,
    gpt2_heads,
    mpt_heads,
    multi_query_heads,
    old_falcon_heads,
    olmo_heads,
    phi_heads,
)

_LAYERS, _HEADS, _HIDDEN = "num_hidden_layers", "num_attention_heads", "hidden_size"

_GPT2 = {_LAYERS: ("n_layer",), _HEADS: ("n_head",), _HIDDEN: ("n_embd",)}
_MOSAIC = {_LAYERS: ("n_layers",), _HEADS: ("n_heads",), _HIDDEN: ("d_model",)}
_XGLM = {_LAYERS: ("num_layers",), _HEADS: ("attention_heads",), _HIDDEN: ("d_model",)}
_BLOOM = {_LAYERS: ("n_layer",), _HEADS: ("n_head",), _HIDDEN: ("n_embed",)}
_CHATGLM = {_LAYERS: ("num_layers",), "head_dim": ("kv_channels",)}
_POSITIONS = ("n_positions",)

GPT_FAMILIES = {
    "gpt2": Dense(context=1024, layers=12, heads=12, hidden=768, names=_GPT2, contexts=_POSITIONS, prepare=gpt2_heads),
    "gpt-sw3": Dense(context=1024, names=_GPT2, contexts=_POSITIONS, prepare=all_heads),
    "jais": Dense(own_code=True, context=1024, names=_GPT2, contexts=_POSITIONS, prepare=all_heads),
    "btlm": Dense(own_code=True, context=1024, names=_GPT2, contexts=_POSITIONS, prepare=all_heads),
    "codegen": Dense(context=2048, names=_GPT2, contexts=_POSITIONS, prepare=all_heads),
    "gptj": Dense(context=2048, names=_GPT2, contexts=_POSITIONS, prepare=all_heads),
    "ctrl": Dense(context=256, names=_GPT2, contexts=_POSITIONS, prepare=all_heads),
    "gpt_bigcode": Dense(context=1024, names=_GPT2, contexts=_POSITIONS, prepare=multi_query_heads),
    "gpt_refact": Dense(own_code=True, context=4096, names=_GPT2, contexts=_POSITIONS, prepare=multi_query_heads),
    "gpt_neox": Dense(context=2048, layers=44, heads=64, hidden=6144, prepare=all_heads),
    "gpt_neox_japanese": Dense(context=2048, prepare=all_heads),
    "opt": Dense(context=2048, layers=12, heads=12, hidden=768, prepare=all_heads),
    "biogpt": Dense(context=1024, prepare=all_heads),
    "persimmon": Dense(context=16384, layers=36, heads=64, hidden=4096, prepare=all_heads),
    "xglm": Dense(context=2048, names=_XGLM, prepare=all_heads),
    # ALiBi has no longest sequence; BLOOM was trained on 2,048 tokens.
    "bloom": Dense(context=2048, names=_BLOOM, contexts=("seq_length",), prepare=all_heads),
    "mpt": Dense(context=2048, names=_MOSAIC, contexts=("max_seq_len",), prepare=mpt_heads),
    "dbrx": Dense(context=2048, names=_MOSAIC, contexts=("max_seq_len",), prepare=dbrx_heads),
    "hf_olmo": Dense(own_code=True, context=1024, names=_MOSAIC, contexts=("max_sequence_length",), prepare=olmo_heads),
    "falcon": Dense(context=2048, layers=32, heads=71, hidden=4544, prepare=falcon_heads),
    "RefinedWeb": Dense(own_code=True, context=2048, names=_BLOOM, prepare=old_falcon_heads),
    "RefinedWebModel": Dense(own_code=True, context=2048, names=_BLOOM, prepare=old_falcon_heads),
    "phi-msft": Dense(own_code=True, context=2048, names=_GPT2, contexts=_POSITIONS, prepare=phi_heads),
    "qwen": Dense(own_code=True, context=8192, head_dim=128, names={"head_dim": ("kv_channels",)}, prepare=all_heads),
    "chatglm": Dense(
        own_code=True, context=2048, head_dim=128, names=_CHATGLM, contexts=("seq_length", "max_sequence_length"),
        prepare=chatglm_heads,
    ),
    "baichuan": Dense(own_code=True, context=4096, contexts=("model_max_length",), prepare=all_heads),
    "internlm": Dense(own_code=True, context=2048, prepare=all_heads),
}  # fmt: skip

GPT = readers_of(GPT_FAMILIES)
