// What a thread works in when many queries attend, and values as it needs them. Included inside the target region of
// cpu_attention.cpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu_avx512.h"
#include "cpu_blocks.h"
#include "cpu_codecs.h"

namespace kvist::avx512 {
namespace {

// What one thread works in.
struct alignas(64) Scratch {
    std::uint32_t q[kMaxTiles][kMaxDim / 2][kLanes]; KVIST_FENCE(q)  // Q^T in pairs
    float out[kMaxTiles][kMaxDim][kLanes]; KVIST_FENCE(out)  // O^T
    float max[kMaxTiles][kLanes]; KVIST_FENCE(max)
    float sum[kMaxTiles][kLanes]; KVIST_FENCE(sum)
    // The last key of each query; lanes without one have the last one's.
    std::int64_t seen[kMaxTiles][kLanes]; KVIST_FENCE(seen)
    float scores[2][kKeys][kLanes]; KVIST_FENCE(scores)
    std::uint32_t weights[2][kKeys / 2][kLanes]; KVIST_FENCE(weights)  // P^T in pairs
    std::uint16_t values[kMaxDim][kKeys]; KVIST_FENCE(values)  // V^T
    std::uint16_t keys[kKeys][kMaxDim]; KVIST_FENCE(keys)  // K, where it is unpacked: rows of `dim`
    std::uint16_t rows[2][kLanes][kMaxDim]; KVIST_FENCE(rows)  // V of two groups of tokens, likewise
};

// V^T of one head for a pass over the keys `first … end - 1`, in `padded` groups of sixteen, an even number; keys that do
// not exist count as 0, whatever their memory holds. Keys and values of a later pass, up to `last_key`, are asked for.
inline void transpose_values(const Geometry& shape, const Blocks& blocks, const Unit& unit, int head, std::int64_t first,
                             std::int64_t end, std::int64_t last_key, int padded, Scratch& s) {
    alignas(64) static const std::uint16_t kLow[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    alignas(64) static const std::uint16_t kHigh[32] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21,
                                                        53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58,
                                                        27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    const __m512i low = _mm512_load_si512(kLow), high = _mm512_load_si512(kHigh);
    const std::int64_t row_bytes = 2 * shape.dim;
    for (int g = 0; g < padded; g += 2) {
        const char* half[2];
        int count[2];
        for (int i = 0; i < 2; ++i) {
            const std::int64_t key = first + (g + i) * kLanes;
            count[i] = static_cast<int>(std::clamp<std::int64_t>(end - key, 0, kLanes));
            if (key + kAhead * kKeys < last_key) {
                const char* ahead = blocks.of(unit, key + kAhead * kKeys);
                blocks.fetch_keys(ahead, head, blocks.slot(key + kAhead * kKeys));
                blocks.fetch_values(ahead, head, blocks.slot(key + kAhead * kKeys));
            }
            const std::int64_t there = count[i] > 0 ? key : first;
            const char* run = blocks.values(unit, head, there);
            if (has_scales(shape.value))
                unpack_values(shape.value, run, shape.block_tokens, blocks.slot(there), shape.dim, count[i],
                              s.values[0] + (g + i) * kLanes, kKeys);
            else
                half[i] = blocks.rows(shape.value, run, blocks.slot(there), count[i], s.rows[i][0]);
        }
        if (has_scales(shape.value)) continue;
        for (int d = 0; d < shape.dim; d += 32) {
            __m512i left[kLanes], right[kLanes];
            for (int i = 0; i < 2; ++i) {
                for (int pair = 0; pair < kLanes / 2; ++pair) {
                    const char* p = half[i] + 2 * pair * row_bytes + 2 * d;
                    const __m512i one = 2 * pair < count[i] ? _mm512_loadu_si512(p) : _mm512_setzero_si512();
                    const __m512i two =
                        2 * pair + 1 < count[i] ? _mm512_loadu_si512(p + row_bytes) : _mm512_setzero_si512();
                    left[i * 8 + pair] = _mm512_permutex2var_epi16(one, low, two);
                    right[i * 8 + pair] = _mm512_permutex2var_epi16(one, high, two);
                }
            }
            transpose(left);
            transpose(right);
            for (int i = 0; i < kLanes; ++i) {
                _mm512_store_si512(&s.values[d + i][g * kLanes], left[i]);
                _mm512_store_si512(&s.values[d + 16 + i][g * kLanes], right[i]);
            }
        }
    }
}

}  // namespace
}  // namespace kvist::avx512
