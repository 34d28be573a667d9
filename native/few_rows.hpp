// x Qᵀ and its gradients for few rows, which stay row-major; the members of a team share out the rows.
//
// Rows are independent, so each member applies all blocks to its rows without a barrier. Only the gradient of V is a sum over
// all rows: the members share out its blocks after the last block.
#pragma once

#include "gradient.hpp"

namespace fasth {

// One member's part of the work on one matrix. Panels have the rows of all members: (lanes, columns of the panel).
template <class T> class FewRows {
  public:
    // For backward: the output; the gradient before every block but the first to act, and R; the gradient of x.
    struct Shared {
        T *rows, *output, *result, *gradients, *R;
    };
    struct Own : Scratch<T> {
        Block<T> at;
        T *S, *Z;
        T **current; // the rows of each panel now
    };
    static Shared take_shared(const Problem<T> &p, int, bool back, Carver &carver) {
        const Index size = p.padded_d() * p.lanes(), before_last = std::max<Index>(p.blocks() - 1, 0);
        return {carver.take<T>(size), carver.take<T>(back * size), carver.take<T>(back * size),
                carver.take<T>(back * before_last * size), carver.take<T>(back * p.blocks() * p.lanes() * p.K())};
    }
    static Own take_own(const Problem<T> &p, int, bool, Carver &carver) {
        const auto small = [&] { return carver.take<T>(p.lanes() * p.K()); };
        return {Scratch<T>::take(p, carver), Block<T>::take(p, p.panels(), carver), small(), small(),
                carver.take<T *>(p.panels())};
    }

    FewRows(const Problem<T> &p, Team &team, Strided<const T> V, const Shared &shared, const Own &own, const Saved<T> &saved)
        : p(p), team(team), shared(shared), own(own), at(own.at), saved(saved), reflectors(p, V, Columns(p, 1, 0)),
          K(p.K()), first(row_of(team.rank)), rows(row_of(team.rank + 1) - first) {}

    void load(Strided<const T> source, int set = 0) {
        for_panels([&](Index q, Index column, Index width, Index stride) {
            FASTH_PHASE(rows);
            T *const place = panel(set == 0 ? shared.rows : shared.output, q);
            if (set == 0) own.current[q] = place;
            for (Index i = first; i < first + rows; ++i) {
                T *const row = place + i * stride;
                const Index count = i < p.m ? width : 0;
                if (source.column_stride == 1 && count)
                    std::memcpy(row, &source(i, column), sizeof(T) * std::size_t(count));
                else
                    for (Index c = 0; c < count; ++c) row[c] = source(i, column + c);
                std::fill(row + count, row + stride, T(0));
            }
        });
    }
    void store(Strided<T> target) const {
        for_panels([&](Index q, Index column, Index width, Index stride) {
            FASTH_PHASE(rows);
            for (Index i = first; i < std::min(first + rows, p.m); ++i)
                std::memcpy(&target(i, column), own.current[q] + i * stride, sizeof(T) * std::size_t(width));
        });
    }
    // Loads the rows of another product, each column times its entry of the diagonal; columns without an entry are zero.
    void load_scaled(const FewRows &from, const Diagonal<T> &diagonal) {
        for_panels([&](Index q, Index column, Index width, Index stride) {
            own.current[q] = panel(shared.rows, q);
            const Index count = std::clamp<Index>(diagonal.count - column, 0, width);
            T entries[widest_panel];
            for (Index c = 0; c < count; ++c) entries[c] = diagonal.entry(column + c);
            for (Index i = first; i < first + rows; ++i) {
                T *const row = own.current[q] + i * stride;
                const T *const source = count ? from.own.current[q] + i * from.stride_of(q) : nullptr;
                for (Index c = 0; c < count; ++c) row[c] = source[c] * entries[c];
                std::fill(row + count, row + stride, T(0));
            }
        });
    }
    void add(const T *bias) {
        for_panels([&](Index q, Index column, Index width, Index stride) {
            T *const place = panel(shared.rows, q);
            for (Index i = first; i < first + rows; ++i)
                for (Index c = 0; c < width; ++c) place[i * stride + c] = own.current[q][i * stride + c] + bias[column + c];
            own.current[q] = place;
        });
    }
    // Sums over the rows that were loaded from `source`. The members share out the columns.
    void sum_columns(Strided<const T> source, T *sums) const {
        sum_share(p.d, [&](Index i, Index q, Index c) { return source(i, q * p.panel + c); },
                  [&](Index c, T sum) { sums[c] = sum; });
    }
    // The gradient of sigma in load_scaled: this product's second set of rows times the other's rows.
    void gradient_of_sigma(const FewRows &other, const Diagonal<T> &diagonal, T *gradient) const {
        team.barrier();
        sum_share(diagonal.count,
                  [&](Index i, Index q, Index c) {
                      return panel(shared.output, q)[i * stride_of(q) + c] * other.own.current[q][i * other.stride_of(q) + c];
                  },
                  [&](Index c, T sum) { gradient[c] = sum * diagonal.sign(c); });
    }

    // Multiplies the rows by Qᵀ, or by Q if p.transpose.
    void forward() {
        for (Index step = 0; step < p.blocks(); ++step) {
            const Index block = p.block_at(step, p.transpose);
            const bool saves = p.has_A && step + 1 < p.blocks();
            T *const Z = saved.Z ? saved.Z_of(block) : own.Z;
            multiply_by_T(block, p.transpose, Z);
            T *const after = saves ? saved.A_at(p.place(block)) : shared.rows;
            reflectors.for_panels(block, [&](Index q, Index from, Index to) { update(q, from, to, Z, panel(after, q)); });
        }
    }

    // Turns the rows from the gradient of the output into the gradient of x, and stores it if dx has data. Computes the
    // gradient of V if dV has data; this needs Z, A, and the output in the second set of rows.
    void backward(Strided<T> dx, Strided<T> dV) {
        const bool ascending = !p.transpose;
        for (Index step = 0; step < p.blocks(); ++step) {
            const Index block = p.block_at(step, ascending);
            T *const R = dV.data ? R_of(block) : own.Z;
            multiply_by_T(block, ascending, R);
            const Index next = step + 1 < p.blocks() ? p.block_at(step + 1, ascending) : -1;
            const Index next_panel = next < 0 ? reflectors.columns.panels : reflectors.columns.first_panel(p, next);
            T *const result = dV.data ? shared.result : shared.rows;
            reflectors.for_panels(block, [&](Index q, Index from, Index to) {
                update(q, from, to, R, dV.data && q >= next_panel ? gradient_before(next, q) : panel(result, q));
            });
        }
        if (dx.data) store(dx);
        if (dV.data) find_gradient(dV);
    }

  private:
    const Problem<T> &p;
    Team &team;
    const Shared &shared;
    const Own &own;
    Block<T> at;
    const Saved<T> saved;
    const Reflectors<T> reflectors; // all columns
    const Index K, first, rows;    // this member's rows, in whole tiles

    // Each member has whole tiles of rows, as evenly as possible.
    Index row_of(int rank) const { return p.lanes() / inner_rows * rank / team.size * inner_rows; }
    T *panel(T *all, Index q) const { return all + q * p.panel * p.lanes(); }
    T *gradient_before(Index block, Index q) const {
        return panel(shared.gradients + p.place(block) * p.padded_d() * p.lanes(), q);
    }
    T *R_of(Index block) const { return shared.R + block * p.lanes() * K; }
    // The stride of rows in a panel: its number of columns, rounded up to whole packets.
    Index stride_of(Index q) const { return round_up(reflectors.columns.width(q), p.packet); }
    // Calls action(panel, first column, number of columns, stride of rows) for every panel.
    template <class Action> void for_panels(const Action &action) const {
        for (Index q = 0; q < reflectors.columns.panels; ++q)
            action(q, q * p.panel, reflectors.columns.width(q), stride_of(q));
    }
    // Calls put(column, Σ entry(row, panel, column in it)) over all rows, for this member's panels of the first columns.
    template <class Entry, class Put> void sum_share(Index columns, const Entry &entry, const Put &put) const {
        for (Index q = 0; q * p.panel < columns; ++q) {
            if (!team.owns(q)) continue;
            const Index width = std::min(p.panel, columns - q * p.panel);
            T sum[widest_panel] = {};
            for (Index i = 0; i < p.m; ++i)
                for (Index c = 0; c < width; ++c) sum[c] += entry(i, q, c);
            for (Index c = 0; c < width; ++c) put(q * p.panel + c, sum[c]);
        }
    }

    // Z = rows · Yᵀ T for a block, which has to be prepared, or with Tᵀ if not `upper`.
    void multiply_by_T(Index block, bool upper, T *Z) {
        reflectors.prepare(at, block, saved.scales(block));
        {
            FASTH_PHASE(S);
            Index count = 0;
            reflectors.for_panels(block, [&](Index q, Index from, Index to) {
                const Strided<const T> y = at.Y[q];
                own.spans[count++] = {own.current[q] + first * to + from, to, y.data, y.row_stride, to - from};
            });
            inner_products<T>(rows, K, own.spans, count, {own.S, K});
        }
        FASTH_PHASE(Z);
        const T *block_T = saved.T_of(block);
        if (!upper) {
            transpose<T>(K, K, {block_T, K}, {own.N, K});
            block_T = own.N;
        }
        product<T>(Result::set, rows, K, {K, own.S, K, 1, {block_T, K}}, {nullptr, 0}, {Z + first * K, K});
    }
    // after = rows − Z Y in one panel, on the columns that the block reaches.
    void update(Index q, Index from, Index to, const T *Z, T *after) {
        FASTH_PHASE(update);
        const Strided<const T> y = at.Y[q];
        const T *const before = own.current[q] + first * to;
        T *const place = after + first * to;
        product<T, widest_tile>(Result::subtract, rows, to - from, {at.size, Z + first * K, K, 1, {y.data, y.row_stride}},
                                {before + from, to}, {place + from, to});
        if (from && before != place) copy<T>(rows, from, {before, to}, {place, to});
        own.current[q] = after;
    }

    // The gradient of V: members share out blocks, or panels if blocks are few.
    void find_gradient(Strided<T> dV) {
        {
            FASTH_PHASE(barrier);
            team.barrier();
        }
        // The gradient before a block is the first set of rows where no other block acted on it.
        const auto before = [&](Index block, Index q) {
            const bool untouched = p.acts_last(block) || (p.transpose && q < reflectors.columns.first_panel(p, block + 1));
            return untouched ? panel(shared.rows, q) : gradient_before(block, q);
        };
        const Gradient<T> gradient(p, reflectors, own, dV);
        const bool by_blocks = p.blocks() >= 2 * team.size;
        const Team nobody = team.alone();
        for (Index block = 0; block < p.blocks(); ++block) {
            if (by_blocks && !team.owns(block)) continue;
            const T *const Z = saved.Z_of(block), *const R = R_of(block);
            T *const after = p.acts_last(block) ? shared.output : saved.A_at(p.place(block));
            reflectors.prepare(at, block, saved.scales(block));
            gradient.begin(at, Z, R, by_blocks ? nobody : team);
            reflectors.for_panels(block, [&](Index q, Index from, Index to) {
                if (!by_blocks && !team.owns(q)) return;
                gradient.of_panel(at, q, from, to, Z, R, before(block, q), panel(after, q));
            });
        }
        gradient.finish(team);
    }
};

} // namespace fasth
