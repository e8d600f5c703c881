// Products with codes of 4 and 8 bits as they are, on x86, whose processors multiply pairs of 16 bits and add them up.
// Included behind cpu_portable_products.h.
//
// Inputs are bf16, of 8 significant bits; the 32 of a step become whole multiples of one power of two, of 16 bits:
// exact from 2^-7 of the largest's power of two on, else within 2^-15 of it; or all of them 0 where none is above 1e-30,
// as units would be subnormal. Sums of a step are exact, and scales are applied to them:
//
//     sum += scale x unit x (sum of code x integer) + minimum x (sum of the step's x)

#if KVIST_LANES == 4
#define KVIST_MM(operation) _mm_##operation
typedef __m128i Words;
#elif KVIST_LANES == 8
#define KVIST_MM(operation) _mm256_##operation
typedef __m256i Words;
#else
#define KVIST_MM(operation) _mm512_##operation
typedef __m512i Words;
#endif

typedef std::int16_t Shorts __attribute__((vector_size(2 * KVIST_LANES)));

constexpr int kPairs = kStep / 2;

KVIST_INLINE Words load_words(const void* p) {
    Words x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// Compilers would rather keep all products of a step, for which there are no registers, and add them in the end.
KVIST_INLINE void settle(Words& sum) {
#if KVIST_LANES == 16
    asm("" : "+v"(sum));
#else
    asm("" : "+x"(sum));
#endif
}

// ---- inputs ---------------------------------------------------------------------------------------------------------

struct Factors {
    float unit;  // what inputs are multiples of
    float sum;   // of the inputs as they are multiplied
};

KVIST_INLINE float power_of_two(int power) { return float_of(static_cast<std::uint32_t>(power + 127) << 23); }

// One row's inputs of a step.
KVIST_INLINE void pack(const bf16* x, std::int16_t* to, Factors& factors) {
    constexpr int kHighest = 14;  // the largest's power of two, in units
    constexpr float kLeast = 1e-30f;
    Floats most = {};
    Ints special = {};
    for (int i = 0; i < kStep; i += kLanes) {
        const Bits size = (Bits)load_bf16(x + i) & 0x7fffffff;
        most = larger((Floats)size, most);
        special |= size >= kInfinity;
    }
    const float largest = largest_of(most);
    const bool some = largest > kLeast;
    const int power = static_cast<int>(bits_of(largest) >> 23) - 127;
    const Floats share = all(some ? power_of_two(kHighest - power) : 0);
    factors.unit = some ? power_of_two(power - kHighest) : 0;
    Floats sum = {};
    for (int i = 0; i < kStep; i += kLanes) {
        // What is no number becomes none that matters.
        const Floats shifted = load_bf16(x + i) * share + kRounder;
        const Ints number = (Ints)shifted - (Ints)all(kRounder);
        sum += __builtin_convertvector(number, Floats);
        const Shorts short_ones = __builtin_convertvector(number, Shorts);
        std::memcpy(to + i, &short_ones, sizeof short_ones);
    }
    factors.sum = factors.unit * sum_of(sum);
    // What is no finite number makes results that are none.
    const Floats none = __builtin_convertvector(special, Floats);  // -1 where one is
    if (largest_of(-none) > 0) factors.unit = factors.sum = float_of(0x7fc00000);
}

// ---- a panel --------------------------------------------------------------------------------------------------------

class InIntegers {
    // A step of a panel: of each pair of inputs the codes of all outputs.
    struct Step {
        std::int16_t codes[kPairs][kPanel][2];
        float scale[kPanel], least[kPanel];
    };

  public:
    static constexpr std::size_t kDecoded = sizeof(Step) * kChunk;

    InIntegers(const Matrix& m, const Team& team, const bf16* x, std::int64_t rows)
        : m_(m), steps_(m.inputs / kStep) {
        const std::int64_t count = rows * steps_;
        auto* memory = static_cast<std::int16_t*>(inputs_of_this_thread().reserve(
            static_cast<std::size_t>(count) * (sizeof(std::int16_t) * kStep + sizeof(Factors))));
        auto* factors = reinterpret_cast<Factors*>(memory + count * kStep);
        team.share(rows, 16, [&](std::int64_t row) {
            for (std::int64_t at = row * steps_; at < (row + 1) * steps_; ++at)
                pack(x + at * kStep, memory + at * kStep, factors[at]);
        });
        x_ = memory;
        factors_ = factors;
    }

    void decode(std::int64_t panel, std::int64_t step, int some, char* decoded) const {
        auto* to = reinterpret_cast<Step*>(decoded);
        for (int i = 0; i < some; ++i, ++to) {
            fetch_step(m_, panel, step + i + kStepsAhead);
            for (int side = 0; side < 2; ++side) {
                const std::uint8_t* from = tile_of(m_, panel, step + i, side);
                if (m_.bits == 4)
                    decode_side<4>(from, side * kSide, *to);
                else
                    decode_side<8>(from, side * kSide, *to);
            }
        }
    }

    void add(const char* decoded, std::int64_t step, int some, std::int64_t row, int rows, float* sums) const {
        const auto* steps = reinterpret_cast<const Step*>(decoded);
        std::int64_t at = row * steps_ + step;
        const auto add_some = [&](auto number) {
            constexpr int kCount = decltype(number)::value;
            for (; rows >= kCount; rows -= kCount, at += kCount * steps_, sums += kCount * kPanel)
                add_rows<kCount>(steps, some, at, sums);
        };
        add_some(Known<int, 4>());
        add_some(Known<int, 1>());
    }

    // Rows that are few meet codes as they are read: what is decoded would be stored for so few alone.
    static constexpr int kFewRows = 4;

    void multiply_few(std::int64_t panel, int rows, float* sums) const {
        for (int row = 0; row < rows;) {
            const int count = rows - row == 4 ? 2 : std::min(3, rows - row);
            const auto some = [&](auto number) {
                constexpr int kCount = decltype(number)::value;
                if (count != kCount) return;
                if (m_.bits == 4)
                    few_rows<4, kCount>(panel, row, sums + row * kPanel);
                else
                    few_rows<8, kCount>(panel, row, sums + row * kPanel);
            };
            some(Known<int, 3>());
            some(Known<int, 2>());
            some(Known<int, 1>());
            row += count;
        }
    }

  private:
    // Pair `i` of those in each word.
    template <int kBits>
    __attribute__((always_inline)) static inline Words pair_of(Words words, int i) {
        if (kBits == 4) return (Words)((Bits)words >> (4 * i) & 0x000f000f);
        return KVIST_MM(srai_epi16)(i == 0 ? KVIST_MM(slli_epi16)(words, 8) : words, 8);
    }

    // Sums [kRows, 32] of all steps, rounded as `add_rows` does: a row's results do not depend on its neighbours.
    template <int kBits, int kRows>
    void few_rows(std::int64_t panel, std::int64_t row, float* sums) const {
        // Both sides at once: where the second followed, found in the first cache, memory would wait for it. Short
        // vectors' sums would fill the registers.
        constexpr int kVectors = kPanel / kLanes;
        constexpr int kSome = kLanes > 4 ? kVectors : kVectors / 2;
        for (int first = 0; first < kVectors; first += kSome) some_vectors<kBits, kRows, kSome>(panel, row, first, sums);
    }

    template <int kBits, int kRows, int kSome>
    void some_vectors(std::int64_t panel, std::int64_t row, int first, float* sums) const {
        constexpr int kOfWord = 16 / kBits, kOfSide = kSide / kLanes;
        Floats total[kRows][kSome] = {};
        const std::int16_t* x = x_ + row * steps_ * kStep;
        const Factors* factors = factors_ + row * steps_;
        for (std::int64_t step = 0; step < steps_; ++step, x += kStep, ++factors) {
            const std::uint8_t* from = tile_of(m_, panel, step, 0);
            if (first == 0) fetch_step(m_, panel, step + kStepsAhead);
            const auto tile = [&](int v) { return from + (first + v) / kOfSide * m_.tile_bytes; };
            const auto lane = [&](int v) { return (first + v) % kOfSide * kLanes; };
            Words sum[kRows][kSome] = {};
#pragma GCC unroll 8
            for (int vector = 0; vector < kBits; ++vector) {
                Words words[kSome];
                for (int v = 0; v < kSome; ++v) words[v] = load_words(tile(v) + vector * 64 + lane(v) * 4);
#pragma GCC unroll 4
                for (int i = 0; i < kOfWord; ++i) {
                    Words factor[kRows];
                    for (int r = 0; r < kRows; ++r) {
                        std::int32_t both;
                        std::memcpy(&both, x + r * steps_ * kStep + 2 * (vector * kOfWord + i), 4);
                        factor[r] = KVIST_MM(set1_epi32)(both);
                    }
                    for (int v = 0; v < kSome; ++v) {
                        const Words pair = pair_of<kBits>(words[v], i);
                        for (int r = 0; r < kRows; ++r) {
                            sum[r][v] = KVIST_MM(add_epi32)(sum[r][v], KVIST_MM(madd_epi16)(pair, factor[r]));
                            settle(sum[r][v]);
                        }
                    }
                }
            }
            for (int v = 0; v < kSome; ++v) {
                const std::uint8_t* scales = tile(v) + kBits * 64 + lane(v) * 2;
                const Floats scale = load_f16(scales), least = load_f16(scales + 32);
                for (int r = 0; r < kRows; ++r) {
                    const Factors& by = factors[r * steps_];
                    const Floats product = __builtin_convertvector((Ints)sum[r][v], Floats);
                    total[r][v] = total[r][v] + least * by.sum + scale * by.unit * product;
                }
            }
        }
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kSome; ++v) store(sums + r * kPanel + (first + v) * kLanes, total[r][v]);
    }

    template <int kBits>
    static void decode_side(const std::uint8_t* from, int first, Step& to) {
        constexpr int kOfWord = 16 / kBits;  // pairs
        for (int lane = 0; lane < kSide; lane += kLanes) {
            for (int vector = 0; vector < kBits; ++vector) {
                const Words words = load_words(from + vector * 64 + lane * 4);
                for (int i = 0; i < kOfWord; ++i) {
                    const Words pair = pair_of<kBits>(words, i);
                    std::memcpy(to.codes[vector * kOfWord + i][first + lane], &pair, sizeof pair);
                }
            }
            const std::uint8_t* factors = from + kBits * 64 + lane * 2;
            store(to.scale + first + lane, load_f16(factors));
            store(to.least + first + lane, load_f16(factors + 32));
        }
    }

    // Two vectors of outputs at a time: with four rows their sums, what they are added from and its factor take no more
    // than sixteen registers.
    template <int kRows>
    void add_rows(const Step* steps, int some, std::int64_t at, float* sums) const {
        for (int first = 0; first < kPanel; first += 2 * kLanes) {
            for (int i = 0; i < some; ++i) {
                const Step& step = steps[i];
                const std::int16_t* x = x_ + (at + i) * kStep;
                const Factors* factors = factors_ + at + i;
                Words sum[kRows][2] = {};
#pragma GCC unroll 16
                for (int pair = 0; pair < kPairs; ++pair) {
                    const Words one = load_words(step.codes[pair][first]);
                    const Words other = load_words(step.codes[pair][first + kLanes]);
                    for (int r = 0; r < kRows; ++r) {
                        std::int32_t both;
                        std::memcpy(&both, x + r * steps_ * kStep + 2 * pair, 4);
                        const Words factor = KVIST_MM(set1_epi32)(both);
                        sum[r][0] = KVIST_MM(add_epi32)(sum[r][0], KVIST_MM(madd_epi16)(one, factor));
                        sum[r][1] = KVIST_MM(add_epi32)(sum[r][1], KVIST_MM(madd_epi16)(other, factor));
                        settle(sum[r][0]);
                        settle(sum[r][1]);
                    }
                }
                for (int v = 0; v < 2; ++v) {
                    const Floats scale = load(step.scale + first + v * kLanes);
                    const Floats least = load(step.least + first + v * kLanes);
                    for (int r = 0; r < kRows; ++r) {
                        const Factors& by = factors[r * steps_];
                        float* to = sums + r * kPanel + first + v * kLanes;
                        const Floats product = __builtin_convertvector((Ints)sum[r][v], Floats);
                        store(to, load(to) + least * by.sum + scale * by.unit * product);
                    }
                }
            }
        }
    }

    const Matrix& m_;
    const std::int64_t steps_;
    const std::int16_t* x_;   // [rows, steps, 32]
    const Factors* factors_;  // [rows, steps]
};
