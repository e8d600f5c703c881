// Products of few queries with keys and values as they are stored, which no cache but the registers sees unpacked.
// Included inside a namespace, once a build.
//
// Tokens come sixteen at a time: blocks lie here and there, and are whole vectors of sixteen.

// How a vector of a token's elements is read that lie in rows, `d + i … d + i + kLanes - 1`: d a multiple of kElements, i
// below it. `scale` is as `read_row_scales` leaves it.
template <Codec kCodec>
constexpr bool kScaled = kCodec >= Codec::kInt8;
template <Codec kCodec>
constexpr int kElements = kScaled<kCodec> ? kGroup : 16;

template <Codec kCodec>
KVIST_INLINE Floats stored(const char* row, const float* scale, int dim, int d, int i) {
    if constexpr (kCodec == Codec::kBfloat16) return load_bf16(row + 2 * (d + i));
    if constexpr (kCodec == Codec::kFloat16) return load_f16(row + 2 * (d + i));
    if constexpr (kCodec == Codec::kFloat32) return load(reinterpret_cast<const float*>(row) + d + i);
    if constexpr (kCodec == Codec::kFp8) return load_fp8(row + d + i);
    if constexpr (kCodec == Codec::kInt8) return load_signed(row + d + i) * scale[d / kGroup];
    if constexpr (kScaled<kCodec> && kCodec != Codec::kInt8) {
        const Bits both = load_codes(row + d / 2 + i % (kGroup / 2));
        const Floats code = numbers(i < kGroup / 2 ? both & 15 : both >> 4);
        if constexpr (kCodec == Codec::kInt4) return (code - 8.0f) * scale[d / kGroup];
        if constexpr (kCodec == Codec::kInt4Affine) return code * scale[d / kGroup * 2] + scale[d / kGroup * 2 + 1];
        return code * load(scale + d + i) + load(scale + dim + d + i);
    }
}

// Floats of scales between one token of sixteen and the next.
KVIST_INLINE int scale_step(const Side& side) {
    if (!has_scales(side.codec) || side.codec == Codec::kInt4Channels) return 0;
    return side.groups() * (side.affine() ? 2 : 1);
}

// Scales, and least values, of sixteen tokens that lie in rows: of each token's groups, or of the channels of all.
static void read_row_scales(const Side& side, const char* run, int slot, float* to) {
    if (!has_scales(side.codec)) return;
    const bool channels = side.codec == Codec::kInt4Channels;
    const int step = scale_step(side);
    const std::int64_t before = channels ? slot / kChannelRun * 2 * side.dim : slot * step;
    const char* from = run + side.code_bytes() + 2 * before;
    const int count = channels ? 2 * side.dim : kSixteen * step;
    for (int i = 0; i < count; i += kLanes) store(to + i, load_f16(from + 2 * i));
}

// Scores [kRows, 16] of the tokens at `rows`, `row_bytes` apart. Four keys at a time and three queries fill sixteen
// registers.
template <Codec kCodec, int kRows>
__attribute__((noinline)) static void few_scores_of(const float* q, const char* rows, std::int64_t row_bytes,
                                                    const float* scale, int step, int dim, float* scores, Ahead& ahead) {
    for (int t = 0; t < kSixteen; t += 4) {
        ahead.some(4 * row_bytes);
        Floats sum[kRows][4] = {};
        for (int d = 0; d < dim; d += kElements<kCodec>) {
            for (int i = 0; i < kElements<kCodec>; i += kLanes) {
                Floats left[kRows];
                for (int r = 0; r < kRows; ++r) left[r] = load(q + r * dim + d + i);
                for (int m = 0; m < 4; ++m) {
                    const Floats right = stored<kCodec>(rows + m * row_bytes, scale + m * step, dim, d, i);
                    for (int r = 0; r < kRows; ++r) sum[r][m] += left[r] * right;
                }
            }
        }
        for (int r = 0; r < kRows; ++r) {
            const Four found = sums_of(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
            std::memcpy(scores + r * kKeys + t, &found, sizeof found);
        }
        rows += 4 * row_bytes;
        scale += 4 * step;
    }
}

// O [kRows, kWide vectors] += P [kRows, count] x V, tokens in rows of a codec without scales.
template <Codec kCodec, int kRows, int kWide>
__attribute__((noinline)) static void few_values_of(const float* weights, const char* const* sixteens,
                                                    std::int64_t row_bytes, int d, int count, float* out, int dim,
                                                    Ahead& ahead) {
    Floats sum[kRows][kWide];
    for (int r = 0; r < kRows; ++r)
        for (int m = 0; m < kWide; ++m) sum[r][m] = load(out + r * dim + d + m * kLanes);
    for (int at = 0; at < count; at += kSixteen) {
        const char* row = *sixteens++;
        ahead.some(kSixteen * row_bytes * kWide * kLanes / dim);
        const float* end = weights + std::min(kSixteen, count - at);
        for (; weights < end; ++weights, row += row_bytes) {
            Floats left[kRows];
            for (int r = 0; r < kRows; ++r) left[r] = all(weights[r * kKeys]);
            for (int m = 0; m < kWide; ++m) {
                const Floats right = stored<kCodec>(row, nullptr, dim, d, m * kLanes);
                for (int r = 0; r < kRows; ++r) sum[r][m] += left[r] * right;
            }
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int m = 0; m < kWide; ++m) store(out + r * dim + d + m * kLanes, sum[r][m]);
}

// O [kRows, 32] += W [kRows, count] x C^T for the codes of a group of transposed values, whose rows of one element, or of
// two, are `tokens` bytes apart; count a multiple of 16.
template <bool kBytes, int kRows>
__attribute__((noinline)) static void few_codes_of(const float* weights, const char* const* sixteens, std::int64_t tokens,
                                                   int g, int count, float* out, int dim, Ahead& ahead) {
    for (int d = 0; d < kGroup; d += 4) {
        const std::int64_t place = (g * kGroup + d) / (kBytes ? 1 : 2) * tokens;
        ahead.some(count * (kBytes ? 4 : 2));
        Floats sum[kRows][4] = {};
        for (int at = 0; at < count; at += kSixteen) {
            const char* from = sixteens[at / kSixteen] + place;
            for (int i = 0; i < kSixteen; i += kLanes) {
                Floats left[kRows];
                for (int r = 0; r < kRows; ++r) left[r] = load(weights + r * kKeys + at + i);
                for (int m = 0; m < 4; ++m) {
                    Floats right;
                    if constexpr (kBytes) {
                        right = load_signed(from + m * tokens + i);
                    } else {
                        const Bits both = load_codes(from + m % 2 * tokens + i);
                        right = numbers(m < 2 ? both & 15 : both >> 4);
                    }
                    for (int r = 0; r < kRows; ++r) sum[r][m] += left[r] * right;
                }
            }
        }
        for (int r = 0; r < kRows; ++r) {
            float* to = out + r * dim + g * kGroup + d;
            Four found = sums_of(sum[r][0], sum[r][1], sum[r][2], sum[r][3]), before;
            std::memcpy(&before, to, sizeof before);
            found += before;
            std::memcpy(to, &found, sizeof found);
        }
    }
}

// ---- by codec, and any number of queries ----------------------------------------------------------------------------

// Calls `some(codec)` with a constant.
template <class Some>
KVIST_INLINE void of_codec(Codec codec, Some&& some) {
    switch (codec) {
        case Codec::kBfloat16: return some(Known<Codec, Codec::kBfloat16>());
        case Codec::kFloat16: return some(Known<Codec, Codec::kFloat16>());
        case Codec::kFloat32: return some(Known<Codec, Codec::kFloat32>());
        case Codec::kFp8: return some(Known<Codec, Codec::kFp8>());
        case Codec::kInt8: return some(Known<Codec, Codec::kInt8>());
        case Codec::kInt4: return some(Known<Codec, Codec::kInt4>());
        case Codec::kInt4Affine: return some(Known<Codec, Codec::kInt4Affine>());
        case Codec::kInt4Channels: return some(Known<Codec, Codec::kInt4Channels>());
    }
}

// Calls `some(first, count)` for up to three rows at a time, whose number is a constant.
template <class Some>
KVIST_INLINE void by_rows(int rows, Some&& some) {
    for (int r = 0; r < rows;) {
        const int count = rows - r == 4 ? 2 : std::min(3, rows - r);
        if (count == 3) some(r, Known<int, 3>());
        if (count == 2) some(r, Known<int, 2>());
        if (count == 1) some(r, Known<int, 1>());
        r += count;
    }
}

// S [queries, 16] = Q x K^T of the tokens from `slot` on; scores are kKeys apart.
static void few_scores(const Side& side, const float* q, int queries, const char* run, int slot, const float* scale,
                       float* scores, Ahead& ahead) {
    const std::int64_t bytes = side.row_bytes();
    of_codec(side.codec, [&](auto codec) {
        by_rows(queries, [&](int r, auto rows) {
            few_scores_of<decltype(codec)::value, decltype(rows)::value>(q + r * side.dim, run + slot * bytes, bytes, scale,
                                                                         scale_step(side), side.dim, scores + r * kKeys, ahead);
        });
    });
}

// O [queries, dim] += P x V of values without scales, sixteen of whose rows begin at each of `sixteens`.
static void few_values(const Side& side, const float* weights, int queries, const char* const* sixteens, int count,
                       float* out, Ahead& ahead) {
    of_codec(side.codec, [&](auto codec) {
        constexpr Codec kCodec = decltype(codec)::value;
        if constexpr (!kScaled<kCodec>) {
            by_rows(queries, [&](int r, auto rows) {
                constexpr int kRows = decltype(rows)::value, kLeast = 16 / kLanes;
                int d = 0;
                for (; d + 4 * kLanes <= side.dim; d += 4 * kLanes)
                    few_values_of<kCodec, kRows, 4>(weights + r * kKeys, sixteens, side.row_bytes(), d, count,
                                                    out + r * side.dim, side.dim, ahead);
                for (; d < side.dim; d += kLeast * kLanes)
                    few_values_of<kCodec, kRows, kLeast>(weights + r * kKeys, sixteens, side.row_bytes(), d, count,
                                                         out + r * side.dim, side.dim, ahead);
            });
        }
    });
}

// O [queries, 32] += W x C^T of group `g` of values with scales, whose places of the first token begin at `sixteens`.
static void few_codes(const Side& side, const float* weights, int queries, const char* const* sixteens, int g, int count,
                      float* out, Ahead& ahead) {
    by_rows(queries, [&](int r, auto rows) {
        constexpr int kRows = decltype(rows)::value;
        const float* some = weights + r * kKeys;
        float* to = out + r * side.dim;
        if (side.bytewise())
            few_codes_of<true, kRows>(some, sixteens, side.tokens, g, count, to, side.dim, ahead);
        else
            few_codes_of<false, kRows>(some, sixteens, side.tokens, g, count, to, side.dim, ahead);
    });
}
