// What the kernels of the CPU share: the memory they read, the work of one step, and threads. No framework in here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include "cpu_team.h"

namespace kvist {

// bf16 values travel as their bits.
using bf16 = std::uint16_t;

// How a key or a value is stored; store/codecs.py draws them.
enum class Codec : int { kBfloat16, kFloat16, kFloat32, kFp8, kInt8, kInt4, kInt4Affine, kInt4Channels };

constexpr int kChannelRun = 32;  // tokens of which each channel has a scale under the last of them, which is of keys alone

inline bool has_scales(Codec codec) { return codec >= Codec::kInt8; }

// How one group of layers lies in the arena; see cache/groups.py for the drawing. Sizes in bytes.
struct Geometry {
    std::int64_t slab_bytes;
    std::int64_t blocks_per_slab;
    std::int64_t block_bytes;
    std::int64_t layer_bytes;  // one layer's part of a block: all heads' keys, then their values
    std::int64_t key_run_bytes, value_run_bytes;  // one head's keys, or values, of one layer of one block
    Codec key, value;
    int block_tokens;
    int kv_heads;
    int dim;
    int repeats;  // query heads of a KV head

    std::int64_t offset(std::int64_t block) const {
        return block / blocks_per_slab * slab_bytes + block % blocks_per_slab * block_bytes;
    }

    // Of a head's runs in a layer's part of a block.
    std::int64_t key_run(int head) const { return head * key_run_bytes; }
    std::int64_t value_run(int head) const { return kv_heads * key_run_bytes + head * value_run_bytes; }
};

// Keys that lie in one format, and how far the rows of a step see into them.
struct Segment {
    Geometry geometry;
    char* arena;
    std::vector<int> layers;            // place of each of the plan's layers among those that lie here
    std::vector<std::int64_t> offsets;  // of all tables' blocks; -1 where given back
    std::vector<std::int64_t> seen;     // of each row: the last key that it sees here; below 0: none

    char* layer(int slot) const { return arena + layers[slot] * geometry.layer_bytes; }
};

// Rows `first_row … end_row - 1` of a step over the keys at places `first_key … end_key - 1` of one block table.
// Only what a row, and the window, let it see counts.
struct Unit {
    int first_row, end_row;
    std::int64_t first_key, end_key;
    const std::int64_t* offsets;  // of the table's blocks in the arena
    std::int64_t partial;         // where its part of a result goes; -1: straight to the output
    int segment;
    int drawn;                    // of the plan's `drawn`, which its keys' weights are added to; -1: none
    std::int64_t weighed;         // where its part of these goes
};

// What each key of a sequence has drawn: the weights that queries gave it, added up. float32 [layers, kv_heads, keys],
// strides in elements.
struct Drawn {
    float* sums;
    std::int64_t layer_stride, head_stride;
};

// Keys of one pass over the queries of a unit.
constexpr int kKeys = 128;

// Sums that a unit makes for a head, of the keys from 0 on: whole passes.
inline std::int64_t weighed_keys(const Unit& unit) { return (unit.end_key + kKeys - 1) / kKeys * kKeys; }

// A unit for some of its KV heads: what one thread takes at a time.
struct Task {
    int unit, head, heads;
};

// Results that several units made of one row, merged by their log-sum-exps.
struct Partial {
    std::int64_t base;  // of the unit in `partials`
    int first_row;      // of the unit
};

// A token that leaves the open segment, where it lies as it was computed, for the first one and its format.
struct Sealed {
    std::int64_t from, to;  // offsets of the blocks in the arena
    int from_slot, to_slot;
};

// What the rows of one step see in the layers of one group, in one segment or in several, which are merged.
struct Plan {
    std::vector<Segment> segments;  // of equal heads; a row sees something in at least one of them
    int open;                       // the segment in which rows are stored
    float scale;
    float softcap;        // 0: none
    std::int64_t window;  // of a lone segment; 0: none
    std::vector<std::int64_t> append;         // offset in the arena of the block that each row is stored in
    std::vector<int> append_slots;            // and the row's place in it
    std::vector<Sealed> sealed;               // before anything is read
    std::vector<Unit> units;
    std::vector<Task> tasks;
    std::vector<int> merged_rows;             // rows with several results
    std::vector<std::int64_t> partial_begin;  // their places in `partial`, one more than rows
    std::vector<Partial> partial;
    std::vector<float> partials;  // a result: numerator [dim], maximum, denominator
    std::vector<Drawn> drawn;
    std::vector<float> weighed;  // of each unit that adds to one: [kv_heads, weighed_keys(unit)]

    // Heads and their width, the same everywhere.
    const Geometry& shape() const { return segments.front().geometry; }
};

// The sequences of a step in one segment: for each its place in `blocks`, and its rows.
struct Tables {
    std::vector<std::int64_t> blocks, begin, count;
};

// Blocks `first_block … end_block - 1`, equal in the tables of sequences `first_span … end_span - 1`.
struct Run {
    std::int64_t first_span, end_span, first_block, end_block;
};

// Fills a plan that has its segments, but for their offsets, and its scale, softcap and window; `tables` of each segment,
// `runs` of the first; and for each sequence which of `drawn` its queries add to, or -1: it is in no run then, sees its
// keys from 0 on, and nothing in other segments.
void make_plan(Plan& plan, const std::vector<Tables>& tables, const std::vector<Run>& runs,
               const std::vector<int>& drawn);

// Memory that grows, aligned for the kernels; what it held is lost when it does. Out of line, so that files compiled
// for AVX-512 emit no template of the standard library, which the linker might choose for all others.
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer();

    void* reserve(std::size_t bytes);
    void* data() const { return data_; }

  private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

// One of the arrays of which a head's keys, or values, of a block are made; of it a token has equally spaced elements.
struct RunPiece {
    std::int64_t offset;  // in the layer's part of a block: of the first head's
    std::int64_t head_bytes, token_step, element_step;
    int heads, elements, element_bytes;
};

// Copies the tokens that a sequence keeps to its new blocks, layer by layer and head by head; these may be among the
// old ones.
//   arena, layer_bytes   of the group's first layer, and from one to the next
//   from, to             offsets in the arena of the old blocks and of the new
//   kept                 [layers, kv_heads, count]: slots in the old blocks, ascending; a piece's heads take them by turns
void move_kept(const Team& team, char* arena, std::int64_t layer_bytes, int layers, int kv_heads, int block_tokens,
               const std::vector<RunPiece>& pieces, const std::vector<std::int64_t>& from,
               const std::vector<std::int64_t>& to, const std::int64_t* kept, std::int64_t count);

// A weight as the kernels read it; see cpu_matrix.cpp for the drawing.
struct Matrix {
    enum Result { kBfloat16, kFloat32, kSilu, kGelu };

    std::int64_t outputs, inputs;  // multiples of 32
    int bits;                      // 16: bf16; 4 or 8: codes with a scale and a minimum for 32 inputs
    Result result;                 // gated ones hold a gate's 16 outputs, then 16 of what it lets through, by turns
    std::int64_t tile_bytes;
    std::uint8_t* data;
    void* slab;  // that holds it; null: memory of its own

    Matrix(std::int64_t outputs, std::int64_t inputs, int bits, Result result);
    Matrix(const Matrix&) = delete;
    Matrix& operator=(const Matrix&) = delete;
    ~Matrix();

    bool gated() const { return result == kSilu || result == kGelu; }

    // The row of the checkpoint's weight that is output `index`.
    std::int64_t row(std::int64_t index) const {
        if (!gated()) return index;
        return index / 32 * 16 + index % 16 + (index / 16 % 2) * (outputs / 2);
    }

    void pack(const bf16* weight);
    // codes [outputs, inputs], unsigned below 16 or signed; scales and minima in f16 [outputs, inputs / 32]
    void pack(const std::uint8_t* codes, const std::uint16_t* scales, const std::uint16_t* minima);
};

namespace avx512 {

// out = x W^T + bias: x [rows, inputs] dense; out [rows, outputs], half as wide where it is gated.
// `next`, where it is there, is what will be multiplied with after this, and is asked for at the end.
void multiply(const Matrix& m, const Team& team, bool amx, const bf16* x, std::int64_t rows, void* out,
              const float* bias, const Matrix* next = nullptr);

// Stores the step's keys and values of one layer; arguments as of `attend`.
void append(const Plan& plan, const Team& team, int slot, const bf16* kv, std::int64_t kv_stride);

// Stores the step's keys and values of one layer, then attends.
//   slot       the layer's place in the group
//   q          [rows, repeats, kv_heads, dim], rows `q_stride` elements apart
//   kv         [rows, 2 x kv_heads, dim], rows `kv_stride` elements apart
//   out        [rows, repeats, kv_heads, dim], dense
void attend(Plan& plan, const Team& team, bool amx, int slot, const bf16* q, std::int64_t q_stride, const bf16* kv,
            std::int64_t kv_stride, bf16* out);

// Adds to the plan's `drawn` what these queries weigh each key, and does nothing else: all is stored already.
void weigh(Plan& plan, const Team& team, bool amx, int slot, const bf16* q, std::int64_t q_stride);

// Merges the results of row `index` of the plan's `merged_rows` (FlashInfer's cascade, arXiv:2501.01005).
void merge(const Plan& plan, std::int64_t index, bf16* out);

// Norms (where `weight` is there: [heads, dim]) and turns heads in place: [rows, heads, dim], rows `stride` elements
// apart; cos and sin [rows, dim / 2].
void rotate(const Team& team, bf16* x, std::int64_t rows, std::int64_t stride, int heads, int dim, const float* cos,
            const float* sin, const float* weight, float eps);

// Turns each head by Hadamard's matrix in Sylvester's order, all elements of which are `factor` or its negative, in
// place: [rows, heads, dim], rows `stride` elements apart. Where dim is no power of two, blocks of the largest that
// divides it are turned.
void spread(const Team& team, bf16* x, std::int64_t rows, std::int64_t stride, int heads, int dim, float factor);

// stream += change, where change is there, normed by `after` first where that is there; out = norm(stream).
void add_norm(const Team& team, bf16* stream, const bf16* change, const float* after, const float* weight, bf16* out,
              std::int64_t rows, std::int64_t width, float eps);

}  // namespace avx512
}  // namespace kvist
