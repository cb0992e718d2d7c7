// Completions, and the messages that carry notifications and emulated signals.
#include <algorithm>
#include <atomic>

#include "provider/libfabric_provider.hpp"

namespace expertwire::fabric {
namespace {

constexpr std::size_t kBatch = 64;  // completions read at once
constexpr int kRoundsMax = 4;       // so that a poll is bounded however much arrives

}  // namespace

std::size_t LibfabricProvider::poll(std::span<Completion> completions, std::vector<Arrival>& arrivals) {
    if (!objects_) return 0;
    std::size_t count = 0;
    const auto take_immediate = [&] {
        while (!immediate_.empty() && count < completions.size()) {
            completions[count++] = immediate_.back();
            immediate_.pop_back();
            ++counters_.completed;
        }
    };
    take_immediate();
    if (!early_.empty()) take_early(completions, count, arrivals);
    // The old one first: what it still holds comes to an end.
    if (replacing_ && count < completions.size())
        static_cast<void>(drain_queue(queue_of(replaced_), completions, count, arrivals));
    for (int round = 0; round < kRoundsMax && count < completions.size(); ++round) {
        if (!drain_queue(queue_of(current_), completions, count, arrivals)) break;
    }
    if (counted_) {
        counting_ended();
        take_immediate();  // now: whoever polls may sleep where nothing has come
    }
    send_answers();
    send_notices();
    if (!unasked_.empty()) ask_for_keys();
    if (counted_) send_counted();
    post_receives();
    if (!unmoved_.empty()) tell_unmoved();
    if (!ungreeted_.empty()) greet();
    if (!moving_.empty()) advance_moves();
    return count;
}

// True: there may be more.
bool LibfabricProvider::drain_queue(fid_cq* queue, std::span<Completion> completions, std::size_t& count,
                                    std::vector<Arrival>& arrivals) {
    std::array<fi_cq_data_entry, kBatch> entries;
    const std::size_t wanted = std::min(kBatch, completions.size() - count);
    const ssize_t got = fi_cq_read(queue, entries.data(), wanted);
    if (got == -FI_EAVAIL) {
        read_error(queue, completions, count);
        return true;
    }
    if (got <= 0) return false;
    for (std::size_t index = 0; index < static_cast<std::size_t>(got); ++index) {
        if (counted_ && (entries[index].flags & FI_REMOTE_CQ_DATA) != 0) {
            counted_->immediate(static_cast<std::uint32_t>(entries[index].data));
            continue;
        }
        if (entries[index].op_context == nullptr) {
            ++counters_.unattributed_errors;
            continue;
        }
        OperationContext& context = *static_cast<OperationContext*>(entries[index].op_context);
        if (context.role == OperationContext::Role::receive) {
            received(context, entries[index].len, completions, count, arrivals);
        } else {
            complete(context, Status::ok, 0, completions, count);
        }
    }
    return static_cast<std::size_t>(got) == wanted;
}

// An error may come without a context, twice for one operation, or with a negative code.
void LibfabricProvider::read_error(fid_cq* queue, std::span<Completion> completions, std::size_t& count) {
    fi_cq_err_entry entry{};
    if (fi_cq_readerr(queue, &entry, 0) < 0) return;
    const int code = entry.err < 0 ? -entry.err : entry.err;
    if (entry.op_context == nullptr) {
        ++counters_.unattributed_errors;
        return;
    }
    OperationContext& context = *static_cast<OperationContext*>(entry.op_context);
    if (context.role == OperationContext::Role::receive) {
        if (context.state != OperationContext::State::posted) {
            ++counters_.unattributed_errors;
            return;
        }
        ++counters_.dropped_messages;
        context.state = OperationContext::State::idle;
        if (code != FI_ECANCELED) idle_receives_.push_back(&context);
        return;
    }
    complete(context, status_of_error(code), code, completions, count);
}

// libfabric is done with a submission or an answer.
void LibfabricProvider::complete(OperationContext& context, Status status, int code, std::span<Completion> completions,
                                 std::size_t& count) {
    using State = OperationContext::State;
    if (context.state == State::idle || context.state == State::unanswered) {
        ++counters_.unattributed_errors;  // it has ended already
        return;
    }
    --in_flight_[context.endpoint];
    --context.peer->in_flight;
    free_peer(*context.peer);
    if (context.bounce != OperationContext::kNone)
        free_bounces_.push_back(std::exchange(context.bounce, OperationContext::kNone));
    if (context.role == OperationContext::Role::answer) {
        context.state = State::idle;
        idle_receives_.push_back(&receive_of(context));
        return;
    }
    if (context.role == OperationContext::Role::notice) {
        context.state = State::idle;
        free_notices_.push_back(context.index);
        return;
    }
    if (context.region != nullptr) --context.region->in_flight;
    // A counted write is on its way there until it was acknowledged.
    if (context.remote.valid() && !context.immediate) --remotes_[row_of(context.remote)].in_flight;
    if (status != Status::ok || context.peer->removed) uncount(context);
    if (context.state == State::posted_unanswered && status == Status::ok) {
        if (context.peer->removed) {
            finish(context, Status::peer_dead, code, completions, count);
        } else {
            context.state = State::unanswered;
        }
        return;
    }
    if (context.state == State::answered && status == Status::ok) status = context.answer;
    finish(context, status, code, completions, count);
}

void LibfabricProvider::finish(OperationContext& context, Status status, int code, std::span<Completion> completions,
                               std::size_t& count) {
    context.state = OperationContext::State::idle;
    completions[count++] = {context.ticket, status, context.level, code};
    ++counters_.completed;
}

void LibfabricProvider::received(OperationContext& context, std::size_t bytes, std::span<Completion> completions,
                                 std::size_t& count, std::vector<Arrival>& arrivals) {
    context.state = OperationContext::State::idle;
    const std::byte* buffer = receive_buffer(context);
    MessageHeader message;
    const bool whole = bytes >= sizeof(message);
    if (whole) std::memcpy(&message, buffer, sizeof(message));
    if (!whole || message.magic != kMessageMagic || removed_instances_.contains(message.sender)) {
        ++counters_.dropped_messages;
        idle_receives_.push_back(&context);
        return;
    }
    const auto sender = by_instance_.find(message.sender);
    if (sender == by_instance_.end()) return keep_early(context, bytes, message.sender);
    switch (message.kind) {
        case MessageKind::notification:
            arrivals.push_back({sender->second, {buffer + sizeof(message), buffer + bytes}});
            break;
        case MessageKind::signal: {
            OperationContext& answer = answer_of(context);
            answer.message = message;
            answer.message.kind = MessageKind::answer;
            answer.message.status = apply_signal(message);
            unsent_answers_.push_back(&answer);  // the buffer is posted again once its answer has left
            return;
        }
        case MessageKind::answer:
            answer_received(message, completions, count);
            break;
        case MessageKind::revocation:
            revoked_there(message);
            return answer_later(context, message, MessageKind::revocation_answer, Status::ok, held_answers_);
        case MessageKind::revocation_answer:
            revocation_answered(message);
            break;
        case MessageKind::inquiry:
            return answer_later(context, message, MessageKind::inquiry_answer,
                                is_ours(message) ? Status::ok : Status::bad_key, unsent_answers_);
        case MessageKind::inquiry_answer:
            key_answered(message);
            break;
        case MessageKind::counted:
            if (counted_) counted_->message(sender->second, {buffer + sizeof(message), buffer + bytes});
            break;
        case MessageKind::moved:
        case MessageKind::greeting:
            peer_moved(message, {buffer + sizeof(message), buffer + bytes});
            break;
        case MessageKind::moved_answer:
            move_answered(message);
            break;
        default:
            ++counters_.dropped_messages;
    }
    idle_receives_.push_back(&context);
}

// Peers do not add each other at one moment. Who is added first would wait in vain for the answer to a signal that we
// dropped, and everything of it that must come behind that signal with it. Bounded: the oldest one goes.
void LibfabricProvider::keep_early(OperationContext& context, std::size_t bytes, std::uint64_t sender) {
    early_.push_back({&context, bytes, sender});
    if (early_.size() <= options_.receive_buffers / 2) return;
    ++counters_.dropped_messages;
    idle_receives_.push_back(early_.front().receive);
    early_.pop_front();
}

void LibfabricProvider::take_early(std::span<Completion> completions, std::size_t& count,
                                   std::vector<Arrival>& arrivals) {
    for (std::size_t left = early_.size(); left > 0 && count < completions.size(); --left) {
        const Early early = early_.front();
        early_.pop_front();
        if (by_instance_.contains(early.sender) || removed_instances_.contains(early.sender)) {
            received(*early.receive, early.bytes, completions, count, arrivals);
        } else {
            early_.push_back(early);
        }
    }
}

Status LibfabricProvider::apply_signal(const MessageHeader& message) {
    const auto& regions = objects_->regions;
    if (message.region >= regions.size() || !regions[message.region] ||
        regions[message.region]->number != message.registration ||
        regions[message.region]->state != LocalRegion::State::registered ||
        !regions[message.region]->spec.remote_write) {
        ++counters_.dropped_messages;
        return Status::bad_key;
    }
    const RegionSpec& spec = regions[message.region]->spec;
    if (spec.bytes < sizeof(std::uint64_t) || message.offset > spec.bytes - sizeof(std::uint64_t) ||
        message.offset % sizeof(std::uint64_t) != 0) {
        ++counters_.dropped_messages;
        return Status::out_of_range;
    }
    auto& word = *reinterpret_cast<std::uint64_t*>(spec.address + message.offset);
    std::atomic_ref(word).fetch_add(message.operand, std::memory_order_release);
    ++counters_.signals_applied;
    return Status::ok;
}

void LibfabricProvider::answer_received(const MessageHeader& message, std::span<Completion> completions,
                                        std::size_t& count) {
    using State = OperationContext::State;
    const Ticket ticket = Ticket::unpack(message.ticket);
    if (ticket.slot >= objects_->contexts.size()) {
        ++counters_.dropped_messages;
        return;
    }
    OperationContext& context = objects_->contexts[ticket.slot];
    if (context.ticket != ticket || (context.state != State::unanswered && context.state != State::posted_unanswered)) {
        ++counters_.dropped_messages;
        return;
    }
    if (context.state == State::unanswered) {
        finish(context, message.status, 0, completions, count);
        return;
    }
    context.answer = message.status;
    context.state = State::answered;
}

// It waits to leave, or is leaving.
bool LibfabricProvider::is_said(const MessageHeader& notice) const {
    const auto same = [&](const MessageHeader& other, std::uint64_t receiver) {
        return receiver == notice.sender && other.kind == notice.kind && other.region == notice.region &&
               other.registration == notice.registration && other.operand == notice.operand;
    };
    const auto waits = [&](const MessageHeader& other) { return same(other, other.sender); };
    return std::any_of(unsent_notices_.begin(), unsent_notices_.end(), waits) ||
           std::any_of(put_off_notices_.begin(), put_off_notices_.end(), waits) ||
           std::any_of(objects_->notices.begin(), objects_->notices.end(), [&](const OperationContext& other) {
               return other.state != OperationContext::State::idle && same(other.message, other.peer->instance);
           });
}

void LibfabricProvider::say(const MessageHeader& notice) {
    if (!is_said(notice)) unsent_notices_.push_back(notice);
}

void LibfabricProvider::send_notices() {
    while (!unsent_notices_.empty() && !free_notices_.empty()) {
        const auto receiver = by_instance_.find(unsent_notices_.front().sender);
        if (receiver == by_instance_.end()) {  // removed meanwhile
            unsent_notices_.pop_front();
            continue;
        }
        if (const Peer& peer = *peers_[receiver->second.value]; peer.move != Peer::Move::settled) {
            (put_off(peer) ? put_off_notices_ : unsent_notices_).push_back(unsent_notices_.front());
            unsent_notices_.pop_front();  // not to its old endpoint any more
            if (put_off(peer)) continue;
            return;
        }
        OperationContext& notice = objects_->notices[free_notices_.back()];
        notice.peer = peers_[receiver->second.value].get();
        notice.message = unsent_notices_.front();
        notice.message.sender = instance_;
        notice.endpoint = current_;
        const ssize_t outcome =
            fi_send(objects_->endpoints[current_].get(), &notice.message, sizeof(notice.message),
                    descriptor(objects_->notice_registration), address_of(*notice.peer, 0), &notice.fi);
        if (passes(outcome)) {  // behind the others: one unreachable peer must not hold them up
            const bool lost = put_off(*notice.peer);
            (lost ? put_off_notices_ : unsent_notices_).push_back(unsent_notices_.front());
            unsent_notices_.pop_front();
            if (lost) continue;
            return;
        }
        unsent_notices_.pop_front();
        if (outcome != 0) continue;  // it is said again, until the peer answers or is removed
        free_notices_.pop_back();
        notice.state = OperationContext::State::posted;
        ++in_flight_[notice.endpoint];
        ++notice.peer->in_flight;
    }
}

// A peer that moves gets answers at its old endpoint while we wait for some of its own: it may move over to us at the
// same time, and wait for ours.
bool LibfabricProvider::answerable(const Peer& peer) const {
    return peer.move == Peer::Move::settled || (peer.move == Peer::Move::draining && awaits_answers(peer));
}

void LibfabricProvider::send_answers() {
    for (std::size_t index = held_answers_.size(); index-- > 0;) {
        if (on_its_way(held_answers_[index]->message)) continue;
        unsent_answers_.push_back(held_answers_[index]);
        held_answers_.erase(held_answers_.begin() + static_cast<std::ptrdiff_t>(index));
    }
    while (!unsent_answers_.empty()) {
        OperationContext& answer = *unsent_answers_.front();
        const auto sender = by_instance_.find(answer.message.sender);
        if (sender == by_instance_.end()) {  // removed meanwhile
            idle_receives_.push_back(&receive_of(answer));
            unsent_answers_.pop_front();
            continue;
        }
        if (const Peer& peer = *peers_[sender->second.value]; !answerable(peer)) {
            (put_off(peer) ? put_off_answers_ : unsent_answers_).push_back(&answer);
            unsent_answers_.pop_front();
            if (put_off(peer)) continue;
            return;
        }
        answer.peer = peers_[sender->second.value].get();
        answer.endpoint = current_ + lane_of(answer.set);
        answer.message.sender = instance_;
        const ssize_t outcome =
            fi_send(objects_->endpoints[answer.endpoint].get(), &answer.message, sizeof(answer.message),
                    descriptor(objects_->sets[answer.set].answer_registration),
                    address_of(*answer.peer, answer.endpoint), &answer.fi);
        if (passes(outcome)) {  // behind the others: one unreachable peer must not hold them up
            answer.message.sender = answer.peer->instance;
            const bool lost = put_off(*answer.peer);
            (lost ? put_off_answers_ : unsent_answers_).push_back(&answer);
            unsent_answers_.pop_front();
            if (lost) continue;
            return;
        }
        unsent_answers_.pop_front();
        if (outcome != 0) {
            idle_receives_.push_back(&receive_of(answer));
            continue;
        }
        answer.state = OperationContext::State::posted;
        ++in_flight_[answer.endpoint];
        ++answer.peer->in_flight;
    }
}

void LibfabricProvider::expect_nothing_of(PeerId peer) {
    if (objects_ && peer.value < peers_.size() && peers_[peer.value]) peers_[peer.value]->hope = Peer::Hope::lost;
}

// Each message to who is lost is tried once more. One that is refused does not end a poll's round: it is put off again.
void LibfabricProvider::take_what_was_put_off() {
    unsent_notices_.insert(unsent_notices_.end(), put_off_notices_.begin(), put_off_notices_.end());
    unsent_answers_.insert(unsent_answers_.end(), put_off_answers_.begin(), put_off_answers_.end());
    put_off_notices_.clear();
    put_off_answers_.clear();
}

// Beside what is in the queues of messages: greetings, questions, words of those that move.
bool LibfabricProvider::has_something_to_say() const {
    const auto lost = [&](std::uint64_t instance) {
        const auto found = by_instance_.find(instance);
        return found != by_instance_.end() && put_off(*peers_[found->second.value]);
    };
    return std::any_of(moving_.begin(), moving_.end(), [&](std::uint64_t each) { return !lost(each); }) ||
           std::any_of(ungreeted_.begin(), ungreeted_.end(), [&](const Ungreeted& each) { return !each.sent; }) ||
           std::any_of(unasked_.begin(), unasked_.end(), [&](RemoteRegionId id) { return may_ask(id); });
}

void LibfabricProvider::post_receives() {
    while (!idle_receives_.empty()) {
        OperationContext& context = *idle_receives_.back();
        if (!is_open(context.endpoint)) {
            parked_receives_.push_back(&context);
            idle_receives_.pop_back();
            continue;
        }
        const ssize_t outcome =
            fi_recv(objects_->endpoints[context.endpoint].get(), receive_buffer(context), message_bytes_,
                    descriptor(objects_->sets[context.set].memory_registration), FI_ADDR_UNSPEC, &context.fi);
        if (outcome != 0) return;  // tried again at the next poll
        context.state = OperationContext::State::posted;
        idle_receives_.pop_back();
    }
}

bool LibfabricProvider::may_sleep() {
    if (!objects_ || !immediate_.empty() || !unsent_answers_.empty() || !unsent_notices_.empty()) return false;
    if (counted_ && !(counted_->idle() && counted_->ended().empty())) return false;
    if (replacing_ || has_something_to_say()) return false;
    const auto known = [&](const Early& early) { return by_instance_.contains(early.sender); };
    if (std::any_of(early_.begin(), early_.end(), known)) return false;
    if (wait_fd_ < 0) return true;  // shm has no fi_trywait for a queue without a wait object: calling it crashes
    fid* objects[] = {&queue_of(current_)->fid};
    return fi_trywait(objects_->fabric.get(), objects, 1) == FI_SUCCESS;
}

}  // namespace expertwire::fabric
