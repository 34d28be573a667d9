// One call of the core: every matrix of a batch, on as many threads as pay, and what is kept from the way forward for the
// way back.
#pragma once

#include <atomic>
#include <optional>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "reflections.hpp"
#include "rowwise.hpp"

namespace fasth {

// OpenMP's threads do not survive a fork, and starting them anew in the child would wait for ever.
inline std::atomic<bool> forked{false};

template <class T> struct Batch { // (batch, rows, columns) anywhere in memory, or nothing
    T *data;
    Index batch_stride, row_stride, column_stride;
    Strided<T> operator[](Index b) const { return {data ? data + b * batch_stride : nullptr, row_stride, column_stride}; }
};
template <class T> Batch<T> in_rows(T *data, Index rows, Index columns) { return {data, rows * columns, columns, 1}; }

// A batch is done by one team for all its matrices in turn, or, when there are many, with one matrix a thread.
struct Plan {
    int teams, members;
};
inline Plan plan_for(Index batch, Index operations, Index panels, int threads) {
    if (forked || operations < Index(1) << 19) threads = 1; // the latter: too little to share
    if (batch >= threads) return {int(std::max<Index>(1, std::min<Index>(threads, batch))), 1};
    return {1, int(std::min<Index>(threads, panels))};
}
inline Plan plan_for(const Problem &p, Index batch, int threads) {
    return plan_for(batch, batch * p.lanes() * p.reflectors() * p.d, p.panels(), threads);
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

// Runs work(bench, team, b) for every matrix of the batch, where a bench is what lay_out(members, arena) gives. Says how
// many members each team had.
template <class LayOut, class Work> int for_batch(const Plan &plan, Index batch, const LayOut &lay_out, const Work &work) {
    Arena arena;
    std::vector<decltype(lay_out(1, arena))> benches;
    for (const bool counting : {true, false}) {
        benches.clear();
        for (int team = 0; team < plan.teams; ++team) benches.push_back(lay_out(plan.members, arena));
        if (counting) arena.provide();
    }
    Team::Meeting meeting;
    const bool many = plan.teams > 1;
    const auto run = [&](int thread) {
        Team team(plan.members, many ? 0 : thread, meeting);
        for (Index b = many ? thread : 0; b < batch; b += many ? plan.teams : 1) {
            work(benches[std::size_t(many ? thread : 0)], team, b);
            team.meet();
        }
    };
    const int running = plan.teams * plan.members;
#ifdef _OPENMP
    if (running > 1) {
        std::atomic<bool> complete{true};
#pragma omp parallel num_threads(running)
        {
            if (omp_get_num_threads() == running)
                run(omp_get_thread_num());
            else
                complete = false; // fewer threads than asked for, as inside another parallel region
        }
        return complete ? plan.members : for_batch({1, 1}, batch, lay_out, work);
    }
#endif
    run(0);
    return 1;
}

// What is kept is one of: nothing; scales and T; these with Z and the rows after every block, as they come, or else for so
// many members.
constexpr int rows_kept = -2, nothing_kept = -1, factors_kept = 0;

// The problem is the one that this is kept of: in rows if these are kept.
template <class T> Index kept_size(const Problem &p, int kept) {
    return kept == nothing_kept ? 0 : Kept<T>::size(p, std::max(kept, 1), kept != factors_kept);
}
// What a team of another size than planned for keeps.
inline int kept_by(int members, int planned) {
    return members == planned || planned == rows_kept ? planned : std::min(planned, factors_kept);
}
template <class T> Kept<T> kept_part(const Problem &p, T *memory, int members, int kept) {
    if (!memory || kept == nothing_kept) return {};
    return {p, memory, members, kept == members || kept == rows_kept};
}

// Zeros where nothing was written: between the parts of what is kept, beside the last columns, and behind all of it, up to
// `size`. What an operator of PyTorch gives back should not be what happened to be in memory.
template <class T> void clear_gaps(const Problem &p, T *memory, Index size, int kept) {
    if (kept != nothing_kept) std::fill(memory + p.reflectors(), memory + round_up(p.reflectors(), padding), T(0));
    for (int rank = 0; p.blocks() && rank < kept; ++rank) {
        const Columns own(p, kept, rank);
        std::vector<Index> offsets(std::size_t(p.blocks()));
        const States<T> states(p, Kept<T>(p, memory, kept, true).states, kept, rank, offsets.data());
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
    std::fill(memory + kept_size<T>(p, kept), memory + size, T(0));
}

// One product, in either layout.
template <class T> struct Layouts {
    Problem columns, rows;
    bool prefers_rows;

    Layouts(const Problem &p, bool prefers_rows) : columns(p), rows(in_rows(p)), prefers_rows(prefers_rows) {}
    const Problem &of(int kept) const { return kept == rows_kept ? rows : columns; }
    // The one to go forward in, if this is to be kept.
    const Problem &forward(int kept) const { return kept > factors_kept || !prefers_rows ? columns : rows; }
    Index size(int kept) const { return kept_size<T>(of(kept), kept); }
    int best_kept(int members) const { return prefers_rows ? rows_kept : members; }
};

// x Qᵀ or x Q, and its gradients, for a batch. `by_rows`: whether V is stored so.
template <class T> struct Reflection {
    Index batch;
    Plan plan;
    Layouts<T> layouts;

    Reflection(const Problem &p, Index batch, int threads, bool by_rows)
        : batch(batch), plan(plan_for(p, batch, threads)), layouts(p, rows_pay<T>(p, by_rows, plan.members)) {}

    // The most that may be kept in so much room, and is worth it: to fetch a large matrix' states from memory takes longer
    // than to run the output back.
    int best_kept(Index room) const {
        if (layouts.columns.of_identity) return size(factors_kept) <= room ? factors_kept : nothing_kept;
        for (const int kept : {layouts.best_kept(plan.members), plan.members}) {
            const bool states_pay = layouts.size(kept) * Index(sizeof(T)) <= Index(48) << 20;
            if (size(kept) <= room && states_pay) return kept;
        }
        return size(factors_kept) <= room ? factors_kept : nothing_kept;
    }
    Index size(int kept) const { return batch * layouts.size(kept); }

    // Gives back what was kept.
    int forward(Batch<const T> x, Batch<const T> V, T *out, T *memory, int planned) const {
        const Problem &p = layouts.forward(planned);
        const Batch<T> outs = in_rows(out, p.m, p.d);
        const int members = for_batch(plan, batch, lay_out(p, false), [&](const Bench<T> &bench, Team &team, Index b) {
            bench.with([&](const auto &layout) {
                auto member = layout.member(p, team, V[b], part(memory, b, team, kept_by(team.size, planned)));
                if (!member.finds_factors()) member.find_factors(), team.meet();
                member.load(x[b]);
                member.forward();
                member.store(outs[b]);
            });
        });
        return kept_by(members, planned);
    }
    // `kept` is what forward gave back. dx and dV may be left out.
    void backward(Batch<const T> g, const T *out, Batch<const T> V, T *memory, int kept, T *dx, Batch<T> dV) const {
        const Problem &p = layouts.of(kept);
        const Batch<T> dxs = in_rows(dx, p.m, p.d);
        const Batch<const T> outs = in_rows(out, p.m, p.d);
        for_batch(plan, batch, lay_out(p, dV.data != nullptr), [&](const Bench<T> &bench, Team &team, Index b) {
            bench.with([&](const auto &layout) {
                auto member = layout.member(p, team, V[b], part(memory, b, team, kept));
                if (kept == nothing_kept) member.find_factors(), team.meet();
                member.load(g[b]);
                if (dV.data) member.load(outs[b], 1);
                member.backward(dxs[b], dV[b]);
            });
        });
    }
    void clear(T *memory, Index all, int kept) const {
        const Index each = layouts.size(kept);
        for (Index b = 0; b < batch && each; ++b) clear_gaps(layouts.of(kept), memory + b * each, each, kept);
        std::fill(memory + size(kept), memory + all, T(0));
    }

  private:
    static auto lay_out(const Problem &p, bool back) {
        return [&p, back](int members, Arena &arena) { return Bench<T>(p, members, back, arena); };
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
    Plan plan;
    Layouts<T> V, U;

    Weight(const Problem &V, const Problem &U, Strided<const T> V_reflectors, Strided<const T> U_reflectors,
           const Diagonal<T> &diagonal, int threads)
        : V_reflectors(V_reflectors), U_reflectors(U_reflectors), diagonal(diagonal),
          plan(plan_for(1, V.lanes() * (V.reflectors() * V.d + U.reflectors() * U.d),
                        std::min(shares(V, U), shares(U, V)), threads)),
          V(V, both_pay(V, U)), U(U, both_pay(V, U)) {}

    // Kept, in this order: the rows after the first product and those after the second; what each keeps besides.
    Index U_output() const { return round_up(V.columns.m * V.columns.d, 16); }
    Index V_kept() const { return U_output() + round_up(U.columns.m * U.columns.d, 16); }
    Index U_kept(int kept) const { return V_kept() + V.size(kept); }
    Index size(int kept) const { return U_kept(kept) + U.size(kept); }
    int best_kept(Index room) const {
        for (const int kept : {V.best_kept(plan.members), plan.members})
            if (size(kept) <= room) return kept;
        return factors_kept;
    }

    // Gives back what was kept, which may be nothing only where there is no memory for it.
    int forward(Strided<const T> x, const T *bias, Strided<T> out, T *memory, int planned) const {
        const Problem &v = V.forward(planned), &u = U.forward(planned);
        const int members = for_batch(plan, 1, lay_out(v, u, false), [&](const Benches &benches, Team &team, Index) {
            with_members(benches, team, memory, kept_by(team.size, planned), [&](auto &&first, auto &&second) {
                if (!first.finds_factors()) first.find_factors();
                if (!second.finds_factors()) second.find_factors();
                team.meet();
                first.load(x);
                first.forward();
                second.load_scaled(first, diagonal);
                second.forward();
                if (memory) {
                    first.store({memory, v.d, 1});
                    second.store({memory + U_output(), u.d, 1});
                }
                if (bias) second.add(bias);
                second.store(out);
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
        for_batch(plan, 1, lay_out(v, u, true), [&](const Benches &benches, Team &team, Index) {
            with_members(benches, team, memory, kept, [&](auto &&first, auto &&second) {
                second.load(g);
                if (to.bias) second.sum_columns(g, to.bias);
                if (to.U.data) second.load({memory + U_output(), u.d, 1}, 1);
                second.backward({}, to.U);
                if (to.sigma || to.V.data) first.load({memory, v.d, 1}, 1);
                if (to.sigma) first.gradient_of_factors(second, diagonal, to.sigma);
                if (!to.x.data && !to.V.data) return;
                first.load_scaled(second, diagonal);
                first.backward(to.x, to.V);
            });
            if (to.V.data && v.shares) // the diagonal between U and V is nobody's
                for (Index i = team.rank; i < v.reflectors(); i += team.size) to.V(i, i) = T(0);
        });
    }
    void clear(T *memory, Index all, int kept) const {
        std::fill(memory + V.columns.m * V.columns.d, memory + U_output(), T(0));
        std::fill(memory + U_output() + U.columns.m * U.columns.d, memory + V_kept(), T(0));
        clear_gaps(V.of(kept), memory + V_kept(), U_kept(kept) - V_kept(), kept);
        clear_gaps(U.of(kept), memory + U_kept(kept), all - U_kept(kept), kept);
    }

  private:
    struct Benches {
        Problem v, u;
        Bench<T> V, U;
    };
    static auto lay_out(const Problem &v, const Problem &u, bool back) {
        return [&v, &u, back](int members, Arena &arena) {
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
    // How many members a product has panels for; one without reflections is no reason to be fewer.
    static Index shares(const Problem &p, const Problem &other) { return p.blocks() ? p.panels() : other.panels(); }
    bool both_pay(const Problem &V, const Problem &U) const {
        return rows_pay<T>(V, V_reflectors.column_stride == 1, plan.members) &&
               rows_pay<T>(U, U_reflectors.column_stride == 1, plan.members);
    }
};

} // namespace fasth
