// Threads that share work, told of every race: each index is taken once, each place by one thread, and what a thread
// throws reaches who called. Prints how often another thread came to work that waited for one; fails where anything is
// wrong.

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu_team.h"

using kvist::Ranges;
using kvist::Team;

namespace {

constexpr int kMostPlaces = 128;

// Threads that come late, as those of a busy machine do.
void start(void (*work)(void*), void* data, unsigned count, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < count; ++i)
        others.emplace_back([=] {
            for (unsigned late = 0; late < i % 4; ++late) std::this_thread::yield();
            work(data);
        });
    work(data);
    for (std::thread& other : others) other.join();
}

struct Count {
    long wrong = 0, met = 0;
};

void share_ranges(const Team& team, int threads, Count& count) {
    const int size = std::rand() % 200;
    std::vector<int> taken(size, 0);
    std::vector<std::atomic<int>> there(kMostPlaces);
    Ranges ranges(size, team.threads());
    team.run([&](int place) {
        if (place < 0 || place >= threads) std::abort();
        there[place].fetch_add(1);
        ranges.run(place, [&](std::int64_t index) { ++taken[index]; });
    });
    for (const auto& at : there) count.wrong += at.load() > 1;
    for (int i = 0; i < size; ++i) count.wrong += taken[i] != 1;
}

// Whoever comes waits for a second one: on a busy machine short work is over before another thread has begun.
void meet(const Team& team, int threads, Count& count) {
    if (threads == 1) return;
    std::atomic<int> here{0};
    team.run([&](int) {
        here.fetch_add(1);
        while (here.load() < 2) std::this_thread::yield();
    });
    ++count.met;
}

void share_grains(const Team& team, Count& count) {
    const int size = std::rand() % 200;
    std::atomic<long> sum{0};
    team.share(size, 1 + std::rand() % 5, [&](std::int64_t index) { sum.fetch_add(index); });
    count.wrong += sum.load() != static_cast<long>(size) * (size - 1) / 2;
}

}  // namespace

int main(int, char** arguments) {
    const int threads = std::atoi(arguments[1]);
    Team team;
    team.borrow(start, threads);
    Count count;
    for (int round = 0; round < 24; ++round) {
        const bool throws = round % 3 == 0;
        bool thrown = false;
        share_ranges(team, threads, count);
        if (round < 4) meet(team, threads, count);
        try {
            team.together([&](const Team& inner) {
                if (round < 4) meet(inner, threads, count);
                for (int piece = 0; piece < 24; ++piece) {
                    share_ranges(inner, threads, count);
                    share_grains(inner, count);
                    if (throws && piece == 12) inner.run([](int) { throw std::bad_alloc(); });
                }
            });
        } catch (const std::bad_alloc&) {
            thrown = true;
        }
        count.wrong += thrown != throws;
    }
    std::printf("%ld\n", count.met);
    return count.wrong != 0;
}
