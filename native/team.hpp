// Threads that work on one product together, and the memory they use.
#pragma once

#include <atomic>
#include <cstddef>
#include <new>
#include <thread>

#include "products.hpp"

namespace fasth {

// The members of a team run the same code, each on its own columns or rows. They meet in two halves: a member arrives when
// what the others need is written, does what needs no one else, and only then waits for the others. Waiting spins, since
// all arrive within microseconds of each other, and where they do not (more threads than processors) gives way.
class Team {
  public:
    struct Meeting {
        alignas(64) std::atomic<Index> arrivals{0};
    };
    const int size, rank;

    Team(int size, int rank, Meeting &meeting) : size(size), rank(rank), meeting(meeting) {}
    Team alone() const { return {1, 0, meeting}; }

    void arrive() {
        if (size == 1) return;
        due += size;
        meeting.arrivals.fetch_add(1, std::memory_order_acq_rel);
    }
    bool complete() const { return size == 1 || meeting.arrivals.load(std::memory_order_acquire) >= due; }
    void wait() const {
        for (int spins = 0; !complete();) {
            if (spins < 300)
                pause(), ++spins;
            else
                std::this_thread::yield();
        }
    }
    void meet() {
        arrive();
        wait();
    }

  private:
    Meeting &meeting;
    Index due = 0;

    static void pause() {
#if defined(__x86_64__) || defined(_M_X64)
        _mm_pause();
#endif
    }
};

// Memory taken in one piece before the work starts, so that nothing can fail in the middle of it: the same calls first
// count what is needed, then hand it out. A thread keeps its last piece, since memory fresh from the system costs a page
// fault every 4 KiB.
class Arena {
  public:
    Arena() = default;
    ~Arena() {
        if (memory && memory == last().memory)
            last().taken = false;
        else
            release(memory);
    }
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;

    template <class T> T *take(Index count) {
        const Index start = used;
        used += round_up(count * Index(sizeof(T)), 64);
        return memory ? reinterpret_cast<T *>(memory + start) : nullptr;
    }
    void provide() {
        Last &kept = last();
        if (kept.taken || used > most_kept) {
            memory = allocate(used);
        } else {
            if (kept.size < used) {
                release(kept.memory);
                kept.memory = nullptr, kept.size = 0;
                kept.memory = allocate(used);
                kept.size = used;
            }
            kept.taken = true;
            memory = kept.memory;
        }
        used = 0;
    }

  private:
    static constexpr Index most_kept = Index(32) << 20;
    struct Last {
        char *memory = nullptr;
        Index size = 0;
        bool taken = false;
        ~Last() { release(memory); }
    };
    static Last &last() {
        thread_local Last kept;
        return kept;
    }
    static char *allocate(Index size) { return static_cast<char *>(::operator new(std::size_t(size), std::align_val_t(64))); }
    static void release(char *piece) { ::operator delete(piece, std::align_val_t(64)); }

    char *memory = nullptr;
    Index used = 0;
};

} // namespace fasth
