// Which operation is posted next: lanes in turn, small ones before bulk, controls before writes.
#include <algorithm>

#include "engine/engine.hpp"

namespace expertwire {

namespace {
// Bulk of many descriptors: several are no chunk yet, and a small one weighs as a sixteenth, for what it costs by
// itself.
constexpr std::uint64_t pieces_bytes_max = 16 * 1024;
constexpr std::uint32_t pieces_a_chunk = 16;
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
        std::uint32_t pieces = 0;
        while (postable_ > 0 && count < out.size() && idle_lanes < lanes_used_) {
            if (round_robin_ >= lanes_used_) round_robin_ = 0;
            const std::uint32_t lane = round_robin_++;
            const bool served = !bulk_last || (lanes_[lane].bulk_window > 0) == bulk;
            if (served && !held_back(lanes_[lane], now) && take_one(lane, out[count], now)) {
                ++count;
                idle_lanes = 0;
                if (!bulk || !bulk_hold_.active()) continue;
                if (out[count - 1].bytes > pieces_bytes_max || ++pieces == pieces_a_chunk) return count;
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

// What is read comes from the other side's core in one go, and whoever asks it for something small meanwhile waits for
// all of it (beside 1 and 2 MiB 240 and 600 µs); what is written goes in steps.
std::uint64_t Engine::weight(const Operation& operation) const {
    if (limits_.bulk_chunk_bytes == 0) return 1;
    const std::uint64_t bytes = std::max(operation.bytes, limits_.bulk_chunk_bytes / pieces_a_chunk);
    return operation.kind == OpKind::read ? 2 * bytes : bytes;
}

// Where small ones come now and then, the next one should meet no more than one chunk.
bool Engine::has_room(const QueuePair& lane, const Operation& operation, TimeNs now) const {
    if (lane.counted >= window_ || counted_ >= limits_.outstanding_max || slots_.available() == 0) return false;
    if (lane.bulk_window == 0 || lane.weight == 0 || operation.line == LineKind::control) return true;
    const std::uint64_t chunks = bulk_hold_.wary(now) ? 1 : lane.bulk_window;
    const std::uint64_t chunk_bytes = std::max<std::uint64_t>(limits_.bulk_chunk_bytes, 1);
    // A lead (Provider::lead_bytes) stands beside a full window: a sixteenth, or of what is read twice that.
    return lane.weight + weight(operation) <= chunks * chunk_bytes + chunk_bytes / 8;
}

void Engine::give_slot(std::uint32_t index) {
    Operation& operation = operations_[index];
    QueuePair& lane = lanes_[operation.queue_pair];
    operation.slot = slots_.mint();
    operation.state = OperationState::taken;
    --postable_;
    SlotInfo& info = slot_info_[operation.slot.slot];
    info = SlotInfo{};
    info.operation = index;
    info.endpoint = operation.endpoint;
    info.counted = true;
    ++lane.counted;
    lane.weight += weight(operation);
    ++counted_;
    counts_.slots_counted_peak = std::max(counts_.slots_counted_peak, counted_);
}

// Controls first: their data is there already, and somebody waits for them.
bool Engine::take_one(std::uint32_t queue_pair, PostCommand& out, TimeNs now) {
    QueuePair& lane = lanes_[queue_pair];
    if (lane.state != LaneState::open && lane.state != LaneState::aborting) return false;
    std::uint32_t index = lane.ready_cursor;
    const bool control = index != no_index;
    Line& data = lane.line(LineKind::data);
    if (!control) {
        while (data.cursor != no_index && operations_[data.cursor].state != OperationState::queued) {
            data.cursor = operations_[data.cursor].next_in_line;
        }
        if (data.cursor == no_index) return false;
        // While it aborts, only what stood before the failed operation goes on; what came since waits for its
        // reopening.
        if (lane.state == LaneState::aborting && operations_[data.cursor].position >= lane.reopen_at) return false;
        index = data.cursor;
    }
    if (!has_room(lane, operations_[index], now)) return false;
    if (control) {
        lane.ready_cursor = operations_[index].next_ready;
    } else {
        data.cursor = operations_[index].next_in_line;
        operations_[index].endpoint = lane.endpoint;
        bulk_hold_.take(lane.bulk_window > 0, now);
    }
    give_slot(index);
    fill(out, operations_[index]);
    if (!control && lane.bulk_window > 0) join_neighbours(lane, index, out, now);
    return true;
}

bool Engine::joins(const QueuePair& lane, const Operation& last, const Operation& next, std::uint64_t bytes) const {
    return next.state == OperationState::queued && next.request == last.request && next.kind == last.kind &&
           next.local == last.local && next.remote == last.remote &&
           next.local_offset == last.local_offset + last.bytes &&
           (next.remote_offset == last.remote_offset + last.bytes || mutant(Mutant::join_over_gap)) &&
           bytes + next.bytes <= limits_.bulk_post_bytes && lane.state == LaneState::open;
}

// What was cut so that small work may come between goes out whole where there is none: a chunk costs the provider
// some 15 µs beside its bytes. Each keeps its slot and its place, so that whatever ends one by one goes on doing so.
void Engine::join_neighbours(QueuePair& lane, std::uint32_t index, PostCommand& out, TimeNs now) {
    if (limits_.bulk_post_bytes == 0 || !bulk_hold_.alone(now) || policy_.ordering != OrderingClass::delivery_gated)
        return;
    if (out.bytes <= limits_.bulk_chunk_bytes / pieces_a_chunk) return;  // a lead is there to stand by itself
    Line& data = lane.line(LineKind::data);
    std::uint32_t last = index;
    while (data.cursor != no_index && joins(lane, operations_[last], operations_[data.cursor], out.bytes) &&
           has_room(lane, operations_[data.cursor], now)) {
        last = data.cursor;
        data.cursor = operations_[last].next_in_line;
        operations_[last].endpoint = lane.endpoint;
        bulk_hold_.take(true, now);
        give_slot(last);
        ++operations_[index].joined;
        out.bytes += operations_[last].bytes;
    }
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
