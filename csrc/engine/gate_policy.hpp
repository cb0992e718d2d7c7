// What the engine must know of a provider in order to hold signals back (SPEC T4, T5). Data only:
// provider/capabilities.hpp derives it from what the provider promises, so that the engine needs to know no provider.
#pragma once

#include <cstdint>

namespace expertwire {

// SPEC T5, DESIGN "What providers promise". A: same-endpoint order is proved; B: a signal leaves when its payload is
// delivered; C: the receiver counts immediates.
enum class OrderingClass : std::uint8_t { ordered, delivery_gated, counted_immediates };

struct GatePolicy {
    OrderingClass ordering = OrderingClass::delivery_gated;
    bool delivery_complete = true;  // writes end with Level::delivered, whatever their request's level
    // Class A: larger writes prove nothing by their order (max_order_waw_size); they are gated as in class B.
    std::uint64_t ordered_bytes_max = ~std::uint64_t{0};
};

}  // namespace expertwire
