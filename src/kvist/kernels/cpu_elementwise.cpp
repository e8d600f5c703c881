// Norms and rotation in bf16, computed in float32.

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu_avx512_begin.h"
#include "cpu_avx512.h"

namespace kvist::avx512 {
namespace {

inline float mean_square(const bf16* x, std::int64_t width) {
    __m512 sum = _mm512_setzero_ps();
    std::int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        const __m512 v = load(x + i);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    float total = _mm512_reduce_add_ps(sum);
    for (; i < width; ++i) {
        std::uint32_t bits = static_cast<std::uint32_t>(x[i]) << 16;
        float v;
        std::memcpy(&v, &bits, 4);
        total += v * v;
    }
    return total / static_cast<float>(width);
}

// The fast transform of Walsh and Hadamard, of `size` elements, 32 to kMaxDim.
inline void turn(bf16* x, int size, __m512 factor) {
    __m512 v[kMaxDim / kLanes];
    const int vectors = size / kLanes;
    for (int i = 0; i < vectors; ++i) v[i] = load(x + i * kLanes);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int apart = 1; apart < kLanes; apart *= 2) {
        const __m512i across = _mm512_xor_si512(lanes, _mm512_set1_epi32(apart));
        const __mmask16 upper = _mm512_test_epi32_mask(lanes, _mm512_set1_epi32(apart));
        for (int i = 0; i < vectors; ++i) {
            const __m512 other = _mm512_permutexvar_ps(across, v[i]);
            v[i] = _mm512_mask_sub_ps(_mm512_add_ps(v[i], other), upper, other, v[i]);
        }
    }
    for (int apart = 1; apart < vectors; apart *= 2)
        for (int i = 0; i < vectors; ++i) {
            if ((i & apart) != 0) continue;
            const __m512 one = v[i], other = v[i + apart];
            v[i] = _mm512_add_ps(one, other);
            v[i + apart] = _mm512_sub_ps(one, other);
        }
    for (int i = 0; i < vectors; ++i) store(x + i * kLanes, _mm512_mul_ps(v[i], factor));
}

}  // namespace

void spread(const Team& team, bf16* x, std::int64_t rows, std::int64_t stride, int heads, int dim, float factor) {
    if (heads == 0) return;
    const int size = dim & -dim;
    const __m512 by = _mm512_set1_ps(factor);
    team.share(rows, 16, [&](std::int64_t row) {
        for (int at = 0; at < heads * dim; at += size) turn(x + row * stride + at, size, by);
    });
}

void rotate(const Team& team, bf16* x, std::int64_t rows, std::int64_t stride, int heads, int dim, const float* cos,
            const float* sin, const float* weight, float eps) {
    const int half = dim / 2;
    team.share(rows, 16, [&](std::int64_t row) {
        const float* c = cos + row * half;
        const float* s = sin + row * half;
        for (int head = 0; head < heads; ++head) {
            bf16* v = x + row * stride + static_cast<std::int64_t>(head) * dim;
            const float* w = weight == nullptr ? nullptr : weight + static_cast<std::int64_t>(head) * dim;
            const __m512 share = _mm512_set1_ps(w == nullptr ? 1 : 1 / std::sqrt(mean_square(v, dim) + eps));
            for (int i = 0; i < half; i += kLanes) {
                const __mmask16 mask = lanes_left(half - i);
                __m512 a = load_some(v + i, mask), b = load_some(v + half + i, mask);
                if (w != nullptr) {
                    a = _mm512_mul_ps(_mm512_mul_ps(a, share), load_some(w + i, mask));
                    b = _mm512_mul_ps(_mm512_mul_ps(b, share), load_some(w + half + i, mask));
                }
                const __m512 turn = load_some(c + i, mask), tilt = load_some(s + i, mask);
                store_some(v + i, mask, _mm512_fmsub_ps(a, turn, _mm512_mul_ps(b, tilt)));
                store_some(v + half + i, mask, _mm512_fmadd_ps(b, turn, _mm512_mul_ps(a, tilt)));
            }
        }
    });
}

void add_norm(const Team& team, bf16* stream, const bf16* change, const float* after, const float* weight, bf16* out,
              std::int64_t rows, std::int64_t width, float eps) {
    team.share(rows, 8, [&](std::int64_t row) {
        bf16* x = stream + row * width;
        if (change != nullptr) {
            const bf16* d = change + row * width;
            const __m512 share =
                _mm512_set1_ps(after == nullptr ? 1 : 1 / std::sqrt(mean_square(d, width) + eps));
            for (std::int64_t i = 0; i < width; i += kLanes) {
                const __mmask16 mask = lanes_left(width - i);
                __m512 v = load_some(d + i, mask);
                if (after != nullptr) v = _mm512_mul_ps(_mm512_mul_ps(v, share), load_some(after + i, mask));
                store_some(x + i, mask, _mm512_add_ps(load_some(x + i, mask), v));
            }
        }
        const __m512 share = _mm512_set1_ps(1 / std::sqrt(mean_square(x, width) + eps));
        bf16* to = out + row * width;
        for (std::int64_t i = 0; i < width; i += kLanes) {
            const __mmask16 mask = lanes_left(width - i);
            const __m512 v = _mm512_mul_ps(_mm512_mul_ps(load_some(x + i, mask), share), load_some(weight + i, mask));
            store_some(to + i, mask, v);
        }
    });
}

}  // namespace kvist::avx512

#include "cpu_avx512_end.h"

#else

#include <stdexcept>

namespace kvist::avx512 {
void rotate(const Team&, bf16*, std::int64_t, std::int64_t, int, int, const float*, const float*, const float*, float) {
    throw std::logic_error("built without AVX-512");
}
void spread(const Team&, bf16*, std::int64_t, std::int64_t, int, int, float) {
    throw std::logic_error("built without AVX-512");
}
void add_norm(const Team&, bf16*, const bf16*, const float*, const float*, bf16*, std::int64_t, std::int64_t, float) {
    throw std::logic_error("built without AVX-512");
}
}  // namespace kvist::avx512

#endif
