// Layers of one kind, one after the other, without going back to the framework between them.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu_kinds.h"

namespace kvist {

// A layer of attention and a gated product, with root-mean-square norms; pointers to weights that others own, float32
// but for the matrices. A norm, or a bias, that is null is not there.
struct ChainLayer {
    const Matrix *qkv, *output, *gate_up, *down;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
    const float *before_mixer, *after_mixer, *before_mlp, *after_mlp, *heads;
    float mixer_eps, mlp_eps, heads_eps;
    int slot;         // the layer's place in its group
    int group, rope;  // places in what a run is given
    int queries, kv_heads, dim;
    // Heads, values last, that a rotation spreads by so much in each element, and whether results are turned back.
    int spread_begin, spread_end;
    bool turns_back;
    float spread;
};

class Chain {
  public:
    std::vector<ChainLayer> layers;

    // Runs the first `count` layers over a step's rows.
    //   plans    of each group
    //   tables   cosines and sines of each rotation, by turns: float32 [rows, dim / 2]
    //   stream   bf16 [rows, hidden], in and out; what the last layer adds to it goes to `change`, not normed
    //   kept     where each layer's queries go, [rows, queries, dim] one after the other; null: nowhere
    void run(const Team& team, const Kernels& kernels, const std::vector<Plan*>& plans,
             const std::vector<const float*>& tables, bf16* stream, bf16* change, bf16* kept, std::int64_t rows,
             std::int64_t count);

  private:
    void run_layers(const Team& team, const Kernels& kernels, const std::vector<Plan*>& plans,
                    const std::vector<const float*>& tables, bf16* stream, bf16* change, bf16* kept, std::int64_t rows,
                    std::int64_t count);

    Buffer normed_, projected_, mixed_, inner_;
};

}  // namespace kvist
