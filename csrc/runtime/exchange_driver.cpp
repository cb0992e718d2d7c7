#include "runtime/exchange_driver.hpp"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "runtime/clock.hpp"
#include "runtime/helping.hpp"

namespace expertwire::runtime {

namespace {

constexpr std::uint64_t kStepBytes = 1 << 20;  // of copying under the token: some 150 µs, as a chunk's way through TCP
constexpr TimeNs kTurnNs = 20'000;             // SPEC T13
constexpr TimeNs kSpinNs = 20'000;             // DESIGN "Waits and cores"
constexpr TimeNs kSliceNs = 50'000'000;        // Ctrl-C is answered within 100 ms
constexpr TimeNs kGraceNs = 500'000'000;       // from a failed put to the first word of who died …
constexpr TimeNs kBlameNs = 8'000'000'000;     // … and until somebody is named without one (SPEC T19)
constexpr TimeNs kTellNs = 500'000'000;        // for the verdict to reach the others before this rank may be gone
constexpr TimeNs kSilentNs = 2'000'000'000;    // a heartbeat older than this is called silence

const char* kind_name(const exchange::Operation& operation) {
    return operation.kind() == exchange::Kind::dispatch ? "dispatch" : "combine";
}

std::string seconds(TimeNs ns) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(ns) * 1e-9);
    return text;
}

}  // namespace

ExchangeDriver::ExchangeDriver(Context& context, const exchange::Shape& shape)
    : ContextPort(context, shape.rank, shape.nodes, {"control", "staging", "data"}), shape_(shape) {
    const exchange::Layout layout(shape_);
    for (std::uint32_t rank = 0; rank < shape_.nodes.ranks(); ++rank) {
        require_region(rank, "control", layout.control_bytes());
        require_region(rank, "staging", layout.staging_bytes(rank));
    }
}

// ---- run

// One turn of the engine, one step of the operation, and its puts on their way; what has come meanwhile is seen by the
// next turn, for an empty look at the network costs some 5 µs. True: something moved.
bool ExchangeDriver::turn(exchange::Operation& operation, exchange::Step& step) {
    const TokenGuard guard(context_, now_ns() + kSliceNs);
    if (!guard) return false;
    bool moved = context_.turn_held(kTurnNs);
    step = operation.step(kStepBytes);
    if (step == exchange::Step::progressed) {
        context_.post_held();
        moved = true;
    }
    return moved;
}

void ExchangeDriver::run(exchange::Operation& operation, TimeNs timeout_ns, const std::function<void()>& interrupted) {
    const TimeNs deadline = now_ns() + timeout_ns;
    TimeNs look = now_ns() + kSliceNs;
    TimeNs idle_since = 0;
    exchange::Step step = exchange::Step::waiting;
    // Whatever leaves this function before the operation has ended leaves rows under way.
    broken_ = std::string("an earlier ") + kind_name(operation) + " (call " + std::to_string(operation.epoch()) +
              ") did not end; destroy this Buffer and make a new one";
    refused_ = {};
    left_since_ns_ = 0;
    stall_.moved(now_ns());
    publish(operation);
    Helping helping(context_);
    while (true) {
        const std::uint32_t seen = context_.doorbell().seen();
        step = exchange::Step::waiting;
        const bool moved = turn(operation, step);
        if (step == exchange::Step::done || step == exchange::Step::failed) break;
        const TimeNs now = now_ns();
        if (step == exchange::Step::progressed) stall_.moved(now);
        if (now >= look) {
            interrupted();
            look = now + kSliceNs;
            stall_.look(now, [&](TimeNs still) {
                return where(operation) + "nothing has moved for " + seconds(still) + table(operation);
            });
        }
        if (moved) {
            idle_since = 0;
            if (now >= deadline) fail_deadline(operation, timeout_ns);
            continue;
        }
        look_around(operation, deadline, timeout_ns, interrupted);
        if (idle_since == 0) idle_since = now;
        if (context_.may_spin() && now - idle_since < kSpinNs) {
            pause_cpu();
            continue;
        }
        publish(operation);
        helping.sleep(seen, std::min(kSliceNs, deadline > now ? deadline - now : 0));
    }
    publish(operation);
    conclude(operation, operation.failure(), interrupted);
    broken_.clear();
}

// Nothing moved: is there a reason why nothing ever will?
void ExchangeDriver::look_around(const exchange::Operation& operation, TimeNs deadline_ns, TimeNs timeout_ns,
                                 const std::function<void()>& interrupted) {
    if (context_.has_fault()) {
        const std::optional<Fault> fault = context_.fault();
        if (fault) fail_peer(operation, *fault);
    }
    if (refused_.status != Status::ok) {
        fail_put(operation, refused_.rank, refused_.status, "nothing can be sent to it", interrupted);
    }
    const TimeNs now = now_ns();
    if (now >= leavers_look_ns_) {
        leavers_look_ns_ = now + kSliceNs;
        look_for_leavers(operation, now);
    }
    if (now >= deadline_ns) fail_deadline(operation, timeout_ns);
}

// A rank that closed its Buffer before it had done its part of this call never will. Leaving is no death, so liveness
// says nothing; the grace is for the word of who died, where that is why it left, and for its last phase.
void ExchangeDriver::look_for_leavers(const exchange::Operation& operation, TimeNs now) {
    std::optional<std::uint32_t> first;  // the least far of them: the others may have left because of it
    std::pair<std::uint64_t, std::uint64_t> least;
    for (std::uint32_t rank = 0; rank < shape_.nodes.ranks(); ++rank) {
        if (rank == shape_.rank) continue;
        const PeerPulse pulse = context_.pulse(rank);
        const bool did_its_part = pulse.call_sequence > operation.epoch() ||
                                  (pulse.call_sequence == operation.epoch() &&
                                   static_cast<exchange::Phase>(pulse.phase & 0xFF) == exchange::Phase::done);
        if (!pulse.leaving || did_its_part) continue;
        const std::pair<std::uint64_t, std::uint64_t> far{pulse.call_sequence, pulse.phase};
        if (!first || far < least) {
            first = rank;
            least = far;
        }
    }
    if (!first) {
        left_since_ns_ = 0;
    } else if (left_since_ns_ == 0) {
        left_since_ns_ = now;
    } else if (now - left_since_ns_ >= kBlameNs ||
               (now - left_since_ns_ >= kGraceNs && !context_.undecided(*first, left_since_ns_))) {
        throw Failure(FailureKind::peer,
                      where(operation) + "rank " + std::to_string(*first) +
                          " has closed its Buffer and will not take part in this call" + table(operation),
                      static_cast<std::int32_t>(*first));
    }
}

void ExchangeDriver::publish(const exchange::Operation& operation) {
    const std::uint64_t phase = static_cast<std::uint64_t>(operation.phase()) | (operation.chunks_sent() << 8);
    if (operation.epoch() == published_epoch_ && phase == published_phase_) return;
    published_epoch_ = operation.epoch();
    published_phase_ = phase;
    context_.publish_call(operation.epoch(), phase);
}

void ExchangeDriver::conclude(const exchange::Operation& operation, const exchange::Failure& failure,
                              const std::function<void()>& interrupted) {
    switch (failure.reason) {
        case exchange::FailureReason::none:
            return;
        case exchange::FailureReason::mismatch:
            broken_.clear();
            throw Failure(FailureKind::mismatch, failure.text);
        case exchange::FailureReason::capacity:
            broken_.clear();
            throw Failure(FailureKind::capacity, failure.text);
        case exchange::FailureReason::put:
            fail_put(operation, failure.rank, failure.status, failure.text, interrupted);
        case exchange::FailureReason::left_out:  // never of this mode
        case exchange::FailureReason::protocol:
            throw Failure(FailureKind::transfer, where(operation) + failure.text);
    }
}

// ---- failures (SPEC E8)

std::string ExchangeDriver::where(const exchange::Operation& operation) const {
    return std::string(kind_name(operation)) + " (call " + std::to_string(operation.epoch()) + ") on rank " +
           std::to_string(shape_.rank) + ", phase " + exchange::phase_name(operation.phase()) + ": ";
}

void ExchangeDriver::fail_peer(const exchange::Operation& operation, const Fault& fault) {
    // Whoever raises may be gone the next moment, and its broken connections must not be taken for the cause.
    context_.publish_verdict(fault.rank, now_ns() + kTellNs);
    std::string text = where(operation) + "rank " + std::to_string(fault.rank) + " is gone: " + fault.why;
    if (fault.told_by >= 0) text += " (told by rank " + std::to_string(fault.told_by) + ")";
    throw Failure(FailureKind::peer, text + table(operation), static_cast<std::int32_t>(fault.rank));
}

// A put that failed is often the first sign of a death, and often of another rank's than its target: that one may have
// seen somebody die and left. It is named only when everybody else has been heard since, or for want of time.
void ExchangeDriver::fail_put(const exchange::Operation& operation, std::uint32_t rank, Status status,
                              const std::string& text, const std::function<void()>& interrupted) {
    const TimeNs since = now_ns();
    while (true) {
        if (const std::optional<Fault> fault = context_.has_fault() ? context_.fault() : std::nullopt) {
            fail_peer(operation, *fault);
        }
        const TimeNs waited = now_ns() - since;
        if (waited >= kBlameNs || (waited >= kGraceNs && !context_.undecided(rank, since))) break;
        interrupted();
        const std::uint32_t seen = context_.doorbell().seen();
        context_.turn(kTurnNs);
        context_.leave_help();
        context_.doorbell().wait(seen, kSliceNs / 10);
        context_.enter_help();
    }
    std::string message = where(operation) + text + " (rank " + std::to_string(rank) + ", status " +
                          std::to_string(static_cast<int>(status)) + ")";
    if (context_.pulse(rank).leaving) message += "; it has closed its Buffer and named no dead rank";
    message += table(operation);
    if (status == Status::peer_dead) {
        context_.publish_verdict(rank, now_ns() + kTellNs);
        throw Failure(FailureKind::peer, message, static_cast<std::int32_t>(rank));
    }
    throw Failure(FailureKind::transfer, message, static_cast<std::int32_t>(rank));
}

void ExchangeDriver::fail_deadline(const exchange::Operation& operation, TimeNs timeout_ns) {
    throw Failure(FailureKind::deadline, where(operation) + "not done after " + seconds(timeout_ns) + table(operation));
}

// Not in this call, sent but not arrived, or silent.
std::string ExchangeDriver::peer_state(const exchange::Operation& operation, std::uint32_t rank) const {
    const PeerPulse pulse = context_.pulse(rank);
    if (pulse.leaving) return "it has closed its Buffer";
    if (pulse.age_ns > kSilentNs) return "it is silent: no heartbeat for " + seconds(pulse.age_ns);
    const std::string heard = " (heartbeat " + seconds(pulse.age_ns) + " ago)";
    if (pulse.call_sequence < operation.epoch()) {
        return "it is not in this call: its last was call " + std::to_string(pulse.call_sequence) + heard;
    }
    const auto phase = static_cast<exchange::Phase>(pulse.phase & 0xFF);
    return "it is in call " + std::to_string(pulse.call_sequence) + ", phase " + exchange::phase_name(phase) +
           ", and has sent " + std::to_string(pulse.phase >> 8) + " chunks over the fabric" + heard;
}

std::string ExchangeDriver::table(const exchange::Operation& operation) const {
    std::string text;
    for (const exchange::PeerProgress& peer : operation.progress()) {
        if (peer.missing.empty()) continue;
        text += "\n  rank " + std::to_string(peer.rank) + ": waiting for " + peer.missing;
        if (peer.rows_expected > 0) {
            text +=
                ", " + std::to_string(peer.rows_arrived) + " of " + std::to_string(peer.rows_expected) + " rows here";
        }
        if (peer.chunks_to_send > 0) {
            text += ", " + std::to_string(peer.chunks_sent) + " of " + std::to_string(peer.chunks_to_send) +
                    " chunks sent to it and " + std::to_string(peer.chunks_credited) + " consumed";
        }
        if (peer.rank != shape_.rank) text += "; " + peer_state(operation, peer.rank);
    }
    return text;
}

}  // namespace expertwire::runtime
