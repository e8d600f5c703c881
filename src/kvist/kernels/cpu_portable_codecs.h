// Keys and values as they are stored, to and from float32. Included inside a namespace, once a build; store/codecs.py
// draws the layouts and is the oracle.

constexpr int kGroup = 32;  // elements under one scale

// A head's keys, or values, of one block.
struct Side {
    Codec codec;
    int tokens, dim;

    bool bytewise() const { return codec == Codec::kInt8; }
    bool affine() const { return codec == Codec::kInt4Affine; }
    int groups() const { return dim / kGroup; }
    // Of one token that lies in a row, and of a run's, but for scales.
    std::int64_t row_bytes() const {
        if (has_scales(codec)) return bytewise() ? dim : dim / 2;
        return codec == Codec::kFloat32 ? 4 * dim : codec == Codec::kFp8 ? dim : 2 * dim;
    }
    std::int64_t code_bytes() const { return tokens * row_bytes(); }
};

// ---- reading --------------------------------------------------------------------------------------------------------

// Tokens `slot … slot + count - 1` of a run whose tokens are rows, to [count, dim], rows `stride` apart.
static void read_rows(const Side& shape, const char* run, int slot, int count, float* to, int stride) {
    const int dim = shape.dim;
    for (int t = 0; t < count; ++t, to += stride) {
        const std::int64_t first = static_cast<std::int64_t>(slot + t) * dim;
        switch (shape.codec) {
            case Codec::kBfloat16:
                for (int d = 0; d < dim; d += kLanes) store(to + d, load_bf16(run + 2 * (first + d)));
                break;
            case Codec::kFloat16:
                for (int d = 0; d < dim; d += kLanes) store(to + d, load_f16(run + 2 * (first + d)));
                break;
            case Codec::kFloat32:
                std::memcpy(to, run + 4 * first, 4 * static_cast<std::size_t>(dim));
                break;
            case Codec::kFp8:
                for (int d = 0; d < dim; d += kLanes) store(to + d, load_fp8(run + first + d));
                break;
            case Codec::kInt8: {
                const char* scales = run + shape.code_bytes() + first / kGroup * 2;
                for (int g = 0; g < shape.groups(); ++g) {
                    const float scale = of_f16_at(scales + 2 * g);
                    for (int d = g * kGroup; d < (g + 1) * kGroup; d += kLanes)
                        store(to + d, load_signed(run + first + d) * scale);
                }
                break;
            }
            case Codec::kInt4Channels: {
                const char* scales = run + shape.code_bytes() + (slot + t) / kChannelRun * static_cast<std::int64_t>(dim) * 4;
                for (int d = 0; d < dim; d += kGroup) {
                    const char* from = run + (first + d) / 2;
                    for (int i = 0; i < kGroup / 2; i += kLanes) {
                        const Bits both = load_codes(from + i);
                        const char *low = scales + 2 * (d + i), *high = low + kGroup;
                        store(to + d + i, numbers(both & 15) * load_f16(low) + load_f16(low + 2 * dim));
                        store(to + d + kGroup / 2 + i, numbers(both >> 4) * load_f16(high) + load_f16(high + 2 * dim));
                    }
                }
                break;
            }
            default: {
                const int pair = shape.affine() ? 4 : 2;
                const char* scales = run + shape.code_bytes() + first / kGroup * pair;
                for (int g = 0; g < shape.groups(); ++g) {
                    const float scale = of_f16_at(scales + pair * g);
                    const float least = shape.affine() ? of_f16_at(scales + pair * g + 2) : -8 * scale;
                    const char* from = run + first / 2 + g * kGroup / 2;
                    for (int i = 0; i < kGroup / 2; i += kLanes) {
                        const Bits both = load_codes(from + i);
                        store(to + g * kGroup + i, numbers(both & 15) * scale + least);
                        store(to + g * kGroup + kGroup / 2 + i, numbers(both >> 4) * scale + least);
                    }
                }
            }
        }
    }
}

// Codes of group `g` of transposed values, of `count` tokens from `slot` on, a multiple of 16: to columns of
// [32, …], rows `stride` apart. Codes of four bits come as 0 … 15.
static void read_codes(const Side& shape, const char* run, int slot, int count, int g, float* to, int stride) {
    const std::int64_t tokens = shape.tokens;
    if (shape.bytewise()) {
        const char* from = run + g * kGroup * tokens + slot;
        for (int d = 0; d < kGroup; ++d, from += tokens, to += stride)
            for (int t = 0; t < count; t += kLanes) store(to + t, load_signed(from + t));
        return;
    }
    const char* from = run + g * kGroup / 2 * tokens + slot;
    for (int d = 0; d < kGroup; d += 4, to += 4 * stride) {
        for (int j = 0; j < 2; ++j, from += tokens) {
            for (int t = 0; t < count; t += kLanes) {
                const Bits both = load_codes(from + t);
                store(to + j * stride + t, numbers(both & 15));
                store(to + (j + 2) * stride + t, numbers(both >> 4));
            }
        }
    }
}

// What makes numbers of those codes: scale x code + least, for `count` tokens, 0 and 0 for those from `filled` on.
static void read_scales(const Side& shape, const char* run, int slot, int count, int filled, int g, float* scale,
                        float* least) {
    const std::int64_t first = g * static_cast<std::int64_t>(shape.tokens) + slot;
    const char* scales = run + shape.code_bytes() + 2 * first;
    const char* minima = scales + 2 * static_cast<std::int64_t>(shape.groups()) * shape.tokens;
    for (int t = 0; t < count; t += kLanes) {
        const Floats found = load_f16(scales + 2 * t);
        store(scale + t, found);
        if (shape.bytewise()) continue;
        store(least + t, shape.affine() ? load_f16(minima + 2 * t) : found * -8.0f);
    }
    for (int t = filled; t < count; ++t) scale[t] = least[t] = 0;
}

// ---- writing --------------------------------------------------------------------------------------------------------

// 32 elements as codes.
struct Packed {
    std::uint8_t codes[kGroup];
    std::uint16_t scale, least;
};

static void pack(Codec codec, const float* x, Packed& packed) {
    float shift = 0, low, high;
    packed.least = 0;
    bool none = false;
    for (int i = 0; i < kGroup; ++i) none |= x[i] != x[i];
    if (none) {
        // One that is no number leaves none of the 32.
        std::memset(packed.codes, 0, kGroup);
        packed.scale = 0x7e00;
        return;
    }
    if (codec == Codec::kInt4Affine) {
        float least = x[0], most = x[0];
        for (int i = 1; i < kGroup; ++i) {
            least = x[i] < least ? x[i] : least;
            most = x[i] > most ? x[i] : most;
        }
        packed.scale = to_f16_saturated((most - least) / 15);
        packed.least = to_f16_saturated(least);
        shift = of_f16(packed.least);
        low = 0;
        high = 15;
    } else {
        // The first of the largest magnitude, with its sign.
        Floats most = {};
        for (int i = 0; i < kGroup; i += kLanes) {
            const Floats some = load(x + i);
            most = larger(most, some < 0.0f ? -some : some);
        }
        const float magnitude = largest_of(most);
        if (codec == Codec::kInt8) {
            packed.scale = to_f16_saturated(magnitude / 127);
            low = -127;
            high = 127;
        } else {
            int at = 0;
            while (at < kGroup - 1 && x[at] != magnitude && x[at] != -magnitude) ++at;
            packed.scale = to_f16_saturated(x[at] / -8);
            low = -8;
            high = 7;
        }
    }
    const float scale = of_f16(packed.scale);
    const int zero = codec == Codec::kInt4 ? 8 : 0;
    for (int i = 0; i < kGroup; i += kLanes) {
        Floats code = {};
        if (scale != 0) {
            // Clamped first: a tiny scale may make what no integer holds.
            const Floats exact = (load(x + i) - shift) / scale;
            const Floats bounded = exact < low ? all(low) : exact > high ? all(high) : exact;
            code = (bounded + kRounder) - kRounder;
        }
        const Ints whole = __builtin_convertvector(code, Ints) + zero;
        for (int lane = 0; lane < kLanes; ++lane) packed.codes[i + lane] = static_cast<std::uint8_t>(whole[lane]);
    }
}

// One token's key or value, `slot` of a run whose tokens are rows.
static void write_row(const Side& shape, char* run, int slot, const float* x) {
    const int dim = shape.dim;
    const std::int64_t first = static_cast<std::int64_t>(slot) * dim;
    switch (shape.codec) {
        case Codec::kBfloat16:
        case Codec::kFloat16: {
            const bool half = shape.codec == Codec::kFloat16;
            auto* to = reinterpret_cast<std::uint16_t*>(run) + first;
            for (int d = 0; d < dim; ++d) to[d] = half ? to_f16(x[d]) : to_bf16(x[d]);
            return;
        }
        case Codec::kFloat32:
            std::memcpy(run + 4 * first, x, 4 * static_cast<std::size_t>(dim));
            return;
        case Codec::kFp8:
            for (int d = 0; d < dim; ++d) run[first + d] = static_cast<char>(to_fp8(x[d]));
            return;
        default:
            break;
    }
    const int pair = shape.affine() ? 4 : 2;
    char* scales = run + shape.code_bytes() + first / kGroup * pair;
    for (int g = 0; g < shape.groups(); ++g, scales += pair) {
        Packed packed;
        pack(shape.codec, x + g * kGroup, packed);
        if (shape.bytewise()) {
            std::memcpy(run + first + g * kGroup, packed.codes, kGroup);
        } else {
            char* to = run + (first + g * kGroup) / 2;
            for (int i = 0; i < kGroup / 2; ++i)
                to[i] = static_cast<char>(packed.codes[i] | packed.codes[i + kGroup / 2] << 4);
        }
        std::memcpy(scales, &packed.scale, 2);
        if (shape.affine()) std::memcpy(scales + 2, &packed.least, 2);
    }
}

// A run of tokens' keys under scales of channels, from `slot` on: x [32, dim].
static void write_run(const Side& shape, char* run, int slot, const float* x) {
    const std::int64_t dim = shape.dim;
    char* scales = run + shape.code_bytes() + slot / kChannelRun * dim * 4;
    for (std::int64_t d = 0; d < dim; ++d) {
        float channel[kChannelRun];
        for (int t = 0; t < kChannelRun; ++t) channel[t] = x[t * dim + d];
        Packed packed;
        pack(Codec::kInt4Affine, channel, packed);
        // A zero has no sign.
        if (packed.least == 0x8000) packed.least = 0;
        std::memcpy(scales + 2 * d, &packed.scale, 2);
        std::memcpy(scales + 2 * (dim + d), &packed.least, 2);
        const std::int64_t in_group = d % kGroup;
        const bool high = in_group >= kGroup / 2;
        for (int t = 0; t < kChannelRun; ++t) {
            char& both = run[(static_cast<std::int64_t>(slot + t) * dim + d - in_group) / 2 + in_group % (kGroup / 2)];
            // The lower half of a byte comes first.
            both = static_cast<char>(high ? both | packed.codes[t] << 4 : packed.codes[t]);
        }
    }
}

// One token's value under a codec with scales: a column.
static void write_column(const Side& shape, char* run, int slot, const float* x) {
    const std::int64_t tokens = shape.tokens;
    char* scales = run + shape.code_bytes() + 2 * slot;
    for (int g = 0; g < shape.groups(); ++g) {
        Packed packed;
        pack(shape.codec, x + g * kGroup, packed);
        if (shape.bytewise()) {
            for (int d = 0; d < kGroup; ++d) run[(g * kGroup + d) * tokens + slot] = static_cast<char>(packed.codes[d]);
        } else {
            for (int i = 0; i < kGroup / 2; ++i) {
                const int d = i / 2 * 4 + i % 2;
                run[(g * kGroup / 2 + i) * tokens + slot] =
                    static_cast<char>(packed.codes[d] | packed.codes[d + 2] << 4);
            }
        }
        std::memcpy(scales + 2 * g * tokens, &packed.scale, 2);
        if (shape.affine()) std::memcpy(scales + 2 * (shape.groups() + g) * tokens, &packed.least, 2);
    }
}
