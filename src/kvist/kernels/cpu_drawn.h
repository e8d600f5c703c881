// What keys draw: a job's weights kept until the sums of its queries are known, then added up over the queries. Included
// inside the target region of cpu_attention.cpp.
//
//     column sum of key j  =  sum over queries i of  P[i, j] x 2^(maximum of i when P was made - its last one) / sum of i
//
// which neither computes scores again nor raises anything to a power but once a pass.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu.h"
#include "cpu_avx512.h"
#include "cpu_blocks.h"

namespace kvist::avx512 {

class KeptWeights {
  public:
    using Pairs = std::uint32_t[kLanes];

    // Memory for so many passes over so many tiles of sixteen queries.
    void reserve(int passes, int tiles) {
        passes_ = passes;
        tiles_ = tiles;
        const std::size_t count = static_cast<std::size_t>(passes) * tiles;
        weights_ = static_cast<Pairs*>(weights_memory_.reserve(count * (kKeys / 2) * sizeof(Pairs)));
        highest_ = static_cast<float*>(highest_memory_.reserve(count * kLanes * sizeof(float)));
    }

    // P^T of a pass and tile, in pairs of keys: [kKeys / 2], as far as there are keys.
    Pairs* of(int pass, int tile) { return weights_ + static_cast<std::int64_t>(place(pass, tile)) * (kKeys / 2); }

    // The maximum of each query that it was made with, as a power of two.
    float* highest(int pass, int tile) { return highest_ + static_cast<std::int64_t>(place(pass, tile)) * kLanes; }

    // Sums over the queries in `lanes` lanes from `first` on, the tiles' lanes one after the other.
    //   max, sum   of each of these lanes, in the end
    //   to         [passes, kKeys]; behind the last key that was weighed whatever
    void add_up(int first, int lanes, const float* max, const float* sum, float* to) {
        for (int pass = 0; pass < passes_; ++pass) {
            // What P is still to be multiplied by takes the maxima's place.
            for (int tile = 0; tile < tiles_; ++tile) {
                const int from = std::max(0, first - tile * kLanes);
                const __mmask16 counts = static_cast<__mmask16>(
                    lanes_left(first + lanes - tile * kLanes) & ~((1u << std::min(from, kLanes)) - 1));
                const __m512 last = _mm512_load_ps(max + tile * kLanes), total = _mm512_load_ps(sum + tile * kLanes);
                const __m512 then = _mm512_load_ps(highest(pass, tile));
                _mm512_store_ps(factor_[tile], _mm512_maskz_div_ps(counts, exp2(_mm512_sub_ps(then, last)), total));
            }
            for (int key = 0; key < kKeys; key += kLanes) _mm512_storeu_ps(to + pass * kKeys + key, sixteen(pass, key));
        }
    }

  private:
    int place(int pass, int tile) const { return pass * tiles_ + tile; }

    // The sums of sixteen keys of a pass.
    __m512 sixteen(int pass, int key) {
        __m512 sums[kLanes];
        for (__m512& sum : sums) sum = _mm512_setzero_ps();
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
        for (int tile = 0; tile < tiles_; ++tile) {
            const __m512 factor = _mm512_load_ps(factor_[tile]);
            const Pairs* pairs = of(pass, tile) + key / 2;
            for (int i = 0; i < kLanes / 2; ++i) {
                const __m512i both = _mm512_load_si512(pairs[i]);
                const __m512 one = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
                const __m512 two = _mm512_castsi512_ps(_mm512_and_si512(both, upper));
                sums[2 * i] = _mm512_fmadd_ps(one, factor, sums[2 * i]);
                sums[2 * i + 1] = _mm512_fmadd_ps(two, factor, sums[2 * i + 1]);
            }
        }
        __m512i r[kLanes];
        for (int i = 0; i < kLanes; ++i) r[i] = _mm512_castps_si512(sums[i]);
        transpose(r);
        __m512 all = _mm512_castsi512_ps(r[0]);
        for (int i = 1; i < kLanes; ++i) all = _mm512_add_ps(all, _mm512_castsi512_ps(r[i]));
        return all;
    }

    int passes_ = 0, tiles_ = 0;
    Pairs* weights_ = nullptr;
    float* highest_ = nullptr;
    Buffer weights_memory_, highest_memory_;
    alignas(64) float factor_[kMaxTiles][kLanes];
};

}  // namespace kvist::avx512
