// Attention of many queries: one unit of a plan, for one KV head or several. Included inside the target region of
// cpu_attention.cpp, which draws it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu_attention_values.h"
#include "cpu_avx512.h"
#include "cpu_blocks.h"
#include "cpu_drawn.h"

namespace kvist::avx512 {
namespace {

class Job {
  public:
    Job(const Plan& plan, const Segment& segment, bool amx, const char* arena, const bf16* q, std::int64_t q_stride,
        Scratch& scratch)
        : plan_(plan), segment_(segment), shape_(segment.geometry), amx_(amx), blocks_(shape_, arena), q_(q),
          q_stride_(q_stride), s_(scratch) {
        // Scores are kept in powers of two.
        factor_ = plan.scale * 1.44269504f;
    }

    // Runs a unit for one KV head; or for several, where their queries fit into the lanes of one vector. Without `out`
    // its keys are weighed, and nothing else.
    void run(const Unit& unit, int head, int heads, bf16* out, float* partials, float* weighed) {
        attends_ = out != nullptr;
        kept_ = unit.drawn >= 0 ? &of_this_thread<KeptWeights>() : nullptr;
        rows_ = (unit.end_row - unit.first_row) * shape_.repeats;
        heads_ = heads;
        tiles_ = heads > 1 ? 1 : (rows_ + kLanes - 1) / kLanes;
        for (int tile = 0; tile < tiles_; ++tile) locate(unit, tile);
        for (int i = 0; i < std::max(tiles_, heads_); ++i) pack(unit, i, head);
        std::int64_t begin = unit.first_key, end = unit.end_key;
        std::int64_t lowest = segment_.seen[unit.first_row], highest = lowest;
        for (int row = unit.first_row; row < unit.end_row; ++row) {
            lowest = std::min(lowest, segment_.seen[row]);
            highest = std::max(highest, segment_.seen[row]);
        }
        end = std::min(end, highest + 1);
        if (plan_.window > 0) begin = std::max(begin, lowest - plan_.window + 1);
        last_key_ = end;
        const std::int64_t aligned = begin / kLanes * kLanes;
        if (kept_ != nullptr) kept_->reserve(static_cast<int>((end - aligned + kKeys - 1) / kKeys), tiles_);
        for (std::int64_t key = aligned; key < end; key += kKeys)
            pass(unit, head, key, begin, std::min(end, key + kKeys));
        for (int i = 0; attends_ && i < std::max(tiles_, heads_); ++i) write(unit, i, head, out, partials);
        for (int i = 0; kept_ != nullptr && i < heads_; ++i)
            kept_->add_up(heads_ > 1 ? i * rows_ : 0, rows_, s_.max[0], s_.sum[0],
                          weighed + unit.weighed + (head + i) * weighed_keys(unit));
    }

  private:
    // What a tile's queries see; lanes without one repeat the last.
    void locate(const Unit& unit, int tile) {
        for (int lane = 0; lane < kLanes; ++lane) {
            const int index = heads_ > 1 ? lane % rows_ : std::min(tile * kLanes + lane, rows_ - 1);
            s_.seen[tile][lane] = segment_.seen[unit.first_row + index / shape_.repeats];
        }
        _mm512_store_ps(s_.max[tile], _mm512_set1_ps(kHidden));
        _mm512_store_ps(s_.sum[tile], _mm512_setzero_ps());
    }

    // Q^T of a tile, sixteen rows of one head; or, of several heads in one vector, the rows of one of them, with zeros
    // in the others' lanes, so that the scores of all add up in their places.
    void pack(const Unit& unit, int place, int head) {
        const int first_lane = heads_ > 1 ? place * rows_ : 0;
        const int first_index = heads_ > 1 ? 0 : place * kLanes;
        const int count = std::min(kLanes, rows_ - first_index);
        if (heads_ > 1) head += place;
        const bf16* row[kLanes] = {};
        for (int i = 0; i < count; ++i) {
            const int token = unit.first_row + (first_index + i) / shape_.repeats;
            const int repeat = (first_index + i) % shape_.repeats;
            row[first_lane + i] = q_ + token * q_stride_ + (repeat * shape_.kv_heads + head) * shape_.dim;
        }
        for (int pair = 0; pair < shape_.dim / 2; pair += kLanes) {
            __m512i r[kLanes];
            for (int lane = 0; lane < kLanes; ++lane)
                r[lane] = row[lane] != nullptr ? _mm512_loadu_si512(row[lane] + 2 * pair) : _mm512_setzero_si512();
            transpose(r);
            for (int i = 0; i < kLanes; ++i) _mm512_store_si512(s_.q[place][pair + i], r[i]);
        }
        std::memset(s_.out[place], 0, sizeof(float) * kLanes * shape_.dim);
    }

    const char* keys_of(const Unit& unit, int head, std::int64_t key, std::int64_t end, bf16* to) const {
        const int count = static_cast<int>(std::min<std::int64_t>(end - key, kLanes));
        return blocks_.rows(shape_.key, blocks_.keys(unit, head, key), blocks_.slot(key), count, to);
    }

    // Keys `first … end - 1` for all queries of the job; `first` is a multiple of 16, and keys before `begin` are not
    // the unit's.
    void pass(const Unit& unit, int head, std::int64_t first, std::int64_t begin, std::int64_t end) {
        const int groups = static_cast<int>((end - first + kLanes - 1) / kLanes);
        const int padded = (groups + 1) / 2 * 2;
        if (heads_ > 1) {
            scores_of_heads(unit, head, first, end, padded);
            place_weights(0, 1, first);
            softmax(0, 0, first, begin, end, padded * kLanes);
            for (int i = 0; attends_ && i < heads_; ++i) {
                transpose_values(shape_, blocks_, unit, head + i, first, end, last_key_, padded, s_);
                outputs(i, 1, padded / 2);
            }
            return;
        }
        const char* keys[kKeys / kLanes];
        for (int g = 0; g < groups; ++g)
            keys[g] = keys_of(unit, head, first + g * kLanes, end, s_.keys[0] + g * kLanes * shape_.dim);
        if (groups < padded) keys[groups] = keys[groups - 1];
        if (attends_) transpose_values(shape_, blocks_, unit, head, first, end, last_key_, padded, s_);
        for (int tile = 0; tile < tiles_; tile += 2) {
            const int together = std::min(2, tiles_ - tile);
            scores(tile, together, keys, padded);
            place_weights(tile, together, first);
            for (int i = 0; i < together; ++i) softmax(tile + i, i, first, begin, end, padded * kLanes);
            if (attends_) outputs(tile, together, padded / 2);
        }
    }

    // Where the weights of one or two tiles of queries go; kept ones begin with key 0.
    void place_weights(int tile, int together, std::int64_t first) {
        for (int i = 0; i < together; ++i)
            weights_[i] = kept_ != nullptr ? kept_->of(static_cast<int>(first / kKeys), tile + i) : s_.weights[i];
    }

    // S^T of the queries of several heads, each in its own lanes.
    void scores_of_heads(const Unit& unit, int head, std::int64_t first, std::int64_t end, int groups) {
        const int steps = shape_.dim / 32;
        const std::int64_t stride = 2 * shape_.dim;
        for (int g = 0; g < groups; g += 2) {
            if (amx_) {
                TILE_ZERO(0);
                TILE_ZERO(1);
            }
            for (int i = 0; i < heads_; ++i) {
                const char* keys[2];
                for (int half = 0; half < 2; ++half) {
                    const std::int64_t key = first + (g + half) * kLanes;
                    keys[half] = key < end ? keys_of(unit, head + i, key, end, s_.keys[half * kLanes]) : keys[0];
                }
                if (!amx_) {
                    for (int half = 0; half < 2; ++half) {
                        float* scores = s_.scores[0][(g + half) * kLanes];
                        if (i == 0)
                            multiply<false>(scores, keys[half], stride, s_.q[i][0], steps);
                        else
                            multiply<true>(scores, keys[half], stride, s_.q[i][0], steps);
                    }
                    continue;
                }
                for (int step = 0; step < steps; ++step) {
                    TILE_LOAD(4, keys[0] + step * 64, stride);
                    TILE_LOAD(5, keys[1] + step * 64, stride);
                    TILE_LOAD(6, s_.q[i][step * kLanes], 64);
                    TILE_DOT(0, 4, 6);
                    TILE_DOT(1, 5, 6);
                }
            }
            if (!amx_) continue;
            TILE_STORE(0, s_.scores[0][g * kLanes], 64);
            TILE_STORE(1, s_.scores[0][(g + 1) * kLanes], 64);
        }
    }

    // S^T of one or two tiles of queries.
    void scores(int tile, int together, const char* const* keys, int groups) {
        const int steps = shape_.dim / 32;
        const std::int64_t stride = 2 * shape_.dim;
        if (!amx_) {
            for (int i = 0; i < together; ++i)
                for (int g = 0; g < groups; ++g)
                    multiply<false>(s_.scores[i][g * kLanes], keys[g], stride, s_.q[tile + i][0], steps);
            return;
        }
        if (together == 2 && steps == 2) {
            // All of both tiles' queries stay in the unit, so that a key is loaded once for them.
            TILE_LOAD(4, s_.q[tile][0], 64);
            TILE_LOAD(5, s_.q[tile][kLanes], 64);
            TILE_LOAD(6, s_.q[tile + 1][0], 64);
            TILE_LOAD(7, s_.q[tile + 1][kLanes], 64);
            for (int g = 0; g < groups; ++g) {
                TILE_ZERO(0);
                TILE_ZERO(1);
                TILE_LOAD(2, keys[g], stride);
                TILE_LOAD(3, keys[g] + 64, stride);
                TILE_DOT(0, 2, 4);
                TILE_DOT(1, 2, 6);
                TILE_DOT(0, 3, 5);
                TILE_DOT(1, 3, 7);
                TILE_STORE(0, s_.scores[0][g * kLanes], 64);
                TILE_STORE(1, s_.scores[1][g * kLanes], 64);
            }
            return;
        }
        for (int g = 0; g < groups; g += 2) {
            TILE_ZERO(0);
            TILE_ZERO(1);
            if (together == 2) {
                TILE_ZERO(2);
                TILE_ZERO(3);
                for (int step = 0; step < steps; ++step) {
                    TILE_LOAD(4, keys[g] + step * 64, stride);
                    TILE_LOAD(5, keys[g + 1] + step * 64, stride);
                    TILE_LOAD(6, s_.q[tile][step * kLanes], 64);
                    TILE_LOAD(7, s_.q[tile + 1][step * kLanes], 64);
                    TILE_DOT(0, 4, 6);
                    TILE_DOT(1, 5, 6);
                    TILE_DOT(2, 4, 7);
                    TILE_DOT(3, 5, 7);
                }
                TILE_STORE(2, s_.scores[1][g * kLanes], 64);
                TILE_STORE(3, s_.scores[1][(g + 1) * kLanes], 64);
            } else {
                for (int step = 0; step < steps; ++step) {
                    TILE_LOAD(4, keys[g] + step * 64, stride);
                    TILE_LOAD(5, keys[g + 1] + step * 64, stride);
                    TILE_LOAD(6, s_.q[tile][step * kLanes], 64);
                    TILE_DOT(0, 4, 6);
                    TILE_DOT(1, 5, 6);
                }
            }
            TILE_STORE(0, s_.scores[0][g * kLanes], 64);
            TILE_STORE(1, s_.scores[0][(g + 1) * kLanes], 64);
        }
    }

    // P^T of a tile from its scores; brings what was summed before to the new maximum.
    void softmax(int tile, int place, std::int64_t first, std::int64_t begin, std::int64_t end, int count) {
        float(*scores)[kLanes] = s_.scores[place];
        const __m512 factor = _mm512_set1_ps(factor_);
        if (plan_.softcap > 0) {
            const __m512 inward = _mm512_set1_ps(plan_.scale / plan_.softcap);
            const __m512 outward = _mm512_set1_ps(plan_.softcap / plan_.scale);
            for (int i = 0; i < count; ++i) {
                const __m512 x = _mm512_load_ps(scores[i]);
                _mm512_store_ps(scores[i], _mm512_mul_ps(outward, tanh(_mm512_mul_ps(x, inward))));
            }
        }
        hide(tile, place, first, begin, end, count);
        __m512 top[4];
        for (int i = 0; i < 4; ++i) top[i] = _mm512_load_ps(scores[i]);
        for (int i = 4; i < count; i += 4)
            for (int j = 0; j < 4; ++j) top[j] = _mm512_max_ps(top[j], _mm512_load_ps(scores[i + j]));
        __m512 highest = _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
        const __m512 before = _mm512_load_ps(s_.max[tile]);
        highest = _mm512_mul_ps(highest, factor);
        const bool risen =
            _mm512_cmp_ps_mask(highest, _mm512_add_ps(before, _mm512_set1_ps(kSlack)), _CMP_GT_OQ) != 0;
        highest = risen ? _mm512_max_ps(before, highest) : before;
        __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        alignas(64) static const std::uint16_t kPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i pairs = _mm512_load_si512(kPairs);
        for (int i = 0; i < count; i += 2) {
            const __m512 one = exp2_roughly(_mm512_fmsub_ps(_mm512_load_ps(scores[i]), factor, highest));
            const __m512 two = exp2_roughly(_mm512_fmsub_ps(_mm512_load_ps(scores[i + 1]), factor, highest));
            sums[0] = _mm512_add_ps(sums[0], one);
            sums[1] = _mm512_add_ps(sums[1], two);
            const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(two, one));
            _mm512_store_si512(weights_[place][i / 2], _mm512_permutexvar_epi16(pairs, both));
        }
        __m512 sum = _mm512_load_ps(s_.sum[tile]);
        if (risen) {
            const __m512 alpha = exp2(_mm512_sub_ps(before, highest));
            sum = _mm512_mul_ps(sum, alpha);
            _mm512_store_ps(s_.max[tile], highest);
            for (int i = 0; attends_ && i < heads_; ++i)
                for (int d = 0; d < shape_.dim; ++d)
                    _mm512_store_ps(s_.out[tile + i][d], _mm512_mul_ps(alpha, _mm512_load_ps(s_.out[tile + i][d])));
        }
        _mm512_store_ps(s_.sum[tile], _mm512_add_ps(sum, _mm512_add_ps(sums[0], sums[1])));
        if (kept_ != nullptr) _mm512_store_ps(kept_->highest(static_cast<int>(first / kKeys), tile), highest);
    }

    // Puts the lowest score where a query does not see a key.
    void hide(int tile, int place, std::int64_t first, std::int64_t begin, std::int64_t end, int count) {
        const std::int64_t* seen = s_.seen[tile];
        std::int64_t low = seen[0], high = seen[0];
        for (int lane = 1; lane < kLanes; ++lane) {
            low = std::min(low, seen[lane]);
            high = std::max(high, seen[lane]);
        }
        const std::int64_t last = std::min(end, low + 1);
        const std::int64_t from = plan_.window > 0 ? std::max(begin, high - plan_.window + 1) : begin;
        if (first >= from && first + count <= last) return;
        // Places relative to `first`, which keeps them in 32 bits.
        alignas(64) std::int32_t stop[kLanes], start[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
            stop[lane] = static_cast<std::int32_t>(std::min(end, seen[lane] + 1) - first);
            const std::int64_t lowest = plan_.window > 0 ? std::max(begin, seen[lane] - plan_.window + 1) : begin;
            start[lane] = static_cast<std::int32_t>(std::clamp<std::int64_t>(lowest - first, 0, kKeys));
        }
        const __m512i stops = _mm512_load_si512(stop), starts = _mm512_load_si512(start);
        const __m512 nothing = _mm512_set1_ps(kHidden);
        for (int i = 0; i < count; ++i) {
            const __m512i key = _mm512_set1_epi32(i);
            const __mmask16 hidden = _mm512_cmpge_epi32_mask(key, stops) | _mm512_cmplt_epi32_mask(key, starts);
            float* scores = s_.scores[place][i];
            _mm512_store_ps(scores, _mm512_mask_mov_ps(_mm512_load_ps(scores), hidden, nothing));
        }
    }

    // O^T of one or two tiles of queries.
    void outputs(int tile, int together, int steps) {
        constexpr std::int64_t stride = 2 * kKeys;
        if (!amx_) {
            for (int i = 0; i < together; ++i)
                for (int d = 0; d < shape_.dim; d += kLanes)
                    multiply<true>(s_.out[tile + i][d], reinterpret_cast<const char*>(s_.values[d]), stride,
                                   weights_[i][0], steps);
            return;
        }
        for (int d = 0; d < shape_.dim; d += 2 * kLanes) {
            TILE_LOAD(0, s_.out[tile][d], 64);
            TILE_LOAD(1, s_.out[tile][d + kLanes], 64);
            if (together == 2) {
                TILE_LOAD(2, s_.out[tile + 1][d], 64);
                TILE_LOAD(3, s_.out[tile + 1][d + kLanes], 64);
                for (int step = 0; step < steps; ++step) {
                    TILE_LOAD(4, &s_.values[d][step * 32], stride);
                    TILE_LOAD(5, &s_.values[d + kLanes][step * 32], stride);
                    TILE_LOAD(6, weights_[0][step * kLanes], 64);
                    TILE_LOAD(7, weights_[1][step * kLanes], 64);
                    TILE_DOT(0, 4, 6);
                    TILE_DOT(1, 5, 6);
                    TILE_DOT(2, 4, 7);
                    TILE_DOT(3, 5, 7);
                }
                TILE_STORE(2, s_.out[tile + 1][d], 64);
                TILE_STORE(3, s_.out[tile + 1][d + kLanes], 64);
            } else {
                for (int step = 0; step < steps; ++step) {
                    TILE_LOAD(4, &s_.values[d][step * 32], stride);
                    TILE_LOAD(5, &s_.values[d + kLanes][step * 32], stride);
                    TILE_LOAD(6, weights_[0][step * kLanes], 64);
                    TILE_DOT(0, 4, 6);
                    TILE_DOT(1, 5, 6);
                }
            }
            TILE_STORE(0, s_.out[tile][d], 64);
            TILE_STORE(1, s_.out[tile][d + kLanes], 64);
        }
    }

    // The results of one tile, or of one of several heads.
    void write(const Unit& unit, int place, int head, bf16* out, float* partials) {
        const int width = shape_.dim + 2;
        const int tile = heads_ > 1 ? 0 : place;
        const int first_lane = heads_ > 1 ? place * rows_ : 0;
        const int first_index = heads_ > 1 ? 0 : place * kLanes;
        const int count = std::min(kLanes, rows_ - first_index);
        if (heads_ > 1) head += place;
        const __m512 share = _mm512_div_ps(_mm512_set1_ps(1), _mm512_load_ps(s_.sum[tile]));
        for (int d = 0; d < shape_.dim; d += kLanes) {
            __m512i r[kLanes];
            for (int i = 0; i < kLanes; ++i) {
                const __m512 x = _mm512_load_ps(s_.out[place][d + i]);
                r[i] = _mm512_castps_si512(unit.partial < 0 ? _mm512_mul_ps(x, share) : x);
            }
            transpose(r);
            for (int i = 0; i < count; ++i) {
                const int index = first_index + i;
                const __m512 x = _mm512_castsi512_ps(r[first_lane + i]);
                if (unit.partial < 0) {
                    const std::int64_t token = unit.first_row + index / shape_.repeats;
                    const int at = index % shape_.repeats * shape_.kv_heads + head;
                    store(out + (token * shape_.repeats * shape_.kv_heads + at) * shape_.dim + d, x);
                } else {
                    const std::int64_t result = static_cast<std::int64_t>(index) * shape_.kv_heads + head;
                    _mm512_storeu_ps(partials + unit.partial + result * width + d, x);
                }
            }
        }
        if (unit.partial < 0) return;
        for (int i = 0; i < count; ++i) {
            const std::int64_t result = static_cast<std::int64_t>(first_index + i) * shape_.kv_heads + head;
            float* at = partials + unit.partial + result * width + shape_.dim;
            at[0] = s_.max[tile][first_lane + i];
            at[1] = s_.sum[tile][first_lane + i];
        }
    }

    const Plan& plan_;
    const Segment& segment_;
    const Geometry& shape_;
    const bool amx_;
    const Blocks blocks_;
    const bf16* q_;
    const std::int64_t q_stride_;
    Scratch& s_;
    float factor_;
    int rows_ = 0;   // queries of one head
    int heads_ = 1;  // computed in one vector
    int tiles_ = 0;
    std::int64_t last_key_ = 0;
    bool attends_ = true;
    KeptWeights* kept_ = nullptr;            // where keys are told what they draw
    std::uint32_t (*weights_[2])[kLanes] = {};  // P^T in pairs, of one or two tiles
};

}  // namespace
}  // namespace kvist::avx512
