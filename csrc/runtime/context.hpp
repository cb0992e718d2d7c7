// One transport instance: provider, engine, regions, peers, one progress thread, one progress token (DESIGN, SPEC
// T1–T22).
//
// Calls come in three kinds, said at each declaration:
//   [control]  may throw Failure; any thread (serialised inside); the GIL is released by bind/.
//   [token]    the caller holds the progress token (TokenGuard); never throws, never blocks, no allocation on the hot
//   path. [any]      any thread, never throws, never blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.hpp"
#include "engine/types.hpp"
#include "provider/capabilities.hpp"
#include "provider/libfabric.hpp"
#include "provider/live_objects.hpp"
#include "runtime/clock.hpp"
#include "runtime/doorbell.hpp"
#include "runtime/failure.hpp"
#include "runtime/liveness.hpp"
#include "runtime/token.hpp"

namespace expertwire::runtime {

// heartbeat: pidfd is not used (tests of the across-node path)
enum class LivenessMode : std::uint8_t { automatic = 0, heartbeat };

struct ContextOptions {
    std::uint32_t rank = 0;
    std::uint32_t size = 1;
    std::string provider =
        "local";  // "local", or a libfabric name ("tcp;ofi_rxm", "shm", "cxi", "efa", "verbs;ofi_rxm")
    std::vector<std::string> libraries;  // candidate paths of libfabric.so.1, best first (fabric/discover.py)
    std::string source_address;          // numeric address to bind; empty: the provider's choice
    std::string domain;                  // the NIC's domain name; empty: any
    SignalPath signal_path = SignalPath::automatic;
    ProviderSettings settings;            // delivery-complete, trust order, rendezvous threshold
    std::uint32_t outstanding_max = 512;  // SPEC T2
    std::uint32_t lanes = 1;              // queue pairs per peer, in turn over the endpoints
    // The provider's endpoints. Lanes on the first one are for what is small; those on the others are bulk lanes: what
    // goes over them is cut into chunks, of which few are in flight, so that little stands before what is small.
    std::uint32_t endpoints = 1;
    std::uint64_t bulk_chunk_bytes = 256 * 1024;  // half of it where small work has met bulk not long ago
    TimeNs bulk_hold_ns = 250'000;                // beside small work one chunk in so long; 0: at any time
    // Chunks in flight on a bulk lane, of reads half as many; 1 where small work has met bulk. Up to four neighbours go
    // out as one operation where none has.
    std::uint32_t bulk_window = 8;
    std::uint32_t requests_max = 4096;    // requests alive at one time, finished ones that nobody released included
    std::uint32_t counters = 0;           // 64-bit signal words of region "counters" (SPEC T9)
    TimeNs timeout_ns = 100'000'000'000;  // SPEC T19: the default of every wait
    TimeNs hard_timeout_ns = 200'000'000'000;  // SPEC T14
    TimeNs heartbeat_ns = 1'000'000'000;       // across hosts: one add per peer in this time
    TimeNs silence_ns = 5'000'000'000;         // no heartbeat for so long: dead
    bool sync_writes = false;                  // SPEC T3
    LivenessMode liveness = LivenessMode::automatic;
    // Ranks are not those of one job: each context gives its peers numbers of its own, and is told by each which one it
    // has there (`place` of add_peer). No barriers, and a peer's death is its own affair.
    bool independent = false;
    std::uint32_t regions_max = 1024;
    std::uint32_t remote_regions_max = remote_rows_max;  // of all peers, at one time
    std::uint32_t operations_max = 4096;                 // that may be accepted beyond those in flight
    std::uint32_t notifications_max =
        65'536;  // that have come and were not taken; what comes beyond is counted and lost
};

// Chunks as arrays of one length: chunk i is bytes[i] between local_offsets[i] of locals[i] and remote_offsets[i] of
// remotes[i].
struct ChunkArrays {
    std::span<const std::uint32_t> locals;
    std::span<const std::uint64_t> local_offsets;
    std::span<const std::uint32_t> remotes;
    std::span<const std::uint64_t> remote_offsets;
    std::span<const std::uint64_t> bytes;
};

// Chunks to one peer over one lane that have been checked, to be submitted as often as one likes.
struct PreparedChunks {
    std::uint32_t rank = 0;
    std::uint32_t lane = 0;
    std::vector<ChunkSpec> specs;
    std::uint64_t tables_version = 0;  // when they were checked
};

// What a submission does beside taking the work: a turn; posting what may be posted; or nothing, so that it costs
// bookkeeping only, and the thread posts it, or the caller's next turn.
enum class Posting : std::uint8_t { with_a_turn = 0, alone, later };

std::string_view status_name(Status status);

struct Notification {
    std::uint32_t rank = 0;
    std::vector<std::byte> payload;
};

struct BlobRegion;    // runtime/blob.hpp
struct Statistics;    // runtime/statistics.hpp
struct ContextState;  // runtime/context_state.hpp

class Context {
  public:
    explicit Context(
        const ContextOptions& options);  // [control] opens the provider; regions "runtime" (and "counters")
    ~Context();                          // close(); does nothing in a forked child
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    std::uint32_t rank() const;
    std::uint32_t size() const;
    const ContextOptions& options() const;
    const Capabilities& capabilities() const;
    bool closed() const;
    bool forked() const;  // this is a child of the process that made it

    // Throws Failure(state) in a forked child (SPEC T21) or after close(). First line of every entry point of bind/.
    void check_usable() const;  // [control]

    // ---- regions. Names are unique per context; "runtime" exists from the start and belongs to this class.
    RegionId create_region(std::string_view name,
                           std::uint64_t bytes);  // [control] memfd, preallocated, zeroed, registered
    RegionId register_region(std::byte* address, std::uint64_t bytes);  // [control] user memory, announced as "#<id>"
    bool deregister_region(RegionId region, TimeNs until_ns);  // [control] false: still used, call again; throws
                                                               // Failure(state) only for "runtime" or an unknown region
    [[noreturn]] void fail_in_use(RegionId region, std::int64_t timeout_ms) const;
    RegionId region(std::string_view name) const;      // [control] throws if there is none
    std::byte* region_address(RegionId region) const;  // [control] as are the next two
    std::uint64_t region_bytes(RegionId region) const;
    int region_fd(RegionId region) const;           // borrowed; -1 for registered user memory
    std::vector<std::string> region_names() const;  // of memfd regions: their descriptors go to node peers

    // ---- peers. What the bootstrap carries: blob() of each rank to every rank, and to node peers the descriptors.
    // [control] versioned, bounded, binary. `own_only`: without the users' regions
    std::vector<std::byte> blob(bool own_only = false) const;
    // [control] again with a newer blob: more regions. `place`: the number that it gives us, where that is not our rank
    void add_peer(std::uint32_t rank, std::span<const std::byte> blob, std::optional<std::uint32_t> place = {});
    // [control] What its owner's region_key() gave, for peers that pass that on by themselves. The same again is the
    // same.
    std::vector<std::byte> region_key(RegionId region) const;  // [control] empty: no peer can reach it
    RemoteRegionId announce_region(std::uint32_t rank, const BlobRegion& region);
    // [control] Its requests fail, its lanes close. Where work of it does not end the endpoint is replaced: other peers
    // are moved over, and blob() is another from then on. Failure(state): that cannot be done, or not yet.
    void remove_peer(std::uint32_t rank);
    void map_peer(std::uint32_t rank, std::string_view region,
                  int fd);  // [control] fd is borrowed; map "runtime" too: the
                            // doorbell, heartbeats and barrier words live there
    std::byte* peer_memory(std::uint32_t rank,
                           std::string_view region) const;  // [control] null where not mapped; own rank:
                                                            // own memory. Stable until remove_peer()
    RemoteRegionId remote_region(std::uint32_t rank,
                                 std::string_view region) const;  // [control] throws if not announced
    std::uint64_t remote_region_bytes(std::uint32_t rank, std::string_view region) const;  // [control]
    QueuePairId queue_pair(std::uint32_t rank, std::uint32_t lane = 0) const;  // [any] invalid where there is none

    // ---- life
    void start();                 // [control] starts the progress thread
    void close(TimeNs until_ns);  // [control] drains until then, publishes `leaving`, stops, releases; idempotent,
                                  // never throws

    // ---- submission. chunk(), signal() and notification() check every argument (Failure: what, which peer, value,
    // limit).
    ChunkSpec chunk(std::uint32_t rank, OpKind kind, RegionId local, std::uint64_t local_offset, RemoteRegionId remote,
                    std::uint64_t remote_offset, std::uint64_t bytes, std::uint32_t lane = 0) const;  // [control]
    std::vector<ChunkSpec> chunks(std::uint32_t rank, OpKind kind, RegionId local,
                                  std::span<const std::uint64_t> local_offsets, RemoteRegionId remote,
                                  std::span<const std::uint64_t> remote_offsets, std::uint64_t bytes,
                                  std::uint32_t lane = 0) const;  // [control] many of one size
    std::vector<ChunkSpec> chunks(std::uint32_t rank, OpKind kind, const ChunkArrays& arrays,
                                  std::uint32_t lane = 0) const;  // [control] of any regions and sizes
    PreparedChunks prepare(std::uint32_t rank, OpKind kind, const ChunkArrays& arrays,
                           std::uint32_t lane) const;  // [control] chunks(), to be kept
    void renew(PreparedChunks& chunks) const;          // [control] checks them where tables have changed; throws so too
    ControlSpec signal(std::uint32_t rank, RemoteRegionId remote, std::uint64_t offset, std::uint64_t operand,
                       Scope scope = Scope::request, std::uint32_t lane = 0) const;  // [control]
    ControlSpec notification(std::uint32_t rank, std::span<const std::byte> payload, Scope scope = Scope::request,
                             std::uint32_t lane = 0) const;  // [control] payload is copied by submit()
    // Chunks larger than the provider's message are split here. Specs built by hand are trusted.
    Engine::Submitted submit_held(std::uint32_t rank, std::span<const ChunkSpec> chunks,
                                  std::span<const ControlSpec> controls,
                                  Level level);  // [token] would_block: nothing taken
    // [control] would_block: still full at until_ns, nothing taken.
    Engine::Submitted submit(std::uint32_t rank, std::span<const ChunkSpec> chunks,
                             std::span<const ControlSpec> controls, Level level, TimeNs until_ns,
                             Posting posting = Posting::with_a_turn);
    [[noreturn]] void fail_full(std::uint32_t rank, std::int64_t timeout_ms);
    [[noreturn]] void fail_submit(std::uint32_t rank, Status status) const;
    Status status(Ticket request) const;      // [any] one acquire load; `stale` if the record is of another generation
    std::int32_t error_code(Ticket request);  // [control] the provider's number behind a failure, or 0
    void mark_stalled(Ticket request);        // [control] a wait passed its deadline
    bool stalled(Ticket request) const;       // [any]
    void release(Ticket request);             // [any] gives the handle up; freed once terminal (may still be in flight)
    void release_held(Ticket request);        // [token] the same
    Status cancel(Ticket request);            // [control]
    Status withhold_held(Ticket request);     // [token] Engine::withhold
    // Helps and sleeps until the request is terminal, `until_ns`, or a signal of the OS: then `pending`. The binder
    // calls it in slices of <= 50 ms. Ownership never changes.
    Status wait_slice(Ticket request, TimeNs until_ns);  // [control]

    // ---- progress (SPEC T13)
    Token& token();
    bool turn_held(TimeNs budget_ns);  // [token] one turn: poll, step, post; true if anything moved
    void post_held();                  // [token] what may be posted, without a look at what has arrived
    bool turn(TimeNs budget_ns);       // [any] the same if the token is free; false: busy elsewhere or nothing moved
    Status turn_for(Ticket request, TimeNs budget_ns);  // [any] the same until that has ended; its status
    void enter_help();  // [any] a caller begins to drive progress: the progress thread parks …
    // [any] … and takes over: at once where the caller is about to sleep on the doorbell (enter again after it), and
    // soon after its last turn where it only goes home.
    enum class Leaving : std::uint8_t { to_sleep = 0, done };
    void leave_help(Leaving why = Leaving::to_sleep);
    void step_aside();              // [any] a caller that has polled is about to sleep elsewhere: the thread takes over
    bool may_spin() const;          // [any] at least as many cores in our cpuset as ranks on this host
    Doorbell doorbell() const;      // [any] mine: seen(), then flags, then wait()
    void ring(std::uint32_t rank);  // [any] the doorbell of a mapped rank (mine included); nothing where not mapped
    bool doorbell_slice(std::uint32_t seen, TimeNs until_ns);  // [control] helps once, then sleeps; true: it rang
    bool word_slice(RegionId region, std::uint64_t offset, std::uint64_t at_least,
                    TimeNs until_ns);  // [control] throws
                                       // Failure(peer)
    int watch_open();                  // [control] an eventfd for an event loop, written to when something completed
    void watch_close(int fd);          // [control]

    // ---- whole-context waits (SPEC T7), in slices. true: reached.
    struct Quiet {
        std::uint64_t mark = 0;
    };
    Quiet quiet_begin();                             // [control] everything submitted before this call
    bool quiet_slice(Quiet quiet, TimeNs until_ns);  // [control]
    [[noreturn]] void fail_quiet(Quiet quiet, std::int64_t timeout_ms);
    std::uint64_t barrier_begin(TimeNs until_ns);  // [control] its epoch; announced behind all earlier traffic
    bool barrier_slice(std::uint64_t epoch, TimeNs until_ns);  // [control] throws Failure(peer) when a peer died
    [[noreturn]] void fail_barrier(std::uint64_t epoch, std::int64_t timeout_ms);

    // ---- liveness (SPEC T19, E8)
    std::optional<Fault>
    fault();                 // [control] first dead peer, root cause first; may wait <= 500 ms for another's verdict
    bool has_fault() const;  // [any] one load: something is wrong, ask fault()
    std::optional<Fault> fault_of(std::uint32_t rank) const;  // [control] what ends requests to that peer
    [[noreturn]] void raise_fault(const Fault& fault, std::string_view doing) const;  // Failure(peer) in words
    void publish_call(std::uint64_t sequence,
                      std::uint64_t phase);  // [any] goes out with my pulse: stores now, adds soon
    // [any] The same for calls of the low-latency mode: `told` has a word for each rank. `now`: by a beat of its own.
    void publish_low_latency(std::uint64_t call, std::span<const std::uint64_t> told, bool now);
    std::uint64_t low_latency_told(std::uint32_t rank) const;  // [any] the word that it has for me; one load and a lock
    bool ended(std::uint32_t rank) const;   // [any] it has left or its process has exited: it will not wake up
    bool intact(std::uint32_t rank) const;  // [token] nothing that was submitted to it has ever failed
    // [control] Before an operation raises PeerError. Helps until every peer that can be reached holds it, or
    // `until_ns`.
    bool publish_verdict(std::uint32_t dead_rank, TimeNs until_ns);
    // [any] Trouble with `rank` seen at `since` may still turn out to be another rank's death. Ends within 7 s.
    bool undecided(std::uint32_t rank, TimeNs since) const;
    PeerPulse pulse(std::uint32_t rank) const;   // [any]
    bool unreachable(std::uint32_t rank) const;  // [any] dead, or has left: nothing comes from it any more

    // ---- what arrived, and records
    std::vector<Notification> take_notifications();  // [control]
    Statistics statistics();                         // [control] a snapshot

  private:
    template <class Here>
    bool wait_until(Here here, TimeNs until_ns, const char* doing);
    void raise_if_peer_died(Ticket request);
    bool tell(TimeNs until_ns);
    void store_barrier(std::uint64_t epoch);
    std::vector<std::uint32_t> barrier_missing(std::uint64_t epoch) const;

    std::unique_ptr<ContextState> state_;
    Counted<Live::context> counted_;
};

// Holds the token for a scope and counts as a caller's turn.
class TokenGuard {
  public:
    explicit TokenGuard(Context& context) : context_(context), held_(context.token().try_take()) {}
    TokenGuard(Context& context, TimeNs deadline_ns)
        : context_(context), held_(context.token().take_until(deadline_ns)) {}
    ~TokenGuard() {
        if (held_) context_.token().give();
    }
    TokenGuard(const TokenGuard&) = delete;
    TokenGuard& operator=(const TokenGuard&) = delete;
    explicit operator bool() const { return held_; }

  private:
    Context& context_;
    bool held_;
};

}  // namespace expertwire::runtime
