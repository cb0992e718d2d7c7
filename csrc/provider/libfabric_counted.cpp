// Class C over libfabric: writes with immediate data, and the messages that counted.cpp makes of them.
#include <algorithm>

#include "provider/libfabric_provider.hpp"

namespace expertwire::fabric {
namespace {

// Polls, some 2 µs each where somebody polls all the time: a signal comes that much behind its write. Nobody sleeps
// over it (may_sleep).
constexpr std::uint32_t kPatience = 16;

}  // namespace

void LibfabricProvider::open_counting() {
    counted_ = std::make_unique<Counting>(options_.counted_tags, message_bytes_ - sizeof(MessageHeader), kPatience,
                                          [this](PeerId, const CountedSignal& signal) {
                                              MessageHeader message;
                                              message.region = signal.region;
                                              message.registration = signal.registration;
                                              message.offset = signal.offset;
                                              message.operand = signal.operand;
                                              return apply_signal(message);
                                          });
}

PostResult LibfabricProvider::post_counted(const PostCommand& command, OperationContext& context) {
    context.immediate = counted_->begin_write(command.peer, command.ticket, command.counted);
    if (!context.immediate) return posted(-FI_EAGAIN, command, context);
    const ssize_t outcome = post_rma(command, context);
    const PostResult result = posted(outcome, command, context);
    if (outcome == 0) {
        context.state = OperationContext::State::posted_unanswered;
    } else {
        counted_->undo_write(command.peer, *std::exchange(context.immediate, std::nullopt));
    }
    return result;
}

// A signal whose target is to count for it; nullopt: all that it covers was acknowledged, it goes as any other.
std::optional<ssize_t> LibfabricProvider::post_counting(const PostCommand& command, OperationContext& context) {
    if (free_bounces_.empty()) return -FI_EAGAIN;
    std::byte* buffer = objects_->message_memory.data() + std::size_t{free_bounces_.back()} * message_bytes_;
    MessageHeader header;
    header.kind = MessageKind::counted;
    header.sender = instance_;
    std::memcpy(buffer, &header, sizeof(header));
    const RegionKey& key = remotes_[row_of(command.remote)].key;
    const CountedSignal signal{command.ticket.pack(), key.region, key.registration, command.remote_offset,
                               command.operand};
    const std::span<std::byte> room(buffer + sizeof(header), message_bytes_ - sizeof(header));
    const std::optional<std::size_t> bytes = counted_->encode_signal(command.peer, command.counted, signal, room);
    if (!bytes) return -FI_EAGAIN;
    if (*bytes == 0) return std::nullopt;
    const ssize_t outcome = fi_send(objects_->endpoints[command.endpoint.value].get(), buffer, sizeof(header) + *bytes,
                                    descriptor(objects_->message_registration),
                                    address_of(*context.peer, command.endpoint.value), &context.fi);
    if (outcome == 0) {
        context.bounce = free_bounces_.back();
        free_bounces_.pop_back();
    }
    return outcome;
}

// What peers have acknowledged and answered. Ends that come before the operation's own completion wait for that.
void LibfabricProvider::counting_ended() {
    using State = OperationContext::State;
    for (const CountedEnd& end : counted_->ended()) {
        if (end.ticket.slot >= objects_->contexts.size()) continue;
        OperationContext& context = objects_->contexts[end.ticket.slot];
        const bool waits = context.state == State::unanswered || context.state == State::posted_unanswered;
        if (context.ticket != end.ticket || !waits) {
            ++counters_.dropped_messages;
            continue;
        }
        const bool write = context.immediate.has_value();
        context.immediate.reset();
        if (context.state == State::posted_unanswered) {
            context.answer = end.status;
            context.state = State::answered;
            continue;
        }
        if (write) --remotes_[row_of(context.remote)].in_flight;
        context.state = State::idle;
        immediate_.push_back({context.ticket, end.status, context.level, 0});
    }
    counted_->ended().clear();
}

void LibfabricProvider::send_counted() {
    counted_->turn();
    for (std::size_t left = kNotices; left > 0; --left) {
        const Counting::Outgoing* out = counted_->front();
        if (out == nullptr || free_notices_.empty() || free_bounces_.empty()) return;
        Peer* peer = out->peer.value < peers_.size() ? peers_[out->peer.value].get() : nullptr;
        if (peer == nullptr) {  // removed meanwhile
            counted_->sent();
            continue;
        }
        if (peer->move == Peer::Move::answering || peer->move == Peer::Move::unheard) {  // not where it was any more
            put_off(*peer) ? counted_->sent() : counted_->postpone();
            continue;
        }
        const std::uint32_t bounce = free_bounces_.back();
        std::byte* buffer = objects_->message_memory.data() + std::size_t{bounce} * message_bytes_;
        MessageHeader header;
        header.kind = MessageKind::counted;
        header.sender = instance_;
        std::memcpy(buffer, &header, sizeof(header));
        std::memcpy(buffer + sizeof(header), out->bytes.data(), out->bytes.size());
        const ssize_t outcome = send_word(current_, *peer, {buffer, sizeof(header) + out->bytes.size()}, bounce);
        if (passes(outcome) && !put_off(*peer)) {
            counted_->postpone();
            return;
        }
        if (outcome == 0) free_bounces_.pop_back();
        counted_->sent();  // or the peer is gone; who removes it ends what waits for this
    }
}

// The write has ended without its acknowledgement.
void LibfabricProvider::uncount(OperationContext& context) {
    if (!context.immediate) return;
    const auto peer = by_instance_.find(context.peer->instance);
    if (peer != by_instance_.end()) counted_->abandon_write(peer->second, *context.immediate);
    context.immediate.reset();
    if (context.remote.valid()) --remotes_[row_of(context.remote)].in_flight;
}

}  // namespace expertwire::fabric
