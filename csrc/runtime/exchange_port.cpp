#include "runtime/exchange_port.hpp"

#include <array>

namespace expertwire::runtime {

ContextPort::ContextPort(Context& context, std::uint32_t rank, const exchange::NodeTable& nodes, const Names& names)
    : context_(context), rank_(rank), memory_(nodes.ranks()), remotes_(nodes.ranks()) {
    if (nodes.ranks() != context_.size()) {
        throw Failure(FailureKind::invalid_argument, "node_of has " + std::to_string(nodes.ranks()) +
                                                         " ranks but the context has " +
                                                         std::to_string(context_.size()));
    }
    control_ = context_.region(names.control);
    if (names.staging != nullptr) staging_ = context_.region(names.staging);
    data_ = context_.region(names.data);
    data_bytes_ = context_.region_bytes(data_);
    for (std::uint32_t other = 0; other < nodes.ranks(); ++other) {
        open(other, nodes.node_of(other) == nodes.node_of(rank_), names);
    }
}

void ContextPort::open(std::uint32_t rank, bool near, const Names& names) {
    if (near) {
        memory_[rank] = {context_.peer_memory(rank, names.control),
                         names.staging != nullptr ? context_.peer_memory(rank, names.staging) : nullptr,
                         context_.peer_memory(rank, names.data)};
        if (memory_[rank].control != nullptr && memory_[rank].data != nullptr) return;
        throw Failure(FailureKind::state, "the regions of rank " + std::to_string(rank) +
                                              ", which is in this rank's node, are not mapped here");
    }
    Remote& remote = remotes_[rank];
    remote.control = context_.remote_region(rank, names.control);
    if (names.staging != nullptr) remote.staging = context_.remote_region(rank, names.staging);
    remote.data = context_.remote_region(rank, names.data);
    remote.queue_pair = context_.queue_pair(rank);
}

void ContextPort::require_region(std::uint32_t rank, const char* name, std::uint64_t needed) const {
    const std::uint64_t bytes =
        rank == rank_ ? context_.region_bytes(context_.region(name)) : context_.remote_region_bytes(rank, name);
    if (bytes >= needed) return;
    throw Failure(FailureKind::capacity, "region '" + std::string(name) + "' of rank " + std::to_string(rank) +
                                             " has " + std::to_string(bytes) + " bytes, the exchange needs " +
                                             std::to_string(needed));
}

Ticket ContextPort::submitted(std::uint32_t rank, const Engine::Submitted& result) {
    if (result.status == Status::ok) return result.request;
    if (result.status != Status::would_block && refused_.status == Status::ok) refused_ = {rank, result.status};
    return {};
}

std::optional<Ticket> ContextPort::put(const Put& put) {
    const Remote& remote = remotes_[put.rank];
    const std::array<RegionId, 3> from = {control_, staging_, data_};
    const std::array<RemoteRegionId, 3> to = {remote.control, remote.staging, remote.data};
    const auto chunk_of = [&](const Piece& piece) {
        ChunkSpec chunk;
        chunk.queue_pair = remote.queue_pair;
        chunk.kind = OpKind::write;
        chunk.local = from[static_cast<std::size_t>(piece.from)];
        chunk.local_offset = piece.from_offset;
        chunk.remote = to[static_cast<std::size_t>(piece.to)];
        chunk.remote_offset = piece.to_offset;
        chunk.bytes = piece.bytes;
        return chunk;
    };
    chunks_.assign(1, chunk_of(put.head));
    if (put.tail.bytes > 0) chunks_.push_back(chunk_of(put.tail));
    for (const Piece& piece : put.more) chunks_.push_back(chunk_of(piece));
    ControlSpec signal;
    signal.kind = OpKind::signal;
    signal.scope = Scope::request;
    signal.queue_pair = remote.queue_pair;
    signal.remote = remote.control;
    signal.remote_offset = put.word_offset;
    signal.operand = put.delta;
    const Ticket ticket = submitted(put.rank, context_.submit_held(put.rank, chunks_, {&signal, 1}, Level::delivered));
    if (!ticket.valid()) return std::nullopt;
    return ticket;
}

bool ContextPort::add(std::uint32_t rank, std::uint64_t word_offset, std::uint64_t delta) {
    ControlSpec signal;
    signal.kind = OpKind::signal;
    signal.scope = Scope::request;
    signal.queue_pair = remotes_[rank].queue_pair;
    signal.remote = remotes_[rank].control;
    signal.remote_offset = word_offset;
    signal.operand = delta;
    const Ticket ticket = submitted(rank, context_.submit_held(rank, {}, {&signal, 1}, Level::delivered));
    if (!ticket.valid()) return false;
    context_.release_held(ticket);  // nobody asks how it ended: a peer that never gets it shows up as a fault
    return true;
}

Status ContextPort::status(Ticket ticket) {
    const Status status = context_.status(ticket);
    if (status != Status::pending) context_.release_held(ticket);
    return status;
}

Status ContextPort::withhold(Ticket ticket) {
    return context_.withhold_held(ticket);
}

void ContextPort::wake(std::uint32_t rank) {
    if (rank != rank_) context_.ring(rank);
}

}  // namespace expertwire::runtime
