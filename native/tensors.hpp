// CPU tensors of PyTorch, read where they lie and made anew, without its headers: through the table of functions that
// DLPack defines for that, or, where an older PyTorch has none, through the tensors' own methods.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "pool.hpp"
#include "products.hpp"

namespace fasth {

namespace nb = nanobind;

// DLManagedTensorVersioned and DLPackExchangeAPI of DLPack's version 1. Reading a tensor lends its sizes and strides, and
// allocates nothing.
struct Managed {
    std::uint32_t major, minor;
    void *context;
    void (*deleter)(Managed *);
    std::uint64_t flags;
    nb::dlpack::dltensor view;
};
struct ExchangeTable {
    std::uint32_t major, minor;
    void *previous, *allocator, *from_object;
    int (*to_object)(Managed *, void **object);
    int (*read)(void *object, nb::dlpack::dltensor *out);
    void *stream;
};

// What is needed of the running PyTorch. It stays for as long as the process does.
struct Torch {
    PyObject *tensor = nullptr, *parameter = nullptr, *float32 = nullptr, *float64 = nullptr;
    PyObject *empty_like = nullptr, *in_rows = nullptr; // in_rows: a tensor as x.contiguous() is
    decltype(ExchangeTable::read) read = nullptr;
    decltype(ExchangeTable::to_object) to_object = nullptr;
};
inline Torch torch;
inline Pool &pool = *new Pool; // never destroyed: tensors may be freed as late as that

inline PyObject *owned(PyObject *object) {
    if (!object) throw nb::python_error();
    return object;
}
struct Name { // of a method, made once
    PyObject *const text;
    explicit Name(const char *text) : text(owned(PyUnicode_InternFromString(text))) {}
};
inline nb::object call(const Name &method, nb::handle object) {
    return nb::steal(owned(PyObject_CallMethodNoArgs(object.ptr(), method.text)));
}
inline nb::object call(const Name &method, nb::handle object, nb::handle argument) {
    return nb::steal(owned(PyObject_CallMethodOneArg(object.ptr(), method.text, argument.ptr())));
}
inline nb::object call(PyObject *function, nb::handle argument) {
    return nb::steal(owned(PyObject_CallOneArg(function, argument.ptr())));
}

// A tensor, or None: then nothing but `here` may be asked for.
class Tensor {
  public:
    nb::object object;

    Tensor() = default;
    explicit Tensor(nb::handle source) : object(nb::borrow(source)) {
        if (source.is_none()) object = nb::object();
        if (here()) read();
    }
    Tensor(Tensor &&) = default;
    Tensor &operator=(Tensor &&) = default;

    bool here() const { return object.is_valid(); }
    int dims() const { return view.ndim; }
    Index size(int i) const { return view.shape[i < 0 ? i + view.ndim : i]; }
    Index stride(int i) const { return view.strides[i < 0 ? i + view.ndim : i]; }
    Index numel() const {
        Index count = 1;
        for (int i = 0; i < view.ndim; ++i) count *= view.shape[i];
        return count;
    }
    // All but the last dimension as one.
    Index rows() const { return size(-1) ? numel() / size(-1) : 0; }
    bool contiguous() const {
        Index step = 1;
        for (int i = view.ndim - 1; i >= 0; --i) {
            if (view.shape[i] != 1 && view.strides[i] != step) return numel() == 0;
            step *= view.shape[i];
        }
        return true;
    }
    bool on_cpu() const { return view.device.device_type == int(nb::device::cpu::value); }
    template <class T> bool of() const { return view.dtype.code == floating && view.dtype.bits == 8 * sizeof(T); }
    int bytes() const { return view.dtype.bits / 8; } // of a number
    bool of_float() const { return of<float>() || of<double>(); }
    bool has_memory() const { return view.data != nullptr; }
    template <class T> T *data() const {
        return here() && view.data ? reinterpret_cast<T *>(static_cast<char *>(view.data) + view.byte_offset) : nullptr;
    }
    nb::object or_none() const { return here() ? object : nb::none(); }

    // The same numbers, one after the other in memory.
    Tensor in_rows() && {
        static const Name method("contiguous");
        return !here() || contiguous() ? std::move(*this) : Tensor(call(method, object));
    }
    // New ones of the same shape: one number after the other, or with the same strides.
    Tensor new_rows() const { return Tensor(contiguous() ? like() : call(torch.in_rows, object)); }
    Tensor new_like() const { return Tensor(like()); }
    // The same for what comes and goes with every step: where it is large, in memory of the pool, as long as that has room
    // for other things besides.
    Tensor new_gradient() const {
        const std::size_t size = std::size_t(numel()) * view.dtype.bits / 8;
        const bool pays = size >= std::size_t(1) << 20 && size <= Pool::most_bytes / 2;
        return pays && contiguous() && dims() <= most_pooled_dims ? new_pooled(view.shape, dims()) : new_like();
    }
    Tensor new_empty(std::initializer_list<Index> shape) const { return new_empty(shape.begin(), int(shape.size())); }
    Tensor new_pooled(std::int64_t count) const { return new_pooled(&count, 1); }
    // The shape of this one, but for the last dimension.
    Tensor new_with_last(Index last) const {
        if (last == size(-1) && contiguous()) return new_like(); // the faster call
        std::vector<Index> shape(view.shape, view.shape + dims());
        shape.back() = last;
        return new_empty(shape.data(), dims());
    }

  private:
    static constexpr std::uint8_t floating = 2; // kDLFloat
    static constexpr int most_pooled_dims = 3;
    nb::dlpack::dltensor view{};
    std::vector<std::int64_t> numbers; // sizes and strides, where nothing lends them

    nb::object like() const { return call(torch.empty_like, object); }
    // In memory of the pool, to which it returns when nobody holds the tensor any more.
    Tensor new_pooled(const std::int64_t *shape, int dims) const {
        if (!torch.to_object) return new_empty(std::vector<Index>(shape, shape + dims).data(), dims);
        struct Pooled : Managed {
            Pool::Piece piece;
            std::int64_t shape[most_pooled_dims], strides[most_pooled_dims];
        };
        auto made = std::make_unique<Pooled>();
        std::int64_t count = 1;
        for (int i = dims - 1; i >= 0; --i) {
            made->shape[i] = shape[i], made->strides[i] = count;
            count *= shape[i];
        }
        made->major = 1;
        made->deleter = [](Managed *self) {
            auto *const pooled = static_cast<Pooled *>(self);
            pool.give(pooled->piece);
            delete pooled;
        };
        made->piece = pool.take(std::size_t(count) * view.dtype.bits / 8);
        made->view.data = made->piece.memory;
        made->view.device = view.device;
        made->view.ndim = dims;
        made->view.dtype = view.dtype;
        made->view.shape = made->shape;
        made->view.strides = made->strides;
        void *object = nullptr;
        if (torch.to_object(made.release(), &object) != 0) throw nb::python_error();
        return Tensor(nb::steal(static_cast<PyObject *>(object)));
    }
    Tensor new_empty(const Index *shape, int dims) const {
        static const Name method("new_empty");
        nb::object sizes = nb::steal(owned(PyTuple_New(dims)));
        for (int i = 0; i < dims; ++i) PyTuple_SET_ITEM(sizes.ptr(), i, owned(PyLong_FromLongLong(shape[i])));
        return Tensor(call(method, object, sizes));
    }
    void read() {
        if (!torch.read)
            read_by_methods();
        else if (torch.read(object.ptr(), &view) != 0)
            throw nb::python_error();
    }
    void read_by_methods() {
        static const Name data_ptr("data_ptr"), size("size"), stride("stride");
        const nb::object sizes = call(size, object), strides = call(stride, object), dtype = object.attr("dtype");
        for (const nb::object &list : {sizes, strides})
            for (nb::handle number : list) numbers.push_back(nb::cast<std::int64_t>(number));
        view.ndim = int(numbers.size() / 2);
        view.shape = numbers.data();
        view.strides = numbers.data() + view.ndim;
        view.device.device_type = nb::cast<bool>(object.attr("is_cpu")) ? nb::device::cpu::value : -1;
        view.dtype.code = dtype.ptr() == torch.float32 || dtype.ptr() == torch.float64 ? floating : 0;
        view.dtype.bits = std::uint8_t(8 * nb::cast<int>(dtype.attr("itemsize")));
        view.data = reinterpret_cast<void *>(nb::cast<std::uintptr_t>(call(data_ptr, object)));
    }
};

// Whether what stands in the tensor's memory is all there is to it, in a dtype that the core has. There is none for zeros
// kept as such, or once it was freed.
inline bool is_plain(const Tensor &t, bool may_be_empty = false) {
    static const Name is_neg("is_neg");
    const bool all_there = t.has_memory() || (may_be_empty && t.numel() == 0);
    return t.on_cpu() && t.of_float() && all_there && call(is_neg, t.object).ptr() == Py_False;
}
inline bool has_plain_type(nb::handle object) {
    const PyObject *const type = reinterpret_cast<PyObject *>(Py_TYPE(object.ptr()));
    return type == torch.tensor || type == torch.parameter;
}
inline bool is_plain(nb::handle object) {
    if (!has_plain_type(object)) return false;
    try {
        return is_plain(Tensor(object));
    } catch (nb::python_error &) {
        return false; // a tensor that has outlived its transform refuses to be read
    }
}

} // namespace fasth
