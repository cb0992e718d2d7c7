// Who is left out of low-latency calls, how it hears of it, and how it comes back.
#include <algorithm>
#include <utility>

#include "runtime/clock.hpp"
#include "runtime/helping.hpp"
#include "runtime/low_latency_driver.hpp"

namespace expertwire::runtime {

namespace {

constexpr TimeNs kTurnNs = 20'000;          // SPEC T13
constexpr TimeNs kSliceNs = 5'000'000;      // between two looks at what others say
constexpr TimeNs kTokenNs = 500'000'000;    // for the progress token
constexpr TimeNs kPartNs = 500'000'000;     // for rows of earlier calls to reach who is masked by hand
constexpr TimeNs kQuietNs = 2'000'000'000;  // for rows of an old call to end, where somebody comes back
constexpr TimeNs kLastNs = 1'000'000'000;   // for what a process had handed to its kernel to come behind its end

std::string names(const std::vector<std::uint32_t>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (std::size_t at = 0; at < ranks.size(); ++at) {
        if (at > 0) text += at + 1 == ranks.size() ? " and " : ", ";
        text += std::to_string(ranks[at]);
    }
    return text;
}

}  // namespace

// What each rank may know of me, where it changed since.
void LowLatencyDriver::publish(bool now) {
    words_.clear();
    for (std::uint32_t rank = 0; rank < exchange_.nodes().ranks(); ++rank)
        words_.push_back(exchange_.told(rank).word());
    const std::uint64_t call = exchange_.epoch() << 8 | exchange_.stage();
    words_.push_back(call);
    if (words_ == published_) return;
    published_ = words_;
    context_.publish_low_latency(call, std::span(words_).first(words_.size() - 1), now);
}

// Those that go on without this rank from that call on or before it, whether or not they have taken it in again since.
std::vector<std::uint32_t> LowLatencyDriver::who_leave_out(std::uint64_t call) const {
    std::vector<std::uint32_t> found;
    for (std::uint32_t rank = 0; rank < exchange_.nodes().ranks(); ++rank) {
        if (rank == rank_ || exchange_.masked(rank) || context_.unreachable(rank)) continue;
        const auto told = exchange::LowLatencyWord::of(context_.low_latency_told(rank), call);
        const bool missed = told.told == exchange::LowLatencyTold::taken_in && told.call >= call;
        if ((told.leaves_out() && told.call <= call) || missed) found.push_back(rank);
    }
    return found;
}

void LowLatencyDriver::refuse_if_left_out(const std::string& what, std::uint64_t call) {
    const std::vector<std::uint32_t> others = who_leave_out(call);
    if (others.empty()) return;
    const std::string me = std::to_string(rank_);
    const std::string text =
        what + names(others) + (others.size() == 1 ? " has" : " have") + " left this rank out of call " +
        std::to_string(call) +
        ", for want of an answer or because they were told to, and its own calls under way end here. To come back: "
        "low_latency_update_mask_buffer(" +
        me + ", False) on each of them between two of their calls, then the next call here";
    exchange_.abandon(text);
    broken_.clear();
    publish(true);
    throw Failure(FailureKind::excluded, text, static_cast<std::int32_t>(others.front()));
}

// Its rows of an old call may come at any time: it may wake up, and does not know yet that it is out. Also behind its
// end or its farewell, until this rank, which takes them, has had some time of its own for that.
exchange::LowLatency::LateRows LowLatencyDriver::late_rows(std::uint32_t rank) const {
    using LateRows = exchange::LowLatency::LateRows;
    if (context_.ended(rank)) return ended_for_[rank] < kLastNs ? LateRows::may_come : LateRows::never;
    const auto told = exchange::LowLatencyWord::of(context_.low_latency_told(rank), exchange_.epoch());
    return told.told == exchange::LowLatencyTold::left_out_quiet ? LateRows::none : LateRows::may_come;
}

void LowLatencyDriver::look_for_late_rows() {
    const TimeNs now = now_ns();
    const TimeNs passed = awake_ns(looked_ns_, now);
    looked_ns_ = now;
    for (std::uint32_t rank = 0; rank < exchange_.nodes().ranks(); ++rank) {
        if (!exchange_.masked(rank)) continue;
        if (context_.ended(rank)) ended_for_[rank] += passed;
        exchange_.set_late_rows(rank, late_rows(rank));
    }
}

bool LowLatencyDriver::wait_until(const std::function<bool()>& there, TimeNs deadline_ns,
                                  const std::function<void()>& interrupted) {
    Helping helping(context_);
    while (true) {
        const std::uint32_t seen = context_.doorbell().seen();
        if (const TokenGuard guard(context_, now_ns() + kSliceNs); guard) {
            context_.turn_held(kTurnNs);
            std::uint32_t failed = 0;
            Status status = Status::ok;
            exchange_.settle(failed, status);
            if (there()) return true;
        }
        interrupted();
        if (now_ns() >= deadline_ns) return false;
        helping.sleep(seen, kSliceNs);
    }
}

void LowLatencyDriver::begin(const char* what, TimeNs timeout_ns, const std::function<void()>& interrupted) {
    if (!shrink_) return;
    look_for_late_rows();
    const std::uint64_t last = exchange_.epoch();
    const std::uint32_t ranks = exchange_.nodes().ranks();
    std::uint64_t after = last;
    bool stale = false;
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        if (rank == rank_) continue;
        if (exchange_.masked(rank)) continue;
        const auto told = exchange::LowLatencyWord::of(context_.low_latency_told(rank), last);
        // Both take each other in, and its word of it may be under way.
        stale |= told.leaves_out() && last > 0 && exchange_.taken_in(rank) == last;
        if (told.told == exchange::LowLatencyTold::taken_in) after = std::max(after, told.call);
    }
    const std::string where = std::string(what) + " on rank " + std::to_string(rank_) + ": ";
    if (stale) wait_until([&] { return who_leave_out(last + 1).empty(); }, now_ns() + timeout_ns, interrupted);
    if (after == last) return refuse_if_left_out(where, last + 1);
    refuse_if_left_out(where, after + 1);
    exchange_.abandon(where + "this rank was left out, and has come back behind call " + std::to_string(after));
    const auto quiet = [&] {
        for (std::uint32_t rank = 0; rank < ranks; ++rank)
            if (!exchange_.quiet(rank)) return false;
        return true;
    };
    if (!wait_until(quiet, now_ns() + std::min(timeout_ns, kQuietNs), interrupted)) {
        throw Failure(FailureKind::excluded, where +
                                                 "this rank was left out, and rows of a call of before are still on "
                                                 "their way from it: call again later");
    }
    const TokenGuard guard(context_, now_ns() + kTokenNs);
    if (!guard) throw Failure(FailureKind::deadline, where + "the progress token is held for too long");
    exchange_.go_on_after(after);
    context_.turn_held(kTurnNs);
}

void LowLatencyDriver::mask(std::uint32_t rank, bool masked) {
    if (!masked && exchange_.masked(rank) && !context_.unreachable(rank)) {
        const std::string who =
            "rank " + std::to_string(rank) + " cannot be taken in again by rank " + std::to_string(rank_) + ": ";
        if (exchange_.hook_uncalled()) {
            throw Failure(FailureKind::state, who + "the hook of a call is uncalled here; call it first");
        }
        const bool quiet = wait_until([&] { return exchange_.quiet(rank); }, now_ns() + kQuietNs, [] {});
        if (!quiet) throw Failure(FailureKind::state, who + "rows of an earlier call to it are still under way");
    }
    // What is on its way to it at the mask is given up: who only parts shall have it.
    if (masked && rank != rank_ && !exchange_.masked(rank) && !context_.unreachable(rank))
        wait_until([&] { return exchange_.quiet(rank); }, now_ns() + kPartNs, [] {});
    const TokenGuard guard(context_, now_ns() + kTokenNs);
    if (!guard) throw Failure(FailureKind::deadline, "the progress token is held for too long to change the mask");
    if (!masked && exchange_.masked(rank) && !exchange_.near(rank) && !context_.unreachable(rank) &&
        !context_.intact(rank)) {
        throw Failure(FailureKind::state, "rank " + std::to_string(rank) + " cannot be taken in again by rank " +
                                              std::to_string(rank_) +
                                              ": work for it failed while it was out, so that the two no longer agree "
                                              "on what has arrived: make a new Buffer, or shrink this one");
    }
    exchange_.mask(rank, masked);
    publish(true);
    context_.turn_held(kTurnNs);
}

}  // namespace expertwire::runtime
