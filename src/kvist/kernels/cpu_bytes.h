// Numbers as two bytes, for products of bytes on the matrix unit. Included inside a file's target region.
#pragma once

#include <cstdint>

#include "cpu_avx512.h"

namespace kvist::avx512 {

constexpr float kMost = 127 * 128;  // of a number in two bytes

#define TILE_DOT_BYTES(c, a, b) asm volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)

// A whole number of 15 bits as 128 high + low, both bytes.
inline __m512i high_of(__m512i x) { return _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(64)), 7); }
inline __m512i low_of(__m512i x, __m512i high) { return _mm512_sub_epi32(x, _mm512_slli_epi32(high, 7)); }

inline void store_bytes(std::int8_t* p, __m512i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}

}  // namespace kvist::avx512
