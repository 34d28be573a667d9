// One call of the core: every matrix of a batch, on as many threads as pay, and what is kept from the way forward for the
// way back.
#pragma once

#include <optional>
#include <vector>

#include "plan.hpp"
#include "reflections.hpp"
#include "rowwise.hpp"

namespace fasth {

template <class T> struct Batch { // (batch, rows, columns) anywhere in memory, or nothing
    T *data;
    Index batch_stride, row_stride, column_stride;
    Strided<T> operator[](Index b) const { return {data ? data + b * batch_stride : nullptr, row_stride, column_stride}; }
};
template <class T> Batch<T> in_rows(T *data, Index rows, Index columns) { return {data, rows * columns, columns, 1}; }
template <class T> Strided<T> from_row(Strided<T> rows, Index first) {
    if (rows.data) rows.data += first * rows.row_stride;
    return rows;
}

// The same problem for rows as they come.
inline Problem in_rows(Problem p) {
    p.in_rows = true;
    p.of_identity = false; // a hint, of no use here
    p.panel = widest_panel;
    return p;
}
// They pay where they would not fill registers side by side; and, if V is stored by rows, where it stays in the second-level
// cache of every member, since every member reads all of it.
template <class T> bool rows_pay(const Problem &p, bool by_rows, int members) {
    const Index bytes = p.reflectors() * p.d * Index(sizeof(T)) / (p.triangular() ? 2 : 1);
    const bool stays = by_rows && bytes <= Index(768) << 10;
    return has_inner_products<T> && p.m <= (stays ? p.packet * members : p.packet / 2);
}

// What a team needs for one problem, in either layout.
template <class T> struct Bench {
    template <class M> struct Of {
        typename M::Space shared;
        std::vector<typename M::Space::Own> own;
        Of(const Problem &p, int members, bool back, Arena &arena) : shared(p, members, back, arena) {
            for (int i = 0; i < members; ++i) own.push_back(M::Space::own(p, members, back, arena));
        }
        M member(const Problem &p, Team &team, Strided<const T> V, const Kept<T> &kept) const {
            return {p, team, V, shared, own[std::size_t(team.rank)], kept};
        }
    };
    std::optional<Of<Member<T>>> columns;
    std::optional<Of<Rowwise<T>>> rows;

    Bench(const Problem &p, int members, bool back, Arena &arena) {
        if (p.in_rows)
            rows.emplace(p, members, back, arena);
        else
            columns.emplace(p, members, back, arena);
    }
    // use(either), the one of them that is there.
    template <class Use> void with(const Use &use) const { rows ? use(*rows) : use(*columns); }
};

// What is kept is one of: nothing; scales and T; these with Z; or also with the rows after every block, as they come, or
// else for so many members.
constexpr int rows_kept = -3, Z_kept = -2, nothing_kept = -1, factors_kept = 0;
inline bool has_states(int kept) { return kept == rows_kept || kept > factors_kept; }
template <class T> auto most_kept(int kept) {
    using Most = typename Kept<T>::Most;
    return has_states(kept) ? Most::states : kept == Z_kept ? Most::Z : Most::factors;
}

// To fetch many states from memory takes longer than to run the output back by Z.
template <class T> bool states_pay(Index count) { return count * Index(sizeof(T)) <= Index(8) << 20; }

// The problem is the one that this is kept of: in rows if these are kept.
template <class T> Index kept_size(const Problem &p, int kept) {
    return kept == nothing_kept ? 0 : Kept<T>::size(p, std::max(kept, 1), most_kept<T>(kept));
}
// What a team of another size than planned for keeps.
inline int kept_by(int members, int planned) {
    return members == planned || planned < 0 ? planned : factors_kept;
}
template <class T> Kept<T> kept_part(const Problem &p, T *memory, int members, int kept) {
    if (!memory || kept == nothing_kept) return {};
    return {p, memory, members, kept > factors_kept && kept != members ? Kept<T>::Most::factors : most_kept<T>(kept)};
}

// Where a team that shares out rows with others has its sum of a gradient of V: the first in its place, the others in memory
// of their own, which lies alike.
template <class T> Strided<T> place_for_sum(const Problem &p, int team, Strided<T> total, Arena &arena) {
    if (team == 0 || !total.data) return total;
    T *const data = arena.take<T>(p.r * p.d);
    return total.by_columns() ? Strided<T>{data, 1, p.r} : Strided<T>{data, p.d, 1};
}
// Adds what another sum has of the reflectors' own entries. The members of a team share them out.
template <class T> void add_sum(const Problem &p, Strided<T> sum, Strided<T> total, const Team &team) {
    const bool by_columns = total.by_columns();
    const Piece all{0, 0, p.reflectors(), p.d, p.triangular(), p.kind == Kind::compact};
    for (Index l = team.rank; l < (by_columns ? all.width : all.rows); l += team.size) { // lines of numbers side by side
        const Index start = by_columns ? 0 : all.start(l), stop = by_columns ? all.stop(l) : all.width;
        if (start >= stop) continue;
        const Index row = by_columns ? 0 : l, column = by_columns ? l : start;
        T *const to = &total(row, column);
        const T *const from = &sum(row, column);
        const Index stride = by_columns ? total.row_stride : total.column_stride;
        if (stride == 1)
            for (Index i = 0; i < stop - start; ++i) to[i] += from[i];
        else
            for (Index i = 0; i < stop - start; ++i) to[i * stride] += from[i];
    }
}
// The gradient of V from that of the scaled reflectors, when all is added up: a summand may be too large for its type.
template <class T> void scale_sum(const Problem &p, const T *scales, Strided<T> total, Team &team) {
    if (std::all_of(scales, scales + p.reflectors(), [](T s) { return s == T(1); })) return;
    const Piece all{0, 0, p.reflectors(), p.d, p.triangular(), p.kind == Kind::compact};
    team.meet();
    for (Index i = team.rank; i < all.rows; i += team.size)
        for (Index c = all.start(i); c < all.width; ++c) total(i, c) /= scales[i];
}

// What a team needs for parts of the rows: those of one product.
template <class T> struct PartBench {
    typename Bench<T>::template Of<Member<T>> space;
    Strided<T> sum; // of the gradient of V

    // `p` has as many rows as the largest part.
    PartBench(const Problem &p, int members, bool back, Strided<T> sum, Arena &arena)
        : space(p, members, back, arena), sum(sum) {}
    // Scales and T, which all teams share, and what else is kept: in the given memory, or in that of the first team.
    static Kept<T> kept(const Problem &whole, T *memory, int kept, const PartBench &first) {
        if (!memory || kept == nothing_kept) return {whole, first.space.shared.factors, 1};
        return {whole, memory, 1, most_kept<T>(kept)};
    }
    // This thread's share of all T. All have to meet after it.
    void find_factors(const Problem &p, Place &at, Strided<const T> V, const Kept<T> &kept) const {
        space.member(p, at.team, V, kept).find_factors(at.all);
    }
};

// Zeros where nothing was written: between the parts of what is kept, beside the last columns, and behind all of it, up to
// `size`. What an operator of PyTorch gives back should not be what happened to be in memory.
template <class T> void clear_gaps(const Problem &p, T *memory, Index size, int kept) {
    if (kept != nothing_kept) std::fill(memory + p.reflectors(), memory + round_up(p.reflectors(), padding), T(0));
    for (int rank = 0; p.blocks() && rank < kept; ++rank) {
        const Columns own(p, kept, rank);
        std::vector<Index> offsets(std::size_t(p.blocks()));
        const States<T> states(p, Kept<T>(p, memory, kept, most_kept<T>(kept)).states, kept, rank, offsets.data());
        const Index lanes = p.lanes(), stride = p.lane_stride();
        for (Index step = 0; step + 1 < p.blocks(); ++step) {
            const Index block = p.block_at(step, p.transpose);
            for (Index q = own.first_panel(p, block); q < own.panels; ++q) {
                T *const panel = states.of(block, q);
                const Index width = own.width(q);
                for (Index c = 0; c < (lanes < stride ? width : 0); ++c)
                    std::fill(panel + c * stride + lanes, panel + (c + 1) * stride, T(0));
                std::fill(panel + width * stride, panel + p.panel_size(), T(0));
            }
        }
    }
    for (Index block = 0; kept == Z_kept && block < p.blocks(); ++block)
        std::fill_n(Kept<T>(p, memory, 1, most_kept<T>(kept)).Z_of(block), p.first_row(block) * p.padded_k(), T(0));
    std::fill(memory + kept_size<T>(p, kept), memory + size, T(0));
}

// One product, in either layout.
template <class T> struct Layouts {
    Problem columns, rows;
    bool prefers_rows;

    Layouts(const Problem &p, bool prefers_rows) : columns(p), rows(in_rows(p)), prefers_rows(prefers_rows) {}
    const Problem &of(int kept) const { return kept == rows_kept ? rows : columns; }
    // The one to go forward in, if this is to be kept.
    const Problem &forward(int kept) const {
        return kept > factors_kept || kept == Z_kept || !prefers_rows ? columns : rows;
    }
    Index size(int kept) const { return kept_size<T>(of(kept), kept); }
    int best_kept(int members) const { return prefers_rows ? rows_kept : members; }
};

// x Qᵀ or x Q, and its gradients, for a batch. `by_rows`: whether V is stored so.
template <class T> struct Reflection {
    Index batch;
    int threads;
    Plan plan;
    Parts there, back; // of the rows, on either way
    Layouts<T> layouts;

    Reflection(const Problem &p, Index batch, int most_threads, bool by_rows)
        : batch(batch), threads(threads_for(batch * p.lanes() * p.reflectors() * p.d, most_threads)),
          plan(plan_for(batch, p.panels(), threads)), there(parts_of(p, false)), back(parts_of(p, true)),
          layouts(p, rows_pay<T>(p, by_rows, plan.members)) {}

    // The most that may be kept in so much room, and is worth it.
    int best_kept(Index room) const {
        const bool states = !layouts.columns.of_identity && !in_parts(back, layouts.columns, Z_kept);
        for (const int kept : {layouts.best_kept(plan.members), plan.members, Z_kept, factors_kept})
            if (size(kept) <= room && (!has_states(kept) || (states && states_pay<T>(layouts.size(kept))))) return kept;
        return nothing_kept;
    }
    Index size(int kept) const { return batch * layouts.size(kept); }

    // Gives back what was kept.
    int forward(Batch<const T> x, Batch<const T> V, T *out, T *memory, int planned) const {
        const Problem &p = layouts.forward(planned);
        const Batch<T> outs = in_rows(out, p.m, p.d);
        if (in_parts(there, p, planned)) {
            for_parts(there, V[0], memory, planned, true, {}, [&](auto &member, Index first, Strided<T>) {
                member.load(from_row(x[0], first));
                member.forward();
                member.store(from_row(outs[0], first));
            });
            return planned;
        }
        const int members = for_batch(p, false, [&](auto &member_of, Team &team, Index b) {
            auto member = member_of(V[b], part(memory, b, team, kept_by(team.size, planned)));
            if (!member.finds_factors()) member.find_factors(), team.meet();
            member.load(x[b]);
            member.forward();
            member.store(outs[b]);
        });
        return kept_by(members, planned);
    }
    // `kept` is what forward gave back. dx and dV may be left out.
    void backward(Batch<const T> g, const T *out, Batch<const T> V, T *memory, int kept, T *dx, Batch<T> dV) const {
        const Problem &p = layouts.of(kept);
        const Batch<T> dxs = in_rows(dx, p.m, p.d);
        const Batch<const T> outs = in_rows(out, p.m, p.d);
        if (in_parts(back, p, kept)) {
            return for_parts(back, V[0], memory, kept, kept == nothing_kept, dV[0], [&](auto &member, Index first, Strided<T> sum) {
                member.load(from_row(g[0], first));
                if (sum.data) member.load(from_row(outs[0], first), 1);
                member.backward(from_row(dxs[0], first), sum);
            });
        }
        for_batch(p, dV.data != nullptr, [&](auto &member_of, Team &team, Index b) {
            auto member = member_of(V[b], part(memory, b, team, kept));
            if (kept == nothing_kept) member.find_factors(), team.meet();
            member.load(g[b]);
            if (dV.data) member.load(outs[b], 1);
            member.backward(dxs[b], dV[b]);
        });
    }
    void clear(T *memory, Index all, int kept) const {
        const Index each = layouts.size(kept);
        for (Index b = 0; b < batch && each; ++b) clear_gaps(layouts.of(kept), memory + b * each, each, kept);
        std::fill(memory + size(kept), memory + all, T(0));
    }

  private:
    Parts parts_of(const Problem &p, bool back) const {
        return {p, p.r * p.d * Index(sizeof(T)), p.panels(), threads, back};
    }
    // Rows are shared out where they need not stay as they were for what is kept of them.
    bool in_parts(const Parts &parts, const Problem &p, int kept) const {
        return batch == 1 && !p.in_rows && !has_states(kept) && parts.pay();
    }
    // action(member, its first row, where its team has the sum of the gradient of V) for every part of the rows.
    template <class Action>
    void for_parts(const Parts &parts, Strided<const T> V, T *memory, int kept, bool finds, Strided<T> dV,
                   const Action &action) const {
        const Problem &whole = layouts.columns, p = parts.largest(whole);
        const auto lay_out = [&](int team, int members, Arena &arena) {
            return PartBench<T>(p, members, dV.data != nullptr, place_for_sum(p, team, dV, arena), arena);
        };
        for_teams(parts.plan, lay_out, [&](const auto &benches, Place &at) {
            const PartBench<T> &bench = benches[std::size_t(at.number)];
            const Kept<T> all = bench.kept(whole, memory, kept, benches[0]);
            if (finds) bench.find_factors(p, at, V, all), at.all.meet();
            at.for_parts(parts, [&](Index part, bool is_first) {
                const Problem rows = parts.of(whole, part, at.number, is_first);
                auto member = bench.space.member(rows, at.team, V, all.from_row(rows.first));
                action(member, rows.first, bench.sum);
            });
            if (!dV.data) return;
            at.all.meet();
            for (int team = 1; team < at.teams; ++team) add_sum(whole, benches[std::size_t(team)].sum, dV, at.all);
            scale_sum(whole, all.scales, dV, at.all);
        });
    }
    // work(a function that gives the member for a V and what is kept, its team, number) for every matrix of the batch.
    template <class Work> int for_batch(const Problem &p, bool back, const Work &work) const {
        const auto lay_out = [&](int, int members, Arena &arena) { return Bench<T>(p, members, back, arena); };
        return for_teams(plan, lay_out, [&](const auto &benches, Place &at) {
            benches[std::size_t(at.number)].with([&](const auto &layout) {
                const auto member_of = [&](Strided<const T> V, const Kept<T> &kept) { return layout.member(p, at.team, V, kept); };
                for (Index b = at.number; b < batch; b += at.teams) {
                    work(member_of, at.team, b);
                    at.team.meet();
                }
            });
        });
    }
    Kept<T> part(T *memory, Index b, const Team &team, int kept) const {
        return kept_part(layouts.of(kept), memory ? memory + b * layouts.size(kept) : nullptr, team.size, kept);
    }
};

// x Wᵀ with W = Q_U[:, :k] Σ Q_Vᵀ[:k]: first x Q_V, then each column times its singular value, then Q_Uᵀ. Both products have
// the same team.
template <class T> struct Weight {
    Strided<const T> V_reflectors, U_reflectors;
    Diagonal<T> diagonal;
    int threads;
    Plan plan;
    Parts there, back; // of the rows, on either way
    Layouts<T> V, U;

    Weight(const Problem &V, const Problem &U, Strided<const T> V_reflectors, Strided<const T> U_reflectors,
           const Diagonal<T> &diagonal, int most_threads)
        : V_reflectors(V_reflectors), U_reflectors(U_reflectors), diagonal(diagonal),
          threads(threads_for(V.lanes() * (V.reflectors() * V.d + U.reflectors() * U.d), most_threads)),
          plan(plan_for(1, panels(V, U), threads)), there(parts_of(V, U, false)), back(parts_of(V, U, true)),
          V(V, both_pay(V, U)), U(U, both_pay(V, U)) {}

    // Kept, in this order: the rows after the first product and those after the second; what each keeps besides.
    Index U_output() const { return round_up(V.columns.m * V.columns.d, 16); }
    Index V_kept() const { return U_output() + round_up(U.columns.m * U.columns.d, 16); }
    Index U_kept(int kept) const { return V_kept() + V.size(kept); }
    Index size(int kept) const { return U_kept(kept) + U.size(kept); }
    Index factors_size() const { return V.size(factors_kept) + U.size(factors_kept); }
    int best_kept(Index room) const {
        const bool states = !in_parts(back, V.columns, Z_kept);
        for (const int kept : {V.best_kept(plan.members), plan.members, Z_kept})
            if (size(kept) <= room && (!has_states(kept) || (states && states_pay<T>(size(kept))))) return kept;
        return factors_kept;
    }

    // Gives back what was kept, which may be nothing only where there is no memory for it.
    int forward(Strided<const T> x, const T *bias, Strided<T> out, T *memory, int planned) const {
        const Problem &v = V.forward(planned), &u = U.forward(planned);
        if (in_parts(there, v, planned)) {
            for_parts(there, memory, planned, true, nullptr, [&](auto &first, auto &second, Index row, const Gradients &) {
                forward_rows(first, second, row, x, bias, out, memory);
            });
            return planned;
        }
        const int members = for_teams(plan, lay_out(v, u, false), [&](const auto &benches, Place &at) {
            Team &team = at.team;
            with_members(benches[0], team, memory, kept_by(team.size, planned), [&](auto &&first, auto &&second) {
                if (!first.finds_factors()) first.find_factors();
                if (!second.finds_factors()) second.find_factors();
                team.meet();
                forward_rows(first, second, 0, x, bias, out, memory);
            });
        });
        return kept_by(members, planned);
    }

    struct Gradients { // any may be left out
        Strided<T> x, V;
        T *sigma;
        Strided<T> U;
        T *bias;
    };
    void backward(Strided<const T> g, T *memory, int kept, const Gradients &to) const {
        const Problem &v = V.of(kept), &u = U.of(kept);
        if (in_parts(back, v, kept))
            return for_parts(back, memory, kept, false, &to, [&](auto &first, auto &second, Index row, const Gradients &sums) {
                backward_rows(first, second, row, g, memory, sums);
            });
        for_teams(plan, lay_out(v, u, true), [&](const auto &benches, Place &at) {
            with_members(benches[0], at.team, memory, kept,
                         [&](auto &&first, auto &&second) { backward_rows(first, second, 0, g, memory, to); });
            clear_diagonal(to, at.all);
        });
    }
    void clear(T *memory, Index all, int kept) const {
        std::fill(memory + V.columns.m * V.columns.d, memory + U_output(), T(0));
        std::fill(memory + U_output() + U.columns.m * U.columns.d, memory + V_kept(), T(0));
        clear_gaps(V.of(kept), memory + V_kept(), U_kept(kept) - V_kept(), kept);
        clear_gaps(U.of(kept), memory + U_kept(kept), all - U_kept(kept), kept);
    }

  private:
    // The rows of two members from one on.
    template <class M>
    void forward_rows(M &first, M &second, Index row, Strided<const T> x, const T *bias, Strided<T> out, T *memory) const {
        first.load(from_row(x, row));
        first.forward();
        second.load_scaled(first, diagonal);
        second.forward();
        if (memory) {
            first.store(from_row(V_rows(memory), row));
            second.store(from_row(U_rows(memory), row));
        }
        if (bias) second.add(bias);
        second.store(from_row(out, row));
    }
    template <class M>
    void backward_rows(M &first, M &second, Index row, Strided<const T> g, T *memory, const Gradients &to) const {
        g = from_row(g, row);
        second.load(g);
        if (to.bias) second.sum_columns(g, to.bias);
        if (to.U.data) second.load(from_row(U_rows<const T>(memory), row), 1);
        second.backward({}, to.U);
        if (to.sigma || to.V.data) first.load(from_row(V_rows<const T>(memory), row), 1);
        if (to.sigma) first.gradient_of_factors(second, diagonal, to.sigma);
        if (!to.x.data && !to.V.data) return;
        first.load_scaled(second, diagonal);
        first.backward(from_row(to.x, row), to.V);
    }
    // The rows after each product, in what is kept.
    template <class N> Strided<N> V_rows(N *memory) const { return {memory, V.columns.d, 1}; }
    template <class N> Strided<N> U_rows(N *memory) const { return {memory + U_output(), U.columns.d, 1}; }
    // The diagonal between U and V is nobody's.
    void clear_diagonal(const Gradients &to, const Team &team) const {
        if (!to.V.data || !V.columns.shares) return;
        for (Index i = team.rank; i < V.columns.reflectors(); i += team.size) to.V(i, i) = T(0);
    }

    struct Benches {
        Problem v, u;
        Bench<T> V, U;
    };
    static auto lay_out(const Problem &v, const Problem &u, bool back) {
        return [&v, &u, back](int, int members, Arena &arena) {
            return Benches{v, u, {v, members, back, arena}, {u, members, back, arena}};
        };
    }
    // use(member of the first product, member of the second)
    template <class Use> void with_members(const Benches &on, Team &team, T *memory, int kept, const Use &use) const {
        const Kept<T> V_part = kept_part(V.of(kept), memory ? memory + V_kept() : nullptr, team.size, kept);
        const Kept<T> U_part = kept_part(U.of(kept), memory ? memory + U_kept(kept) : nullptr, team.size, kept);
        const auto with = [&](const auto &first, const auto &second) {
            use(first->member(on.v, team, V_reflectors, V_part), second->member(on.u, team, U_reflectors, U_part));
        };
        on.v.in_rows ? with(on.V.rows, on.U.rows) : with(on.V.columns, on.U.columns);
    }

    // Rows are shared out where they need not stay as they were for what is kept of them.
    static bool in_parts(const Parts &parts, const Problem &p, int kept) {
        return !p.in_rows && !has_states(kept) && parts.pay();
    }
    struct PartBenches {
        PartBench<T> V, U;
        T *sigma, *bias; // sums, likewise
    };
    // action(member of the first product, of the second, their first row, where the team has its sums) for every part of the
    // rows. Without gradients it is the way forward.
    template <class Action>
    void for_parts(const Parts &parts, T *memory, int kept, bool finds, const Gradients *to, const Action &action) const {
        const Problem v = parts.largest(V.columns), u = parts.largest(U.columns);
        const auto lay_out = [&](int team, int members, Arena &arena) {
            if (!to) return PartBenches{{v, members, false, {}, arena}, {u, members, false, {}, arena}, nullptr, nullptr};
            const auto vector = [&](T *total, Index count) { return team && total ? arena.take<T>(count) : total; };
            const Strided<T> V_sum = place_for_sum(v, team, to->V, arena);
            const Strided<T> U_sum = team && v.shares ? Strided<T>{V_sum.data, V_sum.column_stride, V_sum.row_stride}
                                                      : place_for_sum(u, team, to->U, arena);
            return PartBenches{{v, members, true, V_sum, arena}, {u, members, true, U_sum, arena},
                               vector(to->sigma, diagonal.count), vector(to->bias, u.d)};
        };
        for_teams(parts.plan, lay_out, [&](const auto &benches, Place &at) {
            const PartBenches &own = benches[std::size_t(at.number)], &all = benches[0];
            const Kept<T> of_V = own.V.kept(V.columns, memory ? memory + V_kept() : nullptr, kept, all.V);
            const Kept<T> of_U = own.U.kept(U.columns, memory ? memory + U_kept(kept) : nullptr, kept, all.U);
            if (finds) {
                own.V.find_factors(v, at, V_reflectors, of_V);
                own.U.find_factors(u, at, U_reflectors, of_U);
                at.all.meet();
            }
            const Gradients sums{to ? to->x : Strided<T>{}, own.V.sum, own.sigma, own.U.sum, own.bias};
            at.for_parts(parts, [&](Index part, bool is_first) {
                const Problem V_part = parts.of(V.columns, part, at.number, is_first);
                const Problem U_part = parts.of(U.columns, part, at.number, is_first);
                auto first = own.V.space.member(V_part, at.team, V_reflectors, of_V.from_row(V_part.first));
                auto second = own.U.space.member(U_part, at.team, U_reflectors, of_U.from_row(U_part.first));
                action(first, second, V_part.first, sums);
            });
            if (!to) return;
            add_sums(benches, *to, at);
            if (to->U.data) scale_sum(U.columns, of_U.scales, to->U, at.all);
            // Where U's and V's are one, so are their scales.
            if (to->V.data && !V.columns.adds) scale_sum(V.columns, of_V.scales, to->V, at.all);
            clear_diagonal(*to, at.all);
        });
    }
    // Of the gradients that all parts have a summand of.
    void add_sums(const std::vector<PartBenches> &benches, const Gradients &to, Place &at) const {
        at.all.meet();
        const auto add = [&](const T *sum, T *total, Index count) {
            for (Index i = at.all.rank; total && i < count; i += at.all.size) total[i] += sum[i];
        };
        for (std::size_t team = 1; team < benches.size(); ++team) {
            const PartBenches &other = benches[team];
            if (to.U.data) add_sum(U.columns, other.U.sum, to.U, at.all);
            if (V.columns.adds) at.all.meet(); // to the same entries
            if (to.V.data) add_sum(V.columns, other.V.sum, to.V, at.all);
            add(other.sigma, to.sigma, diagonal.count);
            add(other.bias, to.bias, U.columns.d);
            if (V.columns.adds) at.all.meet();
        }
    }

    Parts parts_of(const Problem &V, const Problem &U, bool back) const {
        const Index reflectors = V.r * V.d + (V.shares ? 0 : U.r * U.d);
        return {V, reflectors * Index(sizeof(T)), panels(V, U), threads, back};
    }
    // How many members both products have panels for; one without reflections is no reason to be fewer.
    static Index panels(const Problem &V, const Problem &U) {
        const auto of = [](const Problem &p, const Problem &other) { return p.blocks() ? p.panels() : other.panels(); };
        return std::min(of(V, U), of(U, V));
    }
    bool both_pay(const Problem &V, const Problem &U) const {
        return rows_pay<T>(V, V_reflectors.column_stride == 1, plan.members) &&
               rows_pay<T>(U, U_reflectors.column_stride == 1, plan.members);
    }
};

} // namespace fasth
