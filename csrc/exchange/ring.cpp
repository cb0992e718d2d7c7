#include "exchange/ring.hpp"

#include <algorithm>

namespace expertwire::exchange {

RingEnd outer_sender(const Exchange& exchange, std::uint32_t node) {
    const Layout& layout = exchange.layout();
    const std::uint32_t me = exchange.rank();
    const std::uint32_t entry = exchange.nodes().entry(me, node);
    return {entry,
            layout.outer_slot(me, node, 0),
            layout.inner_slot(entry, me, 0),
            RemoteWord::arrived_inner,
            layout.arrived_inner(me),
            layout.credit_outer(node)};
}

RingEnd inner_receiver(const Exchange& exchange, std::uint32_t source) {
    const Layout& layout = exchange.layout();
    return {source,
            layout.inner_slot(exchange.rank(), source, 0),
            layout.outer_slot(source, exchange.node(), 0),
            RemoteWord::credit_outer,
            layout.credit_outer(exchange.node()),
            layout.arrived_inner(source)};
}

RingEnd inner_sender(const Exchange& exchange, std::uint32_t home) {
    const Layout& layout = exchange.layout();
    return {home,
            layout.inner_slot(exchange.rank(), home, 0),
            layout.outer_slot(home, exchange.node(), 0),
            RemoteWord::arrived_outer,
            layout.arrived_outer(exchange.node()),
            layout.credit_inner(home)};
}

RingEnd outer_receiver(const Exchange& exchange, std::uint32_t node) {
    const Layout& layout = exchange.layout();
    const std::uint32_t me = exchange.rank();
    const std::uint32_t entry = exchange.nodes().entry(me, node);
    return {entry,
            layout.outer_slot(me, node, 0),
            layout.inner_slot(entry, me, 0),
            RemoteWord::credit_inner,
            layout.credit_inner(me),
            layout.arrived_outer(node)};
}

namespace {

std::uint64_t slot_offset(const Shape& shape, std::uint64_t chunk) {
    return chunk % shape.ring_slots * shape.slot_bytes;
}

std::uint64_t count_here(const Exchange& exchange, std::uint64_t offset, std::uint64_t epoch) {
    return word_count(load_word(exchange.mine().control, offset), epoch);
}

}  // namespace

SendRing::SendRing(Exchange& exchange, const RingEnd& end, std::uint64_t epoch, std::uint64_t chunks)
    : exchange_(exchange), end_(end), epoch_(epoch), chunks_(chunks), tickets_(exchange.shape().ring_slots) {}

std::uint64_t SendRing::credited() const {
    return count_here(exchange_, end_.my_word_offset, epoch_);
}

bool SendRing::reap(std::optional<Ticket>& ticket) {
    if (!ticket) return true;
    const Status status = exchange_.port().status(*ticket);
    if (status == Status::pending) return false;
    ticket.reset();
    if (failure_ == Status::ok) failure_ = status;
    return true;
}

std::byte* SendRing::open() {
    if (closed_bytes_ != 0) return nullptr;
    const std::uint32_t slots = exchange_.shape().ring_slots;
    if (sent_ >= slots && credited() + slots <= sent_ && !mutant(Mutant::no_staging_credit)) return nullptr;
    if (!reap(tickets_[sent_ % slots])) return nullptr;
    return exchange_.mine().staging + end_.local_base + slot_offset(exchange_.shape(), sent_);
}

std::uint64_t SendRing::peer_slot() const {
    return end_.peer_base + slot_offset(exchange_.shape(), sent_);
}

void SendRing::close(std::uint64_t bytes, const Port::Piece& apart) {
    closed_bytes_ = bytes;
    apart_ = apart;
    flush();
}

bool SendRing::flush() {
    if (closed_bytes_ == 0) return false;
    const auto slot = static_cast<std::uint32_t>(sent_ % exchange_.shape().ring_slots);
    Port::Put put;
    put.rank = end_.peer;
    put.head = {Region::staging, end_.local_base + slot_offset(exchange_.shape(), sent_), Region::staging, peer_slot(),
                closed_bytes_};
    put.tail = apart_;
    const std::optional<Ticket> ticket = exchange_.put(
        put, end_.peer_word, slot, end_.peer_word_offset + slot * sizeof(std::uint64_t), word_value(epoch_, sent_ + 1));
    if (!ticket) return false;
    tickets_[slot] = ticket;
    ++sent_;
    closed_bytes_ = 0;
    return true;
}

void SendRing::reap() {
    for (std::optional<Ticket>& ticket : tickets_) reap(ticket);
}

bool SendRing::ended() {
    reap();
    return sent_ == chunks_ && failure_ == Status::ok &&
           std::none_of(tickets_.begin(), tickets_.end(), [](const auto& ticket) { return ticket.has_value(); });
}

ReceiveRing::ReceiveRing(Exchange& exchange, const RingEnd& end, std::uint64_t epoch)
    : exchange_(exchange), end_(end), epoch_(epoch) {}

const std::byte* ReceiveRing::front() const {
    const std::uint64_t slot = consumed_ % exchange_.shape().ring_slots;
    const std::uint64_t word = end_.my_word_offset + slot * sizeof(std::uint64_t);
    if (count_here(exchange_, word, epoch_) <= consumed_) return nullptr;
    return exchange_.mine().staging + end_.local_base + slot_offset(exchange_.shape(), consumed_);
}

void ReceiveRing::pop() {
    ++consumed_;
    flush();
}

bool ReceiveRing::flush() {
    if (settled()) return false;
    if (!exchange_.raise(end_.peer, end_.peer_word, end_.peer_word_offset, word_value(epoch_, consumed_))) return false;
    credited_ = consumed_;
    return true;
}

}  // namespace expertwire::exchange
