// The operators of PyTorch that compiled graphs call: at once, for the commonest arguments and where nobody else has a say,
// and by PyTorch's dispatcher otherwise. The dispatcher takes the arguments from Python to C++ and back; that, and the same
// questions asked in Python, take as long as a small product.
#pragma once

#include <nanobind/stl/array.h>

#include <memory>
#include <unordered_map>
#include <variant>
#include <vector>

#include "calls.hpp"
#include "packed.hpp"

namespace fasth {

// What graphs need of the running PyTorch.
struct Watch {
    nb::object watchers;     // functions, each of which says whether somebody is to see every operation
    nb::object forward_mode; // a module, with the level of differentiation in forward mode, or -1
    nb::object threads;      // how many may be used

    bool anybody() const {
        static const Name level("_current_level");
        for (Py_ssize_t i = 0, count = PyTuple_GET_SIZE(watchers.ptr()); i < count; ++i)
            if (PyObject_IsTrue(nb::steal(owned(PyObject_CallNoArgs(PyTuple_GET_ITEM(watchers.ptr(), i)))).ptr())) return true;
        return nb::cast<int>(nb::steal(owned(PyObject_GetAttr(forward_mode.ptr(), level.text)))) >= 0;
    }
    int most_threads() const { return nb::cast<int>(nb::steal(owned(PyObject_CallNoArgs(threads.ptr())))); }
};
inline Watch &watch = *new Watch; // never destroyed, as the pool

// How much is kept of how many rows, and from how many on the matrix is formed: `sizes` of ops.py.
struct Sizes {
    std::array<Index, 11> numbers;
    explicit Sizes(nb::handle sizes) : numbers(nb::cast<std::array<Index, 11>>(sizes)) {}

    bool applies(Index rows) const { return rows < numbers[10] && numbers[7] > 0; }
    Index kept(Index rows) const {
        const auto [few, a, b, a_Z, b_Z, c, d, packet, formed_rows, formed_size, crossover] = numbers;
        const Index whole = round_up(rows, packet);
        return std::min(rows <= few ? a + b * whole : a_Z + b_Z * whole, c + d * rows);
    }
};

// Operators have no optional results.
inline nb::object none_as_empty(const nb::object &results, const Tensor &like) {
    const std::size_t count = nb::len(results);
    nb::object all = nb::steal(owned(PyTuple_New(Py_ssize_t(count))));
    for (std::size_t i = 0; i < count; ++i) {
        nb::object one = results[i];
        if (one.is_none()) one = like.new_pooled(0).object;
        PyTuple_SET_ITEM(all.ptr(), Py_ssize_t(i), one.release().ptr());
    }
    return all;
}
// Where a forward pass keeps what the backward pass needs, or False.
inline nb::object memory_for(const Tensor &x, const Sizes &sizes, Index rows, nb::handle keep) {
    return keep.ptr() == Py_True ? x.new_pooled(sizes.kept(rows)).object : nb::borrow(Py_False);
}

// Each takes the arguments of the operator of its name, and gives nothing back where the dispatcher is to do it.

inline nb::object householder_forward(const nb::args &a) {
    const auto plain = plain_householder(a[0], a[1]);
    const Sizes sizes(a[5]);
    if (!plain || !sizes.applies((*plain)[0]) || !PyBool_Check(a[6].ptr())) return {};
    const Tensor x(a[0]);
    const nb::object keep = memory_for(x, sizes, (*plain)[0], a[6]);
    const int kind = nb::cast<int>(a[3]);
    return none_as_empty(
        householder(a[0], a[1], nb::cast<bool>(a[2]), kind, nb::cast<Index>(a[4]), watch.most_threads(), keep, false), x);
}

inline nb::object householder_backward_at_once(const nb::args &a) {
    const auto plain = is_plain(a[1]) && is_plain(a[3]) ? plain_householder(a[0], a[2]) : std::nullopt;
    if (!plain || !Sizes(a[7]).applies((*plain)[0])) return {};
    const auto found = householder_backward(a[0], a[1], a[2], a[3], nb::cast<bool>(a[4]), nb::cast<int>(a[5]), nb::cast<Index>(a[6]),
                                            watch.most_threads(), nb::cast<bool>(a[8]), nb::cast<bool>(a[9]), false);
    return none_as_empty(found, Tensor(a[0]));
}

inline nb::object svd_linear_forward(const nb::args &a) {
    const auto [U_block, V_block] = nb::cast<std::array<Index, 2>>(a[7]);
    const auto call = plain_call(a[0], a[1], a[2], a[3], a[4], a[5], false, nb::cast<int>(a[6]), U_block, V_block);
    const Sizes sizes(a[8]);
    if (!call || !sizes.applies(call->x.count()) || !PyBool_Check(a[9].ptr())) return {};
    const nb::object keep = memory_for(call->x.tensor, sizes, call->x.count(), a[9]);
    return none_as_empty(multiply(*call, watch.most_threads(), keep), call->x.tensor);
}

inline nb::object svd_linear_backward_at_once(const nb::args &a) {
    if (!is_plain(a[0]) || !is_plain(a[7])) return {};
    const auto [U_block, V_block] = nb::cast<std::array<Index, 2>>(a[9]);
    const auto call = plain_call(a[1], a[2], a[3], a[4], a[5], a[6], false, nb::cast<int>(a[8]), U_block, V_block);
    if (!call || !Sizes(a[10]).applies(call->x.count())) return {};
    return with_saved([&] {
        const Rows g(Tensor(a[0]), false);
        const auto found = gradients(g, *call, a[7], false, watch.most_threads(), nb::borrow<nb::sequence>(a[11]));
        return none_as_empty(found, g.tensor);
    });
}

// A weight that a layer keeps for inference, packed, and what it was made of. Operators find it by the layer's number until
// it is forgotten.
class KeptWeight {
  public:
    // `made_of`: (tensor, version, address) for each tensor.
    KeptWeight(std::int64_t number, nb::handle weight, const nb::sequence &made_of) : number(number) {
        for (nb::handle one : made_of)
            parts.push_back({nb::borrow(one[0]), nb::cast<std::int64_t>(one[1]), nb::cast<std::uintptr_t>(one[2])});
        const Tensor W = Tensor(weight).in_rows();
        expect(W.here() && W.dims() == 2 && W.of_float() && !parts.empty(), "a weight should be a matrix, made of something");
        if (W.of<double>())
            panels = std::make_shared<const Panels<double>>(W.size(0), W.size(1), W.data<const double>());
        else
            panels = std::make_shared<const Panels<float>>(W.size(0), W.size(1), W.data<const float>());
        all()[number] = this;
    }
    ~KeptWeight() { forget(); }
    void forget() {
        const auto found = all().find(number);
        if (found != all().end() && found->second == this) all().erase(found);
    }
    KeptWeight(const KeptWeight &) = delete;
    KeptWeight &operator=(const KeptWeight &) = delete;

    static const KeptWeight *of(std::int64_t number) {
        const auto found = all().find(number);
        return found == all().end() ? nullptr : found->second;
    }

    // Whether these are the tensors that it was made of, and have not changed.
    bool is_made_of(nb::handle tensors) const {
        static const Name version("_version");
        if (nb::len(tensors) != parts.size()) return false;
        std::size_t i = 0;
        for (nb::handle t : tensors) {
            const Part &part = parts[i++];
            if (!t.is(part.tensor)) return false;
            if (nb::cast<std::int64_t>(nb::steal(owned(PyObject_GetAttr(t.ptr(), version.text)))) != part.version) return false;
            if (reinterpret_cast<std::uintptr_t>(Tensor(t).data<const char>()) != part.address) return false;
        }
        return true;
    }

    // x Wᵀ + bias.  x: (*, m) → (*, n). Nothing where the arguments are not plain, or do not fit.
    nb::object linear(nb::handle x, nb::handle bias, int threads) const {
        const auto kept = panels; // holds them, while another thread may have Python
        if (!is_plain(x) || !(bias.is_none() || is_plain(bias))) return {};
        return std::visit([&](const auto &panels) { return multiply(*panels, Tensor(x), Tensor(bias).in_rows(), threads); }, kept);
    }

    nb::object linear_or_none(nb::handle x, nb::handle bias, int threads) const {
        const nb::object out = linear(x, bias, threads);
        return out.is_valid() ? out : nb::none();
    }

    nb::object dense() const {
        expect(!parts.empty(), "the weight is no more");
        const Tensor like(parts[0].tensor);
        return std::visit(
            [&](const auto &panels) {
                using T = typename std::decay_t<decltype(*panels)>::Number;
                const Tensor W = like.new_empty({panels->n, panels->m});
                expect_dtype<T>(W);
                panels->unpack(W.data<T>());
                return W.object;
            },
            panels);
    }

    // For the garbage collector: a tensor may refer to a layer that keeps this.
    static int traverse(PyObject *self, visitproc visit, void *arg) {
        Py_VISIT(Py_TYPE(self));
        if (nb::inst_ready(self))
            for (const Part &part : nb::inst_ptr<KeptWeight>(self)->parts) Py_VISIT(part.tensor.ptr());
        return 0;
    }
    static int clear(PyObject *self) {
        KeptWeight &weight = *nb::inst_ptr<KeptWeight>(self);
        weight.forget();
        std::vector<Part>().swap(weight.parts);
        return 0;
    }

  private:
    struct Part {
        nb::object tensor;
        std::int64_t version;
        std::uintptr_t address;
    };
    std::int64_t number;
    std::vector<Part> parts;
    std::variant<std::shared_ptr<const Panels<float>>, std::shared_ptr<const Panels<double>>> panels;

    static std::unordered_map<std::int64_t, const KeptWeight *> &all() {
        static auto &weights = *new std::unordered_map<std::int64_t, const KeptWeight *>;
        return weights;
    }

    template <class T> static nb::object multiply(const Panels<T> &panels, Tensor x, const Tensor &bias, int threads) {
        if (!x.of<T>() || x.dims() < 1 || x.size(-1) != panels.m) return {};
        if (bias.here() && !(bias.of<T>() && bias.dims() == 1 && bias.size(0) == panels.n)) return {};
        const Rows rows(std::move(x), false), out = rows.new_of_width(panels.n);
        const auto from = rows.all<const T>();
        {
            nb::gil_scoped_release release;
            panels.multiply(rows.count(), from, bias.data<const T>(), out.tensor.data<T>(), threads);
        }
        return out.tensor.object;
    }
};

inline nb::object kept_linear(const nb::args &a) {
    const Tensor number(a[3]);
    if (!number.on_cpu() || !number.has_memory() || number.dims() != 0 || number.bytes() != sizeof(std::int64_t)) return {};
    const KeptWeight *const weight = KeptWeight::of(*number.data<const std::int64_t>());
    return weight && weight->is_made_of(a[1]) ? weight->linear(a[0], a[2], watch.most_threads()) : nb::object();
}

// Operators by name, and how many arguments each has.
struct AtOnce {
    const char *name;
    std::size_t arguments;
    nb::object (*call)(const nb::args &);
};
constexpr AtOnce at_once[] = {
    {"householder_forward", 7, householder_forward},
    {"householder_backward", 10, householder_backward_at_once},
    {"svd_linear_forward", 10, svd_linear_forward},
    {"svd_linear_backward", 12, svd_linear_backward_at_once},
    {"kept_linear", 5, kept_linear},
};

class Operator {
  public:
    Operator(const std::string &name, nb::object dispatched) : dispatched(std::move(dispatched)) {
        for (const AtOnce &one : at_once)
            if (name == one.name) found = &one;
        expect(found, "no operator has this name");
    }
    nb::object operator()(const nb::args &arguments, const nb::kwargs &named) const {
        if (arguments.size() == found->arguments && named.size() == 0 && !watch.anybody()) {
            try {
                if (nb::object out = found->call(arguments); out.is_valid()) return out;
            } catch (const std::bad_cast &) { // an argument of another type, of which the dispatcher knows the name
            }
        }
        return dispatched(*arguments, **named);
    }

  private:
    nb::object dispatched;
    const AtOnce *found = nullptr;
};

} // namespace fasth
