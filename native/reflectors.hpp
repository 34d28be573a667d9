// The reflectors of one block: where products read them, and T, the triangular factor of their product.
#pragma once

#include <cmath>
#include <cstring>

#include "layout.hpp"

// phases.cpp defines this to find out where the time goes.
#ifndef FASTH_PHASE
#define FASTH_PHASE(name)
#endif

namespace fasth {

// Where a block meets a panel, from the first column on that it reaches: which entries are there. Row j has those in
// columns start(j) to width; column c has those in rows 0 to stop(c). Compact storage leaves out the diagonal.
struct Piece {
    Index row, column, rows, width;
    bool triangular, compact;
    Index start(Index j) const { return triangular ? std::clamp<Index>(row + j + compact - column, 0, width) : 0; }
    Index stop(Index c) const { return triangular ? std::clamp<Index>(column + c + 1 - compact - row, 0, rows) : rows; }
    bool whole() const { return start(rows - 1) == 0; }
};

// V, as far as it lies in some columns: those of a member, or all.
template <class T> struct Reflectors {
    const Problem &p;
    const Strided<const T> V;
    const Columns columns;
    const Index kp;
    const bool by_columns; // whether V is stored by columns, and read so
    const bool far;        // whether V is too large to be in the second-level cache when it is wanted

    Reflectors(const Problem &p, Strided<const T> V, const Columns &columns)
        : p(p), V(V), columns(columns), kp(p.padded_k()), by_columns(V.by_columns() && !p.in_rows),
          far(p.r * p.d * Index(sizeof(T)) >= Index(1) << 20) {}

    // action(panel, from, to) on every panel that the block reaches, in whole packets if these are read.
    template <class Action> void for_panels(Index block, const Action &action) const {
        for (Index q = columns.first_panel(p, block); q < columns.panels; ++q)
            action(q, columns.from(p, block, q), round_up(columns.width(q), p.in_rows ? p.packet : 1));
    }

    // A block, with the scales given, or none.
    void prepare(Block<T> &at, Index block, const T *scales) const {
        const Index kb = p.size_of(block);
        at.number = block;
        at.size = kb;
        if (scales) std::copy(scales, scales + kb, at.scale);
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
                p.triangular(), p.kind == Kind::compact};
    }

    // Whether a full block has all its entries in a panel, and as they are: not where the triangle ends, nor scaled.
    bool whole(const Block<T> &at, Index q) const { return !at.scaled && at.size == kp && piece(at.number, q).whole(); }
    // V is read as it lies where it is whole; and in packets, if these are needed; and where its columns are not so far apart
    // that they crowd a few lines of both caches.
    bool packed(const Block<T> &at, Index q) const {
        const bool crowded = by_columns && V.column_stride * Index(sizeof(T)) % 8192 == 0;
        return !whole(at, q) || crowded || (p.in_rows && (V.column_stride != 1 || columns.width(q) % p.packet != 0));
    }

    // Asks for the block's entries in a panel ahead of their use.
    template <bool to_write, class U> void prefetch_panel(const Strided<U> &of, Index block, Index q) const {
        if (!far || q >= columns.panels || (of.column_stride != 1 && of.row_stride != 1)) return;
        const Index kb = p.size_of(block), column = columns.column(q);
        if (of.column_stride == 1)
            prefetch<to_write>(&of(block * p.k, column), kb, of.row_stride, columns.width(q));
        else
            prefetch<to_write>(&of(block * p.k, column), columns.width(q), of.column_stride, kb);
    }

  private:
    // Y of the block in one panel, with zeros for whatever is not there.
    void pack(const Block<T> &at, Index q, Index from, Index to) const {
        FASTH_PHASE(pack);
        const Piece piece = this->piece(at.number, q);
        T *const place = at.packed + q * kp * p.panel;
        const Index down = by_columns ? 1 : p.panel, along = by_columns ? kp : 1;
        T *const y = place + from * along;
        at.Y[q] = {y, down, along};
        const T *const source = &V(piece.row, piece.column);
        if (by_columns && piece.rows == kp) {
            copy_up_to<T>(piece.width, kp, {source, V.column_stride}, {y, kp}, [&](Index c) { return piece.stop(c); });
        } else if (V.column_stride == 1 && piece.rows == kp && piece.width % p.packet == 0) {
            copy_from<T>(kp, piece.width, {source, V.row_stride}, {y, p.panel}, [&](Index j) { return piece.start(j); });
        } else if (p.in_rows && V.row_stride == 1 && piece.rows == kp && piece.width % p.packet == 0) {
            transpose<T>(piece.width, kp, {source, V.column_stride}, {y, p.panel});
            if (!piece.whole()) copy_from<T>(kp, piece.width, {y, p.panel}, {y, p.panel}, [&](Index j) { return piece.start(j); });
        } else if (V.column_stride == 1) {
            for (Index j = 0; j < kp; ++j) {
                const Index start = j < piece.rows ? piece.start(j) : piece.width;
                T *const row = std::fill_n(y + j * p.panel, start, T(0));
                std::fill(std::copy(source + j * V.row_stride + start, source + j * V.row_stride + piece.width, row),
                          y + j * p.panel + (to - from), T(0));
            }
        } else {
            for (Index c = 0; c < to - from; ++c)
                for (Index j = 0; j < kp; ++j)
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

// Scales and T of blocks.
template <class T> class Factors {
    const Problem &p;
    const Reflectors<T> whole;
    Scratch<T> &own;
    const Index kp;

  public:
    Factors(const Problem &p, Strided<const T> V, Scratch<T> &own)
        : p(p), whole(p, V, Columns(p, 1, 0)), own(own), kp(p.padded_k()) {}

    // A member's share of all T. The team has to meet after it.
    void find_share(const Team &team, const Kept<T> &to) const {
        for (Index block = 0; block < p.blocks(); ++block) {
            if (dealt_to(block, team.size) != team.rank) continue;
            find_gram(whole, block, own.G);
            finish(block, to);
        }
    }
    // G = Y Yᵀ from the diagonal on, of the columns given.
    void find_gram(const Reflectors<T> &columns, Index block, T *G) const {
        columns.prepare(own.whole, block, nullptr);
        form_gram(columns, G);
    }
    // From G of all columns, in own.G, to T.
    void finish(Index block, const Kept<T> &to) const {
        T *const scales = to.scales + block * p.k;
        std::fill_n(scales, p.size_of(block), T(1));
        if (!lengths_are_safe(p.size_of(block))) {
            whole.prepare(own.whole, block, nullptr);
            find_scales(scales);
            whole.prepare(own.whole, block, scales);
            form_gram(whole, own.G);
        }
        invert(p.size_of(block));
        FASTH_PHASE(keep);
        to.put_factor(block, own.factor);
    }

  private:
    // G from own.whole: inner products of rows, as long as they are in whole packets.
    void form_gram(const Reflectors<T> &columns, T *G) const {
        const auto in_packets = [&](Index q, Index from, Index to) {
            return has_inner_products<T> && own.whole.Y[q].column_stride == 1 && (to - from) % p.packet == 0;
        };
        FASTH_PHASE(gram);
        Index count = 0;
        columns.for_panels(own.whole.number, [&](Index q, Index from, Index to) {
            if (!in_packets(q, from, to)) return;
            const Strided<const T> y = own.whole.Y[q];
            Span<T> *const last = count ? own.spans + count - 1 : nullptr;
            if (last && last->right + last->columns == y.data && last->right_stride == y.row_stride)
                last->columns += to - from;
            else
                own.spans[count++] = {y.data, y.row_stride, y.data, y.row_stride, to - from};
        });
        std::fill(G, G + kp * kp, T(0));
        if constexpr (has_inner_products<T>)
            if (count) inner_products<T>(kp, kp, own.spans, count, {G, kp}, true);
        columns.for_panels(own.whole.number, [&](Index q, Index from, Index to) {
            if (in_packets(q, from, to)) return;
            columns.template prefetch_panel<false>(columns.V, own.whole.number, q + 1);
            add_gram(columns, q, from, to, G);
        });
    }
    // G += Y Yᵀ in one panel, above the diagonal, more or less: what lies left of it in steps of `padding` is left out.
    void add_gram(const Reflectors<T> &columns, Index q, Index from, Index to, T *G) const {
        const Index kb = own.whole.size;
        const Matrix<const T> yt = transposed(columns, q, from, to);
        for (Index j = 0; j < kb; j += padding) {
            const Matrix<T> place{G + j * kp + j, kp};
            product<Result::add, T>(std::min(padding, kb - j), kp - j,
                                    {to - from, yt.data + j, 1, yt.row_stride, {yt.data + j, yt.row_stride}},
                                    {place.data, kp}, place);
        }
    }
    // Yᵀ of the block in one panel from a column on, with kp numbers in a row.
    Matrix<const T> transposed(const Reflectors<T> &columns, Index q, Index from, Index to) const {
        const Strided<const T> y = own.whole.Y[q];
        if (columns.by_columns) return {y.data, y.column_stride};
        if (columns.packed(own.whole, q)) {
            transpose<T>(kp, p.panel, {y.data - from, y.row_stride}, {own.turned, kp});
            return {own.turned + from * kp, kp};
        }
        if (y.column_stride == 1 && (to - from) % p.packet == 0)
            transpose<T>(kp, to - from, {y.data, y.row_stride}, {own.turned, kp});
        else
            for (Index c = 0; c < to - from; ++c)
                for (Index j = 0; j < kp; ++j) own.turned[c * kp + j] = y(j, c);
        return {own.turned, kp};
    }

    // Within these bounds no product of lengths and their inverses leaves the range of float32. NaN is not within.
    bool lengths_are_safe(Index kb) const {
        for (Index j = 0; j < kb; ++j)
            if (const T length = own.G[j * kp + j]; !(length > T(1e-12) && length < T(1e12))) return false;
        return true;
    }
    // The power of two below a reflector's largest entry.
    void find_scales(T *scales) const {
        for (Index j = 0; j < own.whole.size; ++j) {
            T largest = 0;
            whole.for_panels(own.whole.number, [&](Index q, Index from, Index to) {
                for (Index c = 0; c < to - from; ++c) largest = std::max(largest, std::abs(own.whole.Y[q](j, c)));
            });
            scales[j] = largest > 0 && std::isfinite(largest) ? std::ldexp(T(1), std::ilogb(largest)) : T(1);
        }
    }

    // T = B⁻¹: (kp, kp) for B = striu(G) + ½ diag(G), by squares along the diagonal, the last first; rows that are only
    // there as padding are those of the identity. A zero reflector has T = 1 and Y = 0.
    void invert(Index kb) const {
        FASTH_PHASE(invert);
        const T *const G = own.G;
        T diagonal[padding];
        for (Index j = kp - padding; j >= 0; j -= padding) {
            for (Index i = 0; i < padding; ++i) {
                const T half = j + i < kb ? G[(j + i) * kp + j + i] / 2 : T(0);
                diagonal[i] = half == 0 ? T(1) : 1 / half;
            }
            T *const rows = own.factor + j * kp;
            invert_square<T>({G + j * kp + j, kp}, diagonal, {rows + j, kp});
            const Index right = j + padding, rest = kp - right; // −T_jj B_j,rest T_rest,rest
            if (rest == 0) continue;
            product<Result::set, T>(padding, rest, {rest, G + j * kp + right, kp, 1, {own.factor + right * kp + right, kp}},
                                    {nullptr, 0}, {own.N, rest});
            product<Result::negative, T>(padding, rest, {padding, rows + j, kp, 1, {own.N, rest}, Shape::upper_left},
                                         {nullptr, 0}, {rows + right, kp});
        }
    }
};

} // namespace fasth
