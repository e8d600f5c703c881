// Products of few rows with 4-bit weights. Decoding them would be the most of the work, so the matrix unit multiplies
// with ``128 + code``, which is bf16 after an "and" and an "or", and scales are applied to the sums of a step:
//
//     sum += scale x (x (128 + code)) + (minimum - 128 scale) x (sum of the step's x)

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cstring>

#include "cpu_avx512_begin.h"

#include "cpu_matrix.h"

namespace kvist::avx512 {
namespace {

// What a product of few rows works in: two steps are decoded ahead, and results wait for two steps.
struct Few {
    alignas(64) std::uint32_t codes[4][2][256];
    alignas(64) float products[4][2][256];
    alignas(64) float sums[kFew][kPanel];
};

// One step of a 4-bit panel as ``128 + code`` in bf16.
inline void raise(const std::uint8_t* from, std::int64_t tile_bytes, std::uint32_t (*to)[256]) {
    const __m512i mask = _mm512_set1_epi32(0x000f000f), base = _mm512_set1_epi32(0x43004300);
    for (int tile = 0; tile < 2; ++tile, from += tile_bytes) {
        _mm_prefetch(reinterpret_cast<const char*>(from + 16 * tile_bytes), _MM_HINT_T0);
        for (int j = 0; j < 4; ++j) {
            const __m512i words = _mm512_loadu_si512(from + j * 64);
            // (words >> shift) & mask | base
            const auto raised = [&](__m512i shifted) { return _mm512_ternarylogic_epi32(shifted, mask, base, 0xea); };
            _mm512_store_si512(to[tile] + (4 * j) * kLanes, raised(words));
            _mm512_store_si512(to[tile] + (4 * j + 1) * kLanes, raised(_mm512_srli_epi32(words, 4)));
            _mm512_store_si512(to[tile] + (4 * j + 2) * kLanes, raised(_mm512_srli_epi32(words, 8)));
            _mm512_store_si512(to[tile] + (4 * j + 3) * kLanes, raised(_mm512_srli_epi32(words, 12)));
        }
    }
}

// One panel of 4-bit codes for up to kFew rows, on the matrix unit. `step_sums` holds the sum of each row's inputs of a
// step, [rows, steps].
void few_rows(const Matrix& m, Few& few, std::int64_t panel, const bf16* x, int rows, const float* step_sums,
              void* out, const float* bias) {
    const std::int64_t steps = m.inputs / kStep, bytes = 2 * m.inputs;
    const std::uint8_t* from = m.data + panel * steps * 2 * m.tile_bytes;
    std::memset(few.sums, 0, sizeof(float) * kPanel * static_cast<std::size_t>(rows));
    const auto decode_step = [&](std::int64_t step) {
        if (step < steps) raise(from + step * 2 * m.tile_bytes, m.tile_bytes, few.codes[step % 4]);
    };
    const auto add_step = [&](std::int64_t step) {
        const std::uint8_t* factors = from + step * 2 * m.tile_bytes + 256;
        for (int tile = 0; tile < 2; ++tile, factors += m.tile_bytes) {
            const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(factors)));
            const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(factors + 32)));
            const __m512 rest = _mm512_fnmadd_ps(_mm512_set1_ps(128), scale, minimum);
            for (int row = 0; row < rows; ++row) {
                const float* product = few.products[step % 4][tile] + row * kLanes;
                float* sum = few.sums[row] + tile * kLanes;
                const __m512 x_sum = _mm512_set1_ps(step_sums[row * steps + step]);
                _mm512_store_ps(sum, _mm512_fmadd_ps(scale, _mm512_load_ps(product),
                                                     _mm512_fmadd_ps(rest, x_sum, _mm512_load_ps(sum))));
            }
        }
    };
    decode_step(0);
    decode_step(1);
    for (std::int64_t step = 0; step < steps; ++step) {
        decode_step(step + 2);
        TILE_LOAD(6, few.codes[step % 4][0], 64);
        TILE_LOAD(7, few.codes[step % 4][1], 64);
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_LOAD(4, x + step * kStep, bytes);
        TILE_DOT(0, 4, 6);
        TILE_DOT(1, 4, 7);
        TILE_STORE(0, few.products[step % 4][0], 64);
        TILE_STORE(1, few.products[step % 4][1], 64);
        if (step >= 2) add_step(step - 2);
    }
    for (std::int64_t step = std::max<std::int64_t>(0, steps - 2); step < steps; ++step) add_step(step);
    write(m, few.sums[0], panel, 0, rows, out, 0, bias);
}

}  // namespace

// Tiles are as low as there are rows.
void multiply_few(const Matrix& m, const Team& team, const bf16* x, int rows, void* out, const float* bias) {
    const std::int64_t steps = m.inputs / kStep, panels = m.outputs / kPanel;
    const auto sum_bytes = sizeof(float) * static_cast<std::size_t>(rows * steps);
    auto* sums = static_cast<float*>(of_this_thread<Shared>().memory.reserve(sum_bytes));
    for (int row = 0; row < rows; ++row)
        for (std::int64_t step = 0; step < steps; ++step) {
            const bf16* at = x + row * m.inputs + step * kStep;
            sums[row * steps + step] = _mm512_reduce_add_ps(_mm512_add_ps(load(at), load(at + kLanes)));
        }
    Ranges ranges(panels, team.threads());
    team.run([&](int place) {
        Few& few = of_this_thread<Few>();
        tiles_begin(rows);
        ranges.run(place, [&](std::int64_t panel) { few_rows(m, few, panel, x, rows, sums, out, bias); });
        tiles_end();
    });
}

}  // namespace kvist::avx512

#include "cpu_avx512_end.h"

#else

#include <stdexcept>

namespace kvist::avx512 {
void multiply_few(const Matrix&, const Team&, const bf16*, int, void*, const float*) {
    throw std::logic_error("built without AVX-512");
}
}  // namespace kvist::avx512

#endif
