// Endpoints replaced by others (SPEC T14), here and as their peers see it; all of them at once. Regions, keys and the
// address table belong to the domain and stay. Last words to and from each peer, each behind everything that was sent
// that way before: `moved` over each old endpoint to the peer, once nothing of ours is on its way from there to it;
// `moved_answer` over each open endpoint of the peer's to the old ones, once nothing of its own is on its way there.
// The old ones are closed for that peer when all of them have come: what one path carries says nothing of another, and
// with only one answer those that a peer had sent over its other endpoints were lost now and then, as of one that was
// replacing its own.
//
// A peer's address may be older than a replacement. So nothing is posted to a peer before it has said where it is, in a
// `greeting`, which each side sends to whom it adds, and again until it was answered.
#include <algorithm>

#include "provider/libfabric_provider.hpp"

namespace expertwire::fabric {
// With MR_ENDPOINT a region ends with the endpoint that it is bound to.
bool LibfabricProvider::replaceable() const {
    return (info_->domain_attr->mr_mode & FI_MR_ENDPOINT) == 0;
}

ControlResult LibfabricProvider::open_replacement(EndpointId old_first, EndpointId& fresh_first) {
    if (!objects_) return {Status::closed, 0, "open_replacement: the provider was closed"};
    if (!replaceable())
        return {Status::refused, 0,
                "provider \"" + capabilities_.provider +
                    "\" binds regions to endpoints (FI_MR_ENDPOINT): they would end with them"};
    if (replacing_ || old_first.value != current_)
        return {Status::refused, 0, "endpoint " + std::to_string(old_first.value) + " is being replaced already"};
    const std::uint32_t first = current_ == 0 ? options_.endpoints : 0;
    ControlResult result = open_half(first);
    if (result.ok()) result = write_words(first, replacements_ + 1);
    if (!result.ok()) {
        for (std::uint32_t lane = 0; lane < options_.endpoints; ++lane) objects_->endpoints[first + lane].reset();
        objects_->queues[half_of(first)].reset();
        if (fi_control(&queue_of(current_)->fid, FI_GETWAIT, &wait_fd_) != 0) wait_fd_ = -1;
        return result;
    }
    idle_receives_.insert(idle_receives_.end(), parked_receives_.begin(), parked_receives_.end());
    parked_receives_.clear();
    replaced_ = current_;
    current_ = first;
    replacing_ = true;
    ++replacements_;
    post_receives();
    fresh_first = EndpointId{first};
    return {};
}

ControlResult LibfabricProvider::open_half(std::uint32_t first) {
    // A queue of its own: over rxm one that outlives an endpoint bound to it is not safe to wait for (libfabric 2.5.1).
    ControlResult result = open_queue(half_of(first));
    for (std::uint32_t lane = 0; result.ok() && lane < options_.endpoints; ++lane) {
        result = open_endpoint(first + lane);
        if (result.ok() && objects_->sets[first + lane].receives.empty()) result = open_message_set(first + lane);
    }
    return result;
}

// One for each half and kind: what is on its way is never written again.
std::span<std::byte> LibfabricProvider::word_about(std::uint32_t half, MessageKind kind) {
    const std::size_t from_end = 2 * half + (kind == MessageKind::greeting ? 2 : 1);
    std::byte* const end = objects_->message_memory.data() + objects_->message_memory.size();
    return {end - from_end * message_bytes_, word_bytes_};
}

ControlResult LibfabricProvider::write_words(std::uint32_t first, std::uint64_t number) {
    std::vector<std::byte> names;
    for (std::uint32_t lane = 0; lane < options_.endpoints; ++lane) {
        std::vector<std::byte> name;
        if (ControlResult result = name_of(first + lane, name); !result.ok()) return result;
        const auto length = to_bytes(static_cast<std::uint32_t>(name.size()));
        names.insert(names.end(), length.begin(), length.end());
        names.insert(names.end(), name.begin(), name.end());
    }
    if (sizeof(MessageHeader) + names.size() > message_bytes_)
        return {Status::refused, 0,
                "the names of " + std::to_string(options_.endpoints) + " endpoints take " +
                    std::to_string(names.size()) + " bytes, and a message holds " +
                    std::to_string(message_bytes_ - sizeof(MessageHeader))};
    word_bytes_ = sizeof(MessageHeader) + names.size();
    MessageHeader header;
    header.sender = instance_;
    header.operand = number;
    header.registration = options_.endpoints;
    for (const MessageKind kind : {MessageKind::moved, MessageKind::greeting}) {
        header.kind = kind;
        std::byte* const word = word_about(half_of(first), kind).data();
        std::memcpy(word, &header, sizeof(header));
        std::memcpy(word + sizeof(header), names.data(), names.size());
    }
    return {};
}

void LibfabricProvider::announce_replacement(std::span<const PeerId> peers) {
    for (const PeerId peer : peers) {
        if (peer.value < peers_.size() && peers_[peer.value]) unmoved_.push_back({peers_[peer.value]->instance});
    }
}

// Those, too, to whose own replacement we are answering: the answers go over the old endpoints as well.
std::vector<UnmovedPeer> LibfabricProvider::unmoved_peers() const {
    std::vector<UnmovedPeer> peers;
    for (const Unmoved& unmoved : unmoved_) {
        const auto peer = by_instance_.find(unmoved.instance);
        if (peer != by_instance_.end()) peers.push_back({peer->second, unmoved.told == options_.endpoints});
    }
    for (const std::uint64_t instance : moving_) {
        const auto peer = by_instance_.find(instance);
        if (peer != by_instance_.end() && peers_[peer->second.value]->move == Peer::Move::answering)
            peers.push_back({peer->second, true});
    }
    return peers;
}

void LibfabricProvider::forgo_peer(PeerId peer) {
    if (peer.value >= peers_.size() || !peers_[peer.value]) return;
    std::erase_if(unmoved_, [&](const Unmoved& each) { return each.instance == peers_[peer.value]->instance; });
    if (peers_[peer.value]->move == Peer::Move::answering) settle_move(*peers_[peer.value]);
}

// `word`: of word_about(); empty: the message of the notice that is next.
ssize_t LibfabricProvider::send_word(std::uint32_t endpoint, Peer& peer, std::span<const std::byte> word,
                                     std::uint32_t bounce) {
    OperationContext& notice = objects_->notices[free_notices_.back()];
    const bool own = word.empty();
    const ssize_t outcome =
        fi_send(objects_->endpoints[endpoint].get(), own ? static_cast<const void*>(&notice.message) : word.data(),
                own ? sizeof(notice.message) : word.size(),
                descriptor(own ? objects_->notice_registration : objects_->message_registration),
                address_of(peer, endpoint), &notice.fi);
    if (outcome != 0) return outcome;
    free_notices_.pop_back();
    if (!own) notice.message = {};  // of what it said before
    notice.peer = &peer;
    notice.endpoint = endpoint;
    notice.bounce = bounce;
    notice.state = OperationContext::State::posted;
    ++in_flight_[endpoint];
    ++peer.in_flight;
    return 0;
}

std::vector<const Peer*> LibfabricProvider::busy_on(std::uint32_t half) const {
    using State = OperationContext::State;
    std::vector<const Peer*> busy;
    const auto look = [&](const std::vector<OperationContext>& contexts) {
        for (const OperationContext& context : contexts) {
            const bool held = context.state != State::idle && context.state != State::unanswered;
            if (held && half_of(context.endpoint) == half) busy.push_back(context.peer);
        }
    };
    look(objects_->contexts);
    look(objects_->notices);
    for (const MessageSet& set : objects_->sets) look(set.answers);
    return busy;
}

void LibfabricProvider::tell_unmoved() {
    std::erase_if(unmoved_, [&](const Unmoved& each) { return !by_instance_.contains(each.instance); });
    const auto all_told = [&](const Unmoved& each) { return each.told == options_.endpoints; };
    if (std::all_of(unmoved_.begin(), unmoved_.end(), all_told)) return;
    const std::vector<const Peer*> busy = busy_on(half_of(replaced_));
    for (Unmoved& unmoved : unmoved_) {
        Peer& peer = *peers_[by_instance_.at(unmoved.instance).value];
        // A peer that moves itself is told at its new endpoints: the old ones may be gone before they have read this.
        if (peer.move != Peer::Move::settled) continue;
        if (unmoved.told == 0 && std::find(busy.begin(), busy.end(), &peer) != busy.end()) continue;
        const auto word = word_about(half_of(current_), MessageKind::moved);
        while (!all_told(unmoved) && !free_notices_.empty() && send_word(replaced_ + unmoved.told, peer, word) == 0)
            ++unmoved.told;
    }
}

// What was not answered is said again. Who does not answer last words may not have read them, or we not its own: it is
// greeted as one that was added.
void LibfabricProvider::greet_peers() {
    for (Ungreeted& each : ungreeted_) each.sent = false;
    std::erase_if(unmoved_, [](const Unmoved& each) { return each.answered; });
    for (Unmoved& each : unmoved_) {
        const auto same = [&](const Ungreeted& other) { return other.instance == each.instance; };
        each.beats += each.told == options_.endpoints ? 1 : 0;
        if (each.overdue() && std::none_of(ungreeted_.begin(), ungreeted_.end(), same))
            ungreeted_.push_back({each.instance});
    }
    take_what_was_put_off();
    ask_again();
    revoke_again();
}

void LibfabricProvider::greet() {
    std::erase_if(ungreeted_, [&](const Ungreeted& each) { return !by_instance_.contains(each.instance); });
    for (Ungreeted& each : ungreeted_) {
        if (each.sent || free_notices_.empty()) continue;
        Peer& peer = *peers_[by_instance_.at(each.instance).value];
        if (peer.moves() && !put_off(peer)) continue;
        // It is told by the last words on the old paths, and must not go over before they have come.
        const bool told = std::any_of(unmoved_.begin(), unmoved_.end(), [&](const Unmoved& unmoved) {
            return unmoved.instance == each.instance && !unmoved.overdue();
        });
        each.sent = told || peer.moves() ||
                    send_word(current_, peer, word_about(half_of(current_), MessageKind::greeting)) == 0 ||
                    put_off(peer);
    }
}

ControlResult LibfabricProvider::close_endpoints(EndpointId old_first) {
    if (!objects_) return {Status::closed, 0, "close_endpoints: the provider was closed"};
    if (!replacing_ || old_first.value != replaced_)
        return {Status::invalid, 0, "endpoint " + std::to_string(old_first.value) + " is not being replaced"};
    if (!unmoved_peers().empty()) return {Status::would_block, 0, "peers still use it"};
    for (std::uint32_t lane = 0; lane < options_.endpoints; ++lane) {
        Handle<fid_ep>& endpoint = objects_->endpoints[replaced_ + lane];
        if (!endpoint) continue;
        const int code = fi_close(&endpoint->fid);
        if (code != 0) return failure(*library_, "fi_close(endpoint)", code);
        endpoint.abandon();  // closed by hand, for the sake of its code
    }
    // With what it still holds: completions of work that nobody waits for, under contexts that are free from here on.
    objects_->queues[half_of(replaced_)].reset();
    unmoved_.clear();
    release_contexts(half_of(replaced_));
    replacing_ = false;
    return {};
}

void LibfabricProvider::release_contexts(std::uint32_t half) {
    using State = OperationContext::State;
    for (OperationContext& context : objects_->contexts) {
        if (half_of(context.endpoint) == half) release(context);
    }
    for (OperationContext& context : objects_->notices) {
        if (half_of(context.endpoint) != half || context.state == State::idle) continue;
        release(context);
        free_notices_.push_back(context.index);
    }
    for (MessageSet& set : objects_->sets) {
        for (OperationContext& answer : set.answers) {
            if (half_of(answer.endpoint) != half || answer.state == State::idle) continue;
            release(answer);
            idle_receives_.push_back(&receive_of(answer));
        }
        for (OperationContext& receive : set.receives) {
            if (half_of(receive.endpoint) != half || receive.state != State::posted) continue;
            receive.state = State::idle;
            parked_receives_.push_back(&receive);
        }
    }
}

// libfabric is done with it, and nobody will say so.
void LibfabricProvider::release(OperationContext& context) {
    using State = OperationContext::State;
    if (context.state == State::idle) return;
    const bool held = context.state != State::unanswered;
    context.state = State::idle;
    const bool counted = context.immediate.has_value();
    uncount(context);
    if (!held) return;
    --in_flight_[context.endpoint];
    --context.peer->in_flight;
    if (context.role == OperationContext::Role::submission) {
        if (context.region != nullptr) --context.region->in_flight;
        if (context.remote.valid() && !counted) --remotes_[row_of(context.remote)].in_flight;
    }
    if (context.bounce != OperationContext::kNone)
        free_bounces_.push_back(std::exchange(context.bounce, OperationContext::kNone));
    free_peer(*context.peer);
}

// ---- a peer's replacement

void LibfabricProvider::peer_moved(const MessageHeader& message, std::span<const std::byte> bytes) {
    Peer& peer = *peers_[by_instance_.at(message.sender).value];
    if (message.kind == MessageKind::greeting) {
        if (!peer.moves()) peer_greets(peer, message, bytes);  // else it is said again
        return;
    }
    // Its address was made when it was there already: nothing of ours ever went to where it was before.
    if (message.operand <= peer.move_number) {
        if (!peer.moves()) return answer_greeting(peer);
        ++counters_.dropped_messages;
        return;
    }
    if (std::exchange(peer.next_number, message.operand) != message.operand) {
        peer.last_words = 0;
        peer.later.clear();
    }
    if (++peer.last_words < message.registration) return;
    // It may have read our answers to its last move before we know that they have left, and move again at once. This is
    // said once only.
    if (peer.moves()) {
        peer.later.assign(bytes.begin(), bytes.end());
    } else if (begin_move(peer, bytes)) {
        moving_.push_back(peer.instance);
    }
}

bool LibfabricProvider::begin_move(Peer& peer, std::span<const std::byte> names) {
    if (!insert_names(peer, names)) return false;
    peer.move = Peer::Move::draining;
    return true;
}

// It has added us, and what is sent to it goes there. It was removed here and is added again where its number is new
// and yet it was heard before.
void LibfabricProvider::peer_greets(Peer& peer, const MessageHeader& message, std::span<const std::byte> names) {
    if (message.operand > peer.move_number) {
        peer.next_number = message.operand;
        peer.later.clear();
        // It says so again: what is on its way to where it was goes first.
        if (peer.move == Peer::Move::settled && (peer.in_flight != 0 || !all_answered(peer))) {
            if (begin_move(peer, names)) moving_.push_back(peer.instance);
            return;
        }
        if (!insert_names(peer, names)) return;
        settle_move(peer);
        for (Ungreeted& each : ungreeted_)
            each.sent = each.sent && each.instance != peer.instance;  // it went elsewhere
    }
    peer.move = Peer::Move::settled;
    answer_greeting(peer);
}

// The addresses of next_number. False: they are not as many as it had, or not of this network.
bool LibfabricProvider::insert_names(Peer& peer, std::span<const std::byte> bytes) {
    const EndpointNames names = split_names(bytes, peer.addresses.size(), name_format());
    std::vector<fi_addr_t> found;
    if (!names.wrong.empty() || objects_->addresses.insert(names.names, found) != 0) {
        ++counters_.dropped_messages;
        return false;
    }
    peer.next = std::move(found);
    peer.move_number = peer.next_number;
    return true;
}

void LibfabricProvider::answer_greeting(const Peer& peer) {
    MessageHeader answer;
    answer.kind = MessageKind::moved_answer;
    answer.sender = peer.instance;
    answer.operand = peer.move_number;
    answer.registration = 1;
    say(answer);
}

// It knows where we are, and nothing of it comes that way any more to where we were.
void LibfabricProvider::move_answered(const MessageHeader& message) {
    if (message.operand != replacements_) return;
    Peer& peer = *peers_[by_instance_.at(message.sender).value];
    if (peer.move == Peer::Move::unheard) peer.move = Peer::Move::settled;  // it answers where we have greeted it
    std::erase_if(ungreeted_, [&](const Ungreeted& each) { return each.instance == message.sender; });
    std::erase_if(unmoved_, [&](Unmoved& each) {
        if (each.instance != message.sender || ++each.answers < message.registration) return false;
        each.answered = true;
        return !each.overdue();  // else until the next beat: what it sent before may come over another path
    });
}

void LibfabricProvider::advance_moves() {
    std::erase_if(moving_, [&](std::uint64_t instance) {
        const auto found = by_instance_.find(instance);
        if (found == by_instance_.end()) return true;  // removed meanwhile
        Peer& peer = *peers_[found->second.value];
        if (peer.moves()) advance_move(peer);  // it does not where it was forgone, or removed and added again
        if (peer.moves()) return false;
        const std::vector<std::byte> later = std::exchange(peer.later, {});
        return later.empty() || !begin_move(peer, later);
    });
}

bool LibfabricProvider::all_answered(const Peer& peer) const {
    return std::none_of(objects_->contexts.begin(), objects_->contexts.end(), [&](const OperationContext& context) {
        return context.peer == &peer && context.state == OperationContext::State::unanswered;
    });
}

// An emulated signal that has left may not have been read there yet, nor a counted write have arrived.
bool LibfabricProvider::awaits_answers(const Peer& peer) const {
    return (!capabilities_.remote_atomics || counted_) && !all_answered(peer);
}

void LibfabricProvider::advance_move(Peer& peer) {
    if (peer.move == Peer::Move::draining) {
        if (peer.in_flight != 0 || awaits_answers(peer)) return;
        for (std::uint32_t endpoint = 0; endpoint < objects_->endpoints.size(); ++endpoint)
            if (is_open(endpoint)) peer.answer_over.push_back(endpoint);
        peer.answers = static_cast<std::uint32_t>(peer.answer_over.size());
        peer.move = Peer::Move::answering;
    }
    while (!peer.answer_over.empty()) {
        if (free_notices_.empty()) return;
        MessageHeader& answer = objects_->notices[free_notices_.back()].message;
        answer = {};
        answer.kind = MessageKind::moved_answer;
        answer.sender = instance_;
        answer.operand = peer.move_number;
        answer.registration = peer.answers;
        const ssize_t outcome = send_word(peer.answer_over.back(), peer, {});
        if (passes(outcome)) return;
        peer.answer_over.pop_back();
        if (outcome != 0) peer.answer_over.clear();  // the old endpoints are gone: they did not wait for us
    }
    if (peer.in_flight == 0) settle_move(peer);
}

void LibfabricProvider::settle_move(Peer& peer) {
    objects_->addresses.remove(peer.before);
    peer.before = std::exchange(peer.addresses, std::exchange(peer.next, {}));
    peer.move = Peer::Move::settled;
    peer.answer_over.clear();
}

}  // namespace expertwire::fabric
