// The contract between the core and whatever touches a network. One implementation per kind of network; the simulated
// one obeys the same contract in virtual time. A provider is driven by one thread at a time (whoever holds the progress
// token), never throws out of post() or poll(), never blocks, and never retries by itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/commands.hpp"
#include "engine/types.hpp"
#include "provider/capabilities.hpp"

namespace expertwire {

// What arrived here without having been asked for. Emulated signals are applied inside poll() and are not listed.
struct Arrival {
    PeerId peer;
    std::vector<std::byte> payload;
};

struct RegionSpec {
    std::byte* address = nullptr;
    std::uint64_t bytes = 0;
    bool remote_write = true;
    bool remote_read = true;
    int fd = -1;                  // the memfd that backs it, if any (borrowed): what lets `local` peers map it
    std::uint64_t fd_offset = 0;  // bytes
};

// Things that happened and changed nothing, counted so that they are seen (statistics(), soak).
struct ProviderCounters {
    std::uint64_t posted = 0, again = 0, completed = 0, failed = 0;
    std::uint64_t unattributed_errors = 0;  // error without a context, or for an operation that had already ended
    std::uint64_t dropped_messages = 0;     // from an unknown sender, malformed, or for a region that is gone
    std::uint64_t signals_applied = 0;      // emulated signals that this side applied
};

// Failures of the control plane carry the call, its arguments and the code in words; bind/ turns them into exceptions.
struct ControlResult {
    Status status = Status::ok;
    std::int32_t code = 0;
    std::string message;
    bool ok() const { return status == Status::ok; }
};

// A peer that may still have something on its way to endpoints that are being replaced.
struct UnmovedPeer {
    PeerId peer;
    bool told = false;  // by a word that has been posted: an answer is to come
};

class Provider {
  public:
    virtual ~Provider() = default;
    virtual const Capabilities& capabilities() const = 0;

    // Control plane (any thread, serialised by the caller with the progress token).
    virtual ControlResult register_region(RegionId id, const RegionSpec& spec) = 0;
    // Revokes the region's key. `would_block`: a peer may still be writing into it; poll and call again (nothing new is
    // taken for it meanwhile). `refused`: operations of our own use it.
    virtual ControlResult deregister_region(RegionId id) = 0;
    virtual std::vector<std::byte> address(EndpointId endpoint) const = 0;  // for the bootstrap
    virtual std::vector<std::byte> region_key(RegionId id) const = 0;  // for the bootstrap; empty: no peer can reach it
    virtual ControlResult add_peer(PeerId peer, std::span<const std::byte> address) = 0;
    virtual ControlResult remove_peer(PeerId peer) = 0;
    virtual ControlResult add_remote_region(PeerId peer, RemoteRegionId id, std::span<const std::byte> key) = 0;
    // Its row may be another's from now on. What was not posted with it fails (bad_key), what is on its way goes on.
    virtual void forget_remote_region(RemoteRegionId) {}
    // From here on it may not write here any more, whatever it knows, until it is added again. For providers that
    // cannot replace an endpoint.
    virtual void fence_peer(PeerId) {}
    // It was fenced off in the middle of an operation on that region, which goes on to its end, when it wakes up.
    virtual bool stands_in(PeerId, RegionId) { return false; }

    // It is being removed: what only its answer would end has failed (peer_dead). Again in every turn of a removal.
    virtual void forsake_peer(PeerId) {}

    // It is held dead, or has left, until it is removed. What is still to be said to it is tried at greet_peers() only,
    // and keeps nobody awake.
    virtual void expect_nothing_of(PeerId) {}

    // Data plane.
    // Class C: the peer counts what comes from here. False: not yet, or not now; it may have to be asked, so ask again.
    virtual bool counts(PeerId) { return false; }
    // So many bytes of a long write or read are better posted by themselves, before the rest of it; 0: none.
    virtual std::uint64_t lead_bytes(OpKind, RegionId /*local*/, std::uint64_t /*local_offset*/,
                                     RemoteRegionId /*remote*/, std::uint64_t /*remote_offset*/) const {
        return 0;
    }
    virtual PostResult post(const PostCommand& command) = 0;
    virtual std::size_t poll(std::span<Completion> completions, std::vector<Arrival>& arrivals) = 0;

    // A descriptor that becomes readable when poll() has work, or -1 where the provider has none (bounded polling
    // then). may_sleep() is asked right before sleeping on it (fi_trywait): false means poll again first.
    virtual int wait_fd() const = 0;
    // Polls do the work of what was posted, and there is more: look again at once.
    virtual bool copying() const { return false; }
    virtual bool may_sleep() = 0;

    // Replacing the endpoints, all at once (SPEC T14): the only way to be sure that what was posted over it touches no
    // memory any more. In this order: open_replacement, announce_replacement, then polls until unmoved_peers() is empty
    // and the engine has drained the old ones, then close_endpoints. Regions, keys and peers stay as they are. `old`
    // and `fresh` are the first of as many as were asked for; the others follow in order.
    virtual bool replaces_endpoints() const { return false; }  // this provider, with these options
    virtual ControlResult open_replacement(EndpointId /*old*/, EndpointId& /*fresh*/) {
        return {Status::refused, 0, "this provider cannot replace an endpoint"};
    }
    // Tells them, behind everything that was sent to each of them over the old endpoints, where we are reached now.
    virtual void announce_replacement(std::span<const PeerId>) {}
    // A beat: what was said to peers and is not answered yet is said again, where we are reached to those that were
    // added since. To be called now and then.
    virtual void greet_peers() {}
    // Who has not yet answered that.
    virtual std::vector<UnmovedPeer> unmoved_peers() const { return {}; }
    // It is not waited for any more: what it still sends to the old endpoint will fail there.
    virtual void forgo_peer(PeerId) {}
    // `would_block`: poll and call again. `ok`: nothing posted over it touches memory any more, and no completion of it
    // will be reported.
    virtual ControlResult close_endpoints(EndpointId /*old*/) {
        return {Status::refused, 0, "this provider cannot replace an endpoint"};
    }

    virtual ProviderCounters counters() const { return {}; }

    // Ends everything in flight without completions and releases every resource. Idempotent.
    virtual void close() = 0;
};

}  // namespace expertwire
