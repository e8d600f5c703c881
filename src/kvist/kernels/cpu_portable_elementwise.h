// Norms and rotation in bf16, computed in float32. Included inside a namespace, once a build, behind
// cpu_portable_products.h.

KVIST_INLINE float bf16_at(const bf16* p) { return float_of(static_cast<std::uint32_t>(*p) << 16); }

static float mean_square(const bf16* x, std::int64_t width) {
    Floats sum = {};
    std::int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        const Floats v = load_bf16(x + i);
        sum += v * v;
    }
    float total = sum_of(sum);
    for (; i < width; ++i) total += bf16_at(x + i) * bf16_at(x + i);
    return total / static_cast<float>(width);
}

static float share_of(const bf16* x, std::int64_t width, float eps) {
    return 1 / std::sqrt(mean_square(x, width) + eps);
}

static void norm(const bf16* x, float share, const float* weight, std::int64_t width, bf16* to) {
    std::int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store_bf16(to + i, load_bf16(x + i) * share * load(weight + i));
    for (; i < width; ++i) to[i] = to_bf16(bf16_at(x + i) * share * weight[i]);
}

// x += change, which is multiplied by `share` and its weights first, where there are weights.
static void add(bf16* x, const bf16* change, float share, const float* weight, std::int64_t width) {
    std::int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        Floats v = load_bf16(change + i);
        if (weight != nullptr) v = v * share * load(weight + i);
        store_bf16(x + i, load_bf16(x + i) + v);
    }
    for (; i < width; ++i) {
        float v = bf16_at(change + i);
        if (weight != nullptr) v = v * share * weight[i];
        x[i] = to_bf16(bf16_at(x + i) + v);
    }
}

void add_norm(const Team& team, bf16* stream, const bf16* change, const float* after, const float* weight, bf16* out,
              std::int64_t rows, std::int64_t width, float eps) {
    team.share(rows, 8, [&](std::int64_t row) {
        bf16* x = stream + row * width;
        if (change != nullptr) {
            const bf16* d = change + row * width;
            add(x, d, after == nullptr ? 1 : share_of(d, width, eps), after, width);
        }
        norm(x, share_of(x, width, eps), weight, width, out + row * width);
    });
}

// Turns one head, of which all elements are multiplied by `share` and their own weight first, where there are weights.
static void turn(bf16* v, int half, const float* cos, const float* sin, float share, const float* weight) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        Floats a = load_bf16(v + i), b = load_bf16(v + half + i);
        if (weight != nullptr) {
            a = a * share * load(weight + i);
            b = b * share * load(weight + half + i);
        }
        const Floats c = load(cos + i), s = load(sin + i);
        store_bf16(v + i, a * c - b * s);
        store_bf16(v + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        float a = bf16_at(v + i), b = bf16_at(v + half + i);
        if (weight != nullptr) {
            a = a * share * weight[i];
            b = b * share * weight[half + i];
        }
        v[i] = to_bf16(a * cos[i] - b * sin[i]);
        v[half + i] = to_bf16(b * cos[i] + a * sin[i]);
    }
}

void rotate(const Team& team, bf16* x, std::int64_t rows, std::int64_t stride, int heads, int dim, const float* cos,
            const float* sin, const float* weight, float eps) {
    const int half = dim / 2;
    team.share(rows, 16, [&](std::int64_t row) {
        for (int head = 0; head < heads; ++head) {
            bf16* v = x + row * stride + static_cast<std::int64_t>(head) * dim;
            const float* w = weight == nullptr ? nullptr : weight + static_cast<std::int64_t>(head) * dim;
            turn(v, half, cos + row * half, sin + row * half, w == nullptr ? 1 : share_of(v, dim, eps), w);
        }
    });
}

// The sums of lanes `kApart` apart in the lower of both, their differences in the upper.
template <int kApart>
KVIST_INLINE Floats butterfly(Floats x) {
    Floats sums;
    for (int lane = 0; lane < kLanes; ++lane)
        sums[lane] = (lane & kApart) == 0 ? x[lane] + x[lane ^ kApart] : x[lane ^ kApart] - x[lane];
    return sums;
}

// The fast transform of Walsh and Hadamard, of `size` elements: a power of two from 32 to kMaxDim.
static void spread_head(bf16* x, int size, float factor) {
    Floats v[kMaxDim / kLanes];
    const int vectors = size / kLanes;
    for (int i = 0; i < vectors; ++i) {
        Floats one = butterfly<2>(butterfly<1>(load_bf16(x + i * kLanes)));
        if (kLanes > 4) one = butterfly<4 % kLanes>(one);
        if (kLanes > 8) one = butterfly<8 % kLanes>(one);
        v[i] = one;
    }
    for (int apart = 1; apart < vectors; apart *= 2)
        for (int i = 0; i < vectors; ++i) {
            if ((i & apart) != 0) continue;
            const Floats one = v[i], other = v[i + apart];
            v[i] = one + other;
            v[i + apart] = one - other;
        }
    for (int i = 0; i < vectors; ++i) store_bf16(x + i * kLanes, v[i] * factor);
}

void spread(const Team& team, bf16* x, std::int64_t rows, std::int64_t stride, int heads, int dim, float factor) {
    if (heads == 0) return;
    const int size = dim & -dim;
    team.share(rows, 16, [&](std::int64_t row) {
        for (int at = 0; at < heads * dim; at += size) spread_head(x + row * stride + at, size, factor);
    });
}
