// The portable kernels as a program of their own, for a processor that an emulator plays: takes calls from its standard
// input and answers them on its standard output, until the former ends. tools/cross.py writes what is read here.
//
// A call is a row of arrays, each after its number of bytes; what is no bytes are int64.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu.h"
#include "cpu_portable.h"

namespace {

using namespace kvist;

using Numbers = std::vector<std::int64_t>;
// Of 64 bits, so that floats lie as they should.
using Memory = std::vector<std::int64_t>;

void read_whole(void* to, std::size_t bytes) {
    if (std::fread(to, 1, bytes, stdin) != bytes) std::exit(1);
}

Numbers numbers() {
    std::int64_t bytes = 0;
    read_whole(&bytes, sizeof bytes);
    Numbers found(static_cast<std::size_t>(bytes + 7) / 8);
    read_whole(found.data(), static_cast<std::size_t>(bytes));
    return found;
}

Memory memory() { return numbers(); }

std::vector<int> small(const Numbers& given) { return {given.begin(), given.end()}; }

char* chars(Memory& memory) { return reinterpret_cast<char*>(memory.data()); }

void answer(const void* from, std::int64_t bytes) {
    std::fwrite(&bytes, sizeof bytes, 1, stdout);
    std::fwrite(from, 1, static_cast<std::size_t>(bytes), stdout);
}

// Threads of its own, as GOMP_parallel would give them.
void start(void (*body)(void*), void* data, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; ++i) others.emplace_back(body, data);
    body(data);
    for (std::thread& other : others) other.join();
}

// regions; segments [region, offset, geometry …], layers, blocks, begin, count and seen of each; then the plan's
// numbers, runs, sealed tokens, and the call's numbers and memory.
void attend(const Team& team) {
    const Numbers sizes = numbers();
    std::vector<Memory> regions;
    for (std::size_t i = 0; i < sizes.size(); ++i) regions.push_back(memory());
    const std::int64_t segments = numbers()[0];
    Plan plan{};
    std::vector<Tables> tables;
    for (std::int64_t i = 0; i < segments; ++i) {
        const Numbers g = numbers();
        const Geometry geometry{g[2], g[3], g[4], g[5], g[6], g[7], static_cast<Codec>(g[8]), static_cast<Codec>(g[9]),
                                static_cast<int>(g[10]), static_cast<int>(g[11]), static_cast<int>(g[12]),
                                static_cast<int>(g[13])};
        const std::vector<int> layers = small(numbers());
        const Numbers blocks = numbers(), begin = numbers(), count = numbers(), seen = numbers();
        plan.segments.push_back({geometry, chars(regions[static_cast<std::size_t>(g[0])]) + g[1], layers, {}, seen});
        tables.push_back({blocks, begin, count});
    }
    const Numbers given = numbers(), runs = numbers(), sealed = numbers();
    float factors[2];
    std::memcpy(factors, &given[2], sizeof factors);
    plan.open = static_cast<int>(given[0]);
    plan.window = given[1];
    plan.scale = factors[0];
    plan.softcap = factors[1];
    std::vector<Run> shared;
    for (std::size_t i = 0; i < runs.size(); i += 4) shared.push_back({runs[i], runs[i + 1], runs[i + 2], runs[i + 3]});
    const Geometry& from = plan.segments[static_cast<std::size_t>(plan.open)].geometry;
    for (std::size_t i = 0; i < sealed.size(); i += 4)
        plan.sealed.push_back({from.offset(sealed[i]), plan.shape().offset(sealed[i + 2]), static_cast<int>(sealed[i + 1]),
                               static_cast<int>(sealed[i + 3])});
    make_plan(plan, tables, shared, std::vector<int>(tables.front().count.size(), -1));
    const Numbers call = numbers();
    Memory q = memory(), kv = memory(), sinks = memory();
    Memory out(static_cast<std::size_t>(call[4] + 7) / 8);
    portable::baseline::attend(plan, team,
                               {static_cast<portable::Type>(call[0]), static_cast<int>(call[1]), q.data(), call[2],
                                kv.data(), call[3], sinks.empty() ? nullptr : reinterpret_cast<float*>(sinks.data()),
                                out.data()});
    for (std::size_t i = 0; i < sizes.size(); ++i) answer(regions[i].data(), sizes[i]);
    answer(out.data(), call[4]);
}

void move(const Team& team) {
    const std::int64_t bytes = numbers()[0];
    Memory arena = memory();
    const Numbers shape = numbers(), pieces = numbers(), from = numbers(), to = numbers(), kept = numbers();
    std::vector<RunPiece> given;
    for (std::size_t i = 0; i < pieces.size(); i += 7)
        given.push_back({pieces[i], pieces[i + 1], pieces[i + 2], pieces[i + 3], static_cast<int>(pieces[i + 4]),
                         static_cast<int>(pieces[i + 5]), static_cast<int>(pieces[i + 6])});
    move_kept(team, chars(arena), shape[0], static_cast<int>(shape[1]), static_cast<int>(shape[2]),
              static_cast<int>(shape[3]), given, from, to, kept.data(), shape[4]);
    answer(arena.data(), bytes);
}

}  // namespace

int main() {
    Team team;
    std::int64_t head[2];  // what is asked for, threads
    while (std::fread(head, sizeof head, 1, stdin) == 1) {
        team.borrow(start, static_cast<int>(head[1]));
        if (head[0] == 0) attend(team);
        if (head[0] == 1) move(team);
        std::fflush(stdout);
    }
    return 0;
}
