// Weights into the order in which products read them; memory.

#include <cstdlib>
#include <cstring>
#include <new>

#include "cpu.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvist {
namespace {

constexpr std::int64_t kLargePage = std::int64_t{2} << 20;

constexpr std::size_t kLine = 64;

void* aligned(std::size_t alignment, std::size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, alignment, bytes) != 0) throw std::bad_alloc();
    return memory;
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
    const std::int64_t page = size >= kLargePage ? kLargePage : static_cast<std::int64_t>(kLine);
    data = static_cast<std::uint8_t*>(
        aligned(static_cast<std::size_t>(page), static_cast<std::size_t>((size + page - 1) / page * page)));
#if defined(__linux__)
    if (page == kLargePage) madvise(data, static_cast<std::size_t>(size), MADV_HUGEPAGE);
#endif
}

Matrix::~Matrix() { std::free(data); }

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
