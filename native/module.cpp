// The Python module.
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "calls.hpp"
#include "graphs.hpp"

using namespace fasth;

namespace {

// To be called once, before anything else. `table` is the capsule that torch.Tensor has for DLPack, or None.
void connect(nb::handle tensor, nb::handle parameter, nb::handle float32, nb::handle float64, nb::handle empty_like,
             nb::handle in_rows, nb::handle table) {
    Torch found{tensor.ptr(), parameter.ptr(), float32.ptr(), float64.ptr(), empty_like.ptr(), in_rows.ptr()};
    if (!table.is_none()) {
        const auto *const functions = static_cast<const ExchangeTable *>(PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api"));
        if (!functions) throw nb::python_error();
        if (functions->major == 1) found.read = functions->read, found.to_object = functions->to_object;
    }
    for (PyObject *object : {found.tensor, found.parameter, found.float32, found.float64, found.empty_like, found.in_rows})
        Py_INCREF(object);
    fasth::torch = found;
}

// Likewise, before an operator is called. `watchers` is a tuple of functions.
void connect_graphs(nb::object watchers, nb::object forward_mode, nb::object threads) {
    if (!PyTuple_Check(watchers.ptr())) throw nb::type_error("the watchers should be a tuple");
    watch = {std::move(watchers), std::move(forward_mode), std::move(threads)};
}

PyType_Slot kept_weight_slots[] = {{Py_tp_traverse, reinterpret_cast<void *>(&KeptWeight::traverse)},
                                   {Py_tp_clear, reinterpret_cast<void *>(&KeptWeight::clear)},
                                   {0, nullptr}};

// Whether the module was made before, and its classes with it. Then they are this one's, too.
template <class T> bool known(nb::module_ &m, const char *name) {
    const nb::handle type = nb::type<T>();
    if (type.is_valid()) m.attr(name) = type;
    return type.is_valid();
}

} // namespace

NB_MODULE(FASTH_MODULE, m) {
#if !defined(_WIN32)
    pthread_atfork(nullptr, nullptr, [] {
        forked = true;
        pool.forget();
    });
#endif
    m.attr("isa") = FASTH_ISA;
#ifdef _OPENMP
    m.attr("openmp") = true;
#else
    m.attr("openmp") = false;
#endif
    const auto some = nb::arg();
    const auto any = nb::arg().none(); // or None
    m.def("connect", &connect, some, some, some, some, some, some, any);
    m.def("connect_graphs", &connect_graphs);
    m.def("plain", &plain);
    m.def("contains", &contains);
    m.def("plain_householder", &plain_householder, any, any);
    m.def("plain_svd_linear", &plain_svd_linear, any, any, any, any, any, any, some);
    const auto of_identity = nb::arg("of_identity") = false;
    m.def("householder", &householder, some, some, some, some, some, some, some, of_identity);
    m.def("householder_backward", &householder_backward, some, any, some, any, some, some, some, some, some, some, of_identity);
    m.def("kept_sizes", &kept_sizes);
    m.def("householder_keeps_states", &householder_keeps_states);
    m.def("svd_keeps_states", &svd_keeps_states);
    m.def("new_kept", &new_kept);
    m.def("svd_linear", &svd_linear, some, some, some, any, any, any, some, some, some, some, some, some);
    m.def("svd_linear_backward", &svd_linear_backward, some, some, some, some, any, any, any, any, some, some, some, some,
          some, some, some);
    if (!known<Operator>(m, "Operator"))
        nb::class_<Operator>(m, "Operator").def(nb::init<const std::string &, nb::object>()).def("__call__", &Operator::operator());
    if (!known<KeptWeight>(m, "KeptWeight"))
        nb::class_<KeptWeight>(m, "KeptWeight", nb::type_slots(kept_weight_slots))
            .def(nb::init<std::int64_t, nb::handle, const nb::sequence &>())
            .def("linear", &KeptWeight::linear_or_none, some, any, some)
            .def("dense", &KeptWeight::dense)
            .def("forget", &KeptWeight::forget);
    nb::set_leak_warnings(false); // at exit, torch and Python unload in an order that no module can influence
}
