// Keys of regions. Over tcp an operation with a key that its target does not know costs the whole connection, and with
// it whatever else is on its way there; some providers let such a key through. So a key is asked about before it is
// first used, wherever it comes from: whose it is compares all of it with what is registered there. From then on
// whoever takes a region back says so to everybody that it knows, and closes it once nothing is on its way there any
// more.
//
// A message that has left may be lost with a connection that breaks, also between two that live, and nobody hears of
// it. So what is to be answered (a question, a revocation, a greeting) is said again at each beat until it was, and to
// be asked twice changes nothing.
#include <algorithm>
#include <tuple>

#include "provider/libfabric_provider.hpp"

namespace expertwire::fabric {
namespace {

constexpr std::size_t kAskedAtOnce = 8;  // by one poll

auto key_fields(const MessageHeader& inquiry) {
    return std::tuple(inquiry.region, inquiry.registration, inquiry.access, inquiry.ticket, inquiry.offset,
                      inquiry.operand);
}

}  // namespace

MessageHeader inquiry_of(const RegionKey& key) {
    MessageHeader inquiry;
    inquiry.kind = MessageKind::inquiry;
    inquiry.region = key.region;
    inquiry.registration = key.registration;
    inquiry.access = static_cast<std::uint16_t>(key.access);
    inquiry.ticket = key.base;
    inquiry.offset = key.bytes;
    inquiry.operand = key.key;
    return inquiry;
}

// `sender`: who is told, or who tells.
MessageHeader revocation_of(const LocalRegion& region, std::uint32_t id, std::uint64_t sender) {
    MessageHeader notice;
    notice.kind = MessageKind::revocation;
    notice.sender = sender;
    notice.region = id;
    notice.registration = region.number;
    return notice;
}

RegionKey LibfabricProvider::key_of(std::uint32_t id) const {
    const LocalRegion& region = *objects_->regions[id];
    RegionKey key;
    key.region = id;
    key.registration = region.number;
    key.access = (region.spec.remote_write ? 1u : 0u) | (region.spec.remote_read ? 2u : 0u);
    const bool virtual_addresses = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
    key.base = virtual_addresses ? reinterpret_cast<std::uintptr_t>(region.spec.address) : 0;
    key.bytes = region.spec.bytes;
    key.key = fi_mr_key(region.registration.get());
    return key;
}

bool LibfabricProvider::is_ours(const MessageHeader& inquiry) const {
    const auto& regions = objects_->regions;
    return inquiry.region < regions.size() && regions[inquiry.region] &&
           regions[inquiry.region]->state == LocalRegion::State::registered &&
           key_fields(inquiry_of(key_of(inquiry.region))) == key_fields(inquiry);
}

// Only a peer that is settled knows us: another would drop the question.
bool LibfabricProvider::may_ask(RemoteRegionId id) const {
    const RemoteRegion* const remote = remote_of(id);
    return remote != nullptr && remote->state == RemoteRegion::State::asked &&
           peers_[remote->peer.value]->move == Peer::Move::settled;
}

void LibfabricProvider::ask_for_keys() {
    for (std::size_t left = std::min(kAskedAtOnce, unasked_.size()); left > 0 && !free_notices_.empty(); --left) {
        const RemoteRegionId id = unasked_.front();
        unasked_.pop_front();
        const RemoteRegion* const remote = remote_of(id);
        if (remote == nullptr || remote->state != RemoteRegion::State::asked) continue;  // removed, revoked
        ssize_t outcome = -FI_EAGAIN;
        if (may_ask(id)) {
            MessageHeader& message = objects_->notices[free_notices_.back()].message;
            message = inquiry_of(remote->key);
            message.sender = instance_;
            outcome = send_word(current_, *peers_[remote->peer.value], {});
        }
        // An error, or a peer that is lost: it is asked again at the next beat.
        (outcome == -FI_EAGAIN && !put_off(*peers_[remote->peer.value]) ? unasked_ : asked_).push_back(id);
    }
}

// What was not answered may have been lost, with an endpoint that was replaced or while we were not known there.
void LibfabricProvider::ask_again() {
    unasked_.insert(unasked_.end(), asked_.begin(), asked_.end());
    asked_.clear();
}

// Of a question that is asked until it is answered one answer waits at a time: each holds a receive buffer.
void LibfabricProvider::answer_later(OperationContext& receive, const MessageHeader& question, MessageKind kind,
                                     Status status, std::deque<OperationContext*>& queue) {
    const auto same = [&](const OperationContext* other) {
        return other->message.kind == kind && other->message.sender == question.sender &&
               key_fields(other->message) == key_fields(question);
    };
    for (const auto* waiting : {&held_answers_, &unsent_answers_, &put_off_answers_})
        if (std::any_of(waiting->begin(), waiting->end(), same)) return idle_receives_.push_back(&receive);
    OperationContext& answer = answer_of(receive);
    answer.message = question;
    answer.message.kind = kind;
    answer.message.status = status;
    queue.push_back(&answer);
}

void LibfabricProvider::key_answered(const MessageHeader& message) {
    const PeerId peer = by_instance_.at(message.sender);
    const auto about = [&](RemoteRegionId id) {
        const RemoteRegion* const remote = remote_of(id);
        return remote != nullptr && remote->peer == peer && key_fields(inquiry_of(remote->key)) == key_fields(message);
    };
    for (std::deque<RemoteRegionId>* list : {&asked_, &unasked_}) {
        const auto found = std::find_if(list->begin(), list->end(), about);
        if (found == list->end()) continue;
        RemoteRegion& remote = *remote_of(*found);
        if (remote.state == RemoteRegion::State::asked)  // else revoked since
            remote.state = message.status == Status::ok ? RemoteRegion::State::known : RemoteRegion::State::revoked;
        list->erase(found);
        return;
    }
    ++counters_.dropped_messages;
}

void LibfabricProvider::start_revoking(LocalRegion& region, std::uint32_t id) {
    region.state = LocalRegion::State::revoking;
    for (const auto& [instance, peer] : by_instance_) {
        const MessageHeader notice = revocation_of(region, id, instance);
        if (instance == instance_) {
            revoked_there(notice);
            continue;
        }
        say(notice);
        region.unanswered.push_back(instance);
    }
}

void LibfabricProvider::revoke_again() {
    for (std::uint32_t id = 0; id < objects_->regions.size(); ++id) {
        const LocalRegion* const region = objects_->regions[id].get();
        if (region == nullptr || region->state != LocalRegion::State::revoking) continue;
        for (const std::uint64_t instance : region->unanswered)
            if (by_instance_.contains(instance)) say(revocation_of(*region, id, instance));
    }
}

void LibfabricProvider::revoked_there(const MessageHeader& message) {
    const PeerId peer = by_instance_.at(message.sender);
    for (RemoteRegion& remote : remotes_) {
        const bool same = remote.key.region == message.region && remote.key.registration == message.registration;
        if (remote.state != RemoteRegion::State::unknown && remote.peer == peer && same)
            remote.state = RemoteRegion::State::revoked;
    }
}

bool LibfabricProvider::on_its_way(const MessageHeader& revocation) const {
    const auto peer = by_instance_.find(revocation.sender);
    return peer != by_instance_.end() && std::any_of(remotes_.begin(), remotes_.end(), [&](const RemoteRegion& remote) {
               return remote.in_flight != 0 && remote.peer == peer->second && remote.key.region == revocation.region;
           });
}

void LibfabricProvider::revocation_answered(const MessageHeader& message) {
    auto& regions = objects_->regions;
    if (message.region >= regions.size() || !regions[message.region] ||
        regions[message.region]->number != message.registration) {
        ++counters_.dropped_messages;
        return;
    }
    std::erase(regions[message.region]->unanswered, message.sender);
}

}  // namespace expertwire::fabric
