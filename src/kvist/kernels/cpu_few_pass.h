// What the parts of attention of few queries share: one pass over keys, and what a thread works in. Included inside
// the target region of cpu_attention_few.cpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu_attention_few.h"
#include "cpu_avx512.h"
#include "cpu_blocks.h"
#include "cpu_bytes.h"
#include "cpu_codecs.h"

namespace kvist::avx512 {

constexpr int kParts = kKeys / kLanes;  // of sixteen tokens in a pass
constexpr int kSlice = 64;              // bytes of a row of a tile
constexpr int kSlices = kMaxDim / kSlice;
constexpr int kColumns = 4;             // of a query in bytes: high and low, for each of two groups of dims
constexpr int kSets = kFew * kColumns / kLanes;
constexpr int kGroups = kMaxDim / kGroup;
constexpr int kTiles = kMaxDim / kLanes;  // of outputs

// The matrix unit falls asleep when it has had nothing to do for some 600 cycles, and takes as many to wake (measured).
// A product of no consequence keeps it awake: tile 2 is set before it counts.
#define TILE_STAY_AWAKE() TILE_DOT_BYTES(2, 7, 4)

// What one thread works in. Queries of all heads of a job count together, head by head. Arrays without a second bound
// are packed as tightly as the shape at hand lets them be: with strides of their own they would meet in few sets of the
// nearest cache. What is there twice is used by turns: the matrix unit gets nothing that was only just written, which it
// would wait for.
struct alignas(64) FewScratch {
    float scores[kLanes][kKeys]; KVIST_FENCE(scores)  // S; where values are bytes, then P
    float out[kLanes * kMaxDim]; KVIST_FENCE(out)  // O, rows of `dim`; dims in the order of the values' columns
    float max[kLanes]; KVIST_FENCE(max)
    float sum[kLanes][kLanes]; KVIST_FENCE(sum)  // to be added up
    // Keys that are multiplied as bf16.
    std::uint32_t q[kLanes * kMaxDim / 2][kLanes]; KVIST_FENCE(q)  // Q^T of each head in pairs, zeros in others' lanes
    std::uint16_t rows[2][kLanes][kMaxDim]; KVIST_FENCE(rows)  // sixteen tokens unpacked
    // Keys that are multiplied as bytes.
    std::int8_t q8[kLanes * kSets * kSlices][kLanes][kSlice]; KVIST_FENCE(q8)  // Q^T in fours: head, set, slice
    float weight[kLanes][kSets][kLanes]; KVIST_FENCE(weight)  // of the columns
    float least[kLanes][kSets][kSlices][kLanes]; KVIST_FENCE(least)  // what a group's least value is multiplied by
    std::int8_t keys[2][kLanes * kMaxDim]; KVIST_FENCE(keys)
    // Of either, as the matrix unit stores them.
    std::uint32_t raw[kSets * kParts * kSlices][kLanes][kLanes]; KVIST_FENCE(raw)
    // Values.
    std::uint16_t p[2][kLanes][kKeys]; KVIST_FENCE(p)  // P as bf16
    std::int8_t p8[2][kGroups * 2 * kFew][kKeys]; KVIST_FENCE(p8)  // P of each group of dims in bytes, two rows a query
    std::uint32_t v[2][kTiles * kKeys / 2][kLanes]; KVIST_FENCE(v)  // V of sixteen dims at a time, in pairs or fours
    std::int32_t product[kTiles][2 * kFew][kLanes]; KVIST_FENCE(product)
};

// Sixteen tokens of a sequence.
struct Place {
    const char* block;
    int slot;
};

// Walks over a sequence's tokens, sixteen by sixteen.
class Cursor {
  public:
    Cursor(const Blocks& blocks, const Unit& unit, int block_tokens, std::int64_t key)
        : blocks_(blocks), unit_(unit), block_tokens_(block_tokens), key_(key), slot_(blocks.slot(key)) {}

    // Where there are tokens before `end` left.
    bool next(std::int64_t end, Place& place) {
        if (key_ >= end) return false;
        if (slot_ == block_tokens_) slot_ = 0;
        if (slot_ == 0 || block_ == nullptr) block_ = blocks_.of(unit_, key_);
        place = {block_, slot_};
        key_ += kLanes;
        slot_ += kLanes;
        return true;
    }

  private:
    const Blocks& blocks_;
    const Unit& unit_;
    const int block_tokens_;
    std::int64_t key_;
    int slot_;
    const char* block_ = nullptr;
};

// One pass over up to `kKeys` keys.
struct Pass {
    std::int64_t first;  // key; a multiple of sixteen
    int count;           // of keys up to the end
    int parts;
    Place places[kParts];
    Place ahead[kParts];  // of a later pass, to be asked for
    int ahead_parts;
};

// Asks for one head's keys and values of a later pass, some lines at a time: a core waits for only so many at once.
class Fetch {
  public:
    explicit Fetch(const Geometry& shape)
        : keys_(lines(shape.key, shape.key_run_bytes, shape.block_tokens)),
          values_(lines(shape.value, shape.value_run_bytes, shape.block_tokens)),
          key_bytes_(shape.key_run_bytes / shape.block_tokens), value_bytes_(shape.value_run_bytes / shape.block_tokens) {}

    // One of some shares of a part's lines, each to be asked for at its own time.
    void keys(const Pass& pass, int part, std::int64_t run, int share, int shares) const {
        if (part < pass.ahead_parts) ask(pass.ahead[part], run, key_bytes_, keys_, share, shares);
    }
    void values(const Pass& pass, int part, std::int64_t run) const {
        if (part < pass.ahead_parts) ask(pass.ahead[part], run, value_bytes_, values_, 0, 1);
    }

  private:
    // In longer blocks scales lie apart from a part's codes, and are left to be waited for.
    static int lines(Codec codec, std::int64_t run_bytes, int block_tokens) {
        if (has_scales(codec) && block_tokens > kLanes) return 0;
        return static_cast<int>((run_bytes / block_tokens * kLanes + 63) / 64);
    }

    static void ask(const Place& place, std::int64_t run, std::int64_t slot_bytes, int lines, int share, int shares) {
        const char* from = place.block + run + place.slot * slot_bytes;
        const int end = lines * (share + 1) / shares;
        for (int line = lines * share / shares; line < end; ++line) _mm_prefetch(from + 64 * line, _MM_HINT_T1);
    }

    const int keys_, values_;
    const std::int64_t key_bytes_, value_bytes_;
};

}  // namespace kvist::avx512
