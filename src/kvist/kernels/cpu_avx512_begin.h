// What follows is compiled for AVX-512 with BF16, up to cpu_avx512_end.h; with VNNI too in a file that defines
// KVIST_VNNI before. Included once a file, behind the standard library's headers, which are for every processor.

#if defined(KVIST_VNNI)
#define KVIST_ALSO ",avx512vnni"
#else
#define KVIST_ALSO ""
#endif

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16" KVIST_ALSO))), apply_to = function)
#else
// GCC takes no macro here, and adds what comes second to what came first.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#if defined(KVIST_VNNI)
#pragma GCC target("avx512vnni")
#endif
#endif
#include <immintrin.h>
