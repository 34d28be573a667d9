// Shares out one call over threads: matrices of a batch, or parts of the rows, for teams of members.
#pragma once

#include "layout.hpp"

namespace fasth {

// One team does the matrices of a batch in turn, or, if there are many, each thread does its own matrices. Many rows of one
// matrix are split into parts, and a part passes all blocks before the next part: its data stays in the caches, and teams
// that share out the parts need no barrier. Each team has its own sum of the gradient of V, so there are few teams.
struct Schedule {
    static constexpr int most_teams = 4; // teams that share a matrix
    Index batch, m, packet;
    Index parts = 1;
    int teams = 1, members = 1;

    // `operations`: multiplications and additions. `bytes`, `panels`: of the reflectors.
    template <class T>
    Schedule(const Problem<T> &p, Index batch, Index operations, Index bytes, Index panels, int threads, bool back)
        : batch(batch), m(p.m), packet(p.packet) {
        threads = threads_for(operations, threads);
        if (batch >= threads)
            teams = int(std::clamp<Index>(batch, 1, threads));
        else
            members = int(std::min<Index>(threads, panels));
        if (batch == 1 && !p.few_rows && !p.has_A) take_parts(bytes, panels, threads, back);
    }
    static int threads_for(Index operations, int threads) {
        return forked || operations < Index(1) << 19 ? 1 : threads; // too few operations to share out
    }
    Schedule on_one_thread() const {
        Schedule same = *this;
        same.teams = same.members = 1;
        return same;
    }
    int threads() const { return teams * members; }
    Index start(Index part) const { return std::min(m, packets() * part / parts * packet); }
    Index largest_part() const { return std::min(m, (packets() + parts - 1) / parts * packet); }

    // Makes the product for one part of its rows, done by a team, which has done other parts before unless `is_first`.
    template <class T> Problem<T> part_of(Problem<T> p, Index part, int team, bool is_first) const {
        if (parts == 1) return p;
        p.is_part = true;
        p.first = start(part);
        p.m = start(part + 1) - p.first;
        p.continues = !is_first;
        p.adds |= p.continues;
        p.shares |= team > 0; // the rest of a team's own sum is not read
        return p;
    }

  private:
    Index packets() const { return (m + packet - 1) / packet; }
    // Every team reads all of V for every part, and a sum of the same size in backward. This pays if V stays in the caches, or
    // rows are many.
    void take_parts(Index bytes, Index panels, int threads, bool back) {
        constexpr Index most_rows = 128, most_sums = Index(64) << 20;
        const Index near = Index(back ? 1 : 4) << 20;
        const Index least_rows = bytes > near ? 256 : back && bytes > near / 4 ? 64 : 32; // for a team
        const Index most = std::min<Index>({most_teams, threads, m / least_rows, 1 + most_sums / std::max<Index>(bytes, 1)});
        if (most == 0) return;
        int best_teams = 1, best_members = 1;
        for (int count = 1; count <= most; ++count) {
            const int each = int(std::min<Index>(threads / count, panels));
            if (count * each >= best_teams * best_members) best_teams = count, best_members = each;
        }
        const Index count = round_up((m + most_rows - 1) / most_rows, best_teams);
        if (count > 1) parts = count, teams = best_teams, members = best_members;
    }
};

} // namespace fasth
