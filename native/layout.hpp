// The sizes of one product, the columns of each member of the team, and the tensors saved for backward.
#pragma once

#include <cmath>

#include "team.hpp"
#include "workspace.hpp"

namespace fasth {

// How reflectors are stored. Compact: triangular with ones on the diagonal, which are not stored; the sign bits of the stored
// diagonal are signs of columns of U Σ Vᵀ. FORMS in plan.py has the same order.
enum class Form { full, triangular, compact };

template <class T> struct Strided { // (rows, columns) of any strides
    T *data;
    Index row_stride, column_stride;
    T &operator()(Index i, Index j) const { return data[i * row_stride + j * column_stride]; }
    bool column_major() const { return row_stride == 1 && column_stride != 1; }
    Strided transposed() const { return {data, column_stride, row_stride}; }
    Strided from_row(Index row) const { return {data ? data + row * row_stride : nullptr, row_stride, column_stride}; }
};

// Number of columns in a panel, which belongs to one member of a team: few for short reflectors, so that a triangle is shared
// out evenly; many for long ones, to amortize calls.
constexpr Index widest_panel = 64;
constexpr Index panel_for(Index d) { return d < 768 ? 32 : widest_panel; }

// x Qᵀ, or x Q if `transpose`, for one matrix.
template <class T> struct Problem {
    static constexpr Index packet = packet_size<T>;
    Index m, r, d; // rows of x, reflectors, their length
    Form form;
    bool transpose;
    Index k;     // reflections in a block
    Index panel; // columns in a panel
    bool few_rows = false;    // rows of x stay row-major, and the members share out rows instead of columns: few_rows.hpp
    bool has_A = false;       // the rows after every block are saved
    bool shares = false;      // another product has its reflectors in the rest of the matrix
    bool adds = false;        // the gradient of V is added to dV instead of stored
    bool of_identity = false; // x are rows of the identity, in x Qᵀ, and get no gradient
    // For parts of the rows: the first row, and whether sums of previous parts exist.
    Index first = 0;
    bool is_part = false, continues = false;

    bool triangular() const { return form != Form::full; }
    bool compact() const { return form == Form::compact; }
    Index reflectors() const { return triangular() ? std::min(r, d) : r; } // reflectors beyond these are zero
    bool fills() const { return triangular() && !shares && !adds; } // zeros in the gradient where V has no entries
    Index blocks() const { return (reflectors() + k - 1) / k; }
    Index size_of(Index block) const { return std::min(k, reflectors() - block * k); }
    Index K() const { return round_up(k, padding); }
    Index panels() const { return (d + panel - 1) / panel; }
    Index padded_d() const { return round_up(d, packet); }
    // Number of rows of x padded to whole registers, or, if they are few, to whole tiles. Padding rows are zero.
    Index lanes() const { return round_up(m, few_rows ? inner_rows : packet); }
    // Stride of the columns of x. Multiples of a kilobyte would map to few lines of the first-level cache.
    Index lane_stride() const {
        if (has_A) return round_up(m, padding); // as in A
        return m && lanes() % 256 == 0 ? lanes() + packet : lanes();
    }
    Index panel_size() const { return panel * lane_stride(); }
    // The column where the block's reflectors start, and the first column read: rounded down to a packet for few rows.
    Index first_column(Index block) const { return triangular() ? block * k : 0; }
    Index first_read(Index block) const { return few_rows ? first_column(block) / packet * packet : first_column(block); }
    // The first row that a block changes, in whole packets. Earlier rows of the identity are zero in all columns that the block
    // reaches, since the blocks that act before it start further right.
    Index first_row(Index block) const {
        return of_identity ? std::clamp<Index>(first_column(block) - first, 0, m) / packet * packet : 0;
    }
    // The block of number `step`: x Qᵀ starts with the last block, x Q (ascending) with the first.
    Index block_at(Index step, bool ascending) const { return ascending ? step : blocks() - 1 - step; }
    bool acts_last(Index block) const { return block == block_at(blocks() - 1, transpose); }
    // The index of a block among all blocks except the one that acts last.
    Index place(Index block) const { return transpose ? block : block - 1; }
};

// The columns of one member of a team. Panels are dealt out as in Team::owns, so that shares of a triangle differ by a
// panel at most, and the larger share changes from block to block.
struct Columns {
    Index d, panel;
    int size, rank;
    Index panels;

    template <class T>
    Columns(const Problem<T> &p, int size, int rank)
        : d(p.d), panel(p.panel), size(size), rank(rank), panels(before(p.panels())) {}

    // The first column of a member's panel in V, and its number of columns.
    Index column(Index q) const { return (q / 2 * 2 * size + (q % 2 ? 2 * size - 1 - rank : rank)) * panel; }
    Index width(Index q) const { return std::min(panel, d - column(q)); }
    // The first panel that a block reaches, and the number of columns left of the block within a panel.
    template <class T> Index first_panel(const Problem<T> &p, Index block) const { return before(p.first_column(block) / panel); }
    template <class T> Index from(const Problem<T> &p, Index block, Index q) const {
        return std::clamp<Index>(p.first_read(block) - column(q), 0, width(q));
    }

  private:
    Index before(Index count) const { // number of this member's panels among the first `count`
        const Index deals = count / (2 * size), rest = count % (2 * size);
        return 2 * deals + (rest > rank) + (rest > 2 * size - 1 - rank);
    }
};

// Tensors saved for backward: T of every block, (N, K, K), and the scales of its reflectors, (N, K); Z, (N, M, K); and the rows
// after every block but the one that acts last, A: (N - 1, D, M). Each may be absent, the scales only with T. Sizes are
// multiples of `padding`. For few rows, A is row-major in panels.
template <class T> struct Saved {
    T *all_T = nullptr, *all_scales = nullptr, *Z = nullptr, *A = nullptr;
    Index blocks = 0, K = 0, M = 0, D = 0;

    Saved() = default;
    Saved(const Problem<T> &p, Index longest)
        : blocks(p.blocks()), K(p.K()), M(round_up(p.m, padding)), D(round_up(longest, padding)) {}

    Index T_size() const { return blocks * K * K; }
    T *T_of(Index block) const { return all_T + block * K * K; }
    T *scales(Index block) const { return all_scales + block * K; }
    T *Z_of(Index block) const { return Z + block * M * K; }
    T *A_at(Index place) const { return A + place * D * M; }

    // The same for another matrix of the batch, and for the rows from one on.
    Saved in_batch(Index b) const {
        Saved other = *this;
        if (all_T) other.all_T += b * T_size(), other.all_scales += b * blocks * K;
        if (Z) other.Z += b * blocks * M * K;
        if (A) other.A += b * (blocks - 1) * D * M;
        return other;
    }
    Saved from_row(Index row) const {
        Saved part = *this;
        if (Z) part.Z += row * K;
        return part;
    }
};

// The gradient of a diagonal entry that stores a sign. It is zero, except that it pushes an entry close to zero away from zero:
// an optimizer's weight decay may shrink the entry, and should not change its sign. Same as in autograd.py.
template <class T> T sign_guard(T entry) { return std::abs(entry) < T(0.25) ? std::copysign(T(0.1), -entry) : T(0); }

// The singular values between two products, or ones without sigma, times the signs of their columns in both products. A sign is
// the sign of a diagonal entry of the reflectors.
template <class T> struct Diagonal {
    const T *sigma;
    Index count;
    Strided<const T> V, U;
    Index V_signs, U_signs;

    T sign(Index c) const {
        const bool V_negative = c < V_signs && std::signbit(V(c, c)), U_negative = c < U_signs && std::signbit(U(c, c));
        return V_negative == U_negative ? T(1) : T(-1);
    }
    T entry(Index c) const { return sigma ? sigma[c] * sign(c) : sign(c); }
};

// One member's view of one block.
template <class T> struct Block {
    Index number, size; // index of the block, number of reflectors
    bool scaled;
    const T *scale;
    T *packed;           // copies of panels that are not read from V: (panels, K, panel), or column-major as V is
    Strided<const T> *Y; // Y in each panel, from the first column on that the block reaches

    static Block take(const Problem<T> &p, Index panels, Carver &carver) {
        return {0, 0, false, nullptr, carver.take<T>(panels * p.K() * p.panel), carver.take<Strided<const T>>(panels)};
    }
};

// Memory for T and the gradient of V, in either layout.
template <class T> struct Scratch {
    Block<T> whole; // a block with all its columns
    T *G, *N, *dY, *scratch;
    Span<T> *spans; // the parts of a block's reflectors

    static Scratch take(const Problem<T> &p, Carver &carver) {
        const Index K = p.K();
        return {Block<T>::take(p, p.panels(), carver), carver.take<T>(K * K),      carver.take<T>(2 * K * K),
                carver.take<T>(K * p.panel),          carver.take<T>(K * p.panel), carver.take<Span<T>>(p.panels())};
    }
};

} // namespace fasth
