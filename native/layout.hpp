// One problem's sizes, who has which columns of it, and the memory for it.
#pragma once

#include "team.hpp"

namespace fasth {

enum class Kind { full, triangular, compact }; // compact: triangular with a diagonal of ones that is not stored

template <class T> struct Strided { // (rows, columns) anywhere in memory
    T *data;
    Index row_stride, column_stride;
    T &operator()(Index i, Index j) const { return data[i * row_stride + j * column_stride]; }
    bool by_columns() const { return row_stride == 1 && column_stride != 1; }
};

// The singular values between two products, times the signs of both: (2, count), or none.
template <class T> struct Diagonal {
    const T *sigma, *signs;
    Index count;
    T sign(Index c) const { return signs ? signs[c] * signs[count + c] : T(1); }
};

// How many columns are worked on together, and by one member of a team, where reflectors are at most so long: few, so that
// a triangle is shared out evenly, or many, so that calls are worth their while.
constexpr Index widest_panel = 64;
constexpr Index panel_for(Index d) { return d < 768 ? 32 : widest_panel; }

struct Problem {
    Index m, r, d; // rows of x, reflectors, their length
    Kind kind;
    bool transpose;
    Index k;      // reflections in a block
    Index packet; // numbers in a register
    Index panel;  // columns in a panel
    bool shares = false; // with compact reflectors: whether another product has its own in the rest of the matrix
    bool adds = false;   // whether the gradient of V is added to what is there
    bool in_rows = false; // rows of x as they come, which the members share out, instead of columns: rowwise.hpp
    bool of_identity = false; // x are rows of the identity, in x Qᵀ, and no gradient of them is wanted
    // Where the rows are a part of all: the first of them; whether T is there; and sums over the rows before them.
    Index first = 0;
    bool is_part = false, continues = false;

    bool triangular() const { return kind != Kind::full; }
    Index reflectors() const { return triangular() ? std::min(r, d) : r; } // the others are zero
    bool fills() const { return triangular() && !shares && !adds; } // zeros in the gradient where V has none of its own
    Index blocks() const { return (reflectors() + k - 1) / k; }
    Index size_of(Index block) const { return std::min(k, reflectors() - block * k); }
    Index padded_k() const { return round_up(k, padding); }
    Index panels() const { return (d + panel - 1) / panel; }
    // Rows of x stand side by side in registers, or, as they come, in tiles. Those that are only there to fill the last are zero.
    Index lanes() const { return round_up(m, in_rows ? inner_rows : packet); }
    // The first of the rows that a block changes, in whole packets. Those of the identity are zero in all columns that it
    // reaches, up to where it starts itself: the blocks that act before it start further right.
    Index first_row(Index block) const {
        return of_identity ? std::clamp<Index>(first_column(block) - first, 0, m) / packet * packet : 0;
    }
    // How far apart columns of x are. Multiples of a kilobyte would crowd a few lines of the first-level cache.
    Index lane_stride() const { return m && lanes() % 256 == 0 ? lanes() + packet : lanes(); }
    Index panel_size() const { return panel * lane_stride(); }
    // The column where the block's reflectors start, and the one from which on they are read: in packets, if rows are.
    Index first_column(Index block) const { return triangular() ? block * k : 0; }
    Index first_read(Index block) const { return in_rows ? first_column(block) / packet * packet : first_column(block); }
    // Which block acts as number `step`: x Qᵀ takes the last block first, x Q the first.
    Index block_at(Index step, bool transposed) const { return transposed ? step : blocks() - 1 - step; }
};

// Which of so many members is next when things are dealt out to and fro: 0 1 1 0 0 1 1 0 for two.
inline int dealt_to(Index number, int size) {
    const int place = int(number % (2 * size));
    return std::min(place, 2 * size - 1 - place);
}

// The columns of one member of a team. Panels are dealt out to and fro, so that a triangular problem is shared out to a
// panel, and who has one more changes from block to block.
struct Columns {
    Index d, panel;
    int size, rank;
    Index panels;

    Columns(const Problem &p, int size, int rank)
        : d(p.d), panel(p.panel), size(size), rank(rank), panels(before(p.panels())) {}

    // Where a member's panel starts in V, and how many columns it has.
    Index column(Index q) const { return (q / 2 * 2 * size + (q % 2 ? 2 * size - 1 - rank : rank)) * panel; }
    Index width(Index q) const { return std::min(panel, d - column(q)); }
    // The first panel that a block reaches, and the columns on the left, counted within a panel, that it does not.
    Index first_panel(const Problem &p, Index block) const { return before(p.first_column(block) / panel); }
    Index from(const Problem &p, Index block, Index q) const {
        return std::clamp<Index>(p.first_read(block) - column(q), 0, width(q));
    }

  private:
    Index before(Index count) const { // how many of the first so many panels are this member's
        const Index deals = count / (2 * size), rest = count % (2 * size);
        return 2 * deals + (rest > rank) + (rest > 2 * size - 1 - rank);
    }
};

// The rows after every block but the one that acts last, whose rows are the output: member by member, as a team has them.
template <class T> struct States {
    T *data;
    Index *offsets; // of a member's first panel, block by block
    Index panel_size;

    static Index size(const Problem &p, int members) {
        Index panels = 0;
        for (int rank = 0; rank < members; ++rank) panels += panels_of(p, Columns(p, members, rank));
        return panels * p.panel_size();
    }
    // Those of one member. There is room for an offset for each block.
    States(const Problem &p, T *data, int members, int rank, Index *offsets)
        : data(data), offsets(offsets), panel_size(p.panel_size()) {
        if (!data) return;
        Index start = 0;
        for (int other = 0; other < rank; ++other) start += panels_of(p, Columns(p, members, other));
        const Columns own(p, members, rank);
        for (Index block = 0; block < p.blocks(); ++block) {
            offsets[block] = (start - own.first_panel(p, block)) * panel_size;
            start += panels_of(p, own, block);
        }
    }
    T *of(Index block, Index q) const { return data + offsets[block] + q * panel_size; }

  private:
    static Index panels_of(const Problem &p, const Columns &own, Index block) {
        return block == p.block_at(p.blocks() - 1, p.transpose) ? 0 : own.panels - own.first_panel(p, block);
    }
    static Index panels_of(const Problem &p, const Columns &own) {
        Index panels = 0;
        for (Index block = 0; block < p.blocks(); ++block) panels += panels_of(p, own, block);
        return panels;
    }
};

// The same for rows as they come: block by block, panel by panel, each with `lanes` rows; after every block, or a gradient
// before it.
template <class T> struct RowStates {
    T *data;
    Index *offsets; // of what would be the first panel of all, block by block
    Index panel_size;

    static Index columns(const Problem &p, Index block) { // in whole packets
        return round_up(p.d, p.packet) - p.first_column(block) / p.panel * p.panel;
    }
    static Index size(const Problem &p) {
        Index count = 0;
        for (Index block = 0; block < p.blocks(); ++block) count += is_left_out(p, block) ? 0 : columns(p, block);
        return count * p.lanes();
    }
    // There is room for an offset for each block.
    RowStates(const Problem &p, T *data, Index *offsets) : data(data), offsets(offsets), panel_size(p.panel * p.lanes()) {
        Index start = 0;
        for (Index block = 0; block < p.blocks(); ++block) {
            offsets[block] = start - p.first_column(block) / p.panel * panel_size;
            start += is_left_out(p, block) ? 0 : columns(p, block) * p.lanes();
        }
    }
    T *of(Index block, Index q) const { return data + offsets[block] + q * panel_size; }

  private:
    static bool is_left_out(const Problem &p, Index block) { return block == p.block_at(p.blocks() - 1, p.transpose); }
};

// What the forward pass keeps for the backward pass: scales and T of every block, and, if there is room, every Z, and the
// states. Only a team of the same size can use these, unless they are rows as they come. Of T only the squares from the
// diagonal on are kept: with full reflectors, and as many rows as there are in a block, that leaves room for the states.
template <class T> struct Kept {
    enum class Most { factors, Z, states };
    T *scales = nullptr, *factors = nullptr, *Z = nullptr, *states = nullptr;
    Index kp = 0, lanes = 0;
    int members = 0;

    static Index size(const Problem &p, int members, Most most = Most::factors) {
        Index count = round_up(p.reflectors(), padding) + p.blocks() * factor_size(p.padded_k());
        if (most != Most::factors) count += p.blocks() * p.lanes() * p.padded_k();
        if (most == Most::states && p.blocks()) count += p.in_rows ? RowStates<T>::size(p) : States<T>::size(p, members);
        return count;
    }
    Kept() = default;
    Kept(const Problem &p, T *memory, int members, Most most = Most::factors) : kp(p.padded_k()), lanes(p.lanes()), members(members) {
        if (!memory) return;
        scales = memory;
        factors = scales + round_up(p.reflectors(), padding);
        if (most != Most::factors) Z = memory + size(p, members);
        if (most == Most::states) states = memory + size(p, members, Most::Z);
    }
    // The same for the rows from one on.
    Kept from_row(Index first) const {
        Kept part = *this;
        if (Z) part.Z += first * kp;
        return part;
    }
    static Index factor_size(Index kp) { return kp * (kp + padding) / 2; }
    // action(square of T: (padding, kp), its place here) for the squares from the diagonal on.
    template <class Action> void for_squares(Index block, T *factor, const Action &action) const {
        T *place = factors + block * factor_size(kp);
        for (Index i = 0; i < kp; i += padding)
            for (Index j = i; j < kp; j += padding, place += padding * padding)
                action(Matrix<T>{factor + i * kp + j, kp}, Matrix<T>{place, padding});
    }
    void put_factor(Index block, T *factor) const {
        for_squares(block, factor, [](Matrix<T> T_square, Matrix<T> place) {
            copy<T>(padding, padding, {T_square.data, T_square.row_stride}, place);
        });
    }
    // What is left of these squares is not touched.
    void get_factor(Index block, T *factor) const {
        for_squares(block, factor, [](Matrix<T> T_square, Matrix<T> place) {
            copy<T>(padding, padding, {place.data, padding}, T_square);
        });
    }
    void prefetch_factor(Index block) const { prefetch<false>(factors + block * factor_size(kp), 1, 0, factor_size(kp)); }
    T *Z_of(Index block) const { return Z + block * lanes * kp; }
};

// Where a member works on one block.
template <class T> struct Block {
    Index number, size; // of reflectors
    bool scaled;
    T *packed, *scale;   // what is not taken from V as it lies: (panels, kp, panel), or by columns, as V has it
    Strided<const T> *Y; // of each panel, from the first column on that the block reaches

    static Block take(const Problem &p, Index panels, Arena &arena) {
        return {0, 0, false, arena.take<T>(panels * p.padded_k() * p.panel), arena.take<T>(p.padded_k()),
                arena.take<Strided<const T>>(panels)};
    }
};

// What finding T and the gradient of V takes, in either layout.
template <class T> struct Scratch {
    Block<T> whole; // a block with all its columns
    T *G, *factor, *N, *dY, *turned;
    Span<T> *spans; // of a block's reflectors

    static Scratch take(const Problem &p, Arena &arena) {
        const Index kp = p.padded_k();
        return {Block<T>::take(p, p.panels(), arena), arena.take<T>(kp * kp),      arena.take<T>(kp * kp),
                arena.take<T>(2 * kp * kp),           arena.take<T>(kp * p.panel), arena.take<T>(kp * p.panel),
                arena.take<Span<T>>(p.panels())};
    }
};

// The memory of a team. `sets` of m rows run through the blocks: x; or a gradient; or a gradient and the output.
template <class T> struct Workspace {
    // Where the members put their sums for each other: (members, sets, kp, lane stride). Three in turn, since a member
    // prepares the next block while another may still read what it had for the last.
    T *sums[3] = {};
    Index sum_size;
    T *factors; // scales and T of every block, where they are not kept
    T *grams;   // G of some blocks, of which each member has a summand: (ahead, members, kp, kp)
    // How many blocks ahead T is found, so that a large V is fetched only once; 0 if all T are found first.
    static Index ahead(const Problem &p) { return p.r * p.d * Index(sizeof(T)) > Index(3) << 20 && !p.is_part ? 3 : 0; }

    struct Own : Scratch<T> { // a member's
        Block<T> blocks[2]; // the block at work and the next
        T *rows[2];         // each (panels, panel, lane stride)
        T *others;          // the same, for a gradient before and after a block
        T *S, *Zt, *Z, *R;
        const T **now, **before; // where the rows of each panel are at present, and were before the block at work
        Index *offsets;          // of the states
    };

    // `back`: with a second set of rows, and room for the gradient of V.
    Workspace(const Problem &p, int members, bool back, Arena &arena)
        : sum_size((1 + back) * p.lane_stride() * p.padded_k()), factors(arena.take<T>(Kept<T>::size(p, members))) {
        for (T *&slots : sums) slots = arena.take<T>(members * sum_size);
        grams = arena.take<T>(ahead(p) * members * p.padded_k() * p.padded_k());
    }
    static Own own(const Problem &p, int members, bool back, Arena &arena) {
        const int sets = 1 + back;
        const Index kp = p.padded_k(), deal = 2 * members, panels = (p.panels() + deal - 1) / deal * 2; // at most
        Own own;
        static_cast<Scratch<T> &>(own) = Scratch<T>::take(p, arena);
        for (auto &block : own.blocks) block = Block<T>::take(p, panels, arena);
        for (int set = 0; set < 2; ++set) own.rows[set] = set < sets ? arena.take<T>(panels * p.panel_size()) : nullptr;
        own.others = back ? arena.take<T>(panels * p.panel_size()) : nullptr;
        own.S = arena.take<T>(sets * kp * p.lane_stride());
        own.Zt = arena.take<T>(sets * kp * p.lane_stride());
        own.Z = arena.take<T>(p.lanes() * kp);
        own.R = arena.take<T>(p.lanes() * kp);
        own.now = arena.take<const T *>(panels);
        own.before = arena.take<const T *>(panels);
        own.offsets = arena.take<Index>(p.blocks());
        return own;
    }
};

} // namespace fasth
