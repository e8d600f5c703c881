"""Gated delta nets with gated attention, with the head widths and ratios of published models."""

from served import Case

_HEADS = {
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip

CASES = {
    "qwen3.5": Case(model="Qwen3_5ForCausalLM", config=_HEADS),
}
