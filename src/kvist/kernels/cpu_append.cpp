// Stores a step's keys and values as their blocks have them, and seals what has left the open segment.

#include "cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <algorithm>
#include <cstring>

#include "cpu_avx512_begin.h"
#include "cpu_avx512.h"
#include "cpu_encode.h"

namespace kvist::avx512 {
namespace {

// Stores one head's key of a token, and its value.
void pack_key(const Geometry& shape, char* block, int slot, int head, const bf16* key) {
    pack_row(shape.key, block + shape.key_run(head), shape.block_tokens, slot, shape.dim, key);
}

void pack_value(const Geometry& shape, char* block, int slot, int head, const bf16* value) {
    const auto pack = has_scales(shape.value) ? static_cast<decltype(&pack_row)>(avx512::pack_value) : pack_row;
    pack(shape.value, block + shape.value_run(head), shape.block_tokens, slot, shape.dim, value);
}

const bf16* row_of(const char* run, int slot, int dim) {
    return reinterpret_cast<const bf16*>(run) + static_cast<std::int64_t>(slot) * dim;
}

// Seals one head's keys of the run of tokens that begins with `first` of the plan's, which follow each other.
void seal_channels(const Plan& plan, int layer, std::int64_t first, int head) {
    const Segment& open = plan.segments[plan.open];
    const Segment& body = plan.segments.front();
    const Geometry& shape = body.geometry;
    const bf16* rows[kChannelRun];
    for (int t = 0; t < kChannelRun; ++t) {
        const Sealed& token = plan.sealed[first + t];
        rows[t] = row_of(open.layer(layer) + token.from + open.geometry.key_run(head), token.from_slot, shape.dim);
    }
    const Sealed& token = plan.sealed[first];
    pack_run(body.layer(layer) + token.to + shape.key_run(head), shape.block_tokens, token.to_slot, shape.dim, rows);
}

}  // namespace

void append(const Plan& plan, const Team& team, int slot, const bf16* kv, std::int64_t kv_stride) {
    const Segment& open = plan.segments[plan.open];
    const std::int64_t rows = static_cast<std::int64_t>(plan.append.size());
    team.share(rows, 64, [&](std::int64_t row) {
        const Geometry& shape = open.geometry;
        const bf16* keys = kv + row * kv_stride;
        const bf16* values = keys + shape.kv_heads * shape.dim;
        char* block = open.layer(slot) + plan.append[row];
        for (int head = 0; head < shape.kv_heads; ++head) {
            pack_key(shape, block, plan.append_slots[row], head, keys + head * shape.dim);
            pack_value(shape, block, plan.append_slots[row], head, values + head * shape.dim);
        }
    });
    // What is sealed was computed in bf16, and lies so until now.
    team.share(static_cast<std::int64_t>(plan.sealed.size()), 64, [&](std::int64_t index) {
        const Sealed& token = plan.sealed[index];
        const Segment& body = plan.segments.front();
        const char* from = open.layer(slot) + token.from;
        char* to = body.layer(slot) + token.to;
        for (int head = 0; head < body.geometry.kv_heads; ++head) {
            if (body.geometry.key == Codec::kInt4Channels) {
                if (token.to_slot % kChannelRun == 0) seal_channels(plan, slot, index, head);
            } else {
                pack_key(body.geometry, to, token.to_slot, head,
                         row_of(from + open.geometry.key_run(head), token.from_slot, open.geometry.dim));
            }
            pack_value(body.geometry, to, token.to_slot, head,
                       row_of(from + open.geometry.value_run(head), token.from_slot, open.geometry.dim));
        }
    });
}

}  // namespace kvist::avx512

#include "cpu_avx512_end.h"

#else

#include <stdexcept>

namespace kvist::avx512 {
void append(const Plan&, const Team&, int, const bf16*, std::int64_t) {
    throw std::logic_error("built without AVX-512");
}
}  // namespace kvist::avx512

#endif
