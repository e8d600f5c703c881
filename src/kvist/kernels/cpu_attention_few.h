// Attention of one token's few queries of a KV head, as a decode has them, on the matrix unit.
#pragma once

#include <cstdint>

#include "cpu.h"

namespace kvist::avx512 {

constexpr int kFew = 8;  // queries of a KV head

// Whether a unit is one token's, and has so few.
inline bool are_few(const Plan& plan, const Unit& unit) {
    return unit.end_row == unit.first_row + 1 && plan.shape().repeats <= kFew;
}

// Runs such a unit for some KV heads, whose queries are sixteen at most together. Leaves the matrix unit's tiles in
// shapes of its own. Arguments as of `attend`, the arena that of the layer; results also go to the plan's partials.
void attend_few(Plan& plan, const char* arena, const bf16* q, std::int64_t q_stride, const Unit& unit, int head,
                int heads, bf16* out);

}  // namespace kvist::avx512
