// The operators for x86 with AVX2, FMA and F16C.

#include "cpu_portable.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cpuid.h>
#include <cstring>
#include <type_traits>

namespace kvist::portable::avx2 {

bool supported() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool halves = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c >> 29 & 1) != 0;
    return halves && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

}  // namespace kvist::portable::avx2

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include <immintrin.h>

#define KVIST_LANES 8
#define KVIST_X86 1
#define KVIST_F16C 1

namespace kvist::portable::avx2 {

#include "cpu_portable_vectors.h"

#include "cpu_portable_codecs.h"

#include "cpu_portable_store.h"

#include "cpu_portable_tiles.h"

#include "cpu_portable_ahead.h"

#include "cpu_portable_few.h"

#include "cpu_portable_attention.h"

#include "cpu_portable_products.h"

#include "cpu_portable_elementwise.h"

}  // namespace kvist::portable::avx2

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace kvist::portable::avx2 {
bool supported() { return false; }
}  // namespace kvist::portable::avx2

#endif
