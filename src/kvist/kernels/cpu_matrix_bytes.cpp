// Products of very few rows with 4- and 8-bit weights, which are then nearly as fast as the weight is read. Codes are
// multiplied as bytes, of 8 bits where they lie, and sums of a step are exact. Inputs are bf16, of 8 significant bits;
// the 32 of a step become whole multiples of one power of two, in two bytes where results are bf16 and in three where
// they are float32:
//
//     x = unit x (128 high + low)                 exact from 2^-6 of the largest's power of two on, else to 2^-14 of it
//     x = unit x (128^2 high + 128 middle + low)  exact from 2^-13 of it on, else to 2^-21
//
// where all bytes but the high one are 0 to 127. Scales are applied to the sums of a step:
//
//     sum += scale x unit x (sum of code x bytes) + minimum x (sum of the step's x)
//
// Up to kVectorRows rows are multiplied by the vector units (VNNI), more by the matrix unit, to the same results.
// Inputs are put into the order in which a tile's words hold them (cpu_matrix.cpp draws it).

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cmath>
#include <cstring>

#define KVIST_VNNI
#include "cpu_avx512_begin.h"

#include "cpu_bytes.h"
#include "cpu_matrix.h"

namespace kvist::avx512 {
namespace {

constexpr int kVectorRows = 2;
constexpr int kMostBytes = 3;  // of an input
constexpr int kAhead = 8;      // steps that are asked for before they are read

// What all bytes of one row's inputs of a step have in common.
struct Factors {
    std::int32_t less[kMostBytes];  // what codes of 8 bits add to a sum if 128 is added to each, negative
    float unit;                     // what inputs are multiples of
    float sum;                      // of the inputs as they are multiplied
};

// Inputs of all rows, step by step.
struct Inputs {
    std::int8_t* bytes;  // [steps, rows, bytes of an input, 32]: the high ones first
    Factors* factors;    // [steps, rows]
    int rows;

    template <int kBytes>
    const std::int8_t* of(std::int64_t step, int row) const {
        return bytes + (step * rows + row) * kBytes * kStep;
    }
};

inline float power_of_two(int power) {
    const std::uint32_t bits = static_cast<std::uint32_t>(power + 127) << 23;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// One row's inputs of a step.
template <int kBytes>
void pack(const bf16* x, __m256i order, std::int8_t* bytes, Factors& factors) {
    const __m512 one = load(x), two = load(x + kLanes);
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(one), _mm512_abs_ps(two)));
    constexpr int kHighest = 7 * kBytes - 1;  // the largest's power of two, in units
    std::uint32_t bits;
    std::memcpy(&bits, &largest, 4);
    const int power = static_cast<int>(bits >> 23) - 127;
    const bool some = largest > 1e-30f;
    const __m512 share = _mm512_set1_ps(some ? power_of_two(kHighest - power) : 0);
    factors.unit = some ? power_of_two(power - kHighest) : 0;
    __m512i x0 = _mm512_cvtps_epi32(_mm512_mul_ps(one, share));
    __m512i x1 = _mm512_cvtps_epi32(_mm512_mul_ps(two, share));
    // Of the inputs as they are multiplied: what rounding adds to codes that are all positive, a minimum takes away.
    factors.sum = factors.unit * static_cast<float>(_mm512_reduce_add_epi32(_mm512_add_epi32(x0, x1)));
    // What is no finite number makes results that are none.
    constexpr int kNone = 0x01 | 0x08 | 0x10 | 0x80;
    if (_mm512_fpclass_ps_mask(one, kNone) | _mm512_fpclass_ps_mask(two, kNone)) factors.unit = factors.sum = NAN;
    const __m512i lower = _mm512_set1_epi32(127);
    for (int i = kBytes - 1; i >= 0; --i) {
        const __m512i byte0 = i == 0 ? x0 : _mm512_and_si512(x0, lower);
        const __m512i byte1 = i == 0 ? x1 : _mm512_and_si512(x1, lower);
        factors.less[i] = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(byte0, byte1));
        const __m256i all = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(byte0)),
                                                    _mm512_cvtepi32_epi8(byte1), 1);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + i * kStep), _mm256_shuffle_epi8(all, order));
        x0 = _mm512_srai_epi32(x0, 7);
        x1 = _mm512_srai_epi32(x1, 7);
    }
}

// ---- a panel --------------------------------------------------------------------------------------------------------

template <int kBits>
struct Panel {
    static constexpr int kCodes = kStep * kLanes * kBits / 8;  // bytes of a tile before its scales
    static constexpr int kTile = kCodes + 64;

    const std::uint8_t* data;

    Panel(const Matrix& m, std::int64_t panel) : data(m.data + panel * (m.inputs / kStep) * 2 * kTile) {}

    const std::uint8_t* tile(std::int64_t step, int side) const { return data + (2 * step + side) * kTile; }

    void fetch(std::int64_t step, int side) const {
        for (int at = 0; at < kTile; at += 64)
            _mm_prefetch(reinterpret_cast<const char*>(tile(step, side) + at), _MM_HINT_T0);
    }

    // The sums of all steps before with this one's, of which `products(i)` are those of one byte of the inputs.
    template <int kBytes, class Products>
    __m512 add(const std::uint8_t* tile, const Factors& factors, __m512 sum, Products&& products) const {
        const auto* at = reinterpret_cast<const __m256i*>(tile + kCodes);
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(at));
        const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(at + 1));
        const __m512i lower = _mm512_add_epi32(_mm512_slli_epi32(products(kBytes - 2), 7), products(kBytes - 1));
        __m512 product = _mm512_cvtepi32_ps(lower);
        if (kBytes == 3)
            product = _mm512_fmadd_ps(_mm512_cvtepi32_ps(products(0)), _mm512_set1_ps(128 * 128), product);
        const __m512 by = _mm512_mul_ps(scale, _mm512_set1_ps(factors.unit));
        sum = _mm512_fmadd_ps(minimum, _mm512_set1_ps(factors.sum), sum);
        return _mm512_fmadd_ps(by, product, sum);
    }
};

// For kRows rows on the vector units: sums [kRows, 32]. Sums of a step are kept in two parts, each half as long a chain of
// sums that wait for one another. The higher codes of 4 bits stay where they lie, 16 times as large, and so does their
// part, until it is whole.
template <int kBits, int kBytes, int kRows>
void multiply_by_vectors(const Matrix& m, std::int64_t index, const Inputs& in, float* out) {
    const Panel<kBits> panel(m, index);
    const std::int64_t steps = m.inputs / kStep;
    const __m512i lower = _mm512_set1_epi8(15), upper = _mm512_set1_epi8(-16), flip = _mm512_set1_epi8(-128);
    __m512 sums[2][kRows];
    for (auto& of_rows : sums)
        for (__m512& sum : of_rows) sum = _mm512_setzero_ps();
    for (std::int64_t step = 0; step < steps; ++step) {
        const Factors* factors = in.factors + step * kRows;
        const std::int8_t* bytes = in.of<kBytes>(step, 0);
        for (int side = 0; side < 2; ++side) panel.fetch(step + kAhead, side);
        __m512i parts[2][kRows][kBytes][2];  // of a step's sums
        for (auto& of_rows : parts)
            for (int row = 0; row < kRows; ++row)
                for (int i = 0; i < kBytes; ++i) {
                    of_rows[row][i][0] =
                        kBits == 8 ? _mm512_set1_epi32(factors[row].less[i]) : _mm512_setzero_si512();
                    of_rows[row][i][1] = _mm512_setzero_si512();
                }
        const auto add = [&](int side, int part, __m512i codes, int word) {
            for (int row = 0; row < kRows; ++row)
                for (int i = 0; i < kBytes; ++i) {
                    std::int32_t four;
                    std::memcpy(&four, bytes + (row * kBytes + i) * kStep + 4 * word, 4);
                    __m512i& sum = parts[side][row][i][part];
                    sum = _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(four));
                }
        };
#pragma GCC unroll 8
        for (int j = 0; j < kBits; ++j)
            for (int side = 0; side < 2; ++side) {
                const __m512i words = _mm512_loadu_si512(panel.tile(step, side) + j * 64);
                if constexpr (kBits == 4) {
                    add(side, 0, _mm512_and_si512(words, lower), 2 * j);
                    add(side, 1, _mm512_and_si512(words, upper), 2 * j + 1);
                } else {
                    // These codes must not be negative: 128 more.
                    add(side, j % 2, _mm512_xor_si512(words, flip), j);
                }
            }
        for (int side = 0; side < 2; ++side)
            for (int row = 0; row < kRows; ++row) {
                const auto product = [&](int i) {
                    const __m512i* of = parts[side][row][i];
                    return _mm512_add_epi32(of[0], kBits == 4 ? _mm512_srai_epi32(of[1], 4) : of[1]);
                };
                sums[side][row] =
                    panel.template add<kBytes>(panel.tile(step, side), factors[row], sums[side][row], product);
            }
    }
    for (int row = 0; row < kRows; ++row)
        for (int side = 0; side < 2; ++side) _mm512_store_ps(out + row * kPanel + side * kLanes, sums[side][row]);
}

// What a product works in on the matrix unit: two steps are unpacked ahead, and results wait for two steps.
struct Few {
    alignas(64) std::uint8_t codes[4][2][kStep * kLanes];
    alignas(64) std::int32_t products[4][2][kFewBytes * kMostBytes][kLanes];
};

// Rows of which one tile holds the inputs; others have a second.
constexpr int rows_of_tile(int rows, int bytes) { return rows * bytes <= kLanes ? rows : rows / 2; }

// Tiles 0 to 3 are sums, 4 and 5 inputs, 6 and 7 codes.
void tiles_for(int rows, int bytes) {
    const int first = rows_of_tile(rows, bytes), second = rows - first;
    TileConfig config;
    for (int tile : {0, 1, 4}) config.rows[tile] = static_cast<std::uint8_t>(bytes * first);
    for (int tile : {2, 3, 5}) config.rows[tile] = static_cast<std::uint8_t>(bytes * std::max(1, second));
    for (int tile : {6, 7}) config.rows[tile] = kStep / 4;
    for (int tile : {4, 5}) config.bytes[tile] = kStep;
    configure(config);
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

// For all rows on the matrix unit: sums [rows, 32].
template <int kBits, int kBytes>
void multiply_by_tiles(const Matrix& m, std::int64_t index, const Inputs& in, float* out) {
    Few& few = of_this_thread<Few>();
    const Panel<kBits> panel(m, index);
    const std::int64_t steps = m.inputs / kStep;
    const int first = rows_of_tile(in.rows, kBytes);
    std::memset(out, 0, sizeof(float) * kPanel * static_cast<std::size_t>(in.rows));
    const auto unpack_step = [&](std::int64_t step) {
        if (step >= steps) return;
        for (int side = 0; side < 2; ++side) unpack(panel.tile(step, side), few.codes[step % 4][side]);
    };
    const auto add_step = [&](std::int64_t step) {
        for (int side = 0; side < 2; ++side)
            for (int row = 0; row < in.rows; ++row) {
                const auto* products = few.products[step % 4][side] + row * kBytes;
                float* sum = out + row * kPanel + side * kLanes;
                _mm512_store_ps(sum, panel.template add<kBytes>(
                                         panel.tile(step, side), in.factors[step * in.rows + row], _mm512_load_ps(sum),
                                         [&](int i) { return _mm512_load_si512(products[i]); }));
            }
    };
    if constexpr (kBits == 4) {
        unpack_step(0);
        unpack_step(1);
    }
    for (std::int64_t step = 0; step < steps; ++step) {
        for (int side = 0; side < 2; ++side) panel.fetch(step + kAhead, side);
        if constexpr (kBits == 4) {
            unpack_step(step + 2);
            TILE_LOAD(6, few.codes[step % 4][0], 64);
            TILE_LOAD(7, few.codes[step % 4][1], 64);
        } else {
            TILE_LOAD(6, panel.tile(step, 0), 64);
            TILE_LOAD(7, panel.tile(step, 1), 64);
        }
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_LOAD(4, in.of<kBytes>(step, 0), kStep);
        TILE_DOT_BYTES(0, 4, 6);
        TILE_DOT_BYTES(1, 4, 7);
        TILE_STORE(0, few.products[step % 4][0], 64);
        TILE_STORE(1, few.products[step % 4][1], 64);
        if (first < in.rows) {
            TILE_ZERO(2);
            TILE_ZERO(3);
            TILE_LOAD(5, in.of<kBytes>(step, first), kStep);
            TILE_DOT_BYTES(2, 5, 6);
            TILE_DOT_BYTES(3, 5, 7);
            TILE_STORE(2, few.products[step % 4][0][first * kBytes], 64);
            TILE_STORE(3, few.products[step % 4][1][first * kBytes], 64);
        }
        if (step >= 2) add_step(step - 2);
    }
    for (std::int64_t step = std::max<std::int64_t>(0, steps - 2); step < steps; ++step) add_step(step);
}

// ---- all panels -----------------------------------------------------------------------------------------------------

template <int kBits, int kBytes>
Inputs packed(const bf16* x, int rows, std::int64_t width) {
    const std::int64_t steps = width / kStep, count = steps * rows;
    auto* memory = static_cast<std::int8_t*>(of_this_thread<Shared>().memory.reserve(
        static_cast<std::size_t>(count) * (kBytes * kStep + sizeof(Factors))));
    const Inputs in{memory, reinterpret_cast<Factors*>(memory + count * kBytes * kStep), rows};
    // Where input i of a word's inputs lies among its bytes.
    const __m128i four_bits = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m128i eight_bits = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m256i order = _mm256_broadcastsi128_si256(kBits == 4 ? four_bits : eight_bits);
    for (std::int64_t step = 0; step < steps; ++step)
        for (int row = 0; row < rows; ++row) {
            const std::int64_t at = step * rows + row;
            pack<kBytes>(x + row * width + step * kStep, order, in.bytes + at * kBytes * kStep, in.factors[at]);
        }
    return in;
}

// Asks for what a thread will read of a weight first: nothing before it would.
void fetch(const Matrix& m, int place, int threads) {
    const std::int64_t panels = m.outputs / kPanel, panel_bytes = m.inputs / kStep * 2 * m.tile_bytes;
    const auto* from = reinterpret_cast<const char*>(m.data) + Ranges::begin(panels, place, threads) * panel_bytes;
    const std::int64_t bytes = std::min(panel_bytes, kAhead * 2 * m.tile_bytes);
    for (std::int64_t at = 0; at < bytes; at += 64) _mm_prefetch(from + at, _MM_HINT_T0);
}

template <int kBits, int kBytes>
void multiply_panels(const Matrix& m, const Team& team, const bf16* x, int rows, void* out, const float* bias,
                     const Matrix* next) {
    const std::int64_t panels = m.outputs / kPanel;
    const Inputs in = packed<kBits, kBytes>(x, rows, m.inputs);
    Ranges ranges(panels, team.threads());
    team.run([&](int place) {
        alignas(64) float sums[kFewBytes * kPanel];
        if (rows > kVectorRows) tiles_for(rows, kBytes);
        ranges.run(place, [&](std::int64_t panel) {
            if (rows == 1)
                multiply_by_vectors<kBits, kBytes, 1>(m, panel, in, sums);
            else if (rows == 2)
                multiply_by_vectors<kBits, kBytes, 2>(m, panel, in, sums);
            else
                multiply_by_tiles<kBits, kBytes>(m, panel, in, sums);
            write(m, sums, panel, 0, rows, out, 0, bias);
        });
        if (rows > kVectorRows) tiles_end();
        if (next != nullptr) fetch(*next, place, team.threads());
    });
}

}  // namespace

void multiply_bytes(const Matrix& m, const Team& team, const bf16* x, int rows, void* out, const float* bias,
                    const Matrix* next) {
    if (m.result == Matrix::kFloat32)
        (m.bits == 4 ? multiply_panels<4, 3> : multiply_panels<8, 3>)(m, team, x, rows, out, bias, next);
    else
        (m.bits == 4 ? multiply_panels<4, 2> : multiply_panels<8, 2>)(m, team, x, rows, out, bias, next);
}

}  // namespace kvist::avx512

#include "cpu_avx512_end.h"

#else

#include <stdexcept>

namespace kvist::avx512 {
void multiply_bytes(const Matrix&, const Team&, const bf16*, int, void*, const float*, const Matrix*) {
    throw std::logic_error("built without AVX-512");
}
}  // namespace kvist::avx512

#endif
