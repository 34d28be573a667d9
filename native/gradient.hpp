// The gradient of V, block by block.
#pragma once

#include <cstdint>

#include "reflectors.hpp"

namespace fasth {

template <class T> class Gradient {
    const Problem<T> &p;
    const Reflectors<T> &reflectors;
    const Scratch<T> &own;
    const Strided<T> dV;
    const Index K, stride;

  public:
    Gradient(const Problem<T> &p, const Reflectors<T> &reflectors, const Scratch<T> &own, Strided<T> dV)
        : p(p), reflectors(reflectors), own(own), dV(dV), K(p.K()), stride(p.lane_stride()) {}

    // Begins a block's gradient from Z and R, both (lanes, K). The team shares out the zeros.
    void begin(const Block<T> &at, const T *Z, const T *R, const Team &team) const {
        antisymmetric_half(p.first_row(at.number), Z, R);
        if (p.fills()) clear(at.number * p.k, at.number * p.k + at.size, p.first_read(at.number), team);
    }

    // Writes ∂Y = N Y − Zᵀ g − Rᵀ after of one panel to dV.
    void of_panel(const Block<T> &at, Index q, Index from, Index to, const T *Z, const T *R, const T *g, const T *after) const {
        FASTH_PHASE(gradient);
        if (!streams()) reflectors.template prefetch_panel<true>(dV, at.number, q + 1);
        if (p.few_rows && !dV.column_major())
            row_major(at, q, from, to, Z, R, g, after);
        else
            transposed(at, q, from, Z, R, g, after, p.few_rows ? 1 : stride, p.few_rows ? to : 1);
    }

    // Writes zeros for the reflectors beyond those used.
    void finish(const Team &team) const {
        if (p.fills()) clear(p.reflectors(), p.r, p.d, team);
        fence();
    }

  private:
    // For few rows: g and the rows after the block are read in packets, as Y is.
    void row_major(const Block<T> &at, Index q, Index from, Index to, const T *Z, const T *R, const T *g, const T *after) const {
        const Strided<const T> y = at.Y[q];
        const Term<T> terms[3] = {{at.size, own.N, 1, K, {y.data, y.row_stride}, p.transpose ? Shape::upper_left : Shape::lower_left},
                                  {p.m, Z, 1, K, {g + from, to}},
                                  {p.m, R, 1, K, {after + from, to}}};
        const Piece piece = reflectors.piece(at.number, q);
        const auto into = [&](Result result, Matrix<T> place) {
            product<T, widest_tile>(result, at.size, to - from, terms, {place.data, place.row_stride}, place);
        };
        if (dV.column_stride == 1 && reflectors.whole(at, q) && piece.width % p.packet == 0)
            return give({&dV(piece.row, piece.column), dV.row_stride}, into);
        into(Result::negative, {own.scratch, p.panel});
        for (Index j = 0; at.scaled && j < at.size; ++j)
            for (Index c = 0; c < to - from; ++c) own.scratch[j * p.panel + c] /= at.scale[j];
        store_scratch(piece);
    }
    // ∂Yᵀ: N, Z and R are read in packets. Entries of g are `along` apart in a row, and `down` apart in a column.
    void transposed(const Block<T> &at, Index q, Index from, const T *Z, const T *R, const T *g, const T *after, Index along,
                    Index down) const {
        const Index kb = at.size, first = p.first_row(at.number), start = from * along + first * down;
        const Strided<const T> y = at.Y[q];
        const Term<T> terms[3] = {{kb, y.data, y.column_stride, y.row_stride, {own.N, K},
                                   p.transpose ? Shape::strictly_lower_right : Shape::strictly_upper_right},
                                  {p.m - first, g + start, along, down, {Z + first * K, K}},
                                  {p.m - first, after + start, along, down, {R + first * K, K}}};
        const Piece piece = reflectors.piece(at.number, q);
        const auto into = [&](Result result, Matrix<T> place) {
            product<T>(result, piece.width, K, terms, {place.data, place.row_stride}, place);
        };
        if (dV.column_major() && reflectors.whole(at, q)) return give({&dV(piece.row, piece.column), dV.column_stride}, into);
        into(Result::negative, {own.dY, K});
        for (Index c = 0; at.scaled && !p.is_part && c < piece.width; ++c) // sums of parts are scaled when all are there
            for (Index j = 0; j < kb; ++j) own.dY[c * K + j] /= at.scale[j];
        if (dV.column_stride == 1)
            store_row_major(piece, reflectors.whole(at, q) && piece.width % p.packet == 0);
        else
            store_column_major(piece);
    }
    // Calls into(result, place) for a place in dV.
    template <class Into> void give(Matrix<T> place, const Into &into) const {
        into(p.adds ? Result::subtract : streams() ? Result::negative_streamed : Result::negative, place);
    }

    // Writes own.dY to its place in a row-major dV.
    void store_row_major(const Piece &at, bool whole_packets) const {
        if (whole_packets && !p.adds) { // the usual case
            const bool streamed = streams() && at.column % p.packet == 0;
            for (Index j = 0; j < at.rows; j += p.packet)
                for (Index c = 0; c < at.width; c += p.packet) {
                    Square<T> square;
                    load_transposed(own.dY + c * K + j, K, square);
                    T *const place = &dV(at.row + j, at.column + c);
#pragma GCC unroll 16
                    for (Index l = 0; l < packet_size<T>; ++l)
                        streamed ? stream(place + l * dV.row_stride, square.packet[l])
                                 : Eigen::internal::pstoreu(place + l * dV.row_stride, square.packet[l]);
                }
            return;
        }
        transpose<T>(p.panel, K, {own.dY, K}, {own.scratch, p.panel});
        store_scratch(at);
    }
    // Writes own.scratch, (rows, panel), to its place in dV.
    void store_scratch(const Piece &at) const {
        if (p.fills() && dV.column_stride == 1 && at.width % p.packet == 0)
            return copy_from<T>(at.rows, at.width, {own.scratch, p.panel}, {&dV(at.row, at.column), dV.row_stride},
                                [&](Index j) { return at.start(j); });
        for (Index j = 0; j < at.rows; ++j) {
            const T *const row = own.scratch + j * p.panel;
            const Index start = at.start(j);
            for (Index c = 0; c < (p.fills() ? start : 0); ++c) dV(at.row + j, at.column + c) = T(0);
            if (p.adds || dV.column_stride != 1)
                for (Index c = start; c < at.width; ++c) {
                    T &place = dV(at.row + j, at.column + c);
                    place = row[c] + (p.adds ? place : T(0));
                }
            else if (start < at.width)
                std::memcpy(&dV(at.row + j, at.column + start), row + start, sizeof(T) * std::size_t(at.width - start));
        }
    }
    void store_column_major(const Piece &at) const {
        const bool at_once = dV.row_stride == 1 && !p.adds;
        for (Index c = 0; c < at.width; ++c) {
            const Index stop = at.stop(c);
            if (at_once && stop) std::memcpy(&dV(at.row, at.column + c), own.dY + c * K, sizeof(T) * std::size_t(stop));
            for (Index j = at_once ? stop : 0; j < stop; ++j) {
                T &place = dV(at.row + j, at.column + c);
                place = own.dY[c * K + j] + (p.adds ? place : T(0));
            }
            for (Index j = stop; j < (p.fills() ? at.rows : 0); ++j) dV(at.row + j, at.column + c) = T(0);
        }
    }

    // True if the gradient of V is too large to stay in the caches until it is read, and its alignment allows streaming
    // stores of whole packets of a panel (row-major) or of a block (column-major).
    bool streams() const {
        constexpr Index line = 64, size = sizeof(T);
        const bool by_rows = dV.column_stride == 1 && dV.row_stride * size % line == 0;
        const bool by_columns = dV.row_stride == 1 && p.k * size % line == 0 && dV.column_stride * size % line == 0;
        return reflectors.far && !p.is_part && (by_rows || by_columns) &&
               reinterpret_cast<std::uintptr_t>(dV.data) % line == 0;
    }

    // Writes zeros in dV: rows `from` to `to`, columns before `end`; the members share them out.
    void clear(Index from, Index to, Index end, const Team &team) const {
        FASTH_PHASE(clear);
        const auto fill = [&](T *start, Index count) {
            const Index bytes = packet_size<T> * Index(sizeof(T));
            if (streams() && count % packet_size<T> == 0 && reinterpret_cast<std::uintptr_t>(start) % bytes == 0)
                for (Index c = 0; c < count; c += packet_size<T>) stream(start + c, Eigen::internal::pset1<Packet<T>>(T(0)));
            else
                std::memset(start, 0, sizeof(T) * std::size_t(count));
        };
        if (dV.column_stride == 1)
            for (Index i = from + team.rank; i < to; i += team.size) fill(&dV(i, 0), end);
        else if (dV.row_stride == 1)
            for (Index c = team.rank; c < (from < to ? end : 0); c += team.size) fill(&dV(from, c), to - from);
        else
            for (Index i = from + team.rank; i < to; i += team.size)
                for (Index c = 0; c < end; ++c) dV(i, c) = T(0);
    }
    // −Nᵀ = striu(M − Mᵀ) with M = ZᵀR for x Qᵀ, stril for x Q.
    void antisymmetric_half(Index first, const T *Z, const T *R) const {
        FASTH_PHASE(antisymmetric);
        T *const N = own.N, *const Mt = own.N + K * K;
        product<T>(Result::set, K, K, {p.m - first, Z + first * K, 1, K, {R + first * K, K}}, {nullptr, 0}, {N, K});
        transpose<T>(K, K, {N, K}, {Mt, K});
        for (Index i = 0; i < K; ++i)
            for (Index j = 0; j < K; ++j) {
                const T difference = N[i * K + j] - Mt[i * K + j];
                N[i * K + j] = (p.transpose ? j < i : j > i) ? difference : T(0);
            }
    }
};

} // namespace fasth
