"""Families with windows or chunks on some layers or all.

Source of each line: the configuration and modelling files of that name in transformers 5.24; for names that
transformers does not have, the code that is published with the models.
"""

from kvist.spec.families import windows
from kvist.spec.families.dense import Dense, readers_of
from kvist.spec.families.own_keys import modernbert_window, phi3_layers
from kvist.spec.families.windows import everywhere, full_every, full_first, full_from_the_end

_GEMMA2 = Dense(
    context=8192, layers=26, heads=8, hidden=2304, kv_heads=4, head_dim=256, rule=full_every(2), window=4096
)

WINDOWED_FAMILIES = {
    # One window for all layers, or none.
    "ministral": Dense(context=131072, kv_heads=8, rule=everywhere(4096), window=4096),
    "ministral3": Dense(
        context=262144, layers=34, heads=32, hidden=4096, kv_heads=8, head_dim=128, rule=everywhere()
    ),
    "mixtral": Dense(context=131072, kv_heads=8, rule=everywhere()),
    "phi3": Dense(context=4096, layers=32, heads=32, hidden=3072, rule=everywhere(), prepare=phi3_layers),
    "phi4_multimodal": Dense(context=131072, kv_heads=8, rule=everywhere(), prepare=phi3_layers),
    "phimoe": Dense(context=131072, kv_heads=8, rule=everywhere()),
    "starcoder2": Dense(context=4096, kv_heads=2, rule=everywhere()),
    "voxtral_realtime_text": Dense(
        context=131072, layers=32, heads=32, hidden=4096, kv_heads=8, rule=everywhere(4096), window=4096
    ),
    "phi3_v": Dense(own_code=True, rule=everywhere(), prepare=phi3_layers),
    "phi4mm": Dense(own_code=True, rule=everywhere(), prepare=phi3_layers),
    "arctic": Dense(own_code=True, rule=everywhere()),
    # Windows that are switched on.
    "qwen2_moe": Dense(context=32768, kv_heads=16, rule=windows.switched_alternating, window=4096),
    "qwen3_moe": Dense(context=32768, kv_heads=4, rule=windows.switched_for_all, window=4096),
    "qwen2_vl_text": Dense(
        context=32768, layers=80, heads=64, hidden=8192, kv_heads=8, rule=windows.switched, window=4096
    ),
    "qwen2_5_vl_text": Dense(
        context=32768, layers=80, heads=64, hidden=8192, kv_heads=8, rule=windows.switched, window=4096
    ),
    "qwen2_5_omni_text": Dense(
        context=32768, layers=28, heads=28, hidden=3584, kv_heads=4, rule=windows.switched, window=32768
    ),
    "qwen3_omni_moe_text": Dense(context=32768, layers=28, heads=28, hidden=2048, kv_heads=4, rule=everywhere()),
    "mimo": Dense(own_code=True, kv_heads=32, rule=windows.switched, window=4096),
    "dots_ocr": Dense(own_code=True, kv_heads=32, rule=windows.switched, window=4096),
    "minicpmo": Dense(own_code=True, rule=windows.switched, window=4096),
    "minicpmv": Dense(own_code=True, rule=windows.switched, window=4096),
    "smollm3": Dense(context=32768, kv_heads=4, rule=windows.without_rope),
    "dots1": Dense(context=2048, kv_heads=32, rule=windows.dots, window=4096),
    # Windows between full layers.
    "afmoe": Dense(
        context=16384, head_dim=128, rule=full_every(4, key="global_attn_every_n_layers"), window=1024
    ),
    "beam": Dense(context=8192, kv_heads=8, head_dim=128, rule=full_every(6, last=True), window=512),
    "cohere2": Dense(
        context=8192, layers=40, heads=64, hidden=8192, rule=full_every(4, key="sliding_window_pattern"), window=4096
    ),
    "cohere2_moe": Dense(context=8192, head_dim=128, rule=windows.cohere_moe, window=4096),
    "cwm": Dense(context=131072, kv_heads=8, head_dim=128, rule=full_first(4), window=8192),
    "exaone4": Dense(context=2048, layers=32, heads=32, hidden=4096, kv_heads=32, rule=windows.exaone, window=4096),
    "exaone_moe": Dense(context=2048, kv_heads=32, rule=windows.exaone, window=4096),
    "flint": Dense(context=262144, kv_heads=4, head_dim=128, rule=windows.flint, window=513),
    "gemma2": _GEMMA2,
    "gpt_oss": Dense(context=131072, kv_heads=8, head_dim=64, rule=full_every(2), window=128),
    "granite_swa": Dense(context=8192, kv_heads=4, rule=full_first(4), window=128),
    "granitemoe_swa": Dense(context=2048, rule=full_first(4), window=128),
    "kolibri1": Dense(context=262144, kv_heads=4, head_dim=128, rule=full_every(5), window=513),
    "laguna": Dense(context=131072, kv_heads=8, head_dim=128, window=512),
    "mellum": Dense(context=131072, kv_heads=4, head_dim=128, window=1024),
    "muse_glimmer_text": Dense(
        context=131072, layers=52, heads=32, hidden=6656, kv_heads=2, head_dim=128, rule=full_from_the_end(4),
        window=2048,
    ),
    "muse_spark_text": Dense(
        context=1048576, layers=62, heads=128, hidden=8192, kv_heads=16, head_dim=64, rule=full_from_the_end(4),
        window=2048,
    ),
    "modernbert-decoder": Dense(
        context=8192, rule=full_first(3, key="global_attn_every_n_layers"), window=64, prepare=modernbert_window
    ),
    "olmo3": Dense(context=2048, rule=full_every(4), window=4096),
    "vaultgemma": _GEMMA2,
    # Chunks between full layers.
    "llama4_text": Dense(
        context=131072, layers=48, heads=40, hidden=5120, kv_heads=8, head_dim=128, rule=windows.chunked, chunk=8192
    ),
}  # fmt: skip

WINDOWED = readers_of(WINDOWED_FAMILIES)
