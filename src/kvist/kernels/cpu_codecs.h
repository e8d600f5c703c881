// Keys and values as they are stored, for AVX-512: sixteen tokens' are unpacked to bf16; cpu_encode.h packs them, one
// token's at a time. Included inside a file's target region. store/codecs.py draws the layouts and is the oracle:
//
//     keys                 rows of tokens; under codecs with scales the codes of all of a block's tokens, then the scales
//     … of channels        likewise, the scales and then the minima of a run of 32 tokens, one a dim
//     values without scale likewise
//     values with scales   codes of one dim of all tokens, then the next dim's; scales likewise, one of 32 dims
//
// A vector of keys is one token's 32 elements under one scale, a vector of values sixteen tokens of one dim under
// their sixteen scales: nothing is summed across lanes, and values need no transposing.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu.h"
#include "cpu_avx512.h"

namespace kvist::avx512 {

constexpr int kGroup = 32;  // elements under one scale

inline __m512 of_halves(const std::uint16_t* p, __mmask16 mask) {
    return _mm512_cvtph_ps(load_halves(p, mask));
}

inline __m512 of_half(const char* p) {
    std::uint16_t bits;
    std::memcpy(&bits, p, 2);
    return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(bits)));
}

// e4m3 in 32-bit lanes. Its bits, moved to float32's places, are the number times 2^-120, subnormal ones too; all ones
// behind the sign are no number.
inline __m512 of_fp8(__m512i bits) {
    const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x80)), 24);
    const __m512i rest = _mm512_slli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(0x7f)), 20);
    const __mmask16 none = _mm512_cmpeq_epi32_mask(rest, _mm512_set1_epi32(0x7f << 20));
    const __m512i small = _mm512_mask_mov_epi32(_mm512_or_si512(sign, rest), none, _mm512_set1_epi32(0x7fc00000));
    return _mm512_mul_ps(_mm512_castsi512_ps(small), _mm512_castsi512_ps(_mm512_set1_epi32((127 + 120) << 23)));
}

inline __m512i bytes(const char* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline __m512 signed_bytes(const char* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// Codes 0 … 15 as numbers, from `first` up. Only the lowest four bits of an index count.
inline __m512 codes_from(float first) {
    return _mm512_add_ps(_mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_ps(first));
}

inline void store_pair(bf16* p, __m512 low, __m512 high) {
    _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
}

// Tokens `slot … slot + 15` of a run stored in rows, to bf16 `[16, dim]`; of `count` tokens, zeros behind them.
//   tokens   of a block
inline void unpack_rows(Codec codec, const char* run, int tokens, int slot, int dim, int count, bf16* to) {
    const int groups = dim / kGroup;
    const __m512 signed_codes = codes_from(-8), plain_codes = codes_from(0);
    for (int t = 0; t < kLanes; ++t) {
        bf16* row = to + static_cast<std::int64_t>(t) * dim;
        if (t >= count) {
            std::memset(row, 0, 2 * static_cast<std::size_t>(dim));
            continue;
        }
        const std::int64_t token = slot + t;
        switch (codec) {
            case Codec::kBfloat16:
                std::memcpy(row, run + token * dim * 2, 2 * static_cast<std::size_t>(dim));
                break;
            case Codec::kFloat16: {
                const auto* from = reinterpret_cast<const std::uint16_t*>(run) + token * dim;
                for (int d = 0; d < dim; d += kGroup)
                    store_pair(row + d, of_halves(from + d, 0xffff), of_halves(from + d + kLanes, 0xffff));
                break;
            }
            case Codec::kFloat32: {
                const auto* from = reinterpret_cast<const float*>(run) + token * dim;
                for (int d = 0; d < dim; d += kGroup)
                    store_pair(row + d, _mm512_loadu_ps(from + d), _mm512_loadu_ps(from + d + kLanes));
                break;
            }
            case Codec::kFp8: {
                const char* from = run + token * dim;
                for (int d = 0; d < dim; d += kGroup)
                    store_pair(row + d, of_fp8(bytes(from + d)), of_fp8(bytes(from + d + kLanes)));
                break;
            }
            case Codec::kInt8: {
                const char* from = run + token * dim;
                const char* scales = run + static_cast<std::int64_t>(tokens) * dim + token * groups * 2;
                for (int g = 0; g < groups; ++g, from += kGroup) {
                    const __m512 scale = of_half(scales + 2 * g);
                    store_pair(row + g * kGroup, _mm512_mul_ps(scale, signed_bytes(from)),
                               _mm512_mul_ps(scale, signed_bytes(from + kLanes)));
                }
                break;
            }
            case Codec::kInt4: {
                const char* from = run + token * dim / 2;
                const char* scales = run + static_cast<std::int64_t>(tokens) * dim / 2 + token * groups * 2;
                for (int g = 0; g < groups; ++g, from += kLanes) {
                    const __m512 scale = of_half(scales + 2 * g);
                    const __m512i both = bytes(from);
                    store_pair(row + g * kGroup, _mm512_mul_ps(scale, _mm512_permutexvar_ps(both, signed_codes)),
                               _mm512_mul_ps(scale, _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), signed_codes)));
                }
                break;
            }
            case Codec::kInt4Affine: {
                const char* from = run + token * dim / 2;
                const char* scales = run + static_cast<std::int64_t>(tokens) * dim / 2 + token * groups * 4;
                for (int g = 0; g < groups; ++g, from += kLanes) {
                    const __m512 scale = of_half(scales + 4 * g), least = of_half(scales + 4 * g + 2);
                    const __m512i both = bytes(from);
                    store_pair(
                        row + g * kGroup,
                        _mm512_fmadd_ps(scale, _mm512_permutexvar_ps(both, plain_codes), least),
                        _mm512_fmadd_ps(scale, _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), plain_codes), least));
                }
                break;
            }
            case Codec::kInt4Channels: {
                const char* from = run + token * dim / 2;
                const char* shared = run + static_cast<std::int64_t>(tokens) * dim / 2 + token / kChannelRun * dim * 4;
                const auto* scales = reinterpret_cast<const std::uint16_t*>(shared);
                for (int d = 0; d < dim; d += kGroup, from += kLanes) {
                    const __m512i both = bytes(from);
                    const __m512 low = _mm512_permutexvar_ps(both, plain_codes);
                    const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), plain_codes);
                    store_pair(row + d,
                               _mm512_fmadd_ps(of_halves(scales + d, 0xffff), low, of_halves(scales + dim + d, 0xffff)),
                               _mm512_fmadd_ps(of_halves(scales + d + kLanes, 0xffff), high,
                                               of_halves(scales + dim + d + kLanes, 0xffff)));
                }
                break;
            }
        }
    }
}

// Two dims of sixteen tokens, each to its row.
inline void store_dims(bf16* one, bf16* two, __m512 low, __m512 high) {
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(one), _mm512_castsi512_si256(both));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(two), _mm512_extracti64x4_epi64(both, 1));
}

// Values of tokens `slot … slot + 15` under a codec with scales, to columns of V^T: `[dim, …]`, rows `stride` elements
// apart. Tokens from `count` on count as 0, whatever their memory holds.
inline void unpack_values(Codec codec, const char* run, int tokens, int slot, int dim, int count, bf16* to, int stride) {
    const int groups = dim / kGroup;
    const auto mask = static_cast<__mmask16>(count >= kLanes ? 0xffff : (1u << count) - 1);
    const bool bytewise = codec == Codec::kInt8;
    const std::int64_t code_bytes = static_cast<std::int64_t>(tokens) * dim / (bytewise ? 1 : 2);
    const auto* scales = reinterpret_cast<const std::uint16_t*>(run + code_bytes) + slot;
    const auto* minima = scales + static_cast<std::int64_t>(groups) * tokens;
    const bool affine = codec == Codec::kInt4Affine;
    const __m512 codes = codes_from(affine ? 0 : -8);
    for (int g = 0; g < groups; ++g) {
        const __m512 scale = of_halves(scales + static_cast<std::int64_t>(g) * tokens, mask);
        bf16* row = to + static_cast<std::int64_t>(g) * kGroup * stride;
        if (bytewise) {
            const char* from = run + static_cast<std::int64_t>(g) * kGroup * tokens + slot;
            for (int d = 0; d < kGroup; d += 2, from += 2 * static_cast<std::int64_t>(tokens))
                store_dims(row + d * stride, row + (d + 1) * stride, _mm512_mul_ps(scale, signed_bytes(from)),
                           _mm512_mul_ps(scale, signed_bytes(from + tokens)));
            continue;
        }
        const __m512 least =
            affine ? of_halves(minima + static_cast<std::int64_t>(g) * tokens, mask) : _mm512_setzero_ps();
        const char* from = run + static_cast<std::int64_t>(g) * kGroup / 2 * tokens + slot;
        for (int d = 0; d < kGroup; d += 4) {
            for (int j = 0; j < 2; ++j, from += tokens) {
                const __m512i both = bytes(from);
                const __m512 low = _mm512_permutexvar_ps(both, codes);
                const __m512 high = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), codes);
                store_dims(row + (d + j) * stride, row + (d + j + 2) * stride, _mm512_fmadd_ps(scale, low, least),
                           _mm512_fmadd_ps(scale, high, least));
            }
        }
    }
}

}  // namespace kvist::avx512
