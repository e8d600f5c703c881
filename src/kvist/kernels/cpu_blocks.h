// Where one layer's keys and values lie in the blocks of a sequence, for the kernels of AVX-512. Included inside a
// file's target region.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu.h"
#include "cpu_avx512.h"
#include "cpu_codecs.h"

namespace kvist::avx512 {

constexpr int kMaxTiles = 16;         // of 16 queries in a job
constexpr int kAhead = 2;             // passes ahead of which keys and values are asked for
constexpr float kHidden = -0x1p100f;  // score of a key that is not seen: finite, and exact under any factor
constexpr float kSlack = 8;           // sums are brought to a new maximum when it is larger by this power of two

class Blocks {
  public:
    Blocks(const Geometry& shape, const char* arena) : shape_(shape), arena_(arena) {}

    const char* of(const Unit& unit, std::int64_t key) const {
        return arena_ + unit.offsets[key / shape_.block_tokens];
    }
    int slot(std::int64_t key) const { return static_cast<int>(key % shape_.block_tokens); }

    const char* keys(const Unit& unit, int head, std::int64_t key) const {
        return of(unit, key) + shape_.key_run(head);
    }
    const char* values(const Unit& unit, int head, std::int64_t key) const {
        return of(unit, key) + shape_.value_run(head);
    }

    // Sixteen tokens' vectors of a run stored in rows, as bf16: in place, or unpacked to `to`. What lies behind the
    // `count`-th in place is not looked at.
    const char* rows(Codec codec, const char* run, int slot, int count, bf16* to) const {
        if (codec == Codec::kBfloat16) return run + static_cast<std::int64_t>(slot) * shape_.dim * 2;
        unpack_rows(codec, run, shape_.block_tokens, slot, shape_.dim, count, to);
        return reinterpret_cast<const char*>(to);
    }

    // Ask for one head's sixteen keys, and values, of a later pass, which lie in blocks here and there.
    void fetch_keys(const char* block, int head, int slot) const {
        fetch(block + shape_.key_run(head), shape_.key, shape_.key_run_bytes, slot);
    }
    void fetch_values(const char* block, int head, int slot) const {
        fetch(block + shape_.value_run(head), shape_.value, shape_.value_run_bytes, slot);
    }

  private:
    // Of a run with scales all, where it is a block of sixteen tokens; in longer ones they lie here and there.
    void fetch(const char* run, Codec codec, std::int64_t run_bytes, int slot) const {
        if (has_scales(codec) && shape_.block_tokens > kLanes) return;
        const std::int64_t bytes = run_bytes / shape_.block_tokens * kLanes;
        run += run_bytes / shape_.block_tokens * slot;
        for (std::int64_t at = 0; at < bytes; at += 64) _mm_prefetch(run + at, _MM_HINT_T1);
    }

    const Geometry& shape_;
    const char* arena_;
};

}  // namespace kvist::avx512
