// One simulated cluster in low-latency mode: every rank's LowLatency over its own Engine, memory of a node visible at
// once, everything else through the SimulatedNetwork with its faults; steps, turns and deliveries interleaved by the
// seed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bind/simulation_exchange_world.hpp"
#include "bind/simulation_low_latency_script.hpp"

namespace expertwire::simulation {

class LowLatencyWorld {
  public:
    LowLatencyWorld(std::uint64_t seed, Coverage& coverage, const Options& options);
    Result run();

  private:
    // One call of one rank: what it writes to, poisoned and with guards behind.
    struct Call {
        std::shared_ptr<exchange::LowLatencyOperation> operation;
        std::shared_ptr<const exchange::LowLatencyHandle> handle;
        Bytes x, ids, out, scales, src_info;
        std::vector<std::int32_t> counts;
        std::vector<std::int64_t> layout_range, wait_ns;
        std::vector<std::int32_t> statistics;
    };
    struct Member {
        Bytes control, staging, data;
        std::unique_ptr<Engine> engine;
        std::unique_ptr<SimulatedPort> port;
        std::unique_ptr<exchange::LowLatency> exchange;
        std::vector<Call> calls;  // [step]
        std::size_t deed = 0;
        bool refused = false;  // its next call may have lost rows already: it is out
        bool gave_up = false;  // a put of its call failed: its caller does nothing more
        std::vector<Arrival> arrivals;
    };

    NetworkFaults choose_faults();
    void build(const NetworkModel& model, const NetworkFaults& faults);
    void build_member(std::uint32_t rank);
    bool step(std::uint32_t rank, std::uint64_t budget);
    bool begin(std::uint32_t rank, std::size_t at);
    bool may_begin(std::uint32_t rank);
    bool not_yet(std::uint32_t rank);
    bool unmask(std::uint32_t rank, std::uint32_t other);
    bool hear(std::uint32_t rank, std::uint64_t epoch);
    void leave_out(std::uint32_t rank, std::uint32_t other);
    bool deadline();
    void look_for_late_rows(std::uint32_t rank);
    void spoil(std::uint32_t rank, std::uint32_t other);
    bool lose_patience(std::uint32_t rank, std::size_t at);
    bool begin_dispatch(std::uint32_t rank, std::size_t at, exchange::Refusal& refusal);
    bool begin_combine(std::uint32_t rank, std::size_t at, exchange::Refusal& refusal);
    void finish(std::uint32_t rank, std::size_t at, exchange::Step outcome);
    std::string check_dispatch(std::uint32_t rank, std::size_t at) const;
    std::string check_rows(std::uint32_t rank, std::size_t at, std::uint64_t expert,
                           const std::vector<LowLatencyRow>& rows) const;
    std::string check_guards(std::uint32_t rank) const;
    bool turn(std::uint32_t rank);
    bool sweep();
    bool all_ended() const;
    void fail(std::uint32_t rank, const std::string& text);
    std::uint32_t ranks() const { return static_cast<std::uint32_t>(members_.size()); }

    Random random_;
    Coverage& coverage_;
    const Options options_;
    LowLatencyScript script_;  // `apart` grows: who hears that it is left out leaves the other out in turn
    const exchange::NodeTable nodes_;
    std::unique_ptr<SimulatedNetwork> network_;
    std::vector<Member> members_;
    std::vector<std::string> verdicts_;  // [step]: what the first rank that failed said
    GatePolicy policy_;
    Random patience_;         // of its own, so that runs without it stay what they were
    bool impatient_ = false;  // ranks mask others in the middle of a call, for good
    bool puts_may_fail_ = false;
    std::string error_;
    std::uint64_t first_epoch_ = 0;
    std::uint64_t hash_ = 0;
    std::uint64_t steps_ = 0;
};

Result simulate_low_latency(std::uint64_t seed, const Options& options, Coverage& coverage);

}  // namespace expertwire::simulation
