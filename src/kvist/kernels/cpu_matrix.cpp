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
// a call; where rows are few, cpu_matrix_few.cpp and cpu_matrix_bytes.cpp multiply with the codes themselves.

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu_avx512_begin.h"
#include "cpu_matrix.h"

namespace kvist::avx512 {
namespace {

constexpr int kTileBytes = 1024;      // of a tile in bf16
constexpr int kAhead = 8;             // steps that are decoded at a time for few rows
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

struct Work {
    Buffer panels;  // decoded
    alignas(64) float sums[2][kPanel * kPanel];
    alignas(64) std::uint32_t ahead[kAhead * 512];
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
    const std::int64_t width = m.outputs * (m.result == Matrix::kFloat32 ? 4 : 2) / (m.gated() ? 2 : 1);
    char* next = nullptr;
    int next_count = 0;
    const auto beside = [&](std::int64_t step) {
        // Ask for the lines that this block's results will be written to.
        for (std::int64_t i = step * share; i < std::min<std::int64_t>((step + 1) * share, next_count); ++i)
            asm volatile("prefetchw (%0)" ::"r"(next + i * width));
        const int from = static_cast<int>(std::min<std::int64_t>(step * share, done_count));
        write(m, done, done_panel, from, std::min(from + share, done_count), out, done_row, bias);
    };
    for (std::int64_t row = 0; row < rows; row += kPanel) {
        const int count = static_cast<int>(std::min<std::int64_t>(kPanel, rows - row));
        // Tiles read sixteen or thirty-two rows: those of the last block are padded.
        const bf16* from = kAmx && count % kLanes != 0 ? tail : x + row * m.inputs;
        for (std::int64_t panel = first; panel < end; ++panel) {
            float* sums = mine.sums[turn];
            next = static_cast<char*>(out) + row * width + panel * (width * kPanel / m.outputs);
            next_count = count;
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
    team.run([&](int) {
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
              const float* bias, const Matrix* next) {
    if (rows == 0) return;  // which tiles cannot have
    if (amx && m.bits != 16 && rows <= kFewBytes)
        multiply_bytes(m, team, x, static_cast<int>(rows), out, bias, next);
    else if (amx && m.bits == 4 && rows <= kFew)
        multiply_few(m, team, x, static_cast<int>(rows), out, bias);
    else if (amx)
        product<true>(m, team, x, rows, out, bias);
    else
        product<false>(m, team, x, rows, out, bias);
}

}  // namespace kvist::avx512

#include "cpu_avx512_end.h"

#else

#include <stdexcept>

namespace kvist::avx512 {
void multiply(const Matrix&, const Team&, bool, const bf16*, std::int64_t, void*, const float*, const Matrix*) {
    throw std::logic_error("built without AVX-512");
}
}  // namespace kvist::avx512

#endif
