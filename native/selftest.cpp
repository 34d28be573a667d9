// Compares the core with the definition, one reflection at a time, without Python or PyTorch, so that it also runs without
// both: on another processor, or in an emulator. `make selftest` builds it and runs it, for every instruction set that
// this machine has; `make cross-aarch64` for aarch64. With --plant-error the core gets other numbers than the definition, so
// that every kind of call has to fail.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "recurrence.hpp"
#include "run.hpp"

using namespace fasth;

namespace {

bool plant_error = false;

// The type for the definition: its rounding should be negligible.
template <class T> using Wide = std::conditional_t<std::is_same_v<T, float>, double, long double>;
template <class T> using Numbers = std::vector<T>;

// Uniform in [−1, 1], and the same on every machine, unlike the standard library's distributions.
struct Random {
    std::uint64_t state = 1;
    template <class T> Numbers<T> draw(Index count, double size = 1) {
        Numbers<T> numbers(static_cast<std::size_t>(count));
        for (T &number : numbers) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            number = T(size * (double(state >> 40) / double(1 << 23) - 1));
        }
        return numbers;
    }
};
// Memory for results: entries that are not written stay NaN.
template <class T> Numbers<T> unwritten(Index count) {
    return Numbers<T>(static_cast<std::size_t>(count), std::numeric_limits<T>::quiet_NaN());
}
template <class T> Numbers<Wide<T>> widened(const Numbers<T> &numbers) { return {numbers.begin(), numbers.end()}; }

template <class W> W dot(const W *a, const W *b, Index count) {
    W sum = 0;
    for (Index i = 0; i < count; ++i) sum += a[i] * b[i];
    return sum;
}
template <class W> W norm(const Numbers<W> &a) { return std::sqrt(dot(a.data(), a.data(), Index(a.size()))); }
template <class W> W largest_row(const Numbers<W> &a, Index columns) {
    W largest = 0;
    for (Index i = 0; i + columns <= Index(a.size()); i += columns)
        largest = std::max(largest, std::sqrt(dot(&a[std::size_t(i)], &a[std::size_t(i)], columns)));
    return largest;
}

// The worst error of one kind of call. `scale`: the size that rounding is relative to; `steps`: the number of roundings.
struct Report {
    static constexpr double tolerance = 8;
    int comparisons = 0, failures = 0;
    double worst = 0;

    template <class T> void compare(const Numbers<T> &actual, const Numbers<Wide<T>> &expected, Wide<T> scale, Index steps) {
        compare<T>(actual, expected, Numbers<Wide<T>>(expected.size(), scale), steps);
    }
    template <class T>
    void compare(const Numbers<T> &actual, const Numbers<Wide<T>> &expected, const Numbers<Wide<T>> &scale, Index steps) {
        double error = actual.size() == expected.size() ? 0 : std::numeric_limits<double>::infinity();
        for (std::size_t i = 0; i < std::min(actual.size(), expected.size()); ++i) {
            const Wide<T> difference = std::abs(Wide<T>(actual[i]) - expected[i]);
            if (difference == 0) continue;
            const auto unit = std::numeric_limits<T>::epsilon() * Wide<T>(std::max<Index>(steps, 1)) * scale[i];
            const double ratio = double(difference / unit);
            error = ratio <= error ? error : ratio; // NaN stays
            if (!(ratio <= tolerance)) break;
        }
        ++comparisons;
        failures += !(error <= tolerance);
        worst = error <= worst ? worst : error;
    }
    void print(const std::string &kind) const {
        const char *const format = "%-42s  worst error %8.3g eps·size, tolerance %g, %5d comparisons, %d failed\n";
        std::printf(format, kind.c_str(), worst, tolerance, comparisons, failures);
        std::fflush(stdout);
    }
};

// Q = H_1 ⋯ H_r, one reflection at a time.
template <class T> struct Definition {
    using W = Wide<T>;
    Index r, d;
    bool transpose;
    Numbers<W> V; // (r, d), with all zeros and ones

    Definition(Strided<const T> stored, Index r, Index d, Form form, bool transpose)
        : r(r), d(d), transpose(transpose), V(std::size_t(r * d)) {
        for (Index i = 0; i < r; ++i)
            for (Index c = 0; c < d; ++c) {
                const bool is_stored = form == Form::full || c > i || (c == i && form == Form::triangular);
                V[std::size_t(i * d + c)] = is_stored ? W(stored(i, c)) : W(c == i && form == Form::compact);
            }
    }
    const W *reflector(Index i) const { return V.data() + i * d; }
    Index acts_at(Index step) const { return transpose ? step : r - 1 - step; }

    // Replaces a row by its product. `inputs`: (r, d), the row before each reflection.
    void forward(W *row, W *inputs) const {
        for (Index step = 0; step < r; ++step) {
            const Index i = acts_at(step);
            const W *const v = reflector(i), squared = dot(v, v, d);
            std::copy_n(row, d, inputs + i * d);
            if (squared == 0) continue;
            const W multiple = 2 * dot(row, v, d) / squared;
            for (Index c = 0; c < d; ++c) row[c] -= multiple * v[c];
        }
    }
    // Replaces the gradient of the product by the gradient of the row, and adds to the gradient of V.
    void backward(W *g, const W *inputs, W *dV) const {
        for (Index step = r - 1; step >= 0; --step) {
            const Index i = acts_at(step);
            const W *const v = reflector(i), *const a = inputs + i * d, squared = dot(v, v, d);
            if (squared == 0) continue;
            const W av = 2 * dot(a, v, d) / squared, gv = 2 * dot(g, v, d) / squared;
            for (Index c = 0; c < d; ++c) {
                dV[i * d + c] += av * gv * v[c] - gv * a[c] - av * g[c];
                g[c] -= gv * v[c];
            }
        }
    }
    // Only entries that are stored have a gradient.
    void clear_gradient(Form form, Numbers<W> &dV) const {
        for (Index i = 0; form != Form::full && i < r; ++i)
            std::fill_n(dV.begin() + i * d, std::min(d, i + (form == Form::compact)), W(0));
    }
    // A gradient of a reflector is a sum over rows of products of two rows over its length.
    Numbers<W> gradient_scale(W rows, W gradients) const {
        Numbers<W> scale(V.size());
        for (Index i = 0; i < r; ++i) {
            const W length = std::sqrt(dot(reflector(i), reflector(i), d));
            std::fill_n(scale.begin() + i * d, d, rows * gradients / (length == 0 ? W(1) : length));
        }
        return scale;
    }
};

// Memory for saved tensors: none, T, T and Z, or T, Z and A, for 0 to 3.
template <class T> struct SavedNumbers {
    Numbers<T> all_T, scales, Z, A;
    Saved<T> take(const Problem<T> &p, Index longest, Index batch, int save) {
        Saved<T> saved(p, longest);
        const auto make = [](Numbers<T> &numbers, Index count) {
            numbers = unwritten<T>(count + 1); // never empty, so that it has an address
            return numbers.data();
        };
        if (save >= 1) {
            saved.all_T = make(all_T, batch * saved.T_size());
            saved.all_scales = make(scales, batch * saved.blocks * saved.K);
        }
        if (save >= 2) saved.Z = make(Z, batch * saved.blocks * saved.M * saved.K);
        if (save >= 3) saved.A = make(A, batch * std::max<Index>(saved.blocks - 1, 0) * saved.D * saved.M);
        return saved;
    }
};

// The layout of rows in calls.hpp: row-major if they are few, in backward only with A.
template <class T> Problem<T> with_layout(Problem<T> p, int save, int threads, bool back) {
    const Index few = threads > 1 ? packet_size<T> * threads : packet_size<T> / 2;
    p.has_A = save == 3;
    p.few_rows = has_inner_products<T> && p.m <= few && (p.has_A || !back);
    p.of_identity &= !p.few_rows && !p.has_A;
    if (p.few_rows) p.panel = widest_panel;
    return p;
}

struct Shape1 { // sizes for householder
    Index batch, m, r, d, k;
    double size = 1; // scale of the reflectors' entries
    bool of_identity = false;
};
// d = 1, no reflections, ragged blocks, more reflections than dimensions, one row and many, few rows on a team, rows in parts,
// a batch, columns shared out, tiny reflectors, the identity. From 2¹⁹ products on (rows · r · d) several threads are used.
const std::initializer_list<Shape1> householder_shapes = {
    {1, 1, 1, 1, 1},       {1, 3, 0, 5, 1},       {1, 1, 5, 7, 3},       {1, 5, 9, 4, 4},
    {1, 2, 40, 40, 16},    {1, 33, 50, 37, 20},   {2, 3, 6, 8, 4},       {1, 1, 100, 100, 32},
    {1, 6, 300, 300, 48},  {1, 160, 65, 65, 32},  {3, 40, 70, 70, 32},   {1, 40, 130, 130, 32},
    {1, 20, 33, 33, 16, 1e-15}, {1, 65, 65, 65, 16, 1, true}, {1, 130, 40, 130, 16, 1, true},
};

template <class T> struct Householder {
    using W = Wide<T>;
    const Shape1 s;
    const Form form;
    const bool transpose;
    Numbers<T> x, V, g;
    Numbers<W> out, dx, dV, dV_scale;

    Householder(const Shape1 &s, Form form, bool transpose) : s(s), form(form), transpose(transpose) {
        Random random;
        x = random.draw<T>(s.batch * s.m * s.d), g = random.draw<T>(s.batch * s.m * s.d);
        V = random.draw<T>(s.batch * s.r * s.d, s.size);
        for (Index i = 0; s.of_identity && i < s.m * s.d; ++i) x[std::size_t(i)] = T(i % (s.d + 1) == 0);
        out = widened(x), dx = widened(g);
        for (Index b = 0; b < s.batch; ++b) define(b);
        if (plant_error) x[0] += T(0.01), g[0] += T(0.01);
    }
    void define(Index b) {
        const Definition<T> Q({V.data() + b * s.r * s.d, s.d, 1}, s.r, s.d, form, transpose);
        Numbers<W> inputs(Q.V.size()), gradient(Q.V.size());
        for (Index i = b * s.m; i < (b + 1) * s.m; ++i) {
            Q.forward(out.data() + i * s.d, inputs.data());
            Q.backward(dx.data() + i * s.d, inputs.data(), gradient.data());
        }
        Q.clear_gradient(form, gradient);
        for (Index i = 0; form == Form::compact && i < std::min(s.r, s.d); ++i)
            gradient[std::size_t(i * s.d + i)] = sign_guard(V[std::size_t((b * s.r + i) * s.d + i)]);
        dV.insert(dV.end(), gradient.begin(), gradient.end());
        const Numbers<W> scale = Q.gradient_scale(norm(out), norm(dx));
        dV_scale.insert(dV_scale.end(), scale.begin(), scale.end());
    }
    // (batch, r, d) with rows or columns contiguous.
    Numbers<T> stored(const Numbers<T> &rows, bool column_major, bool back) const {
        Numbers<T> other(rows);
        for (Index i = 0; column_major && i < Index(rows.size()); ++i) {
            const Index b = i / (s.r * s.d), j = i / s.d % s.r, c = i % s.d, place = (b * s.d + c) * s.r + j;
            other[std::size_t(back ? i : place)] = rows[std::size_t(back ? place : i)];
        }
        return other;
    }
    template <class U> Batch<U> rows_of(U *data) const { return {data, s.m * s.d, s.d, 1}; }

    void run(bool column_major, int save, int threads, Report &report) const {
        Problem<T> p{s.m, s.r, s.d, form, transpose, s.k, panel_for(s.d)};
        p.of_identity = s.of_identity;
        SavedNumbers<T> saved;
        const Numbers<T> V_stored = stored(V, column_major, false);
        Numbers<T> y = unwritten<T>(Index(x.size())), gx = y, gV = unwritten<T>(Index(V.size()));
        const auto matrices = [&](auto *data) {
            using U = std::remove_pointer_t<decltype(data)>;
            return Batch<U>{data, s.r * s.d, column_major ? 1 : s.d, column_major ? s.r : 1};
        };
        Product<T> product{p, matrices(V_stored.data()), saved.take(p, s.d, s.batch, save), {}};
        const auto call = [&](bool back) {
            product.p = with_layout(p, save, threads, back);
            const Index work = s.batch * round_up(s.m, p.packet) * p.reflectors() * s.d, bytes = s.r * s.d * Index(sizeof(T));
            const Schedule schedule(product.p, s.batch, work, bytes, product.p.panels(), threads, back);
            return Call<T, 1>{schedule, {product}, !back || save == 0, back, {}};
        };
        forward(call(false), rows_of(x.data()), rows_of(y.data()));
        product.dV = matrices(gV.data());
        backward(call(true), rows_of(g.data()), rows_of<const T>(y.data()), rows_of(s.of_identity ? nullptr : gx.data()));
        report.compare(y, out, largest_row(out, s.d), s.r);
        if (!s.of_identity) report.compare(gx, dx, largest_row(dx, s.d), s.r);
        if (s.r > 0) report.compare(stored(gV, column_major, true), dV, dV_scale, s.r);
    }
};

template <class T> Report householder(Form form) {
    Report report;
    for (const Shape1 &s : householder_shapes)
        for (const bool transpose : {false, true}) {
            if (s.of_identity && transpose) continue;
            const Householder<T> problem(s, form, transpose);
            for (const bool column_major : {false, true})
                for (const int save : {0, 1, 2, 3})
                    for (const int threads : {1, 3}) problem.run(column_major, save, threads, report);
        }
    return report;
}

struct Shape2 { // sizes for svd_linear: rows of x, W (n, m), reflections a side, singular values
    Index rows, n, m, r, count, k;
};
const std::initializer_list<Shape2> svd_shapes = {
    {1, 1, 1, 1, 1, 1},     {1, 5, 3, 3, 3, 2},     {3, 7, 12, 7, 5, 4},       {33, 20, 37, 20, 20, 16},
    {7, 90, 40, 40, 40, 8}, {40, 70, 130, 70, 70, 32}, {6, 300, 200, 200, 150, 48}, {160, 66, 65, 65, 65, 32},
};

// x Wᵀ + bias with W = Q_U Σ Q_Vᵀ. Shared: both sides' reflectors are in one (n, m) matrix, U's as columns.
template <class T> struct SVDLinear {
    using W = Wide<T>;
    const Shape2 s;
    const Form form;
    const bool shared;
    const Index U_count, V_count; // numbers of reflectors
    Numbers<T> x, U, V, sigma, bias, g;
    Numbers<W> out, dx, dU, dV, dsigma, dbias, dU_scale, dV_scale;
    W dsigma_scale, dbias_scale;

    SVDLinear(const Shape2 &s, Form form, bool shared)
        : s(s), form(form), shared(shared), U_count(shared ? s.m : s.r), V_count(shared ? s.n : s.r) {
        Random random;
        x = random.draw<T>(s.rows * s.m), g = random.draw<T>(s.rows * s.n);
        sigma = random.draw<T>(s.count), bias = random.draw<T>(s.n);
        U = random.draw<T>(shared ? s.n * s.m : s.r * s.n);
        if (!shared) V = random.draw<T>(s.r * s.m);
        define();
        if (plant_error) x[0] += T(0.01), g[0] += T(0.01), sigma[0] += T(0.01), bias[0] += T(0.01);
    }

    Strided<const T> V_side() const { return {shared ? U.data() : V.data(), s.m, 1}; }
    Strided<const T> U_side() const { return U_side(U.data()); }
    template <class N> Strided<N> U_side(N *data) const {
        return shared ? Strided<N>{data, 1, s.m} : Strided<N>{data, s.n, 1};
    }
    Diagonal<T> diagonal() const {
        const bool compact = form == Form::compact;
        return {sigma.data(), s.count, V_side(), U_side(), compact ? std::min(V_count, s.m) : 0,
                compact && !shared ? std::min(U_count, s.n) : 0};
    }

    void define() {
        const Definition<T> Q_V(V_side(), V_count, s.m, form, true), Q_U(U_side(), U_count, s.n, form, false);
        const Diagonal<T> between = diagonal();
        Numbers<W> V_inputs(Q_V.V.size()), U_inputs(Q_U.V.size()), gU(Q_U.V.size()), gV(Q_V.V.size()), inner, after;
        dsigma.assign(sigma.size(), 0), dbias.assign(bias.size(), 0);
        for (Index i = 0; i < s.rows; ++i) {
            Numbers<W> a(x.begin() + i * s.m, x.begin() + (i + 1) * s.m), y(std::size_t(s.n));
            Numbers<W> gy(g.begin() + i * s.n, g.begin() + (i + 1) * s.n), ga(std::size_t(s.m));
            Q_V.forward(a.data(), V_inputs.data());
            for (std::size_t c = 0; c < sigma.size(); ++c) y[c] = a[c] * W(between.entry(Index(c)));
            Q_U.forward(y.data(), U_inputs.data());
            for (std::size_t c = 0; c < bias.size(); ++c) dbias[c] += gy[c], out.push_back(y[c] + W(bias[c]));
            Q_U.backward(gy.data(), U_inputs.data(), gU.data());
            for (std::size_t c = 0; c < sigma.size(); ++c) {
                dsigma[c] += a[c] * gy[c] * W(between.sign(Index(c)));
                ga[c] = gy[c] * W(between.entry(Index(c)));
            }
            inner.insert(inner.end(), a.begin(), a.end());
            after.insert(after.end(), gy.begin(), gy.end());
            Q_V.backward(ga.data(), V_inputs.data(), gV.data());
            dx.insert(dx.end(), ga.begin(), ga.end());
        }
        dsigma_scale = norm(inner) * norm(after), dbias_scale = norm(after) * std::sqrt(W(s.rows));
        finish(Q_U, Q_V, gU, gV, dsigma_scale);
    }
    // The gradients in the layout of their storage.
    void finish(const Definition<T> &Q_U, const Definition<T> &Q_V, Numbers<W> &gU, Numbers<W> &gV, W size) {
        Q_U.clear_gradient(form, gU), Q_V.clear_gradient(form, gV);
        if (form == Form::compact) {
            for (Index i = 0; i < std::min(V_count, s.m); ++i) gV[std::size_t(i * s.m + i)] = sign_guard(V_side()(i, i));
            for (Index i = 0; !shared && i < std::min(U_count, s.n); ++i)
                gU[std::size_t(i * s.n + i)] = sign_guard(U_side()(i, i));
        }
        dU = gU, dV = gV, dU_scale = Q_U.gradient_scale(size, 1), dV_scale = Q_V.gradient_scale(size, 1);
        if (!shared) return;
        const Numbers<W> U_scale = dU_scale;
        dU = gV, dU_scale = dV_scale, dV.clear(), dV_scale.clear();
        for (Index i = 0; i < s.n; ++i)
            for (Index j = 0; j < std::min(i, s.m); ++j) {
                dU[std::size_t(i * s.m + j)] = gU[std::size_t(j * s.n + i)];
                dU_scale[std::size_t(i * s.m + j)] = U_scale[std::size_t(j * s.n + i)];
            }
    }

    void run(int save, int threads, Report &report) const {
        const Index longest = std::max(s.n, s.m);
        Problem<T> v{s.rows, V_count, s.m, form, true, s.k, panel_for(longest)};
        Problem<T> u{s.rows, U_count, s.n, form, false, s.k, panel_for(longest)};
        v.shares = u.shares = shared;
        SavedNumbers<T> saved[2];
        const auto matrix = [](auto side) {
            return Batch<std::remove_pointer_t<decltype(side.data)>>{side.data, 0, side.row_stride, side.column_stride};
        };
        Product<T> product[] = {{v, matrix(V_side()), saved[0].take(v, longest, 1, save), {}},
                                {u, matrix(U_side()), saved[1].take(u, longest, 1, save), {}}};
        Numbers<T> y = unwritten<T>(s.rows * s.n), before_bias = y, inner = unwritten<T>(s.rows * s.m), gx = inner;
        Numbers<T> gU = unwritten<T>(Index(U.size())), gV = unwritten<T>(Index(V.size()));
        Numbers<T> gsigma = unwritten<T>(s.count), gbias = unwritten<T>(s.n);
        const auto call = [&](bool back) {
            product[0].p = with_layout(v, save, threads, back), product[1].p = with_layout(u, save, threads, back);
            const Index work = round_up(s.rows, v.packet) * (v.reflectors() * v.d + u.reflectors() * u.d);
            const Index bytes = (v.r * v.d + (shared ? 0 : u.r * u.d)) * Index(sizeof(T));
            const Index panels = std::min(product[0].p.panels(), product[1].p.panels());
            const Schedule schedule(product[0].p, 1, work, bytes, panels, threads, back);
            return Call<T, 2>{schedule, {product[0], product[1]}, !back || save == 0, back,
                              {{gsigma.data(), s.count}, {gbias.data(), s.n}}};
        };
        const SVDRows<T> rows{{inner.data(), s.m, 1}, {before_bias.data(), s.n, 1}};
        forward(call(false), diagonal(), {x.data(), s.m, 1}, bias.data(), rows, {y.data(), s.n, 1});
        product[0].dV = matrix(Strided<T>{shared ? gU.data() : gV.data(), s.m, 1});
        product[1].dV = matrix(U_side(gU.data()));
        backward(call(true), diagonal(), {g.data(), s.n, 1}, {{inner.data(), s.m, 1}, {before_bias.data(), s.n, 1}},
                 {gx.data(), s.m, 1});
        const Index steps = v.reflectors() + u.reflectors();
        report.compare(y, out, largest_row(out, s.n), steps);
        report.compare(gx, dx, largest_row(dx, s.m), steps);
        report.compare(gU, dU, dU_scale, steps);
        if (!shared) report.compare(gV, dV, dV_scale, steps);
        report.compare(gsigma, dsigma, dsigma_scale, steps);
        report.compare(gbias, dbias, dbias_scale, steps);
    }
};

template <class T> Report svd_linear(Form form, bool shared) {
    Report report;
    for (const Shape2 &s : svd_shapes) {
        const SVDLinear<T> problem(s, form, shared);
        for (const int save : {0, 1, 2, 3})
            for (const int threads : {1, 3}) problem.run(save, threads, report);
    }
    return report;
}

// h_t = f(x_t + W h_{t−1}) with a number of sequences for each time.
template <class T, Activation f> struct RecurrenceCase {
    using W = Wide<T>;
    const Times times;
    const Index h;
    Numbers<T> x, weight, h0, bias, g;
    Numbers<W> out;

    RecurrenceCase(const Times &times, Index h) : times(times), h(h) {
        Random random;
        x = random.draw<T>(times.rows() * h), g = random.draw<T>(times.rows() * h), h0 = random.draw<T>(batch() * h);
        weight = random.draw<T>(h * h, 1 / std::sqrt(double(h)));
        bias = random.draw<T>(h, 0.5);
        for (T &b : bias) b = -std::abs(b); // for positive biases modReLU jumps at 0, and rounding could decide the side
        out = states();
        if (plant_error) x[0] += T(0.5);
    }
    Index batch() const { return std::max(times.size(0), times.size(times.count() - 1)); }

    void run(bool column_major, int threads, Report &report) const {
        Numbers<T> y = unwritten<T>(times.rows() * h), gx = y, gh0 = unwritten<T>(batch() * h), gbias = unwritten<T>(h);
        Numbers<T> stored(weight);
        for (Index i = 0; column_major && i < h * h; ++i) stored[std::size_t(i)] = weight[std::size_t(i % h * h + i / h)];
        const Strided<const T> matrix{stored.data(), column_major ? 1 : h, column_major ? h : 1};
        const Recurrence<T> call(times, h, threads);
        call.template forward<f>(x.data(), matrix, h0.data(), bias.data(), y.data());
        const Index steps = times.count() * h;
        report.compare(y, out, largest_row(out, h), steps);
        // The slope follows from the core's own states: beside a kink, rounding decides which it is.
        T *const wanted = f == Activation::modrelu ? gbias.data() : nullptr;
        call.template backward<f>(g.data(), matrix, y.data(), gx.data(), gh0.data(), wanted);
        Numbers<W> dx(x.size()), dh0(h0.size()), dbias(bias.size());
        gradients(y, dx, dh0, dbias);
        report.compare(gx, dx, largest_row(dx, h), steps);
        report.compare(gh0, dh0, largest_row(dx, h), steps);
        if (f == Activation::modrelu) report.compare(gbias, dbias, norm(dx) * std::sqrt(W(times.rows())), steps);
    }

  private:
    // The state before a row's state: among the states, or in h0.
    const W *before(Index step, Index row, const Numbers<W> &out, const Numbers<W> &first) const {
        return row < times.size(step - 1) ? &out[std::size_t((times.start(step - 1) + row) * h)] : &first[std::size_t(row * h)];
    }
    static W activation(W z, W b) {
        if (f == Activation::tanh) return std::tanh(z);
        if (f == Activation::relu) return std::max(z, W(0));
        return std::abs(z) + b > 0 ? std::copysign(std::abs(z) + b, z) : W(0);
    }
    static W slope(W value) { return f == Activation::tanh ? 1 - value * value : W(value != 0); }

    Numbers<W> states() const {
        Numbers<W> out(x.size());
        const Numbers<W> first = widened(h0), wide = widened(weight);
        for (Index step = 0; step < times.count(); ++step)
            for (Index row = 0; row < times.size(step); ++row)
                for (Index c = 0; c < h; ++c) {
                    const auto place = std::size_t((times.start(step) + row) * h + c);
                    const W product = dot(&wide[std::size_t(c * h)], before(step, row, out, first), h);
                    out[place] = activation(W(x[place]) + product, W(bias[std::size_t(c)]));
                }
        return out;
    }
    void gradients(const Numbers<T> &out, Numbers<W> &dx, Numbers<W> &dh0, Numbers<W> &dbias) const {
        for (std::size_t i = 0; i < dx.size(); ++i) dx[i] = W(g[i]);
        for (Index step = times.count() - 1; step >= 0; --step)
            for (Index row = 0; row < times.size(step); ++row) {
                W *const own = &dx[std::size_t((times.start(step) + row) * h)];
                W *const earlier = const_cast<W *>(before(step, row, dx, dh0));
                for (Index c = 0; c < h; ++c) {
                    const W value = W(out[std::size_t((times.start(step) + row) * h + c)]);
                    own[c] *= slope(value);
                    dbias[std::size_t(c)] += value > 0 ? own[c] : -own[c];
                    for (Index j = 0; j < h; ++j) earlier[j] += own[c] * W(weight[std::size_t(c * h + j)]);
                }
            }
    }
};

template <class T, Activation f> Report recurrence() {
    Report report;
    // One row, sequences of one length and of several, and in reverse; the last on several threads where h is large.
    const Times all_times[] = {
        {{0, 1}, false},
        {{0, 2, 4, 6}, false},
        {{0, 5, 10, 13, 14}, false},
        {{0, 5, 10, 13, 14}, true},
        {{0, 9, 18, 27, 36, 40}, false},
    };
    for (const Times &times : all_times)
        for (const Index h : {1, 5, 33, 130}) {
            const RecurrenceCase<T, f> problem(times, h);
            for (const bool column_major : {false, true})
                for (const int threads : {1, 3}) problem.run(column_major, threads, report);
        }
    return report;
}

template <class T> int run_all() {
    int failed = 0;
    const auto print = [&](const Report &report, const std::string &kind) {
        report.print(kind);
        failed += report.failures > 0;
    };
    const char *const names[] = {"full", "triangular", "compact", "compact with signs"};
    for (const Form form : {Form::full, Form::triangular, Form::compact})
        print(householder<T>(form), std::string("householder, ") + names[int(form)]);
    for (const Form form : {Form::full, Form::triangular, Form::compact})
        print(svd_linear<T>(form, false), std::string("svd_linear, ") + names[int(form)]);
    print(svd_linear<T>(Form::compact, true), "svd_linear, one matrix, compact");
    print(recurrence<T, Activation::tanh>(), "recurrence, tanh");
    print(recurrence<T, Activation::relu>(), "recurrence, relu");
    print(recurrence<T, Activation::modrelu>(), "recurrence, modrelu");
    return failed;
}

} // namespace

int main(int argc, char **argv) {
    plant_error = argc > 1 && std::strcmp(argv[1], "--plant-error") == 0;
    if (argc > 2 || (argc > 1 && !plant_error)) {
        std::fprintf(stderr, "expected no argument, or --plant-error; got %s\n", argv[argc - 1]);
        return 2;
    }
    std::printf("%s, %s, %d in a register, %s\n", FASTH_ISA, sizeof(FASTH_NUMBER) == 4 ? "float32" : "float64",
                int(packet_size<FASTH_NUMBER>),
#ifdef _OPENMP
                "1 and 3 threads");
#else
                "one thread, since there is no OpenMP");
#endif
    const int failed = run_all<FASTH_NUMBER>(); // one type a program: they compile at the same time
    std::printf(failed ? "FAILED: %d kinds of calls\n" : "all passed\n", failed);
    return failed ? 1 : 0;
}
