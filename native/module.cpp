// The Python module: addresses, sizes and strides of CPU tensors in, results written in place. src/fasth/reflections/
// native.py checks every argument before it calls.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <array>
#include <atomic>
#include <string>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include "reflections.hpp"

namespace nb = nanobind;
using namespace fasth;

namespace {

using Strides = std::array<Index, 3>; // batch, row, column

// OpenMP's threads do not survive a fork, and starting them anew in the child would wait for ever.
std::atomic<bool> forked{false};

template <class T> Strided<T> matrix(std::uintptr_t address, const Strides &strides, Index b) {
    T *const data = reinterpret_cast<T *>(address);
    return {data ? data + b * strides[0] : nullptr, strides[1], strides[2]};
}

// A batch is done by one team for all its matrices in turn, or, when there are many, with one matrix a thread.
struct Plan {
    int teams, members;
};
Plan plan_for(Index batch, Index operations, Index panels, int threads) {
    if (forked || operations < Index(1) << 19) threads = 1; // the latter: too little to share
    if (batch >= threads) return {int(std::max<Index>(1, std::min<Index>(threads, batch))), 1};
    return {1, int(std::min<Index>(threads, panels))};
}
Plan plan_for(const Problem &p, Index batch, int threads) {
    return plan_for(batch, batch * p.m * p.reflectors() * p.d, (p.half_panels() + 1) / 2, threads);
}

// What a team needs for one problem.
template <class T> struct Bench {
    Workspace<T> shared;
    std::vector<typename Workspace<T>::Own> own;
    Bench(const Problem &p, int members, int sets, Arena &arena) : shared(p, members, sets, arena) {
        for (int i = 0; i < members; ++i) own.push_back(Workspace<T>::own(p, members, sets, arena));
    }
    Member<T> member(const Problem &p, Team &team, Strided<const T> V) const {
        return {p, team, V, shared, own[std::size_t(team.rank)]};
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

template <class T> Problem problem(Index m, Index r, Index d, int kind, bool transpose, Index k) {
    return {m, r, d, Kind(kind), transpose, k, Problem::half_panel<T>};
}

// How much to keep of each matrix, with the rows after every block or without, if all may take `room`; 0 if nothing.
template <class T>
std::pair<Index, bool> plan(Index m, Index r, Index d, int kind, bool transpose, Index k, Index batch, int threads, Index room) {
    const Problem p = problem<T>(m, r, d, kind, transpose, k);
    const int members = plan_for(p, batch, threads).members;
    for (const bool with_states : {true, false})
        if (const Index size = Kept<T>::size(p, members, with_states); batch * size <= room) return {size, with_states};
    return {0, false};
}

// Gives back for how many members the states were kept, 0 if there are none.
template <class T>
int forward(Index m, Index r, Index d, int kind, bool transpose, Index k, Index batch, int threads, std::uintptr_t x,
            const Strides &x_strides, std::uintptr_t V, const Strides &V_strides, std::uintptr_t out, std::uintptr_t kept,
            Index kept_size, bool with_states) {
    nb::gil_scoped_release release;
    const Problem p = problem<T>(m, r, d, kind, transpose, k);
    const Strides out_strides{p.m * p.d, p.d, 1};
    const Plan plan = plan_for(p, batch, threads);
    const int members = for_batch(
        plan, batch, [&](int size, Arena &arena) { return Bench<T>(p, size, 1, arena); },
        [&](const Bench<T> &bench, Team &team, Index b) {
            T *const memory = kept ? reinterpret_cast<T *>(kept) + b * kept_size : nullptr;
            Member<T> member = bench.member(p, team, matrix<const T>(V, V_strides, b));
            member.load(matrix<const T>(x, x_strides, b));
            member.forward({p, memory, team.size, team.rank, with_states && team.size == plan.members});
            member.store(matrix<T>(out, out_strides, b));
        });
    return with_states && members == plan.members ? members : 0;
}

// `members` is what `forward` gave back.
template <class T>
void backward(Index m, Index r, Index d, int kind, bool transpose, Index k, Index batch, int threads, std::uintptr_t gradient,
              const Strides &gradient_strides, std::uintptr_t output, std::uintptr_t V, const Strides &V_strides,
              std::uintptr_t kept, Index kept_size, int members, std::uintptr_t dx, std::uintptr_t dV, const Strides &dV_strides) {
    nb::gil_scoped_release release;
    const Problem p = problem<T>(m, r, d, kind, transpose, k);
    const Strides rows{p.m * p.d, p.d, 1};
    for_batch(
        plan_for(p, batch, threads), batch, [&](int size, Arena &arena) { return Bench<T>(p, size, dV ? 2 : 1, arena); },
        [&](const Bench<T> &bench, Team &team, Index b) {
            T *const memory = kept ? reinterpret_cast<T *>(kept) + b * kept_size : nullptr;
            Member<T> member = bench.member(p, team, matrix<const T>(V, V_strides, b));
            member.load(matrix<const T>(gradient, gradient_strides, b));
            if (dV) member.load(matrix<const T>(output, rows, b), 1);
            member.backward({p, memory, team.size, team.rank, team.size == members}, matrix<T>(dV, dV_strides, b));
            if (dx) member.store(matrix<T>(dx, rows, b));
        });
}

// Zeros where `forward` wrote nothing: between the parts of what is kept, beside the last columns, and behind all of it, up
// to `size`. What an operator of PyTorch gives back should not be what happened to be in memory.
template <class T> void clear_gaps(const Problem &p, T *memory, Index size, int members) {
    std::fill(memory + p.reflectors(), memory + round_up(p.reflectors(), padding), T(0));
    Index end = Kept<T>::size(p, 1, false);
    if (members && p.blocks()) {
        end = Kept<T>::size(p, members, true);
        for (int rank = 0; rank < members; ++rank) {
            const Columns own(p, members, rank);
            const Kept<T> kept(p, memory, members, rank, true);
            const Index used = own.panels ? own.to(own.panels - 1) : own.W;
            for (Index step = 0; used < own.W && step + 1 < p.blocks(); ++step) {
                const Index block = p.block_at(step, p.transpose), panels = own.panels - own.first_panel(p, block);
                T *const last = kept.state_of(p, own, block) + (panels - 1) * p.m * own.W;
                for (Index i = 0; panels > 0 && i < p.m; ++i) std::fill(last + i * own.W + used, last + (i + 1) * own.W, T(0));
            }
        }
    }
    std::fill(memory + end, memory + size, T(0));
}
template <class T>
void clear(Index m, Index r, Index d, int kind, bool transpose, Index k, Index batch, std::uintptr_t kept, Index kept_size,
           int members, Index all) {
    T *const memory = reinterpret_cast<T *>(kept);
    const Problem p = problem<T>(m, r, d, kind, transpose, k);
    for (Index b = 0; b < batch && kept_size; ++b) clear_gaps(p, memory + b * kept_size, kept_size, members);
    std::fill(memory + batch * kept_size, memory + all, T(0));
}

// W = Q_U[:, :k] Σ Q_Vᵀ[:k]: first x Q_V, then each column times its singular value, then Q_Uᵀ. Both products have the same
// team, and a member has the same columns of both.
template <class T> struct Factors {
    Problem V, U;
    Diagonal<T> diagonal;
    Plan plan;
    struct Benches {
        Bench<T> V, U;
    };

    Factors(Index m, Index n_in, Index n_out, Index V_reflectors, Index U_reflectors, int kind, Index V_block, Index U_block,
            Index k, int threads, std::uintptr_t sigma = 0, std::uintptr_t signs = 0)
        : V(problem<T>(m, V_reflectors, n_in, kind, true, V_block)), U(problem<T>(m, U_reflectors, n_out, kind, false, U_block)),
          diagonal{reinterpret_cast<const T *>(sigma), reinterpret_cast<const T *>(signs), k},
          plan(plan_for(1, m * (V.reflectors() * V.d + U.reflectors() * U.d),
                        (std::min(V.half_panels(), U.half_panels()) + 1) / 2, threads)) {}

    // Kept, in this order: the rows after the first product, those after the second, what each keeps besides.
    Index U_output() const { return round_up(V.m * V.d, 16); }
    Index V_kept() const { return U_output() + round_up(U.m * U.d, 16); }
    Index U_kept(bool with_states) const { return V_kept() + Kept<T>::size(V, plan.members, with_states); }
    Index size(bool with_states) const { return U_kept(with_states) + Kept<T>::size(U, plan.members, with_states); }
    auto lay_out(int sets) const {
        return [this, sets](int size, Arena &arena) { return Benches{{V, size, sets, arena}, {U, size, sets, arena}}; };
    }
};

// How much to keep, where in it the second product's part starts, and whether with the rows after every block.
template <class T>
std::tuple<Index, Index, bool> svd_plan(Index m, Index n_in, Index n_out, Index V_reflectors, Index U_reflectors, int kind,
                                        Index V_block, Index U_block, Index k, int threads, Index room) {
    const Factors<T> f(m, n_in, n_out, V_reflectors, U_reflectors, kind, V_block, U_block, k, threads);
    const bool with_states = f.size(true) <= room;
    return {f.size(with_states), f.U_kept(with_states), with_states};
}

template <class T>
int svd_forward(Index m, Index n_in, Index n_out, Index V_reflectors, Index U_reflectors, int kind, Index V_block, Index U_block,
                Index k, int threads, std::uintptr_t x, const Strides &x_strides, std::uintptr_t V, const Strides &V_strides,
                std::uintptr_t sigma, std::uintptr_t signs, std::uintptr_t U, const Strides &U_strides, std::uintptr_t bias,
                std::uintptr_t out, std::uintptr_t kept, Index U_kept, bool with_states) {
    nb::gil_scoped_release release;
    const Factors<T> f(m, n_in, n_out, V_reflectors, U_reflectors, kind, V_block, U_block, k, threads, sigma, signs);
    T *const memory = reinterpret_cast<T *>(kept);
    const int members = for_batch(f.plan, 1, f.lay_out(1), [&](const auto &benches, Team &team, Index) {
        const bool states = with_states && team.size == f.plan.members;
        Member<T> v = benches.V.member(f.V, team, matrix<const T>(V, V_strides, 0));
        Member<T> u = benches.U.member(f.U, team, matrix<const T>(U, U_strides, 0));
        v.load(matrix<const T>(x, x_strides, 0));
        v.forward({f.V, kept ? memory + f.V_kept() : nullptr, team.size, team.rank, states});
        u.load_scaled(v, f.diagonal);
        u.forward({f.U, kept ? memory + U_kept : nullptr, team.size, team.rank, states});
        if (kept) {
            v.store({memory, n_in, 1});
            u.store({memory + f.U_output(), n_out, 1});
        }
        u.store({reinterpret_cast<T *>(out), n_out, 1}, reinterpret_cast<const T *>(bias));
    });
    return with_states && members == f.plan.members ? members : 0;
}

template <class T>
void svd_clear(Index m, Index n_in, Index n_out, Index V_reflectors, Index U_reflectors, int kind, Index V_block, Index U_block,
               Index k, std::uintptr_t kept, Index U_kept, int members, Index all) {
    const Factors<T> f(m, n_in, n_out, V_reflectors, U_reflectors, kind, V_block, U_block, k, 1);
    T *const memory = reinterpret_cast<T *>(kept);
    std::fill(memory + m * n_in, memory + f.U_output(), T(0));
    std::fill(memory + f.U_output() + m * n_out, memory + f.V_kept(), T(0));
    clear_gaps(f.V, memory + f.V_kept(), U_kept - f.V_kept(), members);
    clear_gaps(f.U, memory + U_kept, all - U_kept, members);
}

// Any of the gradients may be left out; that of x or V needs that of sigma.
template <class T>
void svd_backward(Index m, Index n_in, Index n_out, Index V_reflectors, Index U_reflectors, int kind, Index V_block,
                  Index U_block, Index k, int threads, std::uintptr_t gradient, const Strides &gradient_strides, std::uintptr_t V,
                  const Strides &V_strides, std::uintptr_t sigma, std::uintptr_t signs, std::uintptr_t U, const Strides &U_strides,
                  std::uintptr_t kept, Index U_kept, int members, std::uintptr_t dx, std::uintptr_t dV,
                  const Strides &dV_strides, std::uintptr_t dsigma, std::uintptr_t dU, const Strides &dU_strides,
                  std::uintptr_t dbias) {
    nb::gil_scoped_release release;
    const Factors<T> f(m, n_in, n_out, V_reflectors, U_reflectors, kind, V_block, U_block, k, threads, sigma, signs);
    T *const memory = reinterpret_cast<T *>(kept);
    for_batch(f.plan, 1, f.lay_out(2), [&](const auto &benches, Team &team, Index) {
        Member<T> v = benches.V.member(f.V, team, matrix<const T>(V, V_strides, 0));
        Member<T> u = benches.U.member(f.U, team, matrix<const T>(U, U_strides, 0));
        u.load(matrix<const T>(gradient, gradient_strides, 0));
        if (dbias) u.sum_columns(reinterpret_cast<T *>(dbias));
        if (dU) u.load({memory + f.U_output(), n_out, 1}, 1);
        u.backward({f.U, memory + U_kept, team.size, team.rank, team.size == members}, matrix<T>(dU, dU_strides, 0));
        if (!dsigma) return;
        v.load({memory, n_in, 1}, 1);
        v.gradient_of_factors(u, f.diagonal, reinterpret_cast<T *>(dsigma));
        if (!dx && !dV) return;
        v.load_scaled(u, f.diagonal);
        v.backward({f.V, memory + f.V_kept(), team.size, team.rank, team.size == members}, matrix<T>(dV, dV_strides, 0));
        if (dx) v.store({reinterpret_cast<T *>(dx), n_in, 1});
        // Compact reflectors leave out their diagonal, which U and V may share.
        const Strided<T> dV_matrix = matrix<T>(dV, dV_strides, 0);
        if (dV && f.V.kind == Kind::compact)
            for (Index i = team.rank; i < f.V.reflectors(); i += team.size) dV_matrix(i, i) = T(0);
    });
}

template <class T> void define(nb::module_ &m, const std::string &dtype) {
    m.def(("plan" + dtype).c_str(), &plan<T>);
    m.def(("forward" + dtype).c_str(), &forward<T>);
    m.def(("backward" + dtype).c_str(), &backward<T>);
    m.def(("clear" + dtype).c_str(), &clear<T>);
    m.def(("svd_plan" + dtype).c_str(), &svd_plan<T>);
    m.def(("svd_forward" + dtype).c_str(), &svd_forward<T>);
    m.def(("svd_backward" + dtype).c_str(), &svd_backward<T>);
    m.def(("svd_clear" + dtype).c_str(), &svd_clear<T>);
}

} // namespace

NB_MODULE(FASTH_MODULE, m) {
#if !defined(_WIN32)
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif
    m.attr("isa") = FASTH_ISA;
#ifdef _OPENMP
    m.attr("openmp") = true;
#else
    m.attr("openmp") = false;
#endif
    define<float>(m, "_float32");
    define<double>(m, "_float64");
    nb::set_leak_warnings(false); // at exit, torch and Python unload in an order that no module can influence
}
