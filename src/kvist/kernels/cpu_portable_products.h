// Products with stored weights, x W^T + b, for every processor. Included inside a namespace, once a build, behind
// cpu_portable_attention.h; cpu_matrix.cpp draws a weight.
//
// A panel of 32 outputs is decoded some steps at a time, which then stay in the first cache while the rows of a block,
// which stays in the second, are multiplied with them. There are two ways:
//
//     in float32     weights become float32, exactly, and so do inputs: bf16, and codes elsewhere than on x86
//     in integers    cpu_portable_integers.h: codes
//
// What comes out does not depend on the team's threads.

constexpr int kStep = 32;   // inputs of a tile
constexpr int kPanel = 32;  // outputs of a panel
constexpr int kSide = 16;   // outputs of a tile
constexpr int kBlockRows = 64;
constexpr std::int64_t kMostRows = 4 * kBlockRows;  // that are held as they are multiplied
constexpr std::int64_t kTasks = 8;  // a thread, at least, where there is enough to do
constexpr int kChunk = 4;           // steps that are decoded at a time
constexpr int kStepsAhead = 8;      // steps that are asked for before they are decoded

// ---- results --------------------------------------------------------------------------------------------------------

KVIST_INLINE void store_bf16(void* p, Floats x) {
    const Bits bits = (Bits)x;
    const Bits rounded = (bits + (0x7fff + (bits >> 16 & 1))) >> 16;
    const Bits found = (bits & 0x7fffffff) > kInfinity ? bits >> 16 | 0x40 : rounded;
    const Halves halves = __builtin_convertvector(found, Halves);
    std::memcpy(p, &halves, sizeof halves);
}

KVIST_INLINE Floats silu(Floats x) {
    const Floats e = exp2((x < 0.0f ? x : -x) * kLog2E);
    return x / (1.0f + e) * (x < 0.0f ? e : all(1.0f));
}

KVIST_INLINE Floats gelu_tanh(Floats x) {
    const Floats half = x * 0.5f;
    return half * tanh((x * x * x * 0.044715f + x) * 0.7978845608f) + half;
}

// A panel's float32 sums [rows, 32] to the output, half as many where gates are multiplied in.
static void write(const Matrix& m, const float* sums, std::int64_t panel, int rows, void* out,
                  std::int64_t first_row, const float* bias) {
    float none[kPanel] = {};
    const float* b = bias == nullptr ? none : bias + panel * kPanel;
    for (int row = 0; row < rows; ++row, sums += kPanel) {
        const std::int64_t at = (first_row + row) * m.outputs + panel * kPanel;
        for (int i = 0; i < (m.gated() ? kSide : kPanel); i += kLanes) {
            const Floats x = load(sums + i) + load(b + i);
            if (m.gated()) {
                const Floats other = load(sums + kSide + i) + load(b + kSide + i);
                const Floats gate = m.result == Matrix::kSilu ? silu(x) : gelu_tanh(x);
                store_bf16(static_cast<bf16*>(out) + at / 2 + i, gate * other);
            } else if (m.result == Matrix::kFloat32) {
                store(static_cast<float*>(out) + at + i, x);
            } else {
                store_bf16(static_cast<bf16*>(out) + at + i, x);
            }
        }
    }
}

// ---- weights in float32 ---------------------------------------------------------------------------------------------

// One tile of 16 outputs to columns of `to`, [32, 32].
KVIST_INLINE void decode_tile(const Matrix& m, const std::uint8_t* from, float* to) {
    for (int lane = 0; lane < kSide; lane += kLanes) {
        const auto words = [&](int vector) {
            Bits x;
            std::memcpy(&x, from + vector * 64 + lane * 4, sizeof x);
            return x;
        };
        float* column = to + lane;
        if (m.bits == 16) {
            for (int pair = 0; pair < kStep / 2; ++pair) {
                const Bits both = words(pair);
                store(column + 2 * pair * kPanel, (Floats)(both << 16));
                store(column + (2 * pair + 1) * kPanel, (Floats)(both & 0xffff0000));
            }
            continue;
        }
        const std::uint8_t* factors = from + m.bits * 64 + lane * 2;
        const Floats scale = load_f16(factors), least = load_f16(factors + 32);
        for (int vector = 0; vector < m.bits; ++vector) {
            const Bits codes = words(vector);
            const int in_word = 32 / m.bits;
            for (int i = 0; i < in_word; ++i) {
                const int shift = (i / 2 + i % 2 * in_word / 2) * m.bits;  // as pack() put it
                const Floats code = m.bits == 4
                                        ? numbers(codes >> shift & 15)
                                        : __builtin_convertvector((Ints)(codes << (24 - shift)) >> 24, Floats);
                store(column + (vector * in_word + i) * kPanel, code * scale + least);
            }
        }
    }
}

// ---- a panel --------------------------------------------------------------------------------------------------------

// What a thread works in: what is decoded, and sums [kBlockRows, 32].
static Buffer& product_of_this_thread() {
    static thread_local Buffer buffer;
    return buffer;
}

// Inputs as they are multiplied: of the thread that calls, read by all.
static Buffer& inputs_of_this_thread() {
    static thread_local Buffer buffer;
    return buffer;
}

KVIST_INLINE const std::uint8_t* tile_of(const Matrix& m, std::int64_t panel, std::int64_t step, int side) {
    return m.data + ((panel * (m.inputs / kStep) + step) * 2 + side) * m.tile_bytes;
}

KVIST_INLINE void fetch_step(const Matrix& m, std::int64_t panel, std::int64_t step) {
    const std::uint8_t* from = tile_of(m, panel, step, 0);
    for (std::int64_t at = 0; at < 2 * m.tile_bytes; at += 64) __builtin_prefetch(from + at);
}

// Sums [kRows, 32] += x [kRows, count] w, w [count, 32]. Two vectors of outputs at a time: with six rows their sums,
// and what they are added from, fill sixteen registers.
template <int kRows>
static void add_floats(const float* x, std::int64_t stride, const float* w, int count, float* sums) {
    for (int at = 0; at < kPanel; at += 2 * kLanes) {
        Floats sum[kRows][2];
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < 2; ++v) sum[r][v] = load(sums + r * kPanel + at + v * kLanes);
        for (int i = 0; i < count; ++i) {
            const Floats one = load(w + i * kPanel + at), other = load(w + i * kPanel + at + kLanes);
            for (int r = 0; r < kRows; ++r) {
                const Floats left = all(x[r * stride + i]);
                sum[r][0] += left * one;
                sum[r][1] += left * other;
            }
        }
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < 2; ++v) store(sums + r * kPanel + at + v * kLanes, sum[r][v]);
    }
}

// Products in float32.
class InFloats {
  public:
    static constexpr std::size_t kDecoded = sizeof(float) * kChunk * kStep * kPanel;
    static constexpr int kFewRows = 0;

    InFloats(const Matrix& m, const Team& team, const bf16* x, std::int64_t rows) : m_(m) {
        auto* to = static_cast<float*>(
            inputs_of_this_thread().reserve(sizeof(float) * static_cast<std::size_t>(rows * m.inputs)));
        const int width = static_cast<int>(m.inputs);
        team.share(rows, 16, [&](std::int64_t row) {
            load_row(Type::kBfloat16, x, row * width, width, to + row * width);
        });
        x_ = to;
    }

    void decode(std::int64_t panel, std::int64_t step, int some, char* decoded) const {
        auto* to = reinterpret_cast<float*>(decoded);
        for (int i = 0; i < some; ++i, to += kStep * kPanel) {
            fetch_step(m_, panel, step + i + kStepsAhead);
            for (int side = 0; side < 2; ++side) decode_tile(m_, tile_of(m_, panel, step + i, side), to + side * kSide);
        }
    }

    void add(const char* decoded, std::int64_t step, int some, std::int64_t row, int rows, float* sums) const {
        const float* x = x_ + row * m_.inputs + step * kStep;
        const auto* w = reinterpret_cast<const float*>(decoded);
        const auto add_some = [&](auto number) {
            constexpr int kCount = decltype(number)::value;
            for (; rows >= kCount; rows -= kCount, x += kCount * m_.inputs, sums += kCount * kPanel)
                add_floats<kCount>(x, m_.inputs, w, some * kStep, sums);
        };
        add_some(Known<int, 6>());
        add_some(Known<int, 3>());
        add_some(Known<int, 1>());
    }

  private:
    const Matrix& m_;
    const float* x_;
};

// Rows `first … first + rows - 1`, which are those of `way`.
template <class Way>
static void multiply_panels(const Matrix& m, const Team& team, const Way& way, std::int64_t first, std::int64_t rows,
                            void* out, const float* bias) {
    const std::int64_t steps = m.inputs / kStep;
    // A thread goes through the panels with one block of rows, or a part of them where blocks are few.
    const std::int64_t panels = m.outputs / kPanel, blocks = (rows + kBlockRows - 1) / kBlockRows;
    const std::int64_t groups = blocks == 1 ? panels : std::min(panels, 1 + kTasks * team.threads() / blocks);
    Ranges ranges(blocks * groups, team.threads());
    team.run([&](int place) {
        auto* sums = static_cast<float*>(
            product_of_this_thread().reserve(sizeof(float) * kBlockRows * kPanel + Way::kDecoded));
        auto* decoded = reinterpret_cast<char*>(sums + kBlockRows * kPanel);
        ranges.run(place, [&](std::int64_t index) {
            const std::int64_t row = index / groups * kBlockRows, group = index % groups;
            const int count = static_cast<int>(std::min<std::int64_t>(kBlockRows, rows - row));
            for (std::int64_t panel = group * panels / groups; panel < (group + 1) * panels / groups; ++panel) {
                if constexpr (Way::kFewRows > 0) {
                    if (rows <= Way::kFewRows) {
                        way.multiply_few(panel, count, sums);
                        write(m, sums, panel, count, out, first + row, bias);
                        continue;
                    }
                }
                std::memset(sums, 0, sizeof(float) * kPanel * static_cast<std::size_t>(count));
                for (std::int64_t step = 0; step < steps; step += kChunk) {
                    const int some = static_cast<int>(std::min<std::int64_t>(kChunk, steps - step));
                    way.decode(panel, step, some, decoded);
                    way.add(decoded, step, some, row, count, sums);
                }
                write(m, sums, panel, count, out, first + row, bias);
            }
        });
    });
}

// Some blocks of rows at a time, so that what is kept of inputs does not grow with a step.
template <class Way>
static void multiply_rows(const Matrix& m, const Team& team, const bf16* x, std::int64_t rows, void* out,
                          const float* bias) {
    for (std::int64_t first = 0; first < rows; first += kMostRows) {
        const std::int64_t some = std::min(kMostRows, rows - first);
        multiply_panels(m, team, Way(m, team, x + first * m.inputs, some), first, some, out, bias);
    }
}

#if KVIST_X86
#include "cpu_portable_integers.h"
#endif

void multiply(const Matrix& m, const Team& team, const bf16* x, std::int64_t rows, void* out, const float* bias) {
#if KVIST_X86
    if (m.bits != 16) return multiply_rows<InIntegers>(m, team, x, rows, out, bias);
#endif
    multiply_rows<InFloats>(m, team, x, rows, out, bias);
}
