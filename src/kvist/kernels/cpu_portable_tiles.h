// Products of float32 whose sums stay in registers. Included inside a namespace, once a build.

// C [kRows, kWide vectors] = A [kRows, k] x B, or added to what is there; B [k, …]. Strides in floats. A function of its
// own: among others' variables the compilers keep sums in memory.
template <int kRows, int kWide, bool kAdd>
__attribute__((noinline)) static void product_rows(const float* a, int a_stride, const float* b, int b_stride, int k,
                                                    float* c, int c_stride) {
    Floats sum[kRows][kWide];
    const float* row[kRows];
    for (int r = 0; r < kRows; ++r) {
        row[r] = a + r * a_stride;
        for (int m = 0; m < kWide; ++m) sum[r][m] = kAdd ? load(c + r * c_stride + m * kLanes) : Floats{};
    }
    for (int i = 0; i < k; ++i, b += b_stride) {
        Floats right[kWide];
        for (int m = 0; m < kWide; ++m) right[m] = load(b + m * kLanes);
        for (int r = 0; r < kRows; ++r) {
            const Floats left = all(row[r][i]);
            for (int m = 0; m < kWide; ++m) sum[r][m] += left * right[m];
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int m = 0; m < kWide; ++m) store(c + r * c_stride + m * kLanes, sum[r][m]);
}

// The same for any number of rows: six at a time and two vectors fill sixteen registers best.
template <int kWide, bool kAdd>
static void product_columns(const float* a, int rows, int a_stride, const float* b, int b_stride, int k, float* c,
                             int c_stride) {
    for (; rows >= 6; rows -= 6, a += 6 * a_stride, c += 6 * c_stride)
        product_rows<6, kWide, kAdd>(a, a_stride, b, b_stride, k, c, c_stride);
    if (rows == 5) product_rows<5, kWide, kAdd>(a, a_stride, b, b_stride, k, c, c_stride);
    if (rows == 4) product_rows<4, kWide, kAdd>(a, a_stride, b, b_stride, k, c, c_stride);
    if (rows == 3) product_rows<3, kWide, kAdd>(a, a_stride, b, b_stride, k, c, c_stride);
    if (rows == 2) product_rows<2, kWide, kAdd>(a, a_stride, b, b_stride, k, c, c_stride);
    if (rows == 1) product_rows<1, kWide, kAdd>(a, a_stride, b, b_stride, k, c, c_stride);
}

// C [rows, n] = A [rows, k] x B [k, n], or added to what is there; n a multiple of 16. All rows meet two vectors'
// columns of B before the next, which therefore are read from the nearest cache.
template <bool kAdd>
static void product(const float* a, int rows, int a_stride, const float* b, int b_stride, int n, int k, float* c,
                     int c_stride) {
    int j = 0;
    for (; j + 2 * kLanes <= n; j += 2 * kLanes)
        product_columns<2, kAdd>(a, rows, a_stride, b + j, b_stride, k, c + j, c_stride);
    if (kLanes == 16 && j < n) product_columns<1, kAdd>(a, rows, a_stride, b + j, b_stride, k, c + j, c_stride);
}

// ---- transposition --------------------------------------------------------------------------------------------------

constexpr int kEdge = KVIST_LANES == 4 ? 4 : 8;  // of the squares that are turned at once

#if KVIST_SHUFFLES && KVIST_LANES == 4
KVIST_INLINE void transpose_square(const float* from, int from_stride, float* to, int to_stride) {
    const Four a = load(from), b = load(from + from_stride), c = load(from + 2 * from_stride),
               d = load(from + 3 * from_stride);
    const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    const Four ba = __builtin_shufflevector(a, b, 2, 6, 3, 7), dc = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    store(to, __builtin_shufflevector(ab, cd, 0, 1, 4, 5));
    store(to + to_stride, __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
    store(to + 2 * to_stride, __builtin_shufflevector(ba, dc, 0, 1, 4, 5));
    store(to + 3 * to_stride, __builtin_shufflevector(ba, dc, 2, 3, 6, 7));
}
#elif KVIST_SHUFFLES
// Halves of rows four apart side by side, so that no later step crosses the middle of a register.
KVIST_INLINE Eight halves_of(const float* row, int from_stride) {
    Four low, high;
    std::memcpy(&low, row, sizeof low);
    std::memcpy(&high, row + 4 * from_stride, sizeof high);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}
KVIST_INLINE void store_eight(float* to, Eight x) { std::memcpy(to, &x, sizeof x); }

KVIST_INLINE void transpose_half(const float* from, int from_stride, float* to, int to_stride) {
    const Eight a = halves_of(from, from_stride), b = halves_of(from + from_stride, from_stride);
    const Eight c = halves_of(from + 2 * from_stride, from_stride), d = halves_of(from + 3 * from_stride, from_stride);
    const Eight ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
    const Eight cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13);
    const Eight ba = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    const Eight dc = __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    store_eight(to, __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13));
    store_eight(to + to_stride, __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15));
    store_eight(to + 2 * to_stride, __builtin_shufflevector(ba, dc, 0, 1, 8, 9, 4, 5, 12, 13));
    store_eight(to + 3 * to_stride, __builtin_shufflevector(ba, dc, 2, 3, 10, 11, 6, 7, 14, 15));
}
KVIST_INLINE void transpose_square(const float* from, int from_stride, float* to, int to_stride) {
    transpose_half(from, from_stride, to, to_stride);
    transpose_half(from + 4, from_stride, to + 4 * to_stride, to_stride);
}
#else
KVIST_INLINE void transpose_square(const float* from, int from_stride, float* to, int to_stride) {
    for (int r = 0; r < kEdge; ++r)
        for (int c = 0; c < kEdge; ++c) to[c * to_stride + r] = from[r * from_stride + c];
}
#endif

// [rows, columns] to [columns, rows]; both multiples of 8.
static void transpose(const float* from, int from_stride, int rows, int columns, float* to, int to_stride) {
    for (int c = 0; c < columns; c += kEdge)
        for (int r = 0; r < rows; r += kEdge)
            transpose_square(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
}
