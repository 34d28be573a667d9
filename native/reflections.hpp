// x Qᵀ and its gradients over blocks of reflections, on one thread or a team that shares the columns.
//
// The notation is that of src/fasth/reflections/README.md; README.md beside this file says why it is done this way.
#pragma once

#include <cstring>
#include <utility>

#include "gradient.hpp"

namespace fasth {

// One member's part of the work on one matrix of the batch.
template <class T> class Member {
    const Problem &p;
    Team &team;
    const Strided<const T> V;
    const Workspace<T> &shared;
    typename Workspace<T>::Own own;
    const Kept<T> kept;
    const Columns columns;
    const Reflectors<T> reflectors;
    const Index kp, lanes, stride; // the stride is that from one column of x to the next
    const T *S = nullptr;          // Sᵀ: (kp, lanes) for each set of rows
    int turn = 0;                  // which place for sums is next
    Index awaited = 0;             // how many sums of each other member are on their way
    T *awaited_slots = nullptr;
    bool fetched = true;           // whether they have been asked for

  public:
    using Space = Workspace<T>;

    // Without memory for what is kept, T has a place in that of the team.
    Member(const Problem &p, Team &team, Strided<const T> V, const Workspace<T> &shared,
           const typename Workspace<T>::Own &own, const Kept<T> &kept)
        : p(p), team(team), V(V), shared(shared), own(own),
          kept(kept.scales ? kept : Kept<T>(p, shared.factors, team.size)), columns(p, team.size, team.rank),
          reflectors(p, V, columns), kp(p.padded_k()), lanes(p.lanes()), stride(p.lane_stride()) {
        std::fill(own.factor, own.factor + kp * kp, T(0));
    }

    // This member's share of all T, among these threads. They have to meet after it.
    void find_factors() { find_factors(team); }
    void find_factors(const Team &among) { Factors<T>(p, V, own).find_share(among, kept); }
    // Whether `forward` finds T on its way. If not, find_factors has to come before.
    bool finds_factors() const { return Workspace<T>::ahead(p) > 0; }

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
    // The sums of the rows, which were loaded from `source`.
    void sum_columns(Strided<const T>, T *sums) const {
        for_panels([&](Index q, Index column, Index width) {
            for (Index c = 0; c < width; ++c)
                put_sum(sums[column + c], sum_of(p.m, [=](Index i) { return now(q)[c * stride + i]; }));
        });
    }
    // The gradient of the factors in load_scaled: this product's second set of rows times that of the other's rows.
    void gradient_of_factors(const Member &of, const Diagonal<T> &factors, T *gradient) const {
        for_panels([&](Index q, Index column, Index width) {
            const T *const panel = own.rows[1] + q * p.panel_size();
            for (Index c = 0; c < std::min(width, factors.count - column); ++c) {
                const T *const mine = panel + c * stride, *const others = of.now(q) + c * stride;
                const T sum = sum_of(p.m, [=](Index i) { return mine[i] * others[i]; });
                put_sum(gradient[column + c], sum * factors.sign(column + c));
            }
        });
    }

    // The rows times Qᵀ, or Q if p.transpose.
    void forward() {
        const States<T> states(p, kept.states, kept.members, team.rank, own.offsets);
        const auto turn_of = [&](Index step, const Block<T> &at) {
            kept.get_factor(at.number, own.factor);
            multiply_by_factor(p.first_row(at.number), S, own.factor, p.transpose, own.Zt);
            if (step + 1 < p.blocks()) kept.prefetch_factor(p.block_at(step + 1, p.transpose));
            if (kept.Z && team.rank == 0) {
                FASTH_PHASE(keep);
                const Index first = p.first_row(at.number);
                transpose<T>(kp, lanes - first, {own.Zt + first, stride}, {kept.Z_of(at.number) + first * kp, kp});
            }
            const bool keeps = kept.states && step + 1 < p.blocks();
            return [=, &at](Index q, Index from, Index to) {
                T *const after = keeps ? states.of(at.number, q) : own.rows[0] + q * p.panel_size();
                if (keeps && reflectors.far && q + 1 < columns.panels) prefetch<true>(after + p.panel_size(), 1, 0, p.panel_size());
                update(at, q, from, to, own.Zt, now(q), after);
                own.now[q] = after;
            };
        };
        sweep(p.transpose, 1, finds_factors(), turn_of, [](const Block<T> &) {});
    }

    // The rows, a gradient of the output, become that of x, which goes into its place, if it has one (data); the gradient of V,
    // likewise, needs the output in the second set of rows.
    void backward(Strided<T> dx, Strided<T> dV) {
        const bool way = !p.transpose;
        // Without states the output runs back beside its gradient; without Z too, that is found again on the way.
        const bool runs_back = dV.data && !kept.states;
        const int sets = runs_back && !kept.Z ? 2 : 1;
        // The others wait for the sums of the next block, not for ∂Y. So a team first does what they wait for.
        const bool later = dV.data && !runs_back && team.size > 1;
        const States<T> states(p, kept.states, kept.members, team.rank, own.offsets);
        const Gradient<T> gradient(p, reflectors, own, dV);
        const auto begin = [&](const Block<T> &at) {
            const Index first = p.first_row(at.number), start = first * kp;
            transpose<T>(kp, lanes - first, {own.Zt + first, stride}, {own.R + start, kp});
            T *const Zt = own.Zt + kp * stride + first; // for the output
            if (sets == 2) { // the way back gives −Z
                transpose<T>(kp, lanes - first, {Zt, stride}, {own.Z + start, kp});
                for (Index i = start; i < lanes * kp; ++i) own.Z[i] = -own.Z[i];
            } else if (runs_back) {
                transpose<T>(lanes - first, kp, {kept.Z_of(at.number) + start, kp}, {Zt, stride});
            }
            gradient.begin(at, Z_of(at), own.R, team);
        };
        const auto of_panel = [&](const Block<T> &at, Index q, Index from, Index to, const T *g) {
            gradient.of_panel(at, q, from, to, Z_of(at), own.R, g, after_block(at, q, states));
        };
        const auto turn_of = [&](Index step, const Block<T> &at) {
            kept.get_factor(at.number, own.factor);
            for (int set = 0; set < sets; ++set)
                multiply_by_factor(p.first_row(at.number), S + set * kp * stride, own.factor, way, own.Zt + set * kp * stride);
            if (step + 1 < p.blocks()) { // another member may have kept them
                const Index next = p.block_at(step + 1, way);
                kept.prefetch_factor(next);
                if (kept.Z && dV.data) prefetch<false>(kept.Z_of(next), lanes, kp, kp);
            }
            if (dV.data && !later) begin(at);
            return [=, &at](Index q, Index from, Index to) {
                if (dV.data && !later) of_panel(at, q, from, to, now(q));
                T *const mine = own.rows[0] + q * p.panel_size();
                T *const after = later && now(q) == mine ? own.others + q * p.panel_size() : mine;
                update(at, q, from, to, own.Zt, now(q), after);
                own.before[q] = now(q);
                own.now[q] = after;
                T *const output = own.rows[1] + q * p.panel_size();
                if (sets == 2)
                    update(at, q, from, to, own.Zt + kp * stride, output, output);
                else if (runs_back)
                    update<Result::add>(at, q, from, to, own.Zt + kp * stride, output, output);
            };
        };
        const auto finish = [&](const Block<T> &at) {
            if (!later) return;
            begin(at);
            reflectors.for_panels(at.number, [&](Index q, Index from, Index to) {
                of_panel(at, q, from, to, own.before[q]);
                fetch_when_complete();
            });
        };
        sweep(way, sets, false, turn_of, finish);
        if (dV.data) gradient.finish(team);
        if (dx.data) store(dx);
    }

  private:
    const T *now(Index panel) const { return own.now[panel]; } // (panel, lane stride)
    // action(panel, its first column, how many) on every panel.
    template <class Action> void for_panels(const Action &action) const {
        for (Index q = 0; q < columns.panels; ++q) action(q, columns.column(q), columns.width(q));
    }
    const T *Z_of(const Block<T> &at) const { return kept.Z ? kept.Z_of(at.number) : own.Z; }
    // The rows after a block: a state, or the output, in the second set of rows, which runs back where there are no states.
    const T *after_block(const Block<T> &at, Index q, const States<T> &states) const {
        if (!kept.states || at.number == p.block_at(0, !p.transpose)) return own.rows[1] + q * p.panel_size();
        const T *const after = states.of(at.number, q);
        if (reflectors.far && q + 1 < columns.panels) prefetch<false>(after + p.panel_size(), 1, 0, p.panel_size());
        return after;
    }
    void put_sum(T &place, T sum) const { place = p.continues ? place + sum : sum; }
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

    // T of the block that acts as number `step`: first its G, of which each member has a summand; then, when all have met, the
    // rest, by one member; and when all have met again it is there.
    void begin_factor(Index step) {
        if (step < p.blocks()) Factors<T>(p, V, own).find_gram(reflectors, p.block_at(step, p.transpose), gram(step, team.rank));
    }
    void end_factor(Index step) {
        if (step >= p.blocks() || dealt_to(step, team.size) != team.rank) return;
        add_up(gram(step, 0), kp * kp, kp * kp, own.G);
        Factors<T>(p, V, own).finish(p.block_at(step, p.transpose), kept);
    }
    void find_first_factors(Index count) {
        for (Index step = 0; step < count; ++step) begin_factor(step);
        team.meet();
        for (Index step = 0; step < count; ++step) end_factor(step);
        team.meet();
    }
    T *gram(Index step, int rank) const {
        return shared.grams + (step % Workspace<T>::ahead(p) * team.size + rank) * kp * kp;
    }

    // One block after the other: S = rows · Yᵀ is added up over the team; `turn_of(step, block)` makes of it what the
    // block needs, and gives back what to do to a panel, after which the panel's part of the next S is computed, while it
    // is at hand. What fills the time until the others' sums are there: `finish(block)` for the block before; and, if T is to
    // be found, G of the block three ahead. It takes two more meetings to T, and the next step prepares that block.
    template <class Turn, class Finish>
    void sweep(bool way, int sets, bool finds, const Turn &turn_of, const Finish &finish) {
        if (p.blocks() == 0) return;
        const Index ahead = finds ? Workspace<T>::ahead(p) : 0;
        if (finds) find_first_factors(ahead);
        Block<T> *at = &own.blocks[0], *next = &own.blocks[1];
        T *sums = begin_sums(sets);
        prepare(*at, p.block_at(0, way));
        reflectors.for_panels(at->number, [&](Index q, Index from, Index to) { add_products(*at, q, from, to, sets, sums); });
        for (Index step = 0; step < p.blocks(); ++step) {
            const bool last = step + 1 == p.blocks();
            announce(sets);
            if (step > 0) finish(*next);
            if (finds) begin_factor(step + ahead);
            if (!last) sums = begin_sums(sets);
            collect();
            if (finds && step > 0) end_factor(step + ahead - 1);
            if (!last) prepare(*next, p.block_at(step + 1, way));
            const auto visit = turn_of(step, *at);
            const Index first = columns.first_panel(p, at->number);
            const Index next_first = last ? columns.panels : columns.first_panel(p, next->number);
            const Index wanted = step + 1 + ahead; // the block whose reflectors are fetched next
            for (Index q = std::min(first, next_first); q < columns.panels; ++q) {
                if (wanted < p.blocks()) reflectors.template prefetch_panel<false>(V, p.block_at(wanted, way), q + 1);
                if (q >= first) visit(q, columns.from(p, at->number, q), columns.width(q));
                if (q >= next_first) add_products(*next, q, columns.from(p, next->number, q), columns.width(q), sets, sums);
            }
            std::swap(at, next);
        }
        finish(*next);
    }

    // This member's place for the sums of the next block, at zero.
    T *begin_sums(int sets) {
        T *const mine = shared.sums[turn] + team.rank * shared.sum_size;
        std::fill(mine, mine + sets * kp * stride, T(0));
        return mine;
    }
    void prepare(Block<T> &at, Index block) const { reflectors.prepare(at, block, kept.scales + block * p.k); }

    void announce(int sets) {
        awaited_slots = shared.sums[turn];
        awaited = sets * kp * stride;
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

    // S: the sums of all members.
    void collect() {
        FASTH_PHASE(meet);
        S = awaited_slots;
        if (team.size == 1) return;
        team.wait();
        fetched = true;
        add_up(awaited_slots, shared.sum_size, awaited, own.S);
        S = own.S;
    }
    // The sum of what each member has in its slot, in the same order for all.
    void add_up(const T *slots, Index slot_size, Index count, T *sum) const {
        std::copy(slots, slots + count, sum);
        for (int member = 1; member < team.size; ++member)
            for (Index i = 0; i < count; ++i) sum[i] += slots[member * slot_size + i];
    }

    // Sᵀ += Y · rowsᵀ in one panel, for every set of rows.
    void add_products(const Block<T> &at, Index q, Index from, Index to, int sets, T *sum) const {
        FASTH_PHASE(S);
        const Strided<const T> y = at.Y[q];
        const Index first = p.first_row(at.number);
        for (int set = 0; set < sets; ++set, sum += kp * stride) {
            const T *const rows = (set == 0 ? now(q) : own.rows[set] + q * p.panel_size()) + first;
            product<Result::add, T>(at.size, lanes - first,
                                    {to - from, y.data, y.row_stride, y.column_stride, {rows + from * stride, stride}},
                                    {sum + first, stride}, {sum + first, stride});
        }
    }

    // after = rows − Yᵀ Zᵀ in one panel, or + if that is the result, on the columns that the block reaches.
    template <Result result = Result::subtract>
    void update(const Block<T> &at, Index q, Index from, Index to, const T *Zt, const T *rows, T *after) const {
        FASTH_PHASE(update);
        const Strided<const T> y = at.Y[q];
        const Index first = p.first_row(at.number), start = from * stride + first;
        product<result, T>(to - from, lanes - first,
                           {at.size, y.data, y.column_stride, y.row_stride, {Zt + first, stride}}, {rows + start, stride},
                           {after + start, stride});
        if (from && after != rows) std::memcpy(after, rows, sizeof(T) * std::size_t(from * stride));
    }

    // Zᵀ = (S F)ᵀ: (kp, lanes), from the first row on that changes, with F = T if `upper`, else Tᵀ.
    void multiply_by_factor(Index first, const T *St, const T *factor, bool upper, T *Zt) const {
        FASTH_PHASE(factor);
        const Matrix<const T> right{St + first, stride};
        const Term<T> term = upper ? Term<T>{kp, factor, 1, kp, right, Shape::lower_left}
                                   : Term<T>{kp, factor, kp, 1, right, Shape::upper_left};
        product<Result::set, T>(kp, lanes - first, term, {nullptr, 0}, {Zt + first, stride});
    }
};

} // namespace fasth
