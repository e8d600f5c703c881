// The operators of a step for processors without AVX-512's BF16 instructions: attention over any codec on either side,
// queries and results in any type, computed in float32; products with stored weights; norms and rotation in bf16.
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

// Of each build; what comes out does not depend on the team's threads.
//
//     attend     stores the step's keys and values of one layer, then attends; it depends on how the plan was cut
//     others     as their namesakes in cpu.h, in bf16
#define KVIST_PORTABLE_OPERATORS                                                                                     \
    void attend(Plan& plan, const Team& team, const Call& call);                                                      \
    void multiply(const Matrix& m, const Team& team, const bf16* x, std::int64_t rows, void* out, const float* bias); \
    void rotate(const Team& team, bf16* x, std::int64_t rows, std::int64_t stride, int heads, int dim,                \
                const float* cos, const float* sin, const float* weight, float eps);                                  \
    void spread(const Team& team, bf16* x, std::int64_t rows, std::int64_t stride, int heads, int dim, float factor); \
    void add_norm(const Team& team, bf16* stream, const bf16* change, const float* after, const float* weight,        \
                  bf16* out, std::int64_t rows, std::int64_t width, float eps);

namespace baseline {
KVIST_PORTABLE_OPERATORS
}
namespace avx2 {
KVIST_PORTABLE_OPERATORS
bool supported();
}  // namespace avx2
namespace avx512 {
KVIST_PORTABLE_OPERATORS
bool supported();
}  // namespace avx512

#undef KVIST_PORTABLE_OPERATORS

}  // namespace kvist::portable
