"""Families shaped like Llama: every layer attends to everything, and the names of keys are Llama's.

Source of each line: the configuration and modelling files of that name in transformers 5.24; for names that
transformers does not have, the code that is published with the models.
"""

from kvist.spec.families.dense import Dense, readers_of
from kvist.spec.families.own_keys import all_heads_unless_printed, attention_everywhere, jetmoe_heads

_GROUPS = {"num_key_value_heads": ("num_attention_groups",)}
_NUM_LAYERS = {"num_hidden_layers": ("num_layers",)}

LLAMA_FAMILIES = {
    # Kept by transformers.
    "apertus": Dense(context=65536, layers=32, heads=32, hidden=4096),
    "apertus1p5_text": Dense(context=65536, layers=32, heads=32, hidden=4096),
    "arcee": Dense(context=4096, layers=32, heads=32, hidden=2560),
    "aria_text": Dense(context=2048, layers=32, heads=32, hidden=4096),
    "bitnet": Dense(context=2048, kv_heads=5),
    "chameleon": Dense(context=4096, layers=32, heads=32, hidden=4096, kv_heads=32),
    "cohere": Dense(context=8192, layers=40, heads=64, hidden=8192),
    "cosmos3_edge_text": Dense(context=131072, layers=28, heads=16, hidden=2048, kv_heads=8, head_dim=128),
    "deepseek_ocr2_text": Dense(context=2048, layers=32, heads=32, hidden=4096),
    "diffllama": Dense(context=2048),
    "doge": Dense(context=2048),
    "emu3_text_model": Dense(context=9216, layers=32, heads=32, hidden=4096, kv_heads=8),
    "ernie4_5": Dense(context=131072, layers=18, heads=16, hidden=1024, kv_heads=2, head_dim=128),
    "ernie4_5_moe": Dense(context=131072, kv_heads=4),
    "ernie4_5_vl_moe_text": Dense(context=131072, layers=28, heads=20, hidden=2560, kv_heads=4),
    "exaone": Dense(context=4096, layers=32, heads=32, hidden=4096, kv_heads=8, names=_NUM_LAYERS),
    "flex_olmo": Dense(context=4096),
    "gemma": Dense(context=8192, layers=28, heads=16, hidden=3072, kv_heads=16, head_dim=256),
    "glm": Dense(context=131072, layers=40, heads=32, hidden=4096, kv_heads=2, head_dim=128),
    "glm4": Dense(context=131072, layers=40, heads=32, hidden=4096, kv_heads=2, head_dim=128),
    "glm4_moe": Dense(context=131072, layers=46, heads=96, hidden=4096, kv_heads=8),
    "glm4v_moe_text": Dense(context=65536, layers=46, heads=96, hidden=4096, kv_heads=8),
    "glm4v_text": Dense(context=32768, layers=40, heads=32, hidden=4096, kv_heads=2),
    "glm_ocr_text": Dense(context=131072, layers=16, heads=16, hidden=1024, kv_heads=8),
    "granite": Dense(context=2048, layers=32, heads=32, hidden=4096),
    "granite4_vision_text": Dense(context=2048, layers=32, heads=32, hidden=4096),
    "granite_docling_text": Dense(context=32768, layers=28, heads=16, hidden=1024, kv_heads=4),
    "granitemoe": Dense(context=2048),
    "granitemoeshared": Dense(context=2048),
    "helium": Dense(context=4096, kv_heads=20, head_dim=128),
    "hy_v3": Dense(context=131072, kv_heads=8, head_dim=128),
    "hyperclovax": Dense(context=2048, layers=32, heads=32, hidden=4096),
    "internlm3": Dense(context=32768, kv_heads=2, head_dim=128),
    "iquestcoder": Dense(context=131072, kv_heads=8, head_dim=128),
    "jais2": Dense(context=8192),
    "jetmoe": Dense(context=4096, kv_heads=16, head_dim=128, prepare=jetmoe_heads),
    "minimax_m2": Dense(context=196608, kv_heads=8, head_dim=128, prepare=attention_everywhere),
    "molmo2_text": Dense(context=36864, layers=36, heads=32, hidden=4096, kv_heads=8, head_dim=128),
    "nanochat": Dense(context=2048),
    "nemotron": Dense(context=4096),
    "olmo": Dense(context=2048),
    "olmo2": Dense(context=2048),
    "olmoe": Dense(context=4096),
    "paddleocr_vl_text": Dense(context=131072, layers=18, heads=16, hidden=1024, kv_heads=2, head_dim=128),
    "phi": Dense(context=2048, layers=24, heads=32, hidden=2048),
    "qwen3_vl_text": Dense(context=128000, layers=32, heads=32, hidden=4096, kv_heads=32, head_dim=128),
    "qwen3_vl_moe_text": Dense(context=128000, layers=24, heads=16, hidden=2048, kv_heads=16),
    "sarvam_moe": Dense(context=131072, kv_heads=4, head_dim=64),
    "seed_oss": Dense(context=524288, kv_heads=8, head_dim=128),
    "solar_open": Dense(context=131072, kv_heads=8, head_dim=128),
    "stablelm": Dense(context=4096, layers=32, heads=32, hidden=2560, kv_heads=32),
    # Published with code of their own.
    "Yi": Dense(own_code=True),
    "aquila": Dense(own_code=True),
    "bailing_moe": Dense(own_code=True),
    "bailing_moe_v2": Dense(own_code=True),
    "deepseek": Dense(own_code=True),
    "ernie4_5_moe_vl": Dense(own_code=True),
    "grok-1": Dense(own_code=True),
    "internlm2": Dense(own_code=True),
    "internlmxcomposer2": Dense(own_code=True),
    "minicpm": Dense(own_code=True),
    "molmo": Dense(own_code=True),
    "orion": Dense(own_code=True),
    "phi3small": Dense(own_code=True, kv_heads=8),
    "skywork": Dense(own_code=True),
    "stablelm_epoch": Dense(own_code=True),
    "step3_text": Dense(own_code=True, names=_GROUPS, contexts=("max_seq_len", "max_position_embedding")),
    "xverse": Dense(own_code=True, prepare=all_heads_unless_printed),
}

LLAMAS = readers_of(LLAMA_FAMILIES)
