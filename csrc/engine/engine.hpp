// The engine: events in, commands out. Pure: no thread, no clock (time is an argument), no exception, and no allocation
// after the constructor. One thread at a time drives it (whoever holds the progress token); only record() and status()
// may be called from any thread at any time.
//
// A turn of whoever drives it:  poll the provider → on_completion() for each → step(now) → take_posts() → for each
// command: may_post()? post it, on_posted(). `pump()` in pump.hpp is exactly that.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/bulk_hold.hpp"
#include "engine/commands.hpp"
#include "engine/gate.hpp"
#include "engine/gate_policy.hpp"
#include "engine/queue_pair.hpp"
#include "engine/request.hpp"
#include "engine/slots.hpp"
#include "engine/types.hpp"

namespace expertwire {

struct EngineLimits {
    std::uint32_t peers_max = 64;              // PeerId.value is below it
    std::uint32_t queue_pairs_max = 256;       // over all peers
    std::uint32_t outstanding_max = 512;       // SPEC T2's cap; the slot table, hence ticket.slot, ends at 2 * cap
    std::uint32_t requests_max = 4096;         // accepted and not yet released
    std::uint32_t queued_max = 4096;           // operations that may be accepted beyond those in flight
    TimeNs hard_timeout_ns = 200'000'000'000;  // SPEC T14
    // BulkHold. Above 0 a take gives one chunk of bulk, too, so that whoever holds the engine can let go between two.
    TimeNs bulk_hold_ns = 0;
    TimeNs bulk_quiet_ns = 100'000;
    TimeNs bulk_wary_ns = 20'000'000;
    // What the window of a bulk lane is reckoned in: chunks of so many bytes, however they were cut, a read twice; 0:
    // operations.
    std::uint64_t bulk_chunk_bytes = 0;
    // Neighbours of one request on a bulk lane are posted as one operation of up to so many bytes, while nothing small
    // is about; 0: each by itself. Class B only.
    std::uint64_t bulk_post_bytes = 0;
    std::uint32_t queue_pairs_per_peer_max = 8;
    std::uint32_t regions_max = 4096;    // RegionId.value is below it
    std::uint32_t held_max = 2048;       // control operations whose gate is closed at one time
    std::uint32_t first_generation = 1;  // of every slot; not 0: tests begin near the wrap
};

// kind is write or read.
struct ChunkSpec {
    QueuePairId queue_pair;
    OpKind kind = OpKind::write;
    RegionId local;
    std::uint64_t local_offset = 0;
    RemoteRegionId remote;
    std::uint64_t remote_offset = 0;
    std::uint64_t bytes = 0;
};

// kind is signal or notification. It goes out over `queue_pair`; what it waits for is told by `scope`.
struct ControlSpec {
    OpKind kind = OpKind::signal;
    Scope scope = Scope::request;
    QueuePairId queue_pair;
    RemoteRegionId remote;               // signal
    std::uint64_t remote_offset = 0;     // signal: a multiple of 8
    std::uint64_t operand = 0;           // signal: added to the word
    const std::byte* payload = nullptr;  // notification: must stay valid until the request is terminal
    std::uint64_t bytes = 0;
};

// A snapshot; nothing in it changes later.
struct EngineStatistics {
    std::uint64_t requests_submitted = 0, requests_done = 0, requests_failed = 0, requests_cancelled = 0;
    std::uint64_t submissions_pushed_back = 0;  // submit() said would_block
    std::uint64_t operations_posted = 0, operations_finished = 0, operations_failed = 0, operations_dropped = 0;
    std::uint64_t posts_again = 0;           // the provider said AGAIN
    std::uint64_t posts_rejected = 0;        // the provider refused a post
    std::uint64_t completions_stale = 0;     // wrong generation, or an operation that had ended: dropped
    std::uint64_t completions_unknown = 0;   // no ticket, or none of ours: dropped
    std::uint64_t errors_after_publish = 0;  // a Level::local request's delivery failed after its record was published
    std::uint64_t controls_held = 0;         // controls that had to wait for their gate, ever
    std::uint64_t lanes_reopened = 0;
    std::uint64_t quarantines = 0;  // slots that passed the hard deadline or lost their peer, ever
    std::uint64_t misuses = 0;      // on_posted() out of order or unasked for: a bug of the driver
    std::uint32_t slots_used = 0, slots_counted = 0, slots_counted_peak = 0, slots_quarantined = 0;
    std::uint32_t requests_live = 0, operations_queued = 0, gates_closed = 0;
    std::uint32_t queue_pairs_live = 0, window = 0;  // of each live queue pair
    bool slots_short = false;                        // fewer slots than live queue pairs (SPEC T2)
    // [from][to], RequestState; how often each transition was taken.
    std::array<std::array<std::uint64_t, request_states>, request_states> transitions{};
};

// One queue pair as seen from outside.
struct QueuePairView {
    PeerId peer;
    EndpointId endpoint;
    LaneState state = LaneState::closed;
    Status error = Status::ok;  // latched
    std::int32_t code = 0;
    std::uint32_t generation = 0;
    std::uint64_t accepted = 0, posted = 0, retired = 0;  // data line
    std::uint32_t in_flight = 0, entries = 0;
};

class Engine {
  public:
    Engine(const EngineLimits& limits, const GatePolicy& policy);
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    const EngineLimits& limits() const { return limits_; }
    const GatePolicy& policy() const { return policy_; }

    // ---- lanes. The first queue pair of a peer opens the peer. An invalid id: table full, the peer is failed or
    // closing.
    // `bulk_window` above 0: a bulk lane, with at most so many operations in flight, served after all others.
    QueuePairId open_queue_pair(PeerId peer, EndpointId endpoint, std::uint32_t bulk_window = 0);
    // Drops what was not posted (Status::closed) and closes the peer's lanes. `ok`: closed, the peer may be opened
    // again. `pending`: something is still in flight; call it again after on_peer_closed(), on_endpoint_closed() or
    // completions.
    Status close_peer(PeerId peer, TimeNs now);
    QueuePairView view(QueuePairId queue_pair) const;
    Status peer_error(PeerId peer) const;  // latched; ok while there is none, `closed` where the peer is not open

    // ---- requests. All chunks and controls go to `peer`. Status:
    //   ok            taken; `request` names it until release()
    //   would_block   nothing was taken: a table, or this lane's share of one, is full; progress, then again
    //   invalid       an argument, or more operations than the table can ever hold
    //   timed_out     a lane that it uses holds quarantined work;  peer_dead, io_error, …: a latched error;  closed
    // No chunks and no controls: done at once. A request whose work has to queue behind a failed one is aborted with
    // it. `counts` (class C): the provider can count for this peer now; a request that is writes and one signal for
    // them then leaves its signal to the target.
    struct Submitted {
        Status status = Status::invalid;
        Ticket request;
    };
    Submitted submit(PeerId peer, std::span<const ChunkSpec> chunks, std::span<const ControlSpec> controls, Level level,
                     TimeNs now, bool counts = false);
    // Only while nothing of it was given out for posting (else `refused`, and it stays as it is); `stale`.
    Status cancel(Ticket request);
    // May what its writes read be overwritten, for no control of it will tell the target of it? `cancelled`: yes, what
    // was not posted is dropped, and so ends its record once the rest has drained. `ok`: yes, all has been delivered.
    // `pending`: no, a control of it has left and writes are on their way (classes A and C). `stale`. What it was is
    // asked of a request with one control.
    Status withhold(Ticket request);
    // FREE(generation + 1). `refused` while not terminal; `stale`.
    Status release(Ticket request);
    // Sets RecordView::stalled: a wait passed its deadline. Ownership does not change.
    void mark_stalled(Ticket request);

    // The terminal record (RecordView::unpack). Any thread; one acquire load answers everything.
    const std::atomic<std::uint64_t>& record(Ticket request) const;
    // The same, decoded: `stale` if the record is of another generation, `pending` until it is terminal. Any thread.
    Status status(Ticket request) const {
        if (request.slot >= limits_.requests_max) return Status::stale;
        const RecordView view = RecordView::unpack(record(request).load(std::memory_order_acquire));
        return view.generation == request.generation ? view.status : Status::stale;
    }
    std::int32_t error_code(Ticket request) const;  // the provider's number behind the first error, or 0

    // ---- progress
    // Fills `out` round robin over the queue pairs, within their windows and the cap. Every command taken must be given
    // to on_posted() in the same order, before anything else is called, except those for which may_post() says no.
    std::size_t take_posts(std::span<PostCommand> out, TimeNs now, bool bulk_too = true);
    // The last take_posts() left bulk where it was for the sake of small work: call it again, though nothing may
    // happen.
    bool bulk_held() const { return bulk_held_; }
    // Chunks of small lanes that have ended, where there are bulk lanes beside them.
    std::uint64_t small_ended() const { return bulk_lanes_ ? bulk_hold_.completions() : 0; }
    // Small work has met bulk not long ago: what is cut now had better be cut small.
    bool bulk_wary(TimeNs now) const { return bulk_hold_.wary(now); }
    // No: since it was taken, an AGAIN or a failure on its queue pair has put it back or dropped it. Do not post it.
    bool may_post(const PostCommand& command) const;
    // AGAIN: it, and what was taken behind it on its queue pair, is at the head again, in order.
    // AGAIN ever since the hard deadline's length before `now`: it fails.
    void on_posted(const PostCommand& command, PostResult result, TimeNs now);
    void on_completion(const Completion& completion, TimeNs now);
    void step(TimeNs now);  // hard deadlines of what is posted
    // After a poll that gave so many: may step() judge? Not while more may be waiting there that arrived in time. That
    // is bounded: of what was in flight at any moment there are no more completions than slots.
    bool has_caught_up(std::uint32_t completions);
    // When a hard deadline is next due, in step() or at an AGAIN; nullopt: never, as things are.
    std::optional<TimeNs> next_deadline() const;

    // ---- failures
    // Latches every lane of the peer; what was not posted fails; what is in flight is quarantined.
    void on_peer_dead(PeerId peer, TimeNs now) { on_peer_error(peer, Status::peer_dead, 0, now); }
    void on_peer_error(PeerId peer, Status status, std::int32_t code, TimeNs now);
    void on_endpoint_error(EndpointId endpoint, Status status, std::int32_t code, TimeNs now);
    // The provider guarantees that nothing posted to this peer / on this endpoint touches memory any more: what was in
    // flight there ends, with the latched error of its request or `closed`.
    void on_peer_closed(PeerId peer, TimeNs now);
    void on_endpoint_closed(EndpointId endpoint, TimeNs now);
    // cap / 2 slots of one endpoint are quarantined: open a new one, replace_endpoint(old, new), announce it, close the
    // old one and say on_endpoint_closed(old).
    std::optional<EndpointId> endpoint_to_replace() const;
    void replace_endpoint(EndpointId old_endpoint, EndpointId new_endpoint);
    // Nothing is on its way over this endpoint, or will be, but what is quarantined: it may be closed.
    bool drained(EndpointId endpoint) const;

    // ---- waits over everything (SPEC T7)
    // Everything accepted so far. What is still in a ring has to be submitted (or counted by the caller) first.
    std::uint64_t quiet_mark() const { return moment_; }
    bool reached(std::uint64_t mark) const;  // every request accepted before the mark is terminal
    // pending; ok; or the first error among the requests that the mark covers and that ended since.
    Status quiet(std::uint64_t mark) const;
    bool idle() const;  // no live request, no slot in use

    // Operations that name this local region and have not ended: deregistering it while > 0 must be refused.
    std::uint32_t region_uses(RegionId region) const;

    EngineStatistics statistics() const;
    // DESIGN "What must always hold". Empty, or the first rule that does not hold, in words. For simulation and tests.
    std::string check_invariants() const;

  private:
    enum class PeerState : std::uint8_t { closed = 0, open, failed, closing };
    struct Peer {
        PeerState state = PeerState::closed;
        Status error = Status::ok;
        std::int32_t code = 0;
        std::uint32_t first_request = no_index;  // live ones, in order of acceptance
        std::uint32_t last_request = no_index;
        std::vector<std::uint32_t> queue_pairs;  // reserved in the constructor
    };
    // What the engine keeps about a submission slot, beside its ticket.
    struct SlotInfo {
        std::uint32_t operation = no_index;
        EndpointId endpoint;
        TimeNs posted_at = 0;
        bool counted = false;  // against the cap (SPEC T2); not while quarantined
        bool expired = false;  // passed the hard deadline or lost its peer
        bool timed = false;    // in the list of those that have a deadline
        std::uint32_t previous = no_index;
        std::uint32_t next = no_index;
    };
    struct Failure {
        std::uint64_t serial = 0;
        std::uint64_t moment = 0;
        Status status = Status::ok;
    };
    static constexpr std::size_t failures_kept = 256;

    // engine_submit.cpp
    Status check_lane(PeerId peer, QueuePairId queue_pair) const;
    Status check_chunk(PeerId peer, const ChunkSpec& spec) const;
    Status check_control(PeerId peer, const ControlSpec& spec) const;
    bool room_for(std::span<const ChunkSpec> chunks, std::span<const ControlSpec> controls);
    std::uint32_t new_operation(std::uint32_t request, QueuePairId queue_pair, OpKind kind, LineKind line);
    void accept_chunk(std::uint32_t request, const ChunkSpec& spec);
    void accept_control(std::uint32_t request, const ControlSpec& spec);
    bool cover(std::uint32_t request, const ControlSpec& spec);
    bool cover_line(std::uint32_t queue_pair, LineKind line, EndpointId endpoint, bool counted = false);
    void link_live(std::uint32_t request);
    void unlink_live(std::uint32_t request);

    // engine.cpp: from the queue to the record
    bool take_one(std::uint32_t queue_pair, PostCommand& out, TimeNs now);
    bool has_room(const QueuePair& lane, const Operation& operation, TimeNs now) const;
    std::uint64_t weight(const Operation& operation) const;
    void give_slot(std::uint32_t index);
    bool joins(const QueuePair& lane, const Operation& last, const Operation& next, std::uint64_t bytes) const;
    void join_neighbours(QueuePair& lane, std::uint32_t index, PostCommand& out, TimeNs now);
    void end_completed(std::uint32_t index, const Completion& completion);
    bool held_back(const QueuePair& lane, TimeNs now);
    void fill(PostCommand& out, const Operation& operation) const;
    void pull_back(QueuePair& lane);
    void accepted_by_provider(std::uint32_t index, TimeNs now);
    void rejected_by_provider(std::uint32_t index, const PostResult& result);
    void forget_slot(Operation& operation);
    void uncount(std::uint32_t slot);
    void untime(std::uint32_t slot);
    void finish(std::uint32_t index, Status result);
    void end_posted(std::uint32_t index, Status result);
    void account(std::uint32_t index);
    void locally_done(std::uint32_t index);
    void unlink_operation(std::uint32_t index);
    void free_operation(std::uint32_t index);
    void make_ready(std::uint32_t index);
    void leave_ready(std::uint32_t index);
    void try_gate(std::uint32_t record);
    void settle();
    void settle_lane(std::uint32_t queue_pair);
    void advance_posted(Line& line);
    void retire_prefix(QueuePair& lane, LineKind kind);
    void release_waiters(Line& line);
    void mark_dirty(std::uint32_t queue_pair);
    void advance(Request& request, RequestEvent event);
    void publish_if_ended(std::uint32_t request);
    void publish(std::uint32_t request);
    void detach_all(std::uint32_t request);
    void store_record(std::uint32_t request, Status status, std::uint8_t more_flags = 0);
    void recount_live();

    // engine_failures.cpp
    void fail_request(std::uint32_t request, Status status, std::int32_t code);
    void fail_operation(std::uint32_t index, Status status, std::int32_t code);
    void drop_unposted(std::uint32_t request);
    void drop(std::uint32_t index, Status status);
    void doom_covering(const Operation& operation);
    void abort_behind(std::uint32_t queue_pair, std::uint64_t serial, Status status, std::int32_t code);
    void latch_aborting(std::uint32_t queue_pair, std::uint64_t serial, Status status, std::int32_t code);
    void take_out_of_count(std::uint32_t queue_pair);
    void quarantine_lane(std::uint32_t queue_pair);
    void fail_lane(std::uint32_t queue_pair, Status status, std::int32_t code);
    void expire(std::uint32_t slot, Status status, std::int32_t code);
    void expire_refused(std::uint32_t index);
    void reopen_if_drained(QueuePair& lane);
    void regate(std::uint32_t operation, EndpointId endpoint);
    bool broken(std::uint32_t queue_pair) const;
    void end_in_flight(std::uint32_t index);

    // engine_check.cpp
    std::string check_slots() const;
    std::string check_lane(std::uint32_t queue_pair) const;
    std::string check_line(std::uint32_t queue_pair, LineKind kind) const;
    std::string check_request(std::uint32_t request) const;
    std::string check_regions() const;

    EngineLimits limits_;
    GatePolicy policy_;
    SlotTable slots_;  // 2 * cap
    SlotTable request_slots_;
    std::vector<SlotInfo> slot_info_;
    std::vector<Request> requests_;
    std::unique_ptr<std::atomic<std::uint64_t>[]> records_;
    std::vector<Operation> operations_;
    std::uint32_t free_operation_ = no_index;
    std::uint32_t operations_free_ = 0;
    std::vector<QueuePair> lanes_;
    std::vector<Peer> peers_;
    Gate gate_;
    std::vector<Threshold> scratch_;  // thresholds of the control being accepted
    std::uint32_t scratch_used_ = 0;
    std::vector<std::uint32_t> region_uses_;
    std::array<Failure, failures_kept> failures_{};
    std::uint64_t failures_seen_ = 0;
    std::uint64_t moment_ = 0;  // counts acceptances and ends; orders them
    std::uint32_t lanes_live_ = 0;
    std::uint32_t window_ = 1;
    std::uint32_t round_robin_ = 0;
    bool bulk_lanes_ = false;  // there ever was one
    bool bulk_held_ = false;
    BulkHold bulk_hold_;
    std::uint32_t lanes_used_ = 0;  // one past the highest lane ever opened: bounds the round
    std::uint32_t postable_ = 0;    // operations in state queued
    std::uint32_t counted_ = 0;     // slots that count against the cap
    std::uint32_t expired_ = 0;     // slots in quarantine
    std::uint32_t lanes_pushed_back_ = 0;
    std::uint32_t dirty_head_ = no_index;
    std::uint32_t failing_head_ = no_index;
    std::uint32_t failing_tail_ = no_index;
    std::uint32_t timed_head_ = no_index;  // posted slots in order of their deadline
    std::uint32_t timed_tail_ = no_index;
    std::uint64_t illegal_transitions_ = 0;
    std::uint64_t early_signals_ = 0;        // a gate opened with a threshold unmet: never
    std::uint64_t records_overwritten_ = 0;  // a terminal record stored twice: never
    std::uint32_t unjudged_ = 0;             // completions taken since has_caught_up() last said yes
    bool settling_ = false;
    bool pushed_back_since_take_ = false;
    EngineStatistics counts_;
};

}  // namespace expertwire
