// What Python calls: tensors in, new tensors out. Every size, stride and dtype is checked here, before anything is read.
#pragma once

#include <nanobind/stl/tuple.h>

#include <array>
#include <optional>
#include <string>

#include "run.hpp"
#include "tensors.hpp"

namespace fasth {

inline void expect(bool fine, const char *what) {
    if (!fine) throw nb::value_error(what);
}
template <class T> void expect_dtype(const Tensor &t) {
    if (!t.here()) return;
    if (!(t.of<T>() && t.on_cpu()))
        throw nb::type_error("all tensors should be on the CPU and of one dtype, float32 or float64");
    expect(t.has_memory() || t.numel() == 0, "a tensor has no memory any more");
}
// action(T()), with T the type of the tensor's numbers.
template <class Action> nb::object by_dtype(const Tensor &t, const Action &action) {
    return t.of<double>() ? action(double()) : action(float());
}

// A tensor as (B, rows, columns). If V has no batch, all of t is rows.
template <class T> Batch<T> batch_of(const Tensor &t, int V_dims) {
    if (!t.here()) return {};
    if (t.dims() != V_dims) return in_rows(t.data<T>(), t.rows(), t.size(-1));
    return {t.data<T>(), V_dims == 3 ? t.stride(0) : 0, t.stride(-2), t.stride(-1)};
}
inline Tensor as_rows(nb::handle t, int V_dims) {
    Tensor rows(t);
    return rows.here() && rows.dims() == V_dims ? std::move(rows) : std::move(rows).in_rows();
}

// x: (*, d) and V: (r, d), or x: (B, m, d) and V: (B, r, d).
template <class T>
Reflection<T> reflection(const Tensor &x, const Tensor &V, bool transpose, int kind, Index k, int threads, bool of_identity) {
    expect_dtype<T>(x), expect_dtype<T>(V);
    const bool batch = V.dims() == 3;
    expect(batch ? x.dims() == 3 && x.size(0) == V.size(0) : V.dims() == 2 && x.dims() > 0,
           "the rows should be (*, d) and V (r, d), or (b, m, d) and (b, r, d)");
    expect(x.size(-1) == V.size(-1) && V.size(-1) > 0, "the rows and the reflectors should have one length, at least 1");
    expect(kind >= 0 && kind < 3 && k > 0 && threads > 0, "unknown kind of reflectors, or a block or team of none");
    const Index m = batch ? x.size(1) : x.rows();
    const Index d = V.size(-1);
    expect(!of_identity || (m <= d && !transpose), "the identity has d rows, and they are multiplied by the transpose");
    Problem p{m, V.size(-2), d, Kind(kind), transpose, k, packet_size<T>, panel_for(d)};
    p.of_identity = of_identity;
    return {p, batch ? V.size(0) : 1, threads, V.stride(-1) == 1};
}

// What is kept for the way back, with a last number that says what it is: in a tensor that was given; in a new one, if there
// is to be one; or nowhere.
template <class T> class Keeping {
  public:
    Tensor memory;
    explicit Keeping(nb::handle where) : given(!PyBool_Check(where.ptr())), wanted(where.ptr() == Py_True) {
        if (given) memory = Tensor(where);
    }
    // What is best kept, in the given memory or in new memory of at most so much room.
    template <class Work> int plan(const Work &work, const Tensor &like, Index room) {
        if (!given && !wanted) return nothing_kept;
        if (given) expect_dtype<T>(memory), expect(memory.dims() == 1 && memory.contiguous(), "`kept` should be a vector");
        room = (given ? memory.numel() : room) - 1; // the last number
        if (room < 0) return nothing_kept; // no matrices, and so no memory
        const int kept = work.best_kept(room);
        expect(!given || work.size(kept) <= room, "`sizes` should be those of the weight: there is no room for what is kept");
        if (wanted && kept != nothing_kept) memory = like.new_pooled(work.size(kept) + 1);
        return kept;
    }
    template <class Work> void finish(const Work &work, int kept) const {
        if (!memory.has_memory()) return;
        const Index last = memory.numel() - 1;
        if (given) work.clear(memory.data<T>(), last, kept); // an operator of PyTorch gives back all of it
        memory.data<T>()[last] = T(kept);
    }

  private:
    bool given, wanted;
};

// The memory as it comes back, wherever a hook may have put it, and what is in it.
template <class T> struct Found {
    Tensor memory;
    int kept = nothing_kept;
    template <class Work> Found(nb::handle object, const Work &work) : memory(Tensor(object).in_rows()) {
        expect_dtype<T>(memory);
        if (!memory.has_memory()) return;
        const Index last = memory.numel() - 1;
        const T code = memory.data<T>()[last];
        expect(code >= (has_inner_products<T> ? rows_kept : Z_kept) && code <= most_threads && work.size(int(code)) <= last,
               "what was kept is not that any more");
        kept = int(code);
    }

  private:
    static constexpr T most_threads = T(1 << 20);
};

// What the way back does with what comes from the way forward: tensors that hooks may have changed.
template <class Work> nb::object with_saved(const Work &work) {
    try {
        return work();
    } catch (const nb::builtin_exception &error) {
        throw std::runtime_error(std::string("a saved tensor should come back as it was: ") + error.what());
    }
}

// How much may be kept of so many numbers in x and in the reflectors. These and the output are kept anyway: as much again;
// for a weight twice that, and whatever is little.
template <class T> Index room_for(const Reflection<T> &, Index x, Index reflectors) { return x + reflectors; }
constexpr Index always_kept = Index(1) << 18; // as in ops.py
template <class T> Index room_for(const Weight<T> &work, Index x, Index reflectors) {
    return std::max(2 * (x + reflectors) + work.factors_size() + 33, always_kept); // rounding, and the last number
}

// The output, and what is kept, a tensor or None. `keep`: a tensor to keep it in, or whether to keep it. `of_identity`:
// whether x are the first rows of the identity, to form Qᵀ. That saves a third of both passes, and x has no gradient.
inline nb::object householder(nb::handle x_, nb::handle V_, bool transpose, int kind, Index k, int threads, nb::handle keep,
                       bool of_identity) {
    const Tensor V(V_), x = as_rows(x_, V.dims());
    return by_dtype(x, [&](auto zero) {
        using T = decltype(zero);
        const Reflection<T> work = reflection<T>(x, V, transpose, kind, k, threads, of_identity);
        const Tensor out = x.new_rows();
        Keeping<T> keeping(keep);
        int kept = keeping.plan(work, x, room_for(work, x.numel(), V.numel()));
        const auto rows = batch_of<const T>(x, V.dims()), reflectors = batch_of<const T>(V, V.dims());
        {
            nb::gil_scoped_release release;
            T *const memory = keeping.memory.template data<T>();
            kept = work.forward(rows, reflectors, out.data<T>(), memory, kept);
            keeping.finish(work, kept);
        }
        return nb::make_tuple(out.object, keeping.memory.or_none());
    });
}

// The gradients of x and V, or None. `out`, for that of V, and `memory` are what `householder` gave back.
inline nb::object householder_backward(nb::handle g_, nb::handle out_, nb::handle V_, nb::handle memory, bool transpose, int kind,
                                Index k, int threads, bool needs_x, bool needs_V, bool of_identity) {
    const Tensor V(V_), g = as_rows(g_, V.dims()), out = Tensor(out_).in_rows();
    return with_saved([&] {
        return by_dtype(g, [&](auto zero) {
            using T = decltype(zero);
            const Reflection<T> work = reflection<T>(g, V, transpose, kind, k, threads, of_identity);
            expect(!(of_identity && needs_x), "the identity has no gradient");
            expect_dtype<T>(out);
            expect(!needs_V || (out.here() && out.numel() == g.numel()), "the output has another shape");
            const Found<T> found(memory, work);
            const Tensor dx = needs_x ? g.new_rows() : Tensor();
            const Tensor dV = needs_V ? V.new_gradient() : Tensor();
            const auto rows = batch_of<const T>(g, V.dims()), reflectors = batch_of<const T>(V, V.dims());
            const auto gradient = batch_of<T>(dV, V.dims());
            {
                nb::gil_scoped_release release;
                work.backward(rows, out.data<const T>(), reflectors, found.memory.template data<T>(), found.kept,
                              dx.data<T>(), gradient);
            }
            return nb::make_tuple(dx.or_none(), dV.or_none());
        });
    });
}

// How much is kept of each matrix, without the rows after every block: for no rows, and of Z for each row besides; and with
// them, by a team of so many members, likewise, for whole packets of rows. `longest`: of all reflectors of a weight.
inline std::tuple<Index, Index, Index, Index, Index> kept_sizes(Index r, Index d, Index longest, int kind, Index k, int members,
                                                                int bytes) {
    const Index packet = bytes == sizeof(float) ? packet_size<float> : packet_size<double>;
    const auto size = [&](Index m, int kept) {
        const Problem p{m, r, d, Kind(kind), true, k, packet, panel_for(longest)}; // x Q keeps more than x Qᵀ
        if (kept == factors_kept) return kept_size<float>(p, kept);
        const Index in_columns = kept_size<float>(p, int(std::min<Index>(kept, p.panels())));
        return inner_products_pay(packet) ? std::max(in_columns, kept_size<float>(in_rows(p), rows_kept)) : in_columns;
    };
    const Problem any{0, r, d, Kind(kind), true, k, packet, panel_for(longest)};
    const Index none = size(0, members);
    return {size(0, factors_kept), any.blocks() * any.padded_k(), none, (size(packet, members) - none) / packet, packet};
}

// Whether the rows after every block are kept of so many rows of x and reflectors that are stored by rows.
inline bool householder_keeps_states(Index rows, Index r, Index d, int kind, Index k, bool batched, int threads, int bytes) {
    const auto keeps = [&](auto zero) {
        using T = decltype(zero);
        const Index batch = batched ? 2 : 1; // any number but one
        const Problem p{rows, r, d, Kind(kind), true, k, packet_size<T>, panel_for(d)};
        const Reflection<T> work(p, batch, threads, true);
        return has_states(work.best_kept(room_for(work, batch * rows * d, batch * r * d) - 1));
    };
    return bytes == sizeof(double) ? keeps(double()) : keeps(float());
}

// W: (n, m) as U Σ Vᵀ. Without V, U is the (n, m) matrix that holds both sides, compact.
struct SVDFactors {
    Tensor U, sigma, V, signs;
    int kind;
    Index U_block, V_block;

    SVDFactors(nb::handle U, nb::handle sigma, nb::handle V, nb::handle signs, int kind, Index U_block, Index V_block)
        : U(U), sigma(Tensor(sigma).in_rows()), V(V), signs(Tensor(signs).in_rows()), kind(kind), U_block(U_block),
          V_block(V_block) {}

    Index n() const { return U.size(V.here() ? 1 : 0); }
    Index m() const { return V.here() ? V.size(1) : U.size(1); }
    Index U_reflectors() const { return U.size(V.here() ? 0 : 1); }
    Index V_reflectors() const { return V.here() ? V.size(0) : U.size(0); }

    // U's reflectors, or V's, in a tensor that lies as U or V does. Of one that both share, U's are the columns.
    template <class T> Strided<T> U_side(const Tensor &t) const {
        if (!t.here()) return {};
        return {t.data<T>(), t.stride(V.here() ? 0 : 1), t.stride(V.here() ? 1 : 0)};
    }
    template <class T> static Strided<T> V_side(const Tensor &t) {
        if (!t.here()) return {};
        return {t.data<T>(), t.stride(0), t.stride(1)};
    }

    const char *wrong(const Tensor &bias) const {
        if (U.dims() != 2 || (V.here() && V.dims() != 2) || sigma.dims() != 1) return "U and V should be matrices, sigma a vector";
        const Index k = sigma.size(0);
        if (n() < 1 || m() < 1 || k > std::min(n(), m())) return "a weight should have at most min(n, m) singular values";
        if (signs.here() && !(signs.dims() == 2 && signs.size(0) == 2 && signs.size(1) == k))
            return "there should be two rows of signs, as many as singular values";
        if (bias.here() && !(bias.dims() == 1 && bias.size(0) == n())) return "the bias should be as long as W has rows";
        if (kind < 0 || kind > 2 || U_block < 1 || V_block < 1) return "unknown kind of reflectors, or a block of none";
        if (!V.here() && kind != int(Kind::compact)) return "only compact reflectors of U and V share a matrix";
        return nullptr;
    }
    // `together`: the gradients of both sides are those of one tensor, and added up.
    template <class T> Weight<T> weight(Index rows, const Tensor &bias, int threads, bool together = false) const {
        for (const Tensor *t : {&U, &sigma, &V, &signs, &bias}) expect_dtype<T>(*t);
        if (const char *const what = wrong(bias)) throw nb::value_error(what);
        expect(threads > 0, "a team of none");
        const Index packet = packet_size<T>, panel = panel_for(std::max(m(), n()));
        const Problem V_problem{rows, V_reflectors(), m(), Kind(kind), true, V_block, packet, panel, !V.here(), together};
        const Problem U_problem{rows, U_reflectors(), n(), Kind(kind), false, U_block, packet, panel, !V.here()};
        const Diagonal<T> diagonal{sigma.data<const T>(), signs.data<const T>(), sigma.size(0)};
        return {V_problem, U_problem, V_side<const T>(V.here() ? V : U), U_side<const T>(U), diagonal, threads};
    }
};

// Rows to multiply, or what becomes of them: (*, width), or (width, count) if they stand as columns.
struct Rows {
    Tensor tensor;
    bool columns;

    Rows(Tensor t, bool columns) : tensor(std::move(t)), columns(columns) {
        expect(!tensor.here() || (columns ? tensor.dims() == 2 : tensor.dims() > 0), "rows or columns of some length are needed");
        if (tensor.here() && tensor.dims() != 2) tensor = std::move(tensor).in_rows();
    }
    Index width() const { return columns ? tensor.size(0) : tensor.size(-1); }
    Index count() const { return columns ? tensor.size(1) : tensor.rows(); }
    template <class T> Strided<T> all() const {
        if (!tensor.here()) return {};
        if (columns) return {tensor.data<T>(), tensor.stride(1), tensor.stride(0)};
        return {tensor.data<T>(), tensor.dims() == 2 ? tensor.stride(0) : width(), tensor.dims() == 2 ? tensor.stride(1) : 1};
    }
    Rows new_of_width(Index width) const {
        return {columns ? tensor.new_empty({width, count()}) : tensor.new_with_last(width), columns};
    }
};

// The arguments of `svd_linear`, read once.
struct SVDCall {
    Rows x;
    Tensor bias;
    SVDFactors factors;

    SVDCall(nb::handle x, nb::handle U, nb::handle sigma, nb::handle V, nb::handle bias, nb::handle signs, bool columns,
            int kind, Index U_block, Index V_block)
        : x(Tensor(x), columns), bias(Tensor(bias).in_rows()), factors(U, sigma, V, signs, kind, U_block, V_block) {}

    // Whether the core takes these tensors as they are, and their shapes fit.
    bool is_plain() const {
        const SVDFactors &f = factors;
        for (const Tensor *t : {&x.tensor, &f.U, &f.sigma, &f.V, &f.signs, &bias}) {
            const bool may_be_empty = t == &f.U || t == &f.V; // no reflectors: the identity
            if (t->here() && !(fasth::is_plain(*t, may_be_empty) && t->of<float>() == x.tensor.of<float>())) return false;
        }
        return !f.wrong(bias) && x.width() == f.m();
    }
};
// The same where it is plain, and nothing where it is not.
inline std::optional<SVDCall> plain_call(nb::handle x, nb::handle U, nb::handle sigma, nb::handle V, nb::handle bias,
                                         nb::handle signs, bool columns, int kind, Index U_block, Index V_block) {
    for (nb::handle t : {x, U, sigma, V, bias, signs})
        if (!t.is_none() && !has_plain_type(t)) return {};
    try {
        std::optional<SVDCall> call(std::in_place, x, U, sigma, V, bias, signs, columns, kind, U_block, V_block);
        if (!call->is_plain()) call.reset();
        return call;
    } catch (nb::python_error &) { // as in `is_plain`
        return {};
    } catch (nb::builtin_exception &) { // no rows at all
        return {};
    }
}

// x Wᵀ + bias, or, if `columns`, W x; and what is kept, as for `householder`.
inline nb::object multiply(const SVDCall &call, int threads, nb::handle keep) {
    const Rows &x = call.x;
    const Tensor &bias = call.bias;
    const SVDFactors &factors = call.factors;
    return by_dtype(x.tensor, [&](auto zero) {
        using T = decltype(zero);
        expect_dtype<T>(x.tensor);
        const Weight<T> work = factors.weight<T>(x.count(), bias, threads);
        expect(x.width() == factors.m(), "x should be as wide as W");
        const Rows out = x.new_of_width(factors.n());
        Keeping<T> keeping(keep);
        const Index reflectors = factors.U.numel() + (factors.V.here() ? factors.V.numel() : 0);
        int kept = keeping.plan(work, x.tensor, room_for(work, x.tensor.numel(), reflectors));
        const auto from = x.all<const T>();
        const auto to = out.all<T>();
        {
            nb::gil_scoped_release release;
            T *const memory = keeping.memory.template data<T>();
            kept = work.forward(from, bias.data<const T>(), to, memory, kept);
            keeping.finish(work, kept);
        }
        return nb::make_tuple(out.tensor.object, keeping.memory.or_none());
    });
}
inline nb::object svd_linear(nb::handle x, nb::handle U, nb::handle sigma, nb::handle V, nb::handle bias, nb::handle signs,
                             bool columns, int kind, Index U_block, Index V_block, int threads, nb::handle keep) {
    return multiply(SVDCall(x, U, sigma, V, bias, signs, columns, kind, U_block, V_block), threads, keep);
}

// The gradients of x, U, sigma, V and bias, or None for those of `needs` that are not needed. If U and V are `one` tensor,
// that of U is that of both.
inline nb::object gradients(const Rows &g, const SVDCall &call, nb::handle memory, bool one, int threads,
                            const nb::sequence &needs) {
    const Rows &x = call.x;
    const Tensor &bias = call.bias;
    const SVDFactors &factors = call.factors;
    const auto needed = [&](int i) { return nb::cast<bool>(needs[i]); };
    return by_dtype(g.tensor, [&](auto zero) {
        using T = decltype(zero);
        expect_dtype<T>(g.tensor), expect_dtype<T>(x.tensor);
        const Weight<T> work = factors.weight<T>(x.count(), bias, threads, one);
        expect(x.tensor.dims() == g.tensor.dims() && x.width() == factors.m() && g.width() == factors.n() && x.count() == g.count(),
               "x has another shape");
        expect(!one || (factors.V.here() && factors.U.size(0) == factors.V.size(0) && factors.n() == factors.m() &&
                        factors.U_block == factors.V_block),
               "U and V are not one tensor any more");
        const Found<T> found(memory, work);
        expect(found.kept != nothing_kept, "nothing was kept");
        const Rows dx(needed(0) ? x.tensor.new_rows() : Tensor(), x.columns);
        const Tensor dU = needed(1) ? factors.U.new_gradient() : Tensor();
        const Tensor dsigma = needed(2) ? factors.sigma.new_rows() : Tensor();
        const Tensor dV = factors.V.here() && !one && needed(3) ? factors.V.new_gradient() : Tensor();
        const Tensor dbias = bias.here() && needed(4) ? bias.new_rows() : Tensor();
        const auto rows = g.all<const T>();
        const typename Weight<T>::Gradients to{dx.all<T>(),
                                               factors.V_side<T>(factors.V.here() && !one ? dV : dU),
                                               dsigma.data<T>(), factors.U_side<T>(dU), dbias.data<T>()};
        {
            nb::gil_scoped_release release;
            work.backward(rows, found.memory.template data<T>(), found.kept, to);
        }
        return nb::make_tuple(dx.tensor.or_none(), dU.or_none(), dsigma.or_none(), dV.or_none(), dbias.or_none());
    });
}
inline nb::object svd_linear_backward(nb::handle g, nb::handle x, nb::handle U, nb::handle sigma, nb::handle V, nb::handle bias,
                                      nb::handle signs, nb::handle memory, bool one, bool columns, int kind, Index U_block,
                                      Index V_block, int threads, const nb::sequence &needs) {
    return with_saved([&] {
        const SVDCall call(x, U, sigma, V, bias, signs, columns, kind, U_block, V_block);
        return gradients(Rows(Tensor(g), columns), call, memory, one, threads, needs);
    });
}

// As `householder_keeps_states`, for W: (n, m).
inline bool svd_keeps_states(Index rows, Index n, Index m, Index r_U, Index r_V, int kind, Index U_block, Index V_block,
                             bool shared, int threads, int bytes) {
    const auto keeps = [&](auto zero) {
        using T = decltype(zero);
        const Index packet = packet_size<T>, panel = panel_for(std::max(m, n));
        const Problem V{rows, r_V, m, Kind(kind), true, V_block, packet, panel, shared};
        const Problem U{rows, r_U, n, Kind(kind), false, U_block, packet, panel, shared};
        const Strided<const T> V_side{nullptr, m, 1}, U_side{nullptr, shared ? 1 : n, shared ? m : 1};
        const Weight<T> work(V, U, V_side, U_side, {}, threads);
        return has_states(work.best_kept(room_for(work, rows * m, shared ? n * m : r_U * n + r_V * m) - 1));
    };
    return bytes == sizeof(double) ? keeps(double()) : keeps(float());
}

// A vector in memory of the pool, of the dtype of a tensor: for what an operator of PyTorch keeps.
inline nb::object new_kept(nb::handle like, Index size) { return Tensor(like).new_pooled(size).object; }

// Whether the core takes these tensors.
inline bool plain(const nb::args &tensors) {
    for (nb::handle t : tensors)
        if (!is_plain(t)) return false;
    return true;
}

// Whether a plain tensor has an entry from low to high; None for any other tensor.
inline nb::object contains(nb::handle tensor, double low, double high) {
    if (!is_plain(tensor)) return nb::none();
    const Tensor t = Tensor(tensor).in_rows();
    const auto found = [&](auto zero) {
        using T = decltype(zero);
        const T *const data = t.data<const T>();
        return nb::bool_(std::any_of(data, data + t.numel(), [&](T entry) { return T(low) <= entry && entry <= T(high); }));
    };
    return t.of<double>() ? found(double()) : found(float());
}

// The commonest arguments at once: (rows, r, d) of plain x: (*, d) and V: (r, d) of one dtype; nothing for any others.
inline std::optional<std::array<Index, 3>> plain_householder(nb::handle x_, nb::handle V_) {
    if (!is_plain(x_) || !is_plain(V_)) return {};
    const Tensor x(x_), V(V_);
    if (V.dims() != 2 || x.dims() < 1 || x.size(-1) != V.size(-1) || x.of<float>() != V.of<float>()) return {};
    return {{x.rows(), V.size(0), V.size(1)}};
}

// Likewise (rows, n, m, U's reflectors, V's) for the arguments of `svd_linear`.
inline std::optional<std::array<Index, 5>> plain_svd_linear(nb::handle x, nb::handle U, nb::handle sigma, nb::handle V,
                                                            nb::handle bias, nb::handle signs, bool columns) {
    const auto call = plain_call(x, U, sigma, V, bias, signs, columns, int(Kind::compact), 1, 1);
    if (!call) return {};
    const SVDFactors &f = call->factors;
    return {{call->x.count(), f.n(), f.m(), f.U_reflectors(), f.V_reflectors()}};
}

} // namespace fasth
