// Python's door to the kernels of the CPU: what this processor can do, plans, and operators on addresses.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "cpu.h"
#include "cpu_attention_few.h"
#include "cpu_chain.h"
#include "cpu_kinds.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace kvist {
namespace {

Team team;

#if defined(__x86_64__) && defined(__linux__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

// The matrix unit needs the processor and the leave of the kernel, which is given to the whole process.
bool ask_for_amx() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tiles = (d >> 24 & 1) != 0, bf16 = (d >> 22 & 1) != 0, bytes = (d >> 25 & 1) != 0;
    constexpr long request_permission = 0x1023, tile_data = 18;
    return tiles && bf16 && bytes && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#else
bool has_avx512() { return false; }
bool ask_for_amx() { return false; }
#endif

using Numbers = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<std::int64_t> copied(const Numbers& numbers) {
    return {numbers.data(), numbers.data() + numbers.size()};
}

// A segment, and the sequences of the step in it.
struct Given {
    Segment segment;
    Tables tables;
};

template <class T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace
}  // namespace kvist

NB_MODULE(_cpu, m) {
    using namespace kvist;
    m.def("has_avx512", &has_avx512);
    m.def("ask_for_amx", &ask_for_amx);
    m.def("portable_builds", [] {
        std::vector<int> builds{0};
        if (portable::avx2::supported()) builds.push_back(1);
        if (portable::avx512::supported()) builds.push_back(2);
        return builds;
    });
    m.attr("sanitized") = kSanitized;
#if KVIST_SANITIZED
    m.def("touch_plainly", [](std::uintptr_t address, bool writes) { touch_plainly(at<char>(address), writes); });
    m.def("touch_fenced", [](std::uintptr_t address, bool writes) { touch_fenced(at<char>(address), writes); });
    m.def("forbid", [](std::uintptr_t address, std::size_t bytes) { forbid(at<char>(address), bytes); });
    m.def("permit", [](std::uintptr_t address, std::size_t bytes) { permit(at<char>(address), bytes); });
#if defined(__x86_64__)
    m.def("touch_vectors", [](std::uintptr_t address, bool writes) { avx512::touch_vectors(at<char>(address), writes); });
    m.def("touch_lanes", [](std::uintptr_t address, bool writes) { avx512::touch_lanes(at<char>(address), writes); });
    m.def("touch_tiles", [](std::uintptr_t address, bool writes) { avx512::touch_tiles(at<char>(address), writes); });
#endif
#endif
    // What Python's caches hold lives until the process ends, and is no leak to report.
    nb::set_leak_warnings(false);
    m.def("borrow_threads", [](std::uintptr_t start, int threads) {
        team.borrow(reinterpret_cast<Team::Start>(start), threads);
    });
    nb::class_<Geometry>(m, "Geometry")
        .def("__init__",
             [](Geometry* self, std::int64_t slab_bytes, std::int64_t blocks_per_slab, std::int64_t block_bytes,
                std::int64_t layer_bytes, std::int64_t key_run_bytes, std::int64_t value_run_bytes, int key, int value,
                int block_tokens, int kv_heads, int dim, int repeats) {
                 new (self) Geometry{slab_bytes,      blocks_per_slab,
                                     block_bytes,     layer_bytes,
                                     key_run_bytes,   value_run_bytes,
                                     static_cast<Codec>(key), static_cast<Codec>(value),
                                     block_tokens,    kv_heads,
                                     dim,             repeats};
             },
             nb::kw_only(), "slab_bytes"_a, "blocks_per_slab"_a, "block_bytes"_a, "layer_bytes"_a, "key_run_bytes"_a,
             "value_run_bytes"_a, "key"_a, "value"_a, "block_tokens"_a, "kv_heads"_a, "dim"_a, "repeats"_a);
    nb::class_<Given>(m, "Segment")
        .def("__init__",
             [](Given* self, const Geometry& geometry, std::uintptr_t arena, const std::vector<int>& layers,
                const Numbers& blocks, const Numbers& begin, const Numbers& count, const Numbers& seen) {
                 new (self) Given{{geometry, at<char>(arena), layers, {}, copied(seen)},
                                  {copied(blocks), copied(begin), copied(count)}};
             },
             nb::kw_only(), "geometry"_a, "arena"_a, "layers"_a, "blocks"_a, "begin"_a, "count"_a, "seen"_a);
    nb::class_<Plan>(m, "Plan")
        .def("__init__",
             [](Plan* self, const nb::list& segments, int open, float scale, float softcap, std::int64_t window,
                const Numbers& runs, const Numbers& sealed, const std::vector<std::int64_t>& drawn) {
                 new (self) Plan{};
                 std::vector<Tables> tables;
                 for (nb::handle segment : segments) {
                     const Given& given = nb::cast<const Given&>(segment);
                     self->segments.push_back(given.segment);
                     tables.push_back(given.tables);
                 }
                 self->open = open;
                 self->scale = scale;
                 self->softcap = softcap;
                 self->window = window;
                 std::vector<Run> shared;
                 for (std::size_t i = 0; i + 4 <= runs.size(); i += 4)
                     shared.push_back({runs(i), runs(i + 1), runs(i + 2), runs(i + 3)});
                 const Geometry &from = self->segments[open].geometry, &to = self->shape();
                 for (std::size_t i = 0; i + 4 <= sealed.size(); i += 4)
                     self->sealed.push_back({from.offset(sealed(i)), to.offset(sealed(i + 2)),
                                             static_cast<int>(sealed(i + 1)), static_cast<int>(sealed(i + 3))});
                 std::vector<int> which(tables.front().count.size(), -1);
                 for (std::size_t i = 0; i + 4 <= drawn.size(); i += 4) {
                     which.at(drawn[i]) = static_cast<int>(self->drawn.size());
                     self->drawn.push_back({at<float>(drawn[i + 1]), drawn[i + 2], drawn[i + 3]});
                 }
                 make_plan(*self, tables, shared, which);
             },
             nb::kw_only(), "segments"_a, "open"_a, "scale"_a, "softcap"_a, "window"_a, "runs"_a, "sealed"_a,
             "drawn"_a = std::vector<std::int64_t>())
        .def("attend",
             [](Plan& self, int kind, int slot, std::uintptr_t q, std::int64_t q_stride, std::uintptr_t kv,
                std::int64_t kv_stride, std::uintptr_t out) {
                 kernels_of(kind).attend(self, team, slot, at<bf16>(q), q_stride, at<bf16>(kv), kv_stride,
                                         at<bf16>(out));
             },
             nb::call_guard<nb::gil_scoped_release>())
        .def("weigh",
             [](Plan& self, bool amx, int slot, std::uintptr_t q, std::int64_t q_stride) {
                 avx512::weigh(self, team, amx, slot, at<bf16>(q), q_stride);
             },
             nb::call_guard<nb::gil_scoped_release>())
        .def("attend_anywhere",
             [](Plan& self, int build, int type, int slot, std::uintptr_t q, std::int64_t q_stride, std::uintptr_t kv,
                std::int64_t kv_stride, std::uintptr_t sinks, std::uintptr_t out) {
                 const portable::Call call{static_cast<portable::Type>(type), slot, at<void>(q), q_stride,
                                           at<void>(kv), kv_stride, at<float>(sinks), at<void>(out)};
                 attend(build, self, team, call);
             },
             nb::call_guard<nb::gil_scoped_release>())
#if KVIST_SANITIZED
        .def_prop_ro("key", [](const Plan& self) { return static_cast<int>(self.shape().key); })
        .def_prop_ro("value", [](const Plan& self) { return static_cast<int>(self.shape().value); })
        .def_prop_ro("has_few",
                     [](const Plan& self) {
                         for (const Unit& unit : self.units)
                             if (avx512::are_few(self, unit)) return true;
                         return false;
                     })
#endif
        ;
    nb::class_<Matrix>(m, "Matrix")
        .def("__init__",
             [](Matrix* self, std::int64_t outputs, std::int64_t inputs, int bits, int result) {
                 new (self) Matrix(outputs, inputs, bits, static_cast<Matrix::Result>(result));
             },
             nb::kw_only(), "outputs"_a, "inputs"_a, "bits"_a, "result"_a)
        .def("pack_bf16", [](Matrix& self, std::uintptr_t weight) { self.pack(at<bf16>(weight)); },
             nb::call_guard<nb::gil_scoped_release>())
        .def("pack_codes",
             [](Matrix& self, std::uintptr_t codes, std::uintptr_t scales, std::uintptr_t minima) {
                 self.pack(at<std::uint8_t>(codes), at<std::uint16_t>(scales), at<std::uint16_t>(minima));
             },
             nb::call_guard<nb::gil_scoped_release>())
        .def("multiply",
             [](const Matrix& self, int kind, std::uintptr_t x, std::int64_t rows, std::uintptr_t out,
                std::uintptr_t bias) {
                 kernels_of(kind).multiply(self, team, at<bf16>(x), rows, at<void>(out), at<float>(bias), nullptr);
             },
             nb::call_guard<nb::gil_scoped_release>())
#if KVIST_SANITIZED
        .def_ro("bits", &Matrix::bits)
#endif
        ;
    nb::class_<Chain>(m, "Chain")
        .def(nb::init<>())
        .def(
            "add",
            [](Chain& self, const Matrix& qkv, const Matrix& output, const Matrix& gate_up, const Matrix& down,
               const std::vector<std::uintptr_t>& biases, const std::vector<std::uintptr_t>& norms,
               const std::vector<float>& eps, int slot, int group, int rope, int queries, int kv_heads, int dim, int spread_begin,
               int spread_end, bool turns_back, float spread) {
                const auto bias = [&](int i) { return at<const float>(biases.at(i)); };
                const auto norm = [&](int i) { return at<const float>(norms.at(i)); };
                self.layers.push_back({&qkv,       &output,   &gate_up,  &down,   bias(0),  bias(1), bias(2),
                                       bias(3),    norm(0),   norm(1),   norm(2), norm(3),  norm(4), eps.at(0),
                                       eps.at(1),  eps.at(2), slot,      group,   rope,     queries, kv_heads,
                                       dim,       spread_begin, spread_end, turns_back, spread});
            },
            nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::kw_only(),
            "qkv"_a, "output"_a, "gate_up"_a, "down"_a, "biases"_a, "norms"_a, "eps"_a, "slot"_a, "group"_a, "rope"_a,
            "queries"_a, "kv_heads"_a, "dim"_a, "spread_begin"_a, "spread_end"_a, "turns_back"_a, "spread"_a)
        .def("run", [](Chain& self, int kind, const nb::list& plans, const std::vector<std::uintptr_t>& tables,
                       std::uintptr_t stream, std::uintptr_t change, std::uintptr_t kept, std::int64_t rows,
                       std::int64_t count) {
            std::vector<Plan*> given;
            for (nb::handle plan : plans) given.push_back(plan.is_none() ? nullptr : nb::cast<Plan*>(plan));
            std::vector<const float*> factors;
            for (std::uintptr_t table : tables) factors.push_back(at<const float>(table));
            nb::gil_scoped_release released;
            self.run(team, kernels_of(kind), given, factors, at<bf16>(stream), at<bf16>(change), at<bf16>(kept), rows, count);
        });
    m.def("move_kept", [](std::uintptr_t arena, std::int64_t layer_bytes, int layers, int kv_heads, int block_tokens,
                          const Numbers& pieces, const Numbers& from, const Numbers& to, std::uintptr_t kept,
                          std::int64_t count) {
        std::vector<RunPiece> given;
        for (std::size_t i = 0; i + 7 <= pieces.size(); i += 7)
            given.push_back({pieces(i), pieces(i + 1), pieces(i + 2), pieces(i + 3), static_cast<int>(pieces(i + 4)),
                             static_cast<int>(pieces(i + 5)), static_cast<int>(pieces(i + 6))});
        const std::vector<std::int64_t> sources = copied(from), targets = copied(to);
        nb::gil_scoped_release released;
        move_kept(team, at<char>(arena), layer_bytes, layers, kv_heads, block_tokens, given, sources, targets,
                  at<const std::int64_t>(kept), count);
    });
    m.def(
        "rotate",
        [](int kind, std::uintptr_t x, std::int64_t rows, std::int64_t stride, int heads, int dim, std::uintptr_t cos,
           std::uintptr_t sin, std::uintptr_t weight, float eps) {
            kernels_of(kind).rotate(team, at<bf16>(x), rows, stride, heads, dim, at<float>(cos), at<float>(sin),
                                    at<float>(weight), eps);
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "spread",
        [](int kind, std::uintptr_t x, std::int64_t rows, std::int64_t stride, int heads, int dim, float factor) {
            kernels_of(kind).spread(team, at<bf16>(x), rows, stride, heads, dim, factor);
        },
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "add_norm",
        [](int kind, std::uintptr_t stream, std::uintptr_t change, std::uintptr_t after, std::uintptr_t weight,
           std::uintptr_t out, std::int64_t rows, std::int64_t width, float eps) {
            kernels_of(kind).add_norm(team, at<bf16>(stream), at<bf16>(change), at<float>(after), at<float>(weight),
                                      at<bf16>(out), rows, width, eps);
        },
        nb::call_guard<nb::gil_scoped_release>());
}
