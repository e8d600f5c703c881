// Vectors of AVX-512 and tiles of the matrix unit (AMX), for the files that compute with them. Included inside their
// target region, after the processor's own header.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu.h"
#include "cpu_sanitized.h"

namespace kvist::avx512 {

constexpr int kLanes = 16;
constexpr int kMaxDim = 256;     // of a head
constexpr float kLowest = -200;  // two to the power of this is 0

// What a thread works in, for as long as it lives: a few hundred KiB that every job writes before it reads.
template <class T>
T& of_this_thread() {
    struct Held {
        T* memory = nullptr;
        ~Held() { delete memory; }
    };
    static thread_local Held held;
    if (held.memory == nullptr) held.memory = new T;
    return *held.memory;
}

// ---- the matrix unit ------------------------------------------------------------------------------------------------
// Inline assembly says that memory is read and written, which the compilers' own intrinsics of these do not.

struct alignas(64) TileConfig {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The rows of this thread's tiles, for the sanitizer.
inline std::uint8_t* rows_of_tiles() {
    static thread_local std::uint8_t rows[8];
    return rows;
}

inline void configure(const TileConfig& config) {
    if (kSanitized) std::memcpy(rows_of_tiles(), config.rows, 8);
    asm volatile("ldtilecfg %0" ::"m"(config));
}

// Tiles 0 to 5 have `rows` rows: sums and left sides. Right sides always have sixteen.
inline void tiles_begin(int rows = kLanes) {
    TileConfig config;
    for (int tile = 0; tile < 6; ++tile) config.rows[tile] = static_cast<std::uint8_t>(rows);
    configure(config);
}
inline void tiles_end() { asm volatile("tilerelease"); }

inline void tile_is_read(int tile, const void* p, std::int64_t stride) {
    for (int row = 0; kSanitized && row < rows_of_tiles()[tile]; ++row)
        is_read(static_cast<const char*>(p) + row * stride, 64);
}
inline void tile_is_written(int tile, void* p, std::int64_t stride) {
    for (int row = 0; kSanitized && row < rows_of_tiles()[tile]; ++row)
        is_written(static_cast<char*>(p) + row * stride, 64);
}

#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, p, stride)                                                                                        \
    do {                                                                                                               \
        tile_is_read(t, p, stride);                                                                                    \
        asm volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(p), "r"(static_cast<std::int64_t>(stride)) : "memory");     \
    } while (false)
#define TILE_STORE(t, p, stride)                                                                                       \
    do {                                                                                                               \
        tile_is_written(t, p, stride);                                                                                 \
        asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(p), "r"(static_cast<std::int64_t>(stride)) : "memory"); \
    } while (false)
#define TILE_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// ---- vectors --------------------------------------------------------------------------------------------------------

inline __m512 load(const bf16* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

inline void store(bf16* p, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

// Two to the power of x, for x down to kLowest; relative error below 4e-6, far under the rounding to bf16.
inline __m512 exp2(__m512 x) {
    // Of a number and none these take the second.
    x = _mm512_max_ps(_mm512_set1_ps(kLowest), x);
    const __m512 whole = _mm512_roundscale_ps(x, 0);
    const __m512 f = _mm512_sub_ps(x, whole);
    // Taylor's series of 2^f on [-0.5, 0.5].
    __m512 p = _mm512_set1_ps(1.3333558e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6181291e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

// The same to 8e-5, which is under the rounding of weights to bf16, in half the instructions.
inline __m512 exp2_roughly(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    // Smallest relative error of a cubic on [0, 1].
    __m512 p = _mm512_set1_ps(7.80245033e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.26067209e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.95833507e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.99925223e-1f));
    // Scaling rounds its exponent down by itself.
    return _mm512_scalef_ps(p, x);
}

inline __m512 tanh(__m512 x) {
    const __m512 e = exp2(_mm512_mul_ps(_mm512_min_ps(_mm512_set1_ps(15), x), _mm512_set1_ps(2.8853901f)));
    return _mm512_sub_ps(_mm512_set1_ps(1),
                         _mm512_div_ps(_mm512_set1_ps(2), _mm512_add_ps(e, _mm512_set1_ps(1))));
}

// Magnitudes as whole numbers, among which what is no number is the largest.
inline __m512i magnitudes(__m512 x) { return _mm512_castps_si512(_mm512_abs_ps(x)); }

// The largest magnitude; no number where there is one that is none.
inline float largest_of(__m512i magnitudes) {
    const int bits = _mm512_reduce_max_epi32(magnitudes);
    float largest;
    std::memcpy(&largest, &bits, 4);
    return largest;
}

// Transposes sixteen vectors of sixteen 32-bit elements.
inline void transpose(__m512i r[kLanes]) {
    __m512i t[kLanes];
    for (int i = 0; i < kLanes; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < kLanes; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int half = 0; half < kLanes; half += 8) {
        for (int i = 0; i < 4; ++i) {
            t[half + i] = _mm512_shuffle_i32x4(r[half + i], r[half + i + 4], 0x88);
            t[half + i + 4] = _mm512_shuffle_i32x4(r[half + i], r[half + i + 4], 0xdd);
        }
    }
    for (int i = 0; i < 8; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// ---- products of tiles ----------------------------------------------------------------------------------------------

// C [16, 16] (+)= A [16, 32 x steps] x B, without the matrix unit; B is [16 x steps] rows of sixteen pairs.
template <bool kAdd>
inline void multiply(float* c, const char* a, std::int64_t a_stride, const std::uint32_t* b, int steps) {
    __m512 sum[kLanes];
    for (int i = 0; i < kLanes; ++i) sum[i] = kAdd ? _mm512_load_ps(c + i * kLanes) : _mm512_setzero_ps();
    for (int pair = 0; pair < kLanes * steps; ++pair) {
        const __m512bh right = reinterpret_cast<__m512bh>(_mm512_load_si512(b + pair * kLanes));
        for (int i = 0; i < kLanes; ++i) {
            int both;
            std::memcpy(&both, a + i * a_stride + pair * 4, 4);
            sum[i] = _mm512_dpbf16_ps(sum[i], reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)), right);
        }
    }
    for (int i = 0; i < kLanes; ++i) _mm512_store_ps(c + i * kLanes, sum[i]);
}

// The first elements of sixteen.
inline __mmask16 lanes_left(std::int64_t left) {
    return left >= kLanes ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << left) - 1);
}

inline __m256i load_halves(const std::uint16_t* p, __mmask16 mask) {
    is_read(p, 2 * __builtin_popcount(mask));
    return _mm256_maskz_loadu_epi16(mask, p);
}

// Loads up to sixteen elements, zeros behind them.
inline __m512 load_some(const float* p, __mmask16 mask) {
    is_read(p, 4 * __builtin_popcount(mask));
    return _mm512_maskz_loadu_ps(mask, p);
}

inline __m512 load_some(const bf16* p, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_halves(p, mask)), 16));
}

inline void store_some(bf16* p, __mmask16 mask, __m512 x) {
    is_written(p, 2 * __builtin_popcount(mask));
    _mm256_mask_storeu_epi16(p, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

}  // namespace kvist::avx512
