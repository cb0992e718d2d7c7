// Runs the two parts of low-latency calls over a Context: waiting, deadlines, dead peers, and the mask.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "exchange/low_latency.hpp"
#include "runtime/exchange_port.hpp"

namespace expertwire::runtime {

// Why a call was not begun, as a Failure.
[[noreturn]] void throw_refusal(const exchange::Refusal& refusal);

class LowLatencyDriver final : public ContextPort {
  public:
    // The context has regions "ll_control" and "ll_data". `shrink`: a rank that is dead, has left, or does not answer
    // until the deadline is masked and the call goes on without it; else it is a Failure. [control]
    LowLatencyDriver(Context& context, const exchange::LowLatencyShape& shape, bool shrink);

    std::uint64_t data_bytes() const { return data_bytes_; }
    exchange::LowLatency& exchange() { return exchange_; }

    // Until every row is handed over; until everything is here, packed and told. Asked `interrupted` every ≤ 50 ms with
    // no lock held, which may throw. Throws Failure with a table of what is missing from whom (SPEC E8).
    void send(exchange::LowLatencyOperation& operation, TimeNs timeout_ns, const std::function<void()>& interrupted);
    void receive(exchange::LowLatencyOperation& operation, TimeNs timeout_ns, const std::function<void()>& interrupted);
    // Offset in my data region of the combine buffer of the next call.
    std::uint64_t combine_buffer(const exchange::LowLatencyHandle& handle, TimeNs timeout_ns,
                                 const std::function<void()>& interrupted);
    void mask(std::uint32_t rank, bool masked);

    // Empty, or why no further call can run: an earlier one was abandoned while rows were under way.
    const std::string& broken() const { return broken_; }

  private:
    using StepFunction = std::function<exchange::Step()>;

    void run(exchange::LowLatencyOperation& operation, const StepFunction& step, TimeNs timeout_ns,
             const std::function<void()>& interrupted);
    bool look_around(exchange::LowLatencyOperation& operation, TimeNs deadline_ns, TimeNs timeout_ns);
    bool leave_out(std::uint32_t rank);
    void conclude(const exchange::LowLatencyOperation& operation);
    std::string where(const exchange::LowLatencyOperation& operation) const;
    std::string table(const exchange::LowLatencyOperation& operation) const;

    const bool shrink_;
    exchange::LowLatency exchange_;
    TimeNs look_ns_ = 0;        // when to look for the dead and the gone, next
    TimeNs gone_since_ns_ = 0;  // since when one has been seen that this call still needs; 0: none
    std::string broken_;
};

}  // namespace expertwire::runtime
