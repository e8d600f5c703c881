// Layers one after the other: what a framework does between operators takes as long as small steps do.

#include "cpu_chain.h"

#include <cstring>

namespace kvist {

void Chain::run(const Team& threads, const Kernels& kernels, const std::vector<Plan*>& plans,
                const std::vector<const float*>& tables, bf16* stream, bf16* change, bf16* kept, std::int64_t rows,
                std::int64_t count) {
    threads.together(
        [&](const Team& team) { run_layers(team, kernels, plans, tables, stream, change, kept, rows, count); });
}

void Chain::run_layers(const Team& team, const Kernels& kernels, const std::vector<Plan*>& plans,
                       const std::vector<const float*>& tables, bf16* stream, bf16* change, bf16* kept,
                       std::int64_t rows, std::int64_t count) {
    const bf16* late = nullptr;  // what is still to be added to the stream, and the norm that it goes through first
    const float* after = nullptr;
    const auto reserve = [rows](Buffer& buffer, std::int64_t width) {
        return static_cast<bf16*>(buffer.reserve(2 * static_cast<std::size_t>(rows * width)));
    };
    for (std::int64_t index = 0; index < count; ++index) {
        const ChainLayer& layer = layers[static_cast<std::size_t>(index)];
        const std::int64_t hidden = layer.qkv->inputs, width = layer.qkv->outputs;
        const std::int64_t queries = static_cast<std::int64_t>(layer.queries) * layer.dim;
        bf16* normed = reserve(normed_, hidden);
        bf16* projected = reserve(projected_, width);
        bf16* mixed = reserve(mixed_, queries);
        bf16* inner = reserve(inner_, layer.down->inputs);
        kernels.add_norm(team, stream, late, after, layer.before_mixer, normed, rows, hidden, layer.mixer_eps);
        kernels.multiply(*layer.qkv, team, normed, rows, projected, layer.qkv_bias, layer.output);
        kernels.rotate(team, projected, rows, width, layer.queries + layer.kv_heads, layer.dim, tables[2 * layer.rope],
                       tables[2 * layer.rope + 1], layer.heads, layer.heads_eps);
        kernels.spread(team, projected + layer.spread_begin * layer.dim, rows, width,
                       layer.spread_end - layer.spread_begin, layer.dim, layer.spread);
        for (std::int64_t row = 0; kept != nullptr && row < rows; ++row, kept += queries)
            std::memcpy(kept, projected + row * width, 2 * static_cast<std::size_t>(queries));
        kernels.attend(*plans[layer.group], team, layer.slot, projected, width, projected + queries, width, mixed);
        if (layer.turns_back)
            kernels.spread(team, mixed, rows, queries, layer.queries, layer.dim, layer.spread);
        kernels.multiply(*layer.output, team, mixed, rows, change, layer.output_bias, layer.gate_up);
        kernels.add_norm(team, stream, change, layer.after_mixer, layer.before_mlp, normed, rows, hidden, layer.mlp_eps);
        kernels.multiply(*layer.gate_up, team, normed, rows, inner, layer.gate_up_bias, layer.down);
        kernels.multiply(*layer.down, team, inner, rows, change, layer.down_bias,
                         index + 1 < count ? layers[static_cast<std::size_t>(index + 1)].qkv : nullptr);
        late = change;
        after = layer.after_mlp;
    }
}

}  // namespace kvist
