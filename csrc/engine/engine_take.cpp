// Which operation is posted next: lanes in turn, small ones before bulk, controls before writes.
#include <algorithm>

#include "engine/engine.hpp"

namespace expertwire {

namespace {
constexpr std::uint64_t pieces_bytes_max = 16 * 1024;  // of bulk of many descriptors: several of them are no chunk yet
}  // namespace

std::size_t Engine::take_posts(std::span<PostCommand> out, TimeNs now, bool bulk_too) {
    std::size_t count = 0;
    bulk_held_ = false;
    pushed_back_since_take_ = false;
    // With fewer slots than lanes small ones could hold them all for ever: then everybody has a turn.
    const bool bulk_last = bulk_lanes_ && lanes_live_ <= limits_.outstanding_max;
    for (const bool bulk : {false, true}) {
        if (bulk && !bulk_last) break;
        if (bulk && !bulk_too) {
            bulk_held_ = postable_ > 0;
            break;
        }
        std::uint32_t idle_lanes = 0;  // looked at in a row without a post
        while (postable_ > 0 && count < out.size() && idle_lanes < lanes_used_) {
            if (round_robin_ >= lanes_used_) round_robin_ = 0;
            const std::uint32_t lane = round_robin_++;
            const bool served = !bulk_last || (lanes_[lane].bulk_window > 0) == bulk;
            if (served && !held_back(lanes_[lane], now) && take_one(lane, out[count], now)) {
                ++count;
                idle_lanes = 0;
                if (bulk && bulk_hold_.active() && out[count - 1].bytes > pieces_bytes_max) return count;
            } else {
                ++idle_lanes;
            }
        }
    }
    return count;
}

bool Engine::held_back(const QueuePair& lane, TimeNs now) {
    if (lane.bulk_window == 0 || !bulk_hold_.active() || lane.entries == lane.in_flight) return false;
    const bool held = bulk_hold_.held(now);
    bulk_held_ = bulk_held_ || held;
    return held;
}

// Where small ones come now and then, the next one should meet no more than one chunk.
std::uint32_t Engine::window_of(const QueuePair& lane, TimeNs now) const {
    if (lane.bulk_window == 0) return window_;
    return bulk_hold_.wary(now) ? 1 : std::min(lane.bulk_window, window_);
}

// Controls first: their data is there already, and somebody waits for them.
bool Engine::take_one(std::uint32_t queue_pair, PostCommand& out, TimeNs now) {
    QueuePair& lane = lanes_[queue_pair];
    if (lane.state != LaneState::open && lane.state != LaneState::aborting) return false;
    if (lane.counted >= window_of(lane, now) || counted_ >= limits_.outstanding_max || slots_.available() == 0)
        return false;
    std::uint32_t index = lane.ready_cursor;
    if (index != no_index) {
        lane.ready_cursor = operations_[index].next_ready;
    } else {
        Line& data = lane.line(LineKind::data);
        while (data.cursor != no_index && operations_[data.cursor].state != OperationState::queued) {
            data.cursor = operations_[data.cursor].next_in_line;
        }
        if (data.cursor == no_index) return false;
        // While it aborts, only what stood before the failed operation goes on; what came since waits for its
        // reopening.
        if (lane.state == LaneState::aborting && operations_[data.cursor].position >= lane.reopen_at) return false;
        index = data.cursor;
        data.cursor = operations_[index].next_in_line;
        operations_[index].endpoint = lane.endpoint;
        bulk_hold_.take(lane.bulk_window > 0, now);
    }
    Operation& operation = operations_[index];
    operation.slot = slots_.mint();
    operation.state = OperationState::taken;
    --postable_;
    SlotInfo& info = slot_info_[operation.slot.slot];
    info = SlotInfo{};
    info.operation = index;
    info.endpoint = operation.endpoint;
    info.counted = true;
    ++lane.counted;
    ++counted_;
    counts_.slots_counted_peak = std::max(counts_.slots_counted_peak, counted_);
    fill(out, operation);
    return true;
}

void Engine::fill(PostCommand& out, const Operation& operation) const {
    out.ticket = operation.slot;
    out.kind = operation.kind;
    out.level = policy_.delivery_complete ? Level::delivered : Level::local;
    out.endpoint = operation.endpoint;
    out.peer = lanes_[operation.queue_pair].peer;
    out.local = operation.local;
    out.local_offset = operation.local_offset;
    out.remote = operation.remote;
    out.remote_offset = operation.remote_offset;
    out.bytes = operation.bytes;
    if (mutant(Mutant::long_write) && operation.kind == OpKind::write) out.bytes += 8;
    out.operand = operation.operand;
    out.payload = operation.payload;
    const bool counted = operation.request != no_index && requests_[operation.request].counted;
    out.counted = counted ? request_slots_.ticket_of(operation.request) : Ticket{};
}

}  // namespace expertwire
