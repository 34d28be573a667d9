#include <Eigen/Core>
#include <nanobind/nanobind.h>
#include <vector>

namespace nb = nanobind;

// A stub that shows the build works: trace of (2 I)(2 I) of size n.
static double trace(int n) {
    Eigen::MatrixXf a = 2 * Eigen::MatrixXf::Identity(n, n), b = a * a;
    std::vector<double> sums(n);
#pragma omp parallel for
    for (int i = 0; i < n; ++i) sums[i] = b(i, i);
    double total = 0;
    for (double s : sums) total += s;
    return total;
}

NB_MODULE(FASTH_MODULE, m) {
    m.attr("isa") = FASTH_ISA;
    m.def("trace", &trace, nb::call_guard<nb::gil_scoped_release>());
}
