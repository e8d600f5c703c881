// The kinds of kernels, by number.

#include "cpu_kinds.h"

#include <stdexcept>

namespace kvist {
namespace {

#if defined(__x86_64__) && defined(__GNUC__)
#define KVIST_X86 1
#endif

#if KVIST_X86
template <bool kAmx>
Kernels in_avx512() {
    return {
        [](const Matrix& m, const Team& team, const bf16* x, std::int64_t rows, void* out, const float* bias,
           const Matrix* next) { avx512::multiply(m, team, kAmx, x, rows, out, bias, next); },
        [](Plan& plan, const Team& team, int slot, const bf16* q, std::int64_t q_stride, const bf16* kv,
           std::int64_t kv_stride,
           bf16* out) { avx512::attend(plan, team, kAmx, slot, q, q_stride, kv, kv_stride, out); },
        avx512::rotate,
        avx512::spread,
        avx512::add_norm,
    };
}
#endif

// A build of the portable ones, whose operators take more types.
template <decltype(portable::baseline::multiply) kMultiply, decltype(portable::baseline::attend) kAttend>
Kernels in_bf16(decltype(Kernels::rotate) rotate, decltype(Kernels::spread) spread,
                decltype(Kernels::add_norm) add_norm) {
    return {
        [](const Matrix& m, const Team& team, const bf16* x, std::int64_t rows, void* out, const float* bias,
           const Matrix*) { kMultiply(m, team, x, rows, out, bias); },
        [](Plan& plan, const Team& team, int slot, const bf16* q, std::int64_t q_stride, const bf16* kv,
           std::int64_t kv_stride, bf16* out) {
            kAttend(plan, team, {portable::Type::kBfloat16, slot, q, q_stride, kv, kv_stride, nullptr, out});
        },
        rotate,
        spread,
        add_norm,
    };
}

}  // namespace

const Kernels& kernels_of(int kind) {
    namespace baseline = portable::baseline;
    static const Kernels every =
        in_bf16<baseline::multiply, baseline::attend>(baseline::rotate, baseline::spread, baseline::add_norm);
    if (kind == kPortable) return every;
#if KVIST_X86
    namespace avx2 = portable::avx2;
    namespace wide = portable::avx512;
    static const Kernels avx512 = in_avx512<false>(), amx = in_avx512<true>();
    static const Kernels in_avx2 = in_bf16<avx2::multiply, avx2::attend>(avx2::rotate, avx2::spread, avx2::add_norm);
    static const Kernels in_wide = in_bf16<wide::multiply, wide::attend>(wide::rotate, wide::spread, wide::add_norm);
    if (kind == kAvx512) return avx512;
    if (kind == kAmx) return amx;
    if (kind == kPortable + 1) return in_avx2;
    if (kind == kPortable + 2) return in_wide;
#endif
    throw std::invalid_argument("no such kernels");
}

void attend(int build, Plan& plan, const Team& team, const portable::Call& call) {
    if (build == 0) return portable::baseline::attend(plan, team, call);
#if KVIST_X86
    if (build == 1) return portable::avx2::attend(plan, team, call);
    if (build == 2) return portable::avx512::attend(plan, team, call);
#endif
    throw std::invalid_argument("no such kernels");
}

}  // namespace kvist
