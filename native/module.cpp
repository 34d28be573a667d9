// The Python module.
#if !defined(_WIN32)
#include <pthread.h>
#endif

#include "recurrence_calls.hpp"

using namespace fasth;

namespace {

// Has to be called once, before any other function. `table` is the capsule torch.Tensor.__dlpack_c_exchange_api__.
void connect(nb::handle tensor, nb::handle parameter, nb::handle empty_like, nb::handle contiguous_empty_like,
             nb::handle table) {
    void *const pointer = PyCapsule_GetPointer(table.ptr(), "dlpack_exchange_api");
    const auto *const functions = static_cast<const ExchangeTable *>(pointer);
    if (!functions) throw nb::python_error();
    if (functions->major != 1) throw nb::import_error("PyTorch's table of DLPack functions should be of version 1");
    for (nb::handle object : {tensor, parameter, empty_like, contiguous_empty_like}) object.inc_ref();
    fasth::torch = {tensor.ptr(),    parameter.ptr(), empty_like.ptr(), contiguous_empty_like.ptr(),
                    functions->read, functions->to_object};
}

} // namespace

NB_MODULE(FASTH_MODULE, m) {
#if !defined(_WIN32)
    pthread_atfork(nullptr, nullptr, [] {
        forked = true;
        pool.reset_after_fork();
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
    m.def("connect", &connect);
    m.def("accepts", &accepts);
    m.def("householder", &householder, some, some, some, some);
    m.def("householder_backward", &householder_backward, some, any, some, some, some, some, some);
    m.def("svd_linear", &svd_linear, some, some, any, any, any, some, some);
    m.def("svd_linear_backward", &svd_linear_backward, some, any, some, any, any, some, some, some, some);
    m.def("recurrence", &recurrence, some, any, some, some, any, some, some, some);
    m.def("recurrence_backward", &recurrence_backward, some, any, some, some, some, some, some, some, some, some);
    nb::set_leak_warnings(false); // at exit, torch and Python unload in an order that no module can influence
}
