// The Port of an exchange over a Context: regions by name, puts and adds through the engine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "exchange/layout.hpp"
#include "exchange/port.hpp"
#include "runtime/context.hpp"

namespace expertwire::runtime {

class ContextPort : public exchange::Port {
  public:
    // The context has these regions, mapped for the ranks of this rank's node and announced by all others. A null
    // `staging`: there is none. [control]: throws Failure.
    struct Names {
        const char* control;
        const char* staging;
        const char* data;
    };
    ContextPort(Context& context, std::uint32_t rank, const exchange::NodeTable& nodes, const Names& names);

    // Called under the progress token.
    const std::vector<exchange::RankMemory>& memory() const override { return memory_; }
    std::optional<Ticket> put(const Put& put) override;
    bool add(std::uint32_t rank, std::uint64_t word_offset, std::uint64_t delta) override;
    Status status(Ticket ticket) override;
    Status withhold(Ticket ticket) override;
    void wake(std::uint32_t rank) override;

  protected:
    struct Remote {
        RemoteRegionId control;
        RemoteRegionId staging;
        RemoteRegionId data;
        QueuePairId queue_pair;
    };
    // Why nothing can be submitted to a rank any more.
    struct Refused {
        std::uint32_t rank = 0;
        Status status = Status::ok;
    };

    // Throws Failure with both numbers where a rank's region is too small.
    void require_region(std::uint32_t rank, const char* name, std::uint64_t needed) const;

    Context& context_;
    const std::uint32_t rank_;
    Refused refused_;
    std::uint64_t data_bytes_ = 0;

  private:
    Ticket submitted(std::uint32_t rank, const Engine::Submitted& result);
    void open(std::uint32_t rank, bool near, const Names& names);

    std::vector<exchange::RankMemory> memory_;  // [rank]
    std::vector<Remote> remotes_;               // [rank]
    RegionId control_;
    RegionId staging_;
    RegionId data_;
    std::vector<ChunkSpec> chunks_;  // scratch
};

}  // namespace expertwire::runtime
