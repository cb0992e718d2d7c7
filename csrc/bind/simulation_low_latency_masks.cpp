// Masks in the simulated cluster: who is left out, hears of it, and may write no more; what the driver does of it.
#include <algorithm>

#include "bind/simulation_low_latency_world.hpp"

namespace expertwire::simulation {

using exchange::Kind;

// Who of those that this rank leaves out may still write, as the driver looks at each step.
void LowLatencyWorld::look_for_late_rows(std::uint32_t rank) {
    using LateRows = exchange::LowLatency::LateRows;
    exchange::LowLatency& exchange = *members_[rank].exchange;
    for (std::uint32_t other = 0; other < ranks(); ++other) {
        if (!exchange.masked(other)) continue;
        const exchange::LowLatencyTold told = members_[other].exchange->told(rank).told;
        const bool ended = members_[other].gave_up || members_[other].deed == script_.deeds[other].size();
        if (ended) not_yet(other);
        // Who has taken this one in writes nothing before it hears from it, for there was a call in between.
        const bool quiet =
            told == exchange::LowLatencyTold::left_out_quiet || told == exchange::LowLatencyTold::taken_in;
        LateRows late = quiet ? LateRows::none : LateRows::may_come;
        if (ended && members_[other].exchange->quiet(rank)) late = LateRows::never;
        exchange.set_late_rows(other, late);
    }
}

// As the driver asks before each call: has somebody left this rank out?
bool LowLatencyWorld::may_begin(std::uint32_t rank) {
    const exchange::LowLatency& exchange = *members_[rank].exchange;
    hear(rank, exchange.epoch() + 1);
    for (std::uint32_t other = 0; other < ranks(); ++other) {
        if (!exchange.masked(other) && members_[other].exchange->told(rank).leaves_out()) return false;
    }
    return true;
}

// Once nothing is on its way to it, as the driver has it.
bool LowLatencyWorld::unmask(std::uint32_t rank, std::uint32_t other) {
    exchange::LowLatency& exchange = *members_[rank].exchange;
    if (members_[other].refused) {
        leave_out(rank, other);
        return true;
    }
    if (!exchange.quiet(other)) not_yet(rank);
    if (!exchange.quiet(other)) return false;
    exchange.mask(other, false);
    return true;
}

void LowLatencyWorld::leave_out(std::uint32_t rank, std::uint32_t other) {
    Member& member = members_[rank];
    const bool for_good = impatient_ || members_[other].refused;
    for (std::size_t step = 0; step < member.calls.size(); ++step) {
        const auto& operation = member.calls[step].operation;
        if (operation ? operation->leave_out(other) : for_good) script_.apart[step][rank * ranks() + other] = 1;
    }
    member.exchange->mask(other, true);
    spoil(rank, other);
}

// What is given up may be overwritten from now on, and is.
void LowLatencyWorld::spoil(std::uint32_t rank, std::uint32_t other) {
    Member& member = members_[rank];
    for (const exchange::LowLatency::GivenUp& gone : member.exchange->given_up(other)) {
        const std::size_t step = gone.call - first_epoch_ - 1;
        // Zero-copy rows of others lie between those.
        if (script_.steps[step].kind == Kind::combine && member.calls[step].x.empty()) continue;
        std::fill(member.data.begin() + static_cast<std::ptrdiff_t>(gone.from),
                  member.data.begin() + static_cast<std::ptrdiff_t>(gone.to), std::byte{0x77});
        ++coverage_["given_up"];
    }
}

// A rank leaves this one out of that call: it does the same, as the driver's error would have it. Not where it has just
// taken that rank in again, which may not have done so yet.
bool LowLatencyWorld::hear(std::uint32_t rank, std::uint64_t epoch) {
    const exchange::LowLatency& exchange = *members_[rank].exchange;
    bool heard = false;
    for (std::uint32_t other = 0; other < ranks(); ++other) {
        const exchange::LowLatencyWord told = members_[other].exchange->told(rank);
        if (exchange.masked(other) || !told.leaves_out() || told.call > epoch) continue;
        if (exchange.taken_in(other) > 0 && exchange.taken_in(other) + 1 == epoch) continue;
        heard = true;
        ++coverage_["heard_that_it_is_out"];
        leave_out(rank, other);
    }
    return heard;
}

// Most often while rows are on their way there.
bool LowLatencyWorld::lose_patience(std::uint32_t rank, std::size_t at) {
    if (!impatient_) return false;
    std::vector<std::uint32_t> missing;
    for (const exchange::LowLatencyPeer& peer : members_[rank].calls[at].operation->progress()) {
        const double chance = members_[rank].exchange->quiet(peer.rank) ? 0.0003 : 0.03;
        if (peer.rank != rank && !peer.missing.empty() && patience_.chance(chance)) missing.push_back(peer.rank);
    }
    if (missing.empty()) return false;
    ++coverage_["masked_in_a_call"];
    leave_out(rank, missing[patience_.below(missing.size())]);
    return true;
}

// Nothing moves: who was refused for good is missed by all others. True: by somebody.
bool LowLatencyWorld::deadline() {
    bool missed = false;
    for (std::uint32_t rank = 0; rank < ranks(); ++rank) {
        for (std::uint32_t other = 0; other < ranks(); ++other) {
            if (members_[rank].gave_up || !members_[other].refused || members_[rank].exchange->masked(other)) continue;
            leave_out(rank, other);
            missed = true;
        }
    }
    return missed;
}

}  // namespace expertwire::simulation
