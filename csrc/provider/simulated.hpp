// Provider for N ranks of one process in virtual time: seeded, deterministic, with faults and a network model (SPEC
// T17). One SimulatedNetwork owns the clock, the event queue and a provider per rank. Deliveries really copy bytes
// between the ranks' registered memory. Same seed and same calls, same trace.
//
// Typical use:   network.provider(r).register_region(RegionId{i}, …) for every rank;  network.connect_all(regions);
//   loop { pump(engine[r], network.provider(r), arrivals[r], network.now()) for every r;  if (!network.run_next())
//   break; }
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "provider/counted.hpp"
#include "provider/provider.hpp"

namespace expertwire {

// xoshiro256**, seeded by splitmix64: the same numbers on every machine and library.
class Random {
  public:
    explicit Random(std::uint64_t seed);
    std::uint64_t next();
    std::uint64_t below(std::uint64_t limit) { return limit == 0 ? 0 : next() % limit; }
    std::uint64_t between(std::uint64_t low, std::uint64_t high) { return low + below(high - low + 1); }  // inclusive
    bool chance(double probability) { return static_cast<double>(next() >> 11) * 0x1.0p-53 < probability; }

  private:
    std::array<std::uint64_t, 4> state_;
};

std::uint64_t mix64(std::uint64_t value);  // splitmix64's finaliser

struct NetworkModel {
    TimeNs latency_ns = 2'000;           // one way
    double bytes_per_ns = 25.0;          // of one rank's link, per direction (25 = 200 Gb/s)
    TimeNs operation_ns = 100;           // the link is busy for at least this per operation
    std::uint32_t transmit_queue = 128;  // operations one rank may have in flight before post() says AGAIN
    std::uint32_t completion_queue = ~std::uint32_t{0};  // completions that wait for a rank's poll; more wait behind it
    OrderingClass ordering = OrderingClass::delivery_gated;  // `ordered`: deliveries keep order per (endpoint, target)
    bool delivery_complete = true;                           // else every write is counted (class C)
    std::uint32_t counted_tags = 4096;                       // class C: of each source at each target
    std::uint32_t counting_patience = 0;
    // Writes of at least so many bytes are pulled by the target: a request to send goes first, the bytes follow when
    // the target has asked for them. What is smaller, and every signal, overtakes them (SPEC T5). 0: all of them.
    std::uint64_t rendezvous_bytes = ~std::uint64_t{0};
    // A rank's NICs: endpoint i goes over rail i, with a rate and a latency of its own. Empty: one, as above.
    struct RailModel {
        double bytes_per_ns = 25.0;
        TimeNs latency_ns = 2'000;
    };
    std::vector<RailModel> rails;
};

// What becomes of the `fail_at`-th operation of the whole network.
enum class NthFault : std::uint8_t {
    operation = 0,  // completes with an error; the bytes may have landed in part
    post,           // post() fails
    again,          // a burst of AGAIN
    lost,           // it lands, and no completion ever comes
};
inline constexpr std::size_t nth_faults = 4;

// Probabilities are per operation. All zero: a network without faults.
struct NetworkFaults {
    double again = 0;  // a burst of AGAIN begins at this post
    std::uint32_t again_burst_max = 8;
    double late_delivery = 0;  // overtaken by what was posted after it (never within class A's order)
    TimeNs late_delivery_max_ns = 50'000;
    double late_completion = 0;  // completions out of order
    TimeNs late_completion_max_ns = 50'000;
    double early_local = 0;       // a Level::local completion before the bytes are visible at the target
    double failed_post = 0;       // post() itself fails
    double failed_operation = 0;  // completes with an error; the bytes may have landed in part
    double lost_completion = 0;   // it lands, but no completion ever comes: only closing its endpoint ends it
    std::uint64_t fail_at = 0;    // the k-th operation posted over the whole network fails; 0: none
    NthFault fail_how = NthFault::operation;
    double duplicate = 0;         // the completion comes twice
    double wrong_generation = 0;  // a completion with an older or newer generation of a slot in use comes as well
    double null_context = 0;      // an error completion without a ticket comes as well
};

enum class NetworkFault : std::uint8_t {
    again = 0,
    late_delivery,
    late_completion,
    early_local,
    failed_post,
    failed_operation,
    failed_kth,
    duplicate,
    wrong_generation,
    null_context,
    dead_peer,
    reported_death,
    silence,
    stale_region,
    out_of_range,
    full_queue,
    lost_completion,
};
inline constexpr std::size_t network_faults = 17;
const char* name_of(NetworkFault fault);

class SimulatedProvider;

class SimulatedNetwork {
  public:
    // An operation that has become visible: a write's or signal's bytes at the target, a read's at its reader.
    struct Landing {
        std::uint32_t source = 0;  // who posted it
        std::uint32_t target = 0;
        PostCommand command;
    };

    SimulatedNetwork(std::uint32_t ranks, const NetworkModel& model, const NetworkFaults& faults, std::uint64_t seed);
    ~SimulatedNetwork();
    SimulatedNetwork(const SimulatedNetwork&) = delete;
    SimulatedNetwork& operator=(const SimulatedNetwork&) = delete;

    std::uint32_t ranks() const { return static_cast<std::uint32_t>(providers_.size()); }
    SimulatedProvider& provider(std::uint32_t rank) { return *providers_[rank]; }

    // Every rank knows every rank as PeerId{rank}, and its region i as remote_region(rank, i). All ranks must have
    // registered RegionId{0} … RegionId{regions - 1}. (add_peer() and add_remote_region() do the same one by one.)
    void connect_all(std::uint32_t regions);
    static RemoteRegionId remote_region(std::uint32_t rank, std::uint32_t region, std::uint32_t regions) {
        return RemoteRegionId{rank * regions + region};
    }

    TimeNs now() const { return now_; }
    std::optional<TimeNs> next_event() const;
    bool run_next();              // advances to the next event and applies it; false: none left
    void run_until(TimeNs when);  // applies everything due and leaves the clock at `when`

    void set_faults(const NetworkFaults& faults) { faults_ = faults; }
    // The process is gone. What it had in flight may or may not land; what others send it vanishes: without a word, or
    // (`reported`) with Status::peer_dead completions later.
    void kill(std::uint32_t rank, bool reported);
    bool dead(std::uint32_t rank) const { return dead_[rank]; }
    // Silence: nothing lands at the rank and nothing of it completes until thaw(); then all of it does, late.
    void freeze(std::uint32_t rank);
    void thaw(std::uint32_t rank);

    std::uint64_t trace_hash() const { return hash_; }
    std::uint64_t events() const { return events_; }
    std::uint64_t posts() const { return posts_; }  // taken or failed; not those that were pushed back
    // Keeps the last `lines` of what happens, in words, for people (a replay); 0: nothing.
    void keep_trace(std::size_t lines) { trace_lines_ = lines; }
    std::vector<std::string> trace_text() const { return {trace_text_.begin(), trace_text_.end()}; }
    void say(const std::string& line);
    std::uint64_t count(NetworkFault fault) const { return counts_[static_cast<std::size_t>(fault)]; }
    std::uint64_t bytes_delivered() const { return bytes_delivered_; }

    // Operations of `rank` in flight that may still read or write this range of its own memory.
    std::size_t touching(std::uint32_t rank, RegionId region, std::uint64_t offset, std::uint64_t bytes) const;

    // Operations of `rank` that are not over (not landed, or not yet completed) and name this range of a remote region.
    std::size_t flying(std::uint32_t rank, RemoteRegionId remote, std::uint64_t offset, std::uint64_t bytes) const;

    // How many bytes an operation of this rank takes on the link; unset: its own.
    std::function<std::uint64_t(std::uint32_t, const PostCommand&)> wire_bytes;
    std::uint64_t bytes_on_links() const { return bytes_on_links_; }  // of everything that has left

    std::function<void(const Landing&)> on_landing;  // called after the bytes were applied
    std::function<void(const Landing&)> on_failure;  // called when an operation reaches its target and fails there

  private:
    friend class SimulatedProvider;
    enum class EventKind : std::uint8_t { deliver = 0, deliver_read, complete_local, complete, stray, pull, message };
    struct Event {
        TimeNs at = 0;
        std::uint64_t sequence = 0;
        EventKind kind = EventKind::deliver;
        std::uint32_t flight = 0;
        std::uint64_t flight_number = 0;
        friend bool operator>(const Event& a, const Event& b) {
            return a.at != b.at ? a.at > b.at : a.sequence > b.sequence;
        }
    };
    // One operation on its way.
    struct Flight {
        bool used = false;
        std::uint64_t number = 0;  // unique; an event of an ended flight finds another number
        std::uint32_t source = 0, target = 0;
        PostCommand command;
        Status outcome = Status::ok;
        std::int32_t code = 0;
        std::uint32_t events = 0;  // scheduled and not applied; the flight ends with the last one
        bool stuck = false;        // to or from a dead rank: nothing more will happen, its owner is not told
        bool captured = false;     // the source's bytes are in `bytes`: its buffer is free again
        bool landed = false;
        bool completed = false;
        bool lost = false;                       // its last completion will not come
        bool pulled = false;                     // rendezvous: the target has asked for the bytes
        std::optional<std::uint32_t> immediate;  // class C: what comes with a counted write
        bool counts = false;                     // class C: a signal whose target counts for it; `bytes` is its message
        bool waits = false;                      // its message is there
        std::vector<std::byte> bytes;
    };
    // What class C puts on the wire beside users' operations.
    struct Message {
        std::uint32_t source = 0, target = 0;
        std::vector<std::byte> bytes;
    };
    struct Extra {
        std::optional<std::uint32_t> immediate;
        std::span<const std::byte> message;
    };

    PostResult post(std::uint32_t rank, const PostCommand& command, const Extra& extra);
    bool push_back(std::uint32_t rank);
    bool nth(NthFault how) const {
        return faults_.fail_how == how && faults_.fail_at != 0 && posts_ == faults_.fail_at;
    }
    void tell(const char* what, std::uint32_t rank, std::uint32_t target, const PostCommand& command, Status status);
    void depart(std::uint32_t index, bool late);
    void complete_later(std::uint32_t index, TimeNs at, EventKind kind);
    void launch(std::uint32_t rank, std::uint32_t target, const PostCommand& command, const Extra& extra,
                Status outcome, std::int32_t code);
    Status check(std::uint32_t rank, std::uint32_t target, const PostCommand& command);
    TimeNs departure(std::uint32_t rank, std::uint64_t bytes, EndpointId endpoint = EndpointId{0});
    TimeNs latency(EndpointId endpoint) const;
    TimeNs arrival(std::uint32_t rank, std::uint32_t target, const PostCommand& command, TimeNs departed);
    void schedule(TimeNs at, EventKind kind, std::uint32_t flight);
    void apply(const Event& event);
    void deliver(std::uint32_t index);
    void deliver_read(std::uint32_t index);
    void land(Flight& flight);
    void complete(std::uint32_t index, Level level);
    void add_noise(std::uint32_t rank, const Completion& completion);
    void stray(std::uint32_t rank, const Completion& completion);
    void capture(Flight& flight);
    void end(std::uint32_t index);
    void end_or_stick(std::uint32_t index);
    void drop_flights(const std::function<bool(const Flight&)>& which);
    std::uint32_t new_flight();
    void trace(std::uint64_t a, std::uint64_t b, std::uint64_t c);
    // simulated_counted.cpp
    bool send(std::uint32_t rank, std::uint32_t target, const std::vector<std::byte>& bytes);
    void arrive(const Event& event);
    std::uint32_t counting_flight(std::uint32_t rank, Ticket signal) const;
    Status land_counted(std::uint32_t source, Ticket signal);
    bool signal_answered(std::uint32_t rank, Ticket signal);
    void note(NetworkFault fault) { ++counts_[static_cast<std::size_t>(fault)]; }

    NetworkModel model_;
    NetworkFaults faults_;
    Random random_;
    TimeNs now_ = 0;
    std::uint64_t sequence_ = 0;
    std::uint64_t posts_ = 0;
    bool nth_again_done_ = false;
    std::size_t trace_lines_ = 0;
    std::deque<std::string> trace_text_;
    std::uint64_t events_ = 0;
    std::uint64_t hash_ = 0x9e3779b97f4a7c15ull;
    std::uint64_t bytes_delivered_ = 0;
    std::uint64_t bytes_on_links_ = 0;
    std::array<std::uint64_t, network_faults> counts_{};
    std::priority_queue<Event, std::vector<Event>, std::greater<>> queue_;
    std::vector<Flight> flights_;
    std::vector<Message> messages_;
    std::vector<std::uint32_t> free_flights_;
    std::vector<std::unique_ptr<SimulatedProvider>> providers_;
    std::vector<TimeNs> link_free_;         // per rank
    std::vector<TimeNs> ordered_arrival_;   // per (source, target): class A
    std::vector<std::uint32_t> in_flight_;  // per rank
    std::vector<std::uint32_t> again_left_;
    std::vector<bool> dead_, death_reported_, frozen_;
    std::vector<Event> held_;                                   // events of frozen ranks
    std::vector<std::pair<std::uint32_t, Completion>> strays_;  // completions that should not come, by rank
};

class SimulatedProvider final : public Provider {
  public:
    SimulatedProvider(SimulatedNetwork& network, std::uint32_t rank);

    const Capabilities& capabilities() const override { return capabilities_; }
    ControlResult register_region(RegionId id, const RegionSpec& spec) override;
    ControlResult deregister_region(RegionId id) override;  // keys given out before are stale from here on
    std::vector<std::byte> address(EndpointId endpoint) const override;
    std::vector<std::byte> region_key(RegionId id) const override;
    ControlResult add_peer(PeerId peer, std::span<const std::byte> address) override;
    ControlResult remove_peer(PeerId peer) override;  // ends what is in flight to the peer, without completions
    ControlResult add_remote_region(PeerId peer, RemoteRegionId id, std::span<const std::byte> key) override;
    PostResult post(const PostCommand& command) override;
    std::size_t poll(std::span<Completion> completions, std::vector<Arrival>& arrivals) override;
    int wait_fd() const override { return -1; }
    bool may_sleep() override { return completions_.empty() && arrivals_.empty() && !has_counting_to_do(); }
    bool counts(PeerId peer) override { return counted_ && counted_->counts(peer); }
    bool has_counting_to_do() const { return counted_ && !(immediates_.empty() && inbox_.empty() && counted_->idle()); }
    const Counting* counted() const { return counted_.get(); }
    ProviderCounters counters() const override { return counters_; }
    void close() override;
    void close_endpoint(EndpointId endpoint);  // as remove_peer(); later posts on it fail

    std::byte* memory(RegionId id, std::uint64_t offset) const;  // null where the region is not registered

  private:
    friend class SimulatedNetwork;
    struct Registered {
        RegionSpec spec;
        std::uint32_t generation = 0;
        bool open = false;
    };
    struct Remote {
        std::uint32_t rank = 0;
        RegionId region;
        std::uint32_t generation = 0;
        bool known = false;
    };

    // A counted write ends when it has left and was acknowledged, in either order.
    enum class Sent : std::uint8_t { none = 0, posted, left, acknowledged };
    struct Ledger {
        Sent state = Sent::none;
        PostCommand command;
        std::uint32_t immediate = 0;
    };
    PostResult post_counted(const PostCommand& command);
    PostResult post_counting(const PostCommand& command);
    void poll_counted();
    void report(const Completion& completion);
    void left(const Completion& completion, std::uint32_t immediate);
    void acknowledged(Ticket write);
    void abandon(const std::function<bool(const PostCommand&)>& which);

    SimulatedNetwork& network_;
    std::uint32_t rank_;
    Capabilities capabilities_;
    std::unique_ptr<Counting> counted_;  // class C
    std::deque<SimulatedNetwork::Message> inbox_;
    std::deque<std::uint32_t> immediates_;
    std::uint64_t meetings_ = 0;
    std::vector<Ledger> ledger_;  // by slot
    std::vector<Registered> regions_;
    std::vector<std::optional<std::uint32_t>> peers_;  // PeerId → rank
    std::vector<Remote> remotes_;
    std::deque<Completion> completions_;
    std::deque<Arrival> arrivals_;
    std::vector<EndpointId> closed_endpoints_;
    ProviderCounters counters_;
    bool closed_ = false;
};

}  // namespace expertwire
