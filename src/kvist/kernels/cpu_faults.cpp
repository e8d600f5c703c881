// Accesses of every sort that the kernels make, so that tools/sanitize.py sees whether one behind an end is found. In
// sanitized builds alone.

#include <cstring>

#include "cpu.h"
#include "cpu_sanitized.h"

namespace kvist {
namespace {

typedef float Eight __attribute__((vector_size(32)));

volatile float sink;

}  // namespace

void touch_plainly(char* p, bool writes) {
    for (char* end = p + kTouched; p < end; p += sizeof(Eight)) {
        Eight x = {};
        if (writes)
            std::memcpy(p, &x, sizeof x);
        else
            std::memcpy(&x, p, sizeof x);
        sink = x[0];
    }
}

void touch_fenced(char* p, bool writes) {
    struct alignas(64) Arrays {
        char one[kTouched];
        KVIST_FENCE(one)
        char other[kTouched];
    };
    static Arrays arrays;
    touch_plainly(arrays.one + reinterpret_cast<std::uintptr_t>(p) % 64, writes);
}

}  // namespace kvist

#if defined(__x86_64__) && defined(__GNUC__)

#include "cpu_avx512_begin.h"
#include "cpu_avx512.h"

namespace kvist::avx512 {

void touch_vectors(char* p, bool writes) {
    for (char* end = p + kTouched; p < end; p += 64) {
        if (writes)
            _mm512_storeu_ps(p, _mm512_setzero_ps());
        else
            sink = _mm512_reduce_add_ps(_mm512_loadu_ps(p));
    }
}

void touch_lanes(char* p, bool writes) {
    const __mmask16 mask = lanes_left(8);
    for (char* end = p + kTouched; p < end; p += 16) {
        if (writes)
            store_some(reinterpret_cast<bf16*>(p), mask, _mm512_setzero_ps());
        else
            sink = _mm512_reduce_add_ps(load_some(reinterpret_cast<const bf16*>(p), mask));
    }
}

void touch_tiles(char* p, bool writes) {
    tiles_begin();
    TILE_ZERO(0);
    if (writes)
        TILE_STORE(0, p, 64);
    else
        TILE_LOAD(0, p, 64);
    tiles_end();
}

}  // namespace kvist::avx512

#include "cpu_avx512_end.h"

#endif
