// Rails in the simulation: requests from one rank to another, spread over several NICs of the model; one of them may
// fail on the way, and what it carried is sent again over the others.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/simulation_bind.hpp"
#include "engine/engine.hpp"
#include "engine/pump.hpp"
#include "engine/rails.hpp"
#include "provider/simulated.hpp"
#include "provider/simulated_oracle.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertwire {

namespace {

struct RailRun {
    std::string error;
    TimeNs ns = 0;                       // until the request was done
    std::vector<std::uint64_t> carried;  // bytes over each rail
    std::uint32_t attempts = 0;
    std::uint64_t records = 0;  // terminal ones: one for each attempt, however many chunks and rails it had
};

class RailPair {
  public:
    RailPair(const std::vector<std::pair<double, TimeNs>>& rails, std::uint64_t bytes, std::uint64_t seed)
        : network_(2, model(rails), {}, seed), from_(bytes), to_(bytes + 64), word_(8), rails_(to_rails(rails)) {
        for (std::uint32_t rank = 0; rank < 2; ++rank) {
            std::vector<std::byte>& big = rank == 0 ? from_ : to_;
            network_.provider(rank).register_region(RegionId{0}, {big.data(), big.size()});
            network_.provider(rank).register_region(RegionId{1}, {word_.data(), word_.size()});
        }
        for (std::uint64_t i = 0; i < bytes; ++i) from_[i] = payload_byte(seed, i);
        network_.connect_all(2);
        EngineLimits limits;
        limits.peers_max = 2;
        limits.queue_pairs_per_peer_max = static_cast<std::uint32_t>(rails.size());
        engine_ = std::make_unique<Engine>(limits, GatePolicy{});
        for (std::uint32_t rail = 0; rail < rails.size(); ++rail) {
            lanes_.push_back(engine_->open_queue_pair(PeerId{1}, EndpointId{rail}));
        }
        scheduler_ = std::make_unique<RailScheduler>(rails_);
        network_.on_landing = [this](const SimulatedNetwork::Landing& landing) { look(landing); };
    }

    RailRun run(std::uint64_t chunk_bytes, std::int64_t failing, TimeNs fail_ns) {
        RailRun result;
        result.carried.resize(rails_.size());
        while (result.error.empty() && result.attempts < 3) {
            ++result.attempts;
            const Status status = attempt(chunk_bytes, failing, fail_ns, result);
            if (status == Status::ok) break;
            if (status != Status::io_error)
                result.error = "ended with status " + std::to_string(static_cast<int>(status));
        }
        result.ns = network_.now();
        const EngineStatistics counts = engine_->statistics();
        result.records = counts.requests_done + counts.requests_failed + counts.requests_cancelled;
        if (result.error.empty()) result.error = engine_->check_invariants();
        if (result.error.empty()) result.error = wrong_;
        if (result.error.empty() && std::memcmp(from_.data(), to_.data(), from_.size()) != 0)
            result.error = "bytes differ";
        for (std::size_t i = from_.size(); i < to_.size(); ++i) {
            if (to_[i] != std::byte{0}) result.error = "a byte behind the request was written";
        }
        return result;
    }

  private:
    static NetworkModel model(const std::vector<std::pair<double, TimeNs>>& rails) {
        NetworkModel model;
        for (const auto& [rate, latency] : rails) model.rails.push_back({rate, latency});
        return model;
    }
    static std::vector<Rail> to_rails(const std::vector<std::pair<double, TimeNs>>& rails) {
        std::vector<Rail> out;
        for (const auto& [rate, latency] : rails) out.push_back({rate, latency, true});
        return out;
    }

    // The signal covers every rail: when it lands every byte must be there.
    void look(const SimulatedNetwork::Landing& landing) {
        if (landing.command.kind != OpKind::signal) return;
        if (std::memcmp(from_.data(), to_.data(), from_.size()) != 0)
            wrong_ = "the signal came before all rails had delivered";
    }

    Status attempt(std::uint64_t chunk_bytes, std::int64_t failing, TimeNs fail_ns, RailRun& result) {
        std::vector<ChunkSpec> chunks;
        const std::vector<RailPiece> pieces = scheduler_->spread(from_.size(), chunk_bytes);
        if (pieces.empty()) return Status::closed;
        for (const RailPiece& piece : pieces) {
            ChunkSpec chunk;
            chunk.queue_pair = lanes_[piece.rail];
            chunk.local = RegionId{0};
            chunk.local_offset = chunk.remote_offset = piece.offset;
            chunk.remote = SimulatedNetwork::remote_region(1, 0, 2);
            chunk.bytes = piece.bytes;
            chunks.push_back(chunk);
            result.carried[piece.rail] += piece.bytes;
        }
        ControlSpec signal;
        signal.queue_pair = lanes_[pieces.front().rail];
        signal.remote = SimulatedNetwork::remote_region(1, 1, 2);
        signal.operand = 1;
        const Engine::Submitted submitted =
            engine_->submit(PeerId{1}, chunks, {&signal, 1}, Level::delivered, network_.now());
        if (submitted.status != Status::ok) return submitted.status;
        std::vector<Arrival> arrivals;
        while (engine_->status(submitted.request) == Status::pending) {
            pump(*engine_, network_.provider(0), arrivals, network_.now());
            if (failing >= 0 && !failed_ && network_.now() >= fail_ns) fail_rail(static_cast<std::uint32_t>(failing));
            if (!network_.run_next() && engine_->status(submitted.request) == Status::pending &&
                network_.now() > 1u << 30) {
                return Status::timed_out;
            }
        }
        for (const RailPiece& piece : pieces) scheduler_->ended(piece.rail, piece.bytes);
        return engine_->status(submitted.request);
    }

    // Its endpoint is gone: what it carried ends with its close, and nothing new goes over it.
    void fail_rail(std::uint32_t rail) {
        failed_ = true;
        scheduler_->set_open(rail, false);
        engine_->on_endpoint_error(EndpointId{rail}, Status::io_error, 5, network_.now());
        network_.provider(0).close_endpoint(EndpointId{rail});
        engine_->on_endpoint_closed(EndpointId{rail}, network_.now());
    }

    SimulatedNetwork network_;
    std::vector<std::byte> from_, to_, word_;
    std::vector<Rail> rails_;
    std::unique_ptr<Engine> engine_;
    std::unique_ptr<RailScheduler> scheduler_;
    std::vector<QueuePairId> lanes_;
    std::string wrong_;
    bool failed_ = false;
};

nb::dict run_rails(const std::vector<std::pair<double, TimeNs>>& rails, std::uint64_t bytes, std::uint64_t chunk_bytes,
                   std::int64_t failing, TimeNs fail_ns, std::uint64_t seed) {
    if (rails.empty() || rails.size() > 8) throw nb::value_error("run_rails: between 1 and 8 rails");
    const RailRun result = RailPair(rails, bytes, seed).run(chunk_bytes, failing, fail_ns);
    nb::dict out;
    out["error"] = result.error;
    out["ns"] = result.ns;
    out["carried"] = nb::cast(result.carried);
    out["attempts"] = result.attempts;
    out["records"] = result.records;
    return out;
}

}  // namespace

void bind_rails_simulation(nb::module_& module) {
    module.def(
        "run_rails", &run_rails, "rails"_a, "bytes"_a, "chunk_bytes"_a = 65536, "failing"_a = -1, "fail_ns"_a = 0,
        "seed"_a = 0,
        "One request over rails of (bytes_per_ns, latency_ns), its signal gated over all of them; rail `failing` is "
        "lost at `fail_ns`. {'error', 'ns', 'carried': bytes over each rail, 'attempts', 'records': terminal ones}.");
}

}  // namespace expertwire
