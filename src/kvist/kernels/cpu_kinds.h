// The kinds of kernels, among which callers choose at run time.
#pragma once

#include "cpu_portable.h"

namespace kvist {

// The operators of a step in bf16; cpu.h says what each does.
struct Kernels {
    void (*multiply)(const Matrix& m, const Team& team, const bf16* x, std::int64_t rows, void* out, const float* bias,
                     const Matrix* next);
    void (*attend)(Plan& plan, const Team& team, int slot, const bf16* q, std::int64_t q_stride, const bf16* kv,
                   std::int64_t kv_stride, bf16* out);
    void (*rotate)(const Team& team, bf16* x, std::int64_t rows, std::int64_t stride, int heads, int dim,
                   const float* cos, const float* sin, const float* weight, float eps);
    void (*spread)(const Team& team, bf16* x, std::int64_t rows, std::int64_t stride, int heads, int dim, float factor);
    void (*add_norm)(const Team& team, bf16* stream, const bf16* change, const float* after, const float* weight,
                     bf16* out, std::int64_t rows, std::int64_t width, float eps);
};

// By number: AVX-512 with BF16, the same with the matrix unit, then the portable ones for every processor of the
// architecture, for AVX2 and for AVX-512. Throws std::invalid_argument where there are none.
constexpr int kAvx512 = 0, kAmx = 1, kPortable = 2;
const Kernels& kernels_of(int kind);

// The portable kernels' attention in any type, of a build: 0 for every processor, 1 for AVX2, 2 for AVX-512.
void attend(int build, Plan& plan, const Team& team, const portable::Call& call);

}  // namespace kvist
