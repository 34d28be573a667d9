// The reflectors of one block: where products read them, and T, the triangular matrix of their product.
#pragma once

#include <cstring>

#include "layout.hpp"

// phases.cpp defines this to find out where the time goes.
#ifndef FASTH_PHASE
#define FASTH_PHASE(name)
#endif

namespace fasth {

// The entries of a block in a panel, from the first column on that it reaches. Row j has entries in columns start(j) to width;
// column c has entries in rows 0 to stop(c). Compact storage excludes the diagonal.
struct Piece {
    Index row, column, rows, width;
    bool triangular, compact;
    Index start(Index j) const { return triangular ? std::clamp<Index>(row + j + compact - column, 0, width) : 0; }
    Index stop(Index c) const { return triangular ? std::clamp<Index>(column + c + 1 - compact - row, 0, rows) : rows; }
    bool whole() const { return start(rows - 1) == 0; }
};

// V in the columns of a member, or in all.
template <class T> struct Reflectors {
    const Problem<T> &p;
    const Strided<const T> V;
    const Columns columns;
    const Index K;
    const bool column_major; // V is column-major, and read in this order
    const bool far;          // V is too large for the second-level cache, so it is prefetched

    Reflectors(const Problem<T> &p, Strided<const T> V, const Columns &columns)
        : p(p), V(V), columns(columns), K(p.K()), column_major(V.column_major() && !p.few_rows),
          far(p.r * p.d * Index(sizeof(T)) >= Index(1) << 20) {}

    // Calls action(panel, from, to) for every panel that the block reaches, in whole packets if packets are read.
    template <class Action> void for_panels(Index block, const Action &action) const {
        for (Index q = columns.first_panel(p, block); q < columns.panels; ++q)
            action(q, columns.from(p, block, q), round_up(columns.width(q), p.few_rows ? p.packet : 1));
    }

    // Prepares a block, with or without scales.
    void prepare(Block<T> &at, Index block, const T *scales) const {
        const Index kb = p.size_of(block);
        at.number = block;
        at.size = kb;
        at.scale = scales;
        at.scaled = scales && std::any_of(scales, scales + kb, [](T s) { return s != T(1); });
        for_panels(block, [&](Index q, Index from, Index to) {
            if (packed(at, q))
                pack(at, q, from, to);
            else
                at.Y[q] = {&V(block * p.k, columns.column(q) + from), V.row_stride, V.column_stride};
        });
    }

    Piece piece(Index block, Index q) const {
        const Index from = columns.from(p, block, q);
        return {block * p.k, columns.column(q) + from, p.size_of(block), columns.width(q) - from,
                p.triangular(), p.compact()};
    }

    // True if a full-size, unscaled block has all its entries in a panel: it is not at the edge of the triangle.
    bool whole(const Block<T> &at, Index q) const { return !at.scaled && at.size == K && piece(at.number, q).whole(); }
    // A block that is whole in a panel is read from V, unless packets are needed and V is not contiguous along them, or V's
    // column stride maps columns to few lines of both caches.
    bool packed(const Block<T> &at, Index q) const {
        const bool crowded = column_major && V.column_stride * Index(sizeof(T)) % 8192 == 0;
        return !whole(at, q) || crowded || (p.few_rows && (V.column_stride != 1 || columns.width(q) % p.packet != 0));
    }

    // Prefetches the block's entries in a panel.
    template <bool to_write, class U> void prefetch_panel(const Strided<U> &matrix, Index block, Index q) const {
        if (!far || q >= columns.panels || (matrix.column_stride != 1 && matrix.row_stride != 1)) return;
        const Index kb = p.size_of(block), column = columns.column(q);
        if (matrix.column_stride == 1)
            prefetch<to_write>(&matrix(block * p.k, column), kb, matrix.row_stride, columns.width(q));
        else
            prefetch<to_write>(&matrix(block * p.k, column), columns.width(q), matrix.column_stride, kb);
    }

  private:
    // Copies Y of the block in one panel, with zeros for entries that are not stored.
    void pack(const Block<T> &at, Index q, Index from, Index to) const {
        FASTH_PHASE(pack);
        const Piece piece = this->piece(at.number, q);
        T *const place = at.packed + q * K * p.panel;
        const Index down = column_major ? 1 : p.panel, along = column_major ? K : 1;
        T *const y = place + from * along;
        at.Y[q] = {y, down, along};
        const T *const source = &V(piece.row, piece.column);
        if (column_major && piece.rows == K) {
            copy_up_to<T>(piece.width, K, {source, V.column_stride}, {y, K}, [&](Index c) { return piece.stop(c); });
        } else if (V.column_stride == 1 && piece.rows == K && piece.width % p.packet == 0) {
            copy_from<T>(K, piece.width, {source, V.row_stride}, {y, p.panel}, [&](Index j) { return piece.start(j); });
        } else if (p.few_rows && V.row_stride == 1 && piece.rows == K && piece.width % p.packet == 0) {
            transpose<T>(piece.width, K, {source, V.column_stride}, {y, p.panel});
            if (!piece.whole()) copy_from<T>(K, piece.width, {y, p.panel}, {y, p.panel}, [&](Index j) { return piece.start(j); });
        } else if (V.column_stride == 1) {
            for (Index j = 0; j < K; ++j) {
                const Index start = j < piece.rows ? piece.start(j) : piece.width;
                T *const row = std::fill_n(y + j * p.panel, start, T(0));
                std::fill(std::copy(source + j * V.row_stride + start, source + j * V.row_stride + piece.width, row),
                          y + j * p.panel + (to - from), T(0));
            }
        } else {
            for (Index c = 0; c < to - from; ++c)
                for (Index j = 0; j < K; ++j)
                    y[j * down + c * along] = j < piece.rows && c < piece.width && c >= piece.start(j)
                                                  ? V(piece.row + j, piece.column + c)
                                                  : T(0);
        }
        for (Index j = 0; piece.compact && j < piece.rows; ++j)
            if (const Index c = piece.row + j - piece.column; c >= 0 && c < piece.width) y[j * down + c * along] = T(1);
        for (Index j = 0; at.scaled && j < piece.rows; ++j) // exact, and right for subnormal numbers
            for (Index c = 0; c < piece.width; ++c) y[j * down + c * along] /= at.scale[j];
    }
};

// T and the scales of blocks.
template <class T> class TFinder {
    const Problem<T> &p;
    const Reflectors<T> reflectors;
    const Scratch<T> &own;
    Block<T> at;
    const Index K;

  public:
    TFinder(const Problem<T> &p, Strided<const T> V, const Scratch<T> &own)
        : p(p), reflectors(p, V, Columns(p, 1, 0)), own(own), at(own.whole), K(p.K()) {}

    // Computes this member's share of all blocks. A barrier has to follow.
    void find_share(const Team &team, const Saved<T> &saved) {
        for (Index block = 0; block < p.blocks(); ++block)
            if (team.owns(block)) find(block, saved);
    }

  private:
    void find(Index block, const Saved<T> &saved) {
        T *const scales = saved.scales(block);
        std::fill_n(scales, K, T(1));
        reflectors.prepare(at, block, nullptr);
        form_gram();
        if (!lengths_are_safe()) {
            find_scales(scales);
            reflectors.prepare(at, block, scales);
            form_gram();
        }
        invert(saved.T_of(block));
    }

    // G = Y Yᵀ from the diagonal on, as inner products of rows if rows are whole packets.
    void form_gram() const {
        FASTH_PHASE(gram);
        const auto in_packets = [&](Index q, Index from, Index to) {
            return has_inner_products<T> && at.Y[q].column_stride == 1 && (to - from) % p.packet == 0;
        };
        Index count = 0;
        reflectors.for_panels(at.number, [&](Index q, Index from, Index to) {
            if (!in_packets(q, from, to)) return;
            const Strided<const T> y = at.Y[q];
            Span<T> *const last = count ? own.spans + count - 1 : nullptr;
            if (last && last->right + last->columns == y.data && last->right_stride == y.row_stride)
                last->columns += to - from;
            else
                own.spans[count++] = {y.data, y.row_stride, y.data, y.row_stride, to - from};
        });
        std::fill(own.G, own.G + K * K, T(0));
        if constexpr (has_inner_products<T>)
            if (count) inner_products<T>(K, K, own.spans, count, {own.G, K}, true);
        reflectors.for_panels(at.number, [&](Index q, Index from, Index to) {
            if (in_packets(q, from, to)) return;
            reflectors.template prefetch_panel<false>(reflectors.V, at.number, q + 1);
            add_gram(q, from, to);
        });
    }
    // G += Y Yᵀ in one panel. Squares of size `padding` left of the diagonal are skipped.
    void add_gram(Index q, Index from, Index to) const {
        const Matrix<const T> yt = transposed(q, from, to);
        for (Index j = 0; j < at.size; j += padding) {
            const Matrix<T> place{own.G + j * K + j, K};
            product<T>(Result::add, std::min(padding, at.size - j), K - j,
                       {to - from, yt.data + j, 1, yt.row_stride, {yt.data + j, yt.row_stride}}, {place.data, K}, place);
        }
    }
    // Yᵀ of the block in one panel from a column on, with K numbers in a row.
    Matrix<const T> transposed(Index q, Index from, Index to) const {
        const Strided<const T> y = at.Y[q];
        if (reflectors.column_major) return {y.data, y.column_stride};
        if (reflectors.packed(at, q)) {
            transpose<T>(K, p.panel, {y.data - from, y.row_stride}, {own.scratch, K});
            return {own.scratch + from * K, K};
        }
        if (y.column_stride == 1 && (to - from) % p.packet == 0)
            transpose<T>(K, to - from, {y.data, y.row_stride}, {own.scratch, K});
        else
            for (Index c = 0; c < to - from; ++c)
                for (Index j = 0; j < K; ++j) own.scratch[c * K + j] = y(j, c);
        return {own.scratch, K};
    }

    // Within these bounds no product of lengths and their inverses leaves the range of float32. NaN is not within.
    bool lengths_are_safe() const {
        for (Index j = 0; j < at.size; ++j)
            if (const T length = own.G[j * K + j]; !(length > T(1e-12) && length < T(1e12))) return false;
        return true;
    }
    // The power of two below a reflector's largest entry.
    void find_scales(T *scales) const {
        for (Index j = 0; j < at.size; ++j) {
            T largest = 0;
            reflectors.for_panels(at.number, [&](Index q, Index from, Index to) {
                for (Index c = 0; c < to - from; ++c) largest = std::max(largest, std::abs(at.Y[q](j, c)));
            });
            scales[j] = largest > 0 && std::isfinite(largest) ? std::ldexp(T(1), std::ilogb(largest)) : T(1);
        }
    }

    // T = B⁻¹: (K, K) for B = striu(G) + ½ diag(G), by squares along the diagonal, the last first. Padding rows are rows
    // of the identity. A zero reflector has T = 1 and Y = 0.
    void invert(T *block_T) const {
        FASTH_PHASE(invert);
        const T *const G = own.G;
        T diagonal[padding];
        for (Index j = K - padding; j >= 0; j -= padding) {
            for (Index i = 0; i < padding; ++i) {
                const T half = j + i < at.size ? G[(j + i) * K + j + i] / 2 : T(0);
                diagonal[i] = half == 0 ? T(1) : 1 / half;
            }
            T *const rows = block_T + j * K;
            for (Index i = 0; i < padding; ++i) std::fill_n(rows + i * K, j, T(0));
            invert_square<T>({G + j * K + j, K}, diagonal, {rows + j, K});
            const Index right = j + padding, rest = K - right; // −T_jj B_j,rest T_rest,rest
            if (rest == 0) continue;
            product<T>(Result::set, padding, rest, {rest, G + j * K + right, K, 1, {block_T + right * K + right, K}},
                       {nullptr, 0}, {own.N, rest});
            product<T>(Result::negative, padding, rest, {padding, rows + j, K, 1, {own.N, rest}, Shape::upper_left},
                       {nullptr, 0}, {rows + right, K});
        }
    }
};

} // namespace fasth
