// One dispatch, and one combine if asked for, of a whole cluster in virtual time: the real exchange over the real
// engine, on a network with a rate, a latency and a cost per operation. What the state machine does costs time only
// where the profile says so: packing chunks, and what comes before the first one of a call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "bind/simulation_exchange_world.hpp"

namespace expertwire::simulation {

// How ranks post: asynchronously, each signal gated on its own write; or as the fallback does (SPEC T3): a batch of
// writes, wait for all of them, then their signals.
enum class Posting : std::uint8_t { asynchronous = 0, synchronous };

struct TimedOptions {
    ShapeOptions shape;
    NetworkModel network;
    Posting posting = Posting::asynchronous;
    bool gate = true;  // false: signals trust the order of posts
    std::uint64_t seed = 0;
    std::uint64_t row_bytes_on_wire = 0;  // rows count as so many bytes on the wire; 0: as what they are
    TimeNs setup_ns = 0;                  // from the call to the first chunk
    double pack_bytes_per_ns = 1e9;       // at which chunks are filled, one after the other
    std::uint32_t proxies = 1;            // that post for a rank, each with a lane of its own
    std::uint32_t outstanding = 512;
};

struct TimedResult {
    std::string error;                   // empty: every byte was right
    std::vector<std::uint64_t> call_ns;  // of each call: until the last rank has ended it
    std::uint64_t chunks = 0, wire_bytes = 0, trace_hash = 0;
};

// Puts leave when they are packed, in the way that `posting` says. A put's ticket is its place in `entries_`.
class TimedPort final : public SimulatedPort {
  public:
    TimedPort(std::uint32_t rank, std::uint32_t ranks, Engine& engine, SimulatedNetwork& network, Random& random,
              const TimedOptions& options);

    void begin_call() { pack_free_ = std::max(pack_free_, network_.now() + options_.setup_ns); }
    bool serve();                             // true if something was submitted or has ended
    std::optional<TimeNs> next_wake() const;  // when the next chunk will have been packed
    std::optional<Ticket> put(const Put& put) override;
    bool add(std::uint32_t rank, std::uint64_t word_offset, std::uint64_t delta) override;
    Status status(Ticket ticket) override;

  private:
    enum class Phase : std::uint8_t { packing = 0, writing, written, signalling, ended };
    struct Entry {
        Phase phase = Phase::packing;
        bool adds = false;  // a credit: no bytes
        Put put;
        TimeNs ready_at = 0;
        Ticket engine;
        Status result = Status::pending;
    };
    struct Proxy {
        std::deque<std::uint32_t> waiting;
        std::vector<std::uint32_t> writes;   // synchronous: the batch that is waited for
        std::vector<std::uint32_t> signals;  // whose end nobody waits for but who put them
    };

    std::uint64_t put_bytes(const Put& put) const;
    bool serve(std::uint32_t proxy);
    bool submit(Entry& entry, std::uint32_t lane, bool with_write, bool with_signal);
    bool advance(std::vector<std::uint32_t>& entries, Phase to);

    const TimedOptions& options_;
    std::deque<Entry> entries_;
    std::vector<Proxy> proxies_;
    std::uint64_t turn_ = 0;
    TimeNs pack_free_ = 0;
};

TimedResult run_timed_exchange(const TimedOptions& options);

}  // namespace expertwire::simulation
