// What a rank tells another of its low-latency calls, in one word that travels with its pulse, so that a wait that ran
// out can say what the other one did, and who was left out hears of it (SPEC E8). Pure.
#pragma once

#include <cstdint>

namespace expertwire::exchange {

// sent: `call` is the last one of which all rows are handed over for you, and there were `rows`. taken_in: I left you
// out, and take you in again after call `call`. left_out: I leave you out from call `call` on; left_out_quiet: and
// nothing of mine is on its way to you any more.
enum class LowLatencyTold : std::uint8_t { sent = 0, taken_in, left_out, left_out_quiet };

struct LowLatencyWord {
    LowLatencyTold told = LowLatencyTold::sent;
    std::uint64_t call = 0;
    std::uint32_t rows = 0;

    bool leaves_out() const { return told >= LowLatencyTold::left_out; }

    std::uint64_t word() const { return static_cast<std::uint64_t>(told) << 62 | (call & kCallMask) << 32 | rows; }
    // `near`: a call that is less than 2^29 calls away from the word's.
    static LowLatencyWord of(std::uint64_t word, std::uint64_t near) {
        const std::uint64_t ahead = ((word >> 32) - near) & kCallMask;
        const std::uint64_t behind = (kCallMask + 1 - ahead) & kCallMask;
        const std::uint64_t call = ahead > kCallMask / 2 && behind <= near ? near - behind : near + ahead;
        return {static_cast<LowLatencyTold>(word >> 62), call, static_cast<std::uint32_t>(word)};
    }

  private:
    static constexpr std::uint64_t kCallMask = (std::uint64_t{1} << 30) - 1;
};

}  // namespace expertwire::exchange
