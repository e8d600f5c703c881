// What the address sanitizer cannot see by itself, told to it: masked loads and stores, which are the compiler's own
// functions, tiles, which are inline assembly, and arrays that lie in one piece of memory. Nothing in other builds.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#define KVIST_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVIST_SANITIZED 1
#endif
#endif

#if KVIST_SANITIZED
// The functions that compiled accesses call.
extern "C" void __asan_loadN(void* p, std::size_t bytes);
extern "C" void __asan_storeN(void* p, std::size_t bytes);
extern "C" void __asan_poison_memory_region(void const volatile* p, std::size_t bytes);
extern "C" void __asan_unpoison_memory_region(void const volatile* p, std::size_t bytes);
#endif

namespace kvist {

#if KVIST_SANITIZED
constexpr bool kSanitized = true;
inline void is_read(const void* p, std::int64_t bytes) {
    __asan_loadN(const_cast<void*>(p), static_cast<std::size_t>(bytes));
}
inline void is_written(void* p, std::int64_t bytes) { __asan_storeN(p, static_cast<std::size_t>(bytes)); }
inline void forbid(void* p, std::size_t bytes) { __asan_poison_memory_region(p, bytes); }
inline void permit(void* p, std::size_t bytes) { __asan_unpoison_memory_region(p, bytes); }

// Behind an array of a struct, of which it takes the name.
struct alignas(64) Fence {
    char bytes[64];

    Fence() { forbid(bytes, sizeof bytes); }
    Fence(const Fence&) = delete;
    Fence& operator=(const Fence&) = delete;
    ~Fence() { permit(bytes, sizeof bytes); }
};
#define KVIST_FENCE(name) Fence behind_##name;

// cpu_faults.cpp: each reads or writes so many bytes from `p` on; the second in an array of a struct, as far behind its
// beginning as `p` is behind a multiple of 64.
constexpr int kTouched = 1024;
void touch_plainly(char* p, bool writes);
void touch_fenced(char* p, bool writes);
namespace avx512 {
void touch_vectors(char* p, bool writes);
void touch_lanes(char* p, bool writes);
void touch_tiles(char* p, bool writes);
}  // namespace avx512
#else
#define KVIST_FENCE(name)
constexpr bool kSanitized = false;
inline void is_read(const void*, std::int64_t) {}
inline void is_written(void*, std::int64_t) {}
inline void forbid(void*, std::size_t) {}
inline void permit(void*, std::size_t) {}
#endif

}  // namespace kvist
