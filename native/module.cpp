// The Python module: addresses, sizes and strides of CPU tensors in, results written in place. src/fasth/reflections/
// native.py checks every argument before it calls.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include <array>
#include <atomic>
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

// Runs work(problem's workspace, team, b) for every matrix of the batch: with one team for all in turn, or, when there
// are many, with one matrix a thread.
template <class T, class Work>
void for_batch(const Problem &p, Index batch, int sets, int threads, const Work &work) {
    if (forked || batch * p.m * p.reflectors() * p.d < Index(1) << 20) threads = 1; // the latter: too little to share
    const bool many = batch >= threads;
    const int members = many ? 1 : int(std::min<Index>(threads, p.panels()));
    const int teams = many ? int(std::max<Index>(1, std::min<Index>(threads, batch))) : 1;
    Arena arena;
    std::vector<Workspace<T>> workspaces;
    std::vector<typename Workspace<T>::Own> owns;
    for (const bool counting : {true, false}) {
        workspaces.clear();
        owns.clear();
        for (int team = 0; team < teams; ++team) {
            workspaces.emplace_back(p, members, sets, arena);
            for (int i = 0; i < members; ++i) owns.push_back(Workspace<T>::own(p, members, sets, arena));
        }
        if (counting) arena.provide();
    }
    Meeting meeting;
    const auto run = [&](int thread) {
        for (Index b = many ? thread : 0; b < batch; b += many ? teams : 1)
            work(workspaces[std::size_t(many ? thread : 0)], owns[std::size_t(thread)], Team{members, many ? 0 : thread, &meeting}, b);
    };
    const int running = teams * members;
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
        return complete ? void() : for_batch<T>(p, batch, sets, 1, work);
    }
#endif
    run(0);
}

template <class T> Problem problem(Index m, Index r, Index d, int kind, bool transpose, Index k) {
    return {m, r, d, Kind(kind), transpose, k, Problem::panel_width<T>};
}

template <class T>
Index kept_size(Index m, Index r, Index d, int kind, bool transpose, Index k, bool with_states) {
    return Kept<T>::size(problem<T>(m, r, d, kind, transpose, k), with_states);
}

template <class T>
void forward(Index m, Index r, Index d, int kind, bool transpose, Index k, Index batch, int threads, std::uintptr_t x, const Strides &x_strides, std::uintptr_t V,
             const Strides &V_strides, std::uintptr_t out, std::uintptr_t kept, bool with_states) {
    nb::gil_scoped_release release;
    const Problem p = problem<T>(m, r, d, kind, transpose, k);
    const Strides out_strides{p.m * p.d, p.d, 1};
    for_batch<T>(p, batch, 1, threads, [&](const auto &workspace, const auto &own, Team team, Index b) {
        T *const memory = kept ? reinterpret_cast<T *>(kept) + b * Kept<T>::size(p, with_states) : nullptr;
        Member<T>(p, team, matrix<const T>(V, V_strides, b), workspace, own)
            .forward(matrix<const T>(x, x_strides, b), matrix<T>(out, out_strides, b), {p, memory, with_states});
        team.meet();
    });
}

template <class T>
void backward(Index m, Index r, Index d, int kind, bool transpose, Index k, Index batch, int threads, std::uintptr_t gradient, const Strides &gradient_strides,
              std::uintptr_t output, std::uintptr_t V, const Strides &V_strides, std::uintptr_t kept, bool with_states,
              std::uintptr_t dx, std::uintptr_t dV, const Strides &dV_strides) {
    nb::gil_scoped_release release;
    const Problem p = problem<T>(m, r, d, kind, transpose, k);
    const Strides rows{p.m * p.d, p.d, 1};
    for_batch<T>(p, batch, dV ? 2 : 1, threads, [&](const auto &workspace, const auto &own, Team team, Index b) {
        T *const memory = kept ? reinterpret_cast<T *>(kept) + b * Kept<T>::size(p, with_states) : nullptr;
        Member<T>(p, team, matrix<const T>(V, V_strides, b), workspace, own)
            .backward(matrix<const T>(gradient, gradient_strides, b), matrix<const T>(output, rows, b),
                      {p, memory, with_states}, matrix<T>(dx, rows, b), matrix<T>(dV, dV_strides, b));
        team.meet();
    });
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
    m.def("kept_size_float32", &kept_size<float>);
    m.def("kept_size_float64", &kept_size<double>);
    m.def("forward_float32", &forward<float>);
    m.def("forward_float64", &forward<double>);
    m.def("backward_float32", &backward<float>);
    m.def("backward_float64", &backward<double>);
    nb::set_leak_warnings(false); // at exit, torch and Python unload in an order that no module can influence
}
