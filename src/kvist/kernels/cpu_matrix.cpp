// Products with weights that stay as they are stored: bf16, or the 4-bit and 8-bit codes of GGUF's Q4_0, Q4_1 and Q8_0.
//
// A weight of N x K is cut in panels of 32 outputs, a panel in steps of 32 inputs, a step in two tiles of 16 outputs:
//
//     panel 0: | step 0: tile of outputs 0-15 | tile of outputs 16-31 | step 1: … |      panel 1: …
//
// so that a product reads its weight once, front to back. In bf16 a tile is 16 rows of pairs, the right side that the
// matrix unit takes. A tile of codes is 32 codes for each of 16 outputs, then their 16 scales and 16 minima in f16:
//
//     4 bits   4 vectors of 16 words; word c of vector j holds inputs 8j … 8j+7 of output c
//     8 bits   8 vectors of 16 words; word c of vector j holds inputs 4j … 4j+3 of output c
//
// even inputs in the low half of a word and odd ones in its high half, the first in the lowest bits.
//
// Codes become bf16 ahead of the product: ``w = scale x code + minimum``, in float32, rounded once, shared by all rows of
// a call. For few rows that would be the most of the work. The matrix unit then multiplies with ``128 + code``, which is
// bf16 after an "and" and an "or", and scales are applied to the sums of a step:
//
//     sum += scale x (x (128 + code)) + (minimum - 128 scale) x (sum of the step's x)

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#endif
#include <immintrin.h>

#include "cpu_avx512.h"

namespace kvist::avx512 {
namespace {

constexpr int kStep = 32;             // inputs of a tile
constexpr int kPanel = 32;            // outputs of a panel
constexpr int kTileBytes = 1024;      // of a tile in bf16
constexpr int kAhead = 8;             // steps that are decoded at a time for few rows
constexpr std::int64_t kFew = 16;     // rows for which 4-bit weights are not decoded
constexpr std::int64_t kPanels = 8;   // panels that a block of rows is multiplied with: they stay in the second cache

// ---- weights --------------------------------------------------------------------------------------------------------

// Sixteen words of codes to pairs of bf16, from the bits at `shift` of both halves.
template <int kBits>
inline __m512i pair_of(__m512i words, int shift, __m512 scale, __m512 minimum, __m512i order) {
    __m512i low, high;
    if constexpr (kBits == 4) {
        const __m512i mask = _mm512_set1_epi32(15);
        low = _mm512_and_si512(_mm512_srli_epi32(words, shift), mask);
        high = _mm512_and_si512(_mm512_srli_epi32(words, shift + 16), mask);
    } else {
        low = _mm512_srai_epi32(_mm512_slli_epi32(words, 24 - shift), 24);
        high = _mm512_srai_epi32(_mm512_slli_epi32(words, 8 - shift), 24);
    }
    const __m512 one = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), scale, minimum);
    const __m512 two = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), scale, minimum);
    return _mm512_permutexvar_epi16(order, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(two, one)));
}

// Decodes one tile to bf16.
template <int kBits>
inline void decode(const std::uint8_t* from, std::uint32_t* to) {
    alignas(64) static const std::uint16_t kPairs[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(kPairs);
    constexpr int vectors = kBits;  // 32 codes of kBits each are so many words
    const std::uint8_t* factors = from + vectors * 64;
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(factors)));
    const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(factors + 32)));
    int pair = 0;
    for (int j = 0; j < vectors; ++j) {
        const __m512i words = _mm512_loadu_si512(from + j * 64);
        for (int shift = 0; shift < 16; shift += kBits)
            _mm512_store_si512(to + kLanes * pair++, pair_of<kBits>(words, shift, scale, minimum, order));
    }
}

inline void decode_steps(const Matrix& m, std::int64_t panel, std::int64_t step, std::int64_t count,
                         std::uint32_t* to) {
    const std::uint8_t* from = m.data + (panel * (m.inputs / kStep) + step) * 2 * m.tile_bytes;
    for (std::int64_t tile = 0; tile < 2 * count; ++tile) {
        _mm_prefetch(reinterpret_cast<const char*>(from + 8 * m.tile_bytes), _MM_HINT_T0);
        if (m.bits == 4)
            decode<4>(from, to);
        else
            decode<8>(from, to);
        from += m.tile_bytes;
        to += kTileBytes / 4;
    }
}

// ---- results --------------------------------------------------------------------------------------------------------

inline __m512 silu(__m512 x) {
    const __m512 e = exp2(_mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-80)), _mm512_set1_ps(-1.44269504f)));
    return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1)));
}

inline __m512 gelu_tanh(__m512 x) {
    const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    const __m512 inner = _mm512_mul_ps(_mm512_set1_ps(0.7978845608f),
                                       _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x));
    const __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
    return _mm512_fmadd_ps(half, tanh(_mm512_max_ps(inner, _mm512_set1_ps(-15))), half);
}

// Rows `begin … end - 1` of a panel's float32 sums to the output: [rows, 32], or 16 where gates are multiplied in.
inline void write(const Matrix& m, const float* sums, std::int64_t panel, int begin, int end, void* out,
                  std::int64_t first_row, const float* bias) {
    const __m512 b0 = bias == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(bias + panel * kPanel);
    const __m512 b1 = bias == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(bias + panel * kPanel + kLanes);
    for (int row = begin; row < end; ++row) {
        const __m512 x0 = _mm512_add_ps(_mm512_load_ps(sums + row * kPanel), b0);
        const __m512 x1 = _mm512_add_ps(_mm512_load_ps(sums + row * kPanel + kLanes), b1);
        const std::int64_t at = (first_row + row) * m.outputs + panel * kPanel;
        switch (m.result) {
            case Matrix::kFloat32:
                _mm512_storeu_ps(static_cast<float*>(out) + at, x0);
                _mm512_storeu_ps(static_cast<float*>(out) + at + kLanes, x1);
                break;
            case Matrix::kSilu:
                store(static_cast<bf16*>(out) + at / 2, _mm512_mul_ps(silu(x0), x1));
                break;
            case Matrix::kGelu:
                store(static_cast<bf16*>(out) + at / 2, _mm512_mul_ps(gelu_tanh(x0), x1));
                break;
            default:
                _mm512_storeu_si512(static_cast<bf16*>(out) + at,
                                    reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x1, x0)));
        }
    }
}

// ---- products -------------------------------------------------------------------------------------------------------

// Sums [32, 32] (+)= two tiles of rows x `steps` steps of a panel in bf16. `rows` of at most 16 need one tile of rows.
// `beside(step)` is called as often as there are steps: the vector units are free while the matrix unit works.
template <bool kAmx, class Beside>
inline void block(float* sums, const bf16* x, std::int64_t stride, const std::uint32_t* panel, std::int64_t steps,
                  int rows, bool add, Beside&& beside) {
    const std::int64_t bytes = 2 * stride;
    if constexpr (kAmx) {
        if (add) {
            TILE_LOAD(0, sums, 128);
            TILE_LOAD(1, sums + 16, 128);
        } else {
            TILE_ZERO(0);
            TILE_ZERO(1);
        }
        if (rows <= kLanes) {
            for (std::int64_t step = 0; step < steps; ++step) {
                TILE_LOAD(4, x + step * kStep, bytes);
                TILE_LOAD(6, panel + step * 512, 64);
                TILE_LOAD(7, panel + step * 512 + 256, 64);
                TILE_DOT(0, 4, 6);
                TILE_DOT(1, 4, 7);
                beside(step);
            }
        } else {
            if (add) {
                TILE_LOAD(2, sums + 512, 128);
                TILE_LOAD(3, sums + 528, 128);
            } else {
                TILE_ZERO(2);
                TILE_ZERO(3);
            }
            for (std::int64_t step = 0; step < steps; ++step) {
                TILE_LOAD(4, x + step * kStep, bytes);
                TILE_LOAD(6, panel + step * 512, 64);
                TILE_DOT(0, 4, 6);
                TILE_LOAD(7, panel + step * 512 + 256, 64);
                TILE_DOT(1, 4, 7);
                TILE_LOAD(5, x + 16 * stride + step * kStep, bytes);
                TILE_DOT(2, 5, 6);
                TILE_DOT(3, 5, 7);
                beside(step);
            }
            TILE_STORE(2, sums + 512, 128);
            TILE_STORE(3, sums + 528, 128);
        }
        TILE_STORE(0, sums, 128);
        TILE_STORE(1, sums + 16, 128);
    } else {
        // Eight rows and both tiles of outputs at a time: sixteen sums stay in registers.
        for (int row = 0; row < rows; row += 8) {
            const int count = std::min(8, rows - row);
            __m512 left[8], right[8];
            for (int i = 0; i < count; ++i) {
                left[i] = add ? _mm512_load_ps(sums + (row + i) * kPanel) : _mm512_setzero_ps();
                right[i] = add ? _mm512_load_ps(sums + (row + i) * kPanel + kLanes) : _mm512_setzero_ps();
            }
            const auto run = [&](auto known) {
                for (std::int64_t step = 0; step < steps; ++step)
                    for (int pair = 0; pair < kLanes; ++pair) {
                        const std::uint32_t* at = panel + step * 512 + pair * kLanes;
                        const __m512bh b0 = reinterpret_cast<__m512bh>(_mm512_load_si512(at));
                        const __m512bh b1 = reinterpret_cast<__m512bh>(_mm512_load_si512(at + 256));
                        const bf16* from = x + row * stride + step * kStep + 2 * pair;
                        for (int i = 0; i < known(count); ++i) {
                            int both;
                            std::memcpy(&both, from + i * stride, 4);
                            const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
                            left[i] = _mm512_dpbf16_ps(left[i], a, b0);
                            right[i] = _mm512_dpbf16_ps(right[i], a, b1);
                        }
                    }
            };
            if (count == 8)
                run([](int) { return 8; });
            else
                run([](int n) { return n; });
            for (int i = 0; i < count; ++i) {
                _mm512_store_ps(sums + (row + i) * kPanel, left[i]);
                _mm512_store_ps(sums + (row + i) * kPanel + kLanes, right[i]);
            }
        }
        for (std::int64_t step = 0; step < steps; ++step) beside(step);
    }
}

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

struct Work {
    Buffer panels;  // decoded
    alignas(64) float sums[2][kPanel * kPanel];
    alignas(64) std::uint32_t ahead[kAhead * 512];
    Few few;
};

// What the caller of a product lays out for all threads: rows padded to whole tiles, or the sums of their steps.
struct Shared {
    Buffer memory;
};

// Panels `first … end - 1` for all rows. A block of rows stays in the first cache while the panels pass, and the panels
// stay in the second while the rows pass; results of one block are written while the next one's are summed.
template <bool kAmx>
void many_rows(const Matrix& m, Work& mine, std::int64_t first, std::int64_t end, const bf16* x, std::int64_t rows,
               const bf16* tail, void* out, const float* bias) {
    const std::int64_t steps = m.inputs / kStep;
    const auto* panels = reinterpret_cast<const std::uint32_t*>(m.data) + first * steps * 512;
    if (m.bits != 16) {
        auto* decoded = static_cast<std::uint32_t*>(mine.panels.data());
        for (std::int64_t panel = first; panel < end; ++panel)
            decode_steps(m, panel, 0, steps, decoded + (panel - first) * steps * 512);
        panels = decoded;
    }
    const int share = static_cast<int>((kPanel + steps - 1) / steps);  // rows written beside a step
    const float* done = nullptr;
    std::int64_t done_panel = 0, done_row = 0;
    int done_count = 0, turn = 0;
    const auto beside = [&](std::int64_t step) {
        const int from = static_cast<int>(std::min<std::int64_t>(step * share, done_count));
        write(m, done, done_panel, from, std::min(from + share, done_count), out, done_row, bias);
    };
    for (std::int64_t row = 0; row < rows; row += kPanel) {
        const int count = static_cast<int>(std::min<std::int64_t>(kPanel, rows - row));
        // Tiles read sixteen or thirty-two rows: those of the last block are padded.
        const bf16* from = kAmx && count % kLanes != 0 ? tail : x + row * m.inputs;
        for (std::int64_t panel = first; panel < end; ++panel) {
            float* sums = mine.sums[turn];
            turn ^= 1;
            block<kAmx>(sums, from, m.inputs, panels + (panel - first) * steps * 512, steps, count, false, beside);
            done = sums;
            done_panel = panel;
            done_row = row;
            done_count = count;
        }
    }
    write(m, done, done_panel, 0, done_count, out, done_row, bias);
}

// One panel for up to kPanel rows: it is decoded some steps at a time, and read once.
template <bool kAmx>
void some_rows(const Matrix& m, Work& mine, std::int64_t panel, const bf16* x, int rows, const bf16* tail, void* out,
               const float* bias) {
    const std::int64_t steps = m.inputs / kStep;
    const bf16* from = kAmx && rows % kLanes != 0 ? tail : x;
    const auto nothing = [](std::int64_t) {};
    if (m.bits == 16) {
        const auto* whole = reinterpret_cast<const std::uint32_t*>(m.data) + panel * steps * 512;
        block<kAmx>(mine.sums[0], from, m.inputs, whole, steps, rows, false, nothing);
    } else {
        for (std::int64_t step = 0; step < steps; step += kAhead) {
            const std::int64_t some = std::min<std::int64_t>(kAhead, steps - step);
            decode_steps(m, panel, step, some, mine.ahead);
            block<kAmx>(mine.sums[0], from + step * kStep, m.inputs, mine.ahead, some, rows, step > 0, nothing);
        }
    }
    write(m, mine.sums[0], panel, 0, rows, out, 0, bias);
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

// Few rows of 4-bit weights: tiles are as low as there are rows.
void product_of_few(const Matrix& m, const Team& team, const bf16* x, int rows, void* out, const float* bias) {
    const std::int64_t steps = m.inputs / kStep, panels = m.outputs / kPanel;
    const auto sum_bytes = sizeof(float) * static_cast<std::size_t>(rows * steps);
    auto* sums = static_cast<float*>(of_this_thread<Shared>().memory.reserve(sum_bytes));
    for (int row = 0; row < rows; ++row)
        for (std::int64_t step = 0; step < steps; ++step) {
            const bf16* at = x + row * m.inputs + step * kStep;
            sums[row * steps + step] = _mm512_reduce_add_ps(_mm512_add_ps(load(at), load(at + kLanes)));
        }
    const std::int64_t grain = std::max<std::int64_t>(1, std::min<std::int64_t>(8, panels / (8 * team.threads())));
    std::atomic<std::int64_t> next{0};
    team.run([&] {
        Few& few = of_this_thread<Work>().few;
        tiles_begin(rows);
        for (;;) {
            const std::int64_t first = next.fetch_add(grain, std::memory_order_relaxed);
            if (first >= panels) break;
            for (std::int64_t panel = first; panel < std::min(panels, first + grain); ++panel)
                few_rows(m, few, panel, x, rows, sums, out, bias);
        }
        tiles_end();
    });
}

template <bool kAmx>
void product(const Matrix& m, const Team& team, const bf16* x, std::int64_t rows, void* out, const float* bias) {
    const std::int64_t panels = m.outputs / kPanel;
    // The rows of the last block, padded with zeros.
    bf16* tail = nullptr;
    const std::int64_t left = rows % kPanel;
    if (kAmx && left % kLanes != 0) {
        const auto bytes = 2 * static_cast<std::size_t>(kPanel * m.inputs);
        tail = static_cast<bf16*>(of_this_thread<Shared>().memory.reserve(bytes));
        std::memset(tail, 0, bytes);
        std::memcpy(tail, x + (rows - left) * m.inputs, 2 * static_cast<std::size_t>(left * m.inputs));
    }
    // A few panels at a time, of equal numbers for all threads where there are few.
    const std::int64_t most = rows > kPanel ? kPanels : std::clamp<std::int64_t>(panels / (8 * team.threads()), 1, 8);
    const std::int64_t rounds = (panels + most * team.threads() - 1) / (most * team.threads());
    const std::int64_t groups = std::min(panels, rounds * team.threads());
    const std::size_t decoded = m.bits == 16 || rows <= kPanel ? 0 : (panels + groups - 1) / groups * m.inputs * kPanel * 2;
    std::atomic<std::int64_t> next{0};
    team.run([&] {
        Work& mine = of_this_thread<Work>();
        mine.panels.reserve(decoded);
        if (kAmx) tiles_begin();
        for (;;) {
            const std::int64_t group = next.fetch_add(1, std::memory_order_relaxed);
            if (group >= groups) break;
            const std::int64_t first = group * panels / groups, end = (group + 1) * panels / groups;
            if (rows > kPanel) {
                many_rows<kAmx>(m, mine, first, end, x, rows, tail, out, bias);
            } else {
                for (std::int64_t panel = first; panel < end; ++panel)
                    some_rows<kAmx>(m, mine, panel, x, static_cast<int>(rows), tail, out, bias);
            }
        }
        if (kAmx) tiles_end();
    });
}

}  // namespace

void multiply(const Matrix& m, const Team& team, bool amx, const bf16* x, std::int64_t rows, void* out,
              const float* bias) {
    if (rows == 0) return;  // which tiles cannot have
    if (amx && m.bits == 4 && rows <= kFew)
        product_of_few(m, team, x, static_cast<int>(rows), out, bias);
    else if (amx)
        product<true>(m, team, x, rows, out, bias);
    else
        product<false>(m, team, x, rows, out, bias);
}

}  // namespace kvist::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

#include <stdexcept>

namespace kvist::avx512 {
void multiply(const Matrix&, const Team&, bool, const bf16*, std::int64_t, void*, const float*) {
    throw std::logic_error("built without AVX-512");
}
}  // namespace kvist::avx512

#endif
