// Functions called from Python: they check every size, stride and dtype before reading, and return new tensors.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "run.hpp"
#include "tensors.hpp"

namespace fasth {

// Prints the shape, "(2, 3)", or "None".
inline std::ostream &operator<<(std::ostream &out, const Tensor &t) {
    if (!t.here()) return out << "None";
    out << '(';
    for (int i = 0; i < t.dims(); ++i) out << (i ? ", " : "") << t.size(i);
    return out << (t.dims() == 1 ? ",)" : ")");
}
template <class... Parts> std::string joined(const Parts &...parts) {
    std::ostringstream out;
    (out << ... << parts);
    return out.str();
}
// Raises a ValueError with the parts as its message unless `fine`.
template <class... Parts> void expect(bool fine, const Parts &...parts) {
    if (!fine) throw nb::value_error(joined(parts...).c_str());
}
template <class T> void expect_dtype(const char *name, const Tensor &t) {
    if (!t.here()) return;
    if (!(t.of<T>() && t.on_cpu()))
        throw nb::type_error(joined("`", name, "` should be a ", sizeof(T) == 8 ? "float64" : "float32",
                                    " tensor on the CPU, as the rows are; got ", t.type_name()).c_str());
    expect(t.has_memory(), "`", name, "` should have memory; got a tensor whose storage was freed");
}
// Calls action(T()) with T the number type of the rows.
template <class Action> nb::object by_dtype(const Tensor &rows, const Action &action) {
    if (!rows.on_cpu() || !(rows.of<float>() || rows.of<double>()))
        throw nb::type_error(joined("the rows should be float32 or float64 on the CPU; got ", rows.type_name()).c_str());
    return rows.of<double>() ? action(double()) : action(float());
}
// Calls action(), which reads saved tensors; errors say that hooks may have changed them.
template <class Action> nb::object with_saved(const Action &action) {
    try {
        return action();
    } catch (const nb::builtin_exception &error) {
        throw std::runtime_error(std::string("a saved tensor should come back as it was: ") + error.what());
    }
}
inline void expect_block_size(Index block_size, Index most) {
    most = std::max<Index>(most, 1);
    expect(block_size >= 1 && block_size <= most, "block_size should be from 1 to ", most, "; got ", block_size);
}
// The entries of plan.py's Plan that the core uses.
struct Plan {
    int form;
    bool transpose;
    Index block_size;
    int save;
    bool copy_output, of_identity, symmetric;
    int threads;

    Plan(const nb::tuple &plan, int threads) : threads(threads) {
        expect(plan.size() >= 8, "a plan should have at least 8 entries; got ", plan.size());
        form = nb::cast<int>(plan[1]), transpose = nb::cast<bool>(plan[2]), block_size = nb::cast<Index>(plan[3]);
        save = nb::cast<int>(plan[4]), copy_output = nb::cast<bool>(plan[5]), of_identity = nb::cast<bool>(plan[6]);
        symmetric = nb::cast<bool>(plan[7]);
        expect(form >= 0 && form <= int(Form::compact), "form should be 0 (full), 1 (triangular) or 2 (compact); got ", form);
        expect(threads > 0, "threads should be at least 1; got ", threads);
        expect(save >= 0 && save <= 3, "save should be from 0 to 3; got ", save);
    }
};

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
template <class T> Batch<T> contiguous_rows(T *data, Index m, Index columns) {
    if (!data) return {};
    return {data, m * columns, columns, 1};
}
template <class T> Strided<T> matrix_of(const Tensor &t) {
    if (!t.here()) return {};
    return {t.data<T>(), t.stride(0), t.stride(1)};
}

// All that is saved for backward, in one tensor, which costs one allocation: x Q_V and a copy of the output, if saved; then T,
// the scales, Z and A of all products; last, a flag that is 1 if A is row-major, which may depend on the number of
// threads. Each part is a multiple of `padding` numbers long. saved_size in planner.py gives the same size.
template <class T> class SavedTensor {
    Tensor tensor;
    Index inner_size, output_size, T_size = 0, scales_size = 0, Z_size = 0, A_size = 0, flag_size = 0;

    T *part(Index start, Index size) const { return size > 0 ? tensor.data<T>() + start : nullptr; }

  public:
    template <int products>
    SavedTensor(const Product<T> (&product)[products], Index batch, int save, Index inner, Index output)
        : inner_size(round_up(inner, padding)), output_size(round_up(output, padding)) {
        for (const Product<T> &side : product) {
            const Saved<T> &saved = side.saved;
            if (save >= 1) T_size += batch * saved.T_size(), scales_size += batch * saved.blocks * saved.K;
            if (save >= 2) Z_size += batch * saved.blocks * saved.M * saved.K;
            if (save >= 3) A_size += batch * std::max<Index>(saved.blocks - 1, 0) * saved.D * saved.M, flag_size = padding;
        }
    }
    Index size() const { return inner_size + output_size + T_size + scales_size + Z_size + A_size + flag_size; }

    // `wanted`: the plan saves something. The tensor may be empty: graphs rely on the number of returned tensors.
    void make(const Tensor &like, bool wanted) {
        if (wanted) tensor = like.new_pooled({size()});
    }
    void take(const nb::sequence &saved) { // a sequence of one tensor, or empty
        if (nb::len(saved) > 0) tensor = Tensor(nb::object(saved[0])).as_contiguous();
        expect_dtype<T>("saved", tensor);
        const Index count = tensor.here() ? tensor.numel() : 0;
        expect(count == size(), "`saved` should have ", size(), " numbers; got ", count);
    }
    T *inner() const { return part(0, inner_size); }
    T *output() const { return part(inner_size, output_size); }
    void set_row_major(bool row_major) const {
        if (flag_size) *part(size() - flag_size, flag_size) = T(row_major);
    }
    bool is_row_major() const { return flag_size && *part(size() - flag_size, flag_size) != T(0); }
    template <int products> void give(Product<T> (&product)[products]) const {
        Index start = inner_size + output_size;
        const auto next = [&](Index size) {
            start += size;
            return part(start - size, size);
        };
        T *all_T = next(T_size), *scales = next(scales_size), *Z = next(Z_size), *A = next(A_size);
        for (Product<T> &side : product) {
            Saved<T> &saved = side.saved;
            saved.all_T = all_T, saved.all_scales = scales, saved.Z = Z, saved.A = A;
            if (all_T) all_T += saved.T_size(), scales += saved.blocks * saved.K;
            if (Z) Z += saved.blocks * saved.M * saved.K;
            if (A) A += std::max<Index>(saved.blocks - 1, 0) * saved.D * saved.M;
        }
    }
    // A tuple of the output and, if anything is saved, this tensor.
    nb::object with(const Tensor &out) const {
        return tensor.here() ? nb::object(nb::make_tuple(out.object, tensor.object)) : nb::object(nb::make_tuple(out.object));
    }
};

// Rows stay row-major if they are too few to fill a register. They also do if each member of a team has at most a register of
// rows, and V is row-major and fits into the second-level caches: a tenth less time at d = 128 to 256 with 32 rows.
template <class T> bool are_few(Index m) { return has_inner_products<T> && m <= packet_size<T> / 2; }
template <class T> bool row_major_pays(const Product<T> &product, Index operations, int threads) {
    const Problem<T> &p = product.p;
    const Index members = std::min<Index>(Schedule::threads_for(operations, threads), p.panels());
    const Index bytes = p.reflectors() * p.d * Index(sizeof(T)) / (p.triangular() ? 2 : 1);
    const bool V_row_major = product.V.column_stride == 1 || p.blocks() == 0;
    return has_inner_products<T> && V_row_major && bytes <= Index(768) << 10 && p.m <= p.packet * members && members > 1;
}
template <class T> void set_layout(Problem<T> &p, bool few_rows, bool has_A) {
    p.few_rows = few_rows;
    p.has_A = has_A;
    p.of_identity &= !few_rows && !has_A; // a hint, unused for these
    if (few_rows) p.panel = widest_panel;
}

// x: (*, d) and V: (r, d), or x: (B, m, d) and V: (B, r, d).
template <class T>
Product<T> householder_product(const Tensor &x, const Tensor &V, const Plan &plan) {
    expect_dtype<T>("V", V);
    expect(x.has_memory(), "the rows should have memory; got a tensor whose storage was freed");
    const bool batch = V.dims() == 3;
    expect(batch ? x.dims() == 3 && x.size(0) == V.size(0) : V.dims() == 2 && x.dims() > 0,
           "the rows should be (*, d) for `V` (r, d), or (b, m, d) for `V` (b, r, d); got ", x, " and ", V);
    expect(x.size(-1) == V.size(-1) && V.size(-1) > 0,
           "the rows and the reflectors should have one length, at least 1; got ", x, " and ", V);
    const Index m = batch ? x.size(1) : x.rows(), r = V.size(-2), d = V.size(-1);
    expect_block_size(plan.block_size, std::min(r, d));
    expect(!plan.of_identity || m <= d, "rows of the identity should be at most d = ", d, "; got ", m);
    expect(!plan.of_identity || !plan.transpose, "rows of the identity should be multiplied by Qᵀ; got transpose, for Q");
    Problem<T> p{m, r, d, Form(plan.form), plan.transpose, plan.block_size, panel_for(d)};
    p.of_identity = plan.of_identity;
    return {p, rows_of<const T>(V, V.dims()), Saved<T>(p, d), {}};
}
template <class T> Call<T, 1> householder_call(const Product<T> &product, Index batch, int threads, bool forward) {
    const Problem<T> &p = product.p;
    const Index work = batch * round_up(p.m, p.packet) * p.reflectors() * p.d, bytes = p.r * p.d * Index(sizeof(T));
    const bool finds_T = forward || !product.saved.all_T;
    const Schedule schedule(p, batch, work, bytes, p.panels(), threads, !forward);
    return {schedule, {product}, finds_T, product.dV.data != nullptr, {}};
}

// Returns the output and the saved tensor. `of_identity`: x holds the first rows of the identity, to form Qᵀ. This saves a third
// of both passes, and x gets no gradient.
inline nb::object householder(nb::handle x_, nb::handle V_, const nb::tuple &plan_, int threads) {
    const Tensor V(V_), x = as_rows(x_, V.dims());
    const Plan plan(plan_, threads);
    return by_dtype(x, [&](auto zero) {
        using T = decltype(zero);
        Product<T> product[] = {householder_product<T>(x, V, plan)};
        Problem<T> &p = product[0].p;
        const Index operations = round_up(p.m, p.packet) * p.reflectors() * p.d, batch = V.dims() == 3 ? V.size(0) : 1;
        const bool row_major = V.dims() == 2 && row_major_pays(product[0], operations, threads);
        set_layout(p, row_major || are_few<T>(p.m), plan.save == 3);
        const Tensor out = x.new_contiguous();
        SavedTensor<T> saved(product, batch, plan.save, 0, plan.copy_output ? out.numel() : 0);
        saved.make(x, plan.save || plan.copy_output);
        saved.give(product);
        const auto rows = rows_of<const T>(x, V.dims());
        const auto outs = contiguous_rows(out.data<T>(), p.m, p.d), copies = contiguous_rows(saved.output(), p.m, p.d);
        {
            nb::gil_scoped_release release;
            forward(householder_call(product[0], batch, threads, true), rows, outs, copies);
        }
        saved.set_row_major(row_major);
        return saved.with(out);
    });
}

// Returns the gradients of x and V, None where `needs` is false. `output` is the forward pass's output, or None if it is not
// needed or saved as a copy. `saved` is a sequence of one tensor, or empty.
inline nb::object householder_backward(nb::handle g_, nb::handle output_, nb::handle V_, const nb::sequence &saved_,
                                       const nb::sequence &needs, const nb::tuple &plan_, int threads) {
    const Tensor V(V_), g = as_rows(g_, V.dims()), output = Tensor(output_).as_contiguous();
    const Plan plan(plan_, threads);
    const bool needs_x = nb::cast<bool>(needs[0]), needs_V = nb::cast<bool>(needs[1]);
    return with_saved([&] {
        return by_dtype(g, [&](auto zero) {
            using T = decltype(zero);
            Product<T> product[] = {householder_product<T>(g, V, plan)};
            Problem<T> &p = product[0].p;
            const Index batch = V.dims() == 3 ? V.size(0) : 1;
            expect(!(plan.of_identity && needs_x), "rows of the identity should need no gradient");
            expect_dtype<T>("output", output);
            expect(!needs_V || plan.copy_output || (output.here() && output.size(-1) == p.d && output.numel() == g.numel()),
                   "the output should have the shape of its gradient, ", g, "; got ", output);
            SavedTensor<T> saved(product, batch, plan.save, 0, plan.copy_output ? g.numel() : 0);
            saved.take(saved_);
            saved.give(product);
            const bool has_A = plan.save == 3 && needs_V;
            set_layout(p, (are_few<T>(p.m) || saved.is_row_major()) && (has_A || !needs_V), has_A);
            const Tensor dx = needs_x ? g.new_contiguous() : Tensor();
            const Tensor dV = needs_V ? V.new_gradient() : Tensor();
            product[0].dV = rows_of<T>(dV, V.dims());
            const auto rows = rows_of<const T>(g, V.dims());
            const T *const outputs = plan.copy_output ? saved.output() : output.data<const T>();
            const auto gradients = contiguous_rows(dx.data<T>(), p.m, p.d);
            {
                nb::gil_scoped_release release;
                backward(householder_call(product[0], batch, threads, false), rows, contiguous_rows(outputs, p.m, p.d),
                         gradients);
            }
            return nb::object(nb::make_tuple(dx.or_none(), dV.or_none()));
        });
    });
}

// W = U Σ Vᵀ: (n, m). Without V, U: (n, m) holds the compact reflectors of both sides.
struct SVDFactors {
    Tensor U, sigma, V;
    int form;
    Index block_size;
    bool shared;
    Index n, m, k;

    SVDFactors(nb::handle U_, nb::handle sigma_, nb::handle V_, int form, Index block_size)
        : U(U_), sigma(Tensor(sigma_).as_contiguous()), V(V_), form(form), block_size(block_size), shared(!V.here()) {
        expect(U.dims() == 2 && (shared || V.dims() == 2), "`U` and `V` should be matrices; got ", U, " and ", V);
        n = U.size(shared ? 0 : 1), m = shared ? U.size(1) : V.size(1);
        k = sigma.here() && sigma.dims() == 1 ? sigma.size(0) : std::min(n, m);
        expect(n > 0 && m > 0, "a weight should have at least one row and one column; got ", n, "×", m);
        expect((!sigma.here() || sigma.dims() == 1) && k <= std::min(n, m), "`sigma` should have at most ", std::min(n, m),
               " singular values for a weight of ", n, "×", m, "; got ", sigma);
        expect(!shared || form == int(Form::compact),
               "U and V should be compact to share a matrix, form 2; got form ", form, " and no `V`");
        expect_block_size(block_size, std::max(std::min(U.size(0), shared ? m : n), shared ? 0 : std::min(V.size(0), m)));
    }

    template <class T> void expect_dtypes() const {
        expect_dtype<T>("U", U), expect_dtype<T>("sigma", sigma), expect_dtype<T>("V", V);
    }
    // The reflectors of U, or V, in a tensor with the shape of U or V. In a shared tensor, U's are the columns.
    template <class T> Strided<T> U_side(const Tensor &t) const {
        return shared ? matrix_of<T>(t).transposed() : matrix_of<T>(t);
    }

    // The products with Q_V and Q_Uᵀ for a number of rows.
    template <class T> Product<T> V_product(Index rows) const {
        return product<T>(rows, shared ? n : V.size(0), m, true, matrix_of<const T>(shared ? U : V));
    }
    template <class T> Product<T> U_product(Index rows) const {
        return product<T>(rows, shared ? m : U.size(0), n, false, U_side<const T>(U));
    }
    template <class T> Diagonal<T> diagonal(const Product<T> (&product)[2]) const {
        const bool compact = form == int(Form::compact);
        return {sigma.data<const T>(), k, product[0].V[0], product[1].V[0], compact ? product[0].p.reflectors() : 0,
                compact && !shared ? product[1].p.reflectors() : 0};
    }
    template <class T>
    Call<T, 2> call(const Product<T> (&product)[2], int threads, bool forward, const Vector<T> &dsigma = {},
                    const Vector<T> &dbias = {}) const {
        const Problem<T> &v = product[0].p, &u = product[1].p;
        const Index work = round_up(v.m, v.packet) * (v.reflectors() * v.d + u.reflectors() * u.d);
        const Index bytes = (v.r * v.d + (shared ? 0 : u.r * u.d)) * Index(sizeof(T));
        // Number of members that both products have panels for; a product without reflections does not limit it.
        const Index panels = std::min(v.blocks() ? v.panels() : u.panels(), u.blocks() ? u.panels() : v.panels());
        const bool finds_T = forward || !(product[0].saved.all_T || product[1].saved.all_T);
        const Schedule schedule(v, 1, work, bytes, panels, threads, !forward);
        return {schedule, {product[0], product[1]}, finds_T, !forward, {dsigma, dbias}};
    }

  private:
    template <class T> Product<T> product(Index rows, Index r, Index d, bool transpose, Strided<const T> reflectors) const {
        const Index longest = std::max(n, m);
        Problem<T> p{rows, r, d, Form(form), transpose, block_size, panel_for(longest)};
        p.shares = shared;
        return {p, {reflectors.data, 0, reflectors.row_stride, reflectors.column_stride}, Saved<T>(p, longest), {}};
    }
};

// Returns x Wᵀ + bias and the saved tensor, which holds x Q_V, and a copy of x Wᵀ if `copy_output`.
inline nb::object svd_linear(nb::handle x_, nb::handle U, nb::handle sigma, nb::handle V, nb::handle bias_,
                             const nb::tuple &plan_, int threads) {
    const Tensor x = as_rows(x_, 2), bias = Tensor(bias_).as_contiguous();
    const Plan plan(plan_, threads);
    const SVDFactors factors(U, sigma, V, plan.form, plan.block_size);
    return by_dtype(x, [&](auto zero) {
        using T = decltype(zero);
        expect_dtype<T>("bias", bias), factors.expect_dtypes<T>();
        const Index n = factors.n, m = factors.m;
        expect(x.has_memory(), "`x` should have memory; got a tensor whose storage was freed");
        expect(x.dims() > 0 && x.size(-1) == m, "`x` should have last dimension ", m, " for a weight of ", n, "×", m, "; got ", x);
        expect(!bias.here() || bias.has_shape({n}), "`bias` should have shape (", n, ",); got ", bias);
        const Index rows = x.rows();
        Product<T> product[] = {factors.V_product<T>(rows), factors.U_product<T>(rows)};
        const Problem<T> &v = product[0].p, &u = product[1].p;
        const Index operations = round_up(rows, v.packet) * (v.reflectors() * v.d + u.reflectors() * u.d);
        const bool row_major = row_major_pays(product[0], operations, threads) && row_major_pays(product[1], operations, threads);
        for (Product<T> &side : product) set_layout(side.p, row_major || are_few<T>(rows), plan.save == 3);
        const Tensor out = x.new_with_last(n);
        SavedTensor<T> saved(product, 1, plan.save, plan.save ? rows * m : 0, plan.copy_output ? rows * n : 0);
        saved.make(x, plan.save || plan.copy_output);
        saved.give(product);
        const SVDRows<T> saved_rows{contiguous_rows(saved.inner(), rows, m)[0], contiguous_rows(saved.output(), rows, n)[0]};
        const auto from = rows_of<const T>(x, 2)[0];
        const auto to = contiguous_rows(out.data<T>(), rows, n)[0];
        {
            nb::gil_scoped_release release;
            forward(factors.call(product, threads, true), factors.diagonal(product), from, bias.data<const T>(), saved_rows, to);
        }
        saved.set_row_major(row_major);
        return saved.with(out);
    });
}

// Returns the gradients of x, U, sigma, V and bias, None where `needs` is false. If U and V are one tensor, U's gradient is the
// gradient of both. `output` is x Wᵀ, or None if it is not needed or saved as a copy.
inline nb::object svd_linear_backward(nb::handle g_, nb::handle output_, nb::handle U, nb::handle sigma, nb::handle V,
                                      const nb::sequence &saved_, const nb::sequence &needs, const nb::tuple &plan_,
                                      int threads) {
    const auto needed = [&](int i) { return nb::cast<bool>(needs[i]); };
    return with_saved([&] {
        const Tensor g = as_rows(g_, 2), output = Tensor(output_).as_contiguous();
        const Plan plan(plan_, threads);
        const bool symmetric = plan.symmetric;
        const SVDFactors factors(U, sigma, V, plan.form, plan.block_size);
        return by_dtype(g, [&](auto zero) {
            using T = decltype(zero);
            expect_dtype<T>("output", output), factors.expect_dtypes<T>();
            const Index rows = g.rows(), n = factors.n, m = factors.m;
            const bool both = symmetric || factors.shared; // one gradient for both sides
            const bool needs_U = needed(1) || (symmetric && needed(3)), needs_V = both ? needs_U : needed(3);
            expect(plan.save >= 1, "save should be at least 1 for a backward pass; got ", plan.save);
            expect(g.dims() > 0 && g.size(-1) == n, "the gradient should have last dimension ", n, "; got ", g);
            expect(!needs_U || plan.copy_output || (output.here() && output.size(-1) == n && output.numel() == g.numel()),
                   "the output should have the shape of its gradient, ", g, "; got ", output);
            expect(!symmetric || (!factors.shared && n == m && factors.U.size(0) == factors.V.size(0)),
                   "U and V should be one tensor; got ", factors.U, " and ", factors.V);
            Product<T> product[] = {factors.V_product<T>(rows), factors.U_product<T>(rows)};
            product[0].p.adds = symmetric;
            SavedTensor<T> saved(product, 1, plan.save, rows * m, plan.copy_output ? rows * n : 0);
            saved.take(saved_);
            saved.give(product);
            const bool has_A = plan.save == 3 && (needs_U || needs_V);
            const bool few_rows = (are_few<T>(rows) || saved.is_row_major()) && (has_A || !(needs_U || needs_V));
            for (Product<T> &side : product) set_layout(side.p, few_rows, has_A);
            const Tensor dx = needed(0) ? g.new_with_last(m) : Tensor();
            const Tensor dU = needs_U ? factors.U.new_gradient() : Tensor();
            const Tensor dsigma = factors.sigma.here() && needed(2) ? factors.sigma.new_contiguous() : Tensor();
            const Tensor dV = needs_V && !both ? factors.V.new_gradient() : Tensor();
            const Tensor dbias = needed(4) ? g.new_pooled({n}) : Tensor();
            const auto gradient_of = [](Strided<T> t) { return Batch<T>{t.data, 0, t.row_stride, t.column_stride}; };
            product[0].dV = gradient_of(matrix_of<T>(both ? dU : dV));
            product[1].dV = gradient_of(factors.U_side<T>(dU));
            const T *const inner = saved.inner(), *const outputs = plan.copy_output ? saved.output() : output.data<const T>();
            const SVDRows<const T> saved_rows{contiguous_rows(inner, rows, m)[0], contiguous_rows(outputs, rows, n)[0]};
            const auto from = rows_of<const T>(g, 2)[0];
            const auto to = contiguous_rows(dx.data<T>(), rows, m)[0];
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
