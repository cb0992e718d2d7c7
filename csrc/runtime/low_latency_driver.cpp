#include "runtime/low_latency_driver.hpp"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>

#include "runtime/clock.hpp"
#include "runtime/helping.hpp"

namespace expertwire::runtime {

namespace {

constexpr std::uint64_t kStepBytes = 256 << 10;  // of copying under the token: some 50 µs
constexpr TimeNs kTurnNs = 20'000;               // SPEC T13
constexpr TimeNs kSpinNs = 20'000;               // DESIGN "Waits and cores"
constexpr TimeNs kSliceNs = 50'000'000;          // Ctrl-C is answered within 100 ms
constexpr TimeNs kGraceNs = 500'000'000;         // for what a rank that left had sent, and for the word of who died
constexpr TimeNs kTellNs = 500'000'000;          // for the verdict to reach the others before this rank may be gone
constexpr TimeNs kSilentNs = 2'000'000'000;      // a heartbeat older than this is called silence
constexpr TimeNs kAbsentNs = 1'000'000'000;      // who took no turn for so long was stopped itself …
constexpr TimeNs kReturnNs = 3'000'000'000;      // … and hears by then what beats of the others say of it

std::string seconds(TimeNs ns) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) * 1e-9);
    return text;
}

}  // namespace

LowLatencyDriver::LowLatencyDriver(Context& context, const exchange::LowLatencyShape& shape, bool shrink)
    : ContextPort(context, shape.rank, shape.nodes, {"ll_control", nullptr, "ll_data"}),
      shrink_(shrink),
      exchange_(shape, *this, data_bytes_),
      ended_for_(shape.nodes.ranks(), 0) {
    const exchange::LowLatencyLayout layout(shape.nodes.ranks(), shape.local_experts_max);
    for (std::uint32_t rank = 0; rank < shape.nodes.ranks(); ++rank) {
        require_region(rank, "ll_control", layout.control_bytes());
        require_region(rank, "ll_data", data_bytes_);
    }
    exchange_.mask_what_fails(shrink);
}

void LowLatencyDriver::send(exchange::LowLatencyOperation& operation, TimeNs timeout_ns,
                            const std::function<void()>& interrupted) {
    run(operation, [&] { return operation.send(kStepBytes); }, timeout_ns, interrupted);
}

void LowLatencyDriver::receive(exchange::LowLatencyOperation& operation, TimeNs timeout_ns,
                               const std::function<void()>& interrupted) {
    run(operation, [&] { return operation.receive(kStepBytes, now_ns()); }, timeout_ns, interrupted);
}

void LowLatencyDriver::run(exchange::LowLatencyOperation& operation, const StepFunction& step, TimeNs timeout_ns,
                           const std::function<void()>& interrupted) {
    TimeNs last = now_ns();
    TimeNs deadline = last + timeout_ns;
    TimeNs look = last + kSliceNs;
    TimeNs idle_since = 0;
    broken_ = std::string("an earlier ") + exchange::kind_name(operation.kind()) + " (call " +
              std::to_string(operation.epoch()) + ") did not end; destroy this Buffer and make a new one";
    refused_ = {};
    gone_since_ns_ = 0;
    stall_.moved(last);
    Helping helping(context_);
    while (true) {
        const std::uint32_t seen = context_.doorbell().seen();
        bool moved = false;
        exchange::Step outcome = exchange::Step::waiting;
        if (const TokenGuard guard(context_, now_ns() + kSliceNs); guard) {
            moved = context_.turn_held(kTurnNs);
            if (shrink_) look_for_late_rows();
            outcome = step();
            if (outcome != exchange::Step::waiting) {
                context_.post_held();  // what has come meanwhile is for the next turn: an empty look costs some 5 µs
                moved = true;
            }
        }
        if (outcome == exchange::Step::done || outcome == exchange::Step::failed) break;
        const TimeNs now = now_ns();
        // Whoever was stopped holds its own absence against nobody, and hears first who goes on without it.
        if (shrink_ && now - last > kAbsentNs) deadline = std::max(deadline, now + kReturnNs);
        last = now;
        if (outcome == exchange::Step::progressed) stall_.moved(now);
        if (now >= look) {
            interrupted();
            look = now + kSliceNs;
            stall_.look(now, [&](TimeNs still) {
                return where(operation) + "nothing has moved for " + seconds(still) + table(operation);
            });
        }
        if (moved && now < deadline) {
            idle_since = 0;
            continue;
        }
        if (look_around(operation, deadline, timeout_ns)) {
            deadline = now + timeout_ns;  // somebody was left out: the others have their time
            continue;
        }
        if (idle_since == 0) idle_since = now;
        if (context_.may_spin() && now - idle_since < kSpinNs) {
            pause_cpu();
            continue;
        }
        publish(false);
        helping.sleep(seen, std::min(kSliceNs, deadline > now ? deadline - now : 0));
    }
    publish(false);
    conclude(operation);
    broken_.clear();
}

// Masks the rank if that is allowed. True: the call goes on without it.
bool LowLatencyDriver::leave_out(std::uint32_t rank) {
    if (!shrink_ || rank == rank_) return false;
    const TokenGuard guard(context_, now_ns() + kSliceNs);
    if (!guard) return false;
    exchange_.mask(rank, true);
    publish(true);
    return true;
}

// Nothing moved: is there a reason why nothing ever will? True: somebody was left out.
bool LowLatencyDriver::look_around(exchange::LowLatencyOperation& operation, TimeNs deadline_ns, TimeNs timeout_ns) {
    if (refused_.status != Status::ok) {
        const Refused refused = std::exchange(refused_, {});
        if (leave_out(refused.rank)) return true;
        // A death is seen here first, and by its cause a moment later.
        if (gone_since_ns_ == 0) gone_since_ns_ = now_ns();
    }
    const TimeNs now = now_ns();
    if (now < look_ns_ && now < deadline_ns) return false;
    look_ns_ = now + kSliceNs / 10;
    if (!shrink_ && context_.has_fault()) {
        if (const std::optional<Fault> fault = context_.fault()) {
            context_.publish_verdict(fault->rank, now_ns() + kTellNs);
            throw Failure(
                FailureKind::peer,
                where(operation) + "rank " + std::to_string(fault->rank) + " is gone: " + fault->why + table(operation),
                static_cast<std::int32_t>(fault->rank));
        }
    }
    if (shrink_) refuse_if_left_out(where(operation), operation.epoch());
    // Silent; not in this call; the rest. Whoever is in the first wait for nobody, and the others may wait for those.
    std::vector<std::uint32_t> missing[3];
    std::optional<std::uint32_t> gone;
    for (const exchange::LowLatencyPeer& peer : operation.progress()) {
        if (peer.missing.empty() || peer.rank == rank_) continue;
        const PeerPulse pulse = context_.pulse(peer.rank);
        const bool behind = pulse.low_latency_call >> 8 < operation.epoch();
        missing[pulse.leaving || pulse.age_ns > kSilentNs ? 0 : behind ? 1 : 2].push_back(peer.rank);
        if (!gone && context_.unreachable(peer.rank)) gone = peer.rank;
    }
    bool left_out = false;
    for (const auto& tier : missing) {
        if (now < deadline_ns || left_out) break;
        for (const std::uint32_t rank : tier) left_out = leave_out(rank) || left_out;
    }
    if (left_out) return true;
    if (now >= deadline_ns) {
        throw Failure(FailureKind::deadline,
                      where(operation) + "not done after " + seconds(timeout_ns) + table(operation));
    }
    if (!gone) {
        gone_since_ns_ = 0;
        return false;
    }
    if (gone_since_ns_ == 0) gone_since_ns_ = now;
    if (now - gone_since_ns_ < kGraceNs) return false;
    gone_since_ns_ = 0;
    if (leave_out(*gone)) return true;
    throw Failure(FailureKind::peer,
                  where(operation) + "rank " + std::to_string(*gone) +
                      " has closed its Buffer and will not take part in this call" + table(operation),
                  static_cast<std::int32_t>(*gone));
}

void LowLatencyDriver::conclude(const exchange::LowLatencyOperation& operation) {
    const exchange::Failure& failure = operation.failure();
    if (failure.reason == exchange::FailureReason::none) return;
    const std::string text = "rank " + std::to_string(rank_) + ": " + failure.text;
    if (failure.reason == exchange::FailureReason::left_out) {
        broken_.clear();
        throw Failure(FailureKind::excluded, failure.text);
    }
    if (failure.reason == exchange::FailureReason::mismatch || failure.reason == exchange::FailureReason::capacity) {
        broken_.clear();
        const bool mismatch = failure.reason == exchange::FailureReason::mismatch;
        throw Failure(mismatch ? FailureKind::mismatch : FailureKind::capacity, text);
    }
    if (failure.reason == exchange::FailureReason::put) {
        // Often the first sign of a death: its cause is named if it is seen within the grace.
        for (const TimeNs until = now_ns() + kGraceNs; now_ns() < until && !context_.has_fault();) {
            const std::uint32_t seen = context_.doorbell().seen();
            context_.turn(kTurnNs);
            context_.doorbell().wait(seen, kSliceNs / 10);
        }
        const std::optional<Fault> fault = context_.has_fault() ? context_.fault() : std::nullopt;
        const std::uint32_t culprit = fault ? fault->rank : failure.rank;
        if (fault || failure.status == Status::peer_dead) context_.publish_verdict(culprit, now_ns() + kTellNs);
        throw Failure(fault || failure.status == Status::peer_dead ? FailureKind::peer : FailureKind::transfer,
                      where(operation) + failure.text + " (rank " + std::to_string(failure.rank) + ", status " +
                          std::string(status_name(failure.status)) + ")" + (fault ? "; " + fault->why : ""),
                      static_cast<std::int32_t>(culprit));
    }
    throw Failure(FailureKind::transfer, where(operation) + failure.text);
}

std::uint64_t LowLatencyDriver::combine_buffer(const exchange::LowLatencyHandle& handle, TimeNs timeout_ns,
                                               const std::function<void()>& interrupted) {
    const TimeNs deadline = now_ns() + timeout_ns;
    Helping helping(context_);
    while (true) {
        const std::uint32_t seen = context_.doorbell().seen();
        bool waiting = true;
        exchange::Refusal refusal;
        if (const TokenGuard guard(context_, now_ns() + kSliceNs); guard) {
            context_.turn_held(kTurnNs);
            if (const auto offset = exchange_.combine_buffer(handle, waiting, refusal)) return *offset;
        }
        if (refusal.kind != exchange::Refusal::Kind::none) throw_refusal(refusal);
        interrupted();
        if (now_ns() >= deadline) {
            throw Failure(FailureKind::deadline, "rank " + std::to_string(rank_) +
                                                     ": rows of an earlier call are still on their way out of the "
                                                     "combine buffer after " +
                                                     seconds(timeout_ns));
        }
        helping.sleep(seen, kSliceNs / 10);
    }
}

void throw_refusal(const exchange::Refusal& refusal) {
    switch (refusal.kind) {
        case exchange::Refusal::Kind::state:
            throw Failure(FailureKind::state, refusal.text);
        case exchange::Refusal::Kind::capacity:
            throw Failure(FailureKind::capacity, refusal.text);
        default:
            throw Failure(FailureKind::invalid_argument, refusal.text);
    }
}

std::string LowLatencyDriver::where(const exchange::LowLatencyOperation& operation) const {
    return std::string(exchange::kind_name(operation.kind())) + " (call " + std::to_string(operation.epoch()) +
           ") on rank " + std::to_string(rank_) + ", phase " + operation.stage_name() + ": ";
}

// Not in this call, sent but not arrived, or silent (SPEC E8).
std::string LowLatencyDriver::peer_state(const exchange::LowLatencyOperation& operation,
                                         const exchange::LowLatencyPeer& peer) const {
    const PeerPulse pulse = context_.pulse(peer.rank);
    if (pulse.leaving) return "it has closed its Buffer";
    const std::uint64_t epoch = operation.epoch();
    const auto told = exchange::LowLatencyWord::of(pulse.low_latency_told, epoch);
    const std::uint64_t call = pulse.low_latency_call >> 8;
    const std::string at = "call " + std::to_string(call) + ", phase " +
                           exchange::low_latency_stage_name(static_cast<std::uint32_t>(pulse.low_latency_call & 0xff));
    if (pulse.age_ns > kSilentNs) {
        return "it is silent: no heartbeat for " + seconds(pulse.age_ns) +
               (call > 0 ? "; it was in " + at + " then" : "");
    }
    const std::string heard = " (heartbeat " + seconds(pulse.age_ns) + " ago)";
    if (told.leaves_out()) return "it leaves this rank out from call " + std::to_string(told.call) + " on" + heard;
    if (call < epoch) return "it is not in this call: its last was " + at + heard;
    if (!peer.rows_missing) return "it is in " + at + heard;
    if (told.told == exchange::LowLatencyTold::sent && told.call == epoch) {
        return "it is in " + at + ", and has sent its " + std::to_string(told.rows) +
               " rows of this call, which have not arrived" + heard;
    }
    if (told.told == exchange::LowLatencyTold::sent && told.call > epoch) {
        return "it is in " + at + ", and has sent its rows of this call, which have not arrived" + heard;
    }
    return "it is in " + at + ", and has not sent to this rank yet" + heard;
}

std::string LowLatencyDriver::table(const exchange::LowLatencyOperation& operation) const {
    std::string text;
    for (const exchange::LowLatencyPeer& peer : operation.progress()) {
        if (peer.missing.empty()) continue;
        text += "\n  rank " + std::to_string(peer.rank) + ": waiting for " + peer.missing +
                "; the last rows from it were of call " + std::to_string(peer.arrived) + ", and it has consumed call " +
                std::to_string(peer.consumed);
        if (peer.rank != rank_) text += "; " + peer_state(operation, peer);
    }
    return text;
}

}  // namespace expertwire::runtime
