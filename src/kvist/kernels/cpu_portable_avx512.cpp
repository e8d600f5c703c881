// The operators for x86 with AVX-512, whether or not it has instructions for bf16.

#include "cpu_portable.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace kvist::portable::avx512 {

bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

}  // namespace kvist::portable::avx512

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c")
#endif
#include <immintrin.h>

#define KVIST_LANES 16
#define KVIST_X86 1

namespace kvist::portable::avx512 {

#include "cpu_portable_vectors.h"

#include "cpu_portable_codecs.h"

#include "cpu_portable_store.h"

#include "cpu_portable_tiles.h"

#include "cpu_portable_ahead.h"

#include "cpu_portable_few.h"

#include "cpu_portable_attention.h"

#include "cpu_portable_products.h"

#include "cpu_portable_elementwise.h"

}  // namespace kvist::portable::avx512

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace kvist::portable::avx512 {
bool supported() { return false; }
}  // namespace kvist::portable::avx512

#endif
