// Vectors of four, eight or sixteen floats as the compilers know them on every processor. Included inside a namespace,
// once a build, which says KVIST_LANES: as many as a register holds. Of vectors that take two, GCC keeps sums in memory.

#define KVIST_INLINE static inline __attribute__((always_inline))

constexpr int kLanes = KVIST_LANES;

// A number that is known when this is compiled, as an argument.
template <class T, T kValue>
struct Known {
    static constexpr T value = kValue;
};

typedef float Floats __attribute__((vector_size(4 * KVIST_LANES)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));
typedef std::int32_t Ints __attribute__((vector_size(4 * KVIST_LANES)));
typedef std::uint32_t Bits __attribute__((vector_size(4 * KVIST_LANES)));
typedef std::uint16_t Halves __attribute__((vector_size(2 * KVIST_LANES)));
typedef std::int8_t Bytes __attribute__((vector_size(KVIST_LANES)));
typedef std::uint8_t Codes __attribute__((vector_size(KVIST_LANES)));

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define KVIST_SHUFFLES 1
#endif
#endif

#if KVIST_LANES == 16
KVIST_INLINE Floats all(float x) { return Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
#elif KVIST_LANES == 4
KVIST_INLINE Floats all(float x) { return Floats{x, x, x, x}; }
#else
KVIST_INLINE Floats all(float x) { return Floats{x, x, x, x, x, x, x, x}; }
#endif
// The second, where one of them is no number.
KVIST_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

KVIST_INLINE Floats load(const float* p) {
    Floats x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
KVIST_INLINE void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

// ---- numbers of other types -----------------------------------------------------------------------------------------

constexpr std::uint32_t kInfinity = 0x7f800000;  // above it is no number

KVIST_INLINE float float_of(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
KVIST_INLINE std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

#if KVIST_LANES == 4 && KVIST_SHUFFLES
// The compilers widen four bytes, which no register holds, one by one: between zeros they lie as they are wanted.
typedef std::uint64_t Two __attribute__((vector_size(16)));
typedef std::uint16_t EightHalves __attribute__((vector_size(16)));
typedef std::uint8_t SixteenCodes __attribute__((vector_size(16)));

KVIST_INLINE Bits load_halves(const void* p) {
    std::uint64_t four;
    std::memcpy(&four, p, sizeof four);
    return (Bits)__builtin_shufflevector((EightHalves)Two{four, 0}, EightHalves{}, 0, 8, 1, 9, 2, 10, 3, 11);
}
KVIST_INLINE Bits load_codes(const void* p) {
    std::uint32_t four;
    std::memcpy(&four, p, sizeof four);
    const auto x = (SixteenCodes)Bits{four, 0, 0, 0};
    const auto halves = (EightHalves)__builtin_shufflevector(x, SixteenCodes{}, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                                             6, 22, 7, 23);
    return (Bits)__builtin_shufflevector(halves, EightHalves{}, 0, 8, 1, 9, 2, 10, 3, 11);
}
KVIST_INLINE Floats load_signed(const void* p) {
    return __builtin_convertvector((Ints)(load_codes(p) << 24) >> 24, Floats);
}
#elif KVIST_F16C
// GCC widens a half of a register at a time, and bytes by way of two.
KVIST_INLINE Bits load_halves(const void* p) {
    return (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
KVIST_INLINE Bits load_codes(const void* p) {
    return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
}
KVIST_INLINE Floats load_signed(const void* p) {
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p))));
}
#else
KVIST_INLINE Bits load_halves(const void* p) {
    Halves x;
    std::memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, Bits);
}
KVIST_INLINE Bits load_codes(const void* p) {
    Codes x;
    std::memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, Bits);
}
KVIST_INLINE Floats load_signed(const void* p) {
    Bytes x;
    std::memcpy(&x, p, sizeof x);
    return __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
}
#endif
// Small integers: signed conversion is one instruction.
KVIST_INLINE Floats numbers(Bits x) { return __builtin_convertvector((Ints)x, Floats); }

KVIST_INLINE Floats load_bf16(const void* p) { return (Floats)(load_halves(p) << 16); }

// A number of `kMantissa` bits after a sign and an exponent whose bias is `kBias`, in the lowest bits; from `kSpecial`
// on, without the sign, float32's infinity and what is no number. Subnormal ones go by way of a normal one: multiplying
// float32's own subnormals takes some processors a hundred cycles.
template <int kMantissa, int kBias, std::uint32_t kSign, std::uint32_t kSpecial>
KVIST_INLINE Floats widened(Bits x) {
    const Bits rest = (x & (kSign - 1)) << (23 - kMantissa);
    const Bits normal = rest + (std::uint32_t{127 - kBias} << 23);
    const Floats low = (Floats)(rest + (std::uint32_t{128 - kBias} << 23)) - float_of(std::uint32_t{128 - kBias} << 23);
    const Bits finite = (rest >> 23) == 0 ? (Bits)low : normal;
    const Bits chosen = rest >= kSpecial << (23 - kMantissa) ? rest | kInfinity : finite;
    return (Floats)(chosen | (x & kSign) << (kSign == 0x80 ? 24 : 16));
}

KVIST_INLINE Floats load_f16(const void* p) {
#if KVIST_LANES == 16
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#elif KVIST_F16C
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#elif KVIST_NEON
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(static_cast<const std::uint16_t*>(p))));
#else
    return widened<10, 15, 0x8000, 0x7c00>(load_halves(p));
#endif
}

// e4m3 without infinities.
KVIST_INLINE Floats load_fp8(const void* p) { return widened<3, 7, 0x80, 0x7f>(load_codes(p)); }

KVIST_INLINE float of_f16(std::uint16_t half) {
#if KVIST_F16C
    return _cvtsh_ss(half);
#else
    const std::uint32_t rest = static_cast<std::uint32_t>(half & 0x7fff) << 13;
    const float low = float_of(rest + (113u << 23)) - 0x1p-14f;
    const std::uint32_t finite = rest < 1u << 23 ? bits_of(low) : rest + (112u << 23);
    const std::uint32_t bits = rest >= 0x7c00u << 13 ? rest | kInfinity : finite;
    return float_of(bits | static_cast<std::uint32_t>(half & 0x8000) << 16);
#endif
}
KVIST_INLINE float of_f16_at(const char* p) {
    std::uint16_t half;
    std::memcpy(&half, p, sizeof half);
    return of_f16(half);
}

// To the nearest, to even from the middle. What is no number stays none.
KVIST_INLINE std::uint16_t to_f16(float x) {
    const std::uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest >= bits_of(65520.0f)) return static_cast<std::uint16_t>(sign | (rest > kInfinity ? 0x7e00 : 0x7c00));
    // Adding what has 2^-24 as its last place rounds to it.
    if (rest < 113u << 23) return static_cast<std::uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f)));
    return static_cast<std::uint16_t>(sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13);
}
KVIST_INLINE std::uint16_t to_f16_saturated(float x) {
    return to_f16(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x);
}
KVIST_INLINE std::uint16_t to_bf16(float x) {
    const std::uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > kInfinity) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
    return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// What is too large saturates.
KVIST_INLINE std::uint8_t to_fp8(float x) {
    const std::uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80, rest = bits & 0x7fffffff;
    if (rest >= bits_of(448.0f)) return static_cast<std::uint8_t>(sign | (rest > kInfinity ? 0x7f : 0x7e));
    // The last place of 2^14 is 2^-9, that of the subnormal ones.
    if (rest < 121u << 23) return static_cast<std::uint8_t>(sign | (bits_of(float_of(rest) + 0x1p14f) - bits_of(0x1p14f)));
    return static_cast<std::uint8_t>(sign | (rest - (120u << 23) + 0x7ffff + (rest >> 20 & 1)) >> 20);
}

// ---- functions ------------------------------------------------------------------------------------------------------

// Adding it leaves an integer of up to 22 bits in the lowest bits, rounded to the nearest, to even from the middle; with
// the bias of float32's exponent, that of two to the power of the integer.
constexpr float kRounder = 0x1.8p23f, kBiasedRounder = kRounder + 127;

// Two to the power of x <= 0, relative error below 2e-7; below 2^-125 it is 0. What is no number stays none, whatever
// bits it has.
KVIST_INLINE Floats exp2(Floats x) {
    const Floats bounded = larger(all(-125.0f), x);
    const Floats shifted = bounded + kBiasedRounder;
    const Floats f = bounded - (shifted - kBiasedRounder);
    // Taylor's series of 2^f on [-0.5, 0.5].
    Floats p = f * 1.5403530e-4f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    const Floats result = p * (Floats)((Bits)shifted << 23);
    return x < -125.0f ? Floats{} : result;
}

KVIST_INLINE Floats tanh(Floats x) {
    const Floats magnitude = x < 0.0f ? -x : x;
    const Floats e = exp2(magnitude * -2.8853901f);
    const Floats result = (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -result : result;
}

#if KVIST_SHUFFLES && KVIST_LANES > 4
KVIST_INLINE Eight folded(Eight x) { return x; }
#if KVIST_LANES == 16
KVIST_INLINE Eight folded(Floats x) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
}
#endif
#endif

// The sums of the lanes of four vectors.
KVIST_INLINE Four sums_of(Floats one, Floats two, Floats three, Floats four) {
#if KVIST_SHUFFLES && KVIST_LANES == 4
    const Four ab = __builtin_shufflevector(one, two, 0, 4, 1, 5) + __builtin_shufflevector(one, two, 2, 6, 3, 7);
    const Four cd = __builtin_shufflevector(three, four, 0, 4, 1, 5) + __builtin_shufflevector(three, four, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
#elif KVIST_SHUFFLES
    const Eight a = folded(one), b = folded(two), c = folded(three), d = folded(four);
    const Eight ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
                     __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const Eight cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) +
                     __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    const Eight sums = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
                       __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    return __builtin_shufflevector(sums, sums, 0, 1, 2, 3) + __builtin_shufflevector(sums, sums, 4, 5, 6, 7);
#else
    Four sums = {};
    for (int lane = 0; lane < kLanes; ++lane) sums += Four{one[lane], two[lane], three[lane], four[lane]};
    return sums;
#endif
}
KVIST_INLINE float sum_of(Floats a) { return sums_of(a, a, a, a)[0]; }
KVIST_INLINE float largest_of(Floats a) {
    float most = a[0];
    for (int lane = 1; lane < kLanes; ++lane) most = a[lane] > most ? a[lane] : most;
    return most;
}
