// x Wᵀ + bias with a dense W that serves many calls, and is packed for them once: its rows stand side by side, in panels as
// wide as a tile of the result.
#pragma once

#include <memory>

#include "plan.hpp"

namespace fasth {

template <class T> class Panels {
  public:
    using Number = T;
    const Index n, m;

    Panels(Index n, Index m, const T *W) : n(n), m(m), numbers(allocate(count() * width * m)) {
        std::fill_n(numbers.get(), count() * width * m, T(0)); // also what the last panel has beyond W
        for (Index i = 0; i < n; ++i)
            for (Index l = 0; l < m; ++l) entry(i, l) = W[i * m + l];
    }
    void unpack(T *W) const {
        for (Index i = 0; i < n; ++i)
            for (Index l = 0; l < m; ++l) W[i * m + l] = entry(i, l);
    }

    // x: (rows, m) and out: (rows, n), one row after the other. Without a bias it is null.
    void multiply(Index rows, Strided<const T> x, const T *bias, T *out, int threads) const {
        const Index parts = (rows + most_rows - 1) / most_rows, pieces = parts * count();
        threads = int(std::min<Index>(threads_for(rows * n * m, threads), std::max<Index>(pieces, 1)));
        const auto run = [&](int thread, int all) {
            for (Index piece = pieces * thread / all; piece < pieces * (thread + 1) / all; ++piece) {
                const Index first = piece / count() * most_rows, panel = piece % count();
                multiply_panel(panel, std::min(most_rows, rows - first), {&x(first, 0), x.row_stride, x.column_stride}, bias,
                               out + first * n);
            }
        };
        if (!on_threads(threads, [&](int thread) { run(thread, threads); })) run(0, 1);
    }

  private:
    static constexpr Index width = widest_tile * packet_size<T>;
    static constexpr Index most_rows = 128; // which stay in a cache while all panels go by
    struct Free {
        void operator()(T *memory) const { ::operator delete(memory, alignment); }
    };
    static constexpr std::align_val_t alignment{64}; // of a line of the caches: no register is filled from two
    std::unique_ptr<T[], Free> numbers;

    static T *allocate(Index count) { return static_cast<T *>(::operator new(sizeof(T) * std::size_t(count), alignment)); }
    Index count() const { return (n + width - 1) / width; }
    std::size_t place(Index i, Index l) const { return std::size_t((i / width * m + l) * width + i % width); }
    T &entry(Index i, Index l) { return numbers[place(i, l)]; }
    const T &entry(Index i, Index l) const { return numbers[place(i, l)]; }

    void multiply_panel(Index panel, Index rows, Strided<const T> x, const T *bias, T *out) const {
        const Index first = panel * width, columns = std::min(width, n - first);
        const Matrix<const T> right{numbers.get() + first * m, width};
        if (columns == width) return multiply_tiles(rows, x, right, bias ? bias + first : nullptr, {out + first, n});
        // The last panel may be wider than what is left of the result.
        T own_bias[width] = {}, own[tile_height * width];
        if (bias) std::copy_n(bias + first, columns, own_bias);
        for (Index i = 0; i < rows; i += tile_height) {
            const Index height = std::min(tile_height, rows - i);
            multiply_tiles(height, {&x(i, 0), x.row_stride, x.column_stride}, right, own_bias, {own, width});
            for (Index j = 0; j < height; ++j) std::copy_n(own + j * width, columns, out + (i + j) * n + first);
        }
    }
    static constexpr Index tile_height = tile_rows(widest_tile);

    void multiply_tiles(Index rows, Strided<const T> x, Matrix<const T> right, const T *bias, Matrix<T> out) const {
        const Term<T> term{m, x.data, x.row_stride, x.column_stride, right};
        if (bias)
            product<Result::add, T, widest_tile>(rows, width, term, {bias, 0}, out);
        else
            product<Result::set, T, widest_tile>(rows, width, term, {}, out);
    }
};

} // namespace fasth
