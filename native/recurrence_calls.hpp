// Functions called from Python for recurrences over time: they check all tensors before reading, and return new ones.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "calls.hpp"
#include "recurrence.hpp"

namespace fasth {

using Sizes = std::optional<std::vector<Index>>;

// The times of rows (time, batch, h), or of a packed sequence (rows, h) with the number of rows at each time.
inline Times times_of(const Tensor &rows, const Sizes &sizes, bool reverse) {
    Times times{{0}, reverse};
    expect(rows.dims() == (sizes ? 2 : 3), "the rows should be (time, batch, h), or (rows, h) with sizes; got ", rows);
    const Index count = sizes ? Index(sizes->size()) : rows.size(0);
    for (Index t = 0; t < count; ++t) {
        const Index size = sizes ? (*sizes)[std::size_t(t)] : rows.size(1);
        expect(size >= 0 && (t == 0 || size <= times.starts[std::size_t(t)] - times.starts[std::size_t(t) - 1]),
               "sizes should not increase; got ", size, " at time ", t);
        times.starts.push_back(times.rows() + size);
    }
    expect(times.rows() == rows.rows() || rows.size(-1) == 0, "sizes should add up to the ", rows.rows(), " rows; got ",
           times.rows());
    return times;
}

template <class T> Strided<const T> square_of(const Tensor &W, Index h) {
    expect_dtype<T>("W", W);
    expect(W.has_shape({h, h}), "`W` should have shape (", h, ", ", h, "); got ", W);
    return matrix_of<const T>(W);
}

// Calls action(std::integral_constant<Activation, f>) for the activation of number f.
template <class Action> void by_activation(int f, const Action &action) {
    expect(f >= 0 && f <= int(Activation::modrelu), "f should be 0 (tanh), 1 (relu) or 2 (modrelu); got ", f);
    if (f == int(Activation::tanh)) return action(std::integral_constant<Activation, Activation::tanh>());
    if (f == int(Activation::relu)) return action(std::integral_constant<Activation, Activation::relu>());
    action(std::integral_constant<Activation, Activation::modrelu>());
}

// The hidden states at all times, of x's shape.
inline nb::object recurrence(nb::handle x_, const Sizes &sizes, nb::handle W_, nb::handle h0_, nb::handle bias_, int f,
                             bool reverse, int threads) {
    const Tensor x = Tensor(x_).as_contiguous(), W(W_), h0 = Tensor(h0_).as_contiguous(), bias = Tensor(bias_).as_contiguous();
    expect(threads > 0, "threads should be at least 1; got ", threads);
    return by_dtype(x, [&](auto zero) {
        using T = decltype(zero);
        expect_dtype<T>("x", x), expect_dtype<T>("h0", h0), expect_dtype<T>("bias", bias);
        const Times times = times_of(x, sizes, reverse);
        const Index h = x.size(-1);
        const Strided<const T> weight = square_of<T>(W, h);
        const Recurrence<T> call(times, h, threads);
        expect(h0.has_shape({call.batch(), h}), "`h0` should have shape (", call.batch(), ", ", h, "); got ", h0);
        expect(bias.here() ? bias.has_shape({h}) : f != int(Activation::modrelu), "modReLU should have a bias of shape (", h,
               ",); got ", bias);
        const Tensor out = x.new_contiguous();
        by_activation(f, [&](auto activation) {
            nb::gil_scoped_release release;
            call.template forward<decltype(activation)::value>(x.data<const T>(), weight, h0.data<const T>(), bias.data<const T>(),
                                                       out.data<T>());
        });
        return out.object;
    });
}

// Returns the gradients of x, of the first states and of modReLU's bias, the last two None if not needed.
inline nb::object recurrence_backward(nb::handle g_, const Sizes &sizes, nb::handle W_, nb::handle out_, nb::handle h0_, int f,
                                      bool reverse, bool needs_h0, bool needs_bias, int threads) {
    return with_saved([&] {
        const Tensor g = Tensor(g_).as_contiguous(), W(W_), out = Tensor(out_).as_contiguous(), h0(h0_);
        expect(threads > 0, "threads should be at least 1; got ", threads);
        return by_dtype(g, [&](auto zero) {
            using T = decltype(zero);
            expect_dtype<T>("g", g), expect_dtype<T>("the states", out), expect_dtype<T>("h0", h0);
            const Times times = times_of(g, sizes, reverse);
            const Index h = g.size(-1);
            const Strided<const T> weight = square_of<T>(W, h);
            const Recurrence<T> call(times, h, threads);
            expect(out.dims() == g.dims() && std::equal(out.shape(), out.shape() + out.dims(), g.shape()),
                   "the states should have the shape of their gradient, ", g, "; got ", out);
            expect(h0.has_shape({call.batch(), h}), "`h0` should have shape (", call.batch(), ", ", h, "); got ", h0);
            const Tensor dx = g.new_contiguous(), dh0 = needs_h0 ? h0.new_contiguous() : Tensor();
            const Tensor dbias = needs_bias ? g.new_pooled({h}) : Tensor();
            by_activation(f, [&](auto activation) {
                nb::gil_scoped_release release;
                call.template backward<decltype(activation)::value>(g.data<const T>(), weight, out.data<const T>(), dx.data<T>(),
                                                            dh0.data<T>(), dbias.data<T>());
            });
            return nb::object(nb::make_tuple(dx.object, dh0.or_none(), dbias.or_none()));
        });
    });
}

} // namespace fasth
