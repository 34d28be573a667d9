// Memory that outlives a call, kept for the next one when it is freed: between forward and backward. From the system's
// allocator such pieces would come and go at the top of its heap, with a page fault for every 4 KiB, step after step.
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
    struct Piece {
        char *memory = nullptr;
        std::size_t size = 0;
    };

    Pool() { idle.reserve(most_pieces + 1); }

    Piece take(std::size_t size) {
        size = std::max<std::size_t>((size + 63) / 64 * 64, 64);
        {
            const Lock lock(busy);
            auto best = idle.end();
            for (auto piece = idle.begin(); piece != idle.end(); ++piece)
                if (piece->size >= size && piece->size <= size + size / 4 && (best == idle.end() || piece->size < best->size))
                    best = piece;
            if (best != idle.end()) {
                const Piece found = *best;
                idle.erase(best);
                idle_bytes -= found.size;
                return found;
            }
        }
        return {static_cast<char *>(::operator new(size, std::align_val_t(64))), size};
    }

    // The newest stay; what has not been asked for since goes back to the system.
    void give(const Piece &piece) noexcept {
        if (piece.size > most_bytes) return release(piece);
        const Lock lock(busy);
        idle.push_back(piece); // there is room
        idle_bytes += piece.size;
        while (idle_bytes > most_bytes || idle.size() > most_pieces) {
            release(idle.front());
            idle_bytes -= idle.front().size;
            idle.erase(idle.begin());
        }
    }

    // In the child of a fork, where the lock may be held by a thread that is not there: what was idle is left alone.
    void forget() {
        new (&idle) std::vector<Piece>();
        idle.reserve(most_pieces + 1);
        idle_bytes = 0;
        busy.clear();
    }

  private:
    static void release(const Piece &piece) noexcept { ::operator delete(piece.memory, std::align_val_t(64)); }

    static constexpr std::size_t most_pieces = 64;
    struct Lock {
        std::atomic_flag &busy;
        explicit Lock(std::atomic_flag &busy) : busy(busy) {
            while (busy.test_and_set(std::memory_order_acquire)) {
            }
        }
        ~Lock() { busy.clear(std::memory_order_release); }
    };
    std::atomic_flag busy = ATOMIC_FLAG_INIT;
    std::vector<Piece> idle;
    std::size_t idle_bytes = 0;
};

} // namespace fasth
