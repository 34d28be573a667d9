// A recurrence over time, h_t = f(x_t + W h_{t−1}), and its gradients. The batch is shared out over threads, and each takes
// its sequences through all times without a barrier.
#pragma once

#include <cmath>
#include <vector>

#include "schedule.hpp"
#include "workspace.hpp"

namespace fasth {

enum class Activation { tanh, relu, modrelu };

// The rows of each time. Sequences are sorted by length, longest first, so sequences that last until time t are the
// first of the batch. Step i of the recurrence is time i, or, in reverse, the i-th from the last.
struct Times {
    std::vector<Index> starts; // first row of each time, and the number of all rows
    bool reverse;

    Index count() const { return Index(starts.size()) - 1; }
    Index rows() const { return starts.back(); }
    Index at(Index step) const { return reverse ? count() - 1 - step : step; }
    Index start(Index step) const { return starts[std::size_t(at(step))]; }
    // Zero for the steps before the first and after the last.
    Index size(Index step) const {
        if (step < 0 || step >= count()) return 0;
        return starts[std::size_t(at(step)) + 1] - start(step);
    }
};

// A matrix (h, h) of any strides, copied to contiguous panels of columns, which `product` reads as its right operand.
template <class T> class Panels {
  public:
    static constexpr Index width = usual_tile * packet_size<T>;

    Panels(Index h, T *memory, const T *W, Index row_stride, Index column_stride) : h(h), memory(memory) {
        for (Index first = 0; first < h; first += width) {
            T *const panel = memory + first * h;
            const T *const from = W + first * column_stride;
            const Index columns = std::min(width, h - first);
            if (columns < width) std::fill_n(panel, h * width, T(0));
            if (column_stride == 1) {
                for (Index l = 0; l < h; ++l) std::copy_n(from + l * row_stride, columns, panel + l * width);
                continue;
            }
            constexpr Index block = 16; // entries of a column, one line of the cache if W is transposed
            for (Index start = 0; start < h; start += block)
                for (Index c = 0; c < columns; ++c)
                    for (Index l = start; l < std::min(start + block, h); ++l)
                        panel[l * width + c] = from[l * row_stride + c * column_stride];
        }
    }
    // out = rows times columns `first` to `first` + width. Rows: (count, h), row-major, and so is out: (count, width).
    void multiply(Index count, const T *rows, Index first, T *out) const {
        product<T>(Result::set, count, width, Term<T>{h, rows, h, 1, {memory + first * h, width}}, {nullptr, 0}, {out, width});
    }

  private:
    const Index h;
    T *const memory;
};

// f of one number. `bias` is modReLU's. NaN stays NaN.
template <Activation f, class T> FASTH_INLINE T activated(T z, T bias) {
    if constexpr (f == Activation::tanh) return std::tanh(z);
    if constexpr (f == Activation::relu) return z <= T(0) ? T(0) : z;
    const T size = std::abs(z) + bias;
    return size <= T(0) || z == T(0) ? T(0) : std::copysign(size, z);
}
// f′ · g, with f′ computed from f's value.
template <Activation f, class T> FASTH_INLINE T through(T g, T value) {
    if constexpr (f == Activation::tanh) return g * (T(1) - value * value);
    if constexpr (f == Activation::relu) return value <= T(0) ? T(0) : g;
    return value == T(0) ? T(0) : g;
}
// f of a row of a panel, in whole packets.
template <Activation f, class T> FASTH_INLINE void activate(T *z, const T *bias) {
    using namespace Eigen::internal;
    constexpr Index width = packet_size<T>;
    if constexpr (f == Activation::tanh && packet_traits<T>::HasTanh) {
        for (Index c = 0; c < Panels<T>::width; c += width) {
            T value[width];
            pstoreu(value, ptanh(ploadu<Packet<T>>(z + c)));
            for (Index i = 0; i < width; ++i) z[c + i] = z[c + i] == z[c + i] ? value[i] : z[c + i]; // f loses NaN
        }
    } else {
        for (Index c = 0; c < Panels<T>::width; ++c) z[c] = activated<f>(z[c], bias[c]);
    }
}

// One call: its memory and its threads.
template <class T> struct Recurrence {
    const Times &times;
    const Index h;
    const int threads;

    Recurrence(const Times &times, Index h, int threads)
        : times(times), h(h), threads(int(std::clamp<Index>(batch(), 1, Schedule::threads_for(times.rows() * h * h, threads)))) {}

    Index batch() const { return std::max(times.size(0), times.size(times.count() - 1)); }

    // out = f(x + rows before · Wᵀ).
    template <Activation f> void forward(const T *x, Strided<const T> W, const T *h0, const T *bias, T *out) const {
        run(W.column_stride, W.row_stride, W.data, bias, [&](const Member &m) { forward<f>(m, x, h0, out); });
    }
    // dx = f′ · (the gradient of out + dx of the step after · W), dh0 where sequences start, and the gradient of modReLU's bias.
    template <Activation f> void backward(const T *g, Strided<const T> W, const T *out, T *dx, T *dh0, T *dbias) const {
        run(W.row_stride, W.column_stride, W.data, nullptr, [&](const Member &m) { backward<f>(m, g, out, dx, dh0); }, dbias);
    }

  private:
    struct Member { // a thread and its part of the batch
        const Panels<T> &panels;
        Index from, to;
        T *products; // (to − from, a panel's width)
        T *bias;     // h numbers in whole panels: modReLU's bias, or the sum of its gradient
    };

    struct Memory {
        T *panels, *biases, *products;
        Index size;

        Memory(Carver carver, Index h, Index padded, Index batch, int threads) {
            panels = carver.take<T>(padded * h);
            biases = carver.take<T>(padded * threads);
            products = carver.take<T>(batch * Panels<T>::width);
            size = carver.size();
        }
    };

    template <class Run>
    void run(Index row_stride, Index column_stride, const T *W, const T *bias, const Run &work, T *dbias = nullptr) const {
        const Index width = Panels<T>::width, padded = round_up(h, width);
        const Workspace workspace(Memory(Carver(), h, padded, batch(), threads).size);
        const Memory memory(Carver(workspace.data()), h, padded, batch(), threads);
        T *const biases = memory.biases;
        const Panels<T> panels(h, memory.panels, W, row_stride, column_stride);
        std::fill_n(biases, padded * threads, T(0));
        for (int i = 0; bias && i < threads; ++i) std::copy_n(bias, h, biases + i * padded);
        const auto part = [&](int rank, int members) {
            const Index from = batch() * rank / members, to = batch() * (rank + 1) / members;
            work({panels, from, to, memory.products + from * width, biases + rank * padded});
        };
        if (!on_threads(threads, [&](int rank) { part(rank, threads); })) part(0, 1);
        for (int i = 0; dbias && i < threads; ++i)
            for (Index c = 0; c < h; ++c) dbias[c] = (i ? dbias[c] : T(0)) + biases[i * padded + c];
    }

    template <Activation f> void forward(const Member &m, const T *x, const T *h0, T *out) const {
        constexpr Index width = Panels<T>::width;
        for (Index step = 0; step < times.count(); ++step) {
            const Index start = times.start(step), end = std::max(m.from, std::min(m.to, times.size(step)));
            const Index carried = std::clamp(times.size(step - 1), m.from, end); // the rows up to here; the others start
            for (Index first = 0; first < h; first += width) {
                const Index columns = std::min(width, h - first);
                if (m.from < carried)
                    m.panels.multiply(carried - m.from, out + (times.start(step - 1) + m.from) * h, first, m.products);
                if (carried < end)
                    m.panels.multiply(end - carried, h0 + carried * h, first, m.products + (carried - m.from) * width);
                for (Index row = m.from; row < end; ++row) {
                    T *const z = m.products + (row - m.from) * width;
                    const Index place = (start + row) * h + first;
                    for (Index c = 0; c < columns; ++c) z[c] += x[place + c];
                    activate<f>(z, m.bias + first);
                    std::copy_n(z, columns, out + place);
                }
            }
        }
    }

    template <Activation f> void backward(const Member &m, const T *g, const T *out, T *dx, T *dh0) const {
        constexpr Index width = Panels<T>::width;
        for (Index step = times.count() - 1; step >= 0; --step) {
            const Index start = times.start(step), end = std::max(m.from, std::min(m.to, times.size(step)));
            const Index carried = std::clamp(times.size(step + 1), m.from, end); // the rows up to here; the others end
            for (Index first = 0; first < h; first += width) {
                const Index columns = std::min(width, h - first);
                std::fill_n(m.products + (carried - m.from) * width, (end - carried) * width, T(0));
                if (m.from < carried)
                    m.panels.multiply(carried - m.from, dx + (times.start(step + 1) + m.from) * h, first, m.products);
                for (Index row = m.from; row < end; ++row) {
                    const T *const later = m.products + (row - m.from) * width;
                    const Index place = (start + row) * h + first;
                    for (Index c = 0; c < columns; ++c) dx[place + c] = through<f>(g[place + c] + later[c], out[place + c]);
                    if constexpr (f == Activation::modrelu)
                        for (Index c = 0; c < columns; ++c)
                            m.bias[first + c] += out[place + c] > T(0) ? dx[place + c] : -dx[place + c];
                }
            }
            const Index begin = std::clamp(times.size(step - 1), m.from, end); // from here on, sequences start
            for (Index first = 0; dh0 && begin < end && first < h; first += width) {
                m.panels.multiply(end - begin, dx + (start + begin) * h, first, m.products);
                for (Index row = begin; row < end; ++row)
                    std::copy_n(m.products + (row - begin) * width, std::min(width, h - first), dh0 + row * h + first);
            }
        }
    }
};

} // namespace fasth
