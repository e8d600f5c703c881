// Paged attention in bf16, for AVX-512 with BF16 instructions and, where there is one, the matrix unit (AMX).
//
// Attention is computed transposed, so that sixteen queries lie in the lanes of a vector and softmax needs no sums
// across lanes:
//
//     scores   S^T [tokens, 16 queries] = K [tokens, dim] x Q^T      keys are read in place from their blocks
//     output   O^T [dim, 16 queries]   += V^T [dim, tokens] x P^T    values are transposed once for all queries of a job
//
// Keys that are not bf16 are unpacked to it, sixteen tokens at a time, and values that have scales lie transposed.
// Both products take their right side in pairs of rows (two bf16 in 32 bits), which Q^T is packed to once a job and
// P^T comes out as. Running maxima and sums follow FlashAttention-2 (arXiv:2307.08691). Where keys are told what they
// draw, P^T is kept until the sums are known (cpu_drawn.h).

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cstring>

#include "cpu_avx512_begin.h"
#include "cpu_attention_few.h"
#include "cpu_attention_job.h"
#include "cpu_avx512.h"

namespace kvist::avx512 {
namespace {

void run_tasks(Plan& plan, const Team& team, bool amx, int slot, const bf16* q, std::int64_t q_stride, bf16* out) {
    const std::int64_t jobs = static_cast<std::int64_t>(plan.tasks.size());
    std::atomic<std::int64_t> next{0};
    team.run([&](int) {
        Scratch& scratch = of_this_thread<Scratch>();
        // Few queries have tiles of their own.
        bool few = true;
        for (;;) {
            const std::int64_t index = next.fetch_add(1, std::memory_order_relaxed);
            if (index >= jobs) break;
            const Task& task = plan.tasks[index];
            const Unit& unit = plan.units[task.unit];
            const Segment& segment = plan.segments[unit.segment];
            if (amx && unit.drawn < 0 && are_few(plan, unit)) {
                attend_few(plan, segment.layer(slot), q, q_stride, unit, task.head, task.heads, out);
                few = true;
                continue;
            }
            if (amx && few) tiles_begin();
            few = false;
            Job(plan, segment, amx, segment.layer(slot), q, q_stride, scratch)
                .run(unit, task.head, task.heads, out, plan.partials.data(), plan.weighed.data());
        }
        if (amx) tiles_end();
    });
}

// Adds what the units have found to the sums of their sequences, in the plan's order, whoever ran them.
void add_weighed(const Plan& plan, const Team& team, int slot) {
    if (plan.drawn.empty()) return;
    team.share(plan.shape().kv_heads, 1, [&](std::int64_t head) {
        for (const Unit& unit : plan.units) {
            if (unit.drawn < 0) continue;
            const Drawn& drawn = plan.drawn[unit.drawn];
            float* to = drawn.sums + slot * drawn.layer_stride + head * drawn.head_stride;
            const float* from = plan.weighed.data() + unit.weighed + head * weighed_keys(unit);
            for (std::int64_t key = 0; key < unit.end_key; ++key) to[key] += from[key];
        }
    });
}

}  // namespace

void weigh(Plan& plan, const Team& team, bool amx, int slot, const bf16* q, std::int64_t q_stride) {
    run_tasks(plan, team, amx, slot, q, q_stride, nullptr);
    add_weighed(plan, team, slot);
}

void attend(Plan& plan, const Team& team, bool amx, int slot, const bf16* q, std::int64_t q_stride, const bf16* kv,
            std::int64_t kv_stride, bf16* out) {
    append(plan, team, slot, kv, kv_stride);
    run_tasks(plan, team, amx, slot, q, q_stride, out);
    add_weighed(plan, team, slot);
    team.share(static_cast<std::int64_t>(plan.merged_rows.size()), 8,
               [&](std::int64_t index) { merge(plan, index, out); });
}

}  // namespace kvist::avx512

#include "cpu_avx512_end.h"

#else

#include <stdexcept>

// Other processors: `has_avx512` says no, and nobody comes here.
namespace kvist::avx512 {
void attend(Plan&, const Team&, bool, int, const bf16*, std::int64_t, const bf16*, std::int64_t, bf16*) {
    throw std::logic_error("built without AVX-512");
}
void weigh(Plan&, const Team&, bool, int, const bf16*, std::int64_t) {
    throw std::logic_error("built without AVX-512");
}
}  // namespace kvist::avx512

#endif
