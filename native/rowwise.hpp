// x Qᵀ and its gradients with rows of x as they come, which the members of a team share out.
//
// Rows do not depend on each other, so a member takes its own through all blocks and meets nobody. Only the gradient of V
// is a sum over all rows: when all are through, the members share out its blocks.
#pragma once

#include "gradient.hpp"

namespace fasth {

// The memory of a team. Panels hold the rows of all members, so many columns of them: (lanes, columns of the panel).
template <class T> struct RowSpace {
    T *factors;          // scales and T of every block, where they are not kept
    T *rows;             // (panels)
    // For the way back: the output; the gradient before every block but the first to act, and R; the gradient of x.
    T *output, *gradients, *R, *result;

    struct Own : Scratch<T> { // a member's
        Block<T> at;
        T *S, *Z;
        T **now; // where the rows of each panel are at present
        Index *offsets, *gradient_offsets;
    };

    RowSpace(const Problem &p, int, bool back, Arena &arena) {
        const Index size = round_up(p.d, p.packet) * p.lanes();
        factors = arena.take<T>(Kept<T>::size(p, 1));
        rows = arena.take<T>(size);
        for (T **place : {&output, &result}) *place = arena.take<T>(back ? size : 0);
        gradients = arena.take<T>(back ? RowStates<T>::size(p) : 0);
        R = arena.take<T>(back ? p.blocks() * p.lanes() * p.padded_k() : 0);
    }
    static Own own(const Problem &p, int, bool, Arena &arena) {
        Own own;
        static_cast<Scratch<T> &>(own) = Scratch<T>::take(p, arena);
        own.at = Block<T>::take(p, p.panels(), arena);
        for (T **place : {&own.S, &own.Z}) *place = arena.take<T>(p.lanes() * p.padded_k());
        own.now = arena.take<T *>(p.panels());
        for (Index **place : {&own.offsets, &own.gradient_offsets}) *place = arena.take<Index>(p.blocks());
        return own;
    }
};

// One member's part of the work on one matrix of the batch.
template <class T> class Rowwise {
    const Problem &p;
    Team &team;
    const Strided<const T> V;
    const RowSpace<T> &shared;
    typename RowSpace<T>::Own own;
    const Kept<T> kept;
    const Reflectors<T> reflectors; // all columns
    const Index kp, first, rows;    // this member's rows, in whole tiles

  public:
    using Space = RowSpace<T>;

    // Without memory for what is kept, T has a place in that of the team.
    Rowwise(const Problem &p, Team &team, Strided<const T> V, const RowSpace<T> &shared,
            const typename RowSpace<T>::Own &own, const Kept<T> &kept)
        : p(p), team(team), V(V), shared(shared), own(own), kept(kept.scales ? kept : Kept<T>(p, shared.factors, 1)),
          reflectors(p, V, Columns(p, 1, 0)), kp(p.padded_k()), first(row_of(team.rank)),
          rows(row_of(team.rank + 1) - first) {
        std::fill(own.factor, own.factor + kp * kp, T(0));
    }

    // This member's share of all T. The team has to meet after it.
    void find_factors() { Factors<T>(p, V, own).find_share(team, kept); }
    bool finds_factors() const { return false; }

    void load(Strided<const T> source, int set = 0) {
        for_panels([&](Index q, Index column, Index width, Index stride) {
            FASTH_PHASE(rows);
            T *const place = panel(set == 0 ? shared.rows : shared.output, q);
            if (set == 0) own.now[q] = place;
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
    // The rows of another product, each entry times its factor, and zeros where that has none.
    void load_scaled(const Rowwise &from, const Diagonal<T> &factors) {
        for_panels([&](Index q, Index column, Index width, Index stride) {
            own.now[q] = panel(shared.rows, q);
            const Index count = std::clamp<Index>(factors.count - column, 0, width);
            T by[widest_panel];
            for (Index c = 0; c < count; ++c) by[c] = factors.sigma[column + c] * factors.sign(column + c);
            for (Index i = first; i < first + rows; ++i) {
                T *const row = own.now[q] + i * stride;
                const T *const source = count ? from.own.now[q] + i * from.stride_of(q) : nullptr;
                for (Index c = 0; c < count; ++c) row[c] = source[c] * by[c];
                std::fill(row + count, row + stride, T(0));
            }
        });
    }
    // Something added to every row.
    void add(const T *bias) {
        for_panels([&](Index q, Index column, Index width, Index stride) {
            T *const place = panel(shared.rows, q);
            for (Index i = first; i < first + rows; ++i)
                for (Index c = 0; c < width; ++c) place[i * stride + c] = own.now[q][i * stride + c] + bias[column + c];
            own.now[q] = place;
        });
    }
    // The sums of the rows, which were loaded from `source`. The members share out the columns.
    void sum_columns(Strided<const T> source, T *sums) const {
        sum_share(p.d, sums, [&](Index i, Index q, Index c) { return source(i, q * p.panel + c); });
    }
    // The gradient of the factors in load_scaled: this product's second set of rows times that of the other's rows.
    void gradient_of_factors(const Rowwise &of, const Diagonal<T> &factors, T *gradient) const {
        team.meet();
        sum_share(factors.count, gradient, [&](Index i, Index q, Index c) {
            return panel(shared.output, q)[i * stride_of(q) + c] * of.own.now[q][i * of.stride_of(q) + c];
        });
        for (Index c = 0; c < factors.count; ++c)
            if (dealt_to(c / p.panel, team.size) == team.rank) gradient[c] *= factors.sign(c);
    }
    void store(Strided<T> target) const {
        for_panels([&](Index q, Index column, Index width, Index stride) {
            FASTH_PHASE(rows);
            for (Index i = first; i < std::min(first + rows, p.m); ++i) {
                const T *const row = own.now[q] + i * stride;
                if (target.column_stride == 1)
                    std::memcpy(&target(i, column), row, sizeof(T) * std::size_t(width));
                else
                    for (Index c = 0; c < width; ++c) target(i, column + c) = row[c];
            }
        });
    }

    // The rows times Qᵀ, or Q if p.transpose.
    void forward() {
        const RowStates<T> states(p, kept.states, own.offsets);
        for (Index step = 0; step < p.blocks(); ++step) {
            const Index block = p.block_at(step, p.transpose);
            const bool keeps = kept.Z && step + 1 < p.blocks();
            T *const Z = kept.Z ? kept.Z_of(block) : own.Z;
            multiply_by(block, p.transpose, Z);
            reflectors.for_panels(block, [&](Index q, Index from, Index to) {
                update(q, from, to, Z, keeps ? states.of(block, q) : panel(shared.rows, q));
            });
        }
    }

    // The rows, a gradient of the output, become that of x, which goes into its place; the gradient of V, if wanted (data),
    // needs the output in the second set of rows, and what was kept.
    void backward(Strided<T> dx, Strided<T> dV) {
        const bool way = !p.transpose;
        const RowStates<T> gradients(p, shared.gradients, own.gradient_offsets);
        for (Index step = 0; step < p.blocks(); ++step) {
            const Index block = p.block_at(step, way);
            T *const R = dV.data ? shared.R + block * p.lanes() * kp : own.Z;
            multiply_by(block, way, R);
            const Index next = step + 1 < p.blocks() ? p.block_at(step + 1, way) : -1;
            const Index next_panel = next < 0 ? reflectors.columns.panels : reflectors.columns.first_panel(p, next);
            reflectors.for_panels(block, [&](Index q, Index from, Index to) {
                T *const result = panel(dV.data ? shared.result : shared.rows, q);
                update(q, from, to, R, dV.data && q >= next_panel ? gradients.of(next, q) : result);
            });
        }
        if (dx.data) store(dx);
        if (dV.data) find_gradient(dV, gradients);
    }

  private:
    // Members have whole tiles of rows, as evenly as can be.
    Index row_of(int rank) const { return p.lanes() / inner_rows * rank / team.size * inner_rows; }
    T *panel(T *all, Index q) const { return all + q * p.panel * p.lanes(); }
    // How far apart rows are in a panel: so many columns, in whole packets.
    Index stride_of(Index q) const { return round_up(reflectors.columns.width(q), p.packet); }
    // action(panel, its first column, how many, how far apart rows are) on every panel.
    template <class Action> void for_panels(const Action &action) const {
        for (Index q = 0; q < reflectors.columns.panels; ++q)
            action(q, q * p.panel, reflectors.columns.width(q), stride_of(q));
    }
    // sums[c] = Σ entry(row, panel, column in it) over all rows, for this member's panels of the first so many columns.
    template <class Entry> void sum_share(Index columns, T *sums, const Entry &entry) const {
        for (Index q = 0; q * p.panel < columns; ++q) {
            if (dealt_to(q, team.size) != team.rank) continue;
            const Index width = std::min(p.panel, columns - q * p.panel);
            T sum[widest_panel] = {};
            for (Index i = 0; i < p.m; ++i)
                for (Index c = 0; c < width; ++c) sum[c] += entry(i, q, c);
            std::copy(sum, sum + width, sums + q * p.panel);
        }
    }

    // Z = rows · Yᵀ F for a block, which is prepared for it, with F = T if `upper`, else Tᵀ.
    void multiply_by(Index block, bool upper, T *Z) {
        reflectors.prepare(own.at, block, kept.scales + block * p.k);
        {
            FASTH_PHASE(S);
            Index count = 0;
            reflectors.for_panels(block, [&](Index q, Index from, Index to) {
                const Strided<const T> y = own.at.Y[q];
                own.spans[count++] = {own.now[q] + first * to + from, to, y.data, y.row_stride, to - from};
            });
            if constexpr (has_inner_products<T>) inner_products<T>(rows, kp, own.spans, count, {own.S, kp});
        }
        FASTH_PHASE(factor);
        kept.get_factor(block, own.factor);
        const T *factor = own.factor;
        if (!upper) {
            transpose<T>(kp, kp, {own.factor, kp}, {own.N, kp});
            factor = own.N;
        }
        product<Result::set, T>(rows, kp, {kp, own.S, kp, 1, {factor, kp}}, {nullptr, 0}, {Z + first * kp, kp});
    }
    // after = rows − Z Y in one panel, on the columns that the block reaches.
    void update(Index q, Index from, Index to, const T *Z, T *after) {
        FASTH_PHASE(update);
        const Strided<const T> y = own.at.Y[q];
        const T *const before = own.now[q] + first * to;
        T *const place = after + first * to;
        product<Result::subtract, T, widest_tile>(rows, to - from, {own.at.size, Z + first * kp, kp, 1, {y.data, y.row_stride}},
                                                  {before + from, to}, {place + from, to});
        if (from && before != place) copy<T>(rows, from, {before, to}, {place, to});
        own.now[q] = after;
    }

    // The gradient of V, by blocks, or where these are few by panels.
    void find_gradient(Strided<T> dV, const RowStates<T> &gradients) {
        {
            FASTH_PHASE(meet);
            team.meet();
        }
        const RowStates<T> states(p, kept.states, own.offsets);
        const Index acts_last = p.blocks() ? p.block_at(p.blocks() - 1, p.transpose) : -1;
        // The gradient before a block is the first set of rows where no other block acted on it.
        const auto before = [&](Index block, Index q) {
            const bool untouched = block == acts_last || (p.transpose && q < reflectors.columns.first_panel(p, block + 1));
            return untouched ? panel(shared.rows, q) : gradients.of(block, q);
        };
        const Gradient<T> gradient(p, reflectors, own, dV);
        const bool by_blocks = p.blocks() >= 2 * team.size;
        const Team nobody = team.alone();
        for (Index block = 0; block < p.blocks(); ++block) {
            if (by_blocks && dealt_to(block, team.size) != team.rank) continue;
            const T *const Z = kept.Z_of(block), *const R = shared.R + block * p.lanes() * kp;
            reflectors.prepare(own.at, block, kept.scales + block * p.k);
            gradient.begin(own.at, Z, R, by_blocks ? nobody : team);
            reflectors.for_panels(block, [&](Index q, Index from, Index to) {
                if (!by_blocks && dealt_to(q, team.size) != team.rank) return;
                gradient.of_panel(own.at, q, from, to, Z, R, before(block, q),
                                  block == acts_last ? panel(shared.output, q) : states.of(block, q));
            });
        }
        gradient.finish(team);
    }
};

} // namespace fasth
