// The end of what cpu_avx512_begin.h began. GCC goes on to the end of the file.

#if defined(__clang__)
#pragma clang attribute pop
#endif
