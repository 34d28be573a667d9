// x Qᵀ and its gradients, block by block, on one thread or a team that shares out the columns.
//
// The notation is that of src/fasth/reflections/README.md; README.md beside this file says why it is done this way.
#pragma once

#include <cstring>
#include <utility>

#include "gradient.hpp"

namespace fasth {

// One member's part of the work on one matrix. A column of x, with its rows side by side, is a row in here.
template <class T> class Sweep {
  public:
    // Memory shared by a team: the members' sums, (members, sets, K, lane stride). Three buffers are used in turn, since a
    // member prepares the next block while another may still read its sums of the last block.
    struct Shared {
        T *sums[3];
        Index sum_size;
    };
    struct Own : Scratch<T> { // memory of one member
        Block<T> blocks[2];      // the current block and the next
        T *rows[2];              // x or a gradient, and the output: each (panels, panel, lane stride)
        T *spare;                // the same, for a gradient before and after a block
        T *S, *Zt, *Z, *R;
        const T **current, **before; // the rows of each panel now, and before the current block
    };
    // `back`: allocates a second set of rows, and memory for the gradient of V.
    static Shared take_shared(const Problem<T> &p, int members, bool back, Carver &carver) {
        const Index size = (1 + back) * p.lane_stride() * p.K();
        const auto sums = [&] { return carver.take<T>(members * size); };
        return {{sums(), sums(), sums()}, size};
    }
    static Own take_own(const Problem<T> &p, int members, bool back, Carver &carver) {
        const Index K = p.K(), deal = 2 * members, panels = (p.panels() + deal - 1) / deal * 2; // at most
        Own own;
        static_cast<Scratch<T> &>(own) = Scratch<T>::take(p, carver);
        for (auto &block : own.blocks) block = Block<T>::take(p, panels, carver);
        own.rows[0] = carver.take<T>(panels * p.panel_size());
        for (T **rows : {&own.rows[1], &own.spare}) *rows = carver.take<T>(back ? panels * p.panel_size() : 0);
        for (T **place : {&own.S, &own.Zt}) *place = carver.take<T>((1 + back) * K * p.lane_stride());
        for (T **place : {&own.Z, &own.R}) *place = carver.take<T>(p.lanes() * K);
        for (const T ***list : {&own.current, &own.before}) *list = carver.take<const T *>(panels);
        return own;
    }

    Sweep(const Problem<T> &p, Team &team, Strided<const T> V, const Shared &shared, const Own &own, const Saved<T> &saved)
        : p(p), team(team), V(V), shared(shared), own(own), saved(saved), columns(p, team.size, team.rank),
          reflectors(p, V, columns), K(p.K()), lanes(p.lanes()), stride(p.lane_stride()) {}

    void load(Strided<const T> source, int set = 0) {
        for_panels([&](Index q, Index column, Index width) {
            FASTH_PHASE(rows);
            T *const panel = own.rows[set] + q * p.panel_size();
            if (set == 0) own.current[q] = panel;
            if (p.m == 0) return; // a source without rows has no memory
            Index done = 0; // rows that are loaded
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
            if (p.m == 0) return;
            Index done = 0;
            if (target.column_stride == 1 && width % p.packet == 0) {
                done = p.m / p.packet * p.packet;
                transpose<T>(width, done, {current(q), stride}, {&target(0, column), target.row_stride});
            }
            for (Index i = done; i < p.m; ++i)
                for (Index c = 0; c < width; ++c) target(i, column + c) = current(q)[c * stride + i];
        });
    }

    // Loads the rows of another product, each column times its entry of the diagonal; columns without an entry are zero.
    void load_scaled(const Sweep &from, const Diagonal<T> &diagonal) {
        for_panels([&](Index q, Index column, Index width) {
            T *const panel = own.rows[0] + q * p.panel_size();
            own.current[q] = panel;
            const Index count = std::clamp<Index>(diagonal.count - column, 0, width);
            for (Index c = 0; c < count; ++c) {
                const T *const source = from.current(q) + c * stride;
                const T entry = diagonal.entry(column + c);
                for (Index i = 0; i < lanes; ++i) panel[c * stride + i] = source[i] * entry;
            }
            for (Index c = count; c < width; ++c) std::fill_n(panel + c * stride, lanes, T(0));
        });
    }
    void add(const T *bias) {
        for_panels([&](Index q, Index column, Index width) {
            T *const panel = own.rows[0] + q * p.panel_size();
            for (Index c = 0; c < width; ++c)
                for (Index i = 0; i < lanes; ++i) panel[c * stride + i] = current(q)[c * stride + i] + bias[column + c];
            own.current[q] = panel;
        });
    }
    // Sums over the rows that were loaded from `source`.
    void sum_columns(Strided<const T>, T *sums) const {
        for_panels([&](Index q, Index column, Index width) {
            for (Index c = 0; c < width; ++c)
                put_sum(sums[column + c], sum_of(p.m, [=](Index i) { return current(q)[c * stride + i]; }));
        });
    }
    // The gradient of sigma in load_scaled: this product's second set of rows times the other's rows.
    void gradient_of_sigma(const Sweep &other, const Diagonal<T> &diagonal, T *gradient) const {
        for_panels([&](Index q, Index column, Index width) {
            const T *const panel = own.rows[1] + q * p.panel_size();
            for (Index c = 0; c < std::min(width, diagonal.count - column); ++c) {
                const T *const mine = panel + c * stride, *const others = other.current(q) + c * stride;
                const T sum = sum_of(p.m, [=](Index i) { return mine[i] * others[i]; });
                put_sum(gradient[column + c], sum * diagonal.sign(column + c));
            }
        });
    }

    // Multiplies the rows by Qᵀ, or by Q if p.transpose.
    void forward() {
        const auto begin_block = [&](Index step, const Block<T> &at) {
            const Index first = p.first_row(at.number);
            multiply_by_T(at.number, p.transpose, S, own.Zt);
            if (step + 1 < p.blocks()) prefetch_T(p.block_at(step + 1, p.transpose));
            if (saved.Z && team.rank == 0) {
                FASTH_PHASE(save);
                T *const Z = saved.Z_of(at.number);
                std::fill_n(Z, first * K, T(0));
                transpose<T>(K, lanes - first, {own.Zt + first, stride}, {Z + first * K, K});
            }
            const bool saves = p.has_A && step + 1 < p.blocks();
            return [=, &at](Index q, Index from, Index to) {
                T *const after = saves ? saved_panel<true>(at.number, q) : own.rows[0] + q * p.panel_size();
                update(at, q, from, to, own.Zt, current(q), after);
                own.current[q] = after;
            };
        };
        run(p.transpose, 1, begin_block, [](const Block<T> &) {});
    }

    // Turns the rows from the gradient of the output into the gradient of x, and stores it if dx has data. Computes the
    // gradient of V if dV has data; this needs the output in the second set of rows.
    void backward(Strided<T> dx, Strided<T> dV) {
        const bool ascending = !p.transpose;
        const Backward plan(*this, dV);
        const auto begin_block = [&](Index step, const Block<T> &at) {
            multiply_by_T(at.number, ascending, S, own.Zt);
            if (plan.sets == 2) multiply_by_T(at.number, ascending, S + K * stride, output_Zt());
            if (step + 1 < p.blocks()) { // T and Z may be in another member's cache
                const Index next = p.block_at(step + 1, ascending);
                prefetch_T(next);
                if (saved.Z && dV.data) prefetch<false>(saved.Z_of(next), lanes, K, K);
            }
            if (plan.at_once) begin_gradient(plan, at);
            return [=, &plan, &at](Index q, Index from, Index to) {
                if (plan.at_once) gradient_of_panel(plan, at, q, from, to, current(q));
                T *const mine = own.rows[0] + q * p.panel_size();
                T *const after = plan.later && current(q) == mine ? own.spare + q * p.panel_size() : mine;
                update(at, q, from, to, own.Zt, current(q), after);
                own.before[q] = current(q);
                own.current[q] = after;
                T *const output = own.rows[1] + q * p.panel_size();
                if (plan.sets == 2)
                    update(at, q, from, to, output_Zt(), output, output);
                else if (plan.runs_back)
                    update(at, q, from, to, output_Zt(), output, output, Result::add);
            };
        };
        const auto finish_block = [&](const Block<T> &at) {
            if (!plan.later) return;
            begin_gradient(plan, at);
            reflectors.for_panels(at.number, [&](Index q, Index from, Index to) {
                gradient_of_panel(plan, at, q, from, to, own.before[q]);
                prefetch_sums();
            });
        };
        run(ascending, plan.sets, begin_block, finish_block);
        if (dV.data) plan.gradient.finish(team);
        if (dx.data) store(dx);
    }

  private:
    const Problem<T> &p;
    Team &team;
    const Strided<const T> V;
    const Shared &shared;
    const Own &own;
    const Saved<T> saved;
    const Columns columns;
    const Reflectors<T> reflectors;
    const Index K, lanes, stride; // stride: from one column of x to the next
    const T *S = nullptr;          // Sᵀ: (K, lanes) for each set of rows
    int turn = 0;                  // the next buffer for sums
    Index awaited = 0;             // number of sums expected from each other member
    T *awaited_sums = nullptr;
    bool fetched = true;           // true if these sums were prefetched

    const T *current(Index panel) const { return own.current[panel]; } // (panel, lane stride)
    // Calls action(panel, first column, number of columns) for every panel.
    template <class Action> void for_panels(const Action &action) const {
        for (Index q = 0; q < columns.panels; ++q) action(q, columns.column(q), columns.width(q));
    }
    void put_sum(T &place, T sum) const { place = p.continues ? place + sum : sum; }
    template <class Entry> static T sum_of(Index count, const Entry &entry) { // several partial sums, then their sum
        constexpr Index width = packet_size<T>;
        T sums[width] = {}, sum = 0;
        Index i = 0;
        for (; i + width <= count; i += width)
            for (Index l = 0; l < width; ++l) sums[l] += entry(i + l);
        for (; i < count; ++i) sum += entry(i);
        for (const T s : sums) sum += s;
        return sum;
    }

    // How the gradient of V is computed. Without A the output runs back beside its gradient; without Z, Z is recomputed too.
    // Other members wait for the sums of the next block, not for ∂Y: so with A a team computes these sums first.
    struct Backward {
        const Gradient<T> gradient;
        const bool runs_back, later, at_once;
        const int sets; // number of sets of rows that are multiplied by Yᵀ

        Backward(const Sweep &sweep, Strided<T> dV)
            : gradient(sweep.p, sweep.reflectors, sweep.own, dV), runs_back(dV.data && !sweep.p.has_A),
              later(dV.data && !runs_back && sweep.team.size > 1), at_once(dV.data && !later),
              sets(runs_back && !sweep.saved.Z ? 2 : 1) {}
    };
    T *output_Zt() const { return own.Zt + K * stride; }
    void begin_gradient(const Backward &plan, const Block<T> &at) const {
        const Index first = p.first_row(at.number), start = first * K;
        transpose<T>(K, lanes - first, {own.Zt + first, stride}, {own.R + start, K});
        if (plan.sets == 2) { // the other direction gives −Z
            transpose<T>(K, lanes - first, {output_Zt() + first, stride}, {own.Z + start, K});
            for (Index i = start; i < lanes * K; ++i) own.Z[i] = -own.Z[i];
        } else if (plan.runs_back) {
            transpose<T>(lanes - first, K, {saved.Z_of(at.number) + start, K}, {output_Zt() + first, stride});
        }
        plan.gradient.begin(at, Z_of(at), own.R, team);
    }
    void gradient_of_panel(const Backward &plan, const Block<T> &at, Index q, Index from, Index to, const T *g) const {
        plan.gradient.of_panel(at, q, from, to, Z_of(at), own.R, g, after_block(at, q));
    }

    const T *Z_of(const Block<T> &at) const { return saved.Z ? saved.Z_of(at.number) : own.Z; }
    void prefetch_T(Index block) const { prefetch<false>(saved.T_of(block), 1, 0, K * K); }
    // A panel of A; prefetches the next.
    template <bool to_write> T *saved_panel(Index block, Index q) const {
        T *const A = saved.A_at(p.place(block));
        if (reflectors.far && q + 1 < columns.panels) prefetch<to_write>(A + columns.column(q + 1) * stride, 1, 0, p.panel_size());
        return A + columns.column(q) * stride;
    }
    // The rows after a block: from A, or the output, in the second set of rows, which runs back where there is no A.
    const T *after_block(const Block<T> &at, Index q) const {
        return !p.has_A || p.acts_last(at.number) ? own.rows[1] + q * p.panel_size() : saved_panel<false>(at.number, q);
    }

    // Loops over the blocks: S = rows · Yᵀ is summed over the team; begin_block(step, block) prepares the block from S and
    // returns a function that updates a panel. The panel's part of the next S is computed next, while the panel is in
    // the cache. finish_block(block) of the previous block fills the time until the other members' sums arrive.
    template <class Begin, class Finish> void run(bool ascending, int sets, const Begin &begin_block, const Finish &finish_block) {
        if (p.blocks() == 0) return;
        Block<T> block[2] = {own.blocks[0], own.blocks[1]}, *at = &block[0], *next = &block[1];
        T *sums = begin_sums(sets);
        prepare(*at, p.block_at(0, ascending));
        reflectors.for_panels(at->number, [&](Index q, Index from, Index to) { add_products(*at, q, from, to, sets, sums); });
        for (Index step = 0; step < p.blocks(); ++step) {
            const bool last = step + 1 == p.blocks();
            publish_sums(sets);
            if (step > 0) finish_block(*next);
            if (!last) sums = begin_sums(sets);
            reduce_sums();
            if (!last) prepare(*next, p.block_at(step + 1, ascending));
            const auto update_panel = begin_block(step, *at);
            const Index first = columns.first_panel(p, at->number);
            const Index next_first = last ? columns.panels : columns.first_panel(p, next->number);
            for (Index q = std::min(first, next_first); q < columns.panels; ++q) {
                if (!last) reflectors.template prefetch_panel<false>(V, next->number, q + 1);
                if (q >= first) update_panel(q, columns.from(p, at->number, q), columns.width(q));
                if (q >= next_first) add_products(*next, q, columns.from(p, next->number, q), columns.width(q), sets, sums);
            }
            std::swap(at, next);
        }
        finish_block(*next);
    }
    void prepare(Block<T> &at, Index block) const { reflectors.prepare(at, block, saved.scales(block)); }

    // This member's buffer for the sums of the next block, set to zero.
    T *begin_sums(int sets) {
        T *const mine = shared.sums[turn] + team.rank * shared.sum_size;
        std::fill(mine, mine + sets * K * stride, T(0));
        return mine;
    }
    void publish_sums(int sets) {
        awaited_sums = shared.sums[turn];
        awaited = sets * K * stride;
        turn = (turn + 1) % 3;
        team.arrive();
        fetched = team.size == 1;
    }
    // Prefetches other members' sums, which move from core to core during other work.
    void prefetch_sums() {
        if (fetched || !team.complete()) return;
        for (int member = 0; member < team.size; ++member)
            if (member != team.rank) prefetch<false>(awaited_sums + member * shared.sum_size, 1, 0, awaited);
        fetched = true;
    }
    // S: adds the sums of all members, in the same order on every member.
    void reduce_sums() {
        FASTH_PHASE(barrier);
        S = awaited_sums;
        if (team.size == 1) return;
        team.wait();
        fetched = true;
        std::copy(awaited_sums, awaited_sums + awaited, own.S);
        for (int member = 1; member < team.size; ++member)
            for (Index i = 0; i < awaited; ++i) own.S[i] += awaited_sums[member * shared.sum_size + i];
        S = own.S;
    }

    // Sᵀ += Y · rowsᵀ in one panel, for every set of rows.
    void add_products(const Block<T> &at, Index q, Index from, Index to, int sets, T *sum) const {
        FASTH_PHASE(S);
        const Strided<const T> y = at.Y[q];
        const Index first = p.first_row(at.number);
        for (int set = 0; set < sets; ++set, sum += K * stride) {
            const T *const rows = (set == 0 ? current(q) : own.rows[set] + q * p.panel_size()) + first;
            product<T>(Result::add, at.size, lanes - first,
                       {to - from, y.data, y.row_stride, y.column_stride, {rows + from * stride, stride}},
                       {sum + first, stride}, {sum + first, stride});
        }
    }
    // after = rows − Yᵀ Zᵀ in one panel, or + if `result` is add, on the columns that the block reaches.
    void update(const Block<T> &at, Index q, Index from, Index to, const T *Zt, const T *rows, T *after,
                Result result = Result::subtract) const {
        FASTH_PHASE(update);
        const Strided<const T> y = at.Y[q];
        const Index first = p.first_row(at.number), start = from * stride + first;
        product<T>(result, to - from, lanes - first,
                   {at.size, y.data, y.column_stride, y.row_stride, {Zt + first, stride}}, {rows + start, stride},
                   {after + start, stride});
        if (from && after != rows) std::memcpy(after, rows, sizeof(T) * std::size_t(from * stride));
    }
    // Zᵀ = (S T)ᵀ if `upper`, else (S Tᵀ)ᵀ: (K, lanes), from the first changed row on.
    void multiply_by_T(Index block, bool upper, const T *St, T *Zt) const {
        FASTH_PHASE(Z);
        const T *const block_T = saved.T_of(block);
        const Index first = p.first_row(block);
        const Matrix<const T> right{St + first, stride};
        const Term<T> term = upper ? Term<T>{K, block_T, 1, K, right, Shape::lower_left}
                                   : Term<T>{K, block_T, K, 1, right, Shape::upper_left};
        product<T>(Result::set, K, lanes - first, term, {nullptr, 0}, {Zt + first, stride});
    }
};

} // namespace fasth
