"""Dense families to serve."""

from served import Case

CASES = {
    "llama": Case(
        model="LlamaForCausalLM", config={"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    ),
}
