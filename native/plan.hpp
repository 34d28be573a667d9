// Who does what: threads in teams, which take the matrices of a batch, or parts of the rows, in turn.
#pragma once

#include <array>
#include <atomic>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "layout.hpp"

namespace fasth {

// OpenMP's threads do not survive a fork, and starting them anew in the child would wait for ever.
inline std::atomic<bool> forked{false};

struct Plan {
    int teams, members;
};
inline int threads_for(Index operations, int threads) {
    return forked || operations < Index(1) << 19 ? 1 : threads; // the latter: too little to share
}
// A batch is done by one team for all its matrices in turn, or, when there are many, with one matrix a thread.
inline Plan plan_for(Index batch, Index panels, int threads) {
    if (batch >= threads) return {int(std::max<Index>(1, std::min<Index>(threads, batch))), 1};
    return {1, int(std::min<Index>(threads, panels))};
}

// Many rows in parts, each of which goes through all blocks before the next. What a product touches of one stays in the
// caches; and teams that share out the parts meet nobody else on their way. Each has its own sum of the gradient of V, so
// there are only few teams.
struct Parts {
    static constexpr int most_teams = 4;
    static constexpr Index most_rows = 128;             // in a part
    static constexpr Index most_sums = Index(64) << 20; // bytes
    Index m, packet, count = 0; // rows; those that fill a register; parts, or 0 where rows stay together
    Plan plan{1, 1};

    // `V_size` is that of all reflectors, in bytes. Every team reads all of V for every part, and, on the way back, a sum as
    // large. That pays where V is at hand, or rows are many.
    Parts(const Problem &p, Index V_size, Index panels, int threads, bool back) : m(p.m), packet(p.packet) {
        const Index near = Index(back ? 1 : 4) << 20;
        const Index least_rows = V_size > near ? 256 : back && V_size > near / 4 ? 64 : 32; // for a team
        const Index most = std::min<Index>({most_teams, threads, m / least_rows, 1 + most_sums / std::max<Index>(V_size, 1)});
        for (int teams = 1; teams <= most; ++teams) {
            const int members = int(std::min<Index>(threads / teams, panels));
            if (teams * members >= plan.teams * plan.members) plan = {teams, members};
        }
        count = most > 0 ? round_up((m + most_rows - 1) / most_rows, plan.teams) : 0;
    }
    bool pay() const { return count > 1; }
    Index start(Index part) const { return std::min(m, packets() * part / count * packet); }
    // One part of a problem, for a team whose gradients have their place, or, but for the first team, memory of their own.
    Problem of(Problem p, Index part, int team, bool is_first) const {
        p.is_part = true;
        p.first = start(part);
        p.m = start(part + 1) - p.first;
        p.continues = !is_first;
        p.adds = p.continues || (p.adds && team == 0);
        p.shares |= team > 0; // what is left of such memory is nobody's
        return p;
    }
    // As many rows as the largest part has.
    Problem largest(Problem p) const {
        p.is_part = true;
        p.m = std::min(m, (packets() + count - 1) / count * packet);
        return p;
    }

  private:
    Index packets() const { return (m + packet - 1) / packet; }
};

// One thread's place: among all; in its team; and which team that is, of how many.
struct Place {
    Team all, team;
    int number, teams;

    // action(part, whether it is the team's first) for each part that is this team's. They are dealt out from the last, which
    // of the rows of the identity takes the most work.
    template <class Action> void for_parts(const Parts &parts, const Action &action) {
        for (Index turn = 0; turn < parts.count; ++turn) {
            if (dealt_to(turn, teams) != number) continue;
            action(parts.count - 1 - turn, turn < teams);
            team.meet();
        }
    }
};

// run(thread) on so many threads at once. False, and nothing is run, if there are fewer, as inside another parallel region.
template <class Run> bool on_threads(int threads, const Run &run) {
    if (threads == 1) return run(0), true;
    std::atomic<bool> complete{false};
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    {
        if (omp_get_num_threads() == threads) {
            complete.store(true, std::memory_order_relaxed);
            run(omp_get_thread_num());
        }
    }
#endif
    return complete;
}

// Runs work(benches, place) on every thread of the plan, where a bench is what lay_out(team, members, arena) gives, one for
// each team. Says how many members a team had.
template <class LayOut, class Work> int for_teams(const Plan &plan, const LayOut &lay_out, const Work &work) {
    Arena arena;
    std::vector<decltype(lay_out(0, 1, arena))> benches;
    for (const bool counting : {true, false}) {
        benches.clear();
        for (int team = 0; team < plan.teams; ++team) benches.push_back(lay_out(team, plan.members, arena));
        if (counting) arena.provide();
    }
    std::array<Team::Meeting, 1 + Parts::most_teams> meetings;
    const int running = plan.teams * plan.members;
    const auto run = [&](int thread) {
        const int number = thread / plan.members;
        Team::Meeting &own = meetings[std::size_t(plan.members > 1 ? 1 + number : 0)]; // one alone meets nobody
        Place place{{running, thread, meetings[0]}, {plan.members, thread % plan.members, own}, number, plan.teams};
        work(benches, place);
    };
    if (on_threads(running, run)) return plan.members;
    return for_teams({1, 1}, lay_out, work);
}

} // namespace fasth
