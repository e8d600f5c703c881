// Attention for what every processor of an architecture has.

#include "cpu_portable.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#define KVIST_LANES 8

namespace kvist::portable::baseline {

#include "cpu_portable_vectors.h"

#include "cpu_portable_codecs.h"

#include "cpu_portable_attention.h"

}  // namespace kvist::portable::baseline
