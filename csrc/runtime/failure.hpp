// How the control plane says no: one exception type whose kind names the class of expertwire.errors that Python sees.
// Thrown only to a caller of this process (constructor, region, peer and wait calls), never out of the progress thread,
// a turn, or anything that runs under the progress token.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace expertwire::runtime {

enum class FailureKind : std::uint8_t {
    invalid_argument = 0,  // InvalidArgumentError
    invalid_type,          // InvalidTypeError
    capacity,              // CapacityError
    state,                 // StateError
    mismatch,              // MismatchError
    peer,                  // PeerError, with `rank`
    transfer,              // TransferError
    deadline,              // DeadlineError
    cancelled,             // CancelledRequestError
    unavailable,           // UnavailableError
    excluded,              // ExcludedError
};

class Failure : public std::runtime_error {
  public:
    Failure(FailureKind kind, const std::string& message, std::int32_t rank = -1)
        : std::runtime_error(message), kind_(kind), rank_(rank) {}
    FailureKind kind() const { return kind_; }
    std::int32_t rank() const { return rank_; }  // the peer at fault, or -1

  private:
    FailureKind kind_;
    std::int32_t rank_;
};

}  // namespace expertwire::runtime
