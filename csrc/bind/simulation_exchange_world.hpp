// One simulated cluster that carries out a script: every rank's Exchange over its own Engine, same-node memory visible
// at once, everything else through the SimulatedNetwork with its faults; steps, turns and deliveries interleaved by the
// seed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind/simulation_exchange_script.hpp"
#include "engine/engine.hpp"
#include "engine/mutants.hpp"
#include "exchange/combine.hpp"
#include "exchange/dispatch.hpp"
#include "exchange/exchange.hpp"
#include "provider/simulated.hpp"

namespace expertwire::simulation {

struct Options {
    Mutant mutant = Mutant::none;
    std::uint64_t fail_at = 0;  // > 0: this operation of the whole network fails, and nothing else does
    NthFault fail_how = NthFault::operation;
    std::uint32_t trace_lines = 0;  // the last so many events, in words
};

struct Result {
    std::string error;  // empty: every byte was right
    std::uint64_t trace_hash = 0;
    std::uint64_t steps = 0;
    std::uint64_t calls = 0;
    std::uint64_t posts = 0;
    std::vector<std::string> trace;
};

// A rank's way out: puts and adds through its engine. The signal may take another lane than the bytes that it covers.
class SimulatedPort : public exchange::Port {
  public:
    SimulatedPort(std::uint32_t rank, std::uint32_t ranks, Engine& engine, SimulatedNetwork& network, Random& random);

    ~SimulatedPort() override = default;
    void map(std::uint32_t rank, const exchange::RankMemory& memory) { memory_[rank] = memory; }
    void open_lanes(std::uint32_t rank, std::uint32_t lanes);
    void reap();  // releases adds that have ended
    std::uint64_t pushed_back() const { return pushed_back_; }
    std::uint64_t puts() const { return puts_; }
    bool add_failed() const { return add_failed_; }  // a credit is lost: its sender may wait for ever

    const std::vector<exchange::RankMemory>& memory() const override { return memory_; }
    std::optional<Ticket> put(const Put& put) override;
    bool add(std::uint32_t rank, std::uint64_t word_offset, std::uint64_t delta) override;
    Status status(Ticket ticket) override;
    Status withhold(Ticket ticket) override { return engine_.withhold(ticket); }
    void wake(std::uint32_t) override {}  // a simulated rank is stepped whether or not it was woken

  protected:
    static ChunkSpec chunk_of(std::uint32_t rank, const Piece& piece, QueuePairId lane);
    static ControlSpec signal_of(std::uint32_t rank, std::uint64_t word_offset, std::uint64_t delta, QueuePairId lane);
    QueuePairId any_lane(std::uint32_t rank) { return lanes_[rank][random_.below(lanes_[rank].size())]; }

    std::uint32_t rank_;
    Engine& engine_;
    SimulatedNetwork& network_;
    Random& random_;
    std::vector<exchange::RankMemory> memory_;
    std::vector<std::vector<QueuePairId>> lanes_;  // [rank]
    std::vector<Ticket> adds_;
    std::uint64_t pushed_back_ = 0;
    std::uint64_t puts_ = 0;
    bool add_failed_ = false;
};

struct TimedOptions;
struct TimedResult;

class World {
  public:
    World(std::uint64_t seed, Coverage& coverage, const Options& options);
    World(const TimedOptions& options, Coverage& coverage);
    Result run();
    TimedResult run_timed();

  private:
    struct Setup {
        NetworkModel model;
        NetworkFaults faults;
        std::uint32_t outstanding = 64;
        std::uint32_t lanes = 1;
        const TimedOptions* timed = nullptr;
    };
    struct Member {
        Bytes control, staging, data;
        std::unique_ptr<Engine> engine;
        std::unique_ptr<SimulatedPort> port;
        std::unique_ptr<exchange::Exchange> exchange;
        std::vector<std::shared_ptr<const exchange::Handle>> handles;  // [call]
        std::size_t call = 0;                                          // next or under way
        std::unique_ptr<exchange::Operation> operation;
        exchange::Dispatch* dispatch = nullptr;  // the operation, if it is one
        Bytes spill;                             // where a result is gathered that does not fit its extent
        Bytes before;                            // the data region when the call began
        Bytes out;
        std::vector<float> out_weights;
        std::string failure;  // text of the call that has failed, as every rank must give it
        std::vector<Arrival> arrivals;
        bool gave_up = false;  // its call failed by a put: its caller does nothing more with this exchange
        EndpointId next_endpoint{16};
    };

    NetworkFaults choose_faults();
    void build(const Setup& setup);
    void build_member(std::uint32_t rank, const Setup& setup);
    std::unique_ptr<SimulatedPort> make_port(std::uint32_t rank, Engine& engine, const Setup& setup);
    static GatePolicy policy_of(const Setup& setup);
    bool serve_timed(std::uint32_t rank);
    bool run_call(std::size_t call);
    std::uint64_t bytes_on_wire(std::uint32_t source, const PostCommand& command) const;
    bool step(std::uint32_t rank, std::uint64_t budget);
    void begin(std::uint32_t rank);
    exchange::DispatchRequest dispatch_request(std::uint32_t rank, std::shared_ptr<const exchange::Handle> handle);
    void draw_first_epoch();
    bool epochs_used_up(std::uint32_t rank, const std::string& wrong);
    void finish(std::uint32_t rank, exchange::Step outcome);
    bool turn(std::uint32_t rank);
    bool sweep();
    bool all_ended() const;
    void drain();
    bool replace_quarantined(std::uint32_t rank);
    void check_landing(const SimulatedNetwork::Landing& landing);
    bool owns_bytes(const SimulatedNetwork::Landing& landing) const;
    bool owns_rows(const SimulatedNetwork::Landing& landing) const;
    bool owns_word(const SimulatedNetwork::Landing& landing) const;
    std::string check_guards(std::uint32_t rank) const;
    void fail(std::uint32_t rank, const std::string& text);
    std::string check_dispatch(std::uint32_t rank) const;
    std::string check_handle(std::uint32_t rank) const;
    std::string check_worst_tokens(std::uint32_t rank, std::uint64_t rows) const;
    std::string check_combine(std::uint32_t rank) const;
    std::string check_untouched(std::uint32_t rank, std::uint64_t begin, std::uint64_t end) const;
    std::string check_failure(std::uint32_t rank);
    void note_end();
    void mix(std::uint64_t value) { hash_ = mix64(hash_ ^ value); }

    Random random_;
    Coverage& coverage_;
    const Options options_;
    const Script script_;
    const exchange::NodeTable nodes_;
    std::unique_ptr<SimulatedNetwork> network_;
    std::vector<Member> members_;
    std::vector<std::string> verdicts_;  // [call]: what the first rank that failed said
    bool puts_may_fail_ = false;
    bool put_failed_ = false;
    std::string error_;
    std::uint64_t hash_ = 0;
    std::uint64_t steps_ = 0;
    std::uint64_t calls_ended_ = 0;
    std::uint64_t first_epoch_ = 0;        // what came before this run
    std::uint64_t row_bytes_on_wire_ = 0;  // timed: 0: as what they are
    std::uint64_t chunks_ = 0;             // timed
};

Result simulate_exchange(std::uint64_t seed, const Options& options, Coverage& coverage);

}  // namespace expertwire::simulation
