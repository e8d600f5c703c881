// What the products share: how weights are cut, and how sums become results. Included inside the target region of a
// file. All is each file's own: the linker is offered nothing that was compiled for AVX-512.
#pragma once

#include "cpu_avx512.h"

namespace kvist::avx512 {

constexpr int kStep = 32;          // inputs of a tile
constexpr int kPanel = 32;         // outputs of a panel
constexpr std::int64_t kFew = 16;  // rows for which 4-bit weights are not decoded

constexpr std::int64_t kFewBytes = 8;  // rows for which codes are multiplied as bytes

// Up to kFewBytes rows of 4- or 8-bit weights, on the matrix unit. x [rows, inputs].
void multiply_bytes(const Matrix& m, const Team& team, const bf16* x, int rows, void* out, const float* bias,
                    const Matrix* next);

// Up to kFew rows of 4-bit weights, on the matrix unit. x [rows, inputs].
void multiply_few(const Matrix& m, const Team& team, const bf16* x, int rows, void* out, const float* bias);

namespace {

// Memory that the caller of a product lays out for all threads.
struct Shared {
    Buffer memory;
};

inline __m512 silu(__m512 x) {
    const __m512 e = exp2(_mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-80)), _mm512_set1_ps(-1.44269504f)));
    return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1)));
}

inline __m512 gelu_tanh(__m512 x) {
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    const __m512 inner = _mm512_mul_ps(_mm512_set1_ps(0.7978845608f),
                                       _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x));
    const __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
    return _mm512_fmadd_ps(half, tanh(_mm512_max_ps(inner, _mm512_set1_ps(-15))), half);
}

// Rows `begin … end - 1` of a panel's float32 sums to the output: [rows, 32], or 16 where gates are multiplied in.
inline void write(const Matrix& m, const float* sums, std::int64_t panel, int begin, int end, void* out,
                  std::int64_t first_row, const float* bias) {
    const __m512 b0 = bias == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(bias + panel * kPanel);
    const __m512 b1 = bias == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(bias + panel * kPanel + kLanes);
    for (int row = begin; row < end; ++row) {
        const __m512 x0 = _mm512_add_ps(_mm512_load_ps(sums + row * kPanel), b0);
        const __m512 x1 = _mm512_add_ps(_mm512_load_ps(sums + row * kPanel + kLanes), b1);
        const std::int64_t at = (first_row + row) * m.outputs + panel * kPanel;
        switch (m.result) {
            case Matrix::kFloat32:
                _mm512_storeu_ps(static_cast<float*>(out) + at, x0);
                _mm512_storeu_ps(static_cast<float*>(out) + at + kLanes, x1);
                break;
            case Matrix::kSilu:
                store(static_cast<bf16*>(out) + at / 2, _mm512_mul_ps(silu(x0), x1));
                break;
            case Matrix::kGelu:
                store(static_cast<bf16*>(out) + at / 2, _mm512_mul_ps(gelu_tanh(x0), x1));
                break;
            default:
                _mm512_storeu_si512(static_cast<bf16*>(out) + at,
                                    reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x1, x0)));
        }
    }
}

}  // namespace
}  // namespace kvist::avx512
