// x Qᵀ and its gradients over blocks of reflections, on one thread or a team that shares the columns.
//
// The notation is that of src/fasth/reflections/README.md; README.md beside this file says why it is done this way.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>

#include "products.hpp"

// phases.cpp defines this to find out where the time goes.
#ifndef FASTH_PHASE
#define FASTH_PHASE(name)
#endif

namespace fasth {

enum class Kind { full, triangular, compact }; // compact: triangular with a diagonal of ones that is not stored

template <class T> struct Strided { // (rows, columns) anywhere in memory
    T *data;
    Index row_stride, column_stride;
    T &operator()(Index i, Index j) const { return data[i * row_stride + j * column_stride]; }
};

struct Problem {
    Index m, r, d; // rows of x, reflectors, their length
    Kind kind;
    bool transpose;
    Index k; // reflections in a block
    Index W; // columns in a panel

    template <class T> static constexpr Index panel_width = 256 / sizeof(T);

    bool triangular() const { return kind != Kind::full; }
    Index reflectors() const { return triangular() ? std::min(r, d) : r; } // the others are zero
    Index blocks() const { return (reflectors() + k - 1) / k; }
    Index size_of(Index block) const { return std::min(k, reflectors() - block * k); }
    Index padded_k() const { return round_up(k, padding); }
    Index panels() const { return (d + W - 1) / W; }
    Index first_panel(Index block) const { return triangular() ? block * k / W : 0; }
    // How many columns of a panel lie left of all the block's reflectors, in half panels: no work is spent on them.
    Index skipped(Index block, Index panel) const {
        return triangular() && panel == first_panel(block) && block * k % W >= W / 2 ? W / 2 : 0;
    }
    // Which block acts as number `step`: x Qᵀ takes the last block first, x Q the first.
    Index block_at(Index step, bool transposed) const { return transposed ? step : blocks() - 1 - step; }
};

// A barrier that spins, since all arrive within microseconds of each other, and where they do not (more threads than
// processors) gives way. OpenMP's own makes a system call every time.
class Meeting {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<unsigned> held{0};

  public:
    void wait_for(int size) {
        const unsigned number = held.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            held.store(number + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; held.load(std::memory_order_acquire) == number;) {
            if (spins < 2000)
                pause(), ++spins;
            else
                std::this_thread::yield();
        }
    }

  private:
    static void pause() {
#if defined(__x86_64__) || defined(_M_X64)
        _mm_pause();
#endif
    }
};

// The members of a team run the same code, each on its own columns: the panels rank, rank + size, … So each reads, packs
// and updates only those, and triangular problems stay balanced. They meet once a block, to add up inner products.
struct Team {
    int size, rank;
    Meeting *meeting;
    void meet() const {
        if (size > 1) meeting->wait_for(size);
    }
};

// What the forward pass keeps for the backward pass: scales and T of every block, and, if there is room, every Z and
// the rows after every block but the one that acts last, whose rows are the output.
template <class T> struct Kept {
    T *scales = nullptr, *factors = nullptr, *Z = nullptr, *states = nullptr;

    static Index size(const Problem &p, bool with_states) {
        Index count = round_up(p.reflectors(), padding) + p.blocks() * p.padded_k() * p.padded_k();
        if (with_states && p.blocks())
            count += p.blocks() * p.m * p.padded_k() + panels_before(p, p.blocks()) * p.m * p.W;
        return count;
    }
    Kept() = default;
    Kept(const Problem &p, T *memory, bool with_states) {
        if (!memory) return;
        scales = memory;
        factors = scales + round_up(p.reflectors(), padding);
        if (!with_states) return;
        Z = memory + size(p, false);
        states = Z + p.blocks() * p.m * p.padded_k();
    }
    T *factor_of(const Problem &p, Index block) const { return factors + block * p.padded_k() * p.padded_k(); }
    T *Z_of(const Problem &p, Index block) const { return Z + block * p.m * p.padded_k(); }
    T *state_of(const Problem &p, Index block) const { return states + panels_before(p, block) * p.m * p.W; }

  private:
    static Index panels_before(const Problem &p, Index block) {
        Index count = 0;
        for (Index b = 0; b < block; ++b)
            if (b != p.block_at(p.blocks() - 1, p.transpose)) count += p.panels() - p.first_panel(b);
        return count;
    }
};

// Memory taken in one piece before the work starts, so that nothing can fail in the middle of it: the same calls first
// count what is needed, then hand it out.
class Arena {
  public:
    Arena() = default;
    ~Arena() { ::operator delete(memory, std::align_val_t(64)); }
    Arena(const Arena &) = delete;
    Arena &operator=(const Arena &) = delete;

    template <class T> T *take(Index count) {
        const Index start = used;
        used += round_up(count * Index(sizeof(T)), 64);
        return memory ? reinterpret_cast<T *>(memory + start) : nullptr;
    }
    void provide() {
        memory = static_cast<char *>(::operator new(std::size_t(used), std::align_val_t(64)));
        used = 0;
    }

  private:
    char *memory = nullptr;
    Index used = 0;
};

// The memory of a team. `sets` of m rows run through the blocks: x; or a gradient; or a gradient and the output.
template <class T> struct Workspace {
    struct Own { // a member's, on its own panels and blocks
        T *Y, *Yt, *S, *scale, *factor, *other, *Z, *N, *dY;
        const T **now; // where the rows of each panel are at present
    };
    T *rows[2] = {};  // each (panels, m, W)
    T *sums[2] = {};  // used in turn: (members, sets · m + kp, kp)
    Index sum_size;

    Workspace(const Problem &p, int members, int sets, Arena &arena) : sum_size((sets * p.m + p.padded_k()) * p.padded_k()) {
        for (int set = 0; set < sets; ++set) rows[set] = arena.take<T>(p.panels() * p.m * p.W);
        for (T *&slots : sums) slots = arena.take<T>(members * sum_size);
    }
    static Own own(const Problem &p, int members, int sets, Arena &arena) {
        const Index kp = p.padded_k(), panels = (p.panels() + members - 1) / members;
        Own own;
        own.Y = arena.take<T>(panels * kp * p.W);
        own.Yt = arena.take<T>(panels * kp * p.W);
        own.S = arena.take<T>(sets * p.m * kp + kp * kp);
        own.scale = arena.take<T>(kp);
        own.factor = arena.take<T>(kp * kp);
        own.other = arena.take<T>(kp * kp);
        own.Z = arena.take<T>(sets * p.m * kp);
        own.N = arena.take<T>(kp * kp);
        own.dY = arena.take<T>(kp * p.W);
        own.now = arena.take<const T *>(panels);
        return own;
    }
};

// One member's part of the work on one matrix of the batch.
template <class T> class Member {
    const Problem &p;
    const Team team;
    const Strided<const T> V;
    const Workspace<T> &shared;
    const typename Workspace<T>::Own own;
    const Index kp, panels, W;
    T *G = nullptr; // (kb, kp), behind the sums S
    int turn = 0;   // which of the two places for sums is next

  public:
    Member(const Problem &p, Team team, Strided<const T> V, const Workspace<T> &shared,
           const typename Workspace<T>::Own &own)
        : p(p), team(team), V(V), shared(shared), own(own), kp(p.padded_k()), panels(p.panels()), W(p.W) {}

    // out = x Qᵀ, or x Q if p.transpose.
    void forward(Strided<const T> x, Strided<T> out, const Kept<T> &kept) {
        for_panels(0, [&](Index q) {
            load(x, q, shared.rows[0] + q * p.m * W);
            now(q) = shared.rows[0] + q * p.m * W;
        });
        for (Index step = 0; step < p.blocks(); ++step) {
            const Index block = p.block_at(step, p.transpose), kb = p.size_of(block), first = p.first_panel(block);
            reflectors(block, 1, true, nullptr);
            factors(kb, p.transpose);
            multiply_by_factor(own.S, own.factor, own.Z);
            if (kept.scales) keep(block, kept);
            T *const state = kept.Z && step + 1 < p.blocks() ? kept.state_of(p, block) : nullptr;
            for_panels(first, [&](Index q) {
                FASTH_PHASE(update);
                T *const after = state ? state + (q - first) * p.m * W : shared.rows[0] + q * p.m * W;
                if (state && q + team.size < panels) prefetch<true>(after + team.size * p.m * W, p.m, W, W);
                const Index skip = p.skipped(block, q);
                product<Result::subtract, T>(p.m, W - skip, {kb, own.Z, kp, 1, {Y(q) + skip, W}}, {now(q) + skip, W},
                                             {after + skip, W});
                if (skip && after != now(q)) copy<T>(p.m, skip, {now(q), W}, {after, W});
                now(q) = after;
            });
        }
        for_panels(0, [&](Index q) { store(now(q), q, out); });
    }

    // The gradients of x and V from that of the output; either may be left out (no data).
    void backward(Strided<const T> gradient, Strided<const T> output, const Kept<T> &kept, Strided<T> dx, Strided<T> dV) {
        const bool states = kept.Z, way = !p.transpose;
        const int sets = dV.data && !states ? 2 : 1; // without states the output runs back beside its gradient
        for_panels(0, [&](Index q) {
            load(gradient, q, shared.rows[0] + q * p.m * W);
            now(q) = shared.rows[0] + q * p.m * W;
            if (dV.data) load(output, q, shared.rows[1] + q * p.m * W);
        });
        for (Index step = 0; step < p.blocks(); ++step) {
            const Index block = p.block_at(step, way), kb = p.size_of(block), first = p.first_panel(block);
            if (kept.scales) prefetch<false>(kept.factor_of(p, block), kp, kp, kp); // another member may have kept them
            if (states) prefetch<false>(kept.Z_of(p, block), p.m, kp, kp);
            reflectors(block, sets, !kept.scales, kept.scales ? kept.scales + block * p.k : nullptr);
            const T *factor = own.factor;
            if (kept.scales)
                factor = kept.factor_of(p, block);
            else
                factors(kb, way);
            T *const R = own.Z;
            multiply_by_factor(own.S, factor, R);
            const T *Z = states ? kept.Z_of(p, block) : own.Z + p.m * kp;
            if (sets == 2) { // the way back gives −Z
                multiply_by_factor(own.S + p.m * kp, factor, own.Z + p.m * kp);
                for (Index i = p.m * kp; i < 2 * p.m * kp; ++i) own.Z[i] = -own.Z[i];
            }
            if (dV.data) antisymmetric_half(Z, R);
            const T *const state = states && step > 0 ? kept.state_of(p, block) : nullptr;
            for_panels(first, [&](Index q) {
                T *const g = shared.rows[0] + q * p.m * W;
                const Index skip = p.skipped(block, q);
                if (dV.data) {
                    const T *const after = state ? state + (q - first) * p.m * W : shared.rows[1] + q * p.m * W;
                    if (q + team.size < panels) {
                        if (state) prefetch<false>(after + team.size * p.m * W, p.m, W, W);
                        if (dV.column_stride == 1 && !streams(dV))
                            prefetch<true>(&dV(block * p.k, (q + team.size) * W), kb, dV.row_stride, W);
                    }
                    gradient_of_panel(block, q, Z, R, g, after, dV);
                    if (sets == 2) {
                        FASTH_PHASE(update);
                        T *const o = shared.rows[1] + q * p.m * W;
                        product<Result::add, T>(p.m, W - skip, {kb, Z, kp, 1, {Y(q) + skip, W}}, {o + skip, W}, {o + skip, W});
                    }
                }
                FASTH_PHASE(update);
                product<Result::subtract, T>(p.m, W - skip, {kb, R, kp, 1, {Y(q) + skip, W}}, {g + skip, W}, {g + skip, W});
            });
            if (dV.data && p.kind == Kind::triangular) clear(dV, block * p.k, block * p.k + kb, first * W);
        }
        if (dV.data && p.kind == Kind::triangular) clear(dV, p.reflectors(), p.r, p.d);
        if (dx.data) for_panels(0, [&](Index q) { store(shared.rows[0] + q * p.m * W, q, dx); });
        fence();
    }

  private:
    template <class Action> void for_panels(Index first, Action action) const {
        const Index skipped = (first - team.rank + team.size - 1) / team.size;
        for (Index q = team.rank + std::max<Index>(skipped, 0) * team.size; q < panels; q += team.size) action(q);
    }
    const T *&now(Index q) const { return own.now[q / team.size]; }
    T *Y(Index q) const { return own.Y + q / team.size * kp * W; }   // (kp, W)
    T *Yt(Index q) const { return own.Yt + q / team.size * kp * W; } // (W, kp)

    // Y and Yᵀ of the block in this member's panels, and, added up over the team, S = rows · Yᵀ for every set of rows
    // and, if wanted, G = Y Yᵀ. Scales are those given, or, where lengths would overflow or vanish, found here.
    void reflectors(Index block, int sets, bool gram, const T *scales) {
        const Index kb = p.size_of(block);
        std::fill(own.scale, own.scale + kb, T(1));
        if (scales) std::copy(scales, scales + kb, own.scale);
        const bool scaled = std::any_of(own.scale, own.scale + kb, [](T s) { return s != T(1); });
        add_up(block, sets, gram, [&](Index q) {
            pack(block, q);
            if (scaled) rescale(q, kb);
        });
        if (gram && !lengths_are_safe(kb)) {
            find_scales(block);
            add_up(block, sets, gram, [&](Index q) { rescale(q, kb); });
        }
    }

    template <class Prepare> void add_up(Index block, int sets, bool gram, const Prepare &prepare) {
        const Index kb = p.size_of(block), count = sets * p.m * kp + (gram ? kp * kp : 0);
        // Two places in turn: a member that runs ahead does not write where another still reads.
        T *const slots = shared.sums[turn], *const mine = slots + team.rank * shared.sum_size;
        turn ^= 1;
        G = own.S + sets * p.m * kp;
        std::fill(mine, mine + count, T(0));
        for_panels(p.first_panel(block), [&](Index q) {
            prepare(q);
            const Index skip = p.skipped(block, q);
            if (V.column_stride == 1 && q + team.size < panels)
                prefetch<false>(&V(block * p.k, (q + team.size) * W), kb, V.row_stride, W);
            T *sum = mine;
            for (int set = 0; set < sets; ++set, sum += p.m * kp) {
                FASTH_PHASE(S);
                const T *const rows = set == 0 ? now(q) : shared.rows[set] + q * p.m * W;
                product<Result::add, T>(p.m, kp, {W - skip, rows + skip, W, 1, {Yt(q) + skip * kp, kp}}, {sum, kp}, {sum, kp});
            }
            if (gram) { // above the diagonal, more or less: what lies left of it in steps of `padding` is not computed
                FASTH_PHASE(gram);
                for (Index j = 0; j < kb; j += padding)
                    product<Result::add, T>(std::min(padding, kb - j), kp - j,
                                            {W - skip, Y(q) + j * W + skip, W, 1, {Yt(q) + skip * kp + j, kp}},
                                            {sum + j * kp + j, kp}, {sum + j * kp + j, kp});
            }
        });
        FASTH_PHASE(meet);
        team.meet();
        // Every member adds up all parts in the same order, so all of them take the same decisions.
        std::copy(slots, slots + count, own.S);
        for (int member = 1; member < team.size; ++member) {
            const T *const part = slots + member * shared.sum_size;
            for (Index i = 0; i < count; ++i) own.S[i] += part[i];
        }
    }

    // Within these bounds no product of lengths and their inverses leaves the range of float32. NaN is not within.
    bool lengths_are_safe(Index kb) const {
        for (Index j = 0; j < kb; ++j)
            if (!(G[j * kp + j] > T(1e-12) && G[j * kp + j] < T(1e12))) return false;
        return true;
    }

    // The power of two below the largest entry of each reflector, found by the whole team.
    void find_scales(Index block) {
        const Index kb = p.size_of(block);
        T *const slots = shared.sums[turn], *const mine = slots + team.rank * shared.sum_size;
        turn ^= 1;
        std::fill(mine, mine + kb, T(0));
        for_panels(p.first_panel(block), [&](Index q) {
            for (Index j = 0; j < kb; ++j)
                for (Index c = 0; c < W; ++c) mine[j] = std::max(mine[j], std::abs(Y(q)[j * W + c]));
        });
        team.meet();
        for (Index j = 0; j < kb; ++j) {
            T largest = 0;
            for (int member = 0; member < team.size; ++member)
                largest = std::max(largest, slots[member * shared.sum_size + j]);
            own.scale[j] = largest > 0 && std::isfinite(largest) ? std::ldexp(T(1), std::ilogb(largest)) : T(1);
        }
    }

    void rescale(Index q, Index kb) const {
        for (Index j = 0; j < kb; ++j)
            for (Index c = 0; c < W; ++c) Y(q)[j * W + c] /= own.scale[j]; // exact, and right for subnormal numbers
        transpose<T>(kp, W, {Y(q), W}, {Yt(q), kp});
    }

    // Where a block meets a panel: which entries are there. Row j has those in columns start(j) to width; column c has
    // those in rows 0 to stop(c). Compact storage leaves out the diagonal.
    struct Piece {
        Index row, column, rows, width;
        bool triangular, compact;
        Index start(Index j) const {
            return triangular ? std::clamp<Index>(row + j + compact - column, 0, width) : 0;
        }
        Index stop(Index c) const {
            return triangular ? std::clamp<Index>(column + c + 1 - compact - row, 0, rows) : rows;
        }
        bool whole(Index W) const { return width == W && start(rows - 1) == 0; }
    };
    Piece piece(Index block, Index q) const {
        return {block * p.k, q * W, p.size_of(block), std::min(W, p.d - q * W), p.triangular(), p.kind == Kind::compact};
    }

    // Y and Yᵀ of the block in one panel, with zeros for whatever is not there.
    void pack(Index block, Index q) const {
        FASTH_PHASE(pack);
        const Piece at = piece(block, q);
        T *const y = Y(q), *const yt = Yt(q);
        const bool by_columns = V.row_stride == 1 && V.column_stride != 1;
        if (at.width == W && V.column_stride == 1) { // the usual case: all that is there in memory, then the zeros
            copy<T>(at.rows, W, {&V(at.row, at.column), V.row_stride}, {y, W});
            if (!at.whole(W))
                for (Index j = 0; j < at.rows; ++j) std::fill(y + j * W, y + j * W + at.start(j), T(0));
            std::fill(y + at.rows * W, y + kp * W, T(0));
        } else if (by_columns) {
            for (Index c = 0; c < W; ++c) {
                const Index stop = c < at.width ? at.stop(c) : 0;
                std::memcpy(yt + c * kp, &V(at.row, at.column + c), sizeof(T) * stop);
                std::fill(yt + c * kp + stop, yt + (c + 1) * kp, T(0));
            }
        } else {
            for (Index j = 0; j < at.rows; ++j) {
                T *const row = y + j * W;
                const Index start = at.start(j);
                std::fill(row, row + start, T(0));
                if (V.column_stride == 1)
                    std::memcpy(row + start, &V(at.row + j, at.column + start), sizeof(T) * (at.width - start));
                else
                    for (Index c = start; c < at.width; ++c) row[c] = V(at.row + j, at.column + c);
                std::fill(row + at.width, row + W, T(0));
            }
            std::fill(y + at.rows * W, y + kp * W, T(0));
        }
        if (at.compact)
            for (Index j = 0; j < at.rows; ++j) {
                const Index c = at.row + j - at.column;
                if (c >= 0 && c < at.width) (by_columns ? yt[c * kp + j] : y[j * W + c]) = T(1);
            }
        if (by_columns)
            transpose<T>(W, kp, {yt, kp}, {y, W});
        else
            transpose<T>(kp, W, {y, W}, {yt, kp});
    }

    // T = B⁻¹: (kp, kp) for B = striu(G) + ½ diag(G), by squares along the diagonal, the last first; rows that are only
    // there as padding are those of the identity. A zero reflector has T = 1 and Y = 0.
    void invert(Index kb, T *out) const {
        FASTH_PHASE(invert);
        T diagonal[padding];
        for (Index j = kp - padding; j >= 0; j -= padding) {
            for (Index i = 0; i < padding; ++i) {
                const T half = j + i < kb ? G[(j + i) * kp + j + i] / 2 : T(0);
                diagonal[i] = half == 0 ? T(1) : 1 / half;
            }
            T *const rows = out + j * kp;
            if (j) std::fill(rows, rows + padding * kp, T(0));
            invert_square<T>({G + j * kp + j, kp}, diagonal, {rows + j, kp});
            const Index right = j + padding, rest = kp - right; // −T_jj B_j,rest T_rest,rest
            if (rest == 0) continue;
            product<Result::set, T>(padding, rest, {rest, G + j * kp + right, kp, 1, {out + right * kp + right, kp}},
                                    {nullptr, 0}, {own.N, rest});
            product<Result::negative, T>(padding, rest, {padding, rows + j, kp, 1, {own.N, rest}}, {nullptr, 0},
                                         {rows + right, kp});
        }
    }

    // own.factor = T if `upper`, else Tᵀ; own.other the other one.
    void factors(Index kb, bool upper) const {
        T *const inverse = upper ? own.factor : own.other;
        invert(kb, inverse);
        transpose<T>(kp, kp, {inverse, kp}, {upper ? own.other : own.factor, kp});
    }

    // Z = S T or S Tᵀ: (m, kp).
    void multiply_by_factor(const T *S, const T *F, T *Z) const {
        FASTH_PHASE(factor);
        product<Result::set, T>(p.m, kp, {kp, S, kp, 1, {F, kp}}, {nullptr, 0}, {Z, kp});
    }

    // −N = stril(RᵀZ − ZᵀR) for x Qᵀ, striu for x Q.
    void antisymmetric_half(const T *Z, const T *R) const {
        FASTH_PHASE(antisymmetric);
        T *const N = own.N;
        for (Index j = 0; j < kp; j += padding) {
            const Index from = p.transpose ? j : 0, count = p.transpose ? kp - j : j + padding;
            const Matrix<T> rows{N + j * kp + from, kp};
            product<Result::set, T>(padding, count, {p.m, R + j, 1, kp, {Z + from, kp}}, {nullptr, 0}, rows);
            product<Result::subtract, T>(padding, count, {p.m, Z + j, 1, kp, {R + from, kp}}, {rows.data, kp}, rows);
        }
        for (Index i = 0; i < kp; ++i)
            if (p.transpose)
                std::fill(N + i * kp, N + i * kp + i + 1, T(0));
            else
                std::fill(N + i * kp + i, N + (i + 1) * kp, T(0));
    }

    // ∂Y = N Y − Zᵀ g − Rᵀ after, in one panel, into its place in dV.
    void gradient_of_panel(Index block, Index q, const T *Z, const T *R, const T *g, const T *after, Strided<T> dV) const {
        const Piece at = piece(block, q);
        const Index kb = at.rows;
        T *const dY = own.dY;
        FASTH_PHASE(gradient);
        const Index skip = p.skipped(block, q);
        const Term<T> terms[3] = {{kb, own.N, kp, 1, {Y(q) + skip, W}, p.transpose ? Left::strictly_upper : Left::strictly_lower},
                                  {p.m, Z, 1, kp, {g + skip, W}},
                                  {p.m, R, 1, kp, {after + skip, W}}};
        const bool scaled = std::any_of(own.scale, own.scale + kb, [](T s) { return s != T(1); });
        if (at.whole(W) && dV.column_stride == 1 && !scaled) { // the usual case, in place
            const Matrix<T> place{&dV(at.row, at.column), dV.row_stride};
            return streams(dV) ? product<Result::negative_streamed, T>(kb, W, terms, {nullptr, 0}, place)
                               : product<Result::negative, T>(kb, W, terms, {nullptr, 0}, place);
        }
        product<Result::negative, T>(kb, W - skip, terms, {nullptr, 0}, {dY + skip, W});
        for (Index j = 0; j < kb; ++j)
            if (own.scale[j] != T(1))
                for (Index c = 0; c < W; ++c) dY[j * W + c] /= own.scale[j];
        if (p.kind == Kind::triangular)
            for (Index j = 0; j < at.rows; ++j) std::fill(dY + j * W, dY + j * W + at.start(j), T(0));
        const auto first = [&](Index j) { return at.compact ? at.start(j) : 0; }; // the rest is not ours to write
        const auto last = [&](Index c) { return at.compact ? at.stop(c) : at.rows; };
        if (dV.row_stride == 1 && dV.column_stride != 1) {
            T *const dYt = Yt(q); // no longer needed
            std::fill(dY + at.rows * W, dY + kp * W, T(0));
            transpose<T>(kp, W, {dY, W}, {dYt, kp});
            for (Index c = 0; c < at.width; ++c)
                std::memcpy(&dV(at.row, at.column + c), dYt + c * kp, sizeof(T) * last(c));
        } else if (dV.column_stride == 1 && at.width == W && !at.compact) {
            copy<T>(at.rows, W, {dY, W}, {&dV(at.row, at.column), dV.row_stride});
        } else {
            for (Index j = 0; j < at.rows; ++j) {
                const Index c = first(j);
                if (dV.column_stride == 1)
                    std::memcpy(&dV(at.row + j, at.column + c), dY + j * W + c, sizeof(T) * (at.width - c));
                else
                    for (Index i = c; i < at.width; ++i) dV(at.row + j, at.column + i) = dY[j * W + i];
            }
        }
    }

    // Whether the gradient of V is so large that it would leave the caches before anybody reads it.
    bool streams(const Strided<T> &dV) const {
        constexpr Index line = 64;
        return p.r * p.d * Index(sizeof(T)) >= (Index(4) << 20) && dV.column_stride == 1 && p.d % W == 0 &&
               dV.row_stride * Index(sizeof(T)) % line == 0 && reinterpret_cast<std::uintptr_t>(dV.data) % line == 0;
    }

    // Zeros in dV: rows `from` to `to`, columns before `end`; the members share the rows.
    void clear(Strided<T> dV, Index from, Index to, Index end) const {
        FASTH_PHASE(clear);
        for (Index i = from + team.rank; i < to; i += team.size) {
            if (streams(dV))
                for (Index c = 0; c < end; c += packet_size<T>) stream(&dV(i, c), Eigen::internal::pset1<Packet<T>>(T(0)));
            else if (dV.column_stride == 1)
                std::memset(&dV(i, 0), 0, sizeof(T) * std::size_t(end));
            else
                for (Index c = 0; c < end; ++c) dV(i, c) = T(0);
        }
    }

    void keep(Index block, const Kept<T> &kept) const {
        FASTH_PHASE(keep);
        const Index kb = p.size_of(block);
        if (team.rank == team.size - 1) {
            std::copy(own.scale, own.scale + kb, kept.scales + block * p.k);
            std::copy(own.other, own.other + kp * kp, kept.factor_of(p, block)); // the way back needs the other one
        }
        if (kept.Z && team.rank == 0) std::copy(own.Z, own.Z + p.m * kp, kept.Z_of(p, block));
    }

    void load(Strided<const T> source, Index q, T *panel) const {
        FASTH_PHASE(rows);
        const Index column = q * W, width = std::min(W, p.d - column);
        for (Index i = 0; i < p.m; ++i) {
            if (source.column_stride == 1)
                std::memcpy(panel + i * W, &source(i, column), sizeof(T) * width);
            else
                for (Index c = 0; c < width; ++c) panel[i * W + c] = source(i, column + c);
            std::fill(panel + i * W + width, panel + (i + 1) * W, T(0));
        }
    }
    void store(const T *panel, Index q, Strided<T> target) const {
        FASTH_PHASE(rows);
        const Index column = q * W, width = std::min(W, p.d - column);
        for (Index i = 0; i < p.m; ++i) std::memcpy(&target(i, column), panel + i * W, sizeof(T) * width);
    }
};

} // namespace fasth
