// A context's peers: how they are reached, what they announced, what of them is mapped here.
#include <sched.h>

#include <algorithm>
#include <optional>

#include "runtime/context_state.hpp"

namespace expertwire::runtime {

namespace {

constexpr TimeNs drain_ns = 1'000'000'000;        // for the work of a removed peer to end by itself
constexpr TimeNs hopeless_drain_ns = 50'000'000;  // the same of one that is dead or past the hard deadline
constexpr TimeNs farewell_ns = 500'000'000;       // for the others to hear that a peer is fenced off
constexpr RegionId runtime_region{0};             // the first that a context creates

std::string rank_text(std::uint32_t rank) {
    return "rank " + std::to_string(rank);
}

bool on_this_host(const Blob& blob) {
    return blob.process.boot != 0 && blob.process.boot == own_identity().boot;
}

void check_control(const ControlResult& result, std::uint32_t rank, const std::string& doing) {
    if (result.ok()) return;
    throw Failure(FailureKind::transfer, doing + " of " + rank_text(rank) + " failed: " + result.message,
                  static_cast<std::int32_t>(rank));
}

void check_blob(const ContextState& state, const Blob& blob, std::uint32_t rank) {
    const auto differ = [&](const std::string& what, const std::string& theirs, const std::string& ours) {
        throw Failure(FailureKind::mismatch,
                      "the blob given for " + rank_text(rank) + " has " + what + " " + theirs + ", " +
                          rank_text(state.options.rank) + " has " + ours + ": both must be built alike",
                      static_cast<std::int32_t>(rank));
    };
    if (!state.options.independent && blob.rank != rank)
        differ("rank", std::to_string(blob.rank), "been told " + std::to_string(rank));
    if (!state.options.independent && blob.size != state.options.size)
        differ("size", std::to_string(blob.size), std::to_string(state.options.size));
    if (blob.provider != state.capabilities.provider) differ("provider", blob.provider, state.capabilities.provider);
}

void forget_region(ContextState& state, RemoteRegionId id) {
    state.provider->forget_remote_region(id);
    state.remotes.remove(id);
}

void forget_regions(ContextState& state, PeerRecord& peer) {
    for (const auto& [name, id] : peer.remotes) forget_region(state, id);
    peer.remotes.clear();
}

// Regions of the blob that are new, or were registered anew under the old name.
// `asked_for`: else memory of its caller's that cannot be reached keeps nobody out, and remote_region() says so.
void announce_regions(ContextState& state, PeerRecord& peer, const Blob& blob, std::uint32_t rank,
                      bool asked_for = false) {
    for (const BlobRegion& region : blob.regions) {
        if (region.key.empty()) continue;  // remote_region() says so to whoever asks for it
        const auto known = std::find_if(peer.blob.regions.begin(), peer.blob.regions.end(),
                                        [&](const BlobRegion& other) { return other.name == region.name; });
        if (known != peer.blob.regions.end() && known->key == region.key && known->bytes == region.bytes &&
            peer.remotes.count(region.name))
            continue;
        const std::optional<RemoteRegionId> id = state.remotes.add({rank, region.name, region.bytes});
        if (!id)
            throw Failure(FailureKind::capacity,
                          "region '" + region.name + "' of " + rank_text(rank) + " would be one more than the " +
                              std::to_string(state.remotes.rows_max()) +
                              " regions of peers that a context knows at one time; remove peers, or register fewer and "
                              "larger pieces there",
                          static_cast<std::int32_t>(rank));
        const ControlResult result = state.provider->add_remote_region(PeerId{rank}, *id, region.key);
        if (!result.ok()) state.remotes.remove(*id);
        if (result.status == Status::refused && region.name.starts_with('#') && !asked_for) continue;
        check_control(result, rank, "announcing region '" + region.name + "'");
        if (const auto before = peer.remotes.find(region.name); before != peer.remotes.end())
            forget_region(state, before->second);
        peer.remotes[region.name] = *id;
    }
}

// Words of another process under this rank count from 0 again; those of the same one go on where they were. Under the
// token, before the provider lets in what that process says.
void forget_words(ContextState& state, PeerRecord& peer, std::uint32_t rank) {
    peer.told = {};
    peer.barrier_told = 0;
    PulseBlock& pulse = state.shared.pulse(rank);
    for (auto* word : {&pulse.heartbeat, &pulse.call_sequence, &pulse.phase, &pulse.verdict, &pulse.leaving,
                       &pulse.fenced, &pulse.barrier, &pulse.low_latency_call, &pulse.low_latency_told})
        word->store(0, std::memory_order_relaxed);
}

// Under the token: the engine has closed its lanes.
void forget_peer(ContextState& state, std::uint32_t rank) {
    PeerRecord& peer = state.peers[rank];
    check_control(state.provider->remove_peer(PeerId{rank}), rank, "removal");
    forget_regions(state, peer);
    peer.added.store(false, std::memory_order_release);
    if (on_this_host(peer.blob)) state.count_rank_on_host(-1);
    state.liveness->remove(rank);
    if (peer.shared.present()) {
        std::uint64_t ours = state.instance;  // unless another has our name there now
        peer.shared.about(state.options.rank).reader.compare_exchange_strong(ours, 0, std::memory_order_acq_rel);
    }
    peer.shared = {};
    peer.mapped.clear();
    peer.lanes.clear();
    peer.blob.regions.clear();
    if (peer.pulse_request.valid()) state.give_up(peer.pulse_request);
    peer.pulse_request = {};
    if (peer.barrier_request.valid()) state.give_up(peer.barrier_request);
    peer.barrier_request = {};
    // Who comes next under this rank hears of the next barrier only: it may not know us yet, and a word that it drops
    // would count as told.
    peer.barrier_tried = true;
    peer.barrier_lanes = lanes_broken;
}

void open_lanes(ContextState& state, PeerRecord& peer, std::uint32_t rank) {
    peer.lanes.clear();
    for (std::uint32_t lane = 0; lane <= state.options.lanes; ++lane) {
        const QueuePairId id = state.engine->open_queue_pair(PeerId{rank}, state.endpoint_of(lane),
                                                             state.is_bulk(lane) ? state.options.bulk_window : 0);
        if (!id.valid())
            throw Failure(FailureKind::capacity, "lane " + std::to_string(lane) + " to " + rank_text(rank) +
                                                     " could not be opened: its requests have not all ended; "
                                                     "call remove_peer() and try again");
        peer.lanes.push_back(id);
    }
}

// What of a peer was begun is given back where the rest of it fails: the next blob for that rank may be another's.
class HalfAdded {
  public:
    HalfAdded(ContextState& state, std::uint32_t rank) : state_(state), rank_(rank) {}
    ~HalfAdded() {
        if (whole_) return;
        static_cast<void>(state_.engine->close_peer(PeerId{rank_}, now_ns()));  // nothing was submitted
        static_cast<void>(state_.provider->remove_peer(PeerId{rank_}));
        forget_regions(state_, state_.peers[rank_]);
        state_.peers[rank_].lanes.clear();
    }
    HalfAdded(const HalfAdded&) = delete;
    HalfAdded& operator=(const HalfAdded&) = delete;
    void whole() { whole_ = true; }

  private:
    ContextState& state_;
    std::uint32_t rank_;
    bool whole_ = false;
};

}  // namespace

// Spinning is for those who have a core of their own (DESIGN "Waits and cores").
void ContextState::count_rank_on_host(int change) {
    ranks_on_host = static_cast<std::uint32_t>(static_cast<int>(ranks_on_host) + change);
    spin_allowed.store(cores >= 2 && cores >= ranks_on_host, std::memory_order_relaxed);
    thread_has_core.store(cores >= 2 * ranks_on_host && cores >= 4, std::memory_order_relaxed);
}

void ContextState::check_rank(std::uint32_t rank, const char* what) const {
    if (rank >= options.size)
        throw Failure(FailureKind::invalid_argument, std::string(what) + " names rank " + std::to_string(rank) +
                                                         "; ranks are 0 to " + std::to_string(options.size - 1));
}

const PeerRecord& ContextState::peer_at(std::uint32_t rank) const {
    check_rank(rank, "the call");
    if (!peers[rank].added.load(std::memory_order_acquire))
        throw Failure(FailureKind::state,
                      rank_text(rank) + " is not a peer of " + rank_text(options.rank) +
                          (rank == options.rank ? ": use memory directly" : ": call add_peer() first"));
    return peers[rank];
}

const RemoteRegion& ContextState::remote_at(std::uint32_t rank, RemoteRegionId remote) const {
    peer_at(rank);
    const RemoteRegion* const found = remotes.find(remote);
    if (found == nullptr || found->rank != rank)
        throw Failure(FailureKind::invalid_argument, "remote region " + std::to_string(remote.value) +
                                                         " is not one that " + rank_text(rank) +
                                                         " has announced, as things are; take the number from "
                                                         "remote_region()");
    return *found;
}

std::vector<std::byte> Context::blob(bool own_only) const {
    check_usable();
    ContextState& state = *state_;
    const std::shared_lock lock(state.tables);
    const ControlGuard guard(state);
    Blob blob;
    blob.rank = state.options.rank;
    blob.size = state.options.size;
    blob.process = own_identity();
    blob.instance = state.instance;
    blob.barrier_epoch = state.barrier_epoch.load(std::memory_order_relaxed);
    blob.provider = state.capabilities.provider;
    blob.address = state.provider->address(state.endpoint);
    for (std::uint32_t i = 0; i < state.regions.size(); ++i) {
        const RegionRecord& region = state.regions[i];
        if (region.address && (!own_only || region.name == "runtime"))
            blob.regions.push_back({region.name, region.bytes, state.provider->region_key(RegionId{i})});
    }
    return encode_blob(blob);
}

void Context::add_peer(std::uint32_t rank, std::span<const std::byte> bytes, std::optional<std::uint32_t> place) {
    check_usable();
    ContextState& state = *state_;
    state.check_rank(rank, "add_peer()");
    if (rank == state.options.rank)
        throw Failure(FailureKind::invalid_argument,
                      "add_peer() names " + rank_text(rank) + ", which is this rank itself");
    Blob blob = decode_blob(bytes, rank);
    check_blob(state, blob, rank);
    if (place.has_value() != state.options.independent || place.value_or(0) >= std::max(blob.size, 1u))
        throw Failure(FailureKind::invalid_argument,
                      "add_peer() for " + rank_text(rank) + " was given " +
                          (place ? "place " + std::to_string(*place) : std::string("no place")) +
                          ": an independent endpoint is told its number there, below the peer's size, " +
                          std::to_string(blob.size) + "; ranks of a job have one");
    const TablesChange lock(state);
    PeerRecord& peer = state.peers[rank];
    const bool again = peer.added.load(std::memory_order_acquire);
    if (again && peer.blob.instance != blob.instance)
        throw Failure(FailureKind::state, rank_text(rank) + " is another process now (instance " +
                                              std::to_string(blob.instance) + ", was " +
                                              std::to_string(peer.blob.instance) + "); call remove_peer() first");
    {
        const ControlGuard guard(state);
        std::optional<HalfAdded> half;
        if (!again) {
            if (peer.blob.instance != 0 && peer.blob.instance != blob.instance) forget_words(state, peer, rank);
            check_control(state.provider->add_peer(PeerId{rank}, blob.address), rank, "the address");
            half.emplace(state, rank);
            open_lanes(state, peer, rank);
        }
        // Words there are counted on from what is told: of another place nothing is.
        if (place.value_or(state.options.rank) != peer.place) peer.told = {};
        peer.place = place.value_or(state.options.rank);
        announce_regions(state, peer, blob, rank);
        const SharedLayout theirs{state.options.independent ? blob.size : state.options.size};
        const auto runtime_region = peer.remotes.find("runtime");
        if (runtime_region == peer.remotes.end() || state.remotes.find(runtime_region->second)->bytes < theirs.bytes())
            throw Failure(FailureKind::mismatch,
                          "the blob given for " + rank_text(rank) + " has no region 'runtime' of " +
                              std::to_string(theirs.bytes()) + " bytes",
                          static_cast<std::int32_t>(rank));
        peer.remote_runtime = runtime_region->second;
        if (!again && on_this_host(blob)) state.count_rank_on_host(1);
        if (half) half->whole();
    }
    // Whoever joins ranks that have been at barriers before counts on from theirs.
    std::uint64_t never_begun = 0;
    if (!again) state.barrier_epoch.compare_exchange_strong(never_begun, blob.barrier_epoch, std::memory_order_relaxed);
    const ProcessIdentity process = blob.process;
    const std::uint64_t instance = blob.instance;
    for (const BlobRegion& region : peer.blob.regions)  // announced by themselves
        if (again && std::none_of(blob.regions.begin(), blob.regions.end(),
                                  [&](const BlobRegion& other) { return other.name == region.name; }))
            blob.regions.push_back(region);
    peer.blob = std::move(blob);
    peer.added.store(true, std::memory_order_release);
    if (!again) {
        state.liveness->publish_fenced(rank, false);
        state.liveness->add(rank, process, instance, now_ns());
        state.pulse_due.store(true, std::memory_order_release);
        state.thread.kick();
    }
}

RemoteRegionId Context::announce_region(std::uint32_t rank, const BlobRegion& region) {
    check_usable();
    ContextState& state = *state_;
    const TablesChange lock(state);
    state.peer_at(rank);
    PeerRecord& peer = state.peers[rank];
    if (region.name.empty() || region.name == "runtime" || region.bytes == 0 || region.key.empty())
        throw Failure(FailureKind::invalid_argument, "region '" + region.name + "' of " + std::to_string(region.bytes) +
                                                         " bytes with a key of " + std::to_string(region.key.size()) +
                                                         " bytes cannot be announced for " + rank_text(rank) +
                                                         ": a user's region has a name, a size and a key");
    Blob only;
    only.regions.push_back(region);
    {
        const ControlGuard guard(state);
        announce_regions(state, peer, only, rank, true);
    }
    std::erase_if(peer.blob.regions, [&](const BlobRegion& other) { return other.name == region.name; });
    peer.blob.regions.push_back(region);
    return peer.remotes.find(region.name)->second;
}

namespace {

// A removal under way. `fence`: the peer is silent, and may wake up to write here: until the endpoint that it knows has
// been closed.
struct Removal {
    std::uint32_t rank = 0;
    TimeNs begun = 0;
    bool fence = false;
    bool lost = false;                // the others hear of it before it ends
    std::uint64_t closed_before = 0;  // what Replacement::closed must exceed then
    std::uint64_t failed_before = 0;  // replacements
    bool inside = false;              // it was stopped while it added to a word that who comes next has, too
};

// Under the token.
Removal begin_removal(ContextState& state, std::uint32_t rank, TimeNs now) {
    Removal removal{.rank = rank, .begun = now};
    removal.closed_before = state.replacement.closed;
    removal.failed_before = state.counters.replacements_failed;
    if (!state.lost(rank, now)) return removal;
    // The others hear it first: what it says of us when it wakes up counts for nothing.
    state.liveness->publish_fenced(rank, true);
    state.broadcast_pulse.store(true, std::memory_order_release);
    removal.lost = true;
    removal.fence = state.provider->replaces_endpoints();
    // One that is under way and was not announced to it serves as well.
    if (state.replacement.phase != Replacement::Phase::none && state.replacement.told[rank]) ++removal.closed_before;
    return removal;
}

// Under the token. True: nothing of it is in flight, and nothing that it sends can arrive.
bool end_traffic(ContextState& state, Removal& removal, TimeNs now) {
    state.provider->forsake_peer(PeerId{removal.rank});
    const bool ended = state.engine->close_peer(PeerId{removal.rank}, now) == Status::ok;
    const bool fenced = !removal.fence || state.replacement.closed > removal.closed_before;
    if (ended && fenced) {
        // Where nothing is replaced this keeps it out of our memory, heard or not: it may have been stopped just now.
        state.provider->fence_peer(PeerId{removal.rank});
        removal.inside = state.provider->stands_in(PeerId{removal.rank}, runtime_region);
        if (removal.inside) return false;
        return !removal.lost || state.news_told() || now - removal.begun >= farewell_ns;
    }
    const bool hopeless = state.quarantined(removal.rank) || state.liveness->unreachable(removal.rank);
    const bool overdue = now - removal.begun >= (hopeless ? hopeless_drain_ns : drain_ns);
    if ((!fenced || overdue) && state.replacement.phase == Replacement::Phase::none) state.replacement.wanted = true;
    return false;
}

void check_removal(const ContextState& state, const Removal& removal, TimeNs now, TimeNs deadline) {
    const bool failed = state.counters.replacements_failed > removal.failed_before;
    if (!failed && now < deadline) return;
    if (removal.inside)
        throw Failure(FailureKind::state, rank_text(removal.rank) +
                                              " was stopped while it added to a word here, and "
                                              "would end that when it wakes up; end its process, then call again");
    throw Failure(FailureKind::state,
                  rank_text(removal.rank) + (removal.fence ? " may still write here, or" : "") +
                      " has operations in flight that neither completed nor failed, " +
                      (failed ? "and the endpoint cannot be replaced: " + state.replacement.failure
                              : "and the endpoint's replacement has not ended within " +
                                    std::to_string((now - removal.begun) / 1'000'000) + " ms; call again") +
                      "; closing the endpoint ends them");
}

}  // namespace

// Its work ends by itself, or with the endpoint that it was posted over, which is replaced then (SPEC T14).
void Context::remove_peer(std::uint32_t rank) {
    check_usable();
    ContextState& state = *state_;
    const TimeNs deadline = now_ns() + drain_ns + state.options.timeout_ns;
    std::optional<Removal> removal;
    while (true) {
        {
            const TablesChange lock(state);
            state.peer_at(rank);
            const ControlGuard guard(state);
            const TimeNs now = now_ns();
            if (!removal) removal = begin_removal(state, rank, now);
            if (end_traffic(state, *removal, now)) return forget_peer(state, rank);
            state.turn(20'000);
            check_removal(state, *removal, now, deadline);
        }
        doorbell_slice(doorbell().seen(), std::min(deadline, now_ns() + 1'000'000));
    }
}

void Context::map_peer(std::uint32_t rank, std::string_view region, int fd) {
    check_usable();
    ContextState& state = *state_;
    const std::unique_lock lock(state.tables);
    state.peer_at(rank);
    if (state.options.independent)
        throw Failure(FailureKind::state,
                      "an independent endpoint's peers are reached by its provider only, not mapped");
    PeerRecord& peer = state.peers[rank];
    const std::string what = "region '" + std::string(region) + "' of " + rank_text(rank);
    const auto announced = peer.remotes.find(region);
    if (announced == peer.remotes.end())
        throw Failure(FailureKind::invalid_argument, what + " was not announced in its blob");
    const std::uint64_t bytes = state.remotes.find(announced->second)->bytes;
    const std::uint64_t held = file_bytes(fd, what);
    if (held != bytes)
        throw Failure(FailureKind::mismatch,
                      what + " was announced with " + std::to_string(bytes) + " bytes, the descriptor holds " +
                          std::to_string(held),
                      static_cast<std::int32_t>(rank));
    if (peer.mapped.count(region)) throw Failure(FailureKind::state, what + " is already mapped");
    Mapping mapping(fd, bytes, what);
    std::byte* address = mapping.address();
    peer.mapped.emplace(region, std::move(mapping));
    if (region != "runtime") return;
    const ControlGuard guard(state);
    peer.shared = {address, state.shared_layout};
    state.liveness->map(rank, peer.shared);
    peer.shared.about(state.options.rank).reader.store(state.instance, std::memory_order_release);
}

std::byte* Context::peer_memory(std::uint32_t rank, std::string_view region) const {
    check_usable();
    state_->check_rank(rank, "peer_memory()");
    if (rank == state_->options.rank) return region_address(this->region(region));
    const std::shared_lock lock(state_->tables);
    const auto found = state_->peers[rank].mapped.find(region);
    return found == state_->peers[rank].mapped.end() ? nullptr : found->second.address();
}

RemoteRegionId Context::remote_region(std::uint32_t rank, std::string_view region) const {
    check_usable();
    const std::shared_lock lock(state_->tables);
    const PeerRecord& peer = state_->peer_at(rank);
    const auto found = peer.remotes.find(region);
    if (found != peer.remotes.end()) return found->second;
    for (const BlobRegion& listed : peer.blob.regions)
        if (listed.name == region)
            throw Failure(FailureKind::state,
                          "region '" + listed.name + "' of " + rank_text(rank) + " is memory of its caller's, which '" +
                              peer.blob.provider +
                              "' cannot reach; create it there with region(), or use a libfabric provider");
    std::string names;
    for (const auto& [name, id] : peer.remotes) names += (names.empty() ? "" : ", ") + name;
    throw Failure(FailureKind::invalid_argument,
                  rank_text(rank) + " has not announced a region '" + std::string(region) + "'; it has: " + names);
}

std::uint64_t Context::remote_region_bytes(std::uint32_t rank, std::string_view region) const {
    const RemoteRegionId id = remote_region(rank, region);
    const std::shared_lock lock(state_->tables);
    return state_->remote_at(rank, id).bytes;
}

QueuePairId Context::queue_pair(std::uint32_t rank, std::uint32_t lane) const {
    if (rank >= state_->options.size || lane >= state_->options.lanes) return {};
    const PeerRecord& peer = state_->peers[rank];
    return peer.added.load(std::memory_order_acquire) ? peer.lanes[lane] : QueuePairId{};
}

}  // namespace expertwire::runtime
