// What a Context holds. Included by context*.cpp and progress_thread.cpp only.
//
// Locks, always in this order: tables → token → small ones (liveness, arrivals, deferred). The token is never held
// while waiting for anything.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "engine/pump.hpp"
#include "provider/live_objects.hpp"
#include "provider/provider.hpp"
#include "runtime/blob.hpp"
#include "runtime/context.hpp"
#include "runtime/liveness.hpp"
#include "runtime/memory.hpp"
#include "runtime/progress_thread.hpp"
#include "runtime/remote_table.hpp"
#include "runtime/shared_block.hpp"
#include "runtime/statistics.hpp"

namespace expertwire::runtime {

constexpr std::uint64_t lanes_broken = ~std::uint64_t{0};  // lane_generations(): one has failed work on it

struct RegionRecord {
    std::string name;
    std::byte* address = nullptr;  // null: deregistered
    std::uint64_t bytes = 0;
    Descriptor fd;        // own memory; -1 for the caller's
    Mapping mapping;      // own memory
    std::string held_by;  // why the provider has not closed it yet
    Counted<Live::region> counted;
};

struct PeerRecord {
    std::atomic<bool> added{false};
    Blob blob;
    std::uint32_t place = 0;  // our number there
    std::vector<QueuePairId> lanes;
    std::map<std::string, RemoteRegionId, std::less<>> remotes;
    std::map<std::string, Mapping, std::less<>> mapped;
    SharedBlock shared;               // its "runtime" region, where mapped
    RemoteRegionId remote_runtime;    // the same over the fabric
    Liveness::Own told{};             // what its copy of our words will hold: the provider has taken the adds
    Ticket pulse_request;             // the adds in flight
    std::uint64_t barrier_told = 0;   // the epoch that its barrier word will hold of us: the provider has taken that
    std::uint64_t barrier_asked = 0;  // the same once barrier_request has been posted
    Ticket barrier_request;           // a word not known to have ended
    std::uint64_t barrier_lanes = 0;  // lane_generations() when the barrier began
    bool barrier_tried = false;       // its word was submitted, or refused for good
};

// What a request keeps until it is released: bytes that the provider may still read.
struct RequestRecord {
    Ticket ticket;
    std::uint32_t rank = 0;
    std::vector<std::byte> payload;
};

// open → closing → closed; never back.
enum class Life : std::uint8_t { open = 0, closing, closed };

// SPEC T14. none → moving (a new endpoint is open, live peers come over, the old one drains) → none: it is closed.
struct Replacement {
    enum class Phase : std::uint8_t { none = 0, moving };
    Phase phase = Phase::none;
    bool wanted = false;       // a peer is being removed that may still write here, or whose work does not end
    EndpointId old_endpoint;   // the first of those that are replaced
    std::vector<bool> told;    // by rank: it goes on with the new one
    std::uint64_t closed = 0;  // old endpoints, ever
    // What peers have had to answer: how long turns were taken here since the new endpoint was open. `answer_since_ns`:
    // by rank, the same when it was told.
    TimeNs patience_ns = 0;
    TimeNs looked_ns = 0;
    std::vector<std::optional<TimeNs>> answer_since_ns;
    TimeNs next_try_ns = 0;
    std::string failure;  // of the last try
};

// A page that the kernel wipes in a forked child: telling a child from its parent costs one load (SPEC T21, T13).
class ForkMark {
  public:
    ForkMark();
    ~ForkMark();
    ForkMark(const ForkMark&) = delete;
    ForkMark& operator=(const ForkMark&) = delete;
    bool forked() const { return word_->load(std::memory_order_relaxed) == 0; }

  private:
    std::atomic<std::uint32_t>* word_ = nullptr;
};

struct ContextState {
    explicit ContextState(const ContextOptions& what)
        : options(what), remotes(what.remote_regions_max), peers(what.size), requests(what.requests_max) {}

    ContextOptions options;
    ForkMark fork_mark;
    std::uint64_t instance = 0;
    std::atomic<Life> life{Life::open};

    std::deque<RegionRecord>
        regions;  // by RegionId; declared before the provider: registrations end before their memory
    std::unique_ptr<Provider> provider;
    Capabilities capabilities;
    std::unique_ptr<Engine> engine;
    Token token;
    SharedLayout shared_layout;
    SharedBlock shared;
    std::unique_ptr<Liveness> liveness;

    mutable std::shared_mutex tables;  // regions, remotes, peers' tables
    RemoteTable remotes;
    std::atomic<std::uint64_t> tables_version{1};  // grows with each change of what requests are checked against
    std::vector<PeerRecord> peers;                 // by rank
    std::uint32_t cores = 1;                       // of our cpuset
    std::uint32_t ranks_on_host = 1;               // ours included
    std::atomic<bool> spin_allowed{false};
    std::atomic<bool> thread_has_core{false};  // beside every caller

    // Under the token.
    std::vector<RequestRecord> requests;      // by request slot
    std::vector<std::uint32_t> rank_of_slot;  // submission slot → rank of what was last posted there
    std::vector<Ticket> abandoned;            // given up while in flight
    std::vector<Arrival> arrivals_scratch;
    PumpTables pump_tables;
    EndpointId endpoint{0};  // the first of those in use
    Replacement replacement;
    Ticket sync_request;  // SPEC T3: the one request that may be in flight
    RuntimeCounters counters;
    bool starved = false;    // the last turn ended in AGAIN
    bool bulk_held = false;  // the last turn kept bulk back for the sake of small work

    std::mutex deferred_mutex;
    std::vector<Ticket> deferred_releases;  // from threads that could not have the token
    std::atomic<bool> deferred_any{false};

    std::mutex arrivals_mutex;
    std::deque<Notification> arrivals;

    std::mutex watches_mutex;
    std::vector<Descriptor> watches;
    std::atomic<std::uint32_t> watch_count{0};

    // SPEC T13: callers that drive progress right now, and when one last did.
    std::atomic<std::uint32_t> helpers{0};
    std::atomic<TimeNs> last_help_ns{0};
    std::atomic<TimeNs> wait_yields_ns{200'000};  // a wait for a request goes on for so long before it sleeps

    std::atomic<bool> pulse_due{false};        // news for the others: beat soon
    std::atomic<bool> broadcast_pulse{false};  // the next turn sends the pulses
    std::atomic<std::uint64_t> thread_sleeps{0}, thread_failures{0};

    std::uint64_t barrier_target = 0;  // under the token: the epoch to be told
    bool barriers_due = false;         // under the token: words of it may have to be sent, or sent again
    bool pulses_due = false;           // under the token: the same of pulses with news, or for which there was no room
    TimeNs next_words_ns = 0;          // under the token
    TimeNs next_repeat_ns = 0;         // the same: of what was not answered

    std::mutex barrier_mutex;
    std::atomic<std::uint64_t> barrier_epoch{0};   // the last begun
    std::uint64_t barrier_mark = 0;                // what it orders behind
    std::atomic<std::uint64_t> barrier_stored{0};  // the last epoch stored for who maps us

    ProgressThread thread;  // last: it ends first

    // ---- under the token (context_progress.cpp)
    bool turn(TimeNs budget_ns, Ticket until = {});  // ends early where `until` has ended
    void post_now(TimeNs now);                       // what may be posted, without a look at what has arrived
    bool cut(std::uint32_t rank, std::span<const ChunkSpec> chunks, TimeNs now, std::vector<ChunkSpec>& pieces) const;
    Engine::Submitted submit(std::uint32_t rank, std::span<const ChunkSpec> chunks,
                             std::span<const ControlSpec> controls, Level level, TimeNs now);
    Engine::Submitted submit_user(std::uint32_t rank, std::span<const ChunkSpec> chunks,
                                  std::span<const ControlSpec> controls, Level level, TimeNs now);
    void give_up(Ticket request);
    void reap(TimeNs now);
    void collect_arrivals();
    void send_pulses(TimeNs now);
    bool send_pulse(std::uint32_t rank, const Liveness::Own& own, TimeNs now);
    bool send_barriers(TimeNs now);  // true: every word was taken, or refused for now
    bool send_barrier(std::uint32_t rank, TimeNs now);
    std::uint64_t lane_generations(std::uint32_t rank) const;
    bool hears_by_fabric(std::uint32_t rank) const;
    bool news_told() const;  // verdict and farewell are with every peer that can be reached

    // ---- under the token (context_replace.cpp)
    bool advance_replacement(TimeNs now);  // true: records have turned terminal
    void begin_replacement(TimeNs now);
    void fail_replacement(const std::string& why, TimeNs now);
    void look_after_unmoved(TimeNs now);
    bool old_drained() const;
    bool live(std::uint32_t rank) const;
    bool lost(std::uint32_t rank, TimeNs now) const;
    bool quarantined(std::uint32_t rank) const;

    // The queue pairs of a peer go round the endpoints; the last one, ours, is on the first.
    EndpointId endpoint_of(std::uint32_t lane) const {
        return {endpoint.value + (lane == options.lanes ? 0 : lane % options.endpoints)};
    }

    bool is_bulk(std::uint32_t lane) const { return lane < options.lanes && lane % options.endpoints != 0; }
    bool is_bulk(std::uint32_t rank, QueuePairId queue_pair) const;

    // ---- any thread
    bool caller_turn(TimeNs budget_ns, Ticket until);  // false: the token is not free, or nothing moved
    void note_peer_error(std::uint32_t rank, Status status, std::int32_t code, const char* doing, TimeNs now);
    void ring_own_if_waiting();
    void wake_all();  // whoever waits here looks again
    void write_watches();
    void count_rank_on_host(int change);

    // ---- tables; the caller holds `tables`
    const RegionRecord& region_at(RegionId region) const;
    const PeerRecord& peer_at(std::uint32_t rank) const;
    const RemoteRegion& remote_at(std::uint32_t rank, RemoteRegionId remote) const;
    void check_rank(std::uint32_t rank, const char* what) const;
};

// Holds the tables for a change, after which whoever keeps checked chunks checks them again.
class TablesChange {
  public:
    explicit TablesChange(ContextState& state) : state_(state), lock_(state.tables) {}
    ~TablesChange() { state_.tables_version.fetch_add(1, std::memory_order_release); }
    TablesChange(const TablesChange&) = delete;
    TablesChange& operator=(const TablesChange&) = delete;

  private:
    ContextState& state_;
    std::unique_lock<std::shared_mutex> lock_;
};

// Takes the token for a control call. Throws Failure(deadline) where somebody holds it for longer than the timeout.
class ControlGuard {
  public:
    explicit ControlGuard(ContextState& state);
    ~ControlGuard() { state_.token.give(); }
    ControlGuard(const ControlGuard&) = delete;
    ControlGuard& operator=(const ControlGuard&) = delete;

  private:
    ContextState& state_;
};

}  // namespace expertwire::runtime
