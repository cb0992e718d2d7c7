// Runs one Operation to its end over a Context: the Port on one side, waiting, deadlines and dead peers on the other.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "exchange/exchange.hpp"
#include "runtime/context.hpp"
#include "runtime/exchange_port.hpp"
#include "runtime/stall_watch.hpp"

namespace expertwire::runtime {

class ExchangeDriver final : public ContextPort {
  public:
    // The context has regions "control", "staging" and "data", mapped for the ranks of `shape`'s node and announced by
    // all others. [control]: throws Failure when one is missing or too small, with both numbers.
    ExchangeDriver(Context& context, const exchange::Shape& shape);

    // Steps the operation until it has ended, a peer is dead, or the deadline. `interrupted` is asked every ≤ 50 ms
    // with no lock held and may throw; the exchange cannot be used again then. Throws Failure with the table of SPEC
    // E8.
    void run(exchange::Operation& operation, TimeNs timeout_ns, const std::function<void()>& interrupted);

    void on_stall(StallWatch::Report report) { stall_.on_stall(std::move(report)); }

    // Empty, or why no further operation can run: an earlier one was abandoned while rows were under way.
    const std::string& broken() const { return broken_; }
    std::uint64_t data_bytes() const { return data_bytes_; }

  private:
    bool turn(exchange::Operation& operation, exchange::Step& step);
    void look_around(const exchange::Operation& operation, TimeNs deadline_ns, TimeNs timeout_ns,
                     const std::function<void()>& interrupted);
    void look_for_leavers(const exchange::Operation& operation, TimeNs now);
    void publish(const exchange::Operation& operation);
    void conclude(const exchange::Operation& operation, const exchange::Failure& failure,
                  const std::function<void()>& interrupted);
    [[noreturn]] void fail_peer(const exchange::Operation& operation, const Fault& fault);
    [[noreturn]] void fail_deadline(const exchange::Operation& operation, TimeNs timeout_ns);
    [[noreturn]] void fail_put(const exchange::Operation& operation, std::uint32_t rank, Status status,
                               const std::string& text, const std::function<void()>& interrupted);
    std::string where(const exchange::Operation& operation) const;
    std::string table(const exchange::Operation& operation) const;
    std::string peer_state(const exchange::Operation& operation, std::uint32_t rank) const;

    const exchange::Shape shape_;
    std::uint64_t published_epoch_ = 0;  // what the peers were last told
    std::uint64_t published_phase_ = 0;
    StallWatch stall_;
    TimeNs leavers_look_ns_ = 0;  // when to look for ranks that left, next
    TimeNs left_since_ns_ = 0;    // since when one has been seen that this call still needs; 0: none
    std::string broken_;
};

}  // namespace expertwire::runtime
