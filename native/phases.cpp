// Where the time goes: the share of each phase of a forward and a backward pass with 32 rows. `make phases` builds it and
// runs it: phases [d] [threads] [triangular | full] [block size]
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <x86intrin.h>

namespace fasth_phases {
enum Name { rows, pack, S, gram, barrier, invert, Z, save, update, antisymmetric, gradient, clear, count };
const char *const names[] = {"rows in and out", "pack edges", "S = A Yᵀ", "G = Y Yᵀ", "barrier, reduction", "T = B⁻¹", "Z = S T",
                             "save Z", "A − Z Y", "N", "∂Y", "zeros in ∂V"};
std::array<unsigned long long, count> cycles;
thread_local bool watched = false;
thread_local Name current = count;
thread_local unsigned long long since = 0;
// Phases may nest: time belongs to the innermost.
struct Phase {
    Name outer = current;
    explicit Phase(Name name) { switch_to(name); }
    ~Phase() { switch_to(outer); }
    static void switch_to(Name name) {
        const auto now = __rdtsc();
        if (watched && current != count) cycles[current] += now - since;
        current = name;
        since = now;
    }
};
} // namespace fasth_phases
#define FASTH_JOIN(a, b) a##b
#define FASTH_UNIQUE(line) FASTH_JOIN(phase_at_, line)
#define FASTH_PHASE(name) fasth_phases::Phase FASTH_UNIQUE(__LINE__)(fasth_phases::name)

#include "run.hpp"

using namespace fasth;

template <class Work> double seconds(const Work &work, int repetitions) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repetitions; ++i) work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / repetitions;
}

int main(int argc, char **argv) {
    const Index m = 32, d = argc > 1 ? std::atol(argv[1]) : 512, k = argc > 4 ? std::atol(argv[4]) : 32;
    const int threads = argc > 2 ? std::atoi(argv[2]) : 1;
    const Form form = argc > 3 && argv[3][0] == 'f' ? Form::full : Form::triangular;
    std::mt19937 generator(0);
    std::normal_distribution<float> normal;
    const auto draw = [&](Index n) {
        auto *const v = static_cast<float *>(::operator new(std::size_t(n) * sizeof(float), std::align_val_t(64)));
        std::generate(v, v + n, [&] { return normal(generator); });
        return v;
    };
    auto x = draw(m * d), V = draw(d * d), g = draw(m * d), out = draw(m * d), dx = draw(m * d), dV = draw(d * d);
    Problem<float> p{m, d, d, form, false, k, panel_for(d)};
    p.has_A = m <= k;
    Saved<float> saved(p, d);
    saved.all_T = draw(saved.T_size());
    saved.all_scales = draw(saved.blocks * saved.K);
    saved.Z = draw(saved.blocks * saved.M * saved.K);
    if (p.has_A) saved.A = draw(saved.blocks * saved.D * saved.M);
    const auto rows = [&](auto *data) { return Batch<std::remove_pointer_t<decltype(data)>>{data, 0, d, 1}; };
    const auto pass = [&](bool back) {
        const Schedule schedule(p, 1, m * d * d, 4 * d * d, p.panels(), threads, back);
        const Product<float> product{p, {V, 0, d, 1}, saved, {back ? dV : nullptr, 0, d, 1}};
        const Call<float, 1> call{schedule, {product}, !back, back, {}};
        if (back)
            backward(call, {g, 0, d, 1}, {out, 0, d, 1}, rows(dx));
        else
            forward(call, {x, 0, d, 1}, rows(out));
    };
    fasth_phases::watched = true; // this thread, which is the first member
    const int repetitions = int(std::max<Index>(5, 400 * 512 * 512 / (d * d)));
    pass(false), pass(true);
    for (const bool back : {false, true}) {
        fasth_phases::cycles.fill(0);
        const double t = seconds([&] { pass(back); }, repetitions) * 1e6;
        double total = 0;
        for (auto c : fasth_phases::cycles) total += double(c);
        std::printf("%s, d = %td, %d threads: %.1f µs\n", back ? "backward" : "forward", d, threads, t);
        for (std::size_t i = 0; i < fasth_phases::count; ++i)
            if (const double share = double(fasth_phases::cycles[i]) / total; share > 0)
                std::printf("  %5.1f %%  %8.1f µs  %s\n", 100 * share, t * share, fasth_phases::names[i]);
    }
}
