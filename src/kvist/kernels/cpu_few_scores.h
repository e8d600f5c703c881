// Scores of few queries: S^T [tokens, columns] = K [tokens, dim] x Q^T on the matrix unit, keys in place where they can
// be. Codes are multiplied as bytes, and sums are exact: a query is two bytes, 128 high + low, of the 15 bits that its
// largest element allows. Its columns are both for each of two groups of 32 dims, which the scales of a token's groups
// then weigh. Included inside the target region of cpu_attention_few.cpp.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu_few_pass.h"

namespace kvist::avx512 {

// The sums of the four columns of each of four queries, of four tokens: query by query, four tokens each.
inline __m512 add_columns(const __m512 x[4]) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
}

// Four queries' quarters of sixteen tokens: a vector a query.
inline void join(const __m512 four[4], __m512 to[4]) {
    const __m512 a = _mm512_shuffle_f32x4(four[0], four[1], 0x88), b = _mm512_shuffle_f32x4(four[0], four[1], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(four[2], four[3], 0x88), d = _mm512_shuffle_f32x4(four[2], four[3], 0xdd);
    to[0] = _mm512_shuffle_f32x4(a, c, 0x88);
    to[1] = _mm512_shuffle_f32x4(b, d, 0x88);
    to[2] = _mm512_shuffle_f32x4(a, c, 0xdd);
    to[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}

class FewScores {
  public:
    FewScores(const Geometry& shape, const Blocks& blocks, int head, int heads, FewScratch& scratch)
        : shape_(shape), blocks_(blocks), head_(head), heads_(heads),
          bytes_(has_scales(shape.key) && shape.key != Codec::kInt4Channels),
          affine_(shape.key == Codec::kInt4Affine), bytewise_(shape.key == Codec::kInt8), groups_(shape.dim / kGroup),
          slices_((shape.dim + kSlice - 1) / kSlice), row_bytes_(bytewise_ ? shape.dim : shape.dim / 2),
          fetch_(shape), s_(scratch) {}

    // Queries of all heads: q [repeats, kv_heads, dim].
    void pack(const bf16* q) {
        for (int i = 0; i < heads_; ++i) {
            if (bytes_)
                clear_bytes(i);
            else
                std::memset(s_.q[i * shape_.dim / 2], 0, sizeof(s_.q[0]) * shape_.dim / 2);
            for (int r = 0; r < shape_.repeats; ++r) {
                const bf16* from = q + (static_cast<std::int64_t>(r) * shape_.kv_heads + head_ + i) * shape_.dim;
                if (bytes_) {
                    pack_bytes(from, i, r);
                    continue;
                }
                for (int pair = 0; pair < shape_.dim / 2; ++pair)
                    std::memcpy(&s_.q[i * shape_.dim / 2 + pair][i * shape_.repeats + r], from + 2 * pair, 4);
            }
        }
    }

    // The products of one head with a pass's keys; of bf16 those of all heads come with the first.
    void multiply(const Pass& pass, int i) {
        if (!bytes_) {
            if (i == 0) multiply_rows(pass);
            return;
        }
        for (int set = 0; set * 4 < shape_.repeats; ++set) multiply_bytes(pass, i, set);
    }

    // And S made of them.
    void finish(const Pass& pass, int i) {
        if (!bytes_) {
            if (i == 0) transpose_all(pass);
            return;
        }
        for (int set = 0; set * 4 < shape_.repeats; ++set)
            affine_ ? weigh<true>(pass, i, set) : weigh<false>(pass, i, set);
    }

  private:
    void clear_bytes(int i) {
        for (int set = 0; set * 4 < shape_.repeats; ++set) {
            std::memset(s_.q8[query(i, set, 0)], 0, sizeof(s_.q8[0]) * slices_);
            std::memset(s_.weight[i][set], 0, sizeof(s_.weight[i][set]));
            std::memset(s_.least[i][set], 0, sizeof(s_.least[i][set]));
        }
    }

    void pack_bytes(const bf16* from, int i, int r) {
        const int set = r / 4, column = r % 4 * kColumns;
        __m512i most = _mm512_setzero_si512();
        for (int d = 0; d < shape_.dim; d += kLanes) most = _mm512_max_epi32(most, magnitudes(load(from + d)));
        const float largest = largest_of(most);
        const float step = largest / kMost;
        // Of a query below this nothing is seen in any score; of one that holds no number the step is none either.
        const __m512 share = _mm512_set1_ps(largest > 1e-30f ? kMost / largest : 0);
        for (int c = 0; c < kColumns; ++c) s_.weight[i][set][column + c] = c < 2 ? 128 * step : step;
        for (int d = 0; d < shape_.dim; d += kLanes) {
            const __m512i x = _mm512_cvtps_epi32(_mm512_mul_ps(load(from + d), share));
            const __m512i high = high_of(x);
            const int slice = d / kSlice, group = d / kGroup % 2;
            alignas(16) std::int8_t bytes[2][kLanes];
            store_bytes(bytes[0], high);
            store_bytes(bytes[1], low_of(x, high));
            for (int part = 0; part < 2; ++part)
                for (int four = 0; four < 4; ++four)
                    std::memcpy(&s_.q8[query(i, set, slice)][d % kSlice / 4 + four][(column + 2 * part + group) * 4],
                                bytes[part] + 4 * four, 4);
            s_.least[i][set][slice][column + group] += _mm512_reduce_add_ps(load(from + d));
        }
    }

    int query(int i, int set, int slice) const { return (i * ((shape_.repeats + 3) / 4) + set) * slices_ + slice; }
    int product(int set, int part, int slice) const { return (set * kParts + part) * slices_ + slice; }
    const char* run(const Place& place, int i) const { return place.block + shape_.key_run(head_ + i); }

    void multiply_rows(const Pass& pass) {
        const int steps = shape_.dim / 32;
        const std::int64_t stride = 2 * shape_.dim;
        for (int part = 0; part < pass.parts; part += 2) {
            TILE_ZERO(0);
            TILE_ZERO(1);
            for (int i = 0; i < heads_; ++i) {
                const char* keys[2];
                for (int half = 0; half < 2; ++half) {
                    if (part + half >= pass.parts) {
                        keys[half] = keys[0];
                        continue;
                    }
                    fetch_.keys(pass, part + half, shape_.key_run(head_ + i), 0, 1);
                    const Place& place = pass.places[part + half];
                    const int count = std::min(kLanes, pass.count - (part + half) * kLanes);
                    keys[half] = blocks_.rows(shape_.key, run(place, i), place.slot, count, s_.rows[half][0]);
                }
                for (int step = 0; step < steps; ++step) {
                    TILE_LOAD(4, keys[0] + step * 64, stride);
                    TILE_LOAD(5, keys[1] + step * 64, stride);
                    TILE_LOAD(6, s_.q[i * shape_.dim / 2 + step * kLanes], 64);
                    TILE_DOT(0, 4, 6);
                    TILE_DOT(1, 5, 6);
                }
            }
            TILE_STORE(0, s_.raw[part], 64);
            TILE_STORE(1, s_.raw[part + 1], 64);
        }
    }

    void transpose_all(const Pass& pass) {
        for (int part = 0; part < pass.parts; ++part) {
            __m512i x[kLanes];
            for (int t = 0; t < kLanes; ++t) x[t] = _mm512_load_si512(s_.raw[part][t]);
            if (part % 4 == 2) TILE_STAY_AWAKE();
            transpose(x);
            for (int row = 0; row < heads_ * shape_.repeats; ++row)
                _mm512_store_si512(s_.scores[row] + part * kLanes, x[row]);
        }
    }

    void multiply_bytes(const Pass& pass, int i, int set) {
        TILE_LOAD(6, s_.q8[query(i, set, 0)], 64);
        for (int part = 0; part < pass.parts; ++part) {
            if (set == 0) fetch_.keys(pass, part, shape_.key_run(head_ + i), 0, 2);
            const Place& place = pass.places[part];
            const char* codes = run(place, i) + place.slot * row_bytes_;
            std::int64_t stride = shape_.dim;
            if (!bytewise_) {
                std::int8_t* to = s_.keys[part % 2];
                unpack(codes, to);
                codes = reinterpret_cast<const char*>(to);
                stride = slices_ * kSlice;
            }
            for (int slice = 0; slice < slices_; ++slice, codes += kSlice) {
                // By turns, so that the next need not wait for this.
                if ((part + slice) % 2 == 0) {
                    TILE_ZERO(0);
                    TILE_LOAD(4, codes, stride);
                    if (slices_ > 1) TILE_LOAD(6, s_.q8[query(i, set, slice)], 64);
                    TILE_DOT_BYTES(0, 4, 6);
                    TILE_STORE(0, s_.raw[product(set, part, slice)], 64);
                } else {
                    TILE_ZERO(1);
                    TILE_LOAD(5, codes, stride);
                    if (slices_ > 1) TILE_LOAD(6, s_.q8[query(i, set, slice)], 64);
                    TILE_DOT_BYTES(1, 5, 6);
                    TILE_STORE(1, s_.raw[product(set, part, slice)], 64);
                }
            }
        }
    }

    // Sixteen tokens' codes of 4 bits as bytes; signed ones were stored with 8 added.
    void unpack(const char* codes, std::int8_t* to) const {
        const __m512i fours = _mm512_set1_epi8(0x0f), zeros = _mm512_set1_epi8(affine_ ? 0 : 8);
        const __m512i shift = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0);
        const __m512i twice = _mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0);
        for (int t = 0; t < kLanes; ++t, codes += row_bytes_) {
            for (int d = 0; d < shape_.dim; d += kSlice, to += kSlice) {
                // Of an odd last group the half behind it is not there.
                const __mmask8 there = shape_.dim - d > kGroup ? 0xf : 0x3;
                is_read(codes + d / 2, there == 0xf ? kGroup : kGroup / 2);
                const __m256i packed = _mm256_maskz_loadu_epi64(there, codes + d / 2);
                const __m512i both = _mm512_permutexvar_epi64(twice, _mm512_castsi256_si512(packed));
                const __m512i bytes = _mm512_and_si512(_mm512_srlv_epi64(both, shift), fours);
                _mm512_store_si512(to, _mm512_sub_epi8(bytes, zeros));
            }
        }
    }

    // S of four queries from their products with codes.
    template <bool kAffine>
    void weigh(const Pass& pass, int i, int set) {
        constexpr int kScaleBytes = kAffine ? 4 : 2;
        const std::int64_t stride = groups_ * kScaleBytes;
        // A slice's second group may lie behind the end; what is read of it counts as 0.
        const __mmask16 last = groups_ % 2 != 0 ? 0x5555 : 0xffff;
        const __m512 weight = _mm512_load_ps(s_.weight[i][set]);
        const int queries = std::min(4, shape_.repeats - set * 4);
        for (int part = 0; part < pass.parts; ++part) {
            const Place& place = pass.places[part];
            const char* scales = run(place, i) + shape_.block_tokens * row_bytes_ + place.slot * stride;
            __m512 four[4], to[4];
            alignas(64) float wide[kLanes * (kGroups + 1)];
            if constexpr (!kAffine) {
                const auto* halves = reinterpret_cast<const std::uint16_t*>(scales);
                for (int g = 0; g < groups_; ++g)
                    _mm512_store_ps(wide + g * kLanes, of_halves(halves + g * kLanes, 0xffff));
            }
            for (int quarter = 0; quarter < 4; ++quarter, scales += 4 * stride) {
                __m512 x[4];
                for (int t = 0; t < 4; ++t) x[t] = _mm512_setzero_ps();
                for (int slice = 0; slice < slices_; ++slice) {
                    const __mmask16 mask = slice + 1 == slices_ ? last : 0xffff;
                    const char* at = scales + 2 * slice * kScaleBytes;
                    for (int t = 0; t < 4; ++t, at += stride) {
                        const auto* sums = s_.raw[product(set, part, slice)][4 * quarter + t];
                        const __m512 product = _mm512_cvtepi32_ps(_mm512_load_si512(sums));
                        if constexpr (kAffine) {
                            __m512 scale, least;
                            columns(at, mask, scale, least);
                            x[t] = _mm512_fmadd_ps(product, _mm512_mul_ps(weight, scale), x[t]);
                            x[t] = _mm512_fmadd_ps(least, _mm512_load_ps(s_.least[i][set][slice]), x[t]);
                        } else {
                            double both;
                            std::memcpy(&both, wide + (4 * quarter + t) * groups_ + 2 * slice, 8);
                            x[t] = _mm512_mask3_fmadd_ps(product, _mm512_castpd_ps(_mm512_set1_pd(both)), x[t], mask);
                        }
                    }
                }
                if constexpr (!kAffine)
                    for (int t = 0; t < 4; ++t) x[t] = _mm512_mul_ps(weight, x[t]);
                four[quarter] = add_columns(x);
            }
            if (part % 4 == 2) TILE_STAY_AWAKE();
            if (set == 0) fetch_.keys(pass, part, shape_.key_run(head_ + i), 1, 2);
            join(four, to);
            for (int r = 0; r < queries; ++r)
                _mm512_store_ps(s_.scores[i * shape_.repeats + set * 4 + r] + part * kLanes, to[r]);
        }
    }

    // A token's scales of two groups by turns, and their least values.
    static void columns(const char* at, __mmask16 mask, __m512& scale, __m512& least) {
        std::int64_t both;
        std::memcpy(&both, at, 8);
        const __m256i all = _mm256_set1_epi64x(both);
        const __m256i scales = _mm256_set1_epi32(0x05040100), leasts = _mm256_set1_epi32(0x07060302);
        scale = _mm512_maskz_cvtph_ps(mask, _mm256_shuffle_epi8(all, scales));
        least = _mm512_maskz_cvtph_ps(mask, _mm256_shuffle_epi8(all, leasts));
    }

    const Geometry& shape_;
    const Blocks& blocks_;
    const int head_, heads_;
    const bool bytes_, affine_, bytewise_;
    const int groups_, slices_;
    const std::int64_t row_bytes_;
    const Fetch fetch_;
    FewScratch& s_;
};

}  // namespace kvist::avx512
