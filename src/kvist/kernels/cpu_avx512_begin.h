// What follows is compiled for AVX-512 with BF16, up to cpu_avx512_end.h. Included once a file, behind the standard
// library's headers, which are for every processor.

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#endif
#include <immintrin.h>
