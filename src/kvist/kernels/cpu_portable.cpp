// The operators for what every processor of an architecture has.

#include "cpu_portable.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <type_traits>

#if defined(__aarch64__)
#include <arm_neon.h>
#define KVIST_NEON 1
#elif defined(__x86_64__) && defined(__GNUC__)
#include <emmintrin.h>
#define KVIST_X86 1
#endif

// SSE2's, and NEON's.
#define KVIST_LANES 4

namespace kvist::portable::baseline {

#include "cpu_portable_vectors.h"

#include "cpu_portable_codecs.h"

#include "cpu_portable_store.h"

#include "cpu_portable_tiles.h"

#include "cpu_portable_ahead.h"

#include "cpu_portable_few.h"

#include "cpu_portable_attention.h"

#include "cpu_portable_products.h"

#include "cpu_portable_elementwise.h"

}  // namespace kvist::portable::baseline
