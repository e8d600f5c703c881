// Results of queries whose keys were cut, or lie in several runs, merged by their log-sum-exp.

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cmath>

#include "cpu_avx512_begin.h"
#include "cpu_avx512.h"

namespace kvist::avx512 {

void merge(const Plan& plan, std::int64_t index, bf16* out) {
    const Geometry& shape = plan.shape();
    const int row = plan.merged_rows[index];
    const int heads = shape.repeats * shape.kv_heads;
    const int width = shape.dim + 2;
    const Partial* parts = plan.partial.data() + plan.partial_begin[index];
    const int count = static_cast<int>(plan.partial_begin[index + 1] - plan.partial_begin[index]);
    for (int head = 0; head < heads; ++head) {
        const auto result = [&](int part) {
            const std::int64_t at = static_cast<std::int64_t>(row - parts[part].first_row) * heads + head;
            return plan.partials.data() + parts[part].base + at * width;
        };
        float highest = -INFINITY;
        for (int part = 0; part < count; ++part) highest = std::max(highest, result(part)[shape.dim]);
        __m512 sum[kMaxDim / kLanes];
        for (int d = 0; d < shape.dim / kLanes; ++d) sum[d] = _mm512_setzero_ps();
        float total = 0;
        for (int part = 0; part < count; ++part) {
            const float* from = result(part);
            const float weight = std::exp2(from[shape.dim] - highest);
            total += weight * from[shape.dim + 1];
            for (int d = 0; d < shape.dim / kLanes; ++d)
                sum[d] = _mm512_fmadd_ps(_mm512_set1_ps(weight), _mm512_loadu_ps(from + d * kLanes), sum[d]);
        }
        bf16* to = out + (static_cast<std::int64_t>(row) * heads + head) * shape.dim;
        for (int d = 0; d < shape.dim / kLanes; ++d)
            store(to + d * kLanes, _mm512_mul_ps(sum[d], _mm512_set1_ps(1 / total)));
    }
}

}  // namespace kvist::avx512

#include "cpu_avx512_end.h"

#else

#include <stdexcept>

namespace kvist::avx512 {
void merge(const Plan&, std::int64_t, bf16*) { throw std::logic_error("built without AVX-512"); }
}  // namespace kvist::avx512

#endif
