// Weights into the order in which products read them; memory.

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "cpu.h"
#include "cpu_sanitized.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvist {
namespace {

constexpr std::int64_t kLargePage = std::int64_t{2} << 20;

constexpr std::size_t kLine = 64;

// What weights share: a step reads nearly all of a network's, front to back, and on small pages every few KiB would have
// to be translated anew. Most are smaller than a large page, so that they lie one behind the other.
constexpr std::int64_t kSlab = 16 * kLargePage;

struct Slab {
    std::uint8_t* memory;
    std::int64_t used;
    int weights;
};

std::mutex guard;
Slab* filling = nullptr;  // the slab that takes weights

void* aligned(std::size_t alignment, std::size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment, bytes) != 0) throw std::bad_alloc();
    return memory;
}

std::uint8_t* on_large_pages(std::int64_t size) {
    const std::int64_t whole = (size + kLargePage - 1) / kLargePage * kLargePage;
    auto* memory = static_cast<std::uint8_t*>(aligned(kLargePage, static_cast<std::size_t>(whole)));
#if defined(__linux__)
    madvise(memory, static_cast<std::size_t>(whole), MADV_HUGEPAGE);
#endif
    return memory;
}

std::uint8_t* in_slab(std::int64_t size, void** slab) {
    const std::lock_guard<std::mutex> hold(guard);
    size = (size + static_cast<std::int64_t>(kLine) - 1) / static_cast<std::int64_t>(kLine) * kLine;
    if (filling == nullptr || filling->used + size > kSlab) filling = new Slab{on_large_pages(kSlab), 0, 0};
    std::uint8_t* memory = filling->memory + filling->used;
    filling->used += size;
    filling->weights += 1;
    *slab = filling;
    return memory;
}

void leave(Slab* slab) {
    const std::lock_guard<std::mutex> hold(guard);
    if (--slab->weights > 0) return;
    if (filling == slab) filling = nullptr;
    std::free(slab->memory);
    delete slab;
}

std::int64_t tile_bytes_of(int bits) { return bits == 16 ? 1024 : bits * 64 + 64; }

}  // namespace

Buffer::~Buffer() { std::free(data_); }

void* Buffer::reserve(std::size_t bytes) {
    if (bytes > bytes_) {
        std::free(data_);
        data_ = nullptr;
        bytes_ = 0;
        data_ = aligned(kLine, bytes);
        bytes_ = bytes;
    }
    return data_;
}

Matrix::Matrix(std::int64_t outputs, std::int64_t inputs, int bits, Result result)
    : outputs(outputs), inputs(inputs), bits(bits), result(result), tile_bytes(tile_bytes_of(bits)) {
    const std::int64_t size = outputs / 16 * (inputs / 32) * tile_bytes;
    slab = nullptr;
    if (size > kSlab / 4)
        data = on_large_pages(size);
    else if (kSanitized)  // apart, so that what lies behind an end is nobody's
        data = static_cast<std::uint8_t*>(aligned(kLine, static_cast<std::size_t>(size)));
    else
        data = in_slab(size, &slab);
}

Matrix::~Matrix() {
    if (slab != nullptr)
        leave(static_cast<Slab*>(slab));
    else
        std::free(data);
}

void Matrix::pack(const bf16* weight) {
    auto* to = reinterpret_cast<std::uint32_t*>(data);
    for (std::int64_t panel = 0; panel < outputs / 32; ++panel)
        for (std::int64_t step = 0; step < inputs / 32; ++step)
            for (int tile = 0; tile < 2; ++tile)
                for (int pair = 0; pair < 16; ++pair)
                    for (int lane = 0; lane < 16; ++lane) {
                        const std::int64_t from = row(panel * 32 + tile * 16 + lane) * inputs + step * 32 + 2 * pair;
                        std::memcpy(to++, weight + from, 4);
                    }
}

void Matrix::pack(const std::uint8_t* codes, const std::uint16_t* scales, const std::uint16_t* minima) {
    const int in_word = 32 / bits;
    std::uint8_t* to = data;
    for (std::int64_t panel = 0; panel < outputs / 32; ++panel)
        for (std::int64_t step = 0; step < inputs / 32; ++step)
            for (int tile = 0; tile < 2; ++tile, to += tile_bytes)
                for (int lane = 0; lane < 16; ++lane) {
                    const std::int64_t source = row(panel * 32 + tile * 16 + lane);
                    const std::uint8_t* from = codes + source * inputs + step * 32;
                    for (int vector = 0; vector < bits; ++vector) {
                        std::uint32_t word = 0;
                        for (int i = 0; i < in_word; ++i) {
                            // Pairs of inputs lie in the two halves of a word, so that one shift brings both down.
                            const int place = i / 2 + i % 2 * in_word / 2;
                            word |= static_cast<std::uint32_t>(from[vector * in_word + i] & ((1 << bits) - 1))
                                    << (place * bits);
                        }
                        std::memcpy(to + vector * 64 + lane * 4, &word, 4);
                    }
                    const std::int64_t group = source * (inputs / 32) + step;
                    std::memcpy(to + bits * 64 + lane * 2, scales + group, 2);
                    std::memcpy(to + bits * 64 + 32 + lane * 2, minima + group, 2);
                }
}

}  // namespace kvist
