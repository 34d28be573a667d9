// x Qᵀ and its gradients over blocks of reflections, on one thread or a team that shares the columns.
//
// The notation is that of src/fasth/reflections/README.md; README.md beside this file says why it is done this way.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "team.hpp"

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
    Index H; // columns in half a panel
    bool shares = false; // with compact reflectors: whether another product has its own in the rest of the matrix
    bool adds = false;   // whether the gradient of V is added to what is there

    template <class T> static constexpr Index half_panel = half_panel_bytes / sizeof(T);

    bool triangular() const { return kind != Kind::full; }
    Index reflectors() const { return triangular() ? std::min(r, d) : r; } // the others are zero
    bool fills() const { return triangular() && !shares && !adds; } // zeros in the gradient where V has none of its own
    Index blocks() const { return (reflectors() + k - 1) / k; }
    Index size_of(Index block) const { return std::min(k, reflectors() - block * k); }
    Index padded_k() const { return round_up(k, padding); }
    Index half_panels() const { return (d + H - 1) / H; }
    // The half panel where the block's reflectors start.
    Index first_half(Index block) const { return triangular() ? block * k / H : 0; }
    // Which block acts as number `step`: x Qᵀ takes the last block first, x Q the first.
    Index block_at(Index step, bool transposed) const { return transposed ? step : blocks() - 1 - step; }
};

// The columns of one member of a team. Half panels are dealt out to and fro (0 1 1 0 0 1 1 0 for two members), and each
// member puts its own together two by two into panels. So a triangular problem is shared out to half a panel, who has one
// more changes from block to block, and products are as wide as a panel.
struct Columns {
    Index H, W;
    int size, rank;
    Index halves, panels;

    Columns(const Problem &p, int size, int rank)
        : H(p.H), W(2 * p.H), size(size), rank(rank), halves(before(p.half_panels())), panels((halves + 1) / 2) {}

    // Where a panel's halves start in V.
    Index column(Index panel, Index half) const { return (panel * 2 * size + (half ? 2 * size - 1 - rank : rank)) * H; }
    Index first_half(const Problem &p, Index block) const { return before(p.first_half(block)); }
    Index first_panel(const Problem &p, Index block) const { return std::min(first_half(p, block) / 2, panels); }
    // The columns of a panel, counted within it, that a block reaches: on the left of them its reflectors are zero.
    Index from(const Problem &p, Index block, Index panel) const {
        return std::clamp<Index>(first_half(p, block) - 2 * panel, 0, 2) * H;
    }
    Index to(Index panel) const { return std::min<Index>(halves - 2 * panel, 2) * H; }

  private:
    Index before(Index half) const { // how many of the first so many half panels are this member's
        const Index deals = half / (2 * size), rest = half % (2 * size);
        return 2 * deals + (rest > rank) + (rest > 2 * size - 1 - rank);
    }
};

// What the forward pass keeps for the backward pass: scales and T of every block, and, if there is room, every Z and
// the rows after every block but the one that acts last, whose rows are the output. Rows are kept as the members of the
// team had them, so only a team of the same size can use them.
template <class T> struct Kept {
    T *scales = nullptr, *factors = nullptr, *Z = nullptr, *states = nullptr;

    static Index size(const Problem &p, int members, bool with_states) {
        Index count = round_up(p.reflectors(), padding) + p.blocks() * p.padded_k() * p.padded_k();
        if (with_states && p.blocks()) {
            count += p.blocks() * p.m * p.padded_k();
            for (int rank = 0; rank < members; ++rank) count += states_before(p, Columns(p, members, rank), p.blocks());
        }
        return count;
    }
    Kept() = default;
    Kept(const Problem &p, T *memory, int members, int rank, bool with_states) {
        if (!memory) return;
        scales = memory;
        factors = scales + round_up(p.reflectors(), padding);
        if (!with_states) return;
        Z = memory + size(p, members, false);
        states = Z + p.blocks() * p.m * p.padded_k();
        for (int other = 0; other < rank; ++other) states += states_before(p, Columns(p, members, other), p.blocks());
    }
    T *factor_of(const Problem &p, Index block) const { return factors + block * p.padded_k() * p.padded_k(); }
    T *Z_of(const Problem &p, Index block) const { return Z + block * p.m * p.padded_k(); }
    T *state_of(const Problem &p, const Columns &own, Index block) const { return states + states_before(p, own, block); }

  private:
    static Index states_before(const Problem &p, const Columns &own, Index block) {
        Index panels = 0;
        for (Index b = 0; b < block; ++b)
            if (b != p.block_at(p.blocks() - 1, p.transpose)) panels += own.panels - own.first_panel(p, b);
        return panels * p.m * own.W;
    }
};

// The memory of a team. `sets` of m rows run through the blocks: x; or a gradient; or a gradient and the output.
template <class T> struct Workspace {
    // Where the members put their sums for each other: (members, sets · m + kp, kp). Three in turn, since a member
    // prepares the next block while another may still read what it had for the last; and two for finding scales.
    T *sums[3] = {}, *spare[2] = {};
    Index sum_size;

    struct Packed { // a block's reflectors on the member's columns: Y (panels, kp, W), Yᵀ (panels, W, kp)
        Index block;
        T *Y, *Yt, *scale;
    };
    struct Own { // a member's
        Packed packed[2]; // the block at work and the next
        T *rows[2];       // each (panels, m, W)
        T *others;        // the same, for a gradient before and after a block
        T *S, *factor, *other, *Z, *N, *dY;
        const T **now, **before; // where the rows of each panel are at present, and were before the block at work
    };

    Workspace(const Problem &p, int members, int sets, Arena &arena) : sum_size((sets * p.m + p.padded_k()) * p.padded_k()) {
        for (T *&slots : sums) slots = arena.take<T>(members * sum_size);
        for (T *&slots : spare) slots = arena.take<T>(members * sum_size);
    }
    static Own own(const Problem &p, int members, int sets, Arena &arena) {
        const Columns widest(p, members, 0);
        const Index kp = p.padded_k(), panels = widest.panels, W = widest.W;
        Own own;
        for (auto &packed : own.packed)
            packed = {0, arena.take<T>(panels * kp * W), arena.take<T>(panels * kp * W), arena.take<T>(kp)};
        for (int set = 0; set < 2; ++set) own.rows[set] = set < sets ? arena.take<T>(panels * p.m * W) : nullptr;
        own.S = arena.take<T>(sets * p.m * kp + kp * kp);
        own.factor = arena.take<T>(kp * kp);
        own.other = arena.take<T>(kp * kp);
        own.Z = arena.take<T>(sets * p.m * kp);
        own.N = arena.take<T>(kp * kp);
        own.dY = arena.take<T>(kp * W);
        own.others = sets == 2 ? arena.take<T>(panels * p.m * W) : nullptr;
        own.now = arena.take<const T *>(panels);
        own.before = arena.take<const T *>(panels);
        return own;
    }
};

// The singular values between two products, times the signs of both: (2, count), or none.
template <class T> struct Diagonal {
    const T *sigma, *signs;
    Index count;
    T sign(Index c) const { return signs ? signs[c] * signs[count + c] : T(1); }
};

// One member's part of the work on one matrix of the batch.
template <class T> class Member {
    using Packed = typename Workspace<T>::Packed;

    const Problem &p;
    Team &team;
    const Strided<const T> V;
    const Workspace<T> &shared;
    typename Workspace<T>::Own own;
    const Columns columns;
    const Index kp, W, H;
    T *G = nullptr;                // (kb, kp), behind the sums S
    int turn = 0, spare_turn = 0;  // which place for sums is next
    Index awaited = 0;             // how many sums of each other member are on their way
    T *awaited_slots = nullptr;
    bool fetched = true;           // whether they have been asked for

  public:
    Member(const Problem &p, Team &team, Strided<const T> V, const Workspace<T> &shared,
           const typename Workspace<T>::Own &own)
        : p(p), team(team), V(V), shared(shared), own(own), columns(p, team.size, team.rank), kp(p.padded_k()),
          W(columns.W), H(columns.H) {}

    void load(Strided<const T> source, int set = 0) {
        for_halves([&](Index q, Index half) {
            FASTH_PHASE(rows);
            T *const panel = own.rows[set] + q * p.m * W;
            if (set == 0) own.now[q] = panel;
            const Index column = columns.column(q, half), width = std::min(H, p.d - column);
            if (source.row_stride == 1 && source.column_stride != 1 && width == H && p.m % packet_size<T> == 0)
                return transpose<T>(H, p.m, {&source(0, column), source.column_stride}, {panel + half * H, W});
            if (source.column_stride == 1 && width == H)
                return copy<T>(p.m, H, {&source(0, column), source.row_stride}, {panel + half * H, W});
            for (Index i = 0; i < p.m; ++i) {
                T *const row = panel + i * W + half * H;
                if (source.column_stride == 1)
                    std::memcpy(row, &source(i, column), sizeof(T) * width);
                else
                    for (Index c = 0; c < width; ++c) row[c] = source(i, column + c);
                std::fill(row + width, row + H, T(0));
            }
        });
    }
    // With something added to each row, or nothing.
    void store(Strided<T> target, const T *bias = nullptr) const {
        for_halves([&](Index q, Index half) {
            FASTH_PHASE(rows);
            const Index column = columns.column(q, half), width = std::min(H, p.d - column);
            const bool by_columns = target.row_stride == 1 && target.column_stride != 1;
            if (by_columns && !bias && width == H && p.m % packet_size<T> == 0)
                return transpose<T>(p.m, H, {now(q) + half * H, W}, {&target(0, column), target.column_stride});
            if (!bias && target.column_stride == 1 && width == H)
                return copy<T>(p.m, H, {now(q) + half * H, W}, {&target(0, column), target.row_stride});
            for (Index i = 0; i < p.m; ++i) {
                const T *const row = now(q) + i * W + half * H;
                if (!bias && target.column_stride == 1)
                    std::memcpy(&target(i, column), row, sizeof(T) * width);
                else
                    for (Index c = 0; c < width; ++c) target(i, column + c) = row[c] + (bias ? bias[column + c] : T(0));
            }
        });
    }

    // The rows of another product, each entry times its factor, and zeros where that has none.
    void load_scaled(const Member &from, const Diagonal<T> &factors) {
        for_halves([&](Index q, Index half) {
            const Index column = columns.column(q, half);
            const Index count = std::clamp<Index>(factors.count - column, 0, H);
            T *const panel = own.rows[0] + q * p.m * W;
            own.now[q] = panel;
            for (Index i = 0; i < p.m; ++i) {
                T *const row = panel + i * W + half * H;
                if (count) {
                    const T *const source = from.now(q) + i * W + half * H;
                    for (Index c = 0; c < count; ++c) row[c] = source[c] * factors.sigma[column + c] * factors.sign(column + c);
                }
                std::fill(row + count, row + H, T(0));
            }
        });
    }
    void sum_columns(T *sums) const {
        for_halves([&](Index q, Index half) {
            const Index column = columns.column(q, half), width = std::min(H, p.d - column);
            std::fill(sums + column, sums + column + width, T(0));
            for (Index i = 0; i < p.m; ++i)
                for (Index c = 0; c < width; ++c) sums[column + c] += now(q)[i * W + half * H + c];
        });
    }
    // The gradient of the factors in load_scaled: this product's second set of rows times that of the other's rows.
    void gradient_of_factors(const Member &of, const Diagonal<T> &factors, T *gradient) const {
        for_halves([&](Index q, Index half) {
            const Index column = columns.column(q, half), count = std::clamp<Index>(factors.count - column, 0, H);
            T sums[half_panel_bytes / sizeof(T)] = {};
            for (Index i = 0; i < (count ? p.m : 0); ++i) {
                const Index at = q * p.m * W + i * W + half * H;
                for (Index c = 0; c < count; ++c) sums[c] += own.rows[1][at + c] * of.now(q)[i * W + half * H + c];
            }
            for (Index c = 0; c < count; ++c) gradient[column + c] = sums[c] * factors.sign(column + c);
        });
    }

    // The rows times Qᵀ, or Q if p.transpose.
    void forward(const Kept<T> &kept) {
        const auto turn_of = [&](Index step, const Packed &at) {
            const Index kb = p.size_of(at.block);
            factors(kb, p.transpose);
            multiply_by_factor(own.S, own.factor, own.Z);
            if (kept.scales) keep(at, kept);
            T *const state = kept.Z && step + 1 < p.blocks() ? kept.state_of(p, columns, at.block) : nullptr;
            const Index first = columns.first_panel(p, at.block);
            return [=, &at](Index q, Index from, Index to) {
                FASTH_PHASE(update);
                T *const after = state ? state + (q - first) * p.m * W : own.rows[0] + q * p.m * W;
                if (state && q + 1 < columns.panels) prefetch<true>(after + p.m * W, p.m, W, W);
                product<Result::subtract, T>(p.m, to - from, {kb, own.Z, kp, 1, {Y(at, q) + from, W}}, {now(q) + from, W},
                                             {after + from, W});
                if (from && after != now(q)) copy<T>(p.m, from, {now(q), W}, {after, W});
                own.now[q] = after;
            };
        };
        sweep(p.transpose, 1, true, nullptr, turn_of, [](const Packed &) {});
    }

    // The rows, a gradient of the output, become that of x; the gradient of V, if wanted (data), needs the output in the
    // second set of rows.
    void backward(const Kept<T> &kept, Strided<T> dV) {
        const bool states = kept.Z, way = !p.transpose;
        const int sets = dV.data && !states ? 2 : 1; // without states the output runs back beside its gradient
        // The others wait for the sums of the next block, not for ∂Y. So a team first does what they wait for.
        const bool later = dV.data && states && team.size > 1;
        const auto turn_of = [&](Index step, const Packed &at) {
            const Index kb = p.size_of(at.block);
            const T *factor = own.factor;
            if (kept.scales)
                factor = kept.factor_of(p, at.block);
            else
                factors(kb, way);
            T *const R = own.Z;
            multiply_by_factor(own.S, factor, R);
            if (sets == 2) { // the way back gives −Z
                multiply_by_factor(own.S + p.m * kp, factor, own.Z + p.m * kp);
                for (Index i = p.m * kp; i < 2 * p.m * kp; ++i) own.Z[i] = -own.Z[i];
            }
            if (kept.scales && step + 1 < p.blocks()) { // another member may have kept them
                const Index next = p.block_at(step + 1, way);
                prefetch<false>(kept.factor_of(p, next), kp, kp, kp);
                if (states) prefetch<false>(kept.Z_of(p, next), p.m, kp, kp);
            }
            const BlockGradient gradient(*this, at, kept, dV);
            if (dV.data && !later) gradient.begin();
            return [=, &at](Index q, Index from, Index to) {
                if (dV.data && !later) gradient.of_panel(q, from, to, now(q));
                if (sets == 2) {
                    FASTH_PHASE(update);
                    T *const o = own.rows[1] + q * p.m * W + from;
                    product<Result::add, T>(p.m, to - from, {kb, gradient.Z, kp, 1, {Y(at, q) + from, W}}, {o, W}, {o, W});
                }
                FASTH_PHASE(update);
                T *const mine = own.rows[0] + q * p.m * W;
                T *const after = later && now(q) == mine ? own.others + q * p.m * W : mine;
                product<Result::subtract, T>(p.m, to - from, {kb, R, kp, 1, {Y(at, q) + from, W}}, {now(q) + from, W},
                                             {after + from, W});
                if (from && after != now(q)) copy<T>(p.m, from, {now(q), W}, {after, W});
                own.before[q] = now(q);
                own.now[q] = after;
            };
        };
        const auto finish = [&](const Packed &at) {
            if (!later) return;
            const BlockGradient gradient(*this, at, kept, dV);
            gradient.begin();
            for_panels(at.block, [&](Index q, Index from, Index to) {
                gradient.of_panel(q, from, to, own.before[q]);
                fetch_when_complete();
            });
        };
        sweep(way, sets, !kept.scales, kept.scales, turn_of, finish);
        if (dV.data && p.fills()) clear(dV, p.reflectors(), p.r, p.d);
        fence();
    }

  private:
    const T *now(Index panel) const { return own.now[panel]; } // (m, W)
    template <class Action> void for_halves(const Action &action) const {
        for (Index q = 0; q < columns.panels; ++q)
            for (Index half = 0; half < columns.to(q) / H; ++half) action(q, half);
    }
    T *Y(const Packed &at, Index q) const { return at.Y + q * kp * W; }   // (kp, W)
    T *Yt(const Packed &at, Index q) const { return at.Yt + q * kp * W; } // (W, kp)

    // action(panel, from, to) on every panel that the block reaches.
    template <class Action> void for_panels(Index block, Index start, const Action &action) const {
        for (Index q = std::max(start, columns.first_panel(p, block)); q < columns.panels; ++q)
            if (const Index from = columns.from(p, block, q), to = columns.to(q); from < to) action(q, from, to);
    }
    template <class Action> void for_panels(Index block, const Action &action) const { for_panels(block, 0, action); }

    // One block after the other: S = rows · Yᵀ is added up over the team; `turn_of(step, block)` makes of it what the
    // block needs, and gives back what to do to a panel, after which the panel's part of the next S is computed, while it
    // is at hand. What fills the time until the others' sums are there: `finish(block)` for the block before, packing the
    // next one, and its G = Y Yᵀ, if wanted.
    template <class Turn, class Finish>
    void sweep(bool way, int sets, bool gram, const T *scales, const Turn &turn_of, const Finish &finish) {
        if (p.blocks() == 0) return;
        Packed *at = &own.packed[0], *next = &own.packed[1];
        T *sums = begin_sums(sets, gram);
        prepare(*at, p.block_at(0, way), gram, scales, sums + sets * p.m * kp);
        for_panels(at->block, [&](Index q, Index from, Index to) { add_products(*at, q, from, to, sets, sums); });
        for (Index step = 0; step < p.blocks(); ++step) {
            const bool last = step + 1 == p.blocks();
            announce(sets, gram);
            if (step > 0) finish(*next);
            if (!last) {
                sums = begin_sums(sets, gram);
                prepare(*next, p.block_at(step + 1, way), gram, scales, sums + sets * p.m * kp);
            }
            collect(sets);
            if (gram && !lengths_are_safe(p.size_of(at->block))) rescale_block(*at, sets);
            const auto visit = turn_of(step, *at);
            const Index start = last ? p.half_panels() : columns.first_panel(p, next->block);
            for (Index q = std::min(start, columns.first_panel(p, at->block)); q < columns.panels; ++q) {
                const Index to = columns.to(q);
                if (const Index from = columns.from(p, at->block, q); from < to) visit(q, from, to);
                if (last) continue;
                if (const Index from = columns.from(p, next->block, q); from < to) add_products(*next, q, from, to, sets, sums);
            }
            std::swap(at, next);
        }
        finish(*next);
    }

    // This member's place for the sums of the next block, at zero.
    T *begin_sums(int sets, bool gram) {
        T *const mine = shared.sums[turn] + team.rank * shared.sum_size;
        std::fill(mine, mine + sets * p.m * kp + (gram ? kp * kp : 0), T(0));
        return mine;
    }

    void announce(int sets, bool gram) {
        awaited_slots = shared.sums[turn];
        awaited = sets * p.m * kp + (gram ? kp * kp : 0);
        turn = (turn + 1) % 3;
        team.arrive();
        fetched = team.size == 1;
    }

    // Sums of other members travel from core to core while something else is done.
    void fetch_when_complete() {
        if (fetched || !team.complete()) return;
        for (int member = 0; member < team.size; ++member)
            if (member != team.rank) prefetch<false>(awaited_slots + member * shared.sum_size, 1, 0, awaited);
        fetched = true;
    }

    // own.S, and G behind it: the sums of all members. Each adds up in the same order, so all take the same decisions.
    void collect(int sets) {
        FASTH_PHASE(meet);
        team.wait();
        G = own.S + sets * p.m * kp;
        std::copy(awaited_slots, awaited_slots + awaited, own.S);
        for (int member = 1; member < team.size; ++member) {
            const T *const part = awaited_slots + member * shared.sum_size;
            for (Index i = 0; i < awaited; ++i) own.S[i] += part[i];
        }
    }

    // Packs a block, with the scales given, and adds G = Y Yᵀ if wanted.
    void prepare(Packed &at, Index block, bool gram, const T *scales, T *sum) {
        const Index kb = p.size_of(block);
        at.block = block;
        std::fill(at.scale, at.scale + kb, T(1));
        if (scales) std::copy(scales + block * p.k, scales + block * p.k + kb, at.scale);
        const bool scaled = std::any_of(at.scale, at.scale + kb, [](T s) { return s != T(1); });
        for_panels(block, [&](Index q, Index from, Index to) {
            prefetch_panel<false>(V, block, q + 1);
            pack(at, q, from, to);
            if (scaled) rescale(at, q, from, to);
            if (gram) add_gram(at, q, from, to, sum);
            fetch_when_complete();
        });
    }

    // S += rows · Yᵀ in one panel, for every set of rows.
    void add_products(const Packed &at, Index q, Index from, Index to, int sets, T *sum) const {
        FASTH_PHASE(S);
        for (int set = 0; set < sets; ++set, sum += p.m * kp) {
            const T *const rows = set == 0 ? now(q) : own.rows[set] + q * p.m * W;
            product<Result::add, T>(p.m, kp, {to - from, rows + from, W, 1, {Yt(at, q) + from * kp, kp}}, {sum, kp}, {sum, kp});
        }
    }

    // G += Y Yᵀ in one panel, above the diagonal, more or less: what lies left of it in steps of `padding` is left out.
    void add_gram(const Packed &at, Index q, Index from, Index to, T *sum) const {
        FASTH_PHASE(gram);
        const Index kb = p.size_of(at.block);
        for (Index j = 0; j < kb; j += padding)
            product<Result::add, T>(std::min(padding, kb - j), kp - j,
                                    {to - from, Y(at, q) + j * W + from, W, 1, {Yt(at, q) + from * kp + j, kp}},
                                    {sum + j * kp + j, kp}, {sum + j * kp + j, kp});
    }

    // Asks for the block's entries in a panel ahead of their use.
    template <bool to_write, class U> void prefetch_panel(const Strided<U> &of, Index block, Index q) const {
        if (q >= columns.panels || (of.column_stride != 1 && of.row_stride != 1)) return;
        const Index kb = p.size_of(block);
        for (Index half = 0; half < columns.to(q) / H; ++half) {
            const Index column = columns.column(q, half), width = std::min(H, p.d - column);
            if (of.column_stride == 1)
                prefetch<to_write>(&of(block * p.k, column), kb, of.row_stride, width);
            else
                prefetch<to_write>(&of(block * p.k, column), width, of.column_stride, kb);
        }
    }

    // Within these bounds no product of lengths and their inverses leaves the range of float32. NaN is not within.
    bool lengths_are_safe(Index kb) const {
        for (Index j = 0; j < kb; ++j)
            if (!(G[j * kp + j] > T(1e-12) && G[j * kp + j] < T(1e12))) return false;
        return true;
    }

    // The block again, every reflector divided by the power of two below its largest entry; found by the whole team.
    void rescale_block(Packed &at, int sets) {
        const Index kb = p.size_of(at.block);
        T *mine = begin_spare();
        std::fill(mine, mine + kb, T(0));
        for_panels(at.block, [&](Index q, Index from, Index to) {
            for (Index j = 0; j < kb; ++j)
                for (Index c = from; c < to; ++c) mine[j] = std::max(mine[j], std::abs(Y(at, q)[j * W + c]));
        });
        team.meet();
        for (Index j = 0; j < kb; ++j) {
            T largest = 0;
            for (int member = 0; member < team.size; ++member)
                largest = std::max(largest, awaited_slots[member * shared.sum_size + j]);
            at.scale[j] = largest > 0 && std::isfinite(largest) ? std::ldexp(T(1), std::ilogb(largest)) : T(1);
        }
        mine = begin_spare();
        std::fill(mine, mine + awaited, T(0));
        for_panels(at.block, [&](Index q, Index from, Index to) {
            rescale(at, q, from, to);
            add_gram(at, q, from, to, mine + sets * p.m * kp);
            add_products(at, q, from, to, sets, mine);
        });
        team.arrive();
        collect(sets);
    }
    T *begin_spare() {
        awaited_slots = shared.spare[spare_turn];
        spare_turn ^= 1;
        return awaited_slots + team.rank * shared.sum_size;
    }

    void rescale(const Packed &at, Index q, Index from, Index to) const {
        for (Index j = 0; j < p.size_of(at.block); ++j)
            for (Index c = from; c < to; ++c) Y(at, q)[j * W + c] /= at.scale[j]; // exact, and right for subnormal numbers
        transpose<T>(kp, to - from, {Y(at, q) + from, W}, {Yt(at, q) + from * kp, kp});
    }

    // Where a block meets half a panel: which entries are there. Row j has those in columns start(j) to width; column c
    // has those in rows 0 to stop(c). Compact storage leaves out the diagonal.
    struct Piece {
        Index row, column, rows, width;
        bool triangular, compact;
        Index start(Index j) const {
            return triangular ? std::clamp<Index>(row + j + compact - column, 0, width) : 0;
        }
        Index stop(Index c) const {
            return triangular ? std::clamp<Index>(column + c + 1 - compact - row, 0, rows) : rows;
        }
        bool whole(Index H) const { return width == H && start(rows - 1) == 0; }
    };
    Piece piece(Index block, Index q, Index half) const {
        const Index column = columns.column(q, half);
        return {block * p.k, column, p.size_of(block), std::min(H, p.d - column), p.triangular(), p.kind == Kind::compact};
    }

    // Y and Yᵀ of the block in one panel, with zeros for whatever is not there.
    void pack(const Packed &at, Index q, Index from, Index to) const {
        FASTH_PHASE(pack);
        const bool by_columns = V.row_stride == 1 && V.column_stride != 1;
        for (Index start = from; start < to; start += H)
            pack_half(piece(at.block, q, start / H), by_columns, Y(at, q) + start, Yt(at, q) + start * kp);
        if (by_columns)
            transpose<T>(to - from, kp, {Yt(at, q) + from * kp, kp}, {Y(at, q) + from, W});
        else
            transpose<T>(kp, to - from, {Y(at, q) + from, W}, {Yt(at, q) + from * kp, kp});
    }

    void pack_half(const Piece &at, bool by_columns, T *y, T *yt) const {
        if (at.width == H && V.column_stride == 1) { // the usual case: all that is there in memory, then the zeros
            copy<T>(at.rows, H, {&V(at.row, at.column), V.row_stride}, {y, W});
            if (!at.whole(H))
                for (Index j = 0; j < at.rows; ++j) std::fill(y + j * W, y + j * W + at.start(j), T(0));
        } else if (by_columns) {
            for (Index c = 0; c < H; ++c) {
                const Index stop = c < at.width ? at.stop(c) : 0;
                if (stop) std::memcpy(yt + c * kp, &V(at.row, at.column + c), sizeof(T) * stop);
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
                std::fill(row + at.width, row + H, T(0));
            }
        }
        if (!by_columns)
            for (Index j = at.rows; j < kp; ++j) std::fill(y + j * W, y + j * W + H, T(0));
        if (at.compact)
            for (Index j = 0; j < at.rows; ++j) {
                const Index c = at.row + j - at.column;
                if (c >= 0 && c < at.width) (by_columns ? yt[c * kp + j] : y[j * W + c]) = T(1);
            }
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

    // −N = stril(M − Mᵀ) with M = RᵀZ for x Qᵀ, striu for x Q.
    void antisymmetric_half(const T *Z, const T *R) const {
        FASTH_PHASE(antisymmetric);
        T *const N = own.N, *const Mt = own.other; // which the way back does not need
        product<Result::set, T>(kp, kp, {p.m, R, 1, kp, {Z, kp}}, {nullptr, 0}, {N, kp});
        transpose<T>(kp, kp, {N, kp}, {Mt, kp});
        for (Index i = 0; i < kp * kp; ++i) N[i] -= Mt[i];
        // A product reads no more of the other half than what lies within a tile's rows of the diagonal.
        static_assert(tile_rows(1) <= padding, "");
        const Index beside = p.transpose ? -padding : padding;
        for (Index i = 0; i < kp; ++i) {
            const Index square = i / padding * padding, diagonal = i - square;
            T *const row = N + i * kp + square;
            for (Index j = 0; j < padding; ++j) row[j] = (p.transpose ? j > diagonal : j < diagonal) ? row[j] : T(0);
            if (square + beside >= 0 && square + beside < kp) std::fill_n(row + beside, padding, T(0));
        }
    }

    // The gradient of a block's reflectors, once R, in own.Z, is known.
    struct BlockGradient {
        const Member &member;
        const Packed &at;
        const Strided<T> dV;
        const T *Z, *R;
        const T *state = nullptr; // the rows after the block, unless they are the output, in the second set of rows

        BlockGradient(const Member &member, const Packed &at, const Kept<T> &kept, Strided<T> dV)
            : member(member), at(at), dV(dV), R(member.own.Z) {
            const Problem &p = member.p;
            Z = kept.Z ? kept.Z_of(p, at.block) : R + p.m * member.kp;
            if (kept.Z && at.block != p.block_at(0, !p.transpose)) state = kept.state_of(p, member.columns, at.block);
        }
        void begin() const {
            const Problem &p = member.p;
            member.antisymmetric_half(Z, R);
            if (p.fills())
                member.clear(dV, at.block * p.k, at.block * p.k + p.size_of(at.block), p.first_half(at.block) * p.H);
        }
        void of_panel(Index q, Index from, Index to, const T *g) const {
            const Index size = member.p.m * member.W, first = member.columns.first_panel(member.p, at.block);
            const T *const after = state ? state + (q - first) * size : member.own.rows[1] + q * size;
            if (state && q + 1 < member.columns.panels) prefetch<false>(after + size, member.p.m, member.W, member.W);
            if (!member.streams(dV)) member.template prefetch_panel<true>(dV, at.block, q + 1);
            member.gradient_of_panel(at, q, from, to, Z, R, g, after, dV);
        }
    };

    // ∂Y = N Y − Zᵀ g − Rᵀ after, in one panel, into its place in dV.
    void gradient_of_panel(const Packed &at, Index q, Index from, Index to, const T *Z, const T *R, const T *g, const T *after,
                           Strided<T> dV) const {
        FASTH_PHASE(gradient);
        const Index kb = p.size_of(at.block);
        const Term<T> terms[3] = {{kb, own.N, kp, 1, {Y(at, q) + from, W}, p.transpose ? Left::strictly_upper : Left::strictly_lower},
                                  {p.m, Z, 1, kp, {g + from, W}},
                                  {p.m, R, 1, kp, {after + from, W}}};
        bool in_place = dV.column_stride == 1 && std::all_of(at.scale, at.scale + kb, [](T s) { return s == T(1); });
        for (Index start = from; start < to; start += H) in_place &= piece(at.block, q, start / H).whole(H);
        if (in_place) { // the usual case
            const Index gap = from == 0 ? columns.column(q, 1) - columns.column(q, 0) - H : 0;
            const Matrix<T> place{&dV(at.block * p.k, columns.column(q, from / H)), dV.row_stride, gap};
            if (p.adds) return product<Result::subtract, T>(kb, to - from, terms, {place.data, place.row_stride, gap}, place);
            return streams(dV) ? product<Result::negative_streamed, T>(kb, to - from, terms, {nullptr, 0}, place)
                               : product<Result::negative, T>(kb, to - from, terms, {nullptr, 0}, place);
        }
        T *const dY = own.dY;
        product<Result::negative, T>(kb, to - from, terms, {nullptr, 0}, {dY + from, W});
        for (Index j = 0; j < kb; ++j)
            if (at.scale[j] != T(1))
                for (Index c = from; c < to; ++c) dY[j * W + c] /= at.scale[j];
        for (Index start = from; start < to; start += H)
            store_gradient(piece(at.block, q, start / H), dY + start, Yt(at, q) + start * kp, dV);
    }

    // Half a panel of ∂Y into its place; `spare` is (H, kp).
    void store_gradient(const Piece &at, T *dY, T *spare, Strided<T> dV) const {
        if (p.triangular() && !p.shares)
            for (Index j = 0; j < at.rows; ++j) std::fill(dY + j * W, dY + j * W + at.start(j), T(0));
        if (p.adds)
            for (Index j = 0; j < at.rows; ++j)
                for (Index c = at.start(j); c < at.width; ++c) dY[j * W + c] += dV(at.row + j, at.column + c);
        if (dV.row_stride == 1 && dV.column_stride != 1) {
            for (Index j = at.rows; j < kp; ++j) std::fill(dY + j * W, dY + j * W + H, T(0));
            transpose<T>(kp, H, {dY, W}, {spare, kp});
            const bool streamed = streams(dV) && at.whole(H) && at.rows % packet_size<T> == 0;
            for (Index c = 0; c < at.width; ++c) {
                const Index count = p.shares ? at.stop(c) : at.rows;
                if (streamed)
                    for (Index j = 0; j < count; j += packet_size<T>)
                        stream(&dV(at.row + j, at.column + c), Eigen::internal::ploadu<Packet<T>>(spare + c * kp + j));
                else if (count)
                    std::memcpy(&dV(at.row, at.column + c), spare + c * kp, sizeof(T) * count);
            }
        } else if (dV.column_stride == 1 && at.width == H && !p.shares) {
            copy<T>(at.rows, H, {dY, W}, {&dV(at.row, at.column), dV.row_stride});
        } else {
            for (Index j = 0; j < at.rows; ++j) {
                const Index c = p.shares ? at.start(j) : 0;
                if (dV.column_stride == 1)
                    std::memcpy(&dV(at.row + j, at.column + c), dY + j * W + c, sizeof(T) * (at.width - c));
                else
                    for (Index i = c; i < at.width; ++i) dV(at.row + j, at.column + i) = dY[j * W + i];
            }
        }
    }

    // Whether the gradient of V is so large that it would leave the caches before anybody reads it, and lies such that
    // whole packets of a panel, or of a block where it is stored by columns, can be written past them.
    bool streams(const Strided<T> &dV) const {
        constexpr Index line = 64, size = sizeof(T);
        const bool by_rows = dV.column_stride == 1 && p.d % H == 0 && dV.row_stride * size % line == 0;
        const bool by_columns = dV.row_stride == 1 && p.k * size % line == 0 && dV.column_stride * size % line == 0;
        return p.r * p.d * size >= (Index(1) << 20) && (by_rows || by_columns) &&
               reinterpret_cast<std::uintptr_t>(dV.data) % line == 0;
    }

    // Zeros in dV: rows `from` to `to`, columns before `end`; the members share them.
    void clear(Strided<T> dV, Index from, Index to, Index end) const {
        FASTH_PHASE(clear);
        const auto fill = [&](T *start, Index count) {
            const Index bytes = packet_size<T> * Index(sizeof(T));
            if (streams(dV) && count % packet_size<T> == 0 && reinterpret_cast<std::uintptr_t>(start) % bytes == 0)
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

    void keep(const Packed &at, const Kept<T> &kept) const {
        FASTH_PHASE(keep);
        const Index kb = p.size_of(at.block);
        if (team.rank == team.size - 1) {
            std::copy(at.scale, at.scale + kb, kept.scales + at.block * p.k);
            std::copy(own.other, own.other + kp * kp, kept.factor_of(p, at.block)); // the way back needs the other one
        }
        if (kept.Z && team.rank == 0) std::copy(own.Z, own.Z + p.m * kp, kept.Z_of(p, at.block));
    }
};

} // namespace fasth
