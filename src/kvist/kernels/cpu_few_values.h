// Outputs of few queries: O [queries, dim] += P [queries, tokens] x V on the matrix unit. Values are the right side, two
// tokens (bf16) or four (bytes) of a dim beside each other. Of values in bytes the scales go into P, which has two rows
// of bytes a query, 128 high + low: 15 bits below the largest of the pass, so that rounding errs by at most 2^-15 of
// that for each token. Included inside the target region of cpu_attention_few.cpp.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu_few_pass.h"

namespace kvist::avx512 {

// Four rows of sixteen bytes, `stride` apart.
inline __m512i four_rows(const char* p, std::int64_t stride) {
    if (stride == kLanes) return _mm512_loadu_si512(p);
    const auto row = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * stride)); };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(row(2)), row(3), 1);
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Sixteen rows of sixteen tokens' bytes become four: four tokens of sixteen rows each.
inline void in_fours(const char* p, std::int64_t stride, __m512i to[4]) {
    alignas(64) static const std::uint32_t kFirst[16] = {0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29};
    alignas(64) static const std::uint32_t kSecond[16] = {2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};
    const __m512i first = _mm512_load_si512(kFirst), second = _mm512_load_si512(kSecond);
    __m512i x[4];
    for (int i = 0; i < 4; ++i) x[i] = four_rows(p + 4 * i * stride, stride);
    const __m512i a = _mm512_permutex2var_epi32(x[0], first, x[1]), b = _mm512_permutex2var_epi32(x[2], first, x[3]);
    const __m512i c = _mm512_permutex2var_epi32(x[0], second, x[1]), d = _mm512_permutex2var_epi32(x[2], second, x[3]);
    to[0] = _mm512_shuffle_i64x2(a, b, 0x44);
    to[1] = _mm512_shuffle_i64x2(a, b, 0xee);
    to[2] = _mm512_shuffle_i64x2(c, d, 0x44);
    to[3] = _mm512_shuffle_i64x2(c, d, 0xee);
}

class FewValues {
  public:
    FewValues(const Geometry& shape, const Blocks& blocks, int head, FewScratch& scratch)
        : shape_(shape), blocks_(blocks), head_(head), bytes_(has_scales(shape.value)),
          affine_(shape.value == Codec::kInt4Affine), bytewise_(shape.value == Codec::kInt8),
          groups_(shape.dim / kGroup), tile_rows_(bytes_ ? kKeys / 4 : kKeys / 2), fetch_(shape), s_(scratch) {}

    bool in_bytes() const { return bytes_; }

    // Rows of the left side for one query.
    int rows() const { return bytes_ ? 2 : 1; }

    // A head's values of a pass, as the right side of products.
    void unpack(const Pass& pass, int i, int turn) {
        for (int part = 0; part < pass.parts; ++part) {
            fetch_.values(pass, part, shape_.value_run(head_ + i));
            if (part % 4 == 3) TILE_STAY_AWAKE();
            if (bytes_)
                unpack_bytes(run(pass.places[part], i) + pass.places[part].slot, part, turn);
            else
                unpack_pairs(pass, i, part, turn);
        }
        // Tokens that do not exist count as 0, whatever their memory holds.
        if (!bytes_ && pass.parts % 2 != 0)
            for (int tile = 0; tile < shape_.dim / kLanes; ++tile)
                std::memset(s_.v[turn][tile * tile_rows_ + pass.parts * 8], 0, sizeof(s_.v[turn][0]) * 8);
    }

    // P times the scales in bytes, from P in `scores`.
    void weigh(const Pass& pass, int i, int turn) {
        const int tokens = shape_.block_tokens;
        const std::uint16_t* scales[kParts];
        __mmask16 there[kParts];
        for (int part = 0; part < pass.parts; ++part) {
            scales[part] = scales_of(pass.places[part], i);
            there[part] = lanes_left(pass.count - part * kLanes);
        }
        for (int g = 0; g < groups_; ++g) {
            __m512 scale[kParts];
            for (int part = 0; part < kParts; ++part)
                scale[part] = part < pass.parts
                                  ? of_halves(scales[part] + static_cast<std::int64_t>(g) * tokens, there[part])
                                  : _mm512_setzero_ps();
            TILE_STAY_AWAKE();
            for (int r = 0; r < shape_.repeats; ++r)
                steps_[g][r] = weigh(s_.scores[i * shape_.repeats + r], s_.p8[turn] + 2 * (g * shape_.repeats + r), scale);
        }
        if (!affine_) return;
        for (int g = 0; g < groups_; ++g) {
            __m512 least[kParts];
            for (int part = 0; part < pass.parts; ++part)
                least[part] = of_halves(scales[part] + static_cast<std::int64_t>(groups_ + g) * tokens, there[part]);
            for (int r = 0; r < shape_.repeats; ++r) {
                const float* p = s_.scores[i * shape_.repeats + r];
                __m512 sum = _mm512_setzero_ps();
                for (int part = 0; part < pass.parts; ++part)
                    sum = _mm512_fmadd_ps(_mm512_load_ps(p + part * kLanes), least[part], sum);
                shifts_[g][r] = _mm512_reduce_add_ps(sum);
            }
        }
    }

    // P V of a head; of values in bf16 O has it then.
    void multiply(int parts, int i, int turn) {
        if (bytes_)
            multiply_bytes(parts, turn);
        else
            multiply_pairs(parts, i, turn);
    }

    // Adds the products of bytes to O.
    void finish(int i) {
        if (!bytes_) return;
        for (int g = 0; g < groups_; ++g) {
            for (int r = 0; r < shape_.repeats; ++r) {
                float* out = s_.out + (i * shape_.repeats + r) * shape_.dim + g * kGroup;
                const __m512 step = _mm512_set1_ps(steps_[g][r]), shift = _mm512_set1_ps(affine_ ? shifts_[g][r] : 0);
                for (int half = 0; half < 2; ++half) {
                    const auto& product = s_.product[2 * g + half];
                    const __m512i high = _mm512_slli_epi32(_mm512_load_si512(product[2 * r]), 7);
                    const __m512i both = _mm512_add_epi32(high, _mm512_load_si512(product[2 * r + 1]));
                    const __m512 before = _mm512_add_ps(shift, _mm512_loadu_ps(out + half * kLanes));
                    _mm512_storeu_ps(out + half * kLanes, _mm512_fmadd_ps(step, _mm512_cvtepi32_ps(both), before));
                }
            }
        }
    }

    // Where the 32 dims of two tiles lie in O, two at a time: of bytes in order, of 4 bits two low and two high by
    // turns, of pairs four and four.
    void order(std::uint64_t places[2][8]) const {
        for (int i = 0; i < kLanes; ++i) {
            int from = i;
            if (!bytes_)
                from = i % 2 + i / 4 * 2 + i / 2 % 2 * 8;
            else if (!bytewise_)
                from = i / 2 + i % 2 * 8;
            places[i / 8][i % 8] = static_cast<std::uint64_t>(from);
        }
    }

  private:
    const char* run(const Place& place, int i) const { return place.block + shape_.value_run(head_ + i); }

    const std::uint16_t* scales_of(const Place& place, int i) const {
        const std::int64_t codes = static_cast<std::int64_t>(shape_.block_tokens) * shape_.dim / (bytewise_ ? 1 : 2);
        return reinterpret_cast<const std::uint16_t*>(run(place, i) + codes) + place.slot;
    }

    void unpack_pairs(const Pass& pass, int i, int part, int turn) {
        const int dim = shape_.dim, count = std::min(kLanes, pass.count - part * kLanes);
        const std::int64_t row_bytes = 2 * dim;
        const Place& place = pass.places[part];
        const char* rows = blocks_.rows(shape_.value, run(place, i), place.slot, count, s_.rows[0][0]);
        for (int pair = 0; pair < kLanes / 2; ++pair, rows += 2 * row_bytes) {
            const __mmask32 one = 2 * pair < count ? ~0u : 0, two = 2 * pair + 1 < count ? ~0u : 0;
            for (int d = 0; d < dim; d += 32) {
                if (one != 0) is_read(rows + 2 * d, 64);
                if (two != 0) is_read(rows + row_bytes + 2 * d, 64);
                const __m512i a = _mm512_maskz_loadu_epi16(one, rows + 2 * d);
                const __m512i b = _mm512_maskz_loadu_epi16(two, rows + row_bytes + 2 * d);
                auto* to = s_.v[turn] + d / kLanes * tile_rows_ + part * 8 + pair;
                _mm512_store_si512(to[0], _mm512_unpacklo_epi16(a, b));
                _mm512_store_si512(to[tile_rows_], _mm512_unpackhi_epi16(a, b));
            }
        }
    }

    // Sixteen tokens' codes in fours; those of 4 bits as bytes, signed ones less the 8 that was added.
    void unpack_bytes(const char* codes, int part, int turn) {
        const std::int64_t tokens = shape_.block_tokens;
        const __m512i fours = _mm512_set1_epi8(0x0f), zeros = _mm512_set1_epi8(affine_ ? 0 : 8);
        for (int tile = 0; tile < shape_.dim / kLanes; tile += bytewise_ ? 1 : 2) {
            __m512i x[4];
            in_fours(codes, tokens, x);
            codes += kLanes * tokens;
            auto* to = s_.v[turn] + tile * tile_rows_ + part * 4;
            for (int j = 0; j < 4; ++j) {
                if (bytewise_) {
                    _mm512_store_si512(to[j], x[j]);
                    continue;
                }
                const __m512i low = _mm512_and_si512(x[j], fours);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(x[j], 4), fours);
                _mm512_store_si512(to[j], _mm512_sub_epi8(low, zeros));
                _mm512_store_si512(to[tile_rows_ + j], _mm512_sub_epi8(high, zeros));
            }
        }
    }

    // A query's weights times the values' scales, as two rows of bytes; returns what they are multiples of.
    static float weigh(const float* p, std::int8_t (*to)[kKeys], const __m512 scale[kParts]) {
        __m512 x[kParts];
        __m512i most[kParts];
        for (int part = 0; part < kParts; ++part) {
            x[part] = _mm512_mul_ps(scale[part], _mm512_load_ps(p + part * kLanes));
            most[part] = magnitudes(x[part]);
        }
        for (int half = kParts / 2; half > 0; half /= 2)
            for (int part = 0; part < half; ++part) most[part] = _mm512_max_epi32(most[part], most[part + half]);
        const float largest = largest_of(most[0]);
        // Weights so small beside the largest that was seen add nothing; where one is no number, what is returned is none.
        const __m512 share = _mm512_set1_ps(largest > 1e-30f ? kMost / largest : 0);
        // Packing goes lane by lane, four tokens of each of four vectors; turned about they are in order again.
        const __m512i turned = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        for (int part = 0; part < kParts; part += 4) {
            __m512i high[2], low[2];
            for (int i = 0; i < 2; ++i) {
                const __m512i one = _mm512_cvtps_epi32(_mm512_mul_ps(share, x[part + 2 * i]));
                const __m512i two = _mm512_cvtps_epi32(_mm512_mul_ps(share, x[part + 2 * i + 1]));
                const __m512i whole = _mm512_packs_epi32(one, two);
                high[i] = _mm512_srai_epi16(_mm512_add_epi16(whole, _mm512_set1_epi16(64)), 7);
                low[i] = _mm512_sub_epi16(whole, _mm512_slli_epi16(high[i], 7));
            }
            const __m512i highs = _mm512_packs_epi16(high[0], high[1]), lows = _mm512_packs_epi16(low[0], low[1]);
            _mm512_storeu_si512(to[0] + part * kLanes, _mm512_permutexvar_epi32(turned, highs));
            _mm512_storeu_si512(to[1] + part * kLanes, _mm512_permutexvar_epi32(turned, lows));
        }
        return largest / kMost;
    }

    void multiply_pairs(int parts, int i, int turn) {
        const int row = i * shape_.repeats, dim = shape_.dim;
        for (int d = 0; d < dim; d += 32) {
            float* out = s_.out + row * dim + d;
            TILE_LOAD(2, out, 4 * dim);
            TILE_LOAD(3, out + kLanes, 4 * dim);
            for (int step = 0; step < (parts + 1) / 2; ++step) {
                TILE_LOAD(7, s_.p[turn][row] + step * 32, sizeof(s_.p[turn][0]));
                const auto* v = s_.v[turn] + d / kLanes * tile_rows_ + step * kLanes;
                TILE_LOAD(4, v[0], 64);
                TILE_LOAD(5, v[tile_rows_], 64);
                TILE_DOT(2, 7, 4);
                TILE_DOT(3, 7, 5);
            }
            TILE_STORE(2, out, 4 * dim);
            TILE_STORE(3, out + kLanes, 4 * dim);
        }
    }

    void multiply_bytes(int parts, int turn) {
        for (int g = 0; g < groups_; ++g) {
            TILE_ZERO(2);
            TILE_ZERO(3);
            for (int four = 0; four < (parts + 3) / 4; ++four) {
                const auto* v = s_.v[turn] + 2 * g * tile_rows_ + four * kLanes;
                TILE_LOAD(7, s_.p8[turn][2 * g * shape_.repeats] + four * kSlice, kKeys);
                TILE_LOAD(4, v[0], 64);
                TILE_LOAD(5, v[tile_rows_], 64);
                TILE_DOT_BYTES(2, 7, 4);
                TILE_DOT_BYTES(3, 7, 5);
            }
            TILE_STORE(2, s_.product[2 * g], 64);
            TILE_STORE(3, s_.product[2 * g + 1], 64);
        }
    }

    const Geometry& shape_;
    const Blocks& blocks_;
    const int head_;
    const bool bytes_, affine_, bytewise_;
    const int groups_;
    const int tile_rows_;  // of V
    const Fetch fetch_;
    float steps_[kGroups][kFew];   // what the weights in bytes are multiples of
    float shifts_[kGroups][kFew];  // what least values add
    FewScratch& s_;
};

}  // namespace kvist::avx512
