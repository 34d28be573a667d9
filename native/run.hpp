// One call of the core: every matrix of a batch, on as many threads as pay, and what is kept from the way forward for the
// way back.
#pragma once

#include <atomic>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "reflections.hpp"

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

// What a team needs for one problem.
template <class T> struct Bench {
    Workspace<T> shared;
    std::vector<typename Workspace<T>::Own> own;
    Bench(const Problem &p, int members, int sets, Arena &arena) : shared(p, members, sets, arena) {
        for (int i = 0; i < members; ++i) own.push_back(Workspace<T>::own(p, members, sets, arena));
    }
    Member<T> member(const Problem &p, Team &team, Strided<const T> V, const Kept<T> &kept) const {
        return {p, team, V, shared, own[std::size_t(team.rank)], kept};
    }
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

// What is kept is one of: nothing; scales and T; these with Z and the rows after every block, for so many members.
constexpr int nothing_kept = -1, factors_kept = 0;

template <class T> Index kept_size(const Problem &p, int kept) {
    return kept == nothing_kept ? 0 : Kept<T>::size(p, std::max(kept, 1), kept > 0);
}
// What a team of another size than planned for keeps.
inline int kept_by(int members, int planned) { return members == planned ? planned : std::min(planned, factors_kept); }

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

// x Qᵀ or x Q, and its gradients, for a batch.
template <class T> struct Reflection {
    Problem p;
    Index batch;
    Plan plan;

    Reflection(const Problem &p, Index batch, int threads) : p(p), batch(batch), plan(plan_for(p, batch, threads)) {}

    // The most that may be kept in so much room, and is worth it: to fetch a large matrix' states from memory takes longer
    // than to run the output back.
    int best_kept(Index room) const {
        const bool states_pay = kept_size<T>(p, plan.members) * Index(sizeof(T)) <= Index(48) << 20;
        for (const int kept : {plan.members, factors_kept})
            if (size(kept) <= room && (kept == factors_kept || states_pay)) return kept;
        return nothing_kept;
    }
    Index size(int kept) const { return batch * kept_size<T>(p, kept); }

    // Gives back what was kept.
    int forward(Batch<const T> x, Batch<const T> V, T *out, T *memory, int planned) const {
        const Batch<T> outs = in_rows(out, p.m, p.d);
        const int members = for_batch(plan, batch, lay_out(1), [&](const Bench<T> &bench, Team &team, Index b) {
            Member<T> member = bench.member(p, team, V[b], part(memory, b, team, kept_by(team.size, planned)));
            if (!member.finds_factors()) member.find_factors(), team.meet();
            member.load(x[b]);
            member.forward();
            member.store(outs[b]);
        });
        return kept_by(members, planned);
    }
    // `kept` is what forward gave back. dx and dV may be left out.
    void backward(Batch<const T> g, const T *out, Batch<const T> V, T *memory, int kept, T *dx, Batch<T> dV) const {
        const Batch<T> dxs = in_rows(dx, p.m, p.d);
        const Batch<const T> outs = in_rows(out, p.m, p.d);
        for_batch(plan, batch, lay_out(dV.data ? 2 : 1), [&](const Bench<T> &bench, Team &team, Index b) {
            Member<T> member = bench.member(p, team, V[b], part(memory, b, team, kept));
            if (kept == nothing_kept) member.find_factors(), team.meet();
            member.load(g[b]);
            if (dV.data) member.load(outs[b], 1);
            member.backward(dV[b]);
            if (dx) member.store(dxs[b]);
        });
    }
    void clear(T *memory, Index all, int kept) const {
        const Index each = kept_size<T>(p, kept);
        for (Index b = 0; b < batch && each; ++b) clear_gaps(p, memory + b * each, each, kept);
        std::fill(memory + size(kept), memory + all, T(0));
    }

  private:
    auto lay_out(int sets) const {
        return [this, sets](int members, Arena &arena) { return Bench<T>(p, members, sets, arena); };
    }
    Kept<T> part(T *memory, Index b, const Team &team, int kept) const {
        if (!memory || kept == nothing_kept) return {};
        return {p, memory + b * kept_size<T>(p, kept), team.size, team.size == kept};
    }
};

// x Wᵀ with W = Q_U[:, :k] Σ Q_Vᵀ[:k]: first x Q_V, then each column times its singular value, then Q_Uᵀ. Both products have
// the same team, and a member has the same columns of both.
template <class T> struct Weight {
    Problem V, U;
    Strided<const T> V_reflectors, U_reflectors;
    Diagonal<T> diagonal;
    Plan plan;

    Weight(const Problem &V, const Problem &U, Strided<const T> V_reflectors, Strided<const T> U_reflectors,
           const Diagonal<T> &diagonal, int threads)
        : V(V), U(U), V_reflectors(V_reflectors), U_reflectors(U_reflectors), diagonal(diagonal),
          plan(plan_for(1, V.lanes() * (V.reflectors() * V.d + U.reflectors() * U.d),
                        std::min(V.panels(), U.panels()), threads)) {}

    // Kept, in this order: the rows after the first product and those after the second, by columns; what each keeps besides.
    Index U_output() const { return round_up(V.m * V.d, 16); }
    Index V_kept() const { return U_output() + round_up(U.m * U.d, 16); }
    Index U_kept(int kept) const { return V_kept() + kept_size<T>(V, kept); }
    Index size(int kept) const { return U_kept(kept) + kept_size<T>(U, kept); }
    int best_kept(Index room) const { return size(plan.members) <= room ? plan.members : factors_kept; }

    // Gives back what was kept, which may be nothing only where there is no memory for it.
    int forward(Strided<const T> x, const T *bias, Strided<T> out, T *memory, int planned) const {
        const int members = for_batch(plan, 1, lay_out(1), [&](const Benches &benches, Team &team, Index) {
            const int kept = kept_by(team.size, planned);
            Member<T> v = benches.V.member(V, team, V_reflectors, V_part(memory, team, kept));
            Member<T> u = benches.U.member(U, team, U_reflectors, U_part(memory, team, kept));
            if (!v.finds_factors()) v.find_factors();
            if (!u.finds_factors()) u.find_factors();
            team.meet();
            v.load(x);
            v.forward();
            u.load_scaled(v, diagonal);
            u.forward();
            if (memory) {
                v.store({memory, 1, V.m});
                u.store({memory + U_output(), 1, U.m});
            }
            if (bias) u.add(bias);
            u.store(out);
        });
        return kept_by(members, planned);
    }

    struct Gradients { // any but that of sigma may be left out
        Strided<T> x, V;
        T *sigma;
        Strided<T> U;
        T *bias;
    };
    void backward(Strided<const T> g, T *memory, int kept, const Gradients &to) const {
        for_batch(plan, 1, lay_out(2), [&](const Benches &benches, Team &team, Index) {
            Member<T> v = benches.V.member(V, team, V_reflectors, V_part(memory, team, kept));
            Member<T> u = benches.U.member(U, team, U_reflectors, U_part(memory, team, kept));
            u.load(g);
            if (to.bias) u.sum_columns(to.bias);
            if (to.U.data) u.load({memory + U_output(), 1, U.m}, 1);
            u.backward(to.U);
            v.load({memory, 1, V.m}, 1);
            v.gradient_of_factors(u, diagonal, to.sigma);
            if (!to.x.data && !to.V.data) return;
            v.load_scaled(u, diagonal);
            v.backward(to.V);
            if (to.x.data) v.store(to.x);
            if (to.V.data && V.shares) // the diagonal between U and V is nobody's
                for (Index i = team.rank; i < V.reflectors(); i += team.size) to.V(i, i) = T(0);
        });
    }
    void clear(T *memory, Index all, int kept) const {
        std::fill(memory + V.m * V.d, memory + U_output(), T(0));
        std::fill(memory + U_output() + U.m * U.d, memory + V_kept(), T(0));
        clear_gaps(V, memory + V_kept(), U_kept(kept) - V_kept(), kept);
        clear_gaps(U, memory + U_kept(kept), all - U_kept(kept), kept);
    }

  private:
    struct Benches {
        Bench<T> V, U;
    };
    auto lay_out(int sets) const {
        return [this, sets](int members, Arena &arena) { return Benches{{V, members, sets, arena}, {U, members, sets, arena}}; };
    }
    Kept<T> V_part(T *memory, const Team &team, int kept) const {
        if (!memory) return {};
        return {V, memory + V_kept(), team.size, team.size == kept};
    }
    Kept<T> U_part(T *memory, const Team &team, int kept) const {
        if (!memory) return {};
        return {U, memory + U_kept(kept), team.size, team.size == kept};
    }
};

} // namespace fasth
