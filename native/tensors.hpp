// CPU tensors of PyTorch, read and made without its headers, through the table of functions that DLPack defines for that.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <initializer_list>
#include <memory>
#include <string>

#include "kernels.hpp"
#include "pool.hpp"

namespace fasth {

namespace nb = nanobind;

// DLManagedTensorVersioned and DLPackExchangeAPI of DLPack's version 1. Reading a tensor borrows its sizes and strides, and
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

// Functions of the running PyTorch. They are kept until the process ends.
struct Torch {
    PyObject *tensor, *parameter, *empty_like, *contiguous_empty_like;
    decltype(ExchangeTable::read) read;
    decltype(ExchangeTable::to_object) to_object;
};
inline Torch torch{};
inline Pool &pool = *new Pool; // never destroyed, since tensors may be freed at exit

inline PyObject *owned(PyObject *object) {
    if (!object) throw nb::python_error();
    return object;
}
inline PyObject *interned(const char *name) { return owned(PyUnicode_InternFromString(name)); }
// Uses vectorcall, whose shorter names are not in the stable ABI.
inline nb::object call(PyObject *function, nb::handle argument) {
    PyObject *const arguments[] = {argument.ptr()};
    return nb::steal(owned(PyObject_Vectorcall(function, arguments, 1, nullptr)));
}
inline nb::object call_method(nb::handle object, PyObject *name) {
    PyObject *const arguments[] = {object.ptr()};
    return nb::steal(owned(PyObject_VectorcallMethod(name, arguments, 1, nullptr)));
}
inline nb::object call_method(nb::handle object, PyObject *name, nb::handle argument) {
    PyObject *const arguments[] = {object.ptr(), argument.ptr()};
    return nb::steal(owned(PyObject_VectorcallMethod(name, arguments, 2, nullptr)));
}

// A tensor, or None, for which only `here` and `data` may be called.
class Tensor {
  public:
    nb::object object;

    Tensor() = default;
    explicit Tensor(nb::object source) : object(std::move(source)) {
        if (object.is_none())
            object.reset();
        else if (torch.read(object.ptr(), &view) != 0)
            throw nb::python_error();
    }
    explicit Tensor(nb::handle source) : Tensor(nb::borrow(source)) {}
    Tensor(Tensor &&) = default;
    Tensor &operator=(Tensor &&) = default;

    bool here() const { return object.is_valid(); }
    int dims() const { return view.ndim; }
    const std::int64_t *shape() const { return view.shape; }
    Index size(int i) const { return view.shape[i < 0 ? i + view.ndim : i]; }
    Index stride(int i) const { return view.strides[i < 0 ? i + view.ndim : i]; }
    Index numel() const {
        Index count = 1;
        for (int i = 0; i < view.ndim; ++i) count *= view.shape[i];
        return count;
    }
    // The product of all dimensions but the last.
    Index rows() const { return size(-1) ? numel() / size(-1) : 0; }
    bool has_shape(std::initializer_list<Index> shape) const {
        return dims() == int(shape.size()) && std::equal(shape.begin(), shape.end(), view.shape);
    }
    bool contiguous() const {
        Index step = 1;
        for (int i = view.ndim - 1; i >= 0; --i) {
            if (view.shape[i] != 1 && view.strides[i] != step) return numel() == 0;
            step *= view.shape[i];
        }
        return true;
    }
    template <class T> bool of() const { return view.dtype.code == floating && view.dtype.bits == 8 * sizeof(T); }
    // True if the core can read the tensor. Zero tensors without storage and freed tensors have no memory.
    bool on_cpu() const { return view.device.device_type == int(nb::device::cpu::value); }
    std::string type_name() const { // "float32 on the CPU"
        const int code = view.dtype.code, bits = view.dtype.bits;
        static const char *const kinds[] = {"int", "uint", "float", "handle", "bfloat", "complex"};
        return (code == 6 ? "bool" : kinds[code < 6 ? code : 0] + std::to_string(bits)) + (on_cpu() ? " on the CPU" : " on another device");
    }
    bool has_memory() const { return view.data != nullptr || numel() == 0; }
    template <class T> T *data() const {
        return here() && view.data ? reinterpret_cast<T *>(static_cast<char *>(view.data) + view.byte_offset) : nullptr;
    }
    nb::object or_none() const { return here() ? object : nb::none(); }

    // The tensor itself if it is row-major, else a row-major copy.
    Tensor as_contiguous() && {
        static PyObject *const method = interned("contiguous");
        return !here() || contiguous() ? std::move(*this) : Tensor(call_method(object, method));
    }

    // New tensors of the same dtype: with this shape, row-major; with this shape and strides; with another last dimension.
    Tensor new_contiguous() const { return Tensor(call(contiguous() ? torch.empty_like : torch.contiguous_empty_like, object)); }
    Tensor new_like() const { return Tensor(call(torch.empty_like, object)); }
    Tensor new_with_last(Index last) const {
        if (last == size(-1)) return new_contiguous(); // the faster call
        static PyObject *const method = interned("new_empty");
        nb::object shape = nb::steal(owned(PyTuple_New(dims())));
        for (int i = 0; i < dims(); ++i)
            PyTuple_SetItem(shape.ptr(), i, owned(PyLong_FromLongLong(i + 1 < dims() ? size(i) : last)));
        return Tensor(call_method(object, method, shape));
    }
    // Gradients are allocated at every step. Large gradients are allocated from the pool, if it has room for other tensors
    // too.
    Tensor new_gradient() const {
        const std::size_t size = std::size_t(numel()) * view.dtype.bits / 8;
        const bool pays = size >= std::size_t(1) << 20 && size <= Pool::most_bytes / 2;
        return pays && contiguous() && dims() <= most_pooled_dims ? new_pooled(view.shape, dims()) : new_like();
    }
    // A row-major tensor in memory of the pool.
    Tensor new_pooled(std::initializer_list<std::int64_t> shape) const { return new_pooled(shape.begin(), int(shape.size())); }
    Tensor new_pooled_with_last(Index last) const {
        if (dims() > most_pooled_dims) return new_with_last(last);
        std::int64_t shape[most_pooled_dims];
        std::copy(view.shape, view.shape + dims(), shape);
        shape[dims() - 1] = last;
        return new_pooled(shape, dims());
    }

  private:
    static constexpr std::uint8_t floating = 2; // kDLFloat
    static constexpr int most_pooled_dims = 4;
    nb::dlpack::dltensor view{};

    Tensor new_pooled(const std::int64_t *shape, int dims) const {
        struct Pooled : Managed {
            Pool::Chunk chunk;
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
            pool.give(pooled->chunk);
            delete pooled;
        };
        made->chunk = pool.take(std::size_t(count) * view.dtype.bits / 8);
        made->view.data = made->chunk.memory;
        made->view.device = view.device;
        made->view.ndim = dims;
        made->view.dtype = view.dtype;
        made->view.shape = made->shape;
        made->view.strides = made->strides;
        void *object = nullptr;
        if (torch.to_object(made.release(), &object) != 0) throw nb::python_error();
        return Tensor(nb::steal(static_cast<PyObject *>(object)));
    }
};

// True if every argument that is not None is an unwrapped CPU tensor, all of them float32 or all float64.
inline bool accepts(const nb::args &arguments) {
    static PyObject *const is_neg = interned("is_neg");
    int bits = 0;
    try {
        for (nb::handle argument : arguments) {
            if (argument.is_none()) continue;
            const PyObject *const type = reinterpret_cast<PyObject *>(Py_TYPE(argument.ptr()));
            if (type != torch.tensor && type != torch.parameter) return false;
            const Tensor t(argument);
            const int own_bits = t.of<float>() ? 32 : t.of<double>() ? 64 : 0;
            if (!own_bits || (bits && bits != own_bits) || !t.on_cpu() || !t.has_memory()) return false;
            if (call_method(argument, is_neg).ptr() != Py_False) return false;
            bits = own_bits;
        }
    } catch (nb::python_error &) { // a tensor that has outlived its transform refuses to be read
        return false;
    }
    return true;
}

} // namespace fasth
