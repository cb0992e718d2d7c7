// Runs the two parts of low-latency calls over a Context: waiting, deadlines, dead peers, and the mask.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "exchange/low_latency.hpp"
#include "runtime/exchange_port.hpp"
#include "runtime/stall_watch.hpp"

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

    // Before a call: who was left out by others learns of it here (Failure excluded), or comes back behind the calls
    // that it missed. `what`: the call's name.
    void begin(const char* what, TimeNs timeout_ns, const std::function<void()>& interrupted);
    // Until every row is handed over; until everything is here, packed and told. Asked `interrupted` every ≤ 50 ms with
    // no lock held, which may throw. Throws Failure with a table of what is missing from whom (SPEC E8).
    void send(exchange::LowLatencyOperation& operation, TimeNs timeout_ns, const std::function<void()>& interrupted);
    void receive(exchange::LowLatencyOperation& operation, TimeNs timeout_ns, const std::function<void()>& interrupted);
    // Offset in my data region of the combine buffer of the next call.
    std::uint64_t combine_buffer(const exchange::LowLatencyHandle& handle, TimeNs timeout_ns,
                                 const std::function<void()>& interrupted);
    // Taken in again: refused (Failure state) while a hook is uncalled, rows to it are under way, or some have failed.
    void mask(std::uint32_t rank, bool masked);

    void on_stall(StallWatch::Report report) { stall_.on_stall(std::move(report)); }

    // Empty, or why no further call can run: an earlier one was abandoned while rows were under way.
    const std::string& broken() const { return broken_; }

  private:
    using StepFunction = std::function<exchange::Step()>;

    void run(exchange::LowLatencyOperation& operation, const StepFunction& step, TimeNs timeout_ns,
             const std::function<void()>& interrupted);
    bool look_around(exchange::LowLatencyOperation& operation, TimeNs deadline_ns, TimeNs timeout_ns);
    bool leave_out(std::uint32_t rank);
    void publish(bool now);
    std::vector<std::uint32_t> who_leave_out(std::uint64_t call) const;
    exchange::LowLatency::LateRows late_rows(std::uint32_t rank) const;
    void look_for_late_rows();
    void refuse_if_left_out(const std::string& what, std::uint64_t call);
    bool wait_until(const std::function<bool()>& there, TimeNs deadline_ns, const std::function<void()>& interrupted);
    void conclude(const exchange::LowLatencyOperation& operation);
    std::string where(const exchange::LowLatencyOperation& operation) const;
    std::string table(const exchange::LowLatencyOperation& operation) const;
    std::string peer_state(const exchange::LowLatencyOperation& operation, const exchange::LowLatencyPeer& peer) const;

    const bool shrink_;
    exchange::LowLatency exchange_;
    StallWatch stall_;
    TimeNs look_ns_ = 0;             // when to look for the dead and the gone, next
    TimeNs looked_ns_ = 0;           // for late rows, last
    std::vector<TimeNs> ended_for_;  // [ranks]: how long it has been looked at since it ended
    TimeNs gone_since_ns_ = 0;       // since when one has been seen that this call still needs; 0: none
    std::string broken_;
    std::vector<std::uint64_t> words_;  // scratch: what each rank is told
    std::vector<std::uint64_t> published_;
};

}  // namespace expertwire::runtime
