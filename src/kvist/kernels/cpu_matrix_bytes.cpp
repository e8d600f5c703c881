// Products of very few rows with 4- and 8-bit weights, which are then as fast as the weight is read. The matrix unit
// multiplies codes as bytes, of 8 bits where they lie, and sums are exact: of each row's 32 inputs of a step there are
// two bytes, 128 high + low, of the 15 bits that the largest of them allows. Scales are applied to the sums of a step:
//
//     sum += scale x (step of x) x (128 high + low) + minimum x (sum of the step's x)
//
// Inputs are put into the order in which a tile's words hold them (cpu_matrix.cpp draws it).

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#endif
#include <immintrin.h>

#include "cpu_bytes.h"
#include "cpu_matrix.h"

namespace kvist::avx512 {
namespace {

// What a product works in: two steps are unpacked ahead, and results wait for two steps.
struct Few {
    alignas(64) std::uint8_t codes[4][2][kStep * kLanes];
    alignas(64) std::int32_t products[4][2][2 * kFewBytes][kLanes];
    alignas(64) float sums[kFewBytes][kPanel];
};

// Inputs of all rows, step by step.
struct Inputs {
    std::int8_t* bytes;  // [steps, rows, 2, 32]: high, then low
    float* steps;        // [steps, rows]: what they are multiples of
    float* sums;         // [steps, rows]: of the inputs
};

// Tiles 0 and 1 are sums, 4 inputs, 6 and 7 codes.
void tiles_for(int rows) {
    TileConfig config;
    for (int tile : {0, 1, 4}) config.rows[tile] = static_cast<std::uint8_t>(2 * rows);
    for (int tile : {6, 7}) config.rows[tile] = kStep / 4;
    config.bytes[4] = kStep;
    configure(config);
}

// One row's inputs of a step.
void pack(const bf16* x, __m256i order, std::int8_t* bytes, float& step, float& sum) {
    const __m512 one = load(x), two = load(x + kLanes);
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(one), _mm512_abs_ps(two)));
    step = largest / kMost;
    const __m512 share = _mm512_set1_ps(largest > 1e-30f ? kMost / largest : 0);
    const __m512i x0 = _mm512_cvtps_epi32(_mm512_mul_ps(one, share));
    const __m512i x1 = _mm512_cvtps_epi32(_mm512_mul_ps(two, share));
    // Of the inputs as they are multiplied: what rounding adds to codes that are all positive, a minimum takes away.
    sum = step * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(x0, x1)));
    const __m512i high0 = high_of(x0), high1 = high_of(x1);
    const auto both = [&](__m512i a, __m512i b) {
        const __m256i all = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(a)),
                                                    _mm512_cvtepi32_epi8(b), 1);
        return _mm256_shuffle_epi8(all, order);
    };
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes), both(high0, high1));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + kStep), both(low_of(x0, high0), low_of(x1, high1)));
}

// A tile of 4-bit codes as bytes: of each word the lower halves of its bytes, then the higher ones.
inline void unpack(const std::uint8_t* from, std::uint8_t* to) {
    const __m512i mask = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; ++j) {
        const __m512i words = _mm512_loadu_si512(from + j * 64);
        _mm512_store_si512(to + j * 128, _mm512_and_si512(words, mask));
        _mm512_store_si512(to + j * 128 + 64, _mm512_and_si512(_mm512_srli_epi32(words, 4), mask));
    }
}

template <int kBits>
void panel_of(const Matrix& m, Few& few, std::int64_t panel, const Inputs& in, int rows, void* out, const float* bias) {
    constexpr int kCodes = kStep * kLanes * kBits / 8;  // bytes of a tile before its scales
    const std::int64_t steps = m.inputs / kStep;
    const std::uint8_t* from = m.data + panel * steps * 2 * m.tile_bytes;
    const auto tile_of = [&](std::int64_t step, int tile) { return from + (2 * step + tile) * m.tile_bytes; };
    std::memset(few.sums, 0, sizeof(float) * kPanel * static_cast<std::size_t>(rows));
    const auto unpack_step = [&](std::int64_t step) {
        if (step >= steps) return;
        for (int tile = 0; tile < 2; ++tile) unpack(tile_of(step, tile), few.codes[step % 4][tile]);
    };
    const auto add_step = [&](std::int64_t step) {
        for (int tile = 0; tile < 2; ++tile) {
            const std::uint8_t* factors = tile_of(step, tile) + kCodes;
            const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(factors)));
            const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(factors + 32)));
            for (int row = 0; row < rows; ++row) {
                const auto* product = few.products[step % 4][tile] + 2 * row;
                const __m512i high = _mm512_slli_epi32(_mm512_load_si512(product[0]), 7);
                const __m512 both = _mm512_cvtepi32_ps(_mm512_add_epi32(high, _mm512_load_si512(product[1])));
                const __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(in.steps[step * rows + row]));
                float* sum = few.sums[row] + tile * kLanes;
                const __m512 before =
                    _mm512_fmadd_ps(minimum, _mm512_set1_ps(in.sums[step * rows + row]), _mm512_load_ps(sum));
                _mm512_store_ps(sum, _mm512_fmadd_ps(by, both, before));
            }
        }
    };
    if constexpr (kBits == 4) {
        unpack_step(0);
        unpack_step(1);
    }
    for (std::int64_t step = 0; step < steps; ++step) {
        for (int tile = 0; tile < 2; ++tile)
            for (int at = 0; at < m.tile_bytes; at += 64)
                _mm_prefetch(reinterpret_cast<const char*>(tile_of(step + 8, tile) + at), _MM_HINT_T0);
        if constexpr (kBits == 4) {
            unpack_step(step + 2);
            TILE_LOAD(6, few.codes[step % 4][0], 64);
            TILE_LOAD(7, few.codes[step % 4][1], 64);
        } else {
            TILE_LOAD(6, tile_of(step, 0), 64);
            TILE_LOAD(7, tile_of(step, 1), 64);
        }
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_LOAD(4, in.bytes + step * rows * 2 * kStep, kStep);
        TILE_DOT_BYTES(0, 4, 6);
        TILE_DOT_BYTES(1, 4, 7);
        TILE_STORE(0, few.products[step % 4][0], 64);
        TILE_STORE(1, few.products[step % 4][1], 64);
        if (step >= 2) add_step(step - 2);
    }
    for (std::int64_t step = std::max<std::int64_t>(0, steps - 2); step < steps; ++step) add_step(step);
    write(m, few.sums[0], panel, 0, rows, out, 0, bias);
}

}  // namespace

void multiply_bytes(const Matrix& m, const Team& team, const bf16* x, int rows, void* out, const float* bias) {
    const std::int64_t steps = m.inputs / kStep, panels = m.outputs / kPanel, count = steps * rows;
    auto* memory = static_cast<std::int8_t*>(
        of_this_thread<Shared>().memory.reserve(static_cast<std::size_t>(count) * (2 * kStep + 2 * sizeof(float))));
    Inputs in{memory, reinterpret_cast<float*>(memory + count * 2 * kStep), nullptr};
    in.sums = in.steps + count;
    // Where input i of a word's inputs lies among its bytes.
    const __m128i four_bits = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m128i eight_bits = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m256i order = _mm256_broadcastsi128_si256(m.bits == 4 ? four_bits : eight_bits);
    for (std::int64_t step = 0; step < steps; ++step)
        for (int row = 0; row < rows; ++row) {
            const std::int64_t at = step * rows + row;
            pack(x + row * m.inputs + step * kStep, order, in.bytes + at * 2 * kStep, in.steps[at], in.sums[at]);
        }
    const std::int64_t grain = std::max<std::int64_t>(1, std::min<std::int64_t>(8, panels / (8 * team.threads())));
    std::atomic<std::int64_t> next{0};
    team.run([&] {
        Few& few = of_this_thread<Few>();
        tiles_for(rows);
        for (;;) {
            const std::int64_t first = next.fetch_add(grain, std::memory_order_relaxed);
            if (first >= panels) break;
            for (std::int64_t panel = first; panel < std::min(panels, first + grain); ++panel) {
                if (m.bits == 4)
                    panel_of<4>(m, few, panel, in, rows, out, bias);
                else
                    panel_of<8>(m, few, panel, in, rows, out, bias);
            }
        }
        tiles_end();
    });
}

}  // namespace kvist::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

#include <stdexcept>

namespace kvist::avx512 {
void multiply_bytes(const Matrix&, const Team&, const bf16*, int, void*, const float*) {
    throw std::logic_error("built without AVX-512");
}
}  // namespace kvist::avx512

#endif
