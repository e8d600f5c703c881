// Keys and values into the layouts that cpu_codecs.h draws: one token's, or a run of tokens' under scales of channels.
// Included inside a file's target region.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu.h"
#include "cpu_avx512.h"
#include "cpu_codecs.h"

namespace kvist::avx512 {

// f16, saturated.
inline std::uint16_t half_bits(float x) {
    x = std::min(std::max(x, -65504.0f), 65504.0f);
    const __m256i halves = _mm512_cvtps_ph(_mm512_set1_ps(x), _MM_FROUND_TO_NEAREST_INT);
    return static_cast<std::uint16_t>(_mm_extract_epi16(_mm256_castsi256_si128(halves), 0));
}

inline float half_value(std::uint16_t bits) {
    return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits))));
}

// 32 elements as codes, with their scale and, where the codec has one, their minimum.
struct Packed {
    std::uint8_t codes[kGroup];
    std::uint16_t scale, least;
};

inline void pack_group(Codec codec, const bf16* from, Packed& packed) {
    const __m512 low = load(from), high = load(from + kLanes);
    float scale, shift = 0;
    int least_code, most_code, zero = 0;
    packed.least = 0;
    if (_mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q) != 0) {
        // One that is no number leaves none of the 32.
        std::memset(packed.codes, 0, kGroup);
        packed.scale = 0x7e00;
        return;
    }
    if (codec == Codec::kInt4Affine) {
        const float least = _mm512_reduce_min_ps(_mm512_min_ps(low, high));
        const float most = _mm512_reduce_max_ps(_mm512_max_ps(low, high));
        packed.least = half_bits(least);
        shift = half_value(packed.least);
        packed.scale = half_bits((most - least) / 15);
        least_code = 0;
        most_code = 15;
    } else {
        const __m512 one = _mm512_abs_ps(low), two = _mm512_abs_ps(high);
        const float most = _mm512_reduce_max_ps(_mm512_max_ps(one, two));
        if (codec == Codec::kInt8) {
            packed.scale = half_bits(most / 127);
            least_code = -127;
            most_code = 127;
        } else {
            // The first of the largest magnitude, whichever sign it has, takes the code that has no counterpart.
            const __m512 top = _mm512_set1_ps(most);
            const unsigned found = _mm512_cmp_ps_mask(one, top, _CMP_EQ_OQ) |
                                   static_cast<unsigned>(_mm512_cmp_ps_mask(two, top, _CMP_EQ_OQ)) << kLanes;
            const int at = found != 0 ? __builtin_ctz(found) : 0;
            std::uint32_t bits = static_cast<std::uint32_t>(from[at]) << 16;
            float value;
            std::memcpy(&value, &bits, 4);
            packed.scale = half_bits(value / -8);
            least_code = -8;
            most_code = 7;
            zero = 8;
        }
    }
    scale = half_value(packed.scale);
    const __m512 by = _mm512_set1_ps(scale), from_shift = _mm512_set1_ps(shift);
    const __m512i lowest = _mm512_set1_epi32(least_code), highest = _mm512_set1_epi32(most_code);
    const __m512 parts[2] = {low, high};
    for (int half = 0; half < 2; ++half) {
        __m512i code = _mm512_setzero_si512();
        if (scale != 0) {
            // Clamped as numbers: a tiny scale may make one that no integer holds.
            __m512 x = _mm512_div_ps(_mm512_sub_ps(parts[half], from_shift), by);
            x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-200)), _mm512_set1_ps(200));
            code = _mm512_min_epi32(_mm512_max_epi32(_mm512_cvtps_epi32(x), lowest), highest);
        }
        code = _mm512_add_epi32(code, _mm512_set1_epi32(zero));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(packed.codes + half * kLanes), _mm512_cvtepi32_epi8(code));
    }
}

// float32 to e4m3, to nearest even, saturated at 448; what is no number stays none.
inline std::uint8_t to_fp8(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const auto sign = static_cast<std::uint8_t>(bits >> 24 & 0x80);
    bits &= 0x7fffffff;
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    if (bits > 0x7f800000) return sign | 0x7f;
    if (magnitude >= 448) return sign | 0x7e;
    if (magnitude < 0x1p-6f)
        // Adding and taking away what has 2^-9 as its last place rounds to it.
        return sign | static_cast<std::uint8_t>((magnitude + 0x1p14f - 0x1p14f) * 0x1p9f);
    const std::uint32_t rounded = bits + 0x7ffff + (bits >> 20 & 1);
    return sign | static_cast<std::uint8_t>((rounded >> 20) - (120 << 3));
}

// One token's key or value, `slot` of a run stored in rows.
inline void pack_row(Codec codec, char* run, int tokens, int slot, int dim, const bf16* from) {
    const int groups = dim / kGroup;
    const std::int64_t token = slot;
    switch (codec) {
        case Codec::kBfloat16:
            std::memcpy(run + token * dim * 2, from, 2 * static_cast<std::size_t>(dim));
            return;
        case Codec::kFloat16:
            for (int d = 0; d < dim; d += kLanes)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(run + (token * dim + d) * 2),
                                    _mm512_cvtps_ph(load(from + d), _MM_FROUND_TO_NEAREST_INT));
            return;
        case Codec::kFloat32:
            for (int d = 0; d < dim; d += kLanes) _mm512_storeu_ps(run + (token * dim + d) * 4, load(from + d));
            return;
        case Codec::kFp8:
            for (int d = 0; d < dim; ++d) {
                const std::uint32_t bits = static_cast<std::uint32_t>(from[d]) << 16;
                float x;
                std::memcpy(&x, &bits, 4);
                run[token * dim + d] = static_cast<char>(to_fp8(x));
            }
            return;
        default:
            break;
    }
    const bool bytewise = codec == Codec::kInt8, affine = codec == Codec::kInt4Affine;
    const std::int64_t row = bytewise ? dim : dim / 2;
    const int scale_bytes = affine ? 4 : 2;
    char* codes = run + token * row;
    char* scales = run + tokens * row + token * groups * scale_bytes;
    for (int g = 0; g < groups; ++g) {
        Packed packed;
        pack_group(codec, from + g * kGroup, packed);
        if (bytewise)
            std::memcpy(codes + g * kGroup, packed.codes, kGroup);
        else
            for (int i = 0; i < kLanes; ++i)
                codes[g * kLanes + i] = static_cast<char>(packed.codes[i] | packed.codes[i + kLanes] << 4);
        std::memcpy(scales + g * scale_bytes, &packed.scale, 2);
        if (affine) std::memcpy(scales + g * scale_bytes + 2, &packed.least, 2);
    }
}

// Sixteen dims of a run of tokens under scales of channels: what they share, and each token's codes.
inline void pack_channels(const bf16* const* rows, int dim, std::uint16_t* scales, std::uint16_t* minima,
                          std::uint8_t (*codes)[kLanes]) {
    __m512 least = load(rows[0] + dim), most = least;
    __mmask16 none = _mm512_cmp_ps_mask(least, least, _CMP_UNORD_Q);
    for (int t = 1; t < kChannelRun; ++t) {
        const __m512 x = load(rows[t] + dim);
        none |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        least = _mm512_min_ps(least, x);
        most = _mm512_max_ps(most, x);
    }
    const __m512 largest = _mm512_set1_ps(65504), smallest = _mm512_set1_ps(-65504);
    const auto halves = [&](__m512 x) {
        return _mm512_cvtps_ph(_mm512_min_ps(_mm512_max_ps(x, smallest), largest), _MM_FROUND_TO_NEAREST_INT);
    };
    __m256i scale = halves(_mm512_div_ps(_mm512_sub_ps(most, least), _mm512_set1_ps(15)));
    // One that is no number leaves none of its channel.
    scale = _mm256_mask_mov_epi16(scale, none, _mm256_set1_epi16(0x7e00));
    // A zero has no sign.
    __m256i minimum = halves(least);
    const __mmask16 zero = _mm256_cmpeq_epi16_mask(minimum, _mm256_set1_epi16(static_cast<short>(0x8000)));
    minimum = _mm256_maskz_mov_epi16(static_cast<__mmask16>(~(none | zero)), minimum);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(scales + dim), scale);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(minima + dim), minimum);
    const __m512 by = _mm512_cvtph_ps(scale), from = _mm512_cvtph_ps(minimum);
    const __mmask16 coded = static_cast<__mmask16>(_mm512_cmp_ps_mask(by, _mm512_setzero_ps(), _CMP_NEQ_OQ) & ~none);
    for (int t = 0; t < kChannelRun; ++t) {
        const __m512 exact = _mm512_maskz_div_ps(coded, _mm512_sub_ps(load(rows[t] + dim), from), by);
        const __m512 bounded = _mm512_min_ps(_mm512_max_ps(exact, _mm512_setzero_ps()), _mm512_set1_ps(15));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes[t]), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(bounded)));
    }
}

// A run of tokens' keys under scales of channels, from `slot` on.
inline void pack_run(char* run, int tokens, int slot, int dim, const bf16* const* rows) {
    char* shared = run + static_cast<std::int64_t>(tokens) * dim / 2 + static_cast<std::int64_t>(slot) / kChannelRun * dim * 4;
    auto* scales = reinterpret_cast<std::uint16_t*>(shared);
    for (int d = 0; d < dim; d += kGroup) {
        std::uint8_t low[kChannelRun][kLanes], high[kChannelRun][kLanes];
        pack_channels(rows, d, scales, scales + dim, low);
        pack_channels(rows, d + kLanes, scales, scales + dim, high);
        for (int t = 0; t < kChannelRun; ++t)
            for (int i = 0; i < kLanes; ++i)
                run[(static_cast<std::int64_t>(slot + t) * dim + d) / 2 + i] =
                    static_cast<char>(low[t][i] | high[t][i] << 4);
    }
}

// One token's value under a codec with scales.
inline void pack_value(Codec codec, char* run, int tokens, int slot, int dim, const bf16* from) {
    const int groups = dim / kGroup;
    const bool bytewise = codec == Codec::kInt8;
    const std::int64_t stride = tokens;
    char* scales = run + stride * dim / (bytewise ? 1 : 2) + 2 * slot;
    for (int g = 0; g < groups; ++g) {
        Packed packed;
        pack_group(codec, from + g * kGroup, packed);
        if (bytewise) {
            for (int d = 0; d < kGroup; ++d)
                run[(g * kGroup + d) * stride + slot] = static_cast<char>(packed.codes[d]);
        } else {
            for (int i = 0; i < kLanes; ++i) {
                const int d = i / 2 * 4 + i % 2;
                run[(g * kLanes + i) * stride + slot] =
                    static_cast<char>(packed.codes[d] | packed.codes[d + 2] << 4);
            }
        }
        std::memcpy(scales + g * stride * 2, &packed.scale, 2);
        if (codec == Codec::kInt4Affine) std::memcpy(scales + (groups + g) * stride * 2, &packed.least, 2);
    }
}

}  // namespace kvist::avx512
