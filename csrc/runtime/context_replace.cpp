// SPEC T14: work that never ends keeps its memory until the endpoint that it was posted over is closed. That endpoint
// serves the live peers too: a new one takes over for them first. Runs under the token, a little in every turn.
#include "runtime/clock.hpp"
#include "runtime/context_state.hpp"

namespace expertwire::runtime {

namespace {

constexpr TimeNs retry_ns = 1'000'000'000;
constexpr TimeNs beats_missed = 5;  // by who counts as silent; far below silence_ms, since nobody is blamed for it

}  // namespace

bool ContextState::live(std::uint32_t rank) const {
    return peers[rank].added.load(std::memory_order_acquire) && !liveness->unreachable(rank) &&
           engine->peer_error(PeerId{rank}) == Status::ok;
}

// It may be stopped, and wake up to write what nobody wants any more: until the endpoint that it knows is gone. Not so
// of one that is heard, or has said farewell.
bool ContextState::lost(std::uint32_t rank, TimeNs now) const {
    const PeerState seen = liveness->state(rank);
    if (seen == PeerState::left) return false;
    if (seen != PeerState::watched || quarantined(rank)) return true;
    return liveness->pulse(rank, now).age_ns > beats_missed * options.heartbeat_ns;
}

bool ContextState::quarantined(std::uint32_t rank) const {
    for (const QueuePairId lane : peers[rank].lanes)
        if (engine->view(lane).state == LaneState::quarantined) return true;
    return false;
}

void ContextState::fail_replacement(const std::string& why, TimeNs now) {
    replacement.failure = why;
    replacement.next_try_ns = now + retry_ns;
    ++counters.replacements_failed;
}

void ContextState::begin_replacement(TimeNs now) {
    replacement.wanted = false;
    EndpointId fresh;
    const ControlResult result = provider->open_replacement(endpoint, fresh);
    if (!result.ok()) return fail_replacement(result.message, now);
    std::vector<PeerId> told;
    replacement.told.assign(options.size, false);
    for (std::uint32_t rank = 0; rank < options.size; ++rank) {
        if (!live(rank)) continue;
        told.push_back(PeerId{rank});
        replacement.told[rank] = true;
    }
    for (std::uint32_t lane = 0; lane < options.endpoints; ++lane)
        engine->replace_endpoint(EndpointId{endpoint.value + lane}, EndpointId{fresh.value + lane});
    replacement.phase = Replacement::Phase::moving;
    replacement.old_endpoint = endpoint;
    replacement.answer_since_ns.assign(options.size, std::nullopt);
    // Not `now`: to open an endpoint takes 0.1 s of a core (34,000 page faults over tcp;ofi_rxm), and on a busy machine
    // a second. No peer has been asked anything meanwhile.
    replacement.patience_ns = 0;
    replacement.looked_ns = now_ns();
    endpoint = fresh;
    provider->announce_replacement(told);
}

// Every peer that is told answers, or is held dead: one that woke up later would still write to the old endpoint. It
// cannot be told while work for it is on its way, which is so for a hard deadline at most, and for good where that has
// passed. While no turns were taken here its answer could not be read.
void ContextState::look_after_unmoved(TimeNs now) {
    replacement.patience_ns += awake_ns(replacement.looked_ns, now);
    replacement.looked_ns = now;
    for (const UnmovedPeer& unmoved : provider->unmoved_peers()) {
        const std::uint32_t rank = unmoved.peer.value;
        std::optional<TimeNs>& since = replacement.answer_since_ns[rank];
        if (unmoved.told && !since) since = replacement.patience_ns;
        const TimeNs waited = replacement.patience_ns - since.value_or(0);
        const TimeNs limit = since               ? options.hard_timeout_ns
                             : quarantined(rank) ? std::min(options.silence_ns, options.hard_timeout_ns)
                                                 : 2 * options.hard_timeout_ns;
        if (live(rank) && waited < limit) continue;
        if (live(rank))
            liveness->suspect(rank,
                              "it has not come over to the endpoint that replaced the one it used within " +
                                  std::to_string(limit / 1'000'000) + " ms",
                              now);
        provider->forgo_peer(unmoved.peer);
    }
}

bool ContextState::old_drained() const {
    for (std::uint32_t lane = 0; lane < options.endpoints; ++lane)
        if (!engine->drained(EndpointId{replacement.old_endpoint.value + lane})) return false;
    return true;
}

bool ContextState::advance_replacement(TimeNs now) {
    if (now < replacement.next_try_ns && !replacement.wanted) return false;
    if (replacement.phase == Replacement::Phase::none) {
        if (replacement.wanted || engine->endpoint_to_replace()) begin_replacement(now);
        return false;
    }
    replacement.wanted = false;
    look_after_unmoved(now);
    if (!provider->unmoved_peers().empty() || !old_drained()) return false;
    const ControlResult result = provider->close_endpoints(replacement.old_endpoint);
    if (result.status == Status::would_block) return false;
    if (!result.ok()) {
        fail_replacement(result.message, now);
        return false;
    }
    replacement.phase = Replacement::Phase::none;
    for (std::uint32_t lane = 0; lane < options.endpoints; ++lane)
        engine->on_endpoint_closed(EndpointId{replacement.old_endpoint.value + lane}, now);
    ++counters.endpoints_replaced;
    ++replacement.closed;
    return true;
}

}  // namespace expertwire::runtime
