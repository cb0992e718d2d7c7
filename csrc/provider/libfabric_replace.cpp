// An endpoint replaced by another (SPEC T14), here and as its peers see it. Regions, keys and the address table belong
// to the domain and stay. Two last words per peer, each behind everything that was sent that way before: `moved` from
// the old endpoint to the peer, once nothing of ours is on its way from there to it; `moved_answer` from the peer to
// the old endpoint, once nothing of its own is on its way there. Then the old one is closed for that peer.
#include <algorithm>

#include "provider/libfabric_provider.hpp"

namespace expertwire::fabric {
namespace {

constexpr std::size_t kNameBytesMax = 512;

}  // namespace

// With several endpoints peers spread over them; with MR_ENDPOINT a region ends with the endpoint that it is bound to.
bool LibfabricProvider::replaceable() const {
    return options_.endpoints == 1 && (info_->domain_attr->mr_mode & FI_MR_ENDPOINT) == 0;
}

ControlResult LibfabricProvider::open_replacement(EndpointId old_endpoint, EndpointId& fresh) {
    if (!objects_) return {Status::closed, 0, "open_replacement: the provider was closed"};
    if (!replaceable())
        return {Status::refused, 0,
                "provider \"" + capabilities_.provider +
                    "\" cannot replace an endpoint: it has several, or binds regions to it (FI_MR_ENDPOINT)"};
    if (replacing_ || old_endpoint.value != current_)
        return {Status::refused, 0, "endpoint " + std::to_string(old_endpoint.value) + " is being replaced already"};
    const std::uint32_t place = 1 - current_;
    // A queue of its own: over rxm one that outlives an endpoint bound to it is not safe to wait for (libfabric 2.5.1).
    ControlResult result = open_queue(place);
    if (result.ok()) result = open_endpoint(place);
    std::vector<std::byte> name;
    if (result.ok()) result = name_of(place, name);
    if (result.ok() && sizeof(MessageHeader) + name.size() > message_bytes_)
        result = {Status::refused, 0, "messages are too small for the name of an endpoint"};
    if (result.ok() && objects_->sets[place].receives.empty()) result = open_message_set(place);
    if (!result.ok()) {
        objects_->endpoints[place].reset();
        objects_->queues[place].reset();
        if (fi_control(&queue_of(current_)->fid, FI_GETWAIT, &wait_fd_) != 0) wait_fd_ = -1;
        return result;
    }
    idle_receives_.insert(idle_receives_.end(), parked_receives_.begin(), parked_receives_.end());
    parked_receives_.clear();
    MessageHeader header;
    header.kind = MessageKind::moved;
    header.sender = instance_;
    header.operand = ++replacements_;
    std::memcpy(announcement(), &header, sizeof(header));
    std::memcpy(announcement() + sizeof(header), name.data(), name.size());
    announcement_bytes_ = sizeof(header) + name.size();
    replaced_ = current_;
    current_ = place;
    replacing_ = true;
    post_receives();
    fresh = EndpointId{place};
    return {};
}

void LibfabricProvider::announce_replacement(std::span<const PeerId> peers) {
    for (const PeerId peer : peers) {
        if (peer.value < peers_.size() && peers_[peer.value]) unmoved_.push_back({peers_[peer.value]->instance, false});
    }
}

std::vector<PeerId> LibfabricProvider::unmoved_peers() const {
    std::vector<PeerId> peers;
    for (const Unmoved& unmoved : unmoved_) {
        const auto peer = by_instance_.find(unmoved.instance);
        if (peer != by_instance_.end()) peers.push_back(peer->second);
    }
    return peers;
}

void LibfabricProvider::forgo_peer(PeerId peer) {
    if (peer.value >= peers_.size() || !peers_[peer.value]) return;
    std::erase_if(unmoved_, [&](const Unmoved& each) { return each.instance == peers_[peer.value]->instance; });
}

ssize_t LibfabricProvider::send_word(std::uint32_t endpoint, Peer& peer, const void* bytes, std::size_t length) {
    OperationContext& notice = objects_->notices[free_notices_.back()];
    const bool own = bytes == nullptr;  // the notice's message
    const ssize_t outcome = fi_send(objects_->endpoints[endpoint].get(), own ? &notice.message : bytes,
                                    own ? sizeof(notice.message) : length,
                                    descriptor(own ? objects_->notice_registration : objects_->message_registration),
                                    address_of(peer, endpoint), &notice.fi);
    if (outcome != 0) return outcome;
    free_notices_.pop_back();
    notice.peer = &peer;
    notice.endpoint = endpoint;
    notice.state = OperationContext::State::posted;
    ++in_flight_[endpoint];
    ++peer.in_flight;
    return 0;
}

std::vector<const Peer*> LibfabricProvider::busy_on(std::uint32_t endpoint) const {
    using State = OperationContext::State;
    std::vector<const Peer*> busy;
    const auto look = [&](const std::vector<OperationContext>& contexts) {
        for (const OperationContext& context : contexts) {
            if (context.state == State::idle || context.state == State::unanswered || context.endpoint != endpoint)
                continue;
            busy.push_back(context.peer);
        }
    };
    look(objects_->contexts);
    look(objects_->notices);
    for (const MessageSet& set : objects_->sets) look(set.answers);
    return busy;
}

void LibfabricProvider::tell_unmoved() {
    std::erase_if(unmoved_, [&](const Unmoved& each) { return !by_instance_.contains(each.instance); });
    if (std::all_of(unmoved_.begin(), unmoved_.end(), [](const Unmoved& each) { return each.told; })) return;
    const std::vector<const Peer*> busy = busy_on(replaced_);
    for (Unmoved& unmoved : unmoved_) {
        Peer& peer = *peers_[by_instance_.at(unmoved.instance).value];
        // A peer that moves itself is told at its new endpoint: the old one may be gone before it has read this.
        if (unmoved.told || free_notices_.empty() || peer.move != Peer::Move::settled) continue;
        if (std::find(busy.begin(), busy.end(), &peer) != busy.end()) continue;
        unmoved.told = send_word(replaced_, peer, announcement(), announcement_bytes_) == 0;
    }
}

ControlResult LibfabricProvider::close_endpoint(EndpointId endpoint) {
    if (!objects_) return {Status::closed, 0, "close_endpoint: the provider was closed"};
    if (!replacing_ || endpoint.value != replaced_)
        return {Status::invalid, 0, "endpoint " + std::to_string(endpoint.value) + " is not being replaced"};
    if (!unmoved_peers().empty()) return {Status::would_block, 0, "peers still use it"};
    const int code = fi_close(&objects_->endpoints[replaced_]->fid);
    if (code != 0) return failure(*library_, "fi_close(endpoint)", code);
    objects_->endpoints[replaced_].abandon();  // closed by hand, for the sake of its code
    // With what it still holds: completions of work that nobody waits for, under contexts that are free from here on.
    objects_->queues[replaced_].reset();
    unmoved_.clear();
    release_contexts(replaced_);
    replacing_ = false;
    return {};
}

void LibfabricProvider::release_contexts(std::uint32_t endpoint) {
    using State = OperationContext::State;
    for (OperationContext& context : objects_->contexts) {
        if (context.endpoint == endpoint) release(context);
    }
    for (OperationContext& context : objects_->notices) {
        if (context.endpoint != endpoint || context.state == State::idle) continue;
        release(context);
        free_notices_.push_back(context.index);
    }
    for (MessageSet& set : objects_->sets) {
        for (OperationContext& answer : set.answers) {
            if (answer.endpoint != endpoint || answer.state == State::idle) continue;
            release(answer);
            idle_receives_.push_back(&receive_of(answer));
        }
    }
    for (OperationContext& receive : objects_->sets[endpoint].receives) {
        if (receive.state != State::posted) continue;
        receive.state = State::idle;
        parked_receives_.push_back(&receive);
    }
}

// libfabric is done with it, and nobody will say so.
void LibfabricProvider::release(OperationContext& context) {
    using State = OperationContext::State;
    if (context.state == State::idle) return;
    const bool held = context.state != State::unanswered;
    context.state = State::idle;
    if (!held) return;
    --in_flight_[context.endpoint];
    --context.peer->in_flight;
    if (context.role == OperationContext::Role::submission) {
        if (context.region != nullptr) --context.region->in_flight;
        if (context.remote.valid()) --remotes_[context.remote.value].in_flight;
        if (context.bounce != OperationContext::kNone)
            free_bounces_.push_back(std::exchange(context.bounce, OperationContext::kNone));
    }
    free_peer(*context.peer);
}

// ---- a peer's replacement

void LibfabricProvider::peer_moved(const MessageHeader& message, std::span<const std::byte> name) {
    Peer& peer = *peers_[by_instance_.at(message.sender).value];
    fi_addr_t found = FI_ADDR_UNSPEC;
    if (peer.move != Peer::Move::settled || peer.addresses.size() != 1 || name.empty() || name.size() > kNameBytesMax ||
        fi_av_insert(objects_->addresses.get(), name.data(), 1, &found, 0, nullptr) != 1) {
        ++counters_.dropped_messages;
        return;
    }
    peer.next = found;
    peer.move_number = message.operand;
    peer.move = Peer::Move::draining;
    moving_.push_back(peer.instance);
}

void LibfabricProvider::advance_moves() {
    std::erase_if(moving_, [&](std::uint64_t instance) {
        const auto peer = by_instance_.find(instance);
        if (peer == by_instance_.end()) return true;  // removed meanwhile
        advance_move(*peers_[peer->second.value]);
        return peers_[peer->second.value]->move == Peer::Move::settled;
    });
}

// An emulated signal that has left may not have been read there yet.
bool LibfabricProvider::awaits_answers(const Peer& peer) const {
    if (capabilities_.remote_atomics) return false;
    return std::any_of(objects_->contexts.begin(), objects_->contexts.end(), [&](const OperationContext& context) {
        return context.peer == &peer && context.state == OperationContext::State::unanswered;
    });
}

void LibfabricProvider::advance_move(Peer& peer) {
    if (peer.in_flight != 0) return;
    if (peer.move == Peer::Move::answering) return settle_move(peer);
    if (free_notices_.empty() || awaits_answers(peer)) return;
    MessageHeader& answer = objects_->notices[free_notices_.back()].message;
    answer = {};
    answer.kind = MessageKind::moved_answer;
    answer.sender = instance_;
    answer.operand = peer.move_number;
    const ssize_t outcome = send_word(current_, peer, nullptr, 0);
    if (outcome == 0) {
        peer.move = Peer::Move::answering;
    } else if (outcome != -FI_EAGAIN) {
        settle_move(peer);  // the old endpoint is gone: it did not wait for us
    }
}

void LibfabricProvider::settle_move(Peer& peer) {
    if (peer.before != FI_ADDR_UNSPEC) fi_av_remove(objects_->addresses.get(), &peer.before, 1, 0);
    peer.before = std::exchange(peer.addresses[0], std::exchange(peer.next, FI_ADDR_UNSPEC));
    peer.move = Peer::Move::settled;
}

}  // namespace expertwire::fabric
