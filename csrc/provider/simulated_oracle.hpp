// What the engine's simulation holds the engine to, from outside: the memory of every rank, and what the network really
// did with it. Nothing here looks inside the engine.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "provider/simulated.hpp"

namespace expertwire {

// One byte of a payload: mixes the whole (source, epoch, chunk) seed with the offset, so that a stale, shifted or torn
// byte is seen.
std::byte payload_byte(std::uint64_t seed, std::uint64_t offset);

class EngineOracle {
  public:
    static constexpr std::uint32_t jobs_per_rank = 10;
    static constexpr std::uint32_t chunks_max = 5;
    static constexpr std::uint32_t chunk_bytes_max = 256;
    static constexpr std::uint32_t regions = 6;
    enum : std::uint32_t {
        outbox = 0,
        inbox,
        words,
        library,
        reads,
        fragile
    };  // fragile: closed in the middle of a run

    struct Chunk {
        OpKind kind = OpKind::write;
        std::uint32_t bytes = 0;
        std::uint32_t lane = 0;
        bool hopeless = false;  // its key is stale or its range is wrong: it must fail
        std::uint32_t fact = 0;
    };
    // A request as its user sees it. Place k of a rank owns fixed pieces of everybody's memory, and is used again for
    // the next epoch as soon as the terminal record says so.
    struct Job {
        bool active = false;
        bool flying = false;  // Level::local, published, its delivery not over
        bool cancelled = false;
        std::uint32_t peer = 0;
        std::uint64_t epoch = 0;
        Level level = Level::delivered;
        Ticket ticket;
        std::uint32_t chunk_count = 0;
        std::array<Chunk, chunks_max> chunks;
        bool has_control = false;
        OpKind control = OpKind::signal;
        Scope scope = Scope::request;
        std::uint32_t control_lane = 0;
        std::uint32_t control_fact = 0;
        std::vector<std::uint32_t> covers;    // facts that must hold when the control lands
        std::array<std::uint64_t, 3> note{};  // notification: source, place, epoch
    };

    EngineOracle(SimulatedNetwork& network, std::uint64_t seed);

    // Layout. All offsets are the same on every rank.
    static std::uint64_t piece(std::uint32_t place, std::uint32_t chunk) {
        return (std::uint64_t{place} * chunks_max + chunk) * chunk_bytes_max;
    }
    std::uint64_t inbox_piece(std::uint32_t source, std::uint32_t place, std::uint32_t chunk) const {
        return std::uint64_t{source} * jobs_per_rank * chunks_max * chunk_bytes_max + piece(place, chunk);
    }
    static std::uint64_t word(std::uint32_t source, std::uint32_t place) {
        return (std::uint64_t{source} * jobs_per_rank + place) * 8;
    }
    RemoteRegionId remote(std::uint32_t rank, std::uint32_t region) const {
        return SimulatedNetwork::remote_region(rank, region, regions);
    }

    Job& job(std::uint32_t rank, std::uint32_t place) { return jobs_[std::size_t{rank} * jobs_per_rank + place]; }

    // Fills the source bytes of a job that is about to be submitted, and gives its operations their facts.
    void prepare(std::uint32_t rank, std::uint32_t place);
    // What a control of scope queue_pair or peer covers besides its own job. Call before the job is active.
    void cover(std::uint32_t rank, std::uint32_t place, const Engine& engine);
    void start(std::uint32_t rank, std::uint32_t place, Ticket ticket);
    // Nobody waits for its operations any more: those that cover them need not either.
    void cancelled(std::uint32_t rank, std::uint32_t place);
    // Looks at a job's record; when it is terminal, checks everything that this means and reuses its memory at once.
    // True: it has just ended with `status`.
    bool check_end(std::uint32_t rank, std::uint32_t place, Engine& engine, Status& status);
    void check_notification(std::uint32_t at, const Arrival& arrival);
    // Every byte of every rank against what its user and the landings asked for may have made of it.
    void check_memory();

    bool errors_possible = false;  // else every request must succeed
    const std::string& failure() const { return failure_; }
    void fail(const std::string& what, std::uint32_t rank, std::uint32_t place);
    std::uint64_t landings() const { return landings_; }
    std::uint64_t controls_checked() const { return controls_checked_; }

  private:
    struct Pieces {  // chunks of one job that an operation carries: neighbours may be posted as one
        std::uint32_t place = 0, first = 0, end = 0;
    };
    static Pieces pieces_of(const PostCommand& command);
    void on_landing(const SimulatedNetwork::Landing& landing);
    void on_write(const SimulatedNetwork::Landing& landing);
    void on_read(const SimulatedNetwork::Landing& landing);
    void on_control(std::uint32_t rank, std::uint32_t place, std::uint64_t epoch);
    void on_torn(const SimulatedNetwork::Landing& landing);
    void expect(std::uint32_t rank, std::uint32_t region, std::uint64_t offset, const std::byte* bytes,
                std::uint64_t count);
    void check_around(std::uint32_t rank, std::uint32_t region, std::uint64_t offset);
    void check_success(std::uint32_t rank, std::uint32_t place);
    bool over(std::uint32_t rank, std::uint32_t place);
    bool untouched(std::uint32_t rank, std::uint32_t place);
    void scribble(std::uint32_t rank, std::uint32_t place);
    std::uint64_t payload_seed(std::uint32_t rank, std::uint32_t place, std::uint32_t chunk, std::uint64_t epoch) const;
    bool matches(const std::byte* at, std::uint64_t seed, std::uint64_t bytes) const;
    std::byte* memory(std::uint32_t rank, std::uint32_t region, std::uint64_t offset) {
        return memory_[rank][region].data() + offset;
    }
    std::uint32_t new_fact() {
        facts_.push_back(0);
        return static_cast<std::uint32_t>(facts_.size() - 1);
    }

    SimulatedNetwork& network_;
    std::uint64_t seed_;
    std::vector<std::array<std::vector<std::byte>, regions>> memory_;  // [rank][region]
    // The same memory as it has to be: changed by what the user does and by what he asked for, never by the operations
    // that were posted for it.
    std::vector<std::array<std::vector<std::byte>, regions>> shadow_;
    std::vector<Job> jobs_;
    static constexpr std::uint8_t excused = 2;
    std::vector<std::uint8_t> facts_;  // one per operation of the run: 1 when it has landed
    std::string failure_;
    std::uint64_t landings_ = 0;
    std::uint64_t controls_checked_ = 0;
};

}  // namespace expertwire
