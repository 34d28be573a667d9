// One call: x Qᵀ of a batch, or x Wᵀ with W = U Σ Vᵀ, and the gradients, on the threads of a schedule.
#pragma once

#include "few_rows.hpp"
#include "schedule.hpp"
#include "sweep.hpp"

namespace fasth {

template <class T> struct Batch { // (batch, rows, columns) of any strides, or nothing
    T *data;
    Index batch_stride, row_stride, column_stride;
    Strided<T> operator[](Index b) const { return {data ? data + b * batch_stride : nullptr, row_stride, column_stride}; }
};

// Rows times a batch of matrices. `saved` belongs to the first matrix; T is in the workspace if it is not saved. Without data
// in dV no gradient is computed.
template <class T> struct Product {
    Problem<T> p;
    Batch<const T> V;
    Saved<T> saved;
    Batch<T> dV;
};

template <class T> struct Vector {
    T *data = nullptr;
    Index count = 0;
};

// Gradients that are sums over rows. The first team sums in place; other teams on the same matrix have their own sums.
template <class T, int products> struct Sums {
    Strided<T> dV[products];
    T *vectors[2];
};

// total += sum, for the reflectors' own entries only. The members of a team share out lines of adjacent numbers.
template <class T> void add_sum(const Problem<T> &p, Strided<T> sum, Strided<T> total, const Team &team) {
    const bool by_columns = total.column_major();
    const Piece all{0, 0, p.reflectors(), p.d, p.triangular(), p.compact()};
    for (Index l = team.rank; l < (by_columns ? all.width : all.rows); l += team.size) {
        const Index start = by_columns ? 0 : all.start(l), stop = by_columns ? all.stop(l) : all.width;
        if (start >= stop) continue;
        T *const to = by_columns ? &total(0, l) : &total(l, start);
        const T *const from = by_columns ? &sum(0, l) : &sum(l, start);
        const Index to_step = by_columns ? 1 : total.column_stride, from_step = by_columns ? sum.row_stride : sum.column_stride;
        if (to_step == 1 && from_step == 1)
            for (Index i = 0; i < stop - start; ++i) to[i] += from[i];
        else
            for (Index i = 0; i < stop - start; ++i) to[i * to_step] += from[i * from_step];
    }
}
// The gradient of V from the gradient of the scaled reflectors, after the sum is complete: a summand may overflow.
template <class T> void scale_sum(const Problem<T> &p, const Saved<T> &saved, Strided<T> total, Team &team) {
    const Piece all{0, 0, p.reflectors(), p.d, p.triangular(), p.compact()};
    const auto scale = [&](Index i) { return saved.scales(i / p.k)[i % p.k]; };
    bool scaled = false;
    for (Index i = 0; i < all.rows; ++i) scaled |= scale(i) != T(1);
    if (!scaled) return;
    team.barrier();
    for (Index i = team.rank; i < all.rows; i += team.size)
        for (Index c = all.start(i); c < all.width; ++c) total(i, c) /= scale(i);
}

// One product; or two, for V and then for U, with singular values between them.
template <class T, int products> struct Call {
    Schedule schedule;
    Product<T> product[products];
    bool finds_T;         // computes T: in forward, or if it was not saved
    bool back;            // needs memory for the output or the gradient of V too
    Vector<T> vectors[2]; // gradients of sigma and bias

    // Calls work(members, matrix, first row, sums) for all rows; `members` holds a Sweep or a FewRows for each product.
    template <class Work> void run(const Work &work) const {
        if constexpr (has_inner_products<T>)
            if (product[0].p.few_rows) return run_as<FewRows<T>>(schedule, work);
        run_as<Sweep<T>>(schedule, work);
    }

  private:
    // The workspace holds a bench for every team, the sums of all teams but the first, and T if it is not saved.
    struct Memory {
        char *data;
        Index bench_size, sums_size, T_size;
        int benches, sums;
        Index size(int places) const { return benches * bench_size + sums * sums_size + places * T_size; }
        Carver bench(int team) const { return Carver(data + team * bench_size); }
        Carver sums_of(int team) const { return Carver(data + benches * bench_size + (team - 1) * sums_size); }
        Carver T_at(int place) const { return Carver(data + benches * bench_size + sums * sums_size + place * T_size); }
    };
    template <class Member> struct Bench { // the workspace of one team, as a member sees it
        typename Member::Shared shared[products];
        typename Member::Own own[products];
    };
    template <class Member> Bench<Member> take_bench(const Schedule &s, int rank, Carver &carver) const {
        Bench<Member> bench;
        for (int i = 0; i < products; ++i) {
            Problem<T> largest = product[i].p;
            largest.m = s.largest_part();
            bench.shared[i] = Member::take_shared(largest, s.members, back, carver);
            for (int member = 0; member < s.members; ++member) {
                const auto own = Member::take_own(largest, s.members, back, carver);
                if (member == rank) bench.own[i] = own;
            }
        }
        return bench;
    }
    Sums<T, products> take_sums(Carver &carver) const {
        Sums<T, products> sums;
        for (int i = 0; i < products; ++i) {
            const Problem<T> &p = product[i].p;
            const Strided<T> total = product[i].dV[0];
            if (!total.data)
                sums.dV[i] = {};
            else if (i > 0 && p.shares) // the other half of a shared matrix
                sums.dV[i] = sums.dV[0].transposed();
            else if (i > 0 && product[0].p.adds)
                sums.dV[i] = sums.dV[0];
            else
                sums.dV[i] = {carver.take<T>(p.r * p.d), total.column_major() ? 1 : p.d, total.column_major() ? p.r : 1};
        }
        for (int i = 0; i < 2; ++i) sums.vectors[i] = vectors[i].data ? carver.take<T>(vectors[i].count) : nullptr;
        return sums;
    }
    Sums<T, products> sums_of(int team, Index b, const Memory &memory) const {
        if (team > 0 && memory.sums) {
            Carver carver = memory.sums_of(team);
            return take_sums(carver);
        }
        Sums<T, products> sums;
        for (int i = 0; i < products; ++i) sums.dV[i] = product[i].dV[b];
        for (int i = 0; i < 2; ++i) sums.vectors[i] = vectors[i].data;
        return sums;
    }

    template <class Member, class Work> void run_as(const Schedule &s, const Work &work) const {
        Carver bench, sums, blocks_of_T; // without memory, they count sizes
        take_bench<Member>(s, 0, bench);
        take_sums(sums);
        for (const Product<T> &side : product) take_T(side.saved, blocks_of_T);
        Memory memory{nullptr, bench.size(), sums.size(), blocks_of_T.size(), s.teams, back && s.parts > 1 ? s.teams - 1 : 0};
        const Workspace workspace(memory.size(s.batch > 1 ? s.teams : 1));
        memory.data = workspace.data();
        Team::Barrier barriers[1 + Schedule::most_teams];
        if (!on_threads(s.threads(), [&](int thread) { run_thread<Member>(s, memory, barriers, thread, work); }))
            run_as<Member>(s.on_one_thread(), work);
    }

    template <class Member, class Work>
    void run_thread(const Schedule &s, const Memory &memory, Team::Barrier *barriers, int thread, const Work &work) const {
        const int number = thread / s.members;
        Team all(s.threads(), thread, barriers[0]);
        Team team(s.members, thread % s.members, barriers[s.members > 1 ? 1 + number : 0]); // a single member needs no barrier
        const Team teams(s.teams, number, barriers[0]);
        Carver carver = memory.bench(number);
        const Bench<Member> bench = take_bench<Member>(s, team.rank, carver);
        const bool batched = s.batch > 1; // teams share out matrices, else parts of the rows
        for (Index b = batched ? number : 0; b < s.batch; b += batched ? s.teams : 1) {
            Saved<T> saved[products];
            Carver blocks_of_T = memory.T_at(batched ? number : 0);
            for (int i = 0; i < products; ++i) saved[i] = take_T(product[i].saved.in_batch(b), blocks_of_T);
            if (finds_T) find_T(bench, b, saved, batched ? team : all);
            const Sums<T, products> sums = sums_of(number, b, memory);
            for (Index turn = 0; turn < s.parts; ++turn) {
                if (!batched && !teams.owns(turn)) continue;
                const Index part = s.parts - 1 - turn; // the last rows of the identity take the most work
                const auto member = [&](int i, const Problem<T> &p) {
                    return Member(p, team, product[i].V[b], bench.shared[i], bench.own[i], saved[i].from_row(p.first));
                };
                const Problem<T> p = s.part_of(product[0].p, part, number, turn < s.teams);
                if constexpr (products == 1) {
                    Member members[] = {member(0, p)};
                    work(members, b, p.first, sums);
                } else {
                    const Problem<T> second = s.part_of(product[1].p, part, number, turn < s.teams);
                    Member members[] = {member(0, p), member(1, second)};
                    work(members, b, p.first, sums);
                }
                team.barrier();
            }
            if (back) finish(s, b, saved, memory, batched ? team : all);
        }
    }

    // Puts T and the scales into the workspace if they are not saved.
    static Saved<T> take_T(Saved<T> saved, Carver &carver) {
        if (saved.all_T) return saved;
        saved.all_T = carver.take<T>(saved.T_size());
        saved.all_scales = carver.take<T>(saved.blocks * saved.K);
        return saved;
    }
    template <class Bench> void find_T(const Bench &bench, Index b, const Saved<T> (&saved)[products], Team &team) const {
        for (int i = 0; i < products; ++i) {
            const Problem<T> &p = product[i].p;
            TFinder<T>(p, product[i].V[b], bench.own[i]).find_share(team, saved[i]);
            const Index padded = saved[i].M - p.m; // rows of Z
            for (Index block = team.rank; saved[i].Z && block < p.blocks(); block += team.size)
                std::fill_n(saved[i].Z_of(block) + p.m * saved[i].K, padded * saved[i].K, T(0));
        }
        team.barrier();
    }
    // Adds up the sums of all teams, and fills in the diagonal of compact reflectors.
    void finish(const Schedule &s, Index b, const Saved<T> (&saved)[products], const Memory &memory, Team &all) const {
        const Sums<T, products> total = sums_of(0, b, memory);
        const auto is_own = [&](int i) { return total.dV[i].data && !product[i].p.adds; };
        if (s.parts > 1) {
            all.barrier();
            for (int team = 1; team < s.teams; ++team) {
                const Sums<T, products> sums = sums_of(team, b, memory);
                for (int i = 0; i < products; ++i)
                    if (is_own(i)) add_sum(product[i].p, sums.dV[i], total.dV[i], all);
                for (int i = 0; i < 2; ++i)
                    for (Index c = all.rank; total.vectors[i] && c < vectors[i].count; c += all.size)
                        total.vectors[i][c] += sums.vectors[i][c];
            }
            for (int i = 0; i < products; ++i)
                if (is_own(i)) scale_sum(product[i].p, saved[i], total.dV[i], all);
        }
        fill_diagonals(total, b, all);
    }
    // The gradient of the signs, on the diagonal of compact reflectors.
    void fill_diagonals(const Sums<T, products> &total, Index b, Team &team) const {
        const bool shared = product[0].p.shares;
        if (!product[0].p.compact()) return;
        if (!shared) team.barrier(); // after the members wrote zeros to the gradient
        for (int i = 0; i < (shared ? 1 : products); ++i)
            for (Index j = team.rank; total.dV[i].data && j < product[i].p.reflectors(); j += team.size)
                total.dV[i](j, j) = sign_guard(product[i].V[b](j, j));
    }
};

// x Qᵀ or x Q of a batch.
template <class T> void forward(const Call<T, 1> &call, Batch<const T> x, Batch<T> out, Batch<T> copy = {}) {
    call.run([&](auto &member, Index b, Index row, const auto &) {
        member[0].load(x[b].from_row(row));
        member[0].forward();
        member[0].store(out[b].from_row(row));
        if (copy.data) member[0].store(copy[b].from_row(row));
    });
}
template <class T> void backward(const Call<T, 1> &call, Batch<const T> g, Batch<const T> out, Batch<T> dx) {
    call.run([&](auto &member, Index b, Index row, const auto &sums) {
        member[0].load(g[b].from_row(row));
        if (sums.dV[0].data) member[0].load(out[b].from_row(row), 1);
        member[0].backward(dx[b].from_row(row), sums.dV[0]);
    });
}

// x Wᵀ with W = Q_U[:, :k] Σ Q_Vᵀ[:k]: first x Q_V, then each column times its singular value, then Q_Uᵀ. Both products have
// the same team, and a member has the same columns, or rows, of both, so no barrier is needed between them.
template <class T> struct SVDRows { // x Q_V and x Wᵀ, without the bias
    Strided<T> inner, output;
};
template <class T>
void forward(const Call<T, 2> &call, const Diagonal<T> &diagonal, Strided<const T> x, const T *bias, const SVDRows<T> &saved,
             Strided<T> out) {
    call.run([&](auto &member, Index, Index row, const auto &) {
        auto &first = member[0], &second = member[1];
        first.load(x.from_row(row));
        first.forward();
        second.load_scaled(first, diagonal);
        second.forward();
        if (saved.inner.data) first.store(saved.inner.from_row(row));
        if (saved.output.data) second.store(saved.output.from_row(row));
        if (bias) second.add(bias);
        second.store(out.from_row(row));
    });
}
template <class T>
void backward(const Call<T, 2> &call, const Diagonal<T> &diagonal, Strided<const T> g, const SVDRows<const T> &saved,
              Strided<T> dx) {
    call.run([&](auto &member, Index, Index row, const auto &sums) {
        auto &first = member[0], &second = member[1];
        const Strided<T> dV = sums.dV[0], dU = sums.dV[1];
        T *const dsigma = sums.vectors[0], *const dbias = sums.vectors[1];
        second.load(g.from_row(row));
        if (dbias) second.sum_columns(g.from_row(row), dbias);
        if (dU.data) second.load(saved.output.from_row(row), 1);
        second.backward({}, dU);
        if (dsigma || dV.data) first.load(saved.inner.from_row(row), 1);
        if (dsigma) first.gradient_of_sigma(second, diagonal, dsigma);
        if (!dx.data && !dV.data) return;
        first.load_scaled(second, diagonal);
        first.backward(dx.from_row(row), dV);
    });
}

} // namespace fasth
