// Memory for one call, taken in one piece before the work starts, so that nothing can fail in the middle of it.
#pragma once

#include <new>

#include "kernels.hpp"

namespace fasth {

// Hands out pieces of a workspace one after the other. Without memory it only counts the size that the same calls will need.
class Carver {
  public:
    explicit Carver(char *memory = nullptr) : memory(memory) {}
    template <class T> T *take(Index count) {
        const Index start = used;
        used += round_up(count * Index(sizeof(T)), 64);
        return memory ? reinterpret_cast<T *>(memory + start) : nullptr;
    }
    Index size() const { return used; }

  private:
    char *memory;
    Index used = 0;
};

// A thread reuses its last workspace, since memory fresh from the system costs a page fault every 4 KiB.
class Workspace {
  public:
    explicit Workspace(Index size) {
        Last &last = last_of_thread();
        if (last.taken || size > largest_reused) {
            memory = allocate(size);
            return;
        }
        if (last.size < size) {
            release(last.memory);
            last.memory = nullptr, last.size = 0;
            last.memory = allocate(size);
            last.size = size;
        }
        last.taken = true;
        memory = last.memory;
    }
    ~Workspace() {
        if (memory == last_of_thread().memory)
            last_of_thread().taken = false;
        else
            release(memory);
    }
    Workspace(const Workspace &) = delete;
    Workspace &operator=(const Workspace &) = delete;

    char *data() const { return memory; }

  private:
    static constexpr Index largest_reused = Index(32) << 20;
    struct Last {
        char *memory = nullptr;
        Index size = 0;
        bool taken = false;
        ~Last() { release(memory); }
    };
    static Last &last_of_thread() {
        thread_local Last last;
        return last;
    }
    static char *allocate(Index size) { return static_cast<char *>(::operator new(std::size_t(size), std::align_val_t(64))); }
    static void release(char *piece) { ::operator delete(piece, std::align_val_t(64)); }

    char *memory = nullptr;
};

} // namespace fasth
