// What is kept of a pruned sequence, copied as it is stored.

#include <cstring>

#include "cpu.h"

namespace kvist {
namespace {

// A token's row of a piece to dense memory, or back.
void copy_row(char* to, std::int64_t to_step, const char* from, std::int64_t from_step, const RunPiece& piece) {
    if (piece.element_step == piece.element_bytes) {
        std::memcpy(to, from, static_cast<std::size_t>(piece.elements) * piece.element_bytes);
        return;
    }
    for (int i = 0; i < piece.elements; ++i)
        std::memcpy(to + i * to_step, from + i * from_step, static_cast<std::size_t>(piece.element_bytes));
}

}  // namespace

void move_kept(const Team& team, char* arena, std::int64_t layer_bytes, int layers, int kv_heads, int block_tokens,
               const std::vector<RunPiece>& pieces, const std::vector<std::int64_t>& from,
               const std::vector<std::int64_t>& to, const std::int64_t* kept, std::int64_t count) {
    const std::int64_t jobs = static_cast<std::int64_t>(layers) * kv_heads;
    std::atomic<std::int64_t> next{0};
    team.run([&](int) {
        Buffer buffer;
        for (;;) {
            const std::int64_t job = next.fetch_add(1, std::memory_order_relaxed);
            if (job >= jobs) return;
            const std::int64_t head = job % kv_heads;
            char* layer = arena + job / kv_heads * layer_bytes;
            const std::int64_t* slots = kept + job * count;
            // What stays where it is.
            std::int64_t first = 0;
            while (first < count && slots[first] == first &&
                   from[first / block_tokens] == to[first / block_tokens])
                ++first;
            for (const RunPiece& piece : pieces) {
                const std::int64_t row = static_cast<std::int64_t>(piece.elements) * piece.element_bytes;
                char* dense = static_cast<char*>(buffer.reserve(static_cast<std::size_t>((count - first) * row + 1)));
                for (std::int64_t each = head; each < piece.heads; each += kv_heads) {
                    char* run = layer + piece.offset + each * piece.head_bytes;
                    // Read whole before anything is written: the new blocks may be among the old ones.
                    for (std::int64_t i = first; i < count; ++i)
                        copy_row(dense + (i - first) * row, piece.element_bytes,
                                 run + from[slots[i] / block_tokens] + slots[i] % block_tokens * piece.token_step,
                                 piece.element_step, piece);
                    for (std::int64_t i = first; i < count; ++i)
                        copy_row(run + to[i / block_tokens] + i % block_tokens * piece.token_step, piece.element_step,
                                 dense + (i - first) * row, piece.element_bytes, piece);
                }
            }
        }
    });
}

}  // namespace kvist
