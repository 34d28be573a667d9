// Threads that work on one product together.
#pragma once

#include <atomic>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels.hpp"

namespace fasth {

// The members of a team run the same code, each on its own columns or rows. A barrier has two halves: a member arrives after
// writing the data that others need, does independent work, and only then waits. Waiting spins, since members arrive within
// microseconds of each other, and yields if they do not, as with more threads than processors.
class Team {
  public:
    struct Barrier {
        alignas(64) std::atomic<Index> arrivals{0};
    };
    const int size, rank;

    Team(int size, int rank, Barrier &shared) : size(size), rank(rank), shared(shared) {}
    Team alone() const { return {1, 0, shared}; }

    void arrive() {
        if (size == 1) return;
        due += size;
        shared.arrivals.fetch_add(1, std::memory_order_acq_rel);
    }
    bool complete() const { return size == 1 || shared.arrivals.load(std::memory_order_acquire) >= due; }
    void wait() const {
        for (int spins = 0; !complete();) {
            if (spins < 300)
                pause(), ++spins;
            else
                std::this_thread::yield();
        }
    }
    void barrier() {
        arrive();
        wait();
    }

    // True if item `number` is this member's. Items are dealt out to and fro, 0 1 1 0 0 1 1 0 for two members, so that no
    // member gets the larger item of every pair.
    bool owns(Index number) const {
        const int place = int(number % (2 * size));
        return rank == std::min(place, 2 * size - 1 - place);
    }

  private:
    Barrier &shared;
    Index due = 0;

    static void pause() {
#if defined(__x86_64__) || defined(_M_X64)
        _mm_pause();
#endif
    }
};

// OpenMP's threads do not survive a fork, and starting them in the child would wait forever.
inline std::atomic<bool> forked{false};

// Calls run(thread) on `threads` threads. Returns false and runs nothing if there are fewer, as inside a parallel region.
template <class Run> bool on_threads(int threads, const Run &run) {
    if (threads == 1) return run(0), true;
    std::atomic<bool> complete{false};
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    {
        if (omp_get_num_threads() == threads) {
            complete.store(true, std::memory_order_relaxed);
            run(omp_get_thread_num());
        }
    }
#endif
    return complete;
}

} // namespace fasth
