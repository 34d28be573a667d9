// Memory for tensors that are allocated at every step and reused by the next: tensors saved for backward, and large gradients.
// The system's allocator would return their memory in between, and every 4 KiB would cost a page fault again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <new>
#include <vector>

namespace fasth {

class Pool {
  public:
    static constexpr std::size_t most_bytes = std::size_t(128) << 20;
    struct Chunk {
        char *memory = nullptr;
        std::size_t size = 0;
    };

    Pool() { idle.reserve(most_chunks + 1); }

    // The smallest chunk that fits, if it is at most a quarter too large, or a new one. Starts with the newest chunks, which
    // are mostly from the last step.
    Chunk take(std::size_t size) {
        size = std::max<std::size_t>((size + 63) / 64 * 64, 64);
        {
            const Lock lock(busy);
            auto best = idle.rend();
            for (auto chunk = idle.rbegin(); chunk != idle.rend() && !(best != idle.rend() && best->size == size); ++chunk)
                if (chunk->size >= size && chunk->size <= size + size / 4 && (best == idle.rend() || chunk->size < best->size))
                    best = chunk;
            if (best != idle.rend()) {
                const Chunk found = *best;
                idle.erase(std::next(best).base());
                idle_bytes -= found.size;
                return found;
            }
        }
        return {static_cast<char *>(::operator new(size, std::align_val_t(64))), size};
    }

    // Keeps the newest chunks, and frees the ones that were not reused.
    void give(const Chunk &chunk) noexcept {
        if (chunk.size > most_bytes) return release(chunk);
        const Lock lock(busy);
        idle.push_back(chunk); // its capacity is reserved
        idle_bytes += chunk.size;
        while (idle_bytes > most_bytes || idle.size() > most_chunks) {
            release(idle.front());
            idle_bytes -= idle.front().size;
            idle.erase(idle.begin());
        }
    }

    // Called in the child of a fork, where a thread that no longer exists may hold the lock: idle chunks are abandoned.
    void reset_after_fork() {
        new (&idle) std::vector<Chunk>();
        idle.reserve(most_chunks + 1);
        idle_bytes = 0;
        busy.clear();
    }

  private:
    static void release(const Chunk &chunk) noexcept { ::operator delete(chunk.memory, std::align_val_t(64)); }

    static constexpr std::size_t most_chunks = 256;
    struct Lock {
        std::atomic_flag &busy;
        explicit Lock(std::atomic_flag &busy) : busy(busy) {
            while (busy.test_and_set(std::memory_order_acquire)) {
            }
        }
        ~Lock() { busy.clear(std::memory_order_release); }
    };
    std::atomic_flag busy = ATOMIC_FLAG_INIT;
    std::vector<Chunk> idle;
    std::size_t idle_bytes = 0;
};

} // namespace fasth
