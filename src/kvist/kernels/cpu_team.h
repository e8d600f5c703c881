// Threads that share the work of a kernel. No framework in here.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <type_traits>

namespace kvist {

// Threads that stand by between the kernels of one call, so that each begins at once. The thread that called leads: it
// offers one piece of work after the other, does it itself, and is joined by whoever comes in time. Nobody is waited
// for but those who are inside, so that a thread that the system has taken away delays nothing.
class Crew {
  public:
    using Work = void (*)(void* data, int place);

    // The leader's: runs `work(data, place)` here, as place 0, and on the others that come.
    void offer(Work work, void* data) {
        work_ = work;
        data_ = data;
        ++turn_;  // odd: there is work
        open_.store(turn_, std::memory_order_seq_cst);
        work(data, 0);
        ++turn_;
        open_.store(turn_, std::memory_order_seq_cst);
        for (int waited = 0; inside_.load(std::memory_order_seq_cst) != 0;) wait(waited);
    }

    // Sends the others home.
    void dismiss() { open_.store(kOver, std::memory_order_release); }

    // The others': works until it is sent home.
    void serve() {
        const int place = places_.fetch_add(1, std::memory_order_relaxed);
        std::uint64_t done = 0;
        for (int waited = 0;;) {
            const std::uint64_t turn = open_.load(std::memory_order_acquire);
            if (turn == kOver) return;
            if (turn % 2 == 0 || turn == done) {
                wait(waited);
                continue;
            }
            // Whoever is inside is seen by the leader, or sees that it is too late: one of both comes first.
            inside_.fetch_add(1, std::memory_order_seq_cst);
            if (open_.load(std::memory_order_seq_cst) == turn) work_(data_, place);
            inside_.fetch_sub(1, std::memory_order_release);
            done = turn;
            waited = 0;
        }
    }

  private:
    static constexpr std::uint64_t kOver = ~std::uint64_t{0} - 1;  // even
    static constexpr int kPatience = 4096;  // looks, some ten microseconds and more, before others may run

    static void wait(int& waited) {
        if (++waited > kPatience) {
            sched_yield();
            return;
        }
#if defined(__x86_64__) && defined(__GNUC__)
        __builtin_ia32_pause();
#endif
    }

    alignas(64) std::atomic<std::uint64_t> open_{0};
    Work work_ = nullptr;
    void* data_ = nullptr;
    std::uint64_t turn_ = 0;  // the leader's own
    alignas(64) std::atomic<int> inside_{0};
    std::atomic<int> places_{1};
};

// Runs work on every thread of the team that the framework's own operators use.
class Team {
  public:
    using Start = void (*)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel

    // May be called while another thread runs: that run keeps the threads it began with.
    void borrow(Start start, int threads) {
        start_.store(start, std::memory_order_relaxed);
        threads_.store(start == nullptr ? 1 : threads, std::memory_order_relaxed);
    }

    int threads() const { return threads_.load(std::memory_order_relaxed); }

    // Runs `body(place)` on up to as many threads as there are, this one among them; each has a place of its own, from 0
    // on. The body throws nothing but `std::bad_alloc`, which must not leave a borrowed thread: the caller gets it.
    template <class Body>
    void run(Body&& body) const {
        const int threads = this->threads();
        const Start start = start_.load(std::memory_order_relaxed);
        if (threads == 1 || (start == nullptr && crew_ == nullptr)) {
            body(0);
            return;
        }
        struct Call {
            std::remove_reference_t<Body>* body;
            std::atomic<int> places;
            std::atomic<bool> failed;

            void at(int place) {
                try {
                    (*body)(place);
                } catch (const std::bad_alloc&) {
                    failed.store(true, std::memory_order_relaxed);
                }
            }
        } call{&body, {0}, {false}};
        if (crew_ != nullptr) {
            crew_->offer([](void* data, int place) { static_cast<Call*>(data)->at(place); }, &call);
        } else {
            start(
                [](void* data) {
                    auto* call = static_cast<Call*>(data);
                    call->at(call->places.fetch_add(1, std::memory_order_relaxed));
                },
                &call, static_cast<unsigned>(threads), 0);
        }
        if (call.failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
    }

    // Runs `body(team)` on this thread while the others stand by: what it runs on that team begins at once. Throws what
    // `run` does.
    template <class Body>
    void together(Body&& body) const {
        const int threads = this->threads();
        if (threads == 1 || crew_ != nullptr) {
            body(*this);
            return;
        }
        Crew crew;
        Team inner;
        inner.threads_.store(threads, std::memory_order_relaxed);
        inner.crew_ = &crew;
        const void* const leader = this_thread();
        run([&](int) {
            if (this_thread() != leader) {
                crew.serve();
                return;
            }
            struct Dismissal {
                Crew& crew;
                ~Dismissal() { crew.dismiss(); }
            } dismissal{crew};
            body(static_cast<const Team&>(inner));
        });
    }

    // Runs `body(index)` for 0 … count - 1, `grain` indices at a time, in whatever order threads are free.
    template <class Body>
    void share(std::int64_t count, std::int64_t grain, Body&& body) const {
        if (threads() == 1 || count <= grain) {
            for (std::int64_t index = 0; index < count; ++index) body(index);
            return;
        }
        std::atomic<std::int64_t> next{0};
        run([&](int) {
            for (;;) {
                const std::int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
                if (begin >= count) return;
                const std::int64_t end = begin + grain < count ? begin + grain : count;
                for (std::int64_t index = begin; index < end; ++index) body(index);
            }
        });
    }

  private:
    static const void* this_thread() {
        static thread_local const char here = 0;
        return &here;
    }

    std::atomic<Start> start_{nullptr};
    std::atomic<int> threads_{1};
    Crew* crew_ = nullptr;
};

// Indices 0 … count - 1, of which each thread has a range of its own and takes it from the front, so that what it reads
// lies one behind the other; who is done takes from the ends of the others' ranges.
class Ranges {
  public:
    Ranges(std::int64_t count, int threads) : threads_(threads < kMost ? threads : kMost) {
        for (int place = 0; place < threads_; ++place)
            ends_[place].value.store(pack(begin(count, place, threads_), begin(count, place + 1, threads_)),
                                     std::memory_order_relaxed);
    }

    // Where the range of a place begins.
    static std::int64_t begin(std::int64_t count, int place, int threads) { return count * place / threads; }

    template <class Body>
    void run(int place, Body&& body) {
        std::int64_t index;
        place %= threads_;
        while (take(place, true, index)) body(index);
        for (int other = (place + 1) % threads_; other != place; other = (other + 1) % threads_)
            while (take(other, false, index)) body(index);
    }

  private:
    static constexpr int kMost = 64;

    static std::uint64_t pack(std::int64_t front, std::int64_t end) {
        return static_cast<std::uint64_t>(end) << 32 | static_cast<std::uint64_t>(front);
    }

    bool take(int place, bool at_front, std::int64_t& index) {
        std::atomic<std::uint64_t>& ends = ends_[place].value;
        std::uint64_t was = ends.load(std::memory_order_relaxed);
        for (;;) {
            const auto front = static_cast<std::int64_t>(was & 0xffffffff), end = static_cast<std::int64_t>(was >> 32);
            if (front >= end) return false;
            index = at_front ? front : end - 1;
            const std::uint64_t now = at_front ? pack(front + 1, end) : pack(front, end - 1);
            if (ends.compare_exchange_weak(was, now, std::memory_order_relaxed)) return true;
        }
    }

    struct alignas(64) Ends {
        std::atomic<std::uint64_t> value;
    };

    int threads_;
    Ends ends_[kMost];
};

}  // namespace kvist
