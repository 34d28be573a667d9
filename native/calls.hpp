// What Python calls: tensors in, new tensors out. Every size, stride and dtype is checked here, before anything is read.
#pragma once

#include <stdexcept>
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
    expect(t.has_memory(), "a tensor has no memory any more");
}
// action(T()), with T the type of the tensor's numbers.
template <class Action> nb::object by_dtype(const Tensor &t, const Action &action) {
    return t.of<double>() ? action(double()) : action(float());
}
// What backward does with tensors that hooks may have changed since they were saved.
template <class Action> nb::object with_saved(const Action &action) {
    try {
        return action();
    } catch (const nb::builtin_exception &error) {
        throw std::runtime_error(std::string("a saved tensor should come back as it was: ") + error.what());
    }
}
inline void expect_block_size(Index block_size, Index most) {
    if (block_size >= 1 && block_size <= std::max<Index>(most, 1)) return;
    const std::string range = "from 1 to " + std::to_string(std::max<Index>(most, 1));
    throw nb::value_error(("block_size should be " + range + ", got " + std::to_string(block_size)).c_str());
}
inline void expect_options(int kind, int threads, int save) {
    expect(kind >= 0 && kind <= int(Kind::with_signs), "kind should be 0 (full), 1 (triangular), 2 (compact) or 3 (signed)");
    expect(threads > 0, "threads should be at least 1");
    expect(save >= 0 && save <= 3, "save should be from 0 to 3");
}

// (*, columns) as rows of any strides where it has `dims` dimensions, else row-major.
inline Tensor as_rows(nb::handle object, int dims) {
    Tensor t(object);
    return t.here() && t.dims() == dims ? std::move(t) : std::move(t).as_contiguous();
}
template <class T> Batch<T> rows_of(const Tensor &t, int dims) {
    if (!t.here()) return {};
    if (t.dims() != dims) return {t.data<T>(), 0, t.size(-1), 1};
    return {t.data<T>(), dims == 3 ? t.stride(0) : 0, t.stride(-2), t.stride(-1)};
}
template <class T> Batch<T> contiguous_rows(const Tensor &t, Index m) {
    if (!t.here()) return {};
    return {t.data<T>(), m * t.size(-1), t.size(-1), 1};
}
template <class T> Strided<T> matrix_of(const Tensor &t) {
    if (!t.here()) return {};
    return {t.data<T>(), t.stride(0), t.stride(1)};
}

// T, Z and A, as new tensors or as they come back in backward, of all products together.
struct SavedTensors {
    Tensor factors, Z, A;
    Index blocks = 0, A_blocks = 0, K = 0, M = 0, D = 0;

    template <class T, int products> explicit SavedTensors(const Product<T> (&product)[products]) {
        for (const Product<T> &of : product) {
            blocks += of.saved.blocks, A_blocks += std::max<Index>(of.saved.blocks - 1, 0);
            K = of.saved.K, M = of.saved.M, D = of.saved.D;
        }
    }
    // `batch` is that of a V with three dimensions, else negative.
    void make(const Tensor &like, Index batch, int save) {
        const auto tensor = [&](Index count, Index rows, Index columns) {
            return batch < 0 ? like.new_pooled({count, rows, columns}) : like.new_pooled({batch, count, rows, columns});
        };
        if (save >= 1) factors = tensor(blocks, K, K);
        if (save >= 2) Z = tensor(blocks, M, K);
        if (save >= 3) A = tensor(A_blocks, D, M);
    }
    // In backward the number of threads may be another, so the forward pass leaves a mark where that decided.
    template <class T> void mark_rows(bool row_major) const {
        if (row_major && A.here() && factors.numel() > 0) Saved<T>::mark(factors.data<T>(), K) = -T(0);
    }
    template <class T> bool rows_marked() const {
        return A.here() && factors.numel() > 0 && std::signbit(Saved<T>::mark(factors.data<T>(), K));
    }
    template <class T> void take(nb::handle factors_, nb::handle Z_, nb::handle A_, Index batch) {
        const auto tensor = [&](nb::handle object, Index count, Index rows, Index columns) {
            Tensor t = Tensor(object).as_contiguous();
            expect_dtype<T>(t);
            expect(!t.here() || (batch < 0 ? t.has_shape({count, rows, columns}) : t.has_shape({batch, count, rows, columns})),
                   "T, Z or A has another shape");
            return t;
        };
        factors = tensor(factors_, blocks, K, K);
        Z = tensor(Z_, blocks, M, K);
        if (Z.here() && factors.here()) A = tensor(A_, A_blocks, D, M); // of no use without these
    }
    template <class T, int products> void give(Product<T> (&product)[products]) const {
        T *factors_data = factors.data<T>(), *Z_data = Z.data<T>(), *A_data = A.data<T>();
        for (Product<T> &of : product) {
            Saved<T> &saved = of.saved;
            saved.factors = factors_data, saved.Z = Z_data, saved.A = A_data;
            if (factors_data) factors_data += saved.factors_size();
            if (Z_data) Z_data += saved.blocks * M * K;
            if (A_data) A_data += std::max<Index>(saved.blocks - 1, 0) * D * M;
        }
    }
    nb::object with(nb::object out) const { return nb::make_tuple(out, factors.or_none(), Z.or_none(), A.or_none()); }
};

// Rows stay row-major where they are too few to fill a register; and where a team that has no more than a register of them for
// each member keeps all of V, row-major too, in its second-level caches: a tenth less time at d = 128 to 256 with 32 rows.
template <class T> bool are_few(Index m) { return has_inner_products<T> && m <= packet_size<T> / 2; }
template <class T> bool suit_a_team(const Product<T> &product, Index operations, int threads) {
    const Problem<T> &p = product.p;
    const Index members = std::min<Index>(Schedule::threads_for(operations, threads), p.panels());
    const Index bytes = p.reflectors() * p.d * Index(sizeof(T)) / (p.triangular() ? 2 : 1);
    const bool row_major = product.V.column_stride == 1 || p.blocks() == 0;
    return has_inner_products<T> && row_major && bytes <= Index(768) << 10 && p.m <= p.packet * members && members > 1;
}
template <class T> void set_layout(Problem<T> &p, bool few_rows, bool has_A) {
    p.few_rows = few_rows;
    p.has_A = has_A;
    p.of_identity &= !few_rows && !has_A; // a hint, of no use with these
    if (few_rows) p.panel = widest_panel;
}

// x: (*, d) and V: (r, d), or x: (B, m, d) and V: (B, r, d).
template <class T>
Product<T> householder_product(const Tensor &x, const Tensor &V, bool transpose, int kind, Index block_size, bool of_identity) {
    expect_dtype<T>(x), expect_dtype<T>(V);
    const bool batch = V.dims() == 3;
    expect(batch ? x.dims() == 3 && x.size(0) == V.size(0) : V.dims() == 2 && x.dims() > 0,
           "the rows should be (*, d) and V (r, d), or (b, m, d) and (b, r, d)");
    expect(x.size(-1) == V.size(-1) && V.size(-1) > 0, "the rows and the reflectors should have one length, at least 1");
    const Index m = batch ? x.size(1) : x.rows(), r = V.size(-2), d = V.size(-1);
    expect_block_size(block_size, std::min(r, d));
    expect(!of_identity || (m <= d && !transpose), "the identity has d rows, and they are multiplied by the transpose");
    Problem<T> p{m, r, d, Kind(kind), transpose, block_size, panel_for(d)};
    p.of_identity = of_identity;
    return {p, rows_of<const T>(V, V.dims()), Saved<T>(p, d), {}};
}
template <class T> Call<T, 1> householder_call(const Product<T> &product, Index batch, int threads, bool forward) {
    const Problem<T> &p = product.p;
    const Index work = batch * round_up(p.m, p.packet) * p.reflectors() * p.d, bytes = p.r * p.d * Index(sizeof(T));
    const bool finds_T = forward || !product.saved.factors;
    const Schedule schedule(p, batch, work, bytes, p.panels(), threads, !forward);
    return {schedule, {product}, finds_T, product.dV.data != nullptr, {}};
}

// The output and what is saved. `of_identity`: whether x are the first rows of the identity, to form Qᵀ. That saves a third
// of both passes, and x gets no gradient.
inline nb::object householder(nb::handle x_, nb::handle V_, bool transpose, int kind, Index block_size, int threads, int save,
                              bool of_identity) {
    const Tensor V(V_), x = as_rows(x_, V.dims());
    return by_dtype(x, [&](auto zero) {
        using T = decltype(zero);
        expect_options(kind, threads, save);
        Product<T> product[] = {householder_product<T>(x, V, transpose, kind, block_size, of_identity)};
        const Problem<T> &p = product[0].p;
        const Index operations = round_up(p.m, p.packet) * p.reflectors() * p.d;
        const bool suits = V.dims() == 2 && suit_a_team(product[0], operations, threads);
        set_layout(product[0].p, suits || are_few<T>(p.m), save == 3);
        const Tensor out = x.new_contiguous();
        SavedTensors saved(product);
        saved.make(x, V.dims() == 3 ? V.size(0) : -1, save);
        saved.give(product);
        const auto rows = rows_of<const T>(x, V.dims());
        const auto outs = contiguous_rows<T>(out, product[0].p.m);
        {
            nb::gil_scoped_release release;
            forward(householder_call(product[0], V.dims() == 3 ? V.size(0) : 1, threads, true), rows, outs);
        }
        saved.mark_rows<T>(suits);
        return saved.with(out.object);
    });
}

// The gradients of x and V, or None.
inline nb::object householder_backward(nb::handle g_, nb::handle out_, nb::handle V_, nb::handle factors, nb::handle Z,
                                       nb::handle A, bool transpose, int kind, Index block_size, int threads, bool needs_x,
                                       bool needs_V, bool of_identity) {
    const Tensor V(V_), g = as_rows(g_, V.dims()), out = Tensor(out_).as_contiguous();
    return with_saved([&] {
        return by_dtype(g, [&](auto zero) {
            using T = decltype(zero);
            expect_options(kind, threads, 0);
            Product<T> product[] = {householder_product<T>(g, V, transpose, kind, block_size, of_identity)};
            const Index m = product[0].p.m;
            expect(!(of_identity && needs_x), "the identity has no gradient");
            expect_dtype<T>(out);
            expect(!needs_V || (out.here() && out.size(-1) == g.size(-1) && out.numel() == g.numel()),
                   "the output has another shape");
            SavedTensors saved(product);
            saved.take<T>(factors, Z, A, V.dims() == 3 ? V.size(0) : -1);
            saved.give(product);
            const bool has_A = saved.A.here() && needs_V;
            set_layout(product[0].p, (are_few<T>(m) || saved.rows_marked<T>()) && (has_A || !needs_V), has_A);
            const Tensor dx = needs_x ? g.new_contiguous() : Tensor();
            const Tensor dV = needs_V ? V.new_gradient() : Tensor();
            product[0].dV = rows_of<T>(dV, V.dims());
            const auto rows = rows_of<const T>(g, V.dims());
            const auto outs = contiguous_rows<const T>(out, m);
            const auto gradients = contiguous_rows<T>(dx, m);
            {
                nb::gil_scoped_release release;
                backward(householder_call(product[0], V.dims() == 3 ? V.size(0) : 1, threads, false), rows, outs, gradients);
            }
            return nb::object(nb::make_tuple(dx.or_none(), dV.or_none()));
        });
    });
}

// W: (n, m) as U Σ Vᵀ. Without V, U is the (n, m) matrix that holds both sides, compact.
struct SVDFactors {
    Tensor U, sigma, V;
    int kind;
    Index block_size;
    bool shared;
    Index n, m, k;

    SVDFactors(nb::handle U_, nb::handle sigma_, nb::handle V_, int kind, Index block_size)
        : U(U_), sigma(Tensor(sigma_).as_contiguous()), V(V_), kind(kind), block_size(block_size), shared(!V.here()) {
        expect(U.dims() == 2 && (shared || V.dims() == 2), "U and V should be matrices");
        n = U.size(shared ? 0 : 1), m = shared ? U.size(1) : V.size(1);
        k = sigma.here() && sigma.dims() == 1 ? sigma.size(0) : std::min(n, m);
        expect(n > 0 && m > 0, "a weight should have at least one row and one column");
        expect((!sigma.here() || sigma.dims() == 1) && k <= std::min(n, m),
               "sigma should be a vector of at most min(n, m) singular values");
        expect(!shared || kind >= int(Kind::compact), "only compact reflectors of U and V share a matrix");
        expect_block_size(block_size, std::max(std::min(U.size(0), shared ? m : n), shared ? 0 : std::min(V.size(0), m)));
    }

    template <class T> void expect_dtypes() const {
        for (const Tensor *t : {&U, &sigma, &V}) expect_dtype<T>(*t);
    }
    // U's reflectors, or V's, in a tensor with the shape of U or V. Of a shared one, U's are the columns.
    template <class T> Strided<T> U_side(const Tensor &t) const {
        return shared ? matrix_of<T>(t).transposed() : matrix_of<T>(t);
    }

    // x Q_V, and what follows, times Q_Uᵀ, for so many rows.
    template <class T> Product<T> V_product(Index rows) const {
        return product<T>(rows, shared ? n : V.size(0), m, true, matrix_of<const T>(shared ? U : V));
    }
    template <class T> Product<T> U_product(Index rows) const {
        return product<T>(rows, shared ? m : U.size(0), n, false, U_side<const T>(U));
    }
    template <class T> Diagonal<T> diagonal(const Product<T> (&product)[2]) const {
        const bool has_signs = kind == int(Kind::with_signs);
        return {sigma.data<const T>(), k, product[0].V[0], product[1].V[0], has_signs ? product[0].p.reflectors() : 0,
                has_signs && !shared ? product[1].p.reflectors() : 0};
    }
    template <class T>
    Call<T, 2> call(const Product<T> (&product)[2], int threads, bool forward, const Vector<T> &dsigma = {},
                    const Vector<T> &dbias = {}) const {
        const Problem<T> &v = product[0].p, &u = product[1].p;
        const Index work = round_up(v.m, v.packet) * (v.reflectors() * v.d + u.reflectors() * u.d);
        const Index bytes = (v.r * v.d + (shared ? 0 : u.r * u.d)) * Index(sizeof(T));
        // How many members both products have panels for; one without reflections is no reason to be fewer.
        const Index panels = std::min(v.blocks() ? v.panels() : u.panels(), u.blocks() ? u.panels() : v.panels());
        const bool finds_T = forward || !product[0].saved.factors;
        const Schedule schedule(v, 1, work, bytes, panels, threads, !forward);
        return {schedule, {product[0], product[1]}, finds_T, !forward, {dsigma, dbias}};
    }

  private:
    template <class T> Product<T> product(Index rows, Index r, Index d, bool transpose, Strided<const T> reflectors) const {
        const Index longest = std::max(n, m);
        Problem<T> p{rows, r, d, Kind(kind), transpose, block_size, panel_for(longest)};
        p.shares = shared;
        return {p, {reflectors.data, 0, reflectors.row_stride, reflectors.column_stride}, Saved<T>(p, longest), {}};
    }
};

// x Wᵀ + bias, the rows after each product, and what else is saved.
inline nb::object svd_linear(nb::handle x_, nb::handle U, nb::handle sigma, nb::handle V, nb::handle bias_, int kind,
                             Index block_size, int threads, int save) {
    const Tensor x = as_rows(x_, 2), bias = Tensor(bias_).as_contiguous();
    expect_options(kind, threads, save);
    const SVDFactors factors(U, sigma, V, kind, block_size);
    return by_dtype(x, [&](auto zero) {
        using T = decltype(zero);
        expect_dtype<T>(x), expect_dtype<T>(bias), factors.expect_dtypes<T>();
        expect(x.dims() > 0 && x.size(-1) == factors.m, "x should be as wide as W");
        expect(!bias.here() || bias.has_shape({factors.n}), "the bias should be as long as W has rows");
        const Index rows = x.rows();
        Product<T> product[] = {factors.V_product<T>(rows), factors.U_product<T>(rows)};
        const Problem<T> &v = product[0].p, &u = product[1].p;
        const Index operations = round_up(rows, v.packet) * (v.reflectors() * v.d + u.reflectors() * u.d);
        const bool suit = suit_a_team(product[0], operations, threads) && suit_a_team(product[1], operations, threads);
        for (Product<T> &of : product) set_layout(of.p, suit || are_few<T>(rows), save == 3);
        const Tensor out = x.new_with_last(factors.n);
        const Tensor inner = save ? x.new_pooled_with_last(factors.m) : Tensor();
        const Tensor before_bias = save && bias.here() ? x.new_pooled_with_last(factors.n) : Tensor();
        SavedTensors saved(product);
        saved.make(x, -1, save);
        saved.give(product);
        const SVDRows<T> saved_rows{contiguous_rows<T>(inner, rows)[0], contiguous_rows<T>(before_bias, rows)[0]};
        const auto from = rows_of<const T>(x, 2)[0];
        const auto to = contiguous_rows<T>(out, rows)[0];
        {
            nb::gil_scoped_release release;
            forward(factors.call(product, threads, true), factors.diagonal(product), from, bias.data<const T>(), saved_rows, to);
        }
        saved.mark_rows<T>(suit);
        return nb::object(nb::make_tuple(out.object, inner.or_none(), before_bias.or_none(), saved.factors.or_none(),
                                         saved.Z.or_none(), saved.A.or_none()));
    });
}

// The gradients of x, U, sigma, V and bias, or None for those of `needs` that are not needed. If U and V are one tensor, that
// of U is that of both.
inline nb::object svd_linear_backward(nb::handle g_, nb::handle inner_, nb::handle product_, nb::handle U, nb::handle sigma,
                                      nb::handle V, nb::handle factors_, nb::handle Z, nb::handle A, int kind, Index block_size,
                                      int threads, const nb::sequence &needs, bool symmetric) {
    const auto needed = [&](int i) { return nb::cast<bool>(needs[i]); };
    return with_saved([&] {
        const Tensor g = as_rows(g_, 2), inner = Tensor(inner_).as_contiguous(), output = Tensor(product_).as_contiguous();
        expect_options(kind, threads, 0);
        const SVDFactors factors(U, sigma, V, kind, block_size);
        return by_dtype(g, [&](auto zero) {
            using T = decltype(zero);
            expect_dtype<T>(g), expect_dtype<T>(inner), expect_dtype<T>(output), factors.expect_dtypes<T>();
            const Index rows = g.rows(), n = factors.n, m = factors.m;
            expect(g.dims() > 0 && g.size(-1) == n, "the gradient should be as wide as the output");
            expect(inner.here() && inner.dims() == g.dims() && inner.size(-1) == m && inner.rows() == rows &&
                       output.here() && output.dims() == g.dims() && output.size(-1) == n && output.rows() == rows,
                   "the rows after a product have another shape");
            expect(!symmetric || (!factors.shared && n == m && factors.U.size(0) == factors.V.size(0)),
                   "U and V are not one tensor any more");
            Product<T> product[] = {factors.V_product<T>(rows), factors.U_product<T>(rows)};
            product[0].p.adds = symmetric;
            SavedTensors saved(product);
            saved.take<T>(factors_, Z, A, -1);
            saved.give(product);

            const bool both = symmetric || factors.shared; // one gradient for both sides
            const bool needs_U = needed(1) || (symmetric && needed(3)), needs_V = both ? needs_U : needed(3);
            const bool has_A = saved.A.here() && (needs_U || needs_V);
            const bool few_rows = (are_few<T>(rows) || saved.rows_marked<T>()) && (has_A || !(needs_U || needs_V));
            for (Product<T> &of : product) set_layout(of.p, few_rows, has_A);
            const Tensor dx = needed(0) ? inner.new_contiguous() : Tensor();
            const Tensor dU = needs_U ? factors.U.new_gradient() : Tensor();
            const Tensor dsigma = factors.sigma.here() && needed(2) ? factors.sigma.new_contiguous() : Tensor();
            const Tensor dV = needs_V && !both ? factors.V.new_gradient() : Tensor();
            const Tensor dbias = needed(4) ? g.new_pooled({n}) : Tensor();
            const auto gradient_of = [](Strided<T> t) { return Batch<T>{t.data, 0, t.row_stride, t.column_stride}; };
            product[0].dV = gradient_of(matrix_of<T>(both ? dU : dV));
            product[1].dV = gradient_of(factors.U_side<T>(dU));
            const SVDRows<const T> saved_rows{contiguous_rows<const T>(inner, rows)[0],
                                              contiguous_rows<const T>(output, rows)[0]};
            const auto from = rows_of<const T>(g, 2)[0];
            const auto to = contiguous_rows<T>(dx, rows)[0];
            {
                nb::gil_scoped_release release;
                backward(factors.call<T>(product, threads, false, {dsigma.data<T>(), factors.k}, {dbias.data<T>(), n}),
                         factors.diagonal(product), from, saved_rows, to);
            }
            return nb::object(nb::make_tuple(dx.or_none(), dU.or_none(), dsigma.or_none(), dV.or_none(), dbias.or_none()));
        });
    });
}

} // namespace fasth
