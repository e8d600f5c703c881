// Paged attention for processors without AVX-512's BF16 instructions: any codec on either side, queries and results in
// any type, computed in float32.
//
// The same code is compiled once for what every processor of an architecture has (SSE2, or NEON), and on x86 twice more:
// for AVX2 with FMA and F16C, and for AVX-512. Which of them runs is chosen when it is called.
#pragma once

#include <cstdint>

#include "cpu.h"
#include "cpu_sanitized.h"

namespace kvist::portable {

// Of queries, new keys and values, and results.
enum class Type : int { kBfloat16, kFloat16, kFloat32 };

// One layer of one step.
struct Call {
    Type type;
    int slot;             // the layer's place in the group
    const void* q;        // [rows, repeats, kv_heads, dim], rows `q_stride` elements apart
    std::int64_t q_stride;
    const void* kv;       // [rows, 2 x kv_heads, dim], rows `kv_stride` elements apart
    std::int64_t kv_stride;
    const float* sinks;   // [repeats, kv_heads]: scores that take part in the softmax and have no value; or none
    void* out;            // [rows, repeats, kv_heads, dim], dense
};

// Blocks are whole vectors of 16 tokens, heads a multiple of 16 wide (of 32 under a codec with scales), at most this.
constexpr int kMaxDim = 512;

// Stores the step's keys and values of one layer, then attends. What comes out does not depend on the team's threads,
// only on how the plan was cut.
namespace baseline {
void attend(Plan& plan, const Team& team, const Call& call);
}
namespace avx2 {
void attend(Plan& plan, const Team& team, const Call& call);
bool supported();
}
namespace avx512 {
void attend(Plan& plan, const Team& team, const Call& call);
bool supported();
}

}  // namespace kvist::portable
