// The progress token: whoever holds it is the one thread that may touch the engine and the provider (SPEC T13).
#pragma once

#include <atomic>
#include <cstdint>

#include "engine/types.hpp"

namespace expertwire::runtime {

class Token {
  public:
    Token() = default;
    Token(const Token&) = delete;
    Token& operator=(const Token&) = delete;

    bool try_take();  // one compare-and-swap, never blocks
    // Spins briefly, then sleeps until given back or the deadline (monotonic clock), which a pause of this process
    // moves.
    bool take_until(TimeNs deadline_ns);
    void give();
    bool wanted() const { return word_.load(std::memory_order_relaxed) == 2; }  // somebody sleeps for it
    bool held() const { return word_.load(std::memory_order_relaxed) != 0; }

  private:
    std::atomic<std::uint32_t> word_{0};  // 0 free, 1 held, 2 held and somebody sleeps for it
};

// Gives back, at the end of the scope, a token that the caller has taken: nothing that throws may keep it.
class TokenReturn {
  public:
    explicit TokenReturn(Token& token) : token_(token) {}
    ~TokenReturn() { token_.give(); }
    TokenReturn(const TokenReturn&) = delete;
    TokenReturn& operator=(const TokenReturn&) = delete;

  private:
    Token& token_;
};

}  // namespace expertwire::runtime
