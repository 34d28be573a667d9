// x Qᵀ and its gradients over blocks of reflections, on one thread or a team that shares the columns.
//
// The notation is that of src/fasth/reflections/README.md; README.md beside this file says why it is done this way.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "layout.hpp"

// phases.cpp defines this to find out where the time goes.
#ifndef FASTH_PHASE
#define FASTH_PHASE(name)
#endif

namespace fasth {

// The singular values between two products, times the signs of both: (2, count), or none.
template <class T> struct Diagonal {
    const T *sigma, *signs;
    Index count;
    T sign(Index c) const { return signs ? signs[c] * signs[count + c] : T(1); }
};

// One member's part of the work on one matrix of the batch.
template <class T> class Member {
    using Block = typename Workspace<T>::Block;

    const Problem &p;
    Team &team;
    const Strided<const T> V;
    const Workspace<T> &shared;
    typename Workspace<T>::Own own;
    const Columns columns;
    const Index kp, lanes, stride; // the stride is that from one column of x to the next
    const bool by_columns;         // whether V is stored by columns
    const bool far;                // whether V is too large to be in the second-level cache when it is wanted
    T *G = nullptr;                // (kb, kp), behind the sums S
    int turn = 0, spare_turn = 0;  // which place for sums is next
    Index awaited = 0;             // how many sums of each other member are on their way
    T *awaited_slots = nullptr;
    bool fetched = true;           // whether they have been asked for

  public:
    Member(const Problem &p, Team &team, Strided<const T> V, const Workspace<T> &shared,
           const typename Workspace<T>::Own &own)
        : p(p), team(team), V(V), shared(shared), own(own), columns(p, team.size, team.rank), kp(p.padded_k()),
          lanes(p.lanes()), stride(p.lane_stride()), by_columns(V.row_stride == 1 && V.column_stride != 1),
          far(p.r * p.d * Index(sizeof(T)) >= Index(1) << 20) {}

    void load(Strided<const T> source, int set = 0) {
        for_panels([&](Index q, Index column, Index width) {
            FASTH_PHASE(rows);
            T *const panel = own.rows[set] + q * p.panel_size();
            if (set == 0) own.now[q] = panel;
            Index done = 0; // rows that are there already
            if (source.row_stride == 1) {
                for (Index c = 0; c < width; ++c)
                    std::memcpy(panel + c * stride, &source(0, column + c), sizeof(T) * std::size_t(p.m));
                done = p.m;
            } else if (source.column_stride == 1 && width % p.packet == 0) {
                done = p.m / p.packet * p.packet;
                transpose<T>(done, width, {&source(0, column), source.row_stride}, {panel, stride});
            }
            for (Index c = 0; c < width && done < lanes; ++c) {
                for (Index i = done; i < p.m; ++i) panel[c * stride + i] = source(i, column + c);
                std::fill(panel + c * stride + p.m, panel + c * stride + lanes, T(0));
            }
        });
    }
    void store(Strided<T> target) const {
        for_panels([&](Index q, Index column, Index width) {
            FASTH_PHASE(rows);
            Index done = 0;
            if (target.row_stride == 1) {
                for (Index c = 0; c < width; ++c)
                    std::memcpy(&target(0, column + c), now(q) + c * stride, sizeof(T) * std::size_t(p.m));
                done = p.m;
            } else if (target.column_stride == 1 && width % p.packet == 0) {
                done = p.m / p.packet * p.packet;
                transpose<T>(width, done, {now(q), stride}, {&target(0, column), target.row_stride});
            }
            for (Index i = done; i < p.m; ++i)
                for (Index c = 0; c < width; ++c) target(i, column + c) = now(q)[c * stride + i];
        });
    }

    // The rows of another product, each entry times its factor, and zeros where that has none.
    void load_scaled(const Member &from, const Diagonal<T> &factors) {
        for_panels([&](Index q, Index column, Index width) {
            T *const panel = own.rows[0] + q * p.panel_size();
            own.now[q] = panel;
            const Index count = std::clamp<Index>(factors.count - column, 0, width);
            for (Index c = 0; c < count; ++c) {
                const T *const source = from.now(q) + c * stride;
                const T factor = factors.sigma[column + c] * factors.sign(column + c);
                for (Index i = 0; i < lanes; ++i) panel[c * stride + i] = source[i] * factor;
            }
            for (Index c = count; c < width; ++c) std::fill_n(panel + c * stride, lanes, T(0));
        });
    }
    // Something added to every row.
    void add(const T *bias) {
        for_panels([&](Index q, Index column, Index width) {
            T *const panel = own.rows[0] + q * p.panel_size();
            for (Index c = 0; c < width; ++c)
                for (Index i = 0; i < lanes; ++i) panel[c * stride + i] = now(q)[c * stride + i] + bias[column + c];
            own.now[q] = panel;
        });
    }
    void sum_columns(T *sums) const {
        for_panels([&](Index q, Index column, Index width) {
            for (Index c = 0; c < width; ++c)
                sums[column + c] = sum_of(p.m, [=](Index i) { return now(q)[c * stride + i]; });
        });
    }
    // The gradient of the factors in load_scaled: this product's second set of rows times that of the other's rows.
    void gradient_of_factors(const Member &of, const Diagonal<T> &factors, T *gradient) const {
        for_panels([&](Index q, Index column, Index width) {
            const T *const panel = own.rows[1] + q * p.panel_size();
            for (Index c = 0; c < std::min(width, factors.count - column); ++c) {
                const T *const mine = panel + c * stride, *const others = of.now(q) + c * stride;
                gradient[column + c] = sum_of(p.m, [=](Index i) { return mine[i] * others[i]; }) * factors.sign(column + c);
            }
        });
    }

    // The rows times Qᵀ, or Q if p.transpose.
    void forward(const Kept<T> &kept) {
        const States<T> states(p, kept.states, kept.members, team.rank, own.offsets);
        const auto turn_of = [&](Index step, const Block &at) {
            invert(at.size, own.factor);
            multiply_by_factor(own.S, own.factor, p.transpose, own.Zt);
            if (kept.scales) keep(at, kept);
            const bool keeps = kept.Z && step + 1 < p.blocks();
            return [=, &at](Index q, Index from, Index to) {
                T *const after = keeps ? states.of(at.number, q) : own.rows[0] + q * p.panel_size();
                if (keeps && far && q + 1 < columns.panels) prefetch<true>(after + p.panel_size(), 1, 0, p.panel_size());
                update(at, q, from, to, own.Zt, now(q), after);
                own.now[q] = after;
            };
        };
        sweep(p.transpose, 1, true, nullptr, turn_of, [](const Block &) {});
    }

    // The rows, a gradient of the output, become that of x; the gradient of V, if wanted (data), needs the output in the
    // second set of rows.
    void backward(const Kept<T> &kept, Strided<T> dV) {
        const bool way = !p.transpose;
        const int sets = dV.data && !kept.Z ? 2 : 1; // without states the output runs back beside its gradient
        // The others wait for the sums of the next block, not for ∂Y. So a team first does what they wait for.
        const bool later = dV.data && kept.Z && team.size > 1;
        const States<T> states(p, kept.states, kept.members, team.rank, own.offsets);
        const auto turn_of = [&](Index step, const Block &at) {
            if (kept.scales)
                kept.get_factor(at.number, own.factor);
            else
                invert(at.size, own.factor);
            for (int set = 0; set < sets; ++set)
                multiply_by_factor(own.S + set * kp * stride, own.factor, way, own.Zt + set * kp * stride);
            if (kept.scales && step + 1 < p.blocks()) { // another member may have kept them
                const Index next = p.block_at(step + 1, way);
                kept.prefetch_factor(next);
                if (kept.Z) prefetch<false>(kept.Z_of(next), lanes, kp, kp);
            }
            const BlockGradient gradient(*this, at, kept, states, dV);
            if (dV.data && !later) gradient.begin();
            return [=, &at](Index q, Index from, Index to) {
                if (dV.data && !later) gradient.of_panel(q, from, to, now(q));
                T *const mine = own.rows[0] + q * p.panel_size();
                T *const after = later && now(q) == mine ? own.others + q * p.panel_size() : mine;
                update(at, q, from, to, own.Zt, now(q), after);
                own.before[q] = now(q);
                own.now[q] = after;
                T *const output = own.rows[1] + q * p.panel_size();
                if (sets == 2) update(at, q, from, to, own.Zt + kp * stride, output, output);
            };
        };
        const auto finish = [&](const Block &at) {
            if (!later) return;
            const BlockGradient gradient(*this, at, kept, states, dV);
            gradient.begin();
            for_panels(at.number, [&](Index q, Index from, Index to) {
                gradient.of_panel(q, from, to, own.before[q]);
                fetch_when_complete();
            });
        };
        sweep(way, sets, !kept.scales, kept.scales, turn_of, finish);
        if (dV.data && p.fills()) clear(dV, p.reflectors(), p.r, p.d);
        fence();
    }

  private:
    const T *now(Index panel) const { return own.now[panel]; } // (panel, lane stride)
    // action(panel, its first column, how many) on every panel.
    template <class Action> void for_panels(const Action &action) const {
        for (Index q = 0; q < columns.panels; ++q) action(q, columns.column(q), columns.width(q));
    }
    // action(panel, from, to) on every panel that the block reaches.
    template <class Action> void for_panels(Index block, const Action &action) const {
        for (Index q = columns.first_panel(p, block); q < columns.panels; ++q)
            action(q, columns.from(p, block, q), columns.width(q));
    }
    template <class Entry> static T sum_of(Index count, const Entry &entry) { // several sums at once, then these
        constexpr Index width = packet_size<T>;
        T sums[width] = {}, sum = 0;
        Index i = 0;
        for (; i + width <= count; i += width)
            for (Index l = 0; l < width; ++l) sums[l] += entry(i + l);
        for (; i < count; ++i) sum += entry(i);
        for (const T s : sums) sum += s;
        return sum;
    }

    // One block after the other: S = rows · Yᵀ is added up over the team; `turn_of(step, block)` makes of it what the
    // block needs, and gives back what to do to a panel, after which the panel's part of the next S is computed, while it
    // is at hand. What fills the time until the others' sums are there: `finish(block)` for the block before, and
    // G = Y Yᵀ of the next one, if wanted.
    template <class Turn, class Finish>
    void sweep(bool way, int sets, bool gram, const T *scales, const Turn &turn_of, const Finish &finish) {
        if (p.blocks() == 0) return;
        Block *at = &own.blocks[0], *next = &own.blocks[1];
        T *sums = begin_sums(sets, gram);
        prepare(*at, p.block_at(0, way), gram, scales, sums + sets * kp * stride);
        for_panels(at->number, [&](Index q, Index from, Index to) { add_products(*at, q, from, to, sets, sums); });
        for (Index step = 0; step < p.blocks(); ++step) {
            const bool last = step + 1 == p.blocks();
            announce(sets, gram);
            if (step > 0) finish(*next);
            if (!last) {
                sums = begin_sums(sets, gram);
                prepare(*next, p.block_at(step + 1, way), gram, scales, sums + sets * kp * stride);
            }
            collect(sets);
            if (gram && !lengths_are_safe(at->size)) rescale_block(*at, sets);
            const auto visit = turn_of(step, *at);
            const Index first = columns.first_panel(p, at->number);
            const Index next_first = last ? columns.panels : columns.first_panel(p, next->number);
            const Index ahead = step + (gram ? 2 : 1); // the block whose reflectors are wanted next
            for (Index q = std::min(first, next_first); q < columns.panels; ++q) {
                if (ahead < p.blocks()) prefetch_panel<false>(V, p.block_at(ahead, way), q + 1);
                if (q >= first) visit(q, columns.from(p, at->number, q), columns.width(q));
                if (q >= next_first) add_products(*next, q, columns.from(p, next->number, q), columns.width(q), sets, sums);
            }
            std::swap(at, next);
        }
        finish(*next);
    }

    // This member's place for the sums of the next block, at zero.
    T *begin_sums(int sets, bool gram) {
        T *const mine = shared.sums[turn] + team.rank * shared.sum_size;
        std::fill(mine, mine + sets * kp * stride + (gram ? kp * kp : 0), T(0));
        return mine;
    }

    void announce(int sets, bool gram) {
        awaited_slots = shared.sums[turn];
        awaited = sets * kp * stride + (gram ? kp * kp : 0);
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
        G = own.S + sets * kp * stride;
        std::copy(awaited_slots, awaited_slots + awaited, own.S);
        for (int member = 1; member < team.size; ++member) {
            const T *const part = awaited_slots + member * shared.sum_size;
            for (Index i = 0; i < awaited; ++i) own.S[i] += part[i];
        }
    }

    // A block with the scales given, and its G = Y Yᵀ if wanted.
    void prepare(Block &at, Index block, bool gram, const T *scales, T *sum) {
        const Index kb = p.size_of(block);
        at.number = block;
        at.size = kb;
        std::fill(at.scale, at.scale + kb, T(1));
        if (scales) std::copy(scales + block * p.k, scales + block * p.k + kb, at.scale);
        at.scaled = std::any_of(at.scale, at.scale + kb, [](T s) { return s != T(1); });
        for_panels(block, [&](Index q, Index from, Index to) {
            if (packed(at, q))
                pack(at, q, from, to);
            else
                at.Y[q] = {&V(block * p.k, columns.column(q) + from), V.row_stride, V.column_stride};
        });
        if (gram) form_gram(at, sum);
        fetch_when_complete();
    }

    // Sᵀ += Y · rowsᵀ in one panel, for every set of rows.
    void add_products(const Block &at, Index q, Index from, Index to, int sets, T *sum) const {
        FASTH_PHASE(S);
        const Strided<const T> y = at.Y[q];
        for (int set = 0; set < sets; ++set, sum += kp * stride) {
            const T *const rows = set == 0 ? now(q) : own.rows[set] + q * p.panel_size();
            product<Result::add, T>(at.size, lanes,
                                    {to - from, y.data, y.row_stride, y.column_stride, {rows + from * stride, stride}},
                                    {sum, stride}, {sum, stride});
        }
    }

    // after = rows − Yᵀ Zᵀ in one panel, on the columns that the block reaches.
    void update(const Block &at, Index q, Index from, Index to, const T *Zt, const T *rows, T *after) const {
        FASTH_PHASE(update);
        const Strided<const T> y = at.Y[q];
        product<Result::subtract, T>(to - from, lanes,
                                     {at.size, y.data, y.column_stride, y.row_stride, {Zt, stride}},
                                     {rows + from * stride, stride}, {after + from * stride, stride});
        if (from && after != rows) std::memcpy(after, rows, sizeof(T) * std::size_t(from * stride));
    }

    // G = Y Yᵀ from the diagonal on, on top of zeros: inner products of rows, as long as they are in whole packets.
    void form_gram(const Block &at, T *sum) {
        const auto in_packets = [&](Index q, Index from, Index to) {
            return has_inner_products<T> && at.Y[q].column_stride == 1 && (to - from) % p.packet == 0;
        };
        Index count = 0;
        for_panels(at.number, [&](Index q, Index from, Index to) {
            if (!in_packets(q, from, to)) return;
            const Strided<const T> y = at.Y[q];
            Span<T> *const last = own.spans + count - 1;
            if (count && last->data + last->columns == y.data && last->row_stride == y.row_stride)
                last->columns += to - from;
            else
                own.spans[count++] = {y.data, y.row_stride, to - from};
        });
        if constexpr (has_inner_products<T>) {
            FASTH_PHASE(gram);
            if (count) inner_products<T>(kp, own.spans, count, {sum, kp});
        }
        for_panels(at.number, [&](Index q, Index from, Index to) {
            if (!in_packets(q, from, to)) add_gram(at, q, from, to, sum);
            fetch_when_complete();
        });
    }
    // G += Y Yᵀ in one panel, above the diagonal, more or less: what lies left of it in steps of `padding` is left out.
    void add_gram(const Block &at, Index q, Index from, Index to, T *sum) const {
        FASTH_PHASE(gram);
        const Index kb = at.size;
        const Matrix<const T> yt = transposed(at, q, from, to);
        for (Index j = 0; j < kb; j += padding)
            product<Result::add, T>(std::min(padding, kb - j), kp - j,
                                    {to - from, yt.data + j, 1, yt.row_stride, {yt.data + j, yt.row_stride}},
                                    {sum + j * kp + j, kp}, {sum + j * kp + j, kp});
    }
    // Yᵀ of the block in one panel from a column on, with kp numbers in a row.
    Matrix<const T> transposed(const Block &at, Index q, Index from, Index to) const {
        const Strided<const T> y = at.Y[q];
        if (by_columns) return {y.data, y.column_stride};
        if (packed(at, q)) {
            transpose<T>(kp, p.panel, {y.data - from, y.row_stride}, {own.Yt, kp});
            return {own.Yt + from * kp, kp};
        }
        if (y.column_stride == 1 && (to - from) % p.packet == 0)
            transpose<T>(kp, to - from, {y.data, y.row_stride}, {own.Yt, kp});
        else
            for (Index c = 0; c < to - from; ++c)
                for (Index j = 0; j < kp; ++j) own.Yt[c * kp + j] = y(j, c);
        return {own.Yt, kp};
    }

    // Asks for the block's entries in a panel ahead of their use.
    template <bool to_write, class U> void prefetch_panel(const Strided<U> &of, Index block, Index q) const {
        if (!far || q >= columns.panels || (of.column_stride != 1 && of.row_stride != 1)) return;
        const Index kb = p.size_of(block), column = columns.column(q);
        if (of.column_stride == 1)
            prefetch<to_write>(&of(block * p.k, column), kb, of.row_stride, columns.width(q));
        else
            prefetch<to_write>(&of(block * p.k, column), columns.width(q), of.column_stride, kb);
    }

    // Within these bounds no product of lengths and their inverses leaves the range of float32. NaN is not within.
    bool lengths_are_safe(Index kb) const {
        for (Index j = 0; j < kb; ++j)
            if (!(G[j * kp + j] > T(1e-12) && G[j * kp + j] < T(1e12))) return false;
        return true;
    }

    // The block again, every reflector divided by the power of two below its largest entry; found by the whole team.
    void rescale_block(Block &at, int sets) {
        const Index kb = at.size;
        T *mine = begin_spare();
        std::fill(mine, mine + kb, T(0));
        for_panels(at.number, [&](Index q, Index from, Index to) {
            const Strided<const T> y = at.Y[q];
            for (Index j = 0; j < kb; ++j)
                for (Index c = 0; c < to - from; ++c) mine[j] = std::max(mine[j], std::abs(y(j, c)));
        });
        team.meet();
        for (Index j = 0; j < kb; ++j) {
            T largest = 0;
            for (int member = 0; member < team.size; ++member)
                largest = std::max(largest, awaited_slots[member * shared.sum_size + j]);
            at.scale[j] = largest > 0 && std::isfinite(largest) ? std::ldexp(T(1), std::ilogb(largest)) : T(1);
        }
        at.scaled = true;
        mine = begin_spare();
        std::fill(mine, mine + awaited, T(0));
        for_panels(at.number, [&](Index q, Index from, Index to) {
            pack(at, q, from, to);
            add_products(at, q, from, to, sets, mine);
        });
        form_gram(at, mine + sets * kp * stride);
        team.arrive();
        collect(sets);
    }
    T *begin_spare() {
        awaited_slots = shared.spare[spare_turn];
        spare_turn ^= 1;
        return awaited_slots + team.rank * shared.sum_size;
    }

    // Where a block meets a panel, from the first column on that it reaches: which entries are there. Row j has those in
    // columns start(j) to width; column c has those in rows 0 to stop(c). Compact storage leaves out the diagonal.
    struct Piece {
        Index row, column, rows, width;
        bool triangular, compact;
        Index start(Index j) const {
            return triangular ? std::clamp<Index>(row + j + compact - column, 0, width) : 0;
        }
        Index stop(Index c) const {
            return triangular ? std::clamp<Index>(column + c + 1 - compact - row, 0, rows) : rows;
        }
        bool whole() const { return start(rows - 1) == 0; }
    };
    Piece piece(Index block, Index q) const {
        const Index from = columns.from(p, block, q);
        return {block * p.k, columns.column(q) + from, p.size_of(block), columns.width(q) - from,
                p.triangular(), p.kind == Kind::compact};
    }

    // V is read as it lies, except where the triangle ends, in a short block, and where reflectors are scaled.
    bool packed(const Block &at, Index q) const {
        return at.scaled || at.size != kp || !piece(at.number, q).whole();
    }
    // Y of the block in one panel, with zeros for whatever is not there.
    void pack(const Block &at, Index q, Index from, Index to) const {
        FASTH_PHASE(pack);
        const Piece piece = this->piece(at.number, q);
        T *const place = at.packed + q * kp * p.panel;
        const Index down = by_columns ? 1 : p.panel, along = by_columns ? kp : 1;
        T *const y = place + from * along;
        at.Y[q] = {y, down, along};
        for (Index c = 0; c < (by_columns ? to - from : 0); ++c) {
            const Index stop = piece.stop(c);
            if (stop) std::memcpy(y + c * kp, &V(piece.row, piece.column + c), sizeof(T) * std::size_t(stop));
            std::fill(y + c * kp + stop, y + (c + 1) * kp, T(0));
        }
        const bool at_once = V.column_stride == 1 && piece.width % p.packet == 0; // then all that is in memory is copied
        if (at_once && !by_columns)
            copy<T>(piece.rows, piece.width, {&V(piece.row, piece.column), V.row_stride}, {y, p.panel});
        for (Index j = 0; j < (by_columns ? 0 : piece.rows); ++j) {
            T *const row = y + j * p.panel;
            const Index start = piece.start(j);
            std::fill(row, row + start, T(0));
            for (Index c = start; c < (at_once ? 0 : piece.width); ++c) row[c] = V(piece.row + j, piece.column + c);
        }
        for (Index j = piece.rows; j < (by_columns ? 0 : kp); ++j) std::fill_n(y + j * p.panel, to - from, T(0));
        for (Index j = 0; piece.compact && j < piece.rows; ++j)
            if (const Index c = piece.row + j - piece.column; c >= 0 && c < piece.width) y[j * down + c * along] = T(1);
        for (Index j = 0; at.scaled && j < piece.rows; ++j) // exact, and right for subnormal numbers
            for (Index c = 0; c < piece.width; ++c) y[j * down + c * along] /= at.scale[j];
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
            product<Result::negative, T>(padding, rest, {padding, rows + j, kp, 1, {own.N, rest}, Shape::upper_left},
                                         {nullptr, 0}, {rows + right, kp});
        }
    }

    // Zᵀ = (S F)ᵀ: (kp, lanes), with F = T if `upper`, else Tᵀ.
    void multiply_by_factor(const T *St, const T *factor, bool upper, T *Zt) const {
        FASTH_PHASE(factor);
        const Matrix<const T> right{St, stride};
        const Term<T> term = upper ? Term<T>{kp, factor, 1, kp, right, Shape::lower_left}
                                   : Term<T>{kp, factor, kp, 1, right, Shape::upper_left};
        product<Result::set, T>(kp, lanes, term, {nullptr, 0}, {Zt, stride});
    }

    // −Nᵀ = striu(M − Mᵀ) with M = ZᵀR for x Qᵀ, stril for x Q.
    void antisymmetric_half(const T *Z, const T *R) const {
        FASTH_PHASE(antisymmetric);
        T *const N = own.N, *const Mt = own.N + kp * kp;
        product<Result::set, T>(kp, kp, {p.m, Z, 1, kp, {R, kp}}, {nullptr, 0}, {N, kp});
        transpose<T>(kp, kp, {N, kp}, {Mt, kp});
        for (Index i = 0; i < kp * kp; ++i) N[i] -= Mt[i];
        for (Index i = 0; i < kp; ++i) { // a product reads no more of the other half than the squares on the diagonal
            const Index square = i / padding * padding, diagonal = i - square;
            T *const row = N + i * kp + square;
            for (Index j = 0; j < padding; ++j) row[j] = (p.transpose ? j < diagonal : j > diagonal) ? row[j] : T(0);
        }
    }

    // The gradient of a block's reflectors, once Rᵀ, in own.Zt, is known.
    struct BlockGradient {
        const Member &member;
        const Block &at;
        const Strided<T> dV;
        const T *Z;
        const States<T> states; // the rows after the block, unless they are the output, in the second set of rows
        const bool kept_state;

        BlockGradient(const Member &member, const Block &at, const Kept<T> &kept, const States<T> &states, Strided<T> dV)
            : member(member), at(at), dV(dV), Z(kept.Z ? kept.Z_of(at.number) : member.own.Z), states(states),
              kept_state(kept.Z && at.number != member.p.block_at(0, !member.p.transpose)) {}
        void begin() const {
            const Problem &p = member.p;
            const Index kp = member.kp, lanes = member.lanes, stride = member.stride, start = at.number * p.k;
            transpose<T>(kp, lanes, {member.own.Zt, stride}, {member.own.R, kp});
            if (Z == member.own.Z) { // the way back gives −Z
                transpose<T>(kp, lanes, {member.own.Zt + kp * stride, stride}, {member.own.Z, kp});
                for (Index i = 0; i < lanes * kp; ++i) member.own.Z[i] = -member.own.Z[i];
            }
            member.antisymmetric_half(Z, member.own.R);
            if (p.fills()) member.clear(dV, start, start + at.size, p.first_column(at.number));
        }
        void of_panel(Index q, Index from, Index to, const T *g) const {
            const Index size = member.p.panel_size();
            const T *const after = kept_state ? states.of(at.number, q) : member.own.rows[1] + q * size;
            if (kept_state && member.far && q + 1 < member.columns.panels) prefetch<false>(after + size, 1, 0, size);
            if (!member.streams(dV)) member.template prefetch_panel<true>(dV, at.number, q + 1);
            member.gradient_of_panel(at, q, from, to, Z, g, after, dV);
        }
    };

    // ∂Y = N Y − Zᵀ g − Rᵀ after, in one panel, into its place in dV; computed as its transpose.
    void gradient_of_panel(const Block &at, Index q, Index from, Index to, const T *Z, const T *g, const T *after,
                           Strided<T> dV) const {
        FASTH_PHASE(gradient);
        const Index kb = at.size;
        const Strided<const T> y = at.Y[q];
        const Term<T> terms[3] = {{kb, y.data, y.column_stride, y.row_stride, {own.N, kp},
                                   p.transpose ? Shape::strictly_lower_right : Shape::strictly_upper_right},
                                  {p.m, g + from * stride, stride, 1, {Z, kp}},
                                  {p.m, after + from * stride, stride, 1, {own.R, kp}}};
        const Piece piece = this->piece(at.number, q);
        if (dV.row_stride == 1 && dV.column_stride != 1 && !packed(at, q)) {
            const Matrix<T> place{&dV(piece.row, piece.column), dV.column_stride};
            if (p.adds) return product<Result::subtract, T>(to - from, kp, terms, {place.data, place.row_stride}, place);
            return streams(dV) ? product<Result::negative_streamed, T>(to - from, kp, terms, {nullptr, 0}, place)
                               : product<Result::negative, T>(to - from, kp, terms, {nullptr, 0}, place);
        }
        product<Result::negative, T>(to - from, kp, terms, {nullptr, 0}, {own.dY, kp});
        for (Index c = 0; at.scaled && c < to - from; ++c)
            for (Index j = 0; j < kb; ++j) own.dY[c * kp + j] /= at.scale[j];
        if (dV.column_stride == 1)
            store_in_rows(piece, !packed(at, q) && piece.width % p.packet == 0, dV);
        else
            store_in_columns(piece, dV);
    }

    // own.dY into its place, where that is stored by rows.
    void store_in_rows(const Piece &at, bool whole_packets, Strided<T> dV) const {
        if (whole_packets && !p.adds) { // the usual case
            const bool streamed = streams(dV) && at.column % p.packet == 0;
            for (Index j = 0; j < at.rows; j += p.packet)
                for (Index c = 0; c < at.width; c += p.packet) {
                    Square<T> square;
                    load_transposed(own.dY + c * kp + j, kp, square);
                    T *const place = &dV(at.row + j, at.column + c);
#pragma GCC unroll 16
                    for (Index l = 0; l < packet_size<T>; ++l)
                        streamed ? stream(place + l * dV.row_stride, square.packet[l])
                                 : Eigen::internal::pstoreu(place + l * dV.row_stride, square.packet[l]);
                }
            return;
        }
        transpose<T>(p.panel, kp, {own.dY, kp}, {own.turned, p.panel});
        for (Index j = 0; j < at.rows; ++j) {
            const T *const row = own.turned + j * p.panel;
            const Index start = at.start(j);
            if (p.fills()) std::fill_n(&dV(at.row + j, at.column), start, T(0));
            if (p.adds)
                for (Index c = start; c < at.width; ++c) dV(at.row + j, at.column + c) += row[c];
            else if (start < at.width)
                std::memcpy(&dV(at.row + j, at.column + start), row + start, sizeof(T) * std::size_t(at.width - start));
        }
    }
    void store_in_columns(const Piece &at, Strided<T> dV) const {
        for (Index c = 0; c < at.width; ++c) {
            const Index stop = at.stop(c);
            for (Index j = 0; j < stop; ++j) {
                T &place = dV(at.row + j, at.column + c);
                place = own.dY[c * kp + j] + (p.adds ? place : T(0));
            }
            for (Index j = stop; j < (p.fills() ? at.rows : 0); ++j) dV(at.row + j, at.column + c) = T(0);
        }
    }

    // Whether the gradient of V is so large that it would leave the caches before anybody reads it, and lies such that
    // whole packets of a panel, or of a block where it is stored by columns, can be written past them.
    bool streams(const Strided<T> &dV) const {
        constexpr Index line = 64, size = sizeof(T);
        const bool by_rows = dV.column_stride == 1 && dV.row_stride * size % line == 0;
        const bool by_columns = dV.row_stride == 1 && p.k * size % line == 0 && dV.column_stride * size % line == 0;
        return far && (by_rows || by_columns) &&
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

    void keep(const Block &at, const Kept<T> &kept) const {
        FASTH_PHASE(keep);
        if (team.rank == team.size - 1) {
            std::copy(at.scale, at.scale + at.size, kept.scales + at.number * p.k);
            kept.put_factor(at.number, own.factor);
        }
        if (kept.Z && team.rank == 0) transpose<T>(kp, lanes, {own.Zt, stride}, {kept.Z_of(at.number), kp});
    }
};

} // namespace fasth
