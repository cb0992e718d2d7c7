// Posts: checked here, since a bad key or range at the target may be reported late, badly or not at all.
#include <algorithm>

#include "provider/kernel_copies.hpp"
#include "provider/libfabric_provider.hpp"

namespace expertwire::fabric {

PostResult LibfabricProvider::refuse(Status status) {
    ++counters_.failed;
    return {PostOutcome::failed, status, 0};
}

std::optional<Status> LibfabricProvider::check_remote(const PostCommand& command) const {
    const RemoteRegion* const known = remote_of(command.remote);
    if (known == nullptr) return Status::bad_key;
    const RemoteRegion& remote = *known;
    if (remote.state != RemoteRegion::State::known && remote.state != RemoteRegion::State::asked)
        return Status::bad_key;
    if (remote.peer != command.peer) return Status::bad_key;
    const std::uint64_t bytes = command.kind == OpKind::signal ? sizeof(std::uint64_t) : command.bytes;
    if (bytes > remote.key.bytes || command.remote_offset > remote.key.bytes - bytes) return Status::out_of_range;
    if (command.kind == OpKind::signal && command.remote_offset % sizeof(std::uint64_t) != 0) return Status::invalid;
    const std::uint32_t needed = command.kind == OpKind::read ? 2u : 1u;
    if ((remote.key.access & needed) == 0) return Status::bad_key;
    return std::nullopt;
}

std::optional<Status> LibfabricProvider::check(const PostCommand& command) const {
    if (!objects_) return Status::closed;
    if (command.ticket.slot >= objects_->contexts.size() || !is_open(command.endpoint.value)) return Status::invalid;
    if (objects_->contexts[command.ticket.slot].state != OperationContext::State::idle) return Status::refused;
    if (command.peer.value >= peers_.size() || !peers_[command.peer.value]) return Status::invalid;
    if (command.kind == OpKind::notification) {
        if (command.bytes > capabilities_.notification_bytes_max) return Status::out_of_range;
        return command.bytes != 0 && command.payload == nullptr ? std::optional(Status::invalid) : std::nullopt;
    }
    if (command.kind == OpKind::signal) return check_remote(command);
    if (command.bytes > capabilities_.message_bytes_max) return Status::out_of_range;
    if (command.local.value >= objects_->regions.size() || !objects_->regions[command.local.value])
        return Status::invalid;
    const RegionSpec& local = objects_->regions[command.local.value]->spec;
    if (command.bytes > local.bytes || command.local_offset > local.bytes - command.bytes) return Status::out_of_range;
    return check_remote(command);
}

// An emulated signal is checked where it arrives.
bool LibfabricProvider::awaits_key(const PostCommand& command) const {
    const bool by_key =
        command.kind == OpKind::signal ? capabilities_.remote_atomics : command.kind != OpKind::notification;
    return by_key && remotes_[row_of(command.remote)].state == RemoteRegion::State::asked;
}

PostResult LibfabricProvider::post(const PostCommand& command) {
    if (const std::optional<Status> status = check(command)) return refuse(*status);
    OperationContext& context = objects_->contexts[command.ticket.slot];
    if (command.bytes == 0 && (command.kind == OpKind::write || command.kind == OpKind::read)) {
        immediate_.push_back(
            {command.ticket, Status::ok, command.level, 0});  // no provider has to take an empty transfer
        ++counters_.posted;
        return {};
    }
    if (in_flight_[command.endpoint.value] >= capabilities_.transmit_queue ||
        peers_[command.peer.value]->move != Peer::Move::settled || awaits_key(command))
        return posted(-FI_EAGAIN, command, context);
    context.ticket = command.ticket;
    context.level = command.level;
    context.endpoint = command.endpoint.value;
    context.peer = peers_[command.peer.value].get();
    context.region = nullptr;
    context.remote = command.kind == OpKind::notification ? RemoteRegionId{} : command.remote;
    context.immediate.reset();
    if (is_counted(command)) return post_counted(command, context);
    if (counted_ && command.kind == OpKind::signal && command.counted.valid()) {
        if (const std::optional<ssize_t> outcome = post_counting(command, context)) {
            const PostResult result = posted(*outcome, command, context);
            if (*outcome == 0) context.state = OperationContext::State::posted_unanswered;
            return result;
        }
    }
    switch (command.kind) {
        case OpKind::write:
        case OpKind::read:
            return posted(post_rma(command, context), command, context);
        case OpKind::signal:
            return posted(
                capabilities_.remote_atomics ? post_atomic(command, context) : post_signal_message(command, context),
                command, context);
        case OpKind::notification:
            return posted(post_notification(command, context), command, context);
    }
    return refuse(Status::invalid);
}

PostResult LibfabricProvider::posted(ssize_t outcome, const PostCommand& command, OperationContext& context) {
    if (outcome == 0) {
        const bool answered = command.kind == OpKind::signal && !capabilities_.remote_atomics;
        context.state = answered ? OperationContext::State::posted_unanswered : OperationContext::State::posted;
        ++in_flight_[context.endpoint];
        ++context.peer->in_flight;
        if (context.region != nullptr) ++context.region->in_flight;
        if (context.remote.valid()) ++remotes_[row_of(context.remote)].in_flight;
        ++counters_.posted;
        return {};
    }
    if (outcome == -FI_EAGAIN || outcome == -FI_ENOMEM || outcome == -FI_ENOBUFS) {
        ++counters_.again;
        return {PostOutcome::again, Status::would_block, 0};
    }
    ++counters_.failed;
    const int code = static_cast<int>(-outcome);
    return {PostOutcome::failed, status_of_error(code), code};
}

// By where its sender has it. Where keys name no addresses, regions are taken to begin a page.
std::uint64_t LibfabricProvider::lead_bytes(OpKind kind, RegionId local, std::uint64_t local_offset,
                                            RemoteRegionId remote, std::uint64_t remote_offset) const {
    if (!leads_ || !objects_) return 0;
    if (kind == OpKind::read) {
        const RemoteRegion* const known = remote_of(remote);
        return known == nullptr ? 0 : lead_at(known->key.base + remote_offset);
    }
    const auto& regions = objects_->regions;
    if (local.value >= regions.size() || !regions[local.value]) return 0;
    return lead_at(reinterpret_cast<std::uintptr_t>(regions[local.value]->spec.address) + local_offset);
}

ssize_t LibfabricProvider::post_rma(const PostCommand& command, OperationContext& context) {
    LocalRegion& local = *objects_->regions[command.local.value];
    const RegionKey& key = remotes_[row_of(command.remote)].key;
    iovec piece{local.spec.address + command.local_offset, command.bytes};
    fi_rma_iov target{key.base + command.remote_offset, command.bytes, key.key};
    void* descriptor = local.descriptor;
    fi_msg_rma message{};
    message.msg_iov = &piece;
    message.desc = &descriptor;
    message.iov_count = 1;
    message.addr = address_of(*context.peer, command.endpoint.value);
    message.rma_iov = &target;
    message.rma_iov_count = 1;
    message.context = &context.fi;
    fid_ep* endpoint = objects_->endpoints[command.endpoint.value].get();
    context.region = &local;
    if (command.kind == OpKind::read) return fi_readmsg(endpoint, &message, FI_COMPLETION);
    message.data = context.immediate.value_or(0);
    const bool deliver = command.level == Level::delivered && capabilities_.delivery_complete;
    const std::uint64_t how = context.immediate ? FI_REMOTE_CQ_DATA : deliver ? FI_DELIVERY_COMPLETE : 0;
    return fi_writemsg(endpoint, &message, FI_COMPLETION | how);
}

ssize_t LibfabricProvider::post_atomic(const PostCommand& command, OperationContext& context) {
    const RegionKey& key = remotes_[row_of(command.remote)].key;
    context.operand = command.operand;
    fi_ioc piece{&context.operand, 1};
    fi_rma_ioc target{key.base + command.remote_offset, 1, key.key};
    void* descriptor = this->descriptor(objects_->context_registration);
    fi_msg_atomic message{};
    message.msg_iov = &piece;
    message.desc = &descriptor;
    message.iov_count = 1;
    message.addr = address_of(*context.peer, command.endpoint.value);
    message.rma_iov = &target;
    message.rma_iov_count = 1;
    message.datatype = FI_UINT64;
    message.op = FI_SUM;
    message.context = &context.fi;
    return fi_atomicmsg(objects_->endpoints[command.endpoint.value].get(), &message,
                        FI_COMPLETION | (capabilities_.delivery_complete ? FI_DELIVERY_COMPLETE : 0));
}

ssize_t LibfabricProvider::post_signal_message(const PostCommand& command, OperationContext& context) {
    const RegionKey& key = remotes_[row_of(command.remote)].key;
    context.message = {};
    context.message.kind = MessageKind::signal;
    context.message.sender = instance_;
    context.message.ticket = command.ticket.pack();
    context.message.region = key.region;
    context.message.registration = key.registration;
    context.message.offset = command.remote_offset;
    context.message.operand = command.operand;
    return fi_send(objects_->endpoints[command.endpoint.value].get(), &context.message, sizeof(context.message),
                   descriptor(objects_->context_registration), address_of(*context.peer, command.endpoint.value),
                   &context.fi);
}

ssize_t LibfabricProvider::post_notification(const PostCommand& command, OperationContext& context) {
    if (free_bounces_.empty()) return -FI_EAGAIN;
    std::byte* buffer = objects_->message_memory.data() + std::size_t{free_bounces_.back()} * message_bytes_;
    MessageHeader header;
    header.kind = MessageKind::notification;
    header.sender = instance_;
    std::memcpy(buffer, &header, sizeof(header));
    if (command.bytes != 0) std::memcpy(buffer + sizeof(header), command.payload, command.bytes);
    iovec piece{buffer, sizeof(header) + command.bytes};
    void* descriptor = this->descriptor(objects_->message_registration);
    fi_msg message{};
    message.msg_iov = &piece;
    message.desc = &descriptor;
    message.iov_count = 1;
    message.addr = address_of(*context.peer, command.endpoint.value);
    message.context = &context.fi;
    const bool deliver = capabilities_.delivery_complete;
    const ssize_t outcome = fi_sendmsg(objects_->endpoints[command.endpoint.value].get(), &message,
                                       FI_COMPLETION | (deliver ? FI_DELIVERY_COMPLETE : 0));
    if (outcome == 0) {
        context.bounce = free_bounces_.back();
        free_bounces_.pop_back();
    }
    return outcome;
}

}  // namespace expertwire::fabric
