// Class C over the simulated network: counted writes, the signals that wait for them at their target, and what the two
// sides tell each other. Messages are late, overtake each other and are pushed back as everything else.
#include <algorithm>
#include <array>

#include "provider/simulated.hpp"

namespace expertwire {

// ---- network

// False: pushed back.
bool SimulatedNetwork::send(std::uint32_t rank, std::uint32_t target, const std::vector<std::byte>& bytes) {
    if (random_.chance(faults_.again)) {
        note(NetworkFault::again);
        return false;
    }
    messages_.push_back({rank, target, bytes});
    PostCommand command;
    command.kind = OpKind::read;  // keeps no order with anything
    schedule(arrival(rank, target, command, departure(rank, bytes.size())), EventKind::message,
             static_cast<std::uint32_t>(messages_.size() - 1));
    return true;
}

void SimulatedNetwork::arrive(const Event& event) {
    Message& message = messages_[event.flight];
    if (frozen_[message.source] || frozen_[message.target]) {
        held_.push_back(event);
        return;
    }
    trace(now_, 98, event.flight);
    if (!dead_[message.target]) provider(message.target).inbox_.push_back(std::move(message));
}

std::uint32_t SimulatedNetwork::counting_flight(std::uint32_t rank, Ticket signal) const {
    for (std::uint32_t i = 0; i < flights_.size(); ++i) {
        const Flight& flight = flights_[i];
        if (flight.used && flight.counts && flight.source == rank && flight.command.ticket == signal) return i;
    }
    return static_cast<std::uint32_t>(flights_.size());
}

// The target has counted. A signal whose endpoint or peer was closed meanwhile is gone.
Status SimulatedNetwork::land_counted(std::uint32_t source, Ticket signal) {
    const std::uint32_t index = counting_flight(source, signal);
    if (index == flights_.size() || !flights_[index].waits) return Status::closed;
    Flight& flight = flights_[index];
    flight.outcome = check(source, flight.target, flight.command);
    tell(flight.outcome == Status::ok ? "counted" : "failed", source, flight.target, flight.command, flight.outcome);
    if (flight.outcome == Status::ok) land(flight);
    if (!flight.landed && on_failure) on_failure({source, flight.target, flight.command});
    const Status status = flight.outcome;
    flight.waits = false;
    if (!flight.lost) end(index);
    return status;
}

// True: its owner may be told. Not where its completion is lost: then it stays in flight, as far as anyone may know.
bool SimulatedNetwork::signal_answered(std::uint32_t rank, Ticket signal) {
    const std::uint32_t index = counting_flight(rank, signal);
    if (index == flights_.size()) return true;
    if (flights_[index].lost) return false;
    end(index);
    return true;
}

// ---- provider

PostResult SimulatedProvider::post_counted(const PostCommand& command) {
    const std::optional<std::uint32_t> immediate = counted_->begin_write(command.peer, command.ticket, command.counted);
    if (!immediate) return {PostOutcome::again, Status::ok, 11};
    PostCommand plain = command;
    plain.level = Level::local;  // its own completion says no more than that it has left
    const PostResult result = network_.post(rank_, plain, {.immediate = immediate, .message = {}});
    if (result.outcome != PostOutcome::posted) {
        counted_->undo_write(command.peer, *immediate);
        return result;
    }
    if (ledger_.size() <= command.ticket.slot) ledger_.resize(command.ticket.slot + 1);
    ledger_[command.ticket.slot] = {Sent::posted, command, *immediate};
    return result;
}

PostResult SimulatedProvider::post_counting(const PostCommand& command) {
    std::array<std::byte, 256> message;
    const std::optional<std::size_t> bytes =
        counted_->encode_signal(command.peer, command.counted, {.ticket = command.ticket.pack()}, message);
    if (!bytes) return {PostOutcome::again, Status::ok, 11};
    return network_.post(rank_, command, {.immediate = {}, .message = std::span(message).first(*bytes)});
}

void SimulatedProvider::poll_counted() {
    for (; !immediates_.empty(); immediates_.pop_front()) counted_->immediate(immediates_.front());
    for (; !inbox_.empty(); inbox_.pop_front()) counted_->message(PeerId{inbox_.front().source}, inbox_.front().bytes);
    for (const CountedEnd& end : counted_->ended()) {
        if (!end.signal) {
            acknowledged(end.ticket);
        } else if (network_.signal_answered(rank_, end.ticket)) {
            report({end.ticket, end.status, Level::delivered, end.status == Status::ok ? 0 : 5});
        }
    }
    counted_->ended().clear();
    counted_->turn();
    for (std::size_t left = 64; left > 0 && counted_->front() != nullptr; --left) {
        const Counting::Outgoing& out = *counted_->front();
        if (peers_[out.peer.value] && !network_.send(rank_, *peers_[out.peer.value], out.bytes)) {
            counted_->postpone();
            break;
        }
        counted_->sent();
    }
}

void SimulatedProvider::report(const Completion& completion) {
    completions_.push_back(completion);
}

// The network's word on a counted write.
void SimulatedProvider::left(const Completion& completion, std::uint32_t immediate) {
    Ledger& ledger = ledger_[completion.ticket.slot];
    const bool current = ledger.command.ticket == completion.ticket && ledger.immediate == immediate;
    if (!current || ledger.state == Sent::none) return;
    if (completion.status != Status::ok) {
        if (ledger.state != Sent::acknowledged) counted_->abandon_write(ledger.command.peer, immediate);
    } else if (ledger.state == Sent::posted) {
        ledger.state = Sent::left;
        return;
    }
    ledger.state = Sent::none;
    report({completion.ticket, completion.status, Level::delivered, completion.code});
}

void SimulatedProvider::acknowledged(Ticket write) {
    Ledger& ledger = ledger_[write.slot];
    if (ledger.command.ticket != write || ledger.state == Sent::none) return;
    if (ledger.state == Sent::posted) {
        ledger.state = Sent::acknowledged;
        return;
    }
    ledger.state = Sent::none;
    report({write, Status::ok, Level::delivered, 0});
}

// They end without a word, as what posted them knows; their immediates may still come.
void SimulatedProvider::abandon(const std::function<bool(const PostCommand&)>& which) {
    for (Ledger& ledger : ledger_) {
        if (ledger.state == Sent::none || !which(ledger.command)) continue;
        if (ledger.state != Sent::acknowledged) counted_->abandon_write(ledger.command.peer, ledger.immediate);
        ledger.state = Sent::none;
    }
}

}  // namespace expertwire
